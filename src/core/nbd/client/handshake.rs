//! The client's half of the fixed newstyle handshake: from the server's greeting to a described export.
//!
//! Invariants: the server is hostile input: every length is checked before anything is kept, replies must
//! answer the option that was sent, and their number is bounded. One option is under way at a time. TLS that
//! is wanted comes before everything else or the connection ends, and nothing that arrived before it is taken
//! for what came under its protection. It must not know of requests, nor of cryptography.

use super::{ClientFatal, ClientOptions, Refusal, RemoteExport, printable};
use crate::nbd::export::{BLOCK_BYTES_MAX, BLOCK_MIN_BYTES_ASSUMED, BLOCK_MIN_BYTES_MAX};
use crate::nbd::wire::{self, Gather, Reader, can, check_string, info, option, reply};

/// The longest option reply that is read: a few strings of the maximum length.
const OPTION_REPLY_BYTES_MAX: u32 = 16 << 10;

/// Replies to one option; servers send about five.
const REPLIES_MAX: u32 = 64;

/// Preferred block size of a server that says nothing, as the protocol has it.
const BLOCK_PREFERRED_BYTES_ASSUMED: u32 = 4096;

/// Size and transmission flags at the head of an EXPORT_NAME reply.
const EXPORT_NAME_REPLY_BYTES: usize = 10;

const OPTION_REPLY_HEADER_BYTES: usize = 20;

/// State of TLS.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Tls {
    /// Not wanted, or not asked for yet.
    Plain,
    /// Granted: received bytes belong to TLS until the driver reports that it is up.
    Starting,
    Secured,
}

#[derive(Debug)]
enum State {
    Greeting,
    ReplyHeader,
    ReplyData { kind: u32, length: u32 },
    ExportName,
    Padding { left: usize },
}

/// State of one handshake.
#[derive(Debug)]
pub(super) struct Handshake {
    wanted: ClientOptions,
    state: State,
    tls: Tls,
    /// The option whose replies are awaited.
    option: u32,
    replies_seen: u32,
    header: Gather<{ OPTION_REPLY_HEADER_BYTES }>,
    data: Vec<u8>,
    no_zeroes: bool,
    described: bool,
    export: RemoteExport,
}

impl Handshake {
    pub(super) fn new(wanted: ClientOptions) -> Handshake {
        let export = RemoteExport {
            name: wanted.export.clone(),
            block_min: BLOCK_MIN_BYTES_ASSUMED,
            block_preferred: BLOCK_PREFERRED_BYTES_ASSUMED,
            block_max: BLOCK_BYTES_MAX,
            ..RemoteExport::default()
        };
        Handshake {
            wanted,
            state: State::Greeting,
            tls: Tls::Plain,
            option: 0,
            replies_seen: 0,
            header: Gather::new(),
            data: Vec::new(),
            no_zeroes: false,
            described: false,
            export,
        }
    }

    /// Handles one message, or as much of one as there is; advances `input` past it. Yields the export at the
    /// end.
    pub(super) fn receive(
        &mut self,
        input: &mut &[u8],
        out: &mut Vec<u8>,
    ) -> Result<Option<Box<RemoteExport>>, ClientFatal> {
        if self.tls == Tls::Starting {
            return Err(ClientFatal::BytesBeforeTls);
        }
        loop {
            match &mut self.state {
                State::Greeting => {
                    let Some(bytes) = self.header.take::<18>(input) else { return Ok(None) };
                    self.greeted(&bytes, out)?;
                    return Ok(None);
                }
                State::ReplyHeader => {
                    let Some(bytes) = self.header.take::<OPTION_REPLY_HEADER_BYTES>(input) else {
                        return Ok(None);
                    };
                    self.state = self.admit(&bytes)?;
                }
                State::ReplyData { kind, length } => {
                    let (kind, length) = (*kind, *length as usize);
                    let (front, rest) = input.split_at(input.len().min(length - self.data.len()));
                    self.data.extend_from_slice(front);
                    *input = rest;
                    if self.data.len() < length {
                        return Ok(None);
                    }
                    self.state = State::ReplyHeader;
                    let data = std::mem::take(&mut self.data);
                    let granted = self.option == option::STARTTLS && kind == reply::ACK;
                    if granted && !input.is_empty() {
                        // The server speaks only when spoken to, and under TLS from here on.
                        return Err(ClientFatal::BytesBeforeTls);
                    }
                    return self.reply(kind, &data, out);
                }
                State::ExportName => {
                    let Some(bytes) = self.header.take::<EXPORT_NAME_REPLY_BYTES>(input) else {
                        return Ok(None);
                    };
                    self.describe(wire::u64_at(&bytes, 0), wire::u16_at(&bytes, 8))?;
                    let left = if self.no_zeroes { 0 } else { wire::EXPORT_NAME_PADDING_BYTES };
                    self.state = State::Padding { left };
                }
                State::Padding { left } => {
                    let count = input.len().min(*left);
                    *input = &input[count..];
                    *left -= count;
                    return Ok(if *left == 0 { Some(self.finish()) } else { None });
                }
            }
        }
    }

    fn greeted(&mut self, bytes: &[u8; 18], out: &mut Vec<u8>) -> Result<(), ClientFatal> {
        let found = wire::u64_at(bytes, 0);
        if found != wire::MAGIC_GREETING {
            return Err(ClientFatal::NotNbd { found });
        }
        let flags = wire::u16_at(bytes, 16);
        match wire::u64_at(bytes, 8) {
            wire::MAGIC_OPTION if flags & wire::HANDSHAKE_FIXED_NEWSTYLE != 0 => {}
            wire::MAGIC_OPTION | wire::MAGIC_OLDSTYLE => return Err(ClientFatal::Outdated),
            found => return Err(ClientFatal::NotNbd { found }),
        }
        self.no_zeroes = flags & wire::HANDSHAKE_NO_ZEROES != 0;
        let answer = flags & (wire::HANDSHAKE_FIXED_NEWSTYLE | wire::HANDSHAKE_NO_ZEROES);
        out.extend_from_slice(&u32::from(answer).to_be_bytes());
        if self.wanted.tls {
            self.send(option::STARTTLS, out);
        } else {
            self.begin(out);
        }
        Ok(())
    }

    /// Sends the first option that asks for something else than TLS.
    fn begin(&mut self, out: &mut Vec<u8>) {
        let first = match (self.wanted.extended, self.wanted.structured) {
            (true, _) => option::EXTENDED_HEADERS,
            (false, true) => option::STRUCTURED_REPLY,
            (false, false) => option::GO,
        };
        self.send(first, out);
    }

    /// Whether the server has granted TLS, and the driver has not set it up.
    pub(super) fn is_starting_tls(&self) -> bool {
        self.tls == Tls::Starting
    }

    /// Bytes received from now on came through TLS.
    pub(super) fn tls_started(&mut self, out: &mut Vec<u8>) {
        assert!(self.tls == Tls::Starting, "TLS that the server did not grant");
        self.tls = Tls::Secured;
        self.begin(out);
    }

    /// Checks the header of an option reply.
    fn admit(&mut self, bytes: &[u8; OPTION_REPLY_HEADER_BYTES]) -> Result<State, ClientFatal> {
        let magic = wire::u64_at(bytes, 0);
        if magic != wire::MAGIC_OPTION_REPLY {
            return Err(ClientFatal::OptionReplyMagic { found: magic });
        }
        let (option, kind, length) =
            (wire::u32_at(bytes, 8), wire::u32_at(bytes, 12), wire::u32_at(bytes, 16));
        if option != self.option {
            return Err(ClientFatal::OptionReplyFor { option, expected: self.option });
        }
        self.replies_seen += 1;
        if self.replies_seen > REPLIES_MAX || length > OPTION_REPLY_BYTES_MAX {
            return Err(ClientFatal::OptionReplyFlood { option });
        }
        Ok(State::ReplyData { kind, length })
    }

    /// Executes an option reply whose data is whole.
    fn reply(
        &mut self,
        kind: u32,
        data: &[u8],
        out: &mut Vec<u8>,
    ) -> Result<Option<Box<RemoteExport>>, ClientFatal> {
        let malformed = ClientFatal::OptionReplyMalformed { option: self.option, kind };
        if kind & reply::ERROR_BIT != 0 {
            return self.refused(kind, data, out).map(|()| None);
        }
        match (self.option, kind) {
            (_, reply::ACK) if !data.is_empty() => Err(malformed),
            (option::STARTTLS, reply::ACK) => {
                self.tls = Tls::Starting;
                Ok(None)
            }
            (option::EXTENDED_HEADERS | option::STRUCTURED_REPLY, reply::ACK) => {
                self.export.structured = true;
                self.export.extended = self.option == option::EXTENDED_HEADERS;
                let next = if self.wanted.base_allocation { option::SET_META_CONTEXT } else { option::GO };
                self.send(next, out);
                Ok(None)
            }
            (option::SET_META_CONTEXT, reply::META_CONTEXT) => {
                let mut reader = Reader(data);
                let id = reader.u32().ok_or_else(|| malformed.clone())?;
                if reader.0 != wire::BASE_ALLOCATION.as_bytes() || self.export.base_allocation.is_some() {
                    return Err(malformed);
                }
                self.export.base_allocation = Some(id);
                Ok(None)
            }
            (option::SET_META_CONTEXT, reply::ACK) => {
                self.send(option::GO, out);
                Ok(None)
            }
            (option::GO, reply::INFO) => {
                self.information(data, malformed)?;
                Ok(None)
            }
            (option::GO, reply::ACK) if self.described => Ok(Some(self.finish())),
            _ => Err(malformed),
        }
    }

    /// An error reply: the next best thing where there is one, the end of the connection where not.
    fn refused(&mut self, kind: u32, data: &[u8], out: &mut Vec<u8>) -> Result<(), ClientFatal> {
        let reason = Refusal::from_code(kind);
        let hopeless = matches!(reason, Refusal::TlsRequired | Refusal::Shutdown);
        match self.option {
            // An attacker who can answer for the server could also pretend that it has no TLS: the connection
            // ends here.
            option::STARTTLS => {
                encode_option(option::ABORT, &[], out);
                return Err(ClientFatal::TlsRefused { reason, message: printable(data) });
            }
            option::EXTENDED_HEADERS if !hopeless => {
                let next = if self.wanted.structured { option::STRUCTURED_REPLY } else { option::GO };
                self.send(next, out);
            }
            option::STRUCTURED_REPLY if !hopeless => self.send(option::GO, out),
            option::SET_META_CONTEXT if !hopeless => {
                self.export.base_allocation = None;
                self.send(option::GO, out);
            }
            // With extended headers there must be GO, and EXPORT_NAME may not be used.
            option::GO if reason == Refusal::Unsupported && !self.described && !self.export.extended => {
                self.send(option::EXPORT_NAME, out);
                self.state = State::ExportName;
            }
            _ => {
                encode_option(option::ABORT, &[], out);
                return Err(ClientFatal::Refused {
                    export: self.wanted.export.clone(),
                    reason,
                    message: printable(data),
                });
            }
        }
        Ok(())
    }

    fn information(&mut self, data: &[u8], malformed: ClientFatal) -> Result<(), ClientFatal> {
        let mut reader = Reader(data);
        let kind = reader.u16().ok_or_else(|| malformed.clone())?;
        match kind {
            info::EXPORT => {
                let (Some(size), Some(flags), true) = (reader.u64(), reader.u16(), reader.is_empty()) else {
                    return Err(malformed);
                };
                self.describe(size, flags)?;
            }
            info::BLOCK_SIZE => {
                let (Some(min), Some(preferred), Some(max), true) =
                    (reader.u32(), reader.u32(), reader.u32(), reader.is_empty())
                else {
                    return Err(malformed);
                };
                let sound = min.is_power_of_two()
                    && min <= BLOCK_MIN_BYTES_MAX
                    && preferred.is_power_of_two()
                    && preferred >= min
                    && max >= min
                    && (max == u32::MAX || max.is_multiple_of(min));
                if !sound {
                    return Err(ClientFatal::BlockSizes { min, preferred, max });
                }
                self.export.block_min = min;
                self.export.block_preferred = preferred;
                self.export.block_max = max.min(BLOCK_BYTES_MAX);
            }
            info::NAME => self.export.name = check_string(reader.0).map_err(|_| malformed)?.to_owned(),
            info::DESCRIPTION => self.export.description = printable(reader.0),
            // Information that a later protocol may define is skipped, as it demands.
            _ => {}
        }
        Ok(())
    }

    fn describe(&mut self, size: u64, flags: u16) -> Result<(), ClientFatal> {
        if flags & can::HAS_FLAGS == 0 || i64::try_from(size).is_err() {
            return Err(ClientFatal::ExportMalformed { size, flags });
        }
        let has = |flag: u16| flags & flag != 0;
        self.described = true;
        self.export.size = size;
        self.export.read_only = has(can::READ_ONLY);
        self.export.rotational = has(can::ROTATIONAL);
        self.export.flush = has(can::FLUSH);
        self.export.fua = has(can::FUA);
        self.export.trim = has(can::TRIM);
        self.export.write_zeroes = has(can::WRITE_ZEROES);
        self.export.fast_zero = has(can::FAST_ZERO) && has(can::WRITE_ZEROES);
        self.export.multi_conn = has(can::MULTI_CONN);
        self.export.cache = has(can::CACHE);
        self.export.df = has(can::DF) && self.export.structured;
        Ok(())
    }

    fn send(&mut self, option: u32, out: &mut Vec<u8>) {
        self.option = option;
        self.replies_seen = 0;
        self.state = State::ReplyHeader;
        let name = self.wanted.export.as_bytes();
        let counted = u32::try_from(name.len()).expect("checked to be at most 4096 bytes").to_be_bytes();
        let number = |value: u16| value.to_be_bytes();
        match option {
            option::EXPORT_NAME => encode_option(option, &[name], out),
            option::SET_META_CONTEXT => {
                let query = wire::BASE_ALLOCATION.as_bytes();
                let length = u32::try_from(query.len()).expect("a short constant").to_be_bytes();
                encode_option(option, &[&counted, name, &1u32.to_be_bytes(), &length, query], out);
            }
            option::GO => {
                let asked = [info::NAME, info::DESCRIPTION, info::BLOCK_SIZE].map(number);
                let parts: [&[u8]; 6] = [&counted, name, &number(3), &asked[0], &asked[1], &asked[2]];
                encode_option(option, &parts, out);
            }
            _ => encode_option(option, &[], out),
        }
    }

    fn finish(&mut self) -> Box<RemoteExport> {
        Box::new(std::mem::take(&mut self.export))
    }
}

/// Appends one option. The parts are names and numbers, far below 4 GiB.
pub(super) fn encode_option(option: u32, parts: &[&[u8]], out: &mut Vec<u8>) {
    let length: usize = parts.iter().map(|part| part.len()).sum();
    let length = u32::try_from(length).expect("options hold a few strings");
    out.extend_from_slice(&wire::MAGIC_OPTION.to_be_bytes());
    out.extend_from_slice(&option.to_be_bytes());
    out.extend_from_slice(&length.to_be_bytes());
    for part in parts {
        out.extend_from_slice(part);
    }
}
