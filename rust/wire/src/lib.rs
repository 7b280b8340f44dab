//! The container, the manifest and the protocol of tensorferry.
//!
//! Everything here is a pure function of bytes: no I/O, no clocks, no Python, no `unsafe`. The engine and the binding
//! pass headers, manifests, tables of digests and the fields of requests to this crate before they use anything that a
//! peer or a file says there. The result is either a value whose documented guarantees hold or a typed error: parsing
//! never panics, and no allocation is larger than a small multiple of the input. The fuzz targets in `rust/fuzz` and
//! the tests named `hostile_*` look for inputs that break this.
//!
//! - [`container`]: the safetensors header at the start of every checkpoint.
//! - [`dtype`]: the element types that such a header can name.
//! - [`manifest`]: the tree of the state, carried as the container's first entry.
//! - [`index`]: where each part of each tensor of a checkpoint is stored.
//! - [`json`]: the parser for the two JSON documents, header and manifest.
//! - [`distinct`]: the search for names and keys that occur twice.
//! - [`digest`]: checksums of the payload, block by block.
//! - [`proof`]: proofs that a peer knows the shared secret.
//! - [`rails`]: the addresses of a source besides the one in its URL.
//! - [`request`]: paths, queries, ranges and entity tags of HTTP requests and answers.
//! - [`swarm`]: what members of a swarm and its tracker tell one another.
//!
//! ```
//! use tensorferry_wire::container::{Entry, Header};
//! use tensorferry_wire::dtype::Dtype;
//!
//! let shape = [2, 3].into_iter().collect();
//! let weight = Entry { name: "weight".into(), dtype: Dtype::F32, shape, start: 0, end: 24 };
//! let header = Header::new(vec![("format".into(), "pt".into())], vec![weight])?;
//! let bytes = header.encode(64)?;
//! assert_eq!(bytes.len() % 64, 0);
//! assert_eq!(Header::decode(&bytes)?, header);
//! # Ok::<(), tensorferry_wire::container::HeaderError>(())
//! ```
#![forbid(unsafe_code)]

pub mod container;
pub mod digest;
pub mod distinct;
pub mod dtype;
pub mod index;
pub mod json;
pub mod manifest;
pub mod proof;
pub mod rails;
pub mod request;
pub mod swarm;

pub use json::JsonError;
