//! Members of a swarm part: from a source that wants its memory back, and from one another.

use std::sync::Arc;
use std::sync::atomic::{AtomicU8, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use tensorferry_core::{
    Destination, Error, FetchOptions, Item, Memory, Publication, Remote, Secret, ServerConfig, Stability, Withdrawn,
};
use tensorferry_wire::dtype::Dtype;

use crate::common::{BLOCK, PATIENCE, Rig, STEP, State, eventually, lanes, noise};

/// Memory of a trainer, which is lent to a source and changed when that has given it back.
struct Lent(Vec<AtomicU8>);

impl Lent {
    fn new(blocks: usize) -> Self {
        Self(noise(blocks * BLOCK, 3).into_iter().map(AtomicU8::new).collect())
    }

    fn bytes(&self) -> Vec<u8> {
        self.0.iter().map(|byte| byte.load(Ordering::Relaxed)).collect()
    }

    fn change(&self) {
        for byte in &self.0 {
            byte.fetch_xor(0xff, Ordering::Relaxed);
        }
    }

    /// A source that lends it, and sends so many blocks in a second.
    fn source(&self, blocks: usize, secret: Option<Secret>) -> Rig {
        let rig = server(Some(blocks), secret);
        // SAFETY: the tests keep `self` until their source is gone.
        let memory = unsafe { Memory::borrowed(self.0.as_ptr() as usize, self.0.len()) };
        let item = Item::new("w", Dtype::U8, &[self.0.len() as u64], memory);
        let publication = Publication::new(Vec::new(), vec![item], Stability::Borrowed, Box::new(())).unwrap();
        rig.server.store().publish(STEP, publication);
        rig
    }
}

/// A server that sends so many blocks in a second.
fn server(blocks: Option<usize>, secret: Option<Secret>) -> Rig {
    let max_bandwidth = blocks.map(|blocks| (blocks * BLOCK) as u64);
    let bind = Some([127, 0, 0, 1].into());
    Rig::configured(&ServerConfig {
        swarm: true,
        max_bandwidth,
        secret,
        bind,
        patience: PATIENCE,
        ..Default::default()
    })
}

/// A receive by the server `rig`, and its result.
fn receive(url: &str, rig: &Rig, options: FetchOptions) -> Result<(Vec<u8>, u64), Error> {
    let options =
        FetchOptions { relay: Some(rig.server.relay_host()), relays_at_once: true, same_host: false, ..options };
    let remote = Remote::open(&[url], STEP, options)?;
    let len = usize::try_from(remote.header().payload_len()).unwrap();
    let arrived = remote.fetch(Destination::Fresh)?;
    Ok((arrived.arena().bytes(arrived.offsets()[0].unwrap(), len).to_vec(), arrived.report().relayed))
}

/// Runs a receive on each of `rigs`, and `then` once each has got some blocks. Returns their results.
fn receives(
    source: Rig,
    rigs: &[Rig],
    secret: Option<&Secret>,
    then: impl FnOnce(Rig, &dyn Fn() -> usize),
) -> Vec<Result<(Vec<u8>, u64), Error>> {
    receives_within(PATIENCE, source, rigs, secret, then)
}

/// The same within `timeout`. What `then` returns is kept until all have ended.
fn receives_within<K>(
    timeout: Duration,
    source: Rig,
    rigs: &[Rig],
    secret: Option<&Secret>,
    then: impl FnOnce(Rig, &dyn Fn() -> usize) -> K,
) -> Vec<Result<(Vec<u8>, u64), Error>> {
    let progress: Vec<Arc<AtomicU64>> = rigs.iter().map(|_| Arc::default()).collect();
    let url = source.url();
    let receive = |(rig, progress): (_, &Arc<AtomicU64>)| {
        let (progress, secret) = (Arc::clone(progress), secret.cloned());
        receive(&url, rig, FetchOptions { progress, secret, timeout, ..lanes(2) })
    };
    std::thread::scope(|scope| {
        let receive = &receive;
        let threads: Vec<_> = rigs.iter().zip(&progress).map(|of| scope.spawn(move || receive(of))).collect();
        eventually("all have begun", || progress.iter().all(|bytes| bytes.load(Ordering::Relaxed) > 2 * BLOCK as u64));
        let _kept = then(source, &|| threads.iter().filter(|thread| !thread.is_finished()).count());
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}

/// Four members receive, each from the source and the others, and the source goes meanwhile. Returns what went wrong, if
/// not a byte is wrong.
fn receive_while_the_source_goes(secret: Option<&Secret>) -> Result<(), String> {
    let lent = Lent::new(64);
    let before = lent.bytes();
    let rigs: Vec<_> = (0..4).map(|_| server(Some(12), secret.cloned())).collect();
    let (mut served, mut unfinished) = (0, 0);
    let results = receives(lent.source(24, secret.cloned()), &rigs, secret, |source, running| {
        let ended = source.server.store().withdraw(PATIENCE);
        assert!(matches!(ended, Withdrawn::Clean | Withdrawn::Drained), "{ended:?}");
        unfinished = running();
        // From here on it is as good as dead.
        lent.change();
        served = source.server.bytes_served();
        drop(source);
    });
    for result in results {
        assert!(result.map_err(|e| e.to_string())?.0 == before, "a mixture of two snapshots");
    }
    if unfinished == 0 {
        return Err("it has waited for the receives to end".into());
    }
    if served >= 3 * before.len() as u64 {
        return Err(format!("it has sent {} of {} MiB", served >> 20, before.len() >> 20));
    }
    Ok(())
}

/// Who is through stays for the others then: without that, they lose what only it has.
#[test]
fn a_source_that_wants_its_memory_back_goes_when_the_others_can_finish_from_one_another() {
    let secret = Secret::new(b"at least sixteen bytes of it").unwrap();
    for secret in [None, Some(secret)] {
        // A member that a busy machine keeps from asking for two seconds is not waited for, and loses its receive.
        let attempts = std::iter::repeat_with(|| receive_while_the_source_goes(secret.as_ref())).take(2);
        let failures: Vec<_> = attempts.map_while(Result::err).collect();
        assert!(failures.len() < 2, "{failures:?}");
    }
}

#[test]
fn a_source_that_withdraws_before_all_is_out_ends_every_receive() {
    let lent = Lent::new(64);
    let rigs: Vec<_> = (0..3).map(|_| server(None, None)).collect();
    let results = receives(lent.source(8, None), &rigs, None, |source, _| {
        assert!(matches!(source.server.store().withdraw(Duration::ZERO), Withdrawn::Cut(_) | Withdrawn::Clean));
        lent.change();
    });
    for result in results {
        result.map(drop).unwrap_err();
    }
}

/// Members that have not all of it between them wait for nothing when the source is gone.
#[test]
fn what_no_member_has_is_not_waited_for_when_the_source_refuses_or_is_gone() {
    for is_replaced in [true, false] {
        let lent = Lent::new(64);
        let rigs: Vec<_> = (0..3).map(|_| server(None, None)).collect();
        let results = receives_within(Duration::from_secs(10), lent.source(8, None), &rigs, None, |source, _| {
            source.server.store().withdraw(Duration::ZERO);
            if is_replaced {
                let state = State::of(&[BLOCK], 3);
                source.server.store().publish(STEP + 1, state.publication(Stability::Private));
                return Some(source);
            }
            None
        });
        for result in results {
            let error = result.map(drop).unwrap_err();
            assert!(!error.is_timeout(), "replaced: {is_replaced}: {error}");
        }
    }
}

#[test]
fn a_receiver_alone_keeps_its_source() {
    let lent = Lent::new(32);
    let before = lent.bytes();
    let results = receives(lent.source(32, None), &[server(None, None)], None, |source, running| {
        let began = Instant::now();
        assert_eq!(source.server.store().withdraw(PATIENCE), Withdrawn::Drained);
        assert!(running() == 0 || began.elapsed() < PATIENCE);
        lent.change();
    });
    for result in results {
        assert!(result.unwrap() == (before.clone(), 0));
    }
}
