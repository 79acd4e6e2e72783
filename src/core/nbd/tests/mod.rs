//! Tests of the protocol as a whole, and the drivers they share: a server and a client that are fed bytes,
//! take payloads off the stream as a reactor would, and record what they saw.

mod extended;
mod hostile_client;
mod hostile_server;
mod loopback;
mod obligations;
mod properties;
mod tls;

use super::wire::{
    self, CHUNK_HEADER_BYTES, Headers, MAGIC_CHUNK, MAGIC_EXTENDED_CHUNK, MAGIC_SIMPLE_REPLY, Reader, chunk,
    option, reply,
};
use super::*;
use crate::units::Timestamp;

/// Size of the test exports.
const SIZE: u64 = 8 << 30;

fn export(name: &str) -> ExportInfo {
    ExportInfo {
        name: name.into(),
        description: format!("about {name}"),
        size: SIZE,
        read_only: false,
        block_min: 512,
        block_preferred: 65536,
        block_max: BLOCK_BYTES_MAX,
        rotational: false,
        trim: true,
        write_zeroes: true,
        fast_zero: true,
        multi_conn: true,
        cache: true,
    }
}

struct TestExports(Vec<ExportInfo>);

impl Exports for TestExports {
    fn list(&self) -> Vec<ExportInfo> {
        self.0.clone()
    }

    fn find(&self, name: &str) -> Option<ExportInfo> {
        let mut exports = self.0.iter();
        if name.is_empty() { exports.next() } else { exports.find(|export| export.name == name) }.cloned()
    }
}

/// `vol` (default), `ro` (read-only), `bare` (offers nothing optional), `4k` (blocks of 4 KiB), `slow` (no
/// fast zeroes), `broken`.
fn exports() -> TestExports {
    let bare = ExportInfo {
        trim: false,
        write_zeroes: false,
        fast_zero: false,
        multi_conn: false,
        cache: false,
        description: String::new(),
        ..export("bare")
    };
    TestExports(vec![
        export("vol"),
        ExportInfo { read_only: true, rotational: true, ..export("ro") },
        bare,
        ExportInfo { block_min: 4096, ..export("4k") },
        ExportInfo { fast_zero: false, ..export("slow") },
        ExportInfo { block_min: 3, ..export("broken") },
    ])
}

/// What a server's driver saw.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Seen {
    Selected(String),
    Request(Request),
    Write(Request, Vec<u8>),
    StartTls,
    Disconnect,
}

/// A server under test.
struct Server {
    connection: ServerConnection,
    exports: TestExports,
    out: Vec<u8>,
    seen: Vec<Seen>,
    /// The WRITE whose payload is being taken.
    taking: Option<(Request, Vec<u8>)>,
    fatal: Option<Fatal>,
}

impl Server {
    /// A server that has sent its greeting.
    fn greeted() -> Server {
        Server::greeted_with_tls(TlsMode::Off)
    }

    fn greeted_with_tls(tls: TlsMode) -> Server {
        let mut server = Server {
            connection: ServerConnection::with_tls(Timestamp(0), tls),
            exports: exports(),
            out: Vec::new(),
            seen: Vec::new(),
            taking: None,
            fatal: None,
        };
        server.connection.start(&mut server.out);
        server
    }

    /// A server whose client agreed to fixed newstyle without padding; nothing left to send.
    fn haggling() -> Server {
        let mut server = Server::greeted();
        server.feed(&3u32.to_be_bytes());
        server.out.clear();
        server
    }

    /// A server whose client chose `export`; nothing left to send or to see. base:allocation comes with
    /// structured replies.
    fn serving(export: &str, structured: bool) -> Server {
        let headers = if structured { Headers::Structured } else { Headers::Simple };
        Server::agreed(export, headers, &["base:allocation"])
    }

    /// The same with these headers and, unless they are simple, these contexts.
    fn agreed(export: &str, headers: Headers, contexts: &[&str]) -> Server {
        let mut server = Server::haggling();
        match headers {
            Headers::Simple => {}
            Headers::Structured => server.feed(&opt(option::STRUCTURED_REPLY, &[])),
            Headers::Extended => server.feed(&opt(option::EXTENDED_HEADERS, &[])),
        }
        if headers != Headers::Simple {
            server.feed(&opt(option::SET_META_CONTEXT, &meta(export, contexts)));
        }
        server.feed(&opt(option::GO, &go(export, &[3])));
        assert_eq!(server.seen, [Seen::Selected(export.into())], "{:?}", server.fatal);
        server.seen.clear();
        server.out.clear();
        server
    }

    /// Feeds bytes until they are used up or the connection failed; every call must make progress.
    fn feed(&mut self, bytes: &[u8]) {
        let mut rest = bytes;
        while !rest.is_empty() && self.fatal.is_none() {
            if let Some((request, mut payload)) = self.taking.take() {
                let missing = request.length as usize - payload.len();
                let (front, tail) = rest.split_at(missing.min(rest.len()));
                payload.extend_from_slice(front);
                rest = tail;
                if payload.len() < request.length as usize {
                    self.taking = Some((request, payload));
                } else {
                    self.connection.payload_taken();
                    self.seen.push(Seen::Write(request, payload));
                }
                continue;
            }
            match self.connection.receive(rest, &self.exports, &mut self.out) {
                Ok((consumed, incoming)) => {
                    assert!(consumed > 0 && consumed <= rest.len(), "consumed {consumed} of {}", rest.len());
                    rest = &rest[consumed..];
                    match incoming {
                        None => {}
                        Some(Incoming::Selected) => {
                            let export = self.connection.export().expect("selected");
                            self.seen.push(Seen::Selected(export.name.clone()));
                        }
                        Some(Incoming::Request(request)) => self.seen.push(Seen::Request(request)),
                        Some(Incoming::Write { request }) => self.taking = Some((request, Vec::new())),
                        Some(Incoming::StartTls) => self.seen.push(Seen::StartTls),
                        Some(Incoming::Disconnect) => self.seen.push(Seen::Disconnect),
                    }
                }
                Err(fatal) => self.fatal = Some(fatal),
            }
        }
    }

    /// Feeds bytes and takes the option replies that they caused.
    fn options(&mut self, bytes: &[u8]) -> Vec<(u32, u32, Vec<u8>)> {
        self.feed(bytes);
        option_replies(&std::mem::take(&mut self.out))
    }

    /// Feeds bytes and takes the (payload-free) replies that they caused.
    fn replies(&mut self, bytes: &[u8]) -> Vec<Reply> {
        self.feed(bytes);
        replies(&std::mem::take(&mut self.out))
    }
}

/// An option.
fn opt(option: u32, data: &[u8]) -> Vec<u8> {
    let mut bytes = wire::MAGIC_OPTION.to_be_bytes().to_vec();
    bytes.extend_from_slice(&option.to_be_bytes());
    bytes.extend_from_slice(&u32::try_from(data.len()).expect("small").to_be_bytes());
    bytes.extend_from_slice(data);
    bytes
}

/// A string with its length in front.
fn counted(text: &[u8]) -> Vec<u8> {
    let mut bytes = u32::try_from(text.len()).expect("small").to_be_bytes().to_vec();
    bytes.extend_from_slice(text);
    bytes
}

/// The data of GO and INFO.
fn go(export: &str, infos: &[u16]) -> Vec<u8> {
    let mut data = counted(export.as_bytes());
    data.extend_from_slice(&u16::try_from(infos.len()).expect("few").to_be_bytes());
    for info in infos {
        data.extend_from_slice(&info.to_be_bytes());
    }
    data
}

/// The data of SET_META_CONTEXT and LIST_META_CONTEXT.
fn meta(export: &str, queries: &[&str]) -> Vec<u8> {
    let mut data = counted(export.as_bytes());
    data.extend_from_slice(&u32::try_from(queries.len()).expect("few").to_be_bytes());
    for query in queries {
        data.extend_from_slice(&counted(query.as_bytes()));
    }
    data
}

/// A request header, sound or not.
fn raw(flags: u16, command: u16, cookie: u64, offset: u64, length: u32) -> Vec<u8> {
    let mut bytes = Vec::new();
    let length = u64::from(length);
    wire::RequestHeader { flags, command, cookie, offset, length }.encode(Headers::Structured, &mut bytes);
    bytes
}

/// A request with an extended header, sound or not.
fn ext(flags: u16, command: u16, cookie: u64, offset: u64, length: u64) -> Vec<u8> {
    let mut bytes = Vec::new();
    wire::RequestHeader { flags, command, cookie, offset, length }.encode(Headers::Extended, &mut bytes);
    bytes
}

/// Splits a server's option replies into (option, type, data).
fn option_replies(bytes: &[u8]) -> Vec<(u32, u32, Vec<u8>)> {
    let mut reader = Reader(bytes);
    let mut replies = Vec::new();
    while !reader.is_empty() {
        assert_eq!(reader.u64(), Some(wire::MAGIC_OPTION_REPLY));
        let (option, kind) = (reader.u32().expect("option"), reader.u32().expect("type"));
        replies.push((option, kind, reader.counted().expect("data").to_vec()));
    }
    replies
}

/// A reply without read payload.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Reply {
    Simple {
        error: u32,
        cookie: u64,
    },
    Chunk {
        done: bool,
        kind: u16,
        cookie: u64,
        payload: Vec<u8>,
    },
    /// With an extended header.
    Wide {
        done: bool,
        kind: u16,
        cookie: u64,
        offset: u64,
        payload: Vec<u8>,
    },
}

impl Reply {
    fn cookie(&self) -> u64 {
        match self {
            Reply::Simple { cookie, .. } | Reply::Chunk { cookie, .. } | Reply::Wide { cookie, .. } => {
                *cookie
            }
        }
    }

    /// The error number; zero for success.
    fn error(&self) -> u32 {
        match self {
            Reply::Simple { error, .. } => *error,
            Reply::Chunk { kind, payload, .. } | Reply::Wide { kind, payload, .. }
                if kind & chunk::ERROR_BIT != 0 =>
            {
                let mut reader = Reader(payload);
                let error = reader.u32().expect("error number");
                let message = reader.u16().map(usize::from).and_then(|length| reader.bytes(length));
                assert!(wire::check_string(message.expect("message")).is_ok_and(|text| !text.is_empty()));
                assert!(reader.is_empty());
                error
            }
            Reply::Chunk { .. } | Reply::Wide { .. } => 0,
        }
    }
}

fn replies(bytes: &[u8]) -> Vec<Reply> {
    let mut reader = Reader(bytes);
    let mut replies = Vec::new();
    while !reader.is_empty() {
        match reader.u32().expect("magic") {
            MAGIC_SIMPLE_REPLY => {
                let error = reader.u32().expect("error");
                replies.push(Reply::Simple { error, cookie: reader.u64().expect("cookie") });
            }
            MAGIC_CHUNK => {
                let (flags, kind) = (reader.u16().expect("flags"), reader.u16().expect("type"));
                let cookie = reader.u64().expect("cookie");
                let payload = reader.counted().expect("payload").to_vec();
                replies.push(Reply::Chunk { done: flags == wire::CHUNK_FLAG_DONE, kind, cookie, payload });
            }
            MAGIC_EXTENDED_CHUNK => {
                let (flags, kind) = (reader.u16().expect("flags"), reader.u16().expect("type"));
                let (cookie, offset) = (reader.u64().expect("cookie"), reader.u64().expect("offset"));
                let length = usize::try_from(reader.u64().expect("length")).expect("a small chunk");
                let payload = reader.bytes(length).expect("payload").to_vec();
                let done = flags == wire::CHUNK_FLAG_DONE;
                replies.push(Reply::Wide { done, kind, cookie, offset, payload });
            }
            magic => panic!("{magic:#x} starts no reply"),
        }
    }
    replies
}

/// What a client's driver saw; payloads joined to the events that announced them.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Got {
    Event(ClientEvent),
    Data { cookie: u64, offset: u64, bytes: Vec<u8> },
}

/// A client under test.
struct Client {
    connection: ClientConnection,
    out: Vec<u8>,
    got: Vec<Got>,
    /// The payload being taken: cookie, offset, bytes missing, bytes so far.
    taking: Option<(u64, u64, usize, Vec<u8>)>,
    fatal: Option<ClientFatal>,
}

impl Client {
    fn new(options: ClientOptions) -> Client {
        Client {
            connection: ClientConnection::new(options, Timestamp(0)).expect("a sound name"),
            out: Vec::new(),
            got: Vec::new(),
            taking: None,
            fatal: None,
        }
    }

    /// Feeds bytes until they are used up or the connection failed; every call must make progress.
    fn feed(&mut self, bytes: &[u8]) {
        let mut rest = bytes;
        while !rest.is_empty() && self.fatal.is_none() {
            if let Some((cookie, offset, missing, mut bytes)) = self.taking.take() {
                let (front, tail) = rest.split_at(missing.min(rest.len()));
                bytes.extend_from_slice(front);
                rest = tail;
                if front.len() < missing {
                    self.taking = Some((cookie, offset, missing - front.len(), bytes));
                } else {
                    self.got.push(Got::Data { cookie, offset, bytes });
                    self.fatal = self.connection.payload_taken().err();
                }
            } else {
                match self.connection.receive(rest, &mut self.out) {
                    Ok(consumed) => {
                        assert!(consumed > 0 && consumed <= rest.len());
                        rest = &rest[consumed..];
                    }
                    Err(fatal) => self.fatal = Some(fatal),
                }
            }
            while let Some(event) = self.connection.poll_event() {
                match event {
                    ClientEvent::Data { cookie, offset, length } => {
                        assert!(self.taking.is_none(), "two payloads at once");
                        self.taking = Some((cookie, offset, length as usize, Vec::new()));
                    }
                    event => self.got.push(Got::Event(event)),
                }
            }
        }
    }

    fn submit(&mut self, request: &Request) -> u64 {
        self.connection.submit(request, &mut self.out).expect("a sound request")
    }
}
