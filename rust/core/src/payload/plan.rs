//! What to fetch and where it goes: pieces of payload with their destinations, cut into ranges of whole blocks.

use std::collections::VecDeque;
use std::io::IoSliceMut;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tensorferry_wire::digest::{BLOCK_SIZE, GRAINS};

use crate::error::{Error, ErrorKind};
use crate::memory::ALIGNMENT;

/// A page of memory.
#[allow(clippy::cast_possible_truncation)]
const PAGE: usize = super::PAGE as usize;

/// How often a lane with nothing to do looks at the others.
const IDLE: Duration = Duration::from_millis(100);

/// One run of payload bytes and the address they go to.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Piece {
    pub(crate) start: u64,
    pub(crate) len: u64,
    address: usize,
}

impl Piece {
    /// `[start, start + len)` of the payload goes to `address`.
    ///
    /// # Safety
    /// The memory must be writable, and nobody else may use it, until the plan made of this piece is gone.
    pub(crate) unsafe fn new(start: u64, len: u64, address: usize) -> Self {
        Self { start, len, address }
    }

    fn end(&self) -> u64 {
        self.start + self.len
    }

    /// Takes `next` in if that goes on where this ends, in the payload and in memory.
    pub(crate) fn join(&mut self, next: &Self) -> bool {
        let goes_on = self.end() == next.start && self.address as u64 + self.len == next.address as u64;
        if goes_on {
            self.len += next.len;
        }
        goes_on
    }

    /// What of it lies in `[start, end)` of the payload.
    pub(crate) fn within(&self, start: u64, end: u64) -> Option<Self> {
        let (from, to) = (self.start.max(start), self.end().min(end));
        // An offset into memory that exists.
        #[allow(clippy::cast_possible_truncation)]
        let address = self.address + from.checked_sub(self.start)? as usize;
        (from < to).then_some(Self { start: from, len: to - from, address })
    }
}

/// Destinations for a payload, in payload order.
#[derive(Debug)]
pub(crate) struct Plan {
    pieces: Vec<Piece>,
    payload_len: u64,
    /// Bytes per block, that is, per checksum.
    grain: u64,
    /// Whether the destination is memory that nobody touched yet.
    pub(crate) fresh: bool,
}

impl Plan {
    /// Sorts `pieces` and merges neighbours; overlapping or out of range pieces are refused.
    pub(crate) fn new(mut pieces: Vec<Piece>, payload_len: u64, fresh: bool) -> Result<Self, Error> {
        pieces.retain(|p| p.len > 0);
        pieces.sort_unstable_by_key(|p| p.start);
        let mut merged: Vec<Piece> = Vec::with_capacity(pieces.len().min(1 << 16));
        for piece in pieces {
            let end = piece.start.checked_add(piece.len).filter(|&end| end <= payload_len);
            let before = merged.last_mut();
            if end.is_none() || before.as_ref().is_some_and(|b| b.end() > piece.start) {
                return Err(Error::new(ErrorKind::Invalid, "two destinations for one byte, or one past the payload"));
            }
            if !before.is_some_and(|before| before.join(&piece)) {
                merged.push(piece);
            }
        }
        Ok(Self { pieces: merged, payload_len, grain: BLOCK_SIZE, fresh })
    }

    /// The same with blocks of `grain` bytes.
    pub(crate) fn grained(self, grain: u64) -> Self {
        Self { grain, ..self }
    }

    /// The coarsest blocks that hold hardly more than what is wanted, at most a 64th; the finest if there are none.
    pub(crate) fn fitting_grain(&self) -> u64 {
        let wanted: u64 = self.pieces.iter().map(|p| p.len).sum();
        let held = |grain| {
            let (mut bytes, mut end) = (0, 0);
            for piece in &self.pieces {
                let (first, last) = (piece.start / grain, piece.end().div_ceil(grain));
                bytes += grain * last.saturating_sub(first.max(end));
                end = last.max(end);
            }
            bytes
        };
        let fits = |grain: &u64| held(*grain) <= wanted + wanted / 64;
        GRAINS.into_iter().find(fits).unwrap_or(GRAINS[GRAINS.len() - 1])
    }

    pub(crate) fn grain(&self) -> u64 {
        self.grain
    }

    /// How many blocks are received at once: as many as one of 1 MiB has.
    pub(crate) fn stride(&self) -> u64 {
        BLOCK_SIZE / self.grain
    }

    /// Payload bytes that have a destination.
    pub(crate) fn wanted(&self) -> u64 {
        self.pieces.iter().map(|p| p.len).sum()
    }

    /// The blocks that hold at least one wanted byte, as ascending runs `[first, end)`. Runs with at most `gap` bytes of
    /// blocks between them are one.
    pub(crate) fn wanted_blocks(&self, gap: u64) -> Vec<(u64, u64)> {
        let mut runs: Vec<(u64, u64)> = Vec::new();
        for piece in &self.pieces {
            let (first, end) = (piece.start / self.grain, piece.end().div_ceil(self.grain));
            match runs.last_mut() {
                Some(run) if first <= run.1 + gap / self.grain => run.1 = run.1.max(end),
                _ => runs.push((first, end)),
            }
        }
        runs
    }

    /// The wanted blocks of block `have` and those behind it, as runs.
    pub(crate) fn missing_blocks(&self, have: u64) -> Vec<(u64, u64)> {
        let runs = self.wanted_blocks(0).into_iter();
        runs.map(|(first, end)| (first.max(have), end)).filter(|(first, end)| first < end).collect()
    }

    /// The bytes of whole blocks in `runs`.
    pub(crate) fn held(&self, runs: &[(u64, u64)]) -> u64 {
        runs.iter().map(|(first, end)| end - first).sum::<u64>() * self.grain
    }

    pub(crate) fn block_bounds(&self, block: u64) -> (u64, u64) {
        (block * self.grain, ((block + 1) * self.grain).min(self.payload_len))
    }

    /// Calls `with` with the destination slices of payload `[start, end)`; bytes nobody wants go to `sink`, which must
    /// be as long.
    pub(crate) fn with_slices<R>(
        &self,
        start: u64,
        end: u64,
        sink: &mut [u8],
        with: impl FnOnce(&mut [IoSliceMut<'_>]) -> R,
    ) -> R {
        let mut slices = Vec::with_capacity(16);
        let mut sink = sink;
        let mut at = start;
        let mut index = self.pieces.partition_point(|p| p.end() <= start);
        // Every length here is at most that of the range, which a sink has memory for.
        #[allow(clippy::cast_possible_truncation)]
        while at < end {
            match self.pieces.get(index).filter(|p| p.start < end) {
                Some(piece) if piece.start <= at => {
                    let stop = piece.end().min(end);
                    let address = piece.address + (at - piece.start) as usize;
                    // SAFETY: `Piece::new` promises writable memory of ours alone; ranges of one plan are handed to one
                    // lane at a time and pieces do not overlap, so no two slices to the same bytes exist at once.
                    slices.push(IoSliceMut::new(unsafe {
                        std::slice::from_raw_parts_mut(address as *mut u8, (stop - at) as usize)
                    }));
                    at = stop;
                    index += 1;
                }
                next => {
                    let stop = next.map_or(end, |p| p.start);
                    let (gap, rest) = sink.split_at_mut((stop - at) as usize);
                    slices.push(IoSliceMut::new(gap));
                    sink = rest;
                    at = stop;
                }
            }
        }
        with(&mut slices)
    }

    /// Asks for the pages behind payload `[start, end)` ahead of the bytes.
    pub(crate) fn populate(&self, start: u64, end: u64) {
        let index = self.pieces.partition_point(|p| p.end() <= start);
        // Many pieces may share a page: one call for as many as follow one another.
        let mut pages = 0..0;
        for piece in self.pieces[index..].iter().take_while(|p| p.start < end) {
            let (first, last) = (piece.start.max(start), piece.end().min(end));
            #[allow(clippy::cast_possible_truncation)]
            let (address, len) = (piece.address + (first - piece.start) as usize, (last - first) as usize);
            let (low, high) = (address & !(PAGE - 1), (address + len).next_multiple_of(PAGE));
            if (pages.start..=pages.end).contains(&low) {
                pages.end = high.max(pages.end);
            } else if last - first > ALIGNMENT {
                crate::memory::populate(pages.start, pages.end);
                pages = low..high;
            }
            // A scalar lies apart from what is around it in the payload, and a call would cost what a fault does.
        }
        crate::memory::populate(pages.start, pages.end);
    }
}

/// Ranges of whole blocks that still have to come, shared by all lanes.
#[derive(Debug)]
pub(crate) struct Queue {
    state: Mutex<QueueState>,
    done: std::sync::Condvar,
}

#[derive(Debug)]
struct QueueState {
    waiting: VecDeque<(u64, u64)>,
    running: usize,
    failed: Option<Error>,
}

impl Queue {
    /// Cuts runs of blocks into ranges of at most `blocks_per_range`.
    pub(crate) fn new(runs: &[(u64, u64)], blocks_per_range: u64) -> Self {
        let mut waiting = VecDeque::new();
        for &(first, end) in runs {
            let mut at = first;
            while at < end {
                let stop = (at + blocks_per_range).min(end);
                waiting.push_back((at, stop));
                at = stop;
            }
        }
        Self { state: Mutex::new(QueueState { waiting, running: 0, failed: None }), done: std::sync::Condvar::new() }
    }

    fn state(&self) -> MutexGuard<'_, QueueState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The next range; waits while others still have some that may come back, and calls `idle` now and then meanwhile.
    /// `None` when all is done or has failed.
    pub(crate) fn take(&self, idle: impl Fn()) -> Option<Taken<'_>> {
        let mut state = self.state();
        loop {
            if state.failed.is_some() {
                return None;
            }
            if let Some((at, end)) = state.waiting.pop_front() {
                state.running += 1;
                return Some(Taken { queue: self, at, end });
            }
            if state.running == 0 {
                return None;
            }
            let waited = self.done.wait_timeout(state, IDLE).unwrap_or_else(PoisonError::into_inner);
            state = if waited.1.timed_out() {
                drop(waited.0);
                idle();
                self.state()
            } else {
                waited.0
            };
        }
    }

    /// Ends the transfer; the first error is the one reported.
    pub(crate) fn fail(&self, error: Error) {
        let mut state = self.state();
        state.failed.get_or_insert(error);
        drop(state);
        self.done.notify_all();
    }

    pub(crate) fn has_failed(&self) -> bool {
        self.state().failed.is_some()
    }

    pub(crate) fn finish(self) -> Result<(), Error> {
        let state = self.state.into_inner().unwrap_or_else(PoisonError::into_inner);
        match state.failed {
            Some(error) => Err(error),
            None if state.waiting.is_empty() => Ok(()),
            None => Err(Error::new(ErrorKind::Connect, "every lane gave up before all bytes had come")),
        }
    }
}

/// A range of blocks that a lane works on. When it is dropped, be it by a panic, what is left goes back for another lane:
/// nobody waits for a lane that is gone.
#[derive(Debug)]
pub(crate) struct Taken<'a> {
    queue: &'a Queue,
    /// The first block that is not here yet.
    pub(crate) at: u64,
    pub(crate) end: u64,
}

impl Drop for Taken<'_> {
    fn drop(&mut self) {
        let mut state = self.queue.state();
        state.running -= 1;
        if self.at < self.end {
            state.waiting.push_front((self.at, self.end));
        }
        drop(state);
        self.queue.done.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;

    use super::*;

    #[test]
    fn neighbours_in_payload_and_memory_are_one_piece_and_no_others_are() {
        // SAFETY: nobody writes to these addresses.
        let piece = |start, len, address| unsafe { Piece::new(start, len, address) };
        for (next, joined) in [
            (piece(164, 8, 1064), true),
            (piece(164, 0, 1064), true),
            (piece(165, 8, 1064), false),
            (piece(164, 8, 1065), false),
            (piece(163, 8, 1063), false),
            (piece(165, 8, 1065), false),
        ] {
            let mut first = piece(100, 64, 1000);
            assert_eq!(first.join(&next), joined, "{next:?}");
            assert_eq!(first.len, if joined { 64 + next.len } else { 64 }, "{next:?}");
        }
    }

    #[test]
    fn what_is_left_of_a_range_comes_back_and_what_is_done_does_not() {
        let queue = Queue::new(&[(0, 5), (9, 10)], 3);
        let bounds = |taken: &Taken<'_>| (taken.at, taken.end);
        let mut first = queue.take(|| ()).unwrap();
        assert_eq!(bounds(&first), (0, 3));
        first.at = 2;
        drop(first);
        for expected in [(2, 3), (3, 5), (9, 10)] {
            let mut taken = queue.take(|| ()).unwrap();
            assert_eq!(bounds(&taken), expected);
            taken.at = taken.end;
        }
        assert!(queue.take(|| ()).is_none());
        queue.finish().unwrap();
    }

    #[test]
    fn a_panic_gives_the_range_back_to_those_who_wait() {
        let queue = Queue::new(&[(0, 4)], 4);
        let (holds, held) = mpsc::channel();
        std::thread::scope(|scope| {
            let panics = scope.spawn(|| {
                let mut taken = queue.take(|| ()).unwrap();
                taken.at = 1;
                holds.send(()).unwrap();
                std::thread::sleep(Duration::from_millis(50));
                panic!("as this test has it");
            });
            held.recv().unwrap();
            let mut taken = queue.take(|| ()).unwrap();
            assert_eq!((taken.at, taken.end), (1, 4));
            taken.at = taken.end;
            assert!(panics.join().is_err());
        });
        queue.finish().unwrap();
    }
}
