//! State that is changed while it is served: the received bytes are of one moment, or the receive fails and says why.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use crate::common::{BLOCK, PATIENCE, Rig, STEP, lanes};
use tensorferry_core::{
    Arrived, Destination, Error, ErrorKind, FetchOptions, Hint, Item, Memory, Publication, Remote, Repeat, Secret,
    ServerConfig, Slice, Stability, Withdrawn,
};
use tensorferry_wire::container::MANIFEST_ENTRY;
use tensorferry_wire::dtype::Dtype;

/// Of a receive on a machine that is busy with others: bytes come several times, and each time is too late.
const LONG: Duration = Duration::from_mins(1);

const SECRET: &[u8] = b"of all that is shared here, this alone stays unsaid";

/// Memory of a trainer in which every byte is the number of the current moment. It outlives the server it is lent to.
struct Lent {
    len: usize,
    memory: Vec<AtomicU64>,
}

impl Lent {
    fn new(len: usize) -> Self {
        Self { len, memory: std::iter::repeat_with(|| AtomicU64::new(0)).take(len.div_ceil(8)).collect() }
    }

    fn publication(&self) -> Publication {
        // SAFETY: the tests keep `self` until their server is gone.
        let memory = unsafe { Memory::borrowed(self.memory.as_ptr() as usize, self.len) };
        let item = Item::new("w", Dtype::U8, &[self.len as u64], memory);
        Publication::new(Vec::new(), vec![item], Stability::Borrowed, Box::new(())).unwrap()
    }

    fn change(&self, moment: u8) {
        let eight = u64::from_ne_bytes([moment; 8]);
        self.memory.iter().for_each(|word| word.store(eight, Ordering::Relaxed));
    }
}

/// When the memory is changed.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Change {
    /// Once, in the middle of the receive.
    Once,
    /// A few times with pauses, and then no more.
    Some,
    /// All the time.
    Always,
}

/// Runs `receive` and changes the memory of `len` bytes once `from` bytes have arrived, as counted in the options that
/// `receive` is given. Returns the result of `receive` and the number of the last moment.
fn during<T>(
    (len, from): (usize, usize),
    change: Change,
    config: &ServerConfig,
    receive: impl FnOnce(&Rig, FetchOptions) -> Result<T, Error>,
) -> (Result<T, Error>, u8) {
    let lent = Lent::new(len);
    let rig = Rig::configured(config).publishing(lent.publication());
    let (progress, over) = (Arc::new(AtomicU64::new(0)), AtomicBool::new(false));
    let options = FetchOptions {
        progress: Arc::clone(&progress),
        secret: config.secret.clone(),
        stall: Duration::from_secs(5),
        timeout: LONG,
        ..lanes(2)
    };
    // Short enough that no block is sent unchanged for long; an endless change takes the processor from other tests.
    let pause = Duration::from_micros(200 + len as u64 / 4096);
    let result = std::thread::scope(|scope| {
        let changing = scope.spawn(|| {
            let mut moment = 0;
            while !over.load(Ordering::SeqCst) {
                if progress.load(Ordering::Relaxed) >= from as u64 {
                    moment = 1 + moment % 250;
                    lent.change(moment);
                    match change {
                        Change::Once => break,
                        Change::Some if moment == 4 => break,
                        Change::Some => std::thread::sleep(Duration::from_millis(5)),
                        Change::Always => {}
                    }
                }
                std::thread::sleep(pause);
            }
            moment
        });
        let result = receive(&rig, options);
        over.store(true, Ordering::SeqCst);
        (result, changing.join().unwrap())
    });
    drop(rig);
    result
}

/// The distinct moments to which `bytes` belong.
fn moments(bytes: &[u8]) -> Vec<u8> {
    let mut seen = [false; 256];
    for &byte in bytes {
        seen[usize::from(byte)] = true;
    }
    (0..=255).filter(|&byte| seen[usize::from(byte)]).collect()
}

/// Whether `bytes` were all in memory at one moment, which may be in the middle of a change: a change writes the first
/// byte first, so there is at most one border between old bytes and new ones.
fn are_of_one_moment(bytes: &[u8]) -> bool {
    bytes.windows(2).filter(|pair| pair[0] != pair[1]).count() <= 1
}

fn fetch(rig: &Rig, options: FetchOptions) -> Result<Arrived, Error> {
    Remote::open(&[&rig.url()], STEP, options)?.fetch(Destination::Fresh)
}

fn is_torn(what: &str, failed: &Error) {
    assert_eq!(failed.kind(), ErrorKind::Torn, "{what}: {failed}");
    assert_eq!(failed.hint(), Some(Hint::WithdrawBeforeChange), "{what}: {failed}");
    assert!(failed.to_string().contains(": w"), "{what}: {failed}");
}

/// Slow enough that a change falls into the middle of a receive of 24 MiB.
fn slow() -> ServerConfig {
    ServerConfig { max_bandwidth: Some(100 << 20), patience: PATIENCE, ..ServerConfig::default() }
}

const LARGE: usize = 24 * BLOCK + 77;

#[test]
fn what_arrives_is_of_one_moment() {
    for same_host in [false, true] {
        for secret in [None, Some(Secret::new(SECRET).unwrap())] {
            for change in [Change::Once, Change::Some] {
                let config = ServerConfig { secret: secret.clone(), ..slow() };
                let what = format!("same_host={same_host} {change:?}");
                let (arrived, last) = during((LARGE, LARGE / 3), change, &config, |rig, options| {
                    fetch(rig, FetchOptions { same_host, ..options })
                });
                let arrived = arrived.unwrap_or_else(|e| panic!("{what}: {e}"));
                assert_eq!(moments(arrived.arena().bytes(0, LARGE)), [last], "{what}");
                assert!(arrived.report().retries > 0 && !arrived.report().troubles.is_empty(), "{what}");
            }
        }
    }
}

#[test]
fn a_state_that_is_never_at_rest_fails_and_the_error_says_what_to_do() {
    // The first two are received whole along with their header.
    for len in [BLOCK / 4, BLOCK - 4096, 3 * BLOCK, LARGE] {
        for same_host in [false, true] {
            let started = Instant::now();
            let (result, _) = during((len, 0), Change::Always, &slow(), |rig, options| {
                fetch(rig, FetchOptions { same_host, ..options })
            });
            let what = format!("{len} bytes, same_host={same_host}");
            match result {
                Err(failed) => is_torn(&what, &failed),
                // Small states may be read between two changes, or in the middle of one.
                Ok(arrived) => assert!(are_of_one_moment(arrived.arena().bytes(0, len)), "{what}"),
            }
            assert!(started.elapsed() < LONG, "{what}");
        }
    }
}

#[test]
fn slices_are_of_one_moment() {
    // Whole blocks, and a small part of many blocks; some bytes are requested twice.
    for (run, count, rate) in [(6 * BLOCK as u64, 2, 40 << 20), (2000, 1000, 8 << 20)] {
        for change in [Change::Once, Change::Always] {
            let (fetched, last) =
                during((LARGE, BLOCK), change, &ServerConfig { max_bandwidth: Some(rate), ..slow() }, {
                    |rig, options| {
                        let mut buffers = [vec![0xEE; LARGE], vec![0xEE; LARGE]];
                        let step = (LARGE as u64 - run) / (count - 1);
                        let places = buffers.each_mut().map(|buffer| {
                            let repeat = Repeat { count, entry_stride: step, memory_stride: run };
                            // SAFETY: it has room for all runs, and nobody touches it meanwhile.
                            unsafe {
                                Slice::new(
                                    "w",
                                    (Dtype::U8, LARGE as u64),
                                    (0, run),
                                    buffer.as_mut_ptr() as usize,
                                    vec![repeat],
                                )
                            }
                        });
                        let options = FetchOptions { ahead: 4096, ..options };
                        Remote::open(&[&rig.url()], STEP, options)?.fetch_slices(&places)?;
                        let used = usize::try_from(run * count).unwrap();
                        Ok(buffers.map(|buffer| buffer[..used].to_vec()))
                    }
                });
            match (change, fetched) {
                (Change::Always, Err(failed)) => is_torn("slices", &failed),
                (_, Ok([one, other])) => {
                    assert!(one == other && are_of_one_moment(&one));
                    assert!(change == Change::Always || moments(&one) == [last] || last == 0, "{last}");
                }
                (_, Err(failed)) => panic!("{failed}"),
            }
        }
    }
}

#[test]
fn what_came_with_the_header_is_of_the_moment_too() {
    let lent = Lent::new(LARGE);
    let rig = Rig::new();
    // The block with the manifest also holds the beginning of the tensor.
    // SAFETY: `lent` is there until the server is gone.
    let memory = unsafe { Memory::borrowed(lent.memory.as_ptr() as usize, LARGE) };
    let items = vec![
        Item::bytes(MANIFEST_ENTRY, Dtype::U8, &[64], vec![b' '; 64].into()),
        Item::new("w", Dtype::U8, &[LARGE as u64], memory),
    ];
    let publication = Publication::new(Vec::new(), items, Stability::Borrowed, Box::new(())).unwrap();
    rig.server.store().publish(STEP, publication);
    let remote = Remote::open(&[&rig.url()], STEP, lanes(2)).unwrap();
    let entry = remote.header().entries().iter().position(|entry| entry.name == "w").unwrap();
    lent.change(1);
    let arrived = remote.fetch(Destination::Fresh).unwrap();
    assert_eq!(moments(arrived.arena().bytes(arrived.offsets()[entry].unwrap(), LARGE)), [1]);
    drop(rig);
}

#[test]
fn what_comes_again_is_of_one_moment_with_the_rest() {
    let lent = Lent::new(LARGE);
    let rig = Rig::new().publishing(lent.publication());
    let most = 5 * BLOCK;
    let remote = Remote::open(&[&rig.url()], STEP, lanes(2)).unwrap();
    let mut waves = remote.staged(Destination::Fresh, &[0], most as u64).unwrap();
    let (mut device, mut memory) = (vec![0xEE; LARGE], vec![0xEE; most]);
    let mut count = 0;
    // SAFETY: as many bytes as the receive was begun with, and nobody else's.
    while let Some(parts) = unsafe { waves.fetch(memory.as_mut_ptr() as usize) }.unwrap() {
        for part in parts {
            let (start, len, at) = [part.start, part.len, part.at].map(|n| usize::try_from(n).unwrap()).into();
            device[start..start + len].copy_from_slice(&memory[at..at + len]);
        }
        count += 1;
        // Once between two of the five waves that bring all bytes, and once between two of those that fetch some again.
        if [2, 6].contains(&count) {
            lent.change(count);
        }
    }
    waves.finish().unwrap();
    assert_eq!((moments(&device), count > 7), (vec![6], true), "{count} waves");
    drop(rig);
}

#[test]
fn two_sources_that_change_are_not_mixed() {
    let other = Lent::new(LARGE);
    let second = Rig::configured(&slow()).publishing(other.publication());
    let (arrived, last) = during((LARGE, LARGE / 3), Change::Once, &slow(), |rig, options| {
        Remote::open(&[&rig.url(), &second.url()], STEP, options)?.fetch(Destination::Fresh)
    });
    let seen = moments(arrived.unwrap().arena().bytes(0, LARGE));
    assert!(seen == [0] || seen == [last], "{seen:?}");
    drop(second);
}

#[test]
fn a_withdrawal_lets_a_receive_find_the_moment() {
    // The trainer waits in `withdraw` until the receiver has bytes that it can verify.
    let lent = Lent::new(LARGE);
    let rig = Rig::configured(&slow()).publishing(lent.publication());
    let progress = Arc::new(AtomicU64::new(0));
    let options = FetchOptions { progress: Arc::clone(&progress), ..lanes(2) };
    std::thread::scope(|scope| {
        let receiver = scope.spawn(|| fetch(&rig, options));
        while progress.load(Ordering::Relaxed) < LARGE as u64 / 3 {
            std::thread::sleep(Duration::from_millis(1));
        }
        lent.change(1);
        assert_eq!(rig.server.store().withdraw(PATIENCE), Withdrawn::Drained);
        lent.change(2);
        let arrived = receiver.join().unwrap().unwrap();
        assert_eq!(moments(arrived.arena().bytes(0, LARGE)), [1]);
    });
    drop(rig);
}
