//! This client against this server in memory: every command, pipelined, answered out of order, over a vector
//! of bytes that says what must come back.

use super::*;
use proptest::prelude::*;

const DISK_BYTES: usize = 1 << 20;

/// A client and a server with a disk behind it.
struct Pair {
    client: Client,
    server: Server,
    disk: Vec<u8>,
    flushes: usize,
    /// Reads are answered in parts where that is allowed.
    in_parts: bool,
}

impl Pair {
    fn new(options: ClientOptions) -> Pair {
        let mut server = Server::greeted();
        for export in &mut server.exports.0 {
            export.size = DISK_BYTES as u64;
        }
        let client = Client::new(options);
        let mut pair = Pair { client, server, disk: vec![0; DISK_BYTES], flushes: 0, in_parts: false };
        pair.settle();
        pair
    }

    /// Carries bytes both ways, and executes what arrives newest first, until nothing moves.
    fn settle(&mut self) {
        loop {
            let (up, down) = (std::mem::take(&mut self.client.out), std::mem::take(&mut self.server.out));
            if up.is_empty() && down.is_empty() {
                break;
            }
            self.server.feed(&up);
            self.client.feed(&down);
            assert_eq!(self.server.fatal, None);
            for seen in std::mem::take(&mut self.server.seen).into_iter().rev() {
                self.execute(seen);
            }
        }
    }

    fn execute(&mut self, seen: Seen) {
        let (request, payload) = match seen {
            Seen::Request(request) => (request, Vec::new()),
            Seen::Write(request, payload) => (request, payload),
            Seen::Selected(_) | Seen::StartTls | Seen::Disconnect => return,
        };
        let range = request.offset as usize..(request.offset + request.length) as usize;
        let Server { connection, out, .. } = &mut self.server;
        match request.command {
            Command::Read => {
                if self.in_parts && connection.takes_parts(&request) {
                    read_in_parts(connection, &request, &self.disk[range], out);
                } else {
                    connection.reply_read_header(&request, out);
                    out.extend_from_slice(&self.disk[range]);
                }
                return;
            }
            Command::BlockStatus => {
                let extents: Vec<_> = self.disk[range]
                    .chunks(512)
                    .map(|block| (512, if block.iter().all(|&byte| byte == 0) { 3 } else { 0 }))
                    .collect();
                connection.reply_block_status(&request, Extents { allocation: &extents, health: &[] }, out);
                return;
            }
            Command::WriteZeroes if request.fast_zero => {
                connection.reply_error(&request, Errno::NotSup, "never fast here", out);
                return;
            }
            Command::Write => self.disk[range].copy_from_slice(&payload),
            Command::WriteZeroes | Command::Trim => self.disk[range].fill(0),
            Command::Flush => self.flushes += 1,
            Command::Cache => {}
        }
        connection.reply_done(&request, out);
    }

    fn write(&mut self, offset: u64, bytes: &[u8]) -> u64 {
        let cookie = self.client.submit(&Request::new(Command::Write, offset, bytes.len() as u64).with_fua());
        self.client.out.extend_from_slice(bytes);
        cookie
    }
}

/// Replies with blocks of zeroes as holes and others as data, as a volume does that knows which are zero.
fn read_in_parts(connection: &ServerConnection, request: &Request, bytes: &[u8], out: &mut Vec<u8>) {
    let mut offset = request.offset;
    for block in bytes.chunks(512) {
        let length = block.len() as u64;
        let part = ReadPart { offset, length, last: offset + length == request.offset + request.length };
        offset += length;
        if block.iter().all(|&byte| byte == 0) {
            connection.reply_read_hole(request, part, out);
        } else {
            connection.reply_read_data(request, part, out);
            out.extend_from_slice(block);
        }
    }
}

fn all_options() -> [ClientOptions; 5] {
    let full = ClientOptions::for_export("vol").expect("a sound name");
    [
        ClientOptions { structured: false, extended: false, ..full.clone() },
        ClientOptions { extended: false, base_allocation: false, export: String::new(), ..full.clone() },
        ClientOptions { extended: false, ..full.clone() },
        ClientOptions { base_allocation: false, ..full.clone() },
        full,
    ]
}

#[test]
fn both_halves_agree_on_the_export() {
    for options in all_options() {
        let pair = Pair::new(options.clone());
        assert_eq!(pair.client.got, [Got::Event(ClientEvent::Ready)], "{:?}", pair.client.fatal);
        let want = RemoteExport {
            name: "vol".into(),
            description: "about vol".into(),
            size: DISK_BYTES as u64,
            flush: true,
            fua: true,
            trim: true,
            write_zeroes: true,
            fast_zero: true,
            multi_conn: true,
            cache: true,
            df: options.structured,
            structured: options.structured,
            extended: options.extended,
            base_allocation: (options.structured && options.base_allocation).then_some(1),
            block_min: 512,
            block_preferred: 65536,
            block_max: BLOCK_BYTES_MAX,
            ..RemoteExport::default()
        };
        assert_eq!(pair.client.connection.export(), Some(&want));
    }
    let missing = Pair::new(ClientOptions::for_export("nope").expect("a sound name"));
    let refused =
        matches!(missing.client.fatal, Some(ClientFatal::Refused { reason: Refusal::UnknownExport, .. }));
    assert!(refused, "{:?}", missing.client.fatal);
}

#[test]
fn every_command_does_what_it_says_pipelined_and_answered_in_reverse() {
    for options in all_options() {
        let status = options.structured && options.base_allocation;
        let mut pair = Pair::new(options);
        pair.client.got.clear();
        let ok = |cookie| Got::Event(ClientEvent::Done { cookie, result: Ok(()) });

        let writes =
            [pair.write(0, &[1; 4096]), pair.write(8192, &[2; 1024]), pair.write(65536, &[3; 65536])];
        let flush = pair.client.submit(&Request::new(Command::Flush, 0, 0));
        let cache = pair.client.submit(&Request::new(Command::Cache, 0, DISK_BYTES as u64));
        pair.settle();
        assert_eq!(pair.client.got, [cache, flush, writes[2], writes[1], writes[0]].map(ok));
        assert_eq!(pair.flushes, 1);
        pair.client.got.clear();

        let trim = pair.client.submit(&Request::new(Command::Trim, 1024, 1024));
        let zeroes = Request { no_hole: true, ..Request::new(Command::WriteZeroes, 65536, 32768) };
        let zeroes = pair.client.submit(&zeroes);
        pair.settle();
        assert_eq!(pair.client.got, [zeroes, trim].map(ok));
        pair.client.got.clear();

        let fast = Request { fast_zero: true, ..Request::new(Command::WriteZeroes, 0, 512) };
        let fast = pair.client.submit(&fast);
        pair.settle();
        let Some(Got::Event(ClientEvent::Done { cookie, result: Err(failure) })) = pair.client.got.pop()
        else {
            panic!("{:?}", pair.client.got)
        };
        assert_eq!((cookie, failure.errno), (fast, Errno::NotSup));

        let reads =
            [(0, 512), (0, DISK_BYTES as u64), (65536, 65536), (1024, 2048)].map(|(offset, length)| {
                (offset, pair.client.submit(&Request::new(Command::Read, offset, length)), length as usize)
            });
        pair.settle();
        let mut want = Vec::new();
        for (offset, cookie, length) in reads.into_iter().rev() {
            let at = offset as usize;
            want.push(Got::Data { cookie, offset, bytes: pair.disk[at..at + length].to_vec() });
            want.push(ok(cookie));
        }
        assert!(pair.client.got == want);
        assert_eq!(pair.disk[1023..1026], [1, 0, 0]);
        pair.client.got.clear();

        let ask = pair
            .client
            .connection
            .submit(&Request::new(Command::BlockStatus, 0, 131072), &mut pair.client.out);
        pair.settle();
        match ask {
            Ok(cookie) => {
                assert!(status);
                let extents = vec![
                    (1024, 0),
                    (1024, 3),
                    (2048, 0),
                    (4096, 3),
                    (1024, 0),
                    (131072 - 32768 - 9216, 3),
                    (32768, 0),
                ];
                let want = Got::Event(ClientEvent::Extents { cookie, extents });
                assert_eq!(pair.client.got, [want, ok(cookie)]);
            }
            Err(refused) => {
                assert!(!status);
                assert_eq!(refused, SubmitError::NotOffered { command: Command::BlockStatus });
            }
        }
        assert_eq!(pair.client.fatal, None);
        assert_eq!(pair.client.connection.in_flight(), 0);
    }
}

#[test]
fn reads_in_parts_say_the_same_and_send_no_zeroes() {
    for options in all_options() {
        let mut pair = Pair::new(options.clone());
        pair.in_parts = true;
        pair.write(1024, &[5; 1024]);
        pair.write(16384, &[6; 512]);
        pair.settle();
        for (offset, length, df) in
            [(0, 32768, false), (0, 32768, true), (1024, 1024, false), (4096, 8192, false)]
        {
            pair.client.got.clear();
            if df && !options.structured {
                continue;
            }
            let cookie = pair.client.submit(&Request { df, ..Request::new(Command::Read, offset, length) });
            pair.settle();
            let (mut bytes, mut sent) = (vec![0xee; length as usize], 0);
            for got in &pair.client.got {
                match got {
                    Got::Data { offset: at, bytes: data, .. } => {
                        let at = (at - offset) as usize;
                        bytes[at..at + data.len()].copy_from_slice(data);
                        sent += data.len();
                    }
                    Got::Event(ClientEvent::Hole { offset: at, length, .. }) => {
                        bytes[(at - offset) as usize..(at - offset + length) as usize].fill(0);
                    }
                    got => assert_eq!(*got, Got::Event(ClientEvent::Done { cookie, result: Ok(()) })),
                }
            }
            let range = offset as usize..(offset + length) as usize;
            assert!(bytes == pair.disk[range.clone()], "{options:?} {offset} {length}");
            let nonzero = pair.disk[range].iter().filter(|&&byte| byte != 0).count();
            assert_eq!(sent, if options.structured && !df { nonzero } else { length as usize });
        }
        assert_eq!(pair.client.fatal, None);
    }
}

#[test]
fn a_read_only_or_large_blocked_export_is_described_as_such() {
    let ro = Pair::new(ClientOptions::for_export("ro").expect("a sound name"));
    let export = ro.client.connection.export().expect("ready");
    assert!(export.read_only && export.rotational && !export.trim && !export.write_zeroes);
    let large = Pair::new(ClientOptions::for_export("4k").expect("a sound name"));
    assert_eq!(large.client.connection.export().map(|export| export.block_min), Some(4096));
}

proptest! {
    #[test]
    fn reads_return_what_was_written_whatever_is_pipelined(
        options in prop::sample::select(all_options().to_vec()),
        steps in prop::collection::vec((0u64..2000, 1u64..48, any::<u8>(), 0u8..4), 1..40),
    ) {
        let mut pair = Pair::new(options);
        for (block, blocks, fill, command) in steps {
            let (offset, length) = (block * 512, blocks * 512);
            match command {
                0 => { pair.write(offset, &vec![fill; length as usize]); }
                1 => { pair.client.submit(&Request::new(Command::WriteZeroes, offset, length)); }
                2 => { pair.client.submit(&Request::new(Command::Read, offset, length)); }
                // Requests of one batch may be executed in any order, so that only settled ones can be
                // compared.
                _ => {
                    pair.settle();
                    pair.client.got.clear();
                    let cookie = pair.client.submit(&Request::new(Command::Read, offset, length));
                    pair.settle();
                    let at = offset as usize;
                    let bytes = pair.disk[at..at + length as usize].to_vec();
                    let data = Got::Data { cookie, offset, bytes };
                    let done = Got::Event(ClientEvent::Done { cookie, result: Ok(()) });
                    prop_assert!(pair.client.got == [data, done]);
                }
            }
        }
        pair.settle();
        prop_assert_eq!(&pair.client.fatal, &None);
        prop_assert_eq!(pair.client.connection.in_flight(), 0);
    }
}
