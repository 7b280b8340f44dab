//! Writes the bytes of a file through the page cache or past it.
//!
//! Writing past the cache needs addresses, lengths and offsets that are multiples of a page. Other bytes, such as the
//! ends of a chunk, go through the cache. After a file system has refused a direct write, no other one is tried.
//!
//! What goes through the cache is sent to the disk at once, so that little is left to be synchronised at the end, and a
//! thread that is far ahead of the disk waits for it: few pages are dirty at a time, and clean ones can be taken back by
//! the kernel whenever somebody needs memory.

use std::collections::VecDeque;
use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use crate::error::Error;
use crate::memory::{PAGE, available_memory, timed, zeroed};

/// A file that is written through the cache without having been asked for takes at most this part of the memory that is
/// available.
const SHARE: u64 = 8;
/// Bytes that are written through the cache before the cost of doing so is judged.
const TRIAL: u64 = 16 << 20;
/// Bytes: a thread that writes fewer than these to the cache in a second of its processor time is slower than a disk.
/// This happens on virtual machines whose host has taken free memory back.
const SLOWEST: u64 = 750 << 20;
/// The type of a ramfs, from linux/magic.h; libc names that of a tmpfs alone.
const RAMFS_MAGIC: libc::c_long = 0x8584_58f6;
/// The most chunks of a thread that are on their way to the disk.
const UNDER_WAY: usize = 8;

/// A file that is being written.
pub(super) struct Output {
    cached: File,
    direct: Option<File>,
    refused: AtomicBool,
    written: AtomicU64,
    /// Whether bytes go through the cache for now, although they could go past it.
    through: AtomicBool,
    /// What that has cost: bytes and nanoseconds of processor time.
    bytes: AtomicU64,
    nanos: AtomicU64,
}

/// Whether the file system is nothing but page cache. Such a one takes direct writes, and there is nothing they pass.
fn is_in_memory(file: &File) -> bool {
    let Ok(system) = rustix::fs::fstatfs(file) else { return false };
    [libc::TMPFS_MAGIC, RAMFS_MAGIC].contains(&system.f_type)
}

impl Output {
    /// Writes to `cached`, a file of `len` bytes. Past the page cache if `direct` and the system lets us;
    /// without saying, through it for as long as that is good for everybody.
    pub(super) fn new(cached: File, len: u64, direct: Option<bool>) -> Self {
        // The same file, whatever its name leads to by now.
        let again = format!("/proc/self/fd/{}", cached.as_raw_fd());
        let open = || OpenOptions::new().write(true).custom_flags(libc::O_DIRECT).open(&again).ok();
        let through = direct.is_none() && available_memory().is_none_or(|memory| len <= memory / SHARE);
        let direct = (direct.unwrap_or(true) && !is_in_memory(&cached)).then(open).flatten();
        Self {
            cached,
            direct,
            refused: AtomicBool::new(false),
            written: AtomicU64::new(0),
            through: AtomicBool::new(through),
            bytes: AtomicU64::new(0),
            nanos: AtomicU64::new(0),
        }
    }

    /// The file, through the page cache.
    pub(super) fn cached(&self) -> &File {
        &self.cached
    }

    /// The file alone.
    pub(super) fn into_cached(self) -> File {
        self.cached
    }

    /// Bytes that went past the page cache.
    pub(super) fn past_the_cache(&self) -> u64 {
        self.written.load(Ordering::Relaxed)
    }

    /// Whether the next bytes should go past the page cache.
    pub(super) fn goes_past(&self) -> bool {
        self.direct.is_some() && !self.refused.load(Ordering::Relaxed) && !self.through.load(Ordering::Relaxed)
    }

    /// Writes `bytes` at `at` past the cache: what lies in whole pages of the file, if its memory is aligned to pages,
    /// too.
    pub(super) fn write_past(&self, bytes: &[u8], at: u64) -> io::Result<()> {
        let whole = if at.is_multiple_of(PAGE as u64) { bytes.len() / PAGE * PAGE } else { 0 };
        let (pages, rest) = bytes.split_at(whole);
        if !self.write_directly(pages, at)? {
            return self.cached.write_all_at(bytes, at);
        }
        self.cached.write_all_at(rest, at + whole as u64)
    }

    /// Writes `bytes` at `at` through the cache. If that is slow, what comes later goes past it.
    pub(super) fn write_through(&self, bytes: &[u8], at: u64) -> io::Result<()> {
        let (written, took) = timed(|| self.cached.write_all_at(bytes, at));
        written?;
        let bytes = bytes.len() as u64 + self.bytes.fetch_add(bytes.len() as u64, Ordering::Relaxed);
        let nanos = took.saturating_add(self.nanos.fetch_add(took, Ordering::Relaxed));
        if bytes >= TRIAL && is_slow(bytes, nanos) {
            self.through.store(false, Ordering::Relaxed);
        }
        Ok(())
    }

    /// Has the disk begin with the chunk `[at, at + len)`, and waits for an older one if there are too many under way,
    /// those of `under_way`.
    pub(super) fn send(&self, at: u64, len: u64, under_way: &mut VecDeque<(u64, u64)>) -> io::Result<()> {
        self.synchronise((at, len), libc::SYNC_FILE_RANGE_WRITE)?;
        under_way.push_back((at, len));
        if under_way.len() <= UNDER_WAY {
            return Ok(());
        }
        under_way.pop_front().map_or(Ok(()), |oldest| self.synchronise(oldest, libc::SYNC_FILE_RANGE_WAIT_BEFORE))
    }

    /// Has the disk do `what`, flags of `sync_file_range`, with a chunk. An error that is reported here is not reported
    /// again when the file is synchronised.
    fn synchronise(&self, (at, len): (u64, u64), what: libc::c_uint) -> io::Result<()> {
        let (Ok(at), Ok(len)) = (i64::try_from(at), i64::try_from(len)) else {
            return Err(io::ErrorKind::FileTooLarge.into());
        };
        // SAFETY: a call on a file that is open; no memory is involved.
        if unsafe { libc::sync_file_range(self.cached.as_raw_fd(), at, len, what) } == 0 {
            return Ok(());
        }
        match io::Error::last_os_error() {
            // The file is synchronised at the end, wherever this cannot be had.
            e if matches!(e.raw_os_error(), Some(libc::EINVAL | libc::ENOSYS | libc::EOPNOTSUPP | libc::ESPIPE)) => {
                Ok(())
            }
            e => Err(e),
        }
    }

    /// Writes whole `pages`, aligned as such, at `at` past the cache, and counts them; returns whether that was done. A
    /// file system that cannot do it says so with the first write, or when the file is opened; it is not asked again.
    fn write_directly(&self, pages: &[u8], at: u64) -> io::Result<bool> {
        let Some(direct) = self.direct.as_ref().filter(|_| !self.refused.load(Ordering::Relaxed)) else {
            return Ok(false);
        };
        match direct.write_all_at(pages, at) {
            Ok(()) => {
                self.written.fetch_add(pages.len() as u64, Ordering::Relaxed);
                Ok(true)
            }
            Err(e) if matches!(e.raw_os_error(), Some(libc::EINVAL | libc::EOPNOTSUPP | libc::ENOTBLK)) => {
                self.refused.store(true, Ordering::Relaxed);
                Ok(false)
            }
            Err(e) => Err(e),
        }
    }
}

fn is_slow(bytes: u64, nanos: u64) -> bool {
    u128::from(bytes) * 1_000_000_000 < u128::from(SLOWEST) * u128::from(nanos)
}

/// Memory aligned to pages, filled from the front.
pub(super) struct Buffer {
    memory: Vec<u8>,
    start: usize,
    filled: usize,
}

impl Buffer {
    pub(super) fn new(len: usize) -> Result<Self, Error> {
        let memory = zeroed(len + PAGE)?;
        let start = memory.as_ptr().align_offset(PAGE);
        Ok(Self { memory, start, filled: 0 })
    }

    pub(super) fn clear(&mut self) {
        self.filled = 0;
    }

    /// Appends `bytes`, for which there must be room.
    pub(super) fn extend(&mut self, bytes: &[u8]) {
        let at = self.start + self.filled;
        self.memory[at..at + bytes.len()].copy_from_slice(bytes);
        self.filled += bytes.len();
    }

    /// The first `len` bytes of the memory.
    pub(super) fn room(&mut self, len: usize) -> &mut [u8] {
        &mut self.memory[self.start..self.start + len]
    }

    pub(super) fn filled(&self) -> &[u8] {
        &self.memory[self.start..self.start + self.filled]
    }
}

#[cfg(test)]
mod tests {
    use std::path::PathBuf;

    use super::*;

    /// A file that is gone at the end.
    struct Gone(PathBuf);

    impl Drop for Gone {
        fn drop(&mut self) {
            let _ = std::fs::remove_file(&self.0);
        }
    }

    fn output(direct: bool) -> (Gone, Output) {
        static COUNT: AtomicU64 = AtomicU64::new(0);
        let number = COUNT.fetch_add(1, Ordering::Relaxed);
        let path = std::env::temp_dir().join(format!("tensorferry-output-{}-{number}", std::process::id()));
        let output = Output::new(File::create(&path).unwrap(), 1, Some(direct));
        (Gone(path), output)
    }

    #[test]
    fn what_is_written_is_there_whichever_way_it_went() {
        let bytes: Vec<u8> = (0_u8..251).cycle().take(5 * PAGE + 100).collect();
        let mut buffer = Buffer::new(bytes.len()).unwrap();
        for direct in [false, true] {
            let (file, output) = output(direct);
            let able = output.direct.is_some();
            buffer.clear();
            buffer.extend(&bytes[..=PAGE]);
            buffer.extend(&bytes[PAGE + 1..]);
            output.write_past(buffer.filled(), 2 * PAGE as u64).unwrap();
            // Not at a page, and less than one: through the cache.
            output.write_past(&bytes[..77], 100).unwrap();
            let found = std::fs::read(&file.0).unwrap();
            assert!(found[100..177] == bytes[..77] && found[2 * PAGE..] == bytes[..]);
            let past = if able && !output.refused.load(Ordering::Relaxed) { 5 * PAGE as u64 } else { 0 };
            assert_eq!(output.past_the_cache(), past);
        }
    }

    #[test]
    fn bytes_go_to_the_file_that_was_opened_whatever_its_name_leads_to() {
        let (file, _) = output(true);
        let opened = File::create(&file.0).unwrap();
        let moved = Gone(file.0.with_extension("moved"));
        std::fs::rename(&file.0, &moved.0).unwrap();
        std::fs::write(&file.0, b"of somebody else").unwrap();
        let output = Output::new(opened, 1, Some(true));
        let mut buffer = Buffer::new(PAGE).unwrap();
        buffer.extend(&[7; PAGE]);
        output.write_past(buffer.filled(), 0).unwrap();
        assert_eq!(std::fs::read(&moved.0).unwrap(), [7; PAGE]);
        assert_eq!(std::fs::read(&file.0).unwrap(), b"of somebody else");
    }

    #[test]
    fn where_the_system_refuses_bytes_go_through_the_cache() {
        let bytes = vec![7; 8 * PAGE];
        let (file, output) = output(true);
        let odd = usize::from(bytes.as_ptr().align_offset(512) == 0);
        // Memory that is not aligned is refused like all that a file system cannot do.
        output.write_past(&bytes[odd..odd + 4 * PAGE], 0).unwrap();
        assert!(std::fs::read(&file.0).unwrap() == bytes[..4 * PAGE]);
        let refused = output.direct.is_none() || output.refused.load(Ordering::Relaxed);
        assert!(refused || output.past_the_cache() == 4 * PAGE as u64);
        output.write_past(&bytes, 0).unwrap();
        assert!(std::fs::read(&file.0).unwrap() == bytes);
        assert!(!refused || output.past_the_cache() == 0, "once refused, it is not tried again");
    }

    #[test]
    fn what_is_slow_in_the_cache_goes_past_it_from_then_on() {
        let path = std::env::temp_dir().join(format!("tensorferry-slow-{}", std::process::id()));
        let file = Gone(path);
        let output = Output::new(File::create(&file.0).unwrap(), 1, None);
        let able = output.direct.is_some();
        assert!(!output.goes_past(), "a small file goes through the cache");
        output.write_through(&[1; 100], 0).unwrap();
        assert!(!output.goes_past(), "too little to judge");
        output.bytes.store(TRIAL, Ordering::Relaxed);
        output.nanos.store(TRIAL * 1_000_000_000 / SLOWEST + 10_000_000, Ordering::Relaxed);
        output.write_through(&[2; 100], 100).unwrap();
        assert_eq!(output.goes_past(), able);
        assert!(is_slow(SLOWEST - 1, 1_000_000_000) && !is_slow(SLOWEST, 1_000_000_000));
        let large = Output::new(File::create(&file.0).unwrap(), u64::MAX, None);
        assert_eq!(large.goes_past(), able, "a file larger than all memory");
    }

    #[test]
    fn chunks_are_sent_to_the_disk_and_only_so_many_are_under_way() {
        let (file, output) = output(false);
        let mut under_way = VecDeque::new();
        for chunk in 0..20 {
            output.write_through(&[chunk; PAGE], u64::from(chunk) * PAGE as u64).unwrap();
            output.send(u64::from(chunk) * PAGE as u64, PAGE as u64, &mut under_way).unwrap();
            assert_eq!(under_way.len(), UNDER_WAY.min(usize::from(chunk) + 1));
        }
        assert_eq!(std::fs::read(&file.0).unwrap().len(), 20 * PAGE);
    }
}
