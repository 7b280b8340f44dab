//! Random bytes from the operating system: tokens in paths, nonces of proofs, and the name of a process's generation.
//!
//! There is no fallback. Without random numbers the engine refuses to start a server or to sign a request.

use crate::error::{Error, ErrorKind};

/// `N` random bytes from the operating system.
pub(crate) fn bytes<const N: usize>() -> Result<[u8; N], Error> {
    let mut bytes = [0; N];
    getrandom::fill(&mut bytes)
        .map_err(|e| Error::new(ErrorKind::System, format!("no random numbers from the system: {e}")))?;
    Ok(bytes)
}

/// 128 random bits as hexadecimal digits, for names and paths that cannot be guessed.
pub(crate) fn token() -> Result<String, Error> {
    Ok(format!("{:032x}", u128::from_be_bytes(bytes()?)))
}
