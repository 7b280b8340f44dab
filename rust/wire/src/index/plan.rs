//! Planning a save: which rank writes each part that several of them have.

use std::collections::HashMap;

use super::boxes::check_whole;
use super::merge::brief;
use super::{Chunk, Index, MergeError, Merged};

/// A part of a value, and the ranks that have it.
struct Part {
    ranks: Vec<u32>,
    /// What it counts as.
    bytes: u64,
    writer: u32,
}

/// Where a rank has a part: the rank, the number of the key there, and the number of the chunk of that key.
type Row = (usize, usize, usize);

/// Plans a save of what ranks have, each in an index of its own, as torch's default planner does, and shows that the
/// parts of each tensor make it up.
///
/// Chunks of a key that begin at the same place are one part. It is written by the first of the ranks that have least to
/// write when its turn comes, or with `to_lowest` by the first rank. Turns come in the order in which the ranks, one after
/// the other, have parts; a part counts as many bytes as its chunk on the last rank says. Chunks in the planned index
/// stand in the order of the ranks that write them; it has no files.
///
/// # Errors
/// The first fault found: the key, the ranks and what they have. Of one rank, parts need not make up whole tensors.
pub fn plan(ranks: &[Index], to_lowest: bool) -> Result<Merged, MergeError> {
    let mut numbers: HashMap<&str, usize> = HashMap::new();
    let mut places: HashMap<(usize, bool, &[u64]), usize> = HashMap::new();
    let mut parts: Vec<Part> = Vec::new();
    let mut rows: Vec<(Row, usize, usize)> = Vec::new();
    for (rank, index) in ranks.iter().enumerate() {
        let holder = u32::try_from(rank).unwrap_or(u32::MAX);
        for number in 0..index.len() {
            let item = index.item(number);
            let count = numbers.len();
            let key = *numbers.entry(item.key).or_insert(count);
            for (at, chunk) in index.chunks(number).enumerate() {
                let place = *places.entry((key, item.dtype.is_none(), chunk.part.offsets)).or_insert(parts.len());
                if place == parts.len() {
                    parts.push(Part { ranks: Vec::new(), bytes: 0, writer: holder });
                }
                let part = &mut parts[place];
                part.bytes = chunk.bytes;
                if part.ranks.last() != Some(&holder) {
                    part.ranks.push(holder);
                }
                rows.push(((rank, number, at), key, place));
            }
        }
    }
    let mut load = vec![0_u64; ranks.len()];
    for part in parts.iter_mut().filter(|_| !to_lowest) {
        part.writer = part.ranks.iter().copied().min_by_key(|&rank| load[rank as usize]).unwrap_or(part.writer);
        load[part.writer as usize] += part.bytes.max(1);
    }
    let mut kept: Vec<Vec<bool>> = ranks.iter().map(|rank| Vec::with_capacity(rank.chunk_count())).collect();
    let mut chosen: Vec<Vec<Row>> = vec![Vec::new(); numbers.len()];
    let mut order: Vec<usize> = Vec::new();
    for (row, key, place) in rows {
        let is_kept = parts[place].writer as usize == row.0;
        kept[row.0].push(is_kept);
        if is_kept {
            if chosen[key].is_empty() {
                order.push(key);
            }
            chosen[key].push(row);
        }
    }
    let mut index = Index::default();
    for key in order {
        add_key(&mut index, ranks, &chosen[key])?;
    }
    Ok(Merged { index, kept })
}

/// Adds a key to what is planned, with the parts that ranks write of it.
fn add_key(index: &mut Index, ranks: &[Index], rows: &[Row]) -> Result<(), MergeError> {
    let (first_rank, number, _) = rows[0];
    let item = ranks[first_rank].item(number);
    // Each rank's index was checked, so nothing of it is refused.
    let _ = index.add(&item);
    let mut parts = Vec::with_capacity(rows.len());
    for &(rank, number, at) in rows {
        let other = ranks[rank].item(number);
        if (item.dtype, item.shape, item.is_spread) != (other.dtype, other.shape, other.is_spread) {
            let (first, other) = (brief(&item), brief(&other));
            return Err(MergeError::Differs { key: item.key.to_owned(), first_rank, first, rank, other });
        }
        let Some(chunk) = ranks[rank].chunks(number).nth(at) else { continue };
        let _ = index.add_chunk(&Chunk { file: 0, entry: 0, bytes: 0, owner: None, layout: None, ..chunk });
        parts.push((rank, chunk.part));
    }
    if item.dtype.is_some() { check_whole(&item, &parts, ranks.len() > 1) } else { Ok(()) }
}
