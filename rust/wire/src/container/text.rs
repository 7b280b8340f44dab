//! The JSON text of a header: how it is read and written.

use super::error::clip;
use super::{Entry, HeaderError, METADATA, ParsedHeader, Shape};
use crate::dtype::Dtype;
use crate::json::{Cursor, JsonError};

/// Reads the JSON of a header. How its entries relate to each other is left to [`Header::new`].
pub(super) fn parse(text: &str) -> Result<ParsedHeader, HeaderError> {
    if !text.starts_with('{') {
        return Err(JsonError { at: 0, expected: "an object" }.into());
    }
    let mut cursor = Cursor::new(text);
    cursor.expect(b'{', "an object")?;
    let mut metadata = None;
    let mut entries = Vec::new();
    let mut first = true;
    while cursor.more(&mut first, b'}')? {
        let name = cursor.member()?;
        if name != METADATA {
            entries.push(parse_entry(&mut cursor, name.into_owned())?);
        } else if metadata.replace(parse_metadata(&mut cursor)?).is_some() {
            return Err(HeaderError::DuplicateMetadata { key: METADATA.to_owned() });
        }
    }
    if cursor.rest().bytes().any(|byte| byte != b' ') {
        return Err(HeaderError::AfterJson { at: cursor.at() });
    }
    Ok((metadata.unwrap_or_default(), entries))
}

fn parse_metadata(cursor: &mut Cursor<'_>) -> Result<Vec<(String, String)>, HeaderError> {
    let mut metadata = Vec::new();
    // safetensors reads null as none
    if cursor.eat_word("null") {
        return Ok(metadata);
    }
    cursor.expect(b'{', "an object of strings")?;
    let mut first = true;
    while cursor.more(&mut first, b'}')? {
        let key = cursor.member()?.into_owned();
        metadata.push((key, cursor.string()?.into_owned()));
    }
    Ok(metadata)
}

fn parse_entry(cursor: &mut Cursor<'_>, name: String) -> Result<Entry, HeaderError> {
    let (mut dtype, mut shape, mut offsets) = (None, None, None);
    cursor.expect(b'{', "an entry, which is an object")?;
    let mut first = true;
    while cursor.more(&mut first, b'}')? {
        let field = cursor.member()?;
        let repeated = match &*field {
            "dtype" => {
                let value = cursor.string()?;
                let known = Dtype::from_name(&value)
                    .ok_or_else(|| HeaderError::UnknownDtype { name: clip(&name), dtype: clip(&value) })?;
                dtype.replace(known).is_some().then_some("dtype")
            }
            "shape" => shape.replace(parse_shape(cursor)?).is_some().then_some("shape"),
            "data_offsets" => offsets.replace(parse_offsets(cursor)?).is_some().then_some("data_offsets"),
            other => {
                return Err(HeaderError::UnknownField { name: clip(&name), field: clip(other) });
            }
        };
        if let Some(field) = repeated {
            return Err(HeaderError::DuplicateField { name: clip(&name), field });
        }
    }
    let missing = |field| HeaderError::MissingField { name: clip(&name), field };
    let dtype = dtype.ok_or_else(|| missing("dtype"))?;
    let shape = shape.ok_or_else(|| missing("shape"))?;
    let (start, end) = offsets.ok_or_else(|| missing("data_offsets"))?;
    Ok(Entry { name, dtype, shape, start, end })
}

fn parse_shape(cursor: &mut Cursor<'_>) -> Result<Shape, JsonError> {
    cursor.expect(b'[', "a shape, which is an array")?;
    let mut shape = Shape::new();
    let mut first = true;
    while cursor.more(&mut first, b']')? {
        shape.push(cursor.unsigned()?);
    }
    Ok(shape)
}

fn parse_offsets(cursor: &mut Cursor<'_>) -> Result<(u64, u64), JsonError> {
    cursor.expect(b'[', "a pair of offsets")?;
    let start = cursor.unsigned()?;
    cursor.expect(b',', "a comma")?;
    let end = cursor.unsigned()?;
    cursor.expect(b']', "the end of a pair")?;
    Ok((start, end))
}

/// Writes a JSON string. Only what JSON requires is escaped; text beyond ASCII stays UTF-8.
pub(super) fn write_string(out: &mut Vec<u8>, text: &str) {
    out.push(b'"');
    let mut rest = text.as_bytes();
    while let Some(at) = rest.iter().position(|&b| b == b'"' || b == b'\\' || b < 0x20) {
        out.extend_from_slice(&rest[..at]);
        match rest[at] {
            plain @ (b'"' | b'\\') => out.extend_from_slice(&[b'\\', plain]),
            control => {
                const HEX: &[u8; 16] = b"0123456789abcdef";
                out.extend_from_slice(b"\\u00");
                out.extend_from_slice(&[HEX[usize::from(control >> 4)], HEX[usize::from(control & 15)]]);
            }
        }
        rest = &rest[at + 1..];
    }
    out.extend_from_slice(rest);
    out.push(b'"');
}

pub(super) fn write_number(out: &mut Vec<u8>, mut value: u64) {
    let mut digits = [0u8; 20];
    let mut at = digits.len();
    loop {
        at -= 1;
        digits[at] = b'0' + (value % 10) as u8;
        value /= 10;
        if value == 0 {
            break;
        }
    }
    out.extend_from_slice(&digits[at..]);
}
