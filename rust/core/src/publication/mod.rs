//! Publications: immutable containers laid over memory, their digests, their readers, and the store that serves one of
//! them.
//!
//! | module | holds |
//! |---|---|
//! | `store` | [`Store`]: at most one publication behind a gate that is open or closed |
//! | `lookup` | what a request for a step finds there |
//! | `lease` | the readers: memory may be read exactly while a lease exists |
//! | `readers` | the connections that read, and whether their receives are over |
//! | `connection` | what ends a reader's connection, and whether its peer stands still |
//! | `reading` | the bytes behind a lease |
//! | `readiness` | [`Readiness`]: how much of a publication's memory is final |
//! | `digests` | checksums of blocks, computed once or on demand |
//! | `proof` | the one digest table that serves all members of a swarm |
//! | `relayed` | publications of what is being received, block by block |
//! | `tracker` | which blocks receivers of a publication fetch, and from whom |
//! | `alternate` | bodies in other formats, built when they are first asked for |
//!
//! Invariants:
//!
//! * the header, the entity tag and the layout of a publication never change;
//! * its owner is dropped only when nobody holds a lease and the store has released it;
//! * after [`Store::withdraw`] returns, not one more byte of borrowed memory is read;
//! * an entity tag is never used for a second snapshot; what relays one has the tag of its source.

mod alternate;
mod connection;
mod digests;
mod lease;
mod lookup;
mod proof;
mod readers;
mod readiness;
mod reading;
mod relayed;
mod store;
mod tracker;

use std::any::Any;
use std::sync::{Arc, Condvar, Mutex};

use bytes::Bytes;
use tensorferry_wire::digest::{self, Algorithm};

use self::alternate::RenderedBodies;
pub use self::alternate::{Alternate, Rendered};
pub(crate) use self::connection::{ConnectionHandle, LOOK};
use self::digests::{BlockDigest, Passes};
pub(crate) use self::lease::{LINGER, Lease};
pub(crate) use self::lookup::{Asked, Lookup};
pub(crate) use self::proof::Asked as ProofAsked;
use self::proof::Proof;
use self::readers::Readers;
pub(crate) use self::readiness::Abandoned;
pub use self::readiness::Readiness;
use self::readiness::ReadinessWatch;
pub(crate) use self::reading::LeasedSegments;
pub use self::store::{Store, Withdrawn};
use self::tracker::Tracker;
use crate::error::{Error, ErrorKind};
use crate::memory::ALIGNMENT;
use crate::payload::{Backing, Item, Layout, Segments};
use crate::swarm::BlockMap;

/// Whether the memory of a publication can change while it is served. It decides what a withdrawal does, and whether
/// checksums are kept.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stability {
    /// A private copy: nothing writes to it. Readers may finish after a withdrawal, which does not wait for them, and a
    /// block's checksum is computed once.
    Private,
    /// Memory of the trainer: a withdrawal waits for readers or cuts them off, and not one more byte is read after it.
    /// Checksums are computed anew whenever they are asked for.
    Borrowed,
}

/// One immutable container over memory, ready to be served to many receivers.
///
/// ```
/// use bytes::Bytes;
/// use tensorferry_core::{ErrorKind, Item, Publication, Stability};
/// use tensorferry_wire::dtype::Dtype;
///
/// let item = |name| Item::bytes(name, Dtype::F32, &[2], Bytes::from(vec![0; 8]));
/// let publish = |items| Publication::new(Vec::new(), items, Stability::Private, Box::new(()));
/// assert!(publish(vec![item("a"), item("b")]).is_ok());
/// assert_eq!(publish(vec![item("a"), item("a")]).unwrap_err().kind(), ErrorKind::Invalid);
/// ```
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
    passes: Passes,
    /// What tells whether the memory is still what was published, if it may change by itself.
    backing: Option<Box<dyn Backing>>,
    /// Which blocks may be read, where it is received while it is served.
    relayed: Option<Arc<BlockMap>>,
    tracker: Tracker,
    proof: Proof,
    alternate: Option<Box<dyn Alternate>>,
    rendered: RenderedBodies,
    readers: Mutex<Readers>,
    idle: Condvar,
    // The last field, so that it is dropped last: everything above may point into its memory.
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
    /// Lays `items` out as one container; no byte of them is copied. `owner` keeps the memory of the items alive and is
    /// dropped with the publication.
    ///
    /// # Errors
    /// [`ErrorKind::Invalid`] when items and metadata make no valid container: two items of one name, a length that
    /// does not fit.
    pub fn new(
        metadata: Vec<(String, String)>,
        items: Vec<Item>,
        stability: Stability,
        owner: Box<dyn Any + Send + Sync>,
    ) -> Result<Self, Error> {
        Ok(Self::lay_out(metadata, items, stability, owner)?.0)
    }

    /// The same over memory that is still being written when it is published. Nobody reads bytes that the [`Readiness`]
    /// has not declared final; those at the beginning of the payload, control entries among them, are sent meanwhile.
    ///
    /// ```
    /// use bytes::Bytes;
    /// use tensorferry_core::{Item, Publication, Stability};
    /// use tensorferry_wire::dtype::Dtype;
    ///
    /// # fn main() -> Result<(), tensorferry_core::Error> {
    /// let items = vec![Item::bytes("w", Dtype::U8, &[8192], Bytes::from(vec![0; 8192]))];
    /// let (publication, readiness) =
    ///     Publication::with_readiness(Vec::new(), items, Stability::Private, Box::new(()))?;
    /// // ... publish it, copy the first half from the device ...
    /// readiness.raise(4096);
    /// // ... and the second.
    /// readiness.finish();
    /// # drop(publication);
    /// # Ok(())
    /// # }
    /// ```
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
            passes: Passes::default(),
            backing: None,
            relayed: None,
            tracker: Tracker::default(),
            proof: Proof::default(),
            alternate: None,
            rendered: RenderedBodies::default(),
            readers: Mutex::default(),
            idle: Condvar::new(),
            _owner: owner,
        };
        Ok((publication, starts))
    }

    /// Says what tells whether the memory is still what was published. Once it is not, requests are answered as if the
    /// snapshot were withdrawn. The checksums with which receivers compare what they have got are those of `backing`, and
    /// a block whose checksum is not what it was before counts as a change.
    #[must_use]
    pub fn with_backing(mut self, backing: Box<dyn Backing>) -> Self {
        self.backing = Some(backing);
        self
    }

    /// Sets the entity tag and the algorithm for checksums, and computes that of the header. To be called right before it
    /// is served: no block has been checksummed yet.
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

    /// Whether the memory is still what was published, as far as something tells.
    pub(crate) fn is_intact(&self) -> bool {
        self.backing.as_ref().is_none_or(|backing| backing.is_unchanged())
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

    /// Whether the first `end` bytes of the container are final and may be read.
    pub(crate) fn is_ready(&self, end: u64) -> bool {
        self.filled.as_ref().is_none_or(|filled| filled.is_ready(end))
    }

    /// Waits until the first `end` bytes are final. The future holds no part of the publication, so a withdrawal does
    /// not wait for it.
    pub(crate) fn ready(&self, end: u64) -> impl Future<Output = Result<(), Abandoned>> + Send + use<> {
        let filled = self.filled.clone();
        async move {
            match filled {
                Some(filled) => filled.ready(end).await,
                None => Ok(()),
            }
        }
    }

    /// Whether the memory is filled by the producer that has `filling`.
    pub(crate) fn is_filled_by(&self, filling: &Readiness) -> bool {
        self.filled.as_ref().is_some_and(|filled| filled.is_by(filling))
    }
}

#[cfg(test)]
pub(crate) mod fixtures {
    use tensorferry_wire::dtype::Dtype;

    use super::{Publication, Stability};
    use crate::payload::Item;

    /// One entry of these bytes.
    pub(crate) fn publication(stability: Stability, bytes: Vec<u8>) -> Publication {
        let item = Item::bytes("w", Dtype::U8, &[bytes.len() as u64], bytes.into());
        Publication::new(Vec::new(), vec![item], stability, Box::new(())).unwrap()
    }
}
