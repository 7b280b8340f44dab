//! What is asked of tensors, storages and `DTensor`s that torch's table of C functions does not tell, by getters that are
//! looked up once for each state.

use pyo3::intern;
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::PyType;

use crate::memory::Getter;

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
}

/// While this lives, torch does not ask classes of tensors for their `__torch_function__` on this thread, which takes longer
/// than the getters of a `DTensor` do. The class `DTensor` has none that does anything.
pub(crate) struct WithoutTorchFunction<'py>(Bound<'py, PyAny>);

impl<'py> WithoutTorchFunction<'py> {
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
}
