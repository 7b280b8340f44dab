//! A fetch of a container from a file or from memory, wave by wave.

use std::sync::Arc;

use super::{FileOptions, FileReport, Stored};
use crate::error::{Error, ErrorKind};
use crate::memory::Arena;
use crate::payload::{StagedRun, Waves};

/// A fetch through a bounded buffer that is under way.
#[derive(Debug)]
pub struct StoredWaves {
    pub(super) stored: Arc<Stored>,
    pub(super) waves: Waves,
    pub(super) options: FileOptions,
    pub(super) report: FileReport,
}

impl StoredWaves {
    /// Fetches the next wave; the runs that pass through the waves' memory are then at `address`. `None` after the last
    /// one.
    ///
    /// # Errors
    /// As [`Stored::fetch`].
    ///
    /// # Safety
    /// `address` must be that of writable memory of as many bytes as were named when the fetch began, which nobody else
    /// uses until this returns.
    pub unsafe fn fetch(&mut self, address: usize) -> Result<Option<Vec<StagedRun>>, Error> {
        // SAFETY: the caller's promise.
        let Some((plan, parts)) = (unsafe { self.waves.next(address) })? else { return Ok(None) };
        let read = self.stored.read(plan, &self.options)?;
        self.report.bytes += read.bytes;
        self.report.wanted += read.wanted;
        Ok(Some(parts))
    }

    /// Ends the fetch after the last wave; returns the arena, the place of each entry in it, and what was read.
    ///
    /// # Errors
    /// [`ErrorKind::Invalid`] when there are waves that were not fetched.
    pub fn finish(self) -> Result<(Arena, Vec<Option<u64>>, FileReport), Error> {
        if !self.waves.is_empty() {
            return Err(Error::new(ErrorKind::Invalid, "there are waves that were not fetched"));
        }
        let (arena, offsets) = self.waves.into_memory();
        Ok((arena, offsets, self.report))
    }
}
