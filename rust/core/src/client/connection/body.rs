//! The body of an answer: received straight into its place, from the socket or through memory shared with the source.
//!
//! From the socket, one system call fills up to [`MAX_SLICES`] destinations. Through shared memory, the source
//! announces each slot with one byte over the socket, and gets one back when the slot has been read.

use std::io::{IoSliceMut, Write};

use super::{Connection, Head};
use crate::error::Error;
use crate::memory::make_room;
use crate::same_host::ring::RingReader;

/// As many slices as the system takes in one call.
const MAX_SLICES: usize = 1024;

/// The memory that a source on this machine shares, and how much of it may be read.
pub(super) struct Ring {
    pub(super) reader: RingReader,
    /// Slots that are filled.
    pub(super) announced: u64,
    /// Whether the body of the last answer comes through it.
    pub(super) in_use: bool,
}

impl Connection {
    /// Fills `parts` (the next bytes of the body) in order. `received` is given what has just arrived, in order too, and
    /// `counted` how much that was, once for all that came at a time.
    pub(crate) fn fill(
        &mut self,
        parts: &mut [IoSliceMut<'_>],
        mut received: impl FnMut(&[u8]),
        counted: impl Fn(u64),
    ) -> Result<(), Error> {
        let mut parts = parts;
        loop {
            IoSliceMut::advance_slices(&mut parts, 0);
            let wanted: u64 = parts.iter().map(|p| p.len() as u64).sum();
            if wanted == 0 {
                return Ok(());
            }
            if wanted > self.remaining {
                return Err(self.protocol("its answer ended before the bytes it announced"));
            }
            if self.ring.as_ref().is_some_and(|ring| ring.in_use) {
                let got = self.take_from_ring(&mut parts[0], &mut received)?;
                self.remaining -= got as u64;
                counted(got as u64);
                IoSliceMut::advance_slices(&mut parts, got);
                continue;
            }
            let got = if self.taken < self.ahead.len() {
                let ahead = &self.ahead[self.taken..];
                let n = ahead.len().min(parts[0].len());
                parts[0][..n].copy_from_slice(&ahead[..n]);
                self.taken += n;
                n
            } else {
                self.wait_at_most(self.stall())?;
                let count = parts.len().min(MAX_SLICES);
                self.receive(&mut parts[..count])?
            };
            self.remaining -= got as u64;
            counted(got as u64);
            let mut left = got;
            for part in parts.iter() {
                let here = left.min(part.len());
                received(&part[..here]);
                left -= here;
                if left == 0 {
                    break;
                }
            }
            IoSliceMut::advance_slices(&mut parts, got);
        }
    }

    /// Receives some of the rest of the body into `into`; 0 at its end, which without a Content-Length is that of the
    /// connection.
    pub(crate) fn read_some(&mut self, head: &Head, into: &mut [u8]) -> Result<usize, Error> {
        let bounded = head.content_length.is_some();
        let left = if bounded { usize::try_from(self.remaining).unwrap_or(usize::MAX) } else { usize::MAX };
        let len = into.len().min(left);
        if len == 0 {
            return Ok(0);
        }
        let ahead = self.ahead.len() - self.taken;
        let got = if ahead > 0 {
            let got = ahead.min(len);
            into[..got].copy_from_slice(&self.ahead[self.taken..self.taken + got]);
            self.taken += got;
            got
        } else {
            loop {
                self.wait_at_most(self.stall())?;
                match self.receive_or_end(&mut [IoSliceMut::new(&mut into[..len])])? {
                    Some(0) => {}
                    Some(got) => break got,
                    None if bounded => return Err(self.ended_early()),
                    None => return Ok(0),
                }
            }
        };
        if bounded {
            self.remaining -= got as u64;
        }
        Ok(got)
    }

    /// Copies bytes of the current slot into `into`, after waiting for the source to announce the slot.
    fn take_from_ring(&mut self, into: &mut [u8], received: impl FnMut(&[u8])) -> Result<usize, Error> {
        let remaining = self.remaining;
        while self.ring.as_ref().is_some_and(|ring| ring.announced == 0) {
            let marks = if self.taken < self.ahead.len() {
                let marks = self.ahead.len() - self.taken;
                self.taken = self.ahead.len();
                marks
            } else {
                self.wait_at_most(self.stall())?;
                // One byte stands for a whole slot.
                self.receive_anything(&mut [IoSliceMut::new(&mut [0; 16])])?
            };
            let Some(ring) = &mut self.ring else { break };
            ring.announced = marks as u64;
            if ring.announced > ring.reader.parts(remaining) {
                return Err(self.protocol("it announced more than it has"));
            }
        }
        let Some(Ring { reader, announced, .. }) = &mut self.ring else { return Ok(0) };
        let n = into.len().min(reader.left());
        reader.copy(&mut into[..n], received);
        if reader.left() == 0 || n as u64 == remaining {
            reader.next();
            *announced -= 1;
            (&*self.stream).write_all(&[1]).map_err(|e| self.io_error(&e))?;
        }
        Ok(n)
    }

    /// The whole body, which must not be longer than `limit` bytes.
    pub(crate) fn body(&mut self, head: &Head, limit: u64) -> Result<Vec<u8>, Error> {
        let mut body = Vec::new();
        self.append_body(head, limit, &mut body)?;
        Ok(body)
    }

    /// Reads a body and appends it to `bytes`. After an error, `bytes` may end with a part of it.
    pub(crate) fn append_body(&mut self, head: &Head, limit: u64, bytes: &mut Vec<u8>) -> Result<(), Error> {
        let length = head.content_length.ok_or_else(|| self.protocol("its answer has no Content-Length"))?;
        if length > limit {
            return Err(self.protocol(format!("its answer has {length} bytes where at most {limit} make sense")));
        }
        let mut left = length;
        while left > 0 {
            // Grown as bytes arrive: an announced length alone takes no memory.
            let at = bytes.len();
            let step = usize::try_from(left).unwrap_or(usize::MAX).min(1 << 20);
            make_room(bytes, step)?;
            bytes.resize(at + step, 0);
            self.fill(&mut [IoSliceMut::new(&mut bytes[at..])], |_| (), |_| ())?;
            left -= step as u64;
        }
        Ok(())
    }
}
