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

pub(crate) mod columns;
mod table;

use std::fmt::Write as _;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use bytes::Bytes;
use pyo3::exceptions::{PyException, PyIndexError, PyRuntimeError, PyValueError};
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyDict, PyInt, PyList, PyString, PyTuple, PyType};
use tensorferry_core::{Item, Transfer};
use tensorferry_wire::dtype::Dtype;

use self::columns::{ByAddress, Columns, Row, Span};
use self::table::Place;
use crate::errors;
use crate::memory::{self, Described, PySharedBuffer, TURN, borrowed};
use crate::read_state::getters::{Torch, WithoutTorchFunction};
use crate::read_state::specs::{self, Fields, Specs};
use crate::read_state::views::{Global, Store, View, Views, typed};

/// One row for each tensor, column by column, and which leaf of the state is which row.
#[pyclass(name = "Rows", module = "tensorferry._native", frozen)]
pub(crate) struct PyRows {
    torch: Arc<Torch>,
    /// Whether tensors are read here at all.
    native: bool,
    /// torch's class, where it was imported.
    dtensor: Option<Py<PyType>>,
    /// Address of a class to what its objects are.
    kinds: Mutex<ByAddress<(Py<PyType>, Kind)>>,
    memory: Py<PyList>,
    /// The leaves that are no rows, and their paths.
    pub(crate) objects: Py<PyList>,
    object_paths: Py<PyList>,
    pub(crate) views: Mutex<Views>,
    specs: Specs,
    /// For each number of specs the first with it, and its `DTensor`.
    pub(crate) first_specs: Py<PyList>,
    /// The tensors among the objects that are not read here.
    unread: Mutex<Vec<i64>>,
    /// The containers around the one that is walked.
    inside: Mutex<Vec<usize>>,
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

    pub(crate) fn views(&self) -> MutexGuard<'_, Views> {
        self.views.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn inside(&self) -> MutexGuard<'_, Vec<usize>> {
        self.inside.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn kinds(&self) -> MutexGuard<'_, ByAddress<(Py<PyType>, Kind)>> {
        self.kinds.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn unread(&self) -> MutexGuard<'_, Vec<i64>> {
        self.unread.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// What `value` is by its class. An object that only says that it has another class, by its `__class__`, is not
    /// asked: that may run any code.
    fn kind(&self, value: &Bound<'_, PyAny>) -> PyResult<Kind> {
        let py = value.py();
        if self.is_tensor(value) {
            return Ok(Kind::Tensor);
        }
        if self.is_dtensor(value) {
            return Ok(Kind::DTensor);
        }
        let id = value.get_type_ptr() as usize;
        if let Some(&(_, kind)) = self.kinds().get(&id) {
            return Ok(kind);
        }
        let class = value.get_type();
        let is = |base: &Bound<'_, PyType>| class.is_subclass(base);
        let kind = if is(self.torch.tensor.bind(py))? {
            Kind::OtherTensor
        } else if is(&py.get_type::<PyDict>())?
            || is(&py.get_type::<PyList>())?
            || is(&py.get_type::<PyTuple>())?
            || is(self.torch.deque.bind(py))?
        {
            Kind::Container
        } else {
            Kind::Leaf
        };
        self.kinds().insert(id, (class.unbind(), kind));
        Ok(kind)
    }

    /// Whether `value` is a `DTensor`, and not of a subclass.
    fn is_dtensor(&self, value: &Bound<'_, PyAny>) -> bool {
        self.dtensor.as_ref().is_some_and(|dtensor| dtensor.as_ptr() == value.get_type_ptr().cast())
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

    /// Runs `work`, without the interpreter if there are many rows. With a few it is over before another thread could make
    /// use of the interpreter, which this one would then have to wait for.
    pub(crate) fn detached<T: Send>(&self, py: Python<'_>, work: impl FnOnce() -> T + Send) -> T {
        let is_long = self.columns().ends.len() + self.views().all.len() >= TURN;
        if is_long { py.detach(work) } else { work() }
    }

    /// Whether `value` is a tensor or a parameter, and not of a subclass.
    fn is_tensor(&self, value: &Bound<'_, PyAny>) -> bool {
        let kind = value.get_type_ptr();
        kind == self.torch.tensor.as_ptr().cast() || kind == self.torch.parameter.as_ptr().cast()
    }

    /// The number of a leaf of this kind, whose path is `path` in two parts: of an earlier one if it is the same object.
    fn number(&self, value: &Bound<'_, PyAny>, kind: Kind, path: [&str; 2], other: &Bound<'_, PyAny>) -> PyResult<i64> {
        let read = if kind == Kind::Tensor { self.read(value, path)? } else { Read::Unknown };
        let id = value.as_ptr() as usize;
        let number = match read {
            Read::Leaf(number) => return Ok(number),
            Read::View(view) => self.add_view(value, path, view)?,
            Read::Unknown => {
                if let Some(number) = self.columns().seen.get(&id).copied() {
                    return Ok(number);
                }
                match kind {
                    Kind::Tensor => self.unread_if_object(other.call1((value, path.concat()))?.extract()?),
                    Kind::DTensor => match left_to_python(value.py(), self.read_dtensor(value))? {
                        Some(view) => self.add_view(value, path, view)?,
                        None => self.unread_if_object(self.add_object(value, path)?),
                    },
                    Kind::OtherTensor => self.unread_if_object(self.add_object(value, path)?),
                    Kind::Container | Kind::Leaf => self.add_object(value, path)?,
                }
            }
        };
        self.columns().seen.insert(id, number);
        Ok(number)
    }

    /// Notes that a tensor is not read here, unless it is a row; returns its number.
    fn unread_if_object(&self, number: i64) -> i64 {
        if number < 0 {
            self.unread().push(number);
        }
        number
    }

    fn add_object(&self, value: &Bound<'_, PyAny>, path: [&str; 2]) -> PyResult<i64> {
        let py = value.py();
        let objects = self.objects.bind(py);
        objects.append(value)?;
        self.object_paths.bind(py).append(PyString::new(py, &path.concat()))?;
        Ok(-i64::try_from(objects.len())?)
    }

    fn add_view(&self, value: &Bound<'_, PyAny>, path: [&str; 2], mut view: View) -> PyResult<i64> {
        let number = self.add_object(value, path)?;
        view.leaf = number;
        self.views().add(value.as_ptr() as usize, view);
        Ok(number)
    }

    /// The description of `value` by `DLPack`, `None` for what is no plain tensor in host memory.
    fn describe(&self, value: &Bound<'_, PyAny>) -> Option<Described> {
        self.torch.exchange.as_ref().filter(|_| self.native && self.is_tensor(value))?.describe(value)
    }

    /// Reads a tensor. If it fills a storage of its own from first to last byte and needs no pickle, it becomes a row
    /// unless it is one: what `memory.tensors.is_plain` says.
    fn read(&self, value: &Bound<'_, PyAny>, path: [&str; 2]) -> PyResult<Read> {
        let py = value.py();
        // Tensors of zeros that autograd makes have bytes, and no memory.
        let has_memory = |tensor: &Described| tensor.nbytes > 0 && tensor.address != 0;
        let Some(tensor) = self.describe(value).filter(has_memory) else { return Ok(Read::Unknown) };
        let (there, seen) = {
            let columns = self.columns();
            let row = if tensor.is_dense { columns.starts.get(&tensor.address).copied() } else { None };
            (row, columns.seen.get(&(value.as_ptr() as usize)).copied())
        };
        if let Some(row) = there
            && self.memory.bind(py).get_item(row)?.is(value)
        {
            return Ok(Read::Leaf(i64::try_from(row)?));
        }
        if let Some(number) = seen {
            return Ok(Read::Leaf(number));
        }
        let Some(told) = left_to_python(py, self.ask(value, &tensor))? else { return Ok(Read::Unknown) };
        let fills = tensor.is_dense && told.nbytes == tensor.nbytes;
        if !fills || there.is_some() && self.filling(&told.storage, tensor.address)?.is_some() {
            let view = left_to_python(py, self.view(value, &tensor, &told, None))?;
            return Ok(view.map_or(Read::Unknown, Read::View));
        }
        let parameter = u8::from(self.is_parameter(value));
        let row = Row {
            dtype: told.dtype,
            shape: tensor.shape(),
            address: tensor.address,
            nbytes: tensor.nbytes,
            flag: parameter + 2 * u8::from(told.requires_grad),
        };
        let number = self.columns().push(path, &row)?;
        self.memory.bind(py).append(value)?;
        self.owners.bind(py).append(told.storage)?;
        Ok(Read::Leaf(number))
    }

    fn is_parameter(&self, value: &Bound<'_, PyAny>) -> bool {
        value.get_type_ptr() == self.torch.parameter.as_ptr().cast()
    }

    /// What torch says of a tensor beyond its description, `None` if more belongs to it than a container says.
    fn ask<'py>(&self, value: &Bound<'py, PyAny>, tensor: &Described) -> PyResult<Option<Told<'py>>> {
        let dtype = match tensor.dtype {
            Some(dtype) => dtype,
            None => match self.byte_dtype(value)? {
                Some(dtype) => dtype,
                None => return Ok(None),
            },
        };
        let of = self.torch.of_tensor(value)?;
        let storage = of.storage.of(value)?;
        let requires_grad = of.requires_grad.is_true_of(value)?;
        // Autograd calls hooks when it has computed a gradient; torch registers none where it computes none.
        let needs_more = of.is_neg.is_true_of(value)?
            || dtype == Dtype::C64 && of.is_conj.is_true_of(value)?
            || of.attributes.is_true_of(value)?
            || requires_grad && of.hooks.is_true_of(value)?;
        if needs_more {
            return Ok(None);
        }
        let nbytes = storage.len()?;
        Ok(Some(Told { dtype, storage, nbytes, requires_grad }))
    }

    /// A tensor as a view of its storage, `None` if only Python can pickle it or say why it cannot be sent.
    /// As the local part of a `DTensor` with the spec `spec`, it has to have the dtype that the spec says.
    fn view(
        &self,
        value: &Bound<'_, PyAny>,
        tensor: &Described,
        told: &Told<'_>,
        spec: Option<usize>,
    ) -> PyResult<Option<View>> {
        let py = value.py();
        let has_names = self.torch.has_names && value.call_method0(intern!(py, "has_names"))?.is_truthy()?;
        if typed(told.dtype).is_none() || has_names {
            return Ok(None);
        }
        let address: usize = if tensor.is_dense && tensor.nbytes == told.nbytes {
            tensor.address
        } else {
            self.torch.of_storage(&told.storage)?.address.of(&told.storage)?.extract()?
        };
        let key: usize = self.torch.of_storage(&told.storage)?.key.of(&told.storage)?.extract()?;
        let Some(start) = tensor.address.checked_sub(address) else { return Ok(None) };
        if !start.is_multiple_of(tensor.itemsize) || start.saturating_add(tensor.extent()) > told.nbytes {
            return Ok(None);
        }
        let mut views = self.views();
        if spec.is_some_and(|spec| views.specs.get(spec).is_none_or(|spec| spec.1 != told.dtype)) {
            return Ok(None);
        }
        let store = views.store(key, || Store::new(told.storage.clone().unbind(), address, told.nbytes, true));
        Ok(views.view(store, start, tensor, told.dtype).map(|mut view| {
            (view.requires_grad, view.parameter) = (told.requires_grad, self.is_parameter(value));
            view
        }))
    }

    /// A `DTensor` whose local part and spec describe it completely, `None` for everything else.
    fn read_dtensor(&self, value: &Bound<'_, PyAny>) -> PyResult<Option<View>> {
        let of = self.torch.of_dtensor(value)?;
        let requires_grad = of.requires_grad.is_true_of(value)?;
        if of.dict.is_true_of(value)? || requires_grad && of.hooks.is_true_of(value)? {
            return Ok(None);
        }
        let local = of.local.of(value)?;
        if local.get_type_ptr() != self.torch.tensor.as_ptr().cast() {
            return Ok(None);
        }
        let Some(tensor) = self.describe(&local).filter(|t| t.nbytes > 0 && t.address != 0) else { return Ok(None) };
        let Some(told) = self.ask(&local, &tensor)? else { return Ok(None) };
        let Some(spec) = self.spec(value, of.spec.of(value)?)? else { return Ok(None) };
        let Some(mut view) = self.view(&local, &tensor, &told, Some(spec))? else { return Ok(None) };
        let local_requires_grad = std::mem::replace(&mut view.requires_grad, requires_grad);
        view.global = Some(Global { local: local.unbind(), local_requires_grad, spec });
        Ok(Some(view))
    }

    /// The number of the spec of a `DTensor`, which it may share with others: a spec is longer than all else that
    /// describes a `DTensor`, and many have one of their own. `None` if it cannot be compared with others.
    fn spec(&self, value: &Bound<'_, PyAny>, spec: Bound<'_, PyAny>) -> PyResult<Option<usize>> {
        if let Some(number) = self.specs.number(&spec) {
            return Ok(Some(number));
        }
        let Some(fields) = specs::fields(&spec)? else { return Ok(None) };
        let Some(words) = self.specs.words(&spec, &fields)? else { return Ok(None) };
        let number = if let Some(number) = self.specs.number_of_words(&words) {
            number
        } else {
            let Some(number) = self.add_spec(value, &spec, &fields)? else { return Ok(None) };
            self.specs.add_words(words, number, fields);
            number
        };
        self.specs.add(spec, number);
        Ok(Some(number))
    }

    /// Numbers a spec that says what none before it did, `None` if it does not say what tensor it is of.
    fn add_spec(
        &self,
        value: &Bound<'_, PyAny>,
        spec: &Bound<'_, PyAny>,
        fields: &Fields<'_>,
    ) -> PyResult<Option<usize>> {
        let py = value.py();
        let is_meta = |name: &Bound<'_, PyAny>| name.cast::<PyString>().is_ok_and(|name| name == "tensor_meta");
        let Some((_, meta)) = fields.iter().find(|(name, _)| is_meta(name)) else { return Ok(None) };
        let Some(dtype) = self.dtype_of(meta)? else { return Ok(None) };
        let shape = meta.getattr(intern!(py, "shape"))?.extract()?;
        let firsts = self.first_specs.bind(py);
        let number = firsts.len();
        firsts.append((spec, value))?;
        self.views().specs.push((shape, dtype));
        Ok(Some(number))
    }

    /// The number that `value` was given as a leaf, `None` if it is not a leaf.
    fn leaf_number(&self, value: &Bound<'_, PyAny>) -> PyResult<Option<i64>> {
        let tensor = self.describe(value).filter(|tensor| tensor.is_dense);
        self.leaf_number_at(value, tensor.map(|tensor| tensor.address))
    }

    /// As `leaf_number`; `address` is where its first element is, if it is a tensor.
    pub(crate) fn leaf_number_at(&self, value: &Bound<'_, PyAny>, address: Option<usize>) -> PyResult<Option<i64>> {
        let (seen, row) = {
            let columns = self.columns();
            let row = address.and_then(|address| columns.starts.get(&address).copied());
            (columns.seen.get(&(value.as_ptr() as usize)).copied(), row)
        };
        match row {
            None => Ok(seen),
            Some(_) if seen.is_some() => Ok(seen),
            Some(row) if self.memory.bind(value.py()).get_item(row)?.is(value) => Ok(Some(i64::try_from(row)?)),
            Some(_) => Ok(None),
        }
    }

    /// Adds a row for bytes of `storage`; returns its number.
    pub(crate) fn add_piece(&self, storage: &Bound<'_, PyAny>, name: [&str; 2], row: &Row<'_>) -> PyResult<i64> {
        let number = self.columns().push_unindexed(name, row)?;
        self.memory.bind(storage.py()).append(storage)?;
        self.owners.bind(storage.py()).append(storage)?;
        Ok(number)
    }

    /// The row whose tensor fills `storage`, whose memory starts at `address`.
    pub(crate) fn filling(&self, storage: &Bound<'_, PyAny>, address: usize) -> PyResult<Option<usize>> {
        let py = storage.py();
        let key_of = |storage: &Bound<'_, PyAny>| self.torch.of_storage(storage)?.key.of(storage)?.extract::<usize>();
        let Some(first) = self.columns().starts.get(&address).copied() else { return Ok(None) };
        let key = key_of(storage)?;
        let owners = self.owners.bind(py);
        if key_of(&owners.get_item(first)?)? == key {
            return Ok(Some(first));
        }
        // There are several storages over the same memory. Each is asked for its identity once.
        let new =
            self.columns().doubles.get_mut(&address).map(|rows| std::mem::take(&mut rows.new)).unwrap_or_default();
        let new =
            new.into_iter().map(|row| Ok((key_of(&owners.get_item(row)?)?, row))).collect::<PyResult<Vec<_>>>()?;
        let mut columns = self.columns();
        let Some(rows) = columns.doubles.get_mut(&address) else { return Ok(None) };
        for (key, row) in new {
            rows.by_storage.entry(key).or_insert(row);
        }
        Ok(rows.by_storage.get(&key).copied())
    }

    /// What a container calls the dtype of a tensor whose elements are one byte each: torch has several kinds of those
    /// that `DLPack` does not tell apart.
    fn byte_dtype(&self, value: &Bound<'_, PyAny>) -> PyResult<Option<Dtype>> {
        Ok(self.dtype_of(value)?.filter(|dtype| dtype.bits() == 8))
    }

    /// What a container calls the attribute `dtype` of `value`.
    fn dtype_of(&self, value: &Bound<'_, PyAny>) -> PyResult<Option<Dtype>> {
        let kind = value.getattr(intern!(value.py(), "dtype"))?;
        Ok(self.torch.dtypes.iter().find(|(known, _)| kind.is(known)).map(|&(_, dtype)| dtype))
    }

    /// Counts a leaf, and lets other threads of the interpreter run after every `TURN` of them.
    pub(crate) fn turn(&self, py: Python<'_>) {
        // The interpreter is held, so no other thread counts at the same time.
        let leaves = self.leaves.load(Ordering::Relaxed) + 1;
        self.leaves.store(leaves % TURN, Ordering::Relaxed);
        if leaves >= TURN {
            py.detach(std::thread::yield_now);
        }
    }

    /// Writes the text of one node: the number of a leaf, or of a container all it has.
    fn child(&self, text: &mut String, value: &Bound<'_, PyAny>, path: [&str; 2], by: &Walk<'_, '_>) -> PyResult<()> {
        let id = value.as_ptr() as usize;
        let kind = self.kind(value)?;
        if kind != Kind::Container || by.depth > MAX_DEPTH || self.inside().contains(&id) {
            let number = self.number(value, kind, path, by.other)?;
            if number < 0 {
                text.push('-');
            }
            write_number(text, number.unsigned_abs());
            self.turn(value.py());
            return Ok(());
        }
        self.inside().push(id);
        let path = path.concat();
        let below = if path.is_empty() { String::new() } else { path.clone() + "." };
        let deeper = Walk { depth: by.depth + 1, ..*by };
        if let Ok(dict) = value.cast_exact::<PyDict>()
            && self.members_of(text, dict, &below, &deeper)?
        {
        } else if let Ok(list) = value.cast_exact::<PyList>() {
            text.push_str("[\"l\"");
            let values = list.get_slice(0, list.len());
            self.elements_of(text, &values, None, &below, &deeper)?;
            text.push(']');
        } else if let Ok(tuple) = value.cast_exact::<PyTuple>() {
            text.push_str("[\"t\"");
            self.elements_of(text, &tuple.to_list(), None, &below, &deeper)?;
            text.push(']');
        } else {
            let node = by.container.call1((value, path, by.depth))?;
            text.push_str(node.cast::<PyString>()?.to_str()?);
        }
        self.inside().pop();
        Ok(())
    }

    /// Writes a dict whose keys are text or small integers; returns whether it is one.
    fn members_of(
        &self,
        text: &mut String,
        dict: &Bound<'_, PyDict>,
        below: &str,
        by: &Walk<'_, '_>,
    ) -> PyResult<bool> {
        let (keys, values) = (dict.keys(), dict.values());
        if keys.len() != values.len() {
            return Err(changed());
        }
        if all_text(&keys) {
            text.push('{');
            self.texts_of(text, &keys, &values, below, by)?;
            text.push('}');
            return Ok(true);
        }
        let number = |key: &Bound<'_, PyAny>| {
            key.cast_exact::<PyInt>().ok()?.extract::<i64>().ok().filter(|n| n.abs() < SAFE_INTEGER)
        };
        let Some(numbers) = keys.iter().map(|key| number(&key)).collect::<Option<Vec<_>>>() else { return Ok(false) };
        text.push_str("[\"d\",\"d\",[");
        for (index, (key, value)) in numbers.into_iter().zip(values.iter()).enumerate() {
            let key = key.to_string();
            text.push_str(if index > 0 { ",[" } else { "[" });
            text.push_str(&key);
            text.push(',');
            self.child(text, &value, [below, &key], by)?;
            text.push(']');
        }
        text.push_str("]]");
        Ok(true)
    }

    /// Begins a run of `DTensor`s, which torch does not ask for functions, if `value` is one, and ends it if not: what
    /// belongs to other leaves may be any code.
    fn begin_or_end_run<'py>(
        &self,
        value: &Bound<'py, PyAny>,
        run: &mut Option<WithoutTorchFunction<'py>>,
    ) -> PyResult<()> {
        let is_dtensor = self.is_dtensor(value);
        if !is_dtensor {
            *run = None;
        } else if run.is_none() {
            *run = left_to_python(value.py(), WithoutTorchFunction::new(value.py()).map(Some))?;
        }
        Ok(())
    }

    /// Writes the members of a JSON object.
    fn texts_of(
        &self,
        text: &mut String,
        keys: &Bound<'_, PyList>,
        values: &Bound<'_, PyList>,
        below: &str,
        by: &Walk<'_, '_>,
    ) -> PyResult<()> {
        self.columns().reserve(values.len());
        let mut run = None;
        for (index, (key, value)) in keys.iter().zip(values.iter()).enumerate() {
            self.begin_or_end_run(&value, &mut run)?;
            let key = key.cast_exact::<PyString>()?.to_str()?;
            if index > 0 {
                text.push(',');
            }
            quote(text, key);
            text.push(':');
            self.child(text, &value, [below, key], by)?;
        }
        Ok(())
    }

    /// Writes the elements of a JSON array, a comma before each.
    fn elements_of(
        &self,
        text: &mut String,
        values: &Bound<'_, PyList>,
        names: Option<&Bound<'_, PyTuple>>,
        below: &str,
        by: &Walk<'_, '_>,
    ) -> PyResult<()> {
        let mut run = None;
        for (index, value) in values.iter().enumerate() {
            self.begin_or_end_run(&value, &mut run)?;
            text.push(',');
            let name = match names {
                Some(names) => names.get_item(index)?.extract()?,
                None => index.to_string(),
            };
            self.child(text, &value, [below, &name], by)?;
        }
        Ok(())
    }
}

/// Containers nested deeper than this are sent as one pickled object.
const MAX_DEPTH: usize = 80;
/// Integers below this are keys in a tree; larger ones are sent as objects.
const SAFE_INTEGER: i64 = 1 << 53;

/// What an object is by its class.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Kind {
    /// A tensor or parameter, and not of a subclass.
    Tensor,
    DTensor,
    /// Of another subclass.
    OtherTensor,
    /// May hold nodes of its own.
    Container,
    Leaf,
}

/// What a tensor is.
enum Read {
    /// A leaf with this number.
    Leaf(i64),
    /// No row, and not a leaf yet.
    View(View),
    /// What only Python can tell.
    Unknown,
}

/// What torch says of a tensor beyond its description.
struct Told<'py> {
    dtype: Dtype,
    storage: Bound<'py, PyAny>,
    /// Bytes of the storage.
    nbytes: usize,
    requires_grad: bool,
}

/// What is left to Python: `container(value, path, depth)` returns the text of a container that is no plain dict, list or
/// tuple, `other(value, path)` the number of a tensor that is a leaf.
#[derive(Clone, Copy)]
struct Walk<'a, 'py> {
    container: &'a Bound<'py, PyAny>,
    other: &'a Bound<'py, PyAny>,
    depth: usize,
}

/// What was read, nothing where that failed: Python then reads the tensor, or says why it cannot be sent.
pub(crate) fn left_to_python<T>(py: Python<'_>, read: PyResult<Option<T>>) -> PyResult<Option<T>> {
    match read {
        Err(error) if error.is_instance_of::<PyException>(py) => Ok(None),
        read => read,
    }
}

fn changed() -> PyErr {
    PyRuntimeError::new_err("a dict of the state changed while it was read")
}

/// Whether all keys are text. A subclass of str may compare as it likes, and a lone surrogate is no text.
fn all_text(keys: &Bound<'_, PyList>) -> bool {
    keys.iter().all(|k| k.cast_exact::<PyString>().is_ok_and(|k| k.to_str().is_ok()))
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
    ) -> PyResult<Self> {
        let py = tensor.py();
        Ok(Self {
            torch: Torch::of(tensor, parameter, dtypes)?,
            native,
            dtensor: dtensor.filter(|_| native),
            kinds: Mutex::default(),
            memory: PyList::empty(py).unbind(),
            objects: PyList::empty(py).unbind(),
            object_paths: PyList::empty(py).unbind(),
            views: Mutex::default(),
            specs: Specs::default(),
            first_specs: PyList::empty(py).unbind(),
            unread: Mutex::default(),
            inside: Mutex::default(),
            owners: PyList::empty(py).unbind(),
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
    pub(crate) fn nbytes(&self) -> usize {
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
    fn overlapping(&self, py: Python<'_>, mut others: Vec<Span>, without: Vec<usize>) -> Vec<Vec<i64>> {
        self.detached(py, || {
            others.extend(self.views().spans());
            self.columns().overlapping(others, &without)
        })
    }

    /// The leaves described here that are no rows, of which some elements may share memory with others.
    fn self_overlapping(&self, py: Python<'_>) -> Vec<i64> {
        self.detached(py, || self.views().self_overlapping())
    }

    /// The address of the first element of a leaf, 0 if it is not known here.
    fn start(&self, number: i64) -> usize {
        match usize::try_from(number) {
            Ok(row) => self.columns().addresses.get(row).copied().unwrap_or(0),
            Err(_) => self.views().leaf(number).map_or(0, |view| view.address),
        }
    }

    /// The text of a node, for `value` at this path and depth; `container` and `other` are what [`Walk`] describes.
    ///
    /// # Errors
    /// `RuntimeError` when a dict changed meanwhile, and whatever `container` and `other` raise.
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

    /// The number of a leaf: of an earlier one if it is the same object.
    fn leaf(&self, value: &Bound<'_, PyAny>, path: &str, other: &Bound<'_, PyAny>) -> PyResult<i64> {
        self.number(value, self.kind(value)?, [path, ""], other)
    }

    /// The numbers of the objects that are tensors and were not read here, first object first.
    #[getter(unread)]
    fn unread_numbers(&self) -> Vec<i64> {
        self.unread().clone()
    }

    /// The leaves that are no rows.
    #[getter]
    fn objects(&self, py: Python<'_>) -> Py<PyList> {
        self.objects.clone_ref(py)
    }

    /// The key path of each of them.
    #[getter]
    pub(crate) fn object_paths(&self, py: Python<'_>) -> Py<PyList> {
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
        let leaf = self.columns().seen.get(&id).copied();
        self.views().is_described(id, leaf)
    }

    /// The row whose tensor fills `storage`, whose memory starts at `address`.
    fn filler(&self, storage: &Bound<'_, PyAny>, address: usize) -> PyResult<Option<usize>> {
        self.filling(storage, address)
    }

    /// The number that `value` was given as a leaf, `None` if it is not a leaf.
    fn number_of(&self, value: &Bound<'_, PyAny>) -> PyResult<Option<i64>> {
        self.leaf_number(value)
    }

    /// Forgets which objects are leaves, and releases them. To be called before the state may change: an address may
    /// then belong to another object.
    fn forget(&self, py: Python<'_>) -> PyResult<()> {
        let memory = self.memory.bind(py);
        memory.del_slice(0, memory.len())?;
        for list in [&self.objects, &self.object_paths, &self.first_specs] {
            let list = list.bind(py);
            list.del_slice(0, list.len())?;
        }
        self.specs.forget();
        let views = std::mem::take(&mut *self.views());
        let kinds = std::mem::take(&mut *self.kinds());
        self.unread().clear();
        let mut columns = self.columns();
        (columns.seen, columns.starts, columns.doubles) = Default::default();
        // Releasing objects may run any code.
        drop(columns);
        drop((views, kinds));
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

    /// The bytes of a buffer that [`Self::copy_into`] can copy all rows into but those in `without`.
    #[allow(clippy::needless_pass_by_value, reason = "what Python calls takes values")]
    fn copied_size(&self, py: Python<'_>, without: Vec<usize>) -> usize {
        py.detach(|| self.columns().laid_out(&without).1)
    }

    /// Copies all rows but those in `without`, which lie in host memory, with up to `threads` threads to `address`, and
    /// notes that they are there. `buffer`, which has the `nbytes` bytes there, becomes their owner.
    ///
    /// # Errors
    /// `ValueError` when they are more bytes than that.
    #[pyo3(signature = (buffer, address, nbytes, without, *, threads))]
    #[allow(clippy::needless_pass_by_value, reason = "what Python calls takes values")]
    fn copy_into(
        &self,
        buffer: &Bound<'_, PyAny>,
        address: usize,
        nbytes: usize,
        without: Vec<usize>,
        threads: usize,
    ) -> PyResult<()> {
        let py = buffer.py();
        let there = py.detach(|| {
            let (places, size) = self.columns().laid_out(&without);
            if size > nbytes {
                return None;
            }
            let transfers: Vec<_> = {
                let columns = self.columns();
                let transfer = |&(row, at): &(usize, usize)| Transfer {
                    from: columns.addresses[row],
                    to: address + at,
                    len: columns.sizes[row],
                };
                places.iter().map(transfer).collect()
            };
            memory::copy(&transfers, threads);
            let mut columns = self.columns();
            for &(row, at) in &places {
                columns.addresses[row] = address + at;
            }
            Some(places)
        });
        let there = there.ok_or_else(|| PyValueError::new_err("the rows do not fit into the buffer"))?;
        let owners = self.owners.bind(py);
        for (row, _) in there {
            owners.set_item(row, buffer)?;
            self.turn(py);
        }
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
        let none = py.get_type::<PyAny>();
        let empty = Self::new(&none, &none, &PyDict::new(py), None, false)?;
        Ok(Self { owners: PyList::new(py, owners)?.unbind(), columns: Mutex::new(columns), ..empty })
    }

    /// Whether every name can stand in a container as it is.
    fn names_are_regular(&self, py: Python<'_>) -> bool {
        self.detached(py, || self.columns().names_are_regular())
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
pub(crate) fn named(dtype: &str) -> PyResult<Dtype> {
    Dtype::from_name(dtype).ok_or_else(|| PyValueError::new_err(format!("a container has no dtype {dtype}")))
}

/// `value` in decimal digits: `write!` takes several times as long.
pub(crate) fn write_number(text: &mut String, value: u64) {
    let (mut digits, mut at, mut rest) = ([b'0'; 20], 20, value);
    loop {
        at -= 1;
        digits[at] = b'0' + (rest % 10) as u8;
        rest /= 10;
        if rest == 0 {
            break;
        }
    }
    text.push_str(std::str::from_utf8(&digits[at..]).unwrap_or_default());
}

/// `text` as a JSON string in ASCII, as Python's `json` writes it.
pub(crate) fn quote(out: &mut String, text: &str) {
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
