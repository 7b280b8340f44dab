//! A payload that is only announced costs no memory. The test is alone in its process, because it measures the
//! process's peak of resident memory.
#![allow(clippy::disallowed_methods, reason = "tests are peers of all kinds")]
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test that cannot go on should panic")]

mod common;

use std::io::Write;
use std::time::Duration;

use common::faults::{Liar, asked_range};
use common::{BLOCK, STEP};
use tensorferry_core::{Destination, ErrorKind, FetchOptions, Remote};
use tensorferry_wire::container::{Entry, Header, MANIFEST_ENTRY};
use tensorferry_wire::digest::{DigestTable, checksum};
use tensorferry_wire::dtype::Dtype;

/// The peak of resident memory, in MiB.
fn peak() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find_map(|l| l.strip_prefix("VmHWM:")).unwrap();
    line.trim().trim_end_matches(" kB").parse::<u64>().unwrap() >> 10
}

/// A source that is correct except for one thing: of the payload of `len` bytes, one entry called `name`, it sends no
/// more than two MiB.
fn announcing(name: &str, len: u64) -> Liar {
    let entry = Entry { name: name.into(), dtype: Dtype::U8, shape: [len].into_iter().collect(), start: 0, end: len };
    let header = Header::new(vec![], vec![entry]).unwrap().encode(64).unwrap();
    let table = DigestTable { header: checksum(&header), payload_len: len, blocks: vec![] };
    let (total, start) = (header.len() as u64 + len, header.len());
    Liar::new(move |mut stream, head, _| {
        let bytes = match asked_range(head) {
            None => {
                let bytes = table.encode();
                write!(stream, "HTTP/1.1 200 OK\r\nETag: \"a\"\r\nContent-Length: {}\r\n\r\n", bytes.len())?;
                bytes
            }
            Some((first, end)) => {
                if end > start + 2 * BLOCK {
                    return Err(std::io::ErrorKind::ConnectionReset.into());
                }
                let whole = [header.as_slice(), &vec![0; 2 * BLOCK]].concat();
                let range = format!("ETag: \"a\"\r\nContent-Range: bytes {first}-{}/{total}\r\n", end - 1);
                write!(stream, "HTTP/1.1 206 P\r\n{range}Content-Length: {}\r\n\r\n", end - first)?;
                whole[first..end].to_vec()
            }
        };
        stream.write_all(&bytes)
    })
}

#[test]
fn a_payload_that_is_only_announced_costs_no_memory() {
    for (name, shift) in
        ["w", MANIFEST_ENTRY].into_iter().flat_map(|name| [32, 36, 40, 44, 46, 50, 60].map(|s| (name, s)))
    {
        let what = format!("{name} of 2^{shift}");
        let liar = announcing(name, 1 << shift);
        let options = FetchOptions { lanes: Some(2), ..FetchOptions::within(Duration::from_secs(4)) };
        let before = peak();
        let failed = match Remote::open(&[&liar.url()], STEP, options) {
            Ok(remote) => remote.fetch(Destination::Fresh).expect_err(&what),
            Err(failed) => failed,
        };
        let known = if shift < 44 { &[ErrorKind::Connect, ErrorKind::System][..] } else { &[ErrorKind::System] };
        assert!(known.contains(&failed.kind()), "{what}: {failed}");
        let grown = peak() - before;
        assert!(grown < 64, "{what}: {grown} MiB for {failed}");
    }
}
