//! A limit on the bytes per second that a server sends over all its connections.
//!
//! It hands out time instead of tokens: each frame moves the moment at which the next one may leave. After a pause at
//! most [`BURST`] of the full rate may leave at once. A sender that has to wait has its place from then on, so connections
//! take turns; frames are short enough that each gets a turn often.

use std::sync::Mutex;
use std::time::{Duration, Instant};

use crate::sync::Locked;
use tensorferry_wire::digest::BLOCK_SIZE;

/// How much may be sent at once after a pause, as a time at the full rate. No frame takes longer, unless it is short.
const BURST: Duration = Duration::from_millis(20);
/// Frames are not made shorter than this.
const LEAST_FRAME: u64 = 16 << 10;

/// Hands out the times at which bytes may leave.
#[derive(Debug)]
pub(crate) struct Throttle {
    bytes_per_second: u64,
    /// When all that was handed out has left.
    free: Mutex<Instant>,
}

impl Throttle {
    pub(crate) fn new(bytes_per_second: u64) -> Self {
        Self { bytes_per_second: bytes_per_second.max(1), free: Mutex::new(Instant::now()) }
    }

    /// The limit.
    pub(crate) fn bytes_per_second(&self) -> u64 {
        self.bytes_per_second
    }

    /// How many bytes a connection may send before it is the turn of another one.
    pub(crate) fn most_per_turn(&self) -> u64 {
        let in_burst = u128::from(self.bytes_per_second) * BURST.as_millis() / 1000;
        u64::try_from(in_burst).unwrap_or(u64::MAX).clamp(LEAST_FRAME, BLOCK_SIZE)
    }

    /// Takes the next turn for `bytes`; returns how long the sender has to wait for it. Who asks later comes later.
    pub(crate) fn reserve(&self, bytes: u64, now: Instant) -> Duration {
        let mut free = self.free.locked();
        let begin = (*free).max(now.checked_sub(BURST).unwrap_or(now));
        *free = begin.checked_add(self.time_for(bytes)).unwrap_or(begin);
        begin.saturating_duration_since(now)
    }

    /// Gives back `bytes` that were reserved and will not be sent.
    pub(crate) fn give_back(&self, bytes: u64) {
        let mut free = self.free.locked();
        *free = (*free).checked_sub(self.time_for(bytes)).unwrap_or(*free);
    }

    /// How long `bytes` take at the full rate.
    fn time_for(&self, bytes: u64) -> Duration {
        // The digits that are lost beyond 2^53 bytes a second matter to no rate.
        Duration::try_from_secs_f64(bytes as f64 / self.bytes_per_second as f64).unwrap_or(Duration::MAX)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_are_spread_over_time() {
        let throttle = Throttle::new(1 << 20);
        let now = Instant::now() + Duration::from_secs(1);
        let wait = |at| throttle.reserve(1 << 19, at).as_millis();
        assert_eq!([wait(now), wait(now), wait(now)], [0, 480, 980], "half a second each, after the burst");
        let later = now + Duration::from_secs(9);
        assert_eq!([wait(later), wait(later)], [0, 480], "what was not used is gone");
        throttle.give_back(1 << 19);
        assert_eq!(wait(later), 480, "what was given back goes to the next one");
    }

    #[test]
    fn turns_are_short() {
        let turn = |rate| Throttle::new(rate).most_per_turn();
        assert_eq!([1, 10_000_000, 1 << 40].map(turn), [LEAST_FRAME, 200_000, BLOCK_SIZE]);
    }
}
