//! Which worker fetches which blocks, from where, and what follows when that fails or takes too long.
//!
//! A worker is a thread with one connection; its [`Role`] says what that leads to: a source, another address of a source,
//! or a relay. Only workers on sources can fail a transfer: the others are help, never a condition. Nothing here waits or
//! reads a clock. The time is an argument, so that the tests below run whole transfers with endpoints that are dead, slow,
//! silent or broken.
//!
//! Invariants:
//!
//! * a block is waiting or claimed by one worker, never both: at most one thread writes it;
//! * what a worker gives back, or loses by a panic, waits again without the blocks that had come;
//! * a transfer is over when nothing is waiting or claimed, or when it has failed; the first failure counts.
//!
//! A worker that is far slower than the others holds up the end, though it never counts as stuck. When another one has
//! nothing to do, its range is stolen: its connection is shut down. Little that comes proves nothing where little comes at
//! all: a source with a limit sends by turns, and on a narrow link one connection may starve for seconds. So a worker is
//! not judged by time alone, but when the average one would have brought some MiB meanwhile ([`EVIDENCE`]). From a source
//! a range is stolen once: if the next worker is as slow, the source is. A rail or a relay loses as many as need be.

use std::collections::{HashSet, VecDeque};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Weak};
use std::time::Duration;

use socket2::Socket;

use super::limits::{ATTEMPTS, backoff};
use crate::error::{Error, ErrorKind};
use crate::fork::CloseOnFork;
use crate::swarm::{FromSource, Receiver};

/// For how long a slow rail is left alone the first time; twice as long each time after that, up to a limit. One that has
/// failed so often is left alone that long at once.
const LEFT_ALONE: Duration = Duration::from_secs(2);
/// A worker is not judged before it has had a range for this long.
const AT_LEAST: Duration = Duration::from_secs(1);
/// And not before the average worker would have got so many bytes in that time: several times what a source sends at once.
const EVIDENCE: u64 = 8 << 20;
/// How many times slower than the average a worker is that loses its range.
const SLOWER: u64 = 10;
/// How often the pace of all workers is taken, at most.
const LOOK: Duration = Duration::from_millis(50);
/// Ranges that come so soon are not recalled; and that of the worker that has got most, if it comes in this time.
const SOON: Duration = Duration::from_millis(500);
const SOON_FOR_ONE: Duration = Duration::from_secs(2);
/// Where a source has several addresses, a range is at most this part of a worker's share of what is left, so that all end
/// together.
const PART_OF_A_SHARE: u64 = 8;
/// For how long what is known of a relay counts while there is something to fetch from it.
const MAP_AGE: Duration = Duration::from_millis(200);
/// How long a worker waits that has nothing to do, if nothing happens.
const IDLE: Duration = Duration::from_millis(100);

/// What a worker's connection leads to.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum Role {
    /// A source, by the best of its addresses.
    #[default]
    Source,
    /// One pair of addresses of a source.
    Rail,
    /// The relay of this number.
    Relay(usize),
}

/// What a worker is to do next.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Task {
    /// Fetch the blocks `[at, end)` from the source of this number, or from the worker's relay.
    Fetch { source: usize, at: u64, end: u64 },
    /// Connect, so that no range waits for it.
    Connect,
    /// Ask the relay what it has; `wait` until that is more than before.
    Refresh { wait: bool },
    /// Ask again after this time, or when something has happened.
    Wait(Duration),
    /// Nothing is left, or the transfer has failed.
    Over,
}

/// Why a worker's connection was shut down.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Cut {
    /// It was far slower than the others, at so many bytes a second.
    Slow(u64),
    /// Others are to share what it was fetching.
    Recall,
}

/// How an attempt has failed.
#[derive(Clone, Copy, Debug)]
#[allow(clippy::struct_excessive_bools, reason = "each is a fact of its own")]
pub(super) struct Failure<'a> {
    pub(super) error: &'a Error,
    /// Whether a block had come.
    pub(super) has_progressed: bool,
    /// Whether its connection was shut down for being slow.
    pub(super) is_slow: bool,
    /// Whether the source answers, and is still copying what it is to send.
    pub(super) is_filling: bool,
    /// Whether it went through shared memory, without which it is to be tried now.
    pub(super) by_same_host: bool,
    /// Whether it would have been waited for longer if there were no other address.
    pub(super) is_hasty: bool,
    /// Whether the deadline has passed or the transfer was cancelled.
    pub(super) is_over: bool,
}

/// What follows a failure.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Action {
    /// The worker goes on, when its back-off is over.
    Retry,
    /// The same, and later receives leave the rail alone for so long, too.
    LeaveAlone(Duration),
    /// The source is done without, as long as relays bring something; the worker waits.
    DoWithout,
    /// The worker ends. The last one of those on sources fails the transfer.
    Leave,
    /// The transfer fails.
    Fail,
}

/// The blocks of one transfer that are still to come, and its workers.
#[derive(Debug)]
pub(super) struct Scheduler {
    waiting: VecDeque<(u64, u64)>,
    workers: Vec<Worker>,
    /// How many sources there are.
    sources: usize,
    /// The most blocks that are fetched from a relay at a time.
    pub(super) unit: u64,
    /// Where a source has several addresses, how many workers there are to be on sources: ranges get shorter towards the end
    /// then, so that workers of different speeds end together, and what one gives back is shared out.
    pub(super) expected: Option<usize>,
    pace: Pace,
    /// Ends of ranges that were stolen from workers on sources.
    stolen: HashSet<u64>,
    /// Whether a worker on a source has found nothing to do since slow ones were looked for.
    is_idle: bool,
    /// What the tracker is to be asked for.
    pub(super) question: Option<Vec<(u64, u64)>>,
    failed: Option<Error>,
}

#[derive(Debug, Default)]
struct Worker {
    role: Role,
    /// The number of the source that it fetches from.
    source: usize,
    /// The bytes that it has brought, counted by its thread.
    got: Arc<AtomicU64>,
    claim: Option<Claim>,
    /// Failures in a row, and until when it rests after the last of them.
    failures: u32,
    not_before: Duration,
    is_gone: bool,
    /// Its connection, which is shut down when it loses its range.
    socket: Weak<CloseOnFork<Socket>>,
    /// Until when what is known of its relay counts, and whether it was asked since something was fetched.
    fresh_until: Duration,
    was_asked: bool,
}

/// A range that a worker is fetching.
#[derive(Debug)]
struct Claim {
    first: u64,
    end: u64,
    /// When it was asked for, and the bytes that the worker had brought then.
    begun: Option<(Duration, u64)>,
    cut: Option<Cut>,
}

/// What the average worker gets while all of them are busy.
#[derive(Debug, Default)]
struct Pace {
    bytes_per_second: u64,
    /// When it was looked at last, and the bytes of all workers then.
    at: Duration,
    total: u64,
}

impl Pace {
    /// `workers` workers have brought `total` bytes in all, `at` after the transfer began. Where next to nothing has come
    /// since the last look, those that had something to bring are through: that makes the others no slower.
    fn look(&mut self, at: Duration, total: u64, workers: u64) -> u64 {
        let since = at.saturating_sub(self.at);
        if since >= LOOK || self.bytes_per_second == 0 {
            if rate(total.saturating_sub(self.total), since).saturating_mul(SLOWER) >= self.bytes_per_second {
                self.bytes_per_second = rate(total, at) / workers;
            }
            (self.at, self.total) = (at, total);
        }
        self.bytes_per_second
    }
}

impl Worker {
    fn bytes(&self) -> u64 {
        self.got.load(Ordering::Relaxed)
    }

    fn is_on_source(&self) -> bool {
        !matches!(self.role, Role::Relay(_))
    }
}

impl Scheduler {
    /// For the blocks in `runs`, in ranges of at most `per_range`, from `sources` sources.
    pub(super) fn new(runs: &[(u64, u64)], per_range: u64, sources: usize) -> Self {
        let ranges = |&(first, end): &(u64, u64)| {
            let step = usize::try_from(per_range).unwrap_or(usize::MAX).max(1);
            (first..end).step_by(step).map(move |at| (at, end.min(at.saturating_add(per_range))))
        };
        Self {
            waiting: runs.iter().flat_map(ranges).collect(),
            workers: Vec::new(),
            sources,
            unit: 1,
            expected: None,
            pace: Pace::default(),
            stolen: HashSet::new(),
            is_idle: false,
            question: None,
            failed: None,
        }
    }

    /// Begins at the range that `seed` says.
    pub(super) fn begin_at(&mut self, seed: u64) {
        let ranges = self.waiting.len().max(1) as u64;
        self.waiting.rotate_left(usize::try_from(seed % ranges).unwrap_or(0));
    }

    /// Adds a worker, which begins with the source of this number after a `rest`; returns its number and its counter of
    /// bytes.
    pub(super) fn enlist(&mut self, role: Role, source: usize, rest: Duration) -> (usize, Arc<AtomicU64>) {
        let got = Arc::new(AtomicU64::new(0));
        self.workers.push(Worker { role, source, got: Arc::clone(&got), not_before: rest, ..Worker::default() });
        if role == Role::Rail {
            self.expected = self.expected.max(Some(self.on_sources()));
        }
        (self.workers.len() - 1, got)
    }

    /// How many workers there were on sources, by any address.
    pub(super) fn on_sources(&self) -> usize {
        self.workers.iter().filter(|worker| worker.is_on_source()).count()
    }

    /// Whether a worker on a source, by its best address, has not ended.
    pub(super) fn is_manned(&self) -> bool {
        self.workers.iter().any(|worker| worker.role == Role::Source && !worker.is_gone)
    }

    /// Whether such a worker has a range.
    pub(super) fn is_source_busy(&self) -> bool {
        self.workers.iter().any(|worker| worker.role == Role::Source && worker.claim.is_some())
    }

    pub(super) fn is_over(&self) -> bool {
        self.failed.is_some() || (self.waiting.is_empty() && self.workers.iter().all(|worker| worker.claim.is_none()))
    }

    /// The bytes that all workers have brought.
    fn bytes(&self) -> u64 {
        self.workers.iter().map(Worker::bytes).sum()
    }

    /// The ranges that nobody has.
    pub(super) fn waiting(&mut self) -> &[(u64, u64)] {
        self.waiting.make_contiguous()
    }

    /// What worker `index` is to do, which has a connection or not. In a swarm, `receiver` decides what comes from where.
    pub(super) fn next(
        &mut self,
        now: Duration,
        index: usize,
        is_connected: bool,
        receiver: Option<&mut Receiver>,
    ) -> Task {
        if self.is_over() {
            return Task::Over;
        }
        let Worker { role, not_before, fresh_until, was_asked, .. } = self.workers[index];
        if now < not_before {
            return Task::Wait(not_before.saturating_sub(now).min(IDLE));
        }
        let bytes = self.bytes();
        let waiting = &*self.waiting.make_contiguous();
        let choice = match (role, receiver) {
            (Role::Rail, _) if !is_connected => return Task::Connect,
            (Role::Relay(_), _) if !was_asked && now >= fresh_until => return Task::Refresh { wait: false },
            (Role::Relay(relay), Some(receiver)) => {
                let Some(choice) = receiver.next_from_relay(now, relay, waiting, self.unit) else {
                    return Task::Refresh { wait: was_asked };
                };
                self.workers[index].was_asked = false;
                return self.claim(index, choice);
            }
            (_, Some(receiver)) => {
                receiver.note_bytes(now, bytes);
                let wait = match receiver.next_from_source(now, waiting) {
                    FromSource::Take(number, run) => {
                        let task = self.claim(index, (number, run));
                        if let Task::Fetch { at, end, .. } = task {
                            receiver.note_source_begun((at, end));
                        }
                        return task;
                    }
                    FromSource::Ask(need) => {
                        self.question = Some(need);
                        IDLE
                    }
                    FromSource::Wait(wait) => wait,
                };
                self.is_idle = true;
                return Task::Wait(wait);
            }
            _ => waiting.first().map(|&run| (0, run)),
        };
        self.is_idle |= choice.is_none();
        choice.map_or(Task::Wait(IDLE), |choice| self.claim(index, choice))
    }

    /// Gives worker `index` the beginning of a part of the waiting range of this number.
    fn claim(&mut self, index: usize, (number, (at, end)): (usize, (u64, u64))) -> Task {
        let end = end.min(at.saturating_add(self.most_blocks()));
        let Some((first, behind)) = self.waiting.remove(number) else { return Task::Wait(IDLE) };
        for left in [(end, behind), (first, at)].into_iter().filter(|left| left.0 < left.1) {
            self.waiting.insert(number, left);
        }
        self.workers[index].claim = Some(Claim { first: at, end, begun: None, cut: None });
        Task::Fetch { source: self.workers[index].source, at, end }
    }

    /// How many blocks the next range may have.
    fn most_blocks(&self) -> u64 {
        let parts = self.expected.map(|workers| PART_OF_A_SHARE * workers as u64);
        // With at least that many ranges, each is short enough as it is.
        let Some(parts) = parts.filter(|&parts| (self.waiting.len() as u64) < parts) else { return u64::MAX };
        let left = self.waiting.iter().map(|(first, end)| end - first).sum::<u64>();
        (left / parts).max(1)
    }

    /// Worker `index` has learned what its relay has.
    pub(super) fn note_refreshed(&mut self, now: Duration, index: usize) {
        let worker = &mut self.workers[index];
        (worker.fresh_until, worker.was_asked) = (now + MAP_AGE, true);
    }

    /// Worker `index` asks for its range now.
    pub(super) fn begin(&mut self, now: Duration, index: usize, socket: Weak<CloseOnFork<Socket>>) {
        let worker = &mut self.workers[index];
        let bytes = worker.bytes();
        worker.socket = socket;
        if let Some(claim) = &mut worker.claim {
            claim.begun = Some((now, bytes));
        }
    }

    /// Worker `index` gives back what is left of its range from block `at` on, and says whether all went well. Returns
    /// why its connection was shut down, if it was.
    pub(super) fn end(
        &mut self,
        now: Duration,
        index: usize,
        at: u64,
        is_well: bool,
        receiver: Option<&mut Receiver>,
    ) -> Option<Cut> {
        let worker = &mut self.workers[index];
        let claim = worker.claim.take()?;
        if at < claim.end {
            self.waiting.push_front((at, claim.end));
        }
        if is_well {
            worker.failures = 0;
        }
        if let Some(receiver) = receiver.filter(|_| worker.is_on_source()) {
            receiver.note_source_done(now, claim.first);
        }
        let (since, before) = claim.begun?;
        match claim.cut? {
            Cut::Slow(_) => Some(Cut::Slow(rate(worker.bytes() - before, now.saturating_sub(since)))),
            Cut::Recall => Some(Cut::Recall),
        }
    }

    /// What follows a failure of worker `index`, which has given its range back: the one table of that.
    pub(super) fn fail(
        &mut self,
        now: Duration,
        index: usize,
        failure: &Failure<'_>,
        receiver: Option<&mut Receiver>,
    ) -> Action {
        let worker = &mut self.workers[index];
        let &Failure { error, has_progressed, is_slow, is_filling, by_same_host, is_hasty, is_over } = failure;
        let is_excused = has_progressed && (!is_slow || worker.role == Role::Source);
        worker.failures = match worker.role {
            // One that was merely slow is not at fault twice, and one that would have waited longer is not at fault.
            Role::Source if has_progressed || is_slow || is_filling => 1,
            Role::Source if is_hasty && worker.failures > 0 => worker.failures,
            _ if is_excused => 1,
            _ => worker.failures + 1,
        };
        let is_worn = worker.failures >= ATTEMPTS;
        let pause = backoff(error, worker.failures);
        let (action, pause) = match worker.role {
            Role::Source => {
                worker.source = (worker.source + 1) % self.sources;
                let is_elsewhere = (self.sources > 1 || by_same_host) && error.kind() != ErrorKind::Cancelled;
                let is_final = !(error.is_transient() || is_elsewhere);
                if (is_final || is_worn) && !is_over && receiver.is_some_and(|receiver| receiver.note_source_lost(now))
                {
                    // It is asked once more when relays bring nothing.
                    worker.failures = ATTEMPTS - 1;
                    (Action::DoWithout, Duration::ZERO)
                } else if is_over || is_final {
                    (Action::Fail, Duration::ZERO)
                } else if is_worn {
                    (Action::Leave, Duration::ZERO)
                } else {
                    (Action::Retry, if by_same_host { Duration::ZERO } else { pause })
                }
            }
            Role::Rail if error.is_timeout() || is_worn => {
                let length = LEFT_ALONE * (1 << (worker.failures - 1).min(3));
                (Action::LeaveAlone(length), length)
            }
            Role::Rail => (Action::Retry, pause),
            // Without the source, nobody names it again.
            Role::Relay(_)
                if error.kind() != ErrorKind::Corrupt && !is_worn && receiver.is_some_and(|r| r.is_free()) =>
            {
                worker.was_asked = false;
                (Action::Retry, pause)
            }
            Role::Relay(_) => (Action::Leave, Duration::ZERO),
        };
        worker.not_before = now + pause;
        action
    }

    /// Worker `index` has ended because of `error`, or since nothing is left. While something is, the last one on a source
    /// fails the transfer.
    pub(super) fn leave(&mut self, index: usize, error: Option<Error>) {
        self.workers[index].is_gone = true;
        if let Some(error) = error
            && self.workers[index].role == Role::Source
            && !self.is_manned()
            && !self.is_over()
        {
            self.give_up(error);
        }
    }

    /// Fails the transfer; the first error counts.
    pub(super) fn give_up(&mut self, error: Error) {
        self.failed.get_or_insert(error);
    }

    pub(super) fn has_failed(&self) -> bool {
        self.failed.is_some()
    }

    /// The connection of worker `index`, if it is there.
    pub(super) fn socket(&self, index: usize) -> Option<Arc<CloseOnFork<Socket>>> {
        self.workers[index].socket.upgrade()
    }

    /// The outcome, once every worker has ended: the first failure, or an error if ranges are left over.
    pub(super) fn finish(self) -> Result<(), Error> {
        match self.failed {
            Some(error) => Err(error),
            None if self.waiting.is_empty() => Ok(()),
            None => Err(Error::new(ErrorKind::Connect, "every lane gave up before all bytes had come")),
        }
    }

    /// The workers that lose their ranges, as they are far slower than the average while another one has nothing to do:
    /// their connections are to be shut down.
    pub(super) fn steal(&mut self, now: Duration) -> Vec<usize> {
        let (total, workers) = (self.bytes(), self.on_sources().max(1) as u64);
        let average = self.pace.look(now, total, workers);
        let mut slow = Vec::new();
        if !std::mem::take(&mut self.is_idle) {
            return slow;
        }
        for (index, worker) in self.workers.iter_mut().enumerate() {
            let bytes = worker.bytes();
            let Some(Claim { end, begun: Some((since, before)), cut: cut @ None, .. }) = &mut worker.claim else {
                continue;
            };
            let elapsed = now.saturating_sub(*since);
            let expected = within(average, elapsed);
            let is_slow =
                elapsed >= AT_LEAST && expected >= EVIDENCE && (bytes - *before).saturating_mul(SLOWER) < expected;
            if is_slow && (worker.role != Role::Source || self.stolen.insert(*end)) {
                *cut = Some(Cut::Slow(0));
                slow.push(index);
            }
        }
        slow
    }

    /// The workers on sources that will not be through with their ranges of `len` bytes soon, since others are to share what
    /// comes from there. One has more time, so that each receiver has something to pass on.
    pub(super) fn recall(&mut self, now: Duration, len: impl Fn(u64, u64) -> u64) -> Vec<usize> {
        let got = |worker: &Worker| {
            let (since, before) = worker.claim.as_ref().filter(|_| worker.role == Role::Source)?.begun?;
            Some((worker.bytes() - before, since))
        };
        let kept = (0..self.workers.len()).max_by_key(|&index| got(&self.workers[index]).map(|(got, _)| got));
        let mut recalled = Vec::new();
        for (index, worker) in self.workers.iter_mut().enumerate() {
            let (Some((got, since)), Some(claim)) = (got(worker), &mut worker.claim) else { continue };
            let left = u128::from(len(claim.first, claim.end).saturating_sub(got));
            let soon = if Some(index) == kept { SOON_FOR_ONE } else { SOON };
            if now.saturating_sub(since).as_millis() * left / u128::from(got.max(1)) > soon.as_millis() {
                claim.cut = Some(Cut::Recall);
                recalled.push(index);
            }
        }
        recalled
    }
}

/// Bytes per second.
pub(super) fn rate(bytes: u64, elapsed: Duration) -> u64 {
    let rate = u128::from(bytes) * 1000 / elapsed.as_millis().max(1);
    u64::try_from(rate).unwrap_or(u64::MAX)
}

/// The bytes that come in `elapsed` at `rate`, in bytes per second.
fn within(rate: u64, elapsed: Duration) -> u64 {
    u64::try_from(u128::from(rate) * elapsed.as_millis() / 1000).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests;
