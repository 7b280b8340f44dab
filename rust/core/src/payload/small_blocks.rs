//! The checksums of blocks of 512 bytes, many at a time.
//!
//! A checksum of so few bytes costs more for its beginning and end than for what lies between. Four blocks side by side
//! share both: on processors with AVX-512 and VPCLMULQDQ that takes a sixth of the time of one after the other. The
//! result is the same CRC-64/NVME.
//!
//! The method is that of Intel's "Fast CRC Computation for Generic Polynomials Using PCLMULQDQ Instruction" (2009), in
//! its variant for reflected checksums: fold 512 bits at a time, then 128, then reduce by Barrett's method.

use tensorferry_wire::digest::{Algorithm, FILE_BLOCK_SIZE};

use super::checksum_blocks;
use crate::memory::nontemporal;

/// Bytes of a group of blocks, which are checksummed together.
pub(super) const GROUP: usize = 2048;
const _: () = assert!(GROUP as u64 == 4 * FILE_BLOCK_SIZE);

/// Appends the checksums of the blocks of `bytes` that make whole groups, and returns how many bytes those are: none on
/// a processor that cannot do it.
pub(super) fn checksums(bytes: &[u8], digests: &mut Vec<u64>) -> usize {
    fold::checksums(bytes, digests)
}

/// Copies `from` to `to`, which has the same length, past the cache, and appends the CRC-64/NVME of each 512 bytes and
/// of the rest.
pub(crate) fn copy_with_checksums(from: &[u8], to: &mut [u8], digests: &mut Vec<u64>) {
    let done = fold::copy(from, to, digests);
    digests.extend(checksum_blocks(&Algorithm::Crc64, [&from[done..]], FILE_BLOCK_SIZE));
    nontemporal::copy(&from[done..], &mut to[done..]);
}

#[cfg(not(target_arch = "x86_64"))]
mod fold {
    pub(super) fn checksums(_bytes: &[u8], _digests: &mut Vec<u64>) -> usize {
        0
    }

    pub(super) fn copy(_from: &[u8], _to: &mut [u8], _digests: &mut Vec<u64>) -> usize {
        0
    }
}

#[cfg(target_arch = "x86_64")]
mod fold {
    use std::arch::x86_64::{
        __m512i, _mm_set_epi64x, _mm_sfence, _mm256_storeu_si256, _mm512_broadcast_i32x4, _mm512_bslli_epi128,
        _mm512_bsrli_epi128, _mm512_castsi512_si256, _mm512_clmulepi64_epi128, _mm512_loadu_si512,
        _mm512_permutexvar_epi64, _mm512_set_epi64, _mm512_set1_epi64, _mm512_shuffle_i64x2, _mm512_stream_si512,
        _mm512_ternarylogic_epi64, _mm512_xor_si512,
    };

    use super::GROUP;

    /// The polynomial of CRC-64/NVME without its highest term.
    const POLYNOMIAL: u64 = 0xad93_d235_94c9_3659;
    /// What moves a value 512 and 128 bits on: the factors of its first and its second half.
    const BY_512: [u64; 2] = [power(575), power(511)];
    const BY_128: [u64; 2] = [power(191), power(127)];
    /// For Barrett's reduction: the quotient of x^127 and the polynomial; the polynomial without its lowest term,
    /// divided by x.
    const REDUCTION: [u64; 2] = [quotient(), (1 << 63 | POLYNOMIAL >> 1).reverse_bits()];
    /// The exclusive or of three values, for the ternary logic.
    const XOR: i32 = 0x96;

    /// A line of the cache.
    #[derive(Clone, Copy)]
    #[repr(align(64))]
    struct Line(#[allow(dead_code, reason = "it is written to by its address")] [u8; 64]);

    /// x^`n` modulo the polynomial, reflected.
    const fn power(n: u32) -> u64 {
        let (mut power, mut i) = (1_u64, 0);
        while i < n {
            power = power << 1 ^ if power >> 63 == 1 { POLYNOMIAL } else { 0 };
            i += 1;
        }
        power.reverse_bits()
    }

    /// The quotient of x^127 and the polynomial, reflected.
    const fn quotient() -> u64 {
        let (mut quotient, mut rest, mut i) = (0_u64, 1_u128, 0);
        while i < 127 {
            (rest, quotient) = (rest << 1, quotient << 1);
            if rest >> 64 == 1 {
                rest ^= 1 << 64 | POLYNOMIAL as u128;
                quotient |= 1;
            }
            i += 1;
        }
        quotient.reverse_bits()
    }

    /// Whether this processor has the instructions.
    fn is_supported() -> bool {
        is_x86_feature_detected!("avx512f")
            && is_x86_feature_detected!("avx512bw")
            && is_x86_feature_detected!("vpclmulqdq")
    }

    /// Appends the checksums of the blocks in whole groups of `bytes`; returns how many bytes those are.
    pub(super) fn checksums(bytes: &[u8], digests: &mut Vec<u64>) -> usize {
        if !is_supported() {
            return 0;
        }
        let groups = bytes.as_chunks().0;
        for group in groups {
            // SAFETY: the processor has the instructions.
            digests.extend(unsafe { four(group, None) });
        }
        groups.len() * GROUP
    }

    /// Copies whole groups of blocks past the cache, and appends their checksums; returns how many bytes those are.
    pub(super) fn copy(from: &[u8], to: &mut [u8], digests: &mut Vec<u64>) -> usize {
        // SAFETY: bytes make a valid line whatever they are.
        let (unaligned, lines, _) = unsafe { to.align_to_mut::<Line>() };
        if !unaligned.is_empty() || !is_supported() {
            return 0;
        }
        let groups = from.as_chunks().0;
        for (group, lines) in groups.iter().zip(lines.as_chunks_mut().0) {
            // SAFETY: as above.
            digests.extend(unsafe { four(group, Some(lines)) });
        }
        // SAFETY: SSE2 is part of x86-64. Such stores are ordered with nothing; after the fence every thread that
        // synchronises with this one sees them.
        unsafe { _mm_sfence() };
        groups.len() * GROUP
    }

    /// The same pair of factors in each quarter.
    #[target_feature(enable = "avx512f")]
    #[allow(clippy::cast_possible_wrap, reason = "the instructions know bits only")]
    fn everywhere(pair: [u64; 2]) -> __m512i {
        _mm512_broadcast_i32x4(_mm_set_epi64x(pair[1] as i64, pair[0] as i64))
    }

    /// `value`, moved on by `factors`, and `next` added.
    #[target_feature(enable = "avx512f,avx512bw,vpclmulqdq")]
    fn fold(value: __m512i, factors: __m512i, next: __m512i) -> __m512i {
        let (first, second) =
            (_mm512_clmulepi64_epi128::<0x00>(value, factors), _mm512_clmulepi64_epi128::<0x11>(value, factors));
        _mm512_ternarylogic_epi64::<XOR>(first, second, next)
    }

    /// The CRC-64/NVME of each of the four blocks of `group`, which is also copied to `copy`: past the cache, so that a
    /// fence has to follow before others read it.
    #[target_feature(enable = "avx512f,avx512bw,vpclmulqdq")]
    fn four(group: &[u8; GROUP], copy: Option<&mut [Line; GROUP / 64]>) -> [u64; 4] {
        let mut copy = copy;
        let mut load = |block: usize, line: usize| {
            let at = block * 8 + line;
            // SAFETY: a group has 32 lines.
            let value = unsafe { _mm512_loadu_si512(group.as_ptr().add(at * 64).cast()) };
            if let Some(lines) = &mut copy {
                // SAFETY: a line is as long as the value, and aligned as the store needs it.
                unsafe { _mm512_stream_si512((&raw mut lines[at]).cast(), value) };
            }
            value
        };
        let begin = _mm512_set_epi64(0, 0, 0, 0, 0, 0, 0, -1);
        let mut values = [0, 1, 2, 3].map(|block| _mm512_xor_si512(load(block, 0), begin));
        let by_512 = everywhere(BY_512);
        for line in 1..8 {
            for (block, value) in values.iter_mut().enumerate() {
                *value = fold(*value, by_512, load(block, line));
            }
        }

        // The quarters of each value follow one another. From here on a quarter is one block's.
        let [a, b, c, d] = values;
        let (low_ab, high_ab) = (_mm512_shuffle_i64x2::<0x44>(a, b), _mm512_shuffle_i64x2::<0xee>(a, b));
        let (low_cd, high_cd) = (_mm512_shuffle_i64x2::<0x44>(c, d), _mm512_shuffle_i64x2::<0xee>(c, d));
        let by_128 = everywhere(BY_128);
        let value = _mm512_shuffle_i64x2::<0x88>(low_ab, low_cd);
        let value = fold(value, by_128, _mm512_shuffle_i64x2::<0xdd>(low_ab, low_cd));
        let value = fold(value, by_128, _mm512_shuffle_i64x2::<0x88>(high_ab, high_cd));
        let value = fold(value, by_128, _mm512_shuffle_i64x2::<0xdd>(high_ab, high_cd));

        let value = _mm512_xor_si512(_mm512_clmulepi64_epi128::<0x10>(value, by_128), _mm512_bsrli_epi128::<8>(value));
        let reduction = everywhere(REDUCTION);
        let times = _mm512_clmulepi64_epi128::<0x00>(value, reduction);
        let whole = _mm512_clmulepi64_epi128::<0x10>(times, reduction);
        let rest = _mm512_ternarylogic_epi64::<XOR>(whole, _mm512_bslli_epi128::<8>(times), value);
        let rest = _mm512_xor_si512(rest, _mm512_set1_epi64(-1));
        let upper = _mm512_permutexvar_epi64(_mm512_set_epi64(0, 0, 0, 0, 7, 5, 3, 1), rest);
        let mut digests = [0; 4];
        // SAFETY: there is room for four words.
        unsafe { _mm256_storeu_si256(digests.as_mut_ptr().cast(), _mm512_castsi512_si256(upper)) };
        digests
    }
}

#[cfg(test)]
mod tests {
    use tensorferry_wire::digest::checksum;

    use super::*;

    #[test]
    fn checksums_and_copies_are_those_of_one_block_after_the_other() {
        let bytes: Vec<u8> = (0..70_000_u32).map(|i| i.wrapping_mul(2_654_435_761).to_le_bytes()[1]).collect();
        for start in [0, 1, 64] {
            for len in [0, 1, 511, 512, 2047, 2048, 2049, 4096, 65_536, 66_000] {
                let bytes = &bytes[start..start + len];
                let expected: Vec<_> = bytes.chunks(512).map(checksum).collect();
                assert_eq!(checksum_blocks(&Algorithm::Crc64, [bytes], FILE_BLOCK_SIZE), expected, "{len} bytes");
                for to in [0, 1, 64] {
                    let mut memory = vec![0xee; to + len + 200];
                    let to = memory.as_ptr().align_offset(64) + to;
                    let mut digests = Vec::new();
                    copy_with_checksums(bytes, &mut memory[to..to + len], &mut digests);
                    assert_eq!(digests, expected, "{len} bytes to {to}");
                    assert_eq!(&memory[to..to + len], bytes);
                    assert!(memory[..to].iter().chain(&memory[to + len..]).all(|&b| b == 0xee));
                }
            }
        }
    }
}
