//! Locks and threads that work shares: a lock that a panic has left is used on, and a thread that the system does not give
//! is done without.

use std::sync::{Mutex, MutexGuard, PoisonError};

/// A lock whose holder may have panicked: what it guards is repaired by those that hold parts of it, or is a count.
pub trait Locked<T> {
    /// The guard.
    fn locked(&self) -> MutexGuard<'_, T>;

    /// The value, which nobody else has any more.
    fn into_value(self) -> T;
}

impl<T> Locked<T> for Mutex<T> {
    fn locked(&self) -> MutexGuard<'_, T> {
        self.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn into_value(self) -> T {
        self.into_inner().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Runs `work` in this thread and up to `threads - 1` others called `name`, and returns what it returns here. It takes its
/// items from what all of them share, so that fewer threads take longer and that is all.
pub(crate) fn parallel<R>(name: &str, threads: usize, work: impl Fn() -> R + Sync) -> R {
    std::thread::scope(|scope| {
        for _ in 1..threads {
            let _ = std::thread::Builder::new().name(name.to_owned()).spawn_scoped(scope, || drop(work()));
        }
        work()
    })
}
