//! Clients that hang up and go on over another connection: nothing of the old one comes after what the new one does.

use super::*;
use nix::sys::socket::{setsockopt, sockopt};
use std::net::Shutdown;
use std::os::fd::AsFd;

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

fn unix(served: &Served) -> Client<Box<dyn Stream>> {
    Client::attach(Box::new(UnixStream::connect(served.socket()).unwrap()))
}

fn tcp(served: &Served) -> Client<Box<dyn Stream>> {
    Client::attach(Box::new(TcpStream::connect(("127.0.0.1", served.port)).unwrap()))
}

type Connect = fn(&Served) -> Client<Box<dyn Stream>>;

const KINDS: [Connect; 2] = [unix, tcp];

/// Large enough to wait for payload memory, small enough to lie in a unix socket's buffer and the inbox.
const LARGE: usize = 300 << 10;

fn ends_unanswered(client: &mut Client<Box<dyn Stream>>) {
    client.0.patience(Duration::from_secs(10));
    assert!(client.at_end());
}

/// Sends a write that cannot start because another client takes all payload memory, hangs up, writes anew.
fn stale_write(kind: Connect, how: Shutdown) -> (Served, Client<Box<dyn Stream>>) {
    let served = Served::with_payload(false, 1 << 20);
    let mut greedy = served.client();
    greedy.send(WRITE, 1, 32 * MIB, 32 << 20);
    greedy.0.write_all(&[1; 4096]).unwrap();
    let mut old = kind(&served);
    setsockopt(&old.0, sockopt::SndBuf, &(1 << 20)).unwrap();
    let mut message = Client::<UnixStream>::header(WRITE, 2, 0, LARGE as u32);
    message.extend(pattern(LARGE, 2));
    old.0.write_all(&message).unwrap();
    // It lies there: what the greedy client keeps is what it waits for.
    old.0.patience(Duration::from_millis(200));
    assert!(old.0.read(&mut [0; 1]).is_err(), "the write was to wait");
    old.0.hang_up(how);
    let mut new = kind(&served);
    assert_eq!(new.write(0, &[9; 4096]), 0);
    greedy.0.write_all(&vec![1; (32 << 20) - 4096]).unwrap();
    assert_eq!(greedy.reply(), (1, 0));
    drop(greedy);
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
    ends_unanswered(&mut old);
    assert!(tcp(&served).read(0, 4096).unwrap() == [9; 4096]);
    let (_served, mut old) = stale_write(unix, Shutdown::Write);
    old.0.patience(Duration::from_secs(10));
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
        // The daemon waits for the rest of it, which comes together with the end.
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
        // What touches nothing of it goes on, on the same connection, too.
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
