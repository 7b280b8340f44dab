//! The first requests to a source: they bring the header, the reserved entries, and all of a small container.
//!
//! Nothing of it is trusted before its digests match. Memory grows with what has arrived, not with what was announced.

use std::time::Duration;

use tensorferry_wire::container::{self, Header};
use tensorferry_wire::digest::{BLOCK_SIZE, Hasher};

use super::open::served_step;
use super::verify::{Passes, hash_digests};
use crate::client::answers::{check_range, read_digests};
use crate::client::blocks::block_len;
use crate::client::connection::{Connection, Head, Offers};
use crate::client::limits::{ATTEMPTS, Limits};
use crate::error::{Error, ErrorKind, Hint};
use crate::memory::{check_machine_has, check_room};
use crate::payload::is_control;
use crate::trust::secret;

/// The results of the first requests to a source.
pub(crate) struct FirstFetch {
    pub(crate) connection: Connection,
    pub(crate) step: i64,
    pub(crate) header: Header,
    pub(crate) header_digest: u64,
    pub(crate) payload_start: u64,
    pub(crate) etag: String,
    pub(crate) prefix: Vec<u8>,
    pub(crate) offers: Offers,
}

impl FirstFetch {
    /// Fetches the header and the first part of the payload, in which the control entries are, and verifies both with the
    /// source's digests.
    ///
    /// * `step`: of which step; without one, of that which the source serves.
    /// * `ahead`: how many bytes the first request asks for: the whole of a small container, the header of most others.
    /// * `max_control_bytes`: how many bytes header and control entries may have together.
    /// * `first_answer_timeout`: how long the source may take to begin its first answer.
    /// * `known_etag`: the entity tag of the snapshot that an earlier attempt began to fetch: no other one is accepted. It
    ///   is set as soon as the source has named one.
    /// * `passes`: the comparisons of earlier attempts; one that finds a difference is added.
    pub(crate) fn read(
        mut connection: Connection,
        step: Option<i64>,
        (ahead, max_control_bytes): (u64, u64),
        limits: &Limits,
        first_answer_timeout: Duration,
        known_etag: &mut Option<String>,
        passes: &mut Passes,
    ) -> Result<Self, Error> {
        let step = match step {
            Some(step) => step,
            None => served_step(&mut connection, limits.left()?.min(first_answer_timeout))?,
        };
        let path = format!("{step}.safetensors");
        let ahead = ahead.max(64);
        let patience = limits.left()?.min(first_answer_timeout);
        let head = connection.get(&path, Some((0, ahead)), known_etag.as_deref(), Some(patience))?;
        if head.status != 206 {
            return Err(refused(&mut connection, &head));
        }
        let protocol = |what: &str| Error::new(ErrorKind::Protocol, what.to_owned());
        let total = match head.content_range {
            Some((0, end, total)) if end == ahead.min(total) => total,
            _ => return Err(protocol("the source answered with another range than asked for")),
        };
        let offers = head.offers();
        let etag = head.etag.clone().ok_or_else(|| protocol("the source's answer has no ETag"))?;
        *known_etag = Some(etag.clone());
        let mut bytes = connection.body(&head, ahead)?;
        let algorithm = secret::algorithm(connection.url().secret());
        // `bytes` are those of the container from `first` on, and shall be until `end`.
        let mut extend = |bytes: &mut Vec<u8>, first: u64, end: u64| -> Result<(), Error> {
            let start = first + bytes.len() as u64;
            if start >= end {
                return Ok(());
            }
            let head = connection.get(&path, Some((start, end)), Some(&etag), None)?;
            check_range(&mut connection, &head, start, end, total)?;
            connection.append_body(&head, end - start, bytes)
        };
        let length = *bytes.first_chunk().ok_or_else(|| protocol("the container is shorter than eight bytes"))?;
        let invalid =
            |e: container::HeaderError| Error::caused(ErrorKind::Protocol, "the source's header is not valid", e);
        let payload_start = Header::total_len(length).map_err(invalid)?;
        if payload_start > total {
            return Err(protocol("the header is longer than the container"));
        }
        let fits = |described: u64| {
            if described <= max_control_bytes {
                return Ok(());
            }
            Err(protocol(&format!(
                "header and control entries of the source have {described} bytes; at most {max_control_bytes} are accepted"
            )))
        };
        fits(payload_start)?;
        extend(&mut bytes, 0, payload_start)?;
        #[allow(clippy::cast_possible_truncation, reason = "both are lengths of memory that exists")]
        let text = ..payload_start as usize;
        check_room(payload_start * container::DECODED_COST, "the header of the source")?;
        let header = Header::decode(&bytes[text]).map_err(invalid)?;
        let header_digest = algorithm.checksum(&bytes[text]);
        // The pages are here already: they take what comes next.
        bytes.drain(text);
        let mut prefix = bytes;
        let payload_len = header.payload_len();
        if payload_start + payload_len != total {
            return Err(protocol("the container has another length than its header says"));
        }
        if (prefix.len() as u64) < payload_len {
            let control = header.entries().iter().filter(|e| is_control(e)).map(|e| e.end).max();
            let wanted = control.unwrap_or(0).next_multiple_of(BLOCK_SIZE).min(payload_len);
            fits(payload_start.saturating_add(wanted))?;
            check_machine_has(wanted, "what the header of the source needs")?;
            prefix.truncate(usize::try_from(wanted).unwrap_or(usize::MAX));
            extend(&mut prefix, payload_start, payload_start + wanted)?;
        }
        prefix.shrink_to_fit();
        let blocks = (prefix.len() as u64).div_ceil(BLOCK_SIZE);
        let (table, _) = read_digests(&mut connection, &step.to_string(), Some(&etag), &[(0, blocks)], BLOCK_SIZE)?;
        if table.header != header_digest || table.payload_len != payload_len {
            return Err(Error::new(
                ErrorKind::Corrupt,
                format!("corrupt: the header did not match its checksum {ATTEMPTS} times"),
            ));
        }
        let blocks = prefix.chunks(block_len()).zip(&table.blocks);
        if let Some(first) =
            (0..).zip(blocks).find_map(|(i, (b, theirs))| (algorithm.checksum(b) != *theirs).then_some(i))
        {
            let mut all = Hasher::new();
            hash_digests(&mut all, &table.blocks);
            passes.note(&etag, &all);
            return Err(passes.error(&header, (first * BLOCK_SIZE, ((first + 1) * BLOCK_SIZE).min(payload_len))));
        }
        Ok(Self { connection, step, header, header_digest, payload_start, etag, prefix, offers })
    }
}

/// The error for a refusal of the first request.
pub(super) fn refused(connection: &mut Connection, head: &Head) -> Error {
    let refused = connection.refuse(head);
    if head.http_10 && head.status == 500 {
        let message = "the server there speaks HTTP/1.0 and cannot read a step: it is not a source of this engine";
        return Error::new(ErrorKind::Foreign, message).hinting(Hint::OtherProgram);
    }
    refused
}
