//! Boxes of elements: the parts of tensors that chunks have and that readers want.

use std::fmt;

use super::{Item, MergeError};

/// A box of elements, borrowed: where it begins in each dimension, and how far it reaches.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct BoxRef<'a> {
    /// The first element in each dimension.
    pub offsets: &'a [u64],
    /// The number of elements in each dimension.
    pub sizes: &'a [u64],
}

/// A box as messages show it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BoxText(String);

impl fmt::Display for BoxText {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl BoxRef<'_> {
    /// The number of elements. Callers have checked that it fits.
    #[must_use]
    pub fn numel(&self) -> u64 {
        self.sizes.iter().product()
    }

    /// Whether the box lies inside of a tensor of this shape.
    #[must_use]
    pub fn is_inside(&self, shape: &[u64]) -> bool {
        self.offsets.len() == shape.len()
            && self.sizes.len() == shape.len()
            && self
                .offsets
                .iter()
                .zip(self.sizes)
                .zip(shape)
                .all(|((&start, &size), &dim)| start.checked_add(size).is_some_and(|end| end <= dim))
    }

    /// The number of elements that this box and `other` have in common. Scalars have one.
    #[must_use]
    pub fn common(&self, other: &BoxRef<'_>) -> u64 {
        let mut common = 1;
        for (dim, (&start, &size)) in self.offsets.iter().zip(self.sizes).enumerate() {
            let (begin, length) = (other.offsets[dim], other.sizes[dim]);
            common *= (start + size).min(begin + length).saturating_sub(start.max(begin));
            // Most boxes are apart in the first dimension.
            if common == 0 {
                break;
            }
        }
        common
    }

    /// The box as messages show it: `[0:4, 8:16]`.
    #[must_use]
    pub fn text(&self) -> BoxText {
        let sides: Vec<_> =
            self.offsets.iter().zip(self.sizes).map(|(&a, &n)| format!("{a}:{}", a.saturating_add(n))).collect();
        BoxText(format!("[{}]", sides.join(", ")))
    }
}

/// Returns two of the boxes that overlap, by their places in `boxes`; all are inside of one tensor.
///
/// It sweeps along the dimension with the most different offsets, so that few boxes are compared with each other.
pub(super) fn find_overlap(boxes: &[BoxRef<'_>]) -> Option<(usize, usize)> {
    let mut order: Vec<usize> = (0..boxes.len()).filter(|&at| boxes[at].numel() > 0).collect();
    let dims = boxes.first().map_or(0, |first| first.offsets.len());
    let along = (0..dims).max_by_key(|&dim| {
        let mut offsets: Vec<u64> = order.iter().map(|&at| boxes[at].offsets[dim]).collect();
        offsets.sort_unstable();
        offsets.dedup();
        offsets.len()
    });
    if let Some(dim) = along {
        order.sort_by_key(|&at| boxes[at].offsets[dim]);
    }
    let mut active: Vec<usize> = Vec::new();
    for at in order {
        if let Some(dim) = along {
            let start = boxes[at].offsets[dim];
            active.retain(|&other| boxes[other].offsets[dim] + boxes[other].sizes[dim] > start);
        }
        if let Some(&other) = active.iter().find(|&&other| boxes[other].common(&boxes[at]) > 0) {
            return Some((other.min(at), other.max(at)));
        }
        active.push(at);
    }
    None
}

/// Checks that the parts that ranks have of a tensor do not overlap and, with `all`, have each of its elements.
pub(super) fn check_whole(item: &Item<'_>, parts: &[(usize, BoxRef<'_>)], all: bool) -> Result<(), MergeError> {
    let boxes: Vec<_> = parts.iter().map(|(_, part)| *part).collect();
    if let Some((one, other)) = find_overlap(&boxes) {
        return Err(MergeError::Overlap {
            key: item.key.to_owned(),
            first_rank: parts[one].0,
            first: boxes[one].text(),
            rank: parts[other].0,
            other: boxes[other].text(),
        });
    }
    let (have, need) = (boxes.iter().map(BoxRef::numel).sum(), item.shape.iter().product());
    if have == need || !all {
        return Ok(());
    }
    let mut names: Vec<String> = Vec::new();
    for (rank, part) in parts {
        let name = format!("rank {rank}");
        if part.numel() > 0 && names.last() != Some(&name) {
            names.push(name);
        }
    }
    let ranks = if names.is_empty() { "no part".to_owned() } else { names.join(", ") };
    Err(MergeError::Missing { key: item.key.to_owned(), have, need, shape: item.shape.to_vec(), ranks })
}
