//! Storages of which objects, or tensors that are no rows, reach some bytes.

use pyo3::prelude::*;

/// A storage to which objects refer.
pub(crate) struct ReachedStorage {
    pub(crate) object: Py<PyAny>,
    pub(crate) address: usize,
    pub(crate) nbytes: usize,
    /// Whether it is known to lie in host memory.
    pub(crate) is_on_host: bool,
    /// What the pickle calls it.
    pub(crate) number: Option<usize>,
    /// The bytes that are reached: first and last (exclusive). Most storages are reached by one tensor, which needs no
    /// memory for a list.
    pub(super) reached: Option<(usize, usize)>,
    pub(super) reached_too: Vec<(usize, usize)>,
}

/// A gap of at most this many bytes that nothing reaches is sent along: a separate entry would cost as much.
const JOIN_GAP: usize = 512;

impl ReachedStorage {
    pub(crate) fn new(object: Py<PyAny>, address: usize, nbytes: usize, is_on_host: bool) -> Self {
        Self { object, address, nbytes, is_on_host, number: None, reached: None, reached_too: Vec::new() }
    }

    /// Notes that the bytes `span` of the storage are reached.
    pub(super) fn reach(&mut self, span: (usize, usize)) {
        if self.reached.is_none() {
            self.reached = Some(span);
        } else if self.reached != Some(span) {
            self.reached_too.push(span);
        }
    }

    /// Puts the runs of bytes to send into `runs`: the union of all spans, with runs joined over small gaps.
    pub(crate) fn covered(&mut self, runs: &mut Vec<(usize, usize)>) {
        runs.clear();
        if !self.reached_too.is_empty() {
            self.reached_too.extend(self.reached);
            self.reached_too.sort_unstable();
        }
        let one = self.reached.filter(|_| self.reached_too.is_empty());
        for &(start, end) in self.reached_too.iter().chain(&one) {
            match runs.last_mut() {
                Some(last) if start <= last.1 + JOIN_GAP => last.1 = last.1.max(end),
                _ if end > start => runs.push((start, end)),
                _ => {}
            }
        }
    }
}
