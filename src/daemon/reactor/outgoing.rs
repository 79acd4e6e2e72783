//! Bytes on their way to a client: reply headers and payloads of one wake-up, sent in one system call.
//!
//! Invariants: bytes leave in the order they were appended; payload buffers stay here until sent. Once sealed,
//! nothing is appended, and the message header stays valid until the message is recycled. Must not know NBD.
#![allow(unsafe_code)] // message headers are raw pointers; each block argues for itself

use crate::block_io::BufMut;
use std::ptr;

/// Most parts of one message: IOV_MAX of Linux.
const PARTS_MAX: usize = 1024;

/// One message, being filled or being sent.
#[derive(Debug)]
pub(super) struct Outgoing {
    /// Headers and other small bytes, appended by the protocol.
    pub(super) head: Vec<u8>,
    parts: Vec<Part>,
    /// Where in `head` the next head part starts.
    head_taken: usize,
    payload_bytes: usize,
    raw: Raw,
}

#[derive(Debug)]
enum Part {
    Head { start: usize, end: usize },
    Payload(BufMut),
}

/// The pointers of a sealed message.
#[derive(Debug)]
struct Raw {
    iovecs: Vec<libc::iovec>,
    /// Parts sent completely.
    sent: usize,
    header: libc::msghdr,
}

impl Outgoing {
    pub(super) fn new() -> Outgoing {
        // SAFETY: all zeroes is a valid msghdr: no address, no vectors, no control data.
        let header = unsafe { std::mem::zeroed() };
        Outgoing {
            head: Vec::new(),
            parts: Vec::new(),
            head_taken: 0,
            payload_bytes: 0,
            raw: Raw { iovecs: Vec::new(), sent: 0, header },
        }
    }

    /// Appends a payload behind everything in `head` so far.
    pub(super) fn push_payload(&mut self, payload: BufMut) {
        self.close_head();
        self.payload_bytes += payload.len();
        self.parts.push(Part::Payload(payload));
    }

    /// Bytes of headers and payloads.
    pub(super) fn bytes(&self) -> usize {
        self.head.len() + self.payload_bytes
    }

    /// Bytes of payloads.
    pub(super) fn payload_bytes(&self) -> usize {
        self.payload_bytes
    }

    /// Whether there is nothing to send.
    pub(super) fn is_empty(&self) -> bool {
        self.head.is_empty() && self.parts.is_empty()
    }

    /// Whether one more reply may be appended after those of `expected` requests.
    pub(super) fn has_room_for(&self, expected: usize) -> bool {
        // A reply adds a head part and a payload; sealing may add one more part.
        self.parts.len() + 2 * (expected + 1) < PARTS_MAX
    }

    /// Makes the message ready to be sent. `head` is not touched from here on.
    pub(super) fn seal(&mut self) {
        self.close_head();
        let head = self.head.as_ptr();
        self.raw.iovecs.clear();
        self.raw.iovecs.extend(self.parts.iter_mut().map(|part| match part {
            Part::Head { start, end } => {
                libc::iovec { iov_base: head.wrapping_add(*start).cast_mut().cast(), iov_len: *end - *start }
            }
            Part::Payload(buf) => libc::iovec { iov_base: buf.as_mut_ptr().cast(), iov_len: buf.len() },
        }));
        self.raw.sent = 0;
    }

    /// The message header of what is still to be sent. Points into this message, which must stay where it is.
    pub(super) fn header(&mut self) -> *const libc::msghdr {
        let rest = &mut self.raw.iovecs[self.raw.sent..];
        self.raw.header.msg_iov = rest.as_mut_ptr();
        self.raw.header.msg_iovlen = rest.len();
        &raw const self.raw.header
    }

    /// Notes that the next `sent` bytes have left. Returns whether all have.
    pub(super) fn advance(&mut self, mut sent: usize) -> bool {
        while let Some(part) = self.raw.iovecs.get_mut(self.raw.sent) {
            if sent < part.iov_len {
                part.iov_base = part.iov_base.wrapping_byte_add(sent);
                part.iov_len -= sent;
                return false;
            }
            sent -= part.iov_len;
            self.raw.sent += 1;
        }
        true
    }

    /// Empties the message, keeping its memory for the next one.
    pub(super) fn recycle(&mut self) {
        self.head.clear();
        self.parts.clear();
        self.head_taken = 0;
        self.payload_bytes = 0;
        self.raw.iovecs.clear();
        self.raw.sent = 0;
        self.raw.header.msg_iov = ptr::null_mut();
        self.raw.header.msg_iovlen = 0;
    }

    fn close_head(&mut self) {
        if self.head.len() > self.head_taken {
            self.parts.push(Part::Head { start: self.head_taken, end: self.head.len() });
            self.head_taken = self.head.len();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::block_io::Pool;

    /// The bytes that the kernel would send now.
    fn gather(message: &mut Outgoing) -> Vec<u8> {
        // SAFETY: the header points into `message`, which is alive and not touched meanwhile.
        let parts = unsafe {
            let header = &*message.header();
            std::slice::from_raw_parts(header.msg_iov, header.msg_iovlen)
        };
        // SAFETY: each part is a live range of the message's head or of a payload.
        parts
            .iter()
            .flat_map(|p| unsafe { std::slice::from_raw_parts(p.iov_base.cast(), p.iov_len) })
            .copied()
            .collect()
    }

    #[test]
    fn headers_and_payloads_keep_their_order_across_short_sends() {
        let pool = Pool::new(1 << 16).unwrap();
        let mut message = Outgoing::new();
        for round in 0..2 {
            let mut expected = Vec::new();
            for reply in 0..5u8 {
                message.head.extend_from_slice(&[reply; 3]);
                expected.extend_from_slice(&[reply; 3]);
                let mut payload = pool.alloc(100);
                payload.fill(0x80 | reply);
                expected.extend_from_slice(&payload);
                message.push_payload(payload);
            }
            message.head.push(round);
            expected.push(round);
            assert_eq!((message.bytes(), message.payload_bytes()), (expected.len(), 500));
            message.seal();
            let mut seen = Vec::new();
            loop {
                let step = 37.min(expected.len() - seen.len());
                seen.extend_from_slice(&gather(&mut message)[..step]);
                if message.advance(step) {
                    break;
                }
            }
            assert_eq!(seen, expected);
            message.recycle();
            assert!(message.is_empty());
        }
    }
}
