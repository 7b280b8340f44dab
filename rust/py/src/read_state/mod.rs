//! Reading a state: what is asked of its tensors (`getters`, `specs`), those that are no rows (`views`), and the pickle
//! of all leaves that are no rows (`objects`, `plain_objects`, `pickle`).

pub(crate) mod getters;
pub(crate) mod objects;
pub(crate) mod pickle;
pub(crate) mod plain_objects;
pub(crate) mod specs;
pub(crate) mod views;
