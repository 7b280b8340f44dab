//! A stream whose writes fail when the peer reads nothing for too long.
//!
//! hyper limits how long a request may take to arrive, but not how long a response may take to leave. Without this, a
//! peer that asks for much and reads nothing holds a connection, and with it a lease, for ever. A withdrawal does not
//! wait for that long, so it is told earlier of a peer that stands still ([`ConnectionHandle`]).

use std::io::{self, IoSlice};
use std::os::fd::{AsRawFd, RawFd};
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::time::{Instant, Sleep};

use crate::fork::CloseOnFork;
use crate::publication::{ConnectionHandle, LOOK};

/// A stream over a socket that the system sends from.
pub(super) trait Outgoing {
    /// How many bytes the system has accepted and the other end has not yet; `None` where it does not say.
    fn unacknowledged(&self) -> Option<i32>;
}

impl<S: AsRawFd> Outgoing for CloseOnFork<S> {
    fn unacknowledged(&self) -> Option<i32> {
        let socket: RawFd = self.as_raw_fd();
        let mut bytes: libc::c_int = 0;
        // SAFETY: the descriptor is open as long as `self` is there, and the system writes one integer.
        let failed = unsafe { libc::ioctl(socket, libc::TIOCOUTQ, &raw mut bytes) };
        (failed == 0).then_some(bytes)
    }
}

impl<S: Outgoing> Outgoing for tokio_rustls::server::TlsStream<S> {
    fn unacknowledged(&self) -> Option<i32> {
        self.get_ref().0.unacknowledged()
    }
}

/// A stream whose writes may wait for `patience` each.
pub(super) struct WriteTimeout<S> {
    stream: S,
    patience: Duration,
    handle: Arc<ConnectionHandle>,
    /// Since when no write was accepted, while something is to be written.
    stuck: Option<Instant>,
    /// What the last look since then has found on its way. A peer takes bytes long before there is room for a write.
    on_its_way: Option<i32>,
    /// Set again only when it rings: writes wait often, and seldom for long.
    alarm: Pin<Box<Sleep>>,
}

impl<S> WriteTimeout<S> {
    pub(super) fn new(stream: S, patience: Duration, handle: Arc<ConnectionHandle>) -> Self {
        let alarm = Box::pin(tokio::time::sleep(LOOK.min(patience)));
        Self { stream, patience, handle, stuck: None, on_its_way: None, alarm }
    }
}

impl<S: Outgoing> WriteTimeout<S> {
    /// `polled`, or the end of the patience.
    fn within<T>(&mut self, context: &mut Context<'_>, polled: Poll<io::Result<T>>) -> Poll<io::Result<T>> {
        if polled.is_ready() {
            if self.stuck.take().is_some() {
                self.on_its_way = None;
                self.handle.note_moved();
            }
            return polled;
        }
        let since = *self.stuck.get_or_insert_with(Instant::now);
        while self.alarm.as_mut().poll(context).is_ready() {
            if since.elapsed() >= self.patience {
                return Poll::Ready(Err(io::ErrorKind::TimedOut.into()));
            }
            self.look();
            self.alarm.as_mut().reset((Instant::now() + LOOK).min(since + self.patience));
        }
        Poll::Pending
    }

    /// Notes whether the peer has taken bytes since the last look.
    fn look(&mut self) {
        let on_its_way = self.stream.unacknowledged();
        if on_its_way == self.on_its_way {
            self.handle.note_still();
        } else {
            self.on_its_way = on_its_way;
            self.handle.note_moved();
        }
    }
}

impl<S: AsyncRead + Unpin> AsyncRead for WriteTimeout<S> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_read(context, buffer)
    }
}

impl<S: AsyncWrite + Outgoing + Unpin> AsyncWrite for WriteTimeout<S> {
    fn poll_write(mut self: Pin<&mut Self>, context: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        let polled = Pin::new(&mut self.stream).poll_write(context, bytes);
        self.within(context, polled)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        slices: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let polled = Pin::new(&mut self.stream).poll_write_vectored(context, slices);
        self.within(context, polled)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        let polled = Pin::new(&mut self.stream).poll_flush(context);
        self.within(context, polled)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        let polled = Pin::new(&mut self.stream).poll_shutdown(context);
        self.within(context, polled)
    }
}
