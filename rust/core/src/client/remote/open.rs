//! Opening a checkpoint: which of its sources answers, and how long each is asked.
//!
//! Sources are asked one at a time, each with a share of the time that is left, so that one that is stuck does not use
//! up the deadline. One that says nothing is asked again later and given twice as long; a refused connection is retried
//! once. So it is with the addresses of one source (`targets`), of which each request takes the first that has not failed.

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
        let mut candidates: Vec<_> = sources.iter().map(|_| Candidate::default()).collect();
        let first = (options.ahead, options.most_described);
        // Each in turn, so that one that is stuck costs a share of the time and not all of it.
        while let Some(primary) = Candidate::next(&candidates) {
            let others = candidates.iter().filter(|candidate| !candidate.is_done).count() - 1;
            let candidate = &mut candidates[primary];
            let wait = candidate.wait();
            if limits.left().is_ok_and(|left| left < wait) {
                // No source wants to be asked before the deadline.
                return Err(last);
            }
            if candidate.asked > 0 && !limits.pause(wait) {
                break;
            }
            let url = &sources[primary].url;
            let (opened, at) = candidate.ask(url, step, first, &limits, others);
            let opened = match opened {
                Ok(opened) => opened,
                Err(e) => {
                    last = candidate.note(e, (url, at), step, &limits);
                    continue;
                }
            };
            let reopened = candidates.iter().map(|candidate| candidate.reopened).sum();
            let trouble = |(candidate, source): (Candidate, &Source)| {
                Some((source.url.authority().to_owned(), candidate.trouble?))
            };
            let troubles = candidates.into_iter().zip(&sources).filter_map(trouble).collect();
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
        match limits.left() {
            Err(over) if last.is_timeout() || !over.is_timeout() => {
                let over = if let Some(step) = step { over.at(&format!("step {step}")) } else { over };
                let waited: Vec<_> = candidates.into_iter().filter_map(|candidate| candidate.waited).collect();
                Err(over.waiting_for(|| waited.join("; ")))
            }
            _ => Err(last),
        }
    }
}

/// A source that may be opened, and what asking it has shown so far.
#[derive(Default)]
struct Candidate {
    is_done: bool,
    /// How often it was asked; how often it has failed in another way than by silence; when it may be asked again.
    asked: u32,
    failures: u32,
    not_before: Option<Instant>,
    /// What was being waited for when it did not answer in time.
    waited: Option<String>,
    /// The snapshot it has begun to send, and its error once that was gone.
    etag: Option<String>,
    gone: Option<Error>,
    /// Why it was asked by another address.
    refused: Option<Error>,
    passes: Passes,
    /// How often opening had to be begun anew after a connection had been made, and the last reason.
    reopened: u64,
    trouble: Option<Trouble>,
}

impl Candidate {
    /// How long it is not to be asked still.
    fn wait(&self) -> Duration {
        self.not_before.map_or(Duration::ZERO, |then| then.saturating_duration_since(Instant::now()))
    }

    /// The number of the one that may be asked now and was asked least, or else of the one that may be asked soonest.
    fn next(candidates: &[Self]) -> Option<usize> {
        let standing = (0..candidates.len()).filter(|&index| !candidates[index].is_done);
        standing.min_by_key(|&index| (candidates[index].wait(), candidates[index].asked))
    }

    /// Asks for `step`, without one for what it serves, and for the beginning of it, within a share of `limits` while
    /// `others` are to be asked as well; notes what was waited for in vain, and how the address has done. Also returns
    /// that, once there is a connection.
    fn ask(
        &mut self,
        url: &Arc<SourceUrl>,
        step: Option<i64>,
        first: (u64, u64),
        limits: &Limits,
        others: usize,
    ) -> (Result<FirstFetch, Error>, Option<IpAddr>) {
        let (share, patience) = share_and_patience(limits, others, self.asked, self.gone.is_some());
        let connection = match Connection::open(url, &share) {
            Ok(connection) => connection,
            Err(e) => {
                if e.is_timeout() {
                    self.waited = Some(reason(&e));
                }
                return (Err(e), None);
            }
        };
        let (there, at) = (connection.peer(), connection.address());
        let connection = connection.in_hurry(OPEN_PATIENCE);
        let patience = connection.patience(patience);
        let opened = FirstFetch::read(connection, step, first, &share, patience, &mut self.etag, &mut self.passes);
        let targets = url.targets();
        match (&opened, at) {
            (Ok(_), Some(at)) => targets.note_answered(at),
            (Err(e), Some(at)) if e.is_timeout() => {
                targets.note_silent(at);
                if limits.left().is_ok() || self.waited.is_none() {
                    let why = limits.at_most((patience / 4).clamp(Duration::from_millis(50), WHY_PATIENCE));
                    let state = there.and_then(|there| state_at(url, there, &why));
                    if state.is_some() {
                        targets.note_waiting(at);
                    }
                    let why = state.unwrap_or_else(|| "it accepts connections and answers nothing".to_owned());
                    self.waited = Some(format!("{}: {why}", reason(e)));
                }
            }
            _ => {}
        }
        (opened, at)
    }

    /// Notes that a request has ended with `error`, at the address `at` if there was a connection: whether it is asked again,
    /// when, and by another address or not. Returns the error that counts if nothing better comes.
    fn note(
        &mut self,
        error: Error,
        (url, at): (&SourceUrl, Option<IpAddr>),
        step: Option<i64>,
        limits: &Limits,
    ) -> Error {
        let targets = url.targets();
        if at.is_some_and(|at| goes_elsewhere(targets, at, &error)) && limits.left().is_ok() {
            // Behind a proxy, the port of one address may be that of another program.
            self.not_before = None;
            let last = Error::new(error.kind(), error.to_string());
            self.refused = Some(error);
            return last;
        }
        // A refused connection is retried once.
        let most = if at.is_none() && error.kind() == ErrorKind::Connect { 2 } else { ATTEMPTS };
        let is_mute = matches!(error.kind(), ErrorKind::Timeout | ErrorKind::Connect);
        // What one address has refused counts when the others say nothing.
        let refused = self.refused.take_if(|_| is_mute && !targets.has_untried() && limits.left().is_ok());
        let error = refused.unwrap_or(error);
        if error.is_timeout()
            && let Some(gone) = self.gone.take()
        {
            // This wait is for another snapshot than the one that was begun, and may last for ever.
            self.is_done = true;
            return gone;
        }
        // A refusal by status is the source's answer and stays.
        let is_refusal = matches!(error.kind(), ErrorKind::Status(_));
        let is_changed = error.kind() == ErrorKind::Changed;
        self.failures += u32::from(!error.is_timeout());
        if at.is_some() && error.is_transient() && !is_refusal && !error.is_timeout() {
            // What it has sent comes again, as a range of a lane does that is given to another connection.
            self.reopened += 1;
            self.trouble = Some(Trouble::of(&error));
        }
        self.is_done = !(error.is_transient() || is_changed) || is_refusal || self.failures >= most;
        self.asked += 1;
        self.not_before = Instant::now().checked_add(backoff(&error, self.failures));
        let authority = url.authority();
        let last = error.at(&step.map_or_else(|| authority.to_owned(), |step| format!("step {step} from {authority}")));
        if is_changed {
            self.etag = None;
            self.gone = Some(Error::new(ErrorKind::Changed, last.to_string()));
        }
        last
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

/// What was waited for when a source took too long.
fn reason(e: &Error) -> String {
    e.waited_for().map_or_else(|| e.to_string().trim_start_matches("timed out: ").to_owned(), str::to_owned)
}
