//! Merging what ranks have into one index.

use std::collections::HashMap;

use super::boxes::check_whole;
use super::{BoxRef, Chunk, Index, Item, MergeError};

/// What becomes of parts that several ranks have.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Replicas {
    /// All stay in the index: each rank has written its own.
    All,
    /// The first rank's stays.
    First,
}

/// The index of all ranks, and what each rank is to write.
#[derive(Debug)]
pub struct Merged {
    /// The index; the number of a chunk's file is the rank.
    pub index: Index,
    /// Of each rank, whether each of its chunks is in the index, in the order of its own index.
    pub kept: Vec<Vec<bool>>,
}

/// Merges what the ranks have, each in an index of its own, and shows that the parts of each tensor make it up.
///
/// Keys stand in the order in which the ranks, one after the other, have them. Of objects, and of tensors that are
/// whole on each rank that has them, the first rank's value stays.
///
/// `same` says whether two ranks' chunks, which are in other
/// meshes, have the same bytes; with `whole` false, parts need not make up whole tensors.
///
/// # Errors
/// The first fault found: the key, the ranks and what they have.
pub fn merge(
    ranks: &[Index],
    replicas: Replicas,
    whole: bool,
    mut same: impl FnMut((usize, Chunk<'_>), (usize, Chunk<'_>)) -> bool,
) -> Result<Merged, MergeError> {
    let mut merged =
        Merged { index: Index::default(), kept: ranks.iter().map(|rank| vec![false; rank.chunk_count()]).collect() };
    for Key { item, parts, .. } in collect(ranks, replicas, &mut same)? {
        if whole && item.is_spread {
            let boxes: Vec<_> = parts.iter().map(|part| (part.first.rank, part.first.chunk.part)).collect();
            check_whole(&item, &boxes, true)?;
        }
        // Each rank's index was checked, so nothing of it is refused.
        let _ = merged.index.add(&item);
        for part in &parts {
            for candidate in part.choose(replicas, item.is_spread) {
                merged.kept[candidate.rank][candidate.row] = true;
                let file = u32::try_from(candidate.rank).unwrap_or(u32::MAX);
                let _ = merged.index.add_chunk(&Chunk { file, owner: None, ..candidate.chunk });
            }
        }
    }
    Ok(merged)
}

/// The index of what ranks have written, each in an index of its own, as a planner has planned it in `planned`: the keys,
/// in their order, shapes and whatever else it says of them. dtypes and chunks are those that were written; `files` has
/// the number of each rank's file. With `whole`, the parts of each tensor are shown to make it up.
///
/// # Errors
/// As [`merge`], and the first difference between what was planned and what was written.
pub fn written(planned: &Index, ranks: &[Index], files: &[u32], whole: bool) -> Result<Index, MergeError> {
    let merged = merge(ranks, Replicas::First, whole, |_, _| true)?.index;
    let mut index = Index { planner: planned.planner.clone(), ..Index::default() };
    for item in (0..planned.len()).map(|number| planned.item(number)) {
        let Some(found) = merged.find(item.key) else {
            return Err(MergeError::NotWritten { part: item.key.to_owned() });
        };
        let about = merged.item(found);
        if (about.dtype.is_some(), about.shape) != (item.dtype.is_some(), item.shape) {
            let (planned, written) = (brief(&item), brief(&about));
            return Err(MergeError::Contradicts { key: item.key.to_owned(), planned, written });
        }
        // Each rank's index was checked, so nothing of it is refused.
        let _ = index.add(&Item { dtype: about.dtype, ..item });
        let mut chunks: HashMap<_, _> = merged.chunks(found).map(|chunk| (chunk.part, chunk)).collect();
        for chunk in planned.chunks(index.len() - 1) {
            let part = || format!("{}{}", item.key, chunk.part.text());
            let written = chunks.remove(&chunk.part).ok_or_else(|| MergeError::NotWritten { part: part() })?;
            let file = files.get(written.file as usize).copied().unwrap_or(u32::MAX);
            let _ = index.add_chunk(&Chunk { file, ..written });
        }
        if let Some(part) = chunks.keys().next() {
            return Err(MergeError::NotPlanned { part: format!("{}{}", item.key, part.text()) });
        }
    }
    match (0..merged.len()).map(|number| merged.item(number).key).find(|key| index.find(key).is_none()) {
        Some(key) => Err(MergeError::NotPlanned { part: key.to_owned() }),
        None => Ok(index),
    }
}

/// A key, and the parts that ranks have of its value.
struct Key<'a> {
    item: Item<'a>,
    first_rank: usize,
    parts: Vec<Part<'a>>,
    places: HashMap<BoxRef<'a>, usize>,
}

/// A chunk of a rank; `row` is its number among all chunks of that rank.
#[derive(Clone, Copy)]
struct Candidate<'a> {
    rank: usize,
    row: usize,
    chunk: Chunk<'a>,
}

/// A part of a tensor, and the ranks that have it.
struct Part<'a> {
    first: Candidate<'a>,
    others: Vec<Candidate<'a>>,
}

impl<'a> Part<'a> {
    /// The candidates that stay in the index.
    fn choose(&self, replicas: Replicas, is_spread: bool) -> impl Iterator<Item = &Candidate<'a>> {
        let others = if replicas == Replicas::All && is_spread { &self.others[..] } else { &[] };
        std::iter::once(&self.first).chain(others)
    }
}

/// The keys of all ranks in order, each with its parts.
fn collect<'a>(
    ranks: &'a [Index],
    replicas: Replicas,
    same: &mut impl FnMut((usize, Chunk<'_>), (usize, Chunk<'_>)) -> bool,
) -> Result<Vec<Key<'a>>, MergeError> {
    let mut numbers: HashMap<&str, usize> = HashMap::new();
    let mut keys: Vec<Key<'_>> = Vec::new();
    for (rank, index) in ranks.iter().enumerate() {
        let mut row = 0;
        for number in 0..index.len() {
            let item = index.item(number);
            let place = *numbers.entry(item.key).or_insert(keys.len());
            if place == keys.len() {
                keys.push(Key { item, first_rank: rank, parts: Vec::new(), places: HashMap::new() });
            }
            let key = &mut keys[place];
            key.check_alike(&item, rank, replicas)?;
            for chunk in index.chunks(number) {
                key.add(Candidate { rank, row, chunk }, same)?;
                row += 1;
            }
        }
    }
    Ok(keys)
}

impl<'a> Key<'a> {
    /// Checks that a rank has a value of the same kind, dtype and shape. Where each rank writes a value of its own, those
    /// that are not spread may differ.
    fn check_alike(&self, other: &Item<'_>, rank: usize, replicas: Replicas) -> Result<(), MergeError> {
        let is_alike = self.item.dtype == other.dtype && self.item.shape == other.shape;
        let may_differ = replicas == Replicas::All && !self.item.is_spread;
        if self.item.is_spread == other.is_spread && (is_alike || may_differ) {
            return Ok(());
        }
        let (key, first_rank) = (self.item.key.to_owned(), self.first_rank);
        Err(MergeError::Differs { key, first_rank, first: brief(&self.item), rank, other: brief(other) })
    }

    /// Adds what a rank has of the value.
    fn add(
        &mut self,
        candidate: Candidate<'a>,
        same: &mut impl FnMut((usize, Chunk<'_>), (usize, Chunk<'_>)) -> bool,
    ) -> Result<(), MergeError> {
        // What is not spread is one value, whatever its shape is on other ranks.
        let place =
            if self.item.is_spread { *self.places.entry(candidate.chunk.part).or_insert(self.parts.len()) } else { 0 };
        let Some(part) = self.parts.get_mut(place) else {
            self.parts.push(Part { first: candidate, others: Vec::new() });
            return Ok(());
        };
        let (first, other) = (&part.first, &candidate);
        let is_in_question =
            self.item.is_spread && first.chunk.owner != other.chunk.owner && other.chunk.part.numel() > 0;
        if is_in_question && !same((first.rank, first.chunk), (other.rank, other.chunk)) {
            let (key, chunk) = (self.item.key.to_owned(), other.chunk.part.text());
            return Err(MergeError::Values { key, first_rank: first.rank, rank: other.rank, chunk });
        }
        part.others.push(candidate);
        Ok(())
    }
}

/// What a rank has, as messages say it.
pub(super) fn brief(item: &Item<'_>) -> String {
    let owner = if item.is_spread { "a part of " } else { "" };
    item.dtype.map_or_else(|| "an object".to_owned(), |dtype| format!("{owner}{dtype} {:?}", item.shape))
}
