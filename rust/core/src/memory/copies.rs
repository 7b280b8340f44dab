//! Many copies from memory to memory, made by several threads.
//!
//! All copies together are one run of bytes that threads take pieces of: a hundred thousand small tensors and one large
//! one are shared out alike.

use std::sync::atomic::{AtomicUsize, Ordering};

use super::nontemporal;
use crate::sync::parallel;

/// Bytes that a thread copies at a time.
const PIECE: usize = 1 << 20;

/// Bytes to be copied: `len` of them from one address to another.
#[derive(Clone, Copy, Debug)]
pub struct Transfer {
    /// Where they are.
    pub from: usize,
    /// Where they go.
    pub to: usize,
    /// How many there are.
    pub len: usize,
}

/// Makes all copies, with up to `threads` threads, the calling one among them.
///
/// # Safety
/// For the length of the call all sources are readable, and nobody else reads or writes the destinations, which overlap
/// neither each other nor a source.
pub unsafe fn copy_all(transfers: &[Transfer], threads: usize) {
    let mut total = 0_usize;
    // Where each begins in the run of all bytes. Lengths of memory of one process have a sum.
    let mut starts = Vec::with_capacity(transfers.len());
    for transfer in transfers {
        starts.push(total);
        total += transfer.len;
    }
    let next = AtomicUsize::new(0);
    let work = || loop {
        let at = next.fetch_add(PIECE, Ordering::Relaxed);
        if at >= total {
            return;
        }
        // SAFETY: what the caller promises; no other thread has this piece.
        unsafe { copy_piece(transfers, &starts, at, total.min(at + PIECE)) };
    };
    parallel("tensorferry-copy", threads.min(total.div_ceil(PIECE)), work);
}

/// Copies the bytes `[at, end)` of the run of all bytes.
///
/// # Safety
/// As for [`copy_all`], for these bytes.
unsafe fn copy_piece(transfers: &[Transfer], starts: &[usize], mut at: usize, end: usize) {
    let mut index = starts.partition_point(|&start| start <= at) - 1;
    while at < end {
        let Transfer { from, to, len } = transfers[index];
        let skipped = at - starts[index];
        let count = (len - skipped).min(end - at);
        if count > 0 {
            // SAFETY: both lie in the memory of this transfer, which the caller vouches for.
            let (source, target) = unsafe {
                (
                    std::slice::from_raw_parts((from + skipped) as *const u8, count),
                    std::slice::from_raw_parts_mut((to + skipped) as *mut u8, count),
                )
            };
            nontemporal::copy(source, target);
        }
        at += count;
        index += 1;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_byte_is_copied_once_however_the_work_is_shared() {
        let source: Vec<u8> = (0_u8..251).cycle().take(5 * PIECE + 77).collect();
        // Large, small and empty ones; the destinations lie in reverse order, each behind a byte that stays.
        let lens = [0, 1, 3, 2 * PIECE + 5, 0, 0, 100, PIECE, PIECE - 1, 63, 0];
        for threads in [1, 2, 5, 64] {
            let mut target = vec![0xee_u8; source.len()];
            let (mut at, mut back, mut transfers) = (0, target.len(), Vec::new());
            for len in lens {
                back -= len + 1;
                transfers.push(Transfer {
                    from: source.as_ptr() as usize + at,
                    to: target.as_mut_ptr() as usize + back + 1,
                    len,
                });
                at += len;
            }
            // SAFETY: inside two vectors that nobody else knows, and apart.
            unsafe { copy_all(&transfers, threads) };
            let (mut at, mut back) = (0, target.len());
            for len in lens {
                back -= len + 1;
                assert!(
                    target[back] == 0xee && target[back + 1..][..len] == source[at..at + len],
                    "{len} of {threads}"
                );
                at += len;
            }
        }
        // SAFETY: nothing is copied.
        unsafe { copy_all(&[], 3) };
    }
}
