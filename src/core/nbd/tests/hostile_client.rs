//! Malformed input from clients: option data whose inner lengths lie, and streams that stop anywhere. The
//! malformed requests are in `obligations`, each beside the rule it breaks.

use super::*;

/// Option data that contradicts itself, with the option it is sent in.
fn malformed_options() -> Vec<(u32, Vec<u8>)> {
    let mut cases = Vec::new();
    for option in [option::GO, option::INFO] {
        for data in [
            b"".to_vec(),
            b"\0".to_vec(),
            b"\0\0\0".to_vec(),
            b"\0\0\0\0".to_vec(),
            b"\0\0\0\0\0".to_vec(),
            b"\0\0\0\x03vol".to_vec(),
            b"\0\0\0\x03vol\0".to_vec(),
            b"\0\0\0\x04vol\0\0".to_vec(),
            b"\0\0\0\x03vol\0\x01".to_vec(),
            b"\0\0\0\x03vol\0\x01\0".to_vec(),
            b"\0\0\0\x03vol\0\0\0".to_vec(),
            b"\0\0\0\x03vol\0\x01\0\0\0\0".to_vec(),
            b"\0\0\0\x03vol\xff\xff\0\0".to_vec(),
            b"\xff\xff\xff\xffvol\0\0".to_vec(),
            b"\x7f\xff\xff\xffvol\0\0".to_vec(),
            b"\0\0\x10\0vol\0\0".to_vec(),
            b"\0\0\0\x03v\0l\0\0".to_vec(),
            b"\0\0\0\x02\xc3\x28\0\0".to_vec(),
        ] {
            cases.push((option, data));
        }
    }
    for option in [option::SET_META_CONTEXT, option::LIST_META_CONTEXT] {
        for data in [
            b"".to_vec(),
            b"\0\0\0".to_vec(),
            b"\0\0\0\x03vol".to_vec(),
            b"\0\0\0\x03vol\0\0\0".to_vec(),
            b"\0\0\0\x03vol\0\0\0\x01".to_vec(),
            b"\0\0\0\x03vol\0\0\0\x01\0\0\0\x05base:x".to_vec(),
            b"\0\0\0\x03vol\0\0\0\x01\0\0\0\x09base:".to_vec(),
            b"\0\0\0\x03vol\0\0\0\0\0".to_vec(),
            b"\0\0\0\x03vol\xff\xff\xff\xff\0\0\0\x05base:".to_vec(),
            b"\0\0\0\x03vol\0\0\0\x01\xff\xff\xff\xffbase:".to_vec(),
            b"\0\0\0\x03vol\0\0\0\x01\0\0\0\x05ba\0e:".to_vec(),
            b"\0\0\0\x03vol\0\0\0\x01\0\0\0\x01\xff".to_vec(),
            b"\xff\xff\xff\xff\0\0\0\0".to_vec(),
            [&b"\0\0\0\x03vol\0\0\0\x02"[..], &counted(b"base:allocation"), b"\0\0\0\x02x"].concat(),
        ] {
            cases.push((option, data));
        }
    }
    for option in [option::LIST, option::STRUCTURED_REPLY] {
        cases.push((option, vec![0]));
        cases.push((option, vec![0; 60000]));
    }
    cases
}

#[test]
fn option_data_that_contradicts_itself_is_answered_and_leaves_the_stream_in_step() {
    let cases = malformed_options();
    assert!(cases.len() >= 60, "{}", cases.len());
    for (option, data) in cases {
        let mut server = Server::haggling();
        server.feed(&opt(option::STRUCTURED_REPLY, &[]));
        server.out.clear();
        let replies = server.options(&opt(option, &data));
        assert_eq!(replies.len(), 1, "option {option} {data:?}: {replies:?}");
        let (answered, kind, message) = &replies[0];
        assert_eq!((*answered, *kind), (option, reply::ERR_INVALID), "{data:?}");
        assert!(wire::check_string(message).is_ok_and(|text| !text.is_empty()));
        assert_eq!(server.options(&opt(option::LIST, &[])).last().map(|reply| reply.1), Some(reply::ACK));
        assert_eq!(server.seen, []);
    }
}

#[test]
fn a_half_understood_meta_context_option_selects_nothing() {
    let mut server = Server::haggling();
    server.feed(&opt(option::STRUCTURED_REPLY, &[]));
    let data = [&b"\0\0\0\x03vol\0\0\0\x02"[..], &counted(b"base:allocation"), b"\0\0\0\x02x"].concat();
    server.feed(&opt(option::SET_META_CONTEXT, &data));
    server.feed(&opt(option::GO, &go("vol", &[])));
    server.out.clear();
    assert_eq!(server.replies(&raw(0, 7, 1, 0, 512))[0].error(), 22);
}

#[test]
fn export_names_that_are_no_strings_close() {
    for name in [&b"\0"[..], b"vol\0", b"\xff", b"\xc3\x28", &[b'x'; 4097]] {
        let mut server = Server::haggling();
        server.feed(&opt(option::EXPORT_NAME, name));
        assert!(matches!(server.fatal, Some(Fatal::ExportName { .. })), "{name:?}");
        assert!(server.out.is_empty());
    }
}

#[test]
fn an_absurd_name_length_is_refused_before_its_first_byte() {
    let mut server = Server::haggling();
    let mut header = opt(option::EXPORT_NAME, &[]);
    header[12..].copy_from_slice(&u32::MAX.to_be_bytes());
    server.feed(&header);
    assert_eq!(server.fatal, Some(Fatal::ExportName { fault: StringFault::TooLong }));
}

#[test]
fn a_client_that_stops_anywhere_costs_nothing_and_hears_nothing_more() {
    let mut stream = 3u32.to_be_bytes().to_vec();
    stream.extend(opt(option::STRUCTURED_REPLY, &[]));
    stream.extend(opt(99, &[1; 30]));
    stream.extend(opt(option::GO, &go("vol", &[3])));
    stream.extend(raw(0, 1, 1, 0, 1024));
    stream.extend(vec![1; 1024]);
    stream.extend(raw(0, 1, 1, 3, 1024));
    stream.extend(vec![1; 1024]);
    for cut in 0..stream.len() {
        let mut server = Server::greeted();
        server.feed(&stream[..cut]);
        assert_eq!(server.fatal, None);
        let writes = server.seen.iter().filter(|seen| matches!(seen, Seen::Write(..))).count();
        assert_eq!(writes, usize::from(cut >= stream.len() - 28 - 1024), "cut at {cut}");
    }
}
