//! Tables of long checksums, with which members of a swarm compare what others bring them.
//!
//! A member knows every short checksum, and the key of its job if there is one. A CRC can be made to match other bytes at
//! once, and 64 bits of a keyed hash by many tries. So blocks that members bring have 128 bits of BLAKE3, with the key if
//! there is one. Blocks that the source sends keep the checksums that they have without a swarm.
//!
//! The layout is that of [`super::DigestTable`], of all blocks of the payload. With a key, a short checksum is the low half
//! of the long one:
//!
//! ```text
//! 8 bytes    magic "TFDIGST2"
//! u128 each  the long checksums
//! ```
//!
//! Without a key (algorithm 3: BLAKE3 beside CRC-64/NVME):
//!
//! ```text
//! 8 bytes         magic "TFDIGST3"
//! u128, u64 each  the long checksum of a block and its CRC-64/NVME
//! ```

use super::table::TableLayout;
use super::{Algorithm, BLOCK_SIZE, DigestError};

const KEYED: TableLayout<16> = TableLayout { magic: b"TFDIGST2" };
const OPEN: TableLayout<24> = TableLayout { magic: b"TFDIGST3" };

/// Length in bytes of the longest table for `count` blocks. `count` must be below 2^58, or the length could overflow.
#[must_use]
pub fn most_wide_table_len(count: u64) -> u64 {
    TableLayout::<24>::len(count)
}

/// What a block is compared with.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BlockDigests {
    /// The checksum of a block that the source has sent: [`Algorithm::checksum`].
    pub short: u64,
    /// Of a block that another receiver has sent: [`Algorithm::wide_checksum`] of [`Algorithm::for_relayed`].
    pub long: u128,
}

impl BlockDigests {
    /// Those of a block whose keyed checksum is `long`.
    #[must_use]
    #[allow(clippy::cast_possible_truncation, reason = "a keyed checksum of 64 bits is the low half")]
    pub fn keyed(long: u128) -> Self {
        Self { short: long as u64, long }
    }
}

/// The long checksums of all blocks of one publication: those of one moment.
///
/// ```
/// use tensorferry_wire::digest::{Algorithm, BlockDigests, WideTable};
///
/// let payload = [2_u8; 3];
/// for (algorithm, other) in [(Algorithm::Crc64, Algorithm::Keyed([7; 32])), (Algorithm::Keyed([7; 32]), Algorithm::Crc64)] {
///     let long = algorithm.for_relayed().wide_checksum(&payload);
///     let blocks = vec![BlockDigests { short: algorithm.checksum(&payload), long }];
///     let table = WideTable { header: 5, payload_len: 3, blocks };
///     let bytes = table.encode(&algorithm);
///     assert_eq!(WideTable::decode(&bytes, &algorithm), Ok(table));
///     assert!(WideTable::decode(&bytes, &other).is_err());
/// }
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct WideTable {
    /// Checksum of the container's header, of 64 bits.
    pub header: u64,
    /// Length in bytes of the payload.
    pub payload_len: u64,
    /// The checksums of each block of [`BLOCK_SIZE`].
    pub blocks: Vec<BlockDigests>,
}

impl WideTable {
    /// The encoded table of a source whose checksums are of `algorithm`.
    #[must_use]
    pub fn encode(&self, algorithm: &Algorithm) -> Vec<u8> {
        let (marked, of) = (algorithm.for_relayed(), (self.header, self.payload_len));
        if let Algorithm::Keyed(_) = algorithm {
            return KEYED.encode(&marked, BLOCK_SIZE, of, self.blocks.iter().map(|block| block.long.to_le_bytes()));
        }
        let both = |block: &BlockDigests| {
            let mut bytes = [0; 24];
            bytes[..16].copy_from_slice(&block.long.to_le_bytes());
            bytes[16..].copy_from_slice(&block.short.to_le_bytes());
            bytes
        };
        OPEN.encode(&marked, BLOCK_SIZE, of, self.blocks.iter().map(both))
    }

    /// Reads a table of a source whose checksums are of `algorithm`, with those of each block.
    ///
    /// # Errors
    /// The first check that fails. Nothing is allocated for checksums before the table was found to be whole.
    pub fn decode(bytes: &[u8], algorithm: &Algorithm) -> Result<Self, DigestError> {
        let wanted = algorithm.for_relayed();
        let whole = |count, of| count == of;
        let (header, payload_len, blocks) = if let Algorithm::Keyed(_) = algorithm {
            let (header, payload_len, blocks) = KEYED.decode(bytes, &wanted, BLOCK_SIZE, whole)?;
            let blocks = blocks.iter().map(|block| BlockDigests::keyed(u128::from_le_bytes(*block))).collect();
            (header, payload_len, blocks)
        } else {
            let (header, payload_len, blocks) = OPEN.decode(bytes, &wanted, BLOCK_SIZE, whole)?;
            let both = |block: &[u8; 24]| {
                let long = block.first_chunk().map_or(0, |long| u128::from_le_bytes(*long));
                let short = block.last_chunk().map_or(0, |short| u64::from_le_bytes(*short));
                BlockDigests { short, long }
            };
            (header, payload_len, blocks.iter().map(both).collect())
        };
        Ok(Self { header, payload_len, blocks })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn table(algorithm: &Algorithm) -> WideTable {
        let both = |long: u128| match algorithm {
            Algorithm::Keyed(_) => BlockDigests::keyed(long),
            _ => BlockDigests { short: u64::MAX / 3, long },
        };
        WideTable { header: 9, payload_len: 2 * BLOCK_SIZE + 1, blocks: [1, u128::MAX, 3 << 64].map(both).to_vec() }
    }

    #[test]
    fn a_damaged_table_is_refused() {
        for algorithm in [Algorithm::Crc64, Algorithm::Keyed([1; 32])] {
            let table = table(&algorithm);
            let bytes = table.encode(&algorithm);
            assert!(bytes.len() as u64 <= most_wide_table_len(3));
            assert_eq!(WideTable::decode(&bytes, &algorithm), Ok(table.clone()));
            for at in 0..bytes.len() {
                let mut damaged = bytes.clone();
                damaged[at] ^= 0x20;
                assert!(WideTable::decode(&damaged, &algorithm).is_err(), "{at}");
                assert!(WideTable::decode(&bytes[..at], &algorithm).is_err(), "{at}");
            }
            let few = WideTable { blocks: table.blocks[1..].to_vec(), ..table }.encode(&algorithm);
            assert!(matches!(WideTable::decode(&few, &algorithm), Err(DigestError::Count { count: 2, .. })));
        }
    }

    #[test]
    fn the_low_half_is_the_checksum_of_64_bits() {
        let bytes: Vec<u8> = (0..5000_u32).map(|i| (i % 251) as u8).collect();
        for algorithm in [Algorithm::Crc64, Algorithm::Keyed([1; 32]), Algorithm::Blake3] {
            let wide = algorithm.wide_checksum(&bytes);
            assert_eq!(wide & u128::from(u64::MAX), algorithm.checksum(&bytes).into());
            assert_eq!(wide >> 64 == 0, matches!(algorithm, Algorithm::Crc64));
            let mut hasher = algorithm.hasher();
            bytes.chunks(700).for_each(|part| hasher.update(part));
            assert_eq!(hasher.finish_wide(), wide);
        }
    }

    #[test]
    fn what_is_relayed_has_a_checksum_that_nobody_can_make_match() {
        assert!(matches!(Algorithm::Crc64.for_relayed(), Algorithm::Blake3));
        assert!(matches!(Algorithm::Keyed([1; 32]).for_relayed(), Algorithm::Keyed([1, ..])));
        // The first 128 bits of what the reference implementation says.
        let known = blake3::hash(b"abc");
        assert_eq!(Algorithm::Blake3.wide_checksum(b"abc").to_le_bytes(), known.as_bytes()[..16]);
    }
}
