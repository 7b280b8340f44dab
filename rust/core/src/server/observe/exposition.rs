//! Figures in the Prometheus text format.
//!
//! The names of the series are documented (docs/reference/metrics.md) and do not change. Of text that a peer chose,
//! labels hold the names of hosts alone, filtered and at most [`MOST_HOSTS`] of them, so that a peer can neither forge
//! lines nor make series without end.

use std::cmp::Reverse;
use std::collections::BTreeMap;
use std::fmt::{Display, Write as _};
use std::time::{Duration, SystemTime};

use super::figures::Figures;
use super::program::{self, ProgramFigures};
use super::receive::Failure;
use super::receives::{Phases, ReceiveFigures};

/// The media type of what [`render`] returns.
pub(in crate::server) const MEDIA_TYPE: &str = "text/plain; version=0.0.4; charset=utf-8";

/// How many hosts have a series of their own, and how many characters of a name are shown.
const MOST_HOSTS: usize = 64;
const LONGEST_HOST: usize = 255;

/// `figures` as a scraper reads them.
pub(in crate::server) fn render(figures: &Figures) -> String {
    let mut page = Exposition(String::new());
    page.about("build_info", "gauge", "1; the version is a label.");
    page.row("build_info", concat!("version=\"", env!("CARGO_PKG_VERSION"), "\""), 1);
    let since = figures.since.duration_since(SystemTime::UNIX_EPOCH).unwrap_or(Duration::ZERO).as_secs_f64();
    page.one("start_timestamp_seconds", "gauge", "When this server began.", since);
    page.one("requests_total", "counter", "Requests answered.", figures.requests);
    page.one("sent_bytes_total", "counter", "Bytes of checkpoint bodies sent.", figures.sent);
    if let Some(limit) = figures.max_bandwidth {
        page.one("max_bandwidth_bytes_per_second", "gauge", "The most that is sent to all receivers.", limit);
    }
    page.one("connections", "gauge", "Connections open now.", figures.connections);
    page.one("transfers", "gauge", "Responses being sent now.", figures.answers);
    page.one("receivers", "gauge", "Peers that a checkpoint is being sent to now.", figures.transfers.len());
    page.one("waiting_requests", "gauge", "Requests that wait for a checkpoint now.", figures.waiting);
    page.one("allowed", "gauge", "1 while a checkpoint may be fetched.", u64::from(figures.allowed));
    if let Some(step) = figures.step {
        page.one("step", "gauge", "The step that is, or was last, served.", step);
    }
    if let Some(len) = figures.published {
        page.one("published_bytes", "gauge", "Size of the checkpoint that is served.", len);
    }
    page.about("answers_total", "counter", "Answers by status.");
    for (code, count) in &figures.tallies.answers {
        page.row("answers_total", &format!("code=\"{code}\""), count);
    }
    page.about("refused_total", "counter", "Requests without a right to ask, by what they lacked.");
    for (reason, count) in figures.refused {
        page.row("refused_total", &format!("reason=\"{}\"", reason.label()), count);
    }
    let bodies = &figures.tallies.bodies;
    page.about("bodies_total", "counter", "Checkpoint bodies sent to their end, or cut off in the middle.");
    page.row("bodies_total", "end=\"complete\"", bodies.complete);
    page.row("bodies_total", "end=\"cut\"", bodies.cut);
    let seconds = bodies.time.as_secs_f64();
    page.one("sending_seconds_total", "counter", "Time those bodies took, added up.", seconds);
    page.one("swarm_members", "gauge", "Receivers that send each other what is served.", figures.members.len());
    page.one("relayed_bytes_total", "counter", "The part of the sent bytes that was being received.", figures.relayed);
    receives(&mut page, &figures.receives);
    if let Some((_, program)) = &figures.program {
        own(&mut page, program);
    }
    page.0
}

/// Writes the series of the program around the server.
fn own(page: &mut Exposition, program: &ProgramFigures) {
    for series in &program.series {
        page.about(&series.name, if series.counts { "counter" } else { "gauge" }, &series.help);
        for (labels, value) in &series.rows {
            if labels.is_empty() {
                let _ = writeln!(page.0, "tensorferry_{} {value}", series.name);
            } else {
                page.row(&series.name, &program::labels(labels), value);
            }
        }
    }
}

/// Writes the series about receives of this process.
fn receives(page: &mut Exposition, figures: &ReceiveFigures) {
    let sums = &figures.sums;
    page.one("receiving", "gauge", "Receives of this process that run now.", figures.running.len());
    let received: u64 = figures.running.iter().map(|receive| receive.received).sum();
    let total: u64 = figures.running.iter().map(|receive| receive.total).sum();
    page.one("receiving_bytes", "gauge", "Bytes of payload those have received.", received);
    page.one("receiving_total_bytes", "gauge", "Bytes of payload those will have received.", total);
    page.about("receiving_phase", "gauge", "Receives that run now, by what they do.");
    for phase in ["open", "fetch", "build"] {
        let count = figures.running.iter().filter(|receive| receive.phase == phase).count();
        page.row("receiving_phase", &format!("phase=\"{phase}\""), count);
    }
    page.about("receives_total", "counter", "Receives of this process from sources of this protocol.");
    page.row("receives_total", "end=\"healed\"", sums.healed);
    page.row("receives_total", "end=\"failed\"", sums.failed);
    page.about("receive_failures_total", "counter", "Receives that failed, by the class of the error.");
    if !sums.failures.contains_key(Failure::OTHER) {
        page.row("receive_failures_total", &format!("error=\"{}\"", Failure::OTHER), 0);
    }
    for (error, count) in &sums.failures {
        page.row("receive_failures_total", &format!("error=\"{error}\""), count);
    }
    page.one("received_bytes_total", "counter", "Bytes of payload those that healed received.", sums.bytes);
    page.one("receive_retries_total", "counter", "Ranges that had to be fetched again in them.", sums.retries);
    let (relayed, refused) = (sums.relayed, sums.refused);
    page.one(
        "received_relayed_bytes_total",
        "counter",
        "The part of the received bytes from other receivers.",
        relayed,
    );
    page.one(
        "receive_refused_blocks_total",
        "counter",
        "Blocks of other receivers that were not the source's.",
        refused,
    );
    page.about("receive_seconds_total", "counter", "Time they took, by what it went to.");
    page.phases("receive_seconds_total", sums.phases);
    let verify = sums.phases.verify.as_secs_f64();
    page.one("receive_verify_seconds_total", "counter", "The part of fetching that compared digests.", verify);
    let last = figures.ended.iter().find_map(|ended| Some((ended, ended.outcome.as_ref().ok()?)));
    let Some((ended, (report, phases))) = last else { return };
    page.one("last_receive_step", "gauge", "The step of the last one that healed.", ended.step);
    let since = ended.at.duration_since(SystemTime::UNIX_EPOCH).unwrap_or(Duration::ZERO).as_secs_f64();
    page.one("last_receive_timestamp_seconds", "gauge", "When the last one ended.", since);
    page.one("last_receive_bytes", "gauge", "Bytes of payload of the last one.", report.bytes);
    page.one("last_receive_relayed_bytes", "gauge", "The part of them from other receivers.", report.relayed);
    page.one("last_receive_relays", "gauge", "Those other receivers.", report.relays);
    page.one("last_receive_senders", "gauge", "Sources and other receivers that sent them.", report.senders.len());
    page.about("last_receive_sender_bytes", "gauge", "Bytes of the last one, by the host that sent them.");
    for (host, bytes) in bytes_by_host(&report.senders) {
        page.row("last_receive_sender_bytes", &format!("host=\"{host}\""), bytes);
    }
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

/// How many bytes the hosts of `senders` have sent, those with the most. Ports would make series without end. Others have
/// named the hosts: what no name and no address of a host has in it is not shown.
fn bytes_by_host(senders: &BTreeMap<String, u64>) -> Vec<(String, u64)> {
    let mut hosts: BTreeMap<String, u64> = BTreeMap::new();
    for (authority, bytes) in senders {
        let host = authority.rsplit_once(':').map_or(&authority[..], |(host, _)| host);
        *hosts.entry(program::plain(host, LONGEST_HOST)).or_default() += bytes;
    }
    let mut hosts: Vec<_> = hosts.into_iter().collect();
    hosts.sort_by_key(|&(_, bytes)| Reverse(bytes));
    hosts.truncate(MOST_HOSTS);
    hosts
}

struct Exposition(String);

impl Exposition {
    fn about(&mut self, name: &str, kind: &str, help: &str) {
        let _ = write!(self.0, "# HELP tensorferry_{name} {help}\n# TYPE tensorferry_{name} {kind}\n");
    }

    fn row(&mut self, name: &str, labels: &str, value: impl Display) {
        let _ = writeln!(self.0, "tensorferry_{name}{{{labels}}} {value}");
    }

    fn one(&mut self, name: &str, kind: &str, help: &str, value: impl Display) {
        self.about(name, kind, help);
        let _ = writeln!(self.0, "tensorferry_{name} {value}");
    }

    /// A row for each phase of a receive, in seconds.
    fn phases(&mut self, name: &str, phases: Phases) {
        for (phase, time) in [("open", phases.open), ("fetch", phases.fetch), ("build", phases.build)] {
            self.row(name, &format!("phase=\"{phase}\""), time.as_secs_f64());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn senders_become_few_series_without_text_of_their_own() {
        let senders = [("10.0.0.1:4", 1), ("10.0.0.1:5", 2), ("[fe80::1%eth0]:6", 9), ("a\"} 7\\:1", 4)];
        let hosts = bytes_by_host(&senders.map(|(sender, bytes)| (sender.to_owned(), bytes)).into());
        let expected = [("[fe80::1%eth0]", 9), ("a???7?", 4), ("10.0.0.1", 3)];
        assert_eq!(hosts, expected.map(|(host, bytes)| (host.to_owned(), bytes)));
        let many = (0..200).map(|number| (format!("host{number}:1"), number)).collect();
        assert_eq!(bytes_by_host(&many).len(), MOST_HOSTS);
    }
}
