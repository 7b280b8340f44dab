//! Publications of what is being received: the container of another source, block by block.

use std::sync::{Arc, Condvar, Mutex};

use bytes::Bytes;
use tensorferry_wire::digest::Algorithm;

use super::alternate::RenderedBodies;
use super::digests::Passes;
use super::proof::Proof;
use super::tracker::Tracker;
use super::{Publication, Stability};
use crate::memory::Memory;
use crate::payload::Segments;
use crate::swarm::{BlockMap, Relayed};

impl Publication {
    /// The container that is being received as `relayed` says. It has the entity tag of the source, and no digests: only
    /// the source vouches for its blocks. The header is not in it, though it has its length.
    pub(crate) fn relayed(relayed: Relayed) -> Self {
        let Relayed { etag, payload_start, payload, blocks, .. } = relayed;
        let header = Bytes::from(vec![0; payload_start]);
        let parts = std::iter::once(Memory::from(header.clone())).chain(payload).collect();
        Self {
            header_digest: 0,
            algorithm: Algorithm::Crc64,
            header,
            payload_start: payload_start as u64,
            stability: Stability::Borrowed,
            etag,
            content: Arc::new(Segments::new(parts)),
            filled: None,
            blocks: Vec::new(),
            passes: Passes::default(),
            backing: None,
            relayed: Some(blocks),
            tracker: Tracker::default(),
            proof: Proof::default(),
            alternate: None,
            rendered: RenderedBodies::default(),
            readers: Mutex::default(),
            idle: Condvar::new(),
            _owner: Box::new(()),
        }
    }

    /// Which blocks may be read, where this is a container that is being received.
    pub(crate) fn block_map(&self) -> Option<&Arc<BlockMap>> {
        self.relayed.as_ref()
    }
}
