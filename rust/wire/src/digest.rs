//! Checksums of the payload: one for each 1 MiB block, and one for the header.
//!
//! Without a shared secret they are CRC-64/NVME, which finds damage but not malice: an attacker who forges a block can
//! forge its checksum. With a secret they are keyed BLAKE3, of which the first 64 bits are kept. An attacker without
//! the key can only guess, with one chance in 2^64 for each block that is tried against a receiver. A keyed table
//! proves nothing by itself: its answer carries a proof of full length ([`crate::proof`]).
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

use crc_fast::CrcAlgorithm::Crc64Nvme;

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
}

impl std::fmt::Debug for Algorithm {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::Crc64 => "Crc64",
            Self::Keyed(_) => "Keyed(..)",
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
        }
    }

    /// A hasher for bytes that come in pieces; it gives the same checksum as [`Algorithm::checksum`].
    #[must_use]
    pub fn hasher(&self) -> Hasher {
        match self {
            Self::Crc64 => Hasher::new(),
            Self::Keyed(key) => Hasher(HasherState::Keyed(Box::new(blake3::Hasher::new_keyed(key)))),
        }
    }

    fn number(&self) -> u32 {
        match self {
            Self::Crc64 => CRC64,
            Self::Keyed(_) => KEYED,
        }
    }
}

/// CRC-64/NVME of `bytes`.
#[must_use]
pub fn checksum(bytes: &[u8]) -> u64 {
    crc_fast::checksum(Crc64Nvme, bytes)
}

/// CRC-64/NVME of bytes with the checksum `first`, followed by `len` bytes with the checksum `second`. Many parts of one
/// length are faster with a [`Joiner`].
///
/// ```
/// use tensorferry_wire::digest::{checksum, join};
///
/// assert_eq!(join(checksum(b"ab"), checksum(b"cde"), 3), checksum(b"abcde"));
/// assert_eq!(join(checksum(b""), checksum(b"cde"), 3), checksum(b"cde"));
/// ```
#[must_use]
pub fn join(first: u64, second: u64, len: u64) -> u64 {
    crc_fast::checksum_combine(Crc64Nvme, first, second, len)
}

/// Computes CRC-64/NVME of bytes from the checksums of consecutive parts of them.
///
/// ```
/// use tensorferry_wire::digest::{Joiner, checksum};
///
/// let bytes = [7_u8; 24];
/// let joined = Joiner::new(8).join(checksum(&bytes[..16]), checksum(&bytes[16..]));
/// assert_eq!(joined, checksum(&bytes));
/// ```
#[derive(Debug, Clone)]
pub struct Joiner {
    /// What each value of each byte of a checksum becomes when `len` bytes follow.
    moved: Box<[[u64; 256]; 8]>,
}

impl Joiner {
    /// For parts of `len` bytes.
    #[must_use]
    pub fn new(len: u64) -> Self {
        let mut moved = Box::new([[0; 256]; 8]);
        for (byte, row) in moved.iter_mut().enumerate() {
            for bit in 0..8 {
                // The operation is linear: what a checksum becomes is that of its bits, added up.
                let one = crc_fast::checksum_combine(Crc64Nvme, 1 << (8 * byte + bit), 0, len);
                for value in 0..1 << bit {
                    row[(1 << bit) + value] = row[value] ^ one;
                }
            }
        }
        Self { moved }
    }

    /// The checksum of bytes with the checksum `first`, followed by the `len` bytes with the checksum `second`.
    #[must_use]
    pub fn join(&self, first: u64, second: u64) -> u64 {
        let moved = first.to_le_bytes().into_iter().zip(self.moved.iter()).map(|(byte, row)| row[usize::from(byte)]);
        moved.fold(second, |joined, part| joined ^ part)
    }
}

/// The part of `[start, end)` that whole blocks fill, as their numbers; without one, an empty run at its end.
#[must_use]
pub fn whole_blocks(start: u64, end: u64, block_size: u64) -> (u64, u64) {
    let (first, behind) = (start.div_ceil(block_size), end / block_size);
    if first < behind { (first, behind) } else { (behind, behind) }
}

fn first_word(hash: &blake3::Hash) -> u64 {
    hash.as_bytes().first_chunk().map_or(0, |word| u64::from_le_bytes(*word))
}

/// Computes a checksum of bytes that come in pieces.
#[derive(Debug, Clone)]
pub struct Hasher(HasherState);

#[derive(Debug, Clone)]
#[expect(clippy::large_enum_variant, reason = "without a secret, a block costs no allocation")]
enum HasherState {
    Crc64(crc_fast::Digest),
    Keyed(Box<blake3::Hasher>),
}

impl Hasher {
    /// A hasher of CRC-64/NVME that has seen no bytes; [`Algorithm::hasher`] also makes keyed ones.
    #[must_use]
    pub fn new() -> Self {
        Self(HasherState::Crc64(crc_fast::Digest::new(Crc64Nvme)))
    }

    /// Adds the next bytes.
    pub fn update(&mut self, bytes: &[u8]) {
        match &mut self.0 {
            HasherState::Crc64(digest) => digest.update(bytes),
            HasherState::Keyed(hasher) => {
                hasher.update(bytes);
            }
        }
    }

    /// The checksum of all bytes so far.
    #[must_use]
    pub fn finish(&self) -> u64 {
        match &self.0 {
            HasherState::Crc64(digest) => digest.finalize(),
            HasherState::Keyed(hasher) => first_word(&hasher.finalize()),
        }
    }
}

impl Default for Hasher {
    fn default() -> Self {
        Self::new()
    }
}

/// How many blocks of [`BLOCK_SIZE`] a payload of `payload_len` bytes has, the last of which may be shorter.
#[must_use]
pub fn block_count(payload_len: u64) -> u64 {
    payload_len.div_ceil(BLOCK_SIZE)
}

/// Length in bytes of a table of `count` checksums. `count` must be below 2^60, or the length could overflow.
#[must_use]
pub fn table_len(count: u64) -> u64 {
    HEAD as u64 + 8 * count + 8
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
        let mut out = Vec::with_capacity(HEAD + 8 * self.blocks.len() + 8);
        out.extend_from_slice(MAGIC);
        out.extend_from_slice(&algorithm.number().to_le_bytes());
        let block_size = if BLOCK_SIZES.contains(&block_size) { block_size } else { 0 };
        out.extend_from_slice(&((block_size & 0xFFFF_FFFF) as u32).to_le_bytes());
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
    /// The first check that fails; [`DigestError::Length`] also for bytes too few to hold a table. Nothing is allocated
    /// for checksums before the table was found to be whole.
    pub fn decode_with_block_size(bytes: &[u8], wanted: &Algorithm, block_size: u64) -> Result<Self, DigestError> {
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
        let (algorithm, found) = split(kind);
        if algorithm != wanted.number() {
            return Err(DigestError::Algorithm(algorithm));
        }
        if u64::from(found) != block_size || !BLOCK_SIZES.contains(&block_size) {
            return Err(DigestError::BlockSize(found));
        }
        if count > payload_len.div_ceil(block_size) {
            return Err(DigestError::Count { count, payload_len });
        }
        // count <= 2^55, since a block has at least 2^9 bytes: this cannot overflow
        let need = table_len(count);
        if have != need {
            return Err(DigestError::Length { have, need });
        }
        let body = bytes.len() - 8;
        let (expected, found) = (word(body)?, checksum(&bytes[..body]));
        if expected != found {
            return Err(DigestError::Checksum { expected, found });
        }
        let blocks = bytes[HEAD..body].as_chunks().0.iter().map(|block| u64::from_le_bytes(*block)).collect();
        Ok(Self { header, payload_len, blocks })
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn checksum_is_crc_64_nvme() {
        // the check value of the catalogue of parametrised CRC algorithms
        assert_eq!(checksum(b"123456789"), 0xAE8B_1486_0A79_9888);
        assert_eq!(checksum(b""), 0);
    }

    #[test]
    fn hasher_in_pieces_is_checksum_of_the_whole() {
        let bytes: Vec<u8> = (0..100_000u32).map(|i| (i * 31 % 251) as u8).collect();
        for step in [1, 7, 64, 1000, 99_999] {
            let mut hasher = Hasher::new();
            bytes.chunks(step).for_each(|piece| hasher.update(piece));
            assert_eq!(hasher.finish(), checksum(&bytes), "pieces of {step}");
        }
        assert_eq!(Hasher::default().finish(), 0);
    }

    #[test]
    fn keyed_checksums_depend_on_key_and_bytes() {
        let (one, other) = (Algorithm::Keyed([1; 32]), Algorithm::Keyed([2; 32]));
        let bytes: Vec<u8> = (0..100_000u32).map(|i| (i * 31 % 251) as u8).collect();
        // the first 64 bits of what the reference implementation says for this key
        assert_eq!(one.checksum(&bytes).to_le_bytes(), blake3::keyed_hash(&[1; 32], &bytes).as_bytes()[..8]);
        assert_ne!(one.checksum(&bytes), other.checksum(&bytes));
        assert_ne!(one.checksum(&bytes), one.checksum(&bytes[1..]));
        assert_ne!(one.checksum(&bytes), Algorithm::Crc64.checksum(&bytes));
        for step in [1, 64, 1000, 99_999] {
            let mut hasher = one.hasher();
            bytes.chunks(step).for_each(|piece| hasher.update(piece));
            assert_eq!(hasher.finish(), one.checksum(&bytes), "pieces of {step}");
        }
        assert_eq!(format!("{one:?} {:?}", Algorithm::Crc64), "Keyed(..) Crc64");
    }

    #[test]
    fn a_table_of_another_algorithm_is_refused() {
        let table = DigestTable { header: 1, payload_len: 5, blocks: vec![2] };
        let keyed = Algorithm::Keyed([1; 32]);
        assert_eq!(DigestTable::decode_as(&table.encode_as(&keyed), &keyed), Ok(table.clone()));
        assert_eq!(DigestTable::decode_as(&table.encode(), &keyed), Err(DigestError::Algorithm(1)));
        assert_eq!(DigestTable::decode(&table.encode_as(&keyed)), Err(DigestError::Algorithm(2)));
    }

    #[test]
    fn block_counts() {
        let counts = [(0, 0), (1, 1), (BLOCK_SIZE - 1, 1), (BLOCK_SIZE, 1), (BLOCK_SIZE + 1, 2), (u64::MAX, 1 << 44)];
        for (len, count) in counts {
            assert_eq!(block_count(len), count, "{len}");
        }
    }
}
