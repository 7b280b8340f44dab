//! The route between two processes of one user on one machine: the same HTTP over a Unix-domain socket.
//!
//! Nothing but the socket differs, so every promise about snapshots, digests and deadlines holds as it stands. docs/explanation/performance.md
//! has how fast it is.
//!
//! A source announces the socket's name in its answers. The name is random and lives in the source's network namespace,
//! and both sides check the user of the other: a peer is on the same machine and runs as the same user.
//!
//! The module is used by both server and client and knows neither: it holds the name of a socket and the ring of shared
//! memory that bodies pass through.

pub(crate) mod ring;

use std::fmt;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::net::UnixListener;

use socket2::{Domain, SockAddr, Socket, Type};

const PREFIX: &str = "tensorferry-";
/// The receiver's greeting. HTTP ignores it: it is an empty line before a request (RFC 9112, section 2.2).
pub(crate) const GREETING: &[u8] = b"\r\n";
/// Random characters behind the prefix.
const RANDOM: usize = 32;

/// The name of a socket in the abstract namespace.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Name(String);

impl Name {
    /// The name made of a random token of 32 hexadecimal characters.
    pub(crate) fn new(token: &str) -> Self {
        Self(format!("{PREFIX}{token}"))
    }

    /// A name as a source announces it; `None` for anything no source of ours would say.
    pub(crate) fn parse(text: &str) -> Option<Self> {
        let random = text.strip_prefix(PREFIX)?;
        let valid = random.len() == RANDOM && random.bytes().all(|b| b.is_ascii_hexdigit());
        valid.then(|| Self(text.to_owned()))
    }

    fn address(&self) -> io::Result<SockAddr> {
        // A leading NUL is the abstract namespace: no file is left behind by a process that dies.
        SockAddr::unix(format!("\0{}", self.0))
    }

    /// Listens under this name.
    pub(crate) fn listen(&self) -> io::Result<UnixListener> {
        let socket = Socket::new(Domain::UNIX, Type::STREAM, None)?;
        socket.set_nonblocking(true)?;
        socket.bind(&self.address()?)?;
        socket.listen(1024)?;
        Ok(OwnedFd::from(socket).into())
    }

    /// Connects at once or not at all, and only to a process of our own user.
    #[allow(clippy::disallowed_methods, reason = "a Unix socket, to a process of this machine")]
    pub(crate) fn connect(&self) -> io::Result<Socket> {
        let socket = Socket::new(Domain::UNIX, Type::STREAM, None)?;
        socket.set_nonblocking(true)?;
        socket.connect(&self.address()?)?;
        socket.set_nonblocking(false)?;
        if peer(&socket)?.uid != own_user() {
            return Err(io::ErrorKind::PermissionDenied.into());
        }
        Ok(socket)
    }
}

impl fmt::Display for Name {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// The effective user of this process.
pub(crate) fn own_user() -> u32 {
    // SAFETY: takes nothing and cannot fail.
    unsafe { libc::geteuid() }
}

/// The process at the other end and its effective user, as the kernel noted them when it connected or listened.
pub(crate) fn peer(socket: &impl AsRawFd) -> io::Result<libc::ucred> {
    let mut found = libc::ucred { pid: 0, uid: u32::MAX, gid: u32::MAX };
    let mut len = libc::socklen_t::try_from(size_of_val(&found)).unwrap_or(0);
    // SAFETY: the option fills a `ucred` and the length says how long that is.
    let failed = unsafe {
        libc::getsockopt(socket.as_raw_fd(), libc::SOL_SOCKET, libc::SO_PEERCRED, (&raw mut found).cast(), &raw mut len)
    };
    if failed == 0 { Ok(found) } else { Err(io::Error::last_os_error()) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_names_of_ours_are_taken() {
        let name = Name::new("0123456789abcdef0123456789abcdef");
        assert_eq!(Name::parse(&name.to_string()), Some(name));
        for bad in [
            "",
            "tensorferry-",
            "tensorferry-0123",
            "/tmp/.X11-unix/X0",
            "tensorferry-0123456789abcdef0123456789abcde/",
        ] {
            assert_eq!(Name::parse(bad), None, "{bad}");
        }
    }
}
