//! Why an index cannot be used, or the parts of ranks make no checkpoint.

use super::BoxText;

/// Why the bytes of an index cannot be used.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[allow(missing_docs, reason = "the messages say what the fields are")]
pub enum IndexError {
    /// The bytes do not begin as an index does.
    #[error("not an index of a checkpoint")]
    Magic,
    /// The index is of a version that this crate does not read.
    #[error("index version {found} is unknown to this tensorferry, which reads version 1: upgrade the older side")]
    Version { found: u32 },
    /// A column ends before its rows do, or has a width that no column has.
    #[error("index is cut off or damaged in its column {column}")]
    Column { column: &'static str },
    /// A column has more or fewer rows than the others need.
    #[error("index has more or fewer rows in its column {column} than it needs")]
    Rows { column: &'static str },
    /// A key, a dtype or a path is not UTF-8.
    #[error("index has text that is not UTF-8 in its column {column}")]
    Utf8 { column: &'static str },
    /// A key occurs twice.
    #[error("index has the key {key:?} twice")]
    RepeatedKey { key: String },
    /// There are more dtypes than an index can name.
    #[error("{key:?} has one dtype too many: an index names at most 255")]
    Dtypes { key: String },
    /// A number has no meaning where it stands.
    #[error("{key:?} has {value} as its {what}")]
    Value { key: String, what: &'static str, value: u64 },
    /// A shape is too large for any tensor.
    #[error("{key:?} has a shape that no tensor has")]
    Shape { key: String },
    /// A chunk is not inside of its tensor.
    #[error("{key:?} has a chunk {chunk}, which is not inside of its shape")]
    Outside { key: String, chunk: BoxText },
}

/// Why the parts that ranks have make no whole tensor.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[allow(missing_docs, reason = "the messages say what the fields are")]
pub enum MergeError {
    /// Two ranks have values of different kinds, dtypes or shapes under one key.
    #[error(
        "{key}: rank {first_rank} has {first}, and rank {rank} has {other}: save it in one dtype, or give each a key of \
         its own"
    )]
    Differs { key: String, first_rank: usize, first: String, rank: usize, other: String },
    /// Two chunks overlap without being replicas.
    #[error(
        "{key} cannot be a part of a checkpoint: rank {first_rank} has {first}, rank {rank} has {other}, and they overlap"
    )]
    Overlap { key: String, first_rank: usize, first: BoxText, rank: usize, other: BoxText },
    /// The chunks do not have all elements.
    #[error(
        "{key} cannot be a part of a checkpoint: {have} of the {need} elements of its shape {shape:?} are there, in {ranks}"
    )]
    Missing { key: String, have: u64, need: u64, shape: Vec<u64>, ranks: String },
    /// Two ranks that are not of one mesh have the same part, with values that differ or cannot be compared.
    #[error(
        "{key} cannot be a part of a checkpoint: ranks {first_rank} and {rank}, which are not of one mesh, have different \
         values of {chunk} or such that cannot be compared: give each tensor a key of its own"
    )]
    Values { key: String, first_rank: usize, rank: usize, chunk: BoxText },
    /// The planner's metadata has a part that no rank has written.
    #[error("the planner's metadata names {part}, which no rank has written")]
    NotWritten { part: String },
    /// A rank has written what the planner's metadata does not have.
    #[error("{part} was written, and the planner's metadata does not describe it")]
    NotPlanned { part: String },
    /// What was written is not what the planner's metadata says.
    #[error("{key}: the planner's metadata says that it is {planned}, and what was written is {written}")]
    Contradicts { key: String, planned: String, written: String },
}

/// Why a box of a tensor cannot be read.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[allow(missing_docs, reason = "the messages say what the fields are")]
pub enum OverlapError {
    /// The box is not inside of the tensor, or has another number of dimensions.
    #[error("{wanted} is not inside of the shape {shape:?}")]
    Outside { wanted: BoxText, shape: Vec<u64> },
    /// The chunks do not have all elements of the box.
    #[error("of {wanted}, the checkpoint has {have} of {need} elements")]
    Missing { wanted: BoxText, have: u64, need: u64 },
    /// Two chunks overlap in the box.
    #[error("two chunks of the checkpoint overlap in {wanted}: {first} and {other}")]
    Overlap { wanted: BoxText, first: BoxText, other: BoxText },
}
