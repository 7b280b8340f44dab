//! Copies that leave the cache alone, for bytes that go to their final place and are not read again soon.
//!
//! On x86-64 an ordinary store first reads the line of memory it changes. The stores used here do not, which saves
//! almost half of what such a copy costs. Elsewhere, and for short copies, this is an ordinary copy.

/// Shorter copies are ordinary ones.
const SHORTEST: usize = 2 << 10;

/// Copies `from` to `to`, which has the same length.
///
/// An ordinary store first reads the line of memory it changes; these do not, and on x86-64 that is almost half of what
/// such a copy costs. Elsewhere this is an ordinary copy.
pub(crate) fn copy(from: &[u8], to: &mut [u8]) {
    assert_eq!(from.len(), to.len());
    if to.len() < SHORTEST {
        to.copy_from_slice(from);
    } else {
        past_cache(from, to);
    }
}

#[cfg(not(target_arch = "x86_64"))]
fn past_cache(from: &[u8], to: &mut [u8]) {
    to.copy_from_slice(from);
}

#[cfg(target_arch = "x86_64")]
fn past_cache(from: &[u8], to: &mut [u8]) {
    use std::arch::x86_64::{__m128i, _mm_loadu_si128, _mm_sfence, _mm_stream_si128};

    /// A line of the cache.
    #[repr(align(64))]
    struct Line([__m128i; 4]);

    // SAFETY: bytes make a valid line whatever they are.
    let (head, lines, tail) = unsafe { to.align_to_mut::<Line>() };
    let (first, rest) = from.split_at(head.len());
    let (middle, last) = rest.split_at(size_of_val(lines));
    head.copy_from_slice(first);
    for (line, bytes) in lines.iter_mut().zip(middle.chunks_exact(size_of::<Line>())) {
        for (to, from) in line.0.iter_mut().zip(bytes.chunks_exact(size_of::<__m128i>())) {
            // SAFETY: SSE2 is part of x86-64; `to` is aligned, and `from` has 16 bytes.
            unsafe { _mm_stream_si128(to, _mm_loadu_si128(from.as_ptr().cast())) };
        }
    }
    tail.copy_from_slice(last);
    // SAFETY: SSE2 again. Such stores are ordered with nothing; after the fence every thread that synchronises with
    // this one sees them.
    unsafe { _mm_sfence() };
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_byte_arrives_wherever_both_sides_start() {
        let bytes: Vec<u8> = (0..40_000_u32).map(|i| (i * 31 % 251) as u8).collect();
        for len in [0, 1, SHORTEST - 1, SHORTEST, SHORTEST + 1, 16 << 10, 39_000] {
            for (from, to) in [(0, 0), (1, 0), (0, 1), (3, 63), (64, 17)] {
                let mut memory = vec![0xee; to + len + 70];
                copy(&bytes[from..from + len], &mut memory[to..to + len]);
                assert_eq!(&memory[to..to + len], &bytes[from..from + len], "{len} bytes from {from} to {to}");
                assert!(memory[..to].iter().chain(&memory[to + len..]).all(|&b| b == 0xee), "{len} bytes to {to}");
            }
        }
    }
}
