use super::*;

fn ask(need: &[(u64, u64)]) -> Ask {
    let relay = RelayAddress { port: 1, token: "a0".repeat(16), fingerprint: Some("0".repeat(FINGERPRINT_LEN)) };
    Ask { relay, need: need.to_vec(), took: Vec::new(), coming: Vec::new(), part: None }
}

#[test]
fn messages_come_back_as_they_were() {
    for need in [&[][..], &[(0, 1)], &[(0, 4), (4, 9), (11, u64::MAX)]] {
        assert_eq!(Ask::parse(&ask(need).query()), Some(ask(need)));
        let taking = Ask { took: need.to_vec(), ..ask(&[]) };
        assert_eq!(Ask::parse(&taking.query()), Some(taking));
    }
    let (grant, peers) = (vec![(3, 5), (9, 10)], vec!["http://h:1/".to_owned(); 3]);
    for has_table in [false, true] {
        let (grant, peers) = (grant.clone(), peers.clone());
        let place = Place { source: Nearness::Far, host: Share { number: 1, of: 2 }, on_host: 1 };
        let answer = Answer { grant, wait_ms: 20, has_table, place: Some(place).filter(|_| has_table), peers };
        assert_eq!(Answer::decode(&answer.encode(), 10), Some(answer));
        let ask = Ask { part: Some(u64::MAX / 8).filter(|_| has_table), ..ask(&[(0, 1)]) };
        assert_eq!(Ask::parse(&ask.query()), Some(ask));
    }
    assert_eq!(Answer::decode(&Answer::default().encode(), 0), Some(Answer::default()));
    for place in ["", "2 0/1 0", "1 1/1 0", "1 0/0 0", "1 0/1", "1 -1/1 0"] {
        assert_eq!(Answer::decode(&format!("place {place}\n"), 1), None, "{place}");
    }
    let later = "grant 0-1\nwait 1\nlater a b\npeer u\n";
    assert_eq!(Answer::decode(later, 1).map(|a| a.peers), Some(vec!["u".to_owned()]));
    assert_eq!(Ask::parse(&format!("{}&later=a", ask(&[]).query())), Some(ask(&[])));
}

#[test]
fn a_need_of_many_runs_is_cut_to_what_is_read() {
    let need: Vec<_> = (0..2 * MAX_RUNS as u64).map(|i| (3 * i, 3 * i + 1)).collect();
    let read = Ask::parse(&ask(&need).query()).unwrap();
    assert_eq!(read.need, need[..MAX_RUNS]);
}

#[test]
fn hostile_messages_are_refused() {
    let token = "a0".repeat(16);
    for bad in [
        "port=0&token=T",
        "port=1",
        "port=1&token=A",
        "port=1&token=T&tls=0",
        "port=1&token=T&need=5-1",
        "port=1&token=T&need=0-4,2-5",
        "port=1&token=T&&",
        "port=1&token=T/../../x",
        "port=1&token=T&part=",
        "port=1&token=T&part=+123456789abcdef",
        "port=1&token=T&part=0123456789abcdef0",
    ] {
        assert_eq!(Ask::parse(&bad.replace('T', &token)), None, "{bad}");
    }
    let many = "peer http://h/\n".repeat(MAX_PEERS + 1);
    for bad in ["grant 0-11", "grant 4-2", "wait -1", "wait x", "grant", &many, &format!("peer {}", "x".repeat(300))] {
        assert_eq!(Answer::decode(bad, 10), None, "{bad}");
    }
}
