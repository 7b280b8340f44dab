//! How fast each rail of a source is, by itself: for finding the one that is wrong.

use std::io::IoSliceMut;
use std::net::{IpAddr, SocketAddr};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use tensorferry_wire::rails::Rail;

use super::Remote;
use crate::client::answers::check_range;
use crate::client::blocks::block_len;
use crate::client::connection::Connection;
use crate::client::limits::Limits;
use crate::error::Error;
use crate::memory::zeroed;

/// Connections to one rail: one waits for a request while the other receives.
const CONNECTIONS: usize = 2;
/// Bytes in one request, at most.
const MOST_ASKED: u64 = 16 << 20;
/// How long a connection attempt may take.
const PATIENCE: Duration = Duration::from_secs(2);

/// What a rail has carried.
#[derive(Clone, Copy, Debug)]
pub struct RailRate {
    /// The address here that its connections had.
    pub here: IpAddr,
    /// Bytes of the container. They are the source's, and are not verified.
    pub bytes: u64,
    /// The time from the first request to the last byte.
    pub elapsed: Duration,
}

impl Remote {
    /// The addresses that the source has named, with the speeds of their links; empty where it has one.
    #[must_use]
    pub fn rails(&self) -> &[Rail] {
        self.sources[self.opener].rails.named()
    }

    /// The address of the source by which it was opened, if that went over the network.
    #[must_use]
    pub fn address(&self) -> Option<IpAddr> {
        self.route.map(|(_, there)| there)
    }

    /// Measures the rail at `address` for about `length`: bytes are received and dropped.
    ///
    /// # Errors
    /// [`crate::ErrorKind::Connect`] where nobody answers there, and as [`Remote::fetch`].
    pub fn measure(&self, address: IpAddr, length: Duration) -> Result<RailRate, Error> {
        let source = &self.sources[self.opener];
        let (from, there) = source.rails.pair(address);
        let pair = (from, SocketAddr::from((there, source.url.port())));
        let limits = Limits { stall: self.limits.stall.min(PATIENCE), ..self.limits.clone() };
        let limits = limits.at_most(length.saturating_add(PATIENCE * 2));
        let first = Connection::open_at(&source.url, pair, &limits)?;
        let here = first.route().map_or(address, |route| route.0);
        let (bytes, started) = (AtomicU64::new(0), Instant::now());
        let further = || Connection::open_at(&source.url, pair, &limits);
        std::thread::scope(|scope| {
            let others: Vec<_> =
                (1..CONNECTIONS).map(|_| scope.spawn(|| self.receive_for(further()?, length, &bytes))).collect();
            let result = self.receive_for(first, length, &bytes);
            others.into_iter().filter_map(|other| other.join().ok()).fold(result, Result::and)
        })?;
        Ok(RailRate { here, bytes: bytes.into_inner(), elapsed: started.elapsed() })
    }

    /// Receives the container, again and again, until `length` is over.
    fn receive_for(&self, mut connection: Connection, length: Duration, bytes: &AtomicU64) -> Result<(), Error> {
        let (path, etag) = (format!("{}.safetensors", self.key), self.etag());
        let end = self.payload_start + self.header.payload_len();
        let (started, mut at) = (Instant::now(), 0);
        let mut sink = zeroed(block_len())?;
        while started.elapsed() < length && end > 0 {
            let stop = end.min(at + MOST_ASKED);
            let head = connection.get(&path, Some((at, stop)), etag, None)?;
            check_range(&mut connection, &head, at, stop, end)?;
            while at < stop && started.elapsed() < length {
                let part = usize::try_from(stop - at).unwrap_or(usize::MAX).min(sink.len());
                let count = |got: u64| {
                    bytes.fetch_add(got, Ordering::Relaxed);
                };
                connection.fill(&mut [IoSliceMut::new(&mut sink[..part])], |_| (), count)?;
                at += part as u64;
            }
            at %= end;
        }
        Ok(())
    }
}
