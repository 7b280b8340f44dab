//! Opening a checkpoint: which of its sources answers, and how long each is asked.
//!
//! Sources are asked one at a time, each with a share of the time that is left, so that one that is stuck does not use
//! up the deadline. One that says nothing is asked again later and given twice as long; a refused connection is retried
//! once. So it is with the addresses of one source (`targets`), of which each request takes the first that has not failed.

use std::collections::{BTreeMap, VecDeque};
use std::net::IpAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use tensorferry_wire::request::STEP_PATH;

use super::first_fetch::{self, FirstFetch};
use super::{Passes, Remote};
use crate::client::connection::Connection;
use crate::client::limits::{ATTEMPTS, Limits, backoff};
use crate::client::source::state_at;
use crate::client::targets::Targets;
use crate::client::url::SourceUrl;
use crate::client::{FetchOptions, Source};
use crate::error::{Error, ErrorKind};
use crate::report::Trouble;
use crate::trust::secret;

/// How long one of several sources may be silent before the next one is asked; twice as long each time it is its turn.
const OPEN_PATIENCE: Duration = Duration::from_secs(1);
/// How long a source may take to serve another snapshot in the place of one that it had begun to send and that is gone.
const NEXT_PATIENCE: Duration = Duration::from_secs(1);
/// How long a source that keeps a request waiting may take to say why.
const WHY_PATIENCE: Duration = Duration::from_secs(1);

impl Remote {
    /// Asks the sources in `urls` for `step`, or without one for what they serve; they must serve the same snapshot. Waits
    /// while the gate is closed there.
    ///
    /// The returned value has the header and the reserved entries, verified; [`Remote::fetch`] fetches the rest.
    ///
    /// ```
    /// use std::time::Duration;
    /// use bytes::Bytes;
    /// use tensorferry_core::{Destination, FetchOptions, Item, Publication, Remote, Server, ServerConfig, Stability};
    /// use tensorferry_wire::dtype::Dtype;
    ///
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # let runtime = tokio::runtime::Runtime::new()?;
    /// # let server = Server::bind(&ServerConfig::default(), runtime.handle())?;
    /// let item = Item::bytes("w", Dtype::U8, &[3], Bytes::from_static(b"abc"));
    /// server.store().publish(3, Publication::new(Vec::new(), vec![item], Stability::Private, Box::new(()))?);
    ///
    /// let remote = Remote::open(&[&server.url("127.0.0.1")], 3, FetchOptions::within(Duration::from_secs(10)))?;
    /// assert_eq!(remote.header().entries()[0].name, "w");
    /// let mut weights = [0_u8; 3];
    /// // SAFETY: as many bytes as the entry has, which nobody else uses until `fetch` has returned.
    /// let destination = unsafe { Destination::given(vec![Some(weights.as_mut_ptr() as usize)]) };
    /// let report = remote.fetch(destination)?.report().clone();
    /// assert_eq!((&weights, report.bytes), (b"abc", 3));
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// [`ErrorKind::Invalid`] when `urls` is empty or holds what is no address, or the timeout is too long;
    /// [`ErrorKind::Timeout`] at the deadline; [`ErrorKind::Connect`] when no source can be reached;
    /// [`ErrorKind::Changed`] when what the source had begun to send is gone and nothing takes its place;
    /// [`ErrorKind::Status`] when it refuses, 400 for a step it does not serve; [`ErrorKind::Foreign`] when it is
    /// another program's server; [`ErrorKind::Unproven`] when it does not know the secret, or shows another certificate
    /// than its URL names; [`ErrorKind::Protocol`] when what it says is not valid, or more than
    /// [`FetchOptions::most_described`]; [`ErrorKind::Corrupt`] and [`ErrorKind::Torn`] when the header or the reserved
    /// entries do not match their checksums time and again; [`ErrorKind::Cancelled`]; [`ErrorKind::System`] when there
    /// is no memory, socket or thread for it.
    pub fn open(urls: &[&str], step: impl Into<Option<i64>>, options: FetchOptions) -> Result<Self, Error> {
        let step = step.into();
        let started = Instant::now();
        let deadline = started
            .checked_add(options.timeout)
            .ok_or_else(|| Error::new(ErrorKind::Invalid, "the timeout is too long to be counted"))?;
        let limits = Limits { started, deadline, stall: options.stall, cancel: options.cancel };
        let sources = urls.iter().map(|url| Source::parse(url, options.same_host, options.secret.as_ref()));
        let sources = sources.collect::<Result<Vec<_>, Error>>()?;
        let mut last = Error::new(ErrorKind::Invalid, "no source was named");
        // For each source that did not answer in time: what was being waited for.
        let mut waited: Vec<Option<String>> = vec![None; sources.len()];
        // For each source: the snapshot it has begun to send, and its error once that was gone.
        let mut begun: Vec<(Option<String>, Option<Error>)> = sources.iter().map(|_| (None, None)).collect();
        // For each source: why it was asked by another address.
        let mut refused: Vec<Option<Error>> = sources.iter().map(|_| None).collect();
        let (mut reopened, mut troubles) = (0, BTreeMap::new());
        let mut passes: Vec<Passes> = sources.iter().map(|_| Passes::default()).collect();
        // Each in turn, so that one that is stuck costs a share of the time and not all of it.
        let mut standing: VecDeque<_> = (0..sources.len()).map(Turn::first).collect();
        while let Some(Turn { source: primary, asked, failures, not_before }) = Turn::next(&mut standing) {
            let wait = not_before.map_or(Duration::ZERO, |then| then.saturating_duration_since(Instant::now()));
            if limits.left().is_ok_and(|left| left < wait) {
                // No source wants to be asked before the deadline.
                return Err(last);
            }
            if asked > 0 && !limits.pause(wait, || false) {
                return Err(match limits.left() {
                    Err(over) if last.is_timeout() || !over.is_timeout() => late(over, step, &waited),
                    _ => last,
                });
            }
            let url = &sources[primary].url;
            let (etag, gone) = &mut begun[primary];
            let (share, patience) = share_and_patience(&limits, standing.len(), asked, gone.is_some());
            let limited = (&limits, &share, patience);
            let (asking, passes) = ((step, (options.ahead, options.most_described)), &mut passes[primary]);
            let (opened, at) = ask(url, asking, limited, etag, passes, &mut waited[primary]);
            let connected = at.is_some();
            let nobody = !connected && opened.as_ref().is_err_and(|e| e.kind() == ErrorKind::Connect);
            let (opened, goes_elsewhere) = judged(opened, (url.targets(), at), &mut refused[primary], &limits);
            match opened {
                Ok(opened) => {
                    sources[primary].note_opened(opened.etag, opened.connection.route(), opened.offers);
                    return Ok(Self {
                        sources,
                        primary,
                        opener: primary,
                        step: opened.step,
                        key: opened.step.to_string(),
                        payload_start: opened.payload_start,
                        header: Arc::new(opened.header),
                        header_digest: opened.header_digest,
                        algorithm: secret::algorithm(options.secret.as_ref()),
                        prefix: opened.prefix,
                        route: opened.connection.route(),
                        // It was given a share of the time, and must not end with that.
                        connections: vec![opened.connection.within(&limits)],
                        opening: started.elapsed(),
                        reopened,
                        troubles,
                        lanes: options.lanes,
                        pool: options.pool,
                        progress: options.progress,
                        relay: options.relay,
                        joining: (options.relays_at_once, options.beside.max(1)),
                        limits,
                    });
                }
                Err(e) if goes_elsewhere => {
                    // Behind a proxy, the port of one address may be that of another program.
                    last = Error::new(e.kind(), e.to_string());
                    refused[primary] = Some(e);
                    standing.push_front(Turn { source: primary, asked, failures, not_before: None });
                }
                Err(e) if e.is_timeout() && gone.is_some() => {
                    // This wait is for another snapshot than the one that was begun, and may last for ever.
                    last = gone.take().unwrap_or(e);
                }
                Err(e) => {
                    // A refusal by status is the source's answer and stays. A refused connection is retried once.
                    let refused = matches!(e.kind(), ErrorKind::Status(_));
                    let repairable = e.is_transient() || e.kind() == ErrorKind::Changed;
                    let most = if nobody { 2 } else { ATTEMPTS };
                    let failures = if e.is_timeout() { failures } else { failures + 1 };
                    if connected && e.is_transient() && !refused && !e.is_timeout() {
                        // What it has sent comes again, as a range of a lane does that is given to another connection.
                        reopened += 1;
                        troubles.insert(url.authority().to_owned(), Trouble::of(&e));
                    }
                    if repairable && !refused && failures < most {
                        let not_before = Instant::now().checked_add(backoff(&e, failures));
                        standing.push_back(Turn { source: primary, asked: asked + 1, failures, not_before });
                    }
                    let changed = e.kind() == ErrorKind::Changed;
                    last = e.at(&asked_for(step, url.authority()));
                    if changed {
                        *etag = None;
                        *gone = Some(Error::new(ErrorKind::Changed, last.to_string()));
                    }
                }
            }
        }
        match limits.left() {
            Err(over) if last.is_timeout() && over.is_timeout() => Err(late(over, step, &waited)),
            _ => Err(last),
        }
    }
}

/// Asks the source at `url` for `step`, without one for what it serves, and for the beginning of it, within a share of
/// `limits`; notes in `waited` what was waited for in vain, and how the address has done. Also returns that, once there is a
/// connection.
fn ask(
    url: &Arc<SourceUrl>,
    (step, first): (Option<i64>, (u64, u64)),
    (limits, share, patience): (&Limits, &Limits, Duration),
    etag: &mut Option<String>,
    passes: &mut Passes,
    waited: &mut Option<String>,
) -> (Result<FirstFetch, Error>, Option<IpAddr>) {
    let connection = match Connection::open(url, share) {
        Ok(connection) => connection,
        Err(e) => {
            if e.is_timeout() {
                *waited = Some(reason(&e));
            }
            return (Err(e), None);
        }
    };
    let (there, at) = (connection.peer(), connection.address());
    let connection = connection.in_hurry(OPEN_PATIENCE);
    let patience = connection.patience(patience);
    let opened = FirstFetch::read(connection, step, first, share, patience, etag, passes);
    let targets = url.targets();
    match (&opened, at) {
        (Ok(_), Some(at)) => targets.note_answered(at),
        (Err(e), Some(at)) if e.is_timeout() => {
            targets.note_silent(at);
            if limits.left().is_ok() || waited.is_none() {
                let state = there.and_then(|there| state_at(url, there, &why_limits(limits, patience)));
                if state.is_some() {
                    targets.note_waiting(at);
                }
                let why = state.unwrap_or_else(|| "it accepts connections and answers nothing".to_owned());
                *waited = Some(format!("{}: {why}", reason(e)));
            }
        }
        _ => {}
    }
    (opened, at)
}

/// What `opened`, the result of a request at the address `at`, counts as, and whether another address is to be asked at
/// once. What one has `refused` counts when the others say nothing.
fn judged(
    opened: Result<FirstFetch, Error>,
    (targets, at): (&Targets, Option<IpAddr>),
    refused: &mut Option<Error>,
    limits: &Limits,
) -> (Result<FirstFetch, Error>, bool) {
    match (opened, at) {
        (Err(e), Some(at)) if goes_elsewhere(targets, at, &e) && limits.left().is_ok() => (Err(e), true),
        (Err(e), _) if matches!(e.kind(), ErrorKind::Timeout | ErrorKind::Connect) => {
            let is_last = !targets.has_untried() && limits.left().is_ok();
            let before = if is_last { refused.take() } else { None };
            (Err(before.unwrap_or(e)), false)
        }
        (opened, _) => (opened, false),
    }
}

/// Whether another address of the source is to be asked at once, after a request at `at` has ended with `e`.
fn goes_elsewhere(targets: &Targets, at: IpAddr, e: &Error) -> bool {
    if e.is_timeout() || e.retry_after().is_some() {
        return false;
    }
    // What the host refuses, the source refuses.
    let is_final = match e.kind() {
        ErrorKind::Status(_) => targets.is_host(at),
        ErrorKind::Cancelled | ErrorKind::Changed | ErrorKind::System => true,
        _ => false,
    };
    if is_final {
        return false;
    }
    targets.note_error(at, e);
    // Another address comes next in any case, and what is damaged counts.
    !matches!(e.kind(), ErrorKind::Corrupt | ErrorKind::Torn) && targets.has_untried()
}

/// How errors name what was asked for.
fn asked_for(step: Option<i64>, authority: &str) -> String {
    step.map_or_else(|| authority.to_owned(), |step| format!("step {step} from {authority}"))
}

/// What of the limits one try may take while `others` are still to be asked, and how long its answer may take to begin.
///
/// A silent source may have nothing to serve yet, or be stuck: it is asked again and given longer each time.
fn share_and_patience(limits: &Limits, others: usize, asked: u32, has_gone: bool) -> (Limits, Duration) {
    let others = u32::try_from(others).unwrap_or(u32::MAX - 1);
    let mut share = limits.share(others + 1);
    if others > 0 {
        share = share.at_most(limits.stall.saturating_mul(1 << asked.min(10)));
    }
    let patience = if others == 0 { limits.stall } else { limits.stall.min(OPEN_PATIENCE) };
    let patience = patience.saturating_mul(1 << asked.min(10));
    (share, if has_gone { patience.min(NEXT_PATIENCE) } else { patience })
}

/// A source that is still to be asked.
#[derive(Debug)]
struct Turn {
    /// Its number.
    source: usize,
    /// How often it was asked.
    asked: u32,
    /// How often it has failed in another way than by silence.
    failures: u32,
    /// When it may be asked again.
    not_before: Option<Instant>,
}

impl Turn {
    fn first(source: usize) -> Self {
        Self { source, asked: 0, failures: 0, not_before: None }
    }

    /// Takes the first that may be asked now, or else the one that may be asked soonest.
    fn next(standing: &mut VecDeque<Self>) -> Option<Self> {
        let now = Instant::now();
        let wait = |turn: &Self| turn.not_before.map_or(Duration::ZERO, |then| then.saturating_duration_since(now));
        let first = (0..standing.len()).min_by_key(|&index| wait(&standing[index]))?;
        standing.remove(first)
    }
}

/// The step that the source at the other end serves. Its answer may take `patience` to begin.
pub(super) fn served_step(connection: &mut Connection, patience: Duration) -> Result<i64, Error> {
    let head = connection.get(STEP_PATH, None, None, Some(patience))?;
    if head.status != 200 {
        return Err(first_fetch::refused(connection, &head));
    }
    let body = connection.body(&head, 64)?;
    let step = std::str::from_utf8(&body).ok().and_then(|text| text.trim().parse().ok());
    step.ok_or_else(|| Error::new(ErrorKind::Protocol, "the source does not say which step it serves"))
}

/// The error for a deadline that has passed, with what was waited for at each source.
fn late(over: Error, step: Option<i64>, waited: &[Option<String>]) -> Error {
    let waited: Vec<_> = waited.iter().flatten().map(String::as_str).collect();
    let over = match step {
        Some(step) => over.at(&format!("step {step}")),
        None => over,
    };
    over.waiting_for(|| waited.join("; "))
}

/// What was waited for when a source took too long.
fn reason(e: &Error) -> String {
    e.waited_for().map_or_else(|| e.to_string().trim_start_matches("timed out: ").to_owned(), str::to_owned)
}

/// The limits of the question why a source keeps a request waiting.
fn why_limits(limits: &Limits, patience: Duration) -> Limits {
    limits.at_most((patience / 4).clamp(Duration::from_millis(50), WHY_PATIENCE))
}
