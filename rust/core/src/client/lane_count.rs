//! How many lanes a transfer has: by the cores of this machine, by the delay of the network, and by how much there is to
//! fetch.

use std::time::Duration;

/// A lane beyond the few that every transfer has must bring so much, or its connection is not made up for.
const LEAST_FOR_MORE: u64 = 32 << 20;
/// The most lanes that a long delay is a reason for.
const MOST_FOR_DELAY: u128 = 16;
/// The delay that each of these stands for: with the buffers of most systems, a lane has about 3 MiB under way.
const DELAY_OF_A_LANE: Duration = Duration::from_millis(2);

/// The cores of this machine that this process may use.
fn cores() -> usize {
    std::thread::available_parallelism().map_or(2, std::num::NonZero::get)
}

/// Lanes over the network for a transfer of any size, and threads that read what was received before.
pub(super) fn few() -> usize {
    few_by(cores())
}

/// Two lanes for each core keep the source's threads evenly busy (measured); more than eight need more cores than that.
fn few_by(cores: usize) -> usize {
    (2 * cores).clamp(2, 8)
}

/// Lanes for `bytes` over a network with this delay, there and back, where it is known.
pub(super) fn over_network(bytes: u64, delay: Option<Duration>) -> usize {
    over_network_by(cores(), bytes, delay)
}

/// [`over_network`] for a machine with so many cores.
fn over_network_by(cores: usize, bytes: u64, delay: Option<Duration>) -> usize {
    let for_delay = delay.map_or(0, |delay| delay.as_micros() / DELAY_OF_A_LANE.as_micros()).min(MOST_FOR_DELAY);
    let wanted = cores.min(16).max(usize::try_from(for_delay).unwrap_or(0));
    few_by(cores).max(wanted.min(lanes_for(bytes)))
}

/// Lanes for `bytes` from a source on this machine. Each has a thread on either side that copies: where there are few
/// cores, more of them are in each other's way.
pub(super) fn same_host(bytes: u64) -> usize {
    same_host_by(cores(), bytes)
}

fn same_host_by(cores: usize, bytes: u64) -> usize {
    cores.clamp(2, 4).max((cores / 2).min(8).min(lanes_for(bytes)))
}

/// How many lanes have enough to do with `bytes`.
fn lanes_for(bytes: u64) -> usize {
    usize::try_from(bytes / LEAST_FOR_MORE).unwrap_or(usize::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn more_cores_mean_more_lanes_for_much_to_fetch() {
        let (much, little) = (1 << 30, 100 << 20);
        let lanes = |bytes| [1, 2, 4, 8, 12, 16, 64].map(|cores| over_network_by(cores, bytes, None));
        assert_eq!(lanes(much), [2, 4, 8, 8, 12, 16, 16]);
        assert_eq!(lanes(little), [2, 4, 8, 8, 8, 8, 8]);
        let lanes = |bytes| [1, 2, 4, 8, 12, 16, 64].map(|cores| same_host_by(cores, bytes));
        assert_eq!(lanes(much), [2, 2, 4, 4, 6, 8, 8]);
        assert_eq!(lanes(little), [2, 2, 4, 4, 4, 4, 4]);
    }

    #[test]
    fn a_long_delay_means_more_lanes_for_much_to_fetch() {
        let lanes = |bytes, millis| over_network_by(2, bytes, Some(Duration::from_millis(millis)));
        assert_eq!([0, 1, 8, 20, 40, 1000].map(|millis| lanes(1 << 30, millis)), [4, 4, 4, 10, 16, 16]);
        assert_eq!(lanes(64 << 20, 40), 4, "each would have little to bring");
        assert_eq!(lanes(256 << 20, 40), 8);
    }
}
