//! What operators see of a server: what it counts, what is under way, and both as a text and as a page.

pub(super) mod exposition;
pub(super) mod figures;
pub(super) mod metrics;
pub(super) mod program;
pub(super) mod receive;
pub(super) mod receives;
pub(super) mod status;
pub(super) mod strangers;
pub(super) mod transfers;
