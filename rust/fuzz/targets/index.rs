//! An index is read or refused; one that is read is written and read back equal, and answers what it is asked.
#![no_main]

use libfuzzer_sys::fuzz_target;
use tensorferry_wire::index::{BoxRef, Index, Replicas, merge, plan};

fuzz_target!(|bytes: &[u8]| {
    // As it is, and behind the beginning that every index has.
    for data in [bytes.to_vec(), [b"TFINDEX1\x01\0\0\0", bytes].concat()] {
        let Ok(index) = Index::decode(&data, 3) else { continue };
        assert_eq!(Index::decode(&index.encode(), 3).expect("what is written is valid"), index);
        for number in 0..index.len() {
            let item = index.item(number);
            assert_eq!(index.find(item.key), Some(number));
            let whole = BoxRef { offsets: &vec![0; item.shape.len()], sizes: item.shape };
            if let Ok(found) = index.overlaps(number, whole, 1) {
                let have: u64 = found.iter().map(|chunk| chunk.part.numel()).sum();
                assert_eq!(have, whole.numel());
            }
        }
        let ranks = [index.clone(), index];
        let _ = merge(&ranks, Replicas::First, true, |_, _| true);
        let _ = plan(&ranks, false);
    }
});
