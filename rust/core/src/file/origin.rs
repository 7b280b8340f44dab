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

use super::{BLOCK, CHUNK, FileOptions, PIECE, refused};
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

    /// Returns the `len` bytes from `at` on, in order, in as many pieces as they have come in. Several threads call it at
    /// once.
    ///
    /// # Errors
    /// Whatever keeps it from that.
    fn get(&self, at: u64, len: usize) -> Result<Vec<Bytes>, Error>;

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
                let mut rest = bytes;
                for piece in got(ranges.as_ref(), path, at, rest.len())? {
                    let (here, behind) = rest.split_at_mut(piece.len());
                    here.copy_from_slice(&piece);
                    rest = behind;
                }
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
pub(super) fn got(ranges: &dyn Ranges, path: &Path, at: u64, len: usize) -> Result<Vec<Bytes>, Error> {
    let pieces = if len == 0 { Vec::new() } else { ranges.get(at, len)? };
    let found = pieces.iter().map(Bytes::len).sum::<usize>();
    if found != len {
        let message = format!("{}: {len} bytes from {at} on were requested, and {found} have come", path.display());
        return Err(Error::new(ErrorKind::Protocol, message));
    }
    Ok(pieces)
}

/// Calls `with` with all bytes of `pieces` in order, at most [`PIECE`] at a time, and whole blocks each time but the last:
/// a block that lies in two pieces or more is put together first, everything else stays where it is.
///
/// # Errors
/// The first one of `with`.
pub(super) fn by_blocks(pieces: &[Bytes], mut with: impl FnMut(&[u8]) -> Result<(), Error>) -> Result<(), Error> {
    let mut begun: Vec<u8> = Vec::with_capacity(BLOCK);
    for piece in pieces {
        let mut rest = &piece[..];
        if !begun.is_empty() {
            let (head, behind) = rest.split_at(rest.len().min(BLOCK - begun.len()));
            begun.extend_from_slice(head);
            rest = behind;
            if begun.len() < BLOCK {
                continue;
            }
            with(&begun)?;
            begun.clear();
        }
        let (whole, tail) = rest.split_at(rest.len() - rest.len() % BLOCK);
        whole.chunks(PIECE).try_for_each(&mut with)?;
        begun.extend_from_slice(tail);
    }
    if begun.is_empty() { Ok(()) } else { with(&begun) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_that_lie_in_several_pieces_come_whole_and_in_order() {
        let all: Vec<u8> = (0..=250).cycle().take(PIECE + 3000).collect();
        let cuts =
            [vec![], vec![1], vec![511, 512, 513], vec![100, 200, 300, 1025], vec![PIECE + 1024], vec![700, 700]];
        for cuts in cuts {
            let ends = cuts.iter().copied().chain([all.len()]);
            let mut from = 0;
            let pieces: Vec<Bytes> =
                ends.map(|end| Bytes::copy_from_slice(&all[std::mem::replace(&mut from, end)..end])).collect();
            let (mut found, mut sizes) = (Vec::new(), Vec::new());
            by_blocks(&pieces, |bytes| {
                found.extend_from_slice(bytes);
                sizes.push(bytes.len());
                Ok(())
            })
            .unwrap();
            assert_eq!(found, all, "{cuts:?}");
            assert!(sizes.iter().all(|&size| size <= PIECE), "{cuts:?}: {sizes:?}");
            assert!(sizes[..sizes.len() - 1].iter().all(|size| size % 512 == 0), "{cuts:?}: {sizes:?}");
        }
    }
}
