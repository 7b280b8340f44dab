//! `Index`: where each part of each tensor of a checkpoint is stored, as columns that Rust searches.

use pyo3::exceptions::PyIndexError;
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyTuple};
use tensorferry_wire::index::{BoxRef, Chunk, Index, Item, Kind, Merged, Replicas, Strides, merge, plan, written};

use crate::errors;

/// The kinds of chunks by the letters that Python has for them.
const KINDS: [(&str, Kind); 4] =
    [("t", Kind::Elements), ("p", Kind::PickledTensor), ("b", Kind::Object), ("v", Kind::Built)];

/// A chunk as Python sees it: offsets, sizes, file, entry, bytes of the entry, kind, and start and strides if its elements
/// do not fill the entry in their order.
type ChunkTuple<'py> =
    (Bound<'py, PyTuple>, Bound<'py, PyTuple>, u32, u32, u64, &'static str, Option<(u64, Bound<'py, PyTuple>)>);

/// The index of a checkpoint, or what one rank has or a planner plans of it.
#[pyclass(name = "Index", module = "tensorferry._native")]
#[derive(Default)]
pub(crate) struct PyIndex(Index);

#[pymethods]
impl PyIndex {
    /// Nothing yet.
    #[new]
    fn new() -> Self {
        Self::default()
    }

    /// Reads an index of `files` files.
    ///
    /// # Errors
    /// `ProtocolError` if it is damaged, or of another version.
    #[staticmethod]
    fn decode(py: Python<'_>, data: &[u8], files: u32) -> PyResult<Self> {
        let index = py.detach(|| Index::decode(data, files));
        index.map(Self).map_err(|e| errors::protocol(py, e.to_string()))
    }

    /// Merges what ranks have, each as `encode` returned it, and shows that the parts of each tensor make it up, unless
    /// `whole` is false. The number of a chunk's file is the rank.
    ///
    /// Of parts that several ranks have, `replicas` keeps `"all"` or the `"first"`. `same` is called for two ranks that have
    /// the same part with different owners, with rank and entry of each, and says whether the bytes are the same; without
    /// it, they are.
    ///
    /// Returns the index, and for each rank which of its chunks are in it, a byte for each.
    ///
    /// # Errors
    /// `InvalidArgument` if parts make up no whole, or contradict each other: key, ranks and reason are named;
    /// `ProtocolError` if a part is damaged; what `same` raises.
    #[staticmethod]
    #[allow(clippy::needless_pass_by_value, reason = "what Python calls takes values")]
    #[pyo3(signature = (parts, *, replicas, whole, same = None))]
    fn merge<'py>(
        py: Python<'py>,
        parts: Vec<Bound<'py, PyBytes>>,
        replicas: &str,
        whole: bool,
        same: Option<Bound<'py, PyAny>>,
    ) -> PyResult<(Self, Vec<Bound<'py, PyBytes>>)> {
        let replicas = match replicas {
            "all" => Replicas::All,
            "first" => Replicas::First,
            _ => return Err(errors::invalid(py, "replicas must be all or first")),
        };
        let ranks = decoded(py, &parts)?;
        let mut raised = None;
        let merged = merge(&ranks, replicas, whole, |(rank, chunk), (other_rank, other)| {
            let Some(same) = &same else { return true };
            let answer = same.call1((rank, chunk.entry, other_rank, other.entry)).and_then(|is| is.is_truthy());
            answer.unwrap_or_else(|e| {
                raised = Some(e);
                false
            })
        });
        if let Some(e) = raised {
            return Err(e);
        }
        let merged = merged.map_err(|e| errors::invalid(py, e.to_string()))?;
        Ok(with_kept(py, merged))
    }

    /// Plans a save of what ranks have, each as `encode` returned it, as torch's default planner does: of parts that
    /// several ranks have, the rank with least to write writes one, or with `to_lowest` the first rank. The bytes of a
    /// chunk are what it counts as.
    ///
    /// Returns the index that is planned, without files, and for each rank which of its chunks it writes, a byte for each.
    ///
    /// # Errors
    /// As for `merge`.
    #[staticmethod]
    #[allow(clippy::needless_pass_by_value, reason = "what Python calls takes values")]
    fn plan<'py>(
        py: Python<'py>,
        parts: Vec<Bound<'py, PyBytes>>,
        to_lowest: bool,
    ) -> PyResult<(Self, Vec<Bound<'py, PyBytes>>)> {
        let ranks = decoded(py, &parts)?;
        let planned = py.detach(|| plan(&ranks, to_lowest)).map_err(|e| errors::invalid(py, e.to_string()))?;
        Ok(with_kept(py, planned))
    }

    /// The index of what ranks have written, each as `encode` returned it, as it is planned here: keys, their order,
    /// shapes and what else is said of them are those of this index, dtypes and chunks those that were written. `files`
    /// has the number of each rank's file; `whole` is as for `merge`.
    ///
    /// # Errors
    /// `InvalidArgument` if what was written is not what was planned, or as for `merge`; `ProtocolError` if a part is
    /// damaged.
    #[allow(clippy::needless_pass_by_value, reason = "what Python calls takes values")]
    fn written(&self, py: Python<'_>, parts: Vec<Bound<'_, PyBytes>>, files: Vec<u32>, whole: bool) -> PyResult<Self> {
        let ranks = decoded(py, &parts)?;
        let index = py.detach(|| written(&self.0, &ranks, &files, whole));
        index.map(Self).map_err(|e| errors::invalid(py, e.to_string()))
    }

    /// The bytes of the index, which `decode` reads.
    fn encode<'py>(&self, py: Python<'py>) -> Bound<'py, PyBytes> {
        PyBytes::new(py, &py.detach(|| self.0.encode()))
    }

    /// Adds a key. `dtype` is `None` for an object; `strides` is `None` for those of a contiguous tensor, and empty, of a
    /// tensor with dimensions, if they are not known. `spread` says whether ranks have parts of it.
    ///
    /// # Errors
    /// `InvalidArgument` if the key is there already, or no tensor has this shape.
    #[allow(clippy::too_many_arguments, clippy::needless_pass_by_value, reason = "Python's keywords")]
    #[pyo3(signature = (key, dtype, shape, *, path = "", requires_grad = false, strides = None, spread = false))]
    fn add(
        &mut self,
        py: Python<'_>,
        key: &str,
        dtype: Option<&str>,
        shape: Vec<u64>,
        path: &str,
        requires_grad: bool,
        strides: Option<Vec<u64>>,
        spread: bool,
    ) -> PyResult<()> {
        let strides = match &strides {
            None => Strides::Contiguous,
            Some(steps) if steps.is_empty() && !shape.is_empty() => Strides::Unknown,
            Some(steps) => Strides::Given(steps),
        };
        let item = Item { key, path, dtype, shape: &shape, requires_grad, strides, is_spread: spread };
        self.0.add(&item).map_err(|e| errors::invalid(py, e.to_string()))
    }

    /// Adds a part of the key that was added last, or the object. `owner` is the same on ranks that have one value of a
    /// part.
    ///
    /// # Errors
    /// `InvalidArgument` if it is not inside of the tensor.
    #[allow(clippy::too_many_arguments, clippy::needless_pass_by_value, reason = "Python's keywords")]
    #[pyo3(signature = (offsets, sizes, entry, nbytes, kind, *, layout = None, owner = 0))]
    fn add_chunk(
        &mut self,
        py: Python<'_>,
        offsets: Vec<u64>,
        sizes: Vec<u64>,
        entry: u32,
        nbytes: u64,
        kind: &str,
        layout: Option<(u64, Vec<u64>)>,
        owner: u32,
    ) -> PyResult<()> {
        let kind = KINDS.iter().find(|(letter, _)| *letter == kind).map(|(_, kind)| *kind);
        let kind = kind.ok_or_else(|| errors::invalid(py, "no such kind of chunk"))?;
        let layout = layout.as_ref().map(|(start, steps)| (*start, &steps[..]));
        let part = BoxRef { offsets: &offsets, sizes: &sizes };
        let chunk = Chunk { part, file: 0, entry, bytes: nbytes, kind, layout, owner: Some(owner) };
        self.0.add_chunk(&chunk).map_err(|e| errors::invalid(py, e.to_string()))
    }

    /// What a planner of the user's has noted, besides the paths.
    #[getter]
    fn planner<'py>(&self, py: Python<'py>) -> Bound<'py, PyBytes> {
        PyBytes::new(py, &self.0.planner)
    }

    #[setter]
    fn set_planner(&mut self, noted: Vec<u8>) {
        self.0.planner = noted;
    }

    fn __len__(&self) -> usize {
        self.0.len()
    }

    /// The keys, in order.
    #[getter]
    fn keys(&self) -> Vec<&str> {
        (0..self.0.len()).map(|number| self.0.item(number).key).collect()
    }

    /// Where each key belongs in a nested state, as `add` took it.
    #[getter]
    fn paths(&self) -> Vec<&str> {
        (0..self.0.len()).map(|number| self.0.item(number).path).collect()
    }

    /// The number of a key, `None` if it is not there.
    fn find(&self, key: &Bound<'_, PyAny>) -> Option<usize> {
        key.extract().ok().and_then(|key| self.0.find(key))
    }

    /// What is said of the key with this number: key, path, dtype, shape, whether it requires a gradient, its strides as
    /// `add` takes them, whether it is spread over ranks.
    ///
    /// # Errors
    /// `IndexError` if there is no such number.
    #[allow(clippy::type_complexity, reason = "a row of a table")]
    fn item<'py>(
        &self,
        py: Python<'py>,
        number: usize,
    ) -> PyResult<(&str, &str, Option<&str>, Bound<'py, PyTuple>, bool, Option<Bound<'py, PyTuple>>, bool)> {
        self.check(number)?;
        let item = self.0.item(number);
        let strides = match item.strides {
            Strides::Contiguous => None,
            Strides::Given(steps) => Some(PyTuple::new(py, steps)?),
            Strides::Unknown => Some(PyTuple::empty(py)),
        };
        let shape = PyTuple::new(py, item.shape)?;
        Ok((item.key, item.path, item.dtype, shape, item.requires_grad, strides, item.is_spread))
    }

    /// The chunks of the key with this number.
    ///
    /// # Errors
    /// `IndexError` if there is no such number.
    fn chunks<'py>(&self, py: Python<'py>, number: usize) -> PyResult<Vec<ChunkTuple<'py>>> {
        self.check(number)?;
        self.0.chunks(number).map(|chunk| chunk_tuple(py, &chunk)).collect()
    }

    /// The chunk of the key with this number that begins at `offsets`, or the object; `None` if there is none.
    ///
    /// # Errors
    /// `IndexError` if there is no such number.
    #[allow(clippy::needless_pass_by_value, reason = "what Python calls takes values")]
    fn chunk_at<'py>(&self, py: Python<'py>, number: usize, offsets: Vec<u64>) -> PyResult<Option<ChunkTuple<'py>>> {
        self.check(number)?;
        self.0.chunk_at(number, &offsets).map(|chunk| chunk_tuple(py, &chunk)).transpose()
    }

    /// The chunks that have each element of a box of the tensor once; of replicas, those in the file `own` if it has one.
    ///
    /// # Errors
    /// `IndexError` if there is no such number, `ProtocolError` if the chunks do not have each of these elements once.
    #[allow(clippy::needless_pass_by_value, reason = "what Python calls takes values")]
    fn overlaps<'py>(
        &self,
        py: Python<'py>,
        number: usize,
        offsets: Vec<u64>,
        sizes: Vec<u64>,
        own: u32,
    ) -> PyResult<Vec<ChunkTuple<'py>>> {
        self.check(number)?;
        let found = self.0.overlaps(number, BoxRef { offsets: &offsets, sizes: &sizes }, own);
        let found = found.map_err(|e| errors::protocol(py, format!("{}: {e}", self.0.item(number).key)))?;
        found.iter().map(|chunk| chunk_tuple(py, chunk)).collect()
    }
}

impl PyIndex {
    fn check(&self, number: usize) -> PyResult<()> {
        if number < self.0.len() { Ok(()) } else { Err(PyIndexError::new_err("there is no such key")) }
    }
}

fn chunk_tuple<'py>(py: Python<'py>, chunk: &Chunk<'_>) -> PyResult<ChunkTuple<'py>> {
    let kind = KINDS.iter().find(|(_, kind)| *kind == chunk.kind).map_or("", |(letter, _)| letter);
    let layout = chunk.layout.map(|(start, steps)| PyTuple::new(py, steps).map(|steps| (start, steps))).transpose()?;
    let (offsets, sizes) = (PyTuple::new(py, chunk.part.offsets)?, PyTuple::new(py, chunk.part.sizes)?);
    Ok((offsets, sizes, chunk.file, chunk.entry, chunk.bytes, kind, layout))
}

/// An index, and for each rank which of its chunks are in it, a byte for each.
fn with_kept(py: Python<'_>, merged: Merged) -> (PyIndex, Vec<Bound<'_, PyBytes>>) {
    let kept = merged.kept.iter().map(|kept| kept.iter().map(|&kept| kept.into()).collect::<Vec<u8>>());
    let kept = kept.map(|kept| PyBytes::new(py, &kept)).collect();
    (PyIndex(merged.index), kept)
}

/// What ranks have, as they have encoded it.
fn decoded(py: Python<'_>, parts: &[Bound<'_, PyBytes>]) -> PyResult<Vec<Index>> {
    let ranks = parts.iter().enumerate().map(|(rank, part)| {
        Index::decode(part.as_bytes(), 1).map_err(|e| errors::protocol(py, format!("rank {rank}: {e}")))
    });
    ranks.collect()
}
