//! A publication: one immutable container laid over memory, with its digests and the readers it has.

use std::any::Any;
use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, Weak};
use std::time::{Duration, Instant};

use bytes::Bytes;
use tensorferry_wire::digest::{self, Algorithm, BLOCK_SIZE, DigestTable, Hasher};
use tokio::sync::Notify;

use crate::error::{Error, ErrorKind};
use crate::filling::{Abandoned, Filled, Filling};
use crate::layout::Layout;
pub(crate) use crate::layout::Segments;
use crate::memory::{Item, Memory};

/// Whether the memory of a publication can change while it is served.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stability {
    /// A private copy: nothing writes to it, and readers may finish after it is withdrawn.
    Private,
    /// Memory of the trainer: once it is withdrawn, not one more byte of it is read.
    Borrowed,
}

/// A body in another format than the container, laid over the same memory: built only when somebody asks for it.
pub trait Alternate: Send + Sync {
    /// Builds the body called `name`, or `None` when there is none of that name.
    ///
    /// # Errors
    /// A message for the one who asked.
    fn render(&self, name: &str) -> Result<Option<Rendered>, String>;
}

/// What [`Alternate::render`] found.
pub enum Rendered {
    /// A body.
    Body {
        /// Its parts, in order.
        parts: Vec<Memory>,
        /// Keeps their memory alive; dropped with the publication.
        owner: Box<dyn Any + Send + Sync>,
    },
    /// Another server has it, at this URL.
    Elsewhere(String),
}

/// One immutable container over memory, ready to be served to many receivers.
pub struct Publication {
    header: Bytes,
    header_digest: u64,
    algorithm: Algorithm,
    payload_start: u64,
    stability: Stability,
    etag: String,
    content: Arc<Segments>,
    /// How far the memory is filled; `None` where it always was.
    filled: Option<Filled>,
    blocks: Vec<BlockDigest>,
    alternate: Option<Box<dyn Alternate>>,
    rendered: Mutex<HashMap<String, RenderedBody>>,
    readers: Mutex<Readers>,
    idle: Condvar,
    // Last: everything above may point into what it owns.
    _owner: Box<dyn Any + Send + Sync>,
}

/// A rendered body, and what keeps its memory alive.
type RenderedBody = (Arc<Segments>, Box<dyn Any + Send + Sync>);

/// Where an alternate body is.
pub(crate) enum Found {
    Here(Arc<Segments>),
    Elsewhere(String),
}

#[derive(Default)]
struct BlockDigest {
    known: AtomicBool,
    value: AtomicU64,
}

impl BlockDigest {
    fn get(&self) -> Option<u64> {
        self.known.load(Ordering::Acquire).then(|| self.value.load(Ordering::Relaxed))
    }

    fn note(&self, value: u64) {
        self.value.store(value, Ordering::Relaxed);
        self.known.store(true, Ordering::Release);
    }
}

#[derive(Default)]
struct Readers {
    active: usize,
    /// When the last one left; `None` if there never was one.
    left: Option<Instant>,
    withdrawn: bool,
    connections: Vec<Weak<Notify>>,
}

impl std::fmt::Debug for Publication {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Publication")
            .field("etag", &self.etag)
            .field("len", &self.content.len())
            .field("stability", &self.stability)
            .finish_non_exhaustive()
    }
}

impl Publication {
    /// Lays `items` out as one container. `owner` keeps the memory of the items alive and is dropped with the
    /// publication.
    ///
    /// # Errors
    /// [`ErrorKind::Invalid`] when the items make no valid container: a name twice, a length that does not fit.
    pub fn new(
        metadata: Vec<(String, String)>,
        items: Vec<Item>,
        stability: Stability,
        owner: Box<dyn Any + Send + Sync>,
    ) -> Result<Self, Error> {
        Ok(Self::lay_out(metadata, items, stability, owner)?.0)
    }

    /// The same over memory that is filled only after it is published. Until the [`Filling`] says that bytes are final,
    /// nobody reads them; control entries and whatever else comes early in the payload are sent meanwhile.
    ///
    /// # Errors
    /// As [`Publication::new`].
    pub fn filling(
        metadata: Vec<(String, String)>,
        items: Vec<Item>,
        stability: Stability,
        owner: Box<dyn Any + Send + Sync>,
    ) -> Result<(Self, Filling), Error> {
        let (mut publication, starts) = Self::lay_out(metadata, items, stability, owner)?;
        let filling = Filling::new(publication.payload_start, starts);
        publication.filled = Some(filling.readers());
        Ok((publication, filling))
    }

    /// A publication, and where each item starts in its payload.
    fn lay_out(
        metadata: Vec<(String, String)>,
        items: Vec<Item>,
        stability: Stability,
        owner: Box<dyn Any + Send + Sync>,
    ) -> Result<(Self, Vec<u64>), Error> {
        let Layout { header, content, starts, .. } = Layout::new(metadata, items, crate::arena::ALIGNMENT)?;
        let payload_start = header.len() as u64;
        let content = Arc::new(content);
        let count = usize::try_from(digest::block_count(content.len() - payload_start))
            .map_err(|e| Error::caused(ErrorKind::Invalid, "too many blocks", e))?;
        let publication = Self {
            header_digest: 0,
            algorithm: Algorithm::Crc64,
            header,
            payload_start,
            stability,
            etag: String::new(),
            content,
            filled: None,
            blocks: std::iter::repeat_with(BlockDigest::default).take(count).collect(),
            alternate: None,
            rendered: Mutex::default(),
            readers: Mutex::default(),
            idle: Condvar::new(),
            _owner: owner,
        };
        Ok((publication, starts))
    }

    /// Adds bodies in another format, built when they are asked for.
    #[must_use]
    pub fn with_alternate(mut self, alternate: Box<dyn Alternate>) -> Self {
        self.alternate = Some(alternate);
        self
    }

    /// Gives it its entity tag and the way it is checksummed. Nothing of it was checksummed before.
    pub(crate) fn seal(&mut self, etag: String, algorithm: &Algorithm) {
        self.etag = etag;
        self.algorithm = algorithm.clone();
        self.header_digest = algorithm.checksum(&self.header);
    }

    /// The entity tag: names the process, and the snapshot within it. Empty until it is published.
    #[must_use]
    pub fn etag(&self) -> &str {
        &self.etag
    }

    /// Whether the memory is private or the trainer's.
    #[must_use]
    pub fn stability(&self) -> Stability {
        self.stability
    }

    /// Length of the whole container in bytes, header included.
    #[must_use]
    pub fn total_len(&self) -> u64 {
        self.content.len()
    }

    pub(crate) fn header(&self) -> &Bytes {
        &self.header
    }

    pub(crate) fn payload_start(&self) -> u64 {
        self.payload_start
    }

    pub(crate) fn content(&self) -> &Arc<Segments> {
        &self.content
    }

    /// Whether the first `end` bytes of the container are final and may be read.
    pub(crate) fn is_ready(&self, end: u64) -> bool {
        self.filled.as_ref().is_none_or(|filled| filled.is_ready(end))
    }

    /// Waits until they are. Whoever waits holds nothing of the publication by it.
    pub(crate) fn ready(&self, end: u64) -> impl Future<Output = Result<(), Abandoned>> + Send + use<> {
        let filled = self.filled.clone();
        async move {
            match filled {
                Some(filled) => filled.ready(end).await,
                None => Ok(()),
            }
        }
    }

    /// Whether it is `filling` that fills its memory.
    pub(crate) fn is_filled_by(&self, filling: &Filling) -> bool {
        self.filled.as_ref().is_some_and(|filled| filled.is_by(filling))
    }

    fn readers(&self) -> MutexGuard<'_, Readers> {
        self.readers.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Checksums block `index` as it is now.
    fn digest_block(&self, index: usize) -> u64 {
        let value = self.digest_payload(index as u64 * BLOCK_SIZE, BLOCK_SIZE);
        self.blocks[index].note(value);
        value
    }

    /// Checksums up to `len` bytes from `start` of the payload on.
    fn digest_payload(&self, start: u64, len: u64) -> u64 {
        let start = self.payload_start + start;
        let mut hasher = self.algorithm.hasher();
        self.content.visit(start, (start + len).min(self.content.len()), |region| {
            // SAFETY: a lease on this publication is held by every caller, and the owner outlives leases.
            hasher.update(unsafe { region.as_slice() });
            true
        });
        hasher.finish()
    }
}

/// A reader's hold on a publication: while one exists, its memory may be read.
pub(crate) struct Lease {
    publication: Arc<Publication>,
}

impl Lease {
    /// A lease for the connection that `cut` ends, or `None` when the publication was withdrawn.
    pub(crate) fn take(publication: &Arc<Publication>, cut: &Arc<Notify>) -> Option<Arc<Self>> {
        let mut readers = publication.readers();
        if readers.withdrawn {
            return None;
        }
        readers.active += 1;
        readers.connections.retain(|c| c.strong_count() > 0);
        if !readers.connections.iter().any(|c| std::ptr::eq(c.as_ptr(), Arc::as_ptr(cut))) {
            readers.connections.push(Arc::downgrade(cut));
        }
        drop(readers);
        Some(Arc::new(Self { publication: Arc::clone(publication) }))
    }

    pub(crate) fn publication(&self) -> &Publication {
        &self.publication
    }

    pub(crate) fn publication_arc(&self) -> Arc<Publication> {
        Arc::clone(&self.publication)
    }

    /// The block that starts at byte `offset` of the container, if it ends before `end` and its checksum has to be taken
    /// when it is sent: not yet known, or of borrowed memory, which may have changed.
    pub(crate) fn block_to_digest(&self, offset: u64, end: u64) -> Option<usize> {
        let publication = &*self.publication;
        let relative = offset.checked_sub(publication.payload_start)?;
        let whole = (relative + BLOCK_SIZE).min(publication.content.len() - publication.payload_start);
        let wanted = relative.is_multiple_of(BLOCK_SIZE) && whole <= end - publication.payload_start;
        let index = usize::try_from(relative / BLOCK_SIZE).ok().filter(|_| wanted)?;
        let known = publication.blocks.get(index)?.get();
        (known.is_none() || publication.stability == Stability::Borrowed).then_some(index)
    }

    /// Whether a block ends at byte `offset` of the container.
    pub(crate) fn is_block_end(&self, offset: u64) -> bool {
        let publication = &*self.publication;
        offset == publication.content.len()
            || offset.checked_sub(publication.payload_start).is_some_and(|o| o.is_multiple_of(BLOCK_SIZE))
    }

    /// What takes a block's checksum.
    pub(crate) fn hasher(&self) -> Hasher {
        self.publication.algorithm.hasher()
    }

    /// Block `index` was sent with this checksum.
    pub(crate) fn note_digest(&self, index: usize, value: u64) {
        self.publication.blocks[index].note(value);
    }

    /// Takes the checksum of the block at byte `offset` of the container where it has to be: called right before the
    /// block is sent, while it is in cache anyway.
    pub(crate) fn digest_before_sending(&self, offset: u64, end: u64) {
        if let Some(index) = self.block_to_digest(offset, end) {
            self.publication.digest_block(index);
        }
    }

    /// The digests of the blocks in `runs`, of `grain` bytes each, of which there must be so many. `None` when the
    /// publication was withdrawn meanwhile.
    pub(crate) fn digests(&self, runs: &[(u64, u64)], grain: u64) -> Option<DigestTable> {
        let publication = &*self.publication;
        let mut blocks = Vec::new();
        for (first, index) in runs.iter().flat_map(|&(first, end)| (first..end).map(move |index| (first, index))) {
            let look = index == first || (index * grain).is_multiple_of(BLOCK_SIZE);
            if look && publication.stability == Stability::Borrowed && publication.readers().withdrawn {
                return None;
            }
            blocks.push(match usize::try_from(index) {
                Ok(index) if grain == BLOCK_SIZE => {
                    publication.blocks[index].get().unwrap_or_else(|| publication.digest_block(index))
                }
                _ => publication.digest_payload(index * grain, grain),
            });
        }
        Some(DigestTable {
            header: publication.header_digest,
            payload_len: publication.content.len() - publication.payload_start,
            blocks,
        })
    }

    /// Waits until the first `end` blocks of `grain` bytes are final.
    pub(crate) fn blocks_ready(
        &self,
        end: u64,
        grain: u64,
    ) -> impl Future<Output = Result<(), Abandoned>> + Send + use<> {
        let publication = &*self.publication;
        let end = publication.payload_start.saturating_add(end.saturating_mul(grain));
        publication.ready(end.min(publication.content.len()))
    }

    /// How many blocks of `grain` bytes the payload has.
    pub(crate) fn block_count(&self, grain: u64) -> u64 {
        (self.publication.content.len() - self.publication.payload_start).div_ceil(grain)
    }

    /// Whether the digests of these blocks are known already, so that asking costs nothing.
    pub(crate) fn digests_known(&self, runs: &[(u64, u64)], grain: u64) -> bool {
        let known = |&(first, end): &(u64, u64)| {
            let (Ok(first), Ok(end)) = (usize::try_from(first), usize::try_from(end)) else { return false };
            self.publication.blocks[first..end].iter().all(|b| b.get().is_some())
        };
        grain == BLOCK_SIZE && runs.iter().all(known)
    }
}

impl Drop for Lease {
    fn drop(&mut self) {
        let mut readers = self.publication.readers();
        readers.active -= 1;
        readers.left = Some(Instant::now());
        if readers.active == 0 {
            self.publication.idle.notify_all();
        }
    }
}

impl Publication {
    /// The alternate body called `name`; built on the first call, so this may take long.
    pub(crate) fn render(&self, name: &str) -> Result<Option<Found>, String> {
        let Some(alternate) = &self.alternate else { return Ok(None) };
        // The lock is held while rendering: two peers that ask for the same body wait for one rendering.
        let mut rendered = self.rendered.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((segments, _)) = rendered.get(name) {
            return Ok(Some(Found::Here(Arc::clone(segments))));
        }
        let (parts, owner) = match alternate.render(name)? {
            Some(Rendered::Body { parts, owner }) => (parts, owner),
            Some(Rendered::Elsewhere(url)) => return Ok(Some(Found::Elsewhere(url))),
            None => return Ok(None),
        };
        let segments = Arc::new(Segments::new(parts));
        rendered.insert(name.to_owned(), (Arc::clone(&segments), owner));
        Ok(Some(Found::Here(segments)))
    }

    /// No lease is given from here on.
    pub(crate) fn close(&self) {
        self.readers().withdrawn = true;
    }

    /// How long nobody has read; `None` while somebody does.
    pub(crate) fn idle_for(&self) -> Option<Duration> {
        let readers = self.readers();
        let left = readers.left.filter(|_| readers.active == 0);
        (readers.active == 0).then(|| left.map_or(Duration::MAX, |left| left.elapsed()))
    }

    /// Whether there ever was a reader.
    pub(crate) fn was_read(&self) -> bool {
        let readers = self.readers();
        readers.active > 0 || readers.left.is_some()
    }

    /// How many readers hold a lease.
    pub(crate) fn active(&self) -> usize {
        self.readers().active
    }

    /// Waits until no reader is left, at most until `deadline`; says whether that is so.
    pub(crate) fn drain(&self, deadline: Instant) -> bool {
        let mut readers = self.readers();
        while readers.active > 0 {
            let Some(left) = deadline.checked_duration_since(Instant::now()) else { return false };
            readers = self.idle.wait_timeout(readers, left).unwrap_or_else(PoisonError::into_inner).0;
        }
        true
    }

    /// Ends the connections of all readers.
    pub(crate) fn cut(&self) {
        for connection in self.readers().connections.drain(..).filter_map(|c| c.upgrade()) {
            connection.notify_one();
        }
    }

    /// Cuts until the last lease is gone. Connections end at their next poll, so this takes no longer than a poll does.
    pub(crate) fn cut_and_wait(&self) {
        self.cut();
        let mut readers = self.readers();
        while readers.active > 0 {
            readers = self.idle.wait(readers).unwrap_or_else(PoisonError::into_inner);
        }
    }
}
