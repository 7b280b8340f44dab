//! A manifest is read or refused; one that is read is JSON, and its storages hold what they promise.
#![no_main]

use std::sync::LazyLock;

use libfuzzer_sys::fuzz_target;
use tensorferry_wire::container::{Entry, Header, MANIFEST_ENTRY, PICKLE_ENTRY};
use tensorferry_wire::dtype::Dtype;
use tensorferry_wire::manifest::validate;

static HEADER: LazyLock<Header> = LazyLock::new(|| {
    let storages = ["__tensorferry__/storage/0/0", "__tensorferry__/storage/0/1"];
    let names = ["a", "b", "c", MANIFEST_ENTRY, PICKLE_ENTRY, storages[0], storages[1]];
    let entries = names.iter().zip(0..).map(|(name, i)| Entry {
        name: (*name).into(),
        dtype: Dtype::U8,
        shape: [8].into_iter().collect(),
        start: 8 * i,
        end: 8 * i + 8,
    });
    Header::new(vec![], entries.collect()).expect("a valid header")
});

fuzz_target!(|json: &[u8]| {
    let Ok(manifest) = validate(json, &HEADER) else { return };
    let end = json.iter().rposition(|&b| b != b' ' && b != 0).map_or(0, |last| last + 1);
    // beyond serde_json's own limits, deep nesting and numbers like 1e999, there is nothing to compare
    if let Err(error) = serde_json::from_slice::<serde_json::Value>(&json[..end]) {
        let text = error.to_string();
        assert!(text.contains("recursion limit") || text.contains("out of range"), "{text}");
    }
    let mut total = 0u64;
    for storage in &manifest.storages {
        total = total.checked_add(storage.nbytes).expect("the sum was checked");
        let sent: u64 = storage.pieces.iter().map(|&(entry, _)| HEADER.entries()[entry].nbytes()).sum();
        assert!(sent <= storage.nbytes, "pieces overlap or stick out");
    }
});
