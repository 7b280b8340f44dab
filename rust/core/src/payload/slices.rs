//! Parts of a container's entries and where in memory they go: the requests of a reshard.
//!
//! A [`Slice`] describes a rectangular part of a tensor as a run of bytes that repeats over any number of dimensions,
//! with one stride in the entry and another in memory. [`resolve`] checks slices against the header of the container
//! that answers and turns them into the extents of one or several plans.

use std::collections::HashMap;

use tensorferry_wire::container::{Entry, Header};
use tensorferry_wire::dtype::Dtype;

use super::Extent;
use crate::error::{Error, ErrorKind};

/// Runs of one slice, at most.
const MAX_RUNS: u64 = 1 << 32;

/// One dimension over which a run of bytes is repeated: `count` times, with a stride in the entry and one in memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Repeat {
    /// How often the run, or the block of inner repetitions, occurs.
    pub count: u64,
    /// Stride within the entry, in bytes.
    pub entry_stride: u64,
    /// Stride in memory, in bytes.
    pub memory_stride: u64,
}

/// Which entry of a container is meant.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum EntryRef {
    /// The one with this name.
    Name(String),
    /// The one at this place in the header, counted from zero.
    Number(u32),
}

impl From<&str> for EntryRef {
    fn from(name: &str) -> Self {
        Self::Name(name.to_owned())
    }
}

impl std::fmt::Display for EntryRef {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Name(name) => write!(f, "{name:?}"),
            Self::Number(number) => write!(f, "number {number}"),
        }
    }
}

/// Bytes of an entry and the memory they go to: a run of bytes, repeated over any number of dimensions.
///
/// Columns 2 and 3 of a matrix of four rows and eight columns of bytes, into memory where they are contiguous:
///
/// ```
/// use tensorferry_core::{Repeat, Slice};
/// use tensorferry_wire::dtype::Dtype;
///
/// let mut columns = [0_u8; 8];
/// let rows = Repeat { count: 4, entry_stride: 8, memory_stride: 2 };
/// // SAFETY: four runs of two bytes fill `columns`, which nobody else uses until the slice has been read.
/// let slice = unsafe { Slice::new("w", (Dtype::U8, 32), (2, 2), columns.as_mut_ptr() as usize, vec![rows]) };
/// # drop(slice);
/// ```
#[derive(Clone, Debug)]
pub struct Slice {
    entry: EntryRef,
    dtype: Dtype,
    nbytes: u64,
    start: u64,
    run: u64,
    address: usize,
    repeats: Vec<Repeat>,
}

impl Slice {
    /// The run of `run` bytes at `start` of the entry `entry`, and its repetitions, the outermost first, go to
    /// `address`. The entry must be of `dtype` and have `nbytes` bytes. That it does, and that all runs lie inside it,
    /// is checked against the header of the container that answers.
    ///
    /// # Safety
    /// All runs from `address` on must be writable memory, and no two of them, of this slice or another, may overlap.
    /// Nobody else may use it until the slices have been read.
    pub unsafe fn new(
        entry: impl Into<EntryRef>,
        (dtype, nbytes): (Dtype, u64),
        (start, run): (u64, u64),
        address: usize,
        repeats: Vec<Repeat>,
    ) -> Self {
        Self { entry: entry.into(), dtype, nbytes, start, run, address, repeats }
    }

    /// Bytes of all its runs.
    #[must_use]
    #[allow(clippy::len_without_is_empty, reason = "nobody asks whether a slice is empty")]
    pub fn len(&self) -> u64 {
        self.repeats.iter().fold(self.run, |len, repeat| len.saturating_mul(repeat.count))
    }

    /// Where each run starts in the entry and in memory; checks that all lie inside.
    fn runs(&self) -> Result<Vec<(u64, usize)>, Error> {
        let outside = || {
            let message = format!("a slice of {} goes beyond the {} bytes it has", self.entry, self.nbytes);
            Error::new(ErrorKind::Invalid, message)
        };
        let (mut last, mut count, mut reach) = (self.start, 1_u64, 0_u64);
        for repeat in &self.repeats {
            let steps = repeat.count.saturating_sub(1);
            last = steps.checked_mul(repeat.entry_stride).and_then(|n| last.checked_add(n)).ok_or_else(outside)?;
            reach = steps.checked_mul(repeat.memory_stride).and_then(|n| reach.checked_add(n)).ok_or_else(outside)?;
            count = count.checked_mul(repeat.count).filter(|&n| n <= MAX_RUNS).ok_or_else(outside)?;
        }
        let inside = last.checked_add(self.run).is_some_and(|end| end <= self.nbytes);
        let reach = reach.checked_add(self.run).and_then(|n| usize::try_from(n).ok());
        if !inside || reach.and_then(|n| self.address.checked_add(n)).is_none() {
            return Err(outside());
        }
        let mut runs = vec![(self.start, self.address)];
        if count == 0 || self.run == 0 {
            runs.clear();
        }
        for repeat in &self.repeats {
            let step = |(start, address): (u64, usize)| {
                #[allow(
                    clippy::cast_possible_truncation,
                    reason = "whatever the steps add up to was found to fit above"
                )]
                (0..repeat.count)
                    .map(move |i| (start + i * repeat.entry_stride, address + (i * repeat.memory_stride) as usize))
            };
            runs = runs.into_iter().flat_map(step).collect();
        }
        Ok(runs)
    }
}

/// The destinations of `slices` in a container with this header, as few layers as possible: within a layer no byte of
/// the payload is wanted twice.
///
/// # Errors
/// [`ErrorKind::Protocol`] when an entry is missing, or has another type or length than its slice says;
/// [`ErrorKind::Invalid`] when a slice goes beyond its entry, or has more than [`MAX_RUNS`] runs.
pub(crate) fn resolve(slices: &[Slice], header: &Header) -> Result<Vec<Vec<Extent>>, Error> {
    let known: HashMap<&str, &Entry> = header.entries().iter().map(|e| (e.name.as_str(), e)).collect();
    let mut extents = Vec::with_capacity(slices.len());
    for slice in slices {
        let entry = match &slice.entry {
            EntryRef::Name(name) => known.get(name.as_str()).copied(),
            EntryRef::Number(number) => header.entries().get(*number as usize),
        };
        let Some(entry) = entry else {
            let message = format!("it has no entry {}: the index belongs to another container", slice.entry);
            return Err(Error::new(ErrorKind::Protocol, message));
        };
        if (entry.dtype, entry.nbytes()) != (slice.dtype, slice.nbytes) {
            let message = format!(
                "its entry {:?} has {} bytes of {}, and the index says {} of {}: it belongs to another container",
                entry.name,
                entry.nbytes(),
                entry.dtype.name(),
                slice.nbytes,
                slice.dtype.name(),
            );
            return Err(Error::new(ErrorKind::Protocol, message));
        }
        for (start, address) in slice.runs()? {
            // SAFETY: `Slice::new` took the promise.
            extents.push(unsafe { Extent::new(entry.start + start, slice.run, address) });
        }
    }
    extents.sort_by_key(|extent| extent.start);
    let mut layers: Vec<Vec<Extent>> = Vec::new();
    for extent in extents {
        let ends_before =
            |layer: &&mut Vec<Extent>| layer.last().is_none_or(|last| last.start + last.len <= extent.start);
        match layers.iter_mut().find(ends_before) {
            Some(layer) => layer.push(extent),
            None => layers.push(vec![extent]),
        }
    }
    Ok(layers)
}

/// The names of the entries that own payload bytes `start..end`, the first few of them.
pub(crate) fn names(header: &Header, start: u64, end: u64) -> String {
    let mut names: Vec<_> = header.covering(start, end).take(4).map(|e| e.name.as_str()).collect();
    if names.len() == 4 {
        names[3] = "...";
    }
    names.join(", ")
}
