//! An NBD server on a unix socket whose exports fail on command, at run time: errors by kind, operation and
//! region, for a time or a number of requests; delays; requests that are never answered, or carried out when
//! the client is gone; connections that end in every way; refused connections; a cache that loses unflushed
//! writes; a rollback to an earlier image.
//!
//! It is for tests with a real daemon whose members are such exports. It lives in the process of the test and
//! outlives the daemon. It keeps two promises to clients: a FLUSH answered with success covers everything
//! answered before on all connections, and a request whose connection is gone is done within [`LANDING_MAX`]
//! or not at all (docs/remote.md, "What happens when a host goes away"). [`Act::Lie`] and [`Export::restore`]
//! break them on purpose.
#![allow(dead_code)]

mod disk;
mod faults;
mod wire;

pub(crate) use disk::{Disk, Keep, SECTOR};
pub(crate) use faults::{Act, Cut, Effect, Errno, Op, Ops, Rule};
pub(crate) use wire::Offer;

use calpe_core::testing::Random;
use faults::Faults;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use std::cell::RefCell;
use std::collections::BTreeMap;
use std::io::{Read, Write};
use std::net::Shutdown;
use std::os::fd::AsFd;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError, Weak};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};
use wire::{Catalogue, PAYLOAD_MAX, Request};

/// A request whose connection has ended is done within this time, or never. Half of the time that a daemon
/// waits after it was killed, so that the promise holds on a machine under load, too.
pub(crate) const LANDING_MAX: Duration = Duration::from_millis(500);

/// A request that is this late all the same, because this process did not run, is dropped.
const LANDING_LATEST: Duration = Duration::from_millis(1500);

/// Interval at which a shut door is polled, in milliseconds.
const DOOR_LOOK_MS: u16 = 20;

/// What happens to clients that connect.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Door {
    Open,
    /// The server does not listen.
    Shut,
    /// Connections are accepted and closed at once.
    Dropping,
    /// Connections are accepted, and the server stays silent.
    Silent,
}

/// See the head of this file.
pub(crate) struct Server {
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
}

struct Shared {
    socket: PathBuf,
    door: Mutex<Door>,
    exports: Mutex<BTreeMap<String, Export>>,
    stopping: AtomicBool,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Server {
    /// Listens at a socket; has no exports yet.
    pub(crate) fn start(socket: &Path) -> Server {
        let shared = Arc::new(Shared {
            socket: socket.to_owned(),
            door: Mutex::new(Door::Open),
            exports: Mutex::default(),
            stopping: AtomicBool::new(false),
        });
        let listener = listen(socket);
        let own = Arc::clone(&shared);
        let thread = thread::Builder::new().name("fault-server".into());
        let thread = thread.spawn(move || own.accept(listener)).expect("a thread");
        Server { shared, thread: Some(thread) }
    }

    /// Serves an export under a name, in place of any earlier one of that name. The empty name is for clients
    /// that ask for no name.
    pub(crate) fn offer(&self, name: &str, export: &Export) {
        lock(&self.shared.exports).insert(name.to_owned(), export.clone());
    }

    /// Stops serving an export; its connections end.
    pub(crate) fn withdraw(&self, name: &str) -> Option<Export> {
        let export = lock(&self.shared.exports).remove(name);
        if let Some(export) = &export {
            export.cut();
        }
        export
    }

    /// The URI of an export.
    pub(crate) fn uri(&self, name: &str) -> String {
        format!("nbd+unix:///{name}?socket={}", self.shared.socket.display())
    }

    pub(crate) fn set_door(&self, door: Door) {
        *lock(&self.shared.door) = door;
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.shared.stopping.store(true, Ordering::Release);
        if let Some(thread) = self.thread.take() {
            // A panic of the thread has been reported already.
            let _ = thread.join();
        }
        for export in lock(&self.shared.exports).values() {
            export.cut();
        }
        let _ = std::fs::remove_file(&self.shared.socket);
    }
}

fn listen(socket: &Path) -> UnixListener {
    // Removes the socket of an earlier listener.
    let _ = std::fs::remove_file(socket);
    let listener = UnixListener::bind(socket).unwrap_or_else(|error| panic!("{}: {error}", socket.display()));
    listener.set_nonblocking(true).expect("a listener");
    listener
}

impl Shared {
    fn accept(self: Arc<Shared>, listener: UnixListener) {
        let mut listener = Some(listener);
        let mut silent: Vec<UnixStream> = Vec::new();
        while !self.stopping.load(Ordering::Acquire) {
            let door = *lock(&self.door);
            if door != Door::Silent {
                silent.clear();
            }
            if door == Door::Shut {
                listener = None;
                thread::sleep(Duration::from_millis(DOOR_LOOK_MS.into()));
                continue;
            }
            let open = listener.get_or_insert_with(|| listen(&self.socket));
            let mut fds = [PollFd::new(open.as_fd(), PollFlags::POLLIN)];
            // Interrupted or not, waiting connections are accepted.
            let _ = poll(&mut fds, PollTimeout::from(DOOR_LOOK_MS));
            let Ok((stream, _)) = open.accept() else { continue };
            match *lock(&self.door) {
                Door::Open => {
                    let shared = Arc::clone(&self);
                    let thread = thread::Builder::new().name("fault-connection".into());
                    thread.spawn(move || shared.serve(stream)).expect("a thread");
                }
                Door::Silent => silent.push(stream),
                Door::Shut | Door::Dropping => drop(stream),
            }
        }
    }

    fn serve(&self, mut stream: UnixStream) {
        let Ok(own) = stream.try_clone() else { return };
        let visit = Visit { shared: self, stream: RefCell::new(Some(own)), chosen: RefCell::new(None) };
        let greeted = wire::shake_hands(&mut stream, &visit);
        let chosen = visit.chosen.take();
        // From here on only the connection holds the descriptor, so its end closes the stream.
        drop(stream);
        if let (Ok(()), Some((export, connection))) = (greeted, chosen) {
            export.serve(&connection);
        }
    }
}

/// A client in its handshake.
struct Visit<'a> {
    shared: &'a Shared,
    /// The stream, until it becomes a connection.
    stream: RefCell<Option<UnixStream>>,
    chosen: RefCell<Option<(Export, Arc<Connection>)>>,
}

impl Catalogue for Visit<'_> {
    fn look_up(&self, name: &str) -> Option<(u64, Offer)> {
        lock(&self.shared.exports).get(name).map(|export| (export.bytes(), export.0.offer))
    }

    fn names(&self) -> Vec<String> {
        lock(&self.shared.exports).keys().cloned().collect()
    }

    /// From here on the client is one of the export: whatever ends all connections of the export ends this
    /// one.
    fn choose(&self, name: &str, structured: bool) {
        let Some(export) = lock(&self.shared.exports).get(name).cloned() else { return };
        let stream = self.stream.take().expect("a client chooses once");
        let connection = Arc::new(Connection {
            stream,
            structured,
            sending: Mutex::new(()),
            unanswered: AtomicU64::new(0),
            hung: AtomicU64::new(0),
            ended: OnceLock::new(),
            life: export.0.life.load(Ordering::Acquire),
        });
        lock(&export.0.connections).push(Arc::downgrade(&connection));
        *self.chosen.borrow_mut() = Some((export, connection));
    }
}

/// A disk as clients see it, with its faults.
#[derive(Clone)]
pub(crate) struct Export(Arc<Inner>);

struct Inner {
    offer: Offer,
    disk: Mutex<Disk>,
    faults: Mutex<Faults>,
    random: Mutex<Random>,
    connections: Mutex<Vec<Weak<Connection>>>,
    /// Counts power cuts.
    life: AtomicU64,
    late: Mutex<Late>,
    late_changed: Condvar,
}

/// Jobs to be done later.
#[derive(Default)]
struct Late {
    jobs: BTreeMap<(Instant, u64), Job>,
    numbered: u64,
    /// A job is being done now.
    busy: bool,
}

struct Job {
    connection: Weak<Connection>,
    request: Request,
    payload: Vec<u8>,
    /// Life of the server in which the request came.
    life: u64,
    /// The reply, if the request was done when it came.
    reply: Option<Vec<u8>>,
    /// When its connection ended.
    orphaned: Option<Instant>,
}

/// A client.
struct Connection {
    stream: UnixStream,
    structured: bool,
    /// One reply at a time.
    sending: Mutex<()>,
    unanswered: AtomicU64,
    /// Requests that will never be answered.
    hung: AtomicU64,
    ended: OnceLock<Instant>,
    /// The life of the server in which it was made; in a later one none of its requests is done.
    life: u64,
}

/// What becomes of a request.
enum Verdict {
    GoOn,
    /// The connection is over.
    End,
}

impl Export {
    /// A disk of zeroes; the seed decides all random choices.
    pub(crate) fn new(bytes: u64, seed: u64, offer: Offer) -> Export {
        let inner = Arc::new(Inner {
            offer,
            disk: Mutex::new(Disk::new(bytes, seed)),
            faults: Mutex::default(),
            random: Mutex::new(Random::new(!seed)),
            connections: Mutex::default(),
            life: AtomicU64::new(0),
            late: Mutex::default(),
            late_changed: Condvar::new(),
        });
        let weak = Arc::downgrade(&inner);
        let thread = thread::Builder::new().name("fault-late".into());
        thread.spawn(move || do_late(&weak)).expect("a thread");
        Export(inner)
    }

    pub(crate) fn bytes(&self) -> u64 {
        lock(&self.0.disk).bytes()
    }

    pub(crate) fn inject(&self, rule: Rule) {
        lock(&self.0.faults).add(rule);
    }

    /// Removes all rules. Delayed requests stay delayed.
    pub(crate) fn clear(&self) {
        lock(&self.0.faults).clear();
    }

    /// How often each kind of fault has struck.
    pub(crate) fn struck(&self) -> BTreeMap<&'static str, u64> {
        lock(&self.0.faults).struck().clone()
    }

    /// Closes all connections cleanly. Requests that have come are done.
    pub(crate) fn cut(&self) {
        for connection in self.connected() {
            connection.hang_up();
        }
    }

    /// Cuts the server's power: connections end, delayed requests are never done, and unflushed writes are
    /// lost except what `keep` lets survive.
    pub(crate) fn power_cut(&self, keep: Keep) {
        lock(&self.0.faults).note("power cut");
        let mut disk = lock(&self.0.disk);
        self.0.life.fetch_add(1, Ordering::AcqRel);
        disk.lose(keep);
        drop(disk);
        self.cut();
        lock(&self.0.late).jobs.clear();
    }

    /// The content that a power cut would leave if it lost the whole cache.
    pub(crate) fn stable(&self) -> Vec<u8> {
        lock(&self.0.disk).stable().to_vec()
    }

    /// Replaces the content by an earlier image.
    pub(crate) fn restore(&self, content: &[u8]) {
        lock(&self.0.faults).note("rollback");
        lock(&self.0.disk).restore(content);
    }

    /// Flips a bit.
    pub(crate) fn flip(&self, offset: u64, bit: u8) {
        lock(&self.0.faults).note("rot");
        lock(&self.0.disk).flip(offset, bit);
    }

    /// The content that reads see now.
    pub(crate) fn read(&self, offset: u64, length: usize) -> Vec<u8> {
        lock(&self.0.disk).read(offset, length).to_vec()
    }

    /// Number of clients that have chosen this export.
    pub(crate) fn connections(&self) -> usize {
        self.connected().len()
    }

    /// Whether nothing is delayed and no request hangs.
    pub(crate) fn is_well(&self) -> bool {
        let late = lock(&self.0.late);
        let hung = |connection: &Arc<Connection>| connection.hung.load(Ordering::Acquire) > 0;
        late.jobs.is_empty() && !late.busy && !self.connected().iter().any(hung)
    }

    /// Whether no request is delayed or unanswered.
    pub(crate) fn is_idle(&self) -> bool {
        let late = lock(&self.0.late);
        let unanswered = |connection: &Arc<Connection>| connection.unanswered.load(Ordering::Acquire) > 0;
        late.jobs.is_empty() && !late.busy && !self.connected().iter().any(unanswered)
    }

    fn connected(&self) -> Vec<Arc<Connection>> {
        let mut connections = lock(&self.0.connections);
        connections.retain(|connection| connection.strong_count() > 0);
        let alive = connections.iter().filter_map(Weak::upgrade);
        alive.filter(|connection| connection.ended.get().is_none()).collect()
    }

    fn below(&self, end: u64) -> u64 {
        lock(&self.0.random).below(end)
    }

    fn serve(&self, connection: &Arc<Connection>) {
        // Reads without a buffer: bytes left unread make the end of a connection a reset.
        while let Ok(request) = Request::read(&mut &connection.stream) {
            if request.leaves {
                break;
            }
            match self.take(connection, request) {
                Ok(Verdict::GoOn) => {}
                Ok(Verdict::End) | Err(_) => break,
            }
        }
        connection.end();
        self.orphan(connection);
    }

    /// Handles one request until it is done or delayed.
    fn take(&self, connection: &Arc<Connection>, request: Request) -> std::io::Result<Verdict> {
        connection.unanswered.fetch_add(1, Ordering::AcqRel);
        let Some(op) = request.op else {
            return connection.answer(&request.answer(connection.structured, Err(Errno::Inval)));
        };
        let range = request.offset..request.offset.saturating_add(request.length.into());
        let act = lock(&self.0.faults).strike(op, &range, Instant::now(), |end| self.below(end));
        if act == Some(Act::Cut(Cut::Reset)) {
            // The payload stays unread, which resets this connection. The export's other connections have
            // nothing unread and just end.
            connection.end();
            self.cut();
            return Ok(Verdict::End);
        }
        let mut payload = Vec::new();
        if op == Op::Write {
            if request.length > PAYLOAD_MAX {
                return Err(std::io::Error::other("a payload that is too long"));
            }
            payload.resize(request.length as usize, 0);
            (&connection.stream).read_exact(&mut payload)?;
        }
        let refuse = |errno| request.answer(connection.structured, Err(errno));
        match act {
            None => connection.answer(&self.perform_for(connection, &request, &payload)),
            Some(Act::Error { errno, effect }) => {
                self.partly(connection, &request, &payload, effect);
                connection.answer(&refuse(errno))
            }
            Some(Act::Lie) if op != Op::Read => {
                connection.answer(&request.answer(connection.structured, Ok(&[])))
            }
            Some(Act::Lie) => connection.answer(&self.perform_for(connection, &request, &payload)),
            Some(Act::Hang(effect)) => {
                self.partly(connection, &request, &payload, effect);
                connection.hung.fetch_add(1, Ordering::AcqRel);
                Ok(Verdict::GoOn)
            }
            Some(Act::Delay(time)) => {
                self.later(connection, time, request, payload, None);
                Ok(Verdict::GoOn)
            }
            Some(Act::LateReply(time)) => {
                let reply = self.perform_for(connection, &request, &payload);
                self.later(connection, time, request, Vec::new(), Some(reply));
                Ok(Verdict::GoOn)
            }
            Some(Act::Cut(how)) => {
                if how == Cut::MidReply {
                    let reply = self.perform_for(connection, &request, &payload);
                    let _ = connection.send(&reply[..reply.len() / 2]);
                }
                self.cut();
                Ok(Verdict::End)
            }
        }
    }

    /// Does the part of a request that `effect` says, though it is answered with an error or not at all.
    fn partly(&self, connection: &Connection, request: &Request, payload: &[u8], effect: Effect) {
        match effect {
            Effect::Nothing => {}
            Effect::Whole => drop(self.perform_for(connection, request, payload)),
            Effect::Half => {
                let half = payload.len() / 2 / SECTOR * SECTOR;
                if half > 0 {
                    let request = Request { length: half as u32, ..*request };
                    self.perform_for(connection, &request, &payload[..half]);
                }
            }
            Effect::CacheLost if request.op == Some(Op::Flush) => {
                lock(&self.0.faults).note("cache lost at a flush");
                lock(&self.0.disk).lose(Keep::Blocks);
            }
            Effect::CacheLost => {}
        }
    }

    fn perform_for(&self, connection: &Connection, request: &Request, payload: &[u8]) -> Vec<u8> {
        self.perform(connection.life, connection.structured, request, payload)
    }

    /// Does a request that came in a life of the server, and returns the reply.
    fn perform(&self, life: u64, structured: bool, request: &Request, payload: &[u8]) -> Vec<u8> {
        let mut disk = lock(&self.0.disk);
        let answer = |outcome| request.answer(structured, outcome);
        // Checked under the lock: after a power cut, no request from before it is done.
        if life != self.0.life.load(Ordering::Acquire) {
            return answer(Err(Errno::Shutdown));
        }
        let (offset, length) = (request.offset, u64::from(request.length));
        if request.op != Some(Op::Flush) && !disk.has(offset, length) {
            return answer(Err(Errno::Inval));
        }
        match request.op {
            Some(Op::Read) if request.length <= PAYLOAD_MAX => {
                return answer(Ok(disk.read(offset, request.length as usize)));
            }
            Some(Op::Write) => disk.write(offset, payload, request.fua),
            Some(Op::Trim | Op::Zero) => disk.zero(offset, length, request.fua),
            Some(Op::Flush) => disk.flush(),
            Some(Op::Read) | None => return answer(Err(Errno::Inval)),
        }
        answer(Ok(&[]))
    }

    fn later(
        &self,
        connection: &Arc<Connection>,
        time: Duration,
        request: Request,
        payload: Vec<u8>,
        reply: Option<Vec<u8>>,
    ) {
        let mut late = lock(&self.0.late);
        late.numbered += 1;
        let key = (Instant::now() + time, late.numbered);
        let (life, connection) = (connection.life, Arc::downgrade(connection));
        late.jobs.insert(key, Job { connection, request, payload, life, reply, orphaned: None });
        self.0.late_changed.notify_one();
    }

    /// Handles the end of a connection: its delayed changes are done soon, or never; delayed reads and
    /// replies are dropped.
    fn orphan(&self, connection: &Arc<Connection>) {
        let mut late = lock(&self.0.late);
        let own = |job: &Job| std::ptr::eq(job.connection.as_ptr(), Arc::as_ptr(connection));
        let keys: Vec<_> = late.jobs.iter().filter(|(_, job)| own(job)).map(|(key, _)| *key).collect();
        let now = Instant::now();
        for key in keys {
            let job = late.jobs.remove(&key).expect("found just now");
            let changes = job.request.op.is_some_and(|op| op != Op::Read);
            if changes && job.reply.is_none() && self.below(2) == 0 {
                let soon = now + LANDING_MAX.mul_f64(self.below(1000) as f64 / 1000.0);
                late.jobs.insert((soon, key.1), Job { orphaned: Some(now), ..job });
            }
        }
        self.0.late_changed.notify_one();
    }
}

/// Does jobs when they are due, until the export is gone.
fn do_late(weak: &Weak<Inner>) {
    /// Longest time until a thread without work notices that its export is gone.
    const IDLE: Duration = Duration::from_millis(200);
    while let Some(inner) = weak.upgrade() {
        let export = Export(inner);
        let mut late = lock(&export.0.late);
        let now = Instant::now();
        let due = late.jobs.keys().next().map(|key| key.0);
        match due {
            Some(at) if at <= now => {
                let (_, job) = late.jobs.pop_first().expect("there is one");
                late.busy = true;
                drop(late);
                export.finish(job);
                lock(&export.0.late).busy = false;
            }
            _ => {
                let wait = due.map_or(IDLE, |at| (at - now).min(IDLE));
                // Whatever the reason for waking up, the loop checks again.
                drop(export.0.late_changed.wait_timeout(late, wait));
            }
        }
    }
}

impl Export {
    fn finish(&self, job: Job) {
        if job.orphaned.is_some_and(|since| since.elapsed() > LANDING_LATEST) {
            return;
        }
        match (job.connection.upgrade(), job.reply) {
            (Some(connection), Some(reply)) => drop(connection.answer(&reply)),
            (Some(connection), None) => {
                let reply = self.perform_for(&connection, &job.request, &job.payload);
                let _ = connection.answer(&reply);
            }
            // The connection is gone, so there is no client to answer.
            (None, None) => drop(self.perform(job.life, false, &job.request, &job.payload)),
            (None, Some(_)) => {}
        }
    }
}

impl Connection {
    fn send(&self, bytes: &[u8]) -> std::io::Result<()> {
        let _one = lock(&self.sending);
        (&self.stream).write_all(bytes)
    }

    fn answer(&self, reply: &[u8]) -> std::io::Result<Verdict> {
        self.unanswered.fetch_sub(1, Ordering::AcqRel);
        self.send(reply).map(|()| Verdict::GoOn)
    }

    fn end(&self) {
        let _ = self.ended.set(Instant::now());
    }

    fn hang_up(&self) {
        // Its reader sees the end, and so does the client.
        let _ = self.stream.shutdown(Shutdown::Both);
    }
}
