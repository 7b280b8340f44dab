//! What a receiver does: it opens a source (`remote`) or a file (`stored`), fetches all of it at once, in waves
//! (`staged`) or by the slice (`slices`), reads what is in it (`entries`), and makes a state of its tree (`tree`).
//! Whole files are written and checked in `files`, and handed out in `parts`; what is read is in a `place`; `answer` reads from sources that speak another format.

pub(crate) mod answer;
pub(crate) mod entries;
pub(crate) mod files;
pub(crate) mod parts;
pub(crate) mod place;
pub(crate) mod progress;
pub(crate) mod remote;
pub(crate) mod slices;
pub(crate) mod staged;
pub(crate) mod stored;
pub(crate) mod tree;
