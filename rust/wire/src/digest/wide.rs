//! Tables of long checksums, with which members of a swarm compare what others bring them.
//!
//! A member has the key of its job, so that 64 bits would be too few: it could look for other bytes with the same
//! checksum on its own. The layout is that of [`super::DigestTable`], with these differences:
//!
//! ```text
//! 8 bytes    magic "TFDIGST2"
//! u128 each  the checksums of all blocks of the payload
//! ```

use super::{Algorithm, BLOCK_SIZE, DigestError, HEAD, block_count, checksum};

const MAGIC: &[u8; 8] = b"TFDIGST2";

/// Length in bytes of a table of `count` long checksums. `count` must be below 2^59, or the length could overflow.
#[must_use]
pub fn wide_table_len(count: u64) -> u64 {
    HEAD as u64 + 16 * count + 8
}

/// The long checksums of all blocks of one publication: those of one moment.
///
/// ```
/// use tensorferry_wire::digest::{Algorithm, WideTable, checksum};
///
/// let (algorithm, payload) = (Algorithm::Keyed([7; 32]), [2_u8; 3]);
/// let blocks = vec![algorithm.wide_checksum(&payload)];
/// let table = WideTable { header: 5, payload_len: 3, blocks };
/// let bytes = table.encode(&algorithm);
/// assert_eq!(WideTable::decode(&bytes, &algorithm), Ok(table));
/// assert!(WideTable::decode(&bytes, &Algorithm::Crc64).is_err());
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct WideTable {
    /// Checksum of the container's header, of 64 bits.
    pub header: u64,
    /// Length in bytes of the payload.
    pub payload_len: u64,
    /// The long checksum of each block of [`BLOCK_SIZE`].
    pub blocks: Vec<u128>,
}

impl WideTable {
    /// The encoded table, marked as one of `algorithm`, which must have computed its checksums.
    #[must_use]
    pub fn encode(&self, algorithm: &Algorithm) -> Vec<u8> {
        let mut out = Vec::with_capacity(HEAD + 16 * self.blocks.len() + 8);
        out.extend_from_slice(MAGIC);
        out.extend_from_slice(&algorithm.number().to_le_bytes());
        out.extend_from_slice(&((BLOCK_SIZE & 0xFFFF_FFFF) as u32).to_le_bytes());
        for word in [self.payload_len, self.header, self.blocks.len() as u64] {
            out.extend_from_slice(&word.to_le_bytes());
        }
        for block in &self.blocks {
            out.extend_from_slice(&block.to_le_bytes());
        }
        let own = checksum(&out);
        out.extend_from_slice(&own.to_le_bytes());
        out
    }

    /// Reads a table whose checksums must be of `wanted`, one for each block.
    ///
    /// # Errors
    /// The first check that fails. Nothing is allocated for checksums before the table was found to be whole.
    pub fn decode(bytes: &[u8], wanted: &Algorithm) -> Result<Self, DigestError> {
        if !bytes.starts_with(MAGIC) {
            return Err(DigestError::Magic);
        }
        let have = bytes.len() as u64;
        let short = DigestError::Length { have, need: HEAD as u64 + 8 };
        let word = |at: usize| {
            let rest = bytes.get(at..).and_then(|rest| rest.first_chunk::<8>());
            rest.map(|word| u64::from_le_bytes(*word)).ok_or_else(|| short.clone())
        };
        let (kind, payload_len, header, count) = (word(8)?, word(16)?, word(24)?, word(32)?);
        let (algorithm, block_size) = ((kind & 0xFFFF_FFFF) as u32, (kind >> 32) as u32);
        if algorithm != wanted.number() {
            return Err(DigestError::Algorithm(algorithm));
        }
        if u64::from(block_size) != BLOCK_SIZE {
            return Err(DigestError::BlockSize(block_size));
        }
        // A block has 2^20 bytes: there are at most 2^44, and the length cannot overflow.
        if count != block_count(payload_len) {
            return Err(DigestError::Count { count, payload_len });
        }
        let need = wide_table_len(count);
        if have != need {
            return Err(DigestError::Length { have, need });
        }
        let body = bytes.len() - 8;
        let (expected, found) = (word(body)?, checksum(&bytes[..body]));
        if expected != found {
            return Err(DigestError::Checksum { expected, found });
        }
        let blocks = bytes[HEAD..body].as_chunks().0.iter().map(|block| u128::from_le_bytes(*block)).collect();
        Ok(Self { header, payload_len, blocks })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn table() -> WideTable {
        WideTable { header: 9, payload_len: 2 * BLOCK_SIZE + 1, blocks: vec![1, u128::MAX, 3 << 64] }
    }

    #[test]
    fn a_damaged_table_is_refused() {
        for algorithm in [Algorithm::Crc64, Algorithm::Keyed([1; 32])] {
            let bytes = table().encode(&algorithm);
            assert_eq!(bytes.len() as u64, wide_table_len(3));
            assert_eq!(WideTable::decode(&bytes, &algorithm), Ok(table()));
            for at in 0..bytes.len() {
                let mut damaged = bytes.clone();
                damaged[at] ^= 0x20;
                assert!(WideTable::decode(&damaged, &algorithm).is_err(), "{at}");
                assert!(WideTable::decode(&bytes[..at], &algorithm).is_err(), "{at}");
            }
        }
        let few = WideTable { blocks: vec![1, 2], ..table() }.encode(&Algorithm::Crc64);
        assert!(matches!(WideTable::decode(&few, &Algorithm::Crc64), Err(DigestError::Count { count: 2, .. })));
    }

    #[test]
    fn the_low_half_is_the_checksum_that_tables_of_64_bits_have() {
        let bytes: Vec<u8> = (0..5000_u32).map(|i| (i % 251) as u8).collect();
        for algorithm in [Algorithm::Crc64, Algorithm::Keyed([1; 32])] {
            let wide = algorithm.wide_checksum(&bytes);
            assert_eq!(wide & u128::from(u64::MAX), algorithm.checksum(&bytes).into());
            assert_eq!(wide >> 64 != 0, matches!(algorithm, Algorithm::Keyed(_)));
            let mut hasher = algorithm.hasher();
            bytes.chunks(700).for_each(|part| hasher.update(part));
            assert_eq!(hasher.finish_wide(), wide);
        }
    }
}
