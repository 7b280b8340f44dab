//! The checksum of bytes from those of their parts.

use crc_fast::CrcAlgorithm::Crc64Nvme;

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
