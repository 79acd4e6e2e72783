//! Bytes on their way to a client: reply headers and payloads of one wake-up, sent in one system call.
//!
//! Invariants: bytes leave in the order they were appended; payload buffers stay here until sent. Once sealed,
//! nothing is appended, and the message header stays valid until the message is recycled. Must not know NBD.

use super::sys::{IOVECS_MAX, MessageHeader};
use calpe_core::block_io::BufMut;

/// Most parts of a message that leaves in one system call.
const PARTS_MAX: usize = IOVECS_MAX;

/// One message, being filled or being sent.
#[derive(Debug)]
pub(super) struct Outgoing {
    /// Headers and other small bytes, appended by the protocol.
    pub(super) head: Vec<u8>,
    parts: Vec<Part>,
    /// Where in `head` the next head part starts.
    head_taken: usize,
    payload_bytes: usize,
    /// Bytes of memory for payloads that are free again when this is sent.
    held_bytes: usize,
    /// The pointers of a sealed message.
    pointers: MessageHeader,
}

#[derive(Debug)]
enum Part {
    Head { start: usize, end: usize },
    Payload(BufMut),
}

impl Outgoing {
    pub(super) fn new() -> Outgoing {
        Outgoing {
            head: Vec::new(),
            parts: Vec::new(),
            head_taken: 0,
            payload_bytes: 0,
            held_bytes: 0,
            pointers: MessageHeader::new(),
        }
    }

    /// Appends a payload behind everything in `head` so far.
    pub(super) fn push_payload(&mut self, payload: BufMut) {
        self.close_head();
        self.payload_bytes += payload.len();
        self.held_bytes += payload.len();
        self.parts.push(Part::Payload(payload));
    }

    /// Counts memory that is held by payloads without being sent: they are parts of a larger buffer.
    pub(super) fn hold(&mut self, bytes: usize) {
        self.held_bytes += bytes;
    }

    /// Bytes of headers and payloads.
    pub(super) fn bytes(&self) -> usize {
        self.head.len() + self.payload_bytes
    }

    /// Bytes of memory for payloads that are free again when this is sent.
    pub(super) fn held_bytes(&self) -> usize {
        self.held_bytes
    }

    /// Whether there is nothing to send.
    pub(super) fn is_empty(&self) -> bool {
        self.head.is_empty() && self.parts.is_empty()
    }

    /// Whether one more reply may be appended after those of `expected` requests. Replies in several parts may go
    /// beyond; they cost a second send.
    pub(super) fn has_room_for(&self, expected: usize) -> bool {
        // A reply adds a head part and a payload; sealing may add one more part.
        self.parts.len() + 2 * (expected + 1) < PARTS_MAX
    }

    /// Makes the message ready to be sent. `head` is not touched from here on.
    pub(super) fn seal(&mut self) {
        self.close_head();
        self.pointers.clear();
        for part in &mut self.parts {
            match part {
                Part::Head { start, end } => self.pointers.push(&self.head[*start..*end]),
                Part::Payload(buf) => self.pointers.push(buf),
            }
        }
    }

    /// The message header of what is still to be sent. Points into this message, which must stay where it is.
    pub(super) fn header(&mut self) -> *const libc::msghdr {
        self.pointers.header()
    }

    /// Notes that the next `sent` bytes have left. Returns whether all have.
    pub(super) fn advance(&mut self, sent: usize) -> bool {
        self.pointers.advance(sent)
    }

    /// Empties the message, keeping its memory for the next one.
    pub(super) fn recycle(&mut self) {
        self.head.clear();
        self.parts.clear();
        self.head_taken = 0;
        self.payload_bytes = 0;
        self.held_bytes = 0;
        self.pointers.clear();
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
    use calpe_core::block_io::Pool;

    #[test]
    fn more_parts_than_one_system_call_takes_leave_in_several() {
        let pool = Pool::new(1 << 16).unwrap();
        let mut message = Outgoing::new();
        let parts = 3 * PARTS_MAX / 2;
        for part in 0..parts {
            message.head.push(part as u8);
            let mut payload = pool.alloc(1);
            payload[0] = !part as u8;
            message.push_payload(payload);
        }
        message.seal();
        let (mut sent, mut calls) = (0, 0);
        loop {
            let count = message.pointers.vectors();
            assert!(count <= PARTS_MAX);
            (sent, calls) = (sent + count, calls + 1);
            if message.advance(count) {
                break;
            }
        }
        assert_eq!((sent, calls), (2 * parts, 3));
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
            assert_eq!((message.bytes(), message.held_bytes()), (expected.len(), 500));
            message.seal();
            let mut seen = Vec::new();
            loop {
                let step = 37.min(expected.len() - seen.len());
                seen.extend_from_slice(&message.pointers.gather()[..step]);
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
