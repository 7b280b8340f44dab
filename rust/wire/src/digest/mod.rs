//! Checksums of the payload: one for each 1 MiB block, and one for the header.
//!
//! Without a shared secret they are CRC-64/NVME, which finds damage but not malice: an attacker who forges a block can
//! forge its checksum. With a secret they are keyed BLAKE3, of which the first 64 bits are kept. An attacker without
//! the key can only guess, with one chance in 2^64 for each block that is tried against a receiver. A keyed table
//! proves nothing by itself: its answer carries a proof of full length ([`crate::proof`]).
//!
//! Members of a swarm ([`crate::swarm`]) know the checksums and, where there is one, the key, so that a CRC could be made
//! to match, and 64 bits be searched for. What they bring is compared with 128 bits of BLAKE3, of which [`WideTable`]s
//! are made.
//!
//! A receiver of slices requests the checksums of smaller blocks ([`BLOCK_SIZES`]), and a file carries those of the
//! smallest ones ([`FILE_BLOCK_SIZE`]): to verify a slice, a reader has to read the blocks in which it begins and ends
//! as a whole.
//!
//! The layout of a table, all numbers little-endian:
//!
//! ```text
//! 8 bytes   magic "TFDIGST1"
//! u32       algorithm: 1 is CRC-64/NVME, 2 is keyed BLAKE3
//! u32       block size in bytes
//! u64       length of the payload
//! u64       checksum of the header's bytes
//! u64       count: how many checksums of blocks follow
//! u64 each  the checksums, in the order of the blocks
//! u64       CRC-64/NVME of everything before it, whatever the algorithm
//! ```
//!
//! A table does not say which blocks it covers: it holds all of them or the run that was requested, and the caller
//! remembers which. [`DigestTable::decode`] checks that algorithm and block size are those expected, that there are no
//! more checksums than the payload has blocks, that the length is exact, and that the table's own checksum matches.

mod hasher;
mod join;
mod table;
mod wide;

use crc_fast::CrcAlgorithm::Crc64Nvme;

pub use self::hasher::Hasher;
use self::hasher::{HasherState, first_word, first_words};
pub use self::join::{Joiner, join};
pub use self::table::{DigestTable, TableHead, block_count, table_len};
pub use self::wide::{BlockDigests, WideTable, most_wide_table_len};

/// Bytes of payload per checksum; the last block may be shorter.
pub const BLOCK_SIZE: u64 = 1 << 20;

/// Bytes of payload per checksum in a file. Rows of tensors, and parts of rows, so often begin and end at multiples of
/// it that a reader of slices reads hardly more than it wants. The table is 1.6 % of the file.
pub const FILE_BLOCK_SIZE: u64 = 512;
/// The block sizes for which a server has checksums, largest first. Each is a multiple of the next.
pub const BLOCK_SIZES: [u64; 4] = [BLOCK_SIZE, 64 << 10, 4096, FILE_BLOCK_SIZE];

const MAGIC: &[u8; 8] = b"TFDIGST1";
const CRC64: u32 = 1;
const KEYED: u32 = 2;
const BLAKE3: u32 = 3;
/// Length of the part of a table before the first block's checksum.
const HEAD: usize = 40;

/// Why a table of checksums cannot be used.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum DigestError {
    /// The bytes do not begin with the magic of a table.
    #[error("not a table of digests")]
    Magic,
    /// The checksums are of another algorithm than the one expected.
    #[error("digest algorithm {0} is unknown to this version (upgrade the older side)")]
    Algorithm(u32),
    /// The blocks have another size than the one expected.
    #[error("digests of blocks of {0} bytes, which were not asked for (upgrade the older side)")]
    BlockSize(u32),
    /// The number of checksums does not fit the payload: there are more than it has blocks, or, in a file, fewer.
    #[error("{count} digests for a payload of {payload_len} bytes")]
    Count {
        /// Checksums the table says it has.
        count: u64,
        /// Payload length the table says it covers.
        payload_len: u64,
    },
    /// The table is shorter or longer than its count of checksums requires.
    #[error("a table of digests of {have} bytes instead of {need}")]
    Length {
        /// Bytes there are.
        have: u64,
        /// Bytes there should be.
        need: u64,
    },
    /// The table was damaged after it was written.
    #[error("the table of digests is damaged (its own checksum is {found:016x} instead of {expected:016x})")]
    Checksum {
        /// The checksum at the end of the table.
        expected: u64,
        /// The checksum of the bytes before that.
        found: u64,
    },
}

/// The algorithm for the checksums of blocks and of the header. `Debug` does not show the key.
#[derive(Clone, Default)]
pub enum Algorithm {
    /// CRC-64/NVME.
    #[default]
    Crc64,
    /// The first 64 bits of BLAKE3 with this key.
    Keyed([u8; 32]),
    /// The same without a key, for what members of a swarm without a secret bring ([`Algorithm::for_relayed`]).
    Blake3,
}

impl std::fmt::Debug for Algorithm {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::Crc64 => "Crc64",
            Self::Keyed(_) => "Keyed(..)",
            Self::Blake3 => "Blake3",
        })
    }
}

impl Algorithm {
    /// The checksum of `bytes`.
    #[must_use]
    pub fn checksum(&self, bytes: &[u8]) -> u64 {
        match self {
            Self::Crc64 => checksum(bytes),
            Self::Keyed(key) => first_word(&blake3::keyed_hash(key, bytes)),
            Self::Blake3 => first_word(&blake3::hash(bytes)),
        }
    }

    /// The checksum of `bytes` in the low half, and behind it as many more bits of the hash: of BLAKE3, 128 bits in all.
    /// CRC-64 has no more, and the high half is zero.
    #[must_use]
    pub fn wide_checksum(&self, bytes: &[u8]) -> u128 {
        match self {
            Self::Crc64 => checksum(bytes).into(),
            Self::Keyed(key) => first_words(&blake3::keyed_hash(key, bytes)),
            Self::Blake3 => first_words(&blake3::hash(bytes)),
        }
    }

    /// The algorithm for what other receivers bring of a payload whose source computes its checksums with this one: its
    /// [`Algorithm::wide_checksum`] cannot be made to match other bytes.
    #[must_use]
    pub fn for_relayed(&self) -> Self {
        match self {
            Self::Keyed(key) => Self::Keyed(*key),
            Self::Crc64 | Self::Blake3 => Self::Blake3,
        }
    }

    /// A hasher for bytes that come in pieces; it gives the same checksum as [`Algorithm::checksum`].
    #[must_use]
    pub fn hasher(&self) -> Hasher {
        match self {
            Self::Crc64 => Hasher::new(),
            Self::Keyed(key) => Hasher(HasherState::Blake3(Box::new(blake3::Hasher::new_keyed(key)))),
            Self::Blake3 => Hasher(HasherState::Blake3(Box::new(blake3::Hasher::new()))),
        }
    }

    /// The number that names the algorithm in a table of digests.
    fn wire_number(&self) -> u32 {
        match self {
            Self::Crc64 => CRC64,
            Self::Keyed(_) => KEYED,
            Self::Blake3 => BLAKE3,
        }
    }
}

/// CRC-64/NVME of `bytes`.
#[must_use]
pub fn checksum(bytes: &[u8]) -> u64 {
    crc_fast::checksum(Crc64Nvme, bytes)
}

/// The part of `[start, end)` that whole blocks fill, as their numbers; without one, an empty run at its end.
#[must_use]
pub fn whole_blocks(start: u64, end: u64, block_size: u64) -> (u64, u64) {
    let (first, behind) = (start.div_ceil(block_size), end / block_size);
    if first < behind { (first, behind) } else { (behind, behind) }
}

#[cfg(test)]
mod tests;
