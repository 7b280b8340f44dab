//! The ranges of whole blocks that are still to come, shared by the threads that bring them.
//!
//! Invariants:
//!
//! * a block is in the queue or in one [`Taken`] range, never in both: at most one thread works on it;
//! * a [`Taken`] that is dropped gives back the blocks that are not done, also when its thread panics;
//! * [`Queue::take`] returns `None` only when nothing is left that could come back, or after a failure;
//! * the first failure is the one reported.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Condvar, Mutex, PoisonError};
use std::time::{Duration, Instant};

use crate::error::{Error, ErrorKind};
use crate::sync::Locked;

/// How often a lane with nothing to do looks at the others.
const IDLE: Duration = Duration::from_millis(100);

/// What a thread finds that looks for something of its own choice.
#[derive(Debug)]
pub(crate) enum Next<'a> {
    Taken(Taken<'a>),
    /// Nothing that it chose, though something may come back.
    Later,
    /// All is done, or has failed.
    Over,
}

/// Ranges of whole blocks that still have to come, shared by all lanes.
#[derive(Debug)]
pub(crate) struct Queue {
    state: Mutex<QueueState>,
    done: Condvar,
    /// Whether there was a failure, for lanes that look after each block.
    has_failed: AtomicBool,
}

#[derive(Debug)]
struct QueueState {
    waiting: VecDeque<(u64, u64)>,
    running: usize,
    failed: Option<Error>,
    /// After [`Queue::taper`]: a range may have 1 / `parts` of the blocks that are left.
    parts: Option<u64>,
}

impl QueueState {
    /// The next range, or the beginning of it.
    fn pop(&mut self) -> Option<(u64, u64)> {
        let (at, end) = self.waiting.pop_front()?;
        let stop = end.min(at.saturating_add(self.max_range_blocks(end - at)));
        if stop < end {
            self.waiting.push_front((stop, end));
        }
        Some((at, stop))
    }

    /// How many blocks the next range may have. `taken` blocks that are left are not in `waiting` any more.
    fn max_range_blocks(&self, taken: u64) -> u64 {
        // With at least that many ranges, each is short enough as it is.
        let Some(parts) = self.parts.filter(|&parts| (self.waiting.len() as u64) < parts) else { return u64::MAX };
        let left = taken + self.waiting.iter().map(|(first, end)| end - first).sum::<u64>();
        (left / parts).max(1)
    }
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
        let state = QueueState { waiting, running: 0, failed: None, parts: None };
        Self { state: Mutex::new(state), done: Condvar::new(), has_failed: AtomicBool::new(false) }
    }

    /// From here on ranges get shorter towards the end: each has at most 1 / `parts` of the blocks that are left. So lanes
    /// of different speeds end together, and what one gives back is shared out.
    pub(crate) fn taper(&self, parts: u64) {
        self.state.locked().parts = Some(parts.max(1));
    }

    /// The same queue beginning at the range that `seed` says.
    pub(crate) fn beginning_at(self, seed: [u8; 8]) -> Self {
        let mut state = self.state.locked();
        let ranges = state.waiting.len().max(1) as u64;
        state.waiting.rotate_left(usize::try_from(u64::from_ne_bytes(seed) % ranges).unwrap_or(0));
        drop(state);
        self
    }

    /// The next range; waits while others still have some that may come back, and calls `idle` now and then meanwhile.
    /// `None` when all is done or has failed.
    pub(crate) fn take(&self, idle: impl Fn()) -> Option<Taken<'_>> {
        let mut state = self.state.locked();
        loop {
            if state.failed.is_some() {
                return None;
            }
            if let Some((at, end)) = state.pop() {
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
                self.state.locked()
            } else {
                waited.0
            };
        }
    }

    /// The part of a range that `choose` wants. It is given all ranges that are waiting, and returns the number of one of
    /// them and a part of it that is not empty. It is not called when all is done.
    pub(crate) fn next(&self, choose: impl FnOnce(&[(u64, u64)]) -> Option<(usize, (u64, u64))>) -> Next<'_> {
        let mut state = self.state.locked();
        if state.failed.is_some() || (state.waiting.is_empty() && state.running == 0) {
            return Next::Over;
        }
        let Some((index, (at, end))) = choose(state.waiting.make_contiguous()) else { return Next::Later };
        let within = |&(first, behind): &(u64, u64)| first <= at && at < end && end <= behind;
        let Some((first, behind)) = state.waiting.get(index).copied().filter(within) else { return Next::Later };
        let end = end.min(at.saturating_add(state.max_range_blocks(0)));
        state.waiting.remove(index);
        for left in [(end, behind), (first, at)].into_iter().filter(|left| left.0 < left.1) {
            state.waiting.insert(index, left);
        }
        state.running += 1;
        Next::Taken(Taken { queue: self, at, end })
    }

    /// Waits for `length`, or until all is done or has failed.
    pub(crate) fn rest(&self, length: Duration) {
        let (started, mut state) = (Instant::now(), self.state.locked());
        while state.failed.is_none() && (!state.waiting.is_empty() || state.running > 0) {
            let Some(left) = length.checked_sub(started.elapsed()).filter(|left| !left.is_zero()) else { return };
            state = self.done.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    /// Waits until something changes, or for `at_most`; not at all after a failure.
    pub(crate) fn wait(&self, at_most: Duration) {
        let state = self.state.locked();
        if state.failed.is_none() {
            drop(self.done.wait_timeout(state, at_most));
        }
    }

    /// Wakes those that wait, since there may be something for them.
    pub(crate) fn wake(&self) {
        self.done.notify_all();
    }

    /// Ends the transfer; the first error is the one reported.
    pub(crate) fn fail(&self, error: Error) {
        let mut state = self.state.locked();
        state.failed.get_or_insert(error);
        self.has_failed.store(true, Ordering::Relaxed);
        drop(state);
        self.done.notify_all();
    }

    /// Whether some thread has reported a failure, so that the others may stop in the middle of a range.
    pub(crate) fn has_failed(&self) -> bool {
        self.has_failed.load(Ordering::Relaxed)
    }

    /// Whether nothing is left that a thread could still bring, or the transfer has failed.
    pub(crate) fn is_over(&self) -> bool {
        let state = self.state.locked();
        state.failed.is_some() || (state.waiting.is_empty() && state.running == 0)
    }

    /// The outcome, once every thread has left: the first failure, or an error if ranges are left over.
    pub(crate) fn finish(self) -> Result<(), Error> {
        let state = self.state.into_value();
        match state.failed {
            Some(error) => Err(error),
            None if state.waiting.is_empty() => Ok(()),
            None => Err(Error::new(ErrorKind::Connect, "every lane gave up before all bytes had come")),
        }
    }
}

/// A range of blocks that a lane works on. When it is dropped, even by a panic, its remaining blocks go back to the
/// queue for another lane.
#[derive(Debug)]
pub(crate) struct Taken<'a> {
    queue: &'a Queue,
    /// The first block that is not here yet.
    pub(crate) at: u64,
    pub(crate) end: u64,
}

impl Drop for Taken<'_> {
    fn drop(&mut self) {
        let mut state = self.queue.state.locked();
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
    fn a_part_of_choice_leaves_the_rest_of_its_range() {
        let queue = Queue::new(&[(0, 30)], 10);
        let Next::Taken(mut taken) = queue.next(|waiting| {
            assert_eq!(waiting, [(0, 10), (10, 20), (20, 30)]);
            Some((1, (13, 15)))
        }) else {
            panic!("nothing was taken");
        };
        for wrong in [(0, (0, 0)), (0, (5, 11)), (4, (20, 21)), (3, (9, 21))] {
            assert!(matches!(queue.next(|_| Some(wrong)), Next::Later), "{wrong:?}");
        }
        assert!(matches!(queue.next(|_| None), Next::Later));
        taken.at = 14;
        drop(taken);
        let mut left = Vec::new();
        while let Some(mut taken) = queue.take(|| ()) {
            left.push((taken.at, taken.end));
            taken.at = taken.end;
        }
        assert_eq!(left, [(14, 15), (0, 10), (10, 13), (15, 20), (20, 30)]);
        assert!(matches!(queue.next(|_| panic!("all is done")), Next::Over));
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
