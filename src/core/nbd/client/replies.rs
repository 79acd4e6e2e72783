//! The client's half of the transmission phase: requests in flight and the replies to them.
//!
//! Invariants: every byte the server sends is checked against the request that it claims to answer: cookie,
//! kind, range, overlap, completeness, order; read payloads never pass through this module; memory is bounded
//! by the number of requests in flight. A violation is a [`ClientFatal`]: the stream cannot be trusted any
//! further.

use std::collections::VecDeque;

use super::{ClientEvent, ClientFatal, Failure, RemoteExport, SubmitError, printable};
use crate::nbd::errno::Errno;
use crate::nbd::wire::{
    self, CHUNK_FLAG_DONE, Command, Gather, Headers, Reader, Request, RequestHeader, chunk, command_flag,
};

/// Requests in flight on one connection; servers queue far fewer.
pub const IN_FLIGHT_MAX: usize = 4096;

/// Disjoint pieces in which one read may arrive, out of order; bounds what is kept about it.
const PIECES_MAX: usize = 4096;

/// Extents kept of one block status reply; the rest is read and dropped.
const EXTENTS_KEPT_MAX: usize = 32 << 10;

/// The longest error chunk: a message of the maximum length, an offset, and room for what may be defined
/// later.
const ERROR_CHUNK_BYTES_MAX: u64 = 8 << 10;

/// The longest payload of any chunk: what a compact header can say. Servers have no use for more.
const CHUNK_BYTES_MAX: u64 = u32::MAX as u64;

#[derive(Debug)]
enum State {
    Magic,
    Simple,
    Chunk,
    ExtendedChunk,
    /// Inside a chunk that answers the request in `slot`.
    Body {
        slot: usize,
        last: bool,
        body: Body,
    },
    /// The driver is taking a read's payload; `last` if the reply ends with it.
    Payload {
        slot: usize,
        last: bool,
    },
}

#[derive(Clone, Copy, Debug)]
enum Body {
    /// Offset of a data chunk with that many bytes of data.
    DataOffset {
        length: u64,
    },
    Hole,
    Error {
        kind: u16,
        length: u64,
    },
    /// Context id of a block status chunk with that many extents; an extended one says their number again.
    Context {
        extents: u64,
    },
    Extents {
        left: u64,
    },
}

/// State of a request in flight. Slots are reused, and their vectors with them.
#[derive(Debug, Default)]
struct Slot {
    request: Option<Request>,
    generation: u32,
    /// Which bytes of a read arrived: disjoint, ascending, never touching.
    pieces: Vec<(u64, u64)>,
    content_chunks: u32,
    extents: Vec<(u64, u32)>,
    extents_total: u64,
    status_seen: bool,
    failure: Option<Failure>,
}

/// State of one connection's transmission phase.
#[derive(Debug)]
pub(super) struct Transmission {
    export: Box<RemoteExport>,
    state: State,
    header: Gather<28>,
    error: Vec<u8>,
    slots: Vec<Slot>,
    free: Vec<usize>,
}

impl Transmission {
    pub(super) fn new(export: Box<RemoteExport>) -> Transmission {
        Transmission {
            export,
            state: State::Magic,
            header: Gather::new(),
            error: Vec::new(),
            slots: Vec::new(),
            free: Vec::new(),
        }
    }

    pub(super) fn export(&self) -> &RemoteExport {
        &self.export
    }

    pub(super) fn in_flight(&self) -> usize {
        self.slots.len() - self.free.len()
    }

    pub(super) fn submit(&mut self, request: &Request, out: &mut Vec<u8>) -> Result<u64, SubmitError> {
        self.export.accepts(request)?;
        let (length, limit) = (request.length, u64::from(u32::MAX));
        if !self.export.extended && length > limit {
            return Err(SubmitError::TooLong { length, limit });
        }
        let paid = self.export.extended && request.command == Command::Write;
        let index = match self.free.pop() {
            Some(index) => index,
            None if self.slots.len() < IN_FLIGHT_MAX => {
                self.slots.push(Slot::default());
                self.slots.len() - 1
            }
            None => return Err(SubmitError::TooManyInFlight { limit: IN_FLIGHT_MAX }),
        };
        let slot = &mut self.slots[index];
        // The generation tells a late or forged reply from the answer to the slot's present request.
        slot.generation = slot.generation.wrapping_add(1);
        let cookie = u64::from(slot.generation) << 32 | index as u64;
        slot.request = Some(Request { cookie, ..*request });
        RequestHeader {
            flags: request.flag_bits() | if paid { command_flag::PAYLOAD_LEN } else { 0 },
            command: request.command.code(),
            cookie,
            offset: request.offset,
            length,
        }
        .encode(self.export.headers(), out);
        Ok(cookie)
    }

    pub(super) fn payload_taken(&mut self, events: &mut VecDeque<ClientEvent>) -> Result<(), ClientFatal> {
        let State::Payload { slot, last } = self.state else { panic!("no payload was to be taken") };
        self.state = State::Magic;
        if last { self.finish(slot, events) } else { Ok(()) }
    }

    /// Handles one message, or as much of one as there is; advances `input` past it.
    pub(super) fn receive(
        &mut self,
        input: &mut &[u8],
        events: &mut VecDeque<ClientEvent>,
    ) -> Result<(), ClientFatal> {
        loop {
            match self.state {
                State::Magic => {
                    let Some(bytes) = self.header.take::<4>(input) else { return Ok(()) };
                    self.state = match (u32::from_be_bytes(bytes), self.export.headers()) {
                        (wire::MAGIC_SIMPLE_REPLY, Headers::Simple | Headers::Structured) => State::Simple,
                        (wire::MAGIC_CHUNK, Headers::Structured) => State::Chunk,
                        (wire::MAGIC_EXTENDED_CHUNK, Headers::Extended) => State::ExtendedChunk,
                        (found, _) => return Err(ClientFatal::ReplyMagic { found }),
                    };
                }
                State::Simple => {
                    let Some(bytes) = self.header.take::<12>(input) else { return Ok(()) };
                    self.state = State::Magic;
                    return self.simple(wire::u32_at(&bytes, 0), wire::u64_at(&bytes, 4), events);
                }
                State::Chunk => {
                    let Some(bytes) = self.header.take::<16>(input) else { return Ok(()) };
                    let (flags, kind) = (wire::u16_at(&bytes, 0), wire::u16_at(&bytes, 2));
                    let (cookie, length) = (wire::u64_at(&bytes, 4), wire::u32_at(&bytes, 12));
                    if let Some(slot) = self.chunk(flags, kind, cookie, u64::from(length))? {
                        return self.finish(slot, events);
                    }
                }
                State::ExtendedChunk => {
                    let Some(bytes) = self.header.take::<28>(input) else { return Ok(()) };
                    let (flags, kind) = (wire::u16_at(&bytes, 0), wire::u16_at(&bytes, 2));
                    let (cookie, offset) = (wire::u64_at(&bytes, 4), wire::u64_at(&bytes, 12));
                    let expected = self.request(self.find(cookie)?).offset;
                    if offset != expected {
                        return Err(ClientFatal::ReplyOffset { cookie, offset, expected });
                    }
                    if let Some(slot) = self.chunk(flags, kind, cookie, wire::u64_at(&bytes, 20))? {
                        return self.finish(slot, events);
                    }
                }
                State::Body { slot, last, body } => {
                    let Some(next) = self.body(slot, body, input, events)? else { return Ok(()) };
                    match next {
                        Next::Body(body) => self.state = State::Body { slot, last, body },
                        Next::Payload => {
                            self.state = State::Payload { slot, last };
                            return Ok(());
                        }
                        Next::End => {
                            self.state = State::Magic;
                            return if last { self.finish(slot, events) } else { Ok(()) };
                        }
                    }
                }
                State::Payload { .. } => panic!("the driver must take the payload before it feeds more"),
            }
        }
    }

    /// Takes a chunk's header: goes into its body, or yields the slot whose reply ends with it.
    fn chunk(
        &mut self,
        flags: u16,
        kind: u16,
        cookie: u64,
        length: u64,
    ) -> Result<Option<usize>, ClientFatal> {
        let slot = self.find(cookie)?;
        let last = flags & CHUNK_FLAG_DONE != 0;
        match self.admit(slot, kind, length, last)? {
            Some(body) => {
                self.state = State::Body { slot, last, body };
                Ok(None)
            }
            None => {
                self.state = State::Magic;
                Ok(Some(slot))
            }
        }
    }

    fn simple(
        &mut self,
        error: u32,
        cookie: u64,
        events: &mut VecDeque<ClientEvent>,
    ) -> Result<(), ClientFatal> {
        let index = self.find(cookie)?;
        let request = self.request(index);
        if self.export.structured && matches!(request.command, Command::Read | Command::BlockStatus) {
            // Errors of BLOCK_STATUS may come either way; its success and every READ need chunks.
            if request.command == Command::Read || error == 0 {
                return Err(ClientFatal::SimpleReply { cookie });
            }
        }
        if error != 0 {
            let failure = Failure { errno: Errno::from_code(error), message: String::new() };
            self.slots[index].failure.get_or_insert(failure);
        } else if request.command == Command::Read {
            let (offset, length) = (request.offset, request.length);
            self.slots[index].pieces.push((offset, offset + length));
            events.push_back(ClientEvent::Data { cookie, offset, length });
            self.state = State::Payload { slot: index, last: true };
            return Ok(());
        }
        self.finish(index, events)
    }

    /// Checks the header of a chunk against the request; none if the chunk has no body and ends the reply.
    fn admit(&self, slot: usize, kind: u16, length: u64, last: bool) -> Result<Option<Body>, ClientFatal> {
        let request = self.request(slot);
        let malformed = ClientFatal::ChunkMalformed { cookie: request.cookie, kind, length };
        if length > CHUNK_BYTES_MAX {
            return Err(malformed);
        }
        // Context id and count, and the size of an extent.
        let (status, head, each) =
            if self.export.extended { (chunk::BLOCK_STATUS_EXT, 8, 16) } else { (chunk::BLOCK_STATUS, 4, 8) };
        let body = match kind {
            chunk::NONE if length == 0 && last => return Ok(None),
            chunk::OFFSET_DATA if request.command == Command::Read && length > 8 => {
                Body::DataOffset { length: length - 8 }
            }
            chunk::OFFSET_HOLE if request.command == Command::Read && length == 12 => Body::Hole,
            _ if kind == status
                && request.command == Command::BlockStatus
                && length >= head + each
                && (length - head).is_multiple_of(each)
                && !self.slots[slot].status_seen =>
            {
                let extents = (length - head) / each;
                if request.req_one && extents > 1 {
                    return Err(malformed);
                }
                Body::Context { extents }
            }
            _ if kind & chunk::ERROR_BIT != 0 && (6..=ERROR_CHUNK_BYTES_MAX).contains(&length) => {
                Body::Error { kind, length }
            }
            _ => return Err(malformed),
        };
        Ok(Some(body))
    }

    /// Takes the next field of a chunk's body; none when more input is needed.
    fn body(
        &mut self,
        index: usize,
        body: Body,
        input: &mut &[u8],
        events: &mut VecDeque<ClientEvent>,
    ) -> Result<Option<Next>, ClientFatal> {
        let request = self.request(index);
        let cookie = request.cookie;
        match body {
            Body::DataOffset { length } => {
                let Some(bytes) = self.header.take::<8>(input) else { return Ok(None) };
                let offset = u64::from_be_bytes(bytes);
                self.slots[index].cover(&request, offset, length)?;
                events.push_back(ClientEvent::Data { cookie, offset, length });
                Ok(Some(Next::Payload))
            }
            Body::Hole => {
                let Some(bytes) = self.header.take::<12>(input) else { return Ok(None) };
                let (offset, length) = (wire::u64_at(&bytes, 0), u64::from(wire::u32_at(&bytes, 8)));
                self.slots[index].cover(&request, offset, length)?;
                events.push_back(ClientEvent::Hole { cookie, offset, length });
                Ok(Some(Next::End))
            }
            Body::Error { kind, length } => {
                let missing = length as usize - self.error.len();
                let (front, rest) = input.split_at(input.len().min(missing));
                self.error.extend_from_slice(front);
                *input = rest;
                if self.error.len() < length as usize {
                    return Ok(None);
                }
                let failure = parse_error(&request, kind, &self.error);
                self.error.clear();
                let failure = failure.ok_or(ClientFatal::ChunkMalformed { cookie, kind, length })?;
                self.slots[index].failure.get_or_insert(failure);
                Ok(Some(Next::End))
            }
            Body::Context { extents } => {
                let (id, count) = if self.export.extended {
                    let Some(bytes) = self.header.take::<8>(input) else { return Ok(None) };
                    (wire::u32_at(&bytes, 0), u64::from(wire::u32_at(&bytes, 4)))
                } else {
                    let Some(bytes) = self.header.take::<4>(input) else { return Ok(None) };
                    (u32::from_be_bytes(bytes), extents)
                };
                // Servers of the extension's first drafts may leave the count out.
                let counted = count == extents || count == 0;
                if Some(id) != self.export.base_allocation || !counted {
                    return Err(ClientFatal::Extents { cookie });
                }
                self.slots[index].status_seen = true;
                Ok(Some(Next::Body(Body::Extents { left: extents })))
            }
            Body::Extents { left: 0 } => Ok(Some(Next::End)),
            Body::Extents { left } => {
                let (length, flags) = if self.export.extended {
                    let Some(bytes) = self.header.take::<16>(input) else { return Ok(None) };
                    // The flags of base:allocation have 32 bits; bits above, which another version may
                    // define, are ignored.
                    (wire::u64_at(&bytes, 0), wire::u32_at(&bytes, 12))
                } else {
                    let Some(bytes) = self.header.take::<8>(input) else { return Ok(None) };
                    (u64::from(wire::u32_at(&bytes, 0)), wire::u32_at(&bytes, 4))
                };
                self.slots[index].extent(&request, length, flags, left)?;
                Ok(Some(Next::Body(Body::Extents { left: left - 1 })))
            }
        }
    }

    /// The reply to the slot's request is complete: checks that nothing is missing and frees the slot.
    fn finish(&mut self, index: usize, events: &mut VecDeque<ClientEvent>) -> Result<(), ClientFatal> {
        let request = self.request(index);
        let cookie = request.cookie;
        let slot = &mut self.slots[index];
        let result = match slot.failure.take() {
            Some(failure) => Err(failure),
            None => {
                let whole = match request.command {
                    Command::Read => slot.pieces == [(request.offset, request.offset + request.length)],
                    Command::BlockStatus => slot.status_seen,
                    _ => true,
                };
                if !whole {
                    return Err(ClientFatal::Incomplete { cookie });
                }
                if request.command == Command::BlockStatus {
                    let extents = std::mem::take(&mut slot.extents);
                    events.push_back(ClientEvent::Extents { cookie, extents });
                }
                Ok(())
            }
        };
        slot.request = None;
        slot.pieces.clear();
        slot.extents.clear();
        slot.extents_total = 0;
        slot.content_chunks = 0;
        slot.status_seen = false;
        self.free.push(index);
        events.push_back(ClientEvent::Done { cookie, result });
        Ok(())
    }

    fn find(&self, cookie: u64) -> Result<usize, ClientFatal> {
        let index = (cookie & u64::from(u32::MAX)) as usize;
        let known = self.slots.get(index).and_then(|slot| slot.request);
        match known {
            Some(request) if request.cookie == cookie => Ok(index),
            _ => Err(ClientFatal::UnknownCookie { cookie }),
        }
    }

    fn request(&self, index: usize) -> Request {
        self.slots[index].request.expect("only slots in flight are looked up")
    }
}

enum Next {
    Body(Body),
    Payload,
    End,
}

impl Slot {
    /// Notes that `length` bytes at `offset` of a read arrive now, which must be new and inside the request.
    fn cover(&mut self, request: &Request, offset: u64, length: u64) -> Result<(), ClientFatal> {
        let bad = ClientFatal::ContentRange { cookie: request.cookie, offset, length };
        let Some(end) = offset.checked_add(length) else { return Err(bad) };
        let inside = length > 0 && offset >= request.offset && end <= request.offset + request.length;
        self.content_chunks = self.content_chunks.saturating_add(1);
        if !inside || (request.df && self.content_chunks > 1) {
            return Err(bad);
        }
        let at = self.pieces.partition_point(|&(start, _)| start < offset);
        let before = at.checked_sub(1).map(|index| self.pieces[index]);
        let after = self.pieces.get(at).copied();
        if before.is_some_and(|(_, stop)| stop > offset) || after.is_some_and(|(start, _)| start < end) {
            return Err(bad);
        }
        let joins_before = before.is_some_and(|(_, stop)| stop == offset);
        let joins_after = after.is_some_and(|(start, _)| start == end);
        match (joins_before, joins_after) {
            (true, true) => {
                self.pieces[at - 1].1 = self.pieces[at].1;
                self.pieces.remove(at);
            }
            (true, false) => self.pieces[at - 1].1 = end,
            (false, true) => self.pieces[at].0 = offset,
            (false, false) if self.pieces.len() < PIECES_MAX => self.pieces.insert(at, (offset, end)),
            (false, false) => return Err(bad),
        }
        Ok(())
    }

    /// Notes one extent; `left` counts it and those that follow it. Only the very last may reach beyond the
    /// request, and only if more than one was asked for; the excess is cut off.
    fn extent(&mut self, request: &Request, length: u64, flags: u32, left: u64) -> Result<(), ClientFatal> {
        let room = request.length - self.extents_total;
        let beyond = length > room;
        if length == 0 || room == 0 || (beyond && (left > 1 || request.req_one)) {
            return Err(ClientFatal::Extents { cookie: request.cookie });
        }
        let length = length.min(room);
        self.extents_total += length;
        if self.extents.len() < EXTENTS_KEPT_MAX {
            self.extents.push((length, flags));
        }
        Ok(())
    }
}

/// The failure that an error chunk reports; none if its lengths or offset contradict it or the request.
fn parse_error(request: &Request, kind: u16, payload: &[u8]) -> Option<Failure> {
    let mut reader = Reader(payload);
    let error = reader.u32().filter(|&error| error != 0)?;
    let length = reader.u16()?;
    let message = printable(reader.bytes(usize::from(length))?);
    if kind == chunk::ERROR_OFFSET {
        let offset = reader.u64()?;
        if offset < request.offset || offset - request.offset >= request.length.max(1) {
            return None;
        }
    }
    Some(Failure { errno: Errno::from_code(error), message })
}
