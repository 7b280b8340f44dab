//! The table of the checksums of a publication, and how it is encoded.

use super::{Algorithm, BLOCK_SIZE, BLOCK_SIZES, CRC64, DigestError, HEAD, MAGIC, checksum};

/// How many blocks of [`BLOCK_SIZE`] a payload of `payload_len` bytes has, the last of which may be shorter.
#[must_use]
pub fn block_count(payload_len: u64) -> u64 {
    payload_len.div_ceil(BLOCK_SIZE)
}

/// Length in bytes of a table of `count` checksums. `count` must be below 2^60, or the length could overflow.
#[must_use]
pub fn table_len(count: u64) -> u64 {
    TableLayout::<8>::len(count)
}

/// The checksums of one publication, or of a run of its blocks.
///
/// ```
/// use tensorferry_wire::digest::{DigestError, DigestTable, checksum};
///
/// let (header, payload) = ([1_u8; 64], [2_u8; 3]);
/// let table = DigestTable { header: checksum(&header), payload_len: 3, blocks: vec![checksum(&payload)] };
/// let mut bytes = table.encode();
/// assert_eq!(DigestTable::decode(&bytes)?, table);
///
/// bytes[40] ^= 1;
/// assert!(matches!(DigestTable::decode(&bytes), Err(DigestError::Checksum { .. })));
/// # Ok::<(), DigestError>(())
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DigestTable {
    /// Checksum of the container's header: length prefix, JSON and padding.
    pub header: u64,
    /// Length in bytes of the whole payload, of which a run of blocks covers only a part.
    pub payload_len: u64,
    /// Checksum of each block, in order: all of them ([`block_count`]), or the run of blocks that was asked for.
    pub blocks: Vec<u64>,
}

impl DigestTable {
    /// The encoded table, marked as one of CRC-64/NVME.
    #[must_use]
    pub fn encode(&self) -> Vec<u8> {
        self.encode_as(&Algorithm::Crc64)
    }

    /// The encoded table, marked as one of `algorithm`, which must have computed its checksums.
    #[must_use]
    pub fn encode_as(&self, algorithm: &Algorithm) -> Vec<u8> {
        self.encode_with_block_size(algorithm, BLOCK_SIZE)
    }

    /// The encoded table for blocks of `block_size` bytes, one of [`BLOCK_SIZES`]; a table of another size is encoded
    /// with a block size of 0, which no reader accepts.
    #[must_use]
    pub fn encode_with_block_size(&self, algorithm: &Algorithm, block_size: u64) -> Vec<u8> {
        let block_size = if BLOCK_SIZES.contains(&block_size) { block_size } else { 0 };
        let blocks = self.blocks.iter().map(|block| block.to_le_bytes());
        LAYOUT.encode(algorithm, block_size, (self.header, self.payload_len), blocks)
    }

    /// Reads a table of CRC-64/NVME over blocks of [`BLOCK_SIZE`] and checks its own checksum.
    pub fn decode(bytes: &[u8]) -> Result<Self, DigestError> {
        Self::decode_as(bytes, &Algorithm::Crc64)
    }

    /// Reads a table whose checksums must be of `wanted` and checks its own checksum, which finds damage. It does not
    /// show who wrote the table.
    pub fn decode_as(bytes: &[u8], wanted: &Algorithm) -> Result<Self, DigestError> {
        Self::decode_with_block_size(bytes, wanted, BLOCK_SIZE)
    }

    /// Reads a table whose checksums must be of `wanted` and whose blocks must have `block_size` bytes.
    ///
    /// # Errors
    /// The first check that fails; [`DigestError::Length`] also for bytes that begin as a table and are too few to hold
    /// one. Nothing is allocated for checksums before the table was found to be whole.
    pub fn decode_with_block_size(bytes: &[u8], wanted: &Algorithm, block_size: u64) -> Result<Self, DigestError> {
        let (header, payload_len, blocks) = LAYOUT.decode(bytes, wanted, block_size, |count, of| count <= of)?;
        let blocks = blocks.iter().map(|block| u64::from_le_bytes(*block)).collect();
        Ok(Self { header, payload_len, blocks })
    }
}

/// How every table is laid out, whatever the length of its checksums: each has `N` bytes.
pub(super) struct TableLayout<const N: usize> {
    pub(super) magic: &'static [u8; 8],
}

const LAYOUT: TableLayout<8> = TableLayout { magic: MAGIC };

impl<const N: usize> TableLayout<N> {
    /// Length in bytes of a table of `count` checksums.
    pub(super) const fn len(count: u64) -> u64 {
        HEAD as u64 + N as u64 * count + 8
    }

    /// The encoded table of `blocks`, behind the checksum of the header and the payload's length.
    pub(super) fn encode(
        &self,
        algorithm: &Algorithm,
        block_size: u64,
        (header, payload_len): (u64, u64),
        blocks: impl ExactSizeIterator<Item = [u8; N]>,
    ) -> Vec<u8> {
        let count = blocks.len();
        let mut out = Vec::with_capacity(HEAD + N * count + 8);
        out.extend_from_slice(self.magic);
        out.extend_from_slice(&algorithm.wire_number().to_le_bytes());
        out.extend_from_slice(&((block_size & 0xFFFF_FFFF) as u32).to_le_bytes());
        for word in [payload_len, header, count as u64] {
            out.extend_from_slice(&word.to_le_bytes());
        }
        for block in blocks {
            out.extend_from_slice(&block);
        }
        let own = checksum(&out);
        out.extend_from_slice(&own.to_le_bytes());
        out
    }

    /// Reads a table of `wanted` over blocks of `block_size` bytes: the checksum of the header, the payload's length
    /// and the checksums. `fits` says whether a table may have so many checksums (its first argument) over a payload
    /// that has so many blocks (its second).
    pub(super) fn decode<'a>(
        &self,
        bytes: &'a [u8],
        wanted: &Algorithm,
        block_size: u64,
        fits: impl FnOnce(u64, u64) -> bool,
    ) -> Result<(u64, u64, &'a [[u8; N]]), DigestError> {
        if !bytes.starts_with(self.magic) {
            return Err(DigestError::Magic);
        }
        let have = bytes.len() as u64;
        let short = DigestError::Length { have, need: HEAD as u64 + 8 };
        let word = |at: usize| {
            let rest = bytes.get(at..).and_then(|rest| rest.first_chunk::<8>());
            rest.map(|word| u64::from_le_bytes(*word)).ok_or_else(|| short.clone())
        };
        let (kind, payload_len, header, count) = (word(8)?, word(16)?, word(24)?, word(32)?);
        let (algorithm, found) = split(kind);
        if algorithm != wanted.wire_number() {
            return Err(DigestError::Algorithm(algorithm));
        }
        if u64::from(found) != block_size || !BLOCK_SIZES.contains(&block_size) {
            return Err(DigestError::BlockSize(found));
        }
        if !fits(count, payload_len.div_ceil(block_size)) {
            return Err(DigestError::Count { count, payload_len });
        }
        // count <= 2^55, since a block has at least 2^9 bytes: this cannot overflow
        let need = Self::len(count);
        if have != need {
            return Err(DigestError::Length { have, need });
        }
        let body = bytes.len() - 8;
        let (expected, found) = (word(body)?, checksum(&bytes[..body]));
        if expected != found {
            return Err(DigestError::Checksum { expected, found });
        }
        Ok((header, payload_len, bytes[HEAD..body].as_chunks().0))
    }
}

/// The part of a table before its checksums, for readers that read only some of those. Such a reader does not check the
/// table's own checksum; a damaged entry of the table shows as a block that does not match.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TableHead {
    /// Checksum of the container's header.
    pub header: u64,
    /// Length in bytes of the payload that the blocks cover.
    pub payload_len: u64,
    /// How many checksums follow, one for each block.
    pub count: u64,
}

impl TableHead {
    /// Length of the part of a table before its first block's checksum.
    pub const LEN: usize = HEAD;

    /// Reads the head of a table of CRC-64/NVME that must cover a whole payload in blocks of `block_size` bytes.
    ///
    /// # Errors
    /// As [`DigestTable::decode_with_block_size`], and [`DigestError::Count`] also if there are too few checksums.
    pub fn decode(bytes: &[u8; HEAD], block_size: u64) -> Result<Self, DigestError> {
        if !bytes.starts_with(MAGIC) {
            return Err(DigestError::Magic);
        }
        let [_, kind, payload_len, header, count] = words(bytes);
        let (algorithm, found) = split(kind);
        if algorithm != CRC64 {
            return Err(DigestError::Algorithm(algorithm));
        }
        if u64::from(found) != block_size || !BLOCK_SIZES.contains(&block_size) {
            return Err(DigestError::BlockSize(found));
        }
        if count != payload_len.div_ceil(block_size) {
            return Err(DigestError::Count { count, payload_len });
        }
        Ok(Self { header, payload_len, count })
    }
}

/// The words of a table's head, the lowest byte first.
fn words(bytes: &[u8; HEAD]) -> [u64; 5] {
    let mut words = [0; 5];
    for (word, bytes) in words.iter_mut().zip(bytes.as_chunks().0) {
        *word = u64::from_le_bytes(*bytes);
    }
    words
}

/// The algorithm and the block size in the second word of a table.
fn split(kind: u64) -> (u32, u32) {
    ((kind & 0xFFFF_FFFF) as u32, (kind >> 32) as u32)
}
