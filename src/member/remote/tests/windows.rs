//! Windows of one remote device, in engines of their own.

use super::*;

#[test]
fn windows_share_the_connection_and_come_back_with_all_their_witnesses() {
    const HALF: u64 = BYTES as u64 / 2;
    let server = Server::new(FLAGS);
    let device = Device::open(&server.uri(), Access::Exclusive).unwrap();
    device.set_limits(TimeLimits { remote: limits(5000, 2000), ..TimeLimits::default() });
    let windows = device.windows(&[0..HALF, HALF..BYTES as u64]);
    drop(device);
    for (window, byte) in windows.iter().zip([1, 2]) {
        window.write_at(0, &[byte; 4096]).unwrap();
        window.set_remote_witness(Arc::new(move |read: ReadAt<'_>| {
            let mut seen = [0; 4096];
            read(0, &mut seen)?;
            let is_same = seen == [byte; 4096];
            if is_same { Ok(()) } else { Err(RemoteError::Changed(format!("no {byte} in its window"))) }
        }));
        window.flush().unwrap();
    }
    let mut benches: Vec<Bench> = windows
        .into_iter()
        .map(|window| {
            let server = Server { dir: tempfile::tempdir().unwrap(), state: Arc::clone(&server.state) };
            let (mut ring, pool) = (Ring::new().unwrap(), Pool::new(1 << 20).unwrap());
            let mut members = MemberIo::new(1, &pool, 1);
            members.add(&mut ring, ID, OWNER, window);
            Bench { server, ring, pool, members }
        })
        .collect();
    for (bench, byte) in benches.iter_mut().zip([1, 2]) {
        bench.assert_read(0, 4096, byte);
        bench.run(bench.write_op(HALF - 4096, 4096, byte + 10, true)).unwrap();
    }
    assert_eq!(server.connections(), 1);
    let at = |offset: u64| server.state.disk.lock().unwrap()[offset as usize];
    assert_eq!([0, HALF - 1, HALF, BYTES as u64 - 1].map(at), [1, 11, 2, 12]);
    // One of them is closed, and nothing changes for the other.
    let Bench { mut members, .. } = benches.remove(0);
    members.release(ID);
    server.hang_up();
    benches[0].assert_read(0, 4096, 2);
    assert_eq!(server.connections(), 2);
    server.state.disk.lock().unwrap()[0] = 77;
    server.hang_up();
    assert_eq!(benches[0].given_up(), libc::ESTALE);
    let lost = lost(&server.uri()).expect("a window was in use");
    assert!(lost.reason.contains("no 1 in its window"), "{}", lost.reason);
}
