//! Malformed input from servers: greetings, option replies, replies and chunks that lie.

use super::*;
use crate::nbd::wire::info;

const SIZE_SMALL: u64 = 1 << 20;

/// Without extended headers: `extended` has what is different about them.
fn options() -> ClientOptions {
    ClientOptions { extended: false, ..ClientOptions::for_export("vol").expect("a sound name") }
}

const GREETING: &[u8] = b"NBDMAGICIHAVEOPT\0\x03";

fn option_reply(option: u32, kind: u32, data: &[u8]) -> Vec<u8> {
    let mut bytes = Vec::new();
    wire::encode_option_reply(option, kind, &[data], &mut bytes);
    bytes
}

fn export_info(size: u64, flags: u16) -> Vec<u8> {
    [&info::EXPORT.to_be_bytes()[..], &size.to_be_bytes(), &flags.to_be_bytes()].concat()
}

fn block_size(min: u32, preferred: u32, max: u32) -> Vec<u8> {
    let kind = info::BLOCK_SIZE.to_be_bytes();
    [&kind[..], &min.to_be_bytes(), &preferred.to_be_bytes(), &max.to_be_bytes()].concat()
}

/// The replies of a server that grants everything, up to GO's.
fn granted() -> Vec<u8> {
    let context = [&7u32.to_be_bytes()[..], b"base:allocation"].concat();
    [
        GREETING.to_vec(),
        option_reply(option::STRUCTURED_REPLY, reply::ACK, &[]),
        option_reply(option::SET_META_CONTEXT, reply::META_CONTEXT, &context),
        option_reply(option::SET_META_CONTEXT, reply::ACK, &[]),
    ]
    .concat()
}

/// A client that is ready, with or without structured replies; nothing left to send.
fn ready(structured: bool) -> Client {
    let mut client = Client::new(options());
    if structured {
        client.feed(&granted());
    } else {
        client.feed(GREETING);
        client.feed(&option_reply(option::STRUCTURED_REPLY, reply::ERR_UNSUP, &[]));
    }
    client.feed(&option_reply(option::GO, reply::INFO, &export_info(SIZE_SMALL, 0x0ded)));
    client.feed(&option_reply(option::GO, reply::ACK, &[]));
    assert_eq!(client.got, [Got::Event(ClientEvent::Ready)], "{:?}", client.fatal);
    client.got.clear();
    client.out.clear();
    client
}

fn simple(error: u32, cookie: u64) -> Vec<u8> {
    let mut bytes = MAGIC_SIMPLE_REPLY.to_be_bytes().to_vec();
    bytes.extend_from_slice(&error.to_be_bytes());
    bytes.extend_from_slice(&cookie.to_be_bytes());
    bytes
}

fn chunk_of(flags: u16, kind: u16, cookie: u64, payload: &[u8]) -> Vec<u8> {
    let mut bytes = Vec::new();
    let length = u32::try_from(payload.len()).expect("small");
    wire::ChunkHeader { flags, kind, cookie, offset: 0, length }.encode(Headers::Structured, &mut bytes);
    bytes.extend_from_slice(payload);
    bytes
}

fn data(offset: u64, length: usize) -> Vec<u8> {
    [&offset.to_be_bytes()[..], &vec![0xab; length]].concat()
}

fn hole(offset: u64, length: u32) -> Vec<u8> {
    [&offset.to_be_bytes()[..], &length.to_be_bytes()].concat()
}

fn error(number: u32, message_length: u16, rest: &[u8]) -> Vec<u8> {
    [&number.to_be_bytes()[..], &message_length.to_be_bytes(), rest].concat()
}

fn status(id: u32, extents: &[(u32, u32)]) -> Vec<u8> {
    let mut bytes = id.to_be_bytes().to_vec();
    for (length, flags) in extents {
        bytes.extend_from_slice(&length.to_be_bytes());
        bytes.extend_from_slice(&flags.to_be_bytes());
    }
    bytes
}

fn done(cookie: u64, result: Result<(), Failure>) -> Got {
    Got::Event(ClientEvent::Done { cookie, result })
}

#[test]
fn greetings_that_are_not_fixed_newstyle_are_told_apart() {
    for (greeting, want) in [
        (&b"SSH-2.0-OpenSSH_9"[..], ClientFatal::NotNbd { found: 0x5353_482d_322e_302d }),
        (b"NBDMAGICgarbage!", ClientFatal::NotNbd { found: 0x6761_7262_6167_6521 }),
        (b"NBDMAGIC\0\0\x42\x02\x81\x86\x12\x53", ClientFatal::Outdated),
        (b"NBDMAGICIHAVEOPT", ClientFatal::Outdated),
    ] {
        let mut client = Client::new(options());
        client.feed(greeting);
        client.feed(&[0; 2]);
        assert_eq!(client.fatal, Some(want));
        assert!(client.out.is_empty());
    }
}

#[test]
fn option_replies_that_lie_end_the_connection() {
    let structured = option::STRUCTURED_REPLY;
    let set = option::SET_META_CONTEXT;
    let go = option::GO;
    let good = export_info(SIZE_SMALL, 1);
    let context = [&7u32.to_be_bytes()[..], b"base:allocation"].concat();
    let accepted = option_reply(structured, reply::ACK, &[]);
    let in_go = |kind, data: &[u8]| [granted(), option_reply(go, kind, data)].concat();
    let in_set = |data: &[u8]| {
        [GREETING.to_vec(), accepted.clone(), option_reply(set, reply::META_CONTEXT, data)].concat()
    };
    let flood = [in_go(reply::INFO, &good), option_reply(go, reply::INFO, &good).repeat(100)].concat();
    let cases: Vec<Vec<u8>> = vec![
        [GREETING, &[0; 20]].concat(),
        [GREETING, &option_reply(go, reply::ACK, &[])].concat(),
        [GREETING, &option_reply(structured, reply::ACK, b"x")].concat(),
        [GREETING, &option_reply(structured, reply::INFO, &good)].concat(),
        [GREETING, &option_reply(structured, reply::ERR_UNSUP, &[b'x'; 20000])].concat(),
        [GREETING, &option_reply(structured, reply::ERR_TLS_REQD, b"")].concat(),
        [GREETING, &option_reply(structured, reply::ERR_SHUTDOWN, b"")].concat(),
        in_set(b""),
        in_set(b"\0\0\0"),
        in_set(b"\0\0\0\x01base:other"),
        [in_set(&context), option_reply(set, reply::META_CONTEXT, &context)].concat(),
        in_go(reply::ACK, b""),
        in_go(reply::SERVER, b""),
        in_go(77, b""),
        in_go(reply::INFO, b""),
        in_go(reply::INFO, b"\0"),
        in_go(reply::INFO, &good[..11]),
        in_go(reply::INFO, &[&good[..], b"x"].concat()),
        in_go(reply::INFO, &export_info(SIZE_SMALL, 0)),
        in_go(reply::INFO, &export_info(1 << 63, 1)),
        in_go(reply::INFO, &block_size(512, 4096, 65536)[..13]),
        in_go(reply::INFO, &block_size(0, 4096, 65536)),
        in_go(reply::INFO, &block_size(513, 4096, 65536)),
        in_go(reply::INFO, &block_size(1 << 17, 1 << 17, 1 << 20)),
        in_go(reply::INFO, &block_size(4096, 512, 65536)),
        in_go(reply::INFO, &block_size(512, 5000, 65536)),
        in_go(reply::INFO, &block_size(512, 512, 0)),
        in_go(reply::INFO, &block_size(512, 512, 513)),
        in_go(reply::INFO, b"\0\x01\xff\xff"),
        in_go(reply::ERR_UNKNOWN, b"no"),
        in_go(reply::ERR_POLICY, b""),
        [in_go(reply::INFO, &good), option_reply(go, reply::ERR_UNSUP, b"")].concat(),
        flood,
    ];
    for case in cases {
        let mut client = Client::new(options());
        client.feed(&case);
        assert!(client.fatal.is_some(), "{:?}", String::from_utf8_lossy(&case));
        assert_eq!(client.got, []);
        client.fatal = None;
        let sent = client.out.len();
        client.feed(&granted());
        assert_eq!((client.got.len(), client.out.len()), (0, sent), "dead is dead");
    }
}

#[test]
fn a_refusal_carries_its_reason_and_a_clean_message_and_aborts() {
    let mut client = Client::new(options());
    client.feed(&granted());
    client.out.clear();
    client.feed(&option_reply(option::GO, reply::ERR_UNKNOWN, b"no\x1b[31m such\nexport\xff"));
    let message = "no [31m such export\u{fffd}".to_owned();
    let want = ClientFatal::Refused { export: "vol".into(), reason: Refusal::UnknownExport, message };
    assert_eq!(client.fatal, Some(want));
    assert_eq!(client.out, opt(option::ABORT, &[]));
}

#[test]
fn a_server_without_go_is_asked_by_export_name() {
    for padded in [true, false] {
        let mut client = Client::new(options());
        client.feed(if padded { b"NBDMAGICIHAVEOPT\0\x01" } else { GREETING });
        client.feed(&option_reply(option::STRUCTURED_REPLY, reply::ERR_UNSUP, b""));
        client.out.clear();
        client.feed(&option_reply(option::GO, reply::ERR_UNSUP, b""));
        assert_eq!(client.out, opt(option::EXPORT_NAME, b"vol"));
        client.feed(&SIZE_SMALL.to_be_bytes());
        client.feed(&0x0005u16.to_be_bytes());
        if padded {
            assert_eq!(client.got, []);
            client.feed(&[0; 124]);
        }
        assert_eq!(client.got, [Got::Event(ClientEvent::Ready)]);
        let export = client.connection.export().expect("ready");
        assert!(export.flush && !export.fua && !export.structured && export.base_allocation.is_none());
        assert_eq!((export.size, export.block_min, export.block_max), (SIZE_SMALL, 512, BLOCK_BYTES_MAX));
    }
}

#[test]
fn replies_that_lie_end_the_connection() {
    let read = Request::new(Command::Read, 4096, 8192);
    let df = Request { df: true, ..read };
    let write = Request::new(Command::Write, 0, 512);
    let ask = Request::new(Command::BlockStatus, 4096, 8192);
    let ask_one = Request { req_one: true, ..ask };
    let (none, content, gap, extents) =
        (chunk::NONE, chunk::OFFSET_DATA, chunk::OFFSET_HOLE, chunk::BLOCK_STATUS);
    let (failed, failed_at) = (chunk::ERROR, chunk::ERROR_OFFSET);
    let at = |offset: u64| offset.to_be_bytes();
    type Lie = Box<dyn Fn(u64) -> Vec<u8>>;
    let one = |flags: u16, kind: u16, payload: Vec<u8>| -> Lie {
        Box::new(move |cookie| chunk_of(flags, kind, cookie, &payload))
    };
    let two = |first: (u16, Vec<u8>), second: (u16, Vec<u8>)| -> Lie {
        Box::new(move |cookie| {
            [chunk_of(0, first.0, cookie, &first.1), chunk_of(1, second.0, cookie, &second.1)].concat()
        })
    };
    let cases: Vec<(Request, Lie)> = vec![
        (read, Box::new(|_| vec![0; 4])),
        (read, Box::new(|cookie| simple(0, cookie))),
        (read, Box::new(|cookie| simple(5, cookie))),
        (ask, Box::new(|cookie| simple(0, cookie))),
        (write, Box::new(|cookie| simple(0, cookie ^ 1))),
        (write, Box::new(|cookie| simple(0, cookie ^ 1 << 40))),
        (write, Box::new(|cookie| [simple(0, cookie), simple(0, cookie)].concat())),
        (read, Box::new(|cookie| chunk_of(1, 0, cookie.wrapping_add(1 << 32), &[]))),
        (read, one(1, none, vec![])),
        (read, one(0, none, vec![])),
        (read, one(1, none, vec![0])),
        (read, one(1, 3, vec![0; 12])),
        (read, one(1, 0x7fff, vec![])),
        (read, one(1, content, at(4096).to_vec())),
        (read, one(1, content, vec![0; 3])),
        (read, one(1, content, data(4096, 8191))),
        (read, one(1, content, data(4096, 8193))),
        (read, one(1, content, data(4095, 8192))),
        (read, one(1, content, data(4097, 8192))),
        (read, one(1, content, data(0, 512))),
        (read, one(1, content, data(u64::MAX, 512))),
        (read, one(1, content, data(1 << 40, 512))),
        (read, one(1, gap, hole(4096, 4096))),
        (read, one(1, gap, hole(4096, 0))),
        (read, one(1, gap, hole(4096, u32::MAX))),
        (read, one(1, gap, hole(u64::MAX - 1, 512))),
        (read, one(1, gap, [&hole(4096, 8192)[..], b"x"].concat())),
        (read, one(1, gap, vec![0; 11])),
        (read, two((content, data(4096, 8192)), (content, data(4096, 8192)))),
        (read, two((content, data(4096, 4096)), (content, data(8191, 4097)))),
        (read, two((gap, hole(8192, 4096)), (content, data(4096, 4097)))),
        (read, two((gap, hole(4096, 512)), (none, vec![]))),
        (df, two((content, data(4096, 4096)), (content, data(8192, 4096)))),
        (df, two((content, data(4096, 4096)), (gap, hole(8192, 4096)))),
        (write, one(1, content, data(0, 512))),
        (write, one(1, gap, hole(0, 512))),
        (write, one(1, extents, status(7, &[(512, 0)]))),
        (read, one(1, extents, status(7, &[(8192, 0)]))),
        (read, one(1, failed, vec![])),
        (read, one(1, failed, vec![0; 5])),
        (read, one(1, failed, error(0, 0, &[]))),
        (read, one(1, failed, error(5, 1, &[]))),
        (read, one(1, failed, error(5, u16::MAX, b"short"))),
        (read, one(1, failed, error(5, 0, &[0; 9000]))),
        (read, one(1, failed_at, error(5, 0, &[]))),
        (read, one(1, failed_at, error(5, 0, &at(4096)[..7]))),
        (read, one(1, failed_at, error(5, 1, &at(4096)))),
        (read, one(1, failed_at, error(5, 0, &at(4095)))),
        (read, one(1, failed_at, error(5, 0, &at(4096 + 8192)))),
        (read, one(1, failed_at, error(5, 0, &at(u64::MAX)))),
        (ask, one(1, none, vec![])),
        (ask, one(1, extents, vec![])),
        (ask, one(1, extents, status(7, &[]))),
        (ask, one(1, extents, status(7, &[(8192, 0)])[..11].to_vec())),
        (ask, one(1, extents, [status(7, &[(8192, 0)]), vec![0]].concat())),
        (ask, one(1, extents, status(8, &[(8192, 0)]))),
        (ask, one(1, extents, status(7, &[(0, 0)]))),
        (ask, one(1, extents, status(7, &[(4096, 0), (0, 0)]))),
        (ask, one(1, extents, status(7, &[(8192, 0), (512, 0)]))),
        (ask, one(1, extents, status(7, &[(8193, 0), (512, 0)]))),
        (ask, one(1, extents, status(7, &[(u32::MAX, 0), (u32::MAX, 0)]))),
        (ask_one, one(1, extents, status(7, &[(4096, 0), (4096, 3)]))),
        (ask_one, one(1, extents, status(7, &[(8193, 0)]))),
        (ask, two((extents, status(7, &[(4096, 0)])), (extents, status(7, &[(4096, 0)])))),
        (ask, one(1, content, data(4096, 8192))),
    ];
    assert!(cases.len() >= 60);
    for (index, (request, lie)) in cases.iter().enumerate() {
        let mut client = ready(true);
        let cookie = client.submit(request);
        client.feed(&lie(cookie));
        assert!(client.fatal.is_some(), "lie {index} about {request:?} was believed: {:?}", client.got);
        assert_eq!(client.connection.submit(request, &mut Vec::new()), Err(SubmitError::NotReady));
    }
}

#[test]
fn content_that_overlaps_is_found_out_at_once() {
    for (first, second) in [
        ((4096, 8192), (4096, 8192)),
        ((4096, 4096), (8191, 512)),
        ((8192, 4096), (4096, 4097)),
        ((6144, 512), (4096, 8192)),
        ((4096, 8192), (6144, 512)),
    ] {
        let mut client = ready(true);
        let cookie = client.submit(&Request::new(Command::Read, 4096, 8192));
        client.feed(&chunk_of(0, chunk::OFFSET_HOLE, cookie, &hole(first.0, first.1)));
        assert_eq!(client.fatal, None);
        client.feed(&chunk_of(0, chunk::OFFSET_HOLE, cookie, &hole(second.0, second.1)));
        let (offset, length) = (second.0, u64::from(second.1));
        assert_eq!(client.fatal, Some(ClientFatal::ContentRange { cookie, offset, length }));
    }
}

#[test]
fn a_slot_remembers_nothing_of_its_last_request() {
    let mut client = ready(true);
    for _ in 0..3 {
        let read = client.submit(&Request { df: true, ..Request::new(Command::Read, 0, 512) });
        client.feed(&chunk_of(1, chunk::OFFSET_DATA, read, &data(0, 512)));
        assert_eq!(client.got.pop(), Some(done(read, Ok(()))));
        let ask = client.submit(&Request::new(Command::BlockStatus, 0, 512));
        client.feed(&chunk_of(1, chunk::BLOCK_STATUS, ask, &status(7, &[(512, 0)])));
        assert_eq!(client.got.pop(), Some(done(ask, Ok(()))));
        assert_eq!((ask & 0xffff_ffff, client.connection.in_flight()), (0, 0));
    }
}

#[test]
fn chunks_without_structured_replies_end_the_connection() {
    let mut client = ready(false);
    let cookie = client.submit(&Request::new(Command::Read, 0, 512));
    client.feed(&chunk_of(1, chunk::OFFSET_DATA, cookie, &data(0, 512)));
    assert_eq!(client.fatal, Some(ClientFatal::ReplyMagic { found: MAGIC_CHUNK }));
}

#[test]
fn chunks_may_come_in_any_order_between_other_replies() {
    let mut client = ready(true);
    let read = client.submit(&Request::new(Command::Read, 4096, 8192));
    let write = client.submit(&Request::new(Command::Write, 0, 512));
    client.feed(&chunk_of(0, chunk::OFFSET_HOLE, read, &hole(8192, 1024)));
    client.feed(&simple(0, write));
    client.feed(&chunk_of(0, chunk::OFFSET_DATA, read, &data(4096, 512)));
    client.feed(&chunk_of(0, chunk::OFFSET_DATA, read, &data(9216, 3072)));
    client.feed(&chunk_of(0, chunk::OFFSET_DATA, read, &data(4608, 3584)));
    client.feed(&chunk_of(1, chunk::NONE, read, &[]));
    let bytes = |offset, length| Got::Data { cookie: read, offset, bytes: vec![0xab; length] };
    assert_eq!(
        client.got,
        [
            Got::Event(ClientEvent::Hole { cookie: read, offset: 8192, length: 1024 }),
            done(write, Ok(())),
            bytes(4096, 512),
            bytes(9216, 3072),
            bytes(4608, 3584),
            done(read, Ok(())),
        ]
    );
    assert_eq!(client.connection.in_flight(), 0);
}

#[test]
fn a_read_in_too_many_pieces_ends_the_connection() {
    let mut client = ready(true);
    let read = client.submit(&Request::new(Command::Read, 0, 65536));
    for offset in (0..65536).step_by(2) {
        client.feed(&chunk_of(0, chunk::OFFSET_HOLE, read, &hole(offset, 1)));
    }
    assert!(matches!(client.fatal, Some(ClientFatal::ContentRange { .. })), "{:?}", client.fatal);
}

#[test]
fn errors_come_with_the_first_number_and_a_clean_message_at_the_end_of_the_reply() {
    let mut client = ready(true);
    let read = client.submit(&Request::new(Command::Read, 4096, 8192));
    let at = error(5, 3, &[&b"a\nb"[..], &5000u64.to_be_bytes()].concat());
    client.feed(&chunk_of(0, chunk::ERROR_OFFSET, read, &at));
    client.feed(&chunk_of(0, chunk::ERROR_BIT | 77, read, &error(28, 0, b"of a later protocol")));
    assert_eq!(client.got, []);
    client.feed(&chunk_of(1, chunk::NONE, read, &[]));
    let failure = Failure { errno: Errno::Io, message: "a b".into() };
    assert_eq!(failure.to_string(), "input/output error: a b");
    assert_eq!(client.got, [done(read, Err(failure))]);

    let ask = client.submit(&Request::new(Command::BlockStatus, 0, 512));
    client.feed(&simple(22, ask));
    assert_eq!(
        client.got.pop(),
        Some(done(ask, Err(Failure { errno: Errno::Inval, message: String::new() })))
    );
    assert_eq!(client.fatal, None);
}

#[test]
fn the_last_extent_is_cut_to_the_request_and_excess_extents_are_dropped() {
    let mut client = ready(true);
    let ask = client.submit(&Request::new(Command::BlockStatus, 0, 8192));
    client.feed(&chunk_of(1, chunk::BLOCK_STATUS, ask, &status(7, &[(4096, 3), (65536, 0)])));
    let extents = vec![(4096, 3), (4096, 0)];
    assert_eq!(client.got[0], Got::Event(ClientEvent::Extents { cookie: ask, extents }));

    let ask = client.submit(&Request::new(Command::BlockStatus, 0, SIZE_SMALL));
    client.feed(&chunk_of(1, chunk::BLOCK_STATUS, ask, &status(7, &vec![(16, 0); 65536])));
    let Some(Got::Event(ClientEvent::Extents { extents, .. })) = client.got.get(2) else {
        panic!("{:?}", client.fatal)
    };
    assert_eq!(extents.len(), 32 << 10);
}

#[test]
fn requests_against_the_offer_are_not_sent() {
    let mut client = ready(true);
    let new = Request::new;
    for (request, want) in [
        (new(Command::Read, 0, 0), "range"),
        (new(Command::Read, SIZE_SMALL, 512), "range"),
        (new(Command::Read, u64::MAX - 511, 512), "range"),
        (new(Command::Flush, 512, 0), "range"),
        (new(Command::Read, 1, 512), "alignment"),
        (new(Command::Write, 0, 100), "alignment"),
        (Request { df: true, ..new(Command::Write, 0, 512) }, "offer"),
        (Request { req_one: true, ..new(Command::Read, 0, 512) }, "offer"),
    ] {
        let got = match client.connection.submit(&request, &mut client.out) {
            Err(SubmitError::Range { .. }) => "range",
            Err(SubmitError::Alignment { .. }) => "alignment",
            Err(SubmitError::NotOffered { .. }) => "offer",
            other => panic!("{request:?}: {other:?}"),
        };
        assert_eq!(got, want, "{request:?}");
    }
    assert!(client.out.is_empty());

    let mut poor = Client::new(options());
    poor.feed(&granted());
    poor.feed(&option_reply(option::GO, reply::INFO, &export_info(1 << 40, 0b11)));
    poor.feed(&option_reply(option::GO, reply::INFO, &block_size(1, 512, u32::MAX)));
    poor.feed(&option_reply(option::GO, reply::ACK, &[]));
    let mut submit = |request: Request| poor.connection.submit(&request, &mut poor.out).expect_err("refused");
    assert_eq!(submit(new(Command::Write, 0, 512)), SubmitError::ReadOnly);
    assert_eq!(submit(new(Command::Trim, 0, 512)), SubmitError::ReadOnly);
    for command in [Command::Flush, Command::Cache] {
        assert_eq!(submit(new(command, 0, 0)), SubmitError::NotOffered { command });
    }
    let fua = new(Command::Read, 0, 512).with_fua();
    assert_eq!(submit(fua), SubmitError::NotOffered { command: Command::Read });
    let df = Request { df: true, ..new(Command::Read, 0, 512) };
    assert_eq!(submit(df), SubmitError::NotOffered { command: Command::Read });
    let long = new(Command::Read, 0, 33 << 20);
    assert!(matches!(submit(long), SubmitError::TooLong { .. }));
    assert!(matches!(submit(new(Command::BlockStatus, 0, 1 << 32)), SubmitError::TooLong { .. }));
}

#[test]
fn requests_in_flight_are_bounded_and_cookies_are_dense_and_never_stale() {
    let mut client = ready(true);
    let read = Request::new(Command::Read, 0, 512);
    let cookies: Vec<u64> = (0..IN_FLIGHT_MAX).map(|_| client.submit(&read)).collect();
    assert!(cookies.iter().enumerate().all(|(index, cookie)| (cookie & 0xffff_ffff) as usize == index));
    let refused = client.connection.submit(&read, &mut client.out);
    assert_eq!(refused, Err(SubmitError::TooManyInFlight { limit: IN_FLIGHT_MAX }));
    client.feed(&chunk_of(1, chunk::ERROR, cookies[9], &error(5, 0, &[])));
    let next = client.submit(&read);
    assert_eq!(next & 0xffff_ffff, 9);
    assert_ne!(next, cookies[9]);
    client.feed(&chunk_of(1, chunk::ERROR, cookies[9], &error(5, 0, &[])));
    assert_eq!(client.fatal, Some(ClientFatal::UnknownCookie { cookie: cookies[9] }));
}

#[test]
fn a_client_gives_up_on_a_handshake_after_ten_seconds_and_says_goodbye_once() {
    let mut client = Client::new(options());
    assert!(!client.connection.handshake_overdue(Timestamp(HANDSHAKE_NANOS_MAX - 1)));
    assert!(client.connection.handshake_overdue(Timestamp(HANDSHAKE_NANOS_MAX)));
    client.connection.disconnect(&mut client.out);
    client.connection.disconnect(&mut client.out);
    assert_eq!(client.out, opt(option::ABORT, &[]));

    let mut client = ready(true);
    assert!(!client.connection.handshake_overdue(Timestamp(u64::MAX)));
    let read = Request::new(Command::Read, 0, 512);
    let cookie = client.submit(&read);
    client.out.clear();
    client.connection.disconnect(&mut client.out);
    assert_eq!(client.out, raw(0, 2, 0, 0, 0));
    assert_eq!(client.connection.submit(&read, &mut client.out), Err(SubmitError::NotReady));
    client.feed(&chunk_of(1, chunk::OFFSET_DATA, cookie, &data(0, 512)));
    assert_eq!(client.got.last(), Some(&done(cookie, Ok(()))), "what is in flight still ends");
}
