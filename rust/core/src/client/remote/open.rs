//! Opening a checkpoint: which of its sources answers, and until when each is asked.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::opened::Opened;
use super::{OPEN_ATTEMPTS, Passes, Remote};
use crate::client::connection::Connection;
use crate::client::limits::Limits;
use crate::client::{FetchOptions, Peer};
use crate::error::{Error, ErrorKind};
use crate::secret;

/// How long one of several sources may be silent before the next one is asked; twice as long each time it is its turn.
const OPEN_PATIENCE: Duration = Duration::from_secs(1);

impl Remote {
    /// Asks the sources in `urls` for `step`; they must serve the same snapshot. Waits while nothing is allowed yet.
    ///
    /// # Errors
    /// [`ErrorKind::Timeout`] at the deadline; [`ErrorKind::Connect`] when no source can be reached;
    /// [`ErrorKind::Status`] when it refuses, 400 for a step it does not serve; [`ErrorKind::Foreign`] when it is a
    /// stock torchft server; [`ErrorKind::Unproven`] when it does not know the secret; [`ErrorKind::Protocol`] when what
    /// it says is not valid.
    pub fn open(urls: &[&str], step: i64, options: FetchOptions) -> Result<Self, Error> {
        let started = Instant::now();
        let deadline = started
            .checked_add(options.timeout)
            .ok_or_else(|| Error::new(ErrorKind::Invalid, "the timeout is too long to be counted"))?;
        let limits = Limits { started, deadline, stall: options.stall, cancel: options.cancel };
        let peers = urls.iter().map(|url| Peer::parse(url, options.same_host, options.secret.as_ref()));
        let peers = peers.collect::<Result<Vec<_>, Error>>()?;
        let mut last = Error::new(ErrorKind::Invalid, "no source was named");
        let mut passes: Vec<Passes> = peers.iter().map(|_| Passes::default()).collect();
        // Each in turn, so that one that is stuck costs a share of the time and not all of it.
        let mut standing: VecDeque<_> = (0..peers.len()).map(|index| (index, 0_u32, 0_u32)).collect();
        while let Some((primary, asked, failures)) = standing.pop_front() {
            if asked > 0 && !limits.pause(Duration::from_millis(20 << asked.min(5)), || false) {
                return Err(limits
                    .left()
                    .err()
                    .filter(|_| last.is_timeout() || limits.cancel.is_cancelled())
                    .unwrap_or(last));
            }
            let source = &peers[primary].source;
            let others = u32::try_from(standing.len()).unwrap_or(u32::MAX);
            let mut share = limits.share(others + 1);
            if others > 0 {
                share = share.at_most(limits.stall.saturating_mul(1 << asked.min(10)));
            }
            // One that says nothing may have nothing to serve yet, or be stuck: asked again, and given longer each time.
            let patience = if others == 0 { limits.stall } else { limits.stall.min(OPEN_PATIENCE) };
            let patience = patience.saturating_mul(1 << asked.min(10));
            let (opened, nobody) = match Connection::open(source, &share) {
                Ok(connection) => {
                    let passes = &mut passes[primary];
                    (Opened::read(connection, step, options.ahead, &share, patience, passes), false)
                }
                Err(e) => {
                    let nobody = e.kind() == ErrorKind::Connect;
                    (Err(e), nobody)
                }
            };
            match opened {
                Ok(opened) => {
                    let _ = peers[primary].etag.set(opened.etag);
                    peers[primary].learn(opened.same_host);
                    return Ok(Self {
                        peers,
                        primary,
                        opener: primary,
                        key: step.to_string(),
                        payload_start: opened.payload_start,
                        header: Arc::new(opened.header),
                        header_digest: opened.header_digest,
                        algorithm: secret::algorithm(options.secret.as_ref()),
                        prefix: opened.prefix,
                        route: opened.connection.route(),
                        // It was given a share of the time, and must not end with that.
                        connections: vec![opened.connection.within(&limits)],
                        opening: started.elapsed(),
                        lanes: options.lanes,
                        pool: options.pool,
                        progress: options.progress,
                        limits,
                    });
                }
                Err(e) => {
                    // Not a refusal, which is what the source has to say. Nobody there is worth one more try and no more.
                    let refused = matches!(e.kind(), ErrorKind::Status(_));
                    let repairable = e.is_transient() || e.kind() == ErrorKind::Changed;
                    let most = if nobody { 2 } else { OPEN_ATTEMPTS };
                    let failures = if e.is_timeout() { failures } else { failures + 1 };
                    if repairable && !refused && failures < most {
                        standing.push_back((primary, asked + 1, failures));
                    }
                    last = e.at(&format!("step {step} from {}", source.authority()));
                }
            }
        }
        Err(last)
    }
}
