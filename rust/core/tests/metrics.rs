//! What `/metrics` reports about a server, and about the receives of the same process.
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test that cannot go on should panic")]

mod common;

use std::time::Duration;

use common::raw::{Raw, get, request};
use common::{BLOCK, Rig, STEP, State, eventually, lanes};
use tensorferry_core::{FetchOptions, Report, Stability};

#[test]
fn metrics_tell_how_answers_and_bodies_ended_and_who_waits() {
    let state = State::of(&[24 * BLOCK], 1);
    let rig = Rig::new();
    let path = rig.path("").replace("checkpoint/", "metrics");
    let has = |line: &str| get(&rig, &path, &[]).text().lines().any(|l| l == line);
    assert!(has("tensorferry_bodies_total{end=\"complete\"} 0") && has("tensorferry_waiting_requests 0"));
    assert!(!get(&rig, &path, &[]).text().contains("tensorferry_step"), "nothing was ever served");

    let mut waiting = Raw::to(&rig);
    waiting.send("GET", &rig.path("7.safetensors"), &[]);
    eventually("somebody waits", || has("tensorferry_waiting_requests 1"));
    rig.server.store().publish(STEP, state.publication(Stability::Private));
    waiting.head();
    eventually("nobody waits", || has("tensorferry_waiting_requests 0"));
    drop(waiting);
    eventually("a body was cut", || has("tensorferry_bodies_total{end=\"cut\"} 1"));

    request(&rig, "HEAD", &rig.path("7.safetensors"), &[]);
    assert_eq!(get(&rig, &rig.path("7.safetensors"), &[("Range", "bytes=5-9")]).status, 206);
    assert_eq!(get(&rig, &rig.path("8.safetensors"), &[]).status, 400);
    assert_eq!(request(&rig, "POST", &rig.path("7.safetensors"), &[]).status, 405);
    let text = get(&rig, &path, &[]).text().to_owned();
    for line in [
        "tensorferry_bodies_total{end=\"complete\"} 1",
        "tensorferry_bodies_total{end=\"cut\"} 1",
        "tensorferry_answers_total{code=\"206\"} 1",
        "tensorferry_answers_total{code=\"400\"} 1",
        "tensorferry_answers_total{code=\"405\"} 1",
        "tensorferry_step 7",
    ] {
        assert!(text.lines().any(|l| l == line), "{line} is missing in\n{text}");
    }
    let seconds = text.lines().find_map(|l| l.strip_prefix("tensorferry_sending_seconds_total "));
    assert!(seconds.unwrap().parse::<f64>().unwrap() > 0.0);
}

#[test]
fn metrics_tell_of_receives_as_the_log_does() {
    let state = State::of(&[24 * BLOCK], 1);
    let rig = Rig::serving(&state);
    let path = rig.path("").replace("checkpoint/", "metrics");
    let options = FetchOptions { same_host: false, ..lanes(3) };
    let arrived = state.fetch(&[&rig.url()], options).unwrap();
    let report = arrived.report();
    let took = report.opening + report.fetching + Duration::from_secs(2);
    rig.server.note_receive(Some(report), took);
    rig.server.note_receive(None, took);
    let text = get(&rig, &path, &[]).text().to_owned();
    for line in [
        "tensorferry_receives_total{end=\"healed\"} 1".to_owned(),
        "tensorferry_receives_total{end=\"failed\"} 1".to_owned(),
        format!("tensorferry_received_bytes_total {}", report.bytes),
        format!("tensorferry_receive_seconds_total{{phase=\"open\"}} {}", report.opening.as_secs_f64()),
        format!("tensorferry_last_receive_seconds{{phase=\"fetch\"}} {}", report.fetching.as_secs_f64()),
        "tensorferry_last_receive_seconds{phase=\"build\"} 2".to_owned(),
        "tensorferry_last_receive_lanes 3".to_owned(),
        "tensorferry_last_receive_route{here=\"127.0.0.1\",there=\"127.0.0.1\"} 1".to_owned(),
    ] {
        assert!(text.lines().any(|l| l == line), "{line} is missing in\n{text}");
    }
}

#[test]
fn metrics_are_what_a_scraper_reads() {
    let rig = Rig::serving(&State::of(&[BLOCK], 1));
    let report = Report { lanes: 2, same_host: true, ..Report::default() };
    rig.server.note_receive(Some(&report), Duration::from_secs(1));
    let path = rig.path("").replace("checkpoint/", "metrics");
    let text = get(&rig, &path, &[]).text().to_owned();
    let mut known = "";
    for line in text.lines() {
        if let Some(about) = line.strip_prefix("# TYPE ") {
            let (name, kind) = about.split_once(' ').unwrap();
            assert_eq!(kind == "counter", name.ends_with("_total"), "{line}");
            assert_eq!(text.matches(&format!("# TYPE {name} ")).count(), 1, "{line}");
            known = name;
        } else if !line.starts_with("# HELP ") {
            let (name, value) = line.rsplit_once(' ').unwrap();
            assert_eq!(name.split('{').next(), Some(known), "{line}");
            assert!(value.parse::<f64>().unwrap() >= 0.0, "{line}");
        }
    }
    assert!(text.contains("tensorferry_last_receive_route{here=\"local\",there=\"local\"} 1\n"));
}
