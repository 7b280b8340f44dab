//! `DTensor`s whose local part and spec describe them completely.

use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::PyString;

use super::PyRows;
use super::specs::{self, Fields};
use super::view::{Global, View};
use tensorferry_core::Locked;

impl PyRows {
    /// A `DTensor` whose local part and spec describe it completely, `None` for everything else.
    pub(super) fn read_dtensor(&self, value: &Bound<'_, PyAny>) -> PyResult<Option<View>> {
        let of = self.torch.of_dtensor(value)?;
        let requires_grad = of.requires_grad.is_true_of(value)?;
        if of.dict.is_true_of(value)? || requires_grad && of.hooks.is_true_of(value)? {
            return Ok(None);
        }
        let local = of.local.of(value)?;
        if local.get_type_ptr() != self.torch.tensor.as_ptr().cast() {
            return Ok(None);
        }
        let Some(tensor) = self.describe(&local).filter(|t| t.nbytes > 0 && t.address != 0) else { return Ok(None) };
        let Some(told) = self.ask(&local, &tensor)? else { return Ok(None) };
        let Some(spec) = self.spec(value, of.spec.of(value)?)? else { return Ok(None) };
        let Some(mut view) = self.view(&local, &tensor, &told, Some(spec))? else { return Ok(None) };
        let local_requires_grad = std::mem::replace(&mut view.requires_grad, requires_grad);
        view.global = Some(Global { local: local.unbind(), local_requires_grad, spec });
        Ok(Some(view))
    }

    /// The number of the spec of a `DTensor`, which it may share with others: a spec is longer than all else that
    /// describes a `DTensor`, and many have one of their own. `None` if it cannot be compared with others.
    fn spec(&self, value: &Bound<'_, PyAny>, spec: Bound<'_, PyAny>) -> PyResult<Option<usize>> {
        if let Some(number) = self.specs.number(&spec) {
            return Ok(Some(number));
        }
        let Some(fields) = specs::fields(&spec)? else { return Ok(None) };
        let Some(fingerprint) = self.specs.fingerprint(&spec, &fields)? else { return Ok(None) };
        let number = if let Some(number) = self.specs.number_of_fingerprint(&fingerprint) {
            number
        } else {
            let Some(number) = self.add_spec(value, &spec, &fields)? else { return Ok(None) };
            self.specs.add_fingerprint(fingerprint, number, fields);
            number
        };
        self.specs.add(spec, number);
        Ok(Some(number))
    }

    /// Numbers a spec that says what none before it did, `None` if it does not say what tensor it is of.
    fn add_spec(
        &self,
        value: &Bound<'_, PyAny>,
        spec: &Bound<'_, PyAny>,
        fields: &Fields<'_>,
    ) -> PyResult<Option<usize>> {
        let py = value.py();
        let is_meta = |name: &Bound<'_, PyAny>| name.cast::<PyString>().is_ok_and(|name| name == "tensor_meta");
        let Some((_, meta)) = fields.iter().find(|(name, _)| is_meta(name)) else { return Ok(None) };
        let Some(dtype) = self.dtype_of(meta)? else { return Ok(None) };
        let shape = meta.getattr(intern!(py, "shape"))?.extract()?;
        let firsts = self.first_specs.bind(py);
        let number = firsts.len();
        firsts.append((spec, value))?;
        self.views.locked().specs.push((shape, dtype));
        Ok(Some(number))
    }
}
