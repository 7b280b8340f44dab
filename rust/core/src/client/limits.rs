//! When a transfer must be over, and what counts as stuck.
//!
//! [`Limits`] is the deadline of a whole receive with the limit on silence; every blocking call asks it how long it may
//! take. [`StallDetector`] covers what a socket's timeout does not see: a connection on which single bytes keep
//! arriving.

use std::time::{Duration, Instant};

use crate::cancel::Cancel;
use crate::error::{Error, ErrorKind};

/// Fewer bytes in a second than this are no progress: a connection with so little is as stuck as a silent one.
const LEAST_PACE: u64 = 1 << 10;

/// The longest that a source's Retry-After delays another request: it may be free again long before.
const LONGEST_RETRY: Duration = Duration::from_secs(10);
/// The least pause before the first repetition of a request that a source has refused with Retry-After, whatever that
/// says; it doubles each time, five times at most.
const SHORTEST_RETRY: Duration = Duration::from_millis(250);

/// How often in a row something may fail before it is given up.
pub(super) const ATTEMPTS: u32 = 5;
/// The first pause before what has failed is tried again, which doubles each time.
const FIRST_PAUSE: Duration = Duration::from_millis(80);

/// How long to wait before what has failed `failures` times in a row, the last time with `error`, is tried again: longer
/// each time, or as the source has said.
pub(super) fn backoff(error: &Error, failures: u32) -> Duration {
    let doubled = 1 << failures.saturating_sub(1).min(5);
    let ordinary = FIRST_PAUSE.saturating_mul(doubled);
    error.retry_after().map_or(ordinary, |said| said.min(LONGEST_RETRY).max(SHORTEST_RETRY.saturating_mul(doubled)))
}

/// How fast an answer comes, for noticing a connection on which bytes drip.
#[derive(Debug, Default)]
pub(super) struct StallDetector {
    since: Option<Instant>,
    got: u64,
}

impl StallDetector {
    /// Records `bytes` of an answer; returns whether next to nothing has arrived for the time of `stall`.
    pub(super) fn is_stuck(&mut self, bytes: usize, stall: Duration) -> bool {
        let now = Instant::now();
        let since = *self.since.get_or_insert(now);
        self.got += bytes as u64;
        let elapsed = now - since;
        if elapsed < stall {
            return false;
        }
        let got = std::mem::take(&mut self.got);
        self.since = Some(now);
        u128::from(got) * 1000 < u128::from(LEAST_PACE) * elapsed.as_millis()
    }
}

/// When an operation must be over, and how it ends early.
#[derive(Clone, Debug)]
pub(crate) struct Limits {
    pub(crate) started: Instant,
    pub(crate) deadline: Instant,
    /// No byte for this long means that the connection is stuck.
    pub(crate) stall: Duration,
    pub(crate) cancel: Cancel,
}

impl Limits {
    /// Time left, or the error that it is over or that the transfer was cancelled.
    pub(crate) fn left(&self) -> Result<Duration, Error> {
        if self.cancel.is_cancelled() {
            return Err(Error::new(ErrorKind::Cancelled, "the transfer was cancelled"));
        }
        match self.deadline.checked_duration_since(Instant::now()) {
            Some(left) if !left.is_zero() => Ok(left),
            _ => Err(self.over()),
        }
    }

    /// The same limits with the `parts`-th part of the time that is left.
    pub(crate) fn share(&self, parts: u32) -> Self {
        let now = Instant::now();
        let left = self.deadline.saturating_duration_since(now);
        let deadline = if parts > 1 { now + left / parts } else { self.deadline };
        Self { deadline, ..self.clone() }
    }

    /// The same limits, but no longer than `length` from now.
    pub(crate) fn at_most(&self, length: Duration) -> Self {
        let deadline = Instant::now().checked_add(length).map_or(self.deadline, |end| end.min(self.deadline));
        Self { deadline, ..self.clone() }
    }

    /// Sleeps for `length`, in steps of at most 20 ms, or until the operation must end; says whether it may go on.
    pub(crate) fn pause(&self, length: Duration) -> bool {
        let (step, started) = (Duration::from_millis(20), Instant::now());
        while let Ok(left) = self.left()
            && let Some(rest) = length.checked_sub(started.elapsed()).filter(|rest| !rest.is_zero())
        {
            std::thread::sleep(step.min(rest).min(left));
        }
        self.left().is_ok()
    }

    pub(crate) fn over(&self) -> Error {
        let allowed = self.deadline.saturating_duration_since(self.started).as_secs_f64();
        Error::new(ErrorKind::Timeout, format!("timed out: the whole receive was given {allowed:.3} s"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn next_to_nothing_is_no_progress_and_slow_is() {
        let stall = Duration::from_millis(40);
        let run = |bytes: usize| {
            let mut pace = StallDetector::default();
            let noted = |_| {
                std::thread::sleep(Duration::from_millis(10));
                pace.is_stuck(bytes, stall)
            };
            (0..20).any(noted)
        };
        assert!(run(1));
        assert!(!run(1000));
        let mut pace = StallDetector::default();
        assert!(!pace.is_stuck(1, stall), "the first byte comes whenever it comes");
    }

    #[test]
    fn a_pause_is_as_long_as_it_is_said_to_be() {
        let (started, stall) = (Instant::now(), Duration::from_secs(9));
        let limits = Limits { started, deadline: started + Duration::from_millis(3900), stall, cancel: Cancel::new() };
        assert!((0..200).all(|_| limits.pause(Duration::from_millis(1))));
    }
}
