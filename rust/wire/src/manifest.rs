//! The manifest: the tree of the state, and where the pieces of its storages lie.
//!
//! A JSON object, written in one go and checked here in one pass, before anything of it is acted on:
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
//! Keys of one dict must differ as Python compares them (1, 1.0 and true are one key). Further top-level fields are
//! read over, so that a later version can add some without leaving this one behind.

use std::borrow::Cow;
use std::collections::HashSet;
use std::fmt::Write as _;
use std::ops::Range;

use crate::container::{Header, MANIFEST_ENTRY, PICKLE_ENTRY};
use crate::distinct::Distinct;
use crate::json::{Cursor, JsonError};

/// Most arrays and objects inside each other, the manifest's own object included.
pub const MAX_DEPTH: usize = 256;
/// The version this crate reads and writes.
pub const VERSION: u32 = 1;

/// A manifest that cannot be used.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[allow(missing_docs, reason = "the messages say what the fields are")]
pub enum ManifestError {
    /// Written by another version.
    #[error("manifest version {found} is unknown to this tensorferry, which reads version 1: upgrade the older side")]
    Version { found: u64 },
    /// Not UTF-8.
    #[error("manifest is not UTF-8 at byte {at}")]
    Utf8 { at: usize },
    /// Not the JSON of a manifest.
    #[error("manifest is malformed {0}")]
    Json(#[from] JsonError),
    /// Something after the JSON.
    #[error("manifest goes on after its JSON at byte {at}")]
    AfterJson { at: usize },
    /// More than [`MAX_DEPTH`] levels.
    #[error("manifest is nested more than 256 deep at byte {at}")]
    TooDeep { at: usize },
    /// A top-level field is there twice.
    #[error("manifest has two fields {field:?}")]
    DuplicateField { field: String },
    /// A top-level field is not there.
    #[error("manifest has no field {field:?}")]
    MissingField { field: &'static str },
    /// A dict has one key twice.
    #[error("a dict of the tree has a key twice at byte {at}")]
    DuplicateKey { at: usize },
    /// A kind of node that version 1 does not have.
    #[error("tree has a node of an unknown kind at byte {at}")]
    UnknownNode { at: usize },
    /// A plain leaf that the header does not have.
    #[error("tree refers to leaf {leaf}, but there are {leaves}")]
    Leaf { leaf: u64, leaves: u64 },
    /// An object that the pickle does not have.
    #[error("tree refers to object {object}, but there are {objects}")]
    Object { object: u64, objects: u64 },
    /// The flags are not one per plain leaf.
    #[error("{flags} flags for {leaves} leaves")]
    FlagCount { flags: u64, leaves: u64 },
    /// A flag other than '0' to '3'.
    #[error("flag of leaf {leaf} is not one of 0 to 3")]
    Flag { leaf: usize },
    /// A gradient is asked for where none can be.
    #[error("leaf {leaf} requires a gradient, and its elements are {dtype}")]
    Gradient { leaf: usize, dtype: &'static str },
    /// A dimension is so long that no tensor has it, though others of no length leave it no bytes.
    #[error("leaf {leaf} has a shape that no tensor has")]
    Shape { leaf: usize },
    /// The storages have more bytes than memory can.
    #[error("storages have more bytes than can be addressed, from storage {storage} on")]
    StorageOverflow { storage: usize },
    /// A piece is an entry that is not there, or not one of tensor bytes.
    #[error("storage {storage} refers to entry {entry}, which is no tensor of the header")]
    PieceEntry { storage: usize, entry: u64 },
    /// An entry is a piece twice.
    #[error("storage {storage} takes entry {entry}, which is a piece already")]
    PieceTaken { storage: usize, entry: u64 },
    /// A piece goes beyond its storage.
    #[error("storage {storage} of {nbytes} bytes has a piece of {len} at {lo}")]
    PieceBounds { storage: usize, nbytes: u64, lo: u64, len: u64 },
    /// Two pieces share bytes.
    #[error("storage {storage} has two pieces over its byte {lo}")]
    PieceOverlap { storage: usize, lo: u64 },
}

/// A storage that is not one plain leaf: what views and objects look into.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Storage {
    /// Its length. Bytes outside the pieces were not sent. The sum over all storages fits an i64, but nothing else
    /// bounds it: what it costs to allocate is for the receiver to judge.
    pub nbytes: u64,
    /// (index into the header's entries, first byte of the storage): the entry's bytes belong there. No two overlap.
    pub pieces: Vec<(usize, u64)>,
}

/// What Rust needs to know of a valid manifest; the tree itself is built in Python.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Manifest {
    /// Version of the grammar.
    pub version: u32,
    /// How many objects the pickle must hold.
    pub objects: u64,
    /// The storages, in order of their numbers.
    pub storages: Vec<Storage>,
    /// How many plain leaves the header has.
    pub leaves: u64,
    /// Where the tree lies in the text.
    pub tree: Range<usize>,
}

/// Checks the manifest of a container with this header. `json` may end with padding: spaces or zero bytes.
pub fn validate(json: &[u8], header: &Header) -> Result<Manifest, ManifestError> {
    let end = json.iter().rposition(|&b| b != b' ' && b != 0).map_or(0, |last| last + 1);
    let text = std::str::from_utf8(&json[..end]).map_err(|e| ManifestError::Utf8 { at: e.valid_up_to() })?;
    let mut walk = Walk { cursor: Cursor::new(text), header, max_leaf: None, max_object: None };
    let fields = walk.document()?;
    walk.check(fields)
}

#[derive(Default)]
struct Fields<'a> {
    version: Option<u32>,
    tree: Option<Range<usize>>,
    flags: Option<Cow<'a, str>>,
    objects: Option<u64>,
    storages: Option<Vec<Storage>>,
}

/// The pass over the text. References are checked at the end, since the fields may come in any order.
struct Walk<'a> {
    cursor: Cursor<'a>,
    header: &'a Header,
    max_leaf: Option<u64>,
    max_object: Option<u64>,
}

impl<'a> Walk<'a> {
    fn document(&mut self) -> Result<Fields<'a>, ManifestError> {
        let mut fields = Fields::default();
        let mut seen = HashSet::new();
        self.cursor.expect(b'{', "an object")?;
        let mut first = true;
        while self.cursor.more(&mut first, b'}')? {
            let field = self.cursor.member()?;
            match &*field {
                "version" => fields.version = Some(self.version()?),
                "tree" => {
                    self.cursor.peek();
                    let start = self.cursor.at();
                    self.node(MAX_DEPTH - 1)?;
                    fields.tree = Some(start..self.cursor.at());
                }
                "flags" => fields.flags = Some(self.cursor.string()?),
                "objects" => fields.objects = Some(self.cursor.unsigned()?),
                "storages" => fields.storages = Some(self.storages()?),
                _ => self.cursor.skip(MAX_DEPTH - 1)?,
            }
            if let Some(field) = seen.replace(field) {
                return Err(ManifestError::DuplicateField { field: field.chars().take(100).collect() });
            }
        }
        if self.cursor.peek().is_some() {
            return Err(ManifestError::AfterJson { at: self.cursor.at() });
        }
        Ok(fields)
    }

    /// Refused as soon as it is read: another version may well have another grammar.
    fn version(&mut self) -> Result<u32, ManifestError> {
        match self.cursor.unsigned()? {
            1 => Ok(VERSION),
            found => Err(ManifestError::Version { found }),
        }
    }

    /// One node of at most `depth` nested arrays and objects. The recursion ends with `depth`.
    fn node(&mut self, depth: usize) -> Result<(), ManifestError> {
        match self.cursor.peek() {
            Some(b'{') => self.dict(depth),
            Some(b'[') => self.tagged(depth),
            _ => self.leaf(),
        }
    }

    fn leaf(&mut self) -> Result<(), ManifestError> {
        if self.cursor.eat(b'-') {
            let negative = self.cursor.adjacent_unsigned()?;
            let Some(object) = negative.checked_sub(1) else {
                return Ok(self.cursor.fail("a node (there is no -0)")?);
            };
            self.saw_object(object);
        } else {
            self.max_leaf = self.max_leaf.max(Some(self.cursor.unsigned()?));
        }
        Ok(())
    }

    fn object(&mut self) -> Result<(), ManifestError> {
        let object = self.cursor.unsigned()?;
        self.saw_object(object);
        Ok(())
    }

    fn saw_object(&mut self, object: u64) {
        self.max_object = self.max_object.max(Some(object));
    }

    /// What `depth` is within an array or object that opens here.
    fn deeper(&mut self, depth: usize) -> Result<usize, ManifestError> {
        depth.checked_sub(1).ok_or(ManifestError::TooDeep { at: self.cursor.at() })
    }

    fn dict(&mut self, depth: usize) -> Result<(), ManifestError> {
        let depth = self.deeper(depth)?;
        self.cursor.expect(b'{', "an object")?;
        let (mut first, mut keys) = (true, Distinct::default());
        while self.cursor.more(&mut first, b'}')? {
            self.cursor.peek();
            let at = self.cursor.at();
            keys.add(&self.cursor.member()?, at);
            self.node(depth)?;
        }
        // What was read once can be read again.
        match keys.repeated(|at| self.cursor.back_at(at).string().unwrap_or_default()) {
            Some(at) => Err(ManifestError::DuplicateKey { at }),
            None => Ok(()),
        }
    }

    fn tagged(&mut self, depth: usize) -> Result<(), ManifestError> {
        let depth = self.deeper(depth)?;
        self.cursor.expect(b'[', "an array")?;
        let at = self.cursor.at();
        match &*self.cursor.string()? {
            "l" | "t" => {}
            "n" => {
                self.cursor.expect(b',', "an object's number")?;
                self.object()?;
            }
            "q" => {
                self.cursor.expect(b',', "a deque's length")?;
                if !self.cursor.eat_word("null") {
                    self.cursor.unsigned()?;
                }
            }
            "a" | "f" => {
                self.cursor.expect(b',', "an object's number")?;
                self.object()?;
                self.cursor.expect(b',', "the node that has the attributes")?;
                self.node(depth)?;
                return Ok(self.cursor.expect(b']', "the end of a node with attributes")?);
            }
            "o" => {
                self.cursor.expect(b',', "an OrderedDict's items")?;
                self.dict(depth)?;
                return Ok(self.cursor.expect(b']', "the end of an OrderedDict")?);
            }
            "d" => {
                self.cursor.expect(b',', "a dict's kind")?;
                if !matches!(&*self.cursor.string()?, "d" | "o") {
                    return Err(ManifestError::UnknownNode { at });
                }
                self.cursor.expect(b',', "a dict's items")?;
                self.pairs(depth)?;
                return Ok(self.cursor.expect(b']', "the end of a dict")?);
            }
            _ => return Err(ManifestError::UnknownNode { at }),
        }
        while self.cursor.more(&mut false, b']')? {
            self.node(depth)?;
        }
        Ok(())
    }

    fn pairs(&mut self, depth: usize) -> Result<(), ManifestError> {
        let depth = self.deeper(depth)?;
        self.cursor.expect(b'[', "an array of pairs")?;
        let (mut first, mut seen) = (true, HashSet::new());
        while self.cursor.more(&mut first, b']')? {
            let depth = self.deeper(depth)?;
            self.cursor.expect(b'[', "a pair")?;
            let mut key = String::new();
            self.key(&mut key, depth)?;
            if !seen.insert(key) {
                return Err(ManifestError::DuplicateKey { at: self.cursor.at() });
            }
            self.cursor.expect(b',', "a node")?;
            self.node(depth)?;
            self.cursor.expect(b']', "the end of a pair")?;
        }
        Ok(())
    }

    /// Reads a key and writes it to `out` in a form in which keys are equal if Python holds them equal. Objects are
    /// equal here if they are the same one.
    fn key(&mut self, out: &mut String, depth: usize) -> Result<(), ManifestError> {
        match self.cursor.peek() {
            Some(b'"') => {
                let text = self.cursor.string()?;
                // the length keeps apart what a tuple joins
                let _ = write!(out, "s{}:{text}", text.len());
            }
            Some(b'[') => {
                let depth = self.deeper(depth)?;
                self.cursor.expect(b'[', "an array")?;
                let at = self.cursor.at();
                match &*self.cursor.string()? {
                    "r" => {
                        self.cursor.expect(b',', "an object's number")?;
                        let object = self.cursor.unsigned()?;
                        self.saw_object(object);
                        let _ = write!(out, "r{object};");
                        self.cursor.expect(b']', "the end of a key")?;
                    }
                    "t" => {
                        out.push('(');
                        while self.cursor.more(&mut false, b']')? {
                            self.key(out, depth)?;
                        }
                        out.push(')');
                    }
                    _ => return Err(ManifestError::UnknownNode { at }),
                }
            }
            Some(b't') if self.cursor.eat_word("true") => out.push_str("i1;"),
            Some(b'f') if self.cursor.eat_word("false") => out.push_str("i0;"),
            Some(b'n') if self.cursor.eat_word("null") => out.push('z'),
            _ => {
                let written = self.cursor.number()?;
                let Some(()) = write_number(out, written) else {
                    return Ok(self.cursor.fail("a number that is finite")?);
                };
            }
        }
        Ok(())
    }

    fn storages(&mut self) -> Result<Vec<Storage>, ManifestError> {
        let mut storages = Vec::new();
        let mut first = true;
        self.cursor.expect(b'[', "an array of storages")?;
        while self.cursor.more(&mut first, b']')? {
            self.cursor.expect(b'[', "a storage")?;
            let nbytes = self.cursor.unsigned()?;
            self.cursor.expect(b',', "a storage's pieces")?;
            self.cursor.expect(b'[', "a storage's pieces")?;
            let mut pieces = Vec::new();
            let mut first = true;
            while self.cursor.more(&mut first, b']')? {
                self.cursor.expect(b'[', "a piece")?;
                let entry = self.cursor.unsigned()?;
                self.cursor.expect(b',', "a piece's place")?;
                let lo = self.cursor.unsigned()?;
                self.cursor.expect(b']', "the end of a piece")?;
                let known = usize::try_from(entry).ok().filter(|&i| self.is_tensor(i));
                let storage = storages.len();
                pieces.push((known.ok_or(ManifestError::PieceEntry { storage, entry })?, lo));
            }
            self.cursor.expect(b']', "the end of a storage")?;
            storages.push(Storage { nbytes, pieces });
        }
        Ok(storages)
    }

    fn is_tensor(&self, entry: usize) -> bool {
        self.header.entries().get(entry).is_some_and(|e| e.name != MANIFEST_ENTRY && e.name != PICKLE_ENTRY)
    }

    fn check(&self, fields: Fields<'_>) -> Result<Manifest, ManifestError> {
        let missing = |field| ManifestError::MissingField { field };
        let version = fields.version.ok_or_else(|| missing("version"))?;
        let tree = fields.tree.ok_or_else(|| missing("tree"))?;
        let flags = fields.flags.ok_or_else(|| missing("flags"))?;
        let objects = fields.objects.ok_or_else(|| missing("objects"))?;
        let storages = fields.storages.ok_or_else(|| missing("storages"))?;

        let leaves = self.header.entries().iter().filter(|entry| entry.is_plain()).count() as u64;
        if let Some(leaf) = self.max_leaf.filter(|&leaf| leaf >= leaves) {
            return Err(ManifestError::Leaf { leaf, leaves });
        }
        if let Some(object) = self.max_object.filter(|&object| object >= objects) {
            return Err(ManifestError::Object { object, objects });
        }
        if !flags.is_empty() && flags.len() as u64 != leaves {
            return Err(ManifestError::FlagCount { flags: flags.len() as u64, leaves });
        }
        if let Some(leaf) = flags.bytes().position(|flag| !(b'0'..=b'3').contains(&flag)) {
            return Err(ManifestError::Flag { leaf });
        }
        self.check_leaves(flags.as_bytes())?;
        self.check_storages(&storages)?;
        Ok(Manifest { version, objects, storages, leaves, tree })
    }

    /// Whether a tensor can be made of each leaf.
    fn check_leaves(&self, flags: &[u8]) -> Result<(), ManifestError> {
        for (leaf, entry) in self.header.entries().iter().filter(|entry| entry.is_plain()).enumerate() {
            // Strides are counted as if every dimension had a length.
            let most = entry.shape.iter().try_fold(entry.dtype.bits(), |n, &dim| n.checked_mul(dim.max(1)));
            if most.is_none_or(|bits| i64::try_from(bits).is_err()) {
                return Err(ManifestError::Shape { leaf });
            }
            if flags.get(leaf).is_some_and(|flag| (flag - b'0') & 2 != 0) && !entry.dtype.has_gradient() {
                return Err(ManifestError::Gradient { leaf, dtype: entry.dtype.name() });
            }
        }
        Ok(())
    }

    fn check_storages(&self, storages: &[Storage]) -> Result<(), ManifestError> {
        let entries = self.header.entries();
        let mut taken = HashSet::new();
        let mut total = 0u64;
        for (storage, Storage { nbytes, pieces }) in storages.iter().enumerate() {
            let nbytes = *nbytes;
            total = total
                .checked_add(nbytes)
                .filter(|&total| i64::try_from(total).is_ok())
                .ok_or(ManifestError::StorageOverflow { storage })?;
            let mut spans = Vec::with_capacity(pieces.len());
            for &(entry, lo) in pieces {
                if !taken.insert(entry) {
                    return Err(ManifestError::PieceTaken { storage, entry: entry as u64 });
                }
                let len = entries[entry].nbytes();
                let end = lo.checked_add(len).filter(|&end| end <= nbytes);
                spans.push((lo, end.ok_or(ManifestError::PieceBounds { storage, nbytes, lo, len })?));
            }
            spans.sort_unstable();
            if let Some(two) = spans.windows(2).find(|two| two[1].0 < two[0].1) {
                return Err(ManifestError::PieceOverlap { storage, lo: two[1].0 });
            }
        }
        Ok(())
    }
}

/// Writes a number so that equal ones look alike: an integer's digits, or the shortest digits of another number. None
/// if it is beyond what a float can hold.
fn write_number(out: &mut String, written: &str) -> Option<()> {
    let is_integer = written.bytes().all(|b| b == b'-' || b.is_ascii_digit());
    if is_integer {
        let digits = if written == "-0" { "0" } else { written };
        let _ = write!(out, "i{digits};");
        return Some(());
    }
    let value: f64 = written.parse().ok()?;
    if !value.is_finite() {
        return None;
    }
    // exact, like the comparison of int and float in Python; adding zero turns -0 into 0
    let _ = if value.fract() == 0.0 { write!(out, "i{:.0};", value + 0.0) } else { write!(out, "f{value:?};") };
    Some(())
}
