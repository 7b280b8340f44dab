//! Which block a receiver fetches from which relay: the rarest that the relay has.
//!
//! Rare is what few of the relays that the receiver knows have. When the relays leave, what is left over should be what
//! many have, and no member should be the only one to have a block for long.

use tensorferry_wire::swarm::Nearness;

use super::BlockSet;

/// Ranges of which the relay has something that are compared for one pick: of more, these are a fair sample.
const LOOKS: usize = 1024;

/// The blocks that relays have, as they have said themselves.
#[derive(Debug)]
pub(crate) struct Picker {
    /// For each block, how many relays have it: those on the same host, and farther away.
    holders: Vec<[u16; 2]>,
    /// For each relay, its blocks.
    sets: Vec<BlockSet>,
    nearness: Vec<Nearness>,
    /// Where the next look begins, so that receivers do not all fetch the same block from a relay.
    turn: u64,
}

impl Picker {
    /// For `blocks` blocks; `seed` should differ from receiver to receiver.
    pub(crate) fn new(blocks: usize, seed: u64) -> Self {
        Self { holders: vec![[0; 2]; blocks], sets: Vec::new(), nearness: Vec::new(), turn: seed }
    }

    /// Adds a relay that is so far away and has nothing yet; returns its number.
    pub(crate) fn add(&mut self, nearness: Nearness) -> usize {
        self.nearness.push(nearness);
        self.sets.push(BlockSet::default());
        self.sets.len() - 1
    }

    /// Relay `relay` has the blocks of `set`; with the empty set, it is as good as gone.
    pub(crate) fn learn(&mut self, relay: usize, set: BlockSet) {
        let (Some(known), Some(&nearness)) = (self.sets.get_mut(relay), self.nearness.get(relay)) else { return };
        for (block, is_new) in set.differences(known) {
            if let Some(holders) = usize::try_from(block).ok().and_then(|block| self.holders.get_mut(block)) {
                let count = &mut holders[nearness as usize];
                *count = if is_new { count.saturating_add(1) } else { count.saturating_sub(1) };
            }
        }
        *known = set;
    }

    /// Whether no relay has `block`.
    pub(crate) fn is_unoffered(&self, block: u64) -> bool {
        self.rarity(block) == 0
    }

    /// Whether a relay has `block` that is nearer than `nearness`.
    pub(crate) fn is_offered_nearer(&self, block: u64, nearness: Nearness) -> bool {
        self.holders_of(block)[..nearness as usize].iter().any(|&holders| holders > 0)
    }

    /// How far away `relay` is.
    pub(crate) fn nearness(&self, relay: usize) -> Nearness {
        self.nearness.get(relay).copied().unwrap_or_default()
    }

    fn rarity(&self, block: u64) -> u16 {
        self.holders_of(block).iter().fold(0, |sum, &holders| sum.saturating_add(holders))
    }

    fn holders_of(&self, block: u64) -> [u16; 2] {
        usize::try_from(block).ok().and_then(|block| self.holders.get(block)).copied().unwrap_or_default()
    }

    /// Of the ranges in `waiting`, none of them empty, what to fetch from `relay` next: the number of the range, and at
    /// most `most` blocks of it, one behind the other. `None` if the relay has none of them.
    pub(crate) fn pick(&mut self, relay: usize, waiting: &[(u64, u64)], most: u64) -> Option<(usize, (u64, u64))> {
        self.pick_allowed(relay, waiting, most, |_, _| true)
    }

    /// The same of the blocks that are `allowed`.
    pub(crate) fn pick_allowed(
        &mut self,
        relay: usize,
        waiting: &[(u64, u64)],
        most: u64,
        allowed: impl Fn(&Self, u64) -> bool,
    ) -> Option<(usize, (u64, u64))> {
        let set = self.sets.get(relay)?;
        let count = waiting.len();
        if count == 0 {
            return None;
        }
        self.turn = mix(self.turn);
        let start = usize::try_from(self.turn % count as u64).unwrap_or(0);
        let mut best: Option<(u16, usize, u64)> = None;
        let mut looks = 0;
        for index in (start..count).chain(0..start) {
            let (first, end) = waiting[index];
            // From the middle of a range, too: its beginning is not rarer than the rest.
            let middle = first + (self.turn >> 32) % (end - first);
            let first_in = |mut at: u64, end: u64| {
                while let Some(block) = set.first_in(at, end) {
                    if allowed(self, block) {
                        return Some(block);
                    }
                    at = block + 1;
                }
                None
            };
            let found = first_in(middle, end).or_else(|| first_in(first, middle));
            let Some(block) = found else { continue };
            let rarity = self.rarity(block);
            if best.is_none_or(|best| rarity < best.0) {
                best = Some((rarity, index, block));
            }
            looks += 1;
            if rarity <= 1 || looks == LOOKS {
                break;
            }
        }
        let (_, index, block) = best?;
        let end = set.run_end(block, waiting[index].1.min(block.saturating_add(most)));
        let end = (block..end).find(|&block| !allowed(self, block)).unwrap_or(end);
        Some((index, (block, end)))
    }
}

/// A number that has nothing to do with `value`, and is always the same.
pub(super) fn mix(value: u64) -> u64 {
    let mut mixed = value.wrapping_add(0x9E37_79B9_7F4A_7C15);
    mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    mixed ^ (mixed >> 31)
}

#[cfg(test)]
mod tests {
    use super::super::BlockMap;
    use super::*;

    fn set(blocks: impl IntoIterator<Item = u64>) -> BlockSet {
        let map = BlockMap::new(100).unwrap();
        blocks.into_iter().for_each(|block| map.set(block));
        BlockSet::decode(&map.encode(), 100).unwrap().1
    }

    #[test]
    fn the_rarest_block_of_a_relay_comes_first() {
        for seed in 0..20 {
            let mut picker = Picker::new(100, seed);
            let relays = [picker.add(Nearness::Far), picker.add(Nearness::Far), picker.add(Nearness::Far)];
            picker.learn(relays[0], set(0..90));
            picker.learn(relays[1], set((0..40).chain(42..90)));
            picker.learn(relays[2], set(50..60));
            let waiting = [(0, 40), (40, 50), (50, 100)];
            picker.learn(relays[1], set((0..40).chain(50..90)));
            let (index, run) = picker.pick(relays[0], &waiting, 16).unwrap();
            assert_eq!((index, run.1), (1, 50), "only one has these");
            assert_eq!(picker.pick(relays[2], &waiting, 4).map(|pick| pick.0), Some(2));
            assert_eq!(picker.pick(relays[2], &waiting[..2], 4), None);
            assert_eq!(picker.pick(relays[2], &[], 4), None);
            assert!(picker.is_unoffered(99) && !picker.is_unoffered(55));
        }
    }

    #[test]
    fn what_a_relay_no_longer_has_counts_no_more() {
        let mut picker = Picker::new(100, 1);
        let (one, two) = (picker.add(Nearness::Far), picker.add(Nearness::Far));
        picker.learn(one, set(0..10));
        picker.learn(two, set(0..10));
        picker.learn(one, BlockSet::default());
        assert_eq!(picker.pick(one, &[(0, 10)], 4), None);
        assert!(!picker.is_unoffered(3));
        picker.learn(two, set(5..10));
        assert!(picker.is_unoffered(3) && !picker.is_unoffered(5));
        assert_eq!(picker.pick(two, &[(5, 6)], 2), Some((0, (5, 6))));
        picker.learn(7, set(0..10));
        assert_eq!(picker.pick(7, &[(0, 10)], 2), None, "a relay that was never added");
    }

    #[test]
    fn equal_blocks_are_taken_in_no_common_order() {
        let first = |seed, waiting: &[(u64, u64)]| {
            let mut picker = Picker::new(100, seed);
            let relay = picker.add(Nearness::Far);
            picker.learn(relay, set(0..100));
            picker.pick(relay, waiting, 1).unwrap()
        };
        let ranges: Vec<_> = (0..100).map(|block| (block, block + 1)).collect();
        // One of many ranges, and any place in one.
        for waiting in [&ranges[..], &[(0, 100)]] {
            let picks: std::collections::HashSet<_> = (0..50).map(|seed| first(seed, waiting)).collect();
            assert!(picks.len() > 20, "{picks:?}");
        }
    }
}
