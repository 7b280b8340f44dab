//! Checks that an answer is the one that was requested.
//!
//! A source can send anything. These checks run before a byte of the body is used: of the status, that a range or the
//! blocks are those requested, that a digest table has the right length, and that it is proven if there is a secret.

use tensorferry_wire::digest::{BLOCK_SIZE, DigestTable, WideTable, most_wide_table_len};
use tensorferry_wire::swarm::LONG_QUERY;

use super::blocks::format_runs;
use super::connection::{Connection, Head};
use crate::error::{Error, ErrorKind};
use crate::trust::secret;

/// The digests of `runs` of blocks of `block_size` bytes of the checkpoint `key`, and the head they came with. That the
/// table is of the header and the payload at hand is for the caller to check.
pub(super) fn read_digests(
    connection: &mut Connection,
    key: &str,
    etag: Option<&str>,
    runs: &[(u64, u64)],
    block_size: u64,
) -> Result<(DigestTable, Head), Error> {
    let blocks: u64 = runs.iter().map(|(first, end)| end - first).sum();
    let grained = if block_size == BLOCK_SIZE { String::new() } else { format!("&grain={block_size}") };
    let path = format!("{key}/digests?blocks={}{grained}", format_runs(runs));
    let head = connection.get(&path, None, etag, None)?;
    if head.status != 200 {
        return Err(connection.refuse(&head));
    }
    let body = connection.body(&head, (blocks + 64) * 8)?;
    let algorithm = secret::algorithm(connection.url().secret());
    if head.proof.is_none() {
        connection.check_proof(&head, &body)?;
    }
    // Damage first, which is worth another try; whether it is proven only then.
    let table = DigestTable::decode_with_block_size(&body, &algorithm, block_size)
        .map_err(|e| Error::caused(ErrorKind::Protocol, "the digests of the source are not valid", e))?;
    connection.check_proof(&head, &body)?;
    if table.blocks.len() as u64 != blocks {
        return Err(Error::new(ErrorKind::Protocol, "the source sent digests of other blocks than asked for"));
    }
    Ok((table, head))
}

/// The long digests of all `blocks` blocks of the checkpoint `key`, which are those of one moment. That the table is of
/// the header and the payload at hand is for the caller to check.
pub(super) fn read_long_digests(
    connection: &mut Connection,
    key: &str,
    etag: Option<&str>,
    blocks: u64,
) -> Result<WideTable, Error> {
    let head = connection.get(&format!("{key}/digests?{LONG_QUERY}"), None, etag, None)?;
    if head.status != 200 {
        return Err(connection.refuse(&head));
    }
    let body = connection.body(&head, most_wide_table_len(blocks))?;
    let algorithm = secret::algorithm(connection.url().secret());
    let table = WideTable::decode(&body, &algorithm)
        .map_err(|e| Error::caused(ErrorKind::Protocol, "the digests of the source are not valid", e))?;
    connection.check_proof(&head, &body)?;
    Ok(table)
}

/// Checks that `head` announces parts of the payload, `len` bytes of them in all.
pub(super) fn check_blocks(connection: &mut Connection, head: &Head, len: u64) -> Result<(), Error> {
    if head.status != 200 {
        return Err(connection.refuse(head));
    }
    if head.content_length != Some(len) {
        return Err(Error::new(ErrorKind::Protocol, "the source answered with other blocks than asked for"));
    }
    Ok(())
}

/// Checks that `head` announces exactly bytes `[start, end)` of `total`.
pub(super) fn check_range(
    connection: &mut Connection,
    head: &Head,
    start: u64,
    end: u64,
    total: u64,
) -> Result<(), Error> {
    if (200..300).contains(&head.status) && head.status != 206 {
        let message = format!("the source answered {} where a part of the container was asked for", head.status);
        return Err(Error::new(ErrorKind::Protocol, message));
    }
    if head.status != 206 {
        return Err(connection.refuse(head));
    }
    if head.content_range != Some((start, end, total)) || head.content_length != Some(end - start) {
        return Err(Error::new(ErrorKind::Protocol, "the source answered with another range than asked for"));
    }
    Ok(())
}

pub(super) fn changed() -> Error {
    Error::new(ErrorKind::Changed, "the source went on to another snapshot while this one was being fetched")
}
