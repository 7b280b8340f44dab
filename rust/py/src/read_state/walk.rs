//! The walk over a state: the text of its tree, in which each leaf is a number.

use pyo3::exceptions::PyRuntimeError;
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyInt, PyList, PyString, PyTuple};

use super::PyRows;
use super::getters::WithoutTorchFunction;
use super::tensors::{Kind, left_to_python};
use super::text::{quote, write_number};
use crate::errors;

/// Containers nested deeper than this are sent as one pickled object.
const MAX_DEPTH: usize = 80;
/// Integers below this are keys in a tree; larger ones are sent as objects.
const SAFE_INTEGER: u64 = 1 << 53;

/// What is left to Python: `container(value, path, depth)` returns the text of a container that is no plain dict, list or
/// tuple, `other(value, path)` the number of a tensor that is a leaf.
#[derive(Clone, Copy)]
pub(super) struct Walk<'a, 'py> {
    pub(super) container: &'a Bound<'py, PyAny>,
    pub(super) other: &'a Bound<'py, PyAny>,
    pub(super) depth: usize,
}

impl PyRows {
    /// Writes the text of one node: the number of a leaf, or a container with all that it holds.
    pub(super) fn child(
        &self,
        text: &mut String,
        value: &Bound<'_, PyAny>,
        path: [&str; 2],
        by: &Walk<'_, '_>,
    ) -> PyResult<()> {
        let id = value.as_ptr() as usize;
        let kind = self.kind(value)?;
        if kind != Kind::Container || by.depth > MAX_DEPTH || self.walked().is_inside(id) {
            let number = self.number(value, kind, path, by.other)?;
            if number < 0 {
                text.push('-');
            }
            write_number(text, number.unsigned_abs());
            self.rows.count_and_yield(value.py());
            return Ok(());
        }
        let path = path.concat();
        // Whatever else Python makes of a container, it holds no more nodes than these say.
        if !self.walked().enter(id, length(value)) {
            return Err(errors::unsupported(value.py(), repeated(&path)));
        }
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
        self.walked().leave();
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
            key.cast_exact::<PyInt>().ok()?.extract::<i64>().ok().filter(|n| n.unsigned_abs() < SAFE_INTEGER)
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
    pub(super) fn texts_of(
        &self,
        text: &mut String,
        keys: &Bound<'_, PyList>,
        values: &Bound<'_, PyList>,
        below: &str,
        by: &Walk<'_, '_>,
    ) -> PyResult<()> {
        self.rows.columns().reserve(values.len());
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

    /// Writes the elements of a JSON array, a comma before each. The path of an element is `below` and its name in
    /// `names`, or its index where there are none.
    pub(super) fn elements_of(
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

/// How many nodes a container holds; none where only its class knows.
fn length(container: &Bound<'_, PyAny>) -> usize {
    if let Ok(dict) = container.cast::<PyDict>() {
        dict.len()
    } else if let Ok(list) = container.cast::<PyList>() {
        list.len()
    } else if let Ok(tuple) = container.cast::<PyTuple>() {
        tuple.len()
    } else {
        0
    }
}

/// The message for a state in which containers occur so often that its tree would be huge.
fn repeated(path: &str) -> String {
    format!(
        "{path}: this and other containers stand in so many places of the state that it is a hundred times as large with \
         each place written out. Put each container into the state once, and into its other places after the receive"
    )
}

pub(super) fn changed() -> PyErr {
    PyRuntimeError::new_err("a dict of the state changed while it was read")
}

/// Whether all keys are text. A subclass of str may compare as it likes, and a lone surrogate is no text.
pub(super) fn all_text(keys: &Bound<'_, PyList>) -> bool {
    keys.iter().all(|k| k.cast_exact::<PyString>().is_ok_and(|k| k.to_str().is_ok()))
}
