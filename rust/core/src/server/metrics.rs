//! Counters of a server, and of the receives of the same process, in the Prometheus text format.
//!
//! Receives are counted here too because a trainer has one address to scrape, and how it heals is as interesting as
//! what it served. The names of the series are documented and do not change.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use super::ConnectionContext;
use crate::report::Report;

/// Counts since the server began.
#[derive(Debug, Default)]
pub(super) struct Metrics {
    pub(super) waiting: AtomicU64,
    tallies: Mutex<Tallies>,
}

#[derive(Debug, Default)]
struct Tallies {
    answers: BTreeMap<u16, u64>,
    bodies: Bodies,
    receives: u64,
    failed: u64,
    received: u64,
    retries: u64,
    phases: Phases,
    last: Option<(Report, Phases)>,
}

/// Bodies of checkpoints.
#[derive(Debug, Default)]
struct Bodies {
    complete: u64,
    cut: u64,
    time: Duration,
}

/// The phases that the time of a receive is divided into.
#[derive(Clone, Copy, Debug, Default)]
struct Phases {
    open: Duration,
    fetch: Duration,
    build: Duration,
}

/// A request that waits for a checkpoint; it is counted as long as this lives.
pub(super) struct Waiting<'a>(&'a AtomicU64);

impl Drop for Waiting<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

/// A body that is being sent.
#[derive(Debug)]
pub(super) struct Sending {
    since: Instant,
    /// How many bytes of bodies the connection had sent before this answer, and will have sent after it.
    bounds: (u64, u64),
}

impl Sending {
    pub(super) fn new(connection: &ConnectionContext, len: u64) -> Self {
        let before = connection.progress[0].bytes.load(Ordering::Relaxed);
        Self { since: Instant::now(), bounds: (before, before + len) }
    }

    /// The body is gone. One of which nothing was sent, as in the answer to HEAD, does not count.
    pub(super) fn end(&self, connection: &ConnectionContext) {
        let sent = connection.progress[0].bytes.load(Ordering::Relaxed);
        if sent > self.bounds.0 {
            connection.shared.metrics.note_body(sent >= self.bounds.1, self.since.elapsed());
        }
    }
}

impl Metrics {
    fn tallies(&self) -> MutexGuard<'_, Tallies> {
        self.tallies.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn wait(&self) -> Waiting<'_> {
        self.waiting.fetch_add(1, Ordering::Relaxed);
        Waiting(&self.waiting)
    }

    pub(super) fn note_answer(&self, status: u16) {
        *self.tallies().answers.entry(status).or_default() += 1;
    }

    fn note_body(&self, complete: bool, time: Duration) {
        let bodies = &mut self.tallies().bodies;
        *(if complete { &mut bodies.complete } else { &mut bodies.cut }) += 1;
        bodies.time += time;
    }

    /// A receive of this process is over; `report` says how it went if it did not fail, `took` what it took in all.
    pub(super) fn note_receive(&self, report: Option<&Report>, took: Duration) {
        let mut tallies = self.tallies();
        let Some(report) = report else {
            tallies.failed += 1;
            return;
        };
        let build = took.saturating_sub(report.opening + report.fetching);
        let phases = Phases { open: report.opening, fetch: report.fetching, build };
        tallies.receives += 1;
        tallies.received += report.bytes;
        tallies.retries += report.retries;
        tallies.phases.open += phases.open;
        tallies.phases.fetch += phases.fetch;
        tallies.phases.build += phases.build;
        tallies.last = Some((report.clone(), phases));
    }

    /// Everything, `connection` being the one that asks.
    pub(super) fn render(connection: &ConnectionContext) -> String {
        let shared = &connection.shared;
        let mut page = MetricsPage(String::new());
        let load = |count: &AtomicU64| count.load(Ordering::Relaxed);
        page.one("requests_total", "counter", "Requests answered.", load(&shared.requests));
        page.one("sent_bytes_total", "counter", "Bytes of checkpoint bodies sent.", load(&shared.progress.bytes));
        page.one("connections", "gauge", "Connections open now.", shared.connections.load(Ordering::Relaxed) as u64);
        page.one("transfers", "gauge", "Responses being sent now.", shared.store.active() as u64);
        page.one(
            "waiting_requests",
            "gauge",
            "Requests that wait for a checkpoint now.",
            load(&shared.metrics.waiting),
        );
        page.one("allowed", "gauge", "1 while a checkpoint may be fetched.", u64::from(shared.store.is_allowed()));
        if let Some(step) = shared.store.step() {
            page.one("step", "gauge", "The step that is, or was last, served.", step);
        }
        let tallies = shared.metrics.tallies();
        page.about("answers_total", "counter", "Answers by status.");
        for (code, count) in &tallies.answers {
            page.row("answers_total", &format!("code=\"{code}\""), count);
        }
        let bodies = &tallies.bodies;
        page.about("bodies_total", "counter", "Checkpoint bodies sent to their end, or cut off in the middle.");
        page.row("bodies_total", "end=\"complete\"", bodies.complete);
        page.row("bodies_total", "end=\"cut\"", bodies.cut);
        let seconds = bodies.time.as_secs_f64();
        page.one("sending_seconds_total", "counter", "Time those bodies took, added up.", seconds);
        tallies.receives(&mut page);
        page.0
    }
}

impl Tallies {
    fn receives(&self, page: &mut MetricsPage) {
        page.about("receives_total", "counter", "Receives of this process from sources of this protocol.");
        page.row("receives_total", "end=\"healed\"", self.receives);
        page.row("receives_total", "end=\"failed\"", self.failed);
        page.one("received_bytes_total", "counter", "Bytes of payload those that healed received.", self.received);
        page.one("receive_retries_total", "counter", "Ranges that had to be fetched again in them.", self.retries);
        page.about("receive_seconds_total", "counter", "Time they took, by what it went to.");
        page.phases("receive_seconds_total", self.phases);
        let Some((report, phases)) = &self.last else { return };
        page.one("last_receive_bytes", "gauge", "Bytes of payload of the last one.", report.bytes);
        page.one("last_receive_lanes", "gauge", "Connections of the last one.", report.lanes);
        page.about("last_receive_seconds", "gauge", "Time of the last one, by what it went to.");
        page.phases("last_receive_seconds", *phases);
        let rate = report.bytes as f64 / phases.fetch.as_secs_f64().max(1e-9);
        page.one("last_receive_bytes_per_second", "gauge", "Speed of the last one while it fetched.", rate);
        page.about("last_receive_route", "gauge", "1 for each way the last one took: from address there to here.");
        for (here, there) in &report.routes {
            page.row("last_receive_route", &format!("here=\"{here}\",there=\"{there}\""), 1);
        }
        if report.same_host {
            page.row("last_receive_route", "here=\"local\",there=\"local\"", 1);
        }
    }
}

struct MetricsPage(String);

impl MetricsPage {
    fn about(&mut self, name: &str, kind: &str, help: &str) {
        let _ = write!(self.0, "# HELP tensorferry_{name} {help}\n# TYPE tensorferry_{name} {kind}\n");
    }

    fn row(&mut self, name: &str, labels: &str, value: impl std::fmt::Display) {
        let _ = writeln!(self.0, "tensorferry_{name}{{{labels}}} {value}");
    }

    fn one(&mut self, name: &str, kind: &str, help: &str, value: impl std::fmt::Display) {
        self.about(name, kind, help);
        let _ = writeln!(self.0, "tensorferry_{name} {value}");
    }

    fn phases(&mut self, name: &str, phases: Phases) {
        for (phase, time) in [("open", phases.open), ("fetch", phases.fetch), ("build", phases.build)] {
            self.row(name, &format!("phase=\"{phase}\""), time.as_secs_f64());
        }
    }
}
