use super::*;

fn member(ip: [u8; 4], port: u16) -> Member {
    Member { ip: ip.into(), relay: RelayAddress { port, token: "0".repeat(32), fingerprint: None } }
}

fn at(millis: u64) -> Duration {
    Duration::from_millis(millis)
}

#[test]
fn a_block_is_handed_out_once_while_its_holder_may_pass_it_on() {
    let mut handout = Handout::new(10).unwrap();
    let (one, two) = (member([10, 0, 0, 1], 1), member([10, 0, 0, 2], 1));
    handout.ask(at(0), &two, &[], 4);
    assert_eq!(handout.ask(at(0), &one, &[(0, 10)], 4).grant, [(0, 4)]);
    assert_eq!(handout.ask(at(1), &two, &[(0, 10)], 4).grant, [(4, 8)]);
    assert_eq!(handout.ask(at(2), &one, &[(4, 10)], 4).grant, [(8, 10)]);
    let told = handout.ask(at(3), &two, &[(0, 4), (8, 10)], 4);
    assert_eq!((told.grant, told.wait, told.neighbours), (vec![], ASK_AGAIN, vec![&one]));
    assert!(handout.ask(at(1999), &two, &[(0, 4)], 4).grant.is_empty());
    assert_eq!(handout.ask(at(2000), &two, &[(0, 4), (8, 10)], 6).grant, [(0, 4)], "held for long");
    assert_eq!(handout.ask(at(2000), &two, &[(8, 10)], 6).grant, []);
    assert_eq!(handout.ask(at(2001), &two, &[(0, 2)], 6).grant, [(0, 2)], "what it has lost itself");
}

#[test]
fn on_slow_links_a_block_is_on_its_way_while_its_holder_says_so() {
    let mut handout = Handout::new(10).unwrap();
    let [one, two, three, slow] = [1, 2, 3, 4].map(|host| member([10, 0, 0, host], 1));
    for member in [&one, &two, &three, &slow] {
        handout.ask(at(0), member, &[], 4);
    }
    let says = |handout: &mut Handout, millis, member, coming: &[(u64, u64)]| {
        handout.note_coming(at(millis), member, coming);
        handout.ask(at(millis), member, &[], 1);
    };
    // Four seconds for a block.
    assert_eq!(handout.ask(at(0), &slow, &[(1, 2)], 1).grant, [(1, 2)]);
    assert_eq!(handout.ask(at(0), &one, &[(0, 1)], 1).grant, [(0, 1)]);
    for millis in [1000, 2500, 3900] {
        says(&mut handout, millis, &one, &[(0, 1)]);
    }
    says(&mut handout, 4000, &one, &[]);
    for second in 1..20 {
        says(&mut handout, 1000 * second, &slow, &[(1, 2)]);
        let overdue = !handout.ask(at(1000 * second), &two, &[(1, 2)], 1).grant.is_empty();
        assert_eq!(overdue, second == 16, "{second}: it is four times as slow");
        if overdue {
            break;
        }
    }
    // Who has it says so no more, and others should have heard of it.
    assert!(handout.ask(at(5899), &three, &[(0, 1)], 1).grant.is_empty());
    assert_eq!(handout.ask(at(5900), &three, &[(0, 1)], 1).grant, [(0, 1)]);
}

#[test]
fn nobody_holds_blocks_by_claiming_them_again_and_again() {
    // Under one name, and under ever new ones.
    for (claims, names, says, renamed) in [
        (true, false, false, false),
        (false, true, false, false),
        (false, false, true, false),
        (true, true, true, false),
        (true, false, false, true),
    ] {
        let mut handout = Handout::new(8).unwrap();
        let honest = member([10, 0, 0, 2], 1);
        handout.ask(at(0), &honest, &[], 8);
        let mut got = 0;
        for tick in 0..300 {
            let (now, all) = (at(100 * u64::from(tick)), [(0, 8)]);
            let hostile = member([10, 0, 0, 1], if renamed { 1 + tick / 5 } else { 1 });
            if says {
                handout.note_coming(now, &hostile, &all);
            }
            handout.ask(now, &hostile, if names || tick == 0 { &all } else { &[] }, 8);
            if claims {
                handout.note_taken(now, &hostile, &all);
            }
            got += handout.ask(now, &honest, &all, 8).grant.len();
        }
        assert!(got > 0, "claims {claims}, names {names}, says {says}, renamed {renamed}");
    }
}

#[test]
fn what_a_member_took_along_is_handed_out_again() {
    let mut handout = Handout::new(4).unwrap();
    let (one, two, three) = (member([10, 0, 0, 1], 1), member([10, 0, 0, 2], 1), member([10, 0, 0, 3], 1));
    handout.ask(at(0), &one, &[(0, 4)], 4);
    handout.ask(at(10_000), &two, &[], 4);
    handout.ask(at(10_000), &three, &[], 4);
    // However late it was handed out: who has it is gone.
    handout.given.hand_out(at(15_000), 1, &[(0, 4)], true);
    assert!(handout.ask(at(14_999), &two, &[(0, 4)], 4).grant.is_empty());
    assert_eq!(handout.ask(at(15_000), &two, &[(0, 4)], 4).grant, [(0, 4)]);
    assert_eq!(handout.members(), 2);
}

#[test]
fn a_member_without_others_gets_what_it_asks_for() {
    let mut handout = Handout::new(4).unwrap();
    let one = member([10, 0, 0, 1], 1);
    for _ in 0..3 {
        assert_eq!(handout.ask(at(0), &one, &[(0, 4)], 9).grant, [(0, 4)]);
    }
    assert_eq!(handout.ask(at(0), &one, &[(2, 900)], 1).grant, [(2, 4)], "what there is not is not handed out");
}

#[test]
fn what_a_member_was_granted_alone_is_shared_when_another_one_comes() {
    let mut handout = Handout::new(10).unwrap();
    let (one, two) = (member([10, 0, 0, 1], 1), member([10, 0, 0, 2], 1));
    assert_eq!(handout.ask(at(0), &one, &[(0, 10)], 2).grant, [(0, 10)]);
    let told = handout.ask(at(1), &two, &[(0, 10)], 2);
    assert_eq!((told.grant, told.neighbours), (vec![], vec![&one]), "it has them soon");
    // It has begun to fetch the first four.
    assert_eq!(handout.ask(at(2), &one, &[(4, 10)], 2).grant, [(4, 6)]);
    assert_eq!(handout.ask(at(3), &two, &[(0, 10)], 2).grant, [(6, 8)]);
    handout.forget(&one);
    assert_eq!(handout.ask(at(5), &two, &[(0, 6), (8, 10)], 2).grant, [(0, 6), (8, 10)]);
}

#[test]
fn what_a_member_took_without_a_grant_is_not_handed_out_to_others() {
    let mut handout = Handout::new(4).unwrap();
    let (one, two) = (member([10, 0, 0, 1], 1), member([10, 0, 0, 2], 1));
    handout.note_taken(at(0), &one, &[(0, 1)]);
    handout.ask(at(0), &one, &[], 4);
    handout.note_taken(at(0), &one, &[(2, 900)]);
    assert_eq!(handout.ask(at(0), &two, &[(0, 4)], 4).grant, [(0, 2)], "a stranger takes nothing");
}

#[test]
fn members_are_bounded_and_those_beyond_are_served_without_a_swarm() {
    let mut handout = Handout::new(4).unwrap();
    for port in 0..200 {
        handout.ask(at(0), &member([10, 0, 0, 1], port), &[], 4);
    }
    assert_eq!(handout.members(), MOST_AT_ADDRESS);
    let told = handout.ask(at(0), &member([10, 0, 0, 1], 999), &[(0, 4)], 1);
    assert_eq!((told.grant, told.neighbours.len()), (vec![(0, 4)], 0));
    for host in 0..100_u8 {
        for port in 0..60 {
            handout.ask(at(0), &member([10, 0, 1, host], port), &[], 4);
        }
    }
    assert_eq!(handout.members(), MOST_MEMBERS);
    handout.ask(SILENCE, &member([10, 0, 9, 9], 1), &[], 4);
    assert_eq!(handout.members(), 1, "the silent ones are forgotten");
}

#[test]
fn neighbours_are_few_others_and_reach_everybody() {
    let mut handout = Handout::new(4).unwrap();
    let members: Vec<_> = (0..200).map(|host| member([10, 0, 0, host], 1)).collect();
    for one in &members {
        handout.ask(at(0), one, &[], 4);
    }
    let mut reached = [false; 200];
    let mut edge = vec![0_usize];
    reached[0] = true;
    while let Some(index) = edge.pop() {
        let told = handout.ask(at(0), &members[index], &[], 4);
        assert_eq!(told.neighbours.len(), MOST_NEIGHBOURS);
        for other in told.neighbours {
            assert_ne!(other, &members[index]);
            let IpAddr::V4(ip) = other.ip else { panic!("not one of them") };
            let other = usize::from(ip.octets()[3]);
            if !std::mem::replace(&mut reached[other], true) {
                edge.push(other);
            }
        }
    }
    assert!(reached.iter().all(|&reached| reached));
}

#[test]
fn members_on_a_loopback_address_are_named_to_such_only() {
    let mut handout = Handout::new(4).unwrap();
    let (here, beside, far) = (member([127, 0, 0, 1], 1), member([127, 0, 0, 1], 2), member([10, 0, 0, 2], 1));
    handout.ask(at(0), &here, &[], 4);
    handout.ask(at(0), &beside, &[], 4);
    assert!(handout.ask(at(0), &far, &[], 4).neighbours.is_empty());
    assert_eq!(handout.ask(at(0), &here, &[], 4).neighbours, [&beside, &far]);
}
