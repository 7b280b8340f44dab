//! The ring: memory that a source shares with one receiver on its machine, a few slots that are filled in turn.
//!
//! The source copies a part of the payload into a slot and sends one byte over their socket; the receiver copies it to
//! its place and sends one byte back. No receiver ever maps the memory of the tensors itself.
//!
//! Invariants:
//!
//! * a slot is written only while the source has it, and read only while the receiver has it;
//! * the memory is sealed: it cannot shrink under the receiver, and from Linux 5.1 on only the source can write to it;
//! * a source that breaks these rules can only make checksums fail, since the receiver copies out of the slot first and
//!   checksums the copy.

use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::AsFd;

use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage, SendFlags,
};

use crate::memory::{SharedMemory, SharedView, nontemporal};

/// The beginning of the source's message when it passes the memory.
const MAGIC: [u8; 8] = *b"tf-ring1";
/// The whole of that message: the magic, then slots and length of a slot as 32-bit little-endian numbers.
const HELLO: usize = MAGIC.len() + 8;
/// A quarter of a block: bytes that were copied in are still in cache when they are copied out.
const SLOT_LEN: u32 = 256 << 10;
const SLOTS: u32 = 4;
/// Bytes that are copied, and then checksummed and copied on, while the first level of the cache still has them.
const CACHED: usize = 16 << 10;
/// The most bytes that a receiver maps.
const MAX_LEN: u64 = 64 << 20;

/// How the memory is divided.
#[derive(Clone, Copy, Debug)]
struct RingLayout {
    slots: u32,
    slot_len: u32,
}

impl RingLayout {
    /// The layout of a ring that a source's greeting `hello` announces.
    fn decode(hello: &[u8; HELLO]) -> io::Result<Self> {
        let invalid = || io::Error::new(io::ErrorKind::InvalidData, "not the shared memory of a source");
        let number = |at: usize| hello[at..].first_chunk().map_or(0, |bytes| u32::from_le_bytes(*bytes));
        let layout = Self { slots: number(MAGIC.len()), slot_len: number(MAGIC.len() + 4) };
        let valid = hello.starts_with(&MAGIC) && layout.slots > 0 && layout.slot_len > 0 && layout.bytes() <= MAX_LEN;
        if valid { Ok(layout) } else { Err(invalid()) }
    }

    /// The greeting that announces this layout to a receiver.
    fn encode(self) -> [u8; HELLO] {
        let mut hello = [0; HELLO];
        hello[..8].copy_from_slice(&MAGIC);
        hello[8..12].copy_from_slice(&self.slots.to_le_bytes());
        hello[12..].copy_from_slice(&self.slot_len.to_le_bytes());
        hello
    }

    fn bytes(self) -> u64 {
        u64::from(self.slots) * u64::from(self.slot_len)
    }

    /// Where the slot used for the `turn`-th part starts.
    fn start(self, turn: u64) -> usize {
        #[allow(
            clippy::cast_possible_truncation,
            reason = "below `bytes`, which is the length of a mapping that exists"
        )]
        let start = ((turn % u64::from(self.slots)) * u64::from(self.slot_len)) as usize;
        start
    }
}

/// The source's end.
#[derive(Debug)]
pub(crate) struct RingWriter {
    memory: SharedMemory,
    layout: RingLayout,
    turn: u64,
    /// Slots that the receiver has not given back yet.
    lent: u32,
}

impl RingWriter {
    /// New memory, passed over `socket`.
    pub(crate) fn pass(socket: impl AsFd) -> io::Result<Self> {
        let layout = RingLayout { slots: SLOTS, slot_len: SLOT_LEN };
        let (memory, fd) = SharedMemory::new(layout.bytes())?;
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        let passed = [fd.as_fd()];
        control.push(SendAncillaryMessage::ScmRights(&passed));
        let hello = layout.encode();
        let sent = rustix::net::sendmsg(socket, &[IoSlice::new(&hello)], &mut control, SendFlags::NOSIGNAL)?;
        if sent == hello.len() {
            Ok(Self { memory, layout, turn: 0, lent: 0 })
        } else {
            Err(io::ErrorKind::WriteZero.into())
        }
    }

    /// Bytes of a slot.
    pub(crate) fn slot_len(&self) -> u64 {
        self.layout.slot_len.into()
    }

    /// Whether a slot must come back before the next one can be filled.
    pub(crate) fn is_full(&self) -> bool {
        self.lent == self.layout.slots
    }

    /// Slots the receiver has.
    pub(crate) fn lent(&self) -> u32 {
        self.lent
    }

    /// The receiver gave `count` slots back, at most those it has.
    pub(crate) fn take_back(&mut self, count: usize) {
        self.lent = self.lent.saturating_sub(u32::try_from(count).unwrap_or(u32::MAX));
    }

    /// Lets `fill` write the next slot, which must be free, and lends it to the receiver.
    pub(crate) fn lend<R>(&mut self, fill: impl FnOnce(&mut [u8]) -> R) -> R {
        assert!(!self.is_full(), "the receiver has every slot");
        let slot = self.memory.slice_mut(self.layout.start(self.turn), self.layout.slot_len as usize);
        let result = fill(slot);
        self.turn += 1;
        self.lent += 1;
        result
    }
}

/// The receiver's end.
#[derive(Debug)]
pub(crate) struct RingReader {
    memory: SharedView,
    layout: RingLayout,
    turn: u64,
    /// Bytes taken out of the slot in turn.
    taken: usize,
    /// Where they pass through.
    cached: Vec<u8>,
}

impl RingReader {
    /// The memory that the source passes over `socket`.
    pub(crate) fn receive(socket: impl AsFd) -> io::Result<Self> {
        let invalid = |why: &str| io::Error::new(io::ErrorKind::InvalidData, why.to_owned());
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut control = RecvAncillaryBuffer::new(&mut space);
        let mut hello = [0; HELLO];
        let got =
            rustix::net::recvmsg(socket, &mut [IoSliceMut::new(&mut hello)], &mut control, RecvFlags::CMSG_CLOEXEC)?;
        let passed = control.drain().find_map(|message| match message {
            RecvAncillaryMessage::ScmRights(mut fds) => fds.next(),
            _ => None,
        });
        let fd = passed.filter(|_| got.bytes == HELLO).ok_or_else(|| invalid("the source passed no shared memory"))?;
        let layout = RingLayout::decode(&hello)?;
        let memory = SharedView::new(&fd, layout.bytes())?
            .ok_or_else(|| invalid("the shared memory of the source could shrink under us"))?;
        Ok(Self { memory, layout, turn: 0, taken: 0, cached: vec![0; CACHED] })
    }

    /// Bytes of the current slot that were not taken yet.
    pub(crate) fn left(&self) -> usize {
        self.layout.slot_len as usize - self.taken
    }

    /// Slots that `bytes` more of the payload come in, with the one that was begun.
    pub(crate) fn parts(&self, bytes: u64) -> u64 {
        (self.taken as u64 + bytes).div_ceil(u64::from(self.layout.slot_len))
    }

    /// Copies the next bytes of the slot in turn, which must have been announced, as many as `into` is long: no more
    /// than are left. `seen` is given them while they are in cache.
    ///
    /// The bytes are copied through private memory, so `seen` gets exactly those that are written to `into`, even if
    /// the source changes the slot meanwhile.
    pub(crate) fn copy(&mut self, mut into: &mut [u8], mut seen: impl FnMut(&[u8])) {
        while !into.is_empty() {
            let (part, rest) = into.split_at_mut(into.len().min(CACHED));
            let mut cached = std::mem::take(&mut self.cached);
            let bytes = &mut cached[..part.len()];
            self.copy_out(bytes);
            seen(bytes);
            nontemporal::copy(bytes, part);
            self.cached = cached;
            into = rest;
        }
    }

    /// Copies the next bytes of the slot in turn.
    fn copy_out(&mut self, into: &mut [u8]) {
        assert!(into.len() <= self.left(), "{} bytes of a slot that has {}", into.len(), self.left());
        self.memory.copy(self.layout.start(self.turn) + self.taken, into);
        self.taken += into.len();
    }

    /// The slot in turn is done with.
    pub(crate) fn next(&mut self) {
        self.turn += 1;
        self.taken = 0;
    }
}
