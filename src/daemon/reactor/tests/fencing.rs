//! Clients that hang up and go on over another connection: nothing of the old connection lands after what the
//! new one does.

use super::*;
use crate::tls::tests::pki;
use crate::tls::{ClientFiles, ClientTls, Pumps, ServerFiles, ServerTls};
use calpe_core::nbd::TlsMode;
use nix::sys::socket::{setsockopt, sockopt};
use std::net::Shutdown;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::LazyLock;

/// What unix and TCP clients have in common.
trait Stream: Read + Write + AsFd {
    fn hang_up(&self, how: Shutdown);
    fn patience(&self, time: Duration);
}

impl Stream for UnixStream {
    fn hang_up(&self, how: Shutdown) {
        self.shutdown(how).unwrap();
    }

    fn patience(&self, time: Duration) {
        self.set_read_timeout(Some(time)).unwrap();
    }
}

impl Stream for TcpStream {
    fn hang_up(&self, how: Shutdown) {
        self.shutdown(how).unwrap();
    }

    fn patience(&self, time: Duration) {
        self.set_read_timeout(Some(time)).unwrap();
    }
}

/// The plain end of TLS.
struct Secured(UnixStream);

impl Read for Secured {
    fn read(&mut self, buf: &mut [u8]) -> io::Result<usize> {
        self.0.read(buf)
    }
}

impl Write for Secured {
    fn write(&mut self, buf: &[u8]) -> io::Result<usize> {
        self.0.write(buf)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl AsFd for Secured {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

impl Stream for Secured {
    fn hang_up(&self, how: Shutdown) {
        self.0.shutdown(how).unwrap();
        // A thread passes it on.
        std::thread::sleep(Duration::from_millis(100));
    }

    fn patience(&self, time: Duration) {
        self.0.set_read_timeout(Some(time)).unwrap();
    }
}

static CERTIFICATES: LazyLock<(Arc<ServerTls>, ClientTls)> = LazyLock::new(|| {
    let dir = tempfile::tempdir().unwrap();
    let ca = pki::Ca::new(dir.path());
    let (server, client) = (ca.issue("server", 1), ca.issue("client", 2));
    let identity = Some((client.certificate, client.key));
    let (certificate, key, client_ca) = (server.certificate, server.key, Some(ca.certificate()));
    let server = ServerTls::load(&ServerFiles { certificate, key, client_ca, crl: None }).unwrap();
    let client = ClientTls::load(&ClientFiles { ca: ca.certificate(), identity, server_name: None }).unwrap();
    (Arc::new(server), client)
});

/// TLS over TCP, on a listener of its own.
fn tls(served: &Served) -> Client<Box<dyn Stream>> {
    let (server, client) = &*CERTIFICATES;
    let listener = Listener::bind(&ListenAddress::Tcp("127.0.0.1:0".parse().unwrap())).unwrap();
    let ListenAddress::Tcp(address) = *listener.address() else { unreachable!("bound to TCP") };
    let tls = ListenTls { mode: TlsMode::Required, server: Some(Arc::clone(server)) };
    served.handle.listen(listener.with_tls(tls));
    let mut stream = TcpStream::connect(address).unwrap();
    let (mut greeting, mut granted) = ([0; 18], [0; 20]);
    stream.read_exact(&mut greeting).unwrap();
    stream.write_all(b"\0\0\0\x03IHAVEOPT\0\0\0\x05\0\0\0\0").unwrap();
    stream.read_exact(&mut granted).unwrap();
    assert_eq!(granted[8..], [0, 0, 0, 5, 0, 0, 0, 1, 0, 0, 0, 0], "STARTTLS is granted");
    let tunnel = Pumps::default().connect(stream.into(), client, "localhost").unwrap();
    Client::choose(Box::new(Secured(tunnel.socket.into())), "disk")
}

fn unix(served: &Served) -> Client<Box<dyn Stream>> {
    Client::attach(Box::new(UnixStream::connect(served.socket()).unwrap()))
}

fn tcp(served: &Served) -> Client<Box<dyn Stream>> {
    Client::attach(Box::new(TcpStream::connect(("127.0.0.1", served.port)).unwrap()))
}

type Kind = fn(&Served) -> Client<Box<dyn Stream>>;

const KINDS: [Kind; 3] = [unix, tcp, tls];

/// Bytes of a write. Two of them are more than the share of a client that has 512 KiB, and small enough to
/// lie in a unix socket's buffer and the inbox.
const LARGE: usize = 300 << 10;

fn ends_unanswered(client: &mut Client<Box<dyn Stream>>) {
    client.0.patience(Duration::from_secs(10));
    assert!(client.at_end());
}

/// Sends a write that cannot start because the one before it holds all memory of its client, hangs up, and
/// writes again.
fn stale_write(kind: Kind, how: Shutdown) -> (Served, Client<Box<dyn Stream>>) {
    let served = Served::with_payload(false, 1 << 20);
    let mut old = kind(&served);
    setsockopt(&old.0, sockopt::SndBuf, &(1 << 20)).unwrap();
    served.gate.store(true, Ordering::SeqCst);
    for (cookie, offset) in [(1, 32 * MIB), (2, 0)] {
        let mut message = Client::<UnixStream>::header(WRITE, cookie, offset, LARGE as u32);
        message.extend(pattern(LARGE, 2));
        old.0.write_all(&message).unwrap();
    }
    // The second one stays unread until the first has ended.
    old.0.patience(Duration::from_millis(200));
    assert!(old.0.read(&mut [0; 1]).is_err(), "the write was to wait");
    old.0.hang_up(how);
    let mut new = kind(&served);
    assert_eq!(new.write(0, &[9; 4096]), 0);
    served.gate.store(false, Ordering::SeqCst);
    (served, old)
}

#[test]
fn a_write_that_waits_when_its_client_hangs_up_is_never_done() {
    for kind in KINDS {
        let (served, mut old) = stale_write(kind, Shutdown::Both);
        assert!(old.at_end());
        served.wait_for_clients(0);
        let mut reader = kind(&served);
        assert!(reader.read(0, 4096).unwrap() == [9; 4096], "the old write won");
        assert!(reader.read(4096, 4096).unwrap() == [0; 4096], "a part of the old write was done");
    }
}

#[test]
fn on_tcp_an_ended_stream_counts_as_hung_up_and_on_a_unix_socket_it_does_not() {
    let (served, mut old) = stale_write(tcp, Shutdown::Write);
    old.0.patience(Duration::from_secs(10));
    assert_eq!(old.reply(), (1, 0), "it was in the volume before");
    ends_unanswered(&mut old);
    assert!(tcp(&served).read(0, 4096).unwrap() == [9; 4096]);
    let (_served, mut old) = stale_write(unix, Shutdown::Write);
    old.0.patience(Duration::from_secs(10));
    assert_eq!(old.reply(), (1, 0));
    assert_eq!(old.reply(), (2, 0), "its client can still read, and waits for the reply");
    ends_unanswered(&mut old);
}

#[test]
fn a_payload_that_completes_as_its_client_hangs_up_is_not_written() {
    for kind in KINDS {
        let served = Served::new(false);
        let mut old = kind(&served);
        old.send(WRITE, 1, 0, 1 << 20);
        old.0.write_all(&vec![1; (1 << 20) - 4096]).unwrap();
        // The daemon waits for the rest of it, which comes together with the end of the stream.
        std::thread::sleep(Duration::from_millis(100));
        let mut last = served.client();
        old.0.write_all(&[1; 4096]).unwrap();
        old.0.hang_up(Shutdown::Both);
        assert_eq!(last.write(0, &[9; 4096]), 0);
        drop(old);
        served.wait_for_clients(1);
        assert!(last.read(0, 4096).unwrap() == [9; 4096]);
    }
}

#[test]
fn what_overlaps_a_write_that_an_ended_client_left_in_the_volume_comes_after_it() {
    for kind in KINDS {
        let served = Served::new(false);
        served.gate.store(true, Ordering::SeqCst);
        let mut old = kind(&served);
        old.send(WRITE, 1, 8192, 8192);
        old.0.write_all(&[1; 8192]).unwrap();
        std::thread::sleep(Duration::from_millis(100));
        old.0.hang_up(Shutdown::Both);
        let mut new = kind(&served);
        new.send(WRITE, 2, 12288, 8192);
        new.0.write_all(&[2; 8192]).unwrap();
        let mut reader = kind(&served);
        reader.send(READ, 3, 8192, 4096);
        // Requests that do not overlap it go on, on the same connection, too.
        new.send(READ, 4, 0, 4096);
        assert_eq!(new.reply(), (4, 0));
        new.0.read_exact(&mut [0; 4096]).unwrap();
        assert_eq!(served.client().write(20480, &[3; 4096]), 0);
        for client in [&mut new, &mut reader] {
            client.0.patience(Duration::from_millis(200));
            assert!(client.0.read(&mut [0; 1]).is_err(), "it must wait");
            client.0.patience(Duration::from_secs(10));
        }
        served.gate.store(false, Ordering::SeqCst);
        assert_eq!(new.reply(), (2, 0));
        assert_eq!(reader.reply(), (3, 0));
        let mut data = [0; 4096];
        reader.0.read_exact(&mut data).unwrap();
        assert!(data == [1; 4096], "a read must not see what is about to change");
        assert!(reader.read(8192, 4096).unwrap() == [1; 4096]);
        assert!(reader.read(12288, 8192).unwrap() == [2; 8192], "the old write won");
    }
}

#[test]
fn a_request_that_waits_for_an_orphan_is_dropped_when_its_own_client_hangs_up() {
    let served = Served::new(false);
    served.gate.store(true, Ordering::SeqCst);
    let mut first = unix(&served);
    first.send(WRITE, 1, 0, 4096);
    first.0.write_all(&[1; 4096]).unwrap();
    std::thread::sleep(Duration::from_millis(100));
    first.0.hang_up(Shutdown::Both);
    let mut second = unix(&served);
    second.send(WRITE, 2, 0, 8192);
    second.0.write_all(&[2; 8192]).unwrap();
    std::thread::sleep(Duration::from_millis(100));
    second.0.hang_up(Shutdown::Both);
    let mut third = unix(&served);
    // Overlaps the second alone, which never began.
    assert_eq!(third.write(4096, &[3; 4096]), 0);
    served.gate.store(false, Ordering::SeqCst);
    drop((first, second));
    served.wait_for_clients(1);
    assert!(third.read(0, 4096).unwrap() == [1; 4096]);
    assert!(third.read(4096, 4096).unwrap() == [3; 4096]);
}

/// Many requests wait for many orphans: each goes on when its own orphan has ended, in the order of their
/// arrival.
#[test]
fn hundreds_of_requests_that_wait_for_orphans_all_end() {
    const EACH: u64 = 200;
    let served = Served::new(false);
    served.gate.store(true, Ordering::SeqCst);
    let write = |client: &mut Client<Box<dyn Stream>>, nth: u64, byte: u8| {
        let at = nth * 4096;
        client.send(WRITE, nth, at, 4096);
        client.0.write_all(&[byte; 4096]).unwrap();
    };
    // The first stays in the volume and overlaps all that come later; the others are orphans for a moment
    // only.
    let mut old = unix(&served);
    old.send(WRITE, 999, 0, (EACH * 4096) as u32);
    old.0.write_all(&vec![1; (EACH * 4096) as usize]).unwrap();
    std::thread::sleep(Duration::from_millis(100));
    old.0.hang_up(Shutdown::Both);
    // No more of each than it may have waiting: with more, nothing is received from it.
    let mut new: Vec<_> = (0..4).map(|_| unix(&served)).collect();
    let begun = Instant::now();
    (0..EACH).for_each(|nth| write(&mut new[nth as usize % 4], nth, 2));
    std::thread::sleep(Duration::from_millis(200));
    served.gate.store(false, Ordering::SeqCst);
    for nth in 0..EACH {
        assert_eq!(new[nth as usize % 4].reply().1, 0);
    }
    assert!(begun.elapsed() < Duration::from_secs(10), "{:?}", begun.elapsed());
    assert!(new[0].read(0, (EACH * 4096) as u32).unwrap().iter().all(|byte| *byte == 2), "the old write won");
}

/// Reads as fast as it can until told to end, so that the shares of others are small.
fn stay_busy(mut client: Client<UnixStream>, ended: &AtomicBool) {
    while !ended.load(Ordering::SeqCst) {
        client.read(48 * MIB, 4096).unwrap();
    }
}

/// More than a turn's share of each client waits for one write, and may go on all at once; the clients hang
/// up when some of their requests have begun.
#[test]
fn clients_that_hang_up_while_what_they_waited_with_begins_leave_nothing_that_others_wait_for() {
    const CLIENTS: u64 = 8;
    // More than may wait: some stay unread.
    const EACH: u64 = 70;
    const BYTES: usize = (CLIENTS * EACH * 4096) as usize;
    let served = Served::new(false);
    let (mut holder, mut after) = (unix(&served), unix(&served));
    after.0.patience(Duration::from_secs(10));
    let ended = AtomicBool::new(false);
    std::thread::scope(|scope| {
        (0..CLIENTS).for_each(|_| _ = scope.spawn(|| stay_busy(served.client(), &ended)));
        let mut round = || {
            served.gate.store(true, Ordering::SeqCst);
            holder.send(WRITE, 1, 1, BYTES as u32);
            holder.0.write_all(&vec![1; BYTES]).unwrap();
            std::thread::sleep(Duration::from_millis(10));
            let mut old: Vec<_> = (0..CLIENTS).map(|_| unix(&served)).collect();
            for nth in 0..CLIENTS * EACH {
                let client = &mut old[(nth % CLIENTS) as usize];
                client.send(WRITE, nth, nth * 4096 + 1, 100);
                client.0.write_all(&[2; 100]).unwrap();
            }
            std::thread::sleep(Duration::from_millis(10));
            served.gate.store(false, Ordering::SeqCst);
            assert_eq!(holder.reply(), (1, 0));
            old.iter().for_each(|client| client.0.hang_up(Shutdown::Both));
            after.send(WRITE, 2, 0, BYTES as u32);
            after.0.write_all(&vec![3; BYTES]).unwrap();
            let mut reply = [0; 16];
            after.0.read_exact(&mut reply).is_ok()
                && after.read(0, BYTES as u32).is_ok_and(|read| read == vec![3; BYTES])
        };
        let good = (0..10).all(|_| round());
        ended.store(true, Ordering::SeqCst);
        assert!(good, "a write waits for clients that are gone, or one of theirs came after it");
    });
    drop(holder);
    served.wait_for_clients(1);
}

/// A client that sends more than may wait goes on when there is room again.
#[test]
fn a_client_with_too_many_requests_that_wait_is_not_listened_to_for_a_while() {
    // More than may wait, and no more than a socket takes.
    const COUNT: u64 = 100;
    let served = Served::new(false);
    served.gate.store(true, Ordering::SeqCst);
    let mut old = unix(&served);
    old.send(WRITE, 999, 0, 4096);
    old.0.write_all(&[1; 4096]).unwrap();
    std::thread::sleep(Duration::from_millis(100));
    let mut new = unix(&served);
    for nth in 0..COUNT {
        new.send(WRITE, nth, nth, 1);
        new.0.write_all(&[nth as u8]).unwrap();
    }
    std::thread::sleep(Duration::from_millis(100));
    served.gate.store(false, Ordering::SeqCst);
    assert_eq!(old.reply(), (999, 0));
    for nth in 0..COUNT {
        assert_eq!(new.reply(), (nth, 0), "in the order in which they came");
    }
    let mut expected = [1; 4096];
    (0..COUNT).for_each(|nth| expected[nth as usize] = nth as u8);
    assert!(new.read(0, 4096).unwrap() == expected);
}

/// However little memory its client has, a write does not begin before it is complete.
#[test]
fn nothing_is_written_of_a_large_payload_that_does_not_end() {
    let served = Served::with_payload(true, 0);
    for mut stale in [unix(&served), tcp(&served)] {
        stale.send(WRITE, 1, 0, 4 << 20);
        stale.0.write_all(&vec![9; 3 << 20]).unwrap();
        stale.0.hang_up(Shutdown::Write);
        ends_unanswered(&mut stale);
        assert!(unix(&served).read(0, 1 << 20).unwrap().iter().all(|byte| *byte == 0), "a part was written");
    }
    // The place for large payloads is free again.
    assert_eq!(unix(&served).write(0, &[1; 1 << 20]), 0);
}

/// A write of part of a block waits for one that is under way, and later requests that overlap it wait for
/// it.
#[test]
fn an_uneven_write_that_waits_goes_before_what_comes_later() {
    let served = Served::new(false);
    served.gate.store(true, Ordering::SeqCst);
    let mut clients = [unix(&served), unix(&served), unix(&served), unix(&served)];
    let writes = [(0, 8192, 1u8), (100, 50, 2), (0, 4096, 3), (200, 1000, 4)];
    for (client, (offset, length, byte)) in clients.iter_mut().zip(writes) {
        client.send(WRITE, u64::from(byte), offset, length);
        client.0.write_all(&vec![byte; length as usize]).unwrap();
        std::thread::sleep(Duration::from_millis(300));
    }
    served.gate.store(false, Ordering::SeqCst);
    for (client, (.., byte)) in clients.iter_mut().zip(writes) {
        assert_eq!(client.reply(), (u64::from(byte), 0));
    }
    let mut expected = vec![1; 8192];
    for (offset, length, byte) in writes {
        expected[offset as usize..][..length as usize].fill(byte);
    }
    assert!(clients[0].read(0, 8192).unwrap() == expected, "not in the order in which they came");
}

#[test]
fn live_clients_do_not_wait_for_each_other() {
    let served = Served::new(false);
    served.gate.store(true, Ordering::SeqCst);
    let mut slow = unix(&served);
    slow.send(WRITE, 1, 0, 4096);
    slow.0.write_all(&[1; 4096]).unwrap();
    std::thread::sleep(Duration::from_millis(100));
    assert_eq!(unix(&served).write(0, &[2; 4096]), 0);
    served.gate.store(false, Ordering::SeqCst);
    assert_eq!(slow.reply(), (1, 0));
}

#[test]
fn an_array_that_stops_leaves_unanswered_what_it_does_not_do() {
    let served = Served::new(false);
    served.gate.store(true, Ordering::SeqCst);
    let mut busy = unix(&served);
    busy.send(WRITE, 1, 0, 4096);
    busy.0.write_all(&[1; 4096]).unwrap();
    std::thread::sleep(Duration::from_millis(100));
    let handle = served.handle.clone();
    let array = served.array;
    let stop = std::thread::spawn(move || handle.stop_array(array));
    std::thread::sleep(Duration::from_millis(100));
    busy.send(WRITE, 2, 0, 4096);
    busy.0.write_all(&[2; 4096]).unwrap();
    served.gate.store(false, Ordering::SeqCst);
    assert_eq!(busy.reply(), (1, 0), "what was begun is finished and answered");
    ends_unanswered(&mut busy);
    stop.join().unwrap().unwrap();
}

/// Whole writes lie before the end of the stream, and the first of them waits for the place for large
/// payloads.
#[test]
fn on_tcp_an_end_behind_several_waiting_writes_is_seen_before_the_first_of_them_begins() {
    const EACH: usize = 1 << 20;
    for count in [2, 3] {
        let served = Served::with_payload(false, 0);
        // It has the place, and sends nothing for now.
        let mut holder = unix(&served);
        holder.send(WRITE, 1, 40 * MIB, 4 << 20);
        std::thread::sleep(Duration::from_millis(100));
        let mut old = tcp(&served);
        for nth in 0..count {
            let mut message = Client::<UnixStream>::header(WRITE, nth, nth * 2 * MIB, EACH as u32);
            message.extend(pattern(EACH, 2));
            old.0.write_all(&message).unwrap();
        }
        old.0.hang_up(Shutdown::Both);
        assert_eq!(tcp(&served).write(0, &[9; 4096]), 0);
        holder.0.write_all(&vec![1; 4 << 20]).unwrap();
        assert_eq!(holder.reply(), (1, 0));
        assert!(old.at_end());
        served.wait_for_clients(1);
        assert!(tcp(&served).read(0, 4096).unwrap() == [9; 4096], "the old write won, of {count}");
    }
}

/// Nothing is received from a client that waits for the place for large payloads.
#[test]
fn a_client_that_leaves_while_it_waits_is_gone_at_once() {
    let served = Served::with_payload(false, 0);
    let mut holder = unix(&served);
    holder.send(WRITE, 1, 0, 4 << 20);
    std::thread::sleep(Duration::from_millis(50));
    let mut waiter = unix(&served);
    waiter.send(WRITE, 2, 8 * MIB, 4 << 20);
    std::thread::sleep(Duration::from_millis(50));
    drop(waiter);
    served.wait_for_clients(1);
    // It would have been closed for a client that waits, and now none does.
    holder.0.write_all(&vec![1; 4 << 20]).unwrap();
    assert_eq!(holder.reply(), (1, 0));
}

/// The flush that ends a long FUA request is the next flush after writes were lost: the request ends with an
/// error.
#[test]
fn a_long_request_whose_flush_tells_of_lost_writes_ends_and_its_connection_too() {
    let served = Served::new(true);
    let mut client = served.client();
    assert_eq!(client.write(0, &[1; 4096]), 0);
    client.send(TRIM, 1, LOSES_WRITES, 4096);
    assert_eq!(client.reply(), (1, 0));
    let mut long = Client::<UnixStream>::header(TRIM, 2, 0, 2 << 20);
    // FUA.
    long[5] = 1;
    client.0.write_all(&long).expect("sent");
    assert_eq!(client.reply(), (2, 5), "lost writes are told once");
    client.send(FLUSH, 3, 0, 0);
    assert_eq!(client.reply(), (3, 0));
    drop(client);
    let started = Instant::now();
    while served.clients() > 0 {
        assert!(started.elapsed() < Duration::from_secs(10), "its connection stays");
        std::thread::sleep(Duration::from_millis(10));
    }
}
