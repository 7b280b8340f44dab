//! How long encoding and checking take for a header and a manifest of 100,000 tensors. Run with
//! `cargo test --release -p tensorferry-wire --test formats -- speed --ignored --nocapture`.
#![allow(clippy::unwrap_used, reason = "a panic is how a test fails")]

use std::time::{Duration, Instant};

use tensorferry_wire::container::{Entry, Header};
use tensorferry_wire::dtype::Dtype;
use tensorferry_wire::manifest::validate;

/// The shortest of ten runs.
fn best<T>(mut work: impl FnMut() -> T) -> Duration {
    let runs = (0..10).map(|_| {
        let begin = Instant::now();
        std::hint::black_box(work());
        begin.elapsed()
    });
    runs.min().unwrap()
}

#[test]
#[ignore = "a measurement, not a check"]
fn a_hundred_thousand_entries() {
    let entries: Vec<Entry> = (0..100_000)
        .map(|i| Entry {
            name: format!("user.model.layers.{i}.weight"),
            dtype: Dtype::F32,
            shape: [16, 16].into_iter().collect(),
            start: 1024 * i,
            end: 1024 * (i + 1),
        })
        .collect();
    let header = Header::new(vec![("format".into(), "pt".into())], entries.clone()).unwrap();
    let bytes = header.encode(64).unwrap();
    println!("header: {} bytes", bytes.len());
    println!("new     {:?} (and cloning the entries)", best(|| Header::new(vec![], entries.clone())));
    println!("encode  {:?}", best(|| header.encode(64)));
    println!("decode  {:?}", best(|| Header::decode(&bytes)));

    let leaves: Vec<String> = (0..100_000).map(|i| format!(r#""user.model.layers.{i}.weight":{i}"#)).collect();
    let manifest = format!(
        r#"{{"version":1,"tree":{{{}}},"flags":"{}","objects":0,"storages":[]}}"#,
        leaves.join(","),
        "0".repeat(100_000)
    );
    println!("manifest: {} bytes", manifest.len());
    println!("validate {:?}", best(|| validate(manifest.as_bytes(), &header).unwrap()));
}
