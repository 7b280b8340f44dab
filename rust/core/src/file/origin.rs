//! Where the bytes of a container are that is read: in a file, or with somebody who reads ranges of them, such as the
//! client of an object store.
//!
//! Whoever reads ranges pays for each request, so they are asked for in larger pieces than a file, by more threads, and
//! what lies between two of them is read, too, where that is little.

use std::fmt;
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;

use bytes::Bytes;

use super::{CHUNK, FileOptions, PIECE, refused};
use crate::error::{Error, ErrorKind};

/// Bytes that one request for a range asks for at most.
const REQUEST: u64 = 8 << 20;
/// Bytes between two wanted ranges that cost less than a second request.
const GAP: u64 = 256 << 10;
/// Requests at a time, unless the caller chooses.
const REQUESTS: usize = 8;

/// The bytes of a container that is neither in a file nor in memory.
pub trait Ranges: fmt::Debug + Send + Sync {
    /// How many bytes there are.
    fn len(&self) -> u64;

    /// Returns the `len` bytes from `at` on. Several threads call it at once.
    ///
    /// # Errors
    /// Whatever keeps it from that.
    fn get(&self, at: u64, len: usize) -> Result<Bytes, Error>;

    /// Whether there are none.
    fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

/// Where the bytes of a container are.
#[derive(Debug)]
pub(super) enum Origin {
    File(File),
    Ranges(Box<dyn Ranges>),
}

impl Origin {
    /// Fills `bytes` with those from `at` on; `path` is the name in messages.
    pub(super) fn read(&self, path: &Path, bytes: &mut [u8], at: u64) -> Result<(), Error> {
        match self {
            Self::File(file) => file.read_exact_at(bytes, at).map_err(|e| refused(path, "cannot be read", e)),
            Self::Ranges(ranges) => {
                bytes.copy_from_slice(&got(ranges.as_ref(), path, at, bytes.len())?);
                Ok(())
            }
        }
    }

    pub(super) fn is_file(&self) -> bool {
        matches!(self, Self::File(_))
    }

    /// Bytes that a thread takes at a time.
    pub(super) fn chunk(&self) -> u64 {
        if self.is_file() { CHUNK } else { REQUEST }
    }

    /// Bytes that a thread reads at a time.
    pub(super) fn piece(&self) -> usize {
        if self.is_file() { PIECE } else { usize::try_from(REQUEST).unwrap_or(PIECE) }
    }

    /// Wanted ranges with so many bytes between them are read as one.
    pub(super) fn gap(&self) -> u64 {
        if self.is_file() { 0 } else { GAP }
    }

    /// `options` with as many threads as requests there should be at a time.
    pub(super) fn options(&self, options: &FileOptions) -> FileOptions {
        let threads = if self.is_file() { options.threads } else { options.threads.or(Some(REQUESTS)) };
        FileOptions { threads, ..options.clone() }
    }
}

/// The `len` bytes from `at` on of `ranges`, which messages call `path`.
///
/// # Errors
/// Those of [`Ranges::get`], and [`ErrorKind::Protocol`] when there are more or fewer.
pub(super) fn got(ranges: &dyn Ranges, path: &Path, at: u64, len: usize) -> Result<Bytes, Error> {
    let bytes = if len == 0 { Bytes::new() } else { ranges.get(at, len)? };
    if bytes.len() != len {
        let message =
            format!("{}: {len} bytes from {at} on were requested, and {} have come", path.display(), bytes.len());
        return Err(Error::new(ErrorKind::Protocol, message));
    }
    Ok(bytes)
}
