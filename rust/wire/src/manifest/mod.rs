//! The manifest: the tree of the state, and which entries hold the bytes of its storages.
//!
//! It is a JSON object, which the sender writes in one go and [`validate`] checks in one pass. The binding calls
//! [`validate`] when a checkpoint is opened, before any part of the manifest is used:
//!
//! ```text
//! {"version": 1, "tree": NODE, "flags": "0012..", "objects": N, "storages": [[nbytes, [[entry, lo], ...]], ...], ...}
//!
//! NODE := n >= 0                       plain leaf n: the n-th entry of the header outside the reserved prefix
//!       | n < 0                        object -(n + 1) of the pickle's list
//!       | {"key": NODE, ...}           dict with string keys
//!       | ["o", {"key": NODE, ...}]    OrderedDict with string keys
//!       | ["l", NODE...]               list
//!       | ["t", NODE...]               tuple
//!       | ["d", kind, [[KEY, NODE]..]] dict (kind "d") or OrderedDict (kind "o") with other keys
//!       | ["n", object, NODE...]       namedtuple, whose class is an object
//!       | ["q", maxlen, NODE...]       deque; maxlen is a number or null
//!       | ["f", object, NODE]          defaultdict with the items of NODE, whose factory is an object
//!       | ["a", object, NODE]          NODE with attributes (its `__dict__` is an object), such as `_metadata`
//! KEY  := string | number | true | false | null | ["r", object] | ["t", KEY...]
//! ```
//!
//! `flags` has one of '0' to '3' per plain leaf (bit 0: Parameter, bit 1: `requires_grad`), or nothing if all are zero.
//! Keys of one dict must differ as Python compares them (1, 1.0 and true are one key). Unknown top-level fields are
//! accepted and ignored if they are valid JSON, so that a later version can add fields that this one can still read.
//!
//! What holds for a manifest that [`validate`] accepts:
//!
//! - Every leaf the tree names is an entry of the header, and every object has a number below `objects`.
//! - Arrays and objects are nested at most [`MAX_DEPTH`] deep, so a reader may recurse over the tree.
//! - Each plain leaf has a shape that a tensor can have, and requires a gradient only if its type can have one.
//! - The pieces of a storage are entries of the header other than manifest and pickle, lie within the storage and do
//!   not overlap; no entry is a piece twice. The lengths of all storages together fit an i64.
//!
//! What depends on Python objects is checked where the state is built from the tree: whether the pickle holds `objects`
//! of them, whether a namedtuple's class is one, whether keys can be hashed.

mod error;
mod tree;
mod validator;

use std::ops::Range;

pub use self::error::ManifestError;
use self::validator::Validator;
use crate::container::Header;
use crate::json::Cursor;

/// How deep arrays and objects may be nested, the manifest's own object included. It bounds the recursion here and in
/// the code that builds the state.
pub const MAX_DEPTH: usize = 256;
/// The only version of the manifest that this crate reads.
pub const VERSION: u32 = 1;

/// A storage whose bytes are not those of a single plain leaf: views, and tensors inside objects, refer to it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Storage {
    /// Length in bytes. Bytes outside the pieces were not sent. The sum over all storages fits an i64, but nothing else
    /// bounds it: a few bytes of manifest can announce terabytes, so the receiver must limit what it allocates.
    pub nbytes: u64,
    /// Pairs of an index into the header's entries and the offset in this storage at which that entry's bytes belong.
    /// No two overlap.
    pub pieces: Vec<(usize, u64)>,
}

/// The parts of a valid manifest that Rust uses. The binding builds the state from the text of the tree.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Manifest {
    /// Version of the grammar.
    pub version: u32,
    /// How many objects the pickle must hold. No reference in the tree is beyond them.
    pub objects: u64,
    /// The storages; a reference to storage `k` means the one at index `k`.
    pub storages: Vec<Storage>,
    /// How many plain leaves the header has ([`crate::container::Entry::is_plain`]).
    pub leaves: u64,
    /// The range of bytes of the text that holds the tree.
    pub tree: Range<usize>,
}

/// Checks the manifest of the container to which `header` belongs. `json` may end with padding: spaces or zero bytes.
///
/// # Errors
/// The first fault found. The version is checked as soon as it is read, references once the whole text was read.
///
/// ```
/// use tensorferry_wire::container::{Entry, Header};
/// use tensorferry_wire::dtype::Dtype;
/// use tensorferry_wire::manifest::validate;
///
/// let shape = [2].into_iter().collect();
/// let weight = Entry { name: "weight".into(), dtype: Dtype::U8, shape, start: 0, end: 2 };
/// let header = Header::new(Vec::new(), vec![weight])?;
///
/// let json = br#"{"version":1,"tree":{"weight":0},"flags":"","objects":0,"storages":[]}"#;
/// assert_eq!(validate(json, &header)?.leaves, 1);
///
/// // There is no leaf 1.
/// let json = br#"{"version":1,"tree":{"weight":1},"flags":"","objects":0,"storages":[]}"#;
/// assert!(validate(json, &header).is_err());
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub fn validate(json: &[u8], header: &Header) -> Result<Manifest, ManifestError> {
    let end = json.iter().rposition(|&b| b != b' ' && b != 0).map_or(0, |last| last + 1);
    let text = std::str::from_utf8(&json[..end]).map_err(|e| ManifestError::Utf8 { at: e.valid_up_to() })?;
    let mut validator = Validator { cursor: Cursor::new(text), header, max_leaf: None, max_object: None };
    let fields = validator.document()?;
    validator.check(fields)
}
