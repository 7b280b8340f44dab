//! What `/metrics` and the status page report about a server, and about the receives of the same process; the ports.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use crate::common::raw::{Raw, get, metrics, request};
use crate::common::{BLOCK, Rig, STEP, State, eventually, lanes, local};
use tensorferry_core::{
    Failure, FetchOptions, Hint, ProgramFigures, ProgramTable, Secret, Series, Server, ServerConfig, Stability,
};

/// Asserts that each of `lines` is one of `text`.
fn has_lines(text: &str, lines: &[impl AsRef<str>]) {
    for line in lines {
        assert!(text.lines().any(|l| l == line.as_ref()), "{} is missing in\n{text}", line.as_ref());
    }
}

#[test]
fn metrics_tell_how_answers_and_bodies_ended_and_who_waits() {
    let state = State::of(&[24 * BLOCK], 1);
    let rig = Rig::new();
    let has = |line: &str| metrics(&rig).lines().any(|l| l == line);
    assert!(has("tensorferry_bodies_total{end=\"complete\"} 0") && has("tensorferry_waiting_requests 0"));
    assert!(!metrics(&rig).contains("tensorferry_step"), "nothing was ever served");

    let mut waiting = Raw::asking(&rig, "7.safetensors");
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
    let text = metrics(&rig);
    has_lines(
        &text,
        &[
            "tensorferry_bodies_total{end=\"complete\"} 1",
            "tensorferry_bodies_total{end=\"cut\"} 1",
            "tensorferry_answers_total{code=\"206\"} 1",
            "tensorferry_answers_total{code=\"400\"} 1",
            "tensorferry_answers_total{code=\"405\"} 1",
            "tensorferry_step 7",
            "tensorferry_allowed 1",
        ],
    );
    let seconds = text.lines().find_map(|l| l.strip_prefix("tensorferry_sending_seconds_total "));
    assert!(seconds.unwrap().parse::<f64>().unwrap() > 0.0);
}

#[test]
fn metrics_tell_of_receives_as_the_log_does() {
    let state = State::of(&[24 * BLOCK], 1);
    let rig = Rig::serving(&state);
    let options = FetchOptions { same_host: false, ..lanes(3) };
    let arrived = state.fetch(&[&rig.url()], options).unwrap();
    let report = arrived.report();
    assert!(!report.verifying.is_zero() && report.verifying < report.fetching);
    let took = report.opening + report.fetching + Duration::from_secs(2);
    rig.server.begin_receive(STEP).end(Ok(report), took);
    rig.server.begin_receive(STEP).end(Err(Failure { class: "ConnectError", counted_as: "ConnectError" }), took);
    drop(rig.server.begin_receive(STEP));
    let text = metrics(&rig);
    has_lines(
        &text,
        &[
            "tensorferry_receives_total{end=\"healed\"} 1".to_owned(),
            "tensorferry_receives_total{end=\"failed\"} 2".to_owned(),
            format!("tensorferry_receive_seconds_total{{phase=\"open\"}} {}", report.opening.as_secs_f64()),
            format!("tensorferry_last_receive_seconds{{phase=\"fetch\"}} {}", report.fetching.as_secs_f64()),
            "tensorferry_last_receive_seconds{phase=\"build\"} 2".to_owned(),
            "tensorferry_last_receive_lanes 3".to_owned(),
            format!("tensorferry_receive_verify_seconds_total {}", report.verifying.as_secs_f64()),
            "tensorferry_last_receive_route{here=\"127.0.0.1\",there=\"127.0.0.1\"} 1".to_owned(),
        ],
    );
}

#[test]
fn a_cap_is_shown_where_there_is_one() {
    let capped = Rig::configured(&ServerConfig { max_bandwidth: Some(10_000_000), ..ServerConfig::default() });
    assert!(metrics(&capped).contains("\ntensorferry_max_bandwidth_bytes_per_second 10000000\n"));
    assert!(figures(&capped).contains("\"max_bandwidth\":10000000,"));
    let free = Rig::new();
    assert!(!metrics(&free).contains("max_bandwidth") && figures(&free).contains("\"max_bandwidth\":null,"));
}

#[test]
fn a_receive_that_runs_is_shown_and_one_that_is_dropped_has_failed() {
    let rig = Rig::new();
    let has = |line: &str| metrics(&rig).lines().any(|l| l == line);
    let receive = rig.server.begin_receive(STEP);
    assert!(has("tensorferry_receiving 1") && has("tensorferry_receiving_phase{phase=\"open\"} 1"));
    let received = Arc::new(AtomicU64::new(30));
    receive.opened(Arc::clone(&received), 100);
    assert!(has("tensorferry_receiving_bytes 30") && has("tensorferry_receiving_total_bytes 100"));
    assert!(has("tensorferry_receiving_phase{phase=\"fetch\"} 1"));
    // Bytes that had to be fetched again count once.
    received.store(130, Ordering::Relaxed);
    assert!(has("tensorferry_receiving_bytes 100") && has("tensorferry_receiving_phase{phase=\"build\"} 1"));
    drop(receive);
    assert!(has("tensorferry_receiving 0") && has("tensorferry_receives_total{end=\"failed\"} 1"));
}

/// What the status page of `rig` shows.
fn figures(rig: &Rig) -> String {
    get(rig, &rig.path("?json"), &[]).text().to_owned()
}

#[test]
fn the_status_page_shows_what_is_sent_and_what_peers_say_is_text() {
    let state = State::of(&[24 * BLOCK], 1);
    let rig = Rig::serving(&state);
    let mut peer = Raw::asking(&rig, "7.safetensors");
    peer.head();
    let sent = "\"sending\":[{\"peer\":\"127.0.0.1\",\"step\":7,\"connections\":1,";
    eventually("the transfer is shown", || figures(&rig).contains(sent));
    drop(peer);
    eventually("the transfer is gone", || figures(&rig).contains("\"sending\":[],"));
    assert_eq!(get(&rig, &rig.path("7&\"{'x'}"), &[]).status, 400);
    // Of strangers the address and a count are shown, and nothing that they wrote.
    assert_eq!(get(&rig, "/00000000000000000000000000000000/stranger", &[]).status, 404);
    let shown = get(&rig, &rig.path("?json"), &[]);
    let text = shown.text();
    assert_eq!(shown.header("content-type"), Some("application/json"));
    assert!(text.contains("7&\\\"{'x'}") && text.contains("\"404\":1") && !text.contains("stranger\""), "{text}");
    assert!(text.contains("\"peer\":\"127.0.0.1\",\"requests\":1,\"why\":\"unknown path"), "{text}");
    let token = rig.path("").split('/').nth(1).unwrap().to_owned();
    let page = get(&rig, &rig.path(""), &[]);
    assert!(!text.contains(&token) && !page.text().contains(&token), "the page gives access to the state");
    for field in ["x-content-type-options", "referrer-policy", "cache-control"] {
        assert!(page.header(field).is_some() && shown.header(field).is_some(), "{field}");
    }
    assert_eq!(get(&rig, &rig.path("").replace("checkpoint/", ""), &[]).status, 200);
    assert_eq!(get(&rig, "/", &[]).status, 404, "without the random part there is no page");
}

#[test]
fn the_port_for_figures_gives_nothing_else() {
    let state = State::of(&[BLOCK], 1);
    let secret = Secret::new(b"at least sixteen bytes of it").unwrap();
    let config = ServerConfig { metrics_ports: Some(0..=0), secret: Some(secret), tls: true, ..local() };
    let rig = Rig::configured(&config).publishing(state.publication(Stability::Private));
    let url = rig.server.metrics_url("127.0.0.1").unwrap();
    let address = url.strip_prefix("http://").unwrap().split('/').next().unwrap().parse().unwrap();
    let ask = |method: &str, path: &str| {
        let mut raw = Raw::connect(address);
        raw.send(method, path, &[]);
        if method == "HEAD" { raw.head() } else { raw.answer() }
    };
    assert!(ask("GET", "/metrics").text().contains("\ntensorferry_step 7\n"));
    assert_eq!(ask("HEAD", "/metrics").status, 200);
    assert_eq!(ask("GET", "/healthz").text(), "ok\n");
    assert_eq!(ask("POST", "/metrics").status, 405);
    // Peers that say nothing neither keep others out nor keep their connection.
    let mut silent: Vec<_> = (0..40).map(|_| Raw::connect(address)).collect();
    std::thread::sleep(Duration::from_millis(100));
    assert_eq!(ask("GET", "/metrics").status, 200);
    assert!(silent[0].is_ended());
    assert_eq!(rig.server.url("127.0.0.1").matches("sha256-").count(), 1);
}

#[test]
fn a_port_that_is_taken_at_one_address_is_taken_at_all() {
    let runtime = tokio::runtime::Runtime::new().unwrap();
    let held = Server::bind(&local(), runtime.handle()).unwrap();
    let taken = held.address().port();
    let config = ServerConfig { ports: taken..=taken, ..ServerConfig::default() };
    assert_eq!(Server::bind(&config, runtime.handle()).unwrap_err().hint(), Some(Hint::ChoosePort));
}

#[test]
fn a_peer_without_the_secret_is_told_from_one_with_another_and_from_a_scanner() {
    let secret = Secret::new(b"at least sixteen bytes of it").unwrap();
    let bind = Some([127, 0, 0, 1].into());
    let rig = Rig::configured(&ServerConfig { secret: Some(secret), bind, ..ServerConfig::default() });
    for (path, headers) in [
        ("/nowhere".to_owned(), None),
        (rig.path("7.safetensors"), None),
        (rig.path("7.safetensors"), Some("tensorferry 1")),
        (rig.path("7.safetensors"), Some("tensorferry 2")),
    ] {
        let headers: Vec<_> = headers.map(|proof| ("Authorization", proof)).into_iter().collect();
        let answer = get(&rig, &path, &headers);
        assert_eq!((answer.status, answer.text()), (404, "not found\n"), "{path}: all are answered alike");
    }
    let text = metrics(&rig);
    for line in ["{reason=\"path\"} 1", "{reason=\"no_secret\"} 1", "{reason=\"other_secret\"} 2"] {
        assert!(text.contains(&format!("\ntensorferry_refused_total{line}\n")), "{line} is missing in\n{text}");
    }
    let known: Vec<_> = rig.server.strangers().into_iter().map(|(peer, _, count)| (peer, count)).collect();
    assert_eq!(known, [("127.0.0.1".to_owned(), 2), ("127.0.0.1".to_owned(), 1), ("127.0.0.1".to_owned(), 1)]);
}

#[test]
fn a_program_describes_itself_on_both_pages() {
    let rig = Rig::new();
    let series = |name: &str, rows| Series { name: name.to_owned(), counts: false, help: "How many.".to_owned(), rows };
    let held = series("keeper_snapshots", vec![(vec![("origin".to_owned(), "own\"} 9\n".to_owned())], 4.0)]);
    rig.server.show(ProgramFigures {
        title: "keeper <default>".to_owned(),
        lines: vec!["4 snapshots".to_owned(), "<b>".to_owned()],
        tables: vec![ProgramTable {
            heading: "Snapshots".to_owned(),
            heads: vec!["job".to_owned(), "#step".to_owned()],
            rows: vec![vec!["<run>".to_owned(), "7".to_owned()]],
        }],
        series: vec![held, series("keeper_clients", vec![(Vec::new(), 2.0)])],
    });
    let text = metrics(&rig);
    has_lines(&text, &["tensorferry_keeper_snapshots{origin=\"own???9?\"} 4", "tensorferry_keeper_clients 2"]);
    let shown = figures(&rig);
    assert!(shown.contains("{\"title\":\"keeper <default>\",\"lines\":[\"4 snapshots\",\"<b>\"],"), "{shown}");
    assert!(shown.contains("\"heads\":[\"job\",\"#step\"],\"rows\":[[\"<run>\",\"7\"]]"), "{shown}");
}
