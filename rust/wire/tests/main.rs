//! The tests of the formats, in one binary: one link instead of one for each file.
#![allow(clippy::unwrap_used, reason = "a panic is how a test fails")]

mod container;
mod digests;
mod hostile_header;
mod hostile_manifest;
mod index;
mod proofs;
mod requests;

/// Cargo no longer finds files by itself, so one that nobody names would not run.
#[test]
fn every_file_is_in_this_binary() {
    let tests = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("tests");
    for entry in std::fs::read_dir(tests).unwrap() {
        let name = entry.unwrap().file_name().into_string().unwrap();
        let stem = name.trim_end_matches(".rs");
        let named = stem == "main" || include_str!("main.rs").contains(&format!("\nmod {stem};\n"));
        assert!(named, "add `mod {stem};` to tests/main.rs");
    }
}
