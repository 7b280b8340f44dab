//! Tensors, parameters and `DTensor`s that are described completely, as torch's own pickling writes them.

use pyo3::prelude::*;
use pyo3::types::PyTuple;

use super::{ObjectWriter, Written};
use crate::read_state::pickle;
use crate::read_state::view::{View, typed};
use tensorferry_core::Locked;

impl ObjectWriter<'_, '_> {
    /// Writes the leaf of the view at `place`: a tensor, or a `DTensor` and its local part. The leaf's own object occurs
    /// once among the objects, so that only the tensor that it is or has may be referred to again.
    pub(super) fn leaf(&mut self, place: usize) -> Written {
        let (global, requires_grad, parameter) = {
            let view = &self.rows.views.locked().all[place];
            let global = view.global.as_ref().map(|global| {
                (global.local.bind(self.py).clone(), global.spec, global.local_requires_grad, view.address)
            });
            (global, view.requires_grad, view.parameter)
        };
        let Some((local, spec, local_requires_grad, address)) = global else {
            return self.tensor(place, requires_grad, parameter);
        };
        if self.function(2)?.is_none() {
            return Ok(None);
        }
        match self.rows.leaf_number_at(&local, Some(address))? {
            // The local part is a leaf of its own, and a row.
            Some(row) if row >= 0 => {
                self.pickle.constant("leaf");
                self.pickle.integer(row);
                self.pickle.op(pickle::TUPLE2);
                self.pickle.op(pickle::BINPERSID);
            }
            _ => {
                if self.tensor(place, local_requires_grad, false)?.is_none() {
                    return Ok(None);
                }
            }
        }
        if let Some(&Some(number)) = self.specs_known.get(spec) {
            self.pickle.get(number);
        } else {
            let first = self.rows.first_specs.bind(self.py).get_item(spec)?.cast_into::<PyTuple>()?.get_item(0)?;
            let Some(number) = self.constant(&first)? else { return Ok(None) };
            self.specs_known[spec] = Some(number);
        }
        self.pickle.boolean(requires_grad);
        self.pickle.op(pickle::TUPLE3);
        self.pickle.op(pickle::REDUCE);
        self.pickle.memoize();
        Ok(Some(()))
    }

    /// Writes the tensor or parameter of the view at `place`, or refers to it where it was written before.
    fn tensor(&mut self, place: usize, requires_grad: bool, parameter: bool) -> Written {
        let (first, is_shared) = {
            let views = self.rows.views.locked();
            let first = views.all[place].first;
            (first, views.all[first].is_shared)
        };
        if is_shared && let Some(&number) = self.views_known.get(&first) {
            self.pickle.get(number);
            return Ok(Some(()));
        }
        let written = if parameter { self.parameter(place, requires_grad)? } else { self.plain(place, requires_grad)? };
        if written.is_some() {
            let number = self.pickle.memoize();
            if is_shared {
                self.views_known.insert(first, number);
            }
        }
        Ok(written)
    }

    /// Writes the tensor of the view at `place`, as torch's own pickling does.
    fn plain(&mut self, place: usize, requires_grad: bool) -> Written {
        if self.function(0)?.is_none() {
            return Ok(None);
        }
        {
            let mut views = self.rows.views.locked();
            let View { store, start, end, .. } = views.all[place];
            let number = views.reach(store, (start, end));
            let view = &views.all[place];
            let Some(dtype) = typed(view.dtype) else { return Ok(None) };
            let (shape, strides) = views.dims_of(view);
            let pickle = &mut self.pickle;
            pickle.op(pickle::MARK);
            pickle.constant("typed");
            pickle.integer(i64::try_from(number)?);
            pickle.constant(dtype);
            pickle.op(pickle::TUPLE3);
            pickle.op(pickle::BINPERSID);
            pickle.integer(i64::try_from(view.offset())?);
            if pickle.numbers(shape).and_then(|()| pickle.numbers(strides)).is_none() {
                return Ok(None);
            }
            pickle.boolean(requires_grad);
        }
        if self.write_empty_hooks()?.is_none() {
            return Ok(None);
        }
        self.pickle.op(pickle::TUPLE);
        self.pickle.op(pickle::REDUCE);
        Ok(Some(()))
    }

    /// Writes the parameter over the view at `place`, as torch's own pickling does.
    fn parameter(&mut self, place: usize, requires_grad: bool) -> Written {
        if self.function(1)?.is_none() || self.plain(place, false)?.is_none() {
            return Ok(None);
        }
        self.pickle.boolean(requires_grad);
        if self.write_empty_hooks()?.is_none() {
            return Ok(None);
        }
        self.pickle.op(pickle::TUPLE3);
        self.pickle.op(pickle::REDUCE);
        Ok(Some(()))
    }
}
