//! The pickle of objects that are numbers, text, `None`, or dicts, lists and tuples of these: what most states have
//! beside their tensors. A module's `state_dict` has an `OrderedDict` of the versions of its modules (`_metadata`), an
//! optimizer's and a schedule's have numbers.
//!
//! All objects of a state are written here or none: a container may occur in several objects, and only the writer of all
//! of them knows that it is one.

use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::{
    PyBool, PyBytes, PyDict, PyFloat, PyInt, PyIterator, PyList, PyString, PyTuple, PyTupleMethods, PyType,
};

use super::PyRows;
use super::pickle::{self, Pickle};
use super::tensors::left_to_python;
use crate::rows::columns::ByAddress;

/// Containers nested deeper than this are left to the interpreter's pickler, which has a limit of its own.
const MAX_DEPTH: usize = 64;

/// The pickle of all objects of `rows`, and the first object that has an `OrderedDict`; `None` if some object is, or has,
/// anything but numbers, text, `None`, dicts, lists and tuples. `ordered` is the class `OrderedDict`, and `None` if a
/// program has said how it is to be pickled.
///
/// # Errors
/// What is no mistake: an interrupt.
#[pyfunction]
#[pyo3(name = "_pickle_plain", signature = (rows, ordered))]
pub(crate) fn pickle_plain<'py>(
    rows: &Bound<'py, PyRows>,
    ordered: Option<&Bound<'py, PyType>>,
) -> PyResult<Option<(Bound<'py, PyBytes>, Option<usize>)>> {
    let py = rows.py();
    let table = rows.get();
    let mut writer = PlainWriter {
        rows: table,
        ordered,
        pickle: Pickle::new(),
        class: None,
        known: ByAddress::default(),
        kept: Vec::new(),
    };
    let mut first = None;
    for (number, value) in table.objects.bind(py).iter().enumerate() {
        writer.pickle.element();
        // An OrderedDict raises if another thread changes it meanwhile: the interpreter's pickler then has the last word.
        if !matches!(left_to_python(py, writer.value(&value, 0).map(Some))?, Some(true)) {
            return Ok(None);
        }
        if writer.class.is_some() {
            first.get_or_insert(number);
        }
        table.rows.count_and_yield(py);
    }
    Ok(Some((PyBytes::new(py, &writer.pickle.end()), first)))
}

/// Writes `value` if it is a number, text or `None`; returns whether it was written.
pub(super) fn write_if_plain(pickle: &mut Pickle, value: &Bound<'_, PyAny>) -> bool {
    if value.is_none() {
        pickle.op(pickle::NONE);
    } else if let Ok(value) = value.cast_exact::<PyFloat>() {
        pickle.float(value.value());
    } else if let Ok(value) = value.cast_exact::<PyBool>() {
        pickle.boolean(value.is_true());
    } else if let Some(value) = value.cast_exact::<PyInt>().ok().and_then(|value| value.extract().ok()) {
        pickle.integer(value);
    } else if let Some(value) = value.cast_exact::<PyString>().ok().and_then(|value| value.to_str().ok()) {
        pickle.text(value);
    } else {
        return false;
    }
    true
}

/// Writes one object after the other. After a method has returned false the pickle is incomplete and must be dropped.
struct PlainWriter<'a, 'py> {
    rows: &'a PyRows,
    ordered: Option<&'a Bound<'py, PyType>>,
    pickle: Pickle,
    /// What a reader memoized the class `OrderedDict` as.
    class: Option<u32>,
    /// Address of a container or a key that was written before, to what a reader memoized it as.
    known: ByAddress<u32>,
    /// Keeps what `known` names: other threads have turns meanwhile, and may change the state.
    kept: Vec<Bound<'py, PyAny>>,
}

impl<'py> PlainWriter<'_, 'py> {
    /// Writes a value at this depth, or refers to it if it was written before; returns whether it could be written.
    fn value(&mut self, value: &Bound<'py, PyAny>, depth: usize) -> PyResult<bool> {
        if write_if_plain(&mut self.pickle, value) {
            return Ok(true);
        }
        if let Some(&number) = self.known.get(&(value.as_ptr() as usize)) {
            self.pickle.get(number);
            return Ok(true);
        }
        if depth == MAX_DEPTH {
            return Ok(false);
        }
        if let Ok(dict) = value.cast_exact::<PyDict>() {
            self.dict(dict, depth + 1)
        } else if let Ok(list) = value.cast_exact::<PyList>() {
            self.list(list, depth + 1)
        } else if let Ok(tuple) = value.cast_exact::<PyTuple>() {
            self.tuple(tuple, depth + 1)
        } else if self.ordered.is_some_and(|ordered| value.get_type().is(ordered)) {
            self.ordered_dict(value, depth + 1)
        } else {
            Ok(false)
        }
    }

    /// Writes a dict whose items lie at this depth; returns whether all of them could be written.
    fn dict(&mut self, dict: &Bound<'py, PyDict>, depth: usize) -> PyResult<bool> {
        self.pickle.op(pickle::EMPTY_DICT);
        self.remember(dict.as_any());
        let (keys, values) = (dict.keys(), dict.values());
        if keys.len() != values.len() {
            return Ok(false);
        }
        self.items(keys.iter().zip(values.iter()).map(Ok), depth)
    }

    /// Writes an `OrderedDict` without attributes of its own, by its `__reduce__`: only it knows its order.
    fn ordered_dict(&mut self, value: &Bound<'py, PyAny>, depth: usize) -> PyResult<bool> {
        let reduced = value.call_method0(intern!(value.py(), "__reduce__"))?;
        let Ok(reduced) = reduced.cast_exact::<PyTuple>() else { return Ok(false) };
        if reduced.len() != 5 || !reduced.get_item(1)?.cast_exact::<PyTuple>().is_ok_and(PyTupleMethods::is_empty) {
            return Ok(false);
        }
        if !reduced.get_item(2)?.is_none() {
            return Ok(false);
        }
        if let Some(class) = self.class {
            self.pickle.get(class);
        } else {
            self.pickle.text("collections");
            self.pickle.text("OrderedDict");
            self.pickle.op(pickle::STACK_GLOBAL);
            self.class = Some(self.pickle.memoize());
        }
        self.pickle.op(pickle::EMPTY_TUPLE);
        self.pickle.op(pickle::REDUCE);
        self.remember(value);
        let items = reduced.get_item(4)?;
        let items = items.cast::<PyIterator>()?.try_iter()?.map(|item| item?.extract());
        self.items(items, depth)
    }

    /// Writes items into the dict that was written last; returns whether all of them could be written.
    fn items(
        &mut self,
        items: impl Iterator<Item = PyResult<(Bound<'py, PyAny>, Bound<'py, PyAny>)>>,
        depth: usize,
    ) -> PyResult<bool> {
        let mut count = 0;
        for item in items {
            let (key, value) = item?;
            self.begin(count, pickle::SETITEMS);
            if !self.key(&key, depth)? || !self.value(&value, depth)? {
                return Ok(false);
            }
            count += 1;
            self.rows.rows.count_and_yield(key.py());
        }
        self.end(count, pickle::SETITEMS);
        Ok(true)
    }

    /// Writes the key of an item. Many dicts have the same keys, and a reader makes each once.
    fn key(&mut self, key: &Bound<'py, PyAny>, depth: usize) -> PyResult<bool> {
        let Ok(text) = key.cast_exact::<PyString>() else { return self.value(key, depth) };
        if let Some(&number) = self.known.get(&(key.as_ptr() as usize)) {
            self.pickle.get(number);
            return Ok(true);
        }
        let Ok(text) = text.to_str() else { return Ok(false) };
        self.pickle.text(text);
        self.remember(key);
        Ok(true)
    }

    /// Writes a list whose items lie at this depth; returns whether all of them could be written.
    fn list(&mut self, list: &Bound<'py, PyList>, depth: usize) -> PyResult<bool> {
        self.pickle.op(pickle::EMPTY_LIST);
        self.remember(list.as_any());
        let mut count = 0;
        for value in list {
            self.begin(count, pickle::APPENDS);
            if !self.value(&value, depth)? {
                return Ok(false);
            }
            count += 1;
            self.rows.rows.count_and_yield(list.py());
        }
        self.end(count, pickle::APPENDS);
        Ok(true)
    }

    /// Writes a tuple whose items lie at this depth; returns whether it could be written.
    fn tuple(&mut self, tuple: &Bound<'py, PyTuple>, depth: usize) -> PyResult<bool> {
        if tuple.len() > 3 {
            self.pickle.op(pickle::MARK);
        }
        for value in tuple {
            if !self.value(&value, depth)? {
                return Ok(false);
            }
            self.rows.rows.count_and_yield(tuple.py());
        }
        self.pickle.op(pickle::tuple_of(tuple.len()));
        // A tuple may have a list that has the tuple.
        if self.known.contains_key(&(tuple.as_ptr() as usize)) {
            return Ok(false);
        }
        self.remember(tuple.as_any());
        Ok(true)
    }

    /// Begins another batch of items before each that is the first of one.
    fn begin(&mut self, count: usize, end: u8) {
        if count.is_multiple_of(pickle::BATCH) {
            if count > 0 {
                self.pickle.op(end);
            }
            self.pickle.op(pickle::MARK);
        }
    }

    /// Ends the last batch of `count` items.
    fn end(&mut self, count: usize, end: u8) {
        if count > 0 {
            self.pickle.op(end);
        }
    }

    /// Lets a reader memoize what was written last, which is `value`.
    fn remember(&mut self, value: &Bound<'py, PyAny>) {
        let number = self.pickle.memoize();
        self.known.insert(value.as_ptr() as usize, number);
        self.kept.push(value.clone());
    }
}
