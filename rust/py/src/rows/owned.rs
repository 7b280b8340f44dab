//! The rows of a state, and what keeps their memory.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, MutexGuard};

use bytes::Bytes;
use pyo3::prelude::*;
use pyo3::types::PyList;
use tensorferry_core::Item;
use tensorferry_wire::dtype::Dtype;

use super::columns::{Columns, Row};
use crate::memory::{YIELD_INTERVAL, borrowed};
use tensorferry_core::Locked;

/// One row for each tensor. No tensor is asked anything here.
pub(crate) struct Rows {
    /// The object each row was read from.
    pub(crate) memory: Py<PyList>,
    /// Keeps the memory of each row alive: a tensor's storage, since a tensor can be given another one at any time.
    pub(crate) owners: Py<PyList>,
    pub(super) columns: Mutex<Columns>,
    /// Leaves since other threads were last let run.
    pub(super) leaves: AtomicUsize,
}

impl Rows {
    pub(crate) fn new(py: Python<'_>) -> Self {
        Self {
            memory: PyList::empty(py).unbind(),
            owners: PyList::empty(py).unbind(),
            columns: Mutex::default(),
            leaves: AtomicUsize::new(0),
        }
    }

    /// The columns; the interpreter is not needed for them.
    pub(crate) fn columns(&self) -> MutexGuard<'_, Columns> {
        self.columns.locked()
    }

    /// Bytes of all rows.
    pub(crate) fn nbytes(&self) -> usize {
        self.columns().sizes.iter().sum()
    }

    /// Adds a row that was read from `memory` and whose bytes `owner` keeps; returns its number.
    ///
    /// # Errors
    /// `OverflowError` for more than 255 dimensions.
    pub(crate) fn push(
        &self,
        name: [&str; 2],
        row: &Row<'_>,
        memory: &Bound<'_, PyAny>,
        owner: &Bound<'_, PyAny>,
    ) -> PyResult<i64> {
        let number = self.columns().push(name, row)?;
        self.memory.bind(memory.py()).append(memory)?;
        self.owners.bind(memory.py()).append(owner)?;
        Ok(number)
    }

    /// Adds a row for bytes of `storage`; returns its number.
    pub(crate) fn add_piece(&self, storage: &Bound<'_, PyAny>, name: [&str; 2], row: &Row<'_>) -> PyResult<i64> {
        let number = self.columns().push_unindexed(name, row)?;
        self.memory.bind(storage.py()).append(storage)?;
        self.owners.bind(storage.py()).append(storage)?;
        Ok(number)
    }

    /// The rows as items to publish, and behind them `control`, name and bytes of each. Nothing is copied: whoever
    /// publishes the items keeps the rows' memory alive. To be called without the interpreter if there are many rows,
    /// since other threads of the process would have to wait long.
    pub(crate) fn items(&self, control: Vec<(String, Vec<u8>)>) -> Vec<Item> {
        let columns = self.columns();
        let mut items = Vec::with_capacity(columns.ends.len() + control.len());
        for (row, (name, shape)) in columns.names().zip(columns.shapes()).enumerate() {
            let memory = borrowed(columns.addresses[row], columns.sizes[row]);
            items.push(Item::new(name, columns.dtypes[row], shape, memory));
        }
        items.extend(control.into_iter().map(|(name, bytes)| {
            let shape = [bytes.len() as u64];
            Item::bytes(name, Dtype::U8, &shape, Bytes::from(bytes))
        }));
        items
    }

    /// Runs `work`, without the interpreter if there are many rows. With a few it is over before another thread could make
    /// use of the interpreter, which this one would then have to wait for.
    pub(crate) fn detached<T: Send>(&self, py: Python<'_>, work: impl FnOnce() -> T + Send) -> T {
        let is_long = self.columns().ends.len() >= YIELD_INTERVAL;
        if is_long { py.detach(work) } else { work() }
    }

    /// Counts a leaf, and lets other threads of the interpreter run after every `YIELD_INTERVAL` of them.
    pub(crate) fn count_and_yield(&self, py: Python<'_>) {
        // The interpreter is held, so no other thread counts at the same time.
        let leaves = self.leaves.load(Ordering::Relaxed) + 1;
        self.leaves.store(leaves % YIELD_INTERVAL, Ordering::Relaxed);
        if leaves >= YIELD_INTERVAL {
            py.detach(std::thread::yield_now);
        }
    }
}
