//! A load over NBD that knows what it wrote: every sector names its write, so each block read back can be
//! recognised as right, mixed, old, or belonging elsewhere. Uses the project's own NBD client.
//!
//! It checks promise 1 after a kill: a block is wholly as the last acknowledged write left it, or wholly as
//! the one write under way would leave it; and once read, it stays so.

use calpe_core::nbd::{ClientConnection, ClientEvent, ClientOptions, Command, Failure, Request};
use calpe_core::testing::Random;
use calpe_core::units::Timestamp;
use std::collections::HashMap;
use std::io::{self, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

/// Bytes of a block, which a crash must not tear.
pub(crate) const BLOCK: usize = 4096;
const SECTOR: usize = 512;
const SECTORS: usize = BLOCK / SECTOR;

/// Most requests on their way at a time.
const DEPTH: usize = 24;

/// A connection to an export.
pub(crate) struct Client {
    stream: UnixStream,
    connection: ClientConnection,
    input: Vec<u8>,
    out: Vec<u8>,
    /// Reads on their way: their start, and the bytes received so far.
    reads: HashMap<u64, (u64, Vec<u8>)>,
    received: u64,
}

/// The end of a request: its cookie and its result, for a read with the bytes.
pub(crate) type Answer = (u64, Result<Vec<u8>, Failure>);

impl Client {
    /// Connects to the only export behind a socket.
    pub(crate) fn connect(socket: &Path) -> io::Result<Client> {
        Client::connect_within(socket, None)
    }

    /// The same; with a limit, any longer wait is an error.
    pub(crate) fn connect_within(socket: &Path, limit: Option<Duration>) -> io::Result<Client> {
        Client::connect_to(socket, "", limit)
    }

    /// The same to an export by its name.
    pub(crate) fn connect_to(socket: &Path, name: &str, limit: Option<Duration>) -> io::Result<Client> {
        let options = ClientOptions::for_export(name).expect("a name that can travel");
        let stream = UnixStream::connect(socket)?;
        stream.set_read_timeout(limit)?;
        stream.set_write_timeout(limit)?;
        let mut client = Client {
            stream,
            connection: ClientConnection::new(options, Timestamp(0)).expect("a name that can travel"),
            input: Vec::new(),
            out: Vec::new(),
            reads: HashMap::new(),
            received: 0,
        };
        while client.connection.export().is_none() {
            client.receive()?;
            while client.connection.poll_event().is_some() {}
        }
        Ok(client)
    }

    /// Hangs up, whatever copies of the socket child processes have at this moment.
    pub(crate) fn hang_up(self) {
        self.stream.shutdown(std::net::Shutdown::Both).expect("it is connected");
    }

    /// The server's description of its export.
    pub(crate) fn export(&self) -> &calpe_core::nbd::RemoteExport {
        self.connection.export().expect("connected")
    }

    /// Bytes that came over the socket so far.
    pub(crate) fn received(&self) -> u64 {
        self.received
    }

    /// Bytes of the export.
    pub(crate) fn size(&self) -> u64 {
        self.connection.export().expect("connected").size
    }

    /// Sends a request, with the payload of a write.
    pub(crate) fn submit(&mut self, request: &Request, payload: &[u8]) -> io::Result<u64> {
        let cookie =
            self.connection.submit(request, &mut self.out).expect("a request that the server offered");
        if request.command == Command::Read {
            self.reads.insert(cookie, (request.offset, vec![0; request.length as usize]));
        }
        self.out.extend_from_slice(payload);
        self.send()?;
        Ok(cookie)
    }

    /// Waits for the next answer.
    pub(crate) fn next(&mut self) -> io::Result<Answer> {
        loop {
            while let Some(event) = self.connection.poll_event() {
                match event {
                    ClientEvent::Data { cookie, offset, length } => {
                        self.take_payload(cookie, offset, length)?
                    }
                    ClientEvent::Done { cookie, result } => {
                        let data = self.reads.remove(&cookie).map(|(_, data)| data).unwrap_or_default();
                        return Ok((cookie, result.map(|()| data)));
                    }
                    // The buffer of a read starts as zeroes.
                    ClientEvent::StartTls => unreachable!("it was not asked for"),
                    ClientEvent::Ready | ClientEvent::Hole { .. } | ClientEvent::Extents { .. } => {}
                }
            }
            self.receive()?;
        }
    }

    /// Sends one request and waits for its answer; no other may be on its way.
    pub(crate) fn call(&mut self, request: &Request, payload: &[u8]) -> io::Result<Result<Vec<u8>, Failure>> {
        self.submit(request, payload)?;
        self.next().map(|(_, result)| result)
    }

    fn send(&mut self) -> io::Result<()> {
        self.stream.write_all(&self.out)?;
        self.out.clear();
        Ok(())
    }

    /// Passes bytes to the connection for one message, waiting for them if there are none.
    fn receive(&mut self) -> io::Result<()> {
        loop {
            if !self.input.is_empty() {
                let taken = self.connection.receive(&self.input, &mut self.out).map_err(io::Error::other)?;
                self.send()?;
                if taken > 0 {
                    self.input.drain(..taken);
                    return Ok(());
                }
            }
            self.fill()?;
        }
    }

    fn fill(&mut self) -> io::Result<()> {
        let mut buffer = [0; 64 << 10];
        match self.stream.read(&mut buffer)? {
            0 => Err(io::ErrorKind::UnexpectedEof.into()),
            count => {
                self.received += count as u64;
                self.input.extend_from_slice(&buffer[..count]);
                Ok(())
            }
        }
    }

    fn take_payload(&mut self, cookie: u64, offset: u64, length: u64) -> io::Result<()> {
        let length = length as usize;
        while self.input.len() < length {
            self.fill()?;
        }
        let (start, data) = self.reads.get_mut(&cookie).expect("a read that is on its way");
        let at = (offset - *start) as usize;
        data[at..at + length].copy_from_slice(&self.input[..length]);
        self.input.drain(..length);
        self.connection.payload_taken().map_err(io::Error::other)
    }
}

/// The number of the write that each sector of a block is of; 0 for zeroes.
type Content = [u32; SECTORS];

#[derive(Clone, Copy, Default)]
struct Block {
    /// The content as the last acknowledged write left it.
    now: Content,
    /// The content as the write on its way will leave it.
    next: Option<Content>,
    /// Reads on their way.
    readers: u32,
}

/// Counts of what the load did.
#[derive(Debug, Default)]
pub(crate) struct Counts {
    pub writes: AtomicU64,
    pub reads: AtomicU64,
    pub flushes: AtomicU64,
}

/// The expected content of the volume, and the load that changes it.
pub(crate) struct Load {
    blocks: Vec<Block>,
    /// Blocks of a whole stripe.
    stripe: usize,
    random: Random,
    generation: u32,
    flights: HashMap<u64, Flight>,
}

/// A request on its way.
enum Flight {
    Write(std::ops::Range<usize>),
    Read(std::ops::Range<usize>),
    Flush,
}

impl Load {
    /// A load on a volume of zeroes.
    pub(crate) fn new(bytes: u64, stripe_bytes: u64, seed: u64) -> Load {
        Load {
            blocks: vec![Block::default(); bytes as usize / BLOCK],
            stripe: stripe_bytes as usize / BLOCK,
            random: Random::new(seed),
            generation: 0,
            flights: HashMap::new(),
        }
    }

    /// Reads and writes until told to stop, then waits for the requests on their way. Panics when a read
    /// returns wrong bytes.
    ///
    /// # Errors
    /// When the connection ends, as it does when the daemon is killed.
    pub(crate) fn run(&mut self, client: &mut Client, stop: &AtomicBool, counts: &Counts) -> io::Result<()> {
        loop {
            let stopping = stop.load(Ordering::Relaxed);
            while !stopping && self.flights.len() < DEPTH {
                self.start(client)?;
            }
            if self.flights.is_empty() {
                return Ok(());
            }
            let (cookie, result) = client.next()?;
            let data = result.unwrap_or_else(|failure| panic!("a request failed: {failure}"));
            match self.flights.remove(&cookie).expect("a request that is on its way") {
                Flight::Write(range) => {
                    counts.writes.fetch_add(1, Ordering::Relaxed);
                    for block in &mut self.blocks[range] {
                        block.now = block.next.take().expect("a write that is on its way");
                    }
                }
                Flight::Read(range) => {
                    counts.reads.fetch_add(1, Ordering::Relaxed);
                    for (at, bytes) in range.zip(data.chunks_exact(BLOCK)) {
                        self.blocks[at].readers -= 1;
                        let now = self.blocks[at].now;
                        assert!(bytes == content(at, now), "{}", told(at, bytes, &[now]));
                    }
                }
                Flight::Flush => {
                    counts.flushes.fetch_add(1, Ordering::Relaxed);
                }
            }
        }
    }

    /// Call it when the connection has ended: reads everything. Each block of a write on its way may or may
    /// not have been written; the content read is the expected one from now on.
    pub(crate) fn settle(&mut self, client: &mut Client) -> io::Result<()> {
        self.flights.clear();
        for first in (0..self.blocks.len()).step_by(64) {
            let range = first..(first + 64).min(self.blocks.len());
            let request = Request::new(Command::Read, (first * BLOCK) as u64, (range.len() * BLOCK) as u64);
            let answer = client.call(&request, &[])?;
            let data = answer.unwrap_or_else(|failure| panic!("blocks {range:?} cannot be read: {failure}"));
            range.zip(data.chunks_exact(BLOCK)).for_each(|(at, bytes)| self.settle_block(at, bytes));
        }
        Ok(())
    }

    /// The same, with the content of the volume read by another client.
    pub(crate) fn settle_on(&mut self, volume: &[u8]) {
        assert_eq!(volume.len(), self.blocks.len() * BLOCK);
        self.flights.clear();
        volume.chunks_exact(BLOCK).enumerate().for_each(|(at, bytes)| self.settle_block(at, bytes));
    }

    fn settle_block(&mut self, at: usize, bytes: &[u8]) {
        let block = &mut self.blocks[at];
        let mut possible = vec![block.now];
        possible.extend(block.next.take());
        let found = possible.iter().find(|content_of| bytes == content(at, **content_of));
        block.now = *found.unwrap_or_else(|| panic!("{}", told(at, bytes, &possible)));
        block.readers = 0;
    }

    /// Sends one request, or none when the blocks drawn are busy.
    fn start(&mut self, client: &mut Client) -> io::Result<()> {
        match self.random.below(100) {
            0..20 => self.start_read(client),
            20..25 => {
                let cookie = client.submit(&Request::new(Command::Flush, 0, 0), &[])?;
                self.flights.insert(cookie, Flight::Flush);
                Ok(())
            }
            25..30 => {
                let range = self.draw(64, 1);
                self.start_write(client, range, 0..SECTORS, true)
            }
            30..45 => {
                let range = self.draw(1, 1);
                let first = self.random.below(SECTORS as u64) as usize;
                let count = 1 + self.random.below((SECTORS - first) as u64) as usize;
                self.start_write(client, range, first..first + count, false)
            }
            45..55 => {
                let range = self.draw(3 * self.stripe, self.stripe);
                self.start_write(client, range, 0..SECTORS, false)
            }
            _ => {
                let range = self.draw(8, 1);
                self.start_write(client, range, 0..SECTORS, false)
            }
        }
    }

    /// Up to `most` blocks, in whole units of `unit`; every second time near the start of the volume, where
    /// blocks are written again and again.
    fn draw(&mut self, most: usize, unit: usize) -> std::ops::Range<usize> {
        let units = self.blocks.len() / unit;
        let near = if self.random.one_in(2) { units.min(units / 16 + 1) } else { units };
        let first = self.random.below(near as u64) as usize;
        let count = (1 + self.random.below((most / unit).max(1) as u64) as usize).min(units - first);
        first * unit..(first + count) * unit
    }

    fn start_read(&mut self, client: &mut Client) -> io::Result<()> {
        let range = self.draw(32, 1);
        if self.blocks[range.clone()].iter().any(|block| block.next.is_some()) {
            return Ok(());
        }
        self.blocks[range.clone()].iter_mut().for_each(|block| block.readers += 1);
        let request = Request::new(Command::Read, (range.start * BLOCK) as u64, (range.len() * BLOCK) as u64);
        let cookie = client.submit(&request, &[])?;
        self.flights.insert(cookie, Flight::Read(range));
        Ok(())
    }

    fn start_write(
        &mut self,
        client: &mut Client,
        range: std::ops::Range<usize>,
        sectors: std::ops::Range<usize>,
        zeroes: bool,
    ) -> io::Result<()> {
        // Two writes to one block at a time may end in either order, and a read at the time of a write may
        // see the old or the new content; so neither is started.
        if self.blocks[range.clone()].iter().any(|block| block.next.is_some() || block.readers > 0) {
            return Ok(());
        }
        self.generation += 1;
        let generation = if zeroes { 0 } else { self.generation };
        let mut payload = Vec::new();
        for at in range.clone() {
            let mut next = self.blocks[at].now;
            next[sectors.clone()].fill(generation);
            self.blocks[at].next = Some(next);
            payload.extend_from_slice(&content(at, next)[sectors.start * SECTOR..sectors.end * SECTOR]);
        }
        let offset = (range.start * BLOCK + sectors.start * SECTOR) as u64;
        let command = if zeroes { Command::WriteZeroes } else { Command::Write };
        let mut request = Request::new(command, offset, payload.len() as u64);
        request.fua = self.random.one_in(8);
        let cookie = client.submit(&request, if zeroes { &[] } else { &payload })?;
        self.flights.insert(cookie, Flight::Write(range));
        Ok(())
    }
}

/// The bytes of a block.
fn content(block: usize, sectors: Content) -> Vec<u8> {
    let mut bytes = vec![0; BLOCK];
    for (at, (sector, generation)) in bytes.chunks_exact_mut(SECTOR).zip(sectors).enumerate() {
        if generation != 0 {
            sector[..8].copy_from_slice(&(block as u64).to_le_bytes());
            sector[8..12].copy_from_slice(&generation.to_le_bytes());
            Random::new((block * SECTORS + at) as u64 ^ u64::from(generation) << 32).fill(&mut sector[12..]);
        }
    }
    bytes
}

/// Describes the wrong content of a block.
fn told(block: usize, bytes: &[u8], possible: &[Content]) -> String {
    let whose = |sector: &[u8]| {
        let owner = u64::from_le_bytes(sector[..8].try_into().expect("8 bytes"));
        let generation = u32::from_le_bytes(sector[8..12].try_into().expect("4 bytes"));
        format!("{owner}/{generation}")
    };
    let found: Vec<String> = bytes.chunks_exact(SECTOR).map(whose).collect();
    format!("block {block}: sectors are of block/write {found:?}, possible are the writes {possible:?}")
}
