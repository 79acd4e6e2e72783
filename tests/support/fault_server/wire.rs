//! The subset of NBD that the server speaks: fixed newstyle, EXPORT_NAME, INFO, GO, LIST, simple and
//! structured replies. Written from the protocol's text, without the project's own implementation: a mistake
//! common to both sides would not show. Must not know what is stored, or faults.

use super::faults::{Errno, Op};
use std::io::{self, Read, Write};

const NBDMAGIC: u64 = 0x4e42_444d_4147_4943;
const IHAVEOPT: u64 = 0x4948_4156_454f_5054;
const OPTION_REPLY: u64 = 0x0003_e889_0455_65a9;
const REQUEST: u32 = 0x2560_9513;
const SIMPLE_REPLY: u32 = 0x6744_6698;
const STRUCTURED_REPLY: u32 = 0x668e_33ef;

const FIXED_NEWSTYLE: u16 = 1;
const NO_ZEROES: u16 = 2;

const OPT_EXPORT_NAME: u32 = 1;
const OPT_ABORT: u32 = 2;
const OPT_LIST: u32 = 3;
const OPT_INFO: u32 = 6;
const OPT_GO: u32 = 7;
const OPT_STRUCTURED_REPLY: u32 = 8;

const REP_ACK: u32 = 1;
const REP_SERVER: u32 = 2;
const REP_INFO: u32 = 3;
const REP_ERR_UNSUP: u32 = 1 << 31 | 1;
const REP_ERR_INVALID: u32 = 1 << 31 | 3;
const REP_ERR_UNKNOWN: u32 = 1 << 31 | 6;

const INFO_EXPORT: u16 = 0;
const INFO_BLOCK_SIZE: u16 = 3;

const CHUNK_DONE: u16 = 1;
const CHUNK_NONE: u16 = 0;
const CHUNK_OFFSET_DATA: u16 = 1;
const CHUNK_ERROR: u16 = 0x8001;

const FLAG_FUA: u16 = 1;

/// Longest option that is accepted.
const OPTION_BYTES_MAX: u32 = 64 << 10;
/// Longest READ or WRITE.
pub(super) const PAYLOAD_MAX: u32 = 32 << 20;

/// What an export offers.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Offer {
    pub structured: bool,
    pub fua: bool,
    pub trim: bool,
    pub zeroes: bool,
    pub multi_conn: bool,
}

impl Default for Offer {
    fn default() -> Offer {
        Offer { structured: true, fua: true, trim: true, zeroes: true, multi_conn: true }
    }
}

impl Offer {
    fn flags(self) -> u16 {
        let flag = |yes: bool, bit: u16| if yes { 1 << bit } else { 0 };
        // Has flags, FLUSH.
        1 | 1 << 2 | flag(self.fua, 3) | flag(self.trim, 5) | flag(self.zeroes, 6) | flag(self.multi_conn, 8)
    }
}

/// The exports from which a client can choose.
pub(super) trait Catalogue {
    /// Size in bytes and offer of an export.
    fn look_up(&self, name: &str) -> Option<(u64, Offer)>;
    fn names(&self) -> Vec<String>;
    /// Called just before the client is told that it has this export.
    fn choose(&self, name: &str, structured: bool);
}

/// Negotiates with a client until it has chosen an export, or has left.
pub(super) fn shake_hands(stream: &mut (impl Read + Write), exports: &dyn Catalogue) -> io::Result<()> {
    let mut greeting = Vec::new();
    greeting.extend(NBDMAGIC.to_be_bytes());
    greeting.extend(IHAVEOPT.to_be_bytes());
    greeting.extend((FIXED_NEWSTYLE | NO_ZEROES).to_be_bytes());
    stream.write_all(&greeting)?;
    let client_flags = u32::from_be_bytes(take(stream)?);
    let mut structured = false;
    loop {
        if u64::from_be_bytes(take(stream)?) != IHAVEOPT {
            return Err(io::Error::other("not an option"));
        }
        let option = u32::from_be_bytes(take(stream)?);
        let length = u32::from_be_bytes(take(stream)?);
        if length > OPTION_BYTES_MAX {
            return Err(io::Error::other("an option that is too long"));
        }
        let mut data = vec![0; length as usize];
        stream.read_exact(&mut data)?;
        match option {
            OPT_EXPORT_NAME => {
                let name = String::from_utf8_lossy(&data).into_owned();
                let Some((bytes, offer)) = exports.look_up(&name) else { return Ok(()) };
                let mut answer = bytes.to_be_bytes().to_vec();
                answer.extend(offer.flags().to_be_bytes());
                if client_flags & u32::from(NO_ZEROES) == 0 {
                    answer.extend([0; 124]);
                }
                exports.choose(&name, structured);
                return stream.write_all(&answer);
            }
            OPT_ABORT => {
                return reply(stream, option, REP_ACK, &[]);
            }
            OPT_LIST => {
                for name in exports.names() {
                    let mut entry = (name.len() as u32).to_be_bytes().to_vec();
                    entry.extend(name.as_bytes());
                    reply(stream, option, REP_SERVER, &entry)?;
                }
                reply(stream, option, REP_ACK, &[])?;
            }
            OPT_INFO | OPT_GO => {
                let Some(name) = chosen(&data) else {
                    reply(stream, option, REP_ERR_INVALID, b"malformed")?;
                    continue;
                };
                let Some((bytes, offer)) = exports.look_up(&name) else {
                    reply(stream, option, REP_ERR_UNKNOWN, b"no such export")?;
                    continue;
                };
                let mut info = INFO_EXPORT.to_be_bytes().to_vec();
                info.extend(bytes.to_be_bytes());
                info.extend(offer.flags().to_be_bytes());
                reply(stream, option, REP_INFO, &info)?;
                let mut blocks = INFO_BLOCK_SIZE.to_be_bytes().to_vec();
                for size in [512, 4096, PAYLOAD_MAX] {
                    blocks.extend(size.to_be_bytes());
                }
                reply(stream, option, REP_INFO, &blocks)?;
                if option == OPT_GO {
                    exports.choose(&name, structured);
                    return reply(stream, option, REP_ACK, &[]);
                }
                reply(stream, option, REP_ACK, &[])?;
            }
            OPT_STRUCTURED_REPLY
                if data.is_empty() && exports.look_up("").is_none_or(|(_, o)| o.structured) =>
            {
                structured = true;
                reply(stream, option, REP_ACK, &[])?;
            }
            _ => reply(stream, option, REP_ERR_UNSUP, b"")?,
        }
    }
}

/// The name in the data of an INFO or GO.
fn chosen(data: &[u8]) -> Option<String> {
    let (length, rest) = data.split_first_chunk::<4>()?;
    let name = rest.get(..u32::from_be_bytes(*length) as usize)?;
    String::from_utf8(name.to_vec()).ok()
}

fn reply(stream: &mut impl Write, option: u32, kind: u32, data: &[u8]) -> io::Result<()> {
    let mut bytes = OPTION_REPLY.to_be_bytes().to_vec();
    bytes.extend(option.to_be_bytes());
    bytes.extend(kind.to_be_bytes());
    bytes.extend((data.len() as u32).to_be_bytes());
    bytes.extend(data);
    stream.write_all(&bytes)
}

fn take<const N: usize>(stream: &mut impl Read) -> io::Result<[u8; N]> {
    let mut bytes = [0; N];
    stream.read_exact(&mut bytes)?;
    Ok(bytes)
}

/// A request of a client; its payload, if it is a write, follows on the stream.
#[derive(Clone, Copy, Debug)]
pub(super) struct Request {
    /// None for a command that is not served.
    pub op: Option<Op>,
    pub fua: bool,
    pub cookie: u64,
    pub offset: u64,
    pub length: u32,
    pub leaves: bool,
}

impl Request {
    pub(super) fn read(stream: &mut impl Read) -> io::Result<Request> {
        let head: [u8; 28] = take(stream)?;
        let word = |at: usize| u16::from_be_bytes([head[at], head[at + 1]]);
        if u32::from_be_bytes(head[..4].try_into().expect("four bytes")) != REQUEST {
            return Err(io::Error::other("not a request"));
        }
        let op = match word(6) {
            0 => Some(Op::Read),
            1 => Some(Op::Write),
            3 => Some(Op::Flush),
            4 => Some(Op::Trim),
            6 => Some(Op::Zero),
            _ => None,
        };
        let wide = |at: usize| u64::from_be_bytes(head[at..at + 8].try_into().expect("eight bytes"));
        Ok(Request {
            op,
            fua: word(4) & FLAG_FUA != 0,
            cookie: wide(8),
            offset: wide(16),
            length: u32::from_be_bytes(head[24..].try_into().expect("four bytes")),
            leaves: word(6) == 2,
        })
    }

    /// The bytes of a reply: the data of a read, nothing, or an error.
    pub(super) fn answer(&self, structured: bool, outcome: Result<&[u8], Errno>) -> Vec<u8> {
        let reads = self.op == Some(Op::Read);
        let mut bytes = Vec::new();
        if !structured {
            bytes.extend(SIMPLE_REPLY.to_be_bytes());
            bytes.extend(outcome.err().map_or(0, Errno::code).to_be_bytes());
            bytes.extend(self.cookie.to_be_bytes());
            bytes.extend(outcome.unwrap_or_default());
            return bytes;
        }
        let mut chunk = |kind: u16, parts: [&[u8]; 2]| {
            bytes.extend(STRUCTURED_REPLY.to_be_bytes());
            bytes.extend(CHUNK_DONE.to_be_bytes());
            bytes.extend(kind.to_be_bytes());
            bytes.extend(self.cookie.to_be_bytes());
            bytes.extend(((parts[0].len() + parts[1].len()) as u32).to_be_bytes());
            bytes.extend(parts[0]);
            bytes.extend(parts[1]);
        };
        match outcome {
            Ok(data) if reads => chunk(CHUNK_OFFSET_DATA, [&self.offset.to_be_bytes(), data]),
            Ok(_) => chunk(CHUNK_NONE, [&[], &[]]),
            // A number and the length of a message.
            Err(errno) => chunk(CHUNK_ERROR, [&errno.code().to_be_bytes(), &[0, 0]]),
        }
        bytes
    }
}
