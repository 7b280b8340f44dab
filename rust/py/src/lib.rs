//! `tensorferry._native`: a thin skin over `tensorferry-core`.

mod columns;
mod door;
mod errors;
mod interfaces;
mod memory;
mod readiness;
mod remote;
mod report;
mod rows;
mod runtime;
mod secret;
mod server;
mod slices;
mod staged;
mod tree;

use pyo3::prelude::*;

/// The native module.
#[pymodule]
mod _native {
    #[pymodule_export]
    use crate::interfaces::{interfaces, resolve};
    #[pymodule_export]
    use crate::memory::{PyArena, PyHostView, PyPart};
    #[pymodule_export]
    use crate::readiness::PyReadiness;
    #[pymodule_export]
    use crate::remote::{PyPool, PyRemote, check_machine_has};
    #[pymodule_export]
    use crate::rows::PyRows;
    #[pymodule_export]
    use crate::runtime::shutdown_runtime;
    #[pymodule_export]
    use crate::secret::PySecret;
    #[pymodule_export]
    use crate::server::PyServer;
    #[pymodule_export]
    use crate::slices::{PyWritten, fetch_slices, file_entries, read_file, write_file};
    #[pymodule_export]
    use crate::staged::PyStagedFetch;
    #[pymodule_export]
    use crate::tree::unflatten;
}
