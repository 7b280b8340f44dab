//! The pickle of the leaves of a state that have no row of their own.
//!
//! Numbers, text, views, `DTensor`s and arrays are written here. Everything else the interpreter's pickler writes, one
//! object at a time, and its opcodes are put between ours ([`crate::read_state::pickle`]).

mod arrays;
mod tensors;

use pyo3::prelude::*;
use pyo3::types::PyBytes;

use super::PyRows;
use super::pickle::{self, Pickle};
use super::plain_objects::write_if_plain;
use crate::rows::columns::ByAddress;
use tensorferry_core::Locked;

/// Pickles as one list all leaves that have no row of their own: numbers and text, views of tensors, `DTensor`s and numpy's
/// arrays, and by `foreign` everything else. `None` if Python's pickler has to write all of them together, because one
/// refers to another one in a way that only a single pickler can express.
///
/// `foreign(value, number)` returns Python's pickle of an object, made by the same pickler each time, and `None` if there is
/// none. `functions` are those that rebuild a tensor, a parameter and a `DTensor`, and the class of a tensor's hooks;
/// `numpy` is, where it was imported, the class of its arrays, that of its scalars, and the functions that rebuild both.
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
    let mut writer = ObjectWriter {
        py,
        rows: table,
        foreign,
        functions,
        numpy,
        pickle: Pickle::new(),
        functions_known: [None; 4],
        specs_known: vec![None; table.views.locked().specs.len()],
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
        table.rows.count_and_yield(py);
    }
    Ok(Some(PyBytes::new(py, &writer.pickle.end())))
}

/// Writes the objects of a state one after the other. A method that returns `None` may have written a part of an object:
/// the pickle is then incomplete and must be dropped.
struct ObjectWriter<'a, 'py> {
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

impl<'py> ObjectWriter<'_, 'py> {
    /// Writes an object of the state: number or text, view, array, or what the interpreter's pickler makes of it.
    fn object(&mut self, value: &Bound<'py, PyAny>) -> Written {
        if write_if_plain(&mut self.pickle, value) {
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
        (self.rows.views.locked().all.get(place)?.leaf == leaf).then(|| {
            self.view += 1;
            place
        })
    }

    /// Writes an empty `OrderedDict` in place of a tensor's hooks, which are not sent.
    fn write_empty_hooks(&mut self) -> Written {
        let written = self.function(3)?;
        self.pickle.op(pickle::EMPTY_TUPLE);
        self.pickle.op(pickle::REDUCE);
        Ok(written)
    }

    /// The function `self.functions[number]`, by its name the first time, then as what a reader memoized.
    fn function(&mut self, number: usize) -> Written {
        if let Some(memoized) = self.functions_known[number] {
            self.pickle.get(memoized);
        } else {
            let function = self.functions[number].clone();
            let Some(memoized) = self.constant(&function)? else { return Ok(None) };
            self.functions_known[number] = Some(memoized);
        }
        Ok(Some(()))
    }

    /// Writes an object that many others refer to (a function, a class, a spec): in full the first time, later as a
    /// reference to the number under which a reader memoizes it. Returns that number, `None` if there is none.
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
        let Some(number) = self.pickle.referenced_by(again.as_bytes()) else { return Ok(None) };
        self.known.insert(id, number);
        self.kept.push(value.clone());
        Ok(Some(number))
    }

    /// Writes `value` as the interpreter's pickler does.
    fn splice(&mut self, value: &Bound<'py, PyAny>) -> Written {
        let pickled = self.foreign.call1((value, self.number))?;
        match pickled.cast::<PyBytes>() {
            Ok(pickled) => Ok(self.pickle.splice(pickled.as_bytes())),
            Err(_) => Ok(None),
        }
    }
}
