//! The index as bytes.

use super::columns::{ColumnReader, ColumnWriter};
use super::{
    BoxRef, Chunk, GRAD, HAS_STRIDES, Index, IndexError, Item, Kind, MOST_DTYPES, Place, SPREAD, Strides,
    UNKNOWN_STRIDES,
};

const MAGIC: &[u8; 8] = b"TFINDEX1";
/// The only version of the index that this crate reads.
const VERSION: u32 = 1;
/// Added to the kind of a chunk that has a layout.
const HAS_LAYOUT: u64 = 8;
/// The columns of numbers, in order.
const COLUMNS: [&str; 14] = [
    "dtype", "flags", "dims", "shape", "strides", "chunks", "boxes", "file", "entry", "bytes", "kind", "layout",
    "owner", "planner",
];
const KINDS: [Kind; 4] = [Kind::Elements, Kind::PickledTensor, Kind::Object, Kind::Built];

impl Index {
    /// The encoded index.
    #[must_use]
    pub fn encode(&self) -> Vec<u8> {
        let mut columns = ColumnWriter::default();
        columns.out.extend_from_slice(MAGIC);
        columns.out.extend_from_slice(&VERSION.to_le_bytes());
        columns.texts(&self.keys);
        columns.texts(&self.paths);
        columns.texts(&self.dtypes.iter().map(|name| &**name).collect());
        columns.numbers(self.heads.iter().map(|head| head.dtype.into()));
        columns.numbers(self.heads.iter().map(|head| head.flags.into()));
        columns.numbers(self.heads.iter().map(|head| head.dims.into()));
        columns.numbers(self.shapes.iter().copied());
        columns.numbers(self.strides.iter().copied());
        columns.numbers((0..self.len()).map(|number| self.chunks(number).len() as u64));
        columns.numbers(self.boxes.iter().copied());
        columns.numbers(self.places.iter().map(|place| place.file.into()));
        columns.numbers(self.places.iter().map(|place| place.entry.into()));
        columns.numbers(self.places.iter().map(|place| place.bytes));
        columns.numbers(self.places.iter().map(kind_number));
        columns.numbers(self.layouts.iter().copied());
        let owners: Option<Vec<_>> = self.places.iter().map(|place| place.owner.map(u64::from)).collect();
        columns.numbers(owners.unwrap_or_default().into_iter());
        columns.numbers(self.planner.iter().map(|&byte| byte.into()));
        columns.out
    }

    /// Reads an index of `files` files, and checks all that [`Index`] promises.
    ///
    /// # Errors
    /// The first fault found. What is allocated is a small multiple of `encoded`.
    pub fn decode(encoded: &[u8], files: u32) -> Result<Self, IndexError> {
        let rest = encoded.strip_prefix(MAGIC).ok_or(IndexError::Magic)?;
        let (version, rest) = rest.split_first_chunk().ok_or(IndexError::Magic)?;
        let found = u32::from_le_bytes(*version);
        if found != VERSION {
            return Err(IndexError::Version { found });
        }
        let mut columns = ColumnReader { rest };
        let (keys, paths, names) = (columns.texts("keys")?, columns.texts("paths")?, columns.texts("dtypes")?);
        if paths.len() != keys.len() {
            return Err(IndexError::Rows { column: "paths" });
        }
        if names.len() > MOST_DTYPES {
            return Err(IndexError::Rows { column: "dtypes" });
        }
        let mut numbers: [Vec<u64>; COLUMNS.len()] = Default::default();
        for (rows, column) in numbers.iter_mut().zip(COLUMNS) {
            *rows = columns.numbers(column)?;
        }
        let mut rows = COLUMNS.iter().zip(&numbers).map(|(&column, rows)| Rows { column, rest: rows });
        let mut next = || rows.next().unwrap_or(Rows { column: "", rest: &[] });
        let (mut dtypes, mut flags, mut dims, mut shapes, mut strides) = (next(), next(), next(), next(), next());
        let (mut counts, mut boxes, mut file, mut entry) = (next(), next(), next(), next());
        let (mut bytes, mut kinds) = (next(), next());
        let (mut layouts, mut owners, planner) = (next(), next(), next());
        let has_owners = !owners.rest.is_empty();
        let planner: Result<Vec<u8>, _> = planner.rest.iter().map(|&byte| u8::try_from(byte)).collect();
        let planner = planner.map_err(|_| IndexError::Column { column: "planner" })?;
        let mut index = Self { planner, ..Self::default() };
        for number in 0..keys.len() {
            let key = keys.get(number);
            let bad = |what, value| IndexError::Value { key: key.to_owned(), what, value };
            let (dtype, flags) = (dtypes.next()?, flags.next()?);
            let dims = dims.next()?;
            let shape = shapes.take(dims)?;
            let flags = u8::try_from(flags).map_err(|_| bad("flags", flags))?;
            let known = [0, HAS_STRIDES, UNKNOWN_STRIDES].contains(&(flags & !(GRAD | SPREAD)));
            if !known || (dtype == 0 && flags != 0) {
                return Err(bad("flags", flags.into()));
            }
            let name = match dtype.checked_sub(1) {
                None => None,
                Some(at) if at < names.len() as u64 => Some(names.get(usize::try_from(at).unwrap_or(usize::MAX))),
                Some(_) => return Err(bad("dtype", dtype)),
            };
            index.add(&Item {
                key,
                path: paths.get(number),
                dtype: name,
                shape,
                requires_grad: flags & GRAD != 0,
                strides: match flags & (HAS_STRIDES | UNKNOWN_STRIDES) {
                    0 => Strides::Contiguous,
                    HAS_STRIDES => Strides::Given(strides.take(dims)?),
                    _ => Strides::Unknown,
                },
                is_spread: flags & SPREAD != 0,
            })?;
            for _ in 0..counts.next()? {
                let part = BoxRef { offsets: boxes.take(dims)?, sizes: boxes.take(dims)? };
                let (file, entry, kind) = (file.next()?, entry.next()?, kinds.next()?);
                let has_layout = kind & HAS_LAYOUT != 0;
                let at = usize::try_from(kind & !HAS_LAYOUT).unwrap_or(usize::MAX);
                index.add_chunk(&Chunk {
                    part,
                    file: u32::try_from(file).ok().filter(|&n| n < files).ok_or_else(|| bad("file", file))?,
                    entry: u32::try_from(entry).map_err(|_| bad("entry", entry))?,
                    bytes: bytes.next()?,
                    kind: *KINDS.get(at).ok_or_else(|| bad("kind", kind))?,
                    layout: if has_layout { Some((layouts.next()?, layouts.take(dims)?)) } else { None },
                    owner: if has_owners {
                        let owner = owners.next()?;
                        Some(u32::try_from(owner).map_err(|_| bad("owner", owner))?)
                    } else {
                        None
                    },
                })?;
            }
        }
        for column in [dtypes, flags, dims, shapes, strides, counts, boxes, file, entry, bytes, kinds, layouts, owners]
        {
            column.check_end()?;
        }
        Ok(index)
    }
}

fn kind_number(place: &Place) -> u64 {
    place.kind as u64 + if place.layout.is_some() { HAS_LAYOUT } else { 0 }
}

/// The rows of a column that are left.
struct Rows<'a> {
    column: &'static str,
    rest: &'a [u64],
}

impl<'a> Rows<'a> {
    fn next(&mut self) -> Result<u64, IndexError> {
        Ok(self.take(1)?[0])
    }

    fn take(&mut self, count: u64) -> Result<&'a [u64], IndexError> {
        let count = usize::try_from(count).unwrap_or(usize::MAX);
        let (taken, rest) = self.rest.split_at_checked(count).ok_or(IndexError::Rows { column: self.column })?;
        self.rest = rest;
        Ok(taken)
    }

    fn check_end(&self) -> Result<(), IndexError> {
        if self.rest.is_empty() { Ok(()) } else { Err(IndexError::Rows { column: self.column }) }
    }
}
