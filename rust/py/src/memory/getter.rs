//! Attributes and methods of torch's classes, by the C functions behind them.

use std::ffi::c_void;

use pyo3::ffi;
use pyo3::prelude::*;
use pyo3::types::{PyString, PyType};

/// An attribute of some classes, or one of their methods without arguments.
///
/// It is looked up once, and its C function is then called directly. Looking it up each time, and making the object that
/// stands for a bound method, takes longer than most of these functions do.
pub(crate) struct Getter {
    /// What has it: no object of another class is passed to the function.
    classes: Vec<Py<PyType>>,
    /// What the classes have in common, from which the function is.
    found: Option<Py<PyAny>>,
    function: Option<Function>,
    otherwise: Fallback,
}

enum Function {
    /// Of a method without arguments.
    Method(ffi::PyCFunction),
    /// Of a descriptor, and this.
    Descriptor(ffi::descrgetfunc, Py<PyAny>),
}

/// What is done where there is no C function, and for objects of other classes.
enum Fallback {
    Attribute(Py<PyString>),
    Method(Py<PyString>),
    /// Call this with the object.
    Call(Py<PyAny>),
}

impl Getter {
    /// The attribute `name` of objects of `classes`.
    pub(crate) fn attribute(classes: &[&Bound<'_, PyType>], name: &Bound<'_, PyString>) -> PyResult<Self> {
        let types = name.py().import("types")?;
        let kinds = [types.getattr("GetSetDescriptorType")?, types.getattr("MemberDescriptorType")?];
        let found = in_common(classes, name);
        let descriptor = found.clone().filter(|found| kinds.iter().any(|kind| found.get_type().is(kind)));
        let function = descriptor.and_then(|descriptor| {
            // SAFETY: the slot of a class of the interpreter, which is empty or a function of this type.
            let get = unsafe {
                let slot = ffi::PyType_GetSlot(descriptor.get_type_ptr(), ffi::Py_tp_descr_get);
                std::mem::transmute::<*mut c_void, Option<ffi::descrgetfunc>>(slot)
            };
            Some(Function::Descriptor(get?, descriptor.unbind()))
        });
        Ok(Self::new(classes, found, function, Fallback::Attribute(name.clone().unbind())))
    }

    /// The method `name`, without arguments, of objects of `classes`. If they have it in common and it is written in C,
    /// its function is called directly. The function is found with `example`, one of the objects, which is not changed.
    pub(crate) fn method(
        classes: &[&Bound<'_, PyType>],
        name: &Bound<'_, PyString>,
        example: &Bound<'_, PyAny>,
    ) -> PyResult<Self> {
        let found = in_common(classes, name);
        let function = found.as_ref().map(|found| function_of(found, example)).transpose()?.flatten();
        Ok(Self::new(classes, found, function, Fallback::Method(name.clone().unbind())))
    }

    /// `method`, which all objects have, for those of `classes`, whatever these call by its name; `example` is one.
    pub(crate) fn base_method(
        classes: &[&Bound<'_, PyType>],
        method: &Bound<'_, PyAny>,
        example: &Bound<'_, PyAny>,
    ) -> PyResult<Self> {
        Ok(Self::new(classes, None, function_of(method, example)?, Fallback::Call(method.clone().unbind())))
    }

    fn new(
        classes: &[&Bound<'_, PyType>],
        found: Option<Bound<'_, PyAny>>,
        function: Option<Function>,
        otherwise: Fallback,
    ) -> Self {
        let classes = classes.iter().map(|&class| class.clone().unbind()).collect();
        Self { classes, found: found.map(Bound::unbind), function, otherwise }
    }

    /// Whether the classes still have what was looked up: a program may give them something else under that name.
    pub(crate) fn is_current(&self, py: Python<'_>) -> bool {
        let (Fallback::Attribute(name) | Fallback::Method(name)) = &self.otherwise else { return true };
        let classes: Vec<_> = self.classes.iter().map(|class| class.bind(py)).collect();
        match (&self.found, in_common(&classes, name.bind(py))) {
            (Some(known), Some(found)) => found.is(known),
            (known, found) => known.is_none() && found.is_none(),
        }
    }

    /// The attribute of `value`, or what the method of `value` returns.
    ///
    /// # Errors
    /// Whatever the attribute or the method raises.
    pub(crate) fn of<'py>(&self, value: &Bound<'py, PyAny>) -> PyResult<Bound<'py, PyAny>> {
        let py = value.py();
        let class = value.get_type_ptr();
        let is_known = || self.classes.iter().any(|known| known.as_ptr() == class.cast());
        // SAFETY: the interpreter is held, and `value` is of a class that has this descriptor, or whose method this
        // function is. Both return an object that is ours, or raise.
        unsafe {
            match self.function.as_ref().filter(|_| is_known()) {
                Some(Function::Method(function)) => {
                    return Bound::from_owned_ptr_or_err(py, function(value.as_ptr(), std::ptr::null_mut()));
                }
                Some(Function::Descriptor(get, descriptor)) => {
                    let found = get(descriptor.as_ptr(), value.as_ptr(), class.cast());
                    return Bound::from_owned_ptr_or_err(py, found);
                }
                None => {}
            }
        }
        match &self.otherwise {
            Fallback::Attribute(name) => value.getattr(name.bind(py)),
            Fallback::Method(name) => value.call_method0(name.bind(py)),
            Fallback::Call(method) => method.bind(py).call1((value,)),
        }
    }

    /// Whether the attribute of `value`, or what its method returns, is true.
    ///
    /// # Errors
    /// Whatever the attribute or the method raises.
    pub(crate) fn is_true_of(&self, value: &Bound<'_, PyAny>) -> PyResult<bool> {
        self.of(value)?.is_truthy()
    }
}

/// The C function of `method`, a method without arguments that `example` has; `None` if it is not written in C.
fn function_of(method: &Bound<'_, PyAny>, example: &Bound<'_, PyAny>) -> PyResult<Option<Function>> {
    let kind = method.py().import("types")?.getattr("MethodDescriptorType")?;
    if !method.get_type().is(&kind) {
        return Ok(None);
    }
    let bound = method.call_method1("__get__", (example,))?;
    // SAFETY: the interpreter is held, and only a function written in C is asked what it is made of. One without
    // arguments is called with null in their place.
    let function = unsafe {
        let is_plain = ffi::PyCFunction_Check(bound.as_ptr()) != 0
            && ffi::PyCFunction_GetFlags(bound.as_ptr()) == ffi::METH_NOARGS;
        if is_plain { ffi::PyCFunction_GetFunction(bound.as_ptr()) } else { None }
    };
    Ok(function.map(Function::Method))
}

/// The attribute `name` of `classes`, `None` unless all have the same.
fn in_common<'py>(classes: &[&Bound<'py, PyType>], name: &Bound<'py, PyString>) -> Option<Bound<'py, PyAny>> {
    let (first, others) = classes.split_first()?;
    let found = first.getattr(name).ok()?;
    others.iter().all(|class| class.getattr(name).is_ok_and(|other| other.is(&found))).then_some(found)
}
