//! The one runtime of the process, and the one way to wait without holding the interpreter.
//!
//! The runtime starts on first use and ends in an exit handler. A forked child finds it without threads, forgets it,
//! and starts its own when it needs one.
//!
//! [`run`] and [`run_until`] are how calls that wait for others are made. Python handles signals on the main thread
//! alone, and only while it runs Python code, so there the work moves to a second thread and the main thread looks for
//! signals in between. On other threads the work runs where it is called.

use std::sync::Mutex;
use std::time::Duration;

use pyo3::prelude::*;
use tensorferry_core::{Cancel, Error};
use tokio::runtime::{Builder, Handle, Runtime};

use crate::errors;
use tensorferry_core::Locked;

/// How often a waiting main thread looks for a signal.
pub(crate) const SIGNAL_POLL: Duration = Duration::from_millis(50);

/// The runtime, and the process whose threads it consists of.
struct Owned {
    pid: u32,
    runtime: Runtime,
}

static RUNTIME: Mutex<Option<Owned>> = Mutex::new(None);

/// The process an object was made in.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Process(u32);

impl Process {
    /// The process that runs now.
    pub(crate) fn current() -> Self {
        Self(std::process::id())
    }

    pub(crate) fn is_current(self) -> bool {
        self.0 == std::process::id()
    }

    /// Checks that this is still the process the object was made in.
    ///
    /// # Errors
    /// `ForkedProcess` in a forked child, where the threads behind the object do not exist.
    pub(crate) fn check(self, py: Python<'_>) -> PyResult<()> {
        if self.is_current() { Ok(()) } else { Err(errors::forked(py)) }
    }
}

/// The handle of the runtime, which is started on first use. A forked child gets one of its own.
///
/// # Errors
/// The system's error when it starts no thread.
pub(crate) fn handle() -> std::io::Result<Handle> {
    // A child would find the lock as it is now.
    tensorferry_core::without_fork(start)
}

/// The runtime of this process, started if there is none. A fork must not come in between.
fn start() -> std::io::Result<Handle> {
    let mut owned = RUNTIME.locked();
    if let Some(owned) = owned.as_ref().filter(|o| o.pid == std::process::id()) {
        return Ok(owned.runtime.handle().clone());
    }
    // A runtime of the parent cannot be shut down here: its threads do not exist.
    std::mem::forget(owned.take());
    let workers = std::thread::available_parallelism().map_or(2, |n| n.get().clamp(2, 16));
    let runtime = Builder::new_multi_thread()
        .worker_threads(workers)
        .thread_name("tensorferry")
        .on_thread_start(tensorferry_core::lower_priority)
        .enable_all()
        .build()?;
    let handle = runtime.handle().clone();
    *owned = Some(Owned { pid: std::process::id(), runtime });
    Ok(handle)
}

/// Registers [`shut_down`] with `atexit`, so that the runtime's threads are gone before the interpreter is.
pub(crate) fn shut_down_at_exit(module: &Bound<'_, PyModule>) -> PyResult<()> {
    let hook = wrap_pyfunction!(shut_down, module)?;
    module.py().import("atexit")?.call_method1("register", (hook,)).map(drop)
}

/// Ends the runtime. Called once, when the interpreter exits.
#[pyfunction]
fn shut_down(py: Python<'_>) {
    let owned = tensorferry_core::without_fork(|| RUNTIME.locked().take());
    match owned {
        Some(owned) if owned.pid == std::process::id() => {
            py.detach(|| owned.runtime.shutdown_timeout(Duration::from_secs(1)));
        }
        other => std::mem::forget(other),
    }
}

/// Called on the waiting thread every `SIGNAL_POLL` while work goes on; an exception ends the work.
pub(crate) type OnTick<'a> = dyn Fn(Python<'_>) -> PyResult<()> + 'a;

/// Runs `work` without holding the interpreter.
///
/// On the main thread a signal whose handler raises ends it: the work is cancelled and waited for, and the handler's
/// exception (`KeyboardInterrupt`, mostly) is raised. An exception of `watch`, which is called now and then, does the
/// same on any thread. `cancel` stays cancelled.
///
/// # Errors
/// The error of `work` as an exception, or the exception of a signal handler or of `watch`. `RuntimeError` when the
/// system gives no thread, or `work` panics on one.
pub(crate) fn run<T: Send>(
    py: Python<'_>,
    cancel: &Cancel,
    watch: Option<&OnTick<'_>>,
    work: impl FnOnce() -> Result<T, Error> + Send,
) -> PyResult<T> {
    run_until(py, || cancel.cancel(), watch, work)
}

/// Runs `work` as [`run`] does; where it has to end early, `cancel` is called without the interpreter and must make it
/// end.
///
/// # Errors
/// As [`run`].
pub(crate) fn run_until<T: Send>(
    py: Python<'_>,
    cancel: impl Fn() + Send + Sync,
    watch: Option<&OnTick<'_>>,
    work: impl FnOnce() -> Result<T, Error> + Send,
) -> PyResult<T> {
    let result = if is_main_thread() || watch.is_some() {
        let (done, waiting) = std::sync::mpsc::sync_channel(1);
        std::thread::scope(|scope| {
            let worker =
                std::thread::Builder::new().name("tensorferry-wait".to_owned()).spawn_scoped(scope, move || {
                    // The receiver is gone only after a signal, and then the result is not needed.
                    let _ = done.send(work());
                });
            if let Err(e) = worker {
                return Err(pyo3::exceptions::PyRuntimeError::new_err(format!("cannot start a thread: {e}")));
            }
            // The receiver itself cannot cross `detach`, a reference to a mutex around it can.
            let waiting = Mutex::new(waiting);
            loop {
                let received = py.detach(|| waiting.locked().recv_timeout(SIGNAL_POLL));
                match received {
                    Ok(result) => return Ok(result),
                    Err(std::sync::mpsc::RecvTimeoutError::Timeout) => {
                        let watched = py.check_signals().and_then(|()| watch.map_or(Ok(()), |watch| watch(py)));
                        if let Err(interrupt) = watched {
                            // Detached: the work may need the interpreter to release an object.
                            let _ = py.detach(|| {
                                cancel();
                                waiting.locked().recv()
                            });
                            return Err(interrupt);
                        }
                    }
                    Err(std::sync::mpsc::RecvTimeoutError::Disconnected) => {
                        return Err(pyo3::exceptions::PyRuntimeError::new_err("the transfer thread panicked"));
                    }
                }
            }
        })?
    } else {
        py.detach(work)
    };
    result.map_err(|e| errors::to_py(py, &e))
}

/// Whether this is the thread that handles signals: on Linux the main thread has the id of the process.
fn is_main_thread() -> bool {
    crate::memory::thread_id() == std::process::id()
}
