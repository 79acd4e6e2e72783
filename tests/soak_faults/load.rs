//! What clients do meanwhile, and the judge of what they may see: reads and writes of all sizes over NBD,
//! checked against the oracle of the simulator. Errors are counted, never believed: what a failed request has
//! changed is known to nobody.

use crate::support::load::Client;
use calpe_core::nbd::{Command, Request};
use calpe_core::testing::{Floor, Oracle, Random, Written, Wrong};
use std::collections::HashMap;
use std::io::{self, ErrorKind};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::sleep;
use std::time::{Duration, Instant};

/// Bytes of a block, which no crash may tear.
pub(crate) const BLOCK: usize = 4096;
const SECTOR: usize = 512;
const SECTORS: usize = BLOCK / SECTOR;

/// Requests on their way at one time.
const DEPTH: usize = 10;

/// Longest that a request may take: longer than anything that the array waits for (a request to a member, a
/// retry, a removal), several times over.
pub(crate) const PATIENCE: Duration = Duration::from_secs(90);

/// Blocks of one read of those that compare the whole volume.
const COMPARED_AT_ONCE: usize = 64;

/// How often, and at what distance, a block is read again that cannot be read, before it counts as lost.
const TRIES: u32 = 4;
const TRY_AGAIN: Duration = Duration::from_millis(800);

/// What was done.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Done {
    pub requests: u64,
    /// Requests that ended in an error.
    pub errors: u64,
}

/// What those say to a load who break the daemon under it.
#[derive(Debug, Default)]
pub(crate) struct Control {
    /// No new requests.
    pub stop: AtomicBool,
    /// How often the daemon was killed or stopped: connections that it had before may end.
    pub crashes: AtomicU64,
    /// The load is over when its connection ends.
    pub last: AtomicBool,
    /// The load is over.
    pub over: AtomicBool,
}

impl Control {
    /// The load has ended, and nobody has told it to.
    pub(crate) fn over_by_itself(&self) -> bool {
        self.over.load(Ordering::Acquire) && !self.last.load(Ordering::Acquire)
    }
}

/// How a load ended.
#[derive(Debug)]
pub(crate) enum End {
    /// It was told to stop, and everything was answered; or it was over at the last crash.
    Stopped,
    /// The connection is gone.
    Gone(io::Error),
    /// A request was not answered in time.
    Stalled,
    /// Something was read that cannot be.
    Wrong(Wrong, String),
}

/// The result of comparing the whole volume.
#[derive(Debug, Default)]
pub(crate) struct Compared {
    pub blocks: u64,
    /// Could not be read at once, and then could.
    pub late: u64,
    /// Cannot be read.
    pub lost: Vec<usize>,
    pub wrong: Vec<Wrong>,
}

enum Flight {
    Write(Written, bool),
    Read { first: usize, count: usize, since: u64 },
    Flush { began: u64 },
}

/// See the head of this file.
pub(crate) struct Load {
    socket: PathBuf,
    oracle: Oracle,
    random: Random,
    stripe_sectors: usize,
    pub done: Done,
    /// What changed something since the volume was compared last.
    diary: Vec<Entry>,
    begun: Instant,
}

/// How a write or a flush ended.
struct Entry {
    at: Duration,
    /// None for a flush.
    written: Option<Written>,
    end: &'static str,
}

impl Load {
    /// The load of a volume of zeroes; `begun`: when all times begin.
    pub(crate) fn new(socket: &Path, bytes: u64, stripe_bytes: u64, seed: u64, begun: Instant) -> Load {
        Load {
            socket: socket.to_owned(),
            oracle: Oracle::new(bytes),
            random: Random::new(seed),
            stripe_sectors: stripe_bytes as usize / SECTOR,
            done: Done::default(),
            diary: Vec::new(),
            begun,
        }
    }

    /// What was written so far is settled.
    pub(crate) fn turn_page(&mut self) {
        self.diary.clear();
    }

    fn enter(&mut self, written: Option<Written>, end: &'static str) {
        self.diary.push(Entry { at: self.begun.elapsed(), written, end });
    }

    /// What was written to a sector since the volume was compared last, and the flushes in between.
    pub(crate) fn history(&self, sector: usize) -> String {
        let mut told = String::new();
        for Entry { at, written, end } in &self.diary {
            let at = at.as_secs_f64();
            match written {
                Some(written) if (written.first..written.first + written.count).contains(&sector) => {
                    told +=
                        &format!("\n  {at:.3} write {} of {} sectors {end}", written.value, written.count);
                }
                Some(_) => {}
                // One of several says enough.
                None if told.ends_with(end) => {}
                None => told += &format!("\n  {at:.3} flush {end}"),
            }
        }
        told
    }

    /// Reads and writes until told to stop, over crashes of the daemon; `pace`: what is waited for after each
    /// answer.
    pub(crate) fn run(&mut self, control: &Control, pace: Duration) -> End {
        loop {
            let crashes = control.crashes.load(Ordering::Acquire);
            let end = self.run_once(&control.stop, pace);
            let expected = control.crashes.load(Ordering::Acquire) > crashes;
            match end {
                End::Gone(_) if expected && control.last.load(Ordering::Acquire) => return End::Stopped,
                End::Gone(_) if expected => {}
                end => return end,
            }
        }
    }

    /// The same on one connection.
    fn run_once(&mut self, stop: &AtomicBool, pace: Duration) -> End {
        let mut client = loop {
            if stop.load(Ordering::Relaxed) {
                return End::Stopped;
            }
            match Client::connect_within(&self.socket, Some(PATIENCE)) {
                Ok(client) => break client,
                // The daemon is not there yet, or not with its array.
                Err(_) => sleep(Duration::from_millis(20)),
            }
        };
        let mut flights = HashMap::new();
        let end = self.drive(&mut client, &mut flights, stop, pace);
        for flight in flights.into_values() {
            if let Flight::Write(written, _) = flight {
                self.enter(Some(written), "was not answered");
                self.oracle.fail_write(&written);
            }
        }
        self.oracle.end_all_reads();
        match end {
            Ok(end) => end,
            Err(error) if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut) => End::Stalled,
            Err(error) => End::Gone(error),
        }
    }

    fn drive(
        &mut self,
        client: &mut Client,
        flights: &mut HashMap<u64, Flight>,
        stop: &AtomicBool,
        pace: Duration,
    ) -> io::Result<End> {
        loop {
            let stopping = stop.load(Ordering::Relaxed);
            while !stopping && flights.len() < DEPTH {
                self.start(client, flights)?;
            }
            if flights.is_empty() {
                return Ok(End::Stopped);
            }
            let (cookie, result) = client.next()?;
            self.done.requests += 1;
            self.done.errors += u64::from(result.is_err());
            match (flights.remove(&cookie).expect("a request that is on its way"), result) {
                (Flight::Write(written, fua), Ok(_)) => {
                    self.enter(Some(written), if fua { "acknowledged, FUA" } else { "acknowledged" });
                    self.oracle.end_write(&written, fua);
                }
                (Flight::Write(written, _), Err(_)) => {
                    self.enter(Some(written), "failed");
                    self.oracle.fail_write(&written);
                }
                (Flight::Read { first, count, since }, result) => {
                    self.oracle.end_read(since);
                    if let Ok(data) = result {
                        assert_eq!(data.len(), count * SECTOR);
                        if let Err(wrong) = self.oracle.check_sectors(first, &data, Floor::Answered(since)) {
                            let history = self.history(wrong.sector);
                            return Ok(End::Wrong(wrong, history));
                        }
                    }
                }
                (Flight::Flush { began }, Ok(_)) => {
                    self.enter(None, "acknowledged");
                    self.oracle.end_flush(began);
                }
                (Flight::Flush { .. }, Err(_)) => self.enter(None, "failed"),
            }
            if !pace.is_zero() {
                sleep(pace);
            }
        }
    }

    fn start(&mut self, client: &mut Client, flights: &mut HashMap<u64, Flight>) -> io::Result<()> {
        match self.random.below(100) {
            0..30 => {
                let (first, count) = self.draw(32 * SECTORS, 1);
                let since = self.oracle.begin_read();
                let request = Request::new(Command::Read, bytes(first), bytes(count));
                let cookie = client.submit(&request, &[])?;
                flights.insert(cookie, Flight::Read { first, count, since });
                Ok(())
            }
            30..36 => {
                let began = self.oracle.now();
                let cookie = client.submit(&Request::new(Command::Flush, 0, 0), &[])?;
                flights.insert(cookie, Flight::Flush { began });
                Ok(())
            }
            36..40 => self.zero(client, flights, Command::WriteZeroes),
            40..43 => self.zero(client, flights, Command::Trim),
            43..55 => {
                let (first, count) = self.draw(SECTORS, 1);
                self.write(client, flights, first, count)
            }
            55..65 => {
                let (first, count) = self.draw(3 * self.stripe_sectors, self.stripe_sectors);
                self.write(client, flights, first, count)
            }
            _ => {
                let (first, count) = self.draw(8 * SECTORS, SECTORS);
                self.write(client, flights, first, count)
            }
        }
    }

    /// Up to `most` sectors, in whole units; every second time near the start of the volume, where requests
    /// meet.
    fn draw(&mut self, most: usize, unit: usize) -> (usize, usize) {
        let units = self.oracle.sectors() / unit;
        let near = if self.random.one_in(2) { units / 16 + 1 } else { units };
        let first = self.random.index(near.min(units));
        let count = (1 + self.random.index((most / unit).max(1))).min(units - first);
        (first * unit, count * unit)
    }

    fn write(
        &mut self,
        client: &mut Client,
        flights: &mut HashMap<u64, Flight>,
        first: usize,
        count: usize,
    ) -> io::Result<()> {
        if self.oracle.is_busy(first, count) {
            return Ok(());
        }
        let written = self.oracle.begin_write(first, count);
        let mut request = Request::new(Command::Write, bytes(first), bytes(count));
        request.fua = self.random.one_in(8);
        self.submit(client, flights, &request, written, &Oracle::bytes_of(&written))
    }

    fn zero(
        &mut self,
        client: &mut Client,
        flights: &mut HashMap<u64, Flight>,
        command: Command,
    ) -> io::Result<()> {
        let (first, count) = self.draw(2 * self.stripe_sectors, SECTORS);
        if self.oracle.is_busy(first, count) {
            return Ok(());
        }
        let written = self.oracle.begin_zeroes(first, count, command == Command::Trim);
        let mut request = Request::new(command, bytes(first), bytes(count));
        request.fua = self.random.one_in(8);
        self.submit(client, flights, &request, written, &[])
    }

    fn submit(
        &mut self,
        client: &mut Client,
        flights: &mut HashMap<u64, Flight>,
        request: &Request,
        written: Written,
        payload: &[u8],
    ) -> io::Result<()> {
        match client.submit(request, payload) {
            Ok(cookie) => {
                flights.insert(cookie, Flight::Write(written, request.fua));
                Ok(())
            }
            // It may have arrived all the same.
            Err(error) => {
                self.oracle.fail_write(&written);
                Err(error)
            }
        }
    }

    /// Reads every block, with nothing else under way. What is read is what is there from now on.
    ///
    /// # Errors
    /// When the connection ends, or an answer does not come.
    pub(crate) fn compare(&mut self, power_was_cut: bool) -> io::Result<Compared> {
        let floor = if power_was_cut { Floor::Flushed } else { Floor::Answered(self.oracle.now()) };
        let mut client = Client::connect_within(&self.socket, Some(PATIENCE))?;
        let mut compared = Compared::default();
        let mut missing = Vec::new();
        let mut read = |first: usize, count: usize| {
            let request = Request::new(Command::Read, bytes(first * SECTORS), bytes(count * SECTORS));
            client.call(&request, &[])
        };
        let blocks = self.oracle.blocks();
        for first in (0..blocks).step_by(COMPARED_AT_ONCE) {
            let count = COMPARED_AT_ONCE.min(blocks - first);
            match read(first, count)? {
                Ok(data) => judge(&mut self.oracle, first, &data, floor, &mut compared),
                Err(_) => missing.extend(first..first + count),
            }
        }
        for attempt in 0..TRIES {
            let mut still = Vec::new();
            for block in std::mem::take(&mut missing) {
                match read(block, 1)? {
                    Ok(data) => {
                        compared.late += u64::from(attempt > 0);
                        judge(&mut self.oracle, block, &data, floor, &mut compared);
                    }
                    Err(_) => still.push(block),
                }
            }
            missing = still;
            if missing.is_empty() {
                break;
            }
            if attempt + 1 < TRIES {
                sleep(TRY_AGAIN);
            }
        }
        compared.lost = missing;
        Ok(compared)
    }
}

fn judge(oracle: &mut Oracle, first: usize, data: &[u8], floor: Floor, compared: &mut Compared) {
    for (at, bytes) in data.chunks_exact(BLOCK).enumerate() {
        compared.blocks += 1;
        match oracle.check(first + at, bytes, floor) {
            Ok(()) => oracle.observe(first + at, bytes),
            Err(wrong) => compared.wrong.push(wrong),
        }
    }
}

fn bytes(sectors: usize) -> u64 {
    (sectors * SECTOR) as u64
}

/// Waits until something is so, looking often.
pub(crate) fn until(limit: Duration, mut reached: impl FnMut() -> bool) -> bool {
    let deadline = Instant::now() + limit;
    while !reached() {
        if Instant::now() >= deadline {
            return false;
        }
        sleep(Duration::from_millis(20));
    }
    true
}
