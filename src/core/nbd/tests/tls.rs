//! STARTTLS on both halves: which clients must use TLS, what is forgotten at the switch, and that nothing
//! sent in the clear passes for data sent under TLS.

use super::*;
use crate::nbd::wire::info;

const MODES: [TlsMode; 2] = [TlsMode::Optional, TlsMode::Required];
const GREETING: &[u8] = b"NBDMAGICIHAVEOPT\0\x03";

/// A server whose client agreed to fixed newstyle; nothing left to send.
fn haggling(tls: TlsMode) -> Server {
    let mut server = Server::greeted_with_tls(tls);
    server.feed(&3u32.to_be_bytes());
    server.out.clear();
    server
}

/// The same after STARTTLS.
fn secured(tls: TlsMode) -> Server {
    let mut server = haggling(tls);
    assert_eq!(server.options(&opt(option::STARTTLS, &[])), [(option::STARTTLS, reply::ACK, vec![])]);
    assert_eq!(server.seen, [Seen::StartTls]);
    server.seen.clear();
    server.connection.tls_started();
    server
}

fn kinds(replies: &[(u32, u32, Vec<u8>)]) -> Vec<u32> {
    replies.iter().map(|reply| reply.1).collect()
}

#[test]
fn a_server_without_tls_refuses_starttls_and_goes_on() {
    let mut server = haggling(TlsMode::Off);
    assert_eq!(kinds(&server.options(&opt(option::STARTTLS, &[]))), [reply::ERR_UNSUP]);
    assert_eq!(kinds(&server.options(&opt(option::STARTTLS, b"data"))), [reply::ERR_UNSUP]);
    server.feed(&opt(option::GO, &go("vol", &[])));
    assert_eq!(server.seen, [Seen::Selected("vol".into())]);
}

#[test]
fn a_server_that_demands_tls_tells_and_takes_nothing_before_it() {
    let others = [
        (option::LIST, vec![]),
        (option::INFO, go("vol", &[])),
        (option::GO, go("vol", &[3])),
        (option::STRUCTURED_REPLY, vec![]),
        (option::LIST_META_CONTEXT, meta("vol", &[])),
        (option::SET_META_CONTEXT, meta("vol", &["base:allocation"])),
        (option::GO, b"malformed".to_vec()),
        (option::GO, vec![0; 20 << 10]),
        (99, b"unknown".to_vec()),
    ];
    for (option, data) in others {
        let mut server = haggling(TlsMode::Required);
        let replies = server.options(&opt(option, &data));
        assert_eq!(kinds(&replies), [reply::ERR_TLS_REQD], "option {option}");
        assert_eq!((replies[0].0, server.seen.len(), &server.fatal), (option, 0, &None));
        // It has no consequences for the client.
        assert_eq!(kinds(&server.options(&opt(option::STARTTLS, &[]))), [reply::ACK]);
    }
    let mut server = haggling(TlsMode::Required);
    server.feed(&opt(option::EXPORT_NAME, b"vol"));
    assert_eq!((server.fatal, server.out.len(), server.seen.len()), (Some(Fatal::TlsRequired), 0, 0));
    let mut server = haggling(TlsMode::Required);
    assert_eq!(kinds(&server.options(&opt(option::ABORT, &[]))), [reply::ACK]);
    assert_eq!(server.seen, [Seen::Disconnect]);
    // A client from before fixed newstyle can choose an export and nothing else.
    let mut server = Server::greeted_with_tls(TlsMode::Required);
    server.feed(&[&0u32.to_be_bytes()[..], &opt(option::EXPORT_NAME, b"vol")].concat());
    assert_eq!(server.fatal, Some(Fatal::TlsRequired));
}

#[test]
fn where_tls_is_optional_clients_are_served_without_it() {
    let mut server = haggling(TlsMode::Optional);
    server.feed(&opt(option::GO, &go("vol", &[])));
    assert_eq!(server.seen, [Seen::Selected("vol".into())]);
    let mut server = haggling(TlsMode::Optional);
    server.feed(&opt(option::EXPORT_NAME, b"vol"));
    assert_eq!(server.seen, [Seen::Selected("vol".into())]);
}

#[test]
fn under_tls_everything_is_served_and_starttls_again_is_invalid() {
    for mode in MODES {
        let mut server = secured(mode);
        assert_eq!(kinds(&server.options(&opt(option::STARTTLS, &[]))), [reply::ERR_INVALID]);
        assert_eq!(kinds(&server.options(&opt(option::STARTTLS, b"x"))), [reply::ERR_INVALID]);
        let listed = server.options(&opt(option::LIST, &[]));
        assert_eq!(listed.last().map(|reply| reply.1), Some(reply::ACK));
        server.feed(&opt(option::GO, &go("vol", &[])));
        assert_eq!(server.seen, [Seen::Selected("vol".into())]);
        let mut server = secured(mode);
        server.feed(&opt(option::EXPORT_NAME, b"vol"));
        // No padding: the client's flags still count.
        assert_eq!((server.seen.len(), server.out.len()), (1, 10));
    }
}

#[test]
fn starttls_with_data_is_invalid_and_changes_nothing() {
    for mode in MODES {
        let mut server = haggling(mode);
        assert_eq!(kinds(&server.options(&opt(option::STARTTLS, b"now"))), [reply::ERR_INVALID]);
        assert_eq!((server.seen.len(), &server.fatal), (0, &None));
        assert_eq!(kinds(&server.options(&opt(option::STARTTLS, &[]))), [reply::ACK]);
    }
}

#[test]
fn what_was_negotiated_in_the_clear_is_forgotten() {
    let mut server = haggling(TlsMode::Optional);
    server.feed(&opt(option::STRUCTURED_REPLY, &[]));
    server.feed(&opt(option::SET_META_CONTEXT, &meta("4k", &["base:allocation"])));
    server.feed(&opt(option::INFO, &go("4k", &[3])));
    server.out.clear();
    server.feed(&opt(option::STARTTLS, &[]));
    server.connection.tls_started();
    server.seen.clear();
    server.out.clear();
    // Contexts need structured replies, which have to be negotiated again; the block size has to be told
    // again.
    let refused = server.options(&opt(option::SET_META_CONTEXT, &meta("4k", &["base:allocation"])));
    assert_eq!(kinds(&refused), [reply::ERR_INVALID]);
    let replies = server.options(&opt(option::GO, &go("4k", &[])));
    assert_eq!(replies.last().map(|reply| reply.1), Some(reply::ACK));
    server.feed(&raw(0, Command::Trim.code(), 6, 1, 1));
    assert!(matches!(server.seen.last(), Some(Seen::Request(request)) if request.command == Command::Trim));
    server.out.clear();
    let error = server.replies(&raw(0, Command::BlockStatus.code(), 7, 0, 4096))[0].error();
    assert_eq!(error, Errno::Inval.code());
    // A simple reply: nothing structured survived.
    assert_eq!(server.replies(&raw(0, Command::Flush.code(), 8, 0, 0)).len(), 0);
    assert!(matches!(server.seen.last(), Some(Seen::Request(request)) if request.command == Command::Flush));
}

#[test]
fn bytes_behind_starttls_end_the_connection_and_are_never_parsed() {
    for mode in MODES {
        for injected in [opt(option::GO, &go("vol", &[])), vec![0x16], opt(option::ABORT, &[])] {
            let mut server = haggling(mode);
            server.feed(&[opt(option::STARTTLS, &[]), injected.clone()].concat());
            assert_eq!(server.fatal, Some(Fatal::BytesBeforeTls));
            assert_eq!((server.out.len(), server.seen.len()), (0, 0), "not even acknowledged");
            // In a piece of their own, they come after the answer was promised, and still end the connection.
            let mut server = haggling(mode);
            server.feed(&opt(option::STARTTLS, &[]));
            server.out.clear();
            server.feed(&injected);
            assert_eq!(server.fatal, Some(Fatal::BytesBeforeTls));
            assert_eq!((server.out.len(), server.seen.len()), (0, 1));
        }
    }
}

#[test]
fn a_stopping_server_starts_no_tls_and_the_clock_runs_through_it() {
    let mut server = haggling(TlsMode::Required);
    server.connection.begin_shutdown();
    assert_eq!(kinds(&server.options(&opt(option::STARTTLS, &[]))), [reply::ERR_SHUTDOWN]);
    let mut server = secured(TlsMode::Required);
    assert!(server.connection.handshake_overdue(Timestamp(HANDSHAKE_NANOS_MAX)));
    server.connection.begin_shutdown();
    assert_eq!(kinds(&server.options(&opt(option::GO, &go("vol", &[])))), [reply::ERR_SHUTDOWN]);
}

fn insisting() -> Client {
    let options = ClientOptions { tls: true, ..ClientOptions::for_export("vol").expect("a sound name") };
    let mut client = Client::new(options);
    client.feed(GREETING);
    assert_eq!(client.out, [&3u32.to_be_bytes()[..], &opt(option::STARTTLS, &[])].concat(), "first of all");
    client.out.clear();
    client
}

fn answer(option: u32, kind: u32, data: &[u8]) -> Vec<u8> {
    let mut bytes = Vec::new();
    wire::encode_option_reply(option, kind, &[data], &mut bytes);
    bytes
}

#[test]
fn a_client_says_nothing_before_tls_and_everything_after() {
    let mut client = insisting();
    client.feed(&answer(option::STARTTLS, reply::ACK, &[]));
    assert_eq!(client.got, [Got::Event(ClientEvent::StartTls)]);
    assert!(client.out.is_empty());
    client.got.clear();
    client.connection.tls_started(&mut client.out);
    assert_eq!(client.out, opt(option::EXTENDED_HEADERS, &[]));
    client.feed(&answer(option::EXTENDED_HEADERS, reply::ERR_UNSUP, &[]));
    client.feed(&answer(option::STRUCTURED_REPLY, reply::ERR_UNSUP, &[]));
    let export = [&info::EXPORT.to_be_bytes()[..], &(1u64 << 20).to_be_bytes(), &1u16.to_be_bytes()].concat();
    client.feed(&answer(option::GO, reply::INFO, &export));
    client.feed(&answer(option::GO, reply::ACK, &[]));
    assert_eq!(client.got, [Got::Event(ClientEvent::Ready)], "{:?}", client.fatal);
}

#[test]
fn a_client_that_insists_never_goes_on_without() {
    for kind in
        [reply::ERR_UNSUP, reply::ERR_POLICY, reply::ERR_INVALID, reply::ERR_SHUTDOWN, reply::ERR_TLS_REQD]
    {
        let mut client = insisting();
        client.feed(&answer(option::STARTTLS, kind, b"no\x07pe"));
        let Some(ClientFatal::TlsRefused { message, .. }) = &client.fatal else {
            panic!("{:?}", client.fatal)
        };
        assert_eq!(message, "no pe");
        assert_eq!(client.out, opt(option::ABORT, &[]), "a goodbye and no option");
        assert!(client.got.is_empty());
    }
    // An acknowledgement with data, and the answer to another option, are no grants.
    let mut client = insisting();
    client.feed(&answer(option::STARTTLS, reply::ACK, b"x"));
    assert!(matches!(client.fatal, Some(ClientFatal::OptionReplyMalformed { .. })), "{:?}", client.fatal);
    let mut client = insisting();
    client.feed(&answer(option::GO, reply::ACK, &[]));
    assert!(matches!(client.fatal, Some(ClientFatal::OptionReplyFor { .. })), "{:?}", client.fatal);
}

#[test]
fn bytes_behind_the_grant_end_a_client_and_are_never_parsed() {
    let injected = answer(option::STRUCTURED_REPLY, reply::ACK, &[]);
    let mut client = insisting();
    client.feed(&[answer(option::STARTTLS, reply::ACK, &[]), injected.clone()].concat());
    assert_eq!(client.fatal, Some(ClientFatal::BytesBeforeTls));
    assert!(client.got.is_empty() && client.out.is_empty());
    let mut client = insisting();
    client.feed(&answer(option::STARTTLS, reply::ACK, &[]));
    client.feed(&injected);
    assert_eq!(client.fatal, Some(ClientFatal::BytesBeforeTls));
    assert_eq!((client.got.len(), client.out.len()), (1, 0));
}

#[test]
fn a_client_without_tls_says_why_it_gives_up_where_tls_is_demanded() {
    let mut client = Client::new(ClientOptions::for_export("vol").expect("a sound name"));
    client.feed(GREETING);
    client.feed(&answer(option::EXTENDED_HEADERS, reply::ERR_TLS_REQD, &[]));
    let refused = matches!(&client.fatal, Some(ClientFatal::Refused { reason: Refusal::TlsRequired, .. }));
    assert!(refused, "{:?}", client.fatal);
}
