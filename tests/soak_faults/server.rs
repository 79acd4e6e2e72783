//! The server that injects faults does what it says: checked with the project's own client half and by hand.

use crate::fault_server::{Act, Cut, Disk, Door, Effect, Errno, Export, Keep, Offer, Op, Ops, Rule, Server};
use crate::support::load::Client;
use calpe_core::nbd::{Command, Request};
use std::io::ErrorKind;
use std::path::PathBuf;
use std::time::{Duration, Instant};

const BYTES: u64 = 1 << 20;

struct Bench {
    dir: tempfile::TempDir,
    server: Server,
    export: Export,
}

impl Bench {
    fn new(offer: Offer) -> Bench {
        Bench::with_seed(offer, 1)
    }

    fn with_seed(offer: Offer, seed: u64) -> Bench {
        let dir = tempfile::tempdir().expect("a directory");
        let server = Server::start(&dir.path().join("s"));
        let export = Export::new(BYTES, seed, offer);
        server.offer("", &export);
        Bench { dir, server, export }
    }

    fn socket(&self) -> PathBuf {
        self.dir.path().join("s")
    }

    /// Waits until every request has its answer and its end.
    fn until_idle(&self) {
        let deadline = Instant::now() + Duration::from_secs(10);
        while !self.export.is_idle() {
            assert!(Instant::now() < deadline, "requests are left");
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    fn client(&self) -> Client {
        Client::connect(&self.socket()).expect("connected")
    }
}

fn write(client: &mut Client, offset: u64, byte: u8, fua: bool) -> Result<Vec<u8>, calpe_core::nbd::Errno> {
    let mut request = Request::new(Command::Write, offset, 4096);
    request.fua = fua;
    client.call(&request, &[byte; 4096]).expect("connected").map_err(|failure| failure.errno)
}

fn read(client: &mut Client, offset: u64) -> Result<Vec<u8>, calpe_core::nbd::Errno> {
    let request = Request::new(Command::Read, offset, 4096);
    client.call(&request, &[]).expect("connected").map_err(|failure| failure.errno)
}

fn flush(client: &mut Client) -> Result<Vec<u8>, calpe_core::nbd::Errno> {
    let request = Request::new(Command::Flush, 0, 0);
    client.call(&request, &[]).expect("connected").map_err(|failure| failure.errno)
}

#[test]
fn the_server_serves_what_was_written_with_simple_and_structured_replies() {
    for structured in [false, true] {
        let bench = Bench::new(Offer { structured, ..Offer::default() });
        let mut client = bench.client();
        assert_eq!(client.size(), BYTES);
        assert!(client.export().flush && client.export().fua && client.export().multi_conn);
        write(&mut client, 8192, 7, false).expect("written");
        assert_eq!(read(&mut client, 8192), Ok(vec![7; 4096]));
        let zeroes = Request::new(Command::WriteZeroes, 8192, 2048);
        client.call(&zeroes, &[]).expect("connected").expect("zeroed");
        let half = [vec![0; 2048], vec![7; 2048]].concat();
        assert_eq!(read(&mut client, 8192), Ok(half.clone()));
        assert_eq!(read(&mut bench.client(), 8192), Ok(half));
        bench.until_idle();
    }
}

#[test]
fn a_power_cut_loses_what_was_not_flushed_and_nothing_else() {
    let bench = Bench::new(Offer::default());
    let mut client = bench.client();
    write(&mut client, 0, 1, false).expect("written");
    flush(&mut client).expect("flushed");
    write(&mut client, 0, 2, false).expect("written");
    write(&mut client, 4096, 3, true).expect("written");
    write(&mut client, 8192, 4, false).expect("written");
    bench.export.power_cut(Keep::Nothing);
    assert!(client.call(&Request::new(Command::Read, 0, 4096), &[]).is_err(), "the connection has ended");
    let mut client = bench.client();
    assert_eq!(read(&mut client, 0), Ok(vec![1; 4096]));
    assert_eq!(read(&mut client, 4096), Ok(vec![3; 4096]));
    assert_eq!(read(&mut client, 8192), Ok(vec![0; 4096]));
}

#[test]
fn a_lost_cache_leaves_whole_sectors_of_known_versions() {
    let mut disk = Disk::new(1 << 20, 5);
    let mut seen = [false; 4];
    for round in 0..200 {
        disk.zero(0, 1 << 20, true);
        for value in 1..4 {
            disk.write(0, &[value; 4096], false);
        }
        disk.lose(if round % 2 == 0 { Keep::Sectors } else { Keep::Blocks });
        for sector in disk.read(0, 4096).chunks(512) {
            assert!(sector.iter().all(|&byte| byte == sector[0]));
            seen[usize::from(sector[0])] = true;
        }
        assert_eq!(disk.read(0, 4096), &disk.stable()[..4096]);
    }
    assert_eq!(seen, [true; 4], "versions in between are what is left at times");
}

#[test]
fn errors_strike_by_operation_range_and_count() {
    let bench = Bench::new(Offer::default());
    let mut client = bench.client();
    let act = Act::Error { errno: Errno::NoSpc, effect: Effect::Nothing };
    let rule = Rule::new(Ops::of(Op::Write), act).within(vec![4096..8192, 65536..131072]).times(2);
    bench.export.inject(rule);
    assert!(write(&mut client, 0, 1, false).is_ok());
    assert_eq!(write(&mut client, 4096, 1, false), Err(calpe_core::nbd::Errno::NoSpc));
    assert!(read(&mut client, 4096).is_ok());
    assert_eq!(write(&mut client, 69632, 1, false), Err(calpe_core::nbd::Errno::NoSpc));
    assert!(write(&mut client, 4096, 1, false).is_ok(), "two were asked for");
    assert_eq!(bench.export.struck().get("ENOSPC"), Some(&2));
    let act = Act::Error { errno: Errno::NoMem, effect: Effect::Nothing };
    bench.export.inject(Rule::new(Ops::ALL, act).lasting(Duration::from_millis(50)));
    assert_eq!(flush(&mut client), Err(calpe_core::nbd::Errno::NoMem));
    std::thread::sleep(Duration::from_millis(60));
    assert!(flush(&mut client).is_ok());
}

#[test]
fn an_error_may_come_with_half_of_the_write_done_or_the_cache_lost() {
    let bench = Bench::new(Offer::default());
    let mut client = bench.client();
    let act = Act::Error { errno: Errno::Io, effect: Effect::Half };
    bench.export.inject(Rule::new(Ops::of(Op::Write), act).times(1));
    assert_eq!(write(&mut client, 0, 9, false), Err(calpe_core::nbd::Errno::Io));
    assert_eq!(read(&mut client, 0), Ok([vec![9; 2048], vec![0; 2048]].concat()));
    let act = Act::Error { errno: Errno::Io, effect: Effect::CacheLost };
    bench.export.inject(Rule::new(Ops::of(Op::Flush), act).times(1));
    for at in 0..64 {
        write(&mut client, at * 4096, 9, false).expect("written");
    }
    assert_eq!(flush(&mut client), Err(calpe_core::nbd::Errno::Io));
    let zero = (0..64).filter(|at| read(&mut client, at * 4096) == Ok(vec![0; 4096])).count();
    assert!((8..56).contains(&zero), "{zero} of 64 blocks are lost");
}

#[test]
fn delays_hold_one_request_and_hangs_are_never_answered() {
    let bench = Bench::new(Offer::default());
    let mut client = bench.client();
    bench.export.inject(Rule::new(Ops::of(Op::Read), Act::Delay(Duration::from_millis(150))).times(1));
    let begun = Instant::now();
    let slow = client.submit(&Request::new(Command::Read, 0, 4096), &[]).expect("sent");
    let quick = client.submit(&Request::new(Command::Read, 4096, 4096), &[]).expect("sent");
    assert_eq!(client.next().expect("an answer").0, quick);
    assert!(!bench.export.is_idle());
    assert_eq!(client.next().expect("an answer").0, slow);
    assert!(begun.elapsed() >= Duration::from_millis(150));
    bench.until_idle();
    bench.export.inject(Rule::new(Ops::of(Op::Write), Act::Hang(Effect::Whole)).times(1));
    client.submit(&Request::new(Command::Write, 0, 4096), &[5; 4096]).expect("sent");
    assert_eq!(read(&mut client, 0), Ok(vec![5; 4096]), "it is done, and not answered");
    assert!(!bench.export.is_idle());
    drop(client);
    bench.until_idle();
}

#[test]
fn requests_of_a_connection_that_has_ended_land_soon_or_never() {
    let mut landed = 0;
    for seed in 0..20 {
        let bench = Bench::with_seed(Offer::default(), seed);
        let mut client = bench.client();
        bench.export.inject(Rule::new(Ops::of(Op::Write), Act::Delay(Duration::from_secs(3600))));
        client.submit(&Request::new(Command::Write, 0, 4096), &[5; 4096]).expect("sent");
        while bench.export.is_idle() {
            std::thread::sleep(Duration::from_millis(1));
        }
        drop(client);
        bench.until_idle();
        landed += usize::from(bench.export.read(0, 1)[0] == 5);
    }
    assert!((1..20).contains(&landed), "{landed} of 20 have landed");
}

#[test]
fn connections_end_in_order_by_reset_and_in_the_middle_of_a_reply() {
    let bench = Bench::new(Offer::default());
    for (how, kinds) in [
        (Cut::Close, &[ErrorKind::UnexpectedEof][..]),
        (Cut::Reset, &[ErrorKind::ConnectionReset, ErrorKind::BrokenPipe]),
        (Cut::MidReply, &[ErrorKind::UnexpectedEof]),
    ] {
        let (mut client, mut other) = (bench.client(), bench.client());
        bench.export.inject(Rule::new(Ops::of(Op::Write), Act::Cut(how)).times(1));
        let request = Request::new(Command::Write, 0, 1 << 19);
        let sent = client.submit(&request, &[1; 1 << 19]);
        let error = sent.and_then(|_| client.next()).expect_err("cut");
        assert!(kinds.contains(&error.kind()), "{how:?}: {error:?}");
        // One after the other.
        let deadline = Instant::now() + Duration::from_secs(10);
        while other.call(&Request::new(Command::Read, 0, 4096), &[]).is_ok() {
            assert!(Instant::now() < deadline, "{how:?}: not all of them end");
        }
        assert!(read(&mut bench.client(), 0).is_ok());
    }
    let mut client = bench.client();
    bench.export.inject(Rule::new(Ops::of(Op::Read), Act::Cut(Cut::MidReply)).times(1));
    let before = client.received();
    client.submit(&Request::new(Command::Read, 0, 4096), &[]).expect("sent");
    assert!(client.next().is_err());
    assert!(client.received() - before > 1024, "half of it has come");
}

#[test]
fn a_door_may_be_shut_dropping_or_silent_and_opens_again() {
    let bench = Bench::new(Offer::default());
    for door in [Door::Shut, Door::Dropping] {
        bench.server.set_door(door);
        let deadline = Instant::now() + Duration::from_secs(10);
        while Client::connect(&bench.socket()).is_ok() {
            assert!(Instant::now() < deadline, "{door:?} is open");
        }
        bench.server.set_door(Door::Open);
        while Client::connect(&bench.socket()).is_err() {
            assert!(Instant::now() < deadline, "not open again after {door:?}");
        }
    }
    bench.server.set_door(Door::Silent);
    std::thread::sleep(Duration::from_millis(50));
    let socket = bench.socket();
    let waiting = std::thread::spawn(move || Client::connect(&socket).is_ok());
    std::thread::sleep(Duration::from_millis(100));
    assert!(!waiting.is_finished(), "it waits for a greeting");
    bench.server.set_door(Door::Open);
    assert!(!waiting.join().expect("no panic"), "it is let go");
    assert!(read(&mut bench.client(), 0).is_ok());
}

#[test]
fn a_disk_goes_back_to_an_earlier_day_or_rots_or_moves() {
    let bench = Bench::new(Offer::default());
    let mut client = bench.client();
    write(&mut client, 0, 1, true).expect("written");
    let earlier = bench.export.stable();
    write(&mut client, 0, 2, true).expect("written");
    bench.export.restore(&earlier);
    assert_eq!(read(&mut client, 0), Ok(vec![1; 4096]));
    bench.export.flip(1, 3);
    assert_eq!(read(&mut client, 0).expect("read")[..3], [1, 9, 1]);
    bench.export.inject(Rule::new(Ops::of(Op::Write), Act::Lie).times(1));
    write(&mut client, 4096, 6, true).expect("so it says");
    assert_eq!(read(&mut client, 4096), Ok(vec![0; 4096]));
    let moved = bench.server.withdraw("").expect("it was there");
    assert!(Client::connect(&bench.socket()).is_err());
    let other = Server::start(&bench.dir.path().join("t"));
    other.offer("", &moved);
    let mut client = Client::connect(&bench.dir.path().join("t")).expect("connected");
    assert_eq!(read(&mut client, 0).expect("read")[..3], [1, 9, 1]);
}
