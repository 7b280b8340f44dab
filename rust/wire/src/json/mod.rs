//! A cursor over JSON text, for the two documents a peer sends: the header of a container and its manifest.
//!
//! Both have a fixed grammar, and both need what a general parser does not offer: the order of keys, refusal of
//! repeated ones, typed errors with the place of the fault, and a depth limit of our own. Strings without escapes are
//! borrowed from the text, and nothing else is allocated but strings with escapes and the keys that are compared.
//!
//! The cursor accepts the grammar of RFC 8259 and nothing beyond it, with one limit of its own: a run of digits in a
//! number has at most 4300 of them. The tests and fuzz targets compare it with `serde_json`. Escapes must form valid
//! Unicode, so a lone surrogate is an error. The text is UTF-8 by its type; callers check that before.
//!
//! ```
//! use tensorferry_wire::json::Cursor;
//!
//! let mut cursor = Cursor::new(r#"{"a": 1, "b": 2}"#);
//! let (mut first, mut sum) = (true, 0);
//! cursor.expect(b'{', "an object")?;
//! while cursor.more(&mut first, b'}')? {
//!     cursor.member()?;
//!     sum += cursor.unsigned()?;
//! }
//! assert_eq!(sum, 3);
//! # Ok::<(), tensorferry_wire::JsonError>(())
//! ```

use std::borrow::Cow;
use std::collections::HashSet;

/// The text is not the JSON that was expected at this place.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("at byte {at}: expected {expected}")]
pub struct JsonError {
    /// Offset into the JSON text, in bytes.
    pub at: usize,
    /// What should have been there.
    pub expected: &'static str,
}

/// The most digits that Python's `int()` accepts in a text by default.
const MAX_DIGITS: usize = 4300;

/// What was read, or where the text is not what was expected.
pub type Result<T> = std::result::Result<T, JsonError>;

/// A position in a JSON text. Methods that read skip the whitespace before what they read (except
/// [`Cursor::adjacent_unsigned`]) and leave the whitespace after it. A method that fails reports the place of the
/// fault; the cursor's own position then means nothing, and the caller stops reading.
#[derive(Debug, Clone)]
pub struct Cursor<'a> {
    text: &'a str,
    at: usize,
}

impl<'a> Cursor<'a> {
    /// A cursor at the beginning of `text`.
    #[must_use]
    pub fn new(text: &'a str) -> Self {
        Self { text, at: 0 }
    }

    /// The cursor's offset into the text, in bytes.
    #[must_use]
    pub fn at(&self) -> usize {
        self.at
    }

    /// A cursor over the same text at `at`, an offset at which this one was before.
    pub(crate) fn back_at(&self, at: usize) -> Self {
        Self { text: self.text, at }
    }

    /// The error for a text that does not have `expected` at this place.
    pub fn fail<T>(&self, expected: &'static str) -> Result<T> {
        Err(JsonError { at: self.at, expected })
    }

    fn byte(&self) -> Option<u8> {
        self.text.as_bytes().get(self.at).copied()
    }

    /// Skips whitespace and returns the byte behind it without consuming that; `None` at the end of the text.
    pub fn peek(&mut self) -> Option<u8> {
        loop {
            match self.byte() {
                Some(b' ' | b'\n' | b'\r' | b'\t') => self.at += 1,
                other => return other,
            }
        }
    }

    /// Consumes `byte` if it comes next.
    pub fn eat(&mut self, byte: u8) -> bool {
        let found = self.peek() == Some(byte);
        if found {
            self.at += 1;
        }
        found
    }

    /// Consumes `byte`, which must come next.
    pub fn expect(&mut self, byte: u8, expected: &'static str) -> Result<()> {
        if self.eat(byte) { Ok(()) } else { self.fail(expected) }
    }

    /// Reads what separates the members of an array or object: returns true if one more member follows, and false after
    /// consuming `close`.
    ///
    /// Call it right after the opening bracket with `first` set to true, then after each member; it resets `first`.
    pub fn more(&mut self, first: &mut bool, close: u8) -> Result<bool> {
        if self.eat(close) {
            return Ok(false);
        }
        if std::mem::take(first) {
            return Ok(true);
        }
        self.expect(b',', "a comma or a closing bracket")?;
        Ok(true)
    }

    /// Reads the key of an object's member and the colon behind it. Repeated keys are for the caller to notice.
    pub fn member(&mut self) -> Result<Cow<'a, str>> {
        let key = self.string()?;
        self.expect(b':', "a colon")?;
        Ok(key)
    }

    /// Reads a string, which is borrowed from the text unless it has escapes.
    pub fn string(&mut self) -> Result<Cow<'a, str>> {
        self.expect(b'"', "a string")?;
        let start = self.at;
        self.plain_run();
        let run = &self.text[start..self.at];
        if self.byte() == Some(b'"') {
            self.at += 1;
            return Ok(Cow::Borrowed(run));
        }
        let mut owned = run.to_owned();
        loop {
            match self.byte() {
                Some(b'"') => {
                    self.at += 1;
                    return Ok(Cow::Owned(owned));
                }
                Some(b'\\') => {
                    self.at += 1;
                    owned.push(self.escape()?);
                }
                _ => return self.fail("the end of a string (or an escaped control character)"),
            }
            let start = self.at;
            self.plain_run();
            owned.push_str(&self.text[start..self.at]);
        }
    }

    /// Advances over the part of a string that needs no decoding. It stops at an ASCII byte or at the end, so that the
    /// text can be sliced there.
    fn plain_run(&mut self) {
        let rest = &self.text.as_bytes()[self.at..];
        self.at += rest.iter().position(|&b| b == b'"' || b == b'\\' || b < 0x20).unwrap_or(rest.len());
    }

    /// Reads an escape behind its backslash.
    fn escape(&mut self) -> Result<char> {
        let Some(code) = self.byte() else {
            return self.fail("an escape");
        };
        let plain = match code {
            b'"' | b'\\' | b'/' => char::from(code),
            b'b' => '\u{8}',
            b'f' => '\u{c}',
            b'n' => '\n',
            b'r' => '\r',
            b't' => '\t',
            b'u' => {
                self.at += 1;
                return self.unicode_escape();
            }
            _ => return self.fail("an escape"),
        };
        self.at += 1;
        Ok(plain)
    }

    /// Reads the four hexadecimal digits behind `\u`, and the second escape of a surrogate pair.
    fn unicode_escape(&mut self) -> Result<char> {
        let unit = self.hex4()?;
        let scalar = if (0xD800..0xDC00).contains(&unit) {
            if !self.text[self.at..].starts_with("\\u") {
                return self.fail("the second half of a surrogate pair");
            }
            self.at += 2;
            let low = self.hex4()?;
            if !(0xDC00..0xE000).contains(&low) {
                return self.fail("the second half of a surrogate pair");
            }
            0x1_0000 + ((unit - 0xD800) << 10) + (low - 0xDC00)
        } else {
            unit
        };
        char::from_u32(scalar).map_or_else(|| self.fail("the first half of a surrogate pair"), Ok)
    }

    /// Reads the four hexadecimal digits of an escape `\u`.
    fn hex4(&mut self) -> Result<u32> {
        let mut unit = 0;
        for _ in 0..4 {
            let Some(digit) = self.byte().and_then(|b| char::from(b).to_digit(16)) else {
                return self.fail("a hexadecimal digit");
            };
            unit = unit * 16 + digit;
            self.at += 1;
        }
        Ok(unit)
    }

    /// Reads a number and returns its text unchanged.
    pub fn number(&mut self) -> Result<&'a str> {
        self.peek();
        let start = self.at;
        self.at += usize::from(self.byte() == Some(b'-'));
        if self.byte() == Some(b'0') {
            self.at += 1;
        } else {
            self.digits()?;
        }
        if self.byte() == Some(b'.') {
            self.at += 1;
            self.digits()?;
        }
        if matches!(self.byte(), Some(b'e' | b'E')) {
            self.at += 1;
            self.at += usize::from(matches!(self.byte(), Some(b'+' | b'-')));
            self.digits()?;
        }
        Ok(&self.text[start..self.at])
    }

    /// Passes over one digit or more.
    fn digits(&mut self) -> Result<()> {
        let rest = &self.text.as_bytes()[self.at..];
        match rest.iter().position(|b| !b.is_ascii_digit()).unwrap_or(rest.len()) {
            0 => self.fail("a digit"),
            count @ 1..=MAX_DIGITS => {
                self.at += count;
                Ok(())
            }
            _ => self.fail("a number of at most 4300 digits"),
        }
    }

    /// Reads an integer from 0 to 2^64 - 1, written without sign, fraction, exponent or leading zero.
    pub fn unsigned(&mut self) -> Result<u64> {
        self.peek();
        self.adjacent_unsigned()
    }

    /// Reads the same without skipping whitespace first, as after a minus sign.
    pub fn adjacent_unsigned(&mut self) -> Result<u64> {
        const EXPECTED: &str = "an integer from 0 to 2^64 - 1";
        let start = self.at;
        let mut value = 0u64;
        while let Some(digit @ b'0'..=b'9') = self.byte() {
            let next = value.checked_mul(10).and_then(|v| v.checked_add(u64::from(digit - b'0')));
            let Some(next) = next else {
                return self.fail(EXPECTED);
            };
            value = next;
            self.at += 1;
        }
        let written = &self.text.as_bytes()[start..self.at];
        let leading_zero = written.len() > 1 && written[0] == b'0';
        if written.is_empty() || leading_zero || matches!(self.byte(), Some(b'.' | b'e' | b'E')) {
            self.at = start;
            return self.fail(EXPECTED);
        }
        Ok(value)
    }

    /// Consumes `word` (true, false or null) if it comes next.
    pub fn eat_word(&mut self, word: &str) -> bool {
        self.peek();
        let found = self.text[self.at..].starts_with(word);
        if found {
            self.at += word.len();
        }
        found
    }

    /// Reads and discards a value in which arrays and objects are nested at most `depth` deep and no key is repeated.
    pub(crate) fn skip(&mut self, depth: usize) -> Result<()> {
        match self.peek() {
            Some(b'{' | b'[') if depth == 0 => self.fail("a value that is not nested as deeply"),
            Some(b'{') => {
                self.at += 1;
                let (mut first, mut seen) = (true, HashSet::new());
                while self.more(&mut first, b'}')? {
                    if !seen.insert(self.member()?) {
                        return self.fail("a key that the object does not have yet");
                    }
                    self.skip(depth - 1)?;
                }
                Ok(())
            }
            Some(b'[') => {
                self.at += 1;
                let mut first = true;
                while self.more(&mut first, b']')? {
                    self.skip(depth - 1)?;
                }
                Ok(())
            }
            Some(b'"') => self.string().map(drop),
            Some(b't') if self.eat_word("true") => Ok(()),
            Some(b'f') if self.eat_word("false") => Ok(()),
            Some(b'n') if self.eat_word("null") => Ok(()),
            _ => self.number().map(drop),
        }
    }

    /// The text that was not read yet.
    pub(crate) fn rest(&self) -> &'a str {
        &self.text[self.at..]
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a panic is how a test fails")]
mod tests;
