//! The first requests to a source: its header, the entries the header needs, and the digests of both.

use std::time::Duration;

use tensorferry_wire::container::{self, Header};
use tensorferry_wire::digest::{BLOCK_SIZE, DigestTable};

use super::OPEN_ATTEMPTS;
use super::connection::{Connection, Head};
use super::lane::block_len;
use super::limits::Limits;
use crate::arena::check_machine_has;
use crate::error::{Error, ErrorKind};
use crate::{same_host, secret};

/// The digest table at `path`, which must hold `blocks` blocks of `grain` bytes, and the head it came with.
pub(super) fn read_digests(
    connection: &mut Connection,
    path: &str,
    etag: Option<&str>,
    blocks: u64,
    grain: u64,
) -> Result<(DigestTable, Head), Error> {
    let head = connection.get(path, None, etag, None)?;
    if head.status != 200 {
        return Err(connection.refuse(&head));
    }
    let body = connection.body(&head, (blocks + 64) * 8)?;
    let algorithm = secret::algorithm(connection.source().secret());
    if head.proof.is_none() {
        connection.check_proof(&head, &body)?;
    }
    // Damage first, which is worth another try; whether it is proven only then.
    let table = DigestTable::decode_grained(&body, &algorithm, grain)
        .map_err(|e| Error::caused(ErrorKind::Protocol, "the digests of the source are not valid", e))?;
    connection.check_proof(&head, &body)?;
    if table.blocks.len() as u64 != blocks {
        return Err(Error::new(ErrorKind::Protocol, "the source sent digests of other blocks than asked for"));
    }
    Ok((table, head))
}

/// What the first requests to a source bring.
pub(super) struct Opened {
    pub(super) connection: Connection,
    pub(super) header: Header,
    pub(super) header_digest: u64,
    pub(super) payload_start: u64,
    pub(super) etag: String,
    pub(super) prefix: Vec<u8>,
    pub(super) same_host: Option<same_host::Name>,
}

impl Opened {
    /// Asks the source at the other end for the first `ahead` bytes: the whole of a small container, the header of most
    /// others. Its first answer may take `patience` to begin.
    pub(super) fn read(
        mut connection: Connection,
        step: i64,
        ahead: u64,
        limits: &Limits,
        patience: Duration,
    ) -> Result<Self, Error> {
        let path = format!("{step}.safetensors");
        let ahead = ahead.max(64);
        let head = connection.get(&path, Some((0, ahead)), None, Some(limits.left()?.min(patience)))?;
        if head.status != 206 {
            let foreign = head.http_10 && head.status == 500;
            let refused = connection.refuse(&head);
            return Err(if foreign {
                Error::new(ErrorKind::Foreign, "the source is a stock torchft server")
            } else {
                refused
            });
        }
        let protocol = |what: &str| Error::new(ErrorKind::Protocol, what.to_owned());
        let total = match head.content_range {
            Some((0, end, total)) if end == ahead.min(total) => total,
            _ => return Err(protocol("the source answered with another range than asked for")),
        };
        let same_host = head.same_host.clone();
        let etag = head.etag.clone().ok_or_else(|| protocol("the source's answer has no ETag"))?;
        let mut bytes = connection.body(&head, ahead)?;
        let mut extend = |bytes: &mut Vec<u8>, end: u64| -> Result<(), Error> {
            let start = bytes.len() as u64;
            if start >= end {
                return Ok(());
            }
            let head = connection.get(&path, Some((start, end)), Some(&etag), None)?;
            check_range(&mut connection, &head, start, end, total)?;
            bytes.append(&mut connection.body(&head, end - start)?);
            Ok(())
        };
        let length = *bytes.first_chunk().ok_or_else(|| protocol("the container is shorter than eight bytes"))?;
        let invalid =
            |e: container::HeaderError| Error::caused(ErrorKind::Protocol, "the source's header is not valid", e);
        let payload_start = Header::total_len(length).map_err(invalid)?;
        if payload_start > total {
            return Err(protocol("the header is longer than the container"));
        }
        extend(&mut bytes, payload_start)?;
        // Both are lengths of memory that exists.
        #[allow(clippy::cast_possible_truncation)]
        let mut prefix = bytes.split_off(payload_start as usize);
        let header = Header::decode(&bytes).map_err(invalid)?;
        let payload_len = header.payload_len();
        if payload_start + payload_len != total {
            return Err(protocol("the container has another length than its header says"));
        }
        if (prefix.len() as u64) < payload_len {
            let reserved = [container::MANIFEST_ENTRY, container::PICKLE_ENTRY];
            let control = header.entries().iter().filter(|e| reserved.contains(&e.name.as_str())).map(|e| e.end).max();
            let wanted = control.unwrap_or(0).next_multiple_of(BLOCK_SIZE).min(payload_len);
            check_machine_has(wanted, "what the header of the source needs")?;
            prefix.truncate(usize::try_from(wanted).unwrap_or(usize::MAX));
            let header_bytes = std::mem::take(&mut bytes);
            let mut whole = [header_bytes.as_slice(), &prefix].concat();
            extend(&mut whole, payload_start + wanted)?;
            prefix = whole.split_off(header_bytes.len());
            bytes = header_bytes;
        }
        let blocks = (prefix.len() as u64).div_ceil(BLOCK_SIZE);
        let (table, _) = read_digests(
            &mut connection,
            &format!("{step}/digests?blocks=0-{blocks}"),
            Some(&etag),
            blocks,
            BLOCK_SIZE,
        )?;
        let algorithm = secret::algorithm(connection.source().secret());
        let header_digest = algorithm.checksum(&bytes);
        let matching =
            prefix.chunks(block_len()).map(|block| algorithm.checksum(block)).eq(table.blocks.iter().copied());
        if table.header != header_digest || table.payload_len != payload_len || !matching {
            return Err(Error::new(
                ErrorKind::Corrupt,
                format!("corrupt: the header or the first blocks did not match their checksums {OPEN_ATTEMPTS} times"),
            ));
        }
        Ok(Self { connection, header, header_digest, payload_start, etag, prefix, same_host })
    }
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
