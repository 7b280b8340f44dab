//! Headers survive encoding and decoding, and the safetensors crate reads ours as we read its headers.

use std::collections::HashMap;

use proptest::prelude::*;
use safetensors::SafeTensors;
use safetensors::tensor::{Metadata, TensorView};
use tensorferry_wire::container::{Entry, Header, HeaderError, MANIFEST_ENTRY, Shape};
use tensorferry_wire::dtype::Dtype;

fn u8s(name: &str, start: u64, end: u64) -> Entry {
    Entry { name: name.into(), dtype: Dtype::U8, shape: [end - start].into_iter().collect(), start, end }
}

/// The safetensors crate's element type with this name.
fn theirs(dtype: Dtype) -> safetensors::Dtype {
    serde_json::from_value(dtype.name().into()).unwrap()
}

/// Valid headers whose payload order is a permutation of the document order, with some empty entries.
fn headers() -> impl Strategy<Value = Header> {
    let shape = prop::collection::vec(prop_oneof![4 => 1u64..5, 1 => Just(0u64)], 0..4);
    let name = prop_oneof![any::<String>(), "[a-z.\"\\\\\u{0}-\u{20}]{0,12}"];
    let dtype = prop::sample::select(Dtype::ALL.to_vec());
    let entries = prop::collection::vec((name, dtype, shape), 0..24);
    let metadata = prop::collection::hash_map(any::<String>(), any::<String>(), 0..4);
    (entries, metadata).prop_flat_map(|(rows, metadata)| {
        let rows: HashMap<String, (Dtype, Vec<u64>)> =
            rows.into_iter().filter(|row| row.0 != "__metadata__").map(|(name, d, s)| (name, (d, s))).collect();
        let rows: Vec<_> = rows.into_iter().collect();
        let order: Vec<usize> = (0..rows.len()).collect();
        (Just(rows), Just(order).prop_shuffle(), Just(metadata)).prop_map(|(rows, order, metadata)| {
            let mut entries: Vec<Entry> = rows
                .into_iter()
                .map(|(name, (dtype, mut shape))| {
                    if dtype.bits() < 8 {
                        shape.push(4); // whole bytes
                    }
                    Entry { name, dtype, shape: Shape::from_vec(shape), start: 0, end: 0 }
                })
                .collect();
            let mut at = 0;
            for i in order {
                let entry = &mut entries[i];
                entry.start = at;
                at += entry.shape.iter().product::<u64>() * entry.dtype.bits() / 8;
                entry.end = at;
            }
            Header::new(metadata.into_iter().collect(), entries).unwrap()
        })
    })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(512))]

    #[test]
    fn what_is_encoded_is_decoded(header in headers(), align in 1u64..64) {
        let bytes = header.encode(align * 8).unwrap();
        prop_assert_eq!(bytes.len() as u64 % (align * 8), 0);
        prop_assert_eq!(Header::total_len(*bytes.first_chunk().unwrap()).unwrap(), bytes.len() as u64);
        prop_assert_eq!(Header::decode(&bytes).unwrap(), header);
    }

    #[test]
    fn what_is_encoded_safetensors_reads(header in headers()) {
        let mut file = header.encode(64).unwrap();
        let payload: Vec<u8> = (0..header.payload_len()).map(|i| (i % 251) as u8).collect();
        file.extend_from_slice(&payload);
        let tensors = SafeTensors::deserialize(&file).unwrap();
        prop_assert_eq!(tensors.len(), header.entries().len());
        for entry in header.entries() {
            let tensor = tensors.tensor(&entry.name).unwrap();
            prop_assert_eq!(tensor.dtype(), theirs(entry.dtype));
            let shape: Vec<u64> = tensor.shape().iter().map(|&dim| dim as u64).collect();
            prop_assert_eq!(&shape[..], &entry.shape[..]);
            let bytes = usize::try_from(entry.start).unwrap()..usize::try_from(entry.end).unwrap();
            prop_assert_eq!(tensor.data(), &payload[bytes]);
        }
        let (_, read) = SafeTensors::read_metadata(&file).unwrap();
        let ours: HashMap<String, String> = header.metadata().iter().cloned().collect();
        prop_assert_eq!(read.metadata().clone().unwrap_or_default(), ours);
    }

    #[test]
    fn what_safetensors_writes_is_decoded(header in headers()) {
        let zeros = vec![0; usize::try_from(header.payload_len()).unwrap()];
        let views = header.entries().iter().map(|entry| {
            let shape = entry.shape.iter().map(|&dim| usize::try_from(dim).unwrap()).collect();
            let data = &zeros[..usize::try_from(entry.nbytes()).unwrap()];
            (entry.name.clone(), TensorView::new(theirs(entry.dtype), shape, data).unwrap())
        });
        // with no tensors and empty metadata safetensors writes `{}"__metadata__"...`, which it cannot read either
        let metadata = Some(header.metadata().iter().cloned().collect()).filter(|map: &HashMap<_, _>| !map.is_empty());
        let file = safetensors::serialize(views, metadata).unwrap();
        let len = usize::try_from(Header::total_len(*file.first_chunk().unwrap()).unwrap()).unwrap();
        let read = Header::decode(&file[..len]).unwrap();
        prop_assert_eq!(read.payload_len(), (file.len() - len) as u64);

        let by_name = |header: &Header| -> HashMap<String, (Dtype, Shape)> {
            header.entries().iter().map(|e| (e.name.clone(), (e.dtype, e.shape.clone()))).collect()
        };
        prop_assert_eq!(by_name(&read), by_name(&header));
    }

    #[test]
    fn what_is_decoded_safetensors_accepts(
        rows in prop::collection::vec((0u64..5, 0u64..5, 0u64..4), 0..5),
    ) {
        // Most of these are invalid: both must agree on which are not.
        let rows: Vec<String> = rows
            .iter()
            .enumerate()
            .map(|(i, (start, end, dim))| {
                format!(r#""{i}":{{"dtype":"U8","shape":[{dim}],"data_offsets":[{start},{end}]}}"#)
            })
            .collect();
        let json = format!("{{{}}}", rows.join(","));
        let mut bytes = (json.len() as u64).to_le_bytes().to_vec();
        bytes.extend_from_slice(json.as_bytes());
        let ours = Header::decode(&bytes);
        let theirs = serde_json::from_str::<Metadata>(&json);
        prop_assert_eq!(ours.is_ok(), theirs.is_ok(), "{}: {:?} {:?}", json, ours, theirs);
    }

    #[test]
    fn payload_order_is_that_of_the_offsets(header in headers()) {
        let order: Vec<_> = header.in_payload_order().collect();
        prop_assert!(order.is_sorted_by_key(|(_, entry)| (entry.start, entry.end)));
        prop_assert!(order.iter().all(|&(number, entry)| std::ptr::eq(entry, &raw const header.entries()[number])));
        prop_assert_eq!(order.len(), header.entries().len());
    }

    #[test]
    fn covering_is_what_a_search_finds(header in headers(), start in 0u64..200, len in 0u64..60) {
        let end = start + len;
        let mut expected: Vec<&Entry> = header
            .entries()
            .iter()
            .filter(|e| e.start.max(start) < e.end.min(end))
            .collect();
        expected.sort_by_key(|e| e.start);
        prop_assert_eq!(header.covering(start, end).collect::<Vec<_>>(), expected);
    }
}

#[test]
fn document_order_is_kept() {
    let names = ["z", "a", MANIFEST_ENTRY, "m"];
    let entries = vec![u8s("z", 8, 16), u8s("a", 4, 8), u8s(MANIFEST_ENTRY, 0, 4), u8s("m", 16, 16)];
    let header = Header::decode(&Header::new(vec![], entries).unwrap().encode(8).unwrap()).unwrap();
    assert_eq!(header.entries().iter().map(|e| &*e.name).collect::<Vec<_>>(), names);
    assert_eq!(header.covering(0, 16).map(|e| &*e.name).collect::<Vec<_>>(), [MANIFEST_ENTRY, "a", "z"]);
    assert_eq!(header.entries().iter().map(Entry::is_plain).collect::<Vec<_>>(), [true, true, false, true]);
    assert_eq!(header.payload_len(), 16);
}

#[test]
fn empty_header_is_an_empty_object() {
    let header = Header::new(vec![], vec![]).unwrap();
    assert_eq!(header.encode(8).unwrap(), b"\x08\0\0\0\0\0\0\0{}      ");
    assert_eq!(header.covering(0, u64::MAX).count(), 0);
    let with_metadata = Header::new(vec![("a".into(), "\"\n".into())], vec![]).unwrap();
    assert_eq!(&with_metadata.encode(8).unwrap()[8..], br#"{"__metadata__":{"a":"\"\u000a"}}       "#);
}

#[test]
fn json_as_python_writes_it_is_read() {
    let json = concat!(
        r#"{"__metadata__": {"format": "pt"}, "#,
        r#""a\u00e4": {"dtype": "F16", "shape": [1, 2], "data_offsets": [0, 4]}}"#
    );
    let mut bytes = (json.len() as u64).to_le_bytes().to_vec();
    bytes.extend_from_slice(json.as_bytes());
    assert_eq!(Header::decode(&bytes).unwrap().entries()[0].name, "aä");
}

#[test]
fn headers_that_cannot_be_written() {
    let header = Header::new(vec![], vec![]).unwrap();
    for align in [0, 1, 4, 12, 63, u64::MAX] {
        assert_eq!(header.encode(align), Err(HeaderError::Alignment(align)));
    }
    // A multiple of 8, but larger than a header may be.
    assert!(matches!(header.encode(1 << 40), Err(HeaderError::TooLong(_))));
    assert_eq!(header.encode(4096).unwrap().len(), 4096);
    let entry = u8s(&"x".repeat(100_000_000), 0, 1);
    assert!(matches!(Header::new(vec![], vec![entry]).unwrap().encode(64), Err(HeaderError::TooLong(_))));
}
