//! Which blocks of a payload there are, one bit for each.

use std::sync::atomic::{AtomicU64, Ordering};

use tokio::sync::Notify;

use crate::error::Error;
use crate::memory::make_room;

const BITS: u64 = u64::BITS as u64;

/// The words that so many blocks need.
fn words(blocks: u64) -> usize {
    usize::try_from(blocks.div_ceil(BITS)).unwrap_or(usize::MAX)
}

/// The word of `block`, and its bit in it.
fn place(block: u64) -> (usize, u64) {
    (usize::try_from(block / BITS).unwrap_or(usize::MAX), 1 << (block % BITS))
}

/// The blocks that a receiver has: each is set once, when its bytes are in place and checksummed, and stays.
#[derive(Debug)]
pub(crate) struct BlockMap {
    words: Vec<AtomicU64>,
    blocks: u64,
    complete: AtomicU64,
    news: Notify,
}

impl BlockMap {
    /// For a payload of `blocks` blocks, none of which is there yet.
    pub(crate) fn new(blocks: u64) -> Result<Self, Error> {
        let mut map = Vec::new();
        make_room(&mut map, words(blocks))?;
        map.resize_with(words(blocks), AtomicU64::default);
        Ok(Self { words: map, blocks, complete: AtomicU64::new(0), news: Notify::new() })
    }

    /// `block` may be read from now on: who sees its bit sees its bytes.
    pub(crate) fn set(&self, block: u64) {
        let (word, bit) = place(block);
        let Some(word) = self.words.get(word).filter(|_| block < self.blocks) else { return };
        if word.fetch_or(bit, Ordering::Release) & bit == 0 {
            self.complete.fetch_add(1, Ordering::Release);
            self.news.notify_waiters();
        }
    }

    /// Whether all blocks of `[first, end)` may be read.
    pub(crate) fn has(&self, first: u64, end: u64) -> bool {
        let mut at = first;
        while at < end {
            let (index, _) = place(at);
            let Some(word) = self.words.get(index) else { return false };
            let stop = (at / BITS + 1) * BITS;
            let bits = mask(at % BITS, end.min(stop) - at);
            if word.load(Ordering::Acquire) & bits != bits {
                return false;
            }
            at = stop;
        }
        true
    }

    /// How many blocks there are so far.
    pub(crate) fn count(&self) -> u64 {
        self.complete.load(Ordering::Acquire)
    }

    /// Waits until there are more than `since` blocks.
    pub(crate) async fn more_than(&self, since: u64) {
        loop {
            let news = self.news.notified();
            tokio::pin!(news);
            news.as_mut().enable();
            if self.count() > since {
                return;
            }
            news.await;
        }
    }

    /// The map as bytes: the number of blocks there are, which may be lower than the number of bits, and the bits.
    pub(crate) fn encode(&self) -> Vec<u8> {
        // The count first: news that come in between are news again.
        let mut bytes = self.count().to_le_bytes().to_vec();
        bytes.extend(self.words.iter().flat_map(|word| word.load(Ordering::Acquire).to_le_bytes()));
        bytes
    }

    /// The length of an encoded map of `blocks` blocks.
    pub(crate) fn encoded_len(blocks: u64) -> u64 {
        8 + 8 * blocks.div_ceil(BITS)
    }
}

/// `len` bits from `start` on, which lie in one word.
fn mask(start: u64, len: u64) -> u64 {
    if len >= BITS { u64::MAX } else { ((1 << len) - 1) << start }
}

/// A set of blocks.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct BlockSet {
    words: Vec<u64>,
}

impl BlockSet {
    /// Reads what [`BlockMap::encode`] has written for `blocks` blocks: the number there are, and the set. `None` where it
    /// is not of this length.
    pub(crate) fn decode(bytes: &[u8], blocks: u64) -> Option<(u64, Self)> {
        let (count, bits) = bytes.split_first_chunk::<8>()?;
        let (chunks, rest) = bits.as_chunks::<8>();
        let mut words: Vec<u64> = chunks.iter().map(|chunk| u64::from_le_bytes(*chunk)).collect();
        if !rest.is_empty() || words.len() != self::words(blocks) {
            return None;
        }
        // Bits behind the last block say nothing.
        if let Some(last) = words.last_mut().filter(|_| !blocks.is_multiple_of(BITS)) {
            *last &= mask(0, blocks % BITS);
        }
        Some((u64::from_le_bytes(*count), Self { words }))
    }

    /// The set of all of `blocks` blocks.
    pub(crate) fn all(blocks: u64) -> Result<Self, Error> {
        let mut set = Vec::new();
        make_room(&mut set, words(blocks))?;
        set.resize(words(blocks), u64::MAX);
        if let Some(last) = set.last_mut().filter(|_| !blocks.is_multiple_of(BITS)) {
            *last &= mask(0, blocks % BITS);
        }
        Ok(Self { words: set })
    }

    pub(crate) fn contains(&self, block: u64) -> bool {
        let (word, bit) = place(block);
        self.words.get(word).is_some_and(|word| word & bit != 0)
    }

    /// Adds `block`, which must be one of those that the set was made for.
    pub(crate) fn insert(&mut self, block: u64) {
        let (word, bit) = place(block);
        if let Some(word) = self.words.get_mut(word) {
            *word |= bit;
        }
    }

    pub(crate) fn remove(&mut self, block: u64) {
        let (word, bit) = place(block);
        if let Some(word) = self.words.get_mut(word) {
            *word &= !bit;
        }
    }

    /// The first block of the set in `[first, end)`.
    pub(crate) fn first_in(&self, first: u64, end: u64) -> Option<u64> {
        let mut at = first;
        while at < end {
            let word = *self.words.get(place(at).0)? & (u64::MAX << (at % BITS));
            if word != 0 {
                let block = at / BITS * BITS + u64::from(word.trailing_zeros());
                return Some(block).filter(|&block| block < end);
            }
            at = (at / BITS + 1) * BITS;
        }
        None
    }

    /// The end of the run of blocks of the set that begins with `first`, at most `end`.
    pub(crate) fn run_end(&self, first: u64, end: u64) -> u64 {
        (first..end).find(|&block| !self.contains(block)).unwrap_or(end)
    }

    /// The blocks that are in exactly one of two sets, each with whether that is this one.
    pub(crate) fn differences<'a>(&'a self, other: &'a Self) -> impl Iterator<Item = (u64, bool)> + 'a {
        let len = self.words.len().max(other.words.len());
        (0..len).flat_map(move |index| {
            let (ours, theirs) = (word(&self.words, index), word(&other.words, index));
            let mut differ = ours ^ theirs;
            std::iter::from_fn(move || {
                let bit = (differ != 0).then(|| differ.trailing_zeros())?;
                differ &= differ - 1;
                Some((index as u64 * BITS + u64::from(bit), ours >> bit & 1 == 1))
            })
        })
    }
}

fn word(words: &[u64], index: usize) -> u64 {
    words.get(index).copied().unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn set(blocks: &[u64], of: u64) -> BlockSet {
        let map = BlockMap::new(of).unwrap();
        for &block in blocks {
            map.set(block);
        }
        let (count, set) = BlockSet::decode(&map.encode(), of).unwrap();
        assert_eq!(count, blocks.len() as u64);
        set
    }

    #[test]
    fn a_map_has_what_was_set_and_nothing_else() {
        let map = BlockMap::new(130).unwrap();
        assert!(!map.has(0, 1) && !map.has(129, 130) && map.has(5, 5));
        (60..70).for_each(|block| map.set(block));
        map.set(61);
        map.set(130);
        map.set(u64::MAX);
        assert!(map.has(60, 70) && !map.has(59, 70) && !map.has(60, 71) && !map.has(0, 130));
        (0..130).for_each(|block| map.set(block));
        assert!(map.has(0, 130) && !map.has(0, 131) && !map.has(128, u64::MAX));
        assert_eq!(map.count(), 130);
        assert_eq!(map.encode().len() as u64, BlockMap::encoded_len(130));
    }

    #[test]
    fn sets_find_runs_and_differences() {
        let ours = set(&[0, 1, 63, 64, 65, 129], 130);
        assert_eq!(ours.first_in(2, 130), Some(63));
        assert_eq!(ours.first_in(2, 63), None);
        assert_eq!(ours.first_in(66, 1000), Some(129));
        assert_eq!((ours.run_end(63, 130), ours.run_end(63, 64), ours.run_end(2, 9)), (66, 64, 2));
        let theirs = set(&[1, 2, 129], 130);
        let differ: Vec<_> = ours.differences(&theirs).collect();
        assert_eq!(differ, [(0, true), (2, false), (63, true), (64, true), (65, true)]);
        let mut all = BlockSet::all(130).unwrap();
        assert_eq!((all.first_in(129, 1000), all.first_in(130, 1000)), (Some(129), None));
        all.remove(129);
        all.remove(4000);
        assert_eq!(all.first_in(129, 1000), None);
    }

    #[test]
    fn a_map_of_another_length_is_refused_and_bits_behind_the_end_say_nothing() {
        assert!(BlockSet::decode(&[0; 7], 0).is_none());
        assert!(BlockSet::decode(&[0; 16], 65).is_none() && BlockSet::decode(&[0; 24], 64).is_none());
        assert!(BlockSet::decode(&[0; 17], 64).is_none());
        let (_, full) = BlockSet::decode(&[255; 16], 3).unwrap();
        assert_eq!(full.first_in(3, 64), None);
        assert!(full.contains(2) && !full.contains(3));
    }
}
