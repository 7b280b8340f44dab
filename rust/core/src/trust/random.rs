//! Random bytes, which the system has to give: tokens, nonces and the name of a process's generation.

use crate::error::{Error, ErrorKind};

/// So many of them.
pub(crate) fn bytes<const N: usize>() -> Result<[u8; N], Error> {
    let mut bytes = [0; N];
    getrandom::fill(&mut bytes)
        .map_err(|e| Error::new(ErrorKind::System, format!("no random numbers from the system: {e}")))?;
    Ok(bytes)
}

/// 128 of their bits in hexadecimal digits: nobody guesses that.
pub(crate) fn token() -> Result<String, Error> {
    Ok(format!("{:032x}", u128::from_be_bytes(bytes()?)))
}
