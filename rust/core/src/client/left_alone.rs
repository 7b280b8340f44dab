//! Addresses of sources that failed, and until when this process leaves them alone.
//!
//! It is known to all receives of a process, so that one that follows another does not wait again for what was silent a
//! moment ago.

use std::sync::Mutex;
use std::time::{Duration, Instant};

use super::pairs::Pair;

/// The most that are remembered.
const MOST: usize = 64;

/// Other addresses of sources, which carry nothing for so long.
pub(super) static RAILS: LeftAlone = LeftAlone::new();
/// Addresses of sources that are tried last for so long.
pub(super) static ADDRESSES: LeftAlone = LeftAlone::new();

/// Pairs of addresses by which sources were to be reached, their ports, and until when each is left alone.
#[derive(Debug)]
pub(super) struct LeftAlone(Mutex<Vec<(Pair, u16, Instant)>>);

impl LeftAlone {
    const fn new() -> Self {
        Self(Mutex::new(Vec::new()))
    }

    /// Notes that a pair is to be left alone for `length`; with no length, that it is as good as any other.
    pub(super) fn leave(&self, pair: Pair, port: u16, length: Duration) {
        // A forked child may find it locked for ever.
        if let Ok(mut all) = self.0.try_lock()
            && let Some(until) = Instant::now().checked_add(length)
        {
            all.retain(|one| (one.0, one.1) != (pair, port) && one.2 > Instant::now());
            all.truncate(MOST - 1);
            if !length.is_zero() {
                all.push((pair, port, until));
            }
        }
    }

    /// For how long a pair is to be left alone still.
    pub(super) fn left(&self, pair: Pair, port: u16) -> Duration {
        let all = self.0.try_lock().ok();
        let until = all.and_then(|all| all.iter().find(|one| (one.0, one.1) == (pair, port)).map(|one| one.2));
        until.map_or(Duration::ZERO, |until| until.saturating_duration_since(Instant::now()))
    }
}
