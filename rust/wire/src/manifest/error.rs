//! Why a manifest cannot be used.

use crate::json::JsonError;

/// Why a manifest cannot be used. `at` is an offset into its text, in bytes.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[allow(missing_docs, reason = "the messages say what the fields are")]
pub enum ManifestError {
    /// The manifest is of another version of the format.
    #[error("manifest version {found} is unknown to this tensorferry, which reads version 1: upgrade the older side")]
    Version { found: u64 },
    /// The text is not UTF-8.
    #[error("manifest is not UTF-8 at byte {at}")]
    Utf8 { at: usize },
    /// The text is not valid JSON, or not the JSON of a manifest.
    #[error("manifest is malformed {0}")]
    Json(#[from] JsonError),
    /// The JSON is followed by something other than padding.
    #[error("manifest goes on after its JSON at byte {at}")]
    AfterJson { at: usize },
    /// Arrays and objects of the tree are nested more than [`MAX_DEPTH`] deep; in a field that is not known, this is
    /// [`ManifestError::Json`].
    #[error("manifest is nested more than 256 deep at byte {at}")]
    TooDeep { at: usize },
    /// A top-level field occurs twice.
    #[error("manifest has two fields {field:?}")]
    DuplicateField { field: String },
    /// A required top-level field is missing.
    #[error("manifest has no field {field:?}")]
    MissingField { field: &'static str },
    /// A dict has one key twice.
    #[error("a dict of the tree has a key twice at byte {at}")]
    DuplicateKey { at: usize },
    /// A node or key has a tag that version 1 does not define.
    #[error("tree has a node of an unknown kind at byte {at}")]
    UnknownNode { at: usize },
    /// The tree refers to a plain leaf that the header does not have.
    #[error("tree refers to leaf {leaf}, but there are {leaves}")]
    Leaf { leaf: u64, leaves: u64 },
    /// The tree refers to an object with a number that is not below `objects`.
    #[error("tree refers to object {object}, but there are {objects}")]
    Object { object: u64, objects: u64 },
    /// The number of flags is neither zero nor the number of plain leaves.
    #[error("{flags} flags for {leaves} leaves")]
    FlagCount { flags: u64, leaves: u64 },
    /// A flag other than '0' to '3'.
    #[error("flag of leaf {leaf} is not one of 0 to 3")]
    Flag { leaf: usize },
    /// A leaf is marked as requiring a gradient, but its element type cannot have one.
    #[error("leaf {leaf} requires a gradient, and its elements are {dtype}")]
    Gradient { leaf: usize, dtype: &'static str },
    /// A shape is too large for any tensor, even if a dimension of length zero leaves it without bytes.
    #[error("leaf {leaf} has a shape that no tensor has")]
    Shape { leaf: usize },
    /// The lengths of the storages add up to more than an i64 can count.
    #[error("storages have more bytes than can be addressed, from storage {storage} on")]
    StorageOverflow { storage: usize },
    /// A piece refers to an entry that the header does not have, or to the manifest or the pickle.
    #[error("storage {storage} refers to entry {entry}, which is no tensor of the header")]
    PieceEntry { storage: usize, entry: u64 },
    /// An entry is used as a piece a second time.
    #[error("storage {storage} takes entry {entry}, which is a piece already")]
    PieceTaken { storage: usize, entry: u64 },
    /// A piece extends beyond the end of its storage.
    #[error("storage {storage} of {nbytes} bytes has a piece of {len} at {lo}")]
    PieceBounds { storage: usize, nbytes: u64, lo: u64, len: u64 },
    /// Two pieces of a storage overlap.
    #[error("storage {storage} has two pieces over its byte {lo}")]
    PieceOverlap { storage: usize, lo: u64 },
}
