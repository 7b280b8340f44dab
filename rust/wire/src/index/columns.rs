//! Columns of numbers and texts: each number takes as many bytes as the largest of its column.

use super::IndexError;

/// Writes columns, one after the other.
#[derive(Default)]
pub(super) struct ColumnWriter {
    pub(super) out: Vec<u8>,
}

impl ColumnWriter {
    /// Appends a column of numbers: their width, how many there are, and the numbers.
    pub(super) fn numbers(&mut self, rows: impl ExactSizeIterator<Item = u64> + Clone) {
        let width = match rows.clone().max().unwrap_or(0) {
            0..=0xFF => 1,
            0x100..=0xFFFF => 2,
            0x1_0000..=0xFFFF_FFFF => 4,
            _ => 8,
        };
        self.out.push(width);
        self.out.extend_from_slice(&(rows.len() as u64).to_le_bytes());
        for row in rows {
            self.out.extend_from_slice(&row.to_le_bytes()[..usize::from(width)]);
        }
    }

    /// Appends a column of texts: how many bytes each has in common with the text before, the lengths of the rests, and
    /// the rests.
    pub(super) fn texts(&mut self, texts: &Texts) {
        let shared: Vec<_> = (0..texts.len())
            .map(|row| shared_bytes(row.checked_sub(1).map_or("", |before| texts.get(before)), texts.get(row)))
            .collect();
        let rests = shared.iter().enumerate().map(|(row, &shared)| &texts.get(row)[shared..]);
        self.numbers(shared.iter().map(|&shared| shared as u64));
        self.numbers(rests.clone().map(|rest| rest.len() as u64));
        rests.for_each(|rest| self.out.extend_from_slice(rest.as_bytes()));
    }
}

/// Reads the columns that a [`ColumnWriter`] wrote. What it allocates is a small multiple of the input.
pub(super) struct ColumnReader<'a> {
    pub(super) rest: &'a [u8],
}

impl<'a> ColumnReader<'a> {
    fn take(&mut self, length: usize, column: &'static str) -> Result<&'a [u8], IndexError> {
        let (taken, rest) = self.rest.split_at_checked(length).ok_or(IndexError::Column { column })?;
        self.rest = rest;
        Ok(taken)
    }

    /// Reads a column of numbers.
    pub(super) fn numbers(&mut self, column: &'static str) -> Result<Vec<u64>, IndexError> {
        let width = usize::from(self.take(1, column)?[0]);
        let mut count = [0; 8];
        count.copy_from_slice(self.take(8, column)?);
        let length = usize::try_from(u64::from_le_bytes(count)).ok().and_then(|count| count.checked_mul(width));
        let (Some(length), 1 | 2 | 4 | 8) = (length, width) else {
            return Err(IndexError::Column { column });
        };
        let rows = self.take(length, column)?.chunks_exact(width);
        Ok(rows.map(|row| row.iter().rev().fold(0, |number, &byte| number << 8 | u64::from(byte))).collect())
    }

    /// Reads a column of texts.
    pub(super) fn texts(&mut self, column: &'static str) -> Result<Texts, IndexError> {
        let (shared, lengths) = (self.numbers(column)?, self.numbers(column)?);
        if shared.len() != lengths.len() {
            return Err(IndexError::Rows { column });
        }
        let mut texts = Texts::default();
        for (shared, length) in shared.into_iter().zip(lengths) {
            let rest = self.take(usize::try_from(length).unwrap_or(usize::MAX), column)?;
            let rest = std::str::from_utf8(rest).map_err(|_| IndexError::Utf8 { column })?;
            let start = texts.ends.len().checked_sub(1).map_or(0, |before| texts.start(before));
            let shared = usize::try_from(shared).ok().filter(|&shared| shared <= MOST_SHARED);
            let end = shared.map_or(usize::MAX, |shared| start + shared);
            // Within the text before, and not in the middle of a letter.
            if texts.text.get(start..end).is_none() {
                return Err(IndexError::Utf8 { column });
            }
            texts.text.extend_from_within(start..end);
            texts.push(rest);
        }
        Ok(texts)
    }
}

/// The most bytes that a text takes from the one before, so that a column expands to a small multiple of its length.
const MOST_SHARED: usize = 64;

/// How many bytes two texts have in common at their beginning, in whole letters.
fn shared_bytes(one: &str, other: &str) -> usize {
    let letters = one.char_indices().zip(other.chars()).take_while(|((_, a), b)| a == b);
    letters.map(|((at, letter), _)| at + letter.len_utf8()).take_while(|&end| end <= MOST_SHARED).last().unwrap_or(0)
}

/// Many texts in one allocation.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct Texts {
    text: String,
    ends: Vec<usize>,
}

impl Texts {
    pub(super) fn push(&mut self, text: &str) {
        self.text.push_str(text);
        self.ends.push(self.text.len());
    }

    pub(super) fn len(&self) -> usize {
        self.ends.len()
    }

    fn start(&self, row: usize) -> usize {
        row.checked_sub(1).and_then(|before| self.ends.get(before)).copied().unwrap_or(0)
    }

    /// The text in a row; empty for a row that is not there.
    pub(super) fn get(&self, row: usize) -> &str {
        let start = self.start(row);
        let end = self.ends.get(row).copied().unwrap_or(start);
        self.text.get(start..end).unwrap_or("")
    }
}

impl<'a> FromIterator<&'a str> for Texts {
    fn from_iter<I: IntoIterator<Item = &'a str>>(texts: I) -> Self {
        let mut all = Self::default();
        texts.into_iter().for_each(|text| all.push(text));
        all
    }
}
