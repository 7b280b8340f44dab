//! `tensorferry._native`: a thin skin over `tensorferry-core`.
//!
//! One file holds one class or a few functions of the same subject. What the engine can do is documented there; what is
//! documented here is what the crossing adds: which thread holds the interpreter, what keeps memory alive, and what is
//! raised.
//!
//! Rooms: `rows` has the table of a container's entries, `read_state` fills it from a state, `server` publishes it, and
//! `fetch` receives one from a peer or reads one from a file. `memory` is what Python and Rust share. The files beside
//! them concern the whole process.
//!
//! Rules that hold in every file:
//!
//! * **The interpreter.** Nothing that may block for long runs while it is held. What waits for a peer, a file or a
//!   store does so in `runtime::run` or `runtime::run_until`, which also look for signals on the main thread; a plain
//!   `detach` does not.
//! * **Errors.** Engine errors become exceptions in `errors`, and nowhere else. No panic crosses into Python on
//!   purpose.
//! * **Forks.** Objects that own threads or sockets note the process they were made in, and raise `ForkedProcess`
//!   elsewhere. There, `close` does nothing, and neither do the methods of `Receive`.
//! * **Unsafe code** is in `memory`, whole.
//!
//! The Python-visible names and signatures are in `python/tensorferry/_native.pyi`, which a test compares with this
//! module.

mod errors;
mod fetch;
mod host;
mod index;
mod memory;
mod read_state;
mod report;
mod rows;
mod runtime;
mod server;
mod trust;

use pyo3::prelude::*;

/// The native module.
#[pymodule]
mod _native {
    use pyo3::prelude::*;

    #[pymodule_export]
    use crate::fetch::answer::PyAnswer;
    #[pymodule_export]
    use crate::fetch::entries::PyEntries;
    #[pymodule_export]
    use crate::fetch::files::{
        PyFileWriting, PyWritten, file_damage, file_entries, file_entry_digests, file_header, rename_new, seal_file,
    };
    #[pymodule_export]
    use crate::fetch::parts::PyParts;
    #[pymodule_export]
    use crate::fetch::remote::{PyPool, PyRemote};
    #[pymodule_export]
    use crate::fetch::slices::{fetch_slices, read_file};
    #[pymodule_export]
    use crate::fetch::staged::PyStagedFetch;
    #[pymodule_export]
    use crate::fetch::stored::PyStored;
    #[pymodule_export]
    use crate::fetch::tree::unflatten;
    #[pymodule_export]
    use crate::host::{available_memory, check_machine_has, dtypes, interfaces, memory_limit, resolve};
    #[pymodule_export]
    use crate::index::PyIndex;
    #[pymodule_export]
    use crate::memory::{PyArena, PyFilePages, PyHostView, PyPart, PySharedBuffer, checksum_memory, copy_memory};
    #[pymodule_export]
    use crate::read_state::PyRows;
    #[pymodule_export]
    use crate::read_state::objects::pickle_objects;
    #[pymodule_export]
    use crate::read_state::pieces::{add_pieces, describe_objects, describe_shards, number_of_storage, reach, restart};
    #[pymodule_export]
    use crate::read_state::plain_objects::pickle_plain;
    #[pymodule_export]
    use crate::report::PyReport;
    #[pymodule_export]
    use crate::rows::PyTable;
    #[pymodule_export]
    use crate::server::readiness::PyReadiness;
    #[pymodule_export]
    use crate::server::{PyReceive, PyServer, PyShelf};
    #[pymodule_export]
    use crate::trust::{PyCertificate, PySecret};

    #[pymodule_init]
    fn init(module: &Bound<'_, PyModule>) -> PyResult<()> {
        crate::runtime::shut_down_at_exit(module)
    }
}
