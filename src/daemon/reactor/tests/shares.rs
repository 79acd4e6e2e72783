//! Shares of clients: places, memory, and requests that are carried out in parts or lie between blocks.

use super::*;

#[test]
fn silence_takes_no_place_from_clients() {
    let served = Served::new(true);
    let silent: Vec<_> =
        (0..4 * CLIENTS_MAX).map(|_| UnixStream::connect(served.socket()).unwrap()).collect();
    let started = Instant::now();
    let mut clients: Vec<_> = (0..CLIENTS_MAX).map(|_| served.client()).collect();
    clients.iter_mut().for_each(|client| assert!(client.read(0, 4096).is_ok()));
    assert!(started.elapsed() < Duration::from_secs(5), "{:?}", started.elapsed());
    drop(silent);
}

#[test]
fn the_network_leaves_places_for_this_host() {
    let served = Served::new(true);
    let tcp = || Client::attach(TcpStream::connect(("127.0.0.1", served.port)).unwrap());
    let many: Vec<_> = (0..CLIENTS_MAX).map(|_| tcp()).collect();
    served.wait_for_clients(CLIENTS_MAX - CLIENTS_MAX / 10);
    assert!(served.client().read(0, 4096).is_ok());
    drop(many);
}

#[test]
fn requests_larger_than_their_clients_memory_are_done_in_parts() {
    // A share of 64 KiB.
    let served = Served::with_payload(true, 0);
    let mut clients = [served.client(), served.client()];
    let data = [pattern(9 << 20, 3), pattern(300 << 10, 4)];
    for (client, (data, offset)) in clients.iter_mut().zip(data.iter().zip([512, 32 * MIB])) {
        assert_eq!(client.write(offset, data), 0);
        assert!(client.read(offset, data.len() as u32).unwrap() == *data);
        // Several at once, among small ones.
        for cookie in 0..6 {
            client.send(READ, cookie, offset, if cookie % 2 == 0 { data.len() as u32 } else { 4096 });
        }
        for _ in 0..6 {
            let (cookie, error) = client.reply();
            let mut seen = vec![0; if cookie % 2 == 0 { data.len() } else { 4096 }];
            client.0.read_exact(&mut seen).unwrap();
            assert!(error == 0 && seen == data[..seen.len()], "{cookie}");
        }
    }
    let traffic = served.handle.status(served.array).unwrap().traffic;
    assert_eq!((traffic.reads, traffic.writes), (14, 2), "counted as their clients sent them");
}

#[test]
fn a_client_that_vanishes_within_a_request_in_parts_leaves_nothing_behind() {
    for memory in [false, true] {
        let served = Served::with_payload(memory, 0);
        let mut half = served.client();
        half.send(WRITE, 1, 0, 4 << 20);
        half.0.write_all(&vec![7; 1 << 20]).unwrap();
        let mut deaf = served.client();
        deaf.send(READ, 1, 0, 32 << 20);
        let mut trims = served.client();
        (0..50).for_each(|cookie| trims.send(TRIM, cookie, 0, 64 << 20));
        drop((half, deaf, trims));
        served.wait_for_clients(0);
        assert!(served.client().read(0, 1 << 20).is_ok());
    }
}

#[test]
fn requests_that_need_no_member_do_not_keep_those_that_do_waiting() {
    const FLOODS: usize = 8;
    const AHEAD: u64 = 16;
    let served = Served::new(true);
    let path = served.dir.path().join("blank.img");
    let id = served.handle.next_device_id();
    let blank = PassThrough { blank: true, ..PassThrough::new(id) };
    add_volume(&served.handle, "blank", blank, Device::create_sparse(&path, BYTES).unwrap()).unwrap();
    let is_over = Arc::new(AtomicBool::new(false));
    let flood = || {
        let stream = UnixStream::connect(served.socket()).unwrap();
        let (mut client, is_over) = (Client::attach_to(stream, "blank"), Arc::clone(&is_over));
        std::thread::spawn(move || {
            let mut data = vec![0; MIB as usize];
            (0..AHEAD).for_each(|cookie| client.send(READ, cookie, 0, MIB as u32));
            while !is_over.load(Ordering::Relaxed) {
                client.reply();
                client.0.read_exact(&mut data).unwrap();
                client.send(READ, 0, 0, MIB as u32);
            }
        })
    };
    let floods: Vec<_> = (0..FLOODS).map(|_| flood()).collect();
    let mut victim = served.client();
    let mut longest = Duration::ZERO;
    for _ in 0..100 {
        let begun = Instant::now();
        assert!(victim.read(0, 4096).is_ok());
        longest = longest.max(begun.elapsed());
    }
    is_over.store(true, Ordering::Relaxed);
    floods.into_iter().for_each(|flood| flood.join().unwrap());
    assert!(longest < Duration::from_secs(2), "{longest:?}");
}

#[test]
fn who_keeps_more_than_a_share_and_takes_nothing_goes_when_others_need_it() {
    let served = Served::with_payload(true, 32 << 20);
    // Two clients have half of the memory each, filled with replies that they do not take.
    let mut deaf = [served.client(), served.client()];
    deaf.iter_mut().for_each(|client| client.send(READ, 1, 0, 32 << 20));
    served.wait_for_clients(2);
    std::thread::sleep(Duration::from_secs(1));
    assert_eq!(served.clients(), 2, "nobody else needs it");
    // With a third client a share is less than what they hold. It is served at once, and they have 10 s.
    let mut honest = served.client();
    let started = Instant::now();
    assert!(honest.read(0, 8 << 20).is_ok());
    assert!(started.elapsed() < Duration::from_secs(5), "{:?}", started.elapsed());
    // Both end, or one of them a tick before the other, which then holds no more than a share of two.
    while served.clients() > 2 {
        assert!(started.elapsed() < Duration::from_secs(40), "they keep it");
        assert!(honest.read(0, 4096).is_ok());
        std::thread::sleep(Duration::from_millis(20));
    }
    assert!(honest.read(0, 8 << 20).is_ok());
    let mut cut_off = 0;
    for client in &mut deaf {
        // It gets the replies sent before, and an end; a client that stays connected gets everything when it
        // reads.
        client.0.set_read_timeout(Some(Duration::from_secs(10))).expect("a timeout");
        let bytes = io::copy(&mut Read::take(&mut client.0, 32 << 20), &mut io::sink());
        cut_off += usize::from(bytes.map_or(true, |bytes| bytes < 32 << 20));
    }
    assert!(cut_off >= 1, "nobody went");
    assert!(honest.read(0, 32 << 20).is_ok());
}

#[test]
fn bytes_at_any_offset_are_served_and_neighbours_keep_theirs() {
    for (memory, payload_bytes) in [(true, 32 << 20), (true, 0), (false, 32 << 20)] {
        let served = Served::with_payload(memory, payload_bytes);
        let mut clients = [served.client(), served.client()];
        let mut model = vec![0u8; 4 << 20];
        let mut random = calpe_core::testing::Random::new(7);
        for turn in 0..200u64 {
            let length = if turn % 20 == 0 { random.index(300 << 10) } else { random.index(3000) } + 1;
            let offset = random.index(model.len() - length);
            let range = offset..offset + length;
            let client = &mut clients[random.index(2)];
            match random.index(4) {
                0 => {
                    client.send(ZEROES, turn, offset as u64, length as u32);
                    assert_eq!(client.reply(), (turn, 0));
                    model[range].fill(0);
                }
                1 => {
                    assert!(client.read(offset as u64, length as u32).unwrap() == model[range], "turn {turn}")
                }
                _ => {
                    let data = pattern(length, turn as u8);
                    assert_eq!(client.write(offset as u64, &data), 0);
                    model[range].copy_from_slice(&data);
                }
            }
        }
        assert!(clients[0].read(0, model.len() as u32).unwrap() == model);
    }
}

#[test]
fn writes_of_neighbouring_bytes_at_one_time_lose_nothing() {
    for memory in [false, true] {
        let served = Served::new(memory);
        let mut clients = [served.client(), served.client()];
        // 100 bytes each, so that both clients write most blocks several times; some writes are whole blocks.
        for number in 0..200u64 {
            for (at, client) in clients.iter_mut().enumerate() {
                client.send(WRITE, number, (2 * number + at as u64) * 100, 100);
                client.0.write_all(&[number as u8 + 1; 100]).unwrap();
                client.send(WRITE, 1000 + number, MIB + (2 * number + at as u64) * 512, 512);
                client.0.write_all(&[number as u8 + 1; 512]).unwrap();
            }
        }
        for client in &mut clients {
            (0..400).for_each(|_| assert_eq!(client.reply().1, 0));
        }
        for (offset, length) in [(0, 100), (MIB, 512)] {
            let data = clients[0].read(offset, 400 * length as u32).unwrap();
            for (number, bytes) in data.chunks(length).enumerate() {
                assert!(bytes.iter().all(|&byte| byte == (number / 2) as u8 + 1), "{offset} {number}");
            }
        }
    }
}

#[test]
fn a_trim_in_parts_is_answered_once() {
    let served = Served::new(true);
    let mut client = served.client();
    assert_eq!(client.write(0, &pattern(8 << 20, 1)), 0);
    client.send(TRIM, 5, 0, 64 << 20);
    client.send(READ, 6, 0, 4096);
    let mut replies = Vec::new();
    for _ in 0..2 {
        replies.push(client.reply());
        if replies.ends_with(&[(6, 0)]) {
            client.0.read_exact(&mut [0; 4096]).unwrap();
        }
    }
    replies.sort_unstable();
    assert_eq!(replies, [(5, 0), (6, 0)]);
    assert!(client.read(0, 8 << 20).unwrap().iter().all(|&byte| byte == 0));
}

#[test]
fn an_array_stops_in_time_whatever_its_clients_leave_half_done() {
    let served = Served::with_payload(true, 0);
    let mut half = served.client();
    half.send(WRITE, 1, 0, 4 << 20);
    half.0.write_all(&vec![7; 1 << 20]).unwrap();
    let mut deaf = served.client();
    deaf.send(READ, 1, 0, 32 << 20);
    let mut begun = served.client();
    begun.send(READ, 1, 0, 32 << 20);
    assert_eq!(begun.reply().1, 0);
    let mut honest = served.client();
    assert_eq!(honest.write(32 * MIB, &[1; 4096]), 0);
    let started = Instant::now();
    served.handle.stop_array(served.array).unwrap();
    for mut client in [half, deaf, begun, honest] {
        let mut rest = Vec::new();
        // The end of the stream, or a reset where the client had sent bytes that nobody read.
        let _ = client.0.read_to_end(&mut rest);
    }
    assert!(started.elapsed() < Duration::from_secs(8), "{:?}", started.elapsed());
}
