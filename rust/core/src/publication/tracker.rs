//! The tracker of a publication: it exists from the first question of a member on.
//!
//! A member is present for as long as the connection by which it last asked is open: so the end of a receive is noticed
//! at once, however it ends, without a message of its own.

use std::fmt;
use std::net::SocketAddr;
use std::sync::{Mutex, PoisonError, Weak};
use std::time::{Duration, Instant};

use tensorferry_wire::digest::BLOCK_SIZE;
use tensorferry_wire::swarm::{Answer, Ask};

use super::{ConnectionHandle, Publication};
use crate::error::Error;
use crate::swarm::{Handout, Member};

/// What was handed out of one publication.
#[derive(Default)]
pub(super) struct Tracker(Mutex<Option<Tracked>>);

struct Tracked {
    began: Instant,
    handout: Handout,
    /// The connections by which members have last asked.
    connections: Vec<(Member, Weak<ConnectionHandle>)>,
}

impl Tracked {
    fn new(blocks: u64, zone: Option<&str>) -> Result<Self, Error> {
        Ok(Self { began: Instant::now(), handout: Handout::new(blocks)?.in_zone(zone), connections: Vec::new() })
    }

    /// Notes that `member` has just asked by `connection`, and who has gone meanwhile; returns the time.
    fn note(&mut self, member: &Member, connection: &Weak<ConnectionHandle>) -> Duration {
        self.connections.retain(|(known, _)| known != member);
        self.connections.push((member.clone(), Weak::clone(connection)));
        self.look()
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
        let Some(known) = &mut *tracker else { return Vec::new() };
        let now = known.look();
        known.handout.present(now).map(|(member, ago)| ((member.ip, member.relay.port).into(), ago)).collect()
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
        let known = match &mut *tracker {
            Some(known) => known,
            None => tracker.insert(Tracked::new(self.payload_len().div_ceil(BLOCK_SIZE), zone)?),
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
