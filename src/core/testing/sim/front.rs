//! The part of a daemon between its clients and the lanes of an array: it hands requests to lanes, and
//! outcomes of lanes to clients. Cutting and joining are the daemon's own (`volume/lanes/requests.rs`).
//!
//! A lane's outcomes arrive in its order; when the next one arrives is up to the caller, so that outcomes of
//! several lanes overtake one another as those of several threads do.

use crate::block_io::{Buf, BufMut, Pool};
use crate::units::{LaneIndex, VolumeOffset};
use crate::volume::{
    Begun, ClientError, ClientReply, ClientRequest, EndedRequest, Joined, LaneCut, LaneRequest, LaneRequests,
    PartId, RequestId, WholeRequest,
};
use std::collections::{HashMap, VecDeque};

/// See the head of this file.
pub(super) struct Front {
    pool: Pool,
    requests: LaneRequests<RequestId>,
    /// What lanes have been asked, by the ids that they know it by.
    asked: HashMap<u64, Asked>,
    next_id: u64,
    /// By lane: what it has said and what has not arrived yet.
    under_way: Vec<VecDeque<Outcome>>,
}

/// A request that a lane has.
enum Asked {
    Whole(RequestId),
    Part(PartId),
}

/// What a lane says.
pub(super) enum Outcome {
    /// A request has ended.
    Ended(EndedRequest),
    /// Acknowledged writes that were not flushed are lost.
    WritesLost,
}

/// What arrives at the clients.
pub(super) enum Arrived {
    /// The answer to a request.
    Answer(EndedRequest),
    /// Acknowledged writes that were not flushed are lost.
    WritesLost,
}

/// A request without its place and its memory.
#[derive(Clone, Copy)]
enum Form {
    Read { is_sparse: bool },
    Write { fua: bool },
    Flush,
    Trim { fua: bool },
    WriteZeroes { may_unmap: bool, fast_only: bool, fua: bool },
    BlockStatus,
    Health,
}

impl Form {
    /// The request with a place and with memory.
    fn at(self, pool: &Pool, (offset, len): (VolumeOffset, u64), payload: Option<BufMut>) -> ClientRequest {
        let memory = |payload: Option<BufMut>| payload.unwrap_or_else(|| pool.alloc(len as usize));
        match self {
            Form::Read { is_sparse: true } => ClientRequest::ReadSparse { offset, buf: memory(payload) },
            Form::Read { is_sparse: false } => ClientRequest::Read { offset, buf: memory(payload) },
            Form::Write { fua } => {
                let data = payload.expect("a write has its payload").freeze();
                ClientRequest::Write { offset, data, fua }
            }
            Form::Flush => ClientRequest::Flush,
            Form::Trim { fua } => ClientRequest::Trim { offset, len, fua },
            Form::WriteZeroes { may_unmap, fast_only, fua } => {
                ClientRequest::WriteZeroes { offset, len, may_unmap, fast_only, fua }
            }
            Form::BlockStatus => ClientRequest::BlockStatus { offset, len },
            Form::Health => ClientRequest::Health { offset, len },
        }
    }
}

impl Front {
    pub(super) fn new(lanes: usize, pool: Pool) -> Front {
        Front {
            requests: LaneRequests::new(pool.clone()),
            pool,
            asked: HashMap::new(),
            next_id: 0,
            under_way: (0..lanes).map(|_| VecDeque::new()).collect(),
        }
    }

    /// Takes a client's request. Returns what is asked of lanes, or its answer.
    pub(super) fn begin(
        &mut self,
        cut: &LaneCut,
        id: RequestId,
        request: ClientRequest,
    ) -> Result<Vec<(LaneIndex, RequestId, ClientRequest)>, ClientError> {
        let (form, whole) = self.taken_apart(request);
        match self.requests.begin(cut, whole, id) {
            Begun::Refused(_, error) => Err(error),
            Begun::InOneLane(piece, payload, id) => {
                let request = form.at(&self.pool, (piece.within, piece.len), payload);
                Ok(vec![(piece.lane, self.ask(Asked::Whole(id)), request)])
            }
            Begun::InParts(parts) => {
                let part = |LaneRequest { piece, payload, part }| {
                    let request = form.at(&self.pool, (piece.within, piece.len), payload);
                    (piece.lane, self.ask(Asked::Part(part)), request)
                };
                Ok(parts.into_iter().map(part).collect())
            }
        }
    }

    fn taken_apart(&self, request: ClientRequest) -> (Form, WholeRequest) {
        let read = |offset, buf: BufMut| WholeRequest::Read { offset, len: buf.len() as u64, buf: Some(buf) };
        match request {
            ClientRequest::Read { offset, buf } => (Form::Read { is_sparse: false }, read(offset, buf)),
            ClientRequest::ReadSparse { offset, buf } => (Form::Read { is_sparse: true }, read(offset, buf)),
            ClientRequest::Write { offset, data, fua } => {
                (Form::Write { fua }, WholeRequest::Write { offset, data: self.received(&data) })
            }
            ClientRequest::Flush => (Form::Flush, WholeRequest::Plain(request)),
            ClientRequest::Trim { fua, .. } => (Form::Trim { fua }, WholeRequest::Plain(request)),
            ClientRequest::WriteZeroes { may_unmap, fast_only, fua, .. } => {
                (Form::WriteZeroes { may_unmap, fast_only, fua }, WholeRequest::Plain(request))
            }
            ClientRequest::BlockStatus { .. } => (Form::BlockStatus, WholeRequest::Plain(request)),
            ClientRequest::Health { .. } => (Form::Health, WholeRequest::Plain(request)),
        }
    }

    /// A payload as it is received: in memory of its own.
    fn received(&self, data: &Buf) -> BufMut {
        let mut buf = self.pool.alloc(data.len());
        buf.copy_from_slice(data);
        buf
    }

    fn ask(&mut self, asked: Asked) -> RequestId {
        let id = self.next_id;
        self.next_id += 1;
        self.asked.insert(id, asked);
        RequestId(id)
    }

    /// A lane says something.
    pub(super) fn say(&mut self, lane: LaneIndex, outcome: Outcome) {
        self.under_way[usize::from(lane.0)].push_back(outcome);
    }

    /// The lanes of which an outcome is under way.
    pub(super) fn lanes_heard(&self) -> impl Iterator<Item = LaneIndex> {
        (0..).map(LaneIndex).zip(&self.under_way).filter(|(_, said)| !said.is_empty()).map(|(lane, _)| lane)
    }

    /// How many outcomes are under way.
    pub(super) fn backlog(&self) -> usize {
        self.under_way.iter().map(VecDeque::len).sum()
    }

    /// The next outcome of a lane arrives.
    pub(super) fn hear(&mut self, lane: LaneIndex) -> Option<Arrived> {
        match self.under_way[usize::from(lane.0)].pop_front()? {
            Outcome::WritesLost => Some(Arrived::WritesLost),
            Outcome::Ended((id, result)) => self.ended(id, result).map(Arrived::Answer),
        }
    }

    fn ended(&mut self, id: RequestId, result: Result<ClientReply, ClientError>) -> Option<EndedRequest> {
        match self.asked.remove(&id.0).expect("a request that the lane has") {
            Asked::Whole(id) => Some((id, result)),
            Asked::Part(part) => match self.requests.ended(part, result)? {
                Joined::Answer(id, result) => Some((id, result)),
                Joined::Dropped(_) => unreachable!("nothing is dropped here"),
            },
        }
    }
}
