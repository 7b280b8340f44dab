//! What a peer's metadata may hold is an address or refused.
#![no_main]

use libfuzzer_sys::fuzz_target;
use tensorferry_core::fuzzing;

fuzz_target!(|bytes: &[u8]| {
    if let Ok(text) = std::str::from_utf8(bytes) {
        fuzzing::address(text);
    }
});
