//! Clients' requests to a volume of several lanes: each is cut into parts, a request to one lane each, and is
//! answered when all of them have ended. For whatever drives the lanes: the daemon's reactors, or the
//! simulator.
//!
//! Invariants: each byte of a request is in one part. A request is answered once, after its last part; the
//! first error to come is its answer, and one of which a part was dropped is dropped. A flush goes to every
//! lane, as each lane has writes of its own. What is done or refused as a whole is refused before a lane has
//! any of it: no lane can know that another one refuses its part. Must not know how a part gets to its lane,
//! nor what its caller attaches to a request.

use super::super::api::{ClientError, ClientReply, ClientRequest, Health, ReadRun, VolumeExtent};
use crate::array::mutation::{Mutation, is_off};
use crate::block_io::{BufMut, Pool};
use crate::units::{LaneIndex, ROW_BYTES, VolumeOffset};
use crate::volume::{LaneCut, LanePiece};
use slab::Slab;

/// A request to the whole volume.
#[derive(Debug)]
pub enum WholeRequest {
    /// A read.
    Read {
        /// Where in the volume.
        offset: VolumeOffset,
        /// Bytes.
        len: u64,
        /// Memory for as many bytes, if there is any.
        buf: Option<BufMut>,
    },
    /// A write.
    Write {
        /// Where in the volume.
        offset: VolumeOffset,
        /// What is written.
        data: BufMut,
    },
    /// One without payload.
    Plain(ClientRequest),
}

/// A part of a request: one to a lane.
#[derive(Debug)]
pub struct LaneRequest {
    /// Where it is, in the whole volume and in that of its lane. Of a flush the lane alone matters.
    pub piece: LanePiece,
    /// What is written, or memory for what is read. A read without it needs some of its own: volumes take
    /// page-aligned memory for page-aligned offsets.
    pub payload: Option<BufMut>,
    /// The name under which its end is told.
    pub part: PartId,
}

/// Names a part of a request under way.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PartId {
    whole: usize,
    nth: usize,
}

/// What is to be done about a request.
#[derive(Debug)]
pub enum Begun<T> {
    /// It lies in one lane, which is to get it whole: where, and its payload. Nothing is kept of it.
    InOneLane(LanePiece, Option<BufMut>, T),
    /// Its parts are to be given to their lanes, those of one lane in this order.
    InParts(Vec<LaneRequest>),
    /// It is refused; no lane is to get any of it.
    Refused(T, ClientError),
}

/// A request of which the last part has ended.
#[derive(Debug)]
pub enum Joined<T> {
    /// Its answer.
    Answer(T, Result<ClientReply, ClientError>),
    /// A part of it was dropped: it has no answer.
    Dropped(T),
}

/// See the head of this file. `T` is what the caller attaches to a request.
#[derive(Debug)]
pub struct LaneRequests<T> {
    pool: Pool,
    open: Slab<Open<T>>,
}

/// A request whose parts are under way.
#[derive(Debug)]
struct Open<T> {
    /// None once it is answered.
    attached: Option<T>,
    /// Parts that have not ended.
    pending: usize,
    error: Option<ClientError>,
    was_dropped: bool,
    /// The replies to its parts, in the order of the volume.
    replies: Vec<Option<ClientReply>>,
}

impl<T> LaneRequests<T> {
    /// Buffers of replies that lie apart are joined in memory of the pool.
    #[must_use]
    pub fn new(pool: Pool) -> LaneRequests<T> {
        LaneRequests { pool, open: Slab::new() }
    }

    /// Whether nothing is under way.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.open.is_empty()
    }

    /// Begins a request to a volume that is cut like this.
    ///
    /// # Panics
    /// When it has a range without bytes.
    pub fn begin(&mut self, cut: &LaneCut, request: WholeRequest, attached: T) -> Begun<T> {
        let (offset, len) = match &request {
            WholeRequest::Read { offset, len, .. } => (*offset, *len),
            WholeRequest::Write { offset, data } => (*offset, data.len() as u64),
            WholeRequest::Plain(plain) => match plain.range() {
                Some(range) => range,
                None => return self.begin_everywhere(cut, attached),
            },
        };
        let mut pieces = cut.pieces(offset, len);
        let first = pieces.next().expect("a request has at least one byte");
        if first.len == len {
            let payload = match request {
                WholeRequest::Read { buf, .. } => buf,
                WholeRequest::Write { data, .. } => Some(data),
                WholeRequest::Plain(_) => None,
            };
            return Begun::InOneLane(first, payload, attached);
        }
        let is_fast =
            matches!(request, WholeRequest::Plain(ClientRequest::WriteZeroes { fast_only: true, .. }));
        let (mut rest, is_read) = match request {
            WholeRequest::Read { buf, .. } => {
                (Some(buf.unwrap_or_else(|| self.pool.alloc(len as usize))), true)
            }
            WholeRequest::Write { data, .. } => (Some(data), false),
            WholeRequest::Plain(plain) if cut.refuses(&plain) && !is_off(Mutation::LanesRefuseAlone) => {
                return Begun::Refused(attached, ClientError::NotSupported);
            }
            WholeRequest::Plain(_) => (None, false),
        };
        let (pool, whole) = (&self.pool, self.open.vacant_key());
        let part = |(nth, piece): (usize, LanePiece)| {
            let payload = rest.take().map(|mut buf| {
                rest = Some(buf.split_off(piece.len as usize));
                buf
            });
            // Otherwise its memory does not lie on pages where its place does.
            let is_aligned = (piece.at.0 - offset.0).is_multiple_of(ROW_BYTES);
            let payload = match payload {
                Some(_) if !is_aligned && is_read => None,
                Some(buf) if !is_aligned => Some(copied(pool, &buf)),
                payload => payload,
            };
            LaneRequest { piece, payload, part: PartId { whole, nth } }
        };
        let mut parts: Vec<_> = std::iter::once(first).chain(pieces).enumerate().map(part).collect();
        if is_off(Mutation::LastPartAlone) || is_fast && is_off(Mutation::FastZeroesInLastLane) {
            parts.drain(..parts.len() - 1);
        }
        self.open(parts, attached)
    }

    /// Begins a request that concerns every lane.
    fn begin_everywhere(&mut self, cut: &LaneCut, attached: T) -> Begun<T> {
        let lanes = if is_off(Mutation::FlushForgetsALane) { 1 } else { cut.count() };
        let (zero, whole) = (VolumeOffset(0), self.open.vacant_key());
        let part = |lane: u16| LaneRequest {
            piece: LanePiece { at: zero, lane: LaneIndex(lane), within: zero, len: 0 },
            payload: None,
            part: PartId { whole, nth: usize::from(lane) },
        };
        self.open((0..lanes).map(part).collect(), attached)
    }

    fn open(&mut self, parts: Vec<LaneRequest>, attached: T) -> Begun<T> {
        let last = parts.last().expect("it has parts").part;
        let replies = (0..=last.nth).map(|_| None).collect();
        let (attached, pending) = (Some(attached), parts.len());
        let whole = self.open.insert(Open { attached, pending, error: None, was_dropped: false, replies });
        debug_assert_eq!(whole, last.whole);
        Begun::InParts(parts)
    }

    /// Takes the end of a part. Returns its request, if that was the last one.
    ///
    /// # Panics
    /// When no such part is under way.
    pub fn ended(&mut self, part: PartId, result: Result<ClientReply, ClientError>) -> Option<Joined<T>> {
        let Open { error, replies, .. } = &mut self.open[part.whole];
        match result {
            Ok(reply) => {
                let nth = match is_off(Mutation::JoinedAsTheyEnd) {
                    true => replies.iter().position(Option::is_none).unwrap_or(part.nth),
                    false => part.nth,
                };
                replies[nth] = Some(reply);
            }
            Err(_) if is_off(Mutation::PartErrorForgotten) => {}
            Err(told) => _ = error.get_or_insert(told),
        }
        self.part_is_over(part.whole)
    }

    /// A part was dropped. Returns its request, if that was the last one.
    ///
    /// # Panics
    /// When no such part is under way.
    pub fn dropped(&mut self, part: PartId) -> Option<Joined<T>> {
        self.open[part.whole].was_dropped = true;
        self.part_is_over(part.whole)
    }

    fn part_is_over(&mut self, whole: usize) -> Option<Joined<T>> {
        let open = &mut self.open[whole];
        open.pending -= 1;
        let is_last = open.pending == 0;
        let is_read = || open.replies.iter().flatten().any(|reply| !matches!(reply, ClientReply::Done));
        if !is_last && (!is_off(Mutation::AnsweredByFirstPart) || is_read()) {
            return None;
        }
        let (attached, replies) = (open.attached.take(), open.replies.iter_mut().filter_map(Option::take));
        let joined = attached.map(|attached| match (open.was_dropped, open.error) {
            (true, _) => Joined::Dropped(attached),
            (false, Some(error)) => Joined::Answer(attached, Err(error)),
            (false, None) => Joined::Answer(attached, Ok(join(&self.pool, replies))),
        });
        if is_last {
            self.open.remove(whole);
        }
        joined
    }
}

/// The same bytes in memory of their own.
fn copied(pool: &Pool, bytes: &[u8]) -> BufMut {
    let mut buf = pool.alloc(bytes.len());
    buf.copy_from_slice(bytes);
    buf
}

/// The reply to a request, of those to its parts in the order of the volume.
fn join(pool: &Pool, replies: impl Iterator<Item = ClientReply>) -> ClientReply {
    let mut replies = replies.peekable();
    match replies.peek() {
        Some(ClientReply::Data(_) | ClientReply::Sparse(_)) => join_reads(pool, replies),
        Some(ClientReply::Extents(_)) => ClientReply::Extents(join_extents(replies)),
        Some(ClientReply::Health(_)) => ClientReply::Health(join_health(replies)),
        Some(ClientReply::Done) | None => ClientReply::Done,
    }
}

/// Joins what was read: one buffer, unless a part has runs of zeroes.
fn join_reads(pool: &Pool, replies: impl Iterator<Item = ClientReply>) -> ClientReply {
    let mut runs: Vec<ReadRun> = Vec::new();
    for reply in replies {
        match reply {
            ClientReply::Data(buf) => ReadRun::Data(buf).push_to(&mut runs),
            ClientReply::Sparse(some) => some.into_iter().for_each(|run| run.push_to(&mut runs)),
            other => unreachable!("a read was answered with {other:?}"),
        }
    }
    if runs.iter().any(|run| matches!(run, ReadRun::Zeroes(_))) {
        return ClientReply::Sparse(runs);
    }
    let data = runs.into_iter().filter_map(|run| match run {
        ReadRun::Data(buf) => Some(buf),
        ReadRun::Zeroes(_) => None,
    });
    ClientReply::Data(pool.join(data))
}

fn join_extents(replies: impl Iterator<Item = ClientReply>) -> Vec<VolumeExtent> {
    let mut all: Vec<VolumeExtent> = Vec::new();
    for reply in replies {
        let ClientReply::Extents(some) = reply else {
            unreachable!("block status was answered with {reply:?}")
        };
        for extent in some {
            match all.last_mut() {
                Some(last) if last.hole == extent.hole => last.len += extent.len,
                _ => all.push(extent),
            }
        }
    }
    all
}

fn join_health(replies: impl Iterator<Item = ClientReply>) -> Vec<(u64, Health)> {
    let mut all: Vec<(u64, Health)> = Vec::new();
    for reply in replies {
        let ClientReply::Health(some) = reply else { unreachable!("health was answered with {reply:?}") };
        for (len, health) in some {
            match all.last_mut() {
                Some((bytes, last)) if *last == health => *bytes += len,
                _ => all.push((len, health)),
            }
        }
    }
    all
}

#[cfg(test)]
mod tests;
