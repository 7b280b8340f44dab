//! The leaves of a state: which of them are tensors, which of these are rows, and which number each has.

use pyo3::exceptions::PyException;
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyList, PyString, PyTuple, PyType};
use tensorferry_wire::dtype::Dtype;

use super::PyRows;
use super::reached::ReachedStorage;
use super::view::{View, typed};
use crate::memory::Described;
use crate::rows::columns::Row;
use tensorferry_core::Locked;

/// What an object is by its class.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Kind {
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
pub(super) enum Read {
    /// A leaf with this number.
    Leaf(i64),
    /// No row, and not a leaf yet.
    View(View),
    /// What only Python can tell.
    Unknown,
}

/// What torch says of a tensor beyond its description.
pub(super) struct StorageFacts<'py> {
    pub(super) dtype: Dtype,
    pub(super) storage: Bound<'py, PyAny>,
    /// Bytes of the storage.
    pub(super) nbytes: usize,
    pub(super) requires_grad: bool,
}

/// What was read, nothing where that failed: Python then reads the tensor, or says why it cannot be sent.
pub(super) fn left_to_python<T>(py: Python<'_>, read: PyResult<Option<T>>) -> PyResult<Option<T>> {
    match read {
        Err(error) if error.is_instance_of::<PyException>(py) => Ok(None),
        read => read,
    }
}

impl PyRows {
    /// What `value` is by its class. An object that only says that it has another class, by its `__class__`, is not
    /// asked: that may run any code.
    pub(super) fn kind(&self, value: &Bound<'_, PyAny>) -> PyResult<Kind> {
        let py = value.py();
        if self.is_tensor(value) {
            return Ok(Kind::Tensor);
        }
        if self.is_dtensor(value) {
            return Ok(Kind::DTensor);
        }
        let id = value.get_type_ptr() as usize;
        if let Some(&(_, kind)) = self.kinds.locked().get(&id) {
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
        self.kinds.locked().insert(id, (class.unbind(), kind));
        Ok(kind)
    }

    /// Whether `value` is a `DTensor`, and not of a subclass.
    pub(super) fn is_dtensor(&self, value: &Bound<'_, PyAny>) -> bool {
        self.dtensor.as_ref().is_some_and(|dtensor| dtensor.as_ptr() == value.get_type_ptr().cast())
    }

    /// Whether `value` is a tensor or a parameter, and not of a subclass.
    fn is_tensor(&self, value: &Bound<'_, PyAny>) -> bool {
        let kind = value.get_type_ptr();
        kind == self.torch.tensor.as_ptr().cast() || kind == self.torch.parameter.as_ptr().cast()
    }

    /// The number of a leaf of this kind, whose path is `path` in two parts: of an earlier one if it is the same object.
    pub(super) fn number(
        &self,
        value: &Bound<'_, PyAny>,
        kind: Kind,
        path: [&str; 2],
        other: &Bound<'_, PyAny>,
    ) -> PyResult<i64> {
        let read = if kind == Kind::Tensor { self.read(value, path)? } else { Read::Unknown };
        let id = value.as_ptr() as usize;
        let number = match read {
            Read::Leaf(number) => return Ok(number),
            Read::View(view) => self.add_view(value, path, view)?,
            Read::Unknown => {
                if let Some(number) = self.rows.columns().seen.get(&id).copied() {
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
        self.rows.columns().seen.insert(id, number);
        Ok(number)
    }

    /// Notes that a tensor is not read here, unless it is a row; returns its number.
    fn unread_if_object(&self, number: i64) -> i64 {
        if number < 0 {
            self.unread().push(number);
        }
        number
    }

    /// Adds a leaf that is no row, with its path in two parts; returns its number, which is negative.
    fn add_object(&self, value: &Bound<'_, PyAny>, path: [&str; 2]) -> PyResult<i64> {
        let py = value.py();
        let objects = self.objects.bind(py);
        objects.append(value)?;
        self.object_paths.bind(py).append(PyString::new(py, &path.concat()))?;
        Ok(-i64::try_from(objects.len())?)
    }

    /// Adds a leaf that has no row of its own and that `view` describes; returns its number.
    fn add_view(&self, value: &Bound<'_, PyAny>, path: [&str; 2], mut view: View) -> PyResult<i64> {
        let number = self.add_object(value, path)?;
        view.leaf = number;
        self.views.locked().add(value.as_ptr() as usize, view);
        Ok(number)
    }

    /// The description of `value` by `DLPack`, `None` for what is no plain tensor in host memory.
    pub(super) fn describe(&self, value: &Bound<'_, PyAny>) -> Option<Described> {
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
            let columns = self.rows.columns();
            let row = if tensor.is_dense { columns.starts.get(&tensor.address).copied() } else { None };
            (row, columns.seen.get(&(value.as_ptr() as usize)).copied())
        };
        if let Some(row) = there
            && self.rows.memory.bind(py).get_item(row)?.is(value)
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
        Ok(Read::Leaf(self.rows.push(path, &row, value, &told.storage)?))
    }

    fn is_parameter(&self, value: &Bound<'_, PyAny>) -> bool {
        value.get_type_ptr() == self.torch.parameter.as_ptr().cast()
    }

    /// What torch says of a tensor beyond its description, `None` if more belongs to it than a container says.
    pub(super) fn ask<'py>(
        &self,
        value: &Bound<'py, PyAny>,
        tensor: &Described,
    ) -> PyResult<Option<StorageFacts<'py>>> {
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
        Ok(Some(StorageFacts { dtype, storage, nbytes, requires_grad }))
    }

    /// A tensor as a view of its storage, `None` if only Python can pickle it or say why it cannot be sent.
    /// As the local part of a `DTensor` with the spec `spec`, it has to have the dtype that the spec says.
    pub(super) fn view(
        &self,
        value: &Bound<'_, PyAny>,
        tensor: &Described,
        told: &StorageFacts<'_>,
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
        let mut views = self.views.locked();
        if spec.is_some_and(|spec| views.specs.get(spec).is_none_or(|spec| spec.1 != told.dtype)) {
            return Ok(None);
        }
        let store = views.store(key, || ReachedStorage::new(told.storage.clone().unbind(), address, told.nbytes, true));
        Ok(views.view(store, start, tensor, told.dtype).map(|mut view| {
            (view.requires_grad, view.parameter) = (told.requires_grad, self.is_parameter(value));
            view
        }))
    }

    /// The number that `value` was given as a leaf, `None` if it is not a leaf.
    pub(super) fn leaf_number(&self, value: &Bound<'_, PyAny>) -> PyResult<Option<i64>> {
        let tensor = self.describe(value).filter(|tensor| tensor.is_dense);
        self.leaf_number_at(value, tensor.map(|tensor| tensor.address))
    }

    /// As `leaf_number`; `address` is where its first element is, if it is a tensor.
    pub(super) fn leaf_number_at(&self, value: &Bound<'_, PyAny>, address: Option<usize>) -> PyResult<Option<i64>> {
        let (seen, row) = {
            let columns = self.rows.columns();
            let row = address.and_then(|address| columns.starts.get(&address).copied());
            (columns.seen.get(&(value.as_ptr() as usize)).copied(), row)
        };
        match row {
            None => Ok(seen),
            Some(_) if seen.is_some() => Ok(seen),
            Some(row) if self.rows.memory.bind(value.py()).get_item(row)?.is(value) => Ok(Some(i64::try_from(row)?)),
            Some(_) => Ok(None),
        }
    }

    /// The row whose tensor fills `storage`, whose memory starts at `address`.
    pub(super) fn filling(&self, storage: &Bound<'_, PyAny>, address: usize) -> PyResult<Option<usize>> {
        let py = storage.py();
        let key_of = |storage: &Bound<'_, PyAny>| self.torch.of_storage(storage)?.key.of(storage)?.extract::<usize>();
        let Some(first) = self.rows.columns().starts.get(&address).copied() else { return Ok(None) };
        let key = key_of(storage)?;
        let owners = self.rows.owners.bind(py);
        if key_of(&owners.get_item(first)?)? == key {
            return Ok(Some(first));
        }
        // There are several storages over the same memory. Each is asked for its identity once.
        let new =
            self.rows.columns().doubles.get_mut(&address).map(|rows| std::mem::take(&mut rows.new)).unwrap_or_default();
        let new =
            new.into_iter().map(|row| Ok((key_of(&owners.get_item(row)?)?, row))).collect::<PyResult<Vec<_>>>()?;
        let mut columns = self.rows.columns();
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
    pub(super) fn dtype_of(&self, value: &Bound<'_, PyAny>) -> PyResult<Option<Dtype>> {
        let kind = value.getattr(intern!(value.py(), "dtype"))?;
        Ok(self.torch.dtypes.iter().find(|(known, _)| kind.is(known)).map(|&(_, dtype)| dtype))
    }
}
