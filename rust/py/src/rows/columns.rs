//! The columns behind [`crate::rows::Rows`]: descriptions of the tensors of a state, without Python objects.
//!
//! Names and dimensions are concatenated instead of one allocation each: 100,000 tensors take a handful of allocations.

use std::borrow::Cow;
use std::collections::{HashMap, HashSet};
use std::hash::{BuildHasherDefault, Hasher};

use pyo3::exceptions::PyOverflowError;
use pyo3::prelude::*;
use tensorferry_wire::container::RESERVED_PREFIX;
use tensorferry_wire::distinct::Distinct;
use tensorferry_wire::dtype::Dtype;

/// The rows of a state, numbered from 0 on, and where its leaves are found again.
#[derive(Default)]
pub(crate) struct Columns {
    /// All names, one after the other, and where each ends.
    pub(crate) names: String,
    pub(crate) ends: Vec<usize>,
    pub(crate) dtypes: Vec<Dtype>,
    pub(crate) ranks: Vec<u8>,
    /// The dimensions of all rows, one after the other.
    pub(crate) dims: Vec<u64>,
    pub(crate) addresses: Vec<usize>,
    pub(crate) sizes: Vec<usize>,
    pub(crate) flags: String,
    /// Address of an object that Python numbered to its number. The state keeps all of them alive.
    pub(crate) seen: ByAddress<i64>,
    /// Where the memory of each row starts.
    pub(crate) starts: ByAddress<usize>,
    /// Further rows whose memory starts there.
    pub(crate) doubles: ByAddress<Doubles>,
}

/// Rows whose memory starts where that of an earlier row does.
#[derive(Default)]
pub(crate) struct Doubles {
    /// Whose storages are not known yet.
    pub(crate) new: Vec<usize>,
    /// Identity of a storage to the first row that fills it.
    pub(crate) by_storage: ByAddress<usize>,
}

/// A map from addresses of this process. No peer chooses addresses, so they need no keyed hash.
pub(crate) type ByAddress<T> = HashMap<usize, T, BuildHasherDefault<AddressHasher>>;

/// One multiplication for each address.
#[derive(Default)]
pub(crate) struct AddressHasher(u64);

impl Hasher for AddressHasher {
    fn finish(&self) -> u64 {
        self.0
    }

    fn write(&mut self, bytes: &[u8]) {
        for &byte in bytes {
            self.write_usize(usize::from(byte));
        }
    }

    fn write_usize(&mut self, address: usize) {
        // A product's upper bits depend on all of the address, and a table looks at the lower ones first.
        self.0 = (self.0 ^ address as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15).rotate_left(32);
    }
}

/// Memory of a leaf: its number, the address space it is in, and its first and last byte (exclusive).
pub(crate) type Span = (i64, u32, usize, usize);

/// For fewer rows no room is made at once.
const RESERVED_FROM: usize = 1024;

/// Rows that are copied start at multiples of this many bytes.
const PLACED_AT: usize = 64;

/// The address space of host memory.
const HOST: u32 = 0;

/// The fields of a row apart from its name.
pub(crate) struct Row<'a> {
    pub(crate) dtype: Dtype,
    pub(crate) shape: &'a [u64],
    pub(crate) address: usize,
    pub(crate) nbytes: usize,
    pub(crate) flag: u8,
}

impl Columns {
    /// Adds a row, whose name comes in two parts, and notes whether an earlier one begins at the same address; returns its
    /// number.
    ///
    /// # Errors
    /// `OverflowError` for more than 255 dimensions.
    pub(crate) fn push(&mut self, name: [&str; 2], row: &Row<'_>) -> PyResult<i64> {
        let number = self.ends.len();
        let added = self.push_unindexed(name, row)?;
        if row.nbytes > 0 && *self.starts.entry(row.address).or_insert(number) != number {
            self.doubles.entry(row.address).or_default().new.push(number);
        }
        Ok(added)
    }

    /// As `push`, for a row that is not found by where its memory starts.
    ///
    /// # Errors
    /// As `push`.
    pub(crate) fn push_unindexed(&mut self, name: [&str; 2], row: &Row<'_>) -> PyResult<i64> {
        let rank = u8::try_from(row.shape.len()).map_err(|_| PyOverflowError::new_err("more than 255 dimensions"))?;
        let number = self.ends.len();
        self.names.extend(name);
        self.ends.push(self.names.len());
        self.dtypes.push(row.dtype);
        self.ranks.push(rank);
        self.dims.extend_from_slice(row.shape);
        self.addresses.push(row.address);
        self.sizes.push(row.nbytes);
        self.flags.push(char::from(b'0' + (row.flag & 3)));
        Ok(i64::try_from(number)?)
    }

    /// Makes room for `count` more rows: a table that grows is copied again and again.
    pub(crate) fn reserve(&mut self, count: usize) {
        if count < RESERVED_FROM {
            return;
        }
        self.starts.reserve(count);
        self.ends.reserve(count);
        self.dtypes.reserve(count);
        self.ranks.reserve(count);
        self.addresses.reserve(count);
        self.sizes.reserve(count);
        self.flags.reserve(count);
    }

    /// The leaves whose memory overlaps, in groups: rows by their number, and `others` by theirs. The rows in `without`
    /// are not looked at.
    pub(crate) fn overlapping(&self, others: Vec<Span>, without: &[usize]) -> Vec<Vec<i64>> {
        let without: HashSet<_> = without.iter().collect();
        let rows = self.addresses.iter().zip(&self.sizes).zip(0_i64..).enumerate();
        let rows = rows.filter(|(row, ((_, size), _))| **size > 0 && !without.contains(row));
        if others.is_empty() {
            // Hardly ever does one overlap, and sorting this takes half the time.
            let mut spans: Vec<_> = rows.clone().map(|(_, ((&start, &size), _))| (start, size)).collect();
            spans.sort_unstable();
            if spans.windows(2).all(|two| two[0].0.saturating_add(two[0].1) <= two[1].0) {
                return Vec::new();
            }
        }
        let rows = rows.map(|(_, ((&start, &size), number))| (number, HOST, start, start.saturating_add(size)));
        let mut spans: Vec<_> = rows.chain(others).collect();
        spans.sort_unstable_by_key(|&(number, space, start, _)| (space, start, number));
        let mut groups = Vec::new();
        let mut group: Vec<i64> = Vec::new();
        let mut reached = (HOST, 0);
        for (number, space, start, end) in spans {
            if reached.0 == space && start < reached.1 {
                reached.1 = reached.1.max(end);
            } else {
                if group.len() > 1 {
                    groups.push(std::mem::take(&mut group));
                }
                group.clear();
                reached = (space, end);
            }
            group.push(number);
        }
        if group.len() > 1 {
            groups.push(group);
        }
        groups
    }

    /// Where the rows go in a buffer, one behind the other, except for those in `without`: a row and its place for each
    /// that has bytes, and the bytes of them all.
    pub(crate) fn laid_out(&self, without: &[usize]) -> (Vec<(usize, usize)>, usize) {
        let mut stays = vec![false; self.sizes.len()];
        for &row in without {
            if let Some(stays) = stays.get_mut(row) {
                *stays = true;
            }
        }
        let mut end = 0_usize;
        let places = self.sizes.iter().zip(stays).enumerate().filter(|(_, (size, stays))| **size > 0 && !stays);
        let places = places.map(|(row, (size, _))| {
            let start = end.next_multiple_of(PLACED_AT);
            end = start + size;
            (row, start)
        });
        (places.collect(), end)
    }

    /// The name of row `row`, which must exist.
    fn name(&self, row: usize) -> &str {
        let start = row.checked_sub(1).map_or(0, |before| self.ends[before]);
        &self.names[start..self.ends[row]]
    }

    /// All names, in the order of the rows.
    pub(crate) fn names(&self) -> impl Iterator<Item = &str> {
        (0..self.ends.len()).map(|row| self.name(row))
    }

    /// All shapes, in the order of the rows.
    pub(crate) fn shapes(&self) -> impl Iterator<Item = &[u64]> {
        let mut rest = self.dims.as_slice();
        self.ranks.iter().map(move |&rank| {
            let shape;
            (shape, rest) = rest.split_at(usize::from(rank));
            shape
        })
    }

    /// Whether every name can stand in a container as it is: none twice, without NUL, none that the format keeps.
    pub(crate) fn names_are_regular(&self) -> bool {
        let mut names = Distinct::with_capacity(self.ends.len());
        let regular = self.names().enumerate().all(|(row, name)| {
            names.add(name, row);
            !(name.is_empty() || name == "__metadata__" || name.starts_with(RESERVED_PREFIX))
        });
        regular && !self.names.contains('\0') && names.repeated(|row| Cow::Borrowed(self.name(row))).is_none()
    }
}
