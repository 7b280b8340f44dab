//! Writes the bytes of a file past the page cache where possible, and through it otherwise.
//!
//! Writing past the cache needs addresses, lengths and offsets that are multiples of a page. Other bytes, such as the
//! ends of a chunk, go through the cache. After a file system has refused a direct write, no other one is tried.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use crate::memory::PAGE;

/// A file that is being written.
pub(super) struct Output {
    cached: File,
    direct: Option<File>,
    refused: AtomicBool,
    written: AtomicU64,
}

impl Output {
    /// Writes to `cached`, the file at `path`; past the page cache if `direct` and the system lets us.
    pub(super) fn new(cached: File, path: &Path, direct: bool) -> Self {
        let open = || OpenOptions::new().write(true).custom_flags(libc::O_DIRECT).open(path).ok();
        let direct = direct.then(open).flatten();
        Self { cached, direct, refused: AtomicBool::new(false), written: AtomicU64::new(0) }
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

    /// Writes `bytes` at `at`. What lies in whole pages of the file goes directly, if its memory is aligned to pages,
    /// too.
    pub(super) fn write(&self, bytes: &[u8], at: u64) -> io::Result<()> {
        let whole = if at.is_multiple_of(PAGE as u64) { bytes.len() / PAGE * PAGE } else { 0 };
        let (pages, rest) = bytes.split_at(whole);
        if !self.write_directly(pages, at)? {
            return self.cached.write_all_at(bytes, at);
        }
        self.cached.write_all_at(rest, at + whole as u64)
    }

    /// Whether `pages` were written. A file system that cannot do it says so with the first write, or when it is
    /// opened.
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

/// Memory aligned to pages, filled from the front.
pub(super) struct Buffer {
    memory: Vec<u8>,
    start: usize,
    filled: usize,
}

impl Buffer {
    pub(super) fn new(len: usize) -> Self {
        let memory = vec![0; len + PAGE];
        let start = memory.as_ptr().align_offset(PAGE);
        Self { memory, start, filled: 0 }
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
        let output = Output::new(File::create(&path).unwrap(), &path, direct);
        (Gone(path), output)
    }

    #[test]
    fn what_is_written_is_there_whichever_way_it_went() {
        let bytes: Vec<u8> = (0_u8..251).cycle().take(5 * PAGE + 100).collect();
        let mut buffer = Buffer::new(bytes.len());
        for direct in [false, true] {
            let (file, output) = output(direct);
            let able = output.direct.is_some();
            buffer.clear();
            buffer.extend(&bytes[..=PAGE]);
            buffer.extend(&bytes[PAGE + 1..]);
            output.write(buffer.filled(), 2 * PAGE as u64).unwrap();
            // Not at a page, and less than one: through the cache.
            output.write(&bytes[..77], 100).unwrap();
            let found = std::fs::read(&file.0).unwrap();
            assert!(found[100..177] == bytes[..77] && found[2 * PAGE..] == bytes[..]);
            let past = if able && !output.refused.load(Ordering::Relaxed) { 5 * PAGE as u64 } else { 0 };
            assert_eq!(output.past_the_cache(), past);
        }
    }

    #[test]
    fn where_the_system_refuses_bytes_go_through_the_cache() {
        let bytes = vec![7; 8 * PAGE];
        let (file, output) = output(true);
        let odd = usize::from(bytes.as_ptr().align_offset(512) == 0);
        // Memory that is not aligned is refused like all that a file system cannot do.
        output.write(&bytes[odd..odd + 4 * PAGE], 0).unwrap();
        assert!(std::fs::read(&file.0).unwrap() == bytes[..4 * PAGE]);
        let refused = output.direct.is_none() || output.refused.load(Ordering::Relaxed);
        assert!(refused || output.past_the_cache() == 4 * PAGE as u64);
        output.write(&bytes, 0).unwrap();
        assert!(std::fs::read(&file.0).unwrap() == bytes);
        assert!(!refused || output.past_the_cache() == 0, "once refused, it is not tried again");
    }
}
