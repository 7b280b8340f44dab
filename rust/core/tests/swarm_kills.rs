//! Random schedules of kills: members of a swarm, and sometimes its source, end at moments that a seed decides.
//!
//! `SWARM_SCHEDULES` says how many there are, `SWARM_SCHEDULES=50` before a release, and `SWARM_FIRST` the seed of the
//! first.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};

use tensorferry_core::{Cancel, FetchOptions, ServerConfig, Stability};

use crate::common::{BLOCK, PATIENCE, Rig, State, at_once, eventually, local};
use crate::swarm::member;

const BLOCKS: usize = 24;
const SCHEDULES: u64 = 12;
/// Schedules that run at once: most of their time they wait for limited bandwidth.
const AT_ONCE: usize = 4;

fn setting(name: &str, default: u64) -> u64 {
    std::env::var(name).map_or(default, |value| value.parse().unwrap())
}

/// Numbers that depend on a seed alone.
struct Random(u64);

impl Random {
    fn below(&mut self, end: u64) -> u64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) % end
    }

    fn index(&mut self, end: usize) -> usize {
        usize::try_from(self.below(end as u64)).unwrap()
    }
}

fn server(blocks: u64) -> Rig {
    Rig::configured(&ServerConfig {
        swarm: true,
        max_bandwidth: Some(blocks * BLOCK as u64),
        patience: PATIENCE,
        ..local()
    })
}

struct Member {
    rig: Rig,
    cancel: Cancel,
    progress: Arc<AtomicU64>,
    has_ended: AtomicBool,
    /// It begins when the first one has got so many blocks, if the number is even.
    late: u64,
}

impl Member {
    fn await_blocks(&self, blocks: u64) {
        let is_time = || self.progress.load(Ordering::Relaxed) >= blocks * BLOCK as u64;
        eventually("it is time", || is_time() || self.has_ended.load(Ordering::SeqCst));
    }
}

/// One schedule: who is not killed has the right bytes at the end, or an error if the source was.
fn run(seed: u64) {
    let mut random = Random(seed);
    let state = State::of(&[BLOCKS * BLOCK - 5], seed);
    let source = server(24 + random.below(48)).publishing(state.publication(Stability::Private));
    let members: Vec<_> = (0..2 + random.below(3))
        .map(|_| Member {
            rig: server(8 + random.below(48)),
            cancel: Cancel::new(),
            progress: Arc::default(),
            has_ended: AtomicBool::new(false),
            late: random.below(BLOCKS as u64),
        })
        .collect();
    // Who is killed when it has got so many blocks; the number behind the last member is the source.
    let kills: Vec<(usize, u64)> =
        (0..=random.below(2)).map(|_| (random.index(members.len() + 1), 1 + random.below(BLOCKS as u64))).collect();
    let source_dies = kills.iter().any(|kill| kill.0 == members.len());
    let receive = |number: usize| {
        let own = &members[number];
        if number > 0 && own.late % 2 == 0 {
            members[0].await_blocks(own.late);
        }
        let (cancel, progress) = (own.cancel.clone(), Arc::clone(&own.progress));
        // The bytes are compared there.
        let result = state.fetch(&[&source.url()], FetchOptions { cancel, progress, ..member(&own.rig) }).map(drop);
        own.has_ended.store(true, Ordering::SeqCst);
        result
    };
    let kill = |(victim, blocks): (usize, u64)| {
        members[victim.min(members.len() - 1)].await_blocks(blocks);
        let dying = members.get(victim).inspect(|member| member.cancel.cancel());
        dying.map_or(&source, |member| &member.rig).server.shutdown(std::time::Duration::ZERO);
    };
    std::thread::scope(|scope| {
        let receive = &receive;
        let receives: Vec<_> = (0..members.len()).map(|number| scope.spawn(move || receive(number))).collect();
        at_once(&kills, |&victim| kill(victim));
        for (number, receive) in receives.into_iter().enumerate() {
            let result = receive.join().unwrap();
            let was_killed = kills.iter().any(|kill| kill.0 == number);
            assert!(result.is_ok() || was_killed || source_dies, "seed {seed}, member {number}: {result:?}");
        }
    });
}

#[test]
fn whoever_is_killed_nobody_gets_a_wrong_byte_or_hangs() {
    let (first, count) = (setting("SWARM_FIRST", 0), setting("SWARM_SCHEDULES", SCHEDULES));
    let next = AtomicUsize::new(0);
    std::thread::scope(|scope| {
        for _ in 0..AT_ONCE {
            scope.spawn(|| {
                loop {
                    let turn = next.fetch_add(1, Ordering::Relaxed) as u64;
                    if turn >= count {
                        return;
                    }
                    run(first + turn);
                }
            });
        }
    });
}
