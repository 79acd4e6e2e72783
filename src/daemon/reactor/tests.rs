//! The reactor with real sockets and files, and the simplest volume there is: one device, passed through.

use super::*;
use crate::daemon::events::EventLog;
use crate::member::{Access, Device};
use calpe_core::block_io::{DeviceId, IoOp, IoToken, IoValue, Pool};
use calpe_core::format::{ChecksumKind, Geometry, Lanes, MemberSet, MemberState};
use calpe_core::units::{ByteOffset, MemberIndex, Timestamp};
use calpe_core::volume::{
    AdminOutcome, AdminRefusal, AdminRequest, ArrayAction, ArrayState, ClientError, ClientReply,
    ClientRequest, LaneCut, LogState, MemberStatus, PartLen, RequestId, Volume, VolumeEvent, VolumeExtent,
    VolumeOutput, VolumeStatus,
};
use slab::Slab;
use std::io::{self, Read, Write};
use std::net::TcpStream;
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};
use tempfile::TempDir;

mod fencing;
mod shares;

const MIB: u64 = 1 << 20;
const BYTES: u64 = 64 * MIB;
const CLIENTS_MAX: usize = 40;

/// The tests run with several, so that most of their clients are served by another one than their array's.
const REACTORS: usize = 3;

/// One device as a volume. Requests fail once the device is gone; each stop waits for what is in flight.
struct PassThrough {
    device: Option<DeviceId>,
    /// Keeps the first write back as long as it is set.
    gate: Arc<AtomicBool>,
    kept: Option<(RequestId, IoOp)>,
    tokens: Slab<(RequestId, Asked)>,
    stop: Option<RequestId>,
    /// Refuses every administrator's request but stopping.
    stubborn: bool,
    /// Reads need no device.
    blank: bool,
    /// What has come of events since it settled.
    output: VolumeOutput,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Asked {
    Client,
    Admin,
}

impl PassThrough {
    fn new(device: DeviceId) -> PassThrough {
        let gate = Arc::default();
        PassThrough {
            device: Some(device),
            gate,
            kept: None,
            tokens: Slab::new(),
            stop: None,
            stubborn: true,
            blank: false,
            output: VolumeOutput::default(),
        }
    }

    fn submit(&mut self, id: RequestId, asked: Asked, op: IoOp, out: &mut VolumeOutput) {
        match self.device {
            Some(device) => {
                let token = IoToken(self.tokens.insert((id, asked)) as u64);
                out.actions.push(ArrayAction::Io { device, token, op, may_wait: false });
            }
            None => out.replies.push((id, Err(ClientError::Io))),
        }
    }

    fn event(&mut self, event: VolumeEvent, out: &mut VolumeOutput) {
        let at = |offset: calpe_core::units::VolumeOffset| ByteOffset(offset.0);
        match event {
            VolumeEvent::Client(id, _) if self.stop.is_some() => {
                out.replies.push((id, Err(ClientError::Stopping)));
            }
            VolumeEvent::Client(id, ClientRequest::Read { buf, .. }) if self.blank => {
                out.replies.push((id, Ok(ClientReply::Data(buf))));
            }
            VolumeEvent::Client(id, request) => {
                let op = match request {
                    ClientRequest::Read { offset, buf } | ClientRequest::ReadSparse { offset, buf } => {
                        IoOp::Read { offset: at(offset), buf }
                    }
                    ClientRequest::Health { .. } => unreachable!("no client here asks for it"),
                    ClientRequest::Write { offset, data, fua } => {
                        IoOp::Write { offset: at(offset), buf: data, fua }
                    }
                    ClientRequest::Flush => IoOp::Flush,
                    ClientRequest::Trim { offset, len, .. } => {
                        if (offset.0 + 4096).is_multiple_of(BYTES / 4) {
                            out.actions.push(ArrayAction::WritesLost);
                        }
                        IoOp::Zero { offset: at(offset), len, may_unmap: true }
                    }
                    ClientRequest::WriteZeroes { offset, len, may_unmap, .. } => {
                        IoOp::Zero { offset: at(offset), len, may_unmap }
                    }
                    ClientRequest::BlockStatus { offset, len } => IoOp::Extents { offset: at(offset), len },
                };
                if self.gate.load(Ordering::SeqCst) && self.kept.is_none() && matches!(op, IoOp::Write { .. })
                {
                    self.kept = Some((id, op));
                } else {
                    self.submit(id, Asked::Client, op, out);
                }
            }
            VolumeEvent::Worked(_) => unreachable!("it gives no work away"),
            VolumeEvent::Admin(id, AdminRequest::Stop) => {
                self.stop = Some(id);
                if self.device.is_some() {
                    self.submit(id, Asked::Admin, IoOp::Flush, out);
                } else {
                    out.actions.push(ArrayAction::AdminDone(id, Ok(AdminOutcome("stopped".into()))));
                }
            }
            VolumeEvent::Admin(id, _) if self.stubborn => {
                out.actions.push(ArrayAction::AdminDone(id, Err(AdminRefusal::NothingToBuildFrom)));
            }
            VolumeEvent::Admin(id, _) => {
                out.actions.push(ArrayAction::AdminDone(id, Ok(AdminOutcome("nothing to do".into()))));
            }
            VolumeEvent::Io(completion) => {
                let (id, asked) = self.tokens.remove(completion.token.0 as usize);
                let reply = match (asked, completion.result) {
                    (Asked::Client, Ok(IoValue::Done)) => Ok(ClientReply::Done),
                    (Asked::Client, Ok(IoValue::Data(buf))) => Ok(ClientReply::Data(buf)),
                    (Asked::Client, Ok(IoValue::Extents(extents))) => {
                        let extents =
                            extents.iter().map(|e| VolumeExtent { len: e.len, hole: e.hole }).collect();
                        Ok(ClientReply::Extents(extents))
                    }
                    (Asked::Client, Err(_)) => Err(ClientError::Io),
                    (Asked::Admin, _) => {
                        let stopped = Ok(AdminOutcome("stopped".into()));
                        out.actions.push(ArrayAction::AdminDone(id, stopped));
                        return;
                    }
                };
                out.replies.push((id, reply));
            }
            VolumeEvent::DeviceGone(device, _) | VolumeEvent::LeftElsewhere(device, _) => {
                self.device = None;
                out.actions.push(ArrayAction::Release(device));
            }
            VolumeEvent::Tick if !self.gate.load(Ordering::SeqCst) => {
                if let Some((id, op)) = self.kept.take() {
                    self.submit(id, Asked::Client, op, out);
                }
            }
            VolumeEvent::Tick | VolumeEvent::ReadElsewhere | VolumeEvent::Replacement(_) => {}
        }
    }
}

impl Volume for PassThrough {
    fn part_len(&self) -> PartLen {
        Arc::new(|request| match request {
            ClientRequest::Trim { len, .. }
            | ClientRequest::WriteZeroes { len, .. }
            | ClientRequest::BlockStatus { len, .. }
            | ClientRequest::Health { len, .. } => (*len).min(MIB),
            _ => u64::MAX,
        })
    }

    fn due(&self) -> Option<Timestamp> {
        None
    }

    fn take(&mut self, _now: Timestamp, event: VolumeEvent) {
        let mut out = std::mem::take(&mut self.output);
        self.event(event, &mut out);
        self.output = out;
    }

    fn settle(&mut self, _now: Timestamp, out: &mut VolumeOutput) {
        out.replies.append(&mut self.output.replies);
        out.actions.append(&mut self.output.actions);
    }

    fn would(&self, _: &AdminRequest) -> Result<AdminOutcome, AdminRefusal> {
        Ok(AdminOutcome("nothing to do".into()))
    }

    fn status(&self) -> VolumeStatus {
        VolumeStatus {
            state: if self.device.is_some() { ArrayState::Online } else { ArrayState::Failed },
            geometry: Geometry {
                data: 1,
                parity: 0,
                chunk: 65536,
                sector: 512,
                slots: BYTES / 65536,
                volume_bytes: BYTES,
                ahead: 0,
            },
            epoch: 1,
            dirty: false,
            members: vec![MemberStatus {
                device: self.device,
                ..calpe_core::testing::bare_member(MemberIndex(0), MemberState::Online)
            }],
            activities: Vec::new(),
            last_scrub: None,
            engine: "none",
            client_errors: 0,
            checksum: ChecksumKind::None,
            yields_to_force: false,
            log: LogState::Serving,
            lost: Vec::new(),
            set_aside: Vec::new(),
            set_aside_on: MemberSet::new(),
            unreadable: Vec::new(),
            page_cache: Default::default(),
            unreadable_pages: 0,
            unconfirmed_lost: Vec::new(),
            unconfirmed: Vec::new(),
        }
    }
}

/// A running reactor that serves "disk" on a unix socket and a TCP port.
struct Served {
    dir: TempDir,
    handle: ReactorHandle,
    array: ArrayId,
    port: u16,
    /// Keeps the first write from now on in the volume, as long as it is set.
    gate: Arc<AtomicBool>,
}

impl Served {
    fn new(memory: bool) -> Served {
        Served::with_payload(memory, 32 << 20)
    }

    fn with_payload(memory: bool, payload_bytes: usize) -> Served {
        let dir =
            if memory { tempfile::tempdir_in("/dev/shm").unwrap() } else { tempfile::tempdir().unwrap() };
        let pool = Pool::new(64 << 20).unwrap();
        let handle = ReactorHandle::spawn(
            ReactorConfig {
                reactors: REACTORS,
                pool,
                payload_bytes,
                connections_max: CLIENTS_MAX,
                gpu: None,
            },
            EventLog::default(),
        )
        .unwrap();
        let gate = Arc::default();
        let path = dir.path().join("member.img");
        let array = add_lanes(&handle, "disk", &path, Arc::clone(&gate), 4).unwrap();
        handle.listen(Listener::bind(&ListenAddress::Unix(dir.path().join("nbd.sock"))).unwrap());
        let tcp = Listener::bind(&ListenAddress::Tcp("127.0.0.1:0".parse().unwrap())).unwrap();
        let ListenAddress::Tcp(address) = tcp.address() else { unreachable!("bound to TCP") };
        let port = address.port();
        handle.listen(tcp);
        Served { dir, handle, array, port, gate }
    }

    fn socket(&self) -> PathBuf {
        self.dir.path().join("nbd.sock")
    }

    fn client(&self) -> Client<UnixStream> {
        let stream = UnixStream::connect(self.socket()).unwrap();
        stream.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
        Client::attach(stream)
    }

    fn clients(&self) -> usize {
        self.handle.status(self.array).unwrap().clients
    }

    fn wait_for_clients(&self, count: usize) {
        let start = Instant::now();
        while self.clients() != count {
            assert!(start.elapsed() < Duration::from_secs(10), "{} clients, not {count}", self.clients());
            std::thread::sleep(Duration::from_millis(5));
        }
    }
}

impl Drop for Served {
    fn drop(&mut self) {
        self.handle.shutdown().unwrap();
    }
}

fn add(handle: &ReactorHandle, name: &str, path: &std::path::Path) -> Result<ArrayId, ReactorError> {
    add_gated(handle, name, path, Arc::default())
}

fn add_gated(
    handle: &ReactorHandle,
    name: &str,
    path: &std::path::Path,
    gate: Arc<AtomicBool>,
) -> Result<ArrayId, ReactorError> {
    add_lanes(handle, name, path, gate, 1)
}

/// Lane 0 is on the file of this path, the others on files beside it.
fn add_lanes(
    handle: &ReactorHandle,
    name: &str,
    path: &std::path::Path,
    gate: Arc<AtomicBool>,
    lanes: u16,
) -> Result<ArrayId, ReactorError> {
    let lane = |nth: u16| {
        let path = if nth == 0 { path.to_owned() } else { path.with_extension(format!("{nth}")) };
        let device = match Device::create_sparse(&path, BYTES) {
            Ok(device) => device,
            Err(_) => Device::open(&path, Access::Exclusive).unwrap(),
        };
        let id = handle.next_device_id();
        let volume = Box::new(PassThrough { gate: Arc::clone(&gate), ..PassThrough::new(id) });
        NewLane { volume, devices: vec![(id, device)] }
    };
    handle.add_array(new_array(name, (0..lanes).map(lane).collect()))
}

fn new_array(name: &str, lanes: Vec<NewLane>) -> NewArray {
    let cut = match lanes.len() as u16 {
        1 => Lanes::ONE,
        count => Lanes { count, group: 1 },
    };
    let cut = LaneCut::new(cut, 65536, BYTES);
    NewArray { array: uuid::Uuid::nil(), name: name.into(), cut, lanes, read_only: false, rules: None }
}

fn add_volume(
    handle: &ReactorHandle,
    name: &str,
    volume: PassThrough,
    device: Device,
) -> Result<ArrayId, ReactorError> {
    let id = volume.device.expect("it has one");
    let lane = NewLane { volume: Box::new(volume), devices: vec![(id, device)] };
    handle.add_array(new_array(name, vec![lane]))
}

/// A TRIM of this offset lets the volume of a lane say that writes are lost.
const LOSES_WRITES: u64 = BYTES - 4096;

/// A minimal NBD client: EXPORT_NAME, simple replies, so that what it sends is plain to see.
struct Client<S>(S);

const READ: u16 = 0;
const WRITE: u16 = 1;
const DISC: u16 = 2;
const FLUSH: u16 = 3;
const TRIM: u16 = 4;
const ZEROES: u16 = 6;
const CACHE: u16 = 5;

impl<S: Read + Write> Client<S> {
    fn attach(stream: S) -> Client<S> {
        Client::attach_to(stream, "disk")
    }

    fn attach_to(mut stream: S, export: &str) -> Client<S> {
        let mut greeting = [0; 18];
        stream.read_exact(&mut greeting).unwrap();
        assert_eq!(&greeting[..16], b"NBDMAGICIHAVEOPT");
        stream.write_all(&3u32.to_be_bytes()).unwrap();
        Client::choose(stream, export)
    }

    /// Chooses an export, after the greetings.
    fn choose(mut stream: S, export: &str) -> Client<S> {
        let mut hello = b"IHAVEOPT".to_vec();
        hello.extend_from_slice(&1u32.to_be_bytes());
        hello.extend_from_slice(&(export.len() as u32).to_be_bytes());
        hello.extend_from_slice(export.as_bytes());
        stream.write_all(&hello).unwrap();
        let mut answer = [0; 10];
        // A client without NO_ZEROES gets 124 bytes more; flags 3 include it.
        stream.read_exact(&mut answer).unwrap();
        assert_eq!(answer[..8], BYTES.to_be_bytes());
        Client(stream)
    }

    fn header(command: u16, cookie: u64, offset: u64, len: u32) -> Vec<u8> {
        let mut bytes = 0x2560_9513u32.to_be_bytes().to_vec();
        bytes.extend_from_slice(&0u16.to_be_bytes());
        bytes.extend_from_slice(&command.to_be_bytes());
        bytes.extend_from_slice(&cookie.to_be_bytes());
        bytes.extend_from_slice(&offset.to_be_bytes());
        bytes.extend_from_slice(&len.to_be_bytes());
        bytes
    }

    fn send(&mut self, command: u16, cookie: u64, offset: u64, len: u32) {
        self.0.write_all(&Self::header(command, cookie, offset, len)).unwrap();
    }

    /// The next reply: its cookie and error.
    fn reply(&mut self) -> (u64, u32) {
        let mut bytes = [0; 16];
        self.0.read_exact(&mut bytes).unwrap();
        assert_eq!(bytes[..4], 0x6744_6698u32.to_be_bytes());
        let error = u32::from_be_bytes(bytes[4..8].try_into().unwrap());
        (u64::from_be_bytes(bytes[8..].try_into().unwrap()), error)
    }

    fn read(&mut self, offset: u64, len: u32) -> Result<Vec<u8>, u32> {
        self.send(READ, 7, offset, len);
        match self.reply() {
            (7, 0) => {
                let mut data = vec![0; len as usize];
                self.0.read_exact(&mut data).unwrap();
                Ok(data)
            }
            (7, error) => Err(error),
            other => panic!("{other:?}"),
        }
    }

    fn write(&mut self, offset: u64, data: &[u8]) -> u32 {
        self.send(WRITE, 8, offset, data.len() as u32);
        self.0.write_all(data).unwrap();
        let (cookie, error) = self.reply();
        assert_eq!(cookie, 8);
        error
    }

    fn at_end(&mut self) -> bool {
        match self.0.read(&mut [0; 1]) {
            Ok(count) => count == 0,
            // What a unix socket says when it was closed with something unread in it.
            Err(error) => error.kind() == io::ErrorKind::ConnectionReset,
        }
    }
}

fn pattern(len: usize, seed: u8) -> Vec<u8> {
    (0..len).map(|i| (i as u32).wrapping_mul(2_654_435_761).to_le_bytes()[3] ^ seed).collect()
}

#[test]
fn what_is_written_reads_back_over_both_kinds_of_socket() {
    for memory in [false, true] {
        let served = Served::new(memory);
        let mut unix = served.client();
        let mut tcp = Client::attach(TcpStream::connect(("127.0.0.1", served.port)).unwrap());
        for (turn, len) in [4096, 65536, 1 << 20, 8 << 20].into_iter().enumerate() {
            let data = pattern(len, turn as u8);
            assert_eq!(unix.write(turn as u64 * 8 * MIB, &data), 0);
            assert!(tcp.read(turn as u64 * 8 * MIB, len as u32).unwrap() == data);
            assert_eq!(tcp.write(40 * MIB, &data), 0);
            assert!(unix.read(40 * MIB, len as u32).unwrap() == data);
        }
        for command in [FLUSH, CACHE] {
            unix.send(command, 3, 0, if command == CACHE { 4096 } else { 0 });
            assert_eq!(unix.reply(), (3, 0));
        }
        let traffic = served.handle.status(served.array).unwrap().traffic;
        assert_eq!((traffic.reads, traffic.writes), (8, 8));
    }
}

#[test]
fn a_burst_of_requests_in_one_segment_is_answered_whole() {
    for memory in [false, true] {
        let served = Served::new(memory);
        let mut client = served.client();
        let mut burst = Vec::new();
        for cookie in 0..1000u64 {
            if cookie % 3 == 0 {
                burst.extend(Client::<UnixStream>::header(WRITE, cookie, cookie * 4096, 4096));
                burst.extend(vec![cookie as u8; 4096]);
            } else {
                burst.extend(Client::<UnixStream>::header(FLUSH, cookie, 0, 0));
            }
        }
        let mut writer = client.0.try_clone().unwrap();
        let sender = std::thread::spawn(move || writer.write_all(&burst).unwrap());
        let mut seen = vec![false; 1000];
        for _ in 0..1000 {
            let (cookie, error) = client.reply();
            assert_eq!(error, 0);
            assert!(!std::mem::replace(&mut seen[cookie as usize], true));
        }
        sender.join().unwrap();
        assert_eq!(client.read(999 * 4096, 4096).unwrap(), vec![999u32 as u8; 4096]);
    }
}

#[test]
fn a_payload_that_trickles_in_is_put_together() {
    let served = Served::new(true);
    let mut client = served.client();
    let data = pattern(300_000 / 512 * 512, 1);
    client.send(WRITE, 8, 0, data.len() as u32);
    for piece in data.chunks(7777) {
        client.0.write_all(piece).unwrap();
        std::thread::sleep(Duration::from_millis(1));
    }
    assert_eq!(client.reply(), (8, 0));
    assert!(client.read(0, data.len() as u32).unwrap() == data);
}

#[test]
fn the_loop_does_not_spin_while_it_waits_for_a_client() {
    // Without payload memory, large reads would wait until the half written payload is given up.
    for (payload_bytes, read_bytes) in [(0, 64 << 10), (32 << 20, 1 << 20)] {
        let served = Served::with_payload(true, payload_bytes);
        let mut half_written = served.client();
        half_written.send(WRITE, 8, 0, 1 << 20);
        half_written.0.write_all(&vec![3; 1 << 19]).unwrap();
        let mut lazy = served.client();
        (0..64).for_each(|cookie| lazy.send(READ, cookie, 0, read_bytes));
        assert_eq!(lazy.reply().1, 0);
        std::thread::sleep(Duration::from_millis(200));
        let before = served.handle.status(served.array).unwrap().turns;
        std::thread::sleep(Duration::from_millis(300));
        let turns = served.handle.status(served.array).unwrap().turns - before;
        assert!(turns < 30, "{turns} turns in a third of a second");
    }
}

#[test]
fn a_client_that_vanishes_costs_only_its_connection() {
    for memory in [false, true] {
        let served = Served::new(memory);
        let mut witness = served.client();
        for vanish in 0..6 {
            match vanish {
                // During the handshake, before and after a part of it.
                0 => drop(UnixStream::connect(served.socket()).unwrap()),
                1 => {
                    UnixStream::connect(served.socket()).unwrap().write_all(&[0, 0, 0, 3, b'I']).unwrap();
                }
                // Inside a header, and inside a payload.
                2 => served.client().0.write_all(&[0x25, 0x60]).unwrap(),
                3 => {
                    let mut client = served.client();
                    client.send(WRITE, 1, 0, 1 << 20);
                    client.0.write_all(&[7; 100_000]).unwrap();
                }
                // With reads in flight whose replies do not fit into the socket.
                4 => {
                    let mut client = served.client();
                    (0..64).for_each(|n| client.send(READ, n, 0, 1 << 20));
                }
                // With nonsense.
                _ => served.client().0.write_all(&[0xff; 4096]).unwrap(),
            }
            assert_eq!(witness.write(0, &[vanish; 4096]), 0);
            assert_eq!(witness.read(0, 4096).unwrap(), [vanish; 4096]);
        }
        served.wait_for_clients(1);
    }
}

#[test]
fn a_half_closed_client_gets_all_its_replies() {
    let served = Served::new(false);
    let mut client = served.client();
    for cookie in 0..50 {
        client.send(READ, cookie, 0, 65536);
    }
    client.0.shutdown(std::net::Shutdown::Write).unwrap();
    for _ in 0..50 {
        assert_eq!(client.reply().1, 0);
        client.0.read_exact(&mut [0; 65536]).unwrap();
    }
    assert!(client.at_end());
}

#[test]
fn a_goodbye_waits_for_what_is_in_flight() {
    let served = Served::new(false);
    let mut client = served.client();
    client.send(READ, 1, 0, 1 << 20);
    client.send(FLUSH, 2, 0, 0);
    client.send(DISC, 3, 0, 0);
    client.send(READ, 4, 0, 4096);
    let mut cookies = Vec::new();
    for _ in 0..2 {
        let (cookie, error) = client.reply();
        assert_eq!(error, 0);
        if cookie == 1 {
            client.0.read_exact(&mut vec![0; 1 << 20]).unwrap();
        }
        cookies.push(cookie);
    }
    cookies.sort_unstable();
    assert_eq!(cookies, [1, 2]);
    assert!(client.at_end());
    served.wait_for_clients(0);
}

#[test]
fn a_client_that_does_not_read_holds_up_nobody_and_loses_nothing() {
    let served = Served::new(true);
    let mut lazy = served.client();
    assert_eq!(lazy.write(0, &pattern(1 << 20, 9)), 0);
    for cookie in 0..200 {
        lazy.send(READ, cookie, 0, 1 << 20);
    }
    let mut other = served.client();
    for turn in 0..100 {
        assert_eq!(other.write(8 * MIB, &[turn; 4096]), 0);
    }
    for _ in 0..200 {
        assert_eq!(lazy.reply().1, 0);
        let mut data = vec![0; 1 << 20];
        lazy.0.read_exact(&mut data).unwrap();
        assert!(data == pattern(1 << 20, 9));
    }
}

#[test]
fn without_payload_memory_every_connection_still_advances() {
    for memory in [false, true] {
        let served = Served::with_payload(memory, 0);
        let mut clients: Vec<_> = (0..4).map(|_| served.client()).collect();
        for client in &mut clients {
            (0..20).for_each(|cookie| client.send(READ, cookie, 0, 65536));
        }
        for client in &mut clients {
            for _ in 0..20 {
                assert_eq!(client.reply().1, 0);
                client.0.read_exact(&mut [0; 65536]).unwrap();
            }
        }
    }
}

#[test]
fn a_deleted_member_is_noticed_and_closed() {
    let served = Served::new(false);
    let mut client = served.client();
    assert!(client.read(0, 4096).is_ok());
    std::fs::remove_file(served.dir.path().join("member.img")).unwrap();
    let start = Instant::now();
    while client.read(0, 4096).is_ok() {
        assert!(start.elapsed() < Duration::from_secs(10));
        std::thread::sleep(Duration::from_millis(20));
    }
    assert_eq!(client.read(0, 4096), Err(5));
    assert_eq!(served.handle.status(served.array).unwrap().status.state, ArrayState::Failed);
}

#[test]
fn a_stopped_array_lets_go_of_clients_and_devices_and_may_come_back() {
    let served = Served::new(false);
    let path = served.dir.path().join("member.img");
    let mut client = served.client();
    assert_eq!(client.write(0, &[5; 4096]), 0);
    let outcome = served.handle.stop_array(served.array).unwrap();
    assert_eq!(outcome.0, "stopped");
    assert!(client.at_end());
    drop(Device::open(&path, Access::Exclusive).unwrap());
    assert!(matches!(served.handle.status(served.array), Err(ReactorError::NoSuchArray)));
    assert!(matches!(served.handle.stop_array(served.array), Err(ReactorError::NoSuchArray)));
    add(&served.handle, "disk", &path).unwrap();
    assert_eq!(served.client().read(0, 4096).unwrap(), [5; 4096]);
}

#[test]
fn names_are_unique_and_choose_the_array() {
    let served = Served::new(true);
    let second = served.dir.path().join("second.img");
    let error = add(&served.handle, "disk", &second).unwrap_err();
    assert!(matches!(error, ReactorError::NameTaken { .. }));
    add(&served.handle, "other", &second).unwrap();
    let mut disk = served.client();
    let mut other = Client::attach_to(UnixStream::connect(served.socket()).unwrap(), "other");
    assert_eq!(other.write(0, &[1; 4096]), 0);
    assert_eq!(disk.read(0, 4096).unwrap(), [0; 4096]);
}

#[test]
fn a_device_that_the_volume_refuses_is_closed_again() {
    let served = Served::new(false);
    let path = |lane: usize| served.dir.path().join(format!("new-{lane}.img"));
    let request = |lane| {
        let device = Device::create_sparse(&path(lane), BYTES).unwrap();
        let id = served.handle.next_device_id();
        let mut new = calpe_core::volume::NewDevice::new(id, uuid::Uuid::nil(), BYTES);
        new.known_zero = true;
        (AdminRequest::Replace { member: MemberIndex(0), device: new }, vec![(id, device)])
    };
    let error = served.handle.admin(served.array, (0..4).map(request).collect()).unwrap_err();
    assert!(matches!(error, ReactorError::Refused(_)), "{error}");
    crate::member::await_closings(Duration::from_secs(20));
    (0..4).for_each(|lane| drop(Device::open(&path(lane), Access::Exclusive).unwrap()));
}

/// It was told the size and the rights of that one, whatever has its name when there is a place.
#[test]
fn a_client_that_waits_for_a_place_is_one_of_the_array_it_chose_or_of_none() {
    let served = Served::new(true);
    let add = |name: &str, file: &str| {
        add_gated(&served.handle, name, &served.dir.path().join(file), Arc::default()).unwrap()
    };
    let other = |name: &str| Client::attach_to(UnixStream::connect(served.socket()).unwrap(), name);
    let first = add("other", "first.img");
    let mut clients: Vec<_> = (0..CLIENTS_MAX).map(|_| served.client()).collect();
    let mut waiting = other("other");
    served.handle.stop_array(first).unwrap();
    add("other", "second.img");
    drop(clients.pop());
    waiting.0.set_read_timeout(Some(Duration::from_secs(10))).unwrap();
    let _ = waiting.0.write_all(&Client::<UnixStream>::header(READ, 1, 0, 4096));
    let received = waiting.0.read(&mut [0; 1]);
    assert!(
        matches!(received, Ok(0)) || received.is_err_and(|e| e.kind() == io::ErrorKind::ConnectionReset),
        "served by another array"
    );
    assert!(other("other").read(0, 4096).is_ok());
}

#[test]
fn beyond_the_limit_clients_wait_for_a_place() {
    let served = Served::new(true);
    let mut clients: Vec<_> = (0..CLIENTS_MAX).map(|_| served.client()).collect();
    let mut waiting: Vec<_> = (0..2).map(|_| served.client()).collect();
    for client in &mut waiting {
        client.send(READ, 1, 0, 4096);
        client.0.set_read_timeout(Some(Duration::from_millis(100))).unwrap();
        assert!(client.0.read(&mut [0; 1]).is_err());
    }
    for client in &mut waiting {
        drop(clients.pop());
        client.0.set_read_timeout(Some(Duration::from_secs(10))).unwrap();
        assert_eq!(client.reply(), (1, 0), "first come, first served");
        client.0.read_exact(&mut [0; 4096]).unwrap();
    }
}

#[test]
fn a_shutdown_ends_soon_whatever_clients_do() {
    let served = Served::new(true);
    let idle = served.client();
    let silent = UnixStream::connect(served.socket()).unwrap();
    let mut lazy = served.client();
    (0..64).for_each(|cookie| lazy.send(READ, cookie, 0, 1 << 20));
    // It takes one reply and leaves the others where they are.
    assert_eq!(lazy.reply().1, 0);
    let start = Instant::now();
    served.handle.shutdown().unwrap();
    assert!(start.elapsed() < Duration::from_secs(15), "{:?}", start.elapsed());
    assert!(!served.socket().exists());
    assert!(matches!(served.handle.status(served.array), Err(ReactorError::Gone)));
    Device::open(&served.dir.path().join("member.img"), Access::Exclusive).unwrap();
    drop((idle, silent, lazy));
}
