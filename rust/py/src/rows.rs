//! `Rows`: the tensors of a state as the rows of a container, read while Python walks the state.
//!
//! A state has up to hundreds of thousands of tensors, and a few calls through the interpreter for each of them would
//! take longer than sending them. `Rows` therefore reads plain tensors itself, through `DLPack`'s table, and asks
//! Python about everything else.
//!
//! Invariants:
//!
//! * row `i` of every column is about the same tensor;
//! * `owners[i]` keeps the memory of row `i`, whatever becomes of the tensor it was read from;
//! * an object is one leaf, however often it occurs in the state;
//! * other threads get a turn after every `TURN` leaves.

use std::fmt::Write as _;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

use bytes::Bytes;
use pyo3::exceptions::{PyIndexError, PyRuntimeError, PyValueError};
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyDict, PyList, PyString, PyTuple, PyType};
use tensorferry_core::Item;
use tensorferry_wire::dtype::Dtype;

use crate::columns::{Columns, Row, Span};
use crate::errors;
use crate::memory::{Described, Exchange, PySharedBuffer, TURN, borrowed};
use crate::table::{self, Place};

/// One row for each tensor, column by column, and which leaf of the state is which row.
#[pyclass(name = "Rows", module = "tensorferry._native", frozen)]
pub(crate) struct PyRows {
    tensor: Py<PyType>,
    parameter: Py<PyType>,
    /// How torch's dtypes are named in a container.
    dtypes: Vec<(Py<PyAny>, Dtype)>,
    /// `None`: this torch does not offer it, and every tensor is read in Python.
    exchange: Option<Exchange>,
    /// `object.__getstate__`: returns attributes without making a dict for them, which an object would keep.
    attributes: Py<PyAny>,
    memory: Py<PyList>,
    /// Keeps the memory of each row alive: a tensor's storage, since a tensor can be given another one at any time.
    owners: Py<PyList>,
    columns: Mutex<Columns>,
    /// Leaves since the last turn of other threads.
    leaves: AtomicUsize,
}

impl PyRows {
    /// The columns; the interpreter is not needed for them.
    fn columns(&self) -> MutexGuard<'_, Columns> {
        self.columns.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The rows as items to publish, and behind them `control`, name and bytes of each. To be called without the
    /// interpreter, for which a peer's training loop would have to wait long.
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

    /// Whether `value` is a tensor or a parameter, and not of a subclass.
    fn is_tensor(&self, value: &Bound<'_, PyAny>) -> bool {
        let kind = value.get_type_ptr();
        kind == self.tensor.as_ptr().cast() || kind == self.parameter.as_ptr().cast()
    }

    /// The number of a leaf, whose path is `path` in two parts: of an earlier one if it is the same object.
    fn number(&self, value: &Bound<'_, PyAny>, path: [&str; 2], other: &Bound<'_, PyAny>) -> PyResult<i64> {
        if let Some(number) = self.read(value, path)? {
            return Ok(number);
        }
        let id = value.as_ptr() as usize;
        let known = self.columns().seen.get(&id).copied();
        if let Some(number) = known {
            return Ok(number);
        }
        let number = other.call1((value, path.concat()))?.extract()?;
        self.columns().seen.insert(id, number);
        Ok(number)
    }

    /// The description of `value` by `DLPack`, `None` for what is no plain tensor in host memory.
    fn describe(&self, value: &Bound<'_, PyAny>) -> Option<Described> {
        self.exchange.as_ref().filter(|_| self.is_tensor(value))?.describe(value)
    }

    /// The row whose memory starts at `address`, and whether it is that of `value`.
    fn row_at(&self, address: usize, value: &Bound<'_, PyAny>) -> PyResult<Option<(usize, bool)>> {
        let Some(row) = self.columns().starts.get(&address).copied() else { return Ok(None) };
        Ok(Some((row, self.memory.bind(value.py()).get_item(row)?.is(value))))
    }

    /// Reads a tensor that fills a storage of its own from first to last byte and needs no pickle, and adds it as a
    /// row unless it is one. `None` for everything else, and where only Python can decide:
    /// `memory.tensors.is_plain` decides.
    fn read(&self, value: &Bound<'_, PyAny>, path: [&str; 2]) -> PyResult<Option<i64>> {
        let py = value.py();
        // Tensors of zeros that autograd makes have bytes, and no memory.
        let has_memory = |tensor: &Described| tensor.nbytes > 0 && tensor.address != 0;
        let Some(tensor) = self.describe(value).filter(has_memory) else { return Ok(None) };
        if let Some((row, same)) = self.row_at(tensor.address, value)? {
            return Ok(if same { Some(i64::try_from(row)?) } else { None });
        }
        let dtype = match tensor.dtype {
            Some(dtype) => dtype,
            None => match self.byte_dtype(value)? {
                Some(dtype) => dtype,
                None => return Ok(None),
            },
        };
        let storage = value.call_method0(intern!(py, "untyped_storage"))?;
        if storage.len()? != tensor.nbytes {
            return Ok(None);
        }
        let truth = |name: &Bound<'_, PyString>| value.call_method0(name)?.is_truthy();
        let needs_more = truth(intern!(py, "is_neg"))?
            || dtype == Dtype::C64 && truth(intern!(py, "is_conj"))?
            || self.attributes.bind(py).call1((value,))?.is_truthy()?
            || value.getattr(intern!(py, "_backward_hooks"))?.is_truthy()?;
        if needs_more {
            return Ok(None);
        }
        let parameter = u8::from(value.get_type_ptr() == self.parameter.as_ptr().cast());
        let requires_grad = u8::from(value.getattr(intern!(py, "requires_grad"))?.is_truthy()?);
        let row = Row {
            dtype,
            shape: tensor.shape(),
            address: tensor.address,
            nbytes: tensor.nbytes,
            flag: parameter + 2 * requires_grad,
        };
        let number = self.columns().push(path, &row)?;
        self.memory.bind(py).append(value)?;
        self.owners.bind(py).append(storage)?;
        Ok(Some(number))
    }

    /// What a container calls the dtype of a tensor whose elements are one byte each: torch has several kinds of those
    /// that `DLPack` does not tell apart.
    fn byte_dtype(&self, value: &Bound<'_, PyAny>) -> PyResult<Option<Dtype>> {
        let kind = value.getattr(intern!(value.py(), "dtype"))?;
        let known = self.dtypes.iter().find(|(known, _)| kind.is(known)).map(|&(_, dtype)| dtype);
        Ok(known.filter(|dtype| dtype.bits() == 8))
    }

    /// Counts a leaf, and lets other threads of the interpreter run after every `TURN` of them.
    fn turn(&self, py: Python<'_>) {
        // The interpreter is held, so no other thread counts at the same time.
        let leaves = self.leaves.load(Ordering::Relaxed) + 1;
        self.leaves.store(leaves % TURN, Ordering::Relaxed);
        if leaves >= TURN {
            py.detach(std::thread::yield_now);
        }
    }

    /// The text for one child: the number of a tensor, or the text that `node` returns for anything else.
    fn child(&self, text: &mut String, value: &Bound<'_, PyAny>, path: [&str; 2], by: &Walk<'_, '_>) -> PyResult<()> {
        if self.is_tensor(value) {
            let number = self.number(value, path, by.other)?;
            // Writing to a string cannot fail.
            let _ = write!(text, "{number}");
            self.turn(value.py());
        } else {
            let node = by.node.call1((value, path.concat(), by.depth))?;
            text.push_str(node.cast::<PyString>()?.to_str()?);
        }
        Ok(())
    }
}

/// What is left to Python: `node(value, path, depth)` returns the text of a node, `other(value, path)` the number of a
/// leaf.
struct Walk<'a, 'py> {
    node: &'a Bound<'py, PyAny>,
    other: &'a Bound<'py, PyAny>,
    depth: usize,
}

#[pymethods]
impl PyRows {
    /// No rows yet. `tensor` and `parameter` are torch's classes, `dtypes` maps torch's dtypes to the names a container
    /// has for them. Without `native`, every tensor is described by Python.
    #[new]
    #[pyo3(signature = (tensor, parameter, dtypes, *, native = true))]
    fn new(
        tensor: &Bound<'_, PyType>,
        parameter: &Bound<'_, PyType>,
        dtypes: &Bound<'_, PyDict>,
        native: bool,
    ) -> PyResult<Self> {
        let dtypes = dtypes
            .iter()
            .map(|(dtype, name)| Ok((dtype.unbind(), named(name.extract()?)?)))
            .collect::<PyResult<_>>()?;
        Ok(Self {
            dtypes,
            exchange: if native { Exchange::of(tensor) } else { None },
            attributes: tensor.py().get_type::<PyAny>().getattr("__getstate__")?.unbind(),
            tensor: tensor.clone().unbind(),
            parameter: parameter.clone().unbind(),
            memory: PyList::empty(tensor.py()).unbind(),
            owners: PyList::empty(tensor.py()).unbind(),
            columns: Mutex::default(),
            leaves: AtomicUsize::new(0),
        })
    }

    fn __len__(&self) -> usize {
        self.columns().ends.len()
    }

    /// The object each row was read from.
    #[getter]
    fn memory(&self, py: Python<'_>) -> Py<PyList> {
        self.memory.clone_ref(py)
    }

    /// Keeps the memory of each row alive, even if the tensor it was read from is freed or gets other memory.
    #[getter]
    fn owners(&self, py: Python<'_>) -> Py<PyList> {
        self.owners.clone_ref(py)
    }

    /// One digit per row: 1 for a Parameter, plus 2 if it requires grad.
    #[getter]
    fn flags(&self) -> String {
        self.columns().flags.clone()
    }

    /// Bytes of all rows.
    #[getter]
    fn nbytes(&self) -> usize {
        self.columns().sizes.iter().sum()
    }

    /// The name of each row.
    #[getter]
    fn names<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyList>> {
        PyList::new(py, self.columns().names().collect::<Vec<_>>())
    }

    /// The dtype of each row, by the name that a container has for it.
    #[getter]
    fn dtypes<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyList>> {
        PyList::new(py, self.columns().dtypes.iter().map(|d| PyString::intern(py, d.name())))
    }

    /// The shape of each row.
    #[getter]
    fn shapes<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyList>> {
        let shapes: Vec<_> = self.columns().shapes().map(|s| PyTuple::new(py, s)).collect::<PyResult<_>>()?;
        PyList::new(py, shapes)
    }

    /// The size of each row in bytes.
    #[getter]
    fn sizes<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyList>> {
        PyList::new(py, &self.columns().sizes)
    }

    /// Bytes of row `row`.
    fn size(&self, row: usize) -> PyResult<usize> {
        self.columns().sizes.get(row).copied().ok_or_else(|| PyIndexError::new_err("there is no such row"))
    }

    /// Where the memory of row `row` starts.
    fn address(&self, row: usize) -> PyResult<usize> {
        self.columns().addresses.get(row).copied().ok_or_else(|| PyIndexError::new_err("there is no such row"))
    }

    /// The leaves whose memory overlaps, in groups: rows by their number, and `others`, each with its number, its
    /// address space (0 is host memory) and its first and last byte (exclusive). The rows in `without` are not looked
    /// at.
    #[allow(clippy::needless_pass_by_value, reason = "what Python calls takes values")]
    fn overlapping(&self, py: Python<'_>, others: Vec<Span>, without: Vec<usize>) -> Vec<Vec<i64>> {
        py.detach(|| self.columns().overlapping(others, &without))
    }

    /// The members of a JSON object for a dict with these keys and values, `None` if a key is not text.
    ///
    /// `below` is the path of the dict, `depth` how deep it lies; `node` and `other` are what [`Walk`] describes.
    ///
    /// # Errors
    /// `RuntimeError` when the dict changed meanwhile, and whatever `node` and `other` raise.
    fn members(
        &self,
        keys: &Bound<'_, PyList>,
        values: &Bound<'_, PyList>,
        below: &str,
        depth: usize,
        node: &Bound<'_, PyAny>,
        other: &Bound<'_, PyAny>,
    ) -> PyResult<Option<String>> {
        if keys.len() != values.len() {
            return Err(PyRuntimeError::new_err("a dict of the state changed while it was read"));
        }
        // A subclass of str may compare as it likes, and a lone surrogate is no text.
        if !keys.iter().all(|k| k.cast_exact::<PyString>().is_ok_and(|k| k.to_str().is_ok())) {
            return Ok(None);
        }
        let by = Walk { node, other, depth };
        let mut text = String::with_capacity(keys.len() * 24);
        for (key, value) in keys.iter().zip(values.iter()) {
            let key = key.cast_exact::<PyString>()?.to_str()?;
            if !text.is_empty() {
                text.push(',');
            }
            quote(&mut text, key);
            text.push(':');
            self.child(&mut text, &value, [below, key], &by)?;
        }
        Ok(Some(text))
    }

    /// The elements of a JSON array for `values`, a comma before each. Their paths end in `names`, or in the index
    /// where there are none.
    ///
    /// # Errors
    /// Whatever `node` and `other` raise.
    fn elements(
        &self,
        values: &Bound<'_, PyList>,
        names: Option<&Bound<'_, PyTuple>>,
        below: &str,
        depth: usize,
        node: &Bound<'_, PyAny>,
        other: &Bound<'_, PyAny>,
    ) -> PyResult<String> {
        let by = Walk { node, other, depth };
        let mut text = String::new();
        for (index, value) in values.iter().enumerate() {
            text.push(',');
            let name = match names {
                Some(names) => names.get_item(index)?.extract()?,
                None => index.to_string(),
            };
            self.child(&mut text, &value, [below, &name], &by)?;
        }
        Ok(text)
    }

    /// The number of a leaf: of an earlier one if it is the same object, else what `other(value, path)` says.
    fn leaf(&self, value: &Bound<'_, PyAny>, path: &str, other: &Bound<'_, PyAny>) -> PyResult<i64> {
        self.number(value, [path, ""], other)
    }

    /// The number that `value` was given as a leaf, `None` if it is not a leaf.
    fn number_of(&self, value: &Bound<'_, PyAny>) -> PyResult<Option<i64>> {
        if let Some(number) = self.columns().seen.get(&(value.as_ptr() as usize)).copied() {
            return Ok(Some(number));
        }
        let Some(tensor) = self.describe(value) else { return Ok(None) };
        let row = self.row_at(tensor.address, value)?.filter(|&(_, same)| same);
        Ok(row.map(|(row, _)| i64::try_from(row)).transpose()?)
    }

    /// Forgets which objects are leaves, and releases them. To be called before the state may change: an address may
    /// then belong to another object.
    fn forget(&self, py: Python<'_>) -> PyResult<()> {
        let memory = self.memory.bind(py);
        memory.del_slice(0, memory.len())?;
        let mut columns = self.columns();
        (columns.seen, columns.starts) = Default::default();
        Ok(())
    }

    /// Adds a row as given and returns its number. `owner` keeps its memory; by default `memory` does.
    ///
    /// # Errors
    /// `ValueError` for a dtype that no container has.
    #[allow(clippy::too_many_arguments, clippy::needless_pass_by_value, reason = "what Python calls takes values")]
    #[pyo3(signature = (memory, name, dtype, shape, address, nbytes, flag, owner = None))]
    fn append(
        &self,
        memory: &Bound<'_, PyAny>,
        name: &str,
        dtype: &str,
        shape: Vec<u64>,
        address: usize,
        nbytes: usize,
        flag: u8,
        owner: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<i64> {
        let row = Row { dtype: named(dtype)?, shape: &shape, address, nbytes, flag };
        let number = self.columns().push([name, ""], &row)?;
        self.memory.bind(memory.py()).append(memory)?;
        self.owners.bind(memory.py()).append(owner.unwrap_or(memory))?;
        Ok(number)
    }

    /// Notes that row `row` was copied to `address`.
    fn place(&self, row: usize, address: usize) -> PyResult<()> {
        let mut columns = self.columns();
        let place = columns.addresses.get_mut(row).ok_or_else(|| PyIndexError::new_err("there is no such row"))?;
        *place = address;
        Ok(())
    }

    /// The rows as bytes for another process that maps `buffers`; [`Self::from_table`] reads them.
    ///
    /// # Errors
    /// `InvalidArgument` when a row lies in none of them.
    #[allow(clippy::needless_pass_by_value, reason = "what Python calls takes values")]
    fn table<'py>(&self, py: Python<'py>, buffers: Vec<Py<PySharedBuffer>>) -> PyResult<Bound<'py, PyBytes>> {
        let places = places(&buffers);
        let table = py.detach(|| table::encode(&self.columns(), &places)).map_err(|e| errors::invalid(py, e))?;
        Ok(PyBytes::new(py, &table))
    }

    /// The rows of a table that another process has made, which lie in `buffers`. Each row keeps its buffer.
    ///
    /// # Errors
    /// `ProtocolError` when it is not a table, or a row reaches beyond its buffer.
    #[staticmethod]
    #[allow(clippy::needless_pass_by_value, reason = "what Python calls takes values")]
    fn from_table(py: Python<'_>, table: &[u8], buffers: Vec<Py<PySharedBuffer>>) -> PyResult<Self> {
        let places = places(&buffers);
        let (columns, numbers) = py
            .detach(|| table::decode(table, &places))
            .map_err(|e| errors::protocol(py, format!("the table of a state cannot be used: {e}")))?;
        // A row without bytes may name any buffer.
        let owners = numbers.iter().map(|&number| buffers.get(number).map(|buffer| buffer.clone_ref(py)));
        // No tensor is read, so no class is one.
        let none = py.get_type::<PyAny>().unbind();
        Ok(Self {
            tensor: none.clone_ref(py),
            parameter: none,
            dtypes: Vec::new(),
            exchange: None,
            attributes: py.None(),
            memory: PyList::empty(py).unbind(),
            owners: PyList::new(py, owners)?.unbind(),
            columns: Mutex::new(columns),
            leaves: AtomicUsize::new(0),
        })
    }

    /// Whether every name can stand in a container as it is.
    fn names_are_regular(&self, py: Python<'_>) -> bool {
        py.detach(|| self.columns().names_are_regular())
    }

    /// Gives every row the name at its place in `names`.
    ///
    /// # Errors
    /// `ValueError` unless there is one name for each row.
    #[allow(clippy::needless_pass_by_value, reason = "what Python calls takes values")]
    fn rename(&self, names: Vec<String>) -> PyResult<()> {
        let mut columns = self.columns();
        if names.len() != columns.ends.len() {
            return Err(PyValueError::new_err("there must be one name for each row"));
        }
        columns.names = names.concat();
        columns.ends = names
            .iter()
            .scan(0, |end, name| {
                *end += name.len();
                Some(*end)
            })
            .collect();
        Ok(())
    }
}

fn places(buffers: &[Py<PySharedBuffer>]) -> Vec<Place> {
    buffers.iter().map(|buffer| buffer.get().place()).collect()
}

/// The dtype that a container calls `dtype`.
fn named(dtype: &str) -> PyResult<Dtype> {
    Dtype::from_name(dtype).ok_or_else(|| PyValueError::new_err(format!("a container has no dtype {dtype}")))
}

/// `text` as a JSON string in ASCII, as Python's `json` writes it.
fn quote(out: &mut String, text: &str) {
    out.push('"');
    if text.bytes().all(|b| matches!(b, b' '..=b'~') && b != b'"' && b != b'\\') {
        out.push_str(text);
    } else {
        for c in text.chars() {
            match c {
                '"' | '\\' => out.extend(['\\', c]),
                ' '..='~' => out.push(c),
                _ => {
                    for unit in c.encode_utf16(&mut [0; 2]) {
                        // Writing to a string cannot fail.
                        let _ = write!(out, "\\u{unit:04x}");
                    }
                }
            }
        }
    }
    out.push('"');
}
