//! Support for the tests over real sockets: a server with something to serve, known bytes, and raw HTTP.
#![allow(dead_code, reason = "every test binary uses its own part of this")]
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test that cannot go on should panic")]

pub(crate) mod faults;
pub(crate) mod local;
pub(crate) mod raw;

use std::net::{IpAddr, Ipv4Addr, TcpListener};
use std::ops::RangeInclusive;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use bytes::Bytes;
use tensorferry_core::{
    Arrived, Destination, Error, FetchOptions, Frontend, Item, Publication, Remote, Server, ServerConfig, Stability,
};
use tensorferry_wire::container::Header;
use tensorferry_wire::dtype::Dtype;
use tokio::runtime::Runtime;

pub(crate) const BLOCK: usize = 1 << 20;
pub(crate) const STEP: i64 = 7;
/// The longest that a test waits for something that must happen.
pub(crate) const PATIENCE: Duration = Duration::from_secs(20);

/// A frontend that has some other formats and its own texts.
#[derive(Debug)]
struct TestFrontend;

impl Frontend for TestFrontend {
    fn alternate(&self, path: &str) -> Option<String> {
        let known = matches!(path, "full" | "metadata") || path.starts_with("folder/");
        known.then(|| path.to_owned()).or_else(|| Some(path.parse::<u64>().ok()?.to_string()))
    }

    fn missing(&self, name: &str) -> String {
        format!("no {name} among the formats of this test")
    }

    fn unpublished(&self, step: i64) -> String {
        format!("step {step} is allowed but no state was sent: call send_checkpoint first")
    }
}

/// A server on a runtime of its own. Fields drop in order: the server before the runtime it uses.
pub(crate) struct Rig {
    pub(crate) server: Server,
    pub(crate) runtime: Runtime,
}

impl Rig {
    pub(crate) fn new() -> Self {
        Self::with_patience(PATIENCE)
    }

    pub(crate) fn with_patience(patience: Duration) -> Self {
        Self::configured(&ServerConfig { patience, ..local() })
    }

    pub(crate) fn configured(config: &ServerConfig) -> Self {
        Self::on(tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all(), config)
    }

    pub(crate) fn on(runtime: &mut tokio::runtime::Builder, config: &ServerConfig) -> Self {
        let runtime = runtime.build().unwrap();
        let config = ServerConfig { frontend: Arc::new(TestFrontend), ..config.clone() };
        let server = Server::bind(&config, runtime.handle()).unwrap();
        Self { server, runtime }
    }

    /// A server that serves `state` as [`STEP`] from a private copy.
    pub(crate) fn serving(state: &State) -> Self {
        Self::new().publishing(state.publication(Stability::Private))
    }

    /// The same server, which serves `publication` as [`STEP`].
    pub(crate) fn publishing(self, publication: Publication) -> Self {
        self.server.store().publish(STEP, publication);
        self
    }

    pub(crate) fn url(&self) -> String {
        self.server.url("127.0.0.1")
    }

    /// The path of `tail`, below the token and `/checkpoint/`.
    pub(crate) fn path(&self, tail: &str) -> String {
        let url = self.url();
        let prefix = url.splitn(4, '/').nth(3).unwrap();
        format!("/{prefix}{tail}")
    }
}

/// An owner of memory that counts how often it was dropped.
pub(crate) struct Owner(pub(crate) Arc<AtomicUsize>);

impl Drop for Owner {
    fn drop(&mut self) {
        self.0.fetch_add(1, Ordering::SeqCst);
    }
}

/// Named bytes that are published, and with which received bytes are compared.
#[derive(Clone)]
pub(crate) struct State(pub(crate) Vec<(String, Bytes)>);

impl State {
    /// Entries of the given sizes, filled from `seed`.
    pub(crate) fn of(sizes: &[usize], seed: u64) -> Self {
        let entry = |(i, &len): (usize, &usize)| (format!("w{i}"), Bytes::from(noise(len, seed + i as u64)));
        Self(sizes.iter().enumerate().map(entry).collect())
    }

    pub(crate) fn with(mut self, name: &str, bytes: Vec<u8>) -> Self {
        self.0.push((name.to_owned(), bytes.into()));
        self
    }

    pub(crate) fn publication(&self, stability: Stability) -> Publication {
        self.owned_by(stability, Box::new(()))
    }

    pub(crate) fn owned_by(&self, stability: Stability, owner: Box<dyn std::any::Any + Send + Sync>) -> Publication {
        Publication::new(vec![("format".into(), "pt".into())], self.items(), stability, owner).unwrap()
    }

    pub(crate) fn items(&self) -> Vec<Item> {
        let item = |(name, bytes): &(String, Bytes)| {
            Item::bytes(name.clone(), Dtype::U8, &[bytes.len() as u64], bytes.clone())
        };
        self.0.iter().map(item).collect()
    }

    pub(crate) fn bytes(&self, name: &str) -> &Bytes {
        &self.0.iter().find(|(n, _)| n == name).unwrap().1
    }

    /// Checks every byte of a receive into fresh memory.
    pub(crate) fn check(&self, header: &Header, arrived: &Arrived) {
        assert_eq!(header.entries().len(), self.0.len());
        // By position: looking 20,000 names up one by one takes longer than their transfer.
        for ((entry, offset), (name, expected)) in header.entries().iter().zip(arrived.offsets()).zip(&self.0) {
            assert_eq!(&entry.name, name);
            let Some(offset) = offset else { continue };
            let found = arrived.arena().bytes(*offset, expected.len());
            // Not assert_eq: a message of 64 MiB would not help.
            assert!(found == &expected[..], "{} arrived with wrong bytes", entry.name);
        }
    }

    /// Fetches this state from `urls` into fresh memory and checks every byte of it.
    pub(crate) fn fetch(&self, urls: &[&str], options: FetchOptions) -> Result<Arrived, Error> {
        self.fetch_from(Remote::open(urls, STEP, options)?)
    }

    /// The same, from a source that is open.
    pub(crate) fn fetch_from(&self, remote: Remote) -> Result<Arrived, Error> {
        let header = remote.header().clone();
        let arrived = remote.fetch(Destination::Fresh)?;
        self.check(&header, &arrived);
        Ok(arrived)
    }
}

/// A port that is free at every address, and is not one of those that the system picks for connections.
pub(crate) fn port_at_every_address() -> RangeInclusive<u16> {
    static TAKEN: AtomicU32 = AtomicU32::new(0);
    loop {
        // Test binaries that run at the same time begin far from each other.
        let number = std::process::id().wrapping_mul(97).wrapping_add(TAKEN.fetch_add(1, Ordering::Relaxed));
        let port = 10_000 + u16::try_from(number % 20_000).unwrap();
        if TcpListener::bind((Ipv4Addr::UNSPECIFIED, port)).is_ok() {
            return port..=port;
        }
    }
}

/// Bytes that look random, the same ones for the same seed.
pub(crate) fn noise(len: usize, seed: u64) -> Vec<u8> {
    let mut state = seed.wrapping_add(1).wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1;
    let mut out = Vec::with_capacity(len + 8);
    while out.len() < len {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        out.extend_from_slice(&state.to_le_bytes());
    }
    out.truncate(len);
    out
}

/// A server at 127.0.0.1 alone.
pub(crate) fn local() -> ServerConfig {
    ServerConfig { bind: Some(loopback(1)), ..ServerConfig::default() }
}

pub(crate) fn loopback(last: u8) -> IpAddr {
    IpAddr::from([127, 0, 0, last])
}

/// Options that find a stuck connection quickly.
pub(crate) fn quick(timeout: Duration, lanes: usize) -> FetchOptions {
    FetchOptions { stall: Duration::from_millis(500), lanes: Some(lanes), ..FetchOptions::within(timeout) }
}

/// Options with `lanes` lanes and more time than any healthy transfer needs.
pub(crate) fn lanes(lanes: usize) -> FetchOptions {
    FetchOptions { lanes: Some(lanes), ..FetchOptions::within(PATIENCE) }
}

/// The results of `each` for all `items`, each on a thread of its own.
pub(crate) fn at_once<I: Sync, T: Send>(items: &[I], each: impl Fn(&I) -> T + Sync) -> Vec<T> {
    std::thread::scope(|scope| {
        let each = &each;
        let threads: Vec<_> = items.iter().map(|item| scope.spawn(move || each(item))).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}

/// Waits until `condition` holds; panics with `what` when it does not within [`PATIENCE`].
pub(crate) fn eventually(what: &str, mut condition: impl FnMut() -> bool) {
    let started = Instant::now();
    while !condition() {
        assert!(started.elapsed() < PATIENCE, "still not so after {PATIENCE:?}: {what}");
        std::thread::sleep(Duration::from_millis(5));
    }
}
