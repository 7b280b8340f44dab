//! The tests of the engine, in one binary: one link instead of one for each file, and tests that wait do so beside each
//! other. A test that measures its process has a binary of its own, which `Cargo.toml` names.
#![allow(clippy::disallowed_methods, reason = "tests are peers of all kinds")]
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test that cannot go on should panic")]

mod addresses;
mod common;
mod digests_of_entries;
mod faults;
mod fetch;
mod file;
mod frozen;
mod gate;
mod http_semantics;
mod liars;
mod metrics;
mod moments;
mod rails;
mod readiness;
mod same_host;
mod secret;
mod server_survival;
mod shelves;
mod slices;
mod sources;
mod staged;
mod swarm;
mod swarm_forgery;
mod swarm_kills;
mod swarm_slices;
mod tls;
mod withdraw;

/// Cargo no longer finds files by itself, so one that nobody names would not run.
#[test]
fn every_file_is_in_a_binary() {
    let root = std::path::Path::new(env!("CARGO_MANIFEST_DIR"));
    let (here, alone) = (include_str!("main.rs"), include_str!("../Cargo.toml"));
    for entry in std::fs::read_dir(root.join("tests")).unwrap() {
        let name = entry.unwrap().file_name().into_string().unwrap();
        let stem = name.trim_end_matches(".rs");
        let named = here.contains(&format!("\nmod {stem};\n")) || alone.contains(&format!("\"tests/{name}\""));
        assert!(named, "add `mod {stem};` to tests/main.rs");
    }
}
