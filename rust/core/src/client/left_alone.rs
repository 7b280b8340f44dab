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
            if !length.is_zero() {
                // The oldest are forgotten.
                let over = (all.len() + 1).saturating_sub(MOST);
                all.drain(..over);
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_latest_are_remembered_and_a_success_makes_forget_none_of_them() {
        let all = LeftAlone::new();
        let pair = |number: usize| (None, [10, 0, 0, u8::try_from(number).unwrap()].into());
        let known = |all: &LeftAlone| (0..=MOST).filter(|&one| !all.left(pair(one), 1).is_zero()).collect::<Vec<_>>();
        (0..=MOST).for_each(|number| all.leave(pair(number), 1, Duration::from_mins(1)));
        assert_eq!(known(&all), (1..=MOST).collect::<Vec<_>>());
        all.leave(pair(0), 1, Duration::ZERO);
        assert_eq!(known(&all).len(), MOST);
        all.leave(pair(7), 1, Duration::ZERO);
        assert!(known(&all).len() == MOST - 1 && !known(&all).contains(&7));
    }
}
