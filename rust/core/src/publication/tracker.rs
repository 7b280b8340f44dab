//! The tracker of a publication: it exists from the first question of a member on.
//!
//! A member is present for as long as the connection by which it last asked is open: so the end of a receive is noticed
//! at once, however it ends, without a message of its own.
//!
//! Members that want all blocks are one swarm; of those that want a part, those that want the same. What one of them
//! fetches all others of its swarm need, so shares, grants and neighbours mean the same for each.

use std::fmt;
use std::net::SocketAddr;
use std::sync::{Mutex, Weak};
use std::time::{Duration, Instant};

use tensorferry_wire::digest::BLOCK_SIZE;
use tensorferry_wire::swarm::{Answer, Ask};

use super::{ConnectionHandle, Publication};
use crate::error::Error;
use crate::swarm::{Handout, Member};
use crate::sync::Locked;

/// Swarms of parts at a time. A member of one more is granted all it needs, and hears of nobody.
const MOST_PARTS: usize = 64;
/// When such a member asks again, in milliseconds.
const ASK_LATER_MS: u64 = 1000;

/// What was handed out of one publication, to each of its swarms.
#[derive(Default)]
pub(super) struct Tracker(Mutex<Vec<Tracked>>);

struct Tracked {
    /// Which part its members want; `None`: all blocks.
    part: Option<u64>,
    began: Instant,
    handout: Handout,
    /// The connections by which members have last asked, and the numbers of these.
    connections: Vec<(u32, Member, Weak<ConnectionHandle>)>,
}

impl Tracked {
    /// The first question of its first member names all that this lacks, or fetches already.
    fn new(blocks: u64, ask: &Ask) -> Result<Self, Error> {
        let named = ask.need.iter().chain(&ask.took).map(|&(first, end)| end.min(blocks).saturating_sub(first));
        let wanted = if ask.part.is_some() { named.sum() } else { blocks };
        let handout = Handout::new(blocks)?.of_part(wanted);
        Ok(Self { part: ask.part, began: Instant::now(), handout, connections: Vec::new() })
    }

    /// Notes that `member` has just asked by `connection`, if it has a place. Connections are as many as members, so that
    /// nobody fills memory by joining under ever new names.
    fn note(&mut self, member: &Member, connection: &Weak<ConnectionHandle>) {
        let handout = &self.handout;
        let number = handout.number_of(member);
        self.connections.retain(|(known, _, _)| Some(*known) != number && handout.has_number(*known));
        self.connections.extend(number.map(|number| (number, member.clone(), Weak::clone(connection))));
    }

    /// Whether all who have asked are gone.
    fn is_deserted(&self) -> bool {
        self.connections.iter().all(|(_, _, connection)| connection.strong_count() == 0)
    }

    /// Notes who has gone; returns the time.
    fn look(&mut self) -> Duration {
        let now = self.began.elapsed();
        let gone = self.connections.extract_if(.., |(_, _, connection)| connection.strong_count() == 0);
        for (_, member, _) in gone {
            self.handout.forget(&member);
        }
        now
    }
}

impl fmt::Debug for Tracker {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Tracker(..)")
    }
}

impl Publication {
    /// The members that are known, and how long ago each has asked.
    pub(crate) fn members(&self) -> Vec<(SocketAddr, Duration)> {
        let mut tracker = self.tracker.0.locked();
        let mut members = Vec::new();
        for known in &mut *tracker {
            let now = known.look();
            let present = known.handout.present(now);
            members.extend(present.map(|(member, ago)| ((member.ip, member.relay.port).into(), ago)));
        }
        members
    }

    /// Answers what `member` asks by `connection`; `url` says where other members are
    /// reached. Says too whether the digests of all blocks should be computed for it and others. A receiver without
    /// others compares as if there were no swarm.
    ///
    /// # Errors
    /// When there is no memory to keep track.
    pub(crate) fn track(
        &self,
        member: &Member,
        ask: &Ask,
        connection: &Weak<ConnectionHandle>,
        url: impl Fn(&Member) -> String,
    ) -> Result<(Answer, bool), Error> {
        let mut tracker = self.tracker.0.locked();
        // Swarms of parts come and go with their members.
        tracker.retain(|known| known.part.is_none() || known.part == ask.part || !known.is_deserted());
        let known = match tracker.iter().position(|known| known.part == ask.part) {
            Some(index) => &mut tracker[index],
            None if ask.part.is_some() && tracker.len() >= MOST_PARTS => {
                return Ok((Answer { grant: ask.need.clone(), wait_ms: ASK_LATER_MS, ..Answer::default() }, false));
            }
            None => {
                tracker.push(Tracked::new(self.payload_len().div_ceil(BLOCK_SIZE), ask)?);
                let last = tracker.len() - 1;
                &mut tracker[last]
            }
        };
        let now = known.look();
        let handout = &mut known.handout;
        let most = handout.most();
        handout.note_coming(now, member, &ask.coming);
        let told = handout.ask(now, member, &ask.need, most);
        let wait_ms = u64::try_from(told.wait.as_millis()).unwrap_or(u64::MAX);
        let peers = told.neighbours.into_iter().map(url).collect();
        let mut answer = Answer { peers, place: told.place, grant: told.grant, wait_ms, ..Answer::default() };
        handout.note_taken(now, member, &ask.took);
        answer.has_table = self.proven().is_some();
        let wants_table = !answer.has_table && handout.members() > 1;
        known.note(member, connection);
        Ok((answer, wants_table))
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use tensorferry_wire::swarm::RelayAddress;

    use super::super::fixtures::publication;
    use super::*;
    use crate::Stability;

    #[test]
    fn who_joins_under_ever_new_names_fills_no_memory() {
        let publication = publication(Stability::Private, vec![1]);
        let (handle, mut asked) = (Arc::new(ConnectionHandle::default()), 0_u32);
        let mut ask = |part| {
            asked += 1;
            let relay = RelayAddress { port: 1, token: format!("{asked:032x}"), fingerprint: None };
            let ask = Ask { relay, need: vec![(0, 1)], took: vec![], coming: vec![], part };
            let member = Member { ip: [10, 0, 0, 1].into(), relay: ask.relay.clone() };
            publication.track(&member, &ask, &Arc::downgrade(&handle), |_| String::new()).unwrap();
        };
        for part in [None, Some(1)] {
            (0..500).for_each(|_| ask(part));
        }
        (0..200).for_each(|part| ask(Some(part)));
        let tracker = publication.tracker.0.lock().unwrap();
        assert_eq!(tracker.len(), MOST_PARTS);
        for tracked in &*tracker {
            assert_eq!(tracked.connections.len(), tracked.handout.members());
        }
    }
}
