//! Paths and fields of a request are read or refused; ranges lie within the resource.
#![no_main]

use libfuzzer_sys::fuzz_target;
use tensorferry_wire::digest::BLOCK_SIZES;
use tensorferry_wire::request::{
    MAX_RUNS, RangeSpec, etag_matches_strong, etag_matches_weak, parse_blocks, parse_content_range, parse_path,
    parse_range, parse_runs, parse_step,
};

fuzz_target!(|bytes: &[u8]| {
    let Some((len, text)) = bytes.split_first_chunk::<8>() else { return };
    let Ok(text) = std::str::from_utf8(text) else { return };
    let len = u64::from_le_bytes(*len);

    let bare = parse_path(text, "");
    let token = "0123456789abcdef0123456789abcdef";
    let prefixed = format!("/{token}{text}");
    match &bare {
        Ok(_) => assert_eq!(parse_path(&prefixed, token), bare),
        // Behind the token, a network card may be named.
        Err(_) => assert!(text.starts_with('~') || parse_path(&prefixed, token).is_err()),
    }
    let _ = parse_path(text, token);
    let _ = parse_step(text);

    if let RangeSpec::Bytes { start, end } = parse_range(text, len) {
        assert!(start < end && end <= len);
        let field = format!("bytes {start}-{}/{len}", end - 1);
        assert_eq!(parse_content_range(&field), Some((start, end, len)));
    }
    if let Some((start, end, total)) = parse_content_range(text) {
        assert!(start < end && end <= total);
    }
    if let Some((first, end, block_size)) = parse_blocks(text) {
        assert!(first <= end && BLOCK_SIZES.contains(&block_size));
    }
    if let Some((runs, block_size)) = parse_runs(text) {
        assert!(!runs.is_empty() && runs.len() <= MAX_RUNS && block_size.is_power_of_two());
        assert!(runs.iter().all(|run| run.0 < run.1) && runs.windows(2).all(|pair| pair[0].1 <= pair[1].0));
    }
    if etag_matches_strong(text, "\"a\"") {
        assert!(etag_matches_weak(text, "\"a\""));
    }
});
