//! HTTP by hand: requests are bytes, and answers are parsed only as far as a test looks at them.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::time::Duration;

use super::{PATIENCE, Rig};

pub(crate) struct Answer {
    pub(crate) status: u16,
    pub(crate) reason: String,
    pub(crate) headers: Vec<(String, String)>,
    pub(crate) body: Vec<u8>,
}

impl Answer {
    /// The value of the header called `name`; panics if there are two.
    pub(crate) fn header(&self, name: &str) -> Option<&str> {
        let mut values = self.headers.iter().filter(|(n, _)| n.eq_ignore_ascii_case(name));
        let value = values.next().map(|(_, v)| v.as_str());
        assert!(values.next().is_none(), "{name} is there twice");
        value
    }

    pub(crate) fn text(&self) -> &str {
        std::str::from_utf8(&self.body).unwrap()
    }
}

/// A connection, and the bytes that were read from it but not used yet.
pub(crate) struct Raw {
    pub(crate) stream: TcpStream,
    pub(crate) buffer: Vec<u8>,
}

impl Raw {
    pub(crate) fn connect(address: SocketAddr) -> Self {
        let stream = TcpStream::connect(address).unwrap();
        stream.set_read_timeout(Some(PATIENCE)).unwrap();
        stream.set_write_timeout(Some(PATIENCE)).unwrap();
        Self { stream, buffer: Vec::new() }
    }

    pub(crate) fn to(rig: &Rig) -> Self {
        Self::connect(rig.server.address())
    }

    /// A client that has sent a request for what lies at `tail` below the token and `/checkpoint/`.
    pub(crate) fn asking(rig: &Rig, tail: &str) -> Self {
        let mut raw = Self::to(rig);
        raw.send("GET", &rig.path(tail), &[]);
        raw
    }

    pub(crate) fn send(&mut self, method: &str, path: &str, headers: &[(&str, &str)]) {
        let mut request = format!("{method} {path} HTTP/1.1\r\nHost: test\r\n");
        for (name, value) in headers {
            request.extend([name, ": ", value, "\r\n"]);
        }
        request.push_str("\r\n");
        self.stream.write_all(request.as_bytes()).unwrap();
    }

    /// Reads a head; bytes that follow it stay in the buffer.
    pub(crate) fn head(&mut self) -> Answer {
        let end = loop {
            if let Some(at) = self.buffer.windows(4).position(|w| w == b"\r\n\r\n") {
                break at + 4;
            }
            assert!(self.more(1 << 14) > 0, "the connection ended in a head");
        };
        let head: Vec<u8> = self.buffer.drain(..end).collect();
        let head = String::from_utf8(head).unwrap();
        let mut lines = head.trim_end().split("\r\n");
        let status = lines.next().unwrap();
        let mut words = status.splitn(3, ' ');
        assert_eq!(words.next(), Some("HTTP/1.1"));
        let status = words.next().unwrap().parse().unwrap();
        let reason = words.next().unwrap_or("").to_owned();
        let headers = lines.map(|l| l.split_once(": ").map(|(n, v)| (n.to_owned(), v.to_owned())).unwrap()).collect();
        Answer { status, reason, headers, body: Vec::new() }
    }

    /// Reads an answer with the body its head announces.
    pub(crate) fn answer(&mut self) -> Answer {
        let mut answer = self.head();
        let length = answer.header("content-length").map_or(0, |l| l.parse().unwrap());
        self.read_to(length);
        answer.body = self.buffer.drain(..length).collect();
        answer
    }

    /// Reads available bytes, at most `limit`; 0 means the end.
    pub(crate) fn more(&mut self, limit: usize) -> usize {
        self.try_more(limit).unwrap()
    }

    pub(crate) fn try_more(&mut self, limit: usize) -> std::io::Result<usize> {
        let at = self.buffer.len();
        self.buffer.resize(at + limit, 0);
        let got = self.stream.read(&mut self.buffer[at..]);
        self.buffer.truncate(at + *got.as_ref().unwrap_or(&0));
        got
    }

    /// Reads until `length` bytes have come.
    pub(crate) fn read_to(&mut self, length: usize) {
        while self.buffer.len() < length {
            let left = length - self.buffer.len();
            assert!(self.more(left) > 0, "the connection ended after {} bytes", self.buffer.len());
        }
    }

    /// Reads everything until the end of the connection or a reset.
    pub(crate) fn rest(&mut self) -> &[u8] {
        while matches!(self.try_more(1 << 20), Ok(n) if n > 0) {}
        &self.buffer
    }

    /// Whether nothing more arrives for a moment. A slow machine can hide a byte that must not be sent, but cannot make
    /// this fail.
    pub(crate) fn is_silent(&mut self) -> bool {
        self.stream.set_read_timeout(Some(Duration::from_millis(200))).unwrap();
        let silent = self.try_more(1).is_err_and(|e| e.kind() == std::io::ErrorKind::WouldBlock);
        self.stream.set_read_timeout(Some(PATIENCE)).unwrap();
        silent
    }

    /// Whether the server has ended this connection; bytes that it sent before are read and dropped.
    pub(crate) fn is_ended(&mut self) -> bool {
        loop {
            match self.try_more(1 << 16) {
                Ok(0) => return true,
                Ok(_) => {}
                Err(e) => {
                    let waiting = matches!(e.kind(), std::io::ErrorKind::WouldBlock | std::io::ErrorKind::TimedOut);
                    return !waiting;
                }
            }
        }
    }
}

/// Sends one request on a connection of its own and returns the answer.
pub(crate) fn request(rig: &Rig, method: &str, path: &str, headers: &[(&str, &str)]) -> Answer {
    let mut raw = Raw::to(rig);
    raw.send(method, path, headers);
    if method == "HEAD" { raw.head() } else { raw.answer() }
}

pub(crate) fn get(rig: &Rig, path: &str, headers: &[(&str, &str)]) -> Answer {
    request(rig, "GET", path, headers)
}

/// The counters of `rig`.
pub(crate) fn metrics(rig: &Rig) -> String {
    get(rig, &rig.path("").replace("checkpoint/", "metrics"), &[]).text().to_owned()
}

/// The number of connections that `rig` has now, including the one of this request.
pub(crate) fn connections(rig: &Rig) -> usize {
    metrics(rig).lines().find_map(|line| line.strip_prefix("tensorferry_connections ")).unwrap().parse().unwrap()
}

/// A client that has requested the whole container and read only the head of the answer, and the container's length.
pub(crate) fn begin(rig: &Rig) -> (Raw, usize) {
    let mut raw = Raw::asking(rig, "7.safetensors");
    let head = raw.head();
    assert_eq!(head.status, 200);
    (raw, head.header("content-length").unwrap().parse().unwrap())
}
