//! The other addresses of a source: lanes over each of them, and where to go when the address of the URL fails.
//!
//! A source with several network cards names its addresses in the answer that brings the header, and in the one that
//! shows that it serves what is fetched. What is large enough to gain by it is then fetched over all of them: beside the
//! lanes to the URL's address there are some to each other one, from the card here that leads there.
//! A rail is help, never a condition. Its lane connects before it takes a range, so an address that cannot be reached
//! holds nothing up; a range that fails goes back to the queue; and a rail that fails or falls far behind is left alone
//! for a while, by later receives of this process, too. Only the lanes of the source itself can fail a transfer, and when
//! their address fails, these try the others, too (`targets`).

use std::net::{IpAddr, SocketAddr};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, OnceLock};
use std::thread::{self, Scope};
use std::time::Duration;

use tensorferry_wire::rails::{MAX_RAILS, Rail};

use super::Source;
use super::blocks::block_len;
use super::connection::Connection;
use super::lane::Transfer;
use super::left_alone::RAILS;
use super::limits::Limits;
use super::pairs::{Pair, pairs};
use super::routes::{own_addresses, route};
use crate::cancel::Cancel;
use crate::error::ErrorKind;
use crate::memory::zeroed;
use crate::payload::Queue;
use crate::sync::Locked;

/// With less to fetch, one address is enough: connecting to others takes longer than they would save.
pub(super) const LEAST_BYTES: u64 = 16 << 20;
/// How long a connection attempt may go unanswered where there is another address.
const PATIENCE: Duration = Duration::from_secs(1);
/// How long a lane over a rail may get no byte at all.
const STALL: Duration = Duration::from_secs(2);
/// How often in a row a rail may fail before it is left alone for a while.
const MAX_FAILURES: u32 = 4;
/// For how long a slow rail is left alone the first time; twice as long each time after that, up to a limit. A rail that
/// has failed so often is left alone that long at once.
const LEFT_ALONE: Duration = Duration::from_secs(2);
const MOST_DOUBLINGS: u32 = 3;
/// A link this many times slower than the fastest one would only hold up the end.
const SLOWEST: u32 = 32;
/// Where a source has several addresses, a lane takes this part of its share of what is left, so that all end together.
const PART_OF_A_SHARE: u64 = 8;

/// The ranges of `runs` for so many `lanes`, of which some are `over_rails`. With some of these the first ranges are short,
/// too: a long one takes a slow link longer than the others need for all the rest.
pub(super) fn queue_of(runs: &[(u64, u64)], per_range: u64, lanes: u64, over_rails: u64) -> Queue {
    let queue = Queue::new(runs, per_range);
    if over_rails > 0 {
        queue.taper(PART_OF_A_SHARE * (lanes + over_rails));
    }
    queue
}

/// `limits` for an answer that another address may give if this one does not.
fn hasty(limits: &Limits) -> Limits {
    Limits { stall: limits.stall.min(STALL), ..limits.clone() }
}

/// The addresses of a source besides the one by which it was opened.
#[derive(Debug, Default)]
pub(super) struct Rails {
    learned: OnceLock<Learned>,
}

#[derive(Debug)]
struct Learned {
    /// The addresses at both ends of the connection that brought it.
    first: (IpAddr, IpAddr),
    others: Vec<IpAddr>,
    /// All that it has named.
    named: Vec<Rail>,
}

impl Rails {
    /// Notes the `rails` that a source has named, which was reached by the route `first`, unless it has named some
    /// before.
    pub(super) fn learn(&self, rails: &[Rail], first: (IpAddr, IpAddr)) {
        let fastest = rails.iter().map(|rail| rail.mbit).max().unwrap_or(0);
        let is_usable = |rail: &Rail| {
            let fast_enough = rail.mbit == 0 || rail.mbit >= fastest / SLOWEST;
            // A loopback address is of this machine, whoever names it.
            rail.address != first.1 && fast_enough && rail.address.is_loopback() == first.1.is_loopback()
        };
        let others = rails.iter().filter(|rail| is_usable(rail)).map(|rail| rail.address).collect();
        let _ = self.learned.set(Learned { first, others, named: rails.to_vec() });
    }

    /// What the source has named.
    pub(super) fn named(&self) -> &[Rail] {
        self.learned.get().map_or(&[], |learned| &learned.named)
    }

    /// The pair by which a receive would use the rail at `address`.
    pub(super) fn pair(&self, address: IpAddr) -> Pair {
        self.pairs(&mut Vec::new()).into_iter().find(|pair| pair.1 == address).unwrap_or((None, address))
    }

    /// The other addresses.
    pub(super) fn others(&self) -> &[IpAddr] {
        self.learned.get().map_or(&[], |learned| &learned.others)
    }

    /// The pairs of addresses by which the source is reached besides the one of its first answer.
    fn pairs(&self, used: &mut Vec<IpAddr>) -> Vec<Pair> {
        match self.learned.get() {
            Some(learned) if !learned.others.is_empty() => {
                let mut found = pairs(&own_addresses(), route, learned.first, &learned.others, used);
                found.truncate(MAX_RAILS);
                found
            }
            _ => Vec::new(),
        }
    }
}

/// The lanes over the rails of one transfer.
#[derive(Debug)]
pub(super) struct RailLanes {
    /// The number of the first of them.
    first: usize,
    /// How many each source may have; 0 where there is too little to fetch.
    most: usize,
    /// How many there are for each pair of addresses.
    each: usize,
    /// For each source whether its lanes have begun.
    begun: Vec<AtomicBool>,
    /// The addresses here that lanes have, as often as they have them.
    used: Mutex<Vec<IpAddr>>,
    /// Those of the transfer, with a cancellation of their own: what is over for the others is so for these.
    limits: Limits,
}

/// A lane over a rail.
struct RailLane {
    /// The number of the source.
    source: usize,
    pair: Pair,
    /// The number of the lane.
    index: usize,
}

impl RailLanes {
    /// Lanes numbered from `first` on to `sources` sources, `each` to each of their rails; none if `each` is 0.
    pub(super) fn new(sources: usize, first: usize, each: usize, limits: &Limits) -> Self {
        let limits = Limits { cancel: Cancel::new(), ..hasty(limits) };
        let begun = std::iter::repeat_with(AtomicBool::default).take(sources).collect();
        Self { first, most: each * MAX_RAILS, each, begun, used: Mutex::default(), limits }
    }

    /// How many there may be.
    pub(super) fn most(&self) -> usize {
        self.most * self.begun.len()
    }

    /// The lanes to `source`, if they have not begun.
    fn begin(&self, number: usize, source: &Source) -> Vec<RailLane> {
        if self.most == 0 || !source.has_rails() || self.begun[number].swap(true, Ordering::Relaxed) {
            return Vec::new();
        }
        let found = source.rails.pairs(&mut self.used.locked());
        let lanes = found.into_iter().flat_map(|pair| std::iter::repeat_n(pair, self.each));
        let first = self.first + number * self.most;
        (first..first + self.most).zip(lanes).map(|(index, pair)| RailLane { source: number, pair, index }).collect()
    }

    /// Ends the lanes: nothing is left for them.
    pub(super) fn close(&self) {
        self.limits.cancel.cancel();
    }
}

impl Transfer<'_> {
    /// Begins the lanes over the other addresses of source `number`, once it has named them.
    pub(super) fn begin_rails<'scope>(&'scope self, scope: &'scope Scope<'scope, '_>, number: usize) {
        let lanes = self.rails.begin(number, &self.sources[number]);
        if lanes.is_empty() {
            return;
        }
        self.queue.taper(PART_OF_A_SHARE * self.watch.add_rails(lanes.len()) as u64);
        for lane in lanes {
            let builder = thread::Builder::new().name(format!("tensorferry-lane-{}", lane.index));
            // Without a thread for it, it is a rail less.
            let _ = builder.spawn_scoped(scope, move || self.run_rail(scope, &lane));
        }
    }

    /// Fetches what it can from a source over a rail until the transfer is over.
    fn run_rail<'scope>(&'scope self, scope: &'scope Scope<'scope, '_>, lane: &RailLane) {
        let (source, limits, index) = (&self.sources[lane.source], &self.rails.limits, lane.index);
        let port = source.url.port();
        let Ok(mut sink) = zeroed(block_len()) else { return };
        let (mut connection, mut failures) = (None::<Connection>, 0);
        self.queue.rest(RAILS.left(lane.pair, port));
        while !self.queue.is_over() {
            let ready = connection.take().filter(Connection::is_reusable).map_or_else(
                || {
                    let hasty = Limits { stall: PATIENCE, ..limits.clone() };
                    Connection::open_at(&source.url, lane.pair, &hasty).map(|opened| opened.within(limits))
                },
                Ok,
            );
            let mut slow = false;
            match ready {
                Ok(ready) => {
                    connection = Some(ready);
                    let Some(mut range) = self.take(scope) else { return };
                    let first = range.at;
                    let from = (lane.source, source, limits);
                    let result = self.fetch_range(index, from, &mut connection, (&mut range, &mut sink), || ());
                    slow = self.watch.end(index).is_some();
                    if slow || result.is_err() {
                        connection = None;
                    }
                    let Err(error) = result else {
                        failures = 0;
                        continue;
                    };
                    if error.kind() != ErrorKind::Cancelled && !limits.cancel.is_cancelled() {
                        self.received.note_retry();
                        self.received.note_trouble(&SocketAddr::from((lane.pair.1, port)).to_string(), &error);
                    }
                    failures = if range.at > first && !slow { 1 } else { failures + 1 };
                }
                Err(_) => failures += 1,
            }
            if slow || failures >= MAX_FAILURES {
                let length = LEFT_ALONE * (1 << failures.saturating_sub(1).min(MOST_DOUBLINGS));
                RAILS.leave(lane.pair, port, length);
                self.queue.rest(length);
            } else {
                self.queue.rest(Duration::from_millis(100 << failures));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_ranges_are_short_where_there_are_other_addresses() {
        let first = |over_rails| queue_of(&[(0, 256)], 16, 2, over_rails).take(|| ()).map(|range| range.end);
        assert_eq!([0, 6].map(first), [Some(16), Some(4)]);
    }

    #[test]
    fn addresses_that_help_are_kept() {
        let rail = |address: &str, mbit| Rail { address: address.parse().unwrap(), mbit };
        let named = [
            rail("10.0.0.1", 25_000),
            rail("10.0.1.1", 25_000),
            rail("10.0.2.1", 0),
            rail("10.0.3.1", 100),
            rail("127.0.0.1", 25_000),
            rail("fd00::1", 1_000),
        ];
        let others = |first: &str| {
            let rails = Rails::default();
            rails.learn(&named, ("10.0.9.9".parse().unwrap(), first.parse().unwrap()));
            rails.others().iter().map(ToString::to_string).collect::<Vec<_>>()
        };
        assert_eq!(others("10.0.0.1"), ["10.0.1.1", "10.0.2.1", "fd00::1"]);
        assert_eq!(others("192.0.2.1").len(), 4);
        assert_eq!(others("127.0.0.2"), ["127.0.0.1"]);
        assert!(Rails::default().others().is_empty());
    }
}
