//! Reading a state: `Rows`, a table whose rows are read while Python walks the state.
//!
//! A state has up to hundreds of thousands of tensors, and a few calls through the interpreter for each of them would
//! take longer than sending them. `Rows` therefore reads plain tensors itself, through `DLPack`'s table, and asks
//! Python about everything else.
//!
//! `walk` writes the tree and numbers its leaves, `tensors` and `dtensors` read them by what `getters` and `specs` tell;
//! those that have no row of their own are `views`, or objects, of which `objects` and `plain_objects` write the `pickle`
//! and `pieces` the memory that they refer to.
//!
//! Invariants:
//!
//! * an object is one leaf, however often it occurs in the state;
//! * other threads get a turn after every `YIELD_INTERVAL` leaves.

mod dtensors;
mod getters;
pub(crate) mod objects;
mod pickle;
pub(crate) mod pieces;
pub(crate) mod plain_objects;
mod reached;
mod specs;
mod tensors;
mod text;
mod view;
mod views;
mod walk;
mod walked;

use std::sync::{Arc, Mutex, MutexGuard};

use pyo3::prelude::*;
use pyo3::types::{PyDict, PyList, PyTuple, PyType};

use self::getters::Torch;
use self::specs::Specs;
use self::tensors::Kind;
use self::views::Views;
use self::walk::{Walk, all_text, changed};
use self::walked::Walked;
use crate::memory::YIELD_INTERVAL;
use crate::rows::columns::{ByAddress, Span};
use crate::rows::{PyTable, Rows};
use tensorferry_core::Locked;

/// Which leaf of a state is which row, and what the leaves are that have no row of their own.
#[pyclass(name = "Rows", module = "tensorferry._native", frozen, extends = PyTable)]
pub(crate) struct PyRows {
    pub(crate) rows: Arc<Rows>,
    torch: Arc<Torch>,
    /// Whether tensors are read here at all.
    native: bool,
    /// torch's class, where it was imported.
    dtensor: Option<Py<PyType>>,
    /// Address of a class to what its objects are.
    kinds: Mutex<ByAddress<(Py<PyType>, Kind)>>,
    /// The leaves that have no row of their own, and their paths.
    objects: Py<PyList>,
    object_paths: Py<PyList>,
    views: Mutex<Views>,
    specs: Specs,
    /// For each number of specs the first with it, and its `DTensor`.
    first_specs: Py<PyList>,
    /// The tensors among the objects that are not read here.
    unread: Mutex<Vec<i64>>,
    walked: Mutex<Walked>,
}

impl PyRows {
    fn walked(&self) -> MutexGuard<'_, Walked> {
        self.walked.locked()
    }

    fn unread(&self) -> MutexGuard<'_, Vec<i64>> {
        self.unread.locked()
    }

    /// Runs `work`, without the interpreter if there are many rows. With a few it is over before another thread could make
    /// use of the interpreter, which this one would then have to wait for.
    fn detached<T: Send>(&self, py: Python<'_>, work: impl FnOnce() -> T + Send) -> T {
        let is_long = self.rows.columns().ends.len() + self.views.locked().all.len() >= YIELD_INTERVAL;
        if is_long { py.detach(work) } else { work() }
    }
}

#[pymethods]
impl PyRows {
    /// No rows yet. `tensor` and `parameter` are torch's classes, `dtypes` maps torch's dtypes to the names a container
    /// has for them, `dtensor` is torch's class of that name, if it was imported. Without `native`, every tensor is
    /// described by Python.
    #[new]
    #[pyo3(signature = (tensor, parameter, dtypes, *, dtensor = None, native = true))]
    fn new(
        tensor: &Bound<'_, PyType>,
        parameter: &Bound<'_, PyType>,
        dtypes: &Bound<'_, PyDict>,
        dtensor: Option<Py<PyType>>,
        native: bool,
    ) -> PyResult<PyClassInitializer<Self>> {
        let py = tensor.py();
        let rows = Arc::new(Rows::new(py));
        let reader = Self {
            rows: Arc::clone(&rows),
            torch: Torch::of(tensor, parameter, dtypes)?,
            native,
            dtensor: dtensor.filter(|_| native),
            kinds: Mutex::default(),
            objects: PyList::empty(py).unbind(),
            object_paths: PyList::empty(py).unbind(),
            views: Mutex::default(),
            specs: Specs::default(),
            first_specs: PyList::empty(py).unbind(),
            unread: Mutex::default(),
            walked: Mutex::default(),
        };
        Ok(PyClassInitializer::from(PyTable(rows)).add_subclass(reader))
    }

    /// The leaves whose memory overlaps, in groups: rows by their number, and `others`, each with its number, its
    /// address space (0 is host memory) and its first and last byte (exclusive). The rows in `without` are not looked
    /// at.
    #[allow(clippy::needless_pass_by_value, reason = "what Python calls takes values")]
    fn overlapping(&self, py: Python<'_>, mut others: Vec<Span>, without: Vec<usize>) -> Vec<Vec<i64>> {
        self.detached(py, || {
            others.extend(self.views.locked().spans());
            self.rows.columns().overlapping(others, &without)
        })
    }

    /// The leaves described here without a row of their own, of which some elements may share memory with others.
    fn self_overlapping(&self, py: Python<'_>) -> Vec<i64> {
        self.detached(py, || self.views.locked().self_overlapping())
    }

    /// The address of the first element of a leaf, 0 if it is not known here.
    fn start(&self, number: i64) -> usize {
        match usize::try_from(number) {
            Ok(row) => self.rows.columns().addresses.get(row).copied().unwrap_or(0),
            Err(_) => self.views.locked().leaf(number).map_or(0, |view| view.address),
        }
    }

    /// The text of a node, for `value` at this path and depth; `container` and `other` are what [`Walk`] describes.
    ///
    /// # Errors
    /// `RuntimeError` when a dict changed meanwhile, `UnsupportedLeaf` when too much of the state is there again and
    /// again because several containers hold the same one, and whatever `container` and `other` raise. The rows are of
    /// no use then.
    fn node(
        &self,
        value: &Bound<'_, PyAny>,
        path: &str,
        depth: usize,
        container: &Bound<'_, PyAny>,
        other: &Bound<'_, PyAny>,
    ) -> PyResult<String> {
        let mut text = String::new();
        self.child(&mut text, value, [path, ""], &Walk { container, other, depth })?;
        Ok(text)
    }

    /// The members of a JSON object for a dict with these keys and values, `None` if a key is not text.
    ///
    /// `below` is the path of the dict, `depth` how deep its values lie.
    ///
    /// # Errors
    /// As for `node`.
    fn members(
        &self,
        keys: &Bound<'_, PyList>,
        values: &Bound<'_, PyList>,
        below: &str,
        depth: usize,
        container: &Bound<'_, PyAny>,
        other: &Bound<'_, PyAny>,
    ) -> PyResult<Option<String>> {
        if keys.len() != values.len() {
            return Err(changed());
        }
        if !all_text(keys) {
            return Ok(None);
        }
        let mut text = String::new();
        self.texts_of(&mut text, keys, values, below, &Walk { container, other, depth })?;
        Ok(Some(text))
    }

    /// The elements of a JSON array for `values`, a comma before each. Their paths end in `names`, or in the index
    /// where there are none.
    ///
    /// # Errors
    /// As for `node`.
    fn elements(
        &self,
        values: &Bound<'_, PyList>,
        names: Option<&Bound<'_, PyTuple>>,
        below: &str,
        depth: usize,
        container: &Bound<'_, PyAny>,
        other: &Bound<'_, PyAny>,
    ) -> PyResult<String> {
        let mut text = String::new();
        self.elements_of(&mut text, values, names, below, &Walk { container, other, depth })?;
        Ok(text)
    }

    /// The number of a leaf: of an earlier one if it is the same object. `other` is as for `node`.
    ///
    /// # Errors
    /// Whatever `other` raises.
    fn leaf(&self, value: &Bound<'_, PyAny>, path: &str, other: &Bound<'_, PyAny>) -> PyResult<i64> {
        self.number(value, self.kind(value)?, [path, ""], other)
    }

    /// The numbers of the objects that are tensors and were not read here, first object first.
    #[getter(unread)]
    fn unread_numbers(&self) -> Vec<i64> {
        self.unread().clone()
    }

    /// The leaves that have no row of their own.
    #[getter]
    fn objects(&self, py: Python<'_>) -> Py<PyList> {
        self.objects.clone_ref(py)
    }

    /// The key path of each leaf that is no row.
    #[getter]
    fn object_paths(&self, py: Python<'_>) -> Py<PyList> {
        self.object_paths.clone_ref(py)
    }

    /// The specs of `DTensor`s that differ, each with the first `DTensor` that has it.
    #[getter]
    fn first_specs(&self, py: Python<'_>) -> Py<PyList> {
        self.first_specs.clone_ref(py)
    }

    /// Whether `value` is a tensor that is no row and is described here, or the local part of one.
    fn is_view(&self, value: &Bound<'_, PyAny>) -> bool {
        let id = value.as_ptr() as usize;
        let leaf = self.rows.columns().seen.get(&id).copied();
        self.views.locked().is_described(id, leaf)
    }

    /// The row whose tensor fills `storage`, whose memory starts at `address`.
    fn filler(&self, storage: &Bound<'_, PyAny>, address: usize) -> PyResult<Option<usize>> {
        self.filling(storage, address)
    }

    /// The number that `value` was given as a leaf, `None` if it is not a leaf.
    fn number_of(&self, value: &Bound<'_, PyAny>) -> PyResult<Option<i64>> {
        self.leaf_number(value)
    }

    /// Forgets which objects are leaves, and releases them; the rows stay, and so do their owners. To be called before
    /// the state may change: an address may then belong to another object.
    fn forget(&self, py: Python<'_>) -> PyResult<()> {
        let memory = self.rows.memory.bind(py);
        memory.del_slice(0, memory.len())?;
        for list in [&self.objects, &self.object_paths, &self.first_specs] {
            let list = list.bind(py);
            list.del_slice(0, list.len())?;
        }
        self.specs.forget();
        let views = std::mem::take(&mut *self.views.locked());
        let kinds = std::mem::take(&mut *self.kinds.locked());
        self.unread().clear();
        let mut columns = self.rows.columns();
        (columns.seen, columns.starts, columns.doubles) = Default::default();
        // Releasing objects may run any code.
        drop(columns);
        drop((views, kinds));
        Ok(())
    }
}
