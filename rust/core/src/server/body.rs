//! The response body: frames straight out of a publication's memory.
//!
//! Large regions are handed to hyper without a copy, each frame holding a lease; regions below [`GATHER_BELOW`] are
//! gathered into frames, since writing many tiny pieces costs more than copying them. A frame ends where a block of
//! digests does, so that the block's checksum is taken while it is in cache.
//!
//! A [`MemoryBody`] that is dropped before its end tells its lease so: the receiver may come back for the rest.

use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

use bytes::Bytes;
use http_body::{Frame, SizeHint};
use tensorferry_wire::digest::{BLOCK_SIZE, Hasher};
use tokio::time::Sleep;

use super::throttle::Throttle;
use crate::publication::{Abandoned, Lease, LeasedSegments};

/// Regions smaller than this are gathered by copying: one write of many tiny pieces costs more than the copy.
const GATHER_BELOW: usize = 16 << 10;
/// How much is gathered into one frame.
const GATHER_FRAME: usize = 256 << 10;

/// As much as is checksummed before it is copied, while it is in the nearest cache.
const CACHED: usize = 16 << 10;

/// Bytes served, for the metrics and for noticing a transfer that no longer moves.
#[derive(Debug, Default)]
pub(crate) struct Progress {
    pub(crate) bytes: AtomicU64,
}

/// The body of a response: a short message, or memory of a publication.
pub(crate) enum ServedBody {
    Message(Option<Bytes>),
    Memory(Box<MemoryBody>),
}

/// `[at, end)` of `content` and then the rest, read under a lease.
pub(crate) struct MemoryBody {
    pub(crate) content: LeasedSegments,
    pub(crate) lease: Arc<Lease>,
    pub(crate) at: u64,
    pub(crate) end: u64,
    /// The ranges that follow, none of them empty.
    pub(crate) rest: std::vec::IntoIter<(u64, u64)>,
    /// Whether this is the container itself, whose blocks may be checksummed right before they are sent.
    pub(crate) digest: bool,
    /// The block that is being copied, and its checksum so far.
    pub(crate) digesting: Option<(usize, Hasher)>,
    pub(crate) progress: Arc<[Arc<Progress>; 2]>,
    /// The cap on what the server sends, the bytes that it has a turn for, and the wait for that turn.
    pub(crate) throttle: Option<Arc<Throttle>>,
    pub(crate) reserved: u64,
    pub(crate) wait: Option<Pin<Box<Sleep>>>,
    /// The wait for bytes that are not final yet.
    pub(crate) filling: Option<Wait>,
    /// Dropped with the body: the connection counts its open answers by it.
    pub(crate) _open: Box<dyn std::any::Any + Send + Sync>,
}

/// Ends when bytes are final, or never will be.
pub(crate) type Wait = Pin<Box<dyn Future<Output = Result<(), Abandoned>> + Send>>;

impl MemoryBody {
    /// The next frame: one large region as it is, or several small ones gathered; `None` at the end.
    fn next_frame(&mut self) -> Option<Bytes> {
        if self.is_over() {
            return None;
        }
        if self.digest {
            self.lease.digest_before_sending(self.at, self.end);
        }
        let mut gathered = Vec::new();
        loop {
            let (stop, before, runs) = (self.frame_end(), gathered.len(), self.rest.len());
            let mut whole = None;
            self.content.visit(self.at, stop, |region| {
                if gathered.is_empty() && region.len() >= GATHER_BELOW {
                    whole = Some(region.into_frame());
                    return false;
                }
                if region.len() >= GATHER_BELOW || gathered.len() + region.len() > GATHER_FRAME {
                    return false;
                }
                if gathered.is_empty() {
                    gathered.reserve(GATHER_FRAME);
                }
                gathered.extend_from_slice(region.bytes());
                true
            });
            if let Some(frame) = whole {
                self.advance(frame.len());
                return Some(frame);
            }
            self.advance(gathered.len() - before);
            // Runs are short: the next one goes into the same frame.
            if self.rest.len() == runs {
                return Some(Bytes::from(gathered));
            }
        }
    }

    /// Copies the next bytes into `into`, as many as there is room for, and computes missing checksums on the way;
    /// returns how many bytes were copied.
    pub(crate) fn copy_next(&mut self, into: &mut [u8]) -> usize {
        let mut filled = 0;
        while filled < into.len() && !self.is_over() {
            if self.digest
                && let Some(block) = self.lease.block_to_digest(self.at, self.end)
            {
                self.digesting = Some((block, self.lease.hasher()));
            }
            let before = filled;
            let stop = self.frame_end().min(self.at + (into.len() - filled) as u64);
            self.content.visit(self.at, stop, |region| {
                for piece in region.bytes().chunks(CACHED) {
                    // The checksum is of the source's own bytes, since the receiver maps the shared memory as well.
                    if let Some((_, hasher)) = &mut self.digesting {
                        hasher.update(piece);
                    }
                    into[filled..filled + piece.len()].copy_from_slice(piece);
                    filled += piece.len();
                }
                true
            });
            self.advance(filled - before);
            if let Some((block, hasher)) = self.digesting.take_if(|_| self.lease.is_block_end(self.at)) {
                self.lease.note_digest(block, hasher.finish());
            }
        }
        filled
    }

    /// Bytes that were not read yet.
    pub(crate) fn left(&self) -> u64 {
        let rest: u64 = self.rest.as_slice().iter().map(|(at, end)| end - at).sum();
        self.end - self.at + rest
    }

    /// Whether all of it was read.
    pub(crate) fn is_over(&self) -> bool {
        self.at >= self.end
    }

    /// Notes that `len` more bytes were read: moves on, and counts them.
    fn advance(&mut self, len: usize) {
        self.at += len as u64;
        if self.at >= self.end
            && let Some(run) = self.rest.next()
        {
            (self.at, self.end) = run;
        }
        for progress in self.progress.iter() {
            progress.bytes.fetch_add(len as u64, Ordering::Relaxed);
        }
        if let Some(throttle) = &self.throttle {
            let len = len as u64;
            // A frame of several short runs may be longer than its turn.
            if len > self.reserved {
                let _ = throttle.reserve(len - self.reserved, Instant::now());
            }
            self.reserved = self.reserved.saturating_sub(len);
        }
    }

    /// Whether the bytes up to `stop` are final. Another format is built only when all of the container is.
    pub(crate) fn is_filled(&self, stop: u64) -> bool {
        !self.digest || self.lease.publication().is_ready(stop)
    }

    /// Waits until the bytes up to `stop` are final.
    pub(crate) fn poll_filled(&mut self, stop: u64, context: &mut Context<'_>) -> Poll<Result<(), Abandoned>> {
        if let Some(filling) = &mut self.filling {
            let filled = std::task::ready!(filling.as_mut().poll(context));
            self.filling = None;
            filled?;
        }
        while !self.is_filled(stop) {
            let mut filling = Box::pin(self.lease.publication().ready(stop));
            match filling.as_mut().poll(context) {
                Poll::Ready(filled) => filled?,
                Poll::Pending => {
                    self.filling = Some(filling);
                    return Poll::Pending;
                }
            }
        }
        Poll::Ready(Ok(()))
    }

    /// Where the next `len` bytes end, or all that are left.
    pub(crate) fn end_of(&self, len: u64) -> u64 {
        self.end.min(self.at.saturating_add(len))
    }

    /// Takes a turn for the bytes up to `stop` under the cap on what the server sends; returns how long to wait for it,
    /// `None` if they may be sent now.
    pub(crate) fn reserve(&mut self, stop: u64) -> Option<Duration> {
        // What is left of a turn is sent first.
        let throttle = self.throttle.as_ref().filter(|_| self.reserved == 0 && self.at < stop)?;
        self.reserved = stop - self.at;
        Some(throttle.reserve(self.reserved, Instant::now())).filter(|delay| !delay.is_zero())
    }

    /// Waits until the cap on what the server sends allows the bytes up to `stop`.
    fn poll_admitted(&mut self, stop: u64, context: &mut Context<'_>) -> Poll<()> {
        if self.wait.is_none()
            && let Some(delay) = self.reserve(stop)
        {
            self.wait = Some(Box::pin(tokio::time::sleep(delay)));
        }
        if let Some(wait) = &mut self.wait {
            std::task::ready!(wait.as_mut().poll(context));
            self.wait = None;
        }
        Poll::Ready(())
    }

    /// A frame ends where a digest block does, so that the checksum of the next one is taken just before it is sent; and
    /// where the turn of this connection does.
    fn frame_end(&self) -> u64 {
        let origin = if self.digest { self.lease.publication().payload_start() } else { 0 };
        let block_end = match self.at.checked_sub(origin) {
            Some(relative) => origin + (relative / BLOCK_SIZE + 1) * BLOCK_SIZE,
            None => origin,
        };
        let turn = self.throttle.as_ref().map_or(u64::MAX, |throttle| throttle.most_per_turn());
        self.end_of(turn).min(block_end)
    }
}

impl Drop for MemoryBody {
    fn drop(&mut self) {
        if !self.is_over() {
            self.lease.break_off();
        }
        if let Some(throttle) = self.throttle.as_ref().filter(|_| self.reserved > 0) {
            throttle.give_back(self.reserved);
        }
    }
}

impl http_body::Body for ServedBody {
    type Data = Bytes;
    type Error = Abandoned;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Abandoned>>> {
        let frame = match &mut *self {
            Self::Message(bytes) => bytes.take().filter(|b| !b.is_empty()),
            Self::Memory(body) => {
                let stop = body.frame_end();
                if let Err(abandoned) = std::task::ready!(body.poll_filled(stop, context)) {
                    return Poll::Ready(Some(Err(abandoned)));
                }
                std::task::ready!(body.poll_admitted(stop, context));
                body.next_frame()
            }
        };
        Poll::Ready(frame.map(|f| Ok(Frame::data(f))))
    }

    fn is_end_stream(&self) -> bool {
        match self {
            Self::Message(bytes) => bytes.as_ref().is_none_or(Bytes::is_empty),
            Self::Memory(body) => body.is_over(),
        }
    }

    fn size_hint(&self) -> SizeHint {
        SizeHint::with_exact(match self {
            Self::Message(bytes) => bytes.as_ref().map_or(0, |b| b.len() as u64),
            Self::Memory(body) => body.left(),
        })
    }
}

#[cfg(test)]
mod tests {
    use std::ptr::null_mut;

    use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
    use rustix::mm::{MapFlags, ProtFlags, mmap, mmap_anonymous, munmap};
    use tensorferry_wire::digest;
    use tensorferry_wire::dtype::Dtype;

    use super::*;
    use crate::payload::Item;
    use crate::publication::{Publication, Stability};

    /// Memory whose pages are all one: what is read from it is not what was written.
    struct Forgetful {
        start: *mut u8,
        len: usize,
    }

    impl Forgetful {
        fn new(len: usize) -> Self {
            // SAFETY: a question without arguments.
            let page = usize::try_from(unsafe { libc::sysconf(libc::_SC_PAGESIZE) }).unwrap();
            let file = memfd_create("tensorferry-test", MemfdFlags::CLOEXEC).unwrap();
            ftruncate(&file, page as u64).unwrap();
            let protection = ProtFlags::READ | ProtFlags::WRITE;
            // SAFETY: new memory, at no address in particular.
            let start = unsafe { mmap_anonymous(null_mut(), len, protection, MapFlags::PRIVATE) }.unwrap();
            for at in (0..len).step_by(page) {
                // SAFETY: a page of the memory that was just made, which nobody uses.
                unsafe { mmap(start.byte_add(at), page, protection, MapFlags::SHARED | MapFlags::FIXED, &file, 0) }
                    .unwrap();
            }
            Self { start: start.cast(), len }
        }

        fn slot(&mut self) -> &mut [u8] {
            // SAFETY: readable and writable memory of this length, which nobody else knows.
            unsafe { std::slice::from_raw_parts_mut(self.start, self.len) }
        }
    }

    impl Drop for Forgetful {
        fn drop(&mut self) {
            // SAFETY: the memory that `new` has made, of which no slice is left.
            let _ = unsafe { munmap(self.start.cast(), self.len) };
        }
    }

    #[test]
    fn checksums_are_of_the_memory_that_was_read_and_not_of_the_slot() {
        let payload: Vec<u8> =
            (0..2 * BLOCK_SIZE + 5).map(|at| u8::try_from(at >> 12 & 0xFF).unwrap_or_default()).collect();
        let shape = [payload.len() as u64];
        let item = Item::bytes("w", Dtype::U8, &shape, payload.clone().into());
        let publication = Publication::new(Vec::new(), vec![item], Stability::Private, Box::new(())).unwrap();
        let lease = Lease::take(&Arc::new(publication), &Arc::default(), true).unwrap();
        let content = lease.content();
        let mut body = MemoryBody {
            at: 0,
            end: content.len(),
            content,
            lease: Arc::clone(&lease),
            rest: Vec::new().into_iter(),
            digest: true,
            digesting: None,
            progress: Arc::default(),
            throttle: None,
            reserved: 0,
            wait: None,
            filling: None,
            _open: Box::new(()),
        };
        let mut slot = Forgetful::new(256 << 10);
        while !body.is_over() {
            body.copy_next(slot.slot());
        }
        assert!(lease.digests_known(&[(0, 3)], BLOCK_SIZE), "they were taken on the way");
        let expected: Vec<u64> = payload.chunks(1 << 20).map(digest::checksum).collect();
        assert_eq!(lease.digests(&[(0, 3)], BLOCK_SIZE).unwrap().blocks, expected);
    }
}
