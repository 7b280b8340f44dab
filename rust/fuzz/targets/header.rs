//! A header is read or refused; one that is read is written and read back equal, and safetensors accepts it as well.
#![no_main]

use libfuzzer_sys::fuzz_target;
use safetensors::tensor::Metadata;
use tensorferry_wire::container::Header;

fuzz_target!(|json: &[u8]| {
    // as it is, and as the JSON of a header whose length is right
    let _ = Header::decode(json);
    let framed = [&(json.len() as u64).to_le_bytes(), json].concat();
    let Ok(header) = Header::decode(&framed) else { return };

    let bytes = header.encode(64).expect("what fits once fits again");
    assert_eq!(Header::decode(&bytes).expect("what is written is valid"), header);
    for json in [json, &bytes[8..]] {
        let theirs: Metadata = serde_json::from_slice(json).expect("safetensors accepts what we do");
        assert_eq!(theirs.data_len() as u64, header.payload_len());
        for entry in header.entries() {
            let info = theirs.info(&entry.name).expect("safetensors knows the entry");
            assert_eq!(info.data_offsets, (entry.start as usize, entry.end as usize));
            assert_eq!(info.dtype.to_string(), entry.dtype.name());
            assert!(info.shape.iter().map(|&dim| dim as u64).eq(entry.shape.iter().copied()));
        }
    }
    let len = header.payload_len();
    let whole = header.entries().iter().filter(|entry| entry.nbytes() > 0).count();
    assert_eq!(header.covering(0, len).count(), whole);
    assert!(header.covering(len / 2, len / 2 + 1).count() <= 1);
});
