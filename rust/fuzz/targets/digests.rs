//! A table of digests is read or refused; one that is read is written as the same bytes.
#![no_main]

use libfuzzer_sys::fuzz_target;
use tensorferry_wire::digest::{Algorithm, DigestTable, BLOCK_SIZES, Hasher, block_count, checksum};

fuzz_target!(|bytes: &[u8]| {
    let check = |bytes: &[u8]| {
        if let Ok(table) = DigestTable::decode(bytes) {
            assert!(table.blocks.len() as u64 <= block_count(table.payload_len));
            assert_eq!(table.encode(), bytes);
        }
        for block_size in BLOCK_SIZES {
            if let Ok(table) = DigestTable::decode_with_block_size(bytes, &Algorithm::Crc64, block_size) {
                assert!(table.blocks.len() as u64 <= table.payload_len.div_ceil(block_size));
                assert_eq!(table.encode_with_block_size(&Algorithm::Crc64, block_size), bytes);
            }
        }
        let keyed = Algorithm::Keyed([7; 32]);
        if let Ok(table) = DigestTable::decode_as(bytes, &keyed) {
            assert_eq!(table.encode_as(&keyed), bytes);
        }
    };
    check(bytes);
    // with the checksum made right, so that the rest is reached
    check(&[bytes, &checksum(bytes).to_le_bytes()].concat());

    let (one, two) = bytes.split_at(bytes.len() / 3);
    let mut hasher = Hasher::new();
    hasher.update(one);
    hasher.update(two);
    assert_eq!(hasher.finish(), checksum(bytes));
});
