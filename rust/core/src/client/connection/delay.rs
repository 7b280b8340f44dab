//! The delay of the network, as the kernel has measured it.

use std::os::fd::AsRawFd;
use std::time::Duration;

use super::Connection;

/// Where the kernel's `struct tcp_info` has the shortest round trip, in microseconds; the libc crate's ends before it.
const MIN_RTT: usize = 148;

impl Connection {
    /// The shortest time that something took there and back so far: the network's delay without what queues add to it.
    /// `None` where no TCP is used, or the kernel does not say.
    pub(crate) fn delay(&self) -> Option<Duration> {
        let mut info = [0_u8; MIN_RTT + 4];
        let mut len = libc::socklen_t::try_from(info.len()).unwrap_or(0);
        let (socket, start) = (self.stream.as_raw_fd(), info.as_mut_ptr().cast());
        // SAFETY: the descriptor is open as long as `self` is there, and the system writes at most `len` bytes.
        let failed = unsafe { libc::getsockopt(socket, libc::IPPROTO_TCP, libc::TCP_INFO, start, &raw mut len) };
        let micros = info[MIN_RTT..].first_chunk().map_or(0, |bytes| u32::from_ne_bytes(*bytes));
        // The kernel's word for a round trip that it has not measured is the greatest number.
        let known = failed == 0 && usize::try_from(len) == Ok(info.len()) && ![0, u32::MAX].contains(&micros);
        known.then(|| Duration::from_micros(micros.into()))
    }
}

#[cfg(test)]
mod tests {
    use std::net::TcpListener;
    use std::sync::Arc;
    use std::time::Instant;

    use crate::cancel::Cancel;
    use crate::client::limits::Limits;
    use crate::client::url::SourceUrl;

    use super::*;

    #[test]
    fn the_delay_of_loopback_is_known_and_is_not_longer_than_connecting_took() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let url = Arc::new(SourceUrl::parse(&format!("http://{}/", listener.local_addr().unwrap())).unwrap());
        let (started, second) = (Instant::now(), Duration::from_secs(20));
        let limits = Limits { started, deadline: started + second, stall: second, cancel: Cancel::new() };
        let connection = Connection::open(&url, &limits).unwrap();
        let delay = connection.delay().unwrap();
        assert!(!delay.is_zero() && delay <= started.elapsed(), "{delay:?}");
    }
}
