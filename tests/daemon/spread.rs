//! Clients on several reactors: what one was told is written, all others read, whatever the thread that owns
//! the array does meanwhile.

use crate::support::load::Client;
use crate::support::{Up, calpe, run};
use calpe_core::nbd::{Command, Request};
use calpe_core::testing::Random;
use std::fs;
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;
use std::time::Duration;

const BLOCK: u64 = 4096;
/// Of 3+2 with chunks of 16 KiB.
const STRIPE_BLOCKS: u64 = 12;
const STRIPES: u64 = 40;
const BLOCKS: u64 = STRIPES * STRIPE_BLOCKS;
const WRITERS: u64 = 2;
const READERS: u64 = 4;

/// Each block has versions. Every eighth one is zeroes, made by a TRIM of its stripe.
const TRIMMED: u64 = 7;

/// What is known of each block.
#[derive(Default)]
struct Known {
    /// The newest version that a client may see: written, perhaps not acknowledged.
    newest: AtomicU64,
    /// The oldest that one may see: acknowledged, or read already.
    oldest: AtomicU64,
}

fn content(block: u64, version: u64) -> Vec<u8> {
    let word = if version % 8 == TRIMMED || version == 0 { 0 } else { block << 40 | version };
    word.to_le_bytes().repeat(BLOCK as usize / 8)
}

/// Writes blocks and whole stripes of its own, and trims some.
fn write(socket: &Path, known: &[Known], writer: u64, is_over: &AtomicBool) {
    let mut client = Client::connect(socket).expect("it is served");
    let mut random = Random::new(writer);
    while !is_over.load(Ordering::Relaxed) {
        let stripe = random.below(STRIPES / WRITERS) * WRITERS + writer;
        let (command, blocks) = match random.below(8) {
            0 => (Command::Trim, stripe * STRIPE_BLOCKS..(stripe + 1) * STRIPE_BLOCKS),
            1 | 2 => (Command::Write, stripe * STRIPE_BLOCKS..(stripe + 1) * STRIPE_BLOCKS),
            _ => {
                let first = stripe * STRIPE_BLOCKS + random.below(STRIPE_BLOCKS);
                (Command::Write, first..first + 1)
            }
        };
        let next = |block: u64| {
            let now = known[block as usize].newest.load(Ordering::SeqCst) + 1;
            match command {
                Command::Trim => now + (TRIMMED + 8 - now % 8) % 8,
                _ => now + u64::from(now % 8 == TRIMMED),
            }
        };
        let versions: Vec<(u64, u64)> = blocks.clone().map(|block| (block, next(block))).collect();
        for &(block, version) in &versions {
            known[block as usize].newest.store(version, Ordering::SeqCst);
        }
        let (offset, length) = (blocks.start * BLOCK, (blocks.end - blocks.start) * BLOCK);
        let payload: Vec<u8> = match command {
            Command::Write => versions.iter().flat_map(|&(block, version)| content(block, version)).collect(),
            _ => Vec::new(),
        };
        let answer = client.call(&Request::new(command, offset, length), &payload).expect("it is connected");
        answer.expect("nothing is lost that could not be had");
        for &(block, version) in &versions {
            known[block as usize].oldest.fetch_max(version, Ordering::SeqCst);
        }
    }
}

/// Reads runs of blocks, several requests at a time. Returns the number of blocks.
fn read(socket: &Path, known: &[Known], reader: u64, is_over: &AtomicBool) -> u64 {
    let mut client = Client::connect(socket).expect("it is served");
    let mut random = Random::new(100 + reader);
    let mut count = 0;
    while !is_over.load(Ordering::Relaxed) {
        let first = random.below(BLOCKS);
        let many = if random.below(20) == 0 { BLOCKS } else { 1 + random.below(8) };
        let blocks = first..(first + many).min(BLOCKS);
        let oldest: Vec<u64> =
            blocks.clone().map(|block| known[block as usize].oldest.load(Ordering::SeqCst)).collect();
        let length = (blocks.end - blocks.start) * BLOCK;
        let request = Request::new(Command::Read, blocks.start * BLOCK, length);
        let read = client.call(&request, &[]).expect("it is connected").expect("it can be read");
        for ((block, oldest), bytes) in blocks.zip(oldest).zip(read.chunks(BLOCK as usize)) {
            let newest = known[block as usize].newest.load(Ordering::SeqCst);
            let word = u64::from_le_bytes(bytes[..8].try_into().expect("eight bytes"));
            // The oldest version that this may be, where it is zeroes.
            let version = match word {
                0 if oldest == 0 => 0,
                0 => oldest + (TRIMMED + 8 - oldest % 8) % 8,
                _ => word & ((1 << 40) - 1),
            };
            assert_eq!(bytes, content(block, version), "block {block} is no version of itself: {word:x}");
            assert!(
                (oldest..=newest).contains(&version),
                "block {block}: version {version} was read, not one of {oldest} to {newest}"
            );
            known[block as usize].oldest.fetch_max(version, Ordering::SeqCst);
        }
        count += length / BLOCK;
    }
    count
}

/// Over and over: writes on a connection that is closed without waiting, then newer ones on another one.
/// Returns how often.
fn write_and_go_on(socket: &Path, first: u64, is_over: &AtomicBool) -> u64 {
    let mut version = 0;
    let mut stays = Client::connect(socket).expect("it is served");
    let request = |command, block: u64| Request::new(command, block * BLOCK, BLOCK);
    while !is_over.load(Ordering::Relaxed) {
        version += 8;
        let mut leaves = Client::connect(socket).expect("it is served");
        for block in first..first + 4 {
            leaves
                .submit(&request(Command::Write, block), &content(block, version))
                .expect("it is connected");
        }
        leaves.hang_up();
        for block in first..first + 4 {
            let newer = content(block, version + 1);
            stays.call(&request(Command::Write, block), &newer).expect("it is connected").expect("written");
        }
        for block in first..first + 4 {
            let read =
                stays.call(&request(Command::Read, block), &[]).expect("it is connected").expect("read");
            let word = u64::from_le_bytes(read[..8].try_into().expect("eight bytes"));
            assert!(read == content(block, version + 1), "block {block}, version {}: {word:x}", version + 1);
        }
    }
    version / 8
}

#[test]
fn what_a_closed_connection_left_behind_never_lands_on_later_writes_of_another_reactor() {
    let dir = tempfile::tempdir_in("/dev/shm").expect("a directory");
    let up = serve(dir.path(), "blake3");
    let (socket, is_over) = (up.socket(), AtomicBool::new(false));
    let rounds = thread::scope(|scope| {
        let (socket, is_over) = (&socket, &is_over);
        let threads: Vec<_> =
            (0..12).map(|nth| scope.spawn(move || write_and_go_on(socket, nth * 4, is_over))).collect();
        thread::sleep(Duration::from_secs(4));
        is_over.store(true, Ordering::Relaxed);
        threads.into_iter().map(|thread| thread.join().expect("nothing landed late")).sum::<u64>()
    });
    assert!(rounds > 50, "only {rounds} rounds");
    up.stop();
}

/// An array of 3+2, served by four reactors.
fn serve(dir: &Path, checksum: &str) -> Up {
    let members: Vec<_> = (0..5).map(|at| dir.join(format!("m{at}"))).collect();
    let shape =
        ["--data", "3", "--parity", "2", "--chunk", "16KiB", "--size", "8MiB", "--checksum", checksum];
    run(calpe().args(["create", "tank"]).args(shape).args(&members));
    let config = dir.join("calpe.toml");
    let at = dir.display();
    fs::create_dir(dir.join("data")).expect("a directory");
    let text = format!(
        "[daemon]\nruntime_dir = \"{at}/data\"\nreactors = 4\n[gpu]\nmode = \"off\"\n[[array]]\nname = \"tank\"\nsearch = [\"{at}\"]\n"
    );
    fs::write(&config, text).expect("a configuration");
    Up::serve(dir, &config)
}

fn everybody_sees_what_was_written(parent: &str, checksum: &str) {
    let dir = tempfile::tempdir_in(parent).expect("a directory");
    let up = serve(dir.path(), checksum);
    let socket = up.socket();
    let known: Vec<Known> = (0..BLOCKS).map(|_| Known::default()).collect();
    let is_over = AtomicBool::new(false);
    let read = thread::scope(|scope| {
        for writer in 0..WRITERS {
            let (socket, known, is_over) = (&socket, &known, &is_over);
            scope.spawn(move || write(socket, known, writer, is_over));
        }
        let readers: Vec<_> = (0..READERS)
            .map(|reader| {
                let (socket, known, is_over) = (&socket, &known, &is_over);
                scope.spawn(move || read(socket, known, reader, is_over))
            })
            .collect();
        thread::sleep(Duration::from_secs(1));
        up.calpe(&["offline", "tank", "1"]);
        thread::sleep(Duration::from_millis(500));
        up.calpe(&["online", "tank", "1"]);
        thread::sleep(Duration::from_millis(1500));
        is_over.store(true, Ordering::Relaxed);
        readers.into_iter().map(|reader| reader.join().expect("it saw nothing wrong")).sum::<u64>()
    });
    assert!(read > 1000, "only {read} blocks were read");
    up.stop();
}

#[test]
fn what_was_written_is_read_on_every_reactor_from_members_in_memory() {
    for checksum in ["blake3", "crc32c", "none"] {
        everybody_sees_what_was_written("/dev/shm", checksum);
    }
}

#[test]
fn what_was_written_is_read_on_every_reactor_from_members_on_disk() {
    for checksum in ["blake3", "crc32c", "none"] {
        everybody_sees_what_was_written("/tmp", checksum);
    }
}
