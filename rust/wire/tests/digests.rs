//! Tables of digests survive encoding and decoding, and tables that a peer should never send are refused.

use proptest::prelude::*;
use tensorferry_wire::digest::{
    Algorithm, BLOCK_SIZE, BLOCK_SIZES, DigestError, DigestTable, FILE_BLOCK_SIZE, TableHead, block_count, checksum,
    table_len,
};

fn table() -> DigestTable {
    DigestTable { header: 0x1122_3344_5566_7788, payload_len: 2 * BLOCK_SIZE + 1, blocks: vec![1, u64::MAX, 3] }
}

/// The table with `bytes` written at `at`, and its own checksum corrected.
fn patched(at: usize, bytes: &[u8]) -> Vec<u8> {
    let mut table = table().encode();
    table[at..at + bytes.len()].copy_from_slice(bytes);
    resealed(table)
}

fn resealed(mut table: Vec<u8>) -> Vec<u8> {
    let body = table.len() - 8;
    let own = checksum(&table[..body]);
    table[body..].copy_from_slice(&own.to_le_bytes());
    table
}

#[test]
fn layout_is_fixed() {
    let bytes = table().encode();
    assert_eq!(bytes.len(), 40 + 3 * 8 + 8);
    assert_eq!(&bytes[..16], b"TFDIGST1\x01\0\0\0\0\0\x10\0");
    assert_eq!(&bytes[16..24], (2 * BLOCK_SIZE + 1).to_le_bytes());
    assert_eq!(&bytes[24..32], 0x1122_3344_5566_7788u64.to_le_bytes());
    assert_eq!(&bytes[32..48], b"\x03\0\0\0\0\0\0\0\x01\0\0\0\0\0\0\0");
    assert_eq!(&bytes[64..], checksum(&bytes[..64]).to_le_bytes());
    assert_eq!(DigestTable::decode(&bytes), Ok(table()));
}

#[test]
fn a_table_of_another_grain_is_read_as_such_only() {
    let fine = DigestTable { header: 7, payload_len: 3 * FILE_BLOCK_SIZE + 1, blocks: vec![1, 2, 3, 4] };
    let bytes = fine.encode_with_block_size(&Algorithm::Crc64, FILE_BLOCK_SIZE);
    assert_eq!(bytes.len() as u64, table_len(4));
    assert_eq!(DigestTable::decode_with_block_size(&bytes, &Algorithm::Crc64, FILE_BLOCK_SIZE), Ok(fine.clone()));
    for other in [BLOCK_SIZE, 64 << 10, 0, 1, u64::MAX] {
        let refused = DigestTable::decode_with_block_size(&bytes, &Algorithm::Crc64, other);
        assert_eq!(refused, Err(DigestError::BlockSize(512)), "{other}");
    }
    let head: &[u8; 40] = bytes.first_chunk().unwrap();
    let expected = TableHead { header: 7, payload_len: 3 * FILE_BLOCK_SIZE + 1, count: 4 };
    assert_eq!(TableHead::decode(head, FILE_BLOCK_SIZE), Ok(expected));
    assert_eq!(TableHead::decode(head, BLOCK_SIZE), Err(DigestError::BlockSize(512)));
    for (at, error) in [
        (0, DigestError::Magic),
        (8, DigestError::Algorithm(0)),
        (32, DigestError::Count { count: 5, payload_len: 3 * FILE_BLOCK_SIZE + 1 }),
    ] {
        let mut damaged = *head;
        damaged[at] ^= 1;
        assert_eq!(TableHead::decode(&damaged, FILE_BLOCK_SIZE), Err(error), "{at}");
    }
    let one_too_many = DigestTable { blocks: vec![0; 5], ..fine };
    let refused = one_too_many.encode_with_block_size(&Algorithm::Crc64, FILE_BLOCK_SIZE);
    assert_eq!(
        DigestTable::decode_with_block_size(&refused, &Algorithm::Crc64, FILE_BLOCK_SIZE),
        Err(DigestError::Count { count: 5, payload_len: 3 * FILE_BLOCK_SIZE + 1 })
    );
    // A table with an unsupported block size is refused by every reader.
    let none = table().encode_with_block_size(&Algorithm::Crc64, 4097);
    assert!(BLOCK_SIZES.iter().all(|&g| DigestTable::decode_with_block_size(&none, &Algorithm::Crc64, g).is_err()));
}

#[test]
fn what_no_peer_should_send_is_refused() {
    let payload_len = 2 * BLOCK_SIZE + 1;
    // So many digests that no memory would do: nothing is allocated for them.
    let mut huge = patched(16, &u64::MAX.to_le_bytes());
    huge[32..40].copy_from_slice(&(1_u64 << 44).to_le_bytes());
    let mut longer = table().encode();
    longer.push(0);
    let mut cases = vec![
        (Vec::new(), DigestError::Magic),
        (b"TFDIGST2aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa".to_vec(), DigestError::Magic),
        (patched(8, &[2, 0, 0, 0]), DigestError::Algorithm(2)),
        (patched(8, &[1, 0, 0, 1]), DigestError::Algorithm(0x0100_0001)),
        (resealed(huge), DigestError::Length { have: 72, need: 48 + (8 << 44) }),
        (longer, DigestError::Length { have: 73, need: 72 }),
    ];
    cases.extend([0, 1, 1 << 21, u32::MAX].map(|n: u32| (patched(12, &n.to_le_bytes()), DigestError::BlockSize(n))));
    // More digests than there are blocks, and fewer than the table says.
    cases.extend(
        [4_u64, 1 << 61, u64::MAX]
            .map(|count| (patched(32, &count.to_le_bytes()), DigestError::Count { count, payload_len })),
    );
    cases
        .extend([0, 1, 2 * BLOCK_SIZE].map(|payload_len| {
            (patched(16, &payload_len.to_le_bytes()), DigestError::Count { count: 3, payload_len })
        }));
    cases.extend(
        [0_u64, 1, 2]
            .map(|count| (patched(32, &count.to_le_bytes()), DigestError::Length { have: 72, need: 48 + 8 * count })),
    );
    for (bytes, error) in cases {
        assert_eq!(DigestTable::decode(&bytes), Err(error));
    }
}

#[test]
fn every_bit_flipped_is_refused() {
    let bytes = table().encode();
    for bit in 0..bytes.len() * 8 {
        let mut flipped = bytes.clone();
        flipped[bit / 8] ^= 1 << (bit % 8);
        assert!(DigestTable::decode(&flipped).is_err(), "bit {bit}");
    }
}

proptest! {
    #[test]
    fn what_is_encoded_is_decoded(
        header: u64,
        blocks in prop::collection::vec(any::<u64>(), 0..40),
        short in 0..BLOCK_SIZE,
    ) {
        let payload_len = (blocks.len() as u64 * BLOCK_SIZE).saturating_sub(short);
        let table = DigestTable { header, payload_len, blocks };
        prop_assert_eq!(block_count(payload_len), table.blocks.len() as u64);
        let run = DigestTable { blocks: table.blocks[table.blocks.len() / 2..].to_vec(), ..table };
        prop_assert_eq!(DigestTable::decode(&run.encode()), Ok(run));
        prop_assert_eq!(DigestTable::decode(&table.encode()), Ok(table));
    }

}
