//! Rows as bytes, for another process that maps the same memory: where each entry lies, and nothing of its bytes.
//!
//! Little-endian, without gaps: the number of rows, the length of all names and the number of all dimensions (`u64`
//! each); then column by column the end of each name (`u64`), dtypes, ranks and flags (a byte each), sizes (`u64`),
//! buffers (`u32`), offsets (`u64`), all dimensions (`u64`), and the names.
//!
//! The decoder trusts nothing in a table: an entry must lie inside its buffer, whose length comes from the kernel.

use tensorferry_wire::dtype::Dtype;

use crate::rows::columns::{Columns, Row};

/// Memory that rows lie in: address and length.
pub(crate) type Place = (usize, usize);

/// Encodes the rows; `places` is all memory that another process is going to have.
///
/// # Errors
/// Which row lies in none of them.
pub(crate) fn encode(columns: &Columns, places: &[Place]) -> Result<Vec<u8>, String> {
    let rows = columns.ends.len();
    let mut table = Vec::with_capacity(columns.names.len() + rows * 31 + columns.dims.len() * 8 + 24);
    put(&mut table, &[rows, columns.names.len(), columns.dims.len()]);
    put(&mut table, &columns.ends);
    table.extend(columns.dtypes.iter().map(|&dtype| code(dtype)));
    table.extend_from_slice(&columns.ranks);
    table.extend_from_slice(columns.flags.as_bytes());
    put(&mut table, &columns.sizes);
    let mut offsets = Vec::with_capacity(rows);
    for (row, (&address, &size)) in columns.addresses.iter().zip(&columns.sizes).enumerate() {
        let (buffer, offset) = if size == 0 { Some((0, 0)) } else { place_of(places, address, size) }
            .ok_or_else(|| format!("row {row} does not lie in shared memory"))?;
        table.extend_from_slice(&buffer.to_le_bytes());
        offsets.push(offset);
    }
    put(&mut table, &offsets);
    table.extend(columns.dims.iter().flat_map(|dim| dim.to_le_bytes()));
    table.extend_from_slice(columns.names.as_bytes());
    Ok(table)
}

fn put(table: &mut Vec<u8>, numbers: &[usize]) {
    table.extend(numbers.iter().flat_map(|&number| (number as u64).to_le_bytes()));
}

/// The buffer in which all `size` bytes from `address` lie, and where in it they begin.
fn place_of(places: &[Place], address: usize, size: usize) -> Option<(u32, usize)> {
    let inside = |&(start, len): &Place| address.checked_sub(start).is_some_and(|at| at <= len && size <= len - at);
    let found = places.iter().position(inside)?;
    Some((u32::try_from(found).ok()?, address - places[found].0))
}

fn code(dtype: Dtype) -> u8 {
    Dtype::ALL.iter().position(|&known| known == dtype).map_or(u8::MAX, |at| u8::try_from(at).unwrap_or(u8::MAX))
}

/// The rows of a table, at the addresses that `places` gives them, and the number of the place of each.
///
/// # Errors
/// What is wrong with the table.
pub(crate) fn decode(table: &[u8], places: &[Place]) -> Result<(Columns, Vec<usize>), String> {
    let mut rest = TableCursor(table);
    let [rows, names, dims] = [rest.number()?, rest.number()?, rest.number()?];
    // Nothing is allocated for a table that is not as long as it says.
    let ends = rest.column(rows, 8)?;
    let dtypes = rest.column(rows, 1)?;
    let ranks = rest.column(rows, 1)?;
    let flags = rest.column(rows, 1)?;
    let sizes = rest.column(rows, 8)?;
    let buffers = rest.column(rows, 4)?;
    let offsets = rest.column(rows, 8)?;
    let mut dims = TableCursor(rest.column(dims, 8)?);
    let names = std::str::from_utf8(rest.column(names, 1)?).map_err(|_| "its names are no text".to_owned())?;
    if !rest.0.is_empty() {
        return Err("it is longer than it says".to_owned());
    }
    let (mut columns, mut owners, mut at) = (Columns::default(), Vec::with_capacity(ends.len() / 8), 0);
    let wrong = |row: usize, what: &str| format!("row {row} {what}");
    for row in 0..ends.len() / 8 {
        let end = word(ends, row)?;
        let name = names.get(at..end).ok_or_else(|| wrong(row, "has no name"))?;
        at = end;
        let dtype = *Dtype::ALL.get(usize::from(dtypes[row])).ok_or_else(|| wrong(row, "has an unknown dtype"))?;
        let shape = (0..ranks[row]).map(|_| dims.number().map(|dim| dim as u64)).collect::<Result<Vec<_>, _>>()?;
        let flag = flags[row].checked_sub(b'0').filter(|&flag| flag < 4).ok_or_else(|| wrong(row, "has no flag"))?;
        let (nbytes, offset) = (word(sizes, row)?, word(offsets, row)?);
        if shape_nbytes(&shape, dtype) != Some(nbytes as u64) {
            return Err(wrong(row, "has another size than its shape"));
        }
        let buffer = u32::from_le_bytes(bytes_of(buffers, row)?) as usize;
        let address = if nbytes == 0 {
            0
        } else {
            let &(start, len) = places.get(buffer).ok_or_else(|| wrong(row, "lies in no buffer"))?;
            let fits = offset <= len && nbytes <= len - offset;
            if fits { start + offset } else { return Err(wrong(row, "reaches beyond its buffer")) }
        };
        let row = Row { dtype, shape: &shape, address, nbytes, flag };
        columns.push([name, ""], &row).map_err(|e| e.to_string())?;
        owners.push(buffer);
    }
    if at != names.len() || !dims.0.is_empty() {
        return Err("it has names or dimensions of no row".to_owned());
    }
    Ok((columns, owners))
}

/// The bytes of a tensor, `None` if they are no whole number or too many.
fn shape_nbytes(shape: &[u64], dtype: Dtype) -> Option<u64> {
    let bits = shape.iter().try_fold(dtype.bits(), |bits, &dim| bits.checked_mul(dim))?;
    bits.is_multiple_of(8).then_some(bits / 8)
}

fn bytes_of<const N: usize>(column: &[u8], row: usize) -> Result<[u8; N], String> {
    column.get(row * N..).and_then(|rest| rest.first_chunk()).copied().ok_or_else(|| "it ends too early".to_owned())
}

fn word(column: &[u8], row: usize) -> Result<usize, String> {
    let number = u64::from_le_bytes(bytes_of(column, row)?);
    usize::try_from(number).map_err(|_| "a number in it is too large".to_owned())
}

/// What is still to be decoded.
struct TableCursor<'a>(&'a [u8]);

impl<'a> TableCursor<'a> {
    fn number(&mut self) -> Result<usize, String> {
        word(self.column(1, 8)?, 0)
    }

    /// Takes the next column of the table: `count` values of `size` bytes each.
    fn column(&mut self, count: usize, size: usize) -> Result<&'a [u8], String> {
        let split = count.checked_mul(size).and_then(|len| self.0.split_at_checked(len));
        let (column, rest) = split.ok_or_else(|| "it ends too early".to_owned())?;
        self.0 = rest;
        Ok(column)
    }
}
