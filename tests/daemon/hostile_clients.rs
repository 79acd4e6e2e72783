//! NBD clients that are wrong, silent, greedy or gone, over the real socket of a real daemon. What is
//! checked: the errno or the end that each gets, that everybody else is served meanwhile, and that memory
//! stays bounded.

use crate::support::{Up, run};
use std::fs;
use std::io::{self, Read, Write};
use std::os::unix::net::UnixStream;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

const MIB: u64 = 1 << 20;

/// Size of the volume of every test.
const VOLUME: u64 = 64 * MIB;

/// Options of the array of every test.
const SMALL: &[&str] = &["--data", "2", "--parity", "1", "--size", "64MiB"];

/// Longest that anything may take; only a hang gets there.
const PATIENCE: Duration = Duration::from_secs(60);

const READ: u16 = 0;
const WRITE: u16 = 1;
const FLUSH: u16 = 3;
const TRIM: u16 = 4;
const CACHE: u16 = 5;
const WRITE_ZEROES: u16 = 6;
const BLOCK_STATUS: u16 = 7;

const EINVAL: u32 = 22;
const ENOSPC: u32 = 28;

const OPTION_GO: u32 = 7;
const ERR_UNSUP: u32 = 1 << 31 | 1;
const ERR_INVALID: u32 = 1 << 31 | 3;
const ERR_UNKNOWN: u32 = 1 << 31 | 6;
const ERR_TOO_BIG: u32 = 1 << 31 | 9;

/// A client that says exactly what it is told to say.
struct Raw(UnixStream);

impl Raw {
    /// Connects and takes the greeting.
    fn connect(up: &Up) -> Raw {
        let stream = UnixStream::connect(up.socket()).expect("connected");
        stream.set_read_timeout(Some(PATIENCE)).expect("a timeout");
        stream.set_write_timeout(Some(PATIENCE)).expect("a timeout");
        Raw(stream)
    }

    fn greeted(up: &Up) -> Raw {
        let mut raw = Raw::connect(up);
        let greeting = raw.bytes::<18>();
        assert_eq!(&greeting[..16], b"NBDMAGICIHAVEOPT");
        raw
    }

    /// Through the handshake, with simple replies.
    fn attached(up: &Up) -> Raw {
        let mut raw = Raw::greeted(up);
        raw.say(&go_handshake());
        while raw.option_reply().1 != 1 {}
        raw
    }

    fn say(&mut self, bytes: &[u8]) {
        self.0.write_all(bytes).expect("said");
    }

    fn bytes<const N: usize>(&mut self) -> [u8; N] {
        let mut bytes = [0; N];
        self.0.read_exact(&mut bytes).expect("an answer");
        bytes
    }

    /// (option, kind) of the next option reply.
    fn option_reply(&mut self) -> (u32, u32) {
        let head = self.bytes::<20>();
        assert_eq!(head[..8], 0x0003_e889_0455_65a9u64.to_be_bytes());
        let word = |at: usize| u32::from_be_bytes(head[at..at + 4].try_into().expect("four bytes"));
        let mut data = vec![0; word(16) as usize];
        self.0.read_exact(&mut data).expect("the data of the reply");
        (word(8), word(12))
    }

    /// Sends a request and returns the error of its simple reply; the payload of a read is taken.
    fn ask(&mut self, command: u16, flags: u16, offset: u64, length: u32, payload: &[u8]) -> u32 {
        self.say(&request(command, flags, 7, offset, length));
        self.say(payload);
        let error = self.reply(7);
        if command == READ && error == 0 {
            let taken = io::copy(&mut (&mut self.0).take(length.into()), &mut io::sink()).expect("a payload");
            assert_eq!(taken, u64::from(length));
        }
        error
    }

    fn reply(&mut self, cookie: u64) -> u32 {
        let reply = self.bytes::<16>();
        assert_eq!(reply[..4], 0x6744_6698u32.to_be_bytes());
        assert_eq!(reply[8..], cookie.to_be_bytes());
        u32::from_be_bytes(reply[4..8].try_into().expect("four bytes"))
    }

    /// The server must close the connection; returns what it said before.
    fn ended(mut self) -> Vec<u8> {
        let mut rest = Vec::new();
        match self.0.read_to_end(&mut rest) {
            Ok(_) => {}
            Err(error) if error.kind() == io::ErrorKind::ConnectionReset => {}
            Err(error) => panic!("the connection was not closed: {error}"),
        }
        rest
    }
}

fn option(code: u32, data: &[u8]) -> Vec<u8> {
    let length = u32::try_from(data.len()).expect("a short option");
    let mut bytes = b"IHAVEOPT".to_vec();
    bytes.extend(code.to_be_bytes());
    bytes.extend(length.to_be_bytes());
    bytes.extend(data);
    bytes
}

/// Client flags, and GO for the default export, with its block sizes.
fn go_handshake() -> Vec<u8> {
    let mut bytes = 3u32.to_be_bytes().to_vec();
    bytes.extend(option(OPTION_GO, &[0, 0, 0, 0, 0, 1, 0, 3]));
    bytes
}

fn go_named(length: u32, name: &[u8]) -> Vec<u8> {
    let mut data = length.to_be_bytes().to_vec();
    data.extend(name);
    data.extend([0; 2]);
    option(OPTION_GO, &data)
}

fn request(command: u16, flags: u16, cookie: u64, offset: u64, length: u32) -> Vec<u8> {
    let mut bytes = 0x2560_9513u32.to_be_bytes().to_vec();
    bytes.extend(flags.to_be_bytes());
    bytes.extend(command.to_be_bytes());
    bytes.extend(cookie.to_be_bytes());
    bytes.extend(offset.to_be_bytes());
    bytes.extend(length.to_be_bytes());
    bytes
}

/// Somebody else writes, reads back and flushes within the time that a person would call prompt.
#[track_caller]
fn others_are_served(up: &Up) {
    let started = Instant::now();
    let mut other = Raw::attached(up);
    assert_eq!(other.ask(WRITE, 0, VOLUME - MIB, 4096, &[9; 4096]), 0);
    assert_eq!(other.ask(READ, 0, VOLUME - MIB, 4096, &[]), 0);
    assert_eq!(other.ask(FLUSH, 0, 0, 0, &[]), 0);
    assert!(started.elapsed() < Duration::from_secs(10), "it took {:?}", started.elapsed());
}

#[track_caller]
fn until(what: &str, mut reached: impl FnMut() -> bool) {
    let deadline = Instant::now() + PATIENCE;
    while !reached() {
        assert!(Instant::now() < deadline, "not reached: {what}");
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// What is wrong, command, flags, offset, length, payload, expected errno.
type WrongRequest<'a> = (&'a str, u16, u16, u64, u32, &'a [u8], u32);

#[test]
fn each_malformed_request_gets_its_errno_and_the_connection_lives() {
    let dir = tempfile::tempdir().expect("a directory");
    let up = Up::start(dir.path(), SMALL);
    let mut raw = Raw::attached(&up);
    let page = vec![1; 4096];
    let huge = vec![1; 33 << 20];
    #[rustfmt::skip]
    let table: &[WrongRequest] = &[
        ("a read off the sectors", READ, 0, 1, 512, &[], EINVAL),
        ("a read of part of a sector", READ, 0, 0, 100, &[], EINVAL),
        ("a write off the sectors", WRITE, 0, 100, 4096, &page, EINVAL),
        ("a write of part of a sector", WRITE, 0, 0, 100, &page[..100], EINVAL),
        ("a read over the end", READ, 0, VOLUME - 512, 1024, &[], EINVAL),
        ("a read far beyond the end", READ, 0, u64::MAX - 511, 512, &[], EINVAL),
        ("a read whose end wraps", READ, 0, u64::MAX - 511, 4096, &[], EINVAL),
        ("a write over the end", WRITE, 0, VOLUME - 512, 4096, &page, ENOSPC),
        ("a write at the end", WRITE, 0, VOLUME, 4096, &page, ENOSPC),
        ("a write whose end wraps", WRITE, 0, u64::MAX - 511, 4096, &page, ENOSPC),
        ("zeroes over the end", WRITE_ZEROES, 0, VOLUME - 4096, 8192, &[], ENOSPC),
        ("zeroes of 4 GiB over the end", WRITE_ZEROES, 0, 0, 0xffff_fe00, &[], ENOSPC),
        ("a trim over the end", TRIM, 0, 0, 0xffff_fe00, &[], EINVAL),
        ("a trim off the sectors", TRIM, 0, 7, 4096, &[], EINVAL),
        ("zeroes off the sectors", WRITE_ZEROES, 0, 7, 4096, &[], EINVAL),
        ("a cache hint over the end", CACHE, 0, VOLUME, 512, &[], EINVAL),
        ("a block status that was not negotiated", BLOCK_STATUS, 0, 0, 4096, &[], EINVAL),
        ("a flush of a range", FLUSH, 0, 4096, 4096, &[], EINVAL),
        ("an unknown command", 99, 0, 0, 512, &[], EINVAL),
        ("the largest command code", u16::MAX, 0, 0, 512, &[], EINVAL),
        ("an unknown flag", READ, 0x8000, 0, 512, &[], EINVAL),
        ("a flag of another command on a write", WRITE, 1 << 3, 0, 4096, &page, EINVAL),
        ("DF without structured replies", READ, 1 << 2, 0, 512, &[], EINVAL),
        ("a read beyond the largest payload", READ, 0, 0, 33 << 20, &[], EINVAL),
        ("a write beyond the largest payload", WRITE, 0, 0, 33 << 20, &huge, EINVAL),
        ("FUA on a read, which is tolerated", READ, 1, 0, 512, &[], 0),
        ("FUA on a trim", TRIM, 1, 0, 4096, &[], 0),
        ("FUA on a flush", FLUSH, 1, 0, 0, &[], 0),
        ("a read of nothing", READ, 0, 0, 0, &[], 0),
        ("a write of nothing", WRITE, 0, 0, 0, &[], 0),
        ("a trim of nothing", TRIM, 0, 0, 0, &[], 0),
        ("zeroes of nothing", WRITE_ZEROES, 0, 0, 0, &[], 0),
        ("nothing at the very end", READ, 0, VOLUME, 0, &[], 0),
        ("the whole volume as zeroes", WRITE_ZEROES, 0, 0, VOLUME as u32, &[], 0),
        ("a trim of the whole volume", TRIM, 0, 0, VOLUME as u32, &[], 0),
        ("the largest read", READ, 0, 0, 32 << 20, &[], 0),
        ("the largest write", WRITE, 0, 0, 32 << 20, &huge[..32 << 20], 0),
        ("an ordinary write", WRITE, 1, 4096, 4096, &page, 0),
    ];
    for &(what, command, flags, offset, length, payload, expected) in table {
        assert_eq!(raw.ask(command, flags, offset, length, payload), expected, "{what}");
    }
    others_are_served(&up);
    up.stop();
}

#[test]
fn a_client_library_without_its_own_checks_gets_errors_not_a_broken_connection() {
    let dir = tempfile::tempdir().expect("a directory");
    let up = Up::start(dir.path(), SMALL);
    // Structured replies and base:allocation are negotiated here, as by any ordinary client.
    let script = format!(
        r#"
import errno, nbd, sys
h = nbd.NBD()
h.set_strict_mode(0)
h.add_meta_context("base:allocation")
h.connect_uri("{uri}")
size = h.get_size()
assert h.get_structured_replies_negotiated()
def expect(wanted, what, call):
    try:
        call()
    except nbd.Error as error:
        got = error.errnum
    else:
        got = 0
    if got != wanted:
        sys.exit(f"{{what}}: {{errno.errorcode.get(got, got)}}, not {{errno.errorcode.get(wanted, wanted)}}")
EINVAL, ENOSPC, EOVERFLOW = errno.EINVAL, errno.ENOSPC, errno.EOVERFLOW
page = bytearray(4096)
extents = lambda *rest: 0
expect(EINVAL, "unaligned read", lambda: h.pread(512, 3))
expect(EINVAL, "read past the end", lambda: h.pread(4096, size - 512))
expect(EINVAL, "read far past the end", lambda: h.pread(512, 1 << 62))
expect(ENOSPC, "write past the end", lambda: h.pwrite(page, size - 512))
expect(EINVAL, "unaligned write", lambda: h.pwrite(page, 17))
expect(EINVAL, "unknown flag", lambda: h.pread(512, 0, 0x4000))
expect(EINVAL, "unknown flag on a write", lambda: h.pwrite(page, 0, 0x4000))
expect(EINVAL, "FAST_ZERO on a write", lambda: h.pwrite(page, 0, nbd.CMD_FLAG_FAST_ZERO))
expect(EINVAL, "too large a read", lambda: h.pread((32 << 20) + 512, 0))
expect(EOVERFLOW, "too large a read in one piece", lambda: h.pread((32 << 20) + 512, 0, nbd.CMD_FLAG_DF))
expect(0, "64 KiB in one piece", lambda: h.pread(64 << 10, 0, nbd.CMD_FLAG_DF))
expect(EINVAL, "too large a write", lambda: h.pwrite(bytearray((32 << 20) + 512), 0))
expect(ENOSPC, "zeroes past the end", lambda: h.zero((4 << 30) - 512, size - 512))
expect(EINVAL, "trim past the end", lambda: h.trim(1 << 20, size - 512))
expect(EINVAL, "cache past the end", lambda: h.cache(1 << 20, size - 512))
expect(EINVAL, "block status past the end", lambda: h.block_status(1 << 20, size - 512, extents))
expect(EINVAL, "block status of nothing", lambda: h.block_status(0, 0, extents))
expect(0, "block status of all", lambda: h.block_status(size, 0, extents))
expect(0, "trim of all", lambda: h.trim(size, 0))
expect(0, "zero of all", lambda: h.zero(size, 0))
page[:] = b"\x5a" * 4096
expect(0, "write", lambda: h.pwrite(page, 8192, nbd.CMD_FLAG_FUA))
assert h.pread(4096, 8192) == page
h.shutdown()
"#,
        uri = up.uri()
    );
    // The libnbd of Debian belongs to Debian's Python, whichever other comes first in PATH.
    run(Command::new("/usr/bin/python3").arg("-c").arg(script));
    up.stop();
}

#[test]
fn a_client_that_talks_nonsense_loses_its_connection_and_nothing_else() {
    let dir = tempfile::tempdir().expect("a directory");
    let up = Up::start(dir.path(), SMALL);
    let unknown_flags = 0x8000_0003u32.to_be_bytes();
    let mut wrong_option = 3u32.to_be_bytes().to_vec();
    wrong_option.extend([0x55; 16]);
    let mut giant_option = 3u32.to_be_bytes().to_vec();
    giant_option.extend(b"IHAVEOPT\x00\x00\x00\x07\xff\xff\xff\xff");
    let mut too_many_options = 3u32.to_be_bytes().to_vec();
    (0..2000).for_each(|_| too_many_options.extend(option(77, &[])));
    let http = b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n";
    let mut random = calpe_core::testing::Random::new(5);
    for nonsense in [&unknown_flags[..], &wrong_option, &giant_option, http] {
        let mut raw = Raw::greeted(&up);
        raw.say(nonsense);
        assert_eq!(raw.ended(), b"", "{nonsense:x?}");
    }
    for _ in 0..50 {
        let mut noise = vec![0; 4096];
        random.fill(&mut noise);
        let mut raw = Raw::greeted(&up);
        raw.say(&noise);
        raw.ended();
        // After an orderly beginning as well: no request has the magic of noise.
        let mut raw = Raw::attached(&up);
        raw.say(&noise);
        assert_eq!(raw.ended(), b"");
    }
    let mut raw = Raw::greeted(&up);
    // The end may come before all of it is said.
    let _ = raw.0.write_all(&too_many_options);
    raw.ended();
    // 4 GiB of payload are not drained for anybody.
    let mut raw = Raw::attached(&up);
    raw.say(&request(WRITE, 0, 1, 0, u32::MAX));
    raw.ended();
    others_are_served(&up);
    up.stop();
}

#[test]
fn options_that_are_wrong_are_refused_one_by_one_and_the_handshake_goes_on() {
    let dir = tempfile::tempdir().expect("a directory");
    let up = Up::start(dir.path(), SMALL);
    let mut raw = Raw::greeted(&up);
    raw.say(&3u32.to_be_bytes());
    let long = vec![b'x'; 4097];
    #[rustfmt::skip]
    let table: &[(&str, Vec<u8>, u32)] = &[
        ("an unknown option", option(4711, &[1, 2, 3]), ERR_UNSUP),
        ("an unknown option with much data", option(4711, &vec![0; 60_000]), ERR_UNSUP),
        ("an unknown export", go_named(6, b"nobody"), ERR_UNKNOWN),
        ("a name longer than its option", go_named(4000, b"x"), ERR_INVALID),
        ("a name of 4 GiB", go_named(u32::MAX, b"x"), ERR_TOO_BIG),
        ("a name of 4097 bytes", go_named(4097, &long), ERR_TOO_BIG),
        ("a name with a NUL", go_named(5, b"cal\0e"), ERR_INVALID),
        ("a name that is no text", go_named(4, b"\xff\xfe\xfd\xfc"), ERR_INVALID),
        ("GO without data", option(OPTION_GO, &[]), ERR_INVALID),
        ("more requests for information than are there", option(OPTION_GO, &[0, 0, 0, 0, 0xff, 0xff]), ERR_INVALID),
        ("LIST with data", option(3, b"x"), ERR_INVALID),
        ("structured replies with data", option(8, b"x"), ERR_INVALID),
        ("meta contexts, half said", option(10, &[0, 0, 0, 0, 0, 0, 0, 9]), ERR_INVALID),
    ];
    for (what, bytes, expected) in table {
        raw.say(bytes);
        let (_, kind) = raw.option_reply();
        let allowed = kind == *expected || kind == ERR_INVALID && *expected == ERR_TOO_BIG;
        assert!(allowed, "{what}: {kind:#x}, not {expected:#x}");
    }
    raw.say(&option(OPTION_GO, &[0; 6]));
    while raw.option_reply().1 != 1 {}
    assert_eq!(raw.ask(READ, 0, 0, 4096, &[]), 0);
    up.stop();
}

#[test]
fn clients_that_vanish_at_any_byte_cost_nothing_but_their_connection() {
    let dir = tempfile::tempdir().expect("a directory");
    let up = Up::start(dir.path(), SMALL);
    let mut conversation = go_handshake();
    let handshake = conversation.len();
    conversation.extend(request(WRITE, 0, 1, 0, 4096));
    conversation.extend([3; 4096]);
    conversation.extend(request(READ, 0, 2, 0, 65536));
    let early = 0..handshake + 40;
    let late = (handshake + 40..conversation.len()).step_by(331);
    for cut in early.chain(late) {
        let mut raw = Raw::connect(&up);
        raw.say(&conversation[..cut]);
        if cut % 2 == 0 {
            // One half closes first, as a client does that still listens.
            raw.0.shutdown(std::net::Shutdown::Write).expect("half closed");
            raw.ended();
        }
    }
    // In the middle of a large payload, and with much outstanding.
    for _ in 0..20 {
        let mut raw = Raw::attached(&up);
        raw.say(&request(WRITE, 0, 1, 0, 32 << 20));
        raw.say(&vec![4; 5 << 20]);
        let mut raw = Raw::attached(&up);
        (0..64).for_each(|cookie| raw.say(&request(READ, 0, cookie, cookie * MIB, 1 << 20)));
        (0..64).for_each(|cookie| raw.say(&request(FLUSH, 0, cookie, 0, 0)));
    }
    others_are_served(&up);
    until("all connections are given up", || open_sockets(&up) <= baseline_sockets());
    assert_eq!(up.status()["state"], "ONLINE");
    up.stop();
}

/// Sockets that the daemon has open.
fn open_sockets(up: &Up) -> usize {
    let links = fs::read_dir(format!("/proc/{}/fd", up.pid())).expect("the daemon's descriptors");
    links
        .flatten()
        .filter(|link| fs::read_link(link.path()).is_ok_and(|to| to.to_string_lossy().starts_with("socket:")))
        .count()
}

/// Listeners for clients and administrators, each twice, and an administrator who asks.
fn baseline_sockets() -> usize {
    8
}

/// Resident memory of the daemon in bytes.
fn resident(up: &Up) -> u64 {
    let status = fs::read_to_string(format!("/proc/{}/status", up.pid())).expect("the daemon's status");
    let line = status.lines().find(|line| line.starts_with("VmRSS:")).expect("VmRSS");
    line.split_whitespace().nth(1).expect("a number").parse::<u64>().expect("a number") * 1024
}

#[test]
fn a_client_that_never_reads_its_replies_is_held_back_and_others_are_not() {
    let dir = tempfile::tempdir().expect("a directory");
    let up = Up::start(dir.path(), SMALL);
    let mut writer = Raw::attached(&up);
    assert_eq!(writer.ask(WRITE, 0, 0, 32 << 20, &vec![5; 32 << 20]), 0);
    // Each asks for 8 GiB, and for many errors, which have no payload to be counted.
    let mut greedy: Vec<Raw> = (0..8).map(|_| Raw::attached(&up)).collect();
    for raw in &mut greedy {
        raw.0.set_nonblocking(true).expect("non-blocking");
        for cookie in 0..8192 {
            let bytes = request(READ, 0, cookie, (cookie % 32) * MIB, 1 << 20);
            // Held back: what it says stays in its socket.
            if raw.0.write(&bytes).is_err() {
                break;
            }
        }
    }
    let mut chatty: Vec<Raw> = (0..4).map(|_| Raw::attached(&up)).collect();
    for raw in &mut chatty {
        raw.0.set_nonblocking(true).expect("non-blocking");
        let batch: Vec<u8> = (0..1000).flat_map(|cookie| request(99, 0, cookie, 0, 0)).collect();
        for _ in 0..2000 {
            match raw.0.write(&batch) {
                Ok(_) => {}
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    std::thread::sleep(Duration::from_millis(1));
                }
                Err(error) => panic!("a client that only listens badly was thrown out: {error}"),
            }
        }
    }
    for _ in 0..5 {
        others_are_served(&up);
    }
    let memory = resident(&up);
    assert!(memory < 1 << 30, "{} MiB are resident", memory >> 20);
    drop((greedy, chatty));
    others_are_served(&up);
    up.stop();
}

#[test]
fn clients_that_stop_in_the_middle_of_a_payload_take_no_more_than_the_memory_and_no_time_of_others() {
    let dir = tempfile::tempdir().expect("a directory");
    let up = Up::start(dir.path(), SMALL);
    let mut stuck: Vec<Raw> = Vec::new();
    for _ in 0..24 {
        let mut raw = Raw::attached(&up);
        raw.say(&request(WRITE, 0, 1, 0, 32 << 20));
        // All but the last bytes; a server that does not take them is as good.
        raw.0.set_write_timeout(Some(Duration::from_millis(300))).expect("a timeout");
        let _ = raw.0.write_all(&vec![6; 31 << 20]);
        stuck.push(raw);
    }
    others_are_served(&up);
    let memory = resident(&up);
    assert!(memory < 512 * MIB, "{} MiB are resident", memory >> 20);
    // Who needs much memory gets it when those who keep it for nothing have been given up.
    let mut large = Raw::attached(&up);
    assert_eq!(large.ask(WRITE, 0, 0, 32 << 20, &vec![1; 32 << 20]), 0);
    others_are_served(&up);
    drop(stuck);
    up.stop();
}

#[test]
fn connections_beyond_the_limit_wait_and_those_that_never_come_to_the_point_take_no_place() {
    let dir = tempfile::tempdir().expect("a directory");
    let up = Up::start(dir.path(), SMALL);
    // Nobody of these says a word.
    let silent: Vec<Raw> = (0..150).map(|_| Raw::connect(&up)).collect();
    let started = Instant::now();
    let mut patient = Raw::greeted(&up);
    patient.say(&go_handshake());
    while patient.option_reply().1 != 1 {}
    assert_eq!(patient.ask(READ, 0, 0, 4096, &[]), 0);
    let waited = started.elapsed();
    assert!(waited < Duration::from_secs(5), "they kept another one waiting: {waited:?}");
    assert!(open_sockets(&up) < 100, "most of them are dropped already: {}", open_sockets(&up));
    drop(silent);
    // Attached clients beyond the limit are served as soon as others leave.
    let mut attached: Vec<Raw> = (0..99).map(|_| Raw::attached(&up)).collect();
    let mut late = Raw::attached(&up);
    late.say(&request(READ, 0, 7, 0, 4096));
    late.0.set_read_timeout(Some(Duration::from_millis(300))).expect("a timeout");
    assert!(late.0.read(&mut [0; 18]).is_err(), "the hundred and first was served");
    late.0.set_read_timeout(Some(PATIENCE)).expect("a timeout");
    for raw in &mut attached {
        assert_eq!(raw.ask(READ, 0, 0, 4096, &[]), 0);
    }
    attached.pop();
    assert_eq!(late.reply(7), 0);
    drop((attached, late, patient));
    others_are_served(&up);
    up.stop();
}

#[test]
fn a_clean_stop_waits_for_no_client_however_it_behaves() {
    let dir = tempfile::tempdir().expect("a directory");
    let up = Up::start(dir.path(), SMALL);
    let mut writer = Raw::attached(&up);
    assert_eq!(writer.ask(WRITE, 1, 0, 1 << 20, &vec![7; 1 << 20]), 0);
    let _silent = Raw::connect(&up);
    let _idle = Raw::attached(&up);
    let mut half = Raw::attached(&up);
    half.say(&request(WRITE, 0, 1, 0, 32 << 20));
    half.say(&[8; 4096]);
    let mut deaf = Raw::attached(&up);
    (0..64).for_each(|cookie| deaf.say(&request(READ, 0, cookie, 0, 1 << 20)));
    let started = Instant::now();
    up.stop();
    assert!(started.elapsed() < Duration::from_secs(15), "it took {:?}", started.elapsed());
    let up = Up::start(dir.path(), &[]);
    assert_eq!(up.status()["state"], "ONLINE");
    let mut reader = Raw::attached(&up);
    reader.say(&request(READ, 0, 9, 0, 4096));
    assert_eq!(reader.reply(9), 0);
    assert_eq!(reader.bytes::<4096>(), [7; 4096]);
    up.stop();
}

#[test]
fn the_control_socket_survives_nonsense_silence_and_crowds() {
    let dir = tempfile::tempdir().expect("a directory");
    let up = Up::start(dir.path(), SMALL);
    let socket = dir.path().join("data/control.sock");
    let connect = || UnixStream::connect(&socket).expect("connected");
    for nonsense in
        [&b"\n"[..], b"{}\n", b"{\"request\":\"format-everything\"}\n", b"\xff\xff\xff\n", b"[[[[[[\n"]
    {
        let mut stream = connect();
        stream.write_all(nonsense).expect("said");
        stream.set_read_timeout(Some(PATIENCE)).expect("a timeout");
        let mut answer = [0; 4096];
        let count = stream.read(&mut answer).expect("an answer, or the end");
        let answer = String::from_utf8_lossy(&answer[..count]).into_owned();
        assert!(count == 0 || answer.contains("error"), "{answer}");
    }
    // A line without an end is not kept for ever.
    let mut endless = connect();
    endless.set_write_timeout(Some(PATIENCE)).expect("a timeout");
    let said = (0..64).try_for_each(|_| endless.write_all(&vec![b'x'; 1 << 20]));
    assert!(said.is_err(), "64 MiB in one line were taken");
    let crowd: Vec<UnixStream> = (0..60).map(|_| connect()).collect();
    assert_eq!(up.status()["state"], "ONLINE");
    drop(crowd);
    assert_eq!(up.status()["state"], "ONLINE");
    up.stop();
}

#[test]
fn a_client_that_is_killed_under_load_leaves_the_array_healthy() {
    let dir = tempfile::tempdir().expect("a directory");
    let up = Up::start(dir.path(), SMALL);
    for round in 0..3 {
        let mut load = Command::new("fio")
            .args(["--name=load", "--ioengine=nbd", &format!("--uri={}", up.uri())])
            .args(["--rw=randrw", "--bsrange=4k-1m", "--iodepth=16", "--size=32M", "--time_based"])
            .arg("--runtime=30")
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .expect("fio starts");
        std::thread::sleep(Duration::from_millis(400 + 100 * round));
        load.kill().expect("killed");
        load.wait().expect("reaped");
        others_are_served(&up);
    }
    up.wait_quiet();
    assert_eq!(up.scrub(), (0, 0));
    up.stop();
}
