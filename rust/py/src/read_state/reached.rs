//! Storages of which some bytes are reached by objects, or by tensors that have no row of their own.

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
    /// The first run of bytes that was reached, `[start, end)`. Most storages have only this one, which needs no list.
    pub(super) first_reached: Option<(usize, usize)>,
    /// The others.
    pub(super) more_reached: Vec<(usize, usize)>,
}

/// A gap of at most this many bytes that nothing reaches is sent along: a separate entry would cost as much.
const JOIN_GAP: usize = 512;

impl ReachedStorage {
    pub(crate) fn new(object: Py<PyAny>, address: usize, nbytes: usize, is_on_host: bool) -> Self {
        Self { object, address, nbytes, is_on_host, number: None, first_reached: None, more_reached: Vec::new() }
    }

    /// Notes that the bytes `span` of the storage are reached.
    pub(super) fn reach(&mut self, span: (usize, usize)) {
        if self.first_reached.is_none() {
            self.first_reached = Some(span);
        } else if self.first_reached != Some(span) {
            self.more_reached.push(span);
        }
    }

    /// Replaces what is in `runs` by the runs of bytes to send: the union of all that is reached, joined over small gaps.
    pub(crate) fn collect_runs(&mut self, runs: &mut Vec<(usize, usize)>) {
        runs.clear();
        if !self.more_reached.is_empty() {
            self.more_reached.extend(self.first_reached);
            self.more_reached.sort_unstable();
        }
        let one = self.first_reached.filter(|_| self.more_reached.is_empty());
        for &(start, end) in self.more_reached.iter().chain(&one) {
            match runs.last_mut() {
                Some(last) if start <= last.1 + JOIN_GAP => last.1 = last.1.max(end),
                _ if end > start => runs.push((start, end)),
                _ => {}
            }
        }
    }
}
