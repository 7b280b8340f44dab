//! Faults of a network: a proxy that damages the bytes it passes on, and a server that does not keep to the rules.

use std::io::{ErrorKind, Read, Write};
use std::net::{IpAddr, Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, Weak};
use std::thread::JoinHandle;
use std::time::Duration;

use super::{Rig, loopback};

/// How often a fault happens, counted over all connections.
pub(crate) const ALWAYS: usize = usize::MAX;

/// What happens to the answers on a connection. Places are counted in bytes that the server has sent on it.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Fault {
    None,
    /// One bit of the byte at this place changes.
    Flip(usize),
    /// One bit changes in every stretch of this many bytes.
    FlipEvery(usize),
    /// The connection is closed in good order after this many bytes.
    Close(usize),
    /// The connection is reset after this many bytes.
    Reset(usize),
    /// This many bytes are lost at this place, and the rest is passed on.
    Lose(usize, usize),
    /// At most this many bytes are passed on per millisecond.
    Drip(usize),
    /// Nothing is passed on after this many bytes, and the connection stays open.
    Stall(usize),
    /// Everything is delayed.
    Delay(Duration),
}

/// Threads and sockets that end with their owner.
struct Running {
    address: SocketAddr,
    made: Arc<AtomicUsize>,
    stop: Arc<AtomicBool>,
    sockets: Arc<Mutex<Vec<Weak<TcpStream>>>>,
    accepting: Option<JoinHandle<()>>,
}

impl Running {
    /// Accepts connections and serves each on a thread of its own.
    fn start(at: (IpAddr, u16), serve: impl Fn(&TcpStream, &Tracker) + Send + Sync + 'static) -> Self {
        let listener = TcpListener::bind(at).unwrap();
        let made = Arc::<AtomicUsize>::default();
        let count = Arc::clone(&made);
        let address = listener.local_addr().unwrap();
        let tracker = Tracker { stop: Arc::default(), sockets: Arc::default() };
        let (stop, sockets) = (Arc::clone(&tracker.stop), Arc::clone(&tracker.sockets));
        let accepting = std::thread::spawn(move || {
            std::thread::scope(|scope| {
                for stream in listener.incoming() {
                    let Ok(stream) = stream else { continue };
                    if tracker.is_over() {
                        return;
                    }
                    count.fetch_add(1, Ordering::SeqCst);
                    let (serve, tracker) = (&serve, &tracker);
                    let stream = tracker.track(stream);
                    scope.spawn(move || serve(&stream, tracker));
                }
            });
        });
        Self { address, made, stop, sockets, accepting: Some(accepting) }
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::SeqCst);
        // Wakes the accepting thread.
        let _ = TcpStream::connect(self.address);
        for socket in self.sockets.lock().unwrap().drain(..).filter_map(|s| s.upgrade()) {
            let _ = socket.shutdown(Shutdown::Both);
        }
        if let Some(thread) = self.accepting.take() {
            let _ = thread.join();
        }
    }
}

pub(crate) struct Tracker {
    stop: Arc<AtomicBool>,
    // Weak: a connection closes when the thread that serves it drops it.
    sockets: Arc<Mutex<Vec<Weak<TcpStream>>>>,
}

impl Tracker {
    fn track(&self, stream: TcpStream) -> Arc<TcpStream> {
        let stream = Arc::new(stream);
        self.sockets.lock().unwrap().push(Arc::downgrade(&stream));
        stream
    }

    pub(crate) fn is_over(&self) -> bool {
        self.stop.load(Ordering::SeqCst)
    }

    /// Sleeps, but returns early when the owner ends.
    pub(crate) fn sleep(&self, length: Duration) {
        let step = Duration::from_millis(10);
        let mut slept = Duration::ZERO;
        while slept < length && !self.is_over() {
            std::thread::sleep(step.min(length));
            slept += step;
        }
    }
}

/// A name under which no process listens.
const NOBODY: &str = "tensorferry-00000000000000000000000000000000";

/// A proxy that passes connections on to a server and adds a fault.
pub(crate) struct Proxy {
    running: Running,
    left: Arc<AtomicUsize>,
    url: String,
}

impl Proxy {
    /// A proxy for the server behind `url`, on which `fault` happens `times` times.
    pub(crate) fn new(url: &str, fault: Fault, times: usize) -> Self {
        Self::naming(url, fault, times, NOBODY)
    }

    /// The same; in answers that carry the server's name for receivers on its machine, `name` replaces it.
    pub(crate) fn naming(url: &str, fault: Fault, times: usize, name: &str) -> Self {
        let (scheme, rest) = url.split_at(url.find("//").unwrap() + 2);
        let (pinned, rest) = rest.split_at(rest.find('@').map_or(0, |at| at + 1));
        let (authority, path) = rest.split_at(rest.find('/').unwrap());
        let upstream: SocketAddr = authority.parse().unwrap();
        let mut proxy = Self::between((loopback(1), 0), upstream, fault, times, name);
        proxy.url = format!("{scheme}{pinned}{}{path}", proxy.running.address);
        proxy
    }

    /// A proxy at another address of `rig`'s machine, and at the same port.
    pub(crate) fn at(last: u8, rig: &Rig, fault: Fault, times: usize) -> Self {
        let upstream = rig.server.address();
        Self::between((loopback(last), upstream.port()), upstream, fault, times, NOBODY)
    }

    fn between(at: (IpAddr, u16), upstream: SocketAddr, fault: Fault, times: usize, name: &str) -> Self {
        let (left, name) = (Arc::new(AtomicUsize::new(times)), name.to_owned());
        let budget = Arc::clone(&left);
        let running = Running::start(at, move |client, tracker| pass(client, upstream, fault, &budget, &name, tracker));
        Self { running, left, url: String::new() }
    }

    /// How many connections were made to it.
    pub(crate) fn connections(&self) -> usize {
        self.running.made.load(Ordering::SeqCst)
    }

    pub(crate) fn url(&self) -> &str {
        &self.url
    }

    /// Lets the fault happen `times` times from now on.
    pub(crate) fn arm(&self, times: usize) {
        self.left.store(times, Ordering::SeqCst);
    }

    /// Whether the fault has happened as often as it should.
    pub(crate) fn is_spent(&self) -> bool {
        self.left.load(Ordering::SeqCst) == 0
    }

    /// Ends every connection and takes no new one.
    pub(crate) fn die(self) {
        drop(self.running);
    }
}

fn pass(client: &TcpStream, upstream: SocketAddr, fault: Fault, left: &AtomicUsize, name: &str, tracker: &Tracker) {
    let Ok(server) = TcpStream::connect(upstream) else { return };
    let server = tracker.track(server);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let _ = std::io::copy(&mut &*client, &mut &*server);
            let _ = server.shutdown(Shutdown::Both);
        });
        let _ = answers(&server, client, fault, left, name, tracker);
        // Shutting down the writing half would close the connection in good order, which must not precede a reset.
        let half = if matches!(fault, Fault::Reset(_)) { Shutdown::Read } else { Shutdown::Both };
        let _ = client.shutdown(half);
        let _ = server.shutdown(Shutdown::Both);
    });
}

/// Replaces the server's name for receivers on its machine: with it, they would bypass the proxy.
fn rename(chunk: &mut [u8], name: &str) {
    const HEADER: &[u8] = b"tensorferry-same-host: ";
    if let Some(at) = chunk.windows(HEADER.len()).position(|w| w == HEADER) {
        chunk[at + HEADER.len()..][..name.len()].copy_from_slice(name.as_bytes());
    }
}

/// Copies from `server` to `client` until one of them ends or the fault ends it.
fn answers(
    mut server: &TcpStream,
    mut client: &TcpStream,
    fault: Fault,
    left: &AtomicUsize,
    name: &str,
    tracker: &Tracker,
) -> std::io::Result<()> {
    let mut buffer = vec![0; 64 << 10];
    let mut at = 0;
    loop {
        let got = server.read(&mut buffer)?;
        if got == 0 {
            return Ok(());
        }
        let chunk = &mut buffer[..got];
        rename(chunk, name);
        let here = |place: usize| (at..at + got).contains(&place);
        // If the fault's place has passed before the fault was allowed, the connection ends at once.
        let reached = |place: usize| at + got > place;
        let spend = || {
            let spend = |n| if n == ALWAYS { Some(n) } else { usize::checked_sub(n, 1) };
            left.fetch_update(Ordering::SeqCst, Ordering::SeqCst, spend).is_ok()
        };
        match fault {
            Fault::Flip(place) if here(place) && spend() => chunk[place - at] ^= 0x10,
            Fault::FlipEvery(every) if left.load(Ordering::SeqCst) > 0 => {
                for place in (at..at + got).filter(|place| *place > 0 && place.is_multiple_of(every)) {
                    chunk[place - at] ^= 0x10;
                }
            }
            Fault::Close(place) if reached(place) && spend() => {
                return client.write_all(&chunk[..place.saturating_sub(at)]);
            }
            Fault::Reset(place) if reached(place) && spend() => {
                client.write_all(&chunk[..place.saturating_sub(at)])?;
                // With a linger time of zero, closing is a reset.
                return socket2::SockRef::from(client).set_linger(Some(Duration::ZERO));
            }
            Fault::Lose(place, count) if here(place) && spend() => {
                client.write_all(&chunk[..place - at])?;
                client.write_all(&chunk[(place - at + count).min(got)..])?;
                at += got;
                continue;
            }
            Fault::Stall(place) if reached(place) && spend() => {
                client.write_all(&chunk[..place.saturating_sub(at)])?;
                tracker.sleep(Duration::from_mins(1));
                return Err(ErrorKind::TimedOut.into());
            }
            Fault::Drip(count) => {
                for piece in chunk.chunks(count) {
                    client.write_all(piece)?;
                    tracker.sleep(Duration::from_millis(1));
                }
                at += got;
                continue;
            }
            Fault::Delay(length) => tracker.sleep(length),
            _ => {}
        }
        client.write_all(chunk)?;
        at += got;
    }
}

/// A server written by hand, which sends what no honest server would.
pub(crate) struct Liar {
    running: Running,
}

impl Liar {
    /// Calls `answer` with every request head; the connection ends when it returns an error.
    pub(crate) fn new(
        answer: impl Fn(&TcpStream, &str, &Tracker) -> std::io::Result<()> + Send + Sync + 'static,
    ) -> Self {
        Self::at((loopback(1), 0), answer)
    }

    /// The same, at this address and port.
    pub(crate) fn at(
        at: (IpAddr, u16),
        answer: impl Fn(&TcpStream, &str, &Tracker) -> std::io::Result<()> + Send + Sync + 'static,
    ) -> Self {
        let running = Running::start(at, move |stream, tracker| {
            while let Ok(head) = read_head(stream) {
                if answer(stream, &head, tracker).is_err() || tracker.is_over() {
                    break;
                }
            }
            let _ = stream.shutdown(Shutdown::Both);
        });
        Self { running }
    }

    pub(crate) fn url(&self) -> String {
        format!("http://{}/checkpoint/", self.running.address)
    }

    /// How many connections were made to it.
    pub(crate) fn connections(&self) -> usize {
        self.running.made.load(Ordering::SeqCst)
    }
}

/// The range that a request asks for: its first byte, and the one behind its last.
pub(crate) fn asked_range(head: &str) -> Option<(usize, usize)> {
    let (first, last) = head.lines().find_map(|line| line.strip_prefix("Range: bytes="))?.split_once('-')?;
    Some((first.parse().ok()?, last.trim().parse::<usize>().ok()? + 1))
}

fn read_head(mut stream: &TcpStream) -> std::io::Result<String> {
    let mut head = Vec::new();
    let mut byte = [0];
    while !head.ends_with(b"\r\n\r\n") {
        stream.read_exact(&mut byte)?;
        head.push(byte[0]);
    }
    Ok(String::from_utf8_lossy(&head).into_owned())
}
