//! Who sent what of a receive: the bytes of each source and each relay.

use std::collections::BTreeMap;

use super::Remote;
use super::transfer::PlannedFetch;
use crate::payload::blocks_of;
use crate::report::Report;

impl Remote {
    /// Adds to `report` what each source and relay has sent of the blocks of `fetch`; a block that came more than once
    /// counts for its last sender.
    pub(super) fn note_senders(&self, fetch: &PlannedFetch<'_>, report: &mut Report) {
        let mut sent: BTreeMap<usize, u64> = BTreeMap::new();
        for block in blocks_of(fetch.missing) {
            let (start, end) = fetch.plan.block_bounds(block);
            *sent.entry(fetch.received.source_of(block)).or_default() += end - start;
        }
        for (origin, bytes) in sent {
            let source = self.sources.get(origin).map(|source| source.url.authority().to_owned());
            if let Some(sender) = source.or_else(|| fetch.received.relay(origin)) {
                *report.senders.entry(sender).or_default() += bytes;
            }
        }
    }
}
