//! Processes of this machine that connect and leave again, as fast as they can. Alone in its process: it counts what is
//! open.
#![allow(clippy::disallowed_methods, reason = "tests are peers of all kinds")]
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test that cannot go on should panic")]

mod common;

use std::io::Write;
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixStream};
use std::time::{Duration, Instant};

use common::local::name_of;
use common::{BLOCK, Rig, State};

#[test]
fn local_connections_that_come_and_go_take_few_descriptors() {
    let rig = Rig::serving(&State::of(&[BLOCK], 1));
    let address = SocketAddr::from_abstract_name(name_of(&rig)).unwrap();
    let until = Instant::now() + Duration::from_secs(2);
    let shared = || {
        let open =
            std::fs::read_dir("/proc/self/fd").unwrap().filter_map(|entry| entry.unwrap().path().read_link().ok());
        open.filter(|link| link.to_string_lossy().contains("memfd:tensorferry")).count()
    };
    let most = std::thread::scope(|scope| {
        for _ in 0..32 {
            scope.spawn(|| {
                while Instant::now() < until {
                    let _ = UnixStream::connect_addr(&address).and_then(|mut stream| stream.write_all(b"\r\n"));
                }
            });
        }
        let mut most = 0;
        while Instant::now() < until {
            most = most.max(shared());
        }
        most
    });
    // 32 that have asked, 32 others, and 32 that are ending; and while they are counted, some end and others begin.
    assert!(most <= 128, "{most} at a time");
}
