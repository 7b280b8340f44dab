//! What is asked of tensors, storages and `DTensor`s that torch's table of C functions does not tell, by getters that are
//! looked up once, and again if a program has changed the classes meanwhile.

use std::sync::Arc;

use pyo3::intern;
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::{PyDict, PyType};
use tensorferry_wire::dtype::Dtype;

use crate::memory::{Exchange, Getter};
use crate::rows::named;

/// What is the same for all states: torch's classes, its dtypes, and how they are asked.
pub(crate) struct Torch {
    pub(crate) tensor: Py<PyType>,
    pub(crate) parameter: Py<PyType>,
    /// How torch's dtypes are named in a container, as given and as a list.
    names: Py<PyDict>,
    pub(crate) dtypes: Vec<(Py<PyAny>, Dtype)>,
    /// `None`: this torch does not offer it, and every tensor is read in Python.
    pub(crate) exchange: Option<Exchange>,
    pub(crate) deque: Py<PyType>,
    /// Whether this torch's tensors may have named dimensions, with which they cannot be pickled.
    pub(crate) has_names: bool,
    of_tensor: PyOnceLock<TensorGetters>,
    of_storage: PyOnceLock<StorageGetters>,
    of_dtensor: PyOnceLock<DTensorGetters>,
}

impl Torch {
    /// For torch's classes `tensor` and `parameter`, and the names of its dtypes: what was made before if it still holds,
    /// since making it takes longer than reading a small state.
    ///
    /// # Errors
    /// `ValueError` for the name of a dtype that no container has.
    pub(crate) fn of(
        tensor: &Bound<'_, PyType>,
        parameter: &Bound<'_, PyType>,
        names: &Bound<'_, PyDict>,
    ) -> PyResult<Arc<Self>> {
        static MADE: PyOnceLock<Arc<Torch>> = PyOnceLock::new();
        let py = tensor.py();
        let is_it = |made: &Self| {
            made.tensor.is(tensor) && made.parameter.is(parameter) && made.names.is(names) && made.is_current(py)
        };
        if let Some(made) = MADE.get(py).filter(|made| is_it(made)) {
            return Ok(Arc::clone(made));
        }
        let dtypes =
            names.iter().map(|(dtype, name)| Ok((dtype.unbind(), named(name.extract()?)?))).collect::<PyResult<_>>()?;
        let made = Arc::new(Self {
            tensor: tensor.clone().unbind(),
            parameter: parameter.clone().unbind(),
            names: names.clone().unbind(),
            dtypes,
            exchange: Exchange::of(tensor),
            deque: py.import("collections")?.getattr("deque")?.cast_into::<PyType>()?.unbind(),
            has_names: tensor.hasattr(intern!(py, "has_names"))?,
            of_tensor: PyOnceLock::new(),
            of_storage: PyOnceLock::new(),
            of_dtensor: PyOnceLock::new(),
        });
        // Rows without tensors have no dtypes, and are made with other classes.
        if made.exchange.is_some() {
            let _ = MADE.set(py, Arc::clone(&made));
        }
        Ok(made)
    }

    /// Whether the classes' attributes are still those that the getters were made for.
    fn is_current(&self, py: Python<'_>) -> bool {
        self.of_tensor.get(py).is_none_or(|getters| getters.are_current(py))
            && self.of_storage.get(py).is_none_or(|getters| getters.are_current(py))
            && self.of_dtensor.get(py).is_none_or(|getters| getters.are_current(py))
    }

    /// The getters of tensors and parameters, of which `example` is one.
    pub(crate) fn of_tensor(&self, example: &Bound<'_, PyAny>) -> PyResult<&TensorGetters> {
        let py = example.py();
        let new = || TensorGetters::new(&[self.tensor.bind(py), self.parameter.bind(py)], example);
        self.of_tensor.get_or_try_init(py, new)
    }

    /// The getters of storages, of which `example` is one.
    pub(crate) fn of_storage(&self, example: &Bound<'_, PyAny>) -> PyResult<&StorageGetters> {
        self.of_storage.get_or_try_init(example.py(), || StorageGetters::new(example))
    }

    /// The getters of `DTensor`s, of which `example` is one.
    pub(crate) fn of_dtensor(&self, example: &Bound<'_, PyAny>) -> PyResult<&DTensorGetters> {
        self.of_dtensor.get_or_try_init(example.py(), || DTensorGetters::new(&example.get_type()))
    }
}

/// Of tensors and parameters.
pub(crate) struct TensorGetters {
    pub(crate) storage: Getter,
    pub(crate) is_neg: Getter,
    pub(crate) is_conj: Getter,
    pub(crate) requires_grad: Getter,
    pub(crate) hooks: Getter,
    /// `object.__getstate__`: returns attributes without making a dict for them, which an object would keep.
    pub(crate) attributes: Getter,
}

impl TensorGetters {
    /// For objects of `classes`, of which `example` is one.
    pub(crate) fn new(classes: &[&Bound<'_, PyType>], example: &Bound<'_, PyAny>) -> PyResult<Self> {
        let py = example.py();
        let getstate = py.get_type::<PyAny>().getattr(intern!(py, "__getstate__"))?;
        Ok(Self {
            storage: Getter::method(classes, intern!(py, "untyped_storage"), example)?,
            is_neg: Getter::method(classes, intern!(py, "is_neg"), example)?,
            is_conj: Getter::method(classes, intern!(py, "is_conj"), example)?,
            requires_grad: Getter::attribute(classes, intern!(py, "requires_grad"))?,
            hooks: Getter::attribute(classes, intern!(py, "_backward_hooks"))?,
            attributes: Getter::base_method(classes, &getstate, example)?,
        })
    }

    /// Whether looking all of them up again would find the same.
    pub(crate) fn are_current(&self, py: Python<'_>) -> bool {
        let all = [&self.storage, &self.is_neg, &self.is_conj, &self.requires_grad, &self.hooks, &self.attributes];
        all.iter().all(|getter| getter.is_current(py))
    }
}

/// Of storages.
pub(crate) struct StorageGetters {
    /// Its identity.
    pub(crate) key: Getter,
    pub(crate) address: Getter,
}

impl StorageGetters {
    /// For objects of the class of `example`.
    pub(crate) fn new(example: &Bound<'_, PyAny>) -> PyResult<Self> {
        let (py, class) = (example.py(), example.get_type());
        Ok(Self {
            key: Getter::attribute(&[&class], intern!(py, "_cdata"))?,
            address: Getter::method(&[&class], intern!(py, "data_ptr"), example)?,
        })
    }

    /// As for tensors.
    pub(crate) fn are_current(&self, py: Python<'_>) -> bool {
        self.key.is_current(py) && self.address.is_current(py)
    }
}

/// While this lives, torch does not ask classes of tensors for their `__torch_function__` on this thread, which takes longer
/// than the getters of a `DTensor` do. The class `DTensor` has none that does anything.
pub(crate) struct WithoutTorchFunction<'py>(Bound<'py, PyAny>);

impl<'py> WithoutTorchFunction<'py> {
    /// Has torch ask no subclass for its functions in this thread, until this is dropped.
    pub(crate) fn new(py: Python<'py>) -> PyResult<Self> {
        // Looked up once: each optimizer state of a parameter is a dict, and so a run of its own.
        static CLASS: PyOnceLock<Py<PyType>> = PyOnceLock::new();
        let guard = CLASS.import(py, "torch._C", "DisableTorchFunctionSubclass")?.call0()?;
        guard.call_method0(intern!(py, "__enter__"))?;
        Ok(Self(guard))
    }
}

impl Drop for WithoutTorchFunction<'_> {
    fn drop(&mut self) {
        let py = self.0.py();
        if let Err(error) = self.0.call_method1(intern!(py, "__exit__"), (py.None(), py.None(), py.None())) {
            error.write_unraisable(py, Some(&self.0));
        }
    }
}

/// Of `DTensor`s.
pub(crate) struct DTensorGetters {
    pub(crate) local: Getter,
    pub(crate) spec: Getter,
    pub(crate) requires_grad: Getter,
    pub(crate) hooks: Getter,
    pub(crate) dict: Getter,
}

impl DTensorGetters {
    /// For objects of `class`.
    pub(crate) fn new(class: &Bound<'_, PyType>) -> PyResult<Self> {
        let py = class.py();
        let classes = &[class];
        Ok(Self {
            local: Getter::attribute(classes, intern!(py, "_local_tensor"))?,
            spec: Getter::attribute(classes, intern!(py, "_spec"))?,
            requires_grad: Getter::attribute(classes, intern!(py, "requires_grad"))?,
            hooks: Getter::attribute(classes, intern!(py, "_backward_hooks"))?,
            dict: Getter::attribute(classes, intern!(py, "__dict__"))?,
        })
    }

    /// As for tensors.
    pub(crate) fn are_current(&self, py: Python<'_>) -> bool {
        let all = [&self.local, &self.spec, &self.requires_grad, &self.hooks, &self.dict];
        all.iter().all(|getter| getter.is_current(py))
    }
}
