//! The container, the manifest and the protocol of tensorferry.
//!
//! Everything here is a pure function of bytes: no I/O, no clocks, no Python, no `unsafe`. Whatever arrives from a
//! peer goes through this crate first and either becomes a value that holds its promises or a typed error; it never
//! panics, and no allocation is larger than a small multiple of the input.
//!
//! - [`container`]: the safetensors header that starts every checkpoint.
//! - [`manifest`]: the tree of the state, carried as the container's first entry.
//! - [`json`]: a cursor over the two JSON documents.
//! - [`distinct`]: texts that must differ.
//! - [`digest`]: checksums of the payload, block by block.
//! - [`proof`]: proofs that a peer knows the shared secret.
//! - [`request`]: paths, ranges and entity tags of the HTTP resource.
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
pub mod json;
pub mod manifest;
pub mod proof;
pub mod request;

pub use json::JsonError;
