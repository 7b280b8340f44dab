//! Addresses of hosts, within a deadline.
//!
//! The system's resolver knows no deadline and cannot be stopped. A name is therefore looked up in a thread, which is
//! abandoned when its time is over: it ends when the resolver gives up. Addresses, and names with a scope, never reach the
//! resolver.

use std::io;
use std::net::{IpAddr, Ipv6Addr, SocketAddr, ToSocketAddrs};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::thread;
use std::time::{Duration, Instant};

use super::limits::Limits;
use crate::cancel::Cancel;
use crate::error::{Error, ErrorKind};

/// How often a waiting thread looks whether it was cancelled.
const CANCEL_POLL: Duration = Duration::from_millis(50);

/// The addresses of `name`, which may be an address itself: that is returned without a lookup.
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
    let name = host.to_owned();
    let look_up = move || (name.as_str(), port).to_socket_addrs().map(Iterator::collect);
    if host.split_once('%').is_some_and(|(address, _)| address.parse::<Ipv6Addr>().is_ok()) {
        // An address and the interface it is good for: the resolver only looks up the number of that.
        return Ok(look_up());
    }
    in_time(host, limits, look_up)
}

/// The result of `look_up`, which asks where `host` is, in a thread of its own.
fn in_time<R: Send + 'static>(
    host: &str,
    limits: &Limits,
    look_up: impl FnOnce() -> io::Result<R> + Send + 'static,
) -> Result<io::Result<R>, Error> {
    let (started, (tell, found)) = (Instant::now(), mpsc::channel());
    let thread = thread::Builder::new().name("tensorferry-name".to_owned());
    let no_thread = |e| Error::caused(ErrorKind::System, "cannot start a thread that looks up a name", e);
    thread.spawn(move || tell.send(look_up())).map_err(no_thread)?;
    loop {
        let waited = || {
            let waited = started.elapsed().as_secs_f64();
            format!("no name server has answered within {waited:.3} s where {host} is")
        };
        let left = limits.left().map_err(|over| over.waiting_for(waited))?;
        match found.recv_timeout(left.min(CANCEL_POLL)) {
            Ok(found) => return Ok(found),
            Err(RecvTimeoutError::Timeout) => {}
            Err(e @ RecvTimeoutError::Disconnected) => return Ok(Err(io::Error::other(e))),
        }
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
        let found = addresses("fe80::1%lo", 5, &limits(Duration::from_secs(1), &Cancel::new())).unwrap().unwrap();
        assert!(matches!(found[..], [SocketAddr::V6(found)] if found.scope_id() != 0), "{found:?}");
        assert!(!resolve("localhost", Duration::from_secs(20), &Cancel::new()).unwrap().is_empty());
    }

    #[test]
    fn who_waits_gives_up_at_the_deadline_and_at_once_when_cancelled() {
        // As if a name server were silent.
        let (_silent, never) = mpsc::channel::<()>();
        let look_up = move || never.recv().map_err(io::Error::other);
        let late = in_time("silent", &limits(Duration::from_millis(150), &Cancel::new()), look_up).unwrap_err();
        assert!(late.is_timeout() && late.to_string().contains("no name server has answered within"), "{late}");
        let (_silent, never) = mpsc::channel::<()>();
        let look_up = move || never.recv().map_err(io::Error::other);
        let (cancel, started) = (Cancel::new(), Instant::now());
        thread::scope(|scope| {
            scope.spawn(|| {
                thread::sleep(Duration::from_millis(100));
                cancel.cancel();
            });
            let ended = in_time("silent", &limits(Duration::from_mins(1), &cancel), look_up).unwrap_err();
            assert_eq!(ended.kind(), ErrorKind::Cancelled);
        });
        assert!(started.elapsed() < Duration::from_secs(20), "{:?}", started.elapsed());
    }

    fn limits(timeout: Duration, cancel: &Cancel) -> Limits {
        let started = Instant::now();
        Limits { started, deadline: started + timeout, stall: timeout, cancel: cancel.clone() }
    }
}
