//! The leaves of a state that are no rows: their pickle, what the manifest says of them, and the memory they refer to.
//!
//! Numbers, text, views, `DTensor`s and arrays are written here. Everything else the interpreter's pickler writes, one
//! object at a time, and its opcodes are put between ours ([`crate::read_state::pickle`]).

use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyList, PyString, PyTuple};
use tensorferry_wire::container::RESERVED_PREFIX;
use tensorferry_wire::dtype::Dtype;

use crate::read_state::pickle::{self, Pickle};
use crate::read_state::plain_objects::is_written;
use crate::read_state::views::{Store, View, numbers, typed};
use crate::rows::columns::{ByAddress, Row};
use crate::rows::{PyRows, quote, write_number};

/// The pickle of all objects of `rows`, `None` if one refers to another one in a way that only a pickler of all of them
/// can say.
///
/// `foreign(value, number)` returns the interpreter's pickle of an object, the same pickler's each time, and `None` if
/// there is none. `functions` are
/// those that rebuild a tensor, a parameter and a `DTensor`, and the class of a tensor's hooks; `numpy` is, where it was
/// imported, the class of its arrays, that of its scalars, and the functions that rebuild both.
///
/// # Errors
/// Whatever `foreign` and the objects' own attributes raise.
#[pyfunction]
#[pyo3(name = "_pickle_objects", signature = (rows, foreign, functions, numpy = None))]
pub(crate) fn pickle_objects<'py>(
    rows: &Bound<'py, PyRows>,
    foreign: &Bound<'py, PyAny>,
    functions: [Bound<'py, PyAny>; 4],
    numpy: Option<[Bound<'py, PyAny>; 4]>,
) -> PyResult<Option<Bound<'py, PyBytes>>> {
    let py = rows.py();
    let table = rows.get();
    let objects = table.objects.bind(py);
    let mut writer = Writer {
        py,
        rows: table,
        foreign,
        functions,
        numpy,
        pickle: Pickle::new(),
        functions_known: [None; 4],
        specs_known: vec![None; table.views().specs.len()],
        known: ByAddress::default(),
        views_known: ByAddress::default(),
        arrays: ByAddress::default(),
        kept: Vec::new(),
        number: 0,
        view: 0,
    };
    for number in 0..objects.len() {
        let value = objects.get_item(number)?;
        writer.number = number;
        writer.pickle.element();
        if writer.object(&value)?.is_none() {
            return Ok(None);
        }
        table.turn(py);
    }
    Ok(Some(PyBytes::new(py, &writer.pickle.end())))
}

/// Writes the objects of a state one after the other. A method that returns `None` may have written a part, so that all
/// of the pickle is of no use.
struct Writer<'a, 'py> {
    py: Python<'py>,
    rows: &'a PyRows,
    foreign: &'a Bound<'py, PyAny>,
    functions: [Bound<'py, PyAny>; 4],
    numpy: Option<[Bound<'py, PyAny>; 4]>,
    pickle: Pickle,
    /// What a reader memoized each function as, once it is written.
    functions_known: [Option<u32>; 4],
    /// The same of the specs of `DTensor`s, by their numbers.
    specs_known: Vec<Option<u32>>,
    /// Address of an object that was written before, to what a reader memoized it as.
    known: ByAddress<u32>,
    /// The same of the first view of a tensor of which there are several.
    views_known: ByAddress<u32>,
    /// Classes of numpy's scalars and dtypes: whether plain bytes describe a value.
    arrays: ByAddress<bool>,
    /// Keeps objects whose addresses are noted.
    kept: Vec<Bound<'py, PyAny>>,
    /// The object that is written.
    number: usize,
    /// The next view, in the order of the objects.
    view: usize,
}

type Written = PyResult<Option<()>>;

impl<'py> Writer<'_, 'py> {
    fn object(&mut self, value: &Bound<'py, PyAny>) -> Written {
        if is_written(&mut self.pickle, value) {
            // Nothing else belongs to it.
        } else if let Some(view) = self.next_view() {
            return self.leaf(view);
        } else if self.is_plain_array(value)? {
            return self.array(value);
        } else {
            return self.splice(value);
        }
        Ok(Some(()))
    }

    /// The place of the view that the object is, `None` if it is none. Views are in the order of the objects.
    fn next_view(&mut self) -> Option<usize> {
        let place = self.view;
        let leaf = -i64::try_from(self.number + 1).ok()?;
        (self.rows.views().all.get(place)?.leaf == leaf).then(|| {
            self.view += 1;
            place
        })
    }

    /// A leaf that is described here. Its own object occurs once among the objects, so that only the tensor that it is or
    /// has may be referred to again.
    fn leaf(&mut self, place: usize) -> Written {
        let (global, requires_grad, parameter) = {
            let view = &self.rows.views().all[place];
            let global = view.global.as_ref().map(|global| {
                (global.local.bind(self.py).clone(), global.spec, global.local_requires_grad, view.address)
            });
            (global, view.requires_grad, view.parameter)
        };
        let Some((local, spec, local_requires_grad, address)) = global else {
            return self.tensor(place, requires_grad, parameter);
        };
        if self.function(2)?.is_none() {
            return Ok(None);
        }
        match self.rows.leaf_number_at(&local, Some(address))? {
            // The local part is a leaf of its own, and a row.
            Some(row) if row >= 0 => {
                self.pickle.constant("leaf");
                self.pickle.integer(row);
                self.pickle.op(pickle::TUPLE2);
                self.pickle.op(pickle::BINPERSID);
            }
            _ => {
                if self.tensor(place, local_requires_grad, false)?.is_none() {
                    return Ok(None);
                }
            }
        }
        if let Some(&Some(number)) = self.specs_known.get(spec) {
            self.pickle.get(number);
        } else {
            let first = self.rows.first_specs.bind(self.py).get_item(spec)?.cast_into::<PyTuple>()?.get_item(0)?;
            let Some(number) = self.constant(&first)? else { return Ok(None) };
            self.specs_known[spec] = Some(number);
        }
        self.pickle.truth(requires_grad);
        self.pickle.op(pickle::TUPLE3);
        self.pickle.op(pickle::REDUCE);
        self.pickle.memoize();
        Ok(Some(()))
    }

    /// The tensor that a view is of.
    fn tensor(&mut self, place: usize, requires_grad: bool, parameter: bool) -> Written {
        let (first, is_shared) = {
            let views = self.rows.views();
            let first = views.all[place].first;
            (first, views.all[first].is_shared)
        };
        if is_shared && let Some(&number) = self.views_known.get(&first) {
            self.pickle.get(number);
            return Ok(Some(()));
        }
        let written = if parameter { self.parameter(place, requires_grad)? } else { self.plain(place, requires_grad)? };
        if written.is_some() {
            let number = self.pickle.memoize();
            if is_shared {
                self.views_known.insert(first, number);
            }
        }
        Ok(written)
    }

    /// A tensor, as torch's own pickling writes it.
    fn plain(&mut self, place: usize, requires_grad: bool) -> Written {
        if self.function(0)?.is_none() {
            return Ok(None);
        }
        {
            let mut views = self.rows.views();
            let View { store, start, end, .. } = views.all[place];
            let number = views.reach(store, (start, end));
            let view = &views.all[place];
            let Some(dtype) = typed(view.dtype) else { return Ok(None) };
            let (shape, strides) = views.dims_of(view);
            let pickle = &mut self.pickle;
            pickle.op(pickle::MARK);
            pickle.constant("typed");
            pickle.integer(i64::try_from(number)?);
            pickle.constant(dtype);
            pickle.op(pickle::TUPLE3);
            pickle.op(pickle::BINPERSID);
            pickle.integer(i64::try_from(view.offset())?);
            if pickle.numbers(shape).and_then(|()| pickle.numbers(strides)).is_none() {
                return Ok(None);
            }
            pickle.truth(requires_grad);
        }
        if self.hooks()?.is_none() {
            return Ok(None);
        }
        self.pickle.op(pickle::TUPLE);
        self.pickle.op(pickle::REDUCE);
        Ok(Some(()))
    }

    fn parameter(&mut self, place: usize, requires_grad: bool) -> Written {
        if self.function(1)?.is_none() || self.plain(place, false)?.is_none() {
            return Ok(None);
        }
        self.pickle.truth(requires_grad);
        if self.hooks()?.is_none() {
            return Ok(None);
        }
        self.pickle.op(pickle::TUPLE3);
        self.pickle.op(pickle::REDUCE);
        Ok(Some(()))
    }

    /// Whether `value` is an array of numpy, or a scalar of one of numpy's own classes, whose bytes describe it. An array
    /// in another order than C's, of another class, or of a dtype that is no number is left to the interpreter's pickler.
    fn is_plain_array(&mut self, value: &Bound<'py, PyAny>) -> PyResult<bool> {
        let py = self.py;
        let Some([array, scalar, ..]) = &self.numpy else { return Ok(false) };
        let class = value.get_type();
        if class.is(array) {
            let flags = value.getattr(intern!(py, "flags"))?;
            if !flags.getattr(intern!(py, "c_contiguous"))?.is_truthy()? {
                return Ok(false);
            }
        } else {
            let is_scalar = if let Some(&known) = self.arrays.get(&(class.as_ptr() as usize)) {
                known
            } else {
                let is = class.is_subclass(scalar)? && class.getattr(intern!(py, "__module__"))?.eq("numpy")?;
                self.arrays.insert(class.as_ptr() as usize, is);
                self.kept.push(class.into_any());
                is
            };
            if !is_scalar {
                return Ok(false);
            }
        }
        self.is_plain_dtype(&value.getattr(intern!(py, "dtype"))?)
    }

    /// An array or scalar for which `is_plain_array` is true.
    fn array(&mut self, value: &Bound<'py, PyAny>) -> Written {
        let py = self.py;
        let Some([array, _, rebuild_array, rebuild_scalar]) = self.numpy.clone() else { return Ok(None) };
        let dtype = value.getattr(intern!(py, "dtype"))?;
        let bytes = value.call_method0(intern!(py, "tobytes"))?.cast_into::<PyBytes>()?;
        if !value.get_type().is(&array) {
            if self.constant(&rebuild_scalar)?.is_none() || self.constant(&dtype)?.is_none() {
                return Ok(None);
            }
            self.pickle.binary(bytes.as_bytes());
            self.pickle.op(pickle::TUPLE2);
            self.pickle.op(pickle::REDUCE);
            return Ok(Some(()));
        }
        let shape: Vec<u64> = value.getattr(intern!(py, "shape"))?.extract()?;
        if self.constant(&rebuild_array)?.is_none() || self.constant(&array)?.is_none() {
            return Ok(None);
        }
        // An empty array, which then gets its state.
        let pickle = &mut self.pickle;
        if pickle.numbers(&[0]).is_none() {
            return Ok(None);
        }
        pickle.binary(b"b");
        pickle.op(pickle::TUPLE3);
        pickle.op(pickle::REDUCE);
        pickle.op(pickle::MARK);
        pickle.integer(1);
        if pickle.numbers(&shape).is_none() || self.constant(&dtype)?.is_none() {
            return Ok(None);
        }
        let pickle = &mut self.pickle;
        pickle.truth(false);
        pickle.binary(bytes.as_bytes());
        pickle.op(pickle::TUPLE);
        pickle.op(pickle::BUILD);
        Ok(Some(()))
    }

    /// Whether values of this dtype of numpy are numbers in the order of bytes of this machine.
    fn is_plain_dtype(&mut self, dtype: &Bound<'py, PyAny>) -> PyResult<bool> {
        let py = self.py;
        if let Some(&known) = self.arrays.get(&(dtype.as_ptr() as usize)) {
            return Ok(known);
        }
        let kind = dtype.getattr(intern!(py, "kind"))?;
        let is_plain = dtype.getattr(intern!(py, "isbuiltin"))?.eq(1)?
            && dtype.getattr(intern!(py, "isnative"))?.is_truthy()?
            && "biufc".contains(kind.cast::<PyString>()?.to_str()?);
        self.arrays.insert(dtype.as_ptr() as usize, is_plain);
        self.kept.push(dtype.clone());
        Ok(is_plain)
    }

    /// An `OrderedDict` for a tensor's hooks, which are not sent.
    fn hooks(&mut self) -> Written {
        let written = self.function(3)?;
        self.pickle.op(pickle::EMPTY_TUPLE);
        self.pickle.op(pickle::REDUCE);
        Ok(written)
    }

    fn function(&mut self, number: usize) -> Written {
        if let Some(known) = self.functions_known[number] {
            self.pickle.get(known);
        } else {
            let function = self.functions[number].clone();
            let Some(known) = self.constant(&function)? else { return Ok(None) };
            self.functions_known[number] = Some(known);
        }
        Ok(Some(()))
    }

    /// An object that is needed again and again, and that a reader makes once; returns what a reader memoized it as.
    fn constant(&mut self, value: &Bound<'py, PyAny>) -> PyResult<Option<u32>> {
        let id = value.as_ptr() as usize;
        if let Some(&number) = self.known.get(&id) {
            self.pickle.get(number);
            return Ok(Some(number));
        }
        if self.splice(value)?.is_none() {
            return Ok(None);
        }
        let again = self.foreign.call1((value, self.number))?;
        let Ok(again) = again.cast::<PyBytes>() else { return Ok(None) };
        // An object that the interpreter's pickler writes in full once more may have been memoized once more, and what
        // it memoizes is counted in `splice` only.
        let Some(number) = self.pickle.spliced_again(again.as_bytes()) else { return Ok(None) };
        self.known.insert(id, number);
        self.kept.push(value.clone());
        Ok(Some(number))
    }

    /// What the interpreter's pickler writes.
    fn splice(&mut self, value: &Bound<'py, PyAny>) -> Written {
        let pickled = self.foreign.call1((value, self.number))?;
        match pickled.cast::<PyBytes>() {
            Ok(pickled) => Ok(self.pickle.splice(pickled.as_bytes())),
            Err(_) => Ok(None),
        }
    }
}

/// Notes that a pickle refers to the bytes `[start, end)` of `storage`, which has the identity `key`, is at `address` and
/// has `nbytes` bytes; returns the storage's number in the pickle.
#[pyfunction]
#[pyo3(name = "_reach")]
pub(crate) fn reach(
    rows: &Bound<'_, PyRows>,
    storage: Py<PyAny>,
    key: usize,
    memory: (usize, usize),
    span: (usize, usize),
) -> usize {
    let mut views = rows.get().views();
    let store = views.store(key, || Store::new(storage, memory.0, memory.1, false));
    views.reach(store, span)
}

/// The number in the pickle of the storage with the identity `key`, `None` if it is not in it.
#[pyfunction]
#[pyo3(name = "_number_of_storage")]
pub(crate) fn number_of_storage(rows: &Bound<'_, PyRows>, key: usize) -> Option<usize> {
    let views = rows.get().views();
    views.stores[*views.by_key.get(&key)?].number
}

/// Forgets to which storages the pickle refers, since it is written again.
#[pyfunction]
#[pyo3(name = "_restart")]
pub(crate) fn restart(rows: &Bound<'_, PyRows>) {
    rows.get().views().restart();
}

/// Adds a row for each run of bytes of the storages that some object reaches and that no row fills.
///
/// Returns, as JSON, the size of each storage with the entries that hold its bytes, and the first byte of each; and those
/// of the new rows that may not lie in host memory.
#[pyfunction]
#[pyo3(name = "_add_pieces")]
pub(crate) fn add_pieces<'py>(rows: &Bound<'py, PyRows>) -> PyResult<(Bound<'py, PyBytes>, Vec<i64>)> {
    let py = rows.py();
    let table = rows.get();
    let numbered = table.views().numbered.clone();
    let mut text = String::with_capacity(numbered.len() * ENTRY_TEXT);
    text.push('[');
    let (mut elsewhere, mut runs, mut name) = (Vec::new(), Vec::new(), String::new());
    let prefix = format!("{RESERVED_PREFIX}storage/");
    for (number, place) in numbered.into_iter().enumerate() {
        let (object, address, nbytes, is_on_host) = {
            let store = &mut table.views().stores[place];
            let object = store.object.bind(py).clone();
            store.covered(&mut runs);
            (object, store.address, store.nbytes, store.is_on_host)
        };
        text.push_str(if number > 0 { ",[" } else { "[" });
        write_number(&mut text, nbytes as u64);
        text.push_str(",[");
        if let Some(row) = table.filling(&object, address)? {
            text.push('[');
            write_number(&mut text, row as u64);
            text.push_str(",0]");
        } else {
            for (index, (start, end)) in runs.iter().copied().enumerate() {
                name.clear();
                write_number(&mut name, number as u64);
                name.push('/');
                write_number(&mut name, index as u64);
                let row = table.add_piece(
                    &object,
                    [&prefix, &name],
                    &Row {
                        dtype: Dtype::U8,
                        shape: &[(end - start) as u64],
                        address: address + start,
                        nbytes: end - start,
                        flag: 0,
                    },
                )?;
                text.push_str(if index > 0 { ",[" } else { "[" });
                write_number(&mut text, row.unsigned_abs());
                text.push(',');
                write_number(&mut text, start as u64);
                text.push(']');
                if !is_on_host {
                    elsewhere.push(row);
                }
            }
        }
        text.push_str("]]");
        table.turn(py);
    }
    text.push(']');
    Ok((PyBytes::new(py, text.as_bytes()), elsewhere))
}

/// As JSON, `[object, path, dtype, shape]` for each view, and between them `others`, each with the number of its object.
#[pyfunction]
#[pyo3(name = "_describe_objects")]
pub(crate) fn describe_objects<'py>(
    rows: &Bound<'py, PyRows>,
    others: Vec<(usize, String)>,
) -> PyResult<Bound<'py, PyBytes>> {
    let py = rows.py();
    let table = rows.get();
    let paths = table.object_paths(py);
    let paths = paths.bind(py);
    let views = table.views();
    let mut text = String::with_capacity(views.all.len() * OBJECT_TEXT);
    let mut others = others.into_iter().peekable();
    text.push('[');
    for view in &views.all {
        let object = usize::try_from(-(view.leaf + 1))?;
        while let Some((_, other)) = others.next_if(|other| other.0 < object) {
            add(&mut text, &other);
        }
        add(&mut text, "");
        text.push('[');
        write_number(&mut text, object as u64);
        text.push(',');
        quote_path(&mut text, paths, object)?;
        text.push_str(",\"torch.");
        text.push_str(typed(view.dtype).unwrap_or_default());
        text.push_str("\",");
        numbers(&mut text, views.shape_of(view));
        text.push(']');
    }
    others.for_each(|(_, other)| add(&mut text, &other));
    text.push(']');
    drop(views);
    Ok(PyBytes::new(py, text.as_bytes()))
}

/// As the members of a JSON object, by path where the local part of each `DTensor` lies that is described here.
/// `offsets` are, for each spec, the coordinates of the first element.
#[pyfunction]
#[pyo3(name = "_describe_shards")]
#[allow(clippy::needless_pass_by_value, reason = "what Python calls takes values")]
pub(crate) fn describe_shards<'py>(rows: &Bound<'py, PyRows>, offsets: Vec<Vec<u64>>) -> PyResult<Bound<'py, PyBytes>> {
    let py = rows.py();
    let table = rows.get();
    let paths = table.object_paths(py);
    let paths = paths.bind(py);
    let views = table.views();
    let beginnings: Vec<_> = offsets.iter().enumerate().map(|(spec, offsets)| views.shard_of(spec, offsets)).collect();
    let mut text = String::with_capacity(views.all.len() * SHARD_TEXT);
    for (view, global) in views.all.iter().filter_map(|view| Some((view, view.global.as_ref()?))) {
        if !text.is_empty() {
            text.push(',');
        }
        quote_path(&mut text, paths, usize::try_from(-(view.leaf + 1))?)?;
        text.push(':');
        views.shard(&mut text, view, beginnings.get(global.spec).map_or("", String::as_str));
    }
    drop(views);
    Ok(PyBytes::new(py, text.as_bytes()))
}

/// About how many bytes of text there are for each storage, object and shard: a text that grows is copied again and
/// again, and memory that is not touched costs nothing.
const ENTRY_TEXT: usize = 48;
const OBJECT_TEXT: usize = 128;
const SHARD_TEXT: usize = 320;

fn add(text: &mut String, element: &str) {
    if text.len() > 1 {
        text.push(',');
    }
    text.push_str(element);
}

fn quote_path(text: &mut String, paths: &Bound<'_, PyList>, object: usize) -> PyResult<()> {
    let path = paths.get_item(object)?.cast_into::<PyString>()?;
    // A path may have half a character of UTF-16, which is no text.
    quote(text, &path.to_string_lossy());
    Ok(())
}
