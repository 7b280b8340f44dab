//! How idle lanes take work from slow ones.
//!
//! A connection that is far slower than the others holds up the whole transfer, though bytes arrive on it and it never
//! counts as stuck. A lane that has nothing left to do takes the range of such a lane away, by shutting down its
//! connection, and fetches it itself.
//!
//! Little that comes proves nothing where little comes at all. A source with a limit sends to its connections by turns, and
//! on a narrow link one connection may starve for seconds. A lane is therefore not judged by time alone, but when one as
//! fast as the average would have brought some MiB meanwhile ([`EVIDENCE`]).
//!
//! A range is taken away once: if the next lane is as slow, the source is, and nothing would be gained. Only lanes to
//! relays and to other addresses of a source lose as many as need be.

use std::collections::HashSet;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, Weak};
use std::time::{Duration, Instant};

use socket2::Socket;

use crate::fork::CloseOnFork;
use crate::sync::Locked;

/// A lane is not judged before it has had a range for this long.
const AT_LEAST: Duration = Duration::from_secs(1);
/// And not before the average lane would have got so many bytes in that time: several times what a source sends at once.
const EVIDENCE: u64 = 8 << 20;
/// As [`EVIDENCE`], for a lane that gets nothing at all where a source has several addresses.
const EVIDENCE_OF_SILENCE: u64 = 4 << 20;
/// How often the pace of all lanes is taken, at most.
const LOOK: Duration = Duration::from_millis(50);
/// Where a source has several addresses, a lane that gets nothing for this long loses its range to an idle one.
const SILENT: Duration = Duration::from_millis(500);
/// Ranges that come so soon are not recalled; and that of the lane that has got most, if it comes in this time.
const SOON: Duration = Duration::from_millis(500);
const SOON_FOR_ONE: Duration = Duration::from_secs(2);
/// How many times slower than the average a lane is that loses its range.
const SLOWER: u64 = 10;

/// The progress of each lane of one transfer, for finding lanes that are far slower than the average.
#[derive(Debug)]
pub(super) struct StragglerMonitor {
    started: Instant,
    lanes: Vec<LaneProgress>,
    /// The number of those to sources; behind them are those to other addresses of sources, and those to relays.
    to_sources: usize,
    over_rails: usize,
    /// How many of those over other addresses there are so far.
    rails: AtomicUsize,
    /// Bytes of all lanes.
    total: AtomicU64,
    pace: Mutex<Pace>,
    /// Ends of ranges that were taken from a slow lane to a source. Once is enough: if the next lane is as slow, it is
    /// the source.
    taken: Mutex<HashSet<u64>>,
}

/// What the average lane gets while all of them are busy.
#[derive(Debug, Default)]
struct Pace {
    bytes_per_second: u64,
    /// When it was looked at last, and the bytes of all lanes then.
    at: Duration,
    total: u64,
}

impl Pace {
    /// `lanes` lanes have brought `total` bytes in all, `at` after the transfer began. Where next to nothing has come since
    /// the last look, the lanes that had something to bring are through: that makes the others no slower.
    fn look(&mut self, at: Duration, total: u64, lanes: u64) -> u64 {
        let since = at.saturating_sub(self.at);
        if since >= LOOK || self.bytes_per_second == 0 {
            if rate(total.saturating_sub(self.total), since).saturating_mul(SLOWER) >= self.bytes_per_second {
                self.bytes_per_second = rate(total, at) / lanes;
            }
            (self.at, self.total) = (at, total);
        }
        self.bytes_per_second
    }
}

/// A range that a lane is fetching.
#[derive(Debug)]
struct LaneRange {
    since: Instant,
    /// Its last block, and its bytes.
    end: u64,
    len: u64,
    /// The lane's connection.
    socket: Weak<CloseOnFork<Socket>>,
}

#[derive(Debug, Default)]
struct LaneProgress {
    /// `None` while it has none.
    range: Mutex<Option<LaneRange>>,
    /// Bytes of that range.
    got: AtomicU64,
    /// When the last of them came, in milliseconds since the transfer began.
    last: AtomicU64,
    /// Whether it lost the range for being slow.
    cut: AtomicBool,
    /// Whether it is to give the range back without a fault of its own.
    recalled: AtomicBool,
}

impl StragglerMonitor {
    /// For lanes to sources, as many as there may be over their other addresses and, behind them, to relays.
    pub(super) fn new((to_sources, over_rails): (usize, usize), to_relays: usize) -> Self {
        let lanes = to_sources + over_rails + to_relays;
        Self {
            started: Instant::now(),
            lanes: std::iter::repeat_with(LaneProgress::default).take(lanes).collect(),
            to_sources,
            over_rails,
            rails: AtomicUsize::new(0),
            total: AtomicU64::new(0),
            pace: Mutex::default(),
            taken: Mutex::default(),
        }
    }

    /// There are so many lanes more over other addresses of sources; returns how many there are then to sources by any
    /// address.
    pub(super) fn add_rails(&self, lanes: usize) -> usize {
        self.to_sources + self.rails.fetch_add(lanes, Ordering::Relaxed) + lanes
    }

    fn has_rails(&self) -> bool {
        self.rails.load(Ordering::Relaxed) > 0
    }

    /// The index of the lane to relays with this number.
    pub(super) fn relay_lane(&self, number: usize) -> usize {
        self.to_sources + self.over_rails + number
    }

    /// Lane `index` fetches the range of `len` bytes up to block `end` over `socket`.
    pub(super) fn begin(&self, index: usize, (end, len): (u64, u64), socket: &Arc<CloseOnFork<Socket>>) {
        let lane = &self.lanes[index];
        lane.got.store(0, Ordering::Relaxed);
        lane.last.store(self.now(), Ordering::Relaxed);
        lane.cut.store(false, Ordering::Relaxed);
        lane.recalled.store(false, Ordering::Relaxed);
        *lane.range.locked() = Some(LaneRange { since: Instant::now(), end, len, socket: Arc::downgrade(socket) });
    }

    /// Takes ranges from lanes to sources that will not be through with them soon, since others are to share what comes from
    /// there. One lane has more time, so that each receiver has something to pass on.
    pub(super) fn recall(&self) {
        let lanes = &self.lanes[..self.to_sources];
        let got = |lane: &LaneProgress| lane.got.load(Ordering::Relaxed);
        let kept = (0..lanes.len()).max_by_key(|&index| got(&lanes[index]));
        for (index, lane) in lanes.iter().enumerate() {
            let range = lane.range.locked();
            let Some(LaneRange { since, len, socket, .. }) = range.as_ref() else { continue };
            let (millis, got) = (since.elapsed().as_millis(), u128::from(got(&lanes[index])));
            let left = millis * u128::from(*len).saturating_sub(got) / got.max(1);
            let soon = if Some(index) == kept { SOON_FOR_ONE } else { SOON };
            if left > soon.as_millis()
                && let Some(socket) = socket.upgrade()
            {
                lane.recalled.store(true, Ordering::Relaxed);
                let _ = socket.shutdown(std::net::Shutdown::Both);
            }
        }
    }

    /// Whether lane `index` was told to give its range back; says so once.
    pub(super) fn was_recalled(&self, index: usize) -> bool {
        self.lanes[index].recalled.swap(false, Ordering::Relaxed)
    }

    /// Counts bytes that lane `index` has received.
    pub(super) fn count(&self, index: usize, bytes: u64) {
        self.lanes[index].got.fetch_add(bytes, Ordering::Relaxed);
        if self.has_rails() {
            self.lanes[index].last.store(self.now(), Ordering::Relaxed);
        }
        self.total.fetch_add(bytes, Ordering::Relaxed);
    }

    /// The range of lane `index` is over; whether it was taken away, and the bytes per second it had come to.
    pub(super) fn end(&self, index: usize) -> Option<u64> {
        let lane = &self.lanes[index];
        let LaneRange { since, .. } = lane.range.locked().take()?;
        let cut = lane.cut.swap(false, Ordering::Relaxed);
        cut.then(|| rate(lane.got.load(Ordering::Relaxed), since.elapsed()))
    }

    /// Milliseconds since the transfer began.
    fn now(&self) -> u64 {
        u64::try_from(self.started.elapsed().as_millis()).unwrap_or(u64::MAX)
    }

    /// Called by a lane that has nothing to do: takes ranges from lanes that are far slower than the average.
    pub(super) fn cut_slow(&self) {
        self.cut(false);
    }

    /// Called by a lane between two ranges: takes ranges from lanes that get nothing, where a source has several
    /// addresses.
    pub(super) fn cut_silent(&self) {
        if self.has_rails() {
            self.cut(true);
        }
    }

    /// Shuts down the connections of lanes that get nothing and, unless `silent_only`, of those far slower than the
    /// average: their ranges go back into the queue. A range that comes from a source by the address of its URL is cut
    /// only once.
    fn cut(&self, silent_only: bool) {
        let lanes = (self.to_sources + self.rails.load(Ordering::Relaxed)).max(1) as u64;
        let (total, at) = (self.total.load(Ordering::Relaxed), self.started.elapsed());
        let average = self.pace.locked().look(at, total, lanes);
        for (index, lane) in self.lanes.iter().enumerate() {
            let range = lane.range.locked();
            let Some(LaneRange { since, end, socket, .. }) = range.as_ref() else { continue };
            let (elapsed, got) = (since.elapsed(), lane.got.load(Ordering::Relaxed));
            let expected = bytes_at(average, elapsed);
            let judged = !silent_only && elapsed >= AT_LEAST && expected >= EVIDENCE;
            let slow = judged && got.saturating_mul(SLOWER) < expected;
            let quiet = Duration::from_millis(self.now().saturating_sub(lane.last.load(Ordering::Relaxed)));
            let on_rails = self.has_rails() && index < self.to_sources + self.over_rails;
            let silent = on_rails && quiet >= SILENT && bytes_at(average, quiet) >= EVIDENCE_OF_SILENCE;
            if (slow || silent)
                && let Some(socket) = socket.upgrade()
                // From a relay or a rail as often as need be: that is left alone then, and the source is still there.
                && (index >= self.to_sources || self.taken.locked().insert(*end))
            {
                lane.cut.store(true, Ordering::Relaxed);
                let _ = socket.shutdown(std::net::Shutdown::Both);
            }
        }
    }
}

/// Bytes per second.
pub(super) fn rate(bytes: u64, elapsed: Duration) -> u64 {
    let rate = u128::from(bytes) * 1000 / elapsed.as_millis().max(1);
    u64::try_from(rate).unwrap_or(u64::MAX)
}

/// The bytes that come in `elapsed` at `rate`, in bytes per second.
fn bytes_at(rate: u64, elapsed: Duration) -> u64 {
    u64::try_from(u128::from(rate) * elapsed.as_millis() / 1000).unwrap_or(u64::MAX)
}

/// `rate`, in bytes per second, as people read it.
pub(super) fn format_rate(rate: u64) -> String {
    match rate {
        0..1_000 => format!("{rate} B/s"),
        1_000..1_000_000 => format!("{}.{} kB/s", rate / 1_000, rate / 100 % 10),
        _ => format!("{}.{} MB/s", rate / 1_000_000, rate / 100_000 % 10),
    }
}

#[cfg(test)]
impl StragglerMonitor {
    /// Shuts down the connection of a lane to a source whose range has come and has not ended yet: it is recalled, or
    /// was slow. Returns whether there was one.
    pub(super) fn cut_one_that_is_through(&self, recalled: bool) -> bool {
        let mut ranges = self.lanes.iter().map(|lane| (lane, lane.range.lock().unwrap()));
        ranges.any(|(lane, range)| {
            let through = range.as_ref().filter(|range| lane.got.load(Ordering::Relaxed) >= range.len);
            let Some(socket) = through.and_then(|range| range.socket.upgrade()) else { return false };
            (if recalled { &lane.recalled } else { &lane.cut }).store(true, Ordering::Relaxed);
            socket.shutdown(std::net::Shutdown::Both).is_ok()
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LANES: usize = 4;

    /// Whether a lane loses its range that has got `bytes` in `millis`, while the others have brought `total` in the two
    /// seconds of the transfer.
    fn is_cut((bytes, millis): (u64, u64), total: u64) -> bool {
        let mut monitor = StragglerMonitor::new((LANES, 0), 0);
        let ago = |millis| Instant::now().checked_sub(Duration::from_millis(millis)).unwrap();
        monitor.started = ago(2000);
        let open = || Socket::new(socket2::Domain::IPV4, socket2::Type::STREAM, None);
        let socket = Arc::new(CloseOnFork::make(open).unwrap());
        monitor.begin(0, (16, 16 << 20), &socket);
        monitor.lanes[0].range.lock().unwrap().as_mut().unwrap().since = ago(millis);
        monitor.count(0, bytes);
        monitor.count(1, total);
        monitor.cut_slow();
        monitor.end(0).is_some()
    }

    #[test]
    fn a_lane_is_judged_by_what_an_average_one_would_have_brought() {
        // 10 and 1 MB/s in all: the other lanes have had their turns, and this one has not yet.
        assert!(!is_cut((0, 1500), 20_000_000));
        assert!(!is_cut((0, 1900), 2_000_000));
        // 200 MB/s in all.
        assert!(is_cut((0, 1500), 400_000_000));
        assert!(is_cut((1 << 20, 1500), 400_000_000));
        assert!(!is_cut((0, 500), 400_000_000), "a moment is too short");
        assert!(!is_cut((32 << 20, 1500), 400_000_000));
    }

    #[test]
    fn lanes_that_are_through_leave_the_pace_as_it_was() {
        let mut pace = Pace::default();
        let at = Duration::from_millis;
        assert_eq!(pace.look(at(0), 0, 2), 0);
        assert_eq!(pace.look(at(1000), 20_000_000, 2), 10_000_000);
        assert_eq!(pace.look(at(1010), 20_000_000, 2), 10_000_000, "too early to say");
        assert_eq!(pace.look(at(10_000), 20_000_100, 2), 10_000_000, "one drips, the others are through");
        assert_eq!(pace.look(at(20_000), 40_000_000, 2), 1_000_000, "the source is slower now");
    }

    #[test]
    fn rates_are_readable() {
        assert_eq!([0, 999, 1_250, 53_626_265].map(format_rate), ["0 B/s", "999 B/s", "1.2 kB/s", "53.6 MB/s"]);
        assert_eq!(rate(3 << 20, Duration::from_millis(1500)), 2 << 20);
    }
}
