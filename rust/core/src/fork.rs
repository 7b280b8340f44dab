//! Sockets that a forked child must not keep.
//!
//! A child that holds its parent's sockets keeps a port open on which no process answers once the parent is gone, and
//! keeps connections open whose peers wait for their end. Data loaders fork trainers all the time, so this is the
//! ordinary case.
//!
//! Every socket of the engine is made through [`CloseOnFork::make`], which notes its descriptor in one table. Handlers
//! that `pthread_atfork` installs keep three invariants:
//!
//! * a fork never falls between the making of a socket and the note of its descriptor: both happen under the table's
//!   lock, which the forking thread takes as well;
//! * in the child every noted descriptor refers to `/dev/null`. The numbers stay taken, so that memory of the parent
//!   that is dropped in the child closes a descriptor of its own, and never one that the child has opened since;
//! * the child's handler makes only system calls that are allowed there, and allocates nothing.
//!
//! [`without_fork`] uses the same lock for other state that a child must find unlocked.

use std::cell::UnsafeCell;
use std::fs::File;
use std::io::{self, IoSlice, IoSliceMut, Read, Write};
use std::mem::ManuallyDrop;
use std::ops::{Deref, DerefMut};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, IntoRawFd, RawFd};
use std::pin::Pin;
use std::sync::OnceLock;
use std::task::{Context, Poll};

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

/// The descriptors that are this process's alone. A mutex of the system's threads and not one of Rust's: the thread
/// that forks locks it before, and unlocks it on both sides after.
struct SocketTable {
    lock: UnsafeCell<libc::pthread_mutex_t>,
    descriptors: UnsafeCell<Vec<RawFd>>,
}

// SAFETY: `descriptors` are only reached by the thread that holds `lock`.
unsafe impl Sync for SocketTable {}

static TABLE: SocketTable =
    SocketTable { lock: UnsafeCell::new(libc::PTHREAD_MUTEX_INITIALIZER), descriptors: UnsafeCell::new(Vec::new()) };

/// The descriptor that replaces a socket in a child; opened beforehand, since a child may have no descriptor left.
static NOTHING: OnceLock<RawFd> = OnceLock::new();

/// The lock on [`TABLE`], which the calling thread holds.
struct Locked(&'static SocketTable);

impl Locked {
    fn new() -> Self {
        // SAFETY: a mutex that is initialized and never destroyed.
        unsafe { libc::pthread_mutex_lock(TABLE.lock.get()) };
        Self(&TABLE)
    }

    fn descriptors(&mut self) -> &mut Vec<RawFd> {
        // SAFETY: the owner of a `Locked` holds the lock, and the reference does not outlive the `Locked`.
        unsafe { &mut *self.0.descriptors.get() }
    }
}

impl Drop for Locked {
    fn drop(&mut self) {
        // SAFETY: this thread holds it.
        unsafe { libc::pthread_mutex_unlock(self.0.lock.get()) };
    }
}

extern "C" fn before() {
    std::mem::forget(Locked::new());
}

extern "C" fn after_in_parent() {
    drop(Locked(&TABLE));
}

/// Makes only system calls that a child of many threads may make, and allocates nothing.
extern "C" fn after_in_child() {
    // Locked by `before`, in the thread that is this one.
    let mut locked = Locked(&TABLE);
    if let Some(&nothing) = NOTHING.get() {
        for &descriptor in locked.descriptors().iter() {
            // SAFETY: two open descriptors; nobody in this process uses the second one.
            unsafe { libc::dup3(nothing, descriptor, libc::O_CLOEXEC) };
        }
    }
    locked.descriptors().clear();
}

/// Opens `/dev/null` and installs the handlers, once in the life of the process. Threads that come meanwhile wait for
/// the lock.
fn install(_: &mut Locked) -> io::Result<()> {
    if NOTHING.get().is_some() {
        return Ok(());
    }
    let nothing = File::options().read(true).write(true).open("/dev/null")?;
    // SAFETY: the three functions are there for as long as the process is.
    let failed = unsafe { libc::pthread_atfork(Some(before), Some(after_in_parent), Some(after_in_child)) };
    if failed != 0 {
        return Err(io::Error::from_raw_os_error(failed));
    }
    let _ = NOTHING.set(nothing.into_raw_fd());
    Ok(())
}

/// Does `work` while no thread forks: a lock that `work` takes and releases is free in every child.
///
/// `work` must not fork, must not block for long, and must neither make nor drop a socket of the engine, which takes
/// the same lock.
pub fn without_fork<R>(work: impl FnOnce() -> R) -> R {
    let _locked = Locked::new();
    work()
}

/// A socket that no forked child keeps. Dropping it takes it out of the table and closes it, both under the lock.
#[derive(Debug)]
pub(crate) struct CloseOnFork<S: AsRawFd>(ManuallyDrop<S>);

impl<S: AsRawFd> CloseOnFork<S> {
    /// The socket that `make` opens. No fork falls between its opening and its entry in the table, since both happen
    /// under the lock: `make` must not block, and must neither make nor drop another [`CloseOnFork`].
    pub(crate) fn make(make: impl FnOnce() -> io::Result<S>) -> io::Result<Self> {
        match Self::poll_make(|| Poll::Ready(make())) {
            Poll::Ready(socket) => socket,
            Poll::Pending => Err(io::ErrorKind::WouldBlock.into()),
        }
    }

    /// As [`CloseOnFork::make`], for a `make` that may have nothing to open yet, such as an accept.
    pub(crate) fn poll_make(make: impl FnOnce() -> Poll<io::Result<S>>) -> Poll<io::Result<Self>> {
        let mut locked = Locked::new();
        install(&mut locked)?;
        make().map_ok(|socket| {
            locked.descriptors().push(socket.as_raw_fd());
            Self(ManuallyDrop::new(socket))
        })
    }
}

impl<S: AsRawFd> Drop for CloseOnFork<S> {
    fn drop(&mut self) {
        let mut locked = Locked::new();
        let descriptor = self.0.as_raw_fd();
        let descriptors = locked.descriptors();
        // The newest are the shortest-lived.
        if let Some(at) = descriptors.iter().rposition(|&known| known == descriptor) {
            descriptors.swap_remove(at);
        }
        // SAFETY: it is not used after this.
        unsafe { ManuallyDrop::drop(&mut self.0) };
    }
}

impl<S: AsRawFd> Deref for CloseOnFork<S> {
    type Target = S;

    fn deref(&self) -> &S {
        &self.0
    }
}

impl<S: AsRawFd> DerefMut for CloseOnFork<S> {
    fn deref_mut(&mut self) -> &mut S {
        &mut self.0
    }
}

impl<S: AsRawFd + AsFd> AsFd for CloseOnFork<S> {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

impl<'a, S: AsRawFd> Read for &'a CloseOnFork<S>
where
    &'a S: Read,
{
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        (&mut &*self.0).read(into)
    }

    fn read_vectored(&mut self, into: &mut [IoSliceMut<'_>]) -> io::Result<usize> {
        (&mut &*self.0).read_vectored(into)
    }
}

impl<'a, S: AsRawFd> Write for &'a CloseOnFork<S>
where
    &'a S: Write,
{
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        (&mut &*self.0).write(bytes)
    }

    fn write_vectored(&mut self, bytes: &[IoSlice<'_>]) -> io::Result<usize> {
        (&mut &*self.0).write_vectored(bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        (&mut &*self.0).flush()
    }
}

impl<S: AsRawFd + AsyncRead + Unpin> AsyncRead for CloseOnFork<S> {
    fn poll_read(mut self: Pin<&mut Self>, context: &mut Context<'_>, into: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut **self).poll_read(context, into)
    }
}

impl<S: AsRawFd + AsyncWrite + Unpin> AsyncWrite for CloseOnFork<S> {
    fn poll_write(mut self: Pin<&mut Self>, context: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        Pin::new(&mut **self).poll_write(context, bytes)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut **self).poll_write_vectored(context, bytes)
    }

    fn is_write_vectored(&self) -> bool {
        self.0.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut **self).poll_flush(context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut **self).poll_shutdown(context)
    }
}
