//! The containers that a walk of a state has entered: which of them are around the node at hand, and how much of the
//! state is walked again because several containers hold the same one.
//!
//! Each place of a container is written into the tree. A dict that holds one dict twice, which holds another one twice,
//! and so on, has a tree of four billion nodes after 32 such levels.

use std::collections::HashSet;
use std::hash::BuildHasherDefault;

use crate::rows::columns::AddressHasher;

/// Nodes that may be walked again in any state.
const MOST: usize = 100_000;
/// How many further ones may be for each node that was walked for the first time.
const TIMES: usize = 100;

/// The containers of a walk, by address. The state keeps them alive meanwhile.
#[derive(Default)]
pub(crate) struct Walked {
    /// Those around the node at hand, outermost first.
    inside: Vec<usize>,
    entered: HashSet<usize, BuildHasherDefault<AddressHasher>>,
    /// How many of the innermost ones were entered before, or lie in one that was.
    again: usize,
    /// Nodes that were walked for the first time.
    distinct: usize,
    /// Nodes that were walked again.
    repeated: usize,
}

impl Walked {
    /// Whether the walk is inside this container.
    pub(crate) fn is_inside(&self, container: usize) -> bool {
        self.inside.contains(&container)
    }

    /// Enters a container that holds `len` nodes. Returns whether the state may be walked further: not if too much of it
    /// was walked before.
    #[must_use]
    pub(crate) fn enter(&mut self, container: usize, len: usize) -> bool {
        self.inside.push(container);
        if self.entered.insert(container) && self.again == 0 {
            self.distinct = self.distinct.saturating_add(len);
            return true;
        }
        self.again += 1;
        self.repeated = self.repeated.saturating_add(len).saturating_add(1);
        self.repeated <= self.distinct.saturating_mul(TIMES).saturating_add(MOST)
    }

    /// Leaves the container that was entered last.
    pub(crate) fn leave(&mut self) {
        self.inside.pop();
        self.again = self.again.saturating_sub(1);
    }
}
