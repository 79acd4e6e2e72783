//! Bytes of the NBD protocol: magics, codes, fixed-size headers and strings, for server and client alike.
//!
//! Invariants: everything is big-endian; every decoder checks lengths before it touches bytes, so that no
//! input can make it panic; nothing here allocates. It must not know what a message means to a connection.
//!
//! Source of the numbers: the protocol document of the NetworkBlockDevice project (doc/proto.md).

use super::errno::Errno;

/// The port that IANA assigned to NBD.
pub const DEFAULT_PORT: u16 = 10809;

/// The longest string (export name, query, message) that the protocol allows, in bytes.
pub const STRING_BYTES_MAX: usize = 4096;

/// `base:allocation` flag: the extent occupies no space.
pub const STATE_HOLE: u32 = 1 << 0;
/// `base:allocation` flag: the extent reads as zeroes.
pub const STATE_ZERO: u32 = 1 << 1;

/// Name of the metadata context that says where space is allocated.
pub const BASE_ALLOCATION: &str = "base:allocation";
/// Name of the metadata context that reports the redundancy of the stored data.
pub const CALPE_HEALTH: &str = "calpe:health";

/// `calpe:health` flag: readable, with less than full redundancy.
pub const HEALTH_DEGRADED: u32 = 1 << 0;
/// `calpe:health` flag: reads fail.
pub const HEALTH_LOST: u32 = 1 << 1;

/// Metadata contexts of a server: what was negotiated, or what one BLOCK_STATUS is to be answered with.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Contexts {
    /// [`BASE_ALLOCATION`].
    pub allocation: bool,
    /// [`CALPE_HEALTH`].
    pub health: bool,
}

impl Contexts {
    /// Whether there is none.
    #[must_use]
    pub fn is_empty(self) -> bool {
        self == Contexts::default()
    }

    pub(super) fn count(self) -> u32 {
        u32::from(self.allocation) + u32::from(self.health)
    }
}

/// The forms that messages of the transmission phase take, as agreed in the handshake.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Headers {
    /// Requests of 28 bytes, simple replies.
    #[default]
    Simple,
    /// Requests of 28 bytes; replies in chunks where they have a payload.
    Structured,
    /// Requests and chunks with headers of 32 bytes and lengths of 64 bits; no simple replies.
    Extended,
}

/// First magic of a server's greeting, "NBDMAGIC".
pub(super) const MAGIC_GREETING: u64 = 0x4e42_444d_4147_4943;
/// Second magic of a newstyle greeting and first of every option, "IHAVEOPT".
pub(super) const MAGIC_OPTION: u64 = 0x4948_4156_454f_5054;
/// Second magic of an oldstyle greeting, known only to name it in an error.
pub(super) const MAGIC_OLDSTYLE: u64 = 0x0000_4202_8186_1253;
/// Starts every option reply.
pub(super) const MAGIC_OPTION_REPLY: u64 = 0x0003_e889_0455_65a9;
/// Starts every request.
pub(super) const MAGIC_REQUEST: u32 = 0x2560_9513;
/// Starts every simple reply.
pub(super) const MAGIC_SIMPLE_REPLY: u32 = 0x6744_6698;
/// Starts every chunk of a structured reply.
pub(super) const MAGIC_CHUNK: u32 = 0x668e_33ef;
/// Starts every request with an extended header.
pub(super) const MAGIC_EXTENDED_REQUEST: u32 = 0x21e4_1c71;
/// Starts every chunk with an extended header.
pub(super) const MAGIC_EXTENDED_CHUNK: u32 = 0x6e8a_278c;

/// Flags of the greeting and of the client's answer to it: bit 0 fixed newstyle, bit 1 no padding zeroes.
pub(super) const HANDSHAKE_FIXED_NEWSTYLE: u16 = 1 << 0;
pub(super) const HANDSHAKE_NO_ZEROES: u16 = 1 << 1;

/// Padding after an EXPORT_NAME reply when the client did not waive it.
pub(super) const EXPORT_NAME_PADDING_BYTES: usize = 124;

/// Option codes of the handshake.
pub(super) mod option {
    pub(crate) const EXPORT_NAME: u32 = 1;
    pub(crate) const ABORT: u32 = 2;
    pub(crate) const LIST: u32 = 3;
    pub(crate) const STARTTLS: u32 = 5;
    pub(crate) const INFO: u32 = 6;
    pub(crate) const GO: u32 = 7;
    pub(crate) const STRUCTURED_REPLY: u32 = 8;
    pub(crate) const LIST_META_CONTEXT: u32 = 9;
    pub(crate) const SET_META_CONTEXT: u32 = 10;
    pub(crate) const EXTENDED_HEADERS: u32 = 11;
}

/// Option reply codes of the handshake. Errors have bit 31 set.
pub(super) mod reply {
    pub(crate) const ACK: u32 = 1;
    pub(crate) const SERVER: u32 = 2;
    pub(crate) const INFO: u32 = 3;
    pub(crate) const META_CONTEXT: u32 = 4;
    pub(crate) const ERROR_BIT: u32 = 1 << 31;
    pub(crate) const ERR_UNSUP: u32 = ERROR_BIT | 1;
    pub(crate) const ERR_POLICY: u32 = ERROR_BIT | 2;
    pub(crate) const ERR_INVALID: u32 = ERROR_BIT | 3;
    pub(crate) const ERR_TLS_REQD: u32 = ERROR_BIT | 5;
    pub(crate) const ERR_UNKNOWN: u32 = ERROR_BIT | 6;
    pub(crate) const ERR_SHUTDOWN: u32 = ERROR_BIT | 7;
    pub(crate) const ERR_BLOCK_SIZE_REQD: u32 = ERROR_BIT | 8;
    pub(crate) const ERR_TOO_BIG: u32 = ERROR_BIT | 9;
    pub(crate) const ERR_EXT_HEADER_REQD: u32 = ERROR_BIT | 10;
}

/// Kinds of information in an INFO or GO exchange.
pub(super) mod info {
    pub(crate) const EXPORT: u16 = 0;
    pub(crate) const NAME: u16 = 1;
    pub(crate) const DESCRIPTION: u16 = 2;
    pub(crate) const BLOCK_SIZE: u16 = 3;
}

/// Transmission flags: capabilities of an export.
pub(super) mod can {
    pub(crate) const HAS_FLAGS: u16 = 1 << 0;
    pub(crate) const READ_ONLY: u16 = 1 << 1;
    pub(crate) const FLUSH: u16 = 1 << 2;
    pub(crate) const FUA: u16 = 1 << 3;
    pub(crate) const ROTATIONAL: u16 = 1 << 4;
    pub(crate) const TRIM: u16 = 1 << 5;
    pub(crate) const WRITE_ZEROES: u16 = 1 << 6;
    pub(crate) const DF: u16 = 1 << 7;
    pub(crate) const MULTI_CONN: u16 = 1 << 8;
    pub(crate) const CACHE: u16 = 1 << 10;
    pub(crate) const FAST_ZERO: u16 = 1 << 11;
    pub(crate) const BLOCK_STATUS_PAYLOAD: u16 = 1 << 12;
}

/// Command flags of a request.
pub(super) mod command_flag {
    pub(crate) const FUA: u16 = 1 << 0;
    pub(crate) const NO_HOLE: u16 = 1 << 1;
    pub(crate) const DF: u16 = 1 << 2;
    pub(crate) const REQ_ONE: u16 = 1 << 3;
    pub(crate) const FAST_ZERO: u16 = 1 << 4;
    pub(crate) const PAYLOAD_LEN: u16 = 1 << 5;
}

/// The command code that ends a connection; it has no reply and is therefore not a [`Command`].
pub(super) const COMMAND_DISC: u16 = 2;

/// Chunk flag: the last chunk of its reply.
pub(super) const CHUNK_FLAG_DONE: u16 = 1 << 0;

/// Chunk types of structured replies. Errors have bit 15 set.
pub(super) mod chunk {
    pub(crate) const NONE: u16 = 0;
    pub(crate) const OFFSET_DATA: u16 = 1;
    pub(crate) const OFFSET_HOLE: u16 = 2;
    pub(crate) const BLOCK_STATUS: u16 = 5;
    pub(crate) const BLOCK_STATUS_EXT: u16 = 6;
    pub(crate) const ERROR_BIT: u16 = 1 << 15;
    pub(crate) const ERROR: u16 = ERROR_BIT | 1;
    pub(crate) const ERROR_OFFSET: u16 = ERROR_BIT | 2;
}

/// What a request asks for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Command {
    /// Return bytes.
    Read,
    /// Store the bytes that follow the request.
    Write,
    /// Answered when every write completed before, on any connection, is on stable storage.
    Flush,
    /// The range is not needed any more; advisory.
    Trim,
    /// The client will read this range soon; advisory.
    Cache,
    /// Make the range read as zeroes.
    WriteZeroes,
    /// Say which parts of the range are allocated.
    BlockStatus,
}

impl Command {
    /// The command of a wire code; none for an unknown one and for DISC.
    pub(super) fn from_code(code: u16) -> Option<Command> {
        Some(match code {
            0 => Command::Read,
            1 => Command::Write,
            3 => Command::Flush,
            4 => Command::Trim,
            5 => Command::Cache,
            6 => Command::WriteZeroes,
            7 => Command::BlockStatus,
            _ => return None,
        })
    }

    /// The wire code.
    pub(super) fn code(self) -> u16 {
        match self {
            Command::Read => 0,
            Command::Write => 1,
            Command::Flush => 3,
            Command::Trim => 4,
            Command::Cache => 5,
            Command::WriteZeroes => 6,
            Command::BlockStatus => 7,
        }
    }

    /// Whether the command changes the export, and is thus refused on a read-only one.
    #[must_use]
    pub fn modifies(self) -> bool {
        matches!(self, Command::Write | Command::Trim | Command::WriteZeroes)
    }

    /// The command flags that the protocol defines for this command. FUA is tolerated everywhere.
    pub(super) fn flags(self) -> u16 {
        command_flag::FUA
            | match self {
                Command::Read => command_flag::DF,
                Command::WriteZeroes => command_flag::NO_HOLE | command_flag::FAST_ZERO,
                Command::BlockStatus => command_flag::REQ_ONE,
                Command::Write | Command::Flush | Command::Trim | Command::Cache => 0,
            }
    }
}

/// One request, as a server receives it and as a client submits it. Offsets and lengths are bytes of the
/// export.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Request {
    /// Pairs the reply with the request. Chosen by the client; opaque to a server.
    pub cookie: u64,
    /// What to do.
    pub command: Command,
    /// Where; zero for FLUSH.
    pub offset: u64,
    /// How many bytes; zero for FLUSH. At most 2^32-1 without extended headers.
    pub length: u64,
    /// Answer only when what this request wrote is on stable storage. Meaningless, and harmless, on reads.
    pub fua: bool,
    /// WRITE_ZEROES: keep the space allocated.
    pub no_hole: bool,
    /// WRITE_ZEROES: fail with ENOTSUP rather than be slow.
    pub fast_zero: bool,
    /// READ: reply with one chunk.
    pub df: bool,
    /// BLOCK_STATUS: one extent is enough.
    pub req_one: bool,
    /// BLOCK_STATUS as a server hands it on: the contexts to answer for, at least one. A client's is not
    /// looked at: it always asks for all that it negotiated.
    pub contexts: Contexts,
}

impl Request {
    /// A request without flags. The cookie is zero: a client's connection chooses it on submission.
    #[must_use]
    pub fn new(command: Command, offset: u64, length: u64) -> Request {
        Request {
            cookie: 0,
            command,
            offset,
            length,
            fua: false,
            no_hole: false,
            fast_zero: false,
            df: false,
            req_one: false,
            contexts: Contexts::default(),
        }
    }

    /// The same request with FUA set.
    #[must_use]
    pub fn with_fua(mut self) -> Request {
        self.fua = true;
        self
    }

    pub(super) fn from_header(header: &RequestHeader, command: Command) -> Request {
        let has = |flag: u16| header.flags & flag != 0;
        Request {
            cookie: header.cookie,
            command,
            offset: header.offset,
            length: header.length,
            fua: has(command_flag::FUA),
            no_hole: has(command_flag::NO_HOLE),
            fast_zero: has(command_flag::FAST_ZERO),
            df: has(command_flag::DF),
            req_one: has(command_flag::REQ_ONE),
            contexts: Contexts::default(),
        }
    }

    pub(super) fn flag_bits(&self) -> u16 {
        [
            (self.fua, command_flag::FUA),
            (self.no_hole, command_flag::NO_HOLE),
            (self.fast_zero, command_flag::FAST_ZERO),
            (self.df, command_flag::DF),
            (self.req_one, command_flag::REQ_ONE),
        ]
        .into_iter()
        .fold(0, |bits, (set, flag)| if set { bits | flag } else { bits })
    }
}

/// Size of a compact request header.
pub(super) const REQUEST_HEADER_BYTES: usize = 28;
/// Size of an extended request header.
pub(super) const EXTENDED_REQUEST_HEADER_BYTES: usize = 32;

/// A request header as it stands on the wire, magic checked, meaning not.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct RequestHeader {
    pub flags: u16,
    pub command: u16,
    pub cookie: u64,
    pub offset: u64,
    /// Of 32 bits in a compact header.
    pub length: u64,
}

impl RequestHeader {
    /// The error is the magic that was found instead.
    pub(super) fn decode(bytes: &[u8; REQUEST_HEADER_BYTES]) -> Result<RequestHeader, u32> {
        Self::fields(bytes, MAGIC_REQUEST, |bytes| u64::from(u32_at(bytes, 24)))
    }

    /// The same of an extended header.
    pub(super) fn decode_extended(bytes: &[u8; EXTENDED_REQUEST_HEADER_BYTES]) -> Result<RequestHeader, u32> {
        Self::fields(bytes, MAGIC_EXTENDED_REQUEST, |bytes| u64_at(bytes, 24))
    }

    fn fields<const N: usize>(
        bytes: &[u8; N],
        expected: u32,
        length: impl Fn(&[u8; N]) -> u64,
    ) -> Result<RequestHeader, u32> {
        let magic = u32_at(bytes, 0);
        if magic != expected {
            return Err(magic);
        }
        Ok(RequestHeader {
            flags: u16_at(bytes, 4),
            command: u16_at(bytes, 6),
            cookie: u64_at(bytes, 8),
            offset: u64_at(bytes, 16),
            length: length(bytes),
        })
    }

    /// # Panics
    /// When a compact header is to hold a length of more than 32 bits.
    pub(super) fn encode(&self, headers: Headers, out: &mut Vec<u8>) {
        let extended = headers == Headers::Extended;
        let magic = if extended { MAGIC_EXTENDED_REQUEST } else { MAGIC_REQUEST };
        out.extend_from_slice(&magic.to_be_bytes());
        out.extend_from_slice(&self.flags.to_be_bytes());
        out.extend_from_slice(&self.command.to_be_bytes());
        out.extend_from_slice(&self.cookie.to_be_bytes());
        out.extend_from_slice(&self.offset.to_be_bytes());
        if extended {
            out.extend_from_slice(&self.length.to_be_bytes());
        } else {
            let length = u32::try_from(self.length).expect("checked before it is to be sent");
            out.extend_from_slice(&length.to_be_bytes());
        }
    }
}

/// Size of a simple reply's header.
pub(super) const SIMPLE_REPLY_BYTES: usize = 16;

/// Appends a simple reply header; `error` is none for success.
pub(super) fn encode_simple_reply(cookie: u64, error: Option<Errno>, out: &mut Vec<u8>) {
    let mut bytes = [0; SIMPLE_REPLY_BYTES];
    bytes[..4].copy_from_slice(&MAGIC_SIMPLE_REPLY.to_be_bytes());
    bytes[4..8].copy_from_slice(&error.map_or(0, Errno::code).to_be_bytes());
    bytes[8..].copy_from_slice(&cookie.to_be_bytes());
    out.extend_from_slice(&bytes);
}

/// Size of a compact chunk header.
pub(super) const CHUNK_HEADER_BYTES: usize = 20;
/// Size of an extended chunk header.
pub(super) const EXTENDED_CHUNK_HEADER_BYTES: usize = 32;

/// Header of one chunk of a reply.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct ChunkHeader {
    pub flags: u16,
    pub kind: u16,
    pub cookie: u64,
    /// Of the request; travels in extended headers only.
    pub offset: u64,
    /// Bytes of payload that follow.
    pub length: u32,
}

impl ChunkHeader {
    pub(super) fn encode(&self, headers: Headers, out: &mut Vec<u8>) {
        let extended = headers == Headers::Extended;
        let magic = if extended { MAGIC_EXTENDED_CHUNK } else { MAGIC_CHUNK };
        let mut bytes = [0; EXTENDED_CHUNK_HEADER_BYTES];
        bytes[..4].copy_from_slice(&magic.to_be_bytes());
        bytes[4..6].copy_from_slice(&self.flags.to_be_bytes());
        bytes[6..8].copy_from_slice(&self.kind.to_be_bytes());
        bytes[8..16].copy_from_slice(&self.cookie.to_be_bytes());
        if extended {
            bytes[16..24].copy_from_slice(&self.offset.to_be_bytes());
            bytes[24..].copy_from_slice(&u64::from(self.length).to_be_bytes());
            out.extend_from_slice(&bytes);
        } else {
            bytes[16..20].copy_from_slice(&self.length.to_be_bytes());
            out.extend_from_slice(&bytes[..CHUNK_HEADER_BYTES]);
        }
    }
}

/// Size of an option header: magic, option, length.
pub(super) const OPTION_HEADER_BYTES: usize = 16;

/// Decodes an option header into (option, data length); the error is the magic that was found instead.
pub(super) fn decode_option_header(bytes: &[u8; OPTION_HEADER_BYTES]) -> Result<(u32, u32), u64> {
    let magic = u64_at(bytes, 0);
    if magic != MAGIC_OPTION {
        return Err(magic);
    }
    Ok((u32_at(bytes, 8), u32_at(bytes, 12)))
}

/// Appends one option reply. `parts` are the pieces of its data; the caller keeps them below 4 GiB in all.
pub(super) fn encode_option_reply(option: u32, kind: u32, parts: &[&[u8]], out: &mut Vec<u8>) {
    let length: usize = parts.iter().map(|part| part.len()).sum();
    let length = u32::try_from(length).expect("option replies hold a few strings");
    out.extend_from_slice(&MAGIC_OPTION_REPLY.to_be_bytes());
    out.extend_from_slice(&option.to_be_bytes());
    out.extend_from_slice(&kind.to_be_bytes());
    out.extend_from_slice(&length.to_be_bytes());
    for part in parts {
        out.extend_from_slice(part);
    }
}

/// Why bytes are not a string of the protocol.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum StringFault {
    /// Longer than [`STRING_BYTES_MAX`].
    #[error("longer than {STRING_BYTES_MAX} bytes")]
    TooLong,
    /// Contains a NUL.
    #[error("contains a NUL byte")]
    Nul,
    /// Not UTF-8.
    #[error("not UTF-8")]
    Utf8,
}

/// Checks length, NULs and encoding of a string from the wire without copying it.
pub(super) fn check_string(bytes: &[u8]) -> Result<&str, StringFault> {
    if bytes.len() > STRING_BYTES_MAX {
        return Err(StringFault::TooLong);
    }
    if bytes.contains(&0) {
        return Err(StringFault::Nul);
    }
    std::str::from_utf8(bytes).map_err(|_| StringFault::Utf8)
}

/// The longest prefix of `text` that has at most `bytes_max` bytes and ends between characters.
pub(super) fn clip(text: &str, bytes_max: usize) -> &str {
    let mut end = text.len().min(bytes_max);
    while !text.is_char_boundary(end) {
        end -= 1;
    }
    &text[..end]
}

/// Reads fields off the front of a slice; every read says none rather than run past the end.
#[derive(Clone, Copy, Debug)]
pub(super) struct Reader<'a>(pub &'a [u8]);

impl<'a> Reader<'a> {
    pub(super) fn bytes(&mut self, count: usize) -> Option<&'a [u8]> {
        let (front, rest) = self.0.split_at_checked(count)?;
        self.0 = rest;
        Some(front)
    }

    fn array<const N: usize>(&mut self) -> Option<[u8; N]> {
        let (front, rest) = self.0.split_first_chunk::<N>()?;
        self.0 = rest;
        Some(*front)
    }

    pub(super) fn u16(&mut self) -> Option<u16> {
        self.array().map(u16::from_be_bytes)
    }

    pub(super) fn u32(&mut self) -> Option<u32> {
        self.array().map(u32::from_be_bytes)
    }

    pub(super) fn u64(&mut self) -> Option<u64> {
        self.array().map(u64::from_be_bytes)
    }

    /// A 32-bit length and that many bytes.
    pub(super) fn counted(&mut self) -> Option<&'a [u8]> {
        let count = usize::try_from(self.u32()?).ok()?;
        self.bytes(count)
    }

    pub(super) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
}

/// Collects a fixed-size header that may arrive in pieces. Holds at most `N` bytes.
#[derive(Clone, Copy, Debug)]
pub(super) struct Gather<const N: usize> {
    bytes: [u8; N],
    filled: usize,
}

impl<const N: usize> Gather<N> {
    pub(super) fn new() -> Self {
        Gather { bytes: [0; N], filled: 0 }
    }

    /// Takes from the front of `input` what is still missing of a header of `SIZE <= N` bytes; yields it when
    /// whole, and is then empty again.
    pub(super) fn take<const SIZE: usize>(&mut self, input: &mut &[u8]) -> Option<[u8; SIZE]> {
        const { assert!(SIZE <= N) };
        if self.filled == 0
            && let Some((whole, rest)) = input.split_first_chunk::<SIZE>()
        {
            *input = rest;
            return Some(*whole);
        }
        let count = input.len().min(SIZE - self.filled);
        let (front, rest) = input.split_at(count);
        self.bytes[self.filled..self.filled + count].copy_from_slice(front);
        self.filled += count;
        *input = rest;
        if self.filled < SIZE {
            return None;
        }
        self.filled = 0;
        self.bytes.first_chunk::<SIZE>().copied()
    }
}

/// A big-endian number at a constant place inside a fixed-size header.
pub(super) fn u16_at<const N: usize>(bytes: &[u8; N], at: usize) -> u16 {
    u16::from_be_bytes([bytes[at], bytes[at + 1]])
}

/// See [`u16_at`].
pub(super) fn u32_at<const N: usize>(bytes: &[u8; N], at: usize) -> u32 {
    u32::from(u16_at(bytes, at)) << 16 | u32::from(u16_at(bytes, at + 2))
}

/// See [`u16_at`].
pub(super) fn u64_at<const N: usize>(bytes: &[u8; N], at: usize) -> u64 {
    u64::from(u32_at(bytes, at)) << 32 | u64::from(u32_at(bytes, at + 4))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn every_command_code_round_trips_and_disc_is_not_among_them() {
        for code in 0..=u16::MAX {
            match Command::from_code(code) {
                Some(command) => assert_eq!(command.code(), code),
                None => assert!(code == COMMAND_DISC || code > 7, "{code}"),
            }
        }
    }

    #[test]
    fn strings_are_refused_for_length_nul_and_encoding() {
        assert_eq!(check_string(b""), Ok(""));
        assert_eq!(check_string("größe".as_bytes()), Ok("größe"));
        assert_eq!(check_string(&[b'x'; STRING_BYTES_MAX]).map(str::len), Ok(STRING_BYTES_MAX));
        assert_eq!(check_string(&[b'x'; STRING_BYTES_MAX + 1]), Err(StringFault::TooLong));
        assert_eq!(check_string(b"a\0b"), Err(StringFault::Nul));
        assert_eq!(check_string(b"\xff\xfe"), Err(StringFault::Utf8));
    }

    #[test]
    fn clipping_never_splits_a_character() {
        assert_eq!(clip("äöü", 3), "ä");
        assert_eq!(clip("äöü", 0), "");
        assert_eq!(clip("abc", 9), "abc");
    }

    #[test]
    fn a_reader_refuses_a_count_beyond_its_bytes() {
        let mut reader = Reader(&[0xff, 0xff, 0xff, 0xff, 1, 2]);
        assert_eq!(reader.counted(), None);
        let mut reader = Reader(&[0, 0, 0, 2, 1, 2]);
        assert_eq!(reader.counted(), Some(&[1, 2][..]));
        assert!(reader.is_empty());
    }

    proptest! {
        #[test]
        fn request_headers_round_trip(
            flags: u16, command: u16, cookie: u64, offset: u64, length: u32
        ) {
            let header = RequestHeader { flags, command, cookie, offset, length: u64::from(length) };
            let mut bytes = Vec::new();
            header.encode(Headers::Structured, &mut bytes);
            let bytes: [u8; REQUEST_HEADER_BYTES] = bytes.try_into().expect("28 bytes");
            prop_assert_eq!(RequestHeader::decode(&bytes), Ok(header));
            let header = RequestHeader { length: header.length << 32 | cookie & 0xffff, ..header };
            let mut bytes = Vec::new();
            header.encode(Headers::Extended, &mut bytes);
            let bytes: [u8; EXTENDED_REQUEST_HEADER_BYTES] = bytes.try_into().expect("32 bytes");
            prop_assert_eq!(RequestHeader::decode_extended(&bytes), Ok(header));
        }

        #[test]
        fn a_header_gathers_the_same_from_any_pieces(cuts in prop::collection::vec(1usize..28, 0..28)) {
            let message: Vec<u8> = (0u8..28).collect();
            let mut gather = Gather::<28>::new();
            let mut rest: &[u8] = &message;
            let mut got = None;
            for cut in cuts.into_iter().chain([28]) {
                let (mut piece, tail) = rest.split_at(cut.min(rest.len()));
                rest = tail;
                got = gather.take::<28>(&mut piece);
                prop_assert!(piece.is_empty());
                if got.is_some() {
                    break;
                }
            }
            prop_assert_eq!(got.map(|bytes| bytes.to_vec()), Some(message.clone()));
        }
    }
}
