//! The tracker of a publication: it exists from the first question of a member on.

use std::fmt;
use std::net::SocketAddr;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use tensorferry_wire::digest::BLOCK_SIZE;
use tensorferry_wire::swarm::Answer;

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

    /// Answers `member`, which needs the blocks in `need`.
    ///
    /// # Errors
    /// When there is no memory to keep track.
    pub(crate) fn track(
        &self,
        member: &Member,
        need: &[(u64, u64)],
        url: impl Fn(&Member) -> String,
    ) -> Result<Answer, Error> {
        let mut tracker = self.tracker.0.lock().unwrap_or_else(PoisonError::into_inner);
        let (began, handout) = match &mut *tracker {
            Some(known) => known,
            None => tracker.insert((Instant::now(), Handout::new(self.payload_len().div_ceil(BLOCK_SIZE))?)),
        };
        let most = handout.most();
        let told = handout.ask(began.elapsed(), member, need, most);
        let wait_ms = u64::try_from(told.wait.as_millis()).unwrap_or(u64::MAX);
        Ok(Answer { peers: told.neighbours.into_iter().map(url).collect(), grant: told.grant, wait_ms })
    }
}
