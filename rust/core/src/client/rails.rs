//! The other addresses of a source: lanes over each of them, and where to go when the address of the URL fails.
//!
//! A source with several network cards names its addresses in the answer that brings the header. What is large enough to
//! gain by it is then fetched over all of them: beside the lanes to the URL's address there are some to each other one.
//! A rail is help, never a condition. Its lane connects before it takes a range, so an address that cannot be reached
//! holds nothing up; a range that fails goes back to the queue; and a rail that keeps failing is left alone. Only the
//! lanes of the source itself can fail a transfer, and when the address of the URL fails, these try the others, too.

use std::net::{IpAddr, SocketAddr};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread::Scope;
use std::time::Duration;

use tensorferry_wire::rails::Rail;

use super::Source;
use super::blocks::block_len;
use super::connection::Connection;
use super::lane::Transfer;
use super::limits::Limits;
use crate::cancel::Cancel;
use crate::error::{Error, ErrorKind};
use crate::memory::zeroed;

/// With less to fetch, one address is enough: connecting to others takes longer than they would save.
pub(super) const LEAST_BYTES: u64 = 16 << 20;
/// How long a connection attempt may go unanswered where there is another address.
const PATIENCE: Duration = Duration::from_secs(1);
/// How long a lane over a rail may get no byte at all.
const STALL: Duration = Duration::from_secs(2);
/// How often in a row a rail may fail.
const MAX_FAILURES: u32 = 4;
/// A link this many times slower than the fastest one would only hold up the end.
const SLOWEST: u32 = 32;

/// `limits` for an answer that another address may give if this one does not.
pub(super) fn hasty(limits: &Limits) -> Limits {
    Limits { stall: limits.stall.min(STALL), ..limits.clone() }
}

/// The addresses of a source besides the one by which it was opened.
#[derive(Debug, Default)]
pub(super) struct Rails {
    others: OnceLock<Vec<SocketAddr>>,
    /// Whether the address by which it was opened has failed, so that the others are tried first.
    first_failed: AtomicBool,
    turn: AtomicUsize,
}

impl Rails {
    /// Notes the `rails` that a source has named, which was reached at `first` and `port`.
    pub(super) fn learn(&self, rails: &[Rail], first: IpAddr, port: u16) {
        let fastest = rails.iter().map(|rail| rail.mbit).max().unwrap_or(0);
        let is_usable = |rail: &Rail| {
            let fast_enough = rail.mbit == 0 || rail.mbit >= fastest / SLOWEST;
            // A loopback address is of this machine, whoever names it.
            rail.address != first && fast_enough && rail.address.is_loopback() == first.is_loopback()
        };
        let others = rails.iter().filter(|rail| is_usable(rail)).map(|rail| (rail.address, port).into()).collect();
        let _ = self.others.set(others);
    }

    /// The other addresses.
    pub(super) fn others(&self) -> &[SocketAddr] {
        self.others.get().map_or(&[], Vec::as_slice)
    }

    /// From here on the other addresses, if there are any, are tried first.
    pub(super) fn note_first_failed(&self) {
        self.first_failed.store(true, Ordering::Relaxed);
    }

    /// Connects to the source: at its first address, unless that has failed, or else at one of the others.
    pub(super) fn connect(&self, source: &Source, limits: &Limits) -> Result<Connection, Error> {
        if self.others().is_empty() {
            return Connection::open(&source.url, limits);
        }
        let hasty = Limits { stall: limits.stall.min(PATIENCE), ..limits.clone() };
        let first = || Connection::open(&source.url, &hasty).map(|connection| connection.within(limits));
        if !self.first_failed.load(Ordering::Relaxed) {
            match first() {
                Err(e) if matches!(e.kind(), ErrorKind::Connect | ErrorKind::Timeout) && limits.left().is_ok() => {
                    self.note_first_failed();
                }
                result => return result,
            }
        }
        let turn = self.turn.fetch_add(1, Ordering::Relaxed);
        for at in 0..self.others().len() {
            let address = self.others()[(turn + at) % self.others().len()];
            if let Ok(connection) = Connection::open_at(&source.url, address, &hasty) {
                return Ok(connection.within(limits));
            }
            limits.left()?;
        }
        first()
    }
}

/// The rails of one transfer, each with the number of its first lane.
#[derive(Debug)]
pub(super) struct RailLanes {
    /// The source, its address, and the number of the lane.
    pub(super) lanes: Vec<(usize, SocketAddr, usize)>,
    /// Those of the transfer, with a cancellation of their own: what is over for the others is so for these.
    limits: Limits,
}

impl RailLanes {
    /// Lanes numbered from `first` on, `each` of them to each rail of `sources`.
    pub(super) fn new(sources: &[Source], first: usize, each: u64, limits: &Limits) -> Self {
        let each = usize::try_from(each).unwrap_or(1);
        let rails = (0..).zip(sources).flat_map(|(number, source)| {
            let others = if source.same_host().is_some() { &[] } else { source.rails.others() };
            others.iter().flat_map(move |&address| std::iter::repeat_n((number, address), each))
        });
        let lanes = rails.zip(first..).map(|((number, address), lane)| (number, address, lane)).collect();
        let limits = Limits { cancel: Cancel::new(), ..hasty(limits) };
        Self { lanes, limits }
    }

    /// Ends the lanes: nothing is left for them.
    pub(super) fn close(&self) {
        self.limits.cancel.cancel();
    }
}

impl Transfer<'_> {
    /// Lane `index` fetches what it can from source `number` over its rail at `address`, until the transfer is over or
    /// the rail fails time and again.
    pub(super) fn run_rail<'scope>(
        &'scope self,
        scope: &'scope Scope<'scope, '_>,
        (number, address, index): (usize, SocketAddr, usize),
    ) {
        let (source, limits) = (&self.sources[number], &self.rails.limits);
        let Ok(mut sink) = zeroed(block_len()) else { return };
        let (mut connection, mut failures) = (None::<Connection>, 0);
        while failures < MAX_FAILURES && !self.queue.is_over() {
            let ready = connection.take().filter(Connection::is_reusable).map_or_else(
                || {
                    let hasty = Limits { stall: PATIENCE, ..limits.clone() };
                    Connection::open_at(&source.url, address, &hasty).map(|opened| opened.within(limits))
                },
                Ok,
            );
            let Ok(ready) = ready else {
                failures += 1;
                limits.pause(Duration::from_millis(100 << failures), || self.queue.is_over());
                continue;
            };
            connection = Some(ready);
            let Some(mut range) = self.take(scope, &mut connection) else { return };
            let first = range.at;
            let result = self.fetch_range(index, (number, source, limits), &mut connection, &mut range, &mut sink);
            let slow = self.watch.end(index);
            if let Err(error) = result {
                connection = None;
                if error.kind() != ErrorKind::Cancelled && !limits.cancel.is_cancelled() {
                    self.received.note_retry();
                    self.received.note_trouble(&address.to_string(), &error);
                }
                failures = if range.at > first && slow.is_none() { 1 } else { failures + 1 };
                drop(range);
                limits.pause(Duration::from_millis(100 << failures), || self.queue.is_over());
            } else {
                failures = 0;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

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
            rails.learn(&named, first.parse().unwrap(), 4000);
            rails.others().iter().map(ToString::to_string).collect::<Vec<_>>()
        };
        assert_eq!(others("10.0.0.1"), ["10.0.1.1:4000", "10.0.2.1:4000", "[fd00::1]:4000"]);
        assert_eq!(others("192.0.2.1").len(), 4);
        assert_eq!(others("127.0.0.2"), ["127.0.0.1:4000"]);
        assert!(Rails::default().others().is_empty());
    }
}
