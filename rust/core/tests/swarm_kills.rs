//! Random schedules of kills: members of a swarm, and sometimes its source, end at moments that a seed decides.
//!
//! `SWARM_SCHEDULES` says how many there are, `SWARM_SCHEDULES=50` before a release, and `SWARM_FIRST` the seed of the
//! first.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};

use tensorferry_core::{Cancel, FetchOptions, ServerConfig, Stability};

use crate::common::{BLOCK, PATIENCE, Rig, STEP, State, eventually, lanes};

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
        bind: Some([127, 0, 0, 1].into()),
        patience: PATIENCE,
        ..ServerConfig::default()
    })
}

/// One schedule: who is not killed has the right bytes at the end, or an error if the source was.
fn run(seed: u64) {
    let mut random = Random(seed);
    let state = State::of(&[BLOCKS * BLOCK - 5], seed);
    let source = server(24 + random.below(48));
    source.server.store().publish(STEP, state.publication(Stability::Private));
    let rigs: Vec<_> = (0..2 + random.below(3)).map(|_| server(8 + random.below(48))).collect();
    // Who is killed when it has got so many blocks; the number behind the last member is the source.
    let kills: Vec<(usize, u64)> =
        (0..=random.below(2)).map(|_| (random.index(rigs.len() + 1), 1 + random.below(BLOCKS as u64))).collect();
    let source_dies = kills.iter().any(|kill| kill.0 == rigs.len());
    let cancels: Vec<Cancel> = rigs.iter().map(|_| Cancel::new()).collect();
    let progress: Vec<Arc<AtomicU64>> = rigs.iter().map(|_| Arc::default()).collect();
    let url = source.url();
    let ended: Vec<AtomicBool> = rigs.iter().map(|_| AtomicBool::new(false)).collect();
    let late: Vec<u64> = rigs.iter().map(|_| random.below(BLOCKS as u64)).collect();
    std::thread::scope(|scope| {
        let receives: Vec<_> = (0..rigs.len())
            .map(|number| {
                let (cancels, progress, rigs, late) = (&cancels, &progress, &rigs, &late);
                let (url, state, ended) = (&url, &state, &ended);
                scope.spawn(move || {
                    // Some begin when the first one has got some blocks.
                    let is_on = || progress[0].load(Ordering::Relaxed) >= late[number] * BLOCK as u64;
                    if number > 0 && late[number] % 2 == 0 {
                        eventually("it is time to begin", || is_on() || ended[0].load(Ordering::SeqCst));
                    }
                    let options = FetchOptions {
                        relay: Some(rigs[number].server.relay_host()),
                        relays_at_once: true,
                        same_host: false,
                        cancel: cancels[number].clone(),
                        progress: Arc::clone(&progress[number]),
                        ..lanes(2)
                    };
                    // The bytes are compared there.
                    let result = state.fetch(&[url], options).map(drop);
                    ended[number].store(true, Ordering::SeqCst);
                    result
                })
            })
            .collect();
        let victims: Vec<_> = kills
            .iter()
            .map(|&(victim, blocks)| {
                let (ended, progress, cancels, rigs, source) = (&ended, &progress, &cancels, &rigs, &source);
                scope.spawn(move || {
                    let watched = victim.min(rigs.len() - 1);
                    let is_time = || progress[watched].load(Ordering::Relaxed) >= blocks * BLOCK as u64;
                    eventually("it is time", || is_time() || ended[watched].load(Ordering::SeqCst));
                    if let Some(rig) = rigs.get(victim) {
                        cancels[victim].cancel();
                        rig.server.shutdown(std::time::Duration::ZERO);
                    } else {
                        source.server.shutdown(std::time::Duration::ZERO);
                    }
                })
            })
            .collect();
        for victim in victims {
            victim.join().unwrap();
        }
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
