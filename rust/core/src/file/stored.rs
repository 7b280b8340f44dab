//! A whole container that no server has, fetched like one that a server has: from a file, or from memory that another
//! process filled.
//!
//! Invariants:
//!
//! * of a file with checksums, no byte is handed out that does not match;
//! * what is not wanted is neither read nor given memory;
//! * memory is read only while its owner is held.

use std::any::Any;
use std::fmt;
use std::path::Path;
use std::sync::Arc;

use tensorferry_wire::container::{self, Entry, Header};
use tensorferry_wire::digest::{Algorithm, BLOCK_SIZE, FILE_BLOCK_SIZE};

use super::{Container, FileOptions, FileReport, PIECE, by_chunks};
use crate::error::{Error, ErrorKind};
use crate::memory::{ALIGNMENT, Arena, nontemporal};
use crate::payload::{Destination, Item, Layout, Plan, ReceiveMemory, Segments, StagedRun, Waves, slices};

/// A container in a file or in memory, of which the header and the control entries were read, and the payload was not.
#[derive(Debug)]
pub struct Stored {
    header: Arc<Header>,
    /// Name and bytes of the entries that describe the container.
    control: Vec<(&'static str, Vec<u8>)>,
    bytes: Content,
}

/// Where the bytes are.
enum Content {
    File(Container),
    Memory {
        /// All of the container, header included.
        content: Segments,
        payload_start: u64,
        /// The checksums of its blocks of 1 MiB, if there are some.
        digests: Option<Vec<u64>>,
        _owner: Box<dyn Any + Send + Sync>,
    },
}

impl fmt::Debug for Content {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::File(container) => container.fmt(f),
            Self::Memory { content, .. } => {
                f.debug_struct("Memory").field("len", &content.len()).finish_non_exhaustive()
            }
        }
    }
}

impl Stored {
    /// The container in the file at `path`. With `header`, only if that is the checksum of its header. Without
    /// `checksums` the file may be one that has none.
    ///
    /// ```
    /// use std::sync::Arc;
    /// use bytes::Bytes;
    /// use tensorferry_core::{Destination, FileOptions, Item, Stored, write_file};
    /// use tensorferry_wire::dtype::Dtype;
    ///
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # let folder = std::env::temp_dir().join(format!("tensorferry-stored-{}", std::process::id()));
    /// # std::fs::create_dir_all(&folder)?;
    /// let (path, partial) = (folder.join("a.safetensors"), folder.join(".a.partial"));
    /// let item = |name: &str, bytes| Item::bytes(name, Dtype::U8, &[4], Bytes::from_static(bytes));
    /// let options = FileOptions::default();
    /// write_file(&path, &partial, Vec::new(), vec![item("v", b"abcd"), item("w", b"efgh")], &options)?;
    ///
    /// let stored = Stored::open(&path, None, true, &options)?;
    /// let (arena, offsets, report) = stored.fetch(Destination::Fresh, &[0], &options)?;
    /// assert_eq!((offsets[0], arena.bytes(offsets[1].unwrap(), 4)), (None, &b"efgh"[..]));
    /// assert_eq!(report.wanted, 4);
    /// # std::fs::remove_dir_all(&folder)?;
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// As [`Container::open`] and [`Container::check_header_checksum`], and as [`Container::read`] for the entries that
    /// describe the container.
    pub fn open(path: &Path, header: Option<u64>, checksums: bool, options: &FileOptions) -> Result<Self, Error> {
        Self::of(Container::open_any(path)?, header, checksums, options)
    }

    /// The opened `container`, as [`Stored::open`] returns it.
    ///
    /// # Errors
    /// As [`Stored::open`].
    pub fn of(
        container: Container,
        header: Option<u64>,
        checksums: bool,
        options: &FileOptions,
    ) -> Result<Self, Error> {
        let container = if checksums { container.with_checksums()? } else { container };
        header.map_or(Ok(()), |header| container.check_header_checksum(header))?;
        let mut control = Vec::new();
        for name in [container::MANIFEST_ENTRY, container::PICKLE_ENTRY] {
            if let Some(bytes) = container.entry(name, options)? {
                control.push((name, bytes));
            }
        }
        Ok(Self { header: Arc::new(container.header().clone()), control, bytes: Content::File(container) })
    }

    /// A container whose entries are `items`, in memory that `owner` keeps readable.
    ///
    /// Borrowed memory of the items must stay readable until the owner is dropped. With `digests`, the checksums of the
    /// blocks of 1 MiB of the payload, what is fetched is compared with them.
    ///
    /// # Errors
    /// [`ErrorKind::Invalid`] when the items make no valid container, or have another number of blocks.
    pub fn over(items: Vec<Item>, digests: Option<Vec<u64>>, owner: Box<dyn Any + Send + Sync>) -> Result<Self, Error> {
        let layout = Layout::new(Vec::new(), items, ALIGNMENT)?;
        let invalid = |e| Error::caused(ErrorKind::Invalid, "cannot read this state", e);
        let header = Header::decode(&layout.header).map_err(invalid)?;
        let payload_start = layout.header.len() as u64;
        let blocks = header.payload_len().div_ceil(BLOCK_SIZE);
        if let Some(digests) = digests.as_ref().filter(|digests| digests.len() as u64 != blocks) {
            return Err(Error::new(ErrorKind::Invalid, format!("{} checksums for {blocks} blocks", digests.len())));
        }
        let mut control = Vec::new();
        for name in [container::MANIFEST_ENTRY, container::PICKLE_ENTRY] {
            let Some(entry) = header.entries().iter().find(|e| e.name == name) else { continue };
            let mut bytes = Vec::new();
            layout.content.visit(payload_start + entry.start, payload_start + entry.end, |region| {
                // SAFETY: `owner` keeps the memory readable, and it is here.
                bytes.extend_from_slice(unsafe { region.as_slice() });
                true
            });
            control.push((name, bytes));
        }
        let bytes = Content::Memory { content: layout.content, payload_start, digests, _owner: owner };
        Ok(Self { header: Arc::new(header), control, bytes })
    }

    /// The header of the container.
    #[must_use]
    pub fn header(&self) -> &Arc<Header> {
        &self.header
    }

    /// The path of the file, if it is one.
    #[must_use]
    pub fn path(&self) -> Option<&Path> {
        self.container().map(|container| container.path.as_path())
    }

    /// The file, if it is one.
    pub(super) fn container(&self) -> Option<&Container> {
        match &self.bytes {
            Content::File(container) => Some(container),
            Content::Memory { .. } => None,
        }
    }

    /// Whether every byte that is fetched is compared with a checksum.
    #[must_use]
    pub fn is_verified(&self) -> bool {
        match &self.bytes {
            Content::File(container) => container.has_checksums(),
            Content::Memory { digests, .. } => digests.is_some(),
        }
    }

    /// The bytes of a reserved entry (`__tensorferry__/manifest` or `/pickle`).
    #[must_use]
    pub fn reserved(&self, name: &str) -> Option<&[u8]> {
        self.control.iter().find(|entry| entry.0 == name).map(|entry| &entry.1[..])
    }

    /// Fetches all entries but those numbered in `without`: those with an address go there, the others into a fresh
    /// arena, which is returned with the place of each entry in it.
    ///
    /// # Errors
    /// [`ErrorKind::Corrupt`] when a block does not match its checksum, [`ErrorKind::System`] when there is no memory
    /// or the file cannot be read, [`ErrorKind::Invalid`] when an entry in `without` does not exist or there are not as
    /// many addresses as entries, [`ErrorKind::Cancelled`]. Memory given as destination may then hold some of the new
    /// bytes.
    pub fn fetch(
        &self,
        destination: Destination,
        without: &[usize],
        options: &FileOptions,
    ) -> Result<(Arena, Vec<Option<u64>>, FileReport), Error> {
        let addresses = destination.addresses();
        let memory = ReceiveMemory::prepare(&self.header, addresses.as_deref(), &self.absent(without)?, None)?;
        let (plan, arena, offsets) = memory.plan(self.payload_len())?;
        let report = self.read(plan, options)?;
        Ok((arena, offsets, report))
    }

    /// Begins a fetch in which the entries numbered in `passing` go by way of memory of `most` bytes, at least one MiB,
    /// that is given for each wave.
    ///
    /// # Errors
    /// [`ErrorKind::Invalid`] for entries that there are not, that pass twice, too little memory, or not as many
    /// addresses as entries; [`ErrorKind::System`] when there is no memory for the others.
    pub fn staged(
        self: Arc<Self>,
        destination: Destination,
        (passing, without): (&[usize], &[usize]),
        most: u64,
        options: FileOptions,
    ) -> Result<StoredWaves, Error> {
        let (absent, len) = (self.absent(without)?, self.payload_len());
        let waves = Waves::new((&self.header, len), destination, (passing, &absent), most, None)?;
        Ok(StoredWaves { stored: self, waves, options, report: FileReport::default() })
    }

    /// Bytes of the payload, without the checksums at its end.
    fn payload_len(&self) -> u64 {
        match &self.bytes {
            Content::File(container) => container.covered(),
            Content::Memory { .. } => self.header.payload_len(),
        }
    }

    /// The entries that get no memory: those in `without`, and the checksums.
    fn absent(&self, without: &[usize]) -> Result<Vec<usize>, Error> {
        let entries = self.header.entries();
        if without.iter().any(|&entry| entry >= entries.len()) {
            return Err(Error::new(ErrorKind::Invalid, "an entry that is left out does not exist"));
        }
        let is_digests = |entry: &Entry| entry.name == container::DIGESTS_ENTRY;
        Ok(without.iter().copied().chain(entries.iter().position(is_digests)).collect())
    }

    /// The checksums of the blocks of 1 MiB of a container in memory, for [`Stored::over`] in another process; `None` for
    /// one in a file, which has its own. Computed by the calling thread.
    #[must_use]
    pub fn digests(&self) -> Option<Vec<u64>> {
        let Content::Memory { content, payload_start, .. } = &self.bytes else { return None };
        let block = |start: u64| {
            let mut digest = Algorithm::Crc64.hasher();
            content.visit(start, (start + BLOCK_SIZE).min(content.len()), |region| {
                // SAFETY: the owner of the memory is in `Stored`, which is borrowed here; the bytes are only
                // checksummed.
                digest.update(unsafe { region.as_slice() });
                true
            });
            digest.finish()
        };
        let starts =
            (0..self.header.payload_len().div_ceil(BLOCK_SIZE)).map(|block| payload_start + block * BLOCK_SIZE);
        Some(starts.map(block).collect())
    }

    /// Reads what `plan` wants, and compares it with the checksums that there are.
    pub(super) fn read(&self, plan: Plan, options: &FileOptions) -> Result<FileReport, Error> {
        let wanted = plan.wanted();
        let bytes = match &self.bytes {
            Content::File(container) => container.read_plan(&plan.with_block_size(FILE_BLOCK_SIZE), options)?,
            Content::Memory { content, payload_start, digests, .. } => {
                let plan = plan.with_block_size(BLOCK_SIZE);
                let read = |first, end| {
                    let (start, stop) = (plan.block_bounds(first).0, plan.block_bounds(end - 1).1);
                    plan.populate(start, stop);
                    for block in first..end {
                        let digest = copy_block(&plan, block, content, *payload_start, digests.is_some());
                        if digests.as_ref().is_some_and(|digests| {
                            usize::try_from(block).ok().and_then(|block| digests.get(block)) != digest.as_ref()
                        }) {
                            return Err(self.corrupt(&plan, block));
                        }
                    }
                    Ok(stop - start)
                };
                by_chunks(&plan, options, || Ok(read))?
            }
        };
        Ok(FileReport { bytes, wanted, direct: 0 })
    }

    /// The error for a `block` of `plan` that does not match its checksum.
    fn corrupt(&self, plan: &Plan, block: u64) -> Error {
        let (start, end) = plan.block_bounds(block);
        let message = format!(
            "corrupt: block {block} (payload bytes {start}-{end}: {}) does not match its checksum: the memory was \
             changed after it was filled",
            slices::names(&self.header, start, end),
        );
        Error::new(ErrorKind::Corrupt, message)
    }
}

/// Copies a block of the payload, which begins at `payload_start` of `content`, to its destinations; with `checked`,
/// returns its checksum, taken in pieces that stay in the processor's cache.
fn copy_block(plan: &Plan, block: u64, content: &Segments, payload_start: u64, checked: bool) -> Option<u64> {
    let (mut at, stop) = plan.block_bounds(block);
    let mut digest = Algorithm::Crc64.hasher();
    content.visit(payload_start + at, payload_start + stop, |region| {
        for from in (0..region.len()).step_by(PIECE) {
            let part = region.slice(from, region.len().min(from + PIECE));
            // SAFETY: the owner of the memory is in `Stored`, which is borrowed here; the bytes are only copied and
            // checksummed.
            let bytes = unsafe { part.as_slice() };
            if checked {
                digest.update(bytes);
            }
            plan.scatter(at, bytes, nontemporal::copy);
            at += bytes.len() as u64;
        }
        true
    });
    checked.then(|| digest.finish())
}

/// A fetch through a bounded buffer that is under way.
#[derive(Debug)]
pub struct StoredWaves {
    stored: Arc<Stored>,
    waves: Waves,
    options: FileOptions,
    report: FileReport,
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
