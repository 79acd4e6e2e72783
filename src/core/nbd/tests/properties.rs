//! Properties over arbitrary input: no stream of bytes makes either half panic, stall or grow without bound,
//! and the way a stream is cut into receives never changes the result. (Progress itself is asserted by the
//! drivers.)

use super::*;
use proptest::prelude::*;

/// What a server may append per byte it receives: an error chunk of 20 + 6 + 256 bytes at most per 28-byte
/// header; the largest answer to a 16-byte option, LIST, with these exports is below 256 bytes.
const OUT_PER_BYTE_MAX: usize = 16;

/// One message from a client, sound or not.
fn client_message(extended: bool) -> impl Strategy<Value = Vec<u8>> {
    let option = prop_oneof![1u32..13, any::<u32>()];
    let data = prop_oneof![
        prop::collection::vec(any::<u8>(), 0..80),
        (prop::sample::select(vec!["vol", "ro", "4k", "", "nope"]), prop::collection::vec(0u16..5, 0..5))
            .prop_map(|(name, infos)| go(name, &infos)),
        prop::sample::select(vec!["vol", "ro"])
            .prop_map(|name| meta(name, &["base:allocation", "calpe:health"])),
        Just(Vec::new()),
    ];
    let block = prop_oneof![0u64..4, Just(SIZE / 512 - 1), any::<u64>()];
    let offset = (block, prop_oneof![9 => Just(0u64), 1 => 0u64..512])
        .prop_map(|(block, rest)| block.wrapping_mul(512).wrapping_add(rest));
    let length = prop_oneof![8 => (0u32..5).prop_map(|blocks| blocks * 512), 1 => any::<u32>()];
    let flags = prop_oneof![4 => Just(0u16), 2 => 0u16..64, 1 => any::<u16>()];
    prop_oneof![
        4 => (option, data).prop_map(|(option, data)| opt(option, &data)),
        8 => (flags, 0u16..9, any::<u64>(), offset, length, any::<bool>()).prop_map(
            move |(flags, command, cookie, offset, length, paid)| {
                if extended && command == 7 && paid {
                    // Contexts 1 and 2, or 2 and 3.
                    let first = u32::from(cookie.is_multiple_of(2)) + 1;
                    let payload = [&u64::from(length).to_be_bytes()[..], &first.to_be_bytes(), &[0, 0, 0, 2]];
                    return [ext(1 << 5, command, cookie, offset, 16), payload.concat()].concat();
                }
                let flags = if extended && command == 1 && paid { flags | 1 << 5 } else { flags };
                let mut bytes = if extended {
                    ext(flags, command, cookie, offset, u64::from(length) << (cookie % 3 * 8))
                } else {
                    raw(flags, command, cookie, offset, length)
                };
                if command == 1 && paid {
                    bytes.extend(vec![0x5a; length.min(4096) as usize]);
                }
                bytes
            }
        ),
        1 => prop::collection::vec(any::<u8>(), 0..64),
    ]
}

fn client_stream() -> impl Strategy<Value = Vec<u8>> {
    any::<bool>().prop_flat_map(client_stream_with)
}

fn client_stream_with(extended: bool) -> impl Strategy<Value = Vec<u8>> {
    let messages = prop::collection::vec(client_message(extended), 0..30);
    let headers = if extended { option::EXTENDED_HEADERS } else { option::STRUCTURED_REPLY };
    let start = prop_oneof![
        1 => Just(0u32.to_be_bytes().to_vec()),
        4 => Just(3u32.to_be_bytes().to_vec()),
        12 => Just([
            3u32.to_be_bytes().to_vec(),
            opt(headers, &[]),
            opt(option::SET_META_CONTEXT, &meta("vol", &["base:allocation", "calpe:health"])),
            opt(option::GO, &go("vol", &[3])),
        ].concat()),
    ];
    (start, messages).prop_map(|(start, messages)| [start, messages.concat()].concat())
}

/// A stream, and the same with a few bytes overwritten.
fn damaged(stream: impl Strategy<Value = Vec<u8>>) -> impl Strategy<Value = Vec<u8>> {
    let damage = prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 0..4);
    (stream, damage).prop_map(|(mut stream, damage)| {
        for (at, byte) in damage {
            if !stream.is_empty() {
                let at = at.index(stream.len());
                stream[at] = byte;
            }
        }
        stream
    })
}

/// The answers of this server to a client that asks for everything and then sends requests: a stream that the
/// client half understands, before it is damaged.
fn server_stream(extended: bool) -> Vec<u8> {
    let headers = if extended { option::EXTENDED_HEADERS } else { option::STRUCTURED_REPLY };
    let mut server = Server::greeted();
    let mut stream = std::mem::take(&mut server.out);
    for option in [
        opt(headers, &[]),
        opt(option::SET_META_CONTEXT, &meta("vol", &["base:allocation"])),
        opt(option::GO, &go("vol", &[1, 2, 3])),
    ] {
        if stream.len() == 18 {
            server.feed(&3u32.to_be_bytes());
        }
        server.feed(&option);
        stream.append(&mut server.out);
    }
    let mut client = ready_client(extended);
    submit_some(&mut client);
    server.seen.clear();
    server.feed(&client.out);
    for seen in std::mem::take(&mut server.seen) {
        let (Seen::Request(request) | Seen::Write(request, _)) = seen else { panic!("{seen:?}") };
        let Server { connection, out, .. } = &mut server;
        match request.command {
            Command::Read => {
                let (offset, length) = (request.offset, 512);
                connection.reply_read_hole(&request, ReadPart { offset, length, last: false }, out);
                let offset = offset + length;
                connection.reply_read_data(&request, ReadPart { offset, length, last: true }, out);
                out.extend([0x11; 512]);
            }
            Command::BlockStatus => {
                let extents = Extents { allocation: &[(512, 3), (512, 0)], health: &[] };
                connection.reply_block_status(&request, extents, out);
            }
            Command::Trim => connection.reply_error(&request, Errno::Io, "no", out),
            _ => connection.reply_done(&request, out),
        }
        stream.append(&mut server.out);
    }
    stream
}

/// A client that has seen the whole handshake of this server; nothing left to send.
fn ready_client(extended: bool) -> Client {
    let mut client = Client::new(options(extended));
    let mut server = Server::greeted();
    while client.got.is_empty() {
        client.feed(&std::mem::take(&mut server.out));
        server.feed(&std::mem::take(&mut client.out));
    }
    client.got.clear();
    client
}

fn options(extended: bool) -> ClientOptions {
    ClientOptions { extended, ..ClientOptions::for_export("vol").expect("a sound name") }
}

fn submit_some(client: &mut Client) {
    client.submit(&Request::new(Command::Read, 0, 1024));
    client.submit(&Request::new(Command::BlockStatus, 0, 4096));
    client.submit(&Request::new(Command::Write, 0, 512));
    client.out.extend_from_slice(&[9; 512]);
    client.submit(&Request::new(Command::Trim, 0, 4096));
    client.submit(&Request::new(Command::Flush, 0, 0));
}

/// Feeds a server's stream to a client in pieces of the given sizes, submitting requests once it is ready.
fn run_client(extended: bool, stream: &[u8], cuts: &[usize]) -> (Vec<Got>, Option<ClientFatal>, Vec<u8>) {
    let mut client = Client::new(options(extended));
    let mut sent = Vec::new();
    let mut rest = stream;
    let mut cuts = cuts.iter().cycle();
    let mut submitted = false;
    // Requests go out at the moment the client becomes ready, wherever the cuts fall: one byte at a time
    // until then.
    while !rest.is_empty() && client.fatal.is_none() {
        let cut = if submitted { *cuts.next().expect("cycled") } else { 1 };
        let (piece, tail) = rest.split_at(cut.min(rest.len()));
        rest = tail;
        client.feed(piece);
        if !submitted && client.connection.export().is_some() {
            let accepts_all = client
                .connection
                .export()
                .is_some_and(|export| export.size >= 4096 && export.block_min <= 512 && !export.read_only);
            if accepts_all && client.connection.export().is_some_and(offers_all) {
                submit_some(&mut client);
            }
            submitted = true;
        }
        sent.append(&mut client.out);
    }
    (client.got, client.fatal, sent)
}

fn offers_all(export: &RemoteExport) -> bool {
    export.trim && export.flush && export.base_allocation.is_some()
}

fn run_server(stream: &[u8], cuts: &[usize]) -> (Vec<Seen>, Option<Fatal>, Vec<u8>) {
    let mut server = Server::greeted();
    let mut rest = stream;
    for &cut in cuts.iter().cycle() {
        if rest.is_empty() {
            break;
        }
        let (piece, tail) = rest.split_at(cut.min(rest.len()));
        rest = tail;
        server.feed(piece);
    }
    (server.seen, server.fatal, server.out)
}

#[test]
fn the_streams_used_here_reach_every_phase() {
    for extended in [false, true] {
        let (got, fatal, _) = run_client(extended, &server_stream(extended), &[7]);
        assert_eq!(fatal, None);
        let ends = got.iter().filter(|got| matches!(got, Got::Event(ClientEvent::Done { .. }))).count();
        assert_eq!(ends, 5);
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(512))]

    #[test]
    fn random_bytes_never_harm_a_server(stream in prop::collection::vec(any::<u8>(), 0..2000)) {
        let mut server = Server::greeted();
        server.feed(&stream);
        prop_assert!(server.out.len() <= 18 + stream.len() * OUT_PER_BYTE_MAX);
    }

    #[test]
    fn likely_and_damaged_streams_never_harm_a_server(stream in damaged(client_stream())) {
        let mut server = Server::greeted();
        server.feed(&stream);
        prop_assert!(server.out.len() <= 18 + stream.len() * OUT_PER_BYTE_MAX);
        for seen in &server.seen {
            let (Seen::Request(request) | Seen::Write(request, _)) = seen else { continue };
            let export = server.connection.export().expect("selected before the first request");
            prop_assert!(request.offset + request.length <= export.size);
            let alignment = server.connection.alignment().expect("known with the export");
            prop_assert!(request.offset.is_multiple_of(alignment) && request.length.is_multiple_of(alignment));
            prop_assert!(request.length > 0 || request.command == Command::Flush);
            prop_assert!(!(request.command.modifies() && export.read_only));
        }
    }

    #[test]
    fn a_server_does_the_same_however_the_stream_is_cut(
        stream in damaged(client_stream()),
        cuts in prop::collection::vec(1usize..60, 1..20),
    ) {
        let whole = run_server(&stream, &[usize::MAX]);
        prop_assert_eq!(&run_server(&stream, &[1]), &whole);
        prop_assert_eq!(&run_server(&stream, &cuts), &whole);
    }

    #[test]
    fn random_bytes_never_harm_a_client(
        stream in prop::collection::vec(any::<u8>(), 0..2000),
        extended: bool,
    ) {
        run_client(extended, &stream, &[usize::MAX]);
        let mut client = ready_client(extended);
        submit_some(&mut client);
        client.feed(&stream);
        prop_assert!(client.got.len() <= stream.len());
    }

    #[test]
    fn damaged_streams_never_harm_a_client_and_cutting_changes_nothing(
        (extended, stream) in any::<bool>()
            .prop_flat_map(|extended| (Just(extended), damaged(Just(server_stream(extended))))),
        cuts in prop::collection::vec(1usize..60, 1..20),
    ) {
        let whole = run_client(extended, &stream, &[usize::MAX]);
        prop_assert_eq!(&run_client(extended, &stream, &[1]), &whole);
        prop_assert_eq!(&run_client(extended, &stream, &cuts), &whole);
        prop_assert!(whole.2.len() < 1000, "a client sends a bounded handshake and its requests");
    }
}
