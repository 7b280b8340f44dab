//! How much memory the machine has.
//!
//! A source announces lengths before it sends bytes, and a hostile or damaged one can announce any number. Everything
//! that allocates in proportion to such a number asks here first.

use std::sync::OnceLock;

use crate::error::{Error, ErrorKind};

/// Refuses `len` bytes for `what` where the machine, swap included, has fewer.
///
/// A source can announce any length, and even the bookkeeping for each MiB of it would cost memory. If the system does
/// not say how much memory there is, nothing is refused.
///
/// ```
/// use tensorferry_core::check_machine_has;
///
/// assert!(check_machine_has(4096, "a page").is_ok());
/// assert!(check_machine_has(u64::MAX, "the received state").is_err());
/// ```
///
/// # Errors
/// [`ErrorKind::System`], naming `what`.
pub fn check_machine_has(len: u64, what: &str) -> Result<(), Error> {
    static MACHINE: OnceLock<u64> = OnceLock::new();
    let has = match MACHINE.get() {
        Some(&has) => has,
        None => match machine() {
            Some(has) => *MACHINE.get_or_init(|| has),
            None => return Ok(()),
        },
    };
    if len <= has {
        return Ok(());
    }
    let message = format!("{what} has {len} bytes, and all memory of this machine is {has}");
    Err(Error::new(ErrorKind::System, message))
}

/// Memory and swap in bytes, if the system says.
pub(super) fn machine() -> Option<u64> {
    let text = std::fs::read_to_string("/proc/meminfo").ok()?;
    Some(field(&text, "MemTotal:")? + field(&text, "SwapTotal:").unwrap_or(0))
}

/// Memory in bytes that processes can have without others being swapped out, if the system says.
pub(crate) fn available() -> Option<u64> {
    field(&std::fs::read_to_string("/proc/meminfo").ok()?, "MemAvailable:")
}

/// A field of `/proc/meminfo`, in bytes.
fn field(text: &str, name: &str) -> Option<u64> {
    let kib = text.lines().find_map(|l| l.strip_prefix(name)?.trim().strip_suffix(" kB")?.parse::<u64>().ok())?;
    kib.checked_mul(1024)
}
