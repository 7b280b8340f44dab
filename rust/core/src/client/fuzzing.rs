//! Entry points for the fuzz targets: the functions that read bytes which a peer chose.

use std::io::Write;
use std::os::unix::net::UnixStream;
use std::sync::{Arc, LazyLock};
use std::time::{Duration, Instant};

use socket2::Socket;

use super::connection::Connection;
use super::limits::Limits;
use super::remote::{FirstFetch, Passes};
use super::url::SourceUrl;
use crate::cancel::Cancel;
use crate::fork::CloseOnFork;

/// The deadline of a run: longer than any input needs, so that one for which the code waits is noticed.
const DEADLINE: Duration = Duration::from_secs(60);
const LIMIT: u64 = 1 << 16;

/// An address at which no server listens: another connection to it fails at once.
static UNREACHABLE: LazyLock<Arc<SourceUrl>> =
    LazyLock::new(|| Arc::new(SourceUrl::parse("http://127.0.0.1:1/").expect("a valid address")));

/// A connection on which `answers` come, and then the end.
fn answering(answers: &[u8]) -> (Connection, UnixStream, Limits) {
    let (ours, mut theirs) = UnixStream::pair().expect("a pair of sockets");
    theirs.write_all(answers).expect("inputs are smaller than the buffer of a socket");
    theirs.shutdown(std::net::Shutdown::Write).expect("it is open");
    let started = Instant::now();
    let limits = Limits { started, deadline: started + DEADLINE, stall: DEADLINE, cancel: Cancel::new() };
    let ours =
        CloseOnFork::make(|| Ok(Socket::from(std::os::fd::OwnedFd::from(ours)))).expect("/dev/null can be opened");
    (Connection::over(Arc::new(ours), &UNREACHABLE, &limits), theirs, limits)
}

/// Sends requests over one connection on which `answers` come, as long as it may be used again; checks what is read of
/// heads and bodies.
pub fn fetch(answers: &[u8]) {
    let (mut connection, _theirs, _) = answering(answers);
    while let Ok(head) = connection.get("7.safetensors", Some((0, LIMIT)), None, None) {
        if let Some((start, end, total)) = head.content_range {
            assert!(start < end && end <= total);
        }
        let Ok(body) = connection.body(&head, LIMIT) else { break };
        assert_eq!(Some(body.len() as u64), head.content_length);
        assert!(body.len() <= answers.len());
        if !connection.is_reusable() {
            break;
        }
    }
}

/// Opens a checkpoint from a source that sends `answers` and then closes; checks lengths of what was opened.
pub fn open(answers: &[u8]) {
    let (connection, _theirs, limits) = answering(answers);
    if let Ok(opened) =
        FirstFetch::read(connection, Some(7), (1 << 20, u64::MAX), &limits, DEADLINE, &mut None, &mut Passes::default())
    {
        assert!(opened.prefix.len() as u64 <= opened.header.payload_len());
        assert!(opened.payload_start as usize + opened.prefix.len() <= answers.len());
    }
}

/// Parses `url` as the address of a source; checks that the parts are those of `url` and cannot write into a request.
pub fn address(url: &str) {
    if let Ok(source) = SourceUrl::parse(url) {
        assert!(!source.host().is_empty() && source.prefix().starts_with('/'));
        assert!(url.contains(source.authority()) && url.ends_with(source.prefix().trim_start_matches('/')));
        assert_eq!(source.tls().is_some(), url.starts_with("https://"));
        assert!(!url.contains(['\r', '\n', ' ']), "it could write into a request");
    }
}
