//! The one conversion from the engine's errors to the exceptions of `tensorferry.errors`.
//!
//! The matches over `ErrorKind` and `Hint` have no catch-all arm: a new kind in the engine does not compile before it
//! has a class here, and a new hint not before it has a text.
//!
//! The engine states facts. What a user can do about one is said here, in the words of the Python package.

use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::PyType;
use tensorferry_core::{Error, ErrorKind, Hint};

/// An exception of the class called `class` in `tensorferry.errors`, or the one that looking for it raised.
fn raise(py: Python<'_>, class: &str, message: String) -> PyErr {
    static MODULE: PyOnceLock<Py<PyModule>> = PyOnceLock::new();
    let module = MODULE.get_or_try_init(py, || py.import("tensorferry.errors").map(Bound::unbind));
    let class = module.and_then(|m| Ok(m.bind(py).getattr(class)?.cast_into::<PyType>()?));
    match class {
        Ok(class) => PyErr::from_type(class, message),
        Err(e) => e,
    }
}

/// What users of the Python package can do about an error with this hint.
fn remedy(hint: Hint) -> &'static str {
    match hint {
        Hint::WithdrawBeforeChange => {
            "Change the state only after disallow_checkpoint() has returned, or send from a private copy: \
             snapshot=\"copy\""
        }
        Hint::SecretForReceiver => "Give this receiver the source's secret: secret=, or TENSORFERRY_SECRET",
        Hint::SecretForSource => "Give the source the same secret: secret=, or TENSORFERRY_SECRET",
        Hint::OtherProgram => "It may be a stock torchft server",
        Hint::WholeAddress => {
            "Give the whole string: what metadata() of the source returns, or what `tensorferry serve` or \
             `tensorferry keeper --status` prints"
        }
        Hint::ChoosePort => {
            "Choose another port with port=, --port or TENSORFERRY_PORT, or a range such as \"29600-29699\", from which the first \
             free port is taken"
        }
        Hint::ChooseMetricsPort => {
            "Choose another port with metrics_port=, --metrics-port or TENSORFERRY_METRICS_PORT, or a range such as \"9400-9499\", from \
             which the first free port is taken"
        }
    }
}

/// The engine's `message`, with what can be done about it as a second sentence.
pub(crate) fn with_remedy(message: String, hint: Option<Hint>) -> String {
    match hint {
        Some(hint) => format!("{message}. {}", remedy(hint)),
        None => message,
    }
}

/// The exception for an error of the engine, with its whole message and what can be done about it.
pub(crate) fn to_py(py: Python<'_>, error: &Error) -> PyErr {
    let message = with_remedy(error.to_string(), error.hint());
    let class = match error.kind() {
        ErrorKind::Timeout => "FetchTimeout",
        ErrorKind::Connect => "ConnectError",
        ErrorKind::Status(status) => return refused(py, status, message),
        ErrorKind::Unproven => "UnprovenSource",
        ErrorKind::Corrupt => "CorruptCheckpoint",
        ErrorKind::Torn => "TornCheckpoint",
        ErrorKind::Changed => "SourceChanged",
        ErrorKind::Cancelled => "TransferCancelled",
        ErrorKind::Invalid => "InvalidArgument",
        ErrorKind::System => "SystemRefused",
        // Python asks a foreign source in torchft's own protocol before it comes to this.
        ErrorKind::Foreign | ErrorKind::Protocol => "ProtocolError",
    };
    raise(py, class, message)
}

/// The exception for an HTTP status: which class it is depends on the status, and Python decides.
fn refused(py: Python<'_>, status: u16, message: String) -> PyErr {
    let made = py
        .import("tensorferry.errors")
        .and_then(|m| m.getattr("SourceRefused"))
        .and_then(|class| class.call_method1("of", (status, message)));
    match made {
        Ok(exception) => PyErr::from_value(exception),
        Err(e) => e,
    }
}

/// The exception for a call in a process forked from the one that made the object.
pub(crate) fn forked(py: Python<'_>) -> PyErr {
    raise(
        py,
        "ForkedProcess",
        "this transport was made before fork(): its threads do not exist in the child; make a new one here".to_owned(),
    )
}

/// The exception for an argument that cannot be used.
pub(crate) fn invalid(py: Python<'_>, message: impl Into<String>) -> PyErr {
    raise(py, "InvalidArgument", message.into())
}

/// The exception for a part of a state that cannot be sent.
pub(crate) fn unsupported(py: Python<'_>, message: String) -> PyErr {
    raise(py, "UnsupportedLeaf", message)
}

/// The exception for something that a source should not have sent.
pub(crate) fn protocol(py: Python<'_>, message: String) -> PyErr {
    raise(py, "ProtocolError", message)
}
