//! The benches beside this file: `cargo bench`.
