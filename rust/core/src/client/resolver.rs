//! Addresses of hosts, within a deadline.
//!
//! The system's resolver knows no deadline and cannot be stopped. Each name is therefore looked up in a thread, which
//! is abandoned when no caller waits for it any more. Invariants:
//!
//! * at most [`MOST`] lookups are under way, the abandoned ones included, and each name at most once;
//! * addresses and names with a scope never reach the resolver;
//! * a forked child starts with an empty list, since the threads of its parent do not exist there.

use std::io;
use std::net::{IpAddr, Ipv6Addr, SocketAddr, ToSocketAddrs};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use super::limits::Limits;
use crate::cancel::Cancel;
use crate::error::{Error, ErrorKind};
use crate::fork::without_fork;
use crate::sync::Locked;

/// The most names that are looked up at the same time, abandoned lookups included.
const MOST: usize = 16;
/// How often a waiting thread looks whether it was cancelled.
const CANCEL_POLL: Duration = Duration::from_millis(50);

type LookupResult = Result<Vec<IpAddr>, (io::ErrorKind, String)>;

/// A lookup under way: one thread, and any number that wait for its result.
#[derive(Debug)]
struct NameLookup {
    name: String,
    found: Mutex<Option<LookupResult>>,
    done: Condvar,
}

/// The lookups under way, and the process whose threads run them: a forked child has none.
static UNDER_WAY: Mutex<(u32, Vec<Arc<NameLookup>>)> = Mutex::new((0, Vec::new()));

/// The addresses of `name`, which may be an address itself: that is returned without a lookup. Lookups of the same name
/// at the same time are shared.
///
/// ```
/// use std::time::Duration;
/// use tensorferry_core::{Cancel, resolve};
///
/// # fn main() -> Result<(), tensorferry_core::Error> {
/// let found = resolve("192.0.2.7", Duration::from_secs(1), &Cancel::new())?;
/// assert_eq!(found, ["192.0.2.7".parse::<std::net::IpAddr>().unwrap()]);
/// # Ok(())
/// # }
/// ```
///
/// # Errors
/// [`ErrorKind::Timeout`] when no name server answers within `timeout`, [`ErrorKind::Connect`] when the name is
/// unknown, [`ErrorKind::Cancelled`], [`ErrorKind::Invalid`] when `timeout` is too long, [`ErrorKind::System`] when no
/// thread can be started for the lookup.
pub fn resolve(name: &str, timeout: Duration, cancel: &Cancel) -> Result<Vec<IpAddr>, Error> {
    let started = Instant::now();
    let deadline = started
        .checked_add(timeout)
        .ok_or_else(|| Error::new(ErrorKind::Invalid, "the timeout is too long to be counted"))?;
    let found = addresses(name, 0, &Limits { started, deadline, stall: timeout, cancel: cancel.clone() })?;
    let found = found.map_err(|e| Error::caused(ErrorKind::Connect, format!("{name} cannot be looked up"), e))?;
    Ok(found.iter().map(SocketAddr::ip).collect())
}

/// Where `port` of `host` is. The outer error ends the wait, the inner one is the resolver's.
pub(super) fn addresses(host: &str, port: u16, limits: &Limits) -> Result<io::Result<Vec<SocketAddr>>, Error> {
    limits.left()?;
    if let Ok(address) = host.parse::<IpAddr>() {
        return Ok(Ok(vec![(address, port).into()]));
    }
    if host.split_once('%').is_some_and(|(address, _)| address.parse::<Ipv6Addr>().is_ok()) {
        // An address and the interface it is good for: the resolver only looks up the number of that.
        return Ok((host, port).to_socket_addrs().map(Iterator::collect));
    }
    let started = Instant::now();
    let lookup = loop {
        match begin(host) {
            Ok(Some(lookup)) => break lookup,
            Ok(None) => {
                let pause =
                    left(limits, || format!("{MOST} other names are being looked up, and no name server answers"))?;
                thread::sleep(pause.min(CANCEL_POLL));
            }
            Err(e) => return Err(Error::caused(ErrorKind::System, "cannot start a thread that looks up a name", e)),
        }
    };
    let mut found = lookup.found.locked();
    loop {
        match &*found {
            Some(Ok(addresses)) => return Ok(Ok(addresses.iter().map(|&ip| (ip, port).into()).collect())),
            Some(Err((kind, why))) => return Ok(Err(io::Error::new(*kind, why.clone()))),
            None => {}
        }
        let waited = || {
            let waited = started.elapsed().as_secs_f64();
            format!("no name server has answered within {waited:.3} s where {host} is")
        };
        let pause = left(limits, waited)?.min(CANCEL_POLL);
        found = lookup.done.wait_timeout(found, pause).unwrap_or_else(PoisonError::into_inner).0;
    }
}

/// The time that is left, or an error that says what was being waited for.
fn left(limits: &Limits, waited: impl FnOnce() -> String) -> Result<Duration, Error> {
    limits.left().map_err(|over| over.waiting_for(waited))
}

/// The lookup of `name`, begun if it is not under way; `None` while there are too many.
fn begin(name: &str) -> io::Result<Option<Arc<NameLookup>>> {
    with_lookups(|under_way| {
        if let Some(lookup) = under_way.iter().find(|lookup| lookup.name == name) {
            return Ok(Some(Arc::clone(lookup)));
        }
        if under_way.len() >= MOST {
            return Ok(None);
        }
        let lookup = Arc::new(NameLookup { name: name.to_owned(), found: Mutex::default(), done: Condvar::new() });
        let thread = thread::Builder::new().name("tensorferry-name".to_owned());
        thread.spawn({
            let lookup = Arc::clone(&lookup);
            move || lookup.run()
        })?;
        under_way.push(Arc::clone(&lookup));
        Ok(Some(lookup))
    })
}

/// Runs `work` on the lookups of this process that are under way: a forked child begins with none.
fn with_lookups<R>(work: impl FnOnce(&mut Vec<Arc<NameLookup>>) -> R) -> R {
    without_fork(|| {
        let mut under_way = UNDER_WAY.locked();
        let (process, lookups) = &mut *under_way;
        if *process != std::process::id() {
            *process = std::process::id();
            lookups.clear();
        }
        work(lookups)
    })
}

impl NameLookup {
    /// Looks the name up, takes the lookup off the list, and wakes those who wait for it.
    fn run(self: Arc<Self>) {
        let found = (self.name.as_str(), 0).to_socket_addrs();
        let found = found.map(|found| found.map(|address| address.ip()).collect());
        let found = found.map_err(|e| (e.kind(), e.to_string()));
        with_lookups(|under_way| under_way.retain(|lookup| !Arc::ptr_eq(lookup, &self)));
        *self.found.locked() = Some(found);
        self.done.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_are_found_without_a_thread() {
        for address in ["192.0.2.7", "2001:db8::7", "::ffff:192.0.2.7"] {
            assert_eq!(
                resolve(address, Duration::from_secs(1), &Cancel::new()).unwrap(),
                [address.parse::<IpAddr>().unwrap()]
            );
        }
        let found = addresses("fe80::1%lo", 5, &limits(Duration::from_secs(1))).unwrap().unwrap();
        assert!(matches!(found[..], [SocketAddr::V6(found)] if found.scope_id() != 0), "{found:?}");
    }

    #[test]
    fn who_waits_gives_up_at_the_deadline_and_at_once_when_cancelled() {
        // As if a name server were silent: no thread looks this name up.
        let silent = Arc::new(NameLookup { name: "silent".into(), found: Mutex::default(), done: Condvar::new() });
        with_lookups(|under_way| under_way.push(Arc::clone(&silent)));
        let late = resolve("silent", Duration::from_millis(150), &Cancel::new()).unwrap_err();
        assert!(late.is_timeout() && late.to_string().contains("no name server has answered within"), "{late}");
        let (cancel, started) = (Cancel::new(), Instant::now());
        thread::scope(|scope| {
            scope.spawn(|| {
                thread::sleep(Duration::from_millis(100));
                cancel.cancel();
            });
            let ended = resolve("silent", Duration::from_mins(1), &cancel).unwrap_err();
            assert_eq!(ended.kind(), ErrorKind::Cancelled);
        });
        assert!(started.elapsed() < Duration::from_secs(2), "{:?}", started.elapsed());
        with_lookups(|under_way| under_way.retain(|lookup| !Arc::ptr_eq(lookup, &silent)));
    }

    #[test]
    fn a_name_more_than_may_be_looked_up_waits_for_its_turn() {
        let silent = |n| NameLookup { name: format!("silent {n}"), found: Mutex::default(), done: Condvar::new() };
        let others: Vec<_> = (0..MOST).map(|n| Arc::new(silent(n))).collect();
        with_lookups(|under_way| under_way.extend(others.iter().cloned()));
        let late = resolve("localhost", Duration::from_millis(150), &Cancel::new());
        let is_other = |lookup: &Arc<NameLookup>| others.iter().any(|other| Arc::ptr_eq(other, lookup));
        with_lookups(|under_way| under_way.retain(|lookup| !is_other(lookup)));
        let late = late.unwrap_err();
        assert!(late.is_timeout() && late.to_string().contains("other names are being looked up"), "{late}");
        assert!(!resolve("localhost", Duration::from_secs(20), &Cancel::new()).unwrap().is_empty());
    }

    fn limits(timeout: Duration) -> Limits {
        let started = Instant::now();
        Limits { started, deadline: started + timeout, stall: timeout, cancel: Cancel::new() }
    }
}
