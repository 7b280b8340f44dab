//! What publishing takes, the same for a server and a shelf.

use std::any::Any;
use std::sync::Arc;

use bytes::Bytes;
use pyo3::prelude::*;
use pyo3::types::PyBytes;
use tensorferry_core::{Alternate, Error, Memory, Publication, Rendered, ServedFiles, Stability, Store};

use super::readiness::PyReadiness;
use crate::errors;
use crate::memory::{Owner, PyFilePages, borrowed};
use crate::rows::PyTable;

/// What [`publish`] is given.
pub(super) struct Published<'a, 'py> {
    pub(super) step: i64,
    pub(super) rows: &'a Bound<'py, PyTable>,
    pub(super) control: Vec<(String, Vec<u8>)>,
    pub(super) metadata: Vec<(String, String)>,
    pub(super) owner: Py<PyAny>,
    pub(super) private: bool,
    pub(super) alternate: Option<Py<PyAny>>,
    pub(super) filled: bool,
    pub(super) pages: Vec<Bound<'py, PyFilePages>>,
}

/// Publishes in `store`; see [`super::PyServer::publish`].
pub(super) fn publish(py: Python<'_>, store: &Store, given: Published<'_, '_>) -> PyResult<Option<PyReadiness>> {
    let Published { step, rows, control, metadata, owner, private, alternate, filled, pages } = given;
    let stability = if private { Stability::Private } else { Stability::Borrowed };
    let owner = Box::new(Owner::new(owner));
    let alternate = alternate.map(|callable| Box::new(PyAlternate(Owner::new(callable))) as Box<dyn Alternate>);
    let rows = &rows.get().0;
    let files: Vec<_> =
        pages.iter().map(|pages| (Arc::clone(&pages.get().pages), pages.get().stored.get().cloned())).collect();
    rows.detached(py, || {
        let items = rows.items(control);
        let (mut publication, filling) = if filled {
            (Publication::new(metadata, items, stability, owner)?, None)
        } else {
            let (publication, filling) = Publication::with_readiness(metadata, items, stability, owner)?;
            (publication, Some(PyReadiness::new(filling)))
        };
        if !files.is_empty() {
            publication = publication.with_backing(Box::new(ServedFiles::new(files)));
        }
        if let Some(alternate) = alternate {
            publication = publication.with_alternate(alternate);
        }
        store.publish(step, publication);
        Ok(filling)
    })
    .map_err(|e: Error| errors::to_py(py, &e))
}

/// A part of a rendered body: `bytes`, which are copied, or `(address, nbytes)`, memory that the list of the parts
/// keeps.
fn memory(part: &Bound<'_, PyAny>) -> PyResult<Memory> {
    if let Ok(bytes) = part.cast::<PyBytes>() {
        return Ok(Bytes::copy_from_slice(bytes.as_bytes()).into());
    }
    let (address, nbytes) = part.extract()?;
    Ok(borrowed(address, nbytes))
}

/// A Python callable `name -> list of parts | None` as the source of alternate bodies.
struct PyAlternate(Owner);

impl Alternate for PyAlternate {
    fn render(&self, name: &str) -> Result<Option<Rendered>, String> {
        Python::try_attach(|py| {
            let Some(parts) = self.0.call(py, name)? else { return Ok(None) };
            let parts = parts.bind(py);
            let memories = parts.try_iter()?.map(|p| memory(&p?)).collect::<PyResult<_>>()?;
            let owner: Box<dyn Any + Send + Sync> = Box::new(Owner::new(parts.clone().unbind()));
            Ok(Some(Rendered { parts: memories, owner }))
        })
        .unwrap_or_else(|| Err(pyo3::exceptions::PyRuntimeError::new_err("the source is exiting")))
        .map_err(|e: PyErr| e.to_string())
    }
}
