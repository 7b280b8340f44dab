//! Figures as a page for people: one HTML document without scripts, links or anything to load.
//!
//! The browser asks for it again every two seconds. Text that may come from peers is escaped, and the page forbids the
//! browser everything but its own style sheet, so that even text that was not escaped could do nothing.

use std::cmp::Reverse;
use std::fmt::Write as _;
use std::time::Duration;

use http::StatusCode;

use super::figures::Figures;
use super::html::{Escaped, table};
use super::metrics::Refusal;
use super::program::ProgramFigures;
use super::receives::{Ended, Underway};
use super::strangers::Stranger;
use super::transfers::Transfer;
use super::units::{Rate, Size, Time};

/// The media type of what [`render`] returns.
pub(in crate::server) const MEDIA_TYPE: &str = "text/html; charset=utf-8";

/// How many senders of a receive have a figure of their own.
const MOST_SENDERS: usize = 12;

const STYLE: &str = "\
:root{color-scheme:light dark;font:15px/1.5 system-ui,sans-serif}
body{max-width:62rem;margin:2rem auto;padding:0 1rem}
h1{font-size:1.5rem;margin:0}h2{font-size:1.05rem;margin:2rem 0 .4rem}
p{margin:.3rem 0}.dim{opacity:.7}
table{border-collapse:collapse;width:100%}
th,td{text-align:left;padding:.3rem .9rem .3rem 0;border-bottom:1px solid #8884;vertical-align:top}
th{font-weight:600}.n{text-align:right;font-variant-numeric:tabular-nums;white-space:nowrap}
.open{color:#1a7f37}.shut,.bad{color:#b35900}.msg{overflow-wrap:anywhere}
@media(prefers-color-scheme:dark){.open{color:#3fb950}.shut,.bad{color:#e3a04f}}
progress{width:9rem;vertical-align:middle}";

/// What a browser is allowed to do with a page that was rendered with `nonce`: to apply its style sheet.
pub(in crate::server) fn content_security_policy(nonce: &str) -> String {
    format!(
        "default-src 'none'; style-src 'nonce-{nonce}'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
}

/// `figures` as a page whose style sheet is marked with `nonce`.
pub(in crate::server) fn render(figures: &Figures, nonce: &str) -> String {
    let mut page = String::with_capacity(8 << 10);
    let title = match (&figures.program, figures.step) {
        (Some((_, program)), _) => Escaped(&program.title).to_string(),
        (None, Some(step)) => format!("step {step}"),
        (None, None) => "nothing served yet".to_owned(),
    };
    let _ = write!(
        page,
        "<!DOCTYPE html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n\
         <meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\n\
         <meta name=\"referrer\" content=\"no-referrer\">\n<meta http-equiv=\"refresh\" content=\"2\">\n\
         <title>tensorferry: {title}</title>\n<style nonce=\"{nonce}\">\n{STYLE}\n</style>\n</head>\n<body>\n"
    );
    summary(&mut page, figures, &title);
    sending(&mut page, figures);
    if let Some((age, program)) = &figures.program {
        described(&mut page, program, *age);
    } else {
        receiving(&mut page, &figures.receives.running);
        received(&mut page, figures);
    }
    refused(&mut page, figures);
    page.push_str("</body>\n</html>\n");
    page
}

/// Writes the heading: what is served, whether the gate is open, and how the server is protected.
fn summary(page: &mut String, figures: &Figures, title: &str) {
    let (class, gate) = if let Some((_, program)) = &figures.program {
        ("open", Escaped(program.lines.join("; ")).to_string())
    } else if figures.allowed {
        ("open", "the gate is open: a checkpoint may be fetched".to_owned())
    } else {
        let closed = "the gate is closed: nothing is published now, and requests wait (normal between two heals)";
        ("shut", closed.to_owned())
    };
    let size = figures.published.map_or(String::new(), |len| format!(" ({})", Size(len as f64)));
    let modes = match (figures.encrypted, figures.secret) {
        (true, true) => ", with TLS and a shared secret",
        (true, false) => ", with TLS",
        (false, true) => ", with a shared secret",
        (false, false) => "",
    };
    let limit = figures.max_bandwidth.map_or(String::new(), |limit| format!(", sends at most {}", Rate(limit as f64)));
    let _ = write!(
        page,
        "<h1>tensorferry: {title}{size}</h1>\n<p id=\"gate\" class=\"{class}\">{gate}</p>\n\
         <p class=\"dim\">version {}, port {}{modes}{limit}, up for {}, {} connections, {} requests waiting</p>\n",
        env!("CARGO_PKG_VERSION"),
        figures.port,
        Time(figures.up),
        figures.connections,
        figures.waiting,
    );
}

/// Writes the transfers that run now.
fn sending(page: &mut String, figures: &Figures) {
    let bodies = &figures.tallies.bodies;
    let _ = write!(
        page,
        "<h2>Sending</h2>\n<p class=\"dim\">{} sent so far in {} answers, {} answers were cut off</p>\n",
        Size(figures.sent as f64),
        bodies.complete,
        bodies.cut,
    );
    let heads = ["to", "step", "#connections", "progress", "#sent", "#rate", "#for"];
    table(page, "sending", &heads, "Nobody is receiving from here now.", &figures.transfers, |row, transfer| {
        let Transfer { peer, step, connections, sent, total, took } = transfer;
        row.cell(peer);
        row.cell(step);
        row.number(connections);
        row.progress(*sent, *total);
        row.number(Size(*sent as f64));
        row.number(Rate(transfer.bytes_per_second()));
        row.number(Time(*took));
    });
    if figures.relayed > 0 {
        let _ = writeln!(page, "<p class=\"dim\">{} of it was being received here</p>", Size(figures.relayed as f64));
    }
    if !figures.members.is_empty() {
        page.push_str("<h2>Receivers that send each other what is served</h2>\n");
        table(page, "swarm", &["at", "#last asked"], "", &figures.members, |row, (at, ago)| {
            row.cell(at);
            row.number(format_args!("{} ago", Time(*ago)));
        });
    }
}

/// Writes the tables of the program around the server, of `age`.
fn described(page: &mut String, program: &ProgramFigures, age: Duration) {
    for (index, made) in program.tables.iter().enumerate() {
        let _ = writeln!(page, "<h2>{}</h2>", Escaped(&made.heading));
        let heads: Vec<_> = made.heads.iter().map(|head| Escaped(head).to_string()).collect();
        let heads: Vec<_> = heads.iter().map(String::as_str).collect();
        table(page, &format!("own{index}"), &heads, "None.", &made.rows, |row, cells| {
            for (head, cell) in made.heads.iter().zip(cells) {
                if head.starts_with('#') { row.number(cell) } else { row.cell(cell) }
            }
        });
    }
    let _ = writeln!(page, "<p class=\"dim\">as of {} ago</p>", Time(age));
}

/// Writes the receives of this process that run now.
fn receiving(page: &mut String, running: &[Underway]) {
    page.push_str("<h2>Receiving</h2>\n");
    let heads = ["step", "phase", "progress", "#received", "#of", "#for"];
    table(page, "receiving", &heads, "This process is not receiving now.", running, |row, receive| {
        row.cell(receive.step);
        row.cell(receive.phase);
        row.progress(receive.received, receive.total);
        row.number(Size(receive.received as f64));
        row.number(Size(receive.total as f64));
        row.number(Time(receive.took));
    });
}

/// Writes the last receives of this process that ended.
fn received(page: &mut String, figures: &Figures) {
    let sums = &figures.receives.sums;
    let _ = write!(
        page,
        "<h2>Last receives</h2>\n<p class=\"dim\">{} healed, {} failed, {} received, {} ranges fetched again</p>\n",
        sums.healed,
        sums.failed,
        Size(sums.bytes as f64),
        sums.retries,
    );
    let heads = ["ended", "step", "#bytes", "#rate", "#open", "#fetch", "#build", "#in all", "route"];
    table(page, "received", &heads, "Nothing was received yet.", &figures.receives.ended, |row, ended| {
        let Ended { step, at, took, outcome } = ended;
        row.cell(format_args!("{} ago", Time(figures.at.duration_since(*at).unwrap_or_default())));
        row.cell(step);
        let (report, phases) = match outcome {
            Ok(outcome) => outcome,
            Err(class) => {
                for _ in 0..5 {
                    row.number("");
                }
                row.number(Time(*took));
                row.classed("bad", format_args!("failed: {class}"));
                return;
            }
        };
        row.number(Size(report.bytes as f64));
        row.number(Rate(report.bytes as f64 / phases.fetch.as_secs_f64().max(1e-9)));
        row.number(Time(phases.open));
        row.number(Time(phases.fetch));
        row.number(Time(phases.build));
        row.number(Time(*took));
        let mut routes: Vec<_> = report.routes.iter().map(|(here, there)| format!("{here} from {there}")).collect();
        if report.same_host {
            routes.push("shared memory".to_owned());
        }
        if report.relays > 0 {
            routes.push(format!("{} from {} other receivers", Size(report.relayed as f64), report.relays));
        }
        if report.senders.len() > 1 {
            let mut senders: Vec<_> = report.senders.iter().collect();
            senders.sort_by_key(|&(_, bytes)| Reverse(*bytes));
            let more = senders.len().saturating_sub(MOST_SENDERS);
            let named = senders.into_iter().take(MOST_SENDERS);
            routes.extend(named.map(|(sender, bytes)| format!("{} sent by {sender}", Size(*bytes as f64))));
            routes.extend((more > 0).then(|| format!("the rest by {more} more")));
        }
        row.cell(format_args!("{} connections, {}", report.lanes, routes.join(", ")));
    });
}

/// Writes how many requests were refused, and the last ones.
fn refused(page: &mut String, figures: &Figures) {
    let refusals = figures.tallies.answers.iter().filter(|(code, _)| **code >= 400);
    let counts: Vec<_> = refusals
        .map(|(code, count)| {
            let status = StatusCode::from_u16(*code).ok().and_then(|status| status.canonical_reason());
            format!("{count} with {code} {}", status.unwrap_or(""))
        })
        .collect();
    let counts = if counts.is_empty() { "none".to_owned() } else { counts.join(", ") };
    let _ = write!(page, "<h2>Refused requests</h2>\n<p class=\"dim\">{}</p>\n", Escaped(counts));
    let heads = ["when", "from", "#status", "answer"];
    let none = "No request of a peer that knows this server's path was refused.";
    table(page, "refused", &heads, none, &figures.tallies.refusals, |row, refusal| {
        let Refusal { at, peer, status, message } = refusal;
        row.cell(format_args!("{} ago", Time(figures.at.duration_since(*at).unwrap_or_default())));
        row.cell(peer);
        row.number(status);
        row.classed("msg", message);
    });
    page.push_str("<h2>Refused peers without a right to ask</h2>\n");
    let heads = ["last", "from", "#requests", "why"];
    let none = "Nobody has asked without the path or the secret.";
    table(page, "unknown", &heads, none, &figures.strangers, |row, stranger| {
        let Stranger { peer, reason, count, at } = stranger;
        row.cell(format_args!("{} ago", Time(figures.at.duration_since(*at).unwrap_or_default())));
        row.cell(peer);
        row.number(count);
        row.cell(reason.text());
    });
}
