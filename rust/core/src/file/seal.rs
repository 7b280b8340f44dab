//! Sealing: the checksums of a container that was filled in its file by a receive, written into its last entry.

use std::fs::OpenOptions;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::Mutex;

use tensorferry_wire::container::{self, DIGESTS_ENTRY, Header};
use tensorferry_wire::digest::{self, Algorithm, DigestTable, FILE_BLOCK_SIZE};

use super::{CHUNK, FileOptions, PIECE, by_runs, refused};
use crate::error::{Error, ErrorKind};
use crate::memory::{check_room, zeroed, zeroed_for};
use crate::payload::checksum_blocks;
use crate::sync::Locked;

/// Computes the checksums of the container at `path`, whose bytes are complete and which nobody else writes to, writes
/// them into the entry that is there for them, and brings all of the file to the disk; its folder is not synchronised.
/// Returns the checksum of its header.
///
/// # Errors
/// [`ErrorKind::System`] when the file cannot be read or written, or there is no memory; [`ErrorKind::Corrupt`] when it
/// ends before its header does, or is cut off meanwhile;
/// [`ErrorKind::Invalid`] when it is no container with room for the checksums as its last entry;
/// [`ErrorKind::Cancelled`]. Nothing of the file but that entry is ever changed.
pub fn seal_file(path: &Path, options: &FileOptions) -> Result<u64, Error> {
    let failed = |e| refused(path, "cannot be sealed", e);
    let invalid = || Error::new(ErrorKind::Invalid, format!("{}: it has no room for its checksums", path.display()));
    let file = OpenOptions::new().read(true).write(true).open(path).map_err(failed)?;
    let mut prefix = [0; 8];
    file.read_exact_at(&mut prefix, 0).map_err(failed)?;
    let start = Header::total_len(prefix).map_err(|_| invalid())?;
    let mut bytes = zeroed_for(start, "the header")?;
    file.read_exact_at(&mut bytes, 0).map_err(failed)?;
    check_room(start * container::DECODED_COST, "the header")?;
    let header = Header::decode(&bytes).map_err(|_| invalid())?;
    let entry = header.entries().iter().find(|entry| entry.name == DIGESTS_ENTRY).ok_or_else(invalid)?;
    let covered = entry.start;
    let count = covered.div_ceil(FILE_BLOCK_SIZE);
    let whole = start.checked_add(header.payload_len());
    if entry.end != header.payload_len()
        || entry.nbytes() != digest::table_len(count)
        || Some(file.metadata().map_err(failed)?.len()) != whole
    {
        return Err(invalid());
    }
    let parts: Mutex<Vec<(u64, Vec<u64>)>> = Mutex::default();
    by_runs(&[(0, count)], CHUNK / FILE_BLOCK_SIZE, options, || {
        let mut buffer = zeroed(PIECE)?;
        let (file, parts) = (&file, &parts);
        Ok(move |first: u64, end: u64| {
            let (mut at, stop) = (first * FILE_BLOCK_SIZE, (end * FILE_BLOCK_SIZE).min(covered));
            let mut digests = Vec::new();
            while at < stop {
                let len = usize::try_from(stop - at).unwrap_or(usize::MAX).min(PIECE);
                file.read_exact_at(&mut buffer[..len], start + at).map_err(failed)?;
                digests.extend(checksum_blocks(&Algorithm::Crc64, [&buffer[..len]], FILE_BLOCK_SIZE));
                at += len as u64;
            }
            parts.locked().push((first, digests));
            Ok(stop - first * FILE_BLOCK_SIZE)
        })
    })?;
    let mut parts = parts.into_value();
    parts.sort_unstable_by_key(|part| part.0);
    let blocks = parts.into_iter().flat_map(|part| part.1).collect();
    let checksum = digest::checksum(&bytes);
    let table = DigestTable { header: checksum, payload_len: covered, blocks };
    let table = table.encode_with_block_size(&Algorithm::Crc64, FILE_BLOCK_SIZE);
    file.write_all_at(&table, start + covered).map_err(failed)?;
    file.sync_all().map_err(failed)?;
    Ok(checksum)
}
