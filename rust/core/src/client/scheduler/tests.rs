//! Whole transfers without threads: a simulator with endpoints that are well, dead, slow, silent, broken or lying.

use super::*;
use crate::error::ErrorKind;

const MIB: u64 = 1 << 20;
const TICK: Duration = Duration::from_millis(10);
/// How long a silent source, and a silent rail, is waited for.
const STALL: [Duration; 2] = [Duration::from_secs(15), Duration::from_secs(1)];

/// How an endpoint behaves.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Health {
    /// It brings so many MiB a second for each worker.
    Well(u64),
    /// Nobody answers.
    Dead,
    /// It accepts a request and says nothing.
    Silent,
    /// It ends each answer after a block.
    Breaking(u64),
    /// What it brings is not what was asked for.
    Lying,
}

impl Scheduler {
    /// Notes that a worker is cut for `reason` whose range of `len` bytes has come and has not ended yet, if there is one.
    pub(in crate::client) fn cut_one_that_is_through(&mut self, reason: Cut, len: u64) -> Option<usize> {
        self.workers.iter_mut().position(|worker| {
            let bytes = worker.bytes();
            let Some(Claim { begun: Some((_, before)), cut, .. }) = &mut worker.claim else { return false };
            let is_through = bytes - *before >= len;
            *cut = cut.or(is_through.then_some(reason));
            is_through
        })
    }
}

struct SimWorker {
    endpoint: usize,
    is_rail: bool,
    index: usize,
    got: Arc<AtomicU64>,
    is_connected: bool,
    /// What it fetches: from which source, the range, when it began, and the bytes that have come of it.
    fetch: Option<(usize, u64, u64, Duration, u64)>,
    is_gone: bool,
}

/// What a transfer has come to.
#[derive(Debug)]
struct Outcome {
    took: Duration,
    /// How often each block has come.
    counts: Vec<u32>,
    /// The blocks that each worker has brought.
    shares: Vec<u64>,
    result: Result<(), Error>,
}

/// Fetches `blocks` blocks by `lanes` workers on `sources` and two over each of `rails`, which are further addresses of the
/// first source.
fn simulate(sources: &[Health], rails: &[Health], lanes: usize, blocks: u64) -> Outcome {
    let mut scheduler = Scheduler::new(&[(0, blocks)], 16, sources.len());
    let mut workers = Vec::new();
    let mut add = |scheduler: &mut Scheduler, role: Role, source: usize, endpoint: usize| {
        let (index, got) = scheduler.enlist(role, source, Duration::ZERO);
        let is_rail = role == Role::Rail;
        workers.push(SimWorker { endpoint, is_rail, index, got, is_connected: false, fetch: None, is_gone: false });
    };
    (0..lanes).for_each(|lane| add(&mut scheduler, Role::Source, lane % sources.len(), 0));
    (0..2 * rails.len()).for_each(|lane| add(&mut scheduler, Role::Rail, 0, lane / 2));
    let (mut counts, mut shares) = (vec![0; usize::try_from(blocks).unwrap()], vec![0; workers.len()]);
    let mut now = Duration::ZERO;
    while scheduler.is_manned() && now < Duration::from_mins(30) {
        now += TICK;
        let cut = scheduler.steal(now);
        for worker in &mut workers {
            tick(
                &mut scheduler,
                worker,
                now,
                cut.contains(&worker.index),
                (sources, rails),
                (&mut counts, &mut shares),
            );
        }
    }
    Outcome { took: now, counts, shares, result: scheduler.finish() }
}

fn tick(
    scheduler: &mut Scheduler,
    worker: &mut SimWorker,
    now: Duration,
    is_cut: bool,
    (sources, rails): (&[Health], &[Health]),
    (counts, shares): (&mut [u32], &mut [u64]),
) {
    if worker.is_gone {
        return;
    }
    let health =
        |worker: &SimWorker, source: usize| if worker.is_rail { rails[worker.endpoint] } else { sources[source] };
    let error = |kind| Error::new(kind, "as this test has it");
    let Some((source, at, end, since, bytes)) = &mut worker.fetch else {
        match scheduler.next(now, worker.index, worker.is_connected, None) {
            Task::Fetch { source, at, end } => {
                if health(worker, source) == Health::Dead {
                    scheduler.end(now, worker.index, at, false, None);
                    fail(scheduler, worker, now, error(ErrorKind::Connect), false, false);
                } else {
                    scheduler.begin(now, worker.index, Weak::new());
                    worker.fetch = Some((source, at, end, now, 0));
                }
            }
            Task::Connect if health(worker, 0) == Health::Dead => {
                fail(scheduler, worker, now, error(ErrorKind::Connect), false, false);
            }
            Task::Connect => worker.is_connected = true,
            Task::Refresh { .. } => panic!("there are no relays"),
            Task::Wait(_) => {}
            Task::Over => {
                worker.is_gone = true;
                scheduler.leave(worker.index, None);
            }
        }
        return;
    };
    let (source, first) = (*source, *at);
    let health = if worker.is_rail { rails[worker.endpoint] } else { sources[source] };
    let speed = match health {
        Health::Well(speed) | Health::Breaking(speed) => speed,
        _ => 0,
    };
    let more = speed * MIB * u64::try_from(TICK.as_millis()).unwrap() / 1000;
    *bytes += more;
    worker.got.fetch_add(more, Ordering::Relaxed);
    let done = (first + *bytes / MIB).min(*end);
    let is_silent = health == Health::Silent && now.saturating_sub(*since) >= STALL[usize::from(worker.is_rail)];
    let ends = match health {
        Health::Breaking(_) if done > first => Some((first + 1, Some(error(ErrorKind::Connect)))),
        Health::Lying => Some((first, Some(error(ErrorKind::Protocol)))),
        _ if is_cut => Some((done, Some(error(ErrorKind::Timeout)))),
        _ if is_silent => Some((first, Some(error(ErrorKind::Timeout)))),
        _ if done == *end => Some((done, None)),
        _ => None,
    };
    if let Some((done, failure)) = ends {
        for block in first..done {
            counts[usize::try_from(block).unwrap()] += 1;
            shares[worker.index] += 1;
        }
        worker.fetch = None;
        let cut = scheduler.end(now, worker.index, done, failure.is_none(), None);
        assert_eq!(cut.is_some(), is_cut);
        if let Some(error) = failure {
            fail(scheduler, worker, now, error, done > first, is_cut);
        }
    }
}

fn fail(
    scheduler: &mut Scheduler,
    worker: &mut SimWorker,
    now: Duration,
    error: Error,
    has_progressed: bool,
    is_slow: bool,
) {
    worker.is_connected = false;
    match scheduler.fail(now, worker.index, &Failure { has_progressed, is_slow, ..failure(&error) }, None) {
        Action::Retry | Action::LeaveAlone(_) => {}
        Action::Leave => {
            worker.is_gone = true;
            scheduler.leave(worker.index, Some(error));
        }
        Action::Fail | Action::DoWithout => panic!("{error} is no reason to end"),
    }
}

fn failure(error: &Error) -> Failure<'_> {
    let (has_progressed, is_slow, is_filling, by_same_host, is_hasty, is_over) = Default::default();
    Failure { error, has_progressed, is_slow, is_filling, by_same_host, is_hasty, is_over }
}

/// Numbers that look random.
fn numbers(seed: u64) -> impl FnMut(u64) -> u64 {
    let mut state = seed;
    move |below| {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 33) % below
    }
}

#[test]
fn every_block_comes_once_while_one_source_lives() {
    for seed in 0..300 {
        let mut number = numbers(seed);
        let mut health = || match number(6) {
            0 => Health::Dead,
            1 => Health::Silent,
            2 => Health::Lying,
            3 => Health::Breaking(50),
            _ => Health::Well([1, 50, 400][usize::try_from(number(3)).unwrap()]),
        };
        let mut sources: Vec<_> = (0..=seed % 3).map(|_| health()).collect();
        let rails: Vec<_> = (0..seed % 4).map(|_| health()).collect();
        let lanes = sources.len() * (1 + usize::try_from(seed % 5).unwrap());
        let living = usize::try_from(seed).unwrap() % sources.len();
        sources[living] = Health::Well(100);
        let outcome = simulate(&sources, &rails, lanes, 1 + seed * 7 % 600);
        assert!(outcome.result.is_ok(), "{seed} {sources:?} {rails:?}: {:?}", outcome.result);
        assert!(outcome.counts.iter().all(|&count| count == 1), "{seed} {sources:?} {rails:?}: {:?}", outcome.counts);
        assert!(outcome.took < Duration::from_mins(10), "{seed} {sources:?} {rails:?}: {:?}", outcome.took);
    }
}

#[test]
fn no_endpoint_that_is_well_is_starved() {
    let outcome = simulate(&[Health::Well(50), Health::Well(100)], &[Health::Well(100), Health::Well(40)], 4, 4000);
    assert!(outcome.result.is_ok() && outcome.shares.iter().all(|&share| share > 100), "{:?}", outcome.shares);
    // All end together: eight workers with 75 MiB a second on average.
    assert!(outcome.took < Duration::from_secs(8), "{:?}", outcome.took);
}

#[test]
fn a_transfer_fails_when_all_sources_have_and_rails_do_not_help_that() {
    for health in [Health::Dead, Health::Lying, Health::Silent] {
        let outcome = simulate(&[health; 2], &[Health::Dead], 3, 40);
        assert!(outcome.result.is_err() && outcome.took < Duration::from_mins(2), "{health:?}: {:?}", outcome.took);
    }
}

#[test]
fn what_is_slow_loses_its_range_to_those_that_have_nothing_to_do() {
    // A slow source of two, whose lanes would need minutes for their ranges.
    let outcome = simulate(&[Health::Well(400), Health::Well(1)], &[], 4, 400);
    assert!(outcome.result.is_ok() && outcome.took < Duration::from_secs(10), "{:?}", outcome.took);
}

#[test]
fn what_follows_a_failure() {
    let kinds =
        [ErrorKind::Connect, ErrorKind::Status(404), ErrorKind::Cancelled, ErrorKind::Corrupt, ErrorKind::Timeout];
    let [connect, refused, cancelled, corrupt, late] = kinds.map(|kind| Error::new(kind, ""));
    let plain = failure(&connect);
    let after = |role: Role, sources: usize, failures: &[Failure<'_>]| {
        let mut scheduler = Scheduler::new(&[(0, 4)], 1, sources);
        scheduler.enlist(role, 0, Duration::ZERO);
        failures.iter().map(|failure| scheduler.fail(Duration::ZERO, 0, failure, None)).last().unwrap()
    };
    let slow = Failure { is_slow: true, ..plain };
    let on_source = |sources, failures: &[Failure<'_>]| after(Role::Source, sources, failures);
    assert_eq!(on_source(1, &[plain; 4]), Action::Retry);
    assert_eq!(on_source(1, &[plain; 5]), Action::Leave);
    assert_eq!(on_source(1, &[slow; 9]), Action::Retry, "it is not at fault twice");
    assert_eq!(on_source(1, &[Failure { has_progressed: true, ..plain }; 9]), Action::Retry);
    assert_eq!(on_source(1, &[Failure { is_filling: true, ..plain }; 9]), Action::Retry);
    assert_eq!(on_source(1, &[Failure { is_hasty: true, ..plain }; 9]), Action::Retry);
    assert_eq!(on_source(1, &[Failure { is_over: true, ..plain }]), Action::Fail);
    let refused = failure(&refused);
    assert_eq!(on_source(1, &[refused]), Action::Fail);
    assert_eq!(on_source(2, &[refused]), Action::Retry, "another source may have it");
    assert_eq!(on_source(1, &[Failure { by_same_host: true, ..refused }]), Action::Retry, "the network may do");
    assert_eq!(on_source(2, &[failure(&cancelled)]), Action::Fail);
    assert_eq!(after(Role::Rail, 1, &[plain; 4]), Action::Retry);
    assert!(matches!(after(Role::Rail, 1, &[plain; 5]), Action::LeaveAlone(_)));
    assert!(matches!(after(Role::Rail, 1, &[failure(&late)]), Action::LeaveAlone(_)));
    assert!(matches!(after(Role::Rail, 1, &[refused; 9]), Action::LeaveAlone(_)), "it cannot fail a transfer");
    assert_eq!(after(Role::Relay(0), 1, &[plain]), Action::Leave);
    assert_eq!(after(Role::Relay(0), 1, &[failure(&corrupt)]), Action::Leave);
}

#[test]
fn what_is_left_of_a_range_comes_back_and_what_is_done_does_not() {
    let mut scheduler = Scheduler::new(&[(0, 5), (9, 10)], 3, 1);
    let worker = scheduler.enlist(Role::Source, 0, Duration::ZERO).0;
    let mut next = |done: u64| {
        let task = scheduler.next(Duration::ZERO, worker, true, None);
        scheduler.end(Duration::ZERO, worker, done, true, None);
        match task {
            Task::Fetch { at, end, .. } => Some((at, end)),
            _ => None,
        }
    };
    let taken = [2, 3, 5, 10, 10].map(&mut next);
    assert_eq!(taken, [Some((0, 3)), Some((2, 3)), Some((3, 5)), Some((9, 10)), None]);
    scheduler.finish().unwrap();
}

#[test]
fn the_first_ranges_are_short_where_there_are_other_addresses() {
    let first = |expected: Option<usize>| {
        let mut scheduler = Scheduler::new(&[(0, 256)], 16, 1);
        scheduler.expected = expected;
        let worker = scheduler.enlist(Role::Source, 0, Duration::ZERO).0;
        scheduler.next(Duration::ZERO, worker, true, None)
    };
    assert_eq!(first(None), Task::Fetch { source: 0, at: 0, end: 16 });
    assert_eq!(first(Some(8)), Task::Fetch { source: 0, at: 0, end: 4 });
}

/// Whether a worker loses its range that has got `bytes` in `millis`, while others have brought `total` in the two seconds
/// of the transfer and one of them has nothing to do.
fn is_cut((bytes, millis): (u64, u64), total: u64) -> bool {
    let at = Duration::from_millis;
    let mut scheduler = Scheduler::new(&[(0, 16)], 16, 1);
    let workers = [(); 4].map(|()| scheduler.enlist(Role::Source, 0, Duration::ZERO));
    let since = at(2000 - millis);
    scheduler.next(since, 0, true, None);
    scheduler.begin(since, 0, Weak::new());
    workers[0].1.fetch_add(bytes, Ordering::Relaxed);
    workers[1].1.fetch_add(total, Ordering::Relaxed);
    scheduler.next(at(2000), 2, true, None);
    let cut = scheduler.steal(at(2000));
    assert!(scheduler.end(at(2000), 0, 0, false, None).is_some() != cut.is_empty());
    cut == [0]
}

#[test]
fn a_worker_is_judged_by_what_an_average_one_would_have_brought() {
    // 10 and 1 MB/s in all: the others have had their turns, and this one has not yet.
    assert!(!is_cut((0, 1500), 20_000_000));
    assert!(!is_cut((0, 1900), 2_000_000));
    // 200 MB/s in all.
    assert!(is_cut((0, 1500), 400_000_000));
    assert!(is_cut((1 << 20, 1500), 400_000_000));
    assert!(!is_cut((0, 500), 400_000_000), "a moment is too short");
    assert!(!is_cut((32 << 20, 1500), 400_000_000));
}

#[test]
fn workers_that_are_through_leave_the_pace_as_it_was() {
    let mut pace = Pace::default();
    let at = Duration::from_millis;
    assert_eq!(pace.look(at(0), 0, 2), 0);
    assert_eq!(pace.look(at(1000), 20_000_000, 2), 10_000_000);
    assert_eq!(pace.look(at(1010), 20_000_000, 2), 10_000_000, "too early to say");
    assert_eq!(pace.look(at(10_000), 20_000_100, 2), 10_000_000, "one drips, the others are through");
    assert_eq!(pace.look(at(20_000), 40_000_000, 2), 1_000_000, "the source is slower now");
}

#[test]
fn ranges_that_come_soon_are_not_recalled() {
    let at = Duration::from_millis;
    let mut scheduler = Scheduler::new(&[(0, 48)], 16, 1);
    for (index, bytes) in [8 * MIB, 2 * MIB, 14 * MIB].into_iter().enumerate() {
        let got = scheduler.enlist(Role::Source, 0, Duration::ZERO).1;
        scheduler.next(at(0), index, true, None);
        scheduler.begin(at(0), index, Weak::new());
        got.fetch_add(bytes, Ordering::Relaxed);
    }
    // The second has seven seconds to go, the first one, and the third 143 milliseconds.
    assert_eq!(scheduler.recall(at(1000), |first, end| (end - first) * MIB), [0, 1]);
    assert_eq!(scheduler.end(at(1000), 1, 18, false, None), Some(Cut::Recall));
}
