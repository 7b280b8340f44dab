//! The memory that the objects of a state refer to, and what the manifest says of the objects.

use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyList, PyString};
use tensorferry_wire::container::RESERVED_PREFIX;
use tensorferry_wire::dtype::Dtype;

use super::PyRows;
use super::reached::ReachedStorage;
use super::text::{quote, write_number};
use super::view::typed;
use super::views::numbers;
use crate::rows::columns::Row;
use tensorferry_core::Locked;

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
    let mut views = rows.get().views.locked();
    let store = views.store(key, || ReachedStorage::new(storage, memory.0, memory.1, false));
    views.reach(store, span)
}

/// The number in the pickle of the storage with the identity `key`, `None` if it is not in it.
#[pyfunction]
#[pyo3(name = "_number_of_storage")]
pub(crate) fn number_of_storage(rows: &Bound<'_, PyRows>, key: usize) -> Option<usize> {
    let views = rows.get().views.locked();
    views.stores[*views.by_key.get(&key)?].number
}

/// Forgets to which storages the pickle refers, since it is written again.
#[pyfunction]
#[pyo3(name = "_restart")]
pub(crate) fn restart(rows: &Bound<'_, PyRows>) {
    rows.get().views.locked().restart();
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
    let numbered = table.views.locked().numbered.clone();
    let mut text = String::with_capacity(numbered.len() * ENTRY_TEXT);
    text.push('[');
    let (mut elsewhere, mut runs, mut name) = (Vec::new(), Vec::new(), String::new());
    let prefix = format!("{RESERVED_PREFIX}storage/");
    for (number, place) in numbered.into_iter().enumerate() {
        let (object, address, nbytes, is_on_host) = {
            let store = &mut table.views.locked().stores[place];
            let object = store.object.bind(py).clone();
            store.collect_runs(&mut runs);
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
                let row = table.rows.add_piece(
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
        table.rows.count_and_yield(py);
    }
    text.push(']');
    Ok((PyBytes::new(py, text.as_bytes()), elsewhere))
}

/// As JSON, `[object, path, dtype, shape]` for each view, and between them `others`, each the number of its object and
/// its JSON text, in the order of the numbers.
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
    let views = table.views.locked();
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
///
/// `specs` has, for each spec, the shape of a local part and how its description begins, `None` if Python has to describe
/// such parts. Also returns the numbers of the leaves that Python has to describe.
#[pyfunction]
#[pyo3(name = "_describe_shards")]
#[allow(clippy::needless_pass_by_value, reason = "what Python calls takes values")]
pub(crate) fn describe_shards<'py>(
    rows: &Bound<'py, PyRows>,
    specs: Vec<Option<(Vec<u64>, String)>>,
) -> PyResult<(Bound<'py, PyBytes>, Vec<i64>)> {
    let py = rows.py();
    let table = rows.get();
    let paths = table.object_paths(py);
    let paths = paths.bind(py);
    let views = table.views.locked();
    let mut text = String::with_capacity(views.all.len() * SHARD_TEXT);
    let mut others = Vec::new();
    for (view, global) in views.all.iter().filter_map(|view| Some((view, view.global.as_ref()?))) {
        let Some(Some((_, beginning))) =
            specs.get(global.spec).map(|spec| spec.as_ref().filter(|spec| spec.0 == views.dims_of(view).0))
        else {
            others.push(view.leaf);
            continue;
        };
        if !text.is_empty() {
            text.push(',');
        }
        quote_path(&mut text, paths, usize::try_from(-(view.leaf + 1))?)?;
        text.push(':');
        views.shard(&mut text, view, beginning);
    }
    drop(views);
    Ok((PyBytes::new(py, text.as_bytes()), others))
}

/// About how many bytes of text there are for each storage, object and shard: a text that grows is copied again and
/// again, and memory that is not touched costs nothing.
const ENTRY_TEXT: usize = 48;
const OBJECT_TEXT: usize = 128;
const SHARD_TEXT: usize = 320;

/// Appends an element to the JSON text of an array or object, behind a comma unless it is the first.
fn add(text: &mut String, element: &str) {
    if text.len() > 1 {
        text.push(',');
    }
    text.push_str(element);
}

/// Appends the key path of the object with this number, as a JSON string.
fn quote_path(text: &mut String, paths: &Bound<'_, PyList>, object: usize) -> PyResult<()> {
    let path = paths.get_item(object)?.cast_into::<PyString>()?;
    // A path may have half a character of UTF-16, which is no text.
    quote(text, &path.to_string_lossy());
    Ok(())
}
