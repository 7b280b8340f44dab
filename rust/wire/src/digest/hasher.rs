//! A checksum of bytes that come in pieces.

use crc_fast::CrcAlgorithm::Crc64Nvme;

pub(super) fn first_word(hash: &blake3::Hash) -> u64 {
    hash.as_bytes().first_chunk().map_or(0, |word| u64::from_le_bytes(*word))
}

pub(super) fn first_words(hash: &blake3::Hash) -> u128 {
    hash.as_bytes().first_chunk().map_or(0, |words| u128::from_le_bytes(*words))
}

/// Computes a checksum of bytes that come in pieces.
#[derive(Debug, Clone)]
pub struct Hasher(pub(super) HasherState);

#[derive(Debug, Clone)]
#[expect(clippy::large_enum_variant, reason = "without a secret, a block costs no allocation")]
pub(super) enum HasherState {
    Crc64(crc_fast::Digest),
    Blake3(Box<blake3::Hasher>),
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
            HasherState::Blake3(hasher) => {
                hasher.update(bytes);
            }
        }
    }

    /// The checksum of all bytes so far.
    #[must_use]
    pub fn finish(&self) -> u64 {
        match &self.0 {
            HasherState::Crc64(digest) => digest.finalize(),
            HasherState::Blake3(hasher) => first_word(&hasher.finalize()),
        }
    }

    /// The same as [`Algorithm::wide_checksum`] of all bytes so far.
    #[must_use]
    pub fn finish_wide(&self) -> u128 {
        match &self.0 {
            HasherState::Crc64(digest) => digest.finalize().into(),
            HasherState::Blake3(hasher) => first_words(&hasher.finalize()),
        }
    }
}

impl Default for Hasher {
    fn default() -> Self {
        Self::new()
    }
}
