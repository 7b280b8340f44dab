//! What a request for a step finds in a store; the table in `store.rs` has it in short.

use std::sync::Arc;
use std::time::Duration;

use tensorferry_wire::request;

use super::store::StoreState;
use super::{ConnectionHandle, Lease, Publication, Store};

/// How long a request for a step ahead of the one served waits before it is refused.
const AHEAD_GRACE: Duration = Duration::from_secs(1);

/// The result of a request for a step.
pub(crate) enum Lookup {
    Found(Arc<Lease>),
    WrongStep(Option<i64>),
    Nothing,
    /// The request names a snapshot that is not served and never will be again.
    Gone,
    Closed,
}

/// A request as the store sees it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Asked<'a> {
    /// `None` asks for whatever step is served.
    pub(crate) step: Option<i64>,
    /// The entity tags it names, one of which the answer must have; `None` where any will do.
    pub(crate) named: Option<&'a str>,
    /// Whether it is one of a receive, which may take more of them.
    pub(crate) receives: bool,
}

impl Store {
    /// Finds the snapshot that `asked` requests. A request that names a snapshot gets it while it is served, drained or
    /// lingers, and otherwise learns at once that it is gone, because entity tags are never reused. Any other request
    /// waits until the gate is open. A request for a step ahead of the one served waits a moment before it is refused:
    /// a peer that is faster than the source may send it before the source has withdrawn the step before.
    pub(crate) async fn lookup(&self, asked: Asked<'_>, cut: &Arc<ConnectionHandle>) -> Lookup {
        let grace = tokio::time::Instant::now() + AHEAD_GRACE;
        loop {
            let mut ahead = false;
            let changed = self.changed.notified();
            tokio::pin!(changed);
            changed.as_mut().enable();
            {
                let state = self.state();
                if state.closed {
                    return Lookup::Closed;
                }
                if let Some(named) = asked.named {
                    return state.named(named, asked, cut);
                }
                if state.allowed {
                    ahead = asked.step.is_some() && state.step < asked.step && tokio::time::Instant::now() < grace;
                    if asked.step.is_some_and(|step| state.step != Some(step)) && !ahead {
                        return Lookup::WrongStep(state.step);
                    }
                    if !ahead {
                        let Some(current) = &state.current else { return Lookup::Nothing };
                        if let Some(lease) = Lease::take(current, cut, asked.receives) {
                            return Lookup::Found(lease);
                        }
                    }
                }
            }
            if ahead {
                // Either the store changes or the grace is over: both lead to another look.
                let _ = tokio::time::timeout_at(grace, changed).await;
            } else {
                changed.await;
            }
        }
    }
}

impl StoreState {
    /// The result of a request that names `tags`.
    fn named(&self, tags: &str, asked: Asked<'_>, cut: &Arc<ConnectionHandle>) -> Lookup {
        let matches = |publication: &Publication| request::etag_matches_strong(tags, publication.etag());
        let former = || self.draining.iter().chain(&self.lingering);
        let found = match &self.current {
            Some(current) if matches(current) && asked.step.is_some_and(|step| self.step != Some(step)) => {
                return Lookup::WrongStep(self.step);
            }
            Some(current) if matches(current) => Some(current),
            _ => former().find(|f| f.step == asked.step && matches(&f.publication)).map(|f| &f.publication),
        };
        found.and_then(|publication| Lease::take(publication, cut, asked.receives)).map_or(Lookup::Gone, Lookup::Found)
    }
}
