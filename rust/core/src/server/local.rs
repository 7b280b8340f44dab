//! Receivers on this machine: the same requests and answers over a Unix-domain socket, but the bytes of a publication
//! go through memory shared with the receiver. Each receiver has a thread, which mostly copies.

use std::fmt::Write as _;
use std::future::poll_fn;
use std::io::{self, Read, Write};
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::time::Instant;

use http::header::{self, HeaderValue};
use http::{Request, Response};
use http_body::Body as _;
use hyper::ext::ReasonPhrase;
use tensorferry_wire::request::RING_HEADER;
use tokio::runtime::Handle;
use tokio::sync::watch;

use super::body::{MemoryBody, ServedBody};
use super::{ConnectionContext, handler};
use crate::fork::CloseOnFork;
use crate::publication::LOOK;
use crate::same_host::ring::RingWriter;

/// A request's head that is longer is not one of ours.
const MAX_HEAD: usize = 16 << 10;
const MAX_HEADERS: usize = 32;

/// A connection from this machine.
pub(super) struct Local {
    stream: CloseOnFork<UnixStream>,
    connection: Arc<ConnectionContext>,
    ring: RingWriter,
    /// Becomes true when the connection is to end; its socket is shut down right after.
    over: watch::Receiver<bool>,
    runtime: Handle,
}

impl Local {
    /// Serves `stream`, on which the receiver's greeting waits to be read, until the receiver leaves, makes no more
    /// requests or breaks the rules, or until `over` becomes true. Blocks its thread.
    pub(super) fn serve(
        stream: CloseOnFork<UnixStream>,
        connection: Arc<ConnectionContext>,
        over: watch::Receiver<bool>,
    ) -> io::Result<()> {
        stream.set_nonblocking(false)?;
        stream.set_read_timeout(Some(LOOK))?;
        stream.set_write_timeout(Some(connection.patience()))?;
        let ring = RingWriter::pass(&stream)?;
        let mut local = Self { stream, connection, ring, over, runtime: Handle::current() };
        let mut head = Vec::with_capacity(1 << 10);
        while let Some(request) = local.read_request(&mut head)? {
            local.answer(request)?;
        }
        Ok(())
    }

    /// The next request, or `None` when the receiver has left or sends something else.
    fn read_request(&mut self, head: &mut Vec<u8>) -> io::Result<Option<Request<()>>> {
        while self.ring.lent() > 0 {
            self.take_back()?;
        }
        head.clear();
        let mut buffer = [0; 2 << 10];
        let mut begun = None;
        loop {
            let got = self.read(&mut buffer)?;
            // One that drips would keep this thread for ever.
            if begun.get_or_insert_with(Instant::now).elapsed() > self.connection.patience() {
                return Err(io::ErrorKind::TimedOut.into());
            }
            head.extend_from_slice(&buffer[..got]);
            let mut headers = [httparse::EMPTY_HEADER; MAX_HEADERS];
            let mut parsed = httparse::Request::new(&mut headers);
            match parsed.parse(head) {
                Ok(httparse::Status::Partial) if got > 0 && head.len() < MAX_HEAD => {}
                // A receiver of ours asks for nothing before it has its answer.
                Ok(httparse::Status::Complete(len)) if len == head.len() => return Ok(to_request(&parsed)),
                _ => return Ok(None),
            }
        }
    }

    /// Answers a request: the head and short bodies over the socket, bytes of a publication by the ring.
    fn answer(&mut self, request: Request<()>) -> io::Result<()> {
        let connection = Arc::clone(&self.connection);
        let answering = async move { handler::answer(&connection, &request).await };
        let Ok(mut answer) = self.on_runtime(answering)?;
        let in_ring = matches!(answer.body(), ServedBody::Memory(_));
        if in_ring {
            answer.headers_mut().insert(RING_HEADER, HeaderValue::from_static("1"));
        }
        (&self.stream).write_all(head_of(&answer).as_bytes())?;
        match answer.into_body() {
            ServedBody::Message(Some(bytes)) => (&self.stream).write_all(&bytes),
            ServedBody::Message(None) => Ok(()),
            ServedBody::Memory(body) => self.lend(body),
        }
    }

    /// Runs `work` in a task of the runtime and returns its result, or an error if the connection ends before. When the
    /// process exits, this thread outlives the runtime's timers, so it must not wait for a timer itself.
    fn on_runtime<T: Send + 'static>(&self, work: impl Future<Output = T> + Send + 'static) -> io::Result<T> {
        let mut task = self.runtime.spawn(work);
        let done = self.runtime.block_on(until_over(&self.over, &mut task));
        task.abort();
        done?.map_err(|_| io::ErrorKind::ConnectionAborted.into())
    }

    /// Sends `body` slot by slot.
    fn lend(&mut self, mut body: Box<MemoryBody>) -> io::Result<()> {
        while !body.is_over() {
            if self.ring.is_full() {
                self.take_back()?;
            }
            // A slot is a turn, whatever the cap: the receiver takes each to be full but the last one.
            let stop = body.end_of(self.ring.slot_len());
            if !body.is_filled(stop) {
                let filled = poll_fn(|context| body.poll_filled(stop, context));
                self.runtime.block_on(until_over(&self.over, filled))??;
            }
            if let Some(delay) = body.reserve(stop) {
                self.on_runtime(async move { tokio::time::sleep(delay).await })?;
            }
            self.ring.lend(|slot| body.copy_next(slot));
            (&self.stream).write_all(&[1])?;
        }
        Ok(())
    }

    /// Reads what the receiver says, and notes meanwhile that it says nothing.
    fn read(&self, into: &mut [u8]) -> io::Result<usize> {
        let begun = Instant::now();
        loop {
            match (&self.stream).read(into) {
                Err(e) if e.kind() == io::ErrorKind::WouldBlock && begun.elapsed() < self.connection.patience() => {
                    self.connection.cut.note_still();
                }
                read => {
                    self.connection.cut.note_moved();
                    return read;
                }
            }
        }
    }

    /// Waits for slots that come back.
    fn take_back(&mut self) -> io::Result<()> {
        let mut marks = [0; 16];
        let most = marks.len().min(self.ring.lent() as usize);
        match self.read(&mut marks[..most])? {
            0 => Err(io::ErrorKind::UnexpectedEof.into()),
            count => {
                self.ring.take_back(count);
                Ok(())
            }
        }
    }
}

/// The result of `work`, or an error if the connection ends before.
async fn until_over<T>(over: &watch::Receiver<bool>, work: impl Future<Output = T>) -> io::Result<T> {
    let mut over = over.clone();
    tokio::select! {
        result = work => Ok(result),
        _ = over.wait_for(|over| *over) => Err(io::ErrorKind::ConnectionAborted.into()),
    }
}

/// The parsed head as hyper's server gives requests; `None` if it is not a valid one.
fn to_request(parsed: &httparse::Request<'_, '_>) -> Option<Request<()>> {
    let mut request = Request::builder().method(parsed.method?).uri(parsed.path?);
    for header in parsed.headers.iter() {
        request = request.header(header.name, header.value);
    }
    request.body(()).ok()
}

/// The head of an answer as HTTP/1.1 has it, with a length in any case.
fn head_of(answer: &Response<ServedBody>) -> String {
    let status = answer.status();
    let reason = answer.extensions().get::<ReasonPhrase>().map(|reason| String::from_utf8_lossy(reason.as_bytes()));
    let reason = reason.unwrap_or_else(|| status.canonical_reason().unwrap_or("").into());
    let mut head = format!("HTTP/1.1 {} {reason}\r\n", status.as_u16());
    for (name, value) in answer.headers() {
        let _ = write!(head, "{name}: {}\r\n", value.to_str().unwrap_or(""));
    }
    if !answer.headers().contains_key(header::CONTENT_LENGTH) {
        let length = answer.body().size_hint().exact().unwrap_or(0);
        let _ = write!(head, "{}: {length}\r\n", header::CONTENT_LENGTH);
    }
    head.push_str("\r\n");
    head
}
