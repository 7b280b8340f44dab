//! A lane: one thread with one connection that works through the queue of ranges.

use std::collections::{BTreeMap, BTreeSet};
use std::io::IoSliceMut;
use std::net::IpAddr;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use tensorferry_wire::digest::{Algorithm, BLOCK_SIZE};

use super::Peer;
use super::blocks::Checksums;
use super::connection::Connection;
use super::limits::Limits;
use super::open::{check_range, read_digests};
use super::plan::{Plan, Queue, Taken};
use super::remote::changed;
use super::watch::{Watch, pace, rate};
use crate::error::{Error, ErrorKind};

/// Failures in a row, without one block in between, after which a lane gives up.
const MAX_FAILURES: u32 = 4;
/// Pages are asked for this many blocks ahead of the bytes.
const POPULATE_BLOCKS: u64 = 4;

/// A block's length as a memory size.
pub(super) const fn block_len() -> usize {
    // One MiB fits every usize there is.
    #[allow(clippy::cast_possible_truncation)]
    let len = BLOCK_SIZE as usize;
    len
}

/// What the lanes of a transfer have received: the checksum of every block, and counters.
#[derive(Debug)]
pub(super) struct Received {
    /// Runs of blocks that are to come, and how many blocks come before each.
    runs: Vec<(u64, u64, usize)>,
    digests: Vec<AtomicU64>,
    /// Which peer each block came from.
    origins: Vec<AtomicUsize>,
    bytes: AtomicU64,
    retries: AtomicU64,
    same_host: AtomicBool,
    /// All bytes of the receive so far, for whoever watches it.
    progress: Arc<AtomicU64>,
    /// The ways that bytes took over the network.
    routes: Mutex<BTreeSet<(IpAddr, IpAddr)>>,
    /// The last trouble with each source that had some.
    troubles: Mutex<BTreeMap<String, String>>,
}

impl Received {
    /// For the blocks in `runs`, which are ascending. `None` when there are too many for this machine to count.
    pub(super) fn new(wanted: &[(u64, u64)], progress: Arc<AtomicU64>) -> Option<Self> {
        let (mut runs, mut blocks) = (Vec::with_capacity(wanted.len()), 0_usize);
        for &(first, end) in wanted {
            runs.push((first, end, blocks));
            blocks = blocks.checked_add(usize::try_from(end - first).ok()?)?;
        }
        Some(Self {
            runs,
            digests: std::iter::repeat_with(AtomicU64::default).take(blocks).collect(),
            origins: std::iter::repeat_with(AtomicUsize::default).take(blocks).collect(),
            bytes: AtomicU64::new(0),
            retries: AtomicU64::new(0),
            same_host: AtomicBool::new(false),
            progress,
            routes: Mutex::default(),
            troubles: Mutex::default(),
        })
    }

    fn index(&self, block: u64) -> Option<usize> {
        let after = self.runs.partition_point(|run| run.0 <= block);
        let &(first, end, before) = self.runs.get(after.checked_sub(1)?)?;
        (block < end).then_some(before + usize::try_from(block - first).ok()?)
    }

    fn note(&self, block: u64, digest: u64, origin: usize) {
        let Some(index) = self.index(block) else { return };
        if let (Some(known), Some(from)) = (self.digests.get(index), self.origins.get(index)) {
            known.store(digest, Ordering::Relaxed);
            from.store(origin, Ordering::Relaxed);
        }
    }

    pub(super) fn digest(&self, block: u64) -> Option<u64> {
        self.digests.get(self.index(block)?).map(|d| d.load(Ordering::Relaxed))
    }

    pub(super) fn origin(&self, block: u64) -> usize {
        self.index(block).and_then(|i| self.origins.get(i)).map_or(0, |o| o.load(Ordering::Relaxed))
    }

    pub(super) fn take_bytes(&self) -> u64 {
        self.bytes.swap(0, Ordering::Relaxed)
    }

    pub(super) fn take_retries(&self) -> u64 {
        self.retries.swap(0, Ordering::Relaxed)
    }

    fn count(&self, bytes: u64) {
        self.bytes.fetch_add(bytes, Ordering::Relaxed);
        self.progress.fetch_add(bytes, Ordering::Relaxed);
    }

    pub(super) fn note_trouble(&self, source: &str, what: String) {
        self.troubles.lock().unwrap_or_else(PoisonError::into_inner).insert(source.to_owned(), what);
    }

    pub(super) fn take_routes(&self) -> BTreeSet<(IpAddr, IpAddr)> {
        std::mem::take(&mut self.routes.lock().unwrap_or_else(PoisonError::into_inner))
    }

    pub(super) fn take_troubles(&self) -> BTreeMap<String, String> {
        std::mem::take(&mut self.troubles.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// Whether a connection did without the network.
    pub(super) fn came_same_host(&self) -> bool {
        self.same_host.load(Ordering::Relaxed)
    }
}

/// A lane that runs. One whose thread panics leaves, too: the others go on with its range, and the last one says so.
struct Present<'a>(&'a Transfer<'a>);

impl Drop for Present<'_> {
    fn drop(&mut self) {
        // Nothing here may panic: the thread is unwinding already.
        if std::thread::panicking() {
            let message = "the last lane panicked: a bug of tensorferry; stderr says where";
            self.0.leave(Error::new(ErrorKind::System, message));
        }
    }
}

/// What all lanes of one transfer share.
pub(super) struct Transfer<'a> {
    pub(super) plan: &'a Plan,
    pub(super) queue: &'a Queue,
    pub(super) peers: &'a [Peer],
    pub(super) primary: usize,
    /// Whether the lanes begin at different sources, or all at the primary one.
    pub(super) spread: bool,
    pub(super) path: String,
    pub(super) digests_path: String,
    pub(super) payload_start: u64,
    pub(super) payload_len: u64,
    pub(super) header_digest: u64,
    pub(super) algorithm: &'a Algorithm,
    pub(super) limits: &'a Limits,
    pub(super) received: &'a Received,
    pub(super) watch: Watch,
    pub(super) alive: AtomicUsize,
}

impl Transfer<'_> {
    /// Fetches ranges until there are none. A range that fails goes back into the queue; a lane that keeps failing
    /// leaves the work to the others, and the last one to leave fails the transfer. Returns the connection if it is
    /// still good.
    pub(super) fn run(&self, index: usize, mut connection: Option<Connection>) -> Option<Connection> {
        let _present = Present(self);
        let mut failures = 0;
        let mut turn = if self.spread { index } else { 0 };
        let mut sink = vec![0; block_len()];
        while let Some(mut range) = self.queue.take(|| self.watch.cut_slow()) {
            let first = range.at;
            // After a failure the lane tries the next source, and stays there.
            let origin = (self.primary + turn) % self.peers.len();
            let peer = &self.peers[origin];
            let result = self.fetch_range(index, origin, &mut connection, &mut range, &mut sink);
            let slow = self.watch.end(index);
            let Err(mut error) = result else {
                failures = 0;
                continue;
            };
            if let Some(rate) = slow {
                let text = format!("timed out: at {} it is far slower than the other connections", pace(rate));
                error = Error::new(ErrorKind::Timeout, text);
            }
            if error.kind() != ErrorKind::Cancelled {
                error = self.placed(error, peer, &range);
            }
            // Whatever it was: the network is the way that has to work.
            let connection = connection.take();
            // The source answers and is not done copying: nobody is at fault, and the deadline ends it.
            let filling = error.is_timeout() && connection.as_ref().is_some_and(Connection::is_filling);
            let around_the_network = !filling && connection.is_some_and(|c| c.is_same_host());
            if around_the_network {
                peer.give_up_same_host();
            }
            turn += 1;
            // A lane that was merely slow is not at fault twice.
            failures = if range.at > first || slow.is_some() || filling { 1 } else { failures + 1 };
            let elsewhere = (self.peers.len() > 1 || around_the_network) && error.kind() != ErrorKind::Cancelled;
            let over = self.limits.left().is_err();
            if over || !(error.is_transient() || elsewhere) {
                self.queue.fail(error);
                break;
            }
            self.received.retries.fetch_add(1, Ordering::Relaxed);
            if !around_the_network {
                self.received.note_trouble(peer.source.authority(), error.to_string());
            }
            if failures >= MAX_FAILURES {
                self.leave(error);
                return None;
            }
            drop(range);
            self.limits.pause(Duration::from_millis(20 << (2 * failures)), || self.queue.has_failed());
        }
        connection.filter(Connection::is_reusable)
    }

    /// A lane is gone because of `error`, which fails the transfer if it was the last.
    pub(super) fn leave(&self, error: Error) {
        if self.alive.fetch_sub(1, Ordering::AcqRel) == 1 {
            self.queue.fail(error);
        }
    }

    /// `error` with what was being fetched, from where, and how far the transfer has come.
    fn placed(&self, error: Error, peer: &Peer, range: &Taken<'_>) -> Error {
        let (start, stop) = (self.plan.block_bounds(range.at).0, self.plan.block_bounds(range.end - 1).1);
        let bytes = self.received.bytes.load(Ordering::Relaxed);
        let pace = pace(rate(bytes, self.limits.started.elapsed()));
        let source = peer.source.authority();
        error.at(&format!(
            "{} from {source}, payload bytes {start}-{stop}, after {bytes} of {} bytes at {pace}",
            self.path, self.payload_len
        ))
    }

    /// Lane `index` fetches `range` from the peer of number `origin`, moving its beginning past each block that is
    /// complete.
    fn fetch_range(
        &self,
        index: usize,
        origin: usize,
        connection: &mut Option<Connection>,
        range: &mut Taken<'_>,
        sink: &mut [u8],
    ) -> Result<(), Error> {
        let Taken { at, end, .. } = range;
        let end = *end;
        let peer = &self.peers[origin];
        let ours = connection.take().filter(|c| peer.may_reuse(c));
        let connection = connection.insert(if let Some(connection) = ours {
            connection
        } else {
            let connection = peer.connect(self.limits)?;
            if connection.is_same_host() {
                // The trainer over there needs these cores.
                crate::background::give_way();
            }
            connection
        });
        if let Some(route) = connection.route() {
            self.received.routes.lock().unwrap_or_else(PoisonError::into_inner).insert(route);
        }
        self.watch.begin(index, end, connection.socket());
        self.received.same_host.fetch_or(connection.is_same_host(), Ordering::Relaxed);
        let etag = self.etag(peer, connection)?;
        let total = self.payload_start + self.payload_len;
        let (start, stop) = (self.plan.block_bounds(*at).0, self.plan.block_bounds(end - 1).1);
        let (start, stop) = (self.payload_start + start, self.payload_start + stop);
        let head = connection.get(&self.path, Some((start, stop)), Some(etag), None)?;
        check_range(connection, &head, start, stop, total)?;
        let mut populated = *at;
        while *at < end {
            if self.plan.fresh && *at == populated {
                populated = (*at + POPULATE_BLOCKS).min(end);
                self.plan.populate(self.plan.block_bounds(*at).0, self.plan.block_bounds(populated - 1).1);
            }
            let next = (*at + self.plan.stride()).min(end);
            let (start, stop) = (self.plan.block_bounds(*at).0, self.plan.block_bounds(next - 1).1);
            // Right after the receive, while the bytes are in cache.
            let mut checksums = Checksums::new(self.algorithm, self.plan.grain());
            let received = |parts: &[IoSliceMut<'_>], got: usize| {
                self.received.count(got as u64);
                self.watch.count(index, got as u64);
                let mut left = got;
                for part in parts {
                    let here = left.min(part.len());
                    checksums.update(&part[..here]);
                    left -= here;
                    if left == 0 {
                        break;
                    }
                }
            };
            self.plan.with_slices(start, stop, sink, |slices| connection.fill(slices, received))?;
            for (block, digest) in (*at..next).zip(checksums.finish()) {
                self.received.note(block, digest, origin);
            }
            *at = next;
            if self.queue.has_failed() {
                return Err(Error::new(ErrorKind::Cancelled, "another lane failed"));
            }
        }
        Ok(())
    }

    /// The entity tag of `peer`, once it has shown that it serves the snapshot we fetch.
    fn etag<'p>(&self, peer: &'p Peer, connection: &mut Connection) -> Result<&'p str, Error> {
        if let Some(etag) = peer.etag.get() {
            return Ok(etag);
        }
        let (table, head) = read_digests(connection, &self.digests_path, None, 0, BLOCK_SIZE)?;
        if table.header != self.header_digest || table.payload_len != self.payload_len {
            return Err(changed().at(peer.source.authority()));
        }
        peer.learn(head.same_host);
        Ok(peer.etag.get_or_init(|| head.etag.unwrap_or_default()))
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicUsize;
    use std::time::Instant;

    use bytes::Bytes;
    use tensorferry_wire::digest::block_count;
    use tensorferry_wire::dtype::Dtype;

    use super::super::{Cancel, FetchOptions, Remote};
    use super::*;
    use crate::{Item, Publication, Server, ServerConfig, Stability};

    const LANES: usize = 3;

    /// Runs three lanes on a source that is well; those that `watch` does not know panic when they get a range.
    fn run(known: usize) -> Result<u64, Error> {
        let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
        let server = Server::bind(&ServerConfig::default(), runtime.handle()).unwrap();
        let bytes = Bytes::from(vec![7; 12 * block_len()]);
        let item = Item::bytes("w", Dtype::U8, &[bytes.len() as u64], bytes);
        let publication = Publication::new(Vec::new(), vec![item], Stability::Private, Box::new(())).unwrap();
        server.store().publish(1, publication);
        let url = server.url("127.0.0.1");
        let header = Remote::open(&[&url], 1, FetchOptions::within(Duration::from_secs(20))).unwrap().header().clone();

        let started = Instant::now();
        let limits = Limits {
            started,
            deadline: started + Duration::from_secs(20),
            stall: Duration::from_secs(5),
            cancel: Cancel::new(),
        };
        let algorithm = Algorithm::default();
        let payload_len = header.payload_len();
        let header = header.encode(crate::arena::ALIGNMENT).unwrap();
        let peers = [Peer::parse(&url, false, None).unwrap()];
        let plan = Plan::new(Vec::new(), payload_len, false).unwrap();
        let queue = Queue::new(&[(0, block_count(payload_len))], 1);
        let received = Received::new(&[(0, 12)], Arc::default()).expect("twelve blocks");
        let transfer = Transfer {
            plan: &plan,
            queue: &queue,
            peers: &peers,
            primary: 0,
            spread: true,
            path: "1.safetensors".into(),
            digests_path: "1/digests?blocks=0-0".into(),
            payload_start: header.len() as u64,
            payload_len,
            header_digest: algorithm.checksum(&header),
            algorithm: &algorithm,
            limits: &limits,
            received: &received,
            watch: Watch::new(known),
            alive: AtomicUsize::new(LANES),
        };
        std::thread::scope(|scope| {
            let transfer = &transfer;
            let lanes: Vec<_> = (0..LANES).map(|index| scope.spawn(move || transfer.run(index, None))).collect();
            for lane in lanes {
                drop(lane.join());
            }
        });
        queue.finish().map(|()| received.take_bytes())
    }

    #[test]
    fn a_lane_that_panics_leaves_its_range_to_the_others() {
        assert_eq!(run(LANES).unwrap(), 12 << 20);
        assert_eq!(run(1).unwrap(), 12 << 20);
    }

    #[test]
    fn when_every_lane_panics_the_transfer_fails() {
        let failed = run(0).unwrap_err();
        assert_eq!(failed.kind(), ErrorKind::System, "{failed}");
    }
}
