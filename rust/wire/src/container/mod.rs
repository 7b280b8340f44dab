//! The header of a container: the beginning of a safetensors file, restricted to what safetensors accepts.
//!
//! A container is an 8-byte little-endian length, that many bytes of JSON (padded with spaces), then the payload
//! without holes. The JSON maps the name of each entry to its element type, shape and offsets:
//!
//! ```text
//! {"__metadata__":{"format":"pt"},"weight":{"dtype":"F32","shape":[2,3],"data_offsets":[0,24]}}
//! ```
//!
//! A [`Header`] exists only in a valid state. [`Header::new`] and [`Header::decode`] check that
//!
//! - names are unique and none is `__metadata__`, and no key of the metadata occurs twice;
//! - every entry has the size that its shape and element type require, in whole bytes;
//! - the entries cover the payload from 0 to its end without gap or overlap, and that end fits an i64.
//!
//! Entries of no bytes may lie where another entry begins or ends, as in safetensors. The order of entries is the order
//! in the document. Receivers and readers of files rely on these guarantees when they compute addresses and lengths
//! from offsets. A header says nothing about the bytes behind it: the caller compares [`Header::payload_len`] with the
//! length of the container.

mod error;
mod text;

use std::borrow::Cow;

use smallvec::SmallVec;

pub use self::error::HeaderError;
use self::error::clip;
use self::text::{parse, write_number, write_string};
use crate::distinct::Distinct;
use crate::dtype::Dtype;

/// Longest JSON text of a header in bytes, padding included: the limit of safetensors.
pub const MAX_HEADER_LEN: u64 = 100_000_000;
/// Bytes of memory that a byte of a header may cost while it is decoded and as a [`Header`], at most. Those of entries
/// with short names cost a fourth of it; metadata with short keys, or shapes of many dimensions, come close.
pub const DECODED_COST: u64 = 16;
/// Prefix of the names that the format reserves: entries whose names begin with it are not plain leaves of the state.
pub const RESERVED_PREFIX: &str = "__tensorferry__/";
/// The entry with the manifest ([`crate::manifest`]).
pub const MANIFEST_ENTRY: &str = "__tensorferry__/manifest";
/// The entry with the pickle of all objects that the manifest's tree refers to.
pub const PICKLE_ENTRY: &str = "__tensorferry__/pickle";
/// The last entry of a container in a file: the checksums ([`crate::digest`]) of the payload before it.
pub const DIGESTS_ENTRY: &str = "__tensorferry__/digests";

const PREFIX_LEN: usize = 8;
const METADATA: &str = "__metadata__";

/// The sizes of a tensor's dimensions, in elements.
pub type Shape = SmallVec<[u64; 4]>;

/// One tensor: bytes `start..end` of the payload, with the type and shape to read them by.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Entry {
    /// Unique within the header.
    pub name: String,
    /// Type of the elements.
    pub dtype: Dtype,
    /// Sizes of the dimensions; empty for a scalar.
    pub shape: Shape,
    /// First byte, counted from the payload's first.
    pub start: u64,
    /// The byte after the last.
    pub end: u64,
}

impl Entry {
    /// Length of the entry in bytes.
    #[must_use]
    pub fn nbytes(&self) -> u64 {
        self.end - self.start
    }

    /// Whether this is a plain leaf of the state: its name does not begin with [`RESERVED_PREFIX`].
    ///
    /// The manifest counts plain leaves in document order: leaf `n` is the `n`-th entry for which this is true.
    #[must_use]
    pub fn is_plain(&self) -> bool {
        !self.name.starts_with(RESERVED_PREFIX)
    }

    /// The length in bytes that the entry's shape and type require, computed as safetensors does: dimensions are
    /// multiplied in order, so that a zero in front keeps the product from overflowing.
    fn expected_nbytes(&self) -> Result<u64, HeaderError> {
        let overflow = || HeaderError::ShapeOverflow { name: clip(&self.name) };
        let elements = self.shape.iter().try_fold(1u64, |n, &dim| n.checked_mul(dim)).ok_or_else(overflow)?;
        let bits = elements.checked_mul(self.dtype.bits()).ok_or_else(overflow)?;
        if !bits.is_multiple_of(8) {
            return Err(HeaderError::PartialByte { name: clip(&self.name) });
        }
        Ok(bits / 8)
    }
}

/// A valid header: the guarantees in the documentation of [this module](self) hold.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Header {
    metadata: Vec<(String, String)>,
    entries: Vec<Entry>,
    /// Indices of `entries` by their place in the payload.
    by_offset: Vec<u32>,
    payload_len: u64,
}

impl Header {
    /// A header of these entries in this order, after checking each of them and all against each other.
    ///
    /// # Errors
    /// The first fault found: repeated names and keys first, then the entries in the order of their offsets.
    pub fn new(metadata: Vec<(String, String)>, entries: Vec<Entry>) -> Result<Self, HeaderError> {
        check_unique(&metadata, &entries)?;
        let count = u32::try_from(entries.len()).map_err(|_| HeaderError::TooLong(entries.len() as u64))?;
        let offsets = |i: u32| (entries[i as usize].start, entries[i as usize].end);
        let mut by_offset: Vec<u32> = (0..count).collect();
        by_offset.sort_by_key(|&i| offsets(i));

        let mut payload_len = 0;
        for &i in &by_offset {
            let entry = &entries[i as usize];
            let (start, end) = offsets(i);
            let name = || clip(&entry.name);
            if end < start {
                return Err(HeaderError::Reversed { name: name(), start, end });
            }
            if start < payload_len {
                return Err(HeaderError::Overlap { name: name(), start, previous: payload_len });
            }
            if start > payload_len {
                return Err(HeaderError::Hole { name: name(), start, previous: payload_len });
            }
            let expected = entry.expected_nbytes()?;
            if end - start != expected {
                return Err(HeaderError::Size { name: name(), expected, actual: end - start });
            }
            if i64::try_from(end).is_err() {
                return Err(HeaderError::TooLarge { name: name(), end });
            }
            payload_len = end;
        }
        Ok(Self { metadata, entries, by_offset, payload_len })
    }

    /// The entries, in document order.
    #[must_use]
    pub fn entries(&self) -> &[Entry] {
        &self.entries
    }

    /// Each entry with its index in [`Header::entries`], in payload order.
    pub fn in_payload_order(&self) -> impl Iterator<Item = (usize, &Entry)> {
        self.by_offset.iter().map(|&i| (i as usize, &self.entries[i as usize]))
    }

    /// The pairs of `__metadata__`, in document order.
    #[must_use]
    pub fn metadata(&self) -> &[(String, String)] {
        &self.metadata
    }

    /// Bytes of payload, all of them covered by entries.
    #[must_use]
    pub fn payload_len(&self) -> u64 {
        self.payload_len
    }

    /// The entries to which any of the payload's bytes `start..end` belong, in payload order. Entries of no bytes are
    /// never among them.
    pub fn covering(&self, start: u64, end: u64) -> impl Iterator<Item = &Entry> {
        let first = self.by_offset.partition_point(|&i| self.entries[i as usize].end <= start);
        self.by_offset[first..]
            .iter()
            .map(|&i| &self.entries[i as usize])
            .take_while(move |entry| entry.start < end)
            .filter(move |entry| entry.start.max(start) < entry.end.min(end))
    }

    /// The first bytes of a container: length prefix and JSON, padded with spaces to a multiple of `align` bytes.
    ///
    /// [`Header::decode`] returns an equal header for them.
    ///
    /// # Errors
    /// [`HeaderError::Alignment`] if `align` is not a positive multiple of 8 (with 8, the payload is aligned as
    /// safetensors writes it); [`HeaderError::TooLong`] if the JSON is beyond [`MAX_HEADER_LEN`].
    pub fn encode(&self, align: u64) -> Result<Vec<u8>, HeaderError> {
        if align == 0 || !align.is_multiple_of(8) {
            return Err(HeaderError::Alignment(align));
        }
        let names: usize = self.entries.iter().map(|entry| entry.name.len()).sum();
        let mut out = Vec::with_capacity(PREFIX_LEN + names + 112 * self.entries.len() + 1024);
        out.extend_from_slice(&[0; PREFIX_LEN]);
        self.write_json(&mut out);

        let total = (out.len() as u64).checked_next_multiple_of(align).ok_or(HeaderError::Alignment(align))?;
        let json_len = total - PREFIX_LEN as u64;
        let (Ok(total), true) = (usize::try_from(total), json_len <= MAX_HEADER_LEN) else {
            return Err(HeaderError::TooLong(json_len));
        };
        out.resize(total, b' ');
        out[..PREFIX_LEN].copy_from_slice(&json_len.to_le_bytes());
        Ok(out)
    }

    fn write_json(&self, out: &mut Vec<u8>) {
        out.push(b'{');
        if !self.metadata.is_empty() {
            out.extend_from_slice(b"\"__metadata__\":{");
            for (i, (key, value)) in self.metadata.iter().enumerate() {
                out.extend_from_slice(if i == 0 { b"" } else { b"," });
                write_string(out, key);
                out.push(b':');
                write_string(out, value);
            }
            out.extend_from_slice(b"},");
        }
        for entry in &self.entries {
            write_string(out, &entry.name);
            out.extend_from_slice(b":{\"dtype\":\"");
            out.extend_from_slice(entry.dtype.name().as_bytes());
            out.extend_from_slice(b"\",\"shape\":[");
            for (i, &dim) in entry.shape.iter().enumerate() {
                out.extend_from_slice(if i == 0 { b"" } else { b"," });
                write_number(out, dim);
            }
            out.extend_from_slice(b"],\"data_offsets\":[");
            write_number(out, entry.start);
            out.push(b',');
            write_number(out, entry.end);
            out.extend_from_slice(b"]},");
        }
        if out.last() == Some(&b',') {
            out.pop();
        }
        out.push(b'}');
    }

    /// The length in bytes of a whole header, prefix included, computed from its first 8 bytes. A receiver that has
    /// only read the prefix learns from it how much more to request; the result is at most `8 + MAX_HEADER_LEN`.
    pub fn total_len(prefix: [u8; 8]) -> Result<u64, HeaderError> {
        match u64::from_le_bytes(prefix) {
            len @ 0..2 => Err(HeaderError::TooShort(len)),
            len if len > MAX_HEADER_LEN => Err(HeaderError::TooLong(len)),
            len => Ok(len + PREFIX_LEN as u64),
        }
    }

    /// Reads a header from its 8-byte prefix and its JSON; `bytes` must end where the JSON's padding does.
    ///
    /// The JSON begins with `{` and may be followed by spaces only. Each entry has the fields `dtype`, `shape` and
    /// `data_offsets`, each once and in any order, and no others.
    ///
    /// ```
    /// use tensorferry_wire::container::{Header, HeaderError};
    ///
    /// let json = br#"{"weight":{"dtype":"U8","shape":[2],"data_offsets":[1,3]}}"#;
    /// let mut bytes = (json.len() as u64).to_le_bytes().to_vec();
    /// bytes.extend_from_slice(json);
    /// assert!(matches!(Header::decode(&bytes), Err(HeaderError::Hole { start: 1, previous: 0, .. })));
    /// ```
    pub fn decode(bytes: &[u8]) -> Result<Self, HeaderError> {
        let have = bytes.len() as u64;
        let Some((prefix, json)) = bytes.split_first_chunk::<PREFIX_LEN>() else {
            return Err(HeaderError::Truncated { have, need: PREFIX_LEN as u64 });
        };
        let need = Self::total_len(*prefix)?;
        if have < need {
            return Err(HeaderError::Truncated { have, need });
        }
        if have > need {
            return Err(HeaderError::Trailing(have - need));
        }
        let text = std::str::from_utf8(json).map_err(|e| HeaderError::Utf8 { at: e.valid_up_to() })?;
        let (metadata, entries) = parse(text)?;
        Self::new(metadata, entries)
    }
}

/// Checks that no two entries and no two keys of the metadata have one name, and that no entry is `__metadata__`.
fn check_unique(metadata: &[(String, String)], entries: &[Entry]) -> Result<(), HeaderError> {
    let mut names = Distinct::with_capacity(entries.len());
    for (number, Entry { name, .. }) in entries.iter().enumerate() {
        if name == METADATA {
            return Err(HeaderError::ReservedName);
        }
        names.add(name, number);
    }
    if let Some(number) = names.repeated(|number| Cow::Borrowed(&entries[number].name)) {
        return Err(HeaderError::DuplicateName { name: clip(&entries[number].name) });
    }
    let mut keys = Distinct::with_capacity(metadata.len());
    for (number, (key, _)) in metadata.iter().enumerate() {
        keys.add(key, number);
    }
    match keys.repeated(|number| Cow::Borrowed(&metadata[number].0)) {
        Some(number) => Err(HeaderError::DuplicateMetadata { key: clip(&metadata[number].0) }),
        None => Ok(()),
    }
}

type ParsedHeader = (Vec<(String, String)>, Vec<Entry>);
