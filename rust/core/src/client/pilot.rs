//! What the thread does that runs the lanes of a transfer in a swarm: it looks whether taking part is worth it, speaks to
//! the tracker while all lanes are busy, and starts lanes to relays.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread::{self, Scope, Thread};
use std::time::Duration;

use super::blocks::block_len;
use super::lane::Transfer;
use super::swarm::{NewRelay, RelayView, Swarm};
use crate::error::{Error, ErrorKind};
use crate::memory::zeroed;
use crate::payload::Next;

/// How often it looks.
const LOOK: Duration = Duration::from_millis(50);
/// Where the source is gone, a relay that fails is tried so often, with pauses.
const MOST_FAILURES: u32 = 4;
const PAUSE: Duration = Duration::from_millis(200);

/// The thread that runs the lanes, and how many lanes there are.
#[derive(Debug)]
pub(super) struct Pilot {
    thread: Thread,
    lanes: AtomicUsize,
}

impl Pilot {
    /// The thread that calls.
    pub(super) fn here() -> Self {
        Self { thread: thread::current(), lanes: AtomicUsize::new(0) }
    }

    /// A lane is about to run.
    pub(super) fn note_coming(&self) {
        self.lanes.fetch_add(1, Ordering::AcqRel);
    }

    /// A lane has ended.
    pub(super) fn note_gone(&self) {
        if self.lanes.fetch_sub(1, Ordering::AcqRel) == 1 {
            self.thread.unpark();
        }
    }

    /// Waits for a while, or until no lane runs; returns whether some do.
    fn wait(&self) -> bool {
        if self.lanes.load(Ordering::Acquire) > 0 {
            thread::park_timeout(LOOK);
        }
        self.lanes.load(Ordering::Acquire) > 0
    }
}

impl Transfer<'_> {
    /// Accompanies the lanes to their end.
    pub(super) fn accompany<'scope>(&'scope self, scope: &'scope Scope<'scope, '_>, swarm: &'scope Swarm<'scope>) {
        while self.pilot.wait() {
            let bytes = self.received.bytes();
            let joins = swarm.is_worth_joining(bytes);
            let mut need = None;
            if let Next::Over = self.queue.next(|waiting| {
                need = swarm.question(waiting, joins);
                None
            }) {
                continue;
            }
            if let Some(need) = need {
                self.ask_tracker(scope, swarm, need);
            }
        }
    }

    /// Asks the tracker for the blocks in `need`, and starts lanes to the relays that it names.
    pub(super) fn ask_tracker<'scope>(
        &'scope self,
        scope: &'scope Scope<'scope, '_>,
        swarm: &'scope Swarm<'scope>,
        need: Vec<(u64, u64)>,
    ) {
        let (relays, are_new) = swarm.ask(need);
        for relay in relays {
            let builder = thread::Builder::new().name(format!("tensorferry-relay-{}", relay.lane));
            // Without a thread for it, it is a relay less.
            let _ = builder.spawn_scoped(scope, move || self.run_relay(swarm, &relay));
        }
        if are_new {
            self.watch.recall();
        }
        self.queue.wake();
    }

    /// Fetches from `relay` what it has, until nothing is left to fetch or it fails; without the source, until it has
    /// failed a few times. Then it is set aside: for good if its bytes were wrong, else until the tracker names it again.
    fn run_relay(&self, swarm: &Swarm<'_>, relay: &NewRelay) {
        let source = &relay.source;
        self.received.note_relay(self.sources.len() + relay.number, source.url.authority());
        let index = self.watch.relay_lane(relay.lane);
        let (mut was_corrupt, mut failures) = (false, 0);
        while let Err(error) = self.fetch_from(swarm, relay, index) {
            let slow = self.watch.end(index);
            was_corrupt = error.kind() == ErrorKind::Corrupt;
            failures += 1;
            // It may leave when it likes, and a connection that is cut at the end is no trouble.
            if (slow.is_some() || was_corrupt) && !swarm.limits.cancel.is_cancelled() {
                self.received.note_trouble(source.url.authority(), &error);
            }
            // Without the source, nobody names it again.
            let goes_on = !was_corrupt && failures < MOST_FAILURES && swarm.receiver().is_free();
            if !goes_on || !swarm.limits.pause(PAUSE, || self.queue.is_over()) {
                break;
            }
        }
        swarm.set_aside(relay, was_corrupt);
        self.queue.wake();
    }

    /// Fetches what the relay has and this receive lacks, range by range, until all is done or an error ends it.
    fn fetch_from(&self, swarm: &Swarm<'_>, relay: &NewRelay, index: usize) -> Result<(), Error> {
        let from = (self.sources.len() + relay.number, &relay.source, &swarm.limits);
        let (mut connection, mut view, mut wait) = (None, RelayView::new(), false);
        let mut sink = zeroed(block_len())?;
        loop {
            view.refresh(swarm, relay, wait)?;
            wait = true;
            while wait || !view.is_old() {
                let mut range = match self
                    .queue
                    .next(|all| swarm.receiver().next_from_relay(swarm.now(), relay.number, all, swarm.unit))
                {
                    Next::Taken(range) => range,
                    Next::Later => break,
                    Next::Over => return Ok(()),
                };
                wait = false;
                self.fetch_range(index, from, &mut connection, (&mut range, &mut sink), || ())?;
                if self.watch.end(index).is_some() {
                    // It was shut down when all had come.
                    connection = None;
                }
            }
        }
    }
}
