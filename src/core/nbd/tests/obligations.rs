//! One test for each obligation of an NBD server that others are known to have broken.

use super::*;

const STARTTLS: u32 = 5;
const EINVAL: u32 = 22;

/// Kinds of the replies, in order.
fn kinds(replies: &[(u32, u32, Vec<u8>)]) -> Vec<u32> {
    replies.iter().map(|(_, kind, _)| *kind).collect()
}

#[test]
fn the_greeting_offers_fixed_newstyle_without_zeroes_and_nothing_else() {
    assert_eq!(Server::greeted().out, b"NBDMAGICIHAVEOPT\0\x03");
}

#[test]
fn unknown_client_flags_close() {
    for bit in 2..32 {
        let mut server = Server::greeted();
        server.feed(&(1u32 << bit | 1).to_be_bytes());
        assert_eq!(server.fatal, Some(Fatal::ClientFlags { flags: 1 << bit | 1 }));
    }
}

#[test]
fn unknown_options_are_drained_and_answered_with_err_unsup() {
    let mut server = Server::haggling();
    for option in [0, 4, STARTTLS, 12, u32::MAX] {
        for length in [0, 1, 4096, OPTION_BYTES_MAX as usize] {
            let mut bytes = opt(option, &vec![0xee; length]);
            bytes.extend(opt(option::STRUCTURED_REPLY, &[]));
            let replies = server.options(&bytes);
            assert_eq!(kinds(&replies), [reply::ERR_UNSUP, reply::ACK], "option {option}");
            assert_eq!(replies[0].0, option);
        }
    }
}

#[test]
fn starttls_changes_nothing_while_tls_is_not_served() {
    let mut server = Server::haggling();
    server.feed(&opt(option::STRUCTURED_REPLY, &[]));
    server.out.clear();
    assert_eq!(kinds(&server.options(&opt(STARTTLS, &[]))), [reply::ERR_UNSUP]);
    let replies = server.options(&opt(option::SET_META_CONTEXT, &meta("vol", &["base:allocation"])));
    assert_eq!(kinds(&replies), [reply::META_CONTEXT, reply::ACK], "structured replies are still agreed");
}

#[test]
fn options_with_more_data_than_is_drained_close() {
    let mut server = Server::haggling();
    let mut header = opt(99, &[]);
    header[12..].copy_from_slice(&(OPTION_BYTES_MAX + 1).to_be_bytes());
    server.feed(&header);
    assert!(matches!(server.fatal, Some(Fatal::OptionLength { option: 99, .. })), "{:?}", server.fatal);
}

#[test]
fn known_options_with_too_much_data_are_drained_and_answered() {
    for option in
        [option::GO, option::INFO, option::ABORT, option::SET_META_CONTEXT, option::LIST_META_CONTEXT]
    {
        let mut server = Server::haggling();
        assert_eq!(kinds(&server.options(&opt(option, &[0; 17000]))), [reply::ERR_TOO_BIG]);
    }
}

#[test]
fn the_number_of_options_is_bounded() {
    let mut server = Server::haggling();
    for _ in 0..OPTIONS_MAX {
        server.feed(&opt(99, &[]));
        assert_eq!(server.fatal, None);
    }
    server.feed(&opt(99, &[]));
    assert_eq!(server.fatal, Some(Fatal::TooManyOptions { limit: OPTIONS_MAX }));
}

#[test]
fn names_of_4096_bytes_are_looked_up_and_longer_or_unsound_ones_refused() {
    let cases: [(Vec<u8>, u32); 5] = [
        (vec![b'x'; 4096], reply::ERR_UNKNOWN),
        (vec![b'x'; 4097], reply::ERR_TOO_BIG),
        (b"a\0b".to_vec(), reply::ERR_INVALID),
        (b"\xff".to_vec(), reply::ERR_INVALID),
        (b"broken".to_vec(), reply::ERR_UNKNOWN),
    ];
    for (name, want) in cases {
        let mut server = Server::haggling();
        server.feed(&opt(option::STRUCTURED_REPLY, &[]));
        server.out.clear();
        let mut data = counted(&name);
        data.extend_from_slice(&[0, 0]);
        assert_eq!(kinds(&server.options(&opt(option::GO, &data))), [want]);
        assert_eq!(kinds(&server.options(&opt(option::INFO, &data))), [want]);
        data.extend_from_slice(&[0, 0]);
        assert_eq!(kinds(&server.options(&opt(option::LIST_META_CONTEXT, &data))), [want]);
        assert_eq!(kinds(&server.options(&opt(option::SET_META_CONTEXT, &data))), [want]);
        server.feed(&opt(option::EXPORT_NAME, &name));
        assert!(
            matches!(server.fatal, Some(Fatal::ExportName { .. } | Fatal::UnknownExport { .. })),
            "{:?}",
            server.fatal
        );
    }
}

#[test]
fn abort_is_acknowledged_and_disconnects() {
    let mut server = Server::haggling();
    let replies = server.options(&opt(option::ABORT, b"ignored"));
    assert_eq!(kinds(&replies), [reply::ACK]);
    assert_eq!(server.seen, [Seen::Disconnect]);
    assert_eq!(server.options(&opt(option::LIST, &[])), [], "nothing is answered after a goodbye");
}

#[test]
fn list_names_every_sound_export_and_takes_no_data() {
    let mut server = Server::haggling();
    let replies = server.options(&opt(option::LIST, &[]));
    assert_eq!(kinds(&replies), [[reply::SERVER; 5].as_slice(), &[reply::ACK]].concat());
    assert_eq!(replies[0].2, b"\0\0\0\x03volabout vol");
    assert_eq!(replies[2].2, b"\0\0\0\x04bare");
    assert_eq!(kinds(&server.options(&opt(option::LIST, b"x"))), [reply::ERR_INVALID]);
    assert_eq!(kinds(&server.options(&opt(option::STRUCTURED_REPLY, b"x"))), [reply::ERR_INVALID]);
}

#[test]
fn clients_without_fixed_newstyle_get_export_name_only() {
    let mut server = Server::greeted();
    server.feed(&0u32.to_be_bytes());
    server.out.clear();
    server.feed(&opt(option::EXPORT_NAME, b"vol"));
    assert_eq!(server.seen, [Seen::Selected("vol".into())]);
    assert_eq!(server.out.len(), 8 + 2 + 124);
    assert_eq!(server.out[..8], SIZE.to_be_bytes());
    assert!(server.out[10..].iter().all(|&byte| byte == 0));

    let mut server = Server::greeted();
    server.feed(&0u32.to_be_bytes());
    server.feed(&opt(option::LIST, &[]));
    assert_eq!(server.fatal, Some(Fatal::NotFixedNewstyle { option: option::LIST }));
}

#[test]
fn export_name_omits_the_padding_when_waived_and_serves_the_default_export() {
    let mut server = Server::haggling();
    server.feed(&opt(option::EXPORT_NAME, b""));
    assert_eq!(server.out.len(), 10);
    assert_eq!(server.seen, [Seen::Selected("vol".into())]);
}

#[test]
fn export_name_for_an_unknown_export_closes_without_a_byte() {
    let mut server = Server::haggling();
    server.feed(&opt(option::EXPORT_NAME, b"nope"));
    assert_eq!(server.fatal, Some(Fatal::UnknownExport { name: "nope".into() }));
    assert!(server.out.is_empty());
}

#[test]
fn go_always_tells_size_and_flags_and_the_rest_when_asked() {
    let mut server = Server::haggling();
    let replies = server.options(&opt(option::INFO, &go("vol", &[])));
    assert_eq!(kinds(&replies), [reply::INFO, reply::ACK]);
    assert_eq!(replies[0].2[..10], [&[0, 0][..], &SIZE.to_be_bytes()].concat());

    let replies = server.options(&opt(option::GO, &go("", &[1, 2, 3, 0, 77, 3])));
    assert_eq!(kinds(&replies), [reply::INFO, reply::INFO, reply::INFO, reply::INFO, reply::ACK]);
    assert_eq!(replies[1].2, b"\0\x01vol");
    assert_eq!(replies[2].2, b"\0\x02about vol");
    assert_eq!(replies[3].2, b"\0\x03\0\0\x02\0\0\x01\0\0\x02\0\0\0");
    assert_eq!(server.seen, [Seen::Selected("vol".into())]);
}

#[test]
fn an_empty_description_is_not_sent() {
    let mut server = Server::haggling();
    let replies = server.options(&opt(option::INFO, &go("bare", &[2])));
    assert_eq!(kinds(&replies), [reply::INFO, reply::ACK]);
}

#[test]
fn block_sizes_bind_a_client_that_asked_for_them_and_no_other() {
    // Clients that asked, about the same export, perhaps earlier.
    let info = |name: &str| opt(option::INFO, &go(name, &[3]));
    let told = [
        opt(option::GO, &go("4k", &[3])),
        [info("4k"), opt(option::GO, &go("4k", &[]))].concat(),
        [info("4k"), opt(option::EXPORT_NAME, b"4k")].concat(),
    ];
    let untold = [
        opt(option::GO, &go("4k", &[])),
        opt(option::EXPORT_NAME, b"4k"),
        [info("vol"), opt(option::EXPORT_NAME, b"4k")].concat(),
    ];
    for (options, is_told) in
        told.into_iter().map(|o| (o, true)).chain(untold.into_iter().map(|o| (o, false)))
    {
        let mut server = Server::haggling();
        server.feed(&options);
        assert_eq!(server.seen, [Seen::Selected("4k".into())]);
        for (offset, length) in [(1, 4096), (4096, 511), (7, 1)] {
            server.seen.clear();
            server.feed(&raw(0, Command::Read.code(), 7, offset, length));
            assert_eq!(server.seen.is_empty(), is_told, "{offset} {length}");
        }
    }
}

#[test]
fn metadata_contexts_need_structured_replies() {
    let mut server = Server::haggling();
    for option in [option::SET_META_CONTEXT, option::LIST_META_CONTEXT] {
        let replies = server.options(&opt(option, &meta("vol", &["base:allocation"])));
        assert_eq!(kinds(&replies), [reply::ERR_INVALID]);
    }
}

#[test]
fn contexts_are_listed_by_wildcard_and_set_by_full_name_once() {
    let (base, health) = ("base:allocation", "calpe:health");
    for negotiation in [option::STRUCTURED_REPLY, option::EXTENDED_HEADERS] {
        let mut server = Server::haggling();
        server.feed(&opt(negotiation, &[]));
        server.out.clear();
        for (queries, listed, set) in [
            (&[][..], &[base, health][..], &[][..]),
            (&["base:"], &[base], &[]),
            (&["calpe:"], &[health], &[]),
            (&["calpe:", "base:"], &[base, health], &[]),
            (&["base:allocation"], &[base], &[base]),
            (&["calpe:health"], &[health], &[health]),
            (&["calpe:health", "base:allocation"], &[base, health], &[base, health]),
            (&["calpe:", "base:allocation"], &[base, health], &[base]),
            (&["x-other:a", "base:allocation", "base:allocation"], &[base], &[base]),
            (&["base:alloc", "calpe:healthy", "calpe", "qemu:dirty-bitmap:x", "nonsense", ""], &[], &[]),
        ] {
            for (option, want) in [(option::LIST_META_CONTEXT, listed), (option::SET_META_CONTEXT, set)] {
                let mut replies = server.options(&opt(option, &meta("vol", queries)));
                assert_eq!(replies.pop().map(|reply| reply.1), Some(reply::ACK), "{queries:?}");
                let named: Vec<_> = replies.into_iter().map(|(_, kind, data)| (kind, data)).collect();
                let want: Vec<_> = want
                    .iter()
                    .map(|name| {
                        let id = u32::from(*name == health) + 1;
                        let id = if option == option::SET_META_CONTEXT { id } else { 0 };
                        (reply::META_CONTEXT, [&id.to_be_bytes()[..], name.as_bytes()].concat())
                    })
                    .collect();
                assert_eq!(named, want, "{queries:?}");
            }
        }
    }
}

#[test]
fn contexts_are_forgotten_when_replaced_refused_or_for_another_export() {
    let set = opt(option::SET_META_CONTEXT, &meta("vol", &["base:allocation"]));
    let status = raw(0, 7, 1, 0, 4096);
    let oversized = opt(option::SET_META_CONTEXT, &vec![0; 20000]);
    for (then, export, kept) in [
        (vec![], "vol", true),
        (vec![], "", true),
        (opt(option::LIST_META_CONTEXT, &meta("vol", &[])), "vol", true),
        (vec![], "ro", false),
        (opt(option::SET_META_CONTEXT, &meta("vol", &[])), "vol", false),
        (opt(option::SET_META_CONTEXT, &meta("nope", &["base:allocation"])), "vol", false),
        (opt(option::SET_META_CONTEXT, b"bad"), "vol", false),
        (oversized, "vol", false),
    ] {
        let mut server = Server::haggling();
        server.feed(&opt(option::STRUCTURED_REPLY, &[]));
        server.feed(&set);
        server.feed(&then);
        server.feed(&opt(option::GO, &go(export, &[])));
        server.out.clear();
        let replies = server.replies(&status);
        if kept {
            assert!(matches!(server.seen[1], Seen::Request(_)), "{then:?}");
        } else {
            assert_eq!(replies[0].error(), EINVAL, "{then:?}");
        }
    }
}

#[test]
fn df_is_announced_with_structured_replies_only() {
    for structured in [false, true] {
        let mut server = Server::haggling();
        if structured {
            server.options(&opt(option::STRUCTURED_REPLY, &[]));
        }
        let replies = server.options(&opt(option::INFO, &go("vol", &[])));
        let flags = u16::from_be_bytes([replies[0].2[10], replies[0].2[11]]);
        assert_eq!(flags & wire::can::DF != 0, structured);
    }
}

#[test]
fn a_handshake_is_overdue_after_ten_seconds_and_never_once_it_is_over() {
    let late = Timestamp(HANDSHAKE_NANOS_MAX);
    let server = Server::haggling();
    assert!(!server.connection.handshake_overdue(Timestamp(HANDSHAKE_NANOS_MAX - 1)));
    assert!(server.connection.handshake_overdue(late));
    assert!(!Server::serving("vol", true).connection.handshake_overdue(late));
}

#[test]
fn a_stopping_server_refuses_what_is_new_and_answers_what_is_in_flight() {
    let mut server = Server::haggling();
    server.connection.begin_shutdown();
    assert_eq!(kinds(&server.options(&opt(option::LIST, &[]))), [reply::ERR_SHUTDOWN]);
    assert_eq!(kinds(&server.options(&opt(option::GO, &go("vol", &[])))), [reply::ERR_SHUTDOWN]);
    assert_eq!(kinds(&server.options(&opt(option::ABORT, &[]))), [reply::ACK]);

    let mut server = Server::serving("vol", true);
    server.feed(&raw(0, 3, 7, 0, 0));
    server.connection.begin_shutdown();
    let write = [raw(0, 1, 8, 0, 512), vec![1; 512]].concat();
    let replies = server.replies(&[write, raw(0, 0, 9, 0, 512)].concat());
    let errors: Vec<_> = replies.iter().map(|reply| (reply.cookie(), reply.error())).collect();
    assert_eq!(errors, [(8, 108), (9, 108)]);
    let Seen::Request(flush) = server.seen[0] else { panic!("{:?}", server.seen) };
    server.connection.reply_done(&flush, &mut server.out);
    assert_eq!(replies_of(&mut server)[0].error(), 0);
}

fn replies_of(server: &mut Server) -> Vec<Reply> {
    replies(&std::mem::take(&mut server.out))
}

#[test]
fn unaligned_unknown_and_undefined_requests_are_einval() {
    let (read, write, flush, trim, cache, zeroes, status) = (0, 1, 3, 4, 5, 6, 7);
    for (flags, command, offset, length) in [
        (0, read, 1, 512),
        (0, read, 0, 511),
        (0, write, 256, 512),
        (0, write, 0, 100),
        (0, trim, 0, 513),
        (0, zeroes, 3, 512),
        (0, cache, 0, 1),
        (0, status, 0, 1),
        (0, status, 0, 0),
        (0, 8, 0, 512),
        (0, 9, 0, 0),
        (0, u16::MAX, 0, 512),
        (1 << 1, read, 0, 512),
        (1 << 3, read, 0, 512),
        (1 << 4, read, 0, 512),
        (1 << 5, write, 0, 512),
        (1 << 1, write, 0, 512),
        (1 << 2, write, 0, 512),
        (1 << 15, write, 0, 512),
        (1 << 4, trim, 0, 512),
        (1 << 2, zeroes, 0, 512),
        (1 << 3, zeroes, 0, 512),
        (1 << 2, status, 0, 512),
        (1 << 1, cache, 0, 512),
        (1 << 1, flush, 0, 0),
        (0, flush, 512, 0),
        (0, flush, 0, 512),
    ] {
        for structured in [false, true] {
            let mut server = Server::serving("vol", structured);
            let payload = if command == write { vec![9; length as usize] } else { vec![] };
            let replies = server.replies(&[raw(flags, command, 5, offset, length), payload].concat());
            assert_eq!(replies.len(), 1, "{flags} {command} {offset} {length}");
            assert_eq!((replies[0].cookie(), replies[0].error()), (5, EINVAL), "{flags} {command}");
            assert_eq!(server.seen, []);
            server.feed(&raw(0, read, 6, 0, 512));
            assert_eq!(server.seen.len(), 1, "in step after {flags} {command} {offset} {length}");
        }
    }
}

#[test]
fn past_the_end_is_enospc_for_writes_and_zeroes_and_einval_otherwise() {
    for (offset, length) in [(SIZE, 512), (SIZE - 512, 1024), (u64::MAX - 511, 512), (u64::MAX - 511, 1024)] {
        for (command, errno) in [(0, 22), (1, 28), (4, 22), (5, 22), (6, 28), (7, 22)] {
            let mut server = Server::serving("vol", true);
            let payload = if command == 1 { vec![0; length as usize] } else { vec![] };
            let replies = server.replies(&[raw(0, command, 1, offset, length), payload].concat());
            assert_eq!(replies[0].error(), errno, "command {command} at {offset}");
        }
    }
    let mut server = Server::serving("vol", true);
    server.feed(&raw(0, 0, 1, SIZE - 512, 512));
    assert_eq!(server.seen.len(), 1, "the last block is inside");
}

#[test]
fn a_read_only_export_refuses_every_modification_with_eperm() {
    for (flags, command, errno) in [(0, 1, 1), (0, 4, 1), (0, 6, 1), (1 << 4, 6, 1), (1 << 9, 1, 22)] {
        let mut server = Server::serving("ro", true);
        let payload = if command == 1 { vec![0; 512] } else { vec![] };
        let replies = server.replies(&[raw(flags, command, 1, SIZE, 512), payload].concat());
        assert_eq!(replies[0].error(), errno, "command {command}");
        server.feed(&raw(0, 0, 1, 0, 512));
        server.feed(&raw(1, 3, 1, 0, 0));
        assert_eq!(server.seen.len(), 2, "reads and flushes are served");
    }
}

#[test]
fn what_was_not_offered_or_negotiated_is_einval() {
    for (flags, command) in [(0, 4), (0, 5), (0, 6), (1 << 4, 6)] {
        let replies = Server::serving("bare", true).replies(&raw(flags, command, 1, 0, 512));
        assert_eq!(replies[0].error(), EINVAL, "command {command}");
    }
    let mut slow = Server::serving("slow", true);
    assert_eq!(slow.replies(&raw(1 << 4, 6, 1, 0, 512))[0].error(), EINVAL, "FAST_ZERO was not offered");
    slow.feed(&raw(0, 6, 1, 0, 512));
    assert_eq!(slow.seen.len(), 1);
    let mut simple = Server::serving("vol", false);
    assert_eq!(simple.replies(&raw(0, 7, 1, 0, 512))[0].error(), EINVAL, "block status without context");
    assert_eq!(
        simple.replies(&raw(1 << 2, 0, 1, 0, 512))[0].error(),
        EINVAL,
        "DF without structured replies"
    );
}

#[test]
fn enotsup_reaches_only_requests_with_fast_zero() {
    let mut server = Server::serving("vol", true);
    server.feed(&[raw(1 << 4, 6, 1, 0, 512), raw(0, 6, 2, 0, 512)].concat());
    for (seen, want) in server.seen.clone().iter().zip([95, EINVAL]) {
        let Seen::Request(request) = seen else { panic!("{seen:?}") };
        server.connection.reply_error(request, Errno::NotSup, "slow", &mut server.out);
        assert_eq!(replies_of(&mut server)[0].error(), want);
    }
}

#[test]
fn zero_length_is_not_an_error_of_the_connection() {
    for structured in [false, true] {
        let mut server = Server::serving("vol", structured);
        for command in [0, 1, 4, 5, 6] {
            for offset in [0, SIZE] {
                let replies = server.replies(&raw(0, command, 3, offset, 0));
                assert_eq!(replies.len(), 1);
                assert_eq!(replies[0].error(), 0, "command {command}");
                assert_eq!(matches!(replies[0], Reply::Chunk { .. }), structured);
            }
        }
        assert_eq!(server.seen, [], "the driver never sees an empty range");
    }
}

#[test]
fn fua_is_tolerated_on_every_command() {
    let mut server = Server::serving("vol", true);
    for command in [0, 3, 4, 5, 6, 7] {
        let length = if command == 3 { 0 } else { 512 };
        server.feed(&raw(1, command, 1, 0, length));
    }
    server.feed(&[raw(1, 1, 1, 0, 512), vec![7; 512]].concat());
    assert_eq!(server.seen.len(), 7);
    for seen in &server.seen {
        let (Seen::Request(request) | Seen::Write(request, _)) = seen else { panic!("{seen:?}") };
        assert!(request.fua);
    }
}

#[test]
fn flags_reach_the_driver() {
    let mut server = Server::serving("vol", true);
    let requests = [raw(0x12, 6, 1, 0, 512), raw(4, 0, 2, 0, 512), raw(8, 7, 3, 0, 512)];
    server.feed(&requests.concat());
    let zeroes =
        Request { cookie: 1, no_hole: true, fast_zero: true, ..Request::new(Command::WriteZeroes, 0, 512) };
    let read = Request { cookie: 2, df: true, ..Request::new(Command::Read, 0, 512) };
    let contexts = Contexts { allocation: true, health: false };
    let status = Request { cookie: 3, req_one: true, contexts, ..Request::new(Command::BlockStatus, 0, 512) };
    assert_eq!(server.seen, [Seen::Request(zeroes), Seen::Request(read), Seen::Request(status)]);
}

#[test]
fn commands_without_payload_may_exceed_the_payload_limit() {
    let mut server = Server::serving("vol", true);
    for command in [4, 5, 6, 7] {
        server.feed(&raw(0, command, 1, 512, u32::MAX - 511));
    }
    assert_eq!(server.seen.len(), 4);
    assert!(server.out.is_empty());
}

#[test]
fn reads_above_the_maximum_are_einval_or_eoverflow_with_df() {
    let mut server = Server::serving("vol", true);
    assert_eq!(server.replies(&raw(0, 0, 1, 0, BLOCK_BYTES_MAX + 512))[0].error(), EINVAL);
    assert_eq!(server.replies(&raw(4, 0, 1, 0, BLOCK_BYTES_MAX + 512))[0].error(), 75);
    server.feed(&raw(4, 0, 1, 0, BLOCK_BYTES_MAX));
    assert_eq!(server.seen.len(), 1);
}

#[test]
fn a_rejected_write_has_its_payload_drained_and_is_answered_after_it() {
    let length = BLOCK_BYTES_MAX + 512;
    let mut server = Server::serving("vol", true);
    assert_eq!(server.replies(&raw(0, 1, 4, 0, length)), []);
    let piece = vec![0x25; 1 << 20];
    for _ in 0..32 {
        assert_eq!(server.replies(&piece), []);
    }
    let replies = server.replies(&[&piece[..511], b"x"].concat());
    assert_eq!((replies[0].cookie(), replies[0].error()), (4, EINVAL));
    server.feed(&raw(0, 0, 5, 0, 512));
    assert_eq!(server.seen, [Seen::Request(Request { cookie: 5, ..Request::new(Command::Read, 0, 512) })]);
}

#[test]
fn a_rejected_write_beyond_what_is_drained_closes() {
    let mut server = Server::serving("vol", false);
    server.feed(&raw(0, 1, 4, 0, (64 << 20) + 512));
    assert!(matches!(server.fatal, Some(Fatal::PayloadLength { .. })));
    server.fatal = None;
    server.feed(&raw(0, 0, 4, 0, 512));
    assert_eq!((server.seen.len(), server.out.len()), (0, 0), "nothing is served after a failure");
}

#[test]
fn a_bad_magic_closes() {
    let mut server = Server::serving("vol", true);
    server.feed(&[0; 28]);
    assert_eq!(server.fatal, Some(Fatal::RequestMagic { found: 0 }));
    let mut server = Server::haggling();
    server.feed(&[0; 16]);
    assert_eq!(server.fatal, Some(Fatal::OptionMagic { found: 0 }));
}

#[test]
fn a_structured_read_never_gets_a_simple_reply() {
    let mut server = Server::serving("vol", true);
    let mut bytes = Vec::new();
    for (flags, offset, length) in
        [(0, 1, 512), (1 << 7, 0, 512), (0, SIZE, 512), (0, 0, 0), (0, 0, u32::MAX)]
    {
        bytes.extend(raw(flags, 0, 1, offset, length));
    }
    bytes.extend(raw(0, 0, 1, 0, 512));
    let mut replies = server.replies(&bytes);
    let Seen::Request(request) = server.seen[0] else { panic!("{:?}", server.seen) };
    server.connection.reply_error(&request, Errno::Io, "gone", &mut server.out);
    server.connection.reply_done(&request, &mut server.out);
    replies.extend(replies_of(&mut server));
    assert_eq!(replies.len(), 7);
    assert!(replies.iter().all(|reply| matches!(reply, Reply::Chunk { done: true, .. })), "{replies:?}");
}

#[test]
fn a_read_is_one_done_chunk_with_its_offset_whether_df_or_not() {
    for (flags, length) in [(0, 512), (4, 65536), (4, BLOCK_BYTES_MAX)] {
        let mut server = Server::serving("vol", true);
        server.feed(&raw(flags, 0, 0x1122, 4096, length));
        let Seen::Request(request) = server.seen[0] else { panic!("{:?}", server.seen) };
        server.connection.reply_read_header(&request, &mut server.out);
        assert_eq!(server.out.len(), CHUNK_HEADER_BYTES + 8);
        server.out.extend(vec![7; length as usize]);
        let payload = [&4096u64.to_be_bytes()[..], &vec![7; length as usize]].concat();
        let want = Reply::Chunk { done: true, kind: chunk::OFFSET_DATA, cookie: 0x1122, payload };
        assert!(replies_of(&mut server) == [want]);
    }
    let mut server = Server::serving("vol", false);
    server.feed(&raw(0, 0, 9, 0, 512));
    let Seen::Request(request) = server.seen[0] else { panic!("{:?}", server.seen) };
    server.connection.reply_read_header(&request, &mut server.out);
    assert_eq!(replies_of(&mut server), [Reply::Simple { error: 0, cookie: 9 }]);
}

#[test]
fn error_messages_are_cut_between_characters() {
    let mut server = Server::serving("vol", true);
    server.feed(&raw(0, 3, 1, 0, 0));
    let Seen::Request(request) = server.seen[0] else { panic!("{:?}", server.seen) };
    server.connection.reply_error(&request, Errno::Io, &"é€".repeat(200), &mut server.out);
    let replies = replies_of(&mut server);
    assert_eq!(replies[0].error(), 5);
    let Reply::Chunk { payload, .. } = &replies[0] else { panic!("{replies:?}") };
    assert!((250..=6 + ERROR_MESSAGE_BYTES_MAX).contains(&payload.len()));
}

fn extents_sent(flags: u16, length: u32, extents: &[(u64, u32)]) -> Vec<(u32, u32)> {
    let mut server = Server::serving("vol", true);
    server.feed(&raw(flags, 7, 1, 0, length));
    let Seen::Request(request) = server.seen[0] else { panic!("{:?}", server.seen) };
    let extents = Extents { allocation: extents, health: &[] };
    server.connection.reply_block_status(&request, extents, &mut server.out);
    let replies = replies_of(&mut server);
    let [Reply::Chunk { done: true, kind: chunk::BLOCK_STATUS, cookie: 1, payload }] = &replies[..] else {
        panic!("{replies:?}")
    };
    let mut reader = Reader(payload);
    assert_eq!(reader.u32(), Some(1), "the id that SET_META_CONTEXT gave");
    let mut sent = Vec::new();
    while let Some(length) = reader.u32() {
        sent.push((length, reader.u32().expect("flags")));
    }
    sent
}

#[test]
fn block_status_merges_clamps_and_obeys_req_one() {
    let (hole, mib) = (STATE_HOLE | STATE_ZERO, 1 << 20);
    let extents = [(4096, 0), (0, 3), (4096, 0), (8192, hole), (u64::MAX, 0)];
    assert_eq!(extents_sent(0, mib, &extents), [(8192, 0), (8192, hole), (mib - 16384, 0)]);
    assert_eq!(extents_sent(0, 6144, &extents), [(6144, 0)]);
    assert_eq!(extents_sent(0, 12288, &extents), [(8192, 0), (4096, hole)]);
    assert_eq!(extents_sent(8, mib, &extents), [(8192, 0)]);
    assert_eq!(extents_sent(8, 512, &extents), [(512, 0)]);
    assert_eq!(extents_sent(0, mib, &extents[..1]), [(4096, 0)], "may end early");
    assert_eq!(extents_sent(0, mib, &[]), [(mib, 0)], "never empty");
    assert_eq!(extents_sent(8, mib, &[(0, 3)]), [(mib, 0)]);
    let top = u32::MAX - 511;
    assert_eq!(extents_sent(0, top, &[(SIZE, hole)]), [(top, hole)], "4 GiB in one extent");
}

#[test]
fn block_status_replies_are_bounded() {
    let many: Vec<_> = (0..100_000u32).map(|i| (512, i % 2)).collect();
    assert_eq!(extents_sent(0, 512 * 100_000, &many).len(), BLOCK_STATUS_EXTENTS_MAX);
}

#[test]
fn many_pipelined_headers_in_one_receive_come_out_in_order() {
    let mut server = Server::serving("vol", true);
    let mut bytes = Vec::new();
    for cookie in 0..1000 {
        bytes.extend(raw(0, 0, cookie, cookie * 4096, 4096));
        if cookie % 10 == 0 {
            bytes.extend(raw(0, 1, cookie + 5000, 0, 1024));
            bytes.extend(vec![cookie as u8; 1024]);
        }
    }
    server.feed(&bytes);
    assert_eq!(server.seen.len(), 1100);
    assert!(server.out.is_empty(), "nothing to send yet");
    let cookies = server.seen.iter().filter_map(|seen| match seen {
        Seen::Request(request) => Some(request.cookie),
        _ => None,
    });
    assert!(cookies.eq(0..1000));
    assert!(
        matches!(&server.seen[1], Seen::Write(request, data) if request.cookie == 5000 && data == &[0; 1024])
    );
}

#[test]
fn a_disconnect_ends_input_and_leaves_replies_possible() {
    let mut server = Server::serving("vol", true);
    server.feed(&[raw(0, 0, 1, 0, 512), raw(0, 2, 0, 0, 0), raw(0, 0, 2, 0, 512)].concat());
    assert_eq!(server.seen.len(), 2);
    assert_eq!(server.seen[1], Seen::Disconnect);
    let Seen::Request(request) = server.seen[0] else { panic!("{:?}", server.seen) };
    server.connection.reply_error(&request, Errno::Io, "late", &mut server.out);
    assert_eq!(replies_of(&mut server).len(), 1);
}
