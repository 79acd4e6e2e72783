//! What is read from sockets: both halves of the NBD protocol. The first byte of an input says into pieces of
//! how many bytes the stream is cut; nothing may come out otherwise than of the stream in one piece.

use calpe_core::nbd::{
    ClientConnection, ClientEvent, ClientOptions, Command, ExportInfo, Exports, Extents, HEALTH_DEGRADED,
    Incoming, ReadPart, Request, STATE_ZERO, ServerConnection,
};
use calpe_core::units::Timestamp;

/// Size of the exports.
pub const EXPORT_BYTES: u64 = 1 << 30;

/// Longest payload with which a read is answered here: what the seeds ask for. More would only be copied.
const READ_PAYLOAD_MAX: usize = 1024;
/// What a server may append for each byte it receives: for a request of 28 bytes, the chunks of a read's
/// data, or an error chunk of 32 + 6 + 256 bytes at most; the longest answer to an option of 16, LIST, has
/// fewer than 256.
const OUT_PER_BYTE_MAX: usize = (READ_PAYLOAD_MAX + 294).div_ceil(28);
/// Bytes of the greeting.
const GREETING_BYTES: usize = 18;

/// `vol`, the default, and `ro`, which is read-only.
pub struct TwoExports;

impl Exports for TwoExports {
    fn list(&self) -> Vec<ExportInfo> {
        let vol = ExportInfo {
            name: "vol".into(),
            description: "about vol".into(),
            size: EXPORT_BYTES,
            read_only: false,
            block_min: 512,
            block_preferred: 65536,
            block_max: 32 << 20,
            rotational: false,
            trim: true,
            write_zeroes: true,
            fast_zero: true,
            multi_conn: true,
            cache: true,
        };
        vec![vol.clone(), ExportInfo { name: "ro".into(), read_only: true, ..vol }]
    }

    fn find(&self, name: &str) -> Option<ExportInfo> {
        self.list().into_iter().find(|export| name.is_empty() || export.name == name)
    }
}

/// A server that is sent this stream.
pub fn nbd_server(data: &[u8]) {
    let Some((&cut, stream)) = data.split_first() else { return };
    let whole = serve(stream, 0);
    assert!(whole.len() <= GREETING_BYTES + stream.len() * OUT_PER_BYTE_MAX, "{} bytes out", whole.len());
    assert_eq!(serve(stream, cut), whole, "cut into pieces of {cut}");
}

/// A client that is sent this stream.
pub fn nbd_client(data: &[u8]) {
    let Some((&cut, stream)) = data.split_first() else { return };
    let whole = talk(stream, 0);
    assert!(whole.1.len() < 1000, "a handshake and a few requests, not {} bytes", whole.1.len());
    assert_eq!(talk(stream, cut), whole, "cut into pieces of {cut}");
}

/// The requests that the client sends once it may.
#[must_use]
pub fn requests() -> [Request; 6] {
    [
        Request::new(Command::Read, 0, 1024),
        Request::new(Command::BlockStatus, 0, 4096),
        Request::new(Command::Write, 0, 512).with_fua(),
        Request::new(Command::Trim, 0, 4096),
        Request::new(Command::WriteZeroes, 8192, 4096),
        Request::new(Command::Flush, 0, 0),
    ]
}

/// What a server sends in answer to a stream.
#[must_use]
pub fn serve(stream: &[u8], cut: u8) -> Vec<u8> {
    serve_counting(stream, cut).0
}

/// How many sound requests a client's stream holds.
#[must_use]
pub fn requests_in(stream: &[u8]) -> usize {
    serve_counting(stream, 0).1
}

fn serve_counting(stream: &[u8], cut: u8) -> (Vec<u8>, usize) {
    let mut count = 0;
    let mut connection = ServerConnection::new(Timestamp(0));
    let mut out = Vec::new();
    connection.start(&mut out);
    // The write whose payload is being taken, and how much of it is missing.
    let mut taking: Option<(Request, usize)> = None;
    for piece in pieces(stream, cut) {
        let mut rest = piece;
        while !rest.is_empty() {
            if let Some((request, missing)) = taking.take() {
                let here = missing.min(rest.len());
                rest = &rest[here..];
                if here < missing {
                    taking = Some((request, missing - here));
                } else {
                    connection.payload_taken();
                    connection.reply_done(&request, &mut out);
                }
                continue;
            }
            let Ok((consumed, incoming)) = connection.receive(rest, &TwoExports, &mut out) else {
                return (out, count);
            };
            assert!((1..=rest.len()).contains(&consumed));
            rest = &rest[consumed..];
            match incoming {
                None | Some(Incoming::Selected) => {}
                // Never offered here.
                Some(Incoming::StartTls) => panic!("TLS was granted"),
                Some(Incoming::Disconnect) => return (out, count),
                Some(Incoming::Request(request)) => {
                    check_request(&connection, &request);
                    count += 1;
                    answer(&connection, &request, &mut out);
                }
                Some(Incoming::Write { request }) => {
                    check_request(&connection, &request);
                    count += 1;
                    taking = Some((request, request.length as usize));
                }
            }
        }
    }
    (out, count)
}

/// A request that is handed on must be one the export can serve.
fn check_request(connection: &ServerConnection, request: &Request) {
    let export = connection.export().expect("selected before the first request");
    assert!(request.offset + request.length <= export.size);
    let alignment = connection.alignment().expect("known with the export");
    assert!(alignment == 1 || alignment == u64::from(export.block_min));
    assert!(request.offset.is_multiple_of(alignment) && request.length.is_multiple_of(alignment));
    assert!(request.length > 0 || request.command == Command::Flush);
    assert!(request.contexts.is_empty() == (request.command != Command::BlockStatus));
    assert!(!(request.command.modifies() && export.read_only));
}

fn answer(connection: &ServerConnection, request: &Request, out: &mut Vec<u8>) {
    match request.command {
        // Half of it as a hole, where that is allowed.
        Command::Read if connection.takes_parts(request) && request.length == READ_PAYLOAD_MAX as u64 => {
            let (offset, length) = (request.offset, request.length / 2);
            connection.reply_read_hole(request, ReadPart { offset, length, last: false }, out);
            let offset = offset + length;
            connection.reply_read_data(request, ReadPart { offset, length, last: true }, out);
            out.extend(std::iter::repeat_n(0x11, length as usize));
        }
        Command::Read => {
            connection.reply_read_header(request, out);
            if request.length <= READ_PAYLOAD_MAX as u64 {
                out.extend(std::iter::repeat_n(0x11, request.length as usize));
            }
        }
        Command::BlockStatus => {
            let extents = Extents {
                allocation: &[(512, STATE_ZERO), (512, 0)],
                health: &[(512, 0), (512, HEALTH_DEGRADED)],
            };
            connection.reply_block_status(request, extents, out);
        }
        _ => connection.reply_done(request, out),
    }
}

/// What happens at a client that is sent a stream: its events, its end if it fails, and what it sends.
#[must_use]
pub fn talk(stream: &[u8], cut: u8) -> (Vec<String>, Vec<u8>) {
    let options = ClientOptions::for_export("vol").expect("a sound name");
    let mut connection = ClientConnection::new(options, Timestamp(0)).expect("a sound name");
    let (mut events, mut out) = (Vec::new(), Vec::new());
    // Bytes of a read's payload that are missing.
    let mut taking = 0;
    for piece in pieces(stream, cut) {
        let mut rest = piece;
        while !rest.is_empty() {
            let outcome = if taking > 0 {
                let here = rest.len().min(taking);
                rest = &rest[here..];
                taking -= here;
                if taking == 0 { connection.payload_taken() } else { Ok(()) }
            } else {
                connection.receive(rest, &mut out).map(|consumed| {
                    assert!((1..=rest.len()).contains(&consumed));
                    rest = &rest[consumed..];
                })
            };
            if let Err(fatal) = outcome {
                events.push(fatal.to_string());
                return (events, out);
            }
            while let Some(event) = connection.poll_event() {
                match &event {
                    ClientEvent::Ready => submit(&mut connection, &mut out),
                    ClientEvent::Data { length, .. } => {
                        assert!(
                            taking == 0 && *length <= READ_PAYLOAD_MAX as u64,
                            "more payload than was asked for"
                        );
                        taking = *length as usize;
                    }
                    _ => {}
                }
                events.push(format!("{event:?}"));
            }
        }
    }
    (events, out)
}

/// Sends what the export takes of [`requests`].
fn submit(connection: &mut ClientConnection, out: &mut Vec<u8>) {
    for request in requests() {
        if connection.submit(&request, out).is_ok() && request.command == Command::Write {
            out.extend([9; 512]);
        }
    }
}

/// The stream in pieces of `cut` bytes, 0 for one.
fn pieces(stream: &[u8], cut: u8) -> impl Iterator<Item = &[u8]> {
    let bytes = if cut == 0 { stream.len().max(1) } else { usize::from(cut) };
    stream.chunks(bytes)
}
