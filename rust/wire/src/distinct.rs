//! Finds a text that occurs twice among many that must differ: the names of entries, the keys of an object.
//!
//! A peer chooses these texts, and there may be a million of them. [`Distinct`] takes 20 bytes at most for each that it
//! has room for and compares only texts whose hashes are equal, so a hostile choice cannot make it slow. Texts that are
//! equal cost more while they are compared: each is read once more.
//!
//! ```
//! use tensorferry_wire::distinct::Distinct;
//!
//! let texts = ["weight", "bias", "weight"];
//! let mut distinct = Distinct::with_capacity(texts.len());
//! for (place, text) in texts.iter().enumerate() {
//!     distinct.add(text, place);
//! }
//! assert_eq!(distinct.repeated(|place| texts[place].into()), Some(2));
//! ```

use std::borrow::Cow;
use std::hash::{BuildHasher, RandomState};

/// The hashes of texts, which are compared once all were added: with a million of them, a set misses the cache at each
/// one.
#[derive(Debug, Default)]
pub struct Distinct {
    /// Keyed at random, so that a peer cannot choose texts with equal hashes.
    hasher: RandomState,
    seen: Vec<(u64, usize)>,
}

impl Distinct {
    /// An empty collection with memory for `count` texts.
    #[must_use]
    pub fn with_capacity(count: usize) -> Self {
        Self { hasher: RandomState::new(), seen: Vec::with_capacity(count) }
    }

    /// Adds a text. Only its hash is kept; `place` is the number under which [`Distinct::repeated`] reads it again.
    pub fn add(&mut self, text: &str, place: usize) {
        self.seen.push((self.hasher.hash_one(text), place));
    }

    /// Drops the hashes that occur once, but for about an eighth of them: sorting what is left takes little time.
    fn drop_unlike(&mut self) {
        let bits = (self.seen.len() * 8).next_power_of_two().max(64);
        let mut once = vec![0_u64; bits / 64];
        let mut again = once.clone();
        let bit_of = |hash: u64| {
            // The lower bits of a hash are as good as all of them.
            let bit = usize::try_from(hash & (bits as u64 - 1)).unwrap_or(0);
            (bit / 64, 1_u64 << (bit % 64))
        };
        for &(hash, _) in &self.seen {
            let (word, bit) = bit_of(hash);
            again[word] |= once[word] & bit;
            once[word] |= bit;
        }
        self.seen.retain(|&(hash, _)| {
            let (word, bit) = bit_of(hash);
            again[word] & bit != 0
        });
    }

    /// The lowest place whose text also occurs at a lower place; `None` if all texts differ. `read` returns the text at
    /// a place and is called only for texts whose hashes are equal.
    #[must_use]
    pub fn repeated<'a>(mut self, read: impl Fn(usize) -> Cow<'a, str>) -> Option<usize> {
        self.drop_unlike();
        self.seen.sort_unstable();
        let mut lowest = None;
        for alike in self.seen.chunk_by(|one, two| one.0 == two.0).filter(|alike| alike.len() > 1) {
            let mut texts: Vec<_> = alike.iter().map(|&(_, place)| (read(place), place)).collect();
            texts.sort_unstable();
            let again = texts.windows(2).filter(|two| two[0].0 == two[1].0).map(|two| two[1].1).min();
            lowest = again.into_iter().chain(lowest).min();
        }
        lowest
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn repeated(texts: &[String]) -> Option<usize> {
        let mut distinct = Distinct::default();
        for (place, text) in texts.iter().enumerate() {
            distinct.add(text, place);
        }
        distinct.repeated(|place| Cow::Borrowed(&texts[place]))
    }

    #[test]
    fn texts_of_one_hash_are_compared() {
        let texts = ["a", "b", "c", "b"];
        let one_hash = |places: &[usize]| {
            let seen = places.iter().map(|&place| (7, place)).collect();
            let distinct = Distinct { seen, ..Distinct::default() };
            distinct.repeated(|place| Cow::Borrowed(texts[place]))
        };
        assert_eq!(one_hash(&[0, 1, 2]), None);
        assert_eq!(one_hash(&[3, 0, 1, 2]), Some(3));
    }

    #[test]
    fn one_repeated_text_is_found_among_many() {
        for count in [2, 7, 64, 65, 1000, 50_000] {
            let mut texts: Vec<_> = (0..count).map(|n| format!("layer{n}.weight")).collect();
            assert_eq!(repeated(&texts), None);
            for (first, again) in [(0, count - 1), (count / 2 - 1, count / 2)] {
                let text = std::mem::replace(&mut texts[again], format!("layer{first}.weight"));
                assert_eq!(repeated(&texts), Some(again), "of {count}");
                texts[again] = text;
            }
        }
    }

    proptest! {
        #[test]
        fn the_first_that_is_there_already_is_found(texts in prop::collection::vec("[a-c]{0,3}", 0..40)) {
            let first = (0..texts.len()).find(|&place| texts[..place].contains(&texts[place]));
            prop_assert_eq!(repeated(&texts), first);
        }
    }
}
