//! The workers of a transfer: threads with one connection each that do what the scheduler says.
//!
//! A [`Lane`] asks for a task, does it, and says how that went; what is left of a range that failed waits again, also when
//! the thread panics. The thread that called starts the lanes and drives them: it starts those over further addresses and
//! to relays when these become known, asks the tracker, and shuts down connections that are too slow.

use std::cell::Cell;
use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::thread::{self, Scope, ScopedJoinHandle, Thread};
use std::time::{Duration, Instant};

use socket2::Socket;

use super::blocks::block_len;
use super::connection::Connection;
use super::ledger::BlockLedger;
use super::limits::Limits;
use super::rails::Pair;
use super::scheduler::{Action, Cut, Failure, Role, Scheduler, Task, rate};
use super::swarm::{NewRelay, RelayView, Swarm};
use super::targets::ADDRESSES;
use super::{Remote, Source};
use crate::error::{Error, ErrorKind};
use crate::fork::CloseOnFork;
use crate::memory::zeroed;
use crate::payload::Plan;
use crate::swarm::Receiver;
use crate::sync::Locked;

/// How often the driver looks whether there is something to do.
const LOOK: Duration = Duration::from_millis(50);
/// How long a connection attempt to a further address may go unanswered.
const PATIENCE: Duration = Duration::from_secs(1);

/// The state that all lanes of one transfer share.
pub(super) struct Transfer<'a> {
    pub(super) remote: &'a Remote,
    pub(super) plan: &'a Plan,
    /// Those of lanes to further addresses, which end with the others.
    pub(super) rail_limits: Limits,
    pub(super) received: &'a BlockLedger,
    /// Other receivers of the same snapshot, if this takes part in a swarm.
    pub(super) swarm: Option<&'a Swarm<'a>>,
    scheduler: Mutex<Scheduler>,
    /// For lanes that wait, and their driver.
    changed: Condvar,
    driver: Thread,
    /// Whether the transfer has failed, for lanes that look after each block.
    has_failed: AtomicBool,
    began: Instant,
}

/// Where a lane's bytes come from.
enum Endpoint {
    Source,
    /// Another pair of addresses of the source of this number.
    Rail(usize, Pair),
    Relay(NewRelay),
}

/// A source or relay that a range is fetched from.
#[derive(Clone, Copy)]
pub(super) struct Origin<'a> {
    /// Its number; those of relays begin behind those of the sources.
    pub(super) number: usize,
    pub(super) source: &'a Source,
    pub(super) limits: &'a Limits,
}

/// A worker.
pub(super) struct Lane<'a> {
    pub(super) transfer: &'a Transfer<'a>,
    index: usize,
    endpoint: Endpoint,
    /// The bytes that it has brought.
    pub(super) got: Arc<AtomicU64>,
    /// The first block of its range that is not here yet, and the end of the range.
    pub(super) at: Cell<u64>,
    pub(super) end: Cell<u64>,
    /// Whether its relay has made a block up.
    has_lied: Cell<bool>,
}

impl<'a> Transfer<'a> {
    /// For lanes that the calling thread drives, and a scheduler whose time began at `began`.
    pub(super) fn new(
        remote: &'a Remote,
        (plan, received): (&'a Plan, &'a BlockLedger),
        swarm: Option<&'a Swarm<'a>>,
        rail_limits: Limits,
        (scheduler, began): (Scheduler, Instant),
    ) -> Self {
        let (scheduler, changed, driver) = (Mutex::new(scheduler), Condvar::new(), thread::current());
        let has_failed = AtomicBool::new(false);
        Self { remote, plan, rail_limits, received, swarm, scheduler, changed, driver, has_failed, began }
    }

    /// The scheduler, once every lane has ended.
    pub(super) fn into_scheduler(self) -> Scheduler {
        self.scheduler.into_value()
    }
}

impl Transfer<'_> {
    /// Whether the transfer has failed.
    pub(super) fn has_failed(&self) -> bool {
        self.has_failed.load(Ordering::Relaxed)
    }

    fn now(&self) -> Duration {
        self.began.elapsed()
    }

    /// Runs `lanes` lanes, the first ones on `connections`, and `each` over every further address of a source. Returns the
    /// connections that are still good.
    pub(super) fn run(&self, origins: &[usize], connections: Vec<Connection>, each: usize) -> Vec<Connection> {
        thread::scope(|scope| {
            let lanes: Vec<_> =
                origins.iter().map(|&source| self.enlist(Endpoint::Source, source, Duration::ZERO)).collect();
            let mut connections = connections.into_iter();
            let start = |lane| self.start(scope, lane, connections.next());
            let threads: Vec<_> = lanes.into_iter().map(start).collect();
            self.drive(scope, each);
            self.rail_limits.cancel.cancel();
            self.changed.notify_all();
            threads.into_iter().flatten().filter_map(|thread| thread.join().ok().flatten()).collect()
        })
    }

    /// A lane to `endpoint` that begins with the source of this number after a `rest`.
    fn enlist(&self, endpoint: Endpoint, source: usize, rest: Duration) -> Lane<'_> {
        let role = match &endpoint {
            Endpoint::Source => Role::Source,
            Endpoint::Rail(..) => Role::Rail,
            Endpoint::Relay(relay) => Role::Relay(relay.number),
        };
        let (index, got) = self.scheduler.locked().enlist(role, source, self.now() + rest);
        let (at, end, has_lied) = Default::default();
        Lane { transfer: self, index, endpoint, got, at, end, has_lied }
    }

    /// Starts the thread of a lane. Without one it takes longer, and that is all, unless it was the last.
    fn start<'scope>(
        &'scope self,
        scope: &'scope Scope<'scope, '_>,
        lane: Lane<'scope>,
        connection: Option<Connection>,
    ) -> Option<ScopedJoinHandle<'scope, Option<Connection>>> {
        let index = lane.index;
        let builder = thread::Builder::new().name(format!("tensorferry-lane-{index}"));
        match builder.spawn_scoped(scope, move || lane.run(connection)) {
            Ok(thread) => Some(thread),
            Err(e) => {
                self.leave(index, Some(Error::caused(ErrorKind::System, "cannot start a thread for a lane", e)));
                None
            }
        }
    }

    /// Does what no lane does for itself, until all lanes to sources have ended.
    fn drive<'scope>(&'scope self, scope: &'scope Scope<'scope, '_>, each: usize) {
        let (mut begun, mut used) = (vec![each == 0; self.remote.sources.len()], Vec::new());
        loop {
            for (number, source) in self.remote.sources.iter().enumerate() {
                if begun[number] || !source.has_rails() {
                    continue;
                }
                begun[number] = true;
                for pair in source.rails.pairs(&mut used).into_iter().flat_map(|pair| std::iter::repeat_n(pair, each)) {
                    let rest = ADDRESSES.remaining(pair, source.url.port());
                    self.start(scope, self.enlist(Endpoint::Rail(number, pair), number, rest), None);
                }
            }
            let joins = self.swarm.is_some_and(|swarm| swarm.is_worth_joining(self.received.bytes()));
            let mut scheduler = self.scheduler.locked();
            if !scheduler.is_manned() {
                return;
            }
            let slow = scheduler.steal(self.now());
            cut(&scheduler, slow);
            let is_over = scheduler.is_over();
            let question = self.swarm.filter(|_| !is_over).and_then(|swarm| {
                let asked = scheduler.question.take();
                asked.or_else(|| swarm.question(scheduler.waiting(), joins)).map(|need| (swarm, need))
            });
            drop(scheduler);
            let Some((swarm, need)) = question else {
                thread::park_timeout(LOOK);
                continue;
            };
            let (relays, are_new) = swarm.ask(need);
            for relay in relays {
                self.received.note_relay(self.remote.sources.len() + relay.number, relay.source.url.authority());
                self.start(scope, self.enlist(Endpoint::Relay(relay), 0, Duration::ZERO), None);
            }
            if are_new {
                let mut scheduler = self.scheduler.locked();
                let len = |first, end| self.plan.held(&[(first, end)]);
                let recalled = scheduler.recall(self.now(), len);
                cut(&scheduler, recalled);
            }
            self.changed.notify_all();
        }
    }

    /// Worker `index` has ended, because of `error` or since nothing is left.
    fn leave(&self, index: usize, error: Option<Error>) {
        let mut scheduler = self.scheduler.locked();
        scheduler.leave(index, error);
        self.has_failed.store(scheduler.has_failed(), Ordering::Relaxed);
        drop(scheduler);
        self.changed.notify_all();
        self.driver.unpark();
    }

    /// Fails the transfer.
    fn fail(&self, error: Error) {
        self.scheduler.locked().give_up(error);
        self.has_failed.store(true, Ordering::Relaxed);
        self.changed.notify_all();
    }

    /// `error` with what was being fetched, from where, and how far the transfer has come.
    fn with_position(&self, error: Error, source: &Source, (at, end): (u64, u64)) -> Error {
        if error.kind() == ErrorKind::Cancelled {
            return error;
        }
        let bounds = |at, end: u64| (self.plan.block_bounds(at).0, self.plan.block_bounds(end - 1).1);
        let range = (at < end).then(|| bounds(at, end));
        let range = range.map_or(String::new(), |(start, stop)| format!(", payload bytes {start}-{stop}"));
        let (path, authority) = (self.path(), source.url.authority());
        let (bytes, total) = (self.received.bytes(), self.remote.header().payload_len());
        let pace = format_rate(rate(bytes, self.remote.limits.started.elapsed()));
        error.at(&format!("{path} from {authority}{range}, after {bytes} of {total} bytes at {pace}"))
    }

    pub(super) fn path(&self) -> String {
        format!("{}.safetensors", self.remote.key)
    }
}

impl Drop for Lane<'_> {
    /// What is left of its range waits again. If its thread panics, the others go on, and the last one says so.
    fn drop(&mut self) {
        self.give_back(false);
        if let (Endpoint::Relay(relay), Some(swarm)) = (&self.endpoint, self.transfer.swarm) {
            swarm.set_aside(relay, self.has_lied.get());
        }
        // Nothing here may panic: the thread is unwinding already.
        let message = "the last lane panicked: a bug of tensorferry; stderr says where";
        let error = thread::panicking().then(|| Error::new(ErrorKind::System, message));
        self.transfer.leave(self.index, error);
    }
}

impl Lane<'_> {
    /// Does what there is to do until nothing is left, or it has failed too often. Returns the connection if it is still
    /// good.
    fn run(self, mut connection: Option<Connection>) -> Option<Connection> {
        let mut view = RelayView::new();
        let mut sink = match zeroed(block_len()) {
            Ok(sink) => sink,
            // Another lane may have got its buffer; the last one to leave fails the transfer.
            Err(error) => {
                self.transfer.leave(self.index, Some(error));
                return None;
            }
        };
        loop {
            let task = self.next(connection.as_ref().is_some_and(Connection::is_reusable));
            let origin = self.origin(task);
            let result = match task {
                Task::Fetch { at, end, .. } => {
                    self.at.set(at);
                    self.end.set(end);
                    self.fetch(origin, &mut connection, &mut sink)
                }
                Task::Connect => self.connect(origin).map(|opened| connection = Some(opened)),
                Task::Refresh { wait } => self.refresh(&mut view, wait),
                Task::Wait(_) | Task::Over => return connection.filter(Connection::is_reusable),
            };
            if !self.settle(task, origin, result, &mut connection) {
                return None;
            }
        }
    }

    /// The next task, once there is one.
    fn next(&self, is_connected: bool) -> Task {
        let Transfer { swarm, remote, changed, driver, .. } = self.transfer;
        let mut scheduler = self.transfer.scheduler.locked();
        loop {
            let mut receiver = swarm.map(Swarm::receiver);
            let task = scheduler.next(self.transfer.now(), self.index, is_connected, receiver.as_deref_mut());
            drop(receiver);
            let Task::Wait(length) = task else { return task };
            if scheduler.question.is_some() {
                driver.unpark();
            }
            // While another lane is at work, its error says more.
            if matches!(self.endpoint, Endpoint::Source)
                && (swarm.is_some() || !scheduler.is_source_busy())
                && let Err(over) = remote.limits.left()
            {
                drop(scheduler);
                let source = &remote.sources[remote.primary];
                self.transfer.fail(self.transfer.with_position(over, source, (0, 0)));
                return Task::Over;
            }
            scheduler = changed.wait_timeout(scheduler, length).unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    /// Where the bytes of `task` come from.
    fn origin(&self, task: Task) -> Origin<'_> {
        let Transfer { remote, rail_limits, swarm, .. } = self.transfer;
        if let (Endpoint::Relay(relay), Some(swarm)) = (&self.endpoint, swarm) {
            let number = remote.sources.len() + relay.number;
            return Origin { number, source: &relay.source, limits: &swarm.limits };
        }
        let (number, limits) = match (&self.endpoint, task) {
            (Endpoint::Rail(number, _), _) => (*number, rail_limits),
            (_, Task::Fetch { source, .. }) => (source, &remote.limits),
            _ => (remote.primary, &remote.limits),
        };
        Origin { number, source: &remote.sources[number], limits }
    }

    /// Connects to a further address.
    fn connect(&self, Origin { source, limits, .. }: Origin<'_>) -> Result<Connection, Error> {
        let Endpoint::Rail(_, pair) = self.endpoint else { return source.connect(limits) };
        let hasty = Limits { stall: PATIENCE, ..limits.clone() };
        let pair = (pair.0, SocketAddr::from((pair.1, source.url.port())));
        Ok(Connection::open_at(&source.url, pair, &hasty)?.within(limits))
    }

    /// Learns what the relay has.
    fn refresh(&self, view: &mut RelayView, wait: bool) -> Result<(), Error> {
        let (Endpoint::Relay(relay), Some(swarm)) = (&self.endpoint, self.transfer.swarm) else { return Ok(()) };
        view.refresh(swarm, relay, wait)?;
        self.transfer.scheduler.locked().note_refreshed(self.transfer.now(), self.index);
        Ok(())
    }

    /// Asks for the range now, over `socket`.
    pub(super) fn begin(&self, socket: &Arc<CloseOnFork<Socket>>) {
        self.transfer.scheduler.locked().begin(self.transfer.now(), self.index, Arc::downgrade(socket));
    }

    /// Gives back what is left of the range. Returns why its connection was shut down, if it was.
    fn give_back(&self, is_well: bool) -> Option<Cut> {
        let cut =
            self.schedule(|scheduler, now, receiver| scheduler.end(now, self.index, self.at.get(), is_well, receiver));
        self.transfer.changed.notify_all();
        cut
    }

    /// Does `work` with the scheduler, the time, and what decides in a swarm.
    fn schedule<R>(&self, work: impl FnOnce(&mut Scheduler, Duration, Option<&mut Receiver>) -> R) -> R {
        let mut scheduler = self.transfer.scheduler.locked();
        let mut receiver = self.transfer.swarm.map(Swarm::receiver);
        work(&mut scheduler, self.transfer.now(), receiver.as_deref_mut())
    }

    /// Draws the conclusions from the `result` of `task`; returns whether the lane goes on.
    fn settle(
        &self,
        task: Task,
        Origin { source, limits, .. }: Origin<'_>,
        result: Result<(), Error>,
        connection: &mut Option<Connection>,
    ) -> bool {
        let is_source = matches!(self.endpoint, Endpoint::Source);
        let cut = if let Task::Fetch { .. } = task { self.give_back(result.is_ok()) } else { None };
        let error = match result {
            Ok(()) => {
                if let Some(brought) = connection.as_ref().filter(|_| is_source) {
                    source.note_answered(brought);
                }
                if cut.is_some() {
                    // It was shut down when all had come.
                    *connection = None;
                }
                return true;
            }
            Err(_) if cut == Some(Cut::Recall) => return true,
            Err(error) => error,
        };
        let slow = if let Some(Cut::Slow(rate)) = cut { Some(rate) } else { None };
        let is_slow = slow.is_some();
        let mut error = slow.map_or(error, |rate| {
            let text = format!("timed out: at {} it is far slower than the other connections", format_rate(rate));
            Error::new(ErrorKind::Timeout, text)
        });
        let (mut is_filling, mut by_same_host, mut is_hasty) = (false, false, false);
        if let Some(failed) = connection.take().filter(|_| is_source) {
            // The source answers but is still copying its state: that is no fault, and only the deadline ends the wait.
            is_filling = error.is_timeout() && failed.is_filling();
            by_same_host = !is_filling && failed.is_same_host();
            if by_same_host {
                // Whatever the error of shared memory was, the range is fetched over the network afterwards.
                source.give_up_same_host();
            } else if !is_filling {
                is_hasty = source.note_failed(&failed, &error) && !is_slow;
            }
        }
        if is_source {
            error = self.transfer.with_position(error, source, (self.at.get(), self.end.get()));
        }
        let has_progressed = matches!(task, Task::Fetch { at, .. } if self.at.get() > at);
        let is_over = limits.left().is_err();
        let failure = Failure { error: &error, has_progressed, is_slow, is_filling, by_same_host, is_hasty, is_over };
        let action = self.schedule(|scheduler, now, receiver| scheduler.fail(now, self.index, &failure, receiver));
        if let (Endpoint::Rail(_, pair), Action::LeaveAlone(length)) = (&self.endpoint, action) {
            ADDRESSES.leave(*pair, source.url.port(), length);
        }
        self.note(task, &error, &failure, source);
        match action {
            Action::Fail => self.transfer.fail(error),
            Action::Leave => self.transfer.leave(self.index, Some(error)),
            Action::Retry | Action::LeaveAlone(_) | Action::DoWithout => return true,
        }
        false
    }

    /// Notes a failure for the report. A relay may leave when it likes, an address that cannot be reached is no trouble while
    /// there are others, and none is a connection that is cut at the end.
    fn note(&self, task: Task, error: &Error, failure: &Failure<'_>, source: &Source) {
        let received = self.transfer.received;
        let authority = source.url.authority();
        match self.endpoint {
            Endpoint::Relay(_) => {
                self.has_lied.set(error.kind() == ErrorKind::Corrupt);
                if (failure.is_slow || self.has_lied.get()) && !failure.is_over {
                    received.note_trouble(authority, error);
                }
            }
            Endpoint::Rail(_, pair) if matches!(task, Task::Fetch { .. }) && !failure.is_over => {
                received.note_retry();
                received.note_trouble(&SocketAddr::from((pair.1, source.url.port())).to_string(), error);
            }
            Endpoint::Rail(..) => {}
            Endpoint::Source => {
                received.note_retry();
                if !failure.by_same_host {
                    received.note_trouble(authority, error);
                }
            }
        }
    }
}

/// Shuts down the connections of `workers`.
fn cut(scheduler: &Scheduler, workers: Vec<usize>) {
    for socket in workers.into_iter().filter_map(|index| scheduler.socket(index)) {
        let _ = socket.shutdown(std::net::Shutdown::Both);
    }
}

/// `rate`, in bytes per second, as people read it.
fn format_rate(rate: u64) -> String {
    match rate {
        0..1_000 => format!("{rate} B/s"),
        1_000..1_000_000 => format!("{}.{} kB/s", rate / 1_000, rate / 100 % 10),
        _ => format!("{}.{} MB/s", rate / 1_000_000, rate / 100_000 % 10),
    }
}

#[cfg(test)]
mod tests {
    use bytes::Bytes;
    use tensorferry_wire::dtype::Dtype;

    use super::super::FetchOptions;
    use super::*;
    use crate::report::Report;
    use crate::{Item, Publication, Server, ServerConfig, Stability};

    const BLOCKS: u64 = 12;

    /// Fetches twelve blocks by `lanes` lanes from a source that is well, while `beside` runs until it is told that they have
    /// ended. Returns the bytes, and how many ranges were fetched again.
    fn run(lanes: usize, beside: impl Fn(&Transfer<'_>, &AtomicBool) + Sync) -> Result<(u64, u64), Error> {
        let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
        let server = Server::bind(&ServerConfig::default(), runtime.handle()).unwrap();
        let bytes = Bytes::from(vec![7; usize::try_from(BLOCKS).unwrap() * block_len()]);
        let item = Item::bytes("w", Dtype::U8, &[bytes.len() as u64], bytes);
        let publication = Publication::new(Vec::new(), vec![item], Stability::Private, Box::new(())).unwrap();
        server.store().publish(1, publication);
        let options = FetchOptions { same_host: false, ..FetchOptions::within(Duration::from_secs(20)) };
        let remote = Remote::open(&[&server.url("127.0.0.1")], 1, options).unwrap();
        let plan = Plan::new(Vec::new(), remote.header().payload_len()).unwrap();
        let received = BlockLedger::new(&[(0, BLOCKS)], Arc::default())?;
        let (scheduler, limits) = (Scheduler::new(&[(0, BLOCKS)], 1, 1), remote.limits.clone());
        let transfer = Transfer::new(&remote, (&plan, &received), None, limits, (scheduler, Instant::now()));
        let over = AtomicBool::new(false);
        thread::scope(|scope| {
            scope.spawn(|| beside(&transfer, &over));
            while lanes == 1 && transfer.scheduler.locked().on_sources() == 0 {}
            transfer.run(&vec![0; lanes - 1], Vec::new(), 0);
            over.store(true, Ordering::Relaxed);
        });
        transfer.into_scheduler().finish()?;
        let mut report = Report::default();
        received.report_to(&mut report);
        Ok((report.bytes, report.retries))
    }

    #[test]
    fn a_connection_that_is_shut_down_when_its_range_has_come_is_no_fault() {
        for reason in [Cut::Recall, Cut::Slow(0)] {
            let cuts = AtomicU64::new(0);
            let cut_all = |transfer: &Transfer<'_>, over: &AtomicBool| {
                while !over.load(Ordering::Relaxed) {
                    let mut scheduler = transfer.scheduler.locked();
                    let through = scheduler.cut_one_that_is_through(reason, block_len() as u64);
                    cuts.fetch_add(through.is_some().into(), Ordering::Relaxed);
                    cut(&scheduler, through.into_iter().collect());
                }
            };
            // It may take a few rounds to come between the last byte of a range and its end.
            let rounds = (0..100).take_while(|_| cuts.load(Ordering::Relaxed) < 10);
            let retries: u64 = rounds.map(|_| run(4, cut_all).unwrap().1).sum();
            assert_eq!((retries, cuts.into_inner() > 0), (0, true), "{reason:?}");
        }
    }

    #[test]
    fn a_lane_that_panics_leaves_its_range_to_the_others() {
        let panics = |transfer: &Transfer<'_>, _: &AtomicBool| {
            let lane = transfer.enlist(Endpoint::Source, 0, Duration::ZERO);
            let ended = std::panic::catch_unwind(std::panic::AssertUnwindSafe(move || {
                if let Task::Fetch { at, end, .. } = lane.next(false) {
                    lane.at.set(at);
                    lane.end.set(end);
                }
                panic!("as this test has it");
            }));
            assert!(ended.is_err());
        };
        assert_eq!(run(4, panics).unwrap().0, BLOCKS << 20);
        let failed = run(1, panics).unwrap_err();
        assert!(failed.kind() == ErrorKind::System && failed.to_string().contains("panicked"), "{failed}");
    }

    #[test]
    fn rates_are_readable() {
        assert_eq!([0, 999, 1_250, 53_626_265].map(format_rate), ["0 B/s", "999 B/s", "1.2 kB/s", "53.6 MB/s"]);
    }
}
