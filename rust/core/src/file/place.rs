//! A name for what is complete, without taking it from anything else.

use std::io;
use std::path::Path;

use rustix::fs::{CWD, RenameFlags, renameat_with};

/// Renames the file or folder `path` to `target`, which must not exist: whatever appeared there meanwhile stays.
///
/// ```
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let folder = std::env::temp_dir().join(format!("tensorferry-place-{}", std::process::id()));
/// # std::fs::create_dir_all(&folder)?;
/// let (path, target) = (folder.join("new"), folder.join("name"));
/// std::fs::write(&path, "new")?;
/// std::fs::write(&target, "taken")?;
/// let refused = tensorferry_core::rename_new(&path, &target).unwrap_err();
/// assert_eq!(refused.kind(), std::io::ErrorKind::AlreadyExists);
/// assert_eq!(std::fs::read(&target)?, b"taken");
///
/// std::fs::remove_file(&target)?;
/// tensorferry_core::rename_new(&path, &target)?;
/// assert_eq!(std::fs::read(&target)?, b"new");
/// # std::fs::remove_dir_all(&folder)?;
/// # Ok(())
/// # }
/// ```
///
/// # Errors
/// The system's: `AlreadyExists` where something has the name, a link that leads nowhere included, `InvalidInput` where
/// the file system has no such rename.
pub fn rename_new(path: &Path, target: &Path) -> io::Result<()> {
    Ok(renameat_with(CWD, path, CWD, target, RenameFlags::NOREPLACE)?)
}
