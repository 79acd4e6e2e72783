//! Long requests: a request that would hold everybody up, or take more memory than its client may have, is
//! carried out in parts, each a request of its own to the volume.
//!
//! A request without payload (TRIM, WRITE_ZEROES, BLOCK_STATUS) is cut where its volume says, so that one
//! part takes some tens of microseconds. A READ whose payload exceeds its client's memory is cut into parts
//! that fit, and sent in parts; where its reply cannot be in parts, it runs alone on its connection. A WRITE
//! is not cut: it waits for the place for large payloads.
//!
//! Invariants: one part of a long request at a time is in the volume; a part is fenced like any
//! request; the long request is answered once, after its last part, or its connection is gone. FUA
//! is a flush behind the last part. Must not know what volumes do.

use super::connections::Connections;
use super::directory::Listed;
use super::large::{LargePlace, LargeToken};
use super::orders::{Answer, ConnectionId, Order, Requester, allocation_of, client_request, health_of};
use super::shares::GUARANTEED;
use super::sockets::Sockets;
use calpe_core::block_io::{BufMut, Pool};
use calpe_core::nbd::{Command, Request};
use calpe_core::units::Timestamp;
use calpe_core::volume::{ClientError, ClientReply, ReadRun};
use slab::Slab;
use std::sync::Arc;

/// Most runs in one answer to a BLOCK_STATUS: a range of any length is answered up to there.
const RUNS_MAX: usize = 1024;

/// Parts of payloads are multiples of this many bytes.
const PAYLOAD_PART_BYTES: usize = GUARANTEED;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum LongKind {
    /// TRIM, WRITE_ZEROES or BLOCK_STATUS.
    NoPayload,
    /// A read that is answered in parts.
    ReadInParts,
    /// A read that is answered whole; nothing else of its connection is under way.
    ReadAlone,
    /// A write.
    Write,
}

/// See the head of this file.
#[derive(Debug)]
struct Long {
    connection: ConnectionId,
    request: Request,
    kind: LongKind,
    /// Bytes of its client's memory that it holds itself.
    charge: usize,
    /// Bytes from its offset that are done.
    done: u64,
    /// Whether a part is being received, in the volume, or fenced.
    busy: bool,
    /// Whether all parts are done and are being flushed.
    flushing: bool,
    /// The error of a write that failed.
    error: Option<ClientError>,
    /// The answer to a BLOCK_STATUS so far: (bytes, flags).
    allocation: Vec<(u64, u32)>,
    health: Vec<(u64, u32)>,
}

impl Long {
    fn new(connection: ConnectionId, request: Request, kind: LongKind, charge: usize) -> Long {
        Long {
            connection,
            request,
            kind,
            charge,
            done: 0,
            busy: false,
            flushing: false,
            error: None,
            allocation: Vec::new(),
            health: Vec::new(),
        }
    }

    /// Bytes of its payload.
    fn bytes(&self) -> usize {
        self.request.length as usize
    }

    /// The rest of it, as a request.
    fn rest(&self) -> Request {
        if self.flushing {
            return Request { command: Command::Flush, offset: 0, length: 0, fua: false, ..self.request };
        }
        Request {
            offset: self.request.offset + self.done,
            length: self.request.length - self.done,
            fua: false,
            // The reply takes all bytes in one piece, without holes.
            df: self.request.df || self.kind == LongKind::ReadAlone,
            ..self.request
        }
    }

    /// Most runs of each context in the answer to a BLOCK_STATUS.
    fn runs_max(&self) -> usize {
        if self.request.req_one { 1 } else { RUNS_MAX }
    }

    /// Whether BLOCK_STATUS has found all that its answer may hold.
    fn knows_enough(&self) -> bool {
        let most = self.runs_max();
        let enough = |asked: bool, runs: &[(u64, u32)]| asked.then_some(runs.len() > most);
        let contexts = self.request.contexts;
        let (allocation, health) =
            (enough(contexts.allocation, &self.allocation), enough(contexts.health, &self.health));
        if self.request.req_one {
            // With REQ_ONE each answer is to be as long as possible.
            [allocation, health].into_iter().flatten().all(|enough| enough)
        } else {
            [allocation, health].into_iter().flatten().any(|enough| enough)
        }
    }
}

/// Appends runs, joined with the last one where they are equal, up to the first run beyond `most`: it shows
/// that the runs before it are complete. Another context may need many more parts.
fn append(runs: &mut Vec<(u64, u32)>, more: &[(u64, u32)], most: usize) {
    for &(len, flags) in more {
        if runs.len() > most {
            return;
        }
        match runs.last_mut() {
            Some(last) if last.1 == flags => last.0 += len,
            _ => runs.push((len, flags)),
        }
    }
}

/// How far a connection's long write has come.
#[derive(Debug)]
pub(super) enum Writing {
    /// There is none, or it waits.
    Waits,
    /// Its payload is being received.
    Receives,
    /// Its payload is complete.
    Order(Order),
}

/// All long requests of clients.
#[derive(Debug)]
pub(super) struct Longs {
    all: Slab<Long>,
    place: LargePlace,
    pool: Pool,
}

/// Whether a request without payload takes so long that it is cut, or writes zeroes to part of a block.
pub(super) fn is_long(array: Option<&Listed>, request: &Request) -> bool {
    part_of(array, request) < request.length || zero_edge(array, request).is_some()
}

/// How many bytes of zeroes at the start of a request fill only part of a block and are written as data. A
/// fast zero request is refused by the volume instead.
fn zero_edge(array: Option<&Listed>, request: &Request) -> Option<u64> {
    if request.command != Command::WriteZeroes || request.fast_zero {
        return None;
    }
    let block = array?.block();
    let within = request.offset % block;
    (within > 0 || request.length < block).then(|| request.length.min(block - within))
}

/// How many bytes of a request without payload are done at once.
fn part_of(array: Option<&Listed>, request: &Request) -> u64 {
    let part = array.zip(client_request(request)).map(|(array, request)| array.part_len(&request));
    part.unwrap_or(u64::MAX).clamp(1, request.length.max(1))
}

/// How much of a payload fits into its client's memory now: all of it, or whole parts that end at multiples
/// of their size in the volume.
fn payload_part(allowed: usize, rest: &Request) -> Option<usize> {
    if rest.length <= allowed as u64 {
        return Some(rest.length as usize);
    }
    let part = PAYLOAD_PART_BYTES as u64;
    let end = (rest.offset + allowed as u64) / part * part;
    match end.checked_sub(rest.offset) {
        Some(length) if length > 0 => Some(length as usize),
        // Between two multiples: one part, if there is room for one.
        _ => (allowed >= PAYLOAD_PART_BYTES).then_some(PAYLOAD_PART_BYTES),
    }
}

impl Longs {
    pub(super) fn new(pool: Pool, place: Arc<LargeToken>) -> Longs {
        Longs { all: Slab::new(), place: LargePlace::new(place), pool }
    }

    pub(super) fn is_empty(&self) -> bool {
        self.all.is_empty()
    }

    /// Looks after the place for large payloads, at each tick.
    pub(super) fn look_after_place(&mut self, connections: &mut Connections, now: Timestamp) {
        self.place.look_after(connections, now);
    }

    /// The place for large payloads may be free.
    pub(super) fn place_is_free(&mut self, connections: &mut Connections, now: Timestamp) {
        self.place.became_free(connections, now);
    }

    /// Whether all reactors are to be told that the place has become free, since the last call.
    pub(super) fn take_place_news(&mut self) -> bool {
        self.place.take_news()
    }

    /// Takes on a request that is to be carried out in parts.
    pub(super) fn begin(
        &mut self,
        connections: &mut Connections,
        key: ConnectionId,
        request: Request,
        kind: LongKind,
        charge: usize,
    ) {
        let long = self.all.insert(Long::new(key, request, kind, charge));
        let connection = &mut connections[key];
        connection.long_began();
        match kind {
            LongKind::Write => connection.longs_mut().begin_writing(long),
            LongKind::ReadAlone => {
                connection.longs_mut().begin_alone();
                connection.longs_mut().push(long);
            }
            LongKind::NoPayload | LongKind::ReadInParts => connection.longs_mut().push(long),
        }
    }

    /// The next part of one of a connection's long requests, in turn; none where none can go on.
    pub(super) fn advance(&mut self, connections: &mut Connections, key: ConnectionId) -> Option<Order> {
        for _ in 0..connections[key].longs().ready() {
            let long = connections[key].longs_mut().pop()?;
            if let Some(order) = self.next_part(connections, key, long) {
                self.all[long].busy = true;
                return Some(order);
            }
            connections[key].longs_mut().push(long);
        }
        None
    }

    fn next_part(&mut self, connections: &mut Connections, key: ConnectionId, long: usize) -> Option<Order> {
        let Long { kind, flushing, .. } = self.all[long];
        let rest = self.all[long].rest();
        let array = connections[key].array().cloned();
        let array = array.as_deref();
        let (request, payload, charge) = match kind {
            _ if flushing => (rest, None, 0),
            LongKind::NoPayload => {
                if let Some(length) = zero_edge(array, &rest) {
                    let zeroes = self.pool.alloc_zeroed(length as usize);
                    (Request { command: Command::Write, length, ..rest }, Some(zeroes), 0)
                } else {
                    let mut length = part_of(array, &rest);
                    if rest.command == Command::WriteZeroes && length == rest.length {
                        length -= array.map_or(0, |array| length % array.block());
                    }
                    (Request { length, ..rest }, None, 0)
                }
            }
            LongKind::ReadInParts | LongKind::ReadAlone => {
                let length = payload_part(connections.allowed(key), &rest)?;
                connections.accounts().take(key, length);
                (Request { length: length as u64, ..rest }, None, length)
            }
            LongKind::Write => unreachable!("a write waits for its payload, or to be flushed"),
        };
        let (requester, sparse) = (connections.requester(key), connections[key].takes_parts(&request));
        let (asked, long) = (request.offset, Some(long));
        Some(Order { requester, request, payload, asked, part: None, charge, long, sparse })
    }

    /// Receives the payload of a connection's long write, as soon as there is room for it.
    pub(super) fn continue_writing(
        &mut self,
        connections: &mut Connections,
        sockets: &mut Sockets,
        now: Timestamp,
        key: ConnectionId,
    ) -> Writing {
        let Some(long) = connections[key].longs().writing() else { return Writing::Waits };
        if self.all[long].busy || connections[key].is_receiving() {
            return Writing::Waits;
        }
        let (request, length) = (self.all[long].rest(), self.all[long].bytes());
        if length > connections.allowed(key) && !self.place.take(connections, now, key, length) {
            return Writing::Waits;
        }
        let mut buf = self.pool.alloc(length);
        connections.accounts().take(key, length);
        self.all[long].busy = true;
        let have = connections[key].take_payload(&mut buf);
        if have < length {
            connections.receive_payload(sockets, now, key, request, (buf, have));
            return Writing::Receives;
        }
        Writing::Order(written(connections.requester(key), long, request, buf))
    }

    /// Takes a volume's answer to a part.
    pub(super) fn part_done(
        &mut self,
        connections: &mut Connections,
        now: Timestamp,
        at: usize,
        answer: Answer,
    ) {
        let Answer { request: part, charge, allocation, result, .. } = answer;
        let Long { connection: key, kind, request, done, .. } = self.all[at];
        let most = self.all[at].runs_max();
        self.all[at].busy = false;
        if connections[key].is_broken() || connections[key].is_dismissed() {
            connections.accounts().give_back(key, charge);
            self.drop(connections, now, at);
            return;
        }
        let mut kept = 0;
        let long = &mut self.all[at];
        match result {
            Err(error) => {
                connections.accounts().give_back(key, charge);
                if kind == LongKind::ReadAlone && done > 0 {
                    // The client was told that all bytes follow.
                    tracing::debug!(connection = %key, %error, "a read failed after its first part was sent");
                    connections.break_off(key);
                    self.drop(connections, now, at);
                } else if kind == LongKind::Write && !long.flushing {
                    long.error = Some(error);
                    return self.part_is_over(connections, now, at, part.length);
                } else {
                    return self.end(connections, now, at, Err(error));
                }
                return;
            }
            Ok(ClientReply::Data(buf)) => {
                let (connection, runs) = (&mut connections[key], vec![ReadRun::Data(buf)]);
                kept = match kind {
                    LongKind::ReadInParts => {
                        connection.reply_runs(&request, part.offset, part.length as usize, runs)
                    }
                    _ => connection.reply_bytes(&request, done == 0, runs),
                };
            }
            Ok(ClientReply::Sparse(runs)) => {
                let connection = &mut connections[key];
                kept = match kind {
                    LongKind::ReadInParts => {
                        connection.reply_runs(&request, part.offset, part.length as usize, runs)
                    }
                    _ => connection.reply_bytes(&request, done == 0, runs),
                };
            }
            Ok(ClientReply::Extents(extents)) => {
                append(&mut long.allocation, &allocation_of(&extents), most);
            }
            Ok(ClientReply::Health(runs)) => {
                append(&mut long.health, &health_of(&runs), most);
                append(&mut long.allocation, &allocation, most);
            }
            Ok(ClientReply::Done) => {}
        }
        connections.accounts().give_back(key, charge - kept);
        if self.all[at].flushing {
            self.end(connections, now, at, Ok(()))
        } else {
            self.part_is_over(connections, now, at, part.length)
        }
    }

    /// Counts a part of a long request as done.
    fn part_is_over(&mut self, connections: &mut Connections, now: Timestamp, at: usize, bytes: u64) {
        let long = &mut self.all[at];
        let key = long.connection;
        long.done += bytes;
        let all = long.done == long.request.length;
        let enough = all || long.request.command == Command::BlockStatus && long.knows_enough();
        if !enough {
            if long.kind != LongKind::Write {
                connections[key].longs_mut().push(at);
            }
            connections.turn().mark(key);
            return;
        }
        if long.kind == LongKind::Write {
            connections[key].longs_mut().end_writing();
            connections[key].payload_taken();
        }
        match long.error {
            Some(error) => self.end(connections, now, at, Err(error)),
            None if long.request.fua && long.request.command.modifies() => {
                long.flushing = true;
                connections[key].longs_mut().push(at);
                connections.turn().mark(key);
            }
            None => self.end(connections, now, at, Ok(())),
        }
    }

    /// Answers a long request.
    fn end(
        &mut self,
        connections: &mut Connections,
        now: Timestamp,
        at: usize,
        result: Result<(), ClientError>,
    ) {
        let Long { connection: key, request, kind, charge, allocation, health, .. } = self.all.remove(at);
        if kind == LongKind::Write {
            self.place.leave(connections, now, key);
        }
        if result.is_ok() {
            connections[key].count(&request);
        }
        let connection = &mut connections[key];
        connection.long_ended(kind == LongKind::ReadAlone);
        connection.refresh_dismissal(now);
        match result {
            // Stopping: the client was dismissed, and learns by the end of the connection.
            Err(ClientError::Stopping) => connections.accounts().give_back(key, charge),
            Err(error) => {
                connection.reply_error(&request, error);
                connection.hold(charge);
            }
            Ok(()) if request.command == Command::Read => connection.hold(charge),
            Ok(()) if request.command == Command::BlockStatus => {
                connection.reply_status(&request, charge, &allocation, &health);
            }
            Ok(()) => {
                connection.reply_done(&request);
                connection.hold(charge);
            }
        }
        connections.turn().mark(key);
    }

    /// Drops a long request unanswered; nothing of it is under way.
    fn drop(&mut self, connections: &mut Connections, now: Timestamp, at: usize) {
        let Long { connection: key, kind, charge, done, .. } = self.all.remove(at);
        connections.accounts().give_back(key, charge);
        let connection = &mut connections[key];
        if kind == LongKind::ReadAlone && done > 0 {
            // Nothing can follow a reply that is cut off in the middle.
            connection.break_off();
        }
        connection.long_ended(kind == LongKind::ReadAlone);
        connection.longs_mut().drop(at);
        if kind == LongKind::Write {
            self.place.leave(connections, now, key);
        }
        connections.turn().mark(key);
    }

    /// Drops an order whose client or array is gone.
    pub(super) fn drop_order(&mut self, connections: &mut Connections, now: Timestamp, order: Order) {
        let key = order.requester.connection;
        connections.accounts().give_back(key, order.charge);
        if let Some(long) = order.long {
            self.all[long].busy = false;
            self.drop(connections, now, long);
        }
    }

    /// Drops the long requests of a broken or dismissed connection that are not under way.
    pub(super) fn drop_of(&mut self, connections: &mut Connections, now: Timestamp, key: ConnectionId) {
        // One with a part under way ends with that part.
        let mut idle = connections[key].longs_mut().take_ready();
        idle.extend(connections[key].longs().writing().filter(|&at| !self.all[at].busy));
        idle.into_iter().for_each(|at| self.drop(connections, now, at));
    }
}

/// The order of a long write whose payload is complete.
pub(super) fn written(requester: Requester, long: usize, request: Request, buf: BufMut) -> Order {
    let (asked, charge, long) = (request.offset, buf.len(), Some(long));
    Order { requester, request, payload: Some(buf), asked, part: None, charge, long, sparse: false }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn neighbouring_runs_of_one_state_are_one() {
        let mut runs = vec![(5, 1)];
        append(&mut runs, &[(5, 1), (3, 0), (2, 0), (1, 1)], 8);
        assert_eq!(runs, [(10, 1), (5, 0), (1, 1)]);
    }

    /// The health of a whole volume may be one run while its allocation is millions: finding the first run of
    /// each takes no more memory than that.
    #[test]
    fn a_status_gathers_no_more_runs_than_its_answer_may_have() {
        let (mut runs, mut health) = (Vec::new(), Vec::new());
        for part in 0..1000 {
            append(&mut runs, &[(4096, 0), (4096, 1)], 1);
            append(&mut health, &[(8192, 0)], 1);
            assert!(runs.len() <= 2, "part {part}: {} runs", runs.len());
        }
        assert_eq!((runs[0], health), ((4096, 0), vec![(8_192_000, 0)]));
        let mut runs = Vec::new();
        (0..3 * RUNS_MAX as u32).for_each(|nth| append(&mut runs, &[(1, nth % 2)], RUNS_MAX));
        assert_eq!(runs.len(), RUNS_MAX + 1);
    }
}
