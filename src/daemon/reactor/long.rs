//! Long requests: what would hold everybody up, or take more memory than its client may have, is carried out in parts,
//! each a request of its own to the volume.
//!
//! A request without payload (TRIM, WRITE_ZEROES, BLOCK_STATUS) is cut where its volume says, so
//! that one part takes some tens of microseconds. A READ with more payload than its client's memory
//! allows for is cut into what it allows, and sent in parts, or, where its reply cannot be in
//! parts, alone on its connection. A WRITE is not cut: it waits for the place for large payloads.
//!
//! Invariants: one part of a long request at a time is in the volume; a part is fenced like any
//! request; the long request is answered once, after its last part, or its connection is gone. FUA
//! is a flush behind the last part. Must not know what volumes do.

use super::Reactor;
use super::clients::{append_runs, client_request};
use super::connection::Receiving;
use super::memory::GUARANTEED;
use calpe_core::block_io::BufMut;
use calpe_core::nbd::{Command, Extents, Request};
use calpe_core::volume::{ClientError, ClientReply, ReadRun};

/// Runs in the answer to one BLOCK_STATUS: it goes on over a range of any length, until there are so many.
const RUNS_MAX: usize = 1024;

/// Memory that a BLOCK_STATUS counts as, in bytes: [`RUNS_MAX`] runs as they are gathered, or encoded.
pub(super) const STATUS_BYTES: usize = 32 << 10;

/// Parts of payloads are multiples of this many bytes.
const PAYLOAD_PART_BYTES: usize = GUARANTEED;

/// A request for a volume, on its way.
#[derive(Debug)]
pub(super) struct Order {
    pub(super) request: Request,
    pub(super) payload: Option<BufMut>,
    /// Bytes of its client's memory that it has.
    pub(super) charge: usize,
    /// The long request that it is a part of.
    pub(super) long: Option<usize>,
}

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
pub(super) struct Long {
    connection: usize,
    request: Request,
    kind: LongKind,
    /// Bytes of its client's memory that it has itself.
    charge: usize,
    /// Bytes from its offset that are done.
    done: u64,
    /// A part is being received, in the volume, or fenced.
    busy: bool,
    /// All parts are done, and are being flushed.
    flushing: bool,
    /// What the write came to.
    error: Option<ClientError>,
    /// What is known of BLOCK_STATUS: (bytes, flags).
    allocation: Vec<(u64, u32)>,
    health: Vec<(u64, u32)>,
}

impl Long {
    fn new(connection: usize, request: Request, kind: LongKind, charge: usize) -> Long {
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
    pub(super) fn bytes(&self) -> usize {
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
            // Bytes without a hole between them.
            df: self.request.df || self.kind == LongKind::ReadAlone,
            ..self.request
        }
    }

    /// Runs that each context of a BLOCK_STATUS may have in its answer.
    fn runs_max(&self) -> usize {
        if self.request.req_one { 1 } else { RUNS_MAX }
    }

    /// Whether BLOCK_STATUS has found all that its answer may have.
    fn knows_enough(&self) -> bool {
        let most = self.runs_max();
        let enough = |asked: bool, runs: &[(u64, u32)]| asked.then_some(runs.len() > most);
        let contexts = self.request.contexts;
        let (allocation, health) =
            (enough(contexts.allocation, &self.allocation), enough(contexts.health, &self.health));
        if self.request.req_one {
            // Each answer is to be as long as it can be.
            [allocation, health].into_iter().flatten().all(|enough| enough)
        } else {
            [allocation, health].into_iter().flatten().any(|enough| enough)
        }
    }
}

/// Appends runs, joined with the last one where they are equal, up to the first that is one too many: it shows that those
/// before it are whole. Another context may still have to go on for long.
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

impl Reactor {
    /// Takes on a request that is to be carried out in parts.
    pub(super) fn begin_long(&mut self, key: usize, request: Request, kind: LongKind, charge: usize) {
        let long = self.longs.insert(Long::new(key, request, kind, charge));
        let connection = &mut self.connections[key];
        connection.in_flight += 1;
        match kind {
            LongKind::Write => connection.writing = Some(long),
            LongKind::ReadAlone => {
                connection.alone = true;
                connection.longs.push_back(long);
            }
            LongKind::NoPayload | LongKind::ReadInParts => connection.longs.push_back(long),
        }
    }

    /// Whether a request without payload takes so long that it is cut, or is zeroes for parts of blocks.
    pub(super) fn is_long(&self, key: usize, request: &Request) -> bool {
        self.part_of(key, request) < request.length || self.zero_edge(key, request).is_some()
    }

    /// How many bytes of zeroes at the start of a request are to be written, since they are a part of a block. What must be
    /// fast is refused by the volume instead.
    fn zero_edge(&self, key: usize, request: &Request) -> Option<u64> {
        if request.command != Command::WriteZeroes || request.fast_zero {
            return None;
        }
        let block = self.block_of(self.connections[key].array?);
        let within = request.offset % block;
        (within > 0 || request.length < block).then(|| request.length.min(block - within))
    }

    /// How many bytes of a request without payload are done at once.
    fn part_of(&self, key: usize, request: &Request) -> u64 {
        let hosted = self.connections[key].array.and_then(|id| self.arrays.get(id.0 as usize)?.as_ref());
        let question = client_request(request);
        let part = hosted.zip(question).map(|(hosted, question)| hosted.part_len(&question));
        part.unwrap_or(u64::MAX).clamp(1, request.length.max(1))
    }

    /// Carries out a part of one of a connection's long requests, in turn. Returns whether there was one that could go on.
    pub(super) fn advance_longs(&mut self, key: usize, looked: &mut bool) -> bool {
        for _ in 0..self.connections[key].longs.len() {
            let Some(long) = self.connections[key].longs.pop_front() else { return false };
            if self.advance_long(key, long, looked) {
                return true;
            }
            self.connections[key].longs.push_back(long);
        }
        false
    }

    fn advance_long(&mut self, key: usize, long: usize, looked: &mut bool) -> bool {
        let Long { kind, flushing, .. } = self.longs[long];
        let rest = self.longs[long].rest();
        let order = match kind {
            _ if flushing => Order { request: rest, payload: None, charge: 0, long: Some(long) },
            LongKind::NoPayload => {
                if let Some(length) = self.zero_edge(key, &rest) {
                    let zeroes = self.config.pool.alloc_zeroed(length as usize);
                    let request = Request { command: Command::Write, length, ..rest };
                    Order { request, payload: Some(zeroes), charge: 0, long: Some(long) }
                } else {
                    let mut length = self.part_of(key, &rest);
                    if rest.command == Command::WriteZeroes && length == rest.length {
                        let array = self.connections[key].array;
                        length -= array.map_or(0, |array| length % self.block_of(array));
                    }
                    let request = Request { length, ..rest };
                    Order { request, payload: None, charge: 0, long: Some(long) }
                }
            }
            LongKind::ReadInParts | LongKind::ReadAlone => {
                let Some(length) = self.payload_part(key, &rest) else { return false };
                self.take_memory(key, length);
                let request = Request { length: length as u64, ..rest };
                Order { request, payload: None, charge: length, long: Some(long) }
            }
            LongKind::Write => unreachable!("a write waits for its payload, or to be flushed"),
        };
        self.longs[long].busy = true;
        self.begin(key, order, looked);
        true
    }

    /// How much of a payload its client's memory allows for now: all of it, or whole parts that end at multiples of their size
    /// in the volume.
    fn payload_part(&self, key: usize, rest: &Request) -> Option<usize> {
        let allowed = self.memory.allowed(self.connections[key].held);
        if rest.length <= allowed as u64 {
            return Some(rest.length as usize);
        }
        let part = PAYLOAD_PART_BYTES as u64;
        let end = (rest.offset + allowed as u64) / part * part;
        match end.checked_sub(rest.offset) {
            Some(length) if length > 0 => Some(length as usize),
            // Between two multiples: what there is, if it is as much as there can be at least.
            _ => (allowed >= PAYLOAD_PART_BYTES).then_some(PAYLOAD_PART_BYTES),
        }
    }

    /// Receives the payload of a connection's long write, as soon as there is room for it. Returns whether that is under way.
    pub(super) fn continue_writing(&mut self, key: usize, looked: &mut bool) -> bool {
        let Some(long) = self.connections[key].writing else { return false };
        if self.longs[long].busy || self.connections[key].receiving != Receiving::Nothing {
            return false;
        }
        let (request, length) = (self.longs[long].rest(), self.longs[long].bytes());
        if length > self.memory.allowed(self.connections[key].held) && !self.take_place(key, length) {
            return false;
        }
        let mut buf = self.config.pool.alloc(length);
        self.take_memory(key, length);
        self.longs[long].busy = true;
        let have = self.connections[key].take_payload(&mut buf);
        if have < length {
            self.receive_payload(key, request, buf, have);
        } else {
            self.part_received(key, request, buf, looked);
        }
        true
    }

    /// The payload of a long write is there.
    pub(super) fn part_received(&mut self, key: usize, request: Request, buf: BufMut, looked: &mut bool) {
        let long = self.connections[key].writing.expect("the payload of a long write was received");
        let charge = buf.len();
        self.begin(key, Order { request, payload: Some(buf), charge, long: Some(long) }, looked);
    }

    /// Takes a volume's answer to a part. `allocation`: of BLOCK_STATUS, what was asked before its health.
    pub(super) fn part_done(
        &mut self,
        order: (usize, Request, usize),
        allocation: Vec<(u64, u32)>,
        result: Result<ClientReply, ClientError>,
    ) {
        let (long, part, charge) = order;
        let Long { connection: key, kind, request, done, .. } = self.longs[long];
        let most = self.longs[long].runs_max();
        self.longs[long].busy = false;
        if self.connections[key].broken || self.connections[key].dismissed.is_some() {
            self.give_memory_back(key, charge);
            self.drop_long(long);
            return;
        }
        let mut kept = 0;
        match result {
            Err(error) => {
                self.give_memory_back(key, charge);
                if kind == LongKind::ReadAlone && done > 0 {
                    // The client was told that all bytes follow.
                    tracing::debug!(connection = key, %error, "a read failed after its first part was sent");
                    self.connections[key].broken = true;
                    self.mark(key);
                    self.drop_long(long);
                } else if kind == LongKind::Write && !self.longs[long].flushing {
                    self.longs[long].error = Some(error);
                    self.part_is_over(key, long, part.length);
                } else {
                    self.end_long(key, long, Err(error));
                }
                return;
            }
            Ok(ClientReply::Data(buf)) => {
                kept = self.append_part(key, (request, kind, done), part, vec![ReadRun::Data(buf)]);
            }
            Ok(ClientReply::Sparse(runs)) => kept = self.append_part(key, (request, kind, done), part, runs),
            Ok(ClientReply::Extents(extents)) => {
                let allocation: Vec<(u64, u32)> =
                    extents.iter().map(|e| (e.len, super::clients::allocation_flags(e))).collect();
                append(&mut self.longs[long].allocation, &allocation, most);
            }
            Ok(ClientReply::Health(runs)) => {
                let health: Vec<(u64, u32)> =
                    runs.iter().map(|&(len, health)| (len, super::clients::health_flags(health))).collect();
                append(&mut self.longs[long].health, &health, most);
                append(&mut self.longs[long].allocation, &allocation, most);
            }
            Ok(ClientReply::Done) => {}
        }
        self.give_memory_back(key, charge - kept);
        if self.longs[long].flushing {
            self.end_long(key, long, Ok(()));
        } else {
            self.part_is_over(key, long, part.length);
        }
    }

    /// Appends what a part of a read found; says how many bytes of its memory are kept until they are sent.
    fn append_part(
        &mut self,
        key: usize,
        (request, kind, done): (Request, LongKind, u64),
        part: Request,
        runs: Vec<ReadRun>,
    ) -> usize {
        let connection = &mut self.connections[key];
        let nbd = &connection.nbd;
        if kind == LongKind::ReadInParts {
            let sent = append_runs(nbd, &request, part.offset, runs, &mut connection.filling);
            let kept = if sent > 0 { part.length as usize } else { 0 };
            connection.filling.hold(kept - sent);
            return kept;
        }
        if done == 0 {
            nbd.reply_read_header(&request, &mut connection.filling.head);
        }
        let mut kept = 0;
        for run in runs {
            let ReadRun::Data(buf) = run else { unreachable!("a read that is answered whole has no holes") };
            kept += buf.len();
            connection.filling.push_payload(buf);
        }
        kept
    }

    /// So many more bytes of a long request are done.
    fn part_is_over(&mut self, key: usize, at: usize, bytes: u64) {
        let long = &mut self.longs[at];
        long.done += bytes;
        let all = long.done == long.request.length;
        let enough = all || long.request.command == Command::BlockStatus && long.knows_enough();
        if !enough {
            if long.kind != LongKind::Write {
                self.connections[key].longs.push_back(at);
            }
            self.mark(key);
            return;
        }
        if long.kind == LongKind::Write {
            let connection = &mut self.connections[key];
            connection.writing = None;
            connection.nbd.payload_taken();
        }
        match long.error {
            Some(error) => self.end_long(key, at, Err(error)),
            None if long.request.fua && long.request.command.modifies() => {
                long.flushing = true;
                self.connections[key].longs.push_back(at);
                self.mark(key);
            }
            None => self.end_long(key, at, Ok(())),
        }
    }

    /// Answers a long request.
    fn end_long(&mut self, key: usize, at: usize, result: Result<(), ClientError>) {
        let Long { request, kind, charge, allocation, health, .. } = self.longs.remove(at);
        if kind == LongKind::Write {
            self.leave_place(key);
        }
        let succeeded = result.is_ok();
        if let Some(array) = self.connections[key].array {
            self.count_traffic(array, &request, succeeded);
        }
        let now = self.now;
        let connection = &mut self.connections[key];
        connection.in_flight -= 1;
        connection.alone &= kind != LongKind::ReadAlone;
        connection.dismissed = connection.dismissed.map(|_| now);
        let (nbd, head) = (&connection.nbd, &mut connection.filling.head);
        match result {
            // Dismissed: it learns by the end of the connection.
            Err(ClientError::Stopping) => {
                self.give_memory_back(key, charge);
                self.mark(key);
                return;
            }
            Err(error) => {
                nbd.reply_error(&request, super::clients::errno_of(error), &error.to_string(), head)
            }
            Ok(()) if request.command == Command::Read => {}
            Ok(()) if request.command == Command::BlockStatus => {
                nbd.reply_block_status(&request, Extents { allocation: &allocation, health: &health }, head);
            }
            Ok(()) => nbd.reply_done(&request, head),
        }
        connection.filling.hold(charge);
        self.mark(key);
    }

    /// Forgets a long request of which nothing is under way, unanswered.
    pub(super) fn drop_long(&mut self, at: usize) {
        let Long { connection: key, kind, charge, done, .. } = self.longs.remove(at);
        self.give_memory_back(key, charge);
        let connection = &mut self.connections[key];
        // Nothing can follow a reply that is cut off in the middle.
        connection.broken |= kind == LongKind::ReadAlone && done > 0;
        connection.in_flight -= 1;
        connection.alone &= kind != LongKind::ReadAlone;
        connection.longs.retain(|&long| long != at);
        if connection.writing == Some(at) {
            connection.writing = None;
        }
        if kind == LongKind::Write {
            self.leave_place(key);
        }
        self.mark(key);
    }

    /// An order came to nothing: its client or its array is gone.
    pub(super) fn drop_order(&mut self, key: usize, order: Order) {
        self.give_memory_back(key, order.charge);
        if let Some(long) = order.long {
            self.longs[long].busy = false;
            self.drop_long(long);
        }
    }

    /// Forgets what a connection that is broken or dismissed has of long requests and is not under way.
    pub(super) fn drop_longs(&mut self, key: usize) {
        // One with a part under way ends with that.
        let connection = &mut self.connections[key];
        let mut idle: Vec<usize> = connection.longs.drain(..).collect();
        idle.extend(connection.writing.filter(|&at| !self.longs[at].busy));
        idle.into_iter().for_each(|at| self.drop_long(at));
    }
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

    /// The health of a whole volume is one run, and its allocation may be millions: the answer to one question for the first run
    /// of each takes no more memory than that.
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
