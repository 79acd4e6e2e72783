//! The server's half of the transmission phase: validates requests, answers the invalid ones, encodes replies.
//!
//! Invariants: a request handed to the driver lies inside the export, is aligned, has a length above zero (but for
//! FLUSH) and uses only what was negotiated; every other request is answered here, and its payload drained unread;
//! payload bytes never pass through this module. Nothing allocates per request but what `out` grows by. It must
//! not know how a request is executed.

use super::errno::Errno;
use super::export::ExportInfo;
use super::handshake::{BASE_ALLOCATION_ID, Negotiated};
use super::server::{Fatal, Incoming};
use super::wire::{
    self, CHUNK_FLAG_DONE, COMMAND_DISC, ChunkHeader, Command, Gather, Request, RequestHeader, chunk, clip,
};

/// The longest payload of a refused WRITE that is drained. Twice the advertised maximum forgives a client that
/// took the limit for a hint; one that announces more is quicker to reconnect than to listen to.
pub const WRITE_DRAIN_BYTES_MAX: u64 = 64 << 20;

/// Length of the message in an error reply; long enough for a sentence, short enough to send thousands.
pub const ERROR_MESSAGE_BYTES_MAX: usize = 256;

/// Extents in one BLOCK_STATUS reply; bounds the reply to 256 KiB. The client asks again from where it ends.
pub const BLOCK_STATUS_EXTENTS_MAX: usize = 32 << 10;

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
    /// Discarding the payload of a refused WRITE, to be answered after its last byte: clients that send before
    /// they receive would not see an earlier answer.
    Drain {
        left: u64,
        cookie: u64,
        refusal: Refusal,
    },
}

/// State of one connection's transmission phase.
#[derive(Debug)]
pub(super) struct Transmission {
    export: ExportInfo,
    structured: bool,
    base_allocation: bool,
    state: State,
    header: Gather<{ wire::REQUEST_HEADER_BYTES }>,
    pub stopping: bool,
}

impl Transmission {
    pub fn new(negotiated: Negotiated, stopping: bool) -> Transmission {
        Transmission {
            export: negotiated.export,
            structured: negotiated.structured,
            base_allocation: negotiated.base_allocation,
            state: State::Header,
            header: Gather::new(),
            stopping,
        }
    }

    pub fn export(&self) -> &ExportInfo {
        &self.export
    }

    pub fn payload_taken(&mut self) {
        assert!(matches!(self.state, State::Payload), "no payload was to be taken");
        self.state = State::Header;
    }

    /// Handles one request, or as much of one as there is; advances `input` past it.
    pub fn receive(&mut self, input: &mut &[u8], out: &mut Vec<u8>) -> Result<Option<Incoming>, Fatal> {
        loop {
            match &mut self.state {
                State::Payload => panic!("the driver must take the payload before it feeds more"),
                State::Drain { left, cookie, refusal } => {
                    let count = (*left).min(input.len() as u64);
                    *input = &input[count as usize..];
                    *left -= count;
                    if *left > 0 {
                        return Ok(None);
                    }
                    let (cookie, refusal) = (*cookie, *refusal);
                    self.state = State::Header;
                    self.append_error(cookie, refusal.errno, refusal.message, out);
                    return Ok(None);
                }
                State::Header => {
                    let Some(bytes) = self.header.take::<{ wire::REQUEST_HEADER_BYTES }>(input) else {
                        return Ok(None);
                    };
                    let header =
                        RequestHeader::decode(&bytes).map_err(|found| Fatal::RequestMagic { found })?;
                    if header.command == COMMAND_DISC {
                        return Ok(Some(Incoming::Disconnect));
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
                        Err(refusal) => {
                            let is_write = header.command == Command::Write.code();
                            let left = if is_write { u64::from(header.length) } else { 0 };
                            if left > WRITE_DRAIN_BYTES_MAX {
                                return Err(Fatal::PayloadLength {
                                    length: left,
                                    limit: WRITE_DRAIN_BYTES_MAX,
                                });
                            }
                            self.state = State::Drain { left, cookie: header.cookie, refusal };
                        }
                    }
                }
            }
        }
    }

    /// Everything that can be wrong with a header. The order matters where two faults meet: nonsense before
    /// permission, permission before range, range before alignment.
    fn validate(&self, header: &RequestHeader) -> Result<Request, Refusal> {
        let Some(command) = Command::from_code(header.command) else {
            return refuse(Errno::Inval, "unknown command");
        };
        if self.stopping {
            return refuse(Errno::Shutdown, "the server is shutting down");
        }
        if header.flags & !command.flags() != 0 {
            return refuse(Errno::Inval, "a command flag that this command does not have");
        }
        let request = Request::from_header(header, command);
        if request.df && !self.structured {
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
            Command::BlockStatus => self.base_allocation,
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
        let block_min = u64::from(self.export.block_min);
        if !request.offset.is_multiple_of(block_min) || !request.length.is_multiple_of(block_min) {
            return refuse(Errno::Inval, "offset or length is not a multiple of the minimum block size");
        }
        if request.length > u64::from(self.export.block_max) {
            match command {
                Command::Read if request.df => {
                    return refuse(Errno::Overflow, "the read is too long for one reply");
                }
                Command::Read | Command::Write => {
                    return refuse(Errno::Inval, "the payload exceeds the maximum block size");
                }
                // Commands without a payload are cut by whoever executes them: the kernel trims 4 GiB at once.
                _ => {}
            }
        }
        if command == Command::BlockStatus && request.length == 0 {
            // Its reply has to describe at least one byte, so that no success can be expressed.
            return refuse(Errno::Inval, "block status of no bytes");
        }
        Ok(request)
    }

    pub fn reply_done(&self, request: &Request, out: &mut Vec<u8>) {
        if self.structured {
            let (kind, cookie) = (chunk::NONE, request.cookie);
            ChunkHeader { flags: CHUNK_FLAG_DONE, kind, cookie, length: 0 }.encode(out);
        } else {
            wire::encode_simple_reply(request.cookie, None, out);
        }
    }

    pub fn reply_error(&self, request: &Request, errno: Errno, message: &str, out: &mut Vec<u8>) {
        self.append_error(request.cookie, errno.allowed_for(request), message, out);
    }

    fn append_error(&self, cookie: u64, errno: Errno, message: &str, out: &mut Vec<u8>) {
        if !self.structured {
            wire::encode_simple_reply(cookie, Some(errno), out);
            return;
        }
        let message = clip(message, ERROR_MESSAGE_BYTES_MAX).as_bytes();
        let message_length = u16::try_from(message.len()).expect("clipped to 256 bytes");
        let length = 6 + u32::from(message_length);
        ChunkHeader { flags: CHUNK_FLAG_DONE, kind: chunk::ERROR, cookie, length }.encode(out);
        out.extend_from_slice(&errno.code().to_be_bytes());
        out.extend_from_slice(&message_length.to_be_bytes());
        out.extend_from_slice(message);
    }

    pub fn reply_read_header(&self, request: &Request, out: &mut Vec<u8>) {
        assert_eq!(request.command, Command::Read, "only reads have a payload");
        if !self.structured {
            wire::encode_simple_reply(request.cookie, None, out);
            return;
        }
        let length = u32::try_from(8 + request.length).expect("a valid read is at most 32 MiB");
        let (kind, cookie) = (chunk::OFFSET_DATA, request.cookie);
        ChunkHeader { flags: CHUNK_FLAG_DONE, kind, cookie, length }.encode(out);
        out.extend_from_slice(&request.offset.to_be_bytes());
    }

    pub fn reply_block_status(&self, request: &Request, extents: &[(u64, u32)], out: &mut Vec<u8>) {
        assert_eq!(request.command, Command::BlockStatus, "extents answer block status only");
        // The chunk's length is known only after merging: the header is written first and mended last.
        let start = out.len();
        let (kind, cookie) = (chunk::BLOCK_STATUS, request.cookie);
        ChunkHeader { flags: CHUNK_FLAG_DONE, kind, cookie, length: 0 }.encode(out);
        out.extend_from_slice(&BASE_ALLOCATION_ID.to_be_bytes());

        let most = if request.req_one { 1 } else { BLOCK_STATUS_EXTENTS_MAX };
        let mut left = request.length;
        let mut count = 0;
        let mut open: Option<(u64, u32)> = None;
        // An answer must describe something; data of unknown state is always right.
        let unknown = [(request.length, 0)];
        let known = extents.iter().any(|&(length, _)| length > 0);
        for &(length, flags) in if known { extents } else { &unknown } {
            let length = length.min(left);
            if length == 0 {
                continue;
            }
            match &mut open {
                Some((open_length, open_flags)) if *open_flags == flags => *open_length += length,
                _ => {
                    if let Some(extent) = open.take() {
                        append_extent(extent, out);
                        count += 1;
                    }
                    if count == most {
                        break;
                    }
                    open = Some((length, flags));
                }
            }
            left -= length;
        }
        if let Some(extent) = open {
            append_extent(extent, out);
        }
        let length = u32::try_from(out.len() - start - wire::CHUNK_HEADER_BYTES)
            .expect("at most 32 Ki extents of 8 bytes");
        out[start + wire::CHUNK_HEADER_BYTES - 4..start + wire::CHUNK_HEADER_BYTES]
            .copy_from_slice(&length.to_be_bytes());
    }
}

fn append_extent((length, flags): (u64, u32), out: &mut Vec<u8>) {
    let length = u32::try_from(length).expect("clamped to the request, which is below 4 GiB");
    out.extend_from_slice(&length.to_be_bytes());
    out.extend_from_slice(&flags.to_be_bytes());
}
