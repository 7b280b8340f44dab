use super::*;

#[test]
fn checksum_is_crc_64_nvme() {
    // the check value of the catalogue of parametrised CRC algorithms
    assert_eq!(checksum(b"123456789"), 0xAE8B_1486_0A79_9888);
    assert_eq!(checksum(b""), 0);
}

#[test]
fn hasher_in_pieces_is_checksum_of_the_whole() {
    let bytes: Vec<u8> = (0..100_000u32).map(|i| (i * 31 % 251) as u8).collect();
    for step in [1, 7, 64, 1000, 99_999] {
        let mut hasher = Hasher::new();
        bytes.chunks(step).for_each(|piece| hasher.update(piece));
        assert_eq!(hasher.finish(), checksum(&bytes), "pieces of {step}");
    }
    assert_eq!(Hasher::default().finish(), 0);
}

#[test]
fn keyed_checksums_depend_on_key_and_bytes() {
    let (one, other) = (Algorithm::Keyed([1; 32]), Algorithm::Keyed([2; 32]));
    let bytes: Vec<u8> = (0..100_000u32).map(|i| (i * 31 % 251) as u8).collect();
    // the first 64 bits of what the reference implementation says for this key
    assert_eq!(one.checksum(&bytes).to_le_bytes(), blake3::keyed_hash(&[1; 32], &bytes).as_bytes()[..8]);
    assert_ne!(one.checksum(&bytes), other.checksum(&bytes));
    assert_ne!(one.checksum(&bytes), one.checksum(&bytes[1..]));
    assert_ne!(one.checksum(&bytes), Algorithm::Crc64.checksum(&bytes));
    for step in [1, 64, 1000, 99_999] {
        let mut hasher = one.hasher();
        bytes.chunks(step).for_each(|piece| hasher.update(piece));
        assert_eq!(hasher.finish(), one.checksum(&bytes), "pieces of {step}");
    }
    assert_eq!(format!("{one:?} {:?}", Algorithm::Crc64), "Keyed(..) Crc64");
}

#[test]
fn a_table_of_another_algorithm_is_refused() {
    let table = DigestTable { header: 1, payload_len: 5, blocks: vec![2] };
    let keyed = Algorithm::Keyed([1; 32]);
    assert_eq!(DigestTable::decode_as(&table.encode_as(&keyed), &keyed), Ok(table.clone()));
    assert_eq!(DigestTable::decode_as(&table.encode(), &keyed), Err(DigestError::Algorithm(1)));
    assert_eq!(DigestTable::decode(&table.encode_as(&keyed)), Err(DigestError::Algorithm(2)));
}

#[test]
fn block_counts() {
    let counts = [(0, 0), (1, 1), (BLOCK_SIZE - 1, 1), (BLOCK_SIZE, 1), (BLOCK_SIZE + 1, 2), (u64::MAX, 1 << 44)];
    for (len, count) in counts {
        assert_eq!(block_count(len), count, "{len}");
    }
}
