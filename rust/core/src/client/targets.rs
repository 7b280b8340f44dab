//! The addresses by which one source may be reached, and how each of them has done so far in this receive.
//!
//! They are tried in this order: the card that the URL prefers, the addresses of the host, the other cards that the URL
//! names, and those that the source has named in its answers. The one that the first connection was made to stays the
//! first until it fails. One that is silent comes behind the others from then on, and is waited for twice as long when it
//! is its turn again: a source may have good reasons for saying nothing. Once another one has answered, later receives of
//! this process try it last as well, for a minute. One at which another program answers is left out.

use std::collections::BTreeMap;
use std::net::{IpAddr, SocketAddr};
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use tensorferry_wire::rails::Cards;

use super::rails::Pair;
use crate::error::{Error, ErrorKind};
use crate::sync::Locked;

/// For how long later receives try an address last that has failed where another one has answered.
const TRIED_LAST: Duration = Duration::from_mins(1);

/// The most that are remembered.
const MOST_LEFT_ALONE: usize = 64;

/// Addresses of sources that have failed in this process, so that one receive does not wait for what was silent a moment
/// ago in another one: until then they are tried last, and carry nothing as rails.
pub(super) static ADDRESSES: LeftAlone = LeftAlone::new();

/// Pairs of addresses by which sources were to be reached, their ports, and until when each is left alone.
#[derive(Debug)]
pub(super) struct LeftAlone(Mutex<Vec<(Pair, u16, Instant)>>);

impl LeftAlone {
    const fn new() -> Self {
        Self(Mutex::new(Vec::new()))
    }

    /// Notes that a pair is to be left alone for `length`; with no length, that it is as good as any other.
    pub(super) fn leave(&self, pair: Pair, port: u16, length: Duration) {
        // A forked child may find it locked for ever.
        if let Ok(mut all) = self.0.try_lock()
            && let Some(until) = Instant::now().checked_add(length)
        {
            all.retain(|one| (one.0, one.1) != (pair, port) && one.2 > Instant::now());
            if !length.is_zero() {
                // The oldest are forgotten.
                let over = (all.len() + 1).saturating_sub(MOST_LEFT_ALONE);
                all.drain(..over);
                all.push((pair, port, until));
            }
        }
    }

    /// For how long a pair is to be left alone still.
    pub(super) fn remaining(&self, pair: Pair, port: u16) -> Duration {
        let all = self.0.try_lock().ok();
        let until = all.and_then(|all| all.iter().find(|one| (one.0, one.1) == (pair, port)).map(|one| one.2));
        until.map_or(Duration::ZERO, |until| until.saturating_duration_since(Instant::now()))
    }
}

/// The addresses of one source.
#[derive(Debug)]
pub(super) struct Targets {
    port: u16,
    cards: Cards,
    state: Mutex<State>,
    /// Whether any of them has failed.
    has_failed: AtomicBool,
}

#[derive(Debug, Default)]
struct State {
    /// The addresses of the host, once they are known.
    host: Option<Vec<SocketAddr>>,
    /// What the source has named in its answers.
    named: Vec<IpAddr>,
    /// The address of the first connection.
    good: Option<IpAddr>,
    records: BTreeMap<IpAddr, Record>,
}

/// How an address has done.
#[derive(Clone, Copy, Debug, Default)]
struct Record {
    /// How often in a row it has failed.
    failures: u32,
    /// Whether the source has shown there that it has nothing to say yet.
    is_waiting: bool,
    /// Whether something else answers there.
    is_foreign: bool,
}

impl Targets {
    /// Those of a source at `port`, whose URL names `cards`, and `host` if that is an address.
    pub(super) fn new(port: u16, host: Option<IpAddr>, cards: Cards) -> Self {
        // A loopback address is of this machine, whoever names it.
        let is_usable = |card: &IpAddr| card.is_loopback() == host.is_some_and(|host| host.is_loopback());
        let cards = Cards {
            first: cards.first.filter(is_usable),
            others: cards.others.into_iter().filter(is_usable).collect(),
        };
        let host = host.map(|host| vec![SocketAddr::from((host, port))]);
        let state = Mutex::new(State { host, ..State::default() });
        Self { port, cards, state, has_failed: AtomicBool::new(false) }
    }

    /// Whether the addresses of the host are known.
    pub(super) fn knows_host(&self) -> bool {
        self.state.locked().host.is_some()
    }

    /// Notes the addresses of the host.
    pub(super) fn learn_host(&self, addresses: Vec<SocketAddr>) {
        self.state.locked().host.get_or_insert(addresses);
    }

    /// Notes addresses that the source has named in an answer.
    pub(super) fn learn_named(&self, addresses: &[IpAddr]) {
        self.state.locked().named = addresses.to_vec();
    }

    /// Whether `address` is one of the host's.
    pub(super) fn is_host(&self, address: IpAddr) -> bool {
        self.state.locked().host.iter().flatten().any(|host| key(host) == address)
    }

    /// The preferred card, unless it has failed, in this receive or a moment ago in another one.
    pub(super) fn preferred(&self) -> Option<SocketAddr> {
        let first = self.cards.first?;
        let record = self.state.locked().record(first);
        (record.failures == 0 && !record.is_foreign && !self.is_left_alone(first)).then(|| (first, self.port).into())
    }

    /// All that are known, in the order in which they are to be tried. Those at which something else answers are left out,
    /// unless there are no others.
    pub(super) fn in_order(&self) -> Vec<SocketAddr> {
        let state = self.state.locked();
        let mut found = self.all(&state);
        found.sort_by_key(|address| {
            let record = state.record(key(address));
            (record.failures, self.is_left_alone(key(address)), state.good != Some(key(address)))
        });
        found
    }

    /// Whether there are several, a host that was not looked up counting as one.
    pub(super) fn are_several(&self) -> bool {
        let state = self.state.locked();
        self.all(&state).len() + usize::from(state.host.is_none()) > 1
    }

    /// Whether there is one that has not failed, a host that was not looked up counting as one.
    pub(super) fn has_untried(&self) -> bool {
        let state = self.state.locked();
        let is_untried = |address: &SocketAddr| {
            let record = state.record(key(address));
            record.failures == 0 && !record.is_foreign
        };
        state.host.is_none() || self.all(&state).iter().any(is_untried)
    }

    /// How long an answer of `address` is waited for before another one is tried: `first` if it has not failed yet, `most`
    /// if the source has shown there that it has nothing to say. `None` where there is no other.
    pub(super) fn patience(&self, address: IpAddr, first: Duration, most: Duration) -> Option<Duration> {
        if !self.are_several() {
            return None;
        }
        let record = self.state.locked().record(address);
        Some(if record.is_waiting { most } else { first.saturating_mul(1 << record.failures.min(10)).min(most) })
    }

    /// Notes that a connection was made to `address`, and none to those in `beaten`, which were tried before.
    pub(super) fn note_connected(&self, address: IpAddr, beaten: &[SocketAddr]) {
        let mut state = self.state.locked();
        state.good.get_or_insert(address);
        for other in beaten {
            self.note_failed(&mut state, key(other));
        }
    }

    /// Notes that `address` has let a connection be made, and is silent.
    pub(super) fn note_silent(&self, address: IpAddr) {
        self.note_failed(&mut self.state.locked(), address);
    }

    /// Notes `error`, with which a request at `address` has ended.
    pub(super) fn note_error(&self, address: IpAddr, error: &Error) {
        let mut state = self.state.locked();
        match error.kind() {
            ErrorKind::Cancelled | ErrorKind::Changed | ErrorKind::System | ErrorKind::Invalid => {}
            ErrorKind::Status(_) | ErrorKind::Foreign | ErrorKind::Unproven => {
                state.records.entry(address).or_default().is_foreign = true;
            }
            _ => self.note_failed(&mut state, address),
        }
    }

    /// Notes that the source at `address` is there and has nothing to say yet: that is where it is asked again.
    pub(super) fn note_waiting(&self, address: IpAddr) {
        let mut state = self.state.locked();
        state.good = Some(address);
        let record = state.records.entry(address).or_default();
        (record.failures, record.is_waiting) = (0, true);
    }

    /// Notes that `address` has answered.
    pub(super) fn note_answered(&self, address: IpAddr) {
        if self.has_failed.load(Ordering::Relaxed) {
            let mut state = self.state.locked();
            state.records.insert(address, Record::default());
            ADDRESSES.leave((None, address), self.port, Duration::ZERO);
            for (&other, record) in &state.records {
                if record.failures > 0 && !self.is_left_alone(other) {
                    ADDRESSES.leave((None, other), self.port, TRIED_LAST);
                }
            }
        }
    }

    fn is_left_alone(&self, address: IpAddr) -> bool {
        !ADDRESSES.remaining((None, address), self.port).is_zero()
    }

    fn note_failed(&self, state: &mut State, address: IpAddr) {
        self.has_failed.store(true, Ordering::Relaxed);
        let record = state.records.entry(address).or_default();
        record.failures = record.failures.saturating_add(1);
        record.is_waiting = false;
    }

    /// All that are known, each once, in the order of their names.
    fn all(&self, state: &State) -> Vec<SocketAddr> {
        let card = |&address: &IpAddr| SocketAddr::from((address, self.port));
        let mut found: Vec<SocketAddr> = Vec::new();
        let cards = (self.cards.first.iter(), self.cards.others.iter().chain(&state.named));
        let hosts = state.host.iter().flatten().copied();
        for address in cards.0.map(card).chain(hosts).chain(cards.1.map(card)) {
            if !found.iter().any(|known| key(known) == key(&address)) {
                found.push(address);
            }
        }
        let is_foreign = |address: &SocketAddr| state.record(key(address)).is_foreign;
        if !found.iter().all(is_foreign) {
            found.retain(|address| !is_foreign(address));
        }
        found
    }
}

impl State {
    fn record(&self, address: IpAddr) -> Record {
        self.records.get(&address).copied().unwrap_or_default()
    }
}

/// By which records are found.
fn key(address: &SocketAddr) -> IpAddr {
    address.ip().to_canonical()
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicU16;

    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    fn ip(last: u8) -> IpAddr {
        [10, 0, 0, last].into()
    }

    /// Those of a source at a port of its own: what has failed is remembered by the port.
    fn targets(host: Option<u8>, first: Option<u8>, others: &[u8]) -> Targets {
        static PORT: AtomicU16 = AtomicU16::new(1);
        at(PORT.fetch_add(1, Ordering::Relaxed), host, first, others)
    }

    fn at(port: u16, host: Option<u8>, first: Option<u8>, others: &[u8]) -> Targets {
        let cards = Cards { first: first.map(ip), others: others.iter().copied().map(ip).collect() };
        Targets::new(port, host.map(ip), cards)
    }

    fn order(targets: &Targets) -> Vec<IpAddr> {
        targets.in_order().iter().map(SocketAddr::ip).collect()
    }

    #[test]
    fn the_preferred_card_comes_first_then_the_host_then_the_others() {
        let all = targets(Some(1), Some(3), &[1, 2, 4]);
        assert_eq!(order(&all), [3, 1, 2, 4].map(ip));
        let by_name = targets(None, Some(3), &[2]);
        assert!(!by_name.knows_host() && by_name.are_several());
        by_name.learn_host(vec![(ip(1), 7).into(), (ip(2), 7).into()]);
        assert_eq!(order(&by_name), [3, 1, 2].map(ip));
        by_name.learn_named(&[ip(9), ip(3)]);
        assert_eq!(order(&by_name), [3, 1, 2, 9].map(ip));
    }

    #[test]
    fn one_that_is_silent_comes_last_and_is_waited_for_twice_as_long() {
        let all = targets(Some(1), Some(2), &[3]);
        all.note_connected(ip(2), &[]);
        for (silent, next) in [(2, 1), (1, 3), (3, 2)] {
            assert_eq!(order(&all)[0], ip(silent));
            all.note_silent(ip(silent));
            assert_eq!(order(&all)[0], ip(next));
        }
        assert!(!all.has_untried());
        assert_eq!(all.patience(ip(2), SECOND, 15 * SECOND), Some(2 * SECOND));
        (0..20).for_each(|_| all.note_silent(ip(2)));
        assert_eq!(all.patience(ip(2), SECOND, 15 * SECOND), Some(15 * SECOND));
        all.note_waiting(ip(1));
        assert_eq!((order(&all)[0], all.patience(ip(1), SECOND, 15 * SECOND)), (ip(1), Some(15 * SECOND)));
        all.note_silent(ip(1));
        assert_eq!(all.patience(ip(1), SECOND, 15 * SECOND), Some(2 * SECOND));
        all.note_answered(ip(2));
        assert_eq!(all.patience(ip(2), SECOND, 15 * SECOND), Some(SECOND));
        assert_eq!(targets(Some(1), Some(1), &[]).patience(ip(1), SECOND, SECOND), None);
    }

    #[test]
    fn what_has_failed_is_tried_last_in_the_next_receive_until_it_answers() {
        let first = targets(Some(1), Some(2), &[3]);
        first.note_connected(ip(2), &[]);
        first.note_silent(ip(2));
        let again = || at(first.port, Some(1), Some(2), &[3]);
        assert!(again().preferred().is_some(), "nothing has shown that another address is better");
        first.note_answered(ip(1));
        let second = again();
        assert_eq!((order(&second), second.preferred()), ([1, 3, 2].map(ip).to_vec(), None));
        assert!(second.has_untried() && second.patience(ip(2), SECOND, SECOND) == Some(SECOND));
        assert_eq!(order(&targets(Some(1), Some(2), &[3]))[0], ip(2), "another source");
        // It is the only one that answers now.
        second.note_silent(ip(1));
        second.note_silent(ip(3));
        assert_eq!(order(&second)[0], ip(2));
        second.note_answered(ip(2));
        assert_eq!(order(&again()), [2, 1, 3].map(ip));
    }

    #[test]
    fn what_answers_as_another_program_is_left_out_unless_there_is_nothing_else() {
        let both = targets(Some(1), Some(2), &[]);
        let refused = Error::new(ErrorKind::Status(404), "not found");
        both.note_error(ip(2), &refused);
        assert_eq!(order(&both), [ip(1)]);
        assert!(both.has_untried() && !both.are_several() && both.preferred().is_none());
        both.note_error(ip(1), &refused);
        assert_eq!(order(&both), [2, 1].map(ip));
        assert!(!both.has_untried());
    }

    #[test]
    fn connections_stay_with_the_first_address_until_it_fails() {
        let all = targets(Some(1), None, &[2, 3]);
        all.note_connected(ip(2), &[]);
        all.note_connected(ip(1), &[]);
        assert_eq!(order(&all), [2, 1, 3].map(ip));
        all.note_silent(ip(2));
        assert_eq!(order(&all), [1, 3, 2].map(ip));
        // Those that were tried in vain before come behind.
        all.note_connected(ip(3), &[(ip(1), 7).into()]);
        assert_eq!(order(&all)[0], ip(3));
    }

    #[test]
    fn loopback_addresses_are_named_by_loopback_hosts_alone() {
        let loopback = |last: u8| IpAddr::from([127, 0, 0, last]);
        let cards = Cards { first: Some(loopback(2)), others: vec![ip(1), loopback(3)] };
        let found = |host: Option<IpAddr>| order(&Targets::new(7, host, cards.clone()));
        assert_eq!(found(Some(loopback(1))), [2, 1, 3].map(loopback));
        assert_eq!(found(Some(ip(9))), [9, 1].map(ip));
        assert_eq!(found(None), [ip(1)]);
    }

    #[test]
    fn the_latest_are_remembered_and_a_success_makes_forget_none_of_them() {
        let all = LeftAlone::new();
        let pair = |number: usize| (None, [10, 0, 0, u8::try_from(number).unwrap()].into());
        let known = |all: &LeftAlone| {
            (0..=MOST_LEFT_ALONE).filter(|&one| !all.remaining(pair(one), 1).is_zero()).collect::<Vec<_>>()
        };
        (0..=MOST_LEFT_ALONE).for_each(|number| all.leave(pair(number), 1, Duration::from_mins(1)));
        assert_eq!(known(&all), (1..=MOST_LEFT_ALONE).collect::<Vec<_>>());
        all.leave(pair(0), 1, Duration::ZERO);
        assert_eq!(known(&all).len(), MOST_LEFT_ALONE);
        all.leave(pair(7), 1, Duration::ZERO);
        assert!(known(&all).len() == MOST_LEFT_ALONE - 1 && !known(&all).contains(&7));
    }
}
