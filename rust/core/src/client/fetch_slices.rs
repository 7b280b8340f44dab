//! Slices of several checkpoints, fetched at the same time.
//!
//! Each [`SliceRequest`] has its own sources and is received by its own [`Remote`]; a few run at once and share one
//! deadline. The first failure cancels the others.

use std::collections::VecDeque;
use std::sync::Mutex;
use std::time::Instant;

use super::lane_count;
use super::{FetchOptions, Remote, Report};
use crate::error::Error;
use crate::payload::Slice;
use crate::sync::{Locked, parallel};

/// Requests that are fetched at the same time, at most.
const MAX_SOURCES: usize = 16;

/// A request for slices of one container: its sources, its step, and the slices.
#[derive(Clone, Debug)]
pub struct SliceRequest {
    /// Where it is served; several sources must serve the same snapshot.
    pub urls: Vec<String>,
    /// The step it is served as.
    pub step: i64,
    /// Which bytes go where.
    pub slices: Vec<Slice>,
    /// Whether others are expected to want the same bytes at the same time: they and this bring them to each other, if
    /// [`FetchOptions::relay`] is given.
    pub is_shared: bool,
}

/// Fetches what `requests` ask for, several at a time; the lanes are divided among them. The first failure ends
/// everything.
///
/// ```
/// use std::time::Duration;
/// use bytes::Bytes;
/// use tensorferry_core::{FetchOptions, Item, Publication, Server, ServerConfig, Slice, SliceRequest, Stability};
/// use tensorferry_core::fetch_slices;
/// use tensorferry_wire::dtype::Dtype;
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let runtime = tokio::runtime::Runtime::new()?;
/// # let server = Server::bind(&ServerConfig::default(), runtime.handle())?;
/// let item = Item::bytes("w", Dtype::U8, &[8], Bytes::from_static(b"abcdefgh"));
/// server.store().publish(3, Publication::new(Vec::new(), vec![item], Stability::Private, Box::new(()))?);
///
/// let mut middle = [0_u8; 4];
/// // SAFETY: the run of four bytes fills `middle`, which nobody else uses until the slices have been fetched.
/// let slice = unsafe { Slice::new("w", (Dtype::U8, 8), (2, 4), middle.as_mut_ptr() as usize, Vec::new()) };
/// let request = SliceRequest { urls: vec![server.url("127.0.0.1")], step: 3, slices: vec![slice], is_shared: false };
/// let report = fetch_slices(vec![request], &FetchOptions::within(Duration::from_secs(10)))?;
/// assert_eq!((&middle, report.wanted), (b"cdef", 4));
/// # Ok(())
/// # }
/// ```
///
/// # Errors
/// As [`Remote::open`] and [`Remote::fetch_slices`]. After an error the slices may hold some of the new bytes.
pub fn fetch_slices(requests: Vec<SliceRequest>, options: &FetchOptions) -> Result<Report, Error> {
    let started = Instant::now();
    let deadline = started.checked_add(options.timeout);
    let threads = requests.len().clamp(1, MAX_SOURCES);
    let lanes = (options.lanes.unwrap_or_else(lane_count::few) / threads).max(1);
    let waiting = Mutex::new(VecDeque::from(requests));
    let outcome: Mutex<Result<Report, Error>> = Mutex::new(Ok(Report::default()));
    let cancel = options.cancel.child();
    let one = |request: SliceRequest| -> Result<Report, Error> {
        let timeout = deadline.map_or(options.timeout, |deadline| deadline.saturating_duration_since(Instant::now()));
        let relay = options.relay.clone().filter(|_| request.is_shared);
        let cancel = cancel.clone();
        let options = FetchOptions { lanes: Some(lanes), timeout, relay, beside: threads, cancel, ..options.clone() };
        let urls: Vec<_> = request.urls.iter().map(String::as_str).collect();
        let remote = Remote::open(&urls, request.step, options)?;
        remote.fetch_slices(&request.slices).map_err(|e| e.at(&format!("slices from {}", remote_name(&urls))))
    };
    let work = || {
        loop {
            let next = waiting.locked().pop_front();
            let Some(request) = next else { return };
            let result = one(request);
            let mut outcome = outcome.locked();
            match (outcome.as_mut(), result) {
                (Err(_), _) => return,
                (Ok(all), Ok(report)) => all.add(report),
                (Ok(_), Err(e)) => {
                    *outcome = Err(e);
                    drop(outcome);
                    cancel.cancel();
                    return;
                }
            }
        }
    };
    parallel("tensorferry-slices", threads, work);
    let mut report = outcome.into_value()?;
    report.fetching = started.elapsed().saturating_sub(report.opening);
    Ok(report)
}

/// The sources as messages name them: without fingerprint and path.
fn remote_name<'a>(urls: &[&'a str]) -> String {
    let host = |url: &&'a str| url.split('/').nth(2).and_then(|authority| authority.rsplit('@').next());
    urls.iter().filter_map(host).collect::<Vec<_>>().join(" ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sources_are_named_without_what_lets_in() {
        let urls = ["https://sha256-ab12@10.0.0.1:5/secret/checkpoint/", "http://[::1]:7/secret/checkpoint/"];
        assert_eq!(remote_name(&urls), "10.0.0.1:5 [::1]:7");
    }
}
