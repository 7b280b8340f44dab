//! What is in the page cache, and requests for what will be read soon.

use std::fs::File;
use std::io::IoSliceMut;
use std::ops::Range;
use std::os::fd::AsRawFd;
use std::sync::Mutex;

use tensorferry_wire::digest::FILE_BLOCK_SIZE;

use super::CHUNK;
use crate::sync::Locked;

/// Bytes that are requested from the disk in one call: the system takes no more notice of a longer one.
const REQUEST: usize = 1 << 20;
/// Bytes ahead of a reading thread that are requested from the disk when something is not in the page cache: the disk
/// has work while threads are between two chunks.
pub(super) const AHEAD: u64 = CHUNK / 2;

/// What is to be read, and how much of it the disk was asked for.
pub(super) struct Ahead<'a> {
    /// The blocks to be read, in ascending order.
    pub(super) runs: &'a [(u64, u64)],
    /// What was requested, in bytes of payload.
    pub(super) requested: Mutex<Range<u64>>,
}

impl Ahead<'_> {
    /// Calls `request` for each stretch of payload `[at, end)` that is to be read and was not requested before.
    pub(super) fn take(&self, at: u64, end: u64, mut request: impl FnMut(u64, u64)) {
        let mut requested = self.requested.locked();
        if requested.is_empty() {
            *requested = at..at;
        }
        // A thread whose chunk lies before the others' may be the last to find that it is not in the cache.
        for (start, end) in [(at, requested.start.min(end)), (requested.end.max(at), end)] {
            let first = self.runs.partition_point(|run| run.1 * FILE_BLOCK_SIZE <= start);
            for &(from, to) in &self.runs[first..] {
                let (from, to) = ((from * FILE_BLOCK_SIZE).max(start), (to * FILE_BLOCK_SIZE).min(end));
                if from >= to {
                    break;
                }
                request(from, to);
            }
        }
        *requested = requested.start.min(at)..requested.end.max(end);
    }
}

/// Asks the disk for bytes `[start, end)` of `file`, without waiting for them.
pub(super) fn request(file: &File, start: u64, end: u64) {
    for from in (start..end).step_by(REQUEST) {
        if let (Ok(from), Ok(len)) = (i64::try_from(from), i64::try_from((REQUEST as u64).min(end - from))) {
            // SAFETY: a call on a file that is open; no memory is involved. It is advice: what it returns is of no use.
            unsafe { libc::posix_fadvise(file.as_raw_fd(), from, len, libc::POSIX_FADV_WILLNEED) };
        }
    }
}

/// Reads what is in the page cache of the bytes from `at` on, until something is not; says how much that was.
pub(super) fn read_cached(file: &File, bytes: &mut [u8], at: u64) -> usize {
    let Ok(offset) = i64::try_from(at) else { return 0 };
    let place = IoSliceMut::new(bytes);
    // SAFETY: `IoSliceMut` has the layout of `iovec`; it is writable memory that is borrowed for the call.
    let got = unsafe { libc::preadv2(file.as_raw_fd(), (&raw const place).cast(), 1, offset, libc::RWF_NOWAIT) };
    // An error, of a file system that cannot do it for one, will come again if it matters.
    usize::try_from(got).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_wanted_is_requested_once_and_nothing_else_is() {
        const B: u64 = FILE_BLOCK_SIZE;
        let runs = [(0, 4), (10, 12), (12, 20), (100, 101)];
        let ahead = Ahead { runs: &runs, requested: Mutex::new(0..0) };
        let take = |at, end| {
            let mut found = Vec::new();
            ahead.take(at * B, end * B, |start, end| found.push((start / B, end / B)));
            found
        };
        assert_eq!(take(1, 11), [(1, 4), (10, 11)]);
        assert_eq!(take(2, 9), [], "all of it was requested before");
        assert_eq!(take(0, 9), [(0, 1)], "what lies before");
        assert_eq!(take(11, 40), [(11, 12), (12, 20)]);
        assert_eq!(take(50, 90), []);
        assert_eq!(take(60, 200), [(100, 101)]);
    }
}
