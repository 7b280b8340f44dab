//! Both ends of a transfer through shared memory, written by hand: a receiver that reads the memory itself, and
//! sources that break the rules.

use std::io::{IoSlice, IoSliceMut, Read, Write};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::fs::FileExt;
use std::os::unix::net::{SocketAddr, UnixListener, UnixStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread::JoinHandle;

use rustix::fs::{MemfdFlags, SealFlags};
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage, SendFlags,
};

use super::faults::asked_range;
use super::raw::get;
use super::{PATIENCE, Rig, STEP};

pub(crate) const NAME_HEADER: &str = "tensorferry-same-host";
const MAGIC: &[u8; 8] = b"tf-ring1";

/// The name of `rig`'s socket for receivers on this machine.
pub(crate) fn name_of(rig: &Rig) -> String {
    get(rig, &rig.path(&format!("{STEP}/header")), &[]).header(NAME_HEADER).unwrap().to_owned()
}

/// A receiver on this machine, without the engine's client.
pub(crate) struct LocalReader {
    pub(crate) stream: UnixStream,
    pub(crate) memory: std::fs::File,
    slots: usize,
    pub(crate) slot_len: usize,
}

impl LocalReader {
    pub(crate) fn connect(name: &str) -> Self {
        let stream = UnixStream::connect_addr(&SocketAddr::from_abstract_name(name).unwrap()).unwrap();
        stream.set_read_timeout(Some(PATIENCE)).unwrap();
        (&stream).write_all(b"\r\n").unwrap();
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut control = RecvAncillaryBuffer::new(&mut space);
        let mut hello = [0; 16];
        let flags = RecvFlags::CMSG_CLOEXEC;
        let got = rustix::net::recvmsg(&stream, &mut [IoSliceMut::new(&mut hello)], &mut control, flags).unwrap();
        assert_eq!((got.bytes, &hello[..8]), (16, &MAGIC[..]));
        let fd = control.drain().find_map(|message| match message {
            RecvAncillaryMessage::ScmRights(mut fds) => fds.next(),
            _ => None,
        });
        let number = |at: usize| u32::from_le_bytes(*hello[at..].first_chunk().unwrap()) as usize;
        Self { stream, memory: fd.unwrap().into(), slots: number(8), slot_len: number(12) }
    }

    /// A receiver whose request for what lies at `tail` is being answered: the head has come.
    pub(crate) fn reading(rig: &Rig, tail: &str) -> Self {
        let mut reader = Self::connect(&name_of(rig));
        reader.request(&rig.path(tail));
        let head = reader.head();
        assert!(head.starts_with("HTTP/1.1 200"), "{head}");
        reader
    }

    /// The path under which this process can open the shared memory again.
    pub(crate) fn path(&self) -> String {
        format!("/proc/self/fd/{}", self.memory.as_raw_fd())
    }

    pub(crate) fn request(&mut self, path: &str) {
        self.ask(path, &[]);
    }

    pub(crate) fn ask(&mut self, path: &str, headers: &[(&str, &str)]) {
        let headers: String = headers.iter().flat_map(|(name, value)| [name, ": ", value, "\r\n"]).collect();
        self.stream.write_all(format!("GET {path} HTTP/1.1\r\nHost: test\r\n{headers}\r\n").as_bytes()).unwrap();
    }

    /// Reads the body that `head` announces, of an answer that does not come through shared memory.
    pub(crate) fn message(&mut self, head: &str) -> Vec<u8> {
        let length = head.lines().find_map(|line| line.strip_prefix("content-length: ")).unwrap();
        let mut body = vec![0; length.trim().parse().unwrap()];
        self.stream.read_exact(&mut body).unwrap();
        body
    }

    /// Reads the head of an answer and not one byte beyond it.
    pub(crate) fn head(&mut self) -> String {
        let mut head = Vec::new();
        while !head.ends_with(b"\r\n\r\n") {
            let mut byte = [0];
            self.stream.read_exact(&mut byte).unwrap();
            head.push(byte[0]);
        }
        String::from_utf8(head).unwrap()
    }

    /// Waits until the source has announced every slot.
    pub(crate) fn await_all_slots(&mut self) {
        let mut marks = vec![0; self.slots];
        self.stream.read_exact(&mut marks).unwrap();
    }

    /// A copy of the shared memory's current content.
    pub(crate) fn content(&self) -> Vec<u8> {
        let mut content = vec![0; self.slots * self.slot_len];
        self.memory.read_exact_at(&mut content, 0).unwrap();
        content
    }
}

/// What a source that breaks the rules does with a connection, in a thread that ends with it.
type Behaviour = dyn Fn(UnixStream) + Send + Sync;

/// A listening socket for receivers on this machine, under a name of its own.
pub(crate) struct FakeSource {
    pub(crate) name: String,
    pub(crate) calls: Arc<AtomicUsize>,
    over: Arc<AtomicBool>,
    accepting: Option<JoinHandle<()>>,
}

impl FakeSource {
    pub(crate) fn new(behaviour: impl Fn(UnixStream) + Send + Sync + 'static) -> Self {
        static MADE: AtomicUsize = AtomicUsize::new(0);
        let number = u64::from(std::process::id()) << 32 | MADE.fetch_add(1, Ordering::SeqCst) as u64;
        let name = format!("tensorferry-{number:032x}");
        let listener = UnixListener::bind_addr(&SocketAddr::from_abstract_name(&name).unwrap()).unwrap();
        let (over, calls) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicUsize::new(0)));
        let behaviour: Arc<Behaviour> = Arc::new(behaviour);
        let accepting = std::thread::spawn({
            let (over, calls) = (Arc::clone(&over), Arc::clone(&calls));
            move || {
                while let Ok((stream, _)) = listener.accept() {
                    if over.load(Ordering::SeqCst) {
                        return;
                    }
                    calls.fetch_add(1, Ordering::SeqCst);
                    stream.set_read_timeout(Some(PATIENCE)).unwrap();
                    let behaviour = Arc::clone(&behaviour);
                    std::thread::spawn(move || behaviour(stream));
                }
            }
        });
        Self { name, calls, over, accepting: Some(accepting) }
    }
}

impl Drop for FakeSource {
    fn drop(&mut self) {
        self.over.store(true, Ordering::SeqCst);
        let _ = UnixStream::connect_addr(&SocketAddr::from_abstract_name(&self.name).unwrap());
        self.accepting.take().unwrap().join().unwrap();
    }
}

/// Memory of `len` bytes, all 0xEE, that cannot shrink if it is `sealed`.
pub(crate) fn shared_memory(len: u64, sealed: bool) -> OwnedFd {
    let fd = rustix::fs::memfd_create("test", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING).unwrap();
    let file = std::fs::File::from(fd);
    file.write_all_at(&vec![0xEE; usize::try_from(len).unwrap()], 0).unwrap();
    if sealed {
        rustix::fs::fcntl_add_seals(&file, SealFlags::SHRINK).unwrap();
    }
    file.into()
}

/// Sends the greeting of a source, with or without memory.
pub(crate) fn greet(stream: &UnixStream, slots: u32, slot_len: u32, memory: Option<&OwnedFd>) {
    // Closing a socket with unread bytes would discard the greeting.
    let _ = (&*stream).read_exact(&mut [0; 2]);
    let mut hello = MAGIC.to_vec();
    hello.extend([slots.to_le_bytes(), slot_len.to_le_bytes()].concat());
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    let passed: Vec<_> = memory.iter().map(AsFd::as_fd).collect();
    if !passed.is_empty() {
        assert!(control.push(SendAncillaryMessage::ScmRights(&passed)));
    }
    // The receiver may be gone.
    let _ = rustix::net::sendmsg(stream, &[IoSlice::new(&hello)], &mut control, SendFlags::NOSIGNAL);
}

/// Reads one request; `None` at the end of the connection. Marks that slots are free may come before it.
pub(crate) fn read_request(mut stream: &UnixStream) -> Option<String> {
    let mut request = Vec::new();
    while !request.ends_with(b"\r\n\r\n") {
        let mut byte = [0];
        stream.read_exact(&mut byte).ok()?;
        if byte != [1] {
            request.push(byte[0]);
        }
    }
    String::from_utf8(request).ok()
}

/// Answers a request for a range of a container of `total` bytes as if all of the range were in shared memory.
pub(crate) fn answer_from_ring(mut stream: &UnixStream, request: &str, total: usize, marks: &[u8]) -> Option<()> {
    let (start, end) = asked_range(request)?;
    let head = format!(
        "HTTP/1.1 206 Partial Content\r\nContent-Range: bytes {start}-{}/{total}\r\nContent-Length: {}\r\n\
         tensorferry-ring: 1\r\n\r\n",
        end - 1,
        end - start
    );
    stream.write_all(head.as_bytes()).ok()?;
    stream.write_all(marks).ok()
}
