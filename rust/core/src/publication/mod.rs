//! A publication: one immutable container laid over memory, with its digests and the readers it has.

mod alternate;
mod digests;
mod lease;
mod readiness;
mod store;

use std::any::Any;
use std::collections::HashMap;
use std::sync::{Arc, Condvar, Mutex};

use bytes::Bytes;
use tensorferry_wire::digest::{self, Algorithm};

pub(crate) use self::alternate::Found;
use self::alternate::RenderedBody;
pub use self::alternate::{Alternate, Rendered};
use self::digests::BlockDigest;
use self::lease::Readers;
pub(crate) use self::lease::{LINGER, Lease};
pub(crate) use self::readiness::Abandoned;
pub use self::readiness::Readiness;
use self::readiness::ReadinessWatch;
pub(crate) use self::store::{Asked, Lookup};
pub use self::store::{Store, Withdrawn};
use crate::error::{Error, ErrorKind};
use crate::memory::ALIGNMENT;
use crate::payload::{Item, Layout, Segments};

/// Whether the memory of a publication can change while it is served.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stability {
    /// A private copy: nothing writes to it, and readers may finish after it is withdrawn.
    Private,
    /// Memory of the trainer: once it is withdrawn, not one more byte of it is read.
    Borrowed,
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
    filled: Option<ReadinessWatch>,
    blocks: Vec<BlockDigest>,
    alternate: Option<Box<dyn Alternate>>,
    rendered: Mutex<HashMap<String, RenderedBody>>,
    readers: Mutex<Readers>,
    idle: Condvar,
    // Last: everything above may point into what it owns.
    _owner: Box<dyn Any + Send + Sync>,
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

    /// The same over memory that is filled only after it is published. Until the [`Readiness`] says that bytes are final,
    /// nobody reads them; control entries and whatever else comes early in the payload are sent meanwhile.
    ///
    /// # Errors
    /// As [`Publication::new`].
    pub fn with_readiness(
        metadata: Vec<(String, String)>,
        items: Vec<Item>,
        stability: Stability,
        owner: Box<dyn Any + Send + Sync>,
    ) -> Result<(Self, Readiness), Error> {
        let (mut publication, starts) = Self::lay_out(metadata, items, stability, owner)?;
        let filling = Readiness::new(publication.payload_start, starts);
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
        let Layout { header, content, starts, .. } = Layout::new(metadata, items, ALIGNMENT)?;
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

    fn payload_len(&self) -> u64 {
        self.content.len() - self.payload_start
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
    pub(crate) fn is_filled_by(&self, filling: &Readiness) -> bool {
        self.filled.as_ref().is_some_and(|filled| filled.is_by(filling))
    }
}
