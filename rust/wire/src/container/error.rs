//! Why a header is not valid.

use crate::json::JsonError;

/// Why a header is not valid. Names of entries are clipped to a readable length.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[allow(missing_docs, reason = "the messages say what the fields are")]
pub enum HeaderError {
    /// There are fewer bytes than the length prefix announces.
    #[error("header cut short: {have} bytes instead of {need}")]
    Truncated { have: u64, need: u64 },
    /// There are more bytes than the length prefix announces.
    #[error("{0} bytes after the header's end")]
    Trailing(u64),
    /// The length prefix is beyond [`MAX_HEADER_LEN`].
    #[error("header of {0} bytes (at most 100000000 are allowed)")]
    TooLong(u64),
    /// The length prefix leaves no room for an empty object.
    #[error("header of {0} bytes, too short for an empty one")]
    TooShort(u64),
    /// The JSON is not UTF-8.
    #[error("header is not UTF-8 at byte {at}")]
    Utf8 { at: usize },
    /// The text is not valid JSON, or not the JSON of a header.
    #[error("header is malformed {0}")]
    Json(#[from] JsonError),
    /// The JSON is followed by something other than spaces.
    #[error("header goes on after its JSON at byte {at}")]
    AfterJson { at: usize },
    /// Two entries share a name.
    #[error("two entries are named {name:?}")]
    DuplicateName { name: String },
    /// An entry is named `__metadata__`.
    #[error("an entry may not be named \"__metadata__\"")]
    ReservedName,
    /// `__metadata__` occurs twice, or one of its keys does.
    #[error("metadata has {key:?} twice")]
    DuplicateMetadata { key: String },
    /// An entry has a field other than `dtype`, `shape` and `data_offsets`.
    #[error("entry {name:?} has an unknown field {field:?}")]
    UnknownField { name: String, field: String },
    /// An entry has a field twice.
    #[error("entry {name:?} has the field {field:?} twice")]
    DuplicateField { name: String, field: &'static str },
    /// An entry lacks a field.
    #[error("entry {name:?} has no field {field:?}")]
    MissingField { name: String, field: &'static str },
    /// An element type that safetensors does not have.
    #[error("entry {name:?} is of an unknown type {dtype:?}")]
    UnknownDtype { name: String, dtype: String },
    /// An entry ends before it starts.
    #[error("entry {name:?} starts at {start} but ends at {end}")]
    Reversed { name: String, start: u64, end: u64 },
    /// An entry starts inside the one before it.
    #[error("entry {name:?} starts at {start}, inside the one that ends at {previous}")]
    Overlap { name: String, start: u64, previous: u64 },
    /// Bytes of the payload belong to no entry.
    #[error("entry {name:?} starts at {start}, leaving a hole from {previous}")]
    Hole { name: String, start: u64, previous: u64 },
    /// The offsets do not fit the shape and the type.
    #[error("entry {name:?} has {actual} bytes where its shape and type ask for {expected}")]
    Size { name: String, expected: u64, actual: u64 },
    /// The shape has more bits than a u64 can count.
    #[error("entry {name:?} has a shape that overflows")]
    ShapeOverflow { name: String },
    /// The payload is longer than the largest i64, the bound of offsets into files and memory.
    #[error("entry {name:?} ends at {end}, beyond what can be addressed")]
    TooLarge { name: String, end: u64 },
    /// A packed type ends within a byte.
    #[error("entry {name:?} does not end on a whole byte")]
    PartialByte { name: String },
    /// [`Header::encode`] was asked for an alignment that is not a positive multiple of 8.
    #[error("header cannot be aligned to {0} bytes")]
    Alignment(u64),
}

/// At most the first 200 bytes of a name, for error messages: a hostile name can be as long as the header.
pub(super) fn clip(name: &str) -> String {
    let mut end = name.len().min(200);
    while !name.is_char_boundary(end) {
        end -= 1;
    }
    if end < name.len() { format!("{}...", &name[..end]) } else { name.to_owned() }
}
