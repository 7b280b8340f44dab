//! Zones over sockets: what receivers say, what the tracker answers, and names that do harm.

use tensorferry_core::ServerConfig;

use crate::common::raw::{Raw, get};
use crate::common::{BLOCK, Rig, State, eventually};
use crate::swarm::{ask_by, etag, member, offering, unfinished};

/// The words of the line that says where the member is; some of no meaning if there is nobody else.
fn place(member: &mut Raw, rig: &Rig, port: u16, zone: &str) -> Vec<String> {
    let answer = ask_by(member, rig, port, &format!("&zone={zone}"));
    assert_eq!(answer.status, 200, "{}", answer.reason);
    let line = answer.text().lines().find_map(|line| line.strip_prefix("place "));
    line.unwrap_or("none of 0/0").split(' ').map(str::to_owned).collect()
}

#[test]
fn a_receiver_says_the_zone_of_its_server() {
    let state = State::of(&[48 * BLOCK], 1);
    let (source, readiness) = unfinished(&state, 20);
    let rig = Rig::configured(&ServerConfig { zone: Some("b".to_owned()), ..ServerConfig::default() });
    std::thread::scope(|scope| {
        let receive = scope.spawn(|| state.fetch(&[&source.url()], member(&rig)).map(drop));
        let (mut same, mut other) = (Raw::to(&source), Raw::to(&source));
        eventually("two members share the zone", || place(&mut same, &source, 1, "b")[2].ends_with("/2"));
        assert_eq!(place(&mut other, &source, 2, "c")[2], "0/1");
        // All of them are on this host, and so is the source.
        assert_eq!(place(&mut other, &source, 2, "c")[..2], ["0", "2/3"]);
        drop((same, other));
        readiness.finish();
        receive.join().unwrap().unwrap();
    });
}

#[test]
fn a_name_that_is_no_zone_is_refused_and_harms_nobody() {
    let state = State::of(&[48 * BLOCK], 1);
    let source = offering(&state, None);
    let path = source.path(&format!("7/swarm?port=1&token={}", "0".repeat(32)));
    for zone in ["", "a%0Apeer", "a/b", "a\"b", "%00", &"z".repeat(65)] {
        let answer = get(&source, &format!("{path}&zone={zone}"), &[("If-Match", &etag(&source))]);
        assert_eq!(answer.status, 400, "{zone}");
    }
    // Members that claim a zone, and bring nothing to it.
    let mut idle: Vec<_> = (1..9).map(|_| Raw::to(&source)).collect();
    for (port, member) in (1..).zip(&mut idle) {
        assert_eq!(ask_by(member, &source, port, "&zone=b").status, 200);
    }
    // Such a name is not sent at all.
    for zone in ["b", "a&leave=1"] {
        let rig = Rig::configured(&ServerConfig { zone: Some(zone.to_owned()), ..ServerConfig::default() });
        state.fetch(&[&source.url()], member(&rig)).unwrap();
    }
}
