//! The dtypes of a container.

use pyo3::prelude::*;
use tensorferry_wire::dtype::Dtype;

/// The name of each dtype that an entry can have, and what torch calls it, `None` if torch has none.
#[pyfunction]
#[pyo3(name = "_dtypes")]
pub(crate) fn dtypes() -> Vec<(&'static str, Option<&'static str>)> {
    Dtype::ALL.iter().map(|dtype| (dtype.name(), dtype.array_name())).collect()
}
