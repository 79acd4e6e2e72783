//! The server's half of the transmission phase: validates requests, answers the invalid ones, encodes
//! replies.
//!
//! Invariants: a request handed to the driver lies inside the export, is aligned to what binds its client,
//! has a length above zero (except FLUSH) and uses only what was negotiated; every other request is answered
//! here, and its payload drained unread; payload bytes of reads and writes never pass through this module.
//! Nothing allocates per request except the growth of `out`. Must not know how a request is executed.

use super::errno::Errno;
use super::events::{Extents, Fatal, Incoming, ReadPart};
use super::export::ExportInfo;
use super::handshake::{BASE_ALLOCATION_ID, CALPE_HEALTH_ID, Negotiated};
use super::wire::{
    self, CHUNK_FLAG_DONE, COMMAND_DISC, ChunkHeader, Command, Contexts, Gather, Headers, Request,
    RequestHeader, chunk, clip, command_flag,
};

/// The longest payload of a refused WRITE that is drained. Twice the advertised maximum forgives a client
/// that took the limit for a hint; one that announces more is quicker to reconnect than to listen to.
pub const WRITE_DRAIN_BYTES_MAX: u64 = 64 << 20;

/// The longest payload for a client that did not ask for the block sizes, and so knows none: what nbdkit
/// takes.
pub(super) const UNTOLD_PAYLOAD_BYTES_MAX: u64 = 64 << 20;

/// Length of the message in an error reply; long enough for a sentence, short enough to send thousands.
pub const ERROR_MESSAGE_BYTES_MAX: usize = 256;

/// Extents in one BLOCK_STATUS reply; bounds the reply to 256 KiB. The client asks again from where it ends.
pub const BLOCK_STATUS_EXTENTS_MAX: usize = 32 << 10;

impl Errno {
    /// The error that may be sent for `request`: clients take ENOTSUP for "no fast zero here" and EOVERFLOW
    /// for "ask again without DF", so that either becomes EINVAL on any other request.
    #[must_use]
    pub(super) fn allowed_for(self, request: &Request) -> Errno {
        let fits = match self {
            Errno::NotSup => request.command == Command::WriteZeroes && request.fast_zero,
            Errno::Overflow => request.command == Command::Read && request.df,
            _ => true,
        };
        if fits { self } else { Errno::Inval }
    }
}

/// Why a request is refused.
#[derive(Clone, Copy, Debug)]
struct Refusal {
    errno: Errno,
    message: &'static str,
}

const fn refuse<T>(errno: Errno, message: &'static str) -> Result<T, Refusal> {
    Err(Refusal { errno, message })
}

#[derive(Clone, Copy, Debug)]
enum State {
    Header,
    /// The driver is taking the payload of a WRITE.
    Payload,
    /// Collecting the payload of a BLOCK_STATUS that names this many contexts, one or two.
    Filter {
        header: RequestHeader,
        contexts: u32,
    },
    /// Discarding the payload of a refused request, to be answered after its last byte: clients that send
    /// before they receive would not see an earlier answer.
    Drain {
        left: u64,
        header: RequestHeader,
        refusal: Refusal,
    },
}

/// Payload of BLOCK_STATUS: the effect length, and that many bytes more for each context.
const FILTER_LENGTH_BYTES: u64 = 8;
const FILTER_CONTEXT_BYTES: u64 = 4;

/// State of one connection's transmission phase.
#[derive(Debug)]
pub(super) struct Transmission {
    export: ExportInfo,
    headers: Headers,
    contexts: Contexts,
    /// What offsets and lengths must be multiples of, and how long payloads may be: the export's block sizes,
    /// for a client that knows them.
    align: u64,
    payload_max: u64,
    state: State,
    header: Gather<{ wire::EXTENDED_REQUEST_HEADER_BYTES }>,
    pub stopping: bool,
}

impl Transmission {
    pub(super) fn new(negotiated: Negotiated, stopping: bool) -> Transmission {
        let told = negotiated.told_block_sizes;
        let (min, max) = (negotiated.export.block_min, negotiated.export.block_max);
        Transmission {
            align: if told { u64::from(min) } else { 1 },
            payload_max: if told { u64::from(max) } else { UNTOLD_PAYLOAD_BYTES_MAX },
            export: negotiated.export,
            headers: negotiated.headers,
            contexts: negotiated.contexts,
            state: State::Header,
            header: Gather::new(),
            stopping,
        }
    }

    pub(super) fn export(&self) -> &ExportInfo {
        &self.export
    }

    pub(super) fn alignment(&self) -> u64 {
        self.align
    }

    pub(super) fn payload_taken(&mut self) {
        assert!(matches!(self.state, State::Payload), "no payload was to be taken");
        self.state = State::Header;
    }

    /// Handles one request, or as much of one as there is; advances `input` past it.
    pub(super) fn receive(
        &mut self,
        input: &mut &[u8],
        out: &mut Vec<u8>,
    ) -> Result<Option<Incoming>, Fatal> {
        loop {
            match &mut self.state {
                State::Payload => panic!("the driver must take the payload before it feeds more"),
                State::Drain { left, header, refusal } => {
                    let count = (*left).min(input.len() as u64);
                    *input = &input[count as usize..];
                    *left -= count;
                    if *left > 0 {
                        return Ok(None);
                    }
                    let (header, refusal) = (*header, *refusal);
                    self.state = State::Header;
                    self.append_error(header.cookie, header.offset, refusal.errno, refusal.message, out);
                    return Ok(None);
                }
                State::Filter { header, contexts } => {
                    let (header, count) = (*header, *contexts);
                    let (length, ids) = if count == 1 {
                        let Some(bytes) = self.header.take::<12>(input) else { return Ok(None) };
                        (wire::u64_at(&bytes, 0), [wire::u32_at(&bytes, 8), 0])
                    } else {
                        let Some(bytes) = self.header.take::<16>(input) else { return Ok(None) };
                        (wire::u64_at(&bytes, 0), [wire::u32_at(&bytes, 8), wire::u32_at(&bytes, 12)])
                    };
                    self.state = State::Header;
                    let effect =
                        RequestHeader { length, flags: header.flags & !command_flag::PAYLOAD_LEN, ..header };
                    let request = self.chosen(&ids[..count as usize]).and_then(|contexts| {
                        self.validate(&effect).map(|request| Request { contexts, ..request })
                    });
                    match request {
                        Ok(request) => return Ok(Some(Incoming::Request(request))),
                        Err(refusal) => self.state = State::Drain { left: 0, header, refusal },
                    }
                }
                State::Header => {
                    let Some(header) = self.header(input)? else { return Ok(None) };
                    if header.command == COMMAND_DISC {
                        return Ok(Some(Incoming::Disconnect));
                    }
                    let payload = self.payload_of(&header)?;
                    if let Some(contexts) = self.filter_of(&header) {
                        self.state = State::Filter { header, contexts };
                        continue;
                    }
                    match self.validate(&header) {
                        Ok(request) if request.length == 0 && request.command != Command::Flush => {
                            self.reply_done(&request, out);
                            return Ok(None);
                        }
                        Ok(request) if request.command == Command::Write => {
                            self.state = State::Payload;
                            return Ok(Some(Incoming::Write { request }));
                        }
                        Ok(request) => return Ok(Some(Incoming::Request(request))),
                        Err(refusal) => self.state = State::Drain { left: payload, header, refusal },
                    }
                }
            }
        }
    }

    /// The next header, in the form that was negotiated.
    fn header(&mut self, input: &mut &[u8]) -> Result<Option<RequestHeader>, Fatal> {
        let header = if self.headers == Headers::Extended {
            let bytes = self.header.take::<{ wire::EXTENDED_REQUEST_HEADER_BYTES }>(input);
            bytes.map(|bytes| RequestHeader::decode_extended(&bytes))
        } else {
            let bytes = self.header.take::<{ wire::REQUEST_HEADER_BYTES }>(input);
            bytes.map(|bytes| RequestHeader::decode(&bytes))
        };
        header.transpose().map_err(|found| Fatal::RequestMagic { found })
    }

    /// How many bytes follow a header, whether its request is valid or refused. The length of a
    /// WRITE is that of its payload; with extended headers a flag says so, which qemu (8.2 to 10.0
    /// at least) leaves out and then sends the payload. Of other commands the flag alone says it.
    fn payload_of(&self, header: &RequestHeader) -> Result<u64, Fatal> {
        let extended = self.headers == Headers::Extended;
        let flagged = extended && header.flags & command_flag::PAYLOAD_LEN != 0;
        let paid = flagged || header.command == Command::Write.code();
        // A client that can express so much must keep to the advertised limit.
        let limit = if extended { self.payload_max } else { WRITE_DRAIN_BYTES_MAX };
        let length = if paid { header.length } else { 0 };
        if length > limit { Err(Fatal::PayloadLength { length, limit }) } else { Ok(length) }
    }

    /// How many contexts the payload of a BLOCK_STATUS names; none if it has no payload that can be
    /// understood.
    fn filter_of(&self, header: &RequestHeader) -> Option<u32> {
        let paid = self.headers == Headers::Extended && header.flags & command_flag::PAYLOAD_LEN != 0;
        if !paid || header.command != Command::BlockStatus.code() {
            return None;
        }
        // More contexts than were negotiated must contain one twice, or an unknown one.
        (1..=self.contexts.count())
            .find(|&count| header.length == FILTER_LENGTH_BYTES + FILTER_CONTEXT_BYTES * u64::from(count))
    }

    /// The contexts that were named, each once and each negotiated.
    fn chosen(&self, ids: &[u32]) -> Result<Contexts, Refusal> {
        let mut chosen = Contexts::default();
        for &id in ids {
            let (negotiated, place) = match id {
                BASE_ALLOCATION_ID => (self.contexts.allocation, &mut chosen.allocation),
                CALPE_HEALTH_ID => (self.contexts.health, &mut chosen.health),
                _ => return refuse(Errno::Inval, "block status of an unknown context"),
            };
            if !negotiated || std::mem::replace(place, true) {
                return refuse(
                    Errno::Inval,
                    "block status of a context twice, or of one that was not negotiated",
                );
            }
        }
        Ok(chosen)
    }

    /// Everything that can be wrong with a header. A client that did not ask for the block sizes is
    /// served at any alignment. The order matters where two faults meet: nonsense before
    /// permission, permission before range, range before alignment.
    fn validate(&self, header: &RequestHeader) -> Result<Request, Refusal> {
        let Some(command) = Command::from_code(header.command) else {
            return refuse(Errno::Inval, "unknown command");
        };
        if self.stopping {
            return refuse(Errno::Shutdown, "the server is shutting down");
        }
        if self.headers == Headers::Extended {
            let paid = header.flags & command_flag::PAYLOAD_LEN != 0;
            match command {
                Command::Write => {}
                Command::BlockStatus if paid => {
                    return refuse(
                        Errno::Inval,
                        "a payload that does not name negotiated contexts, each once",
                    );
                }
                _ if paid => return refuse(Errno::Inval, "this command takes no payload"),
                _ => {}
            }
        }
        let extra = if self.headers == Headers::Extended { command_flag::PAYLOAD_LEN } else { 0 };
        if header.flags & !(command.flags() | extra) != 0 {
            return refuse(Errno::Inval, "a command flag that this command does not have");
        }
        let mut request = Request::from_header(header, command);
        if request.df && self.headers == Headers::Simple {
            return refuse(Errno::Inval, "the flag DF needs structured replies");
        }
        if command.modifies() && self.export.read_only {
            return refuse(Errno::Perm, "the export is read-only");
        }
        if request.fast_zero && !self.export.fast_zero {
            return refuse(Errno::Inval, "the flag FAST_ZERO is not offered");
        }
        let offered = match command {
            Command::Read | Command::Write | Command::Flush => true,
            Command::Trim => self.export.trim,
            Command::Cache => self.export.cache,
            Command::WriteZeroes => self.export.write_zeroes,
            Command::BlockStatus => !self.contexts.is_empty(),
        };
        if !offered {
            return refuse(Errno::Inval, "the command was not offered or negotiated");
        }
        if command == Command::Flush {
            if request.offset != 0 || request.length != 0 {
                return refuse(Errno::Inval, "offset and length of a flush must be zero");
            }
            return Ok(request);
        }
        let inside = request.offset.checked_add(request.length).is_some_and(|end| end <= self.export.size);
        if !inside {
            let full = matches!(command, Command::Write | Command::WriteZeroes);
            return refuse(
                if full { Errno::NoSpc } else { Errno::Inval },
                "the range ends beyond the end of the export",
            );
        }
        if !request.offset.is_multiple_of(self.align) || !request.length.is_multiple_of(self.align) {
            return refuse(Errno::Inval, "offset or length is not a multiple of the minimum block size");
        }
        if request.length > self.payload_max {
            match command {
                Command::Read if request.df => {
                    return refuse(Errno::Overflow, "the read is too long for one reply");
                }
                Command::Read | Command::Write => {
                    return refuse(Errno::Inval, "the payload exceeds the maximum block size");
                }
                // The driver cuts commands without a payload: the kernel trims 4 GiB at once.
                _ => {}
            }
        }
        if command == Command::BlockStatus && request.length == 0 {
            // Its reply has to describe at least one byte, so that no success can be expressed.
            return refuse(Errno::Inval, "block status of no bytes");
        }
        if command == Command::BlockStatus {
            request.contexts = self.contexts;
        }
        Ok(request)
    }

    pub(super) fn reply_done(&self, request: &Request, out: &mut Vec<u8>) {
        if self.headers == Headers::Simple {
            wire::encode_simple_reply(request.cookie, None, out);
        } else {
            self.append_chunk(request, chunk::NONE, true, 0, out);
        }
    }

    pub(super) fn reply_error(&self, request: &Request, errno: Errno, message: &str, out: &mut Vec<u8>) {
        self.append_error(request.cookie, request.offset, errno.allowed_for(request), message, out);
    }

    fn append_error(&self, cookie: u64, offset: u64, errno: Errno, message: &str, out: &mut Vec<u8>) {
        if self.headers == Headers::Simple {
            wire::encode_simple_reply(cookie, Some(errno), out);
            return;
        }
        let message = clip(message, ERROR_MESSAGE_BYTES_MAX).as_bytes();
        let message_length = u16::try_from(message.len()).expect("clipped to 256 bytes");
        let length = 6 + u32::from(message_length);
        let header = ChunkHeader { flags: CHUNK_FLAG_DONE, kind: chunk::ERROR, cookie, offset, length };
        header.encode(self.headers, out);
        out.extend_from_slice(&errno.code().to_be_bytes());
        out.extend_from_slice(&message_length.to_be_bytes());
        out.extend_from_slice(message);
    }

    fn append_chunk(&self, request: &Request, kind: u16, last: bool, length: u64, out: &mut Vec<u8>) {
        let flags = if last { CHUNK_FLAG_DONE } else { 0 };
        let length =
            u32::try_from(length).expect("a chunk holds at most a maximum block, or bounded extents");
        let header = ChunkHeader { flags, kind, cookie: request.cookie, offset: request.offset, length };
        header.encode(self.headers, out);
    }

    pub(super) fn reply_read_header(&self, request: &Request, out: &mut Vec<u8>) {
        if self.headers == Headers::Simple {
            assert_eq!(request.command, Command::Read, "only reads have a payload");
            wire::encode_simple_reply(request.cookie, None, out);
            return;
        }
        self.reply_read_data(
            request,
            ReadPart { offset: request.offset, length: request.length, last: true },
            out,
        );
    }

    pub(super) fn takes_parts(&self, request: &Request) -> bool {
        self.headers >= Headers::Structured && !request.df
    }

    pub(super) fn reply_read_data(&self, request: &Request, part: ReadPart, out: &mut Vec<u8>) {
        self.check_part(request, part);
        self.append_chunk(request, chunk::OFFSET_DATA, part.last, 8 + part.length, out);
        out.extend_from_slice(&part.offset.to_be_bytes());
    }

    pub(super) fn reply_read_hole(&self, request: &Request, part: ReadPart, out: &mut Vec<u8>) {
        self.check_part(request, part);
        self.append_chunk(request, chunk::OFFSET_HOLE, part.last, 12, out);
        out.extend_from_slice(&part.offset.to_be_bytes());
        let length = u32::try_from(part.length).expect("a valid read is at most 32 MiB");
        out.extend_from_slice(&length.to_be_bytes());
    }

    /// The client trusts the parts of a read unchecked: a wrong part is a bug of the driver.
    fn check_part(&self, request: &Request, part: ReadPart) {
        assert_eq!(request.command, Command::Read, "only reads have parts");
        assert!(self.headers >= Headers::Structured, "simple replies have no parts");
        let end = request.offset + request.length;
        let inside = part.length > 0 && part.offset >= request.offset && part.offset + part.length <= end;
        assert!(inside, "{part:?} is no part of {request:?}");
        let whole = part.last && part.length == request.length;
        assert!(whole || self.takes_parts(request), "{request:?} is to be answered in one piece");
    }

    pub(super) fn reply_block_status(&self, request: &Request, extents: Extents, out: &mut Vec<u8>) {
        assert_eq!(request.command, Command::BlockStatus, "extents answer block status only");
        let Contexts { allocation, health } = request.contexts;
        if allocation {
            self.append_extents(request, BASE_ALLOCATION_ID, extents.allocation, !health, out);
        }
        if health {
            self.append_extents(request, CALPE_HEALTH_ID, extents.health, true, out);
        }
    }

    fn append_extents(
        &self,
        request: &Request,
        id: u32,
        extents: &[(u64, u32)],
        last: bool,
        out: &mut Vec<u8>,
    ) {
        let extended = self.headers == Headers::Extended;
        let kind = if extended { chunk::BLOCK_STATUS_EXT } else { chunk::BLOCK_STATUS };
        let merged = merged(request, extents);
        let count = merged.len() as u64;
        let length = if extended { 8 + 16 * count } else { 4 + 8 * count };
        self.append_chunk(request, kind, last, length, out);
        out.extend_from_slice(&id.to_be_bytes());
        if extended {
            let count = u32::try_from(count).expect("at most 32 Ki extents");
            out.extend_from_slice(&count.to_be_bytes());
        }
        for (length, flags) in merged {
            if extended {
                out.extend_from_slice(&length.to_be_bytes());
                out.extend_from_slice(&u64::from(flags).to_be_bytes());
            } else {
                let length = u32::try_from(length).expect("clamped to the request, which is below 4 GiB");
                out.extend_from_slice(&length.to_be_bytes());
                out.extend_from_slice(&flags.to_be_bytes());
            }
        }
    }
}

/// What is sent of the extents: neighbours of one state merged, nothing beyond the request, at least one.
fn merged(request: &Request, extents: &[(u64, u32)]) -> Vec<(u64, u32)> {
    let most = if request.req_one { 1 } else { BLOCK_STATUS_EXTENTS_MAX };
    let mut left = request.length;
    let mut merged: Vec<(u64, u32)> = Vec::new();
    for &(length, flags) in extents {
        let length = length.min(left);
        if length == 0 {
            continue;
        }
        let full = merged.len() == most;
        match merged.last_mut() {
            Some(last) if last.1 == flags => last.0 += length,
            _ if full => break,
            _ => merged.push((length, flags)),
        }
        left -= length;
    }
    if merged.is_empty() {
        // An answer must describe something; data of unknown state is always right.
        merged.push((request.length, 0));
    }
    merged
}
