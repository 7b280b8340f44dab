//! A lane: one thread with one connection that works through the queue of ranges.
//!
//! A range that fails goes back into the queue, without the blocks that had come. The lane then tries the next source,
//! waits a little longer each time, and gives up after [`MAX_FAILURES`] failures in a row; the last lane to give up
//! fails the transfer. A lane whose thread panics counts as one that gave up.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread::{self, Scope};
use std::time::{Duration, Instant};

use tensorferry_wire::digest::Algorithm;

use super::Source;
use super::blocks::block_len;
use super::connection::Connection;
use super::ledger::BlockLedger;
use super::limits::{Limits, retry_pause};
use super::pilot::Pilot;
use super::rails::RailLanes;
use super::stragglers::{StragglerMonitor, format_rate, rate};
use super::swarm::Swarm;
use crate::error::{Error, ErrorKind};
use crate::memory::zeroed;
use crate::payload::{Next, Plan, Queue, Taken};
use crate::swarm::FromSource;

/// Failures in a row, without one block in between, after which a lane gives up.
const MAX_FAILURES: u32 = 4;
/// How often lanes that wait for relays look at slow ones.
const IDLE: Duration = Duration::from_millis(100);

/// A lane that runs. One whose thread panics leaves, too: the others go on with its range, and the last one says so.
struct Present<'a>(&'a Transfer<'a>);

impl Drop for Present<'_> {
    fn drop(&mut self) {
        self.0.pilot.note_gone();
        // Nothing here may panic: the thread is unwinding already.
        if thread::panicking() {
            let message = "the last lane panicked: a bug of tensorferry; stderr says where";
            self.0.leave(Error::new(ErrorKind::System, message));
        }
    }
}

/// The state that all lanes of one transfer share.
pub(super) struct Transfer<'a> {
    pub(super) plan: &'a Plan,
    pub(super) queue: &'a Queue,
    pub(super) sources: &'a [Source],
    pub(super) primary: usize,
    /// Whether the lanes begin at different sources, or all at the primary one.
    pub(super) spread: bool,
    /// The checkpoint's key in paths.
    pub(super) key: &'a str,
    pub(super) payload_start: u64,
    pub(super) payload_len: u64,
    pub(super) header_digest: u64,
    pub(super) algorithm: &'a Algorithm,
    pub(super) limits: &'a Limits,
    pub(super) received: &'a BlockLedger,
    pub(super) watch: StragglerMonitor,
    /// Other receivers of the same snapshot, if this takes part in a swarm.
    pub(super) swarm: Option<&'a Swarm<'a>>,
    /// Lanes over the other addresses of the sources.
    pub(super) rails: &'a RailLanes,
    pub(super) alive: AtomicUsize,
    /// Where the thread waits that runs the lanes.
    pub(super) pilot: Pilot,
}

impl Transfer<'_> {
    /// Runs `lanes` lanes, the first ones on `connections`, each in a thread that is made as `builder` says. Returns
    /// the connections that are still good.
    pub(super) fn run_all(
        &self,
        lanes: usize,
        connections: Vec<Connection>,
        builder: impl Fn(usize) -> thread::Builder,
    ) -> Vec<Connection> {
        thread::scope(|scope| {
            let mut threads = Vec::with_capacity(lanes);
            let mut connections = connections.into_iter();
            for index in 0..lanes {
                let first = connections.next();
                self.pilot.note_coming();
                match builder(index).spawn_scoped(scope, move || self.run(scope, index, first)) {
                    Ok(thread) => threads.push(thread),
                    // With fewer lanes it takes longer, and that is all.
                    Err(e) => {
                        self.pilot.note_gone();
                        self.leave(Error::caused(ErrorKind::System, "cannot start a thread for a lane", e));
                    }
                }
            }
            (0..self.sources.len()).for_each(|number| self.begin_rails(scope, number));
            if let Some(swarm) = self.swarm {
                self.accompany(scope, swarm);
            }
            let left = threads.into_iter().filter_map(|thread| thread.join().ok().flatten()).collect();
            self.rails.close();
            if let Some(swarm) = self.swarm {
                swarm.close();
            }
            left
        })
    }

    /// Fetches ranges until there are none. A range that fails goes back into the queue; a lane that keeps failing
    /// leaves the work to the others, and the last one to leave fails the transfer. Returns the connection if it is
    /// still good.
    fn run<'scope>(
        &'scope self,
        scope: &'scope Scope<'scope, '_>,
        index: usize,
        mut connection: Option<Connection>,
    ) -> Option<Connection> {
        let _present = Present(self);
        let mut failures = 0;
        let mut turn = if self.spread { index } else { 0 };
        let mut sink = match zeroed(block_len()) {
            Ok(sink) => sink,
            // Another lane may have got its buffer; the last one to leave fails the transfer.
            Err(error) => {
                self.leave(error);
                return None;
            }
        };
        while let Some(mut range) = self.take(scope) {
            let first = range.at;
            // After a failure the lane tries the next source, and stays there.
            let origin = (self.primary + turn) % self.sources.len();
            let source = &self.sources[origin];
            let from = (origin, source, self.limits);
            // Not once the range is through: that takes a second where the link is slow.
            let begin_rails = || self.begin_rails(scope, origin);
            let result = self.fetch_range(index, from, &mut connection, (&mut range, &mut sink), begin_rails);
            let (slow, was_recalled) = (self.watch.end(index), self.watch.was_recalled(index));
            let Err(mut error) = result else {
                failures = 0;
                if let Some(brought) = &connection {
                    source.note_answered(brought);
                }
                if slow.is_some() || was_recalled {
                    // It was shut down when all had come.
                    connection = None;
                }
                continue;
            };
            if was_recalled {
                continue;
            }
            if let Some(rate) = slow {
                let text = format!("timed out: at {} it is far slower than the other connections", format_rate(rate));
                error = Error::new(ErrorKind::Timeout, text);
            }
            if error.kind() != ErrorKind::Cancelled {
                error = self.with_position(error, source, &range);
            }
            // Whatever the error of shared memory was, the range is fetched over the network afterwards.
            let connection = connection.take();
            // The source answers but is still copying its state: that is no fault, and only the deadline ends the wait.
            let filling = error.is_timeout() && connection.as_ref().is_some_and(Connection::is_filling);
            let by_network = connection.as_ref().filter(|ended| !filling && !ended.is_same_host());
            let is_hasty = by_network.is_some_and(|ended| source.note_failed(ended, &error)) && slow.is_none();
            let around_the_network = !filling && connection.is_some_and(|c| c.is_same_host());
            if around_the_network {
                source.give_up_same_host();
            }
            turn += 1;
            // A lane that was merely slow is not at fault twice, and one that would have waited longer is not at fault.
            let merely_slow = range.at > first || slow.is_some() || filling;
            failures = if merely_slow { 1 } else { failures + u32::from(!is_hasty || failures == 0) };
            let elsewhere = (self.sources.len() > 1 || around_the_network) && error.kind() != ErrorKind::Cancelled;
            let over = self.limits.left().is_err();
            let fatal = !(error.is_transient() || elsewhere) || failures >= MAX_FAILURES;
            let can_go_on = |swarm: &Swarm<'_>| swarm.receiver().note_source_lost(swarm.now());
            if fatal && !over && self.swarm.is_some_and(can_go_on) {
                self.received.note_trouble(source.url.authority(), &error);
                // It is asked once more when relays bring nothing.
                failures = MAX_FAILURES - 1;
                continue;
            }
            if over || !(error.is_transient() || elsewhere) {
                self.queue.fail(error);
                break;
            }
            let pause = retry_pause(&error, failures, Duration::from_millis(20 << (2 * failures)));
            self.received.note_retry();
            if !around_the_network {
                self.received.note_trouble(source.url.authority(), &error);
            }
            if failures >= MAX_FAILURES {
                self.leave(error);
                return None;
            }
            drop(range);
            if !around_the_network {
                self.limits.pause(pause, || self.queue.has_failed());
            }
        }
        connection.filter(Connection::is_reusable)
    }

    /// What a lane to a source fetches next: anything, or in a swarm, what is left to the source. `None` when all is
    /// done or has failed; in a swarm it fails here when the deadline has passed. Starts lanes to relays that the
    /// tracker names.
    pub(super) fn take<'scope>(&'scope self, scope: &'scope Scope<'scope, '_>) -> Option<Taken<'scope>> {
        self.watch.cut_silent();
        let Some(swarm) = self.swarm else { return self.queue.take(|| self.watch.cut_slow()) };
        let mut looked = Instant::now();
        loop {
            if let Err(over) = self.limits.left() {
                let source = self.sources[self.primary].url.authority();
                self.queue.fail(over.at(&format!("{} from {source}, {}", self.path(), self.progress())));
                return None;
            }
            let mut next = None;
            swarm.receiver().note_bytes(swarm.now(), self.received.bytes());
            let found = self.queue.next(|waiting| match swarm.receiver().next_from_source(swarm.now(), waiting) {
                FromSource::Take(index, run) => Some((index, run)),
                other => {
                    next = Some(other);
                    None
                }
            });
            match (found, next) {
                (Next::Taken(range), _) => return Some(range),
                (Next::Over, _) => return None,
                (Next::Later, Some(FromSource::Ask(need))) => self.ask_tracker(scope, swarm, need),
                (Next::Later, wait) => {
                    let Some(FromSource::Wait(wait)) = wait else { continue };
                    self.queue.wait(wait);
                    if looked.elapsed() >= IDLE {
                        self.watch.cut_slow();
                        looked = Instant::now();
                    }
                }
            }
        }
    }

    /// A lane is gone because of `error`, which fails the transfer if it was the last.
    fn leave(&self, error: Error) {
        if self.alive.fetch_sub(1, Ordering::AcqRel) == 1 {
            self.queue.fail(error);
        }
    }

    /// `error` with what was being fetched, from where, and how far the transfer has come.
    fn with_position(&self, error: Error, source: &Source, range: &Taken<'_>) -> Error {
        let (start, stop) = (self.plan.block_bounds(range.at).0, self.plan.block_bounds(range.end - 1).1);
        let (source, progress) = (source.url.authority(), self.progress());
        error.at(&format!("{} from {source}, payload bytes {start}-{stop}, {progress}", self.path()))
    }

    /// How far the transfer has come.
    fn progress(&self) -> String {
        let bytes = self.received.bytes();
        let pace = format_rate(rate(bytes, self.limits.started.elapsed()));
        format!("after {bytes} of {} bytes at {pace}", self.payload_len)
    }

    pub(super) fn path(&self) -> String {
        format!("{}.safetensors", self.key)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::sync::atomic::AtomicBool;
    use std::time::Instant;

    use bytes::Bytes;
    use tensorferry_wire::digest::block_count;
    use tensorferry_wire::dtype::Dtype;

    use super::super::{Cancel, FetchOptions, Remote};
    use super::*;
    use crate::{Item, Publication, Server, ServerConfig, Stability};

    const LANES: usize = 3;

    /// Runs three lanes on a source that is well. Those that `watch` does not know panic when they get a range; for the
    /// last `threadless` there is no thread.
    fn run(known: usize, threadless: usize) -> Result<u64, Error> {
        run_beside(known, threadless, |_, _| ()).map(|(bytes, _)| bytes)
    }

    /// As [`run`], while `beside` runs until it is told that the lanes have ended. Returns the bytes, and how many ranges
    /// were fetched again.
    fn run_beside(
        known: usize,
        threadless: usize,
        beside: impl Fn(&StragglerMonitor, &AtomicBool) + Sync,
    ) -> Result<(u64, u64), Error> {
        let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
        let server = Server::bind(&ServerConfig::default(), runtime.handle()).unwrap();
        let bytes = Bytes::from(vec![7; 12 * block_len()]);
        let item = Item::bytes("w", Dtype::U8, &[bytes.len() as u64], bytes);
        let publication = Publication::new(Vec::new(), vec![item], Stability::Private, Box::new(())).unwrap();
        server.store().publish(1, publication);
        let url = server.url("127.0.0.1");
        let header = Remote::open(&[&url], 1, FetchOptions::within(Duration::from_secs(20))).unwrap().header().clone();

        let started = Instant::now();
        let limits = Limits {
            started,
            deadline: started + Duration::from_secs(20),
            stall: Duration::from_secs(5),
            cancel: Cancel::new(),
        };
        let algorithm = Algorithm::default();
        let payload_len = header.payload_len();
        let header = header.encode(crate::memory::ALIGNMENT).unwrap();
        let sources = [Source::parse(&url, false, None).unwrap()];
        let plan = Plan::new(Vec::new(), payload_len).unwrap();
        let queue = Queue::new(&[(0, block_count(payload_len))], 1);
        let received = BlockLedger::new(&[(0, 12)], Arc::default()).expect("twelve blocks");
        let rails = RailLanes::new(1, 0, 0, &limits);
        let transfer = Transfer {
            plan: &plan,
            queue: &queue,
            sources: &sources,
            primary: 0,
            spread: true,
            key: "1",
            payload_start: header.len() as u64,
            payload_len,
            header_digest: algorithm.checksum(&header),
            algorithm: &algorithm,
            limits: &limits,
            received: &received,
            watch: StragglerMonitor::new((known, 0), 0),
            swarm: None,
            rails: &rails,
            alive: AtomicUsize::new(LANES),
            pilot: Pilot::here(),
        };
        // A stack of more than all addresses there are.
        let impossible = || thread::Builder::new().stack_size(1 << 60);
        let builder = |index| if index < LANES - threadless { thread::Builder::new() } else { impossible() };
        let over = AtomicBool::new(false);
        thread::scope(|scope| {
            scope.spawn(|| beside(&transfer.watch, &over));
            transfer.run_all(LANES, Vec::new(), builder);
            over.store(true, Ordering::Relaxed);
        });
        queue.finish().map(|()| (received.take_bytes(), received.take_retries()))
    }

    #[test]
    fn a_connection_that_is_shut_down_when_its_range_has_come_is_no_fault() {
        for recalled in [true, false] {
            let cuts = AtomicUsize::new(0);
            let cut = |watch: &StragglerMonitor, over: &AtomicBool| {
                while !over.load(Ordering::Relaxed) {
                    cuts.fetch_add(usize::from(watch.cut_one_that_is_through(recalled)), Ordering::Relaxed);
                }
            };
            // It may take a few rounds to come between the last byte of a range and its end.
            let rounds = (0..100).take_while(|_| cuts.load(Ordering::Relaxed) < 10);
            let retries: u64 = rounds.map(|_| run_beside(LANES, 0, cut).unwrap().1).sum();
            assert_eq!((retries, cuts.into_inner() > 0), (0, true), "recalled: {recalled}");
        }
    }

    #[test]
    fn a_lane_that_panics_or_has_no_thread_leaves_its_ranges_to_the_others() {
        for (known, threadless) in [(LANES, 0), (1, 0), (LANES, 1), (LANES, LANES - 1)] {
            assert_eq!(run(known, threadless).unwrap(), 12 << 20, "{known} {threadless}");
        }
        for (known, threadless, said) in [(0, 0, ""), (LANES, LANES, "cannot start a thread")] {
            let failed = run(known, threadless).unwrap_err();
            assert!(failed.kind() == ErrorKind::System && failed.to_string().contains(said), "{failed}");
        }
    }
}
