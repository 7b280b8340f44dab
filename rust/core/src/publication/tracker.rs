//! The tracker of a publication: it exists from the first question of a member on.

use std::fmt;
use std::net::SocketAddr;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use tensorferry_wire::digest::BLOCK_SIZE;
use tensorferry_wire::swarm::{Answer, Ask};

use super::Publication;
use crate::error::Error;
use crate::swarm::{Handout, Member};

/// What was handed out of one publication.
#[derive(Default)]
pub(super) struct Tracker(Mutex<Option<(Instant, Handout)>>);

impl fmt::Debug for Tracker {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Tracker(..)")
    }
}

impl Publication {
    /// The members that are known, and how long ago each has asked.
    pub(crate) fn members(&self) -> Vec<(SocketAddr, Duration)> {
        let tracker = self.tracker.0.lock().unwrap_or_else(PoisonError::into_inner);
        let Some((began, handout)) = &*tracker else { return Vec::new() };
        handout.present(began.elapsed()).map(|(member, ago)| ((member.ip, member.relay.port).into(), ago)).collect()
    }

    /// Answers what `member` asks; says too whether the digests of all blocks should be computed for it and others. A
    /// receiver without others compares as if there were no swarm.
    ///
    /// # Errors
    /// When there is no memory to keep track.
    pub(crate) fn track(
        &self,
        member: &Member,
        ask: &Ask,
        url: impl Fn(&Member) -> String,
    ) -> Result<(Answer, bool), Error> {
        let mut tracker = self.tracker.0.lock().unwrap_or_else(PoisonError::into_inner);
        let (began, handout) = match &mut *tracker {
            Some(known) => known,
            None => tracker.insert((Instant::now(), Handout::new(self.payload_len().div_ceil(BLOCK_SIZE))?)),
        };
        let (now, wanted_back) = (began.elapsed(), self.is_wanted_back());
        if ask.standing.leaves {
            let is_free = handout.leave(now, member, wanted_back);
            return Ok((Answer { is_free, ..Answer::default() }, false));
        }
        let most = handout.most();
        let told = handout.ask(now, member, &ask.need, most);
        let wait_ms = u64::try_from(told.wait.as_millis()).unwrap_or(u64::MAX);
        let peers = told.neighbours.into_iter().map(url).collect();
        let mut answer = Answer { peers, grant: told.grant, wait_ms, ..Answer::default() };
        answer.is_free = handout.stand(now, member, ask.standing, wanted_back);
        answer.has_table = self.proven().is_some();
        let wants_table = !answer.has_table && handout.members() > 1;
        Ok((answer, wants_table))
    }
}
