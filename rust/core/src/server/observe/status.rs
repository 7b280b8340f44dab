//! The status page, one static document, and the figures that it asks for every two seconds, as JSON.
//!
//! The page sets what it shows as text and never as HTML, and its policy forbids the browser everything but its own
//! style, its own script and a question to this server.

use std::cmp::Reverse;
use std::fmt::Display;
use std::time::{Duration, SystemTime};

use super::figures::Figures;
use super::program::{ProgramFigures, printable};
use super::receives::{Ended, Underway};

/// How many senders of a receive have a figure of their own.
const MOST_SENDERS: usize = 12;

/// The page, whose style and script are marked with `nonce`.
pub(in crate::server) fn page(nonce: &str) -> String {
    include_str!("status.html").replace("NONCE", nonce)
}

/// What a browser may do with the page that is marked with `nonce`.
pub(in crate::server) fn content_security_policy(nonce: &str) -> String {
    format!(
        "default-src 'none'; style-src 'nonce-{nonce}'; script-src 'nonce-{nonce}'; connect-src 'self'; \
         base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
}

/// `figures` as a JSON object.
pub(in crate::server) fn json(figures: &Figures) -> String {
    let (bodies, sums) = (&figures.tallies.bodies, &figures.receives.sums);
    let ago = |at: SystemTime| seconds(figures.at.duration_since(at).unwrap_or_default());
    object([
        ("version", text(env!("CARGO_PKG_VERSION"))),
        ("port", figures.port.to_string()),
        ("tls", figures.encrypted.to_string()),
        ("secret", figures.secret.to_string()),
        ("max_bandwidth", or_null(figures.max_bandwidth)),
        ("up_seconds", seconds(figures.up)),
        ("step", or_null(figures.step)),
        ("allowed", figures.allowed.to_string()),
        ("published_bytes", or_null(figures.published)),
        ("connections", figures.connections.to_string()),
        ("waiting", figures.waiting.to_string()),
        ("sent_bytes", figures.sent.to_string()),
        ("relayed_bytes", figures.relayed.to_string()),
        ("bodies", object([("complete", bodies.complete.to_string()), ("cut", bodies.cut.to_string())])),
        (
            "sending",
            list(&figures.transfers, |transfer| {
                object([
                    ("peer", text(transfer.peer)),
                    ("step", transfer.step.to_string()),
                    ("connections", transfer.connections.to_string()),
                    ("sent_bytes", transfer.sent.to_string()),
                    ("total_bytes", transfer.total.to_string()),
                    ("bytes_per_second", format!("{:.0}", transfer.bytes_per_second())),
                    ("seconds", seconds(transfer.took)),
                ])
            }),
        ),
        (
            "members",
            list(&figures.members, |(at, ago)| object([("address", text(at)), ("seconds_ago", seconds(*ago))])),
        ),
        ("program", or_null(figures.program.as_ref().map(|(age, program)| described(program, *age)))),
        ("receiving", list(&figures.receives.running, receiving)),
        (
            "received",
            object([
                ("healed", sums.healed.to_string()),
                ("failed", sums.failed.to_string()),
                ("bytes", sums.bytes.to_string()),
                ("retries", sums.retries.to_string()),
            ]),
        ),
        ("ended", list(&figures.receives.ended, |ended| self::ended(ended, ago(ended.at)))),
        ("answers", members(figures.tallies.answers.iter().map(|(code, count)| (code, count.to_string())))),
        (
            "refusals",
            list(&figures.tallies.refusals, |refusal| {
                object([
                    ("seconds_ago", ago(refusal.at)),
                    ("peer", text(refusal.peer)),
                    ("status", refusal.status.to_string()),
                    ("message", text(&refusal.message)),
                ])
            }),
        ),
        (
            "strangers",
            list(&figures.strangers, |stranger| {
                object([
                    ("seconds_ago", ago(stranger.at)),
                    ("peer", text(stranger.peer)),
                    ("requests", stranger.count.to_string()),
                    ("why", text(stranger.reason.text())),
                ])
            }),
        ),
    ])
}

/// What the program around the server said of itself, so long ago.
fn described(program: &ProgramFigures, age: Duration) -> String {
    object([
        ("title", text(&program.title)),
        ("lines", list(&program.lines, text)),
        (
            "tables",
            list(&program.tables, |table| {
                object([
                    ("heading", text(&table.heading)),
                    ("heads", list(&table.heads, text)),
                    ("rows", list(&table.rows, |row| list(row, text))),
                ])
            }),
        ),
        ("seconds_ago", seconds(age)),
    ])
}

fn receiving(receive: &Underway) -> String {
    object([
        ("step", receive.step.to_string()),
        ("phase", text(receive.phase)),
        ("received_bytes", receive.received.to_string()),
        ("total_bytes", receive.total.to_string()),
        ("seconds", seconds(receive.took)),
    ])
}

fn ended(ended: &Ended, ago: String) -> String {
    let begun = [("seconds_ago", ago), ("step", ended.step.to_string()), ("seconds", seconds(ended.took))];
    let outcome = match &ended.outcome {
        Err(class) => vec![("error", text(class))],
        Ok((report, phases)) => {
            let mut senders: Vec<_> = report.senders.iter().collect();
            senders.sort_by_key(|&(_, bytes)| Reverse(*bytes));
            vec![
                ("error", "null".to_owned()),
                ("bytes", report.bytes.to_string()),
                ("open_seconds", seconds(phases.open)),
                ("fetch_seconds", seconds(phases.fetch)),
                ("build_seconds", seconds(phases.build)),
                ("lanes", report.lanes.to_string()),
                ("routes", list(&report.routes, |(here, there)| list([here, there], text))),
                ("same_host", report.same_host.to_string()),
                ("relays", report.relays.to_string()),
                ("relayed_bytes", report.relayed.to_string()),
                ("senders", senders.len().to_string()),
                (
                    "sent_by",
                    list(senders.iter().take(MOST_SENDERS), |(sender, bytes)| {
                        list([text(sender), bytes.to_string()], |item| item)
                    }),
                ),
            ]
        }
    };
    members(begun.into_iter().chain(outcome))
}

fn object<const N: usize>(members: [(&str, String); N]) -> String {
    self::members(members)
}

/// A JSON object with these members, whose values are JSON.
fn members<K: Display>(members: impl IntoIterator<Item = (K, String)>) -> String {
    let members: Vec<_> = members.into_iter().map(|(name, value)| format!("{}:{value}", text(name))).collect();
    format!("{{{}}}", members.join(","))
}

fn list<T>(items: impl IntoIterator<Item = T>, json: impl Fn(T) -> String) -> String {
    let items: Vec<_> = items.into_iter().map(json).collect();
    format!("[{}]", items.join(","))
}

/// A JSON string. Of printable ASCII, what Rust escapes is what JSON does.
fn text(value: impl Display) -> String {
    format!("{:?}", printable(&value.to_string()))
}

fn or_null(value: Option<impl Display>) -> String {
    value.map_or("null".to_owned(), |value| value.to_string())
}

fn seconds(time: Duration) -> String {
    format!("{:.3}", time.as_secs_f64())
}
