//! Arrays and scalars of numpy.

use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyString};

use super::{ObjectWriter, Written};
use crate::read_state::pickle;

impl<'py> ObjectWriter<'_, 'py> {
    /// Whether `value` is an array of numpy, or a scalar of one of numpy's own classes, whose bytes describe it. An array
    /// in another order than C's, of another class, or of a dtype that is no number is left to the interpreter's pickler.
    pub(super) fn is_plain_array(&mut self, value: &Bound<'py, PyAny>) -> PyResult<bool> {
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

    /// Writes an array or scalar for which `is_plain_array` is true.
    pub(super) fn array(&mut self, value: &Bound<'py, PyAny>) -> Written {
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
        pickle.boolean(false);
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
}
