//! The index of a checkpoint: its keys, and where each part of each tensor is stored, in columns.
//!
//! A rank describes what it has in an [`Index`] of its own; [`merge`] shows that those of all ranks make up whole
//! tensors and makes one of them, which is written last and makes the files a checkpoint. A reader asks for the chunks
//! that a box of a tensor needs ([`Index::overlaps`]).
//!
//! The layout, all numbers little-endian:
//!
//! ```text
//! 8 bytes   magic "TFINDEX1"
//! u32       version, 1
//! columns   numbers: u8 width (1, 2, 4 or 8), u64 count, that many numbers
//!           texts:   how many bytes each has in common with the one before, as numbers; the lengths of the rests, as
//!                    numbers; the rests without separators, UTF-8
//! ```
//!
//! | column | rows | what |
//! |---|---|---|
//! | keys | | texts |
//! | paths | one for each key | texts: where the value belongs in a nested state, empty if nothing is known |
//! | dtypes | at most 255 | texts: names of dtypes |
//! | dtype | one for each key | 0: an object; otherwise n for the n-th name |
//! | flags | one for each key | bit 0: requires a gradient; bit 1: strides follow; bit 2: strides are not known; bit 3: spread over ranks |
//! | dims | one for each key | how many dimensions; 0 for an object |
//! | shape | sum of dims | the shapes |
//! | strides | dims of keys with bit 1 | the strides of whole tensors that are not contiguous |
//! | chunks | one for each key | how many chunks |
//! | boxes | 2 x dims for each chunk | offsets, then sizes |
//! | file | one for each chunk | the file that has it |
//! | entry | one for each chunk | the number of the entry in that file's header |
//! | bytes | one for each chunk | the length of that entry |
//! | kind | one for each chunk | [`Kind`]; plus 8 if a layout follows |
//! | layout | 1 + dims for such chunks | the first byte in the entry, and the strides in elements |
//! | owner | one for each chunk, or none | ranks with one owner have one value of a part |
//! | planner | bytes | what a planner of the user's has noted, in the words of the binding |
//!
//! Later versions may add columns behind these, which this one does not read.

mod boxes;
mod columns;
mod encoding;
mod error;
mod merge;
mod plan;

use std::collections::HashMap;

use self::boxes::find_overlap;
pub use self::boxes::{BoxRef, BoxText};
use self::columns::Texts;
pub use self::error::{IndexError, MergeError, OverlapError};
pub use self::merge::{Merged, Replicas, merge, written};
pub use self::plan::plan;

/// The most dimensions and, in each tensor, the elements that are below.
const MOST_DIMS: usize = 64;
const MOST_ELEMENTS: u64 = 1 << 62;
/// The most dtypes that an index names.
const MOST_DTYPES: usize = 255;

/// How a chunk or an object is stored.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// The entry has the elements.
    Elements,
    /// The entry has a tensor as `torch.save` writes it.
    PickledTensor,
    /// The entry has an object as `torch.save` writes it.
    Object,
    /// It has no entry of its own: it is built out of the file's manifest and pickle.
    Built,
}

/// What the index says of one key.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Item<'a> {
    /// The key.
    pub key: &'a str,
    /// Where the value belongs in a nested state, in the words of the binding; empty if nothing is known.
    pub path: &'a str,
    /// The name of the dtype; `None` for an object.
    pub dtype: Option<&'a str>,
    /// The shape of the whole tensor; empty for an object.
    pub shape: &'a [u64],
    /// Whether the tensor requires a gradient.
    pub requires_grad: bool,
    /// The strides of the whole tensor.
    pub strides: Strides<'a>,
    /// Whether ranks have parts of it, rather than each a value of its own.
    pub is_spread: bool,
}

/// The strides of a whole tensor.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Strides<'a> {
    /// Those of a contiguous tensor.
    Contiguous,
    /// These.
    Given(&'a [u64]),
    /// Nothing is known.
    Unknown,
}

/// Where a chunk is stored.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Chunk<'a> {
    /// Its elements in the whole tensor; without dimensions for an object.
    pub part: BoxRef<'a>,
    /// The number of the file.
    pub file: u32,
    /// The number of the entry in the file's header.
    pub entry: u32,
    /// The length of that entry in bytes.
    pub bytes: u64,
    /// How it is stored.
    pub kind: Kind,
    /// Where the elements lie in an entry that they do not fill in their order: first byte, strides in elements.
    pub layout: Option<(u64, &'a [u64])>,
    /// Who has this value: the lowest rank of a mesh, say. `None` in an index of files.
    pub owner: Option<u32>,
}

/// Of each key, where its rows begin in the other columns.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Head {
    dtype: u8,
    flags: u8,
    dims: u8,
    shape: usize,
    strides: usize,
    chunks: usize,
    boxes: usize,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Place {
    file: u32,
    entry: u32,
    bytes: u64,
    kind: Kind,
    owner: Option<u32>,
    /// Where its layout begins, if it has one.
    layout: Option<usize>,
}

const GRAD: u8 = 1;
const HAS_STRIDES: u8 = 2;
const UNKNOWN_STRIDES: u8 = 4;
const SPREAD: u8 = 8;

/// The index of a checkpoint, or what one rank has of it. Keys differ, and chunks are inside of their tensors; whether
/// they make up whole tensors is shown by [`merge`] and by [`Index::overlaps`].
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Index {
    keys: Texts,
    paths: Texts,
    dtypes: Vec<String>,
    heads: Vec<Head>,
    shapes: Vec<u64>,
    strides: Vec<u64>,
    boxes: Vec<u64>,
    places: Vec<Place>,
    layouts: Vec<u64>,
    numbers: HashMap<Box<str>, usize>,
    /// What a planner of the user's has noted, besides the paths; empty if it has not.
    pub planner: Vec<u8>,
}

impl Index {
    /// How many keys there are.
    #[must_use]
    pub fn len(&self) -> usize {
        self.heads.len()
    }

    /// Whether there is no key.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.heads.is_empty()
    }

    /// How many chunks and objects there are.
    #[must_use]
    pub fn chunk_count(&self) -> usize {
        self.places.len()
    }

    /// The number of a key.
    #[must_use]
    pub fn find(&self, key: &str) -> Option<usize> {
        self.numbers.get(key).copied()
    }

    /// What is said of the key with this number, which is below [`Index::len`].
    #[must_use]
    pub fn item(&self, number: usize) -> Item<'_> {
        let head = self.heads[number];
        let dims = usize::from(head.dims);
        let strides = match head.flags & (HAS_STRIDES | UNKNOWN_STRIDES) {
            0 => Strides::Contiguous,
            HAS_STRIDES => Strides::Given(&self.strides[head.strides..head.strides + dims]),
            _ => Strides::Unknown,
        };
        Item {
            key: self.keys.get(number),
            path: self.paths.get(number),
            dtype: (head.dtype > 0).then(|| &*self.dtypes[usize::from(head.dtype) - 1]),
            shape: &self.shapes[head.shape..head.shape + dims],
            requires_grad: head.flags & GRAD != 0,
            strides,
            is_spread: head.flags & SPREAD != 0,
        }
    }

    /// The chunks of the key with this number, in order; an object has one for each rank that has it.
    #[must_use]
    pub fn chunks(&self, number: usize) -> impl ExactSizeIterator<Item = Chunk<'_>> + Clone {
        let head = self.heads[number];
        let end = self.heads.get(number + 1).map_or(self.places.len(), |next| next.chunks);
        (head.chunks..end).map(move |at| self.chunk(head, at))
    }

    fn chunk(&self, head: Head, at: usize) -> Chunk<'_> {
        let (dims, place) = (usize::from(head.dims), self.places[at]);
        let start = head.boxes + (at - head.chunks) * 2 * dims;
        let (offsets, sizes) = self.boxes[start..start + 2 * dims].split_at(dims);
        Chunk {
            part: BoxRef { offsets, sizes },
            file: place.file,
            entry: place.entry,
            bytes: place.bytes,
            kind: place.kind,
            layout: place.layout.map(|at| (self.layouts[at], &self.layouts[at + 1..=at + dims])),
            owner: place.owner,
        }
    }

    /// The chunks that have the elements `wanted` of the tensor with this number: each of them once. Of replicas, the
    /// one in the file `own` is taken, or else the first.
    ///
    /// # Errors
    /// `wanted` is not inside of the tensor, or the chunks do not have each of its elements exactly once.
    pub fn overlaps(&self, number: usize, wanted: BoxRef<'_>, own: u32) -> Result<Vec<Chunk<'_>>, OverlapError> {
        let shape = self.item(number).shape;
        if !wanted.is_inside(shape) {
            return Err(OverlapError::Outside { wanted: wanted.text(), shape: shape.to_vec() });
        }
        let need = wanted.numel();
        let mut found: Vec<Chunk<'_>> = Vec::new();
        let mut first: HashMap<BoxRef<'_>, usize> = HashMap::new();
        if need > 0 {
            for chunk in self.chunks(number).filter(|chunk| chunk.part.common(&wanted) > 0) {
                let at = *first.entry(chunk.part).or_insert(found.len());
                match found.get_mut(at) {
                    None => found.push(chunk),
                    Some(replica) if chunk.file == own && replica.file != own => *replica = chunk,
                    Some(_) => {}
                }
            }
        }
        let parts: Vec<_> = found.iter().map(|chunk| chunk.part).collect();
        if let Some((first, other)) = find_overlap(&parts) {
            let (first, other) = (parts[first].text(), parts[other].text());
            return Err(OverlapError::Overlap { wanted: wanted.text(), first, other });
        }
        let have = parts.iter().map(|part| part.common(&wanted)).sum();
        if have != need {
            return Err(OverlapError::Missing { wanted: wanted.text(), have, need });
        }
        Ok(found)
    }

    /// The chunk of the tensor with this number that begins at `offsets`; the first one of an object without any.
    #[must_use]
    pub fn chunk_at(&self, number: usize, offsets: &[u64]) -> Option<Chunk<'_>> {
        self.chunks(number).find(|chunk| chunk.part.offsets == offsets)
    }

    /// Adds a key. Its chunks are added next, by [`Index::add_chunk`].
    ///
    /// # Errors
    /// The key is there already, its shape is too large for a tensor, or an object has one.
    pub fn add(&mut self, item: &Item<'_>) -> Result<(), IndexError> {
        let number = self.heads.len();
        check_shape(item)?;
        if self.numbers.contains_key(item.key) {
            return Err(IndexError::RepeatedKey { key: item.key.to_owned() });
        }
        let dtype = item.dtype.map_or(Some(0), |name| self.number_of_dtype(name));
        let dtype = dtype.ok_or_else(|| IndexError::Dtypes { key: item.key.to_owned() })?;
        let mut flags = if item.requires_grad { GRAD } else { 0 } | if item.is_spread { SPREAD } else { 0 };
        let strides = self.strides.len();
        match item.strides {
            Strides::Contiguous => {}
            Strides::Unknown => flags |= UNKNOWN_STRIDES,
            Strides::Given(steps) => {
                let wrong = |what, value| Err(IndexError::Value { key: item.key.to_owned(), what, value });
                if steps.len() != item.shape.len() {
                    return wrong("number of strides", steps.len() as u64);
                }
                if let Some(&step) = steps.iter().find(|&&step| step >= MOST_ELEMENTS) {
                    return wrong("stride", step);
                }
                flags |= HAS_STRIDES;
                self.strides.extend_from_slice(steps);
            }
        }
        self.numbers.insert(item.key.into(), number);
        self.keys.push(item.key);
        self.paths.push(item.path);
        self.heads.push(Head {
            dtype,
            flags,
            // A shape has at most MOST_DIMS dimensions.
            dims: u8::try_from(item.shape.len()).unwrap_or(u8::MAX),
            shape: self.shapes.len(),
            strides,
            chunks: self.places.len(),
            boxes: self.boxes.len(),
        });
        self.shapes.extend_from_slice(item.shape);
        Ok(())
    }

    /// The number of a dtype, which is added if there is room.
    fn number_of_dtype(&mut self, name: &str) -> Option<u8> {
        let at = self.dtypes.iter().position(|known| known == name).unwrap_or_else(|| {
            if self.dtypes.len() < MOST_DTYPES {
                self.dtypes.push(name.to_owned());
            }
            self.dtypes.len() - 1
        });
        (self.dtypes[at] == name).then(|| u8::try_from(at + 1).unwrap_or(u8::MAX))
    }

    /// Adds a chunk of the key that was added last, if there is one.
    ///
    /// # Errors
    /// The chunk is not inside of its tensor.
    pub fn add_chunk(&mut self, chunk: &Chunk<'_>) -> Result<(), IndexError> {
        let Some(number) = self.heads.len().checked_sub(1) else {
            return Ok(());
        };
        let item = self.item(number);
        if !chunk.part.is_inside(item.shape) || chunk.layout.is_some_and(|(_, steps)| steps.len() != item.shape.len()) {
            return Err(IndexError::Outside { key: item.key.to_owned(), chunk: chunk.part.text() });
        }
        let layout = chunk.layout.map(|(start, steps)| {
            let at = self.layouts.len();
            self.layouts.push(start);
            self.layouts.extend_from_slice(steps);
            at
        });
        self.boxes.extend_from_slice(chunk.part.offsets);
        self.boxes.extend_from_slice(chunk.part.sizes);
        let Chunk { file, entry, bytes, kind, owner, .. } = *chunk;
        self.places.push(Place { file, entry, bytes, kind, owner, layout });
        Ok(())
    }
}

/// Checks that a tensor can have the shape of `item`, and that an object has none.
fn check_shape(item: &Item<'_>) -> Result<(), IndexError> {
    // A dimension of length zero does not make the others smaller.
    let elements = item.shape.iter().try_fold(1_u64, |all, &dim| all.checked_mul(dim.max(1)));
    let most_dims = if item.dtype.is_some() { MOST_DIMS } else { 0 };
    if item.shape.len() > most_dims || elements.is_none_or(|elements| elements >= MOST_ELEMENTS) {
        return Err(IndexError::Shape { key: item.key.to_owned() });
    }
    Ok(())
}
