//! Remote devices against a server that does what a test tells it, down to the bytes.

mod windows;

use super::*;
use crate::member::{Device, DeviceKind, MemberIo, Ring, TimeLimits};
use calpe_core::block_io::{BufMut, Extent, Pool};
use calpe_core::units::ByteOffset;
use std::io::{self, Read, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::PathBuf;
use std::sync::atomic::AtomicUsize;
use std::thread::sleep;
use tempfile::TempDir;

const BYTES: usize = 8 << 20;
const OWNER: u32 = 3;
const ID: DeviceId = DeviceId(0);

const READ: u16 = 0;
const WRITE: u16 = 1;
const DISCONNECT: u16 = 2;
const FLUSH: u16 = 3;
const ZEROES: u16 = 6;

/// HAS_FLAGS, FLUSH, FUA, TRIM, WRITE_ZEROES.
const FLAGS: u16 = 0x6d;
const FLAG_FLUSH: u16 = 4;
const FLAG_FUA: u16 = 8;
const FLAG_READ_ONLY: u16 = 2;
const FLAG_MULTI_CONN: u16 = 0x100;

/// What a server does with a request.
#[derive(Clone, Debug)]
enum Act {
    Serve,
    /// Executes it and never says so.
    Silence,
    /// Serves nothing of it and ends all connections.
    HangUp,
    Refuse(u32),
    /// Sends this in place of a reply.
    Say(Vec<u8>),
    /// Sends nothing and reads nothing for this long.
    Sleep(Duration),
}

/// A request as it came.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Seen {
    connection: usize,
    command: u16,
    fua: bool,
    offset: u64,
    length: u32,
}

type Script = Box<dyn FnMut(&Seen) -> Act + Send>;

struct Server {
    dir: TempDir,
    state: Arc<State>,
}

struct State {
    disk: Mutex<Vec<u8>>,
    seen: Mutex<Vec<Seen>>,
    script: Mutex<Script>,
    flags: Mutex<u16>,
    blocks: (u32, u32),
    connections: AtomicUsize,
    open: Mutex<Vec<UnixStream>>,
    /// New connections are closed at once.
    refusing: Mutex<bool>,
}

impl Server {
    fn new(flags: u16) -> Server {
        Server::with_blocks(flags, (1, 1 << 25))
    }

    fn with_blocks(flags: u16, blocks: (u32, u32)) -> Server {
        let dir = tempfile::tempdir().unwrap();
        let listener = UnixListener::bind(dir.path().join("s")).unwrap();
        let state = Arc::new(State {
            disk: Mutex::new(vec![0; BYTES]),
            seen: Mutex::default(),
            script: Mutex::new(Box::new(|_| Act::Serve)),
            flags: Mutex::new(flags),
            blocks,
            connections: AtomicUsize::new(0),
            open: Mutex::default(),
            refusing: Mutex::new(false),
        });
        let shared = Arc::clone(&state);
        std::thread::spawn(move || {
            for stream in listener.incoming().flatten() {
                if *shared.refusing.lock().unwrap() {
                    continue;
                }
                let number = shared.connections.fetch_add(1, Ordering::Relaxed);
                shared.open.lock().unwrap().push(stream.try_clone().unwrap());
                let state = Arc::clone(&shared);
                std::thread::spawn(move || state.serve(stream, number));
            }
        });
        Server { dir, state }
    }

    fn uri(&self) -> PathBuf {
        format!("nbd+unix:///?socket={}", self.dir.path().join("s").display()).into()
    }

    fn script(&self, script: impl FnMut(&Seen) -> Act + Send + 'static) {
        *self.state.script.lock().unwrap() = Box::new(script);
    }

    fn seen(&self, command: u16) -> Vec<Seen> {
        self.state.seen.lock().unwrap().iter().copied().filter(|seen| seen.command == command).collect()
    }

    fn connections(&self) -> usize {
        self.state.connections.load(Ordering::Relaxed)
    }

    fn refuse_connections(&self, refuse: bool) {
        *self.state.refusing.lock().unwrap() = refuse;
    }

    fn hang_up(&self) {
        self.state.hang_up();
    }
}

impl State {
    fn hang_up(&self) {
        for stream in self.open.lock().unwrap().drain(..) {
            // It may be closed already.
            let _ = stream.shutdown(std::net::Shutdown::Both);
        }
    }

    fn serve(&self, mut stream: UnixStream, connection: usize) -> io::Result<()> {
        let flags = *self.flags.lock().unwrap();
        stream.write_all(b"NBDMAGICIHAVEOPT\0\x03")?;
        stream.read_exact(&mut [0; 4])?;
        loop {
            let mut header = [0; 16];
            stream.read_exact(&mut header)?;
            let option = u32::from_be_bytes(header[8..12].try_into().unwrap());
            let length = u32::from_be_bytes(header[12..].try_into().unwrap());
            stream.read_exact(&mut vec![0; length as usize])?;
            let mut reply = |kind: u32, data: &[u8]| {
                let magic = 0x0003_e889_0455_65a9_u64.to_be_bytes();
                let length = (data.len() as u32).to_be_bytes();
                stream.write_all(
                    &[&magic[..], &option.to_be_bytes(), &kind.to_be_bytes(), &length, data].concat(),
                )
            };
            if option != 7 {
                reply(0x8000_0001, &[])?;
                continue;
            }
            reply(3, &[&[0, 0][..], &(BYTES as u64).to_be_bytes(), &flags.to_be_bytes()].concat())?;
            let (min, max) = self.blocks;
            let sizes = [min, min.max(4096), max].map(u32::to_be_bytes).concat();
            reply(3, &[&[0, 3][..], &sizes].concat())?;
            reply(1, &[])?;
            break;
        }
        loop {
            let mut header = [0; 28];
            stream.read_exact(&mut header)?;
            let u16_at = |at: usize| u16::from_be_bytes(header[at..at + 2].try_into().unwrap());
            let seen = Seen {
                connection,
                command: u16_at(6),
                fua: u16_at(4) & 1 != 0,
                offset: u64::from_be_bytes(header[16..24].try_into().unwrap()),
                length: u32::from_be_bytes(header[24..].try_into().unwrap()),
            };
            let mut payload = vec![0; if seen.command == WRITE { seen.length as usize } else { 0 }];
            stream.read_exact(&mut payload)?;
            self.seen.lock().unwrap().push(seen);
            if seen.command == DISCONNECT {
                return Ok(());
            }
            let act = (self.script.lock().unwrap())(&seen);
            let mut answer = [&0x6744_6698_u32.to_be_bytes()[..], &[0; 4], &header[8..16]].concat();
            match act {
                Act::HangUp => {
                    self.hang_up();
                    return Ok(());
                }
                Act::Refuse(errno) => {
                    answer[4..8].copy_from_slice(&errno.to_be_bytes());
                    stream.write_all(&answer)?;
                    continue;
                }
                Act::Say(bytes) => {
                    stream.write_all(&bytes)?;
                    continue;
                }
                Act::Sleep(time) => sleep(time),
                Act::Serve | Act::Silence => {}
            }
            let range = seen.offset as usize..(seen.offset + u64::from(seen.length)) as usize;
            let mut disk = self.disk.lock().unwrap();
            match seen.command {
                READ => answer.extend_from_slice(&disk[range]),
                WRITE => disk[range].copy_from_slice(&payload),
                ZEROES => disk[range].fill(0),
                _ => {}
            }
            drop(disk);
            if !matches!(act, Act::Silence) {
                stream.write_all(&answer)?;
            }
        }
    }
}

fn limits(request_ms: u64, grace_ms: u64) -> RemoteLimits {
    let [request, grace] = [request_ms, grace_ms].map(Duration::from_millis);
    RemoteLimits { request, grace, connect: Duration::from_secs(2) }
}

/// An engine with one remote device, as a reactor has it.
struct Bench {
    server: Server,
    ring: Ring,
    pool: Pool,
    members: MemberIo,
}

impl Bench {
    fn new(server: Server, limits: RemoteLimits) -> Bench {
        let device = Device::open(&server.uri(), Access::Exclusive).unwrap();
        device.set_limits(TimeLimits { remote: limits, ..TimeLimits::default() });
        device.set_remote_witness(Arc::new(|read: ReadAt<'_>| read(0, &mut [0; 4096])));
        let (mut ring, pool) = (Ring::new().unwrap(), Pool::new(32 << 20).unwrap());
        let mut members = MemberIo::new(1, &pool, 1);
        members.add(&mut ring, ID, OWNER, device);
        Bench { server, ring, pool, members }
    }

    fn submit(&mut self, token: u64, op: IoOp) {
        self.members.submit(&mut self.ring, OWNER, ID, IoToken(token), op);
    }

    /// The next outcome; the ring wakes for it.
    fn next(&mut self) -> (u64, Result<IoValue, IoFault>) {
        let deadline = Instant::now() + Duration::from_secs(20);
        let mut events = Vec::new();
        loop {
            if let Some(done) = self.members.next_finished() {
                assert_eq!((done.owner, done.device), (OWNER, ID));
                return (done.completion.token.0, done.completion.result);
            }
            assert!(Instant::now() < deadline, "no outcome");
            let wait = if self.members.has_finished() { None } else { Some(Duration::from_secs(30)) };
            self.ring.enter(wait, &mut events).unwrap();
            for event in events.drain(..) {
                self.members.complete(&mut self.ring, event.user_data, event.result);
            }
        }
    }

    fn run(&mut self, op: IoOp) -> Result<IoValue, IoFault> {
        self.submit(0, op);
        self.next().1
    }

    fn filled(&self, len: usize, byte: u8) -> BufMut {
        let mut buf = self.pool.alloc(len);
        buf.fill(byte);
        buf
    }

    fn write_op(&self, offset: u64, len: usize, byte: u8, fua: bool) -> IoOp {
        IoOp::Write { offset: ByteOffset(offset), buf: self.filled(len, byte).freeze(), fua }
    }

    fn read_op(&self, offset: u64, len: usize) -> IoOp {
        IoOp::Read { offset: ByteOffset(offset), buf: self.filled(len, 0xee) }
    }

    #[track_caller]
    fn assert_read(&mut self, offset: u64, len: usize, byte: u8) {
        match self.run(self.read_op(offset, len)).unwrap() {
            IoValue::Data(buf) => assert!(buf.len() == len && buf.iter().all(|&b| b == byte)),
            other => panic!("{other:?}"),
        }
    }

    /// Until the device is given up; the errno that it is given up with.
    fn given_up(&mut self) -> i32 {
        let deadline = Instant::now() + Duration::from_secs(20);
        loop {
            if let Some((owner, id, fault)) = self.members.vanished().pop() {
                assert_eq!((owner, id, fault.kind), (OWNER, ID, IoFaultKind::Gone));
                return fault.errno;
            }
            assert!(Instant::now() < deadline, "the device was not given up");
            sleep(Duration::from_millis(5));
        }
    }

    fn reason(&self) -> String {
        lost(&self.server.uri()).expect("it was lost").reason
    }
}

fn gone(result: Result<IoValue, IoFault>) -> bool {
    matches!(result, Err(IoFault { kind: IoFaultKind::Gone, .. }))
}

#[test]
fn what_is_written_reads_back_and_large_operations_are_cut() {
    let server = Server::with_blocks(FLAGS, (512, 1 << 20));
    let mut bench = Bench::new(server, limits(5000, 1000));
    let facts = bench.members.device(ID).unwrap().facts();
    assert_eq!((facts.kind, facts.bytes, facts.sector), (DeviceKind::Remote, BYTES as u64, 512));
    bench.run(bench.write_op(512, 3 << 20, 7, false)).unwrap();
    bench.run(IoOp::Flush).unwrap();
    bench.assert_read(512, 3 << 20, 7);
    let lengths = |seen: Vec<Seen>| seen.iter().map(|s| s.length).collect::<Vec<_>>();
    assert_eq!(lengths(bench.server.seen(WRITE)), [1 << 20; 3]);
    assert_eq!(lengths(bench.server.seen(READ)), [1 << 20; 3]);
    bench.run(IoOp::Zero { offset: ByteOffset(512), len: 4096, may_unmap: true }).unwrap();
    bench.assert_read(512, 4096, 0);
    let extents = bench.run(IoOp::Extents { offset: ByteOffset(0), len: 8192 }).unwrap();
    let all_data = [Extent { len: 8192, hole: false }];
    assert!(matches!(extents, IoValue::Extents(found) if found == all_data), "no status: all is data");
}

#[test]
fn many_operations_at_once_all_end_where_they_belong() {
    let mut bench = Bench::new(Server::new(FLAGS | FLAG_MULTI_CONN), limits(20_000, 1000));
    for turn in 0..4u8 {
        for token in 0..500 {
            bench.submit(token, bench.write_op(token * 16384, 16384, turn ^ token as u8, token % 7 == 0));
        }
        (0..500).for_each(|_| assert!(bench.next().1.is_ok()));
        for token in 0..500 {
            bench.submit(token, bench.read_op(token * 16384, 16384));
        }
        let mut ended = vec![false; 500];
        for _ in 0..500 {
            let (token, result) = bench.next();
            let Ok(IoValue::Data(buf)) = result else { panic!("{result:?}") };
            assert!(buf.iter().all(|&b| b == turn ^ token as u8), "{token}");
            assert!(!std::mem::replace(&mut ended[token as usize], true), "ended twice");
        }
    }
    assert_eq!((bench.members.in_flight(), bench.server.connections()), (0, 4));
    let used: std::collections::BTreeSet<_> = bench.server.seen(WRITE).iter().map(|s| s.connection).collect();
    assert_eq!(used.len(), 4, "several connections are used");
}

#[test]
fn without_multi_conn_there_is_one_connection() {
    let mut bench = Bench::new(Server::new(FLAGS), limits(5000, 1000));
    (0..50).for_each(|n| bench.submit(n, bench.write_op(n * 4096, 4096, 1, false)));
    (0..50).for_each(|_| assert!(bench.next().1.is_ok()));
    assert_eq!(bench.server.connections(), 1);
}

#[test]
fn a_durable_write_uses_fua_or_is_flushed_before_it_ends() {
    let mut bench = Bench::new(Server::new(FLAGS), limits(5000, 1000));
    bench.run(bench.write_op(0, 4096, 1, true)).unwrap();
    assert!(bench.server.seen(WRITE)[0].fua && bench.server.seen(FLUSH).is_empty());
    let mut bench = Bench::new(Server::with_blocks(FLAGS & !FLAG_FUA, (1, 4096)), limits(5000, 1000));
    bench.run(bench.write_op(0, 8192, 1, true)).unwrap();
    let order: Vec<_> = bench.server.state.seen.lock().unwrap().iter().map(|s| (s.command, s.fua)).collect();
    assert_eq!(order, [(WRITE, false), (WRITE, false), (FLUSH, false)]);
}

#[test]
fn servers_that_cannot_hold_a_member_are_refused_with_the_reason() {
    for (flags, blocks, why) in [
        (FLAGS & !FLAG_FLUSH, (1, 1 << 25), "no FLUSH"),
        (FLAGS | FLAG_READ_ONLY, (1, 1 << 25), "read-only"),
        (FLAGS, (8192, 1 << 25), "blocks of 8192 bytes"),
    ] {
        let server = Server::with_blocks(flags, blocks);
        let error = Device::open(&server.uri(), Access::Exclusive).unwrap_err().to_string();
        assert!(error.contains(why) && error.starts_with("nbd+unix:///"), "{error}");
    }
    let nobody =
        Device::open(Path::new("nbd+unix:///?socket=/nonexistent/s"), Access::Exclusive).unwrap_err();
    assert!(nobody.to_string().contains("cannot connect"), "{nobody}");
    // Opening for reading needs neither.
    let server = Server::new(FLAGS & !FLAG_FLUSH | FLAG_READ_ONLY);
    let device = Device::open(&server.uri(), Access::ReadOnly).unwrap();
    device.read_at(100, &mut [0; 1000]).unwrap();
    assert!(matches!(device.check_writable(), Err(DeviceError::ReadOnly { what: "the export", .. })));
    assert!(device.write_at(0, &[0; 4096]).is_err() && server.seen(WRITE).is_empty());
}

#[test]
fn one_export_is_a_member_once() {
    let server = Server::new(FLAGS);
    let first = Device::open(&server.uri(), Access::Exclusive).unwrap();
    let again: PathBuf = server.uri().display().to_string().replace("///", "//").into();
    assert!(first.is_at(&again), "another spelling of the same URI");
    let error = Device::open(&again, Access::Exclusive).unwrap_err();
    assert!(matches!(error, DeviceError::Locked { .. }), "{error}");
    assert!(Device::open(&server.uri(), Access::ReadOnly).unwrap().same_device(&first));
    drop(first);
    Device::open(&server.uri(), Access::Exclusive).unwrap();
}

#[test]
fn plain_access_reads_writes_and_discards() {
    let server = Server::new(FLAGS);
    let device = Device::open(&server.uri(), Access::Exclusive).unwrap();
    device.write_at(4096, &[9; 8192]).unwrap();
    device.flush().unwrap();
    let mut back = vec![0; 5000];
    device.read_at(5000, &mut back).unwrap();
    assert_eq!(back, [9; 5000]);
    assert!(device.write_at(100, &[0; 512]).is_err() && device.read_at(BYTES as u64, &mut [0; 1]).is_err());
    assert!(
        !device.discard_all().unwrap(),
        "a server that does not promise to be quick is not asked to zero"
    );
    device.preallocate(0, 4096).unwrap();
    assert_eq!(device.extents(0, 8192), [Extent { len: 8192, hole: false }]);
}

#[test]
fn errors_of_a_server_mean_what_those_of_a_disk_do() {
    for (errno, kind) in [
        (5, IoFaultKind::Medium),
        (12, IoFaultKind::Shortage),
        (28, IoFaultKind::NoSpace),
        (22, IoFaultKind::Medium),
    ] {
        let mut bench = Bench::new(Server::new(FLAGS), limits(5000, 1000));
        bench.server.script(move |_| Act::Refuse(errno));
        assert_eq!(bench.run(bench.write_op(0, 4096, 1, false)).unwrap_err().kind, kind, "{errno}");
        bench.server.script(|_| Act::Serve);
        bench.assert_read(0, 4096, 0);
    }
    let mut bench = Bench::new(Server::new(FLAGS), limits(5000, 1000));
    bench.server.script(|_| Act::Refuse(22));
    let zero = IoOp::Zero { offset: ByteOffset(0), len: 4096, may_unmap: true };
    assert_eq!(bench.run(zero).unwrap_err().kind, IoFaultKind::Unsupported);
}

#[test]
fn an_idle_connection_that_breaks_is_made_again_unnoticed() {
    let mut bench = Bench::new(Server::new(FLAGS), limits(5000, 2000));
    bench.run(bench.write_op(0, 4096, 5, false)).unwrap();
    bench.run(IoOp::Flush).unwrap();
    for _ in 0..3 {
        bench.server.hang_up();
        bench.assert_read(0, 4096, 5);
    }
    bench.run(bench.write_op(0, 4096, 6, true)).unwrap();
    assert_eq!(bench.server.connections(), 4);
}

#[test]
fn reads_wait_for_a_new_connection_and_are_sent_again() {
    let mut bench = Bench::new(Server::new(FLAGS), limits(10_000, 5000));
    bench.run(bench.write_op(0, 65536, 5, true)).unwrap();
    let mut first = true;
    let state = Arc::clone(&bench.server.state);
    bench.server.script(move |seen| {
        if seen.command == READ && seen.length == 65536 && std::mem::take(&mut first) {
            *state.refusing.lock().unwrap() = true;
            return Act::HangUp;
        }
        Act::Serve
    });
    let begun = Instant::now();
    bench.submit(1, bench.read_op(0, 65536));
    sleep(Duration::from_millis(300));
    // Operations that come while there is no connection wait as well, writes too.
    bench.submit(2, bench.write_op(65536, 4096, 8, false));
    bench.server.refuse_connections(false);
    for _ in 0..2 {
        let (token, result) = bench.next();
        assert!(result.is_ok(), "{token}: {result:?}");
    }
    assert!(begun.elapsed() >= Duration::from_millis(300));
    assert_eq!(bench.server.seen(READ).iter().filter(|seen| seen.length == 65536).count(), 2);
    bench.assert_read(65536, 4096, 8);
}

#[test]
fn a_write_without_an_answer_is_never_sent_again_and_the_export_is_kept_away() {
    let begun = Instant::now();
    let mut bench = Bench::new(Server::new(FLAGS), limits(10_000, 5000));
    bench.server.script(|seen| if seen.command == WRITE { Act::HangUp } else { Act::Serve });
    assert!(gone(bench.run(bench.write_op(0, 4096, 5, false))));
    assert_eq!(bench.given_up(), libc::ENOTCONN);
    assert!(bench.reason().contains("1 writes unanswered"), "{}", bench.reason());
    assert!(gone(bench.run(bench.read_op(0, 4096))), "given up for good");
    assert_eq!(bench.server.seen(WRITE).len(), 1);
    bench.members.release(ID);
    let error = Device::open(&bench.server.uri(), Access::Exclusive).unwrap_err().to_string();
    assert!(error.contains("may still land: try again in"), "{error}");
    forget_lost(&bench.server.uri(), begun);
    assert!(lost(&bench.server.uri()).is_some(), "that was lost before");
    forget_lost(&bench.server.uri(), Instant::now());
    assert!(lost(&bench.server.uri()).is_none(), "it shall not come back by itself");
    let error = Device::open(&bench.server.uri(), Access::Exclusive);
    assert!(error.is_err(), "nor by hand before the time is over");
    Device::open(&bench.server.uri(), Access::ReadOnly).unwrap();
}

#[test]
fn a_device_that_its_array_has_let_go_does_not_come_back_for_a_connection_lost_later() {
    for is_released in [false, true] {
        let mut bench = Bench::new(Server::new(FLAGS), limits(300, 300));
        bench.server.script(|seen| if seen.command == WRITE { Act::Silence } else { Act::Serve });
        bench.submit(0, bench.write_op(0, 4096, 5, false));
        if is_released {
            bench.members.release(ID);
        }
        assert!(gone(bench.next().1));
        assert_eq!(lost(&bench.server.uri()).is_some(), !is_released);
        let error = Device::open(&bench.server.uri(), Access::Exclusive).unwrap_err().to_string();
        assert!(!is_released || error.contains("may still land"), "{error}");
    }
}

#[test]
fn what_was_lost_while_the_next_one_waited_to_open_is_what_was_lost_before() {
    let mut bench = Bench::new(Server::new(FLAGS), limits(10_000, 300));
    // Not flushed: a lost connection is the end.
    bench.run(bench.write_op(0, 4096, 5, false)).unwrap();
    let uri = bench.server.uri();
    let next = std::thread::spawn(move || Device::open(&uri, Access::Exclusive).map(|device| device.since()));
    sleep(Duration::from_millis(50));
    bench.server.hang_up();
    assert_eq!(bench.given_up(), libc::ENOTCONN);
    assert!(lost(&bench.server.uri()).is_some());
    bench.members.release(ID);
    let since = next.join().unwrap().unwrap();
    forget_lost(&bench.server.uri(), since);
    assert!(lost(&bench.server.uri()).is_none());
}

#[test]
fn a_write_that_is_answered_after_the_connection_is_lost_counts() {
    let mut bench = Bench::new(Server::new(FLAGS | FLAG_MULTI_CONN), limits(10_000, 5000));
    // Durable, so that nothing is unflushed; the answer comes on one connection after another has
    // broken.
    let state = Arc::clone(&bench.server.state);
    bench.server.script(move |seen| {
        if seen.command == WRITE {
            let other = (0..4).find(|n| *n != seen.connection).unwrap();
            state.open.lock().unwrap()[other].shutdown(std::net::Shutdown::Both).unwrap();
            return Act::Sleep(Duration::from_millis(200));
        }
        Act::Serve
    });
    bench.run(bench.write_op(0, 4096, 5, true)).unwrap();
    bench.assert_read(0, 4096, 5);
    assert!(bench.members.vanished().is_empty());
}

#[test]
fn writes_that_a_lost_server_may_have_forgotten_are_not_glossed_over() {
    let mut bench = Bench::new(Server::new(FLAGS), limits(10_000, 5000));
    bench.run(bench.write_op(0, 4096, 5, false)).unwrap();
    bench.server.hang_up();
    assert_eq!(bench.given_up(), libc::ENOTCONN);
    assert!(bench.reason().contains("not yet flushed"), "{}", bench.reason());
    // They were answered, so nothing can land late.
    bench.members.release(ID);
    Device::open(&bench.server.uri(), Access::Exclusive).unwrap();
}

#[test]
fn a_server_that_ends_in_order_is_waited_for() {
    let mut bench = Bench::new(Server::new(FLAGS), limits(10_000, 5000));
    let mut refused = 0;
    bench.server.script(move |_| {
        refused += 1;
        if refused <= 2 { Act::Refuse(108) } else { Act::Serve }
    });
    bench.submit(1, bench.write_op(0, 4096, 5, true));
    sleep(Duration::from_millis(100));
    bench.server.hang_up();
    assert!(bench.next().1.is_ok());
    bench.assert_read(0, 4096, 5);
}

#[test]
fn a_server_that_does_not_come_back_costs_the_member_after_the_grace_time() {
    let mut bench = Bench::new(Server::new(FLAGS), limits(20_000, 400));
    bench.server.refuse_connections(true);
    bench.server.hang_up();
    let begun = Instant::now();
    bench.submit(1, bench.read_op(0, 4096));
    assert!(gone(bench.next().1));
    assert!(begun.elapsed() < Duration::from_secs(3), "{:?}", begun.elapsed());
    assert!(bench.reason().contains("not reached again"), "{}", bench.reason());
    assert!(!lost(&bench.server.uri()).expect("it was lost").is_refused, "nobody was there");
}

#[test]
fn a_server_that_refuses_new_connections_is_told_from_one_that_is_away() {
    let mut bench = Bench::new(Server::new(FLAGS), limits(20_000, 400));
    let witness = |_: ReadAt<'_>| Err(RemoteError::Tls("the peer refused the connection".into()));
    bench.members.device(ID).unwrap().set_remote_witness(Arc::new(witness));
    sleep(Duration::from_millis(50));
    bench.server.hang_up();
    assert_eq!(bench.given_up(), libc::ENOTCONN);
    let lost = lost(&bench.server.uri()).expect("it was lost");
    assert!(lost.is_refused && lost.reason.contains("refused the connection"), "{lost:?}");
}

#[test]
fn a_server_that_never_answers_costs_the_member_after_the_request_limit() {
    for act in [Act::Silence, Act::Sleep(Duration::from_secs(5))] {
        let mut bench = Bench::new(Server::new(FLAGS), limits(300, 100));
        bench.server.script(move |_| act.clone());
        // Far more than sockets hold: the rest waits here, and no longer than the limit.
        let begun = Instant::now();
        (0..64).for_each(|n| bench.submit(n, bench.write_op((n % 8) << 20, 1 << 20, 1, false)));
        (0..64).for_each(|_| assert!(gone(bench.next().1)));
        assert!(begun.elapsed() < Duration::from_secs(3), "{:?}", begun.elapsed());
        assert_eq!(bench.given_up(), libc::ETIMEDOUT);
    }
}

#[test]
fn what_no_server_may_send_costs_the_member_and_nothing_else() {
    let unknown = [&0x6744_6698_u32.to_be_bytes()[..], &[0; 4], &[0x77; 8]].concat();
    let chunk = [&0x668e_33ef_u32.to_be_bytes()[..], &[0; 16]].concat();
    for said in [vec![0xff; 1 << 20], unknown, chunk, b"NBDMAGIC".repeat(1000)] {
        let mut bench = Bench::new(Server::new(FLAGS), limits(5000, 500));
        bench.server.script(move |_| Act::Say(said.clone()));
        assert!(gone(bench.run(bench.write_op(0, 4096, 1, false))));
        assert!(bench.reason().contains("broke the protocol"), "{}", bench.reason());
    }
}

#[test]
fn a_reply_that_stops_in_the_middle_is_not_waited_for_longer_than_a_request() {
    for keep in [3, 16, 20, 1000] {
        let mut bench = Bench::new(Server::new(FLAGS), limits(400, 200));
        bench.server.script(move |seen| {
            // The cookie of the first request: generation 1, slot 0.
            let head = [&0x6744_6698_u32.to_be_bytes()[..], &[0; 4], &(1u64 << 32).to_be_bytes()].concat();
            let whole = [head, vec![1; seen.length as usize]].concat();
            Act::Say(whole[..keep].to_vec())
        });
        let begun = Instant::now();
        assert!(gone(bench.run(bench.read_op(0, 4096))), "{keep}");
        assert!(begun.elapsed() < Duration::from_secs(3), "{:?}", begun.elapsed());
    }
}

#[test]
fn replies_that_nobody_asked_for_end_an_idle_member() {
    let mut bench = Bench::new(Server::new(FLAGS), limits(5000, 500));
    let mut stream = bench.server.state.open.lock().unwrap()[0].try_clone().unwrap();
    // It ends while this is being sent.
    let _ = stream.write_all(&[0x67; 4 << 20]);
    bench.given_up();
    assert!(bench.reason().contains("broke the protocol"), "{}", bench.reason());
}

#[test]
fn another_export_behind_the_same_uri_is_not_gone_on_with() {
    for (flags, why) in [
        (FLAGS & !FLAG_FUA, "its FUA was 1 and is 0"),
        (FLAGS | FLAG_READ_ONLY, "its read-only flag was 0 and is 1"),
    ] {
        let mut bench = Bench::new(Server::new(FLAGS), limits(5000, 2000));
        *bench.server.state.flags.lock().unwrap() = flags;
        bench.server.hang_up();
        assert_eq!(bench.given_up(), libc::ESTALE);
        assert!(bench.reason().contains(why), "{}", bench.reason());
    }
    let mut bench = Bench::new(Server::new(FLAGS), limits(5000, 2000));
    let witness = |_: ReadAt<'_>| Err(RemoteError::Changed("it is somebody else's".into()));
    bench.members.device(ID).unwrap().set_remote_witness(Arc::new(witness));
    sleep(Duration::from_millis(50));
    bench.server.hang_up();
    assert_eq!(bench.given_up(), libc::ESTALE);
    assert!(bench.reason().contains("somebody else's"), "{}", bench.reason());
}

#[test]
fn closing_says_goodbye_and_forgets_nothing_that_was_asked() {
    let mut bench = Bench::new(Server::new(FLAGS), limits(5000, 1000));
    bench.submit(1, bench.write_op(0, 4096, 5, false));
    bench.members.release(ID);
    assert!(bench.next().1.is_ok(), "it is closed when nothing is in flight any more");
    let deadline = Instant::now() + Duration::from_secs(10);
    while bench.server.seen(DISCONNECT).is_empty() {
        assert!(Instant::now() < deadline);
        sleep(Duration::from_millis(5));
    }
}

#[test]
fn what_a_lost_connection_said_of_its_end_does_not_end_the_next_one() {
    let device = Device::open(&Server::new(FLAGS).uri(), Access::ReadOnly).unwrap();
    let export = device.remote().unwrap().export();
    let (mut operations, pool) = (operations::Operations::default(), Pool::new(1 << 20).unwrap());
    let (reply, _answer) = sync_channel(1);
    let op = IoOp::Read { offset: ByteOffset(0), buf: pool.alloc(4096) };
    operations.add(Submission { op, to: To::Caller(reply), fast: false }, export, Instant::now());
    let (part, _) = operations.next_part().unwrap();
    let stopping =
        calpe_core::nbd::Failure { errno: calpe_core::nbd::Errno::Shutdown, message: String::new() };
    operations.done(&part, Err(stopping));
    // Nobody asked before the connection was lost for another reason.
    operations.send_again(Vec::new());
    assert!(operations.has_waiting() && !operations.server_stops());
}

#[test]
fn a_large_range_is_zeroed_fast_or_not_at_all() {
    let export = RemoteExport {
        size: 1 << 40,
        block_min: 512,
        block_max: 1 << 25,
        write_zeroes: true,
        fast_zero: true,
        ..RemoteExport::default()
    };
    let mut operations = operations::Operations::default();
    let add = |operations: &mut operations::Operations, at: u64, len: u64, fast: bool| {
        let op = IoOp::Zero { offset: ByteOffset(at), len, may_unmap: true };
        operations.add(Submission { op, to: To::Caller(sync_channel(1).0), fast }, &export, Instant::now());
    };
    add(&mut operations, 0, 4096, false);
    add(&mut operations, 1 << 20, 1 << 30, true);
    let parts: Vec<_> = std::iter::from_fn(|| operations.next_part()).map(|(part, _)| part.request).collect();
    assert!(parts.len() > 2);
    assert!(parts.iter().all(|part| part.fast_zero == (part.offset > 0)), "{parts:?}");
}

#[test]
fn settings_that_come_among_requests_are_not_lost() {
    let mut bench = Bench::new(Server::new(FLAGS), limits(20_000, 5000));
    let witnessed = Arc::new(AtomicUsize::new(0));
    for round in 1..=20 {
        let seen = Arc::clone(&witnessed);
        (0..8).for_each(|n| bench.submit(n, bench.read_op(0, 4096)));
        bench.members.device(ID).unwrap().set_remote_witness(Arc::new(move |_: ReadAt<'_>| {
            seen.store(round, Ordering::SeqCst);
            Ok(())
        }));
        (0..8).for_each(|_| assert!(bench.next().1.is_ok()));
        bench.server.hang_up();
        bench.assert_read(0, 4096, 0);
        assert_eq!(witnessed.load(Ordering::SeqCst), round, "an older one was asked");
    }
}
