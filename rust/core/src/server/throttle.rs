//! A limit on the bytes per second that a server sends over all its connections.
//!
//! It hands out time instead of tokens: each frame moves the moment at which the next one may leave. After a pause at
//! most [`BURST`] of the full rate may leave at once.

use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

/// How much may be sent at once after a pause, as a time at the full rate.
const BURST: Duration = Duration::from_millis(20);

/// Hands out the times at which bytes may leave.
#[derive(Debug)]
pub(crate) struct Throttle {
    bytes_per_second: f64,
    /// When all that was handed out has left.
    free: Mutex<Instant>,
}

impl Throttle {
    pub(crate) fn new(bytes_per_second: u64) -> Self {
        // The digits that are lost beyond 2^53 bytes a second matter to no rate.
        let bytes_per_second = bytes_per_second.max(1) as f64;
        Self { bytes_per_second, free: Mutex::new(Instant::now()) }
    }

    /// How long a sender has to wait before its next frame.
    pub(crate) fn delay(&self, now: Instant) -> Duration {
        self.free.lock().unwrap_or_else(PoisonError::into_inner).saturating_duration_since(now)
    }

    /// Counts `bytes` as sent at `now`: the next sender waits for as long as they take at the full rate.
    pub(crate) fn book(&self, bytes: usize, now: Instant) {
        let takes = Duration::try_from_secs_f64(bytes as f64 / self.bytes_per_second).unwrap_or(Duration::MAX);
        let mut free = self.free.lock().unwrap_or_else(PoisonError::into_inner);
        let begin = (*free).max(now.checked_sub(BURST).unwrap_or(now));
        *free = begin.checked_add(takes).unwrap_or(begin);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_are_spread_over_time() {
        let throttle = Throttle::new(1 << 20);
        let now = Instant::now() + Duration::from_secs(1);
        let send = |at| {
            let delay = throttle.delay(at);
            throttle.book(1 << 19, at + delay);
            delay.as_millis()
        };
        assert_eq!([send(now), send(now), send(now)], [0, 480, 980], "half a second each, after the burst");
        let later = now + Duration::from_secs(9);
        assert_eq!([send(later), send(later)], [0, 480], "what was not used is gone");
    }
}
