//! What a source may answer is taken as it is announced, or refused; the receiver neither hangs nor panics.
#![no_main]

use libfuzzer_sys::fuzz_target;
use tensorferry_core::fuzzing;

fuzz_target!(|bytes: &[u8]| {
    let Some((which, answers)) = bytes.split_first() else { return };
    if which % 2 == 1 { fuzzing::fetch(answers) } else { fuzzing::open(answers) }
});
