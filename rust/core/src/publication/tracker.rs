//! The tracker of a publication: it exists from the first question of a member on.
//!
//! A member is present for as long as the connection by which it last asked is open: so the end of a receive is noticed
//! at once, however it ends, without a message of its own.
//!
//! Members that want all blocks are one swarm; of those that want a part, those that want the same. What one of them
//! fetches all others of its swarm need, so shares, grants and neighbours mean the same for each.

use std::fmt;
use std::net::SocketAddr;
use std::sync::{Mutex, PoisonError, Weak};
use std::time::{Duration, Instant};

use tensorferry_wire::digest::BLOCK_SIZE;
use tensorferry_wire::swarm::{Answer, Ask};

use super::{ConnectionHandle, Publication};
use crate::error::Error;
use crate::swarm::{Handout, Member};

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
    /// The connections by which members have last asked.
    connections: Vec<(Member, Weak<ConnectionHandle>)>,
}

impl Tracked {
    /// The first question of its first member names all that this lacks, or fetches already.
    fn new(blocks: u64, zone: Option<&str>, ask: &Ask) -> Result<Self, Error> {
        let named = ask.need.iter().chain(&ask.took).map(|&(first, end)| end.min(blocks).saturating_sub(first));
        let wanted = if ask.part.is_some() { named.sum() } else { blocks };
        let handout = Handout::new(blocks)?.of_part(wanted).in_zone(zone);
        Ok(Self { part: ask.part, began: Instant::now(), handout, connections: Vec::new() })
    }

    /// Notes that `member` has just asked by `connection`, and who has gone meanwhile; returns the time.
    fn note(&mut self, member: &Member, connection: &Weak<ConnectionHandle>) -> Duration {
        self.connections.retain(|(known, _)| known != member);
        self.connections.push((member.clone(), Weak::clone(connection)));
        self.look()
    }

    /// Whether all who have asked are gone.
    fn is_deserted(&self) -> bool {
        self.connections.iter().all(|(_, connection)| connection.strong_count() == 0)
    }

    /// Notes who has gone; returns the time.
    fn look(&mut self) -> Duration {
        let now = self.began.elapsed();
        let gone = self.connections.extract_if(.., |(_, connection)| connection.strong_count() == 0);
        for (member, _) in gone {
            self.handout.note_gone(&member);
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
        let mut tracker = self.tracker.0.lock().unwrap_or_else(PoisonError::into_inner);
        let mut members = Vec::new();
        for known in &mut *tracker {
            let now = known.look();
            let present = known.handout.present(now);
            members.extend(present.map(|(member, ago)| ((member.ip, member.relay.port).into(), ago)));
        }
        members
    }

    /// Answers what `member` asks by `connection`, the source being in `zone`; says too whether the digests of all blocks should be computed for it and others. A
    /// receiver without others compares as if there were no swarm.
    ///
    /// # Errors
    /// When there is no memory to keep track.
    pub(crate) fn track(
        &self,
        member: &Member,
        ask: &Ask,
        zone: Option<&str>,
        connection: &Weak<ConnectionHandle>,
        url: impl Fn(&Member) -> String,
    ) -> Result<(Answer, bool), Error> {
        let mut tracker = self.tracker.0.lock().unwrap_or_else(PoisonError::into_inner);
        // Swarms of parts come and go with their members.
        tracker.retain(|known| known.part.is_none() || known.part == ask.part || !known.is_deserted());
        let known = match tracker.iter().position(|known| known.part == ask.part) {
            Some(index) => &mut tracker[index],
            None if ask.part.is_some() && tracker.len() >= MOST_PARTS => {
                let grant = if ask.standing.leaves { Vec::new() } else { ask.need.clone() };
                return Ok((Answer { grant, wait_ms: ASK_LATER_MS, ..Answer::default() }, false));
            }
            None => {
                tracker.push(Tracked::new(self.payload_len().div_ceil(BLOCK_SIZE), zone, ask)?);
                let last = tracker.len() - 1;
                &mut tracker[last]
            }
        };
        let (now, wanted_back) = (known.note(member, connection), self.is_wanted_back());
        let handout = &mut known.handout;
        if ask.standing.leaves {
            let is_free = handout.leave(now, member, wanted_back);
            return Ok((Answer { is_free, ..Answer::default() }, false));
        }
        let most = handout.most();
        let is_ready = ask.standing.has_table && ask.standing.is_covered;
        // Of memory that is wanted back, nothing is sent to those that can have it from others.
        let need = if wanted_back && is_ready { &[] } else { &ask.need[..] };
        let told = handout.ask(now, member, need, most);
        let wait = if is_ready { told.again } else { told.wait };
        let wait_ms = u64::try_from(wait.as_millis()).unwrap_or(u64::MAX);
        let peers = told.neighbours.into_iter().map(url).collect();
        let mut answer = Answer { peers, place: told.place, grant: told.grant, wait_ms, ..Answer::default() };
        handout.note_taken(now, member, &ask.took);
        answer.is_free = handout.stand(now, member, ask.standing, wanted_back);
        answer.has_table = self.proven().is_some();
        let wants_table = !answer.has_table && handout.members() > 1;
        Ok((answer, wants_table))
    }
}
