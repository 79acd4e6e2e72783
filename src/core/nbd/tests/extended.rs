//! Extended headers, in both halves: how they are agreed on, and how a server treats requests, and a client
//! replies, that misuse them. The rules that headers of either form share are in `obligations` and
//! `hostile_server`.

use super::wire::info;
use super::*;

const EINVAL: u32 = 22;
const PAID: u16 = 1 << 5;
const BOTH: &[&str] = &["base:allocation", "calpe:health"];

const READ: u16 = 0;
const WRITE: u16 = 1;
const FLUSH: u16 = 3;
const TRIM: u16 = 4;
const CACHE: u16 = 5;
const ZEROES: u16 = 6;
const STATUS: u16 = 7;

/// Kinds of the replies to options, in order.
fn kinds(replies: &[(u32, u32, Vec<u8>)]) -> Vec<u32> {
    replies.iter().map(|(_, kind, _)| *kind).collect()
}

fn serving() -> Server {
    Server::agreed("vol", Headers::Extended, BOTH)
}

/// The payload of a BLOCK_STATUS.
fn filter(length: u64, ids: &[u32]) -> Vec<u8> {
    let ids = ids.iter().flat_map(|id| id.to_be_bytes());
    length.to_be_bytes().into_iter().chain(ids).collect()
}

#[test]
fn extended_headers_take_precedence_over_structured_replies_in_either_order() {
    let (structured, extended) = (opt(option::STRUCTURED_REPLY, &[]), opt(option::EXTENDED_HEADERS, &[]));
    for (options, want) in [
        (vec![&extended], vec![reply::ACK]),
        (vec![&structured, &extended], vec![reply::ACK, reply::ACK]),
        (vec![&extended, &structured], vec![reply::ACK, reply::ERR_EXT_HEADER_REQD]),
        (vec![&extended, &extended], vec![reply::ACK, reply::ERR_INVALID]),
        (vec![&structured, &structured, &extended], vec![reply::ACK; 3]),
    ] {
        let mut server = Server::haggling();
        let bytes: Vec<u8> = options.into_iter().flatten().copied().collect();
        assert_eq!(kinds(&server.options(&bytes)), want);
        server.feed(&opt(option::GO, &go("vol", &[])));
        server.feed(&ext(0, READ, 1, 0, 512));
        assert!(matches!(server.seen[1], Seen::Request(_)), "{:?}", server.fatal);
    }
}

#[test]
fn the_option_takes_no_data_and_changes_nothing_when_it_is_refused() {
    let mut server = Server::haggling();
    assert_eq!(kinds(&server.options(&opt(option::EXTENDED_HEADERS, b"x"))), [reply::ERR_INVALID]);
    server.feed(&opt(option::GO, &go("vol", &[])));
    server.feed(&raw(0, READ, 1, 0, 512));
    assert!(matches!(server.seen[1], Seen::Request(_)), "{:?}", server.fatal);
}

#[test]
fn extended_headers_forbid_export_name() {
    let mut server = Server::haggling();
    server.feed(&opt(option::EXTENDED_HEADERS, &[]));
    server.out.clear();
    server.feed(&opt(option::EXPORT_NAME, b"vol"));
    assert_eq!(server.fatal, Some(Fatal::ExportNameAfterExtendedHeaders));
    assert!(server.out.is_empty());
}

#[test]
fn a_server_that_stops_refuses_the_option() {
    let mut server = Server::haggling();
    server.connection.begin_shutdown();
    assert_eq!(kinds(&server.options(&opt(option::EXTENDED_HEADERS, &[]))), [reply::ERR_SHUTDOWN]);
}

#[test]
fn contexts_chosen_before_extended_headers_stay_chosen() {
    let mut server = Server::haggling();
    server.feed(&opt(option::STRUCTURED_REPLY, &[]));
    server.feed(&opt(option::SET_META_CONTEXT, &meta("vol", BOTH)));
    server.feed(&opt(option::EXTENDED_HEADERS, &[]));
    server.feed(&opt(option::GO, &go("vol", &[])));
    server.feed(&ext(0, STATUS, 1, 0, 512));
    let Seen::Request(request) = server.seen[1] else { panic!("{:?}", server.seen) };
    assert_eq!(request.contexts, Contexts { allocation: true, health: true });
}

#[test]
fn the_payload_form_of_block_status_is_announced_where_it_can_be_used() {
    let flag = |headers: Option<u32>, contexts: &[&str], option: u32| {
        let mut server = Server::haggling();
        headers.map(|headers| server.options(&opt(headers, &[])));
        server.options(&opt(option::SET_META_CONTEXT, &meta("vol", contexts)));
        let replies = server.options(&opt(option, &go("vol", &[])));
        u16::from_be_bytes([replies[0].2[10], replies[0].2[11]]) & wire::can::BLOCK_STATUS_PAYLOAD != 0
    };
    let (structured, extended) = (Some(option::STRUCTURED_REPLY), Some(option::EXTENDED_HEADERS));
    assert!(flag(extended, BOTH, option::GO));
    assert!(flag(extended, BOTH, option::INFO));
    assert!(flag(extended, &[], option::INFO), "it could be had");
    assert!(!flag(extended, &[], option::GO), "no context, no block status");
    assert!(!flag(structured, BOTH, option::GO));
    assert!(!flag(None, BOTH, option::GO));
}

#[test]
fn a_header_of_the_other_form_closes() {
    for (headers, bytes, found) in [
        (Headers::Extended, raw(0, READ, 1, 0, 512), wire::MAGIC_REQUEST),
        (Headers::Structured, ext(0, READ, 1, 0, 512), wire::MAGIC_EXTENDED_REQUEST),
        (Headers::Simple, ext(0, READ, 1, 0, 512), wire::MAGIC_EXTENDED_REQUEST),
    ] {
        let mut server = Server::agreed("vol", headers, BOTH);
        server.feed(&[bytes, vec![0; 4]].concat());
        assert_eq!(server.fatal, Some(Fatal::RequestMagic { found }));
    }
}

#[test]
fn every_command_without_payload_takes_lengths_beyond_32_bits() {
    let mut server = serving();
    for command in [TRIM, CACHE, ZEROES, STATUS] {
        server.feed(&ext(0, command, 9, 512, SIZE - 512));
    }
    assert_eq!(server.seen.len(), 4);
    assert!(server.out.is_empty());
    for seen in &server.seen {
        let Seen::Request(request) = seen else { panic!("{seen:?}") };
        assert_eq!((request.cookie, request.offset, request.length), (9, 512, SIZE - 512));
    }
}

#[test]
fn ranges_beyond_the_end_are_refused_whatever_they_add_up_to() {
    for (command, errno) in [(READ, EINVAL), (TRIM, EINVAL), (CACHE, EINVAL), (STATUS, EINVAL), (ZEROES, 28)]
    {
        for (offset, length) in [
            (512, SIZE),
            (SIZE, 512),
            (u64::MAX - 511, 512),
            (512, u64::MAX - 511),
            (u64::MAX - 511, u64::MAX - 511),
            (0, 1 << 63),
        ] {
            let replies = serving().replies(&ext(0, command, 3, offset, length));
            assert_eq!(replies[0].error(), errno, "command {command}: {length} bytes at {offset}");
            assert!(matches!(replies[0], Reply::Wide { offset: at, done: true, .. } if at == offset));
        }
    }
}

#[test]
fn a_write_has_its_payload_also_from_clients_that_forget_to_announce_it() {
    for flags in [PAID, 0] {
        let mut server = serving();
        server.feed(&[ext(flags, WRITE, 1, 0, 512), vec![7; 512]].concat());
        let want = Request { cookie: 1, ..Request::new(Command::Write, 0, 512) };
        assert_eq!(server.seen, [Seen::Write(want, vec![7; 512])]);
        let refused = [ext(flags, WRITE, 2, 3, 512), vec![7; 512], ext(0, TRIM, 3, 1, 512)].concat();
        let replies = server.replies(&refused);
        let answers: Vec<_> = replies.iter().map(|reply| (reply.cookie(), reply.error())).collect();
        assert_eq!(answers, [(2, EINVAL), (3, EINVAL)], "drained");
        assert_eq!(server.replies(&ext(flags, WRITE, 4, 0, 0))[0].error(), 0, "an empty write does no harm");
        server.feed(&ext(flags, WRITE, 5, 0, u64::from(BLOCK_BYTES_MAX) + 512));
        assert!(matches!(server.fatal, Some(Fatal::PayloadLength { .. })));
    }
}

#[test]
fn payloads_of_other_commands_are_drained_and_refused() {
    for command in [READ, FLUSH, TRIM, CACHE, ZEROES, 8, 99] {
        let mut server = serving();
        let bytes = [ext(PAID, command, 5, 0, 4096), vec![0x21; 4096]].concat();
        assert_eq!(server.replies(&bytes[..bytes.len() - 1]), [], "answered after the last byte");
        let replies = server.replies(&bytes[bytes.len() - 1..]);
        assert_eq!((replies.len(), replies[0].error()), (1, EINVAL), "command {command}");
        server.feed(&ext(0, READ, 6, 0, 512));
        assert_eq!(server.seen.len(), 1, "in step after command {command}");
    }
}

#[test]
fn refused_writes_are_drained_and_payloads_above_the_maximum_close() {
    let mut server = serving();
    let replies = server.replies(&[ext(PAID, WRITE, 1, 3, 4096), vec![1; 4096]].concat());
    assert_eq!(replies[0].error(), EINVAL);
    let most = u64::from(BLOCK_BYTES_MAX);
    for command in [WRITE, READ, STATUS, 77] {
        let mut server = serving();
        server.feed(&ext(PAID, command, 1, 0, most + 512));
        assert_eq!(server.fatal, Some(Fatal::PayloadLength { length: most + 512, limit: most }));
        let mut server = serving();
        server.feed(&ext(PAID, command, 1, 0, u64::MAX));
        assert!(matches!(server.fatal, Some(Fatal::PayloadLength { .. })));
    }
}

#[test]
fn the_flag_payload_len_means_nothing_in_compact_headers() {
    for (command, payload) in [(READ, 0), (WRITE, 512), (STATUS, 0)] {
        let mut server = Server::serving("vol", true);
        let replies = server.replies(&[raw(PAID, command, 1, 0, 512), vec![1; payload]].concat());
        assert_eq!(replies[0].error(), EINVAL);
        server.feed(&raw(0, READ, 2, 0, 512));
        assert_eq!(server.seen.len(), 1);
    }
}

#[test]
fn a_disconnect_with_an_extended_header_ends_the_connection() {
    let mut server = serving();
    server.feed(&ext(0, 2, 0, 0, 0));
    assert_eq!(server.seen, [Seen::Disconnect]);
}

#[test]
fn every_reply_has_the_extended_header_with_the_offset_of_its_request() {
    let mut server = serving();
    server.feed(&[ext(0, FLUSH, 1, 0, 0), ext(0, READ, 2, 8192, 1024), ext(0, READ, 3, SIZE, 0)].concat());
    let Seen::Request(flush) = server.seen[0] else { panic!("{:?}", server.seen) };
    let Seen::Request(read) = server.seen[1] else { panic!("{:?}", server.seen) };
    let Server { connection, out, .. } = &mut server;
    connection.reply_done(&flush, out);
    connection.reply_read_hole(&read, ReadPart { offset: 8192, length: 512, last: false }, out);
    connection.reply_read_data(&read, ReadPart { offset: 8704, length: 512, last: true }, out);
    out.extend([9; 512]);
    connection.reply_error(&read, Errno::Io, "gone", out);
    let wide = |done, kind, cookie, offset, payload| Reply::Wide { done, kind, cookie, offset, payload };
    let hole = [&8192u64.to_be_bytes()[..], &512u32.to_be_bytes()].concat();
    let data = [&8704u64.to_be_bytes()[..], &[9; 512]].concat();
    let failed = b"\0\0\0\x05\0\x04gone".to_vec();
    let want = [
        wide(true, chunk::NONE, 3, SIZE, vec![]),
        wide(true, chunk::NONE, 1, 0, vec![]),
        wide(false, chunk::OFFSET_HOLE, 2, 8192, hole),
        wide(true, chunk::OFFSET_DATA, 2, 8192, data),
        wide(true, chunk::ERROR, 2, 8192, failed),
    ];
    assert_eq!(replies(&server.out), want);
}

/// The (id, extents) of the chunks that answer a BLOCK_STATUS.
fn status_of(replies: &[Reply]) -> Vec<(u32, Vec<(u64, u64)>)> {
    let last = replies.len() - 1;
    let each = replies.iter().enumerate().map(|(at, reply)| {
        let Reply::Wide { done, kind: chunk::BLOCK_STATUS_EXT, payload, .. } = reply else {
            panic!("{reply:?}")
        };
        assert_eq!(*done, at == last);
        let mut reader = Reader(payload);
        let (id, count) = (reader.u32().expect("id"), reader.u32().expect("count"));
        let mut extents = Vec::new();
        while let Some(length) = reader.u64() {
            extents.push((length, reader.u64().expect("flags")));
        }
        assert!(reader.is_empty());
        assert_eq!(extents.len(), count as usize, "the count is right");
        (id, extents)
    });
    each.collect()
}

#[test]
fn block_status_answers_for_each_context_that_was_negotiated_or_named() {
    let (allocation, health) =
        ([(SIZE, STATE_HOLE | STATE_ZERO)], [(4096, HEALTH_LOST), (SIZE, HEALTH_DEGRADED)]);
    let full = vec![(1u32, vec![(SIZE, 3u64)]), (2, vec![(4096, 2), (SIZE - 4096, 1)])];
    let named = |ids: &[u32]| {
        let length = 8 + 4 * ids.len() as u64;
        [ext(PAID, STATUS, 1, 0, length), filter(SIZE, ids)].concat()
    };
    for (bytes, want) in [
        (ext(0, STATUS, 1, 0, SIZE), full.clone()),
        (named(&[1, 2]), full.clone()),
        (named(&[2, 1]), full.clone()),
        (named(&[1]), full[..1].to_vec()),
        (named(&[2]), full[1..].to_vec()),
    ] {
        let mut server = serving();
        for byte in bytes {
            server.feed(&[byte]);
        }
        let Seen::Request(request) = server.seen[0] else { panic!("{:?}", server.seen) };
        assert_eq!((request.offset, request.length), (0, SIZE));
        let extents = Extents { allocation: &allocation, health: &health };
        server.connection.reply_block_status(&request, extents, &mut server.out);
        assert_eq!(status_of(&replies(&std::mem::take(&mut server.out))), want);
        server.feed(&ext(0, READ, 2, 0, 512));
        assert_eq!(server.seen.len(), 2, "in step");
    }
}

#[test]
fn structured_block_status_answers_with_one_compact_chunk_for_each_context() {
    let mut server = Server::agreed("vol", Headers::Structured, BOTH);
    server.feed(&raw(1 << 3, STATUS, 1, 0, 8192));
    let Seen::Request(request) = server.seen[0] else { panic!("{:?}", server.seen) };
    let extents = Extents { allocation: &[(512, 3), (7680, 0)], health: &[] };
    server.connection.reply_block_status(&request, extents, &mut server.out);
    let chunk = |done, id: u32, length: u32, flags: u32| {
        let payload = [id, length, flags].iter().flat_map(|word| word.to_be_bytes()).collect();
        Reply::Chunk { done, kind: chunk::BLOCK_STATUS, cookie: 1, payload }
    };
    // Nothing known reads as clean.
    assert_eq!(replies(&server.out), [chunk(false, 1, 512, 3), chunk(true, 2, 8192, 0)]);
}

#[test]
fn payloads_that_name_no_set_of_negotiated_contexts_are_drained_and_refused() {
    let good = filter(4096, &[1]);
    let cases: &[(&[&str], Vec<u8>)] = &[
        (BOTH, vec![]),
        (BOTH, filter(4096, &[])),
        (BOTH, good[..11].to_vec()),
        (BOTH, [&good[..], b"x"].concat()),
        (BOTH, good[..4].to_vec()),
        (BOTH, filter(4096, &[3])),
        (BOTH, filter(4096, &[0])),
        (BOTH, filter(4096, &[1, 1])),
        (BOTH, filter(4096, &[2, 7])),
        (BOTH, filter(4096, &[1, 2, 1])),
        (BOTH, filter(4096, &[1; 5000])),
        (&["base:allocation"], filter(4096, &[2])),
        (&["base:allocation"], filter(4096, &[1, 2])),
        (&["calpe:health"], filter(4096, &[1])),
        (&[], filter(4096, &[1])),
        // The effective length is checked like any other.
        (BOTH, filter(0, &[1])),
        (BOTH, filter(100, &[1])),
        (BOTH, filter(SIZE + 512, &[1])),
        (BOTH, filter(u64::MAX - 511, &[1])),
    ];
    for (contexts, payload) in cases {
        let mut server = Server::agreed("vol", Headers::Extended, contexts);
        let replies =
            server.replies(&[ext(PAID, STATUS, 1, 512, payload.len() as u64), payload.clone()].concat());
        assert_eq!((replies.len(), replies[0].error()), (1, EINVAL), "{contexts:?} {} bytes", payload.len());
        server.feed(&ext(0, READ, 2, 0, 512));
        assert_eq!(server.seen.len(), 1, "in step");
    }
}

fn option_reply(option: u32, kind: u32, data: &[u8]) -> Vec<u8> {
    let mut bytes = Vec::new();
    wire::encode_option_reply(option, kind, &[data], &mut bytes);
    bytes
}

const GREETING: &[u8] = b"NBDMAGICIHAVEOPT\0\x03";
const FAR: u64 = 1 << 40;

/// A client with extended headers, of an export of a TiB.
fn client() -> Client {
    let mut client = Client::new(ClientOptions::for_export("vol").expect("a sound name"));
    let context = [&7u32.to_be_bytes()[..], b"base:allocation"].concat();
    let about = [&info::EXPORT.to_be_bytes()[..], &FAR.to_be_bytes(), &0x0dedu16.to_be_bytes()].concat();
    for bytes in [
        GREETING.to_vec(),
        option_reply(option::EXTENDED_HEADERS, reply::ACK, &[]),
        option_reply(option::SET_META_CONTEXT, reply::META_CONTEXT, &context),
        option_reply(option::SET_META_CONTEXT, reply::ACK, &[]),
        option_reply(option::GO, reply::INFO, &about),
        option_reply(option::GO, reply::ACK, &[]),
    ] {
        client.feed(&bytes);
    }
    assert_eq!(client.got, [Got::Event(ClientEvent::Ready)], "{:?}", client.fatal);
    client.got.clear();
    client.out.clear();
    client
}

fn wide(flags: u16, kind: u16, cookie: u64, offset: u64, payload: &[u8]) -> Vec<u8> {
    let mut bytes = Vec::new();
    let length = u32::try_from(payload.len()).expect("small");
    wire::ChunkHeader { flags, kind, cookie, offset, length }.encode(Headers::Extended, &mut bytes);
    bytes.extend_from_slice(payload);
    bytes
}

fn status(id: u32, count: u32, extents: &[(u64, u64)]) -> Vec<u8> {
    let mut bytes = [id.to_be_bytes(), count.to_be_bytes()].concat();
    for (length, flags) in extents {
        bytes.extend_from_slice(&length.to_be_bytes());
        bytes.extend_from_slice(&flags.to_be_bytes());
    }
    bytes
}

#[test]
fn a_client_that_is_refused_extended_headers_does_with_less() {
    let mut client = Client::new(ClientOptions::for_export("vol").expect("a sound name"));
    client.feed(GREETING);
    assert_eq!(client.out[4..], opt(option::EXTENDED_HEADERS, &[]));
    client.out.clear();
    client.feed(&option_reply(option::EXTENDED_HEADERS, reply::ERR_UNSUP, b""));
    assert_eq!(client.out, opt(option::STRUCTURED_REPLY, &[]));
    client.out.clear();
    client.feed(&option_reply(option::STRUCTURED_REPLY, reply::ERR_UNSUP, b""));
    assert_eq!(client.out[..12], opt(option::GO, &[])[..12]);
    for hopeless in [reply::ERR_TLS_REQD, reply::ERR_SHUTDOWN] {
        let mut client = Client::new(ClientOptions::for_export("vol").expect("a sound name"));
        client.feed(&[GREETING, &option_reply(option::EXTENDED_HEADERS, hopeless, b"")].concat());
        assert!(matches!(client.fatal, Some(ClientFatal::Refused { .. })));
    }
    // A server that has agreed to them must have GO: EXPORT_NAME is no way out.
    let mut client = Client::new(ClientOptions {
        base_allocation: false,
        ..ClientOptions::for_export("vol").expect("a sound name")
    });
    client.feed(&[GREETING, &option_reply(option::EXTENDED_HEADERS, reply::ACK, b"")].concat());
    client.feed(&option_reply(option::SET_META_CONTEXT, reply::ERR_UNSUP, b""));
    client.feed(&option_reply(option::GO, reply::ERR_UNSUP, b""));
    assert!(client.fatal.is_some());
}

#[test]
fn a_client_sends_long_requests_and_announces_payloads() {
    let mut client = client();
    let cookies = [
        client.submit(&Request::new(Command::Trim, 512, FAR - 512)),
        client.submit(&Request::new(Command::Write, 0, 512)),
    ];
    let want = [ext(0, TRIM, cookies[0], 512, FAR - 512), ext(PAID, WRITE, cookies[1], 0, 512)].concat();
    assert_eq!(client.out, want);
    client.out.clear();
    client.connection.disconnect(&mut client.out);
    assert_eq!(client.out, ext(0, 2, 0, 0, 0));
    let mut compact = Client::new(ClientOptions {
        extended: false,
        ..ClientOptions::for_export("vol").expect("a sound name")
    });
    let about = [&info::EXPORT.to_be_bytes()[..], &FAR.to_be_bytes(), &0x0dedu16.to_be_bytes()].concat();
    compact.feed(&[GREETING, &option_reply(option::STRUCTURED_REPLY, reply::ERR_UNSUP, b"")].concat());
    compact.feed(&option_reply(option::GO, reply::INFO, &about));
    compact.feed(&option_reply(option::GO, reply::ACK, b""));
    let refused = compact.connection.submit(&Request::new(Command::Trim, 0, 1 << 32), &mut Vec::new());
    assert_eq!(refused, Err(SubmitError::TooLong { length: 1 << 32, limit: u64::from(u32::MAX) }));
}

#[test]
fn a_client_understands_extended_replies() {
    let mut client = client();
    let ask = client.submit(&Request::new(Command::BlockStatus, 4096, 1 << 36));
    for count in [0, 2] {
        let mut client = self::client();
        assert_eq!(client.submit(&Request::new(Command::BlockStatus, 4096, 1 << 36)), ask);
        client.feed(&wide(
            1,
            chunk::BLOCK_STATUS_EXT,
            ask,
            4096,
            &status(7, count, &[(1 << 35, 3), (1 << 40, 0)]),
        ));
        let extents = vec![(1 << 35, 3), (1 << 35, 0)];
        let done = ClientEvent::Done { cookie: ask, result: Ok(()) };
        assert_eq!(client.got, [ClientEvent::Extents { cookie: ask, extents }, done].map(Got::Event));
    }
    let failed = client.submit(&Request::new(Command::Trim, 0, 1 << 33));
    client.feed(&wide(1, chunk::ERROR, failed, 0, b"\0\0\0\x05\0\x02no"));
    let result = Err(Failure { errno: Errno::Io, message: "no".into() });
    assert_eq!(client.got, [Got::Event(ClientEvent::Done { cookie: failed, result })]);
}

#[test]
fn extended_replies_that_lie_end_the_connection() {
    let block = |count, extents: &[(u64, u64)]| status(7, count, extents);
    let at = |offset: u64, rest: &[u8]| [&offset.to_be_bytes()[..], rest].concat();
    let mut giant = wide(1, chunk::OFFSET_DATA, 0, 4096, &[]);
    giant[24..32].copy_from_slice(&(1u64 << 32).to_be_bytes());
    let mut beyond = wide(1, chunk::OFFSET_DATA, 0, 4096, &[]);
    beyond[24..32].copy_from_slice(&(8 + 8193u64).to_be_bytes());
    beyond.extend(4096u64.to_be_bytes());
    let read = Request::new(Command::Read, 4096, 8192);
    let ask = Request::new(Command::BlockStatus, 4096, 8192);
    let one = Request { req_one: true, ..ask };
    // The cookie of the only request is patched in.
    let cases: Vec<(Request, Vec<u8>)> = vec![
        (read, wide(1, chunk::NONE, 0, 4097, &[])),
        (read, wide(1, chunk::OFFSET_HOLE, 0, 0, &at(4096, &8192u32.to_be_bytes()))),
        (read, wide(1, chunk::ERROR, 0, 8192, b"\0\0\0\x05\0\x02no")),
        (read, giant),
        (read, beyond),
        (read, wide(1, chunk::OFFSET_HOLE, 0, 4096, &at(4096, &8193u32.to_be_bytes()))),
        (read, wide(1, chunk::OFFSET_HOLE, 0, 4096, &at(0, &512u32.to_be_bytes()))),
        (read, wide(1, chunk::OFFSET_HOLE, 0, 4096, &at(4096, &4096u32.to_be_bytes()))),
        (read, wide(1, chunk::BLOCK_STATUS_EXT, 0, 4096, &block(1, &[(8192, 0)]))),
        (ask, wide(1, chunk::BLOCK_STATUS, 0, 4096, &[0, 0, 0, 7, 0, 0, 32, 0, 0, 0, 0, 0])),
        (ask, wide(1, chunk::BLOCK_STATUS_EXT, 0, 4096, &block(0, &[]))),
        (ask, wide(1, chunk::BLOCK_STATUS_EXT, 0, 4096, &block(1, &[(8192, 0)])[..23])),
        (ask, wide(1, chunk::BLOCK_STATUS_EXT, 0, 4096, &block(2, &[(8192, 0)]))),
        (ask, wide(1, chunk::BLOCK_STATUS_EXT, 0, 4096, &block(1, &[(0, 0)]))),
        (ask, wide(1, chunk::BLOCK_STATUS_EXT, 0, 4096, &block(2, &[(8193, 0), (1, 0)]))),
        (ask, wide(1, chunk::BLOCK_STATUS_EXT, 0, 4096, &block(2, &[(u64::MAX, 0), (u64::MAX, 0)]))),
        (ask, wide(1, chunk::BLOCK_STATUS_EXT, 0, 4096, &status(8, 1, &[(8192, 0)]))),
        (one, wide(1, chunk::BLOCK_STATUS_EXT, 0, 4096, &block(2, &[(4096, 0), (4096, 3)]))),
        (one, wide(1, chunk::BLOCK_STATUS_EXT, 0, 4096, &block(1, &[(8193, 0)]))),
        (ask, wide(1, chunk::NONE, 0, 4096, &[])),
        (ask, [wide(0, chunk::BLOCK_STATUS_EXT, 0, 4096, &block(1, &[(512, 0)]))].concat().repeat(2)),
    ];
    for (at, (request, mut bytes)) in cases.into_iter().enumerate() {
        let mut client = client();
        let cookie = client.submit(&request);
        let chunk = bytes.len() / if request == ask && bytes.len() == 112 { 2 } else { 1 };
        for header in bytes.chunks_mut(chunk) {
            header[8..16].copy_from_slice(&cookie.to_be_bytes());
        }
        client.feed(&bytes);
        assert!(client.fatal.is_some(), "case {at}: {:?}", client.got);
    }
    for foreign in [
        [&MAGIC_SIMPLE_REPLY.to_be_bytes()[..], &[0; 12]].concat(),
        [&MAGIC_CHUNK.to_be_bytes()[..], &[0; 16]].concat(),
    ] {
        let mut client = client();
        client.submit(&read);
        client.feed(&foreign);
        assert!(matches!(client.fatal, Some(ClientFatal::ReplyMagic { .. })));
    }
    let mut client = client();
    client.feed(&wide(1, chunk::NONE, 12345, 0, &[]));
    assert_eq!(client.fatal, Some(ClientFatal::UnknownCookie { cookie: 12345 }));
}
