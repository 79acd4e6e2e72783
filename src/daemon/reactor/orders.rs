//! What passes between clients and arrays: orders for volumes one way, their outcomes the other; and the
//! translation of NBD requests and replies to those of volumes. Plain data.

use super::order::Ticket;
use calpe_core::block_io::BufMut;
use calpe_core::format::MAX_LANES;
use calpe_core::nbd::{Command, Errno, HEALTH_DEGRADED, HEALTH_LOST, Request, STATE_HOLE, STATE_ZERO};
use calpe_core::units::{LaneIndex, VolumeOffset};
use calpe_core::volume::{ClientError, ClientReply, ClientRequest, Health, PartId, VolumeExtent};

/// Names an array; never reused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct ArrayId(pub u32);

/// Names a lane of an array, which one reactor hosts.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(super) struct LaneId(u32);

/// Bits of a [`LaneId`] that are the lane's index.
const LANE_BITS: u32 = (MAX_LANES as u32).next_power_of_two().ilog2();

impl LaneId {
    pub(super) fn new(array: ArrayId, lane: LaneIndex) -> LaneId {
        LaneId(array.0 << LANE_BITS | u32::from(lane.0))
    }

    /// One that was made a number.
    pub(super) fn from_number(number: u32) -> LaneId {
        LaneId(number)
    }

    /// A number of its own.
    pub(super) fn number(self) -> u32 {
        self.0
    }

    pub(super) fn array(self) -> ArrayId {
        ArrayId(self.0 >> LANE_BITS)
    }

    pub(super) fn lane(self) -> LaneIndex {
        LaneIndex((self.0 & ((1 << LANE_BITS) - 1)) as u16)
    }
}

/// Names a reactor: the reactors of a daemon are numbered from zero.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct ReactorId(pub usize);

/// Names a connection in one reactor; used again once it is gone.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(super) struct ConnectionId(pub(super) usize);

impl std::fmt::Display for ConnectionId {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.0.fmt(f)
    }
}

/// The place of a request in the order of a lane.
pub(super) type LaneTicket = (LaneId, Ticket);

/// The requester of an order, which gets its outcome: a client, over its connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Requester {
    /// The reactor that serves the connection.
    pub(super) reactor: ReactorId,
    pub(super) connection: ConnectionId,
}

/// A request for the volume of a lane, on its way.
#[derive(Debug)]
pub(super) struct Order {
    pub(super) requester: Requester,
    /// With its offset in the volume of the lane.
    pub(super) request: Request,
    /// What is to be written, or memory for what is to be read.
    pub(super) payload: Option<BufMut>,
    /// Its offset in the volume of the array.
    pub(super) asked: u64,
    /// The part of a request of several lanes that it is, on the reactor of its connection.
    pub(super) part: Option<PartId>,
    /// Bytes of its requester's memory that it holds.
    pub(super) charge: usize,
    /// The long request that it is a part of.
    pub(super) long: Option<usize>,
    /// Of a read: whether zeroes may stay out of the answer.
    pub(super) sparse: bool,
}

/// The result of an order that its volume has ended.
#[derive(Debug)]
pub(super) struct Answer {
    pub(super) requester: Requester,
    /// With its offset in the volume of the array.
    pub(super) request: Request,
    /// The part of a request of several lanes that it is, on the reactor of its connection.
    pub(super) part: Option<PartId>,
    pub(super) charge: usize,
    pub(super) long: Option<usize>,
    /// Of a question about two contexts: (bytes, flags) of base:allocation.
    pub(super) allocation: Vec<(u64, u32)>,
    pub(super) result: Result<ClientReply, ClientError>,
}

/// The answer to a read that brought these bytes.
pub(super) fn answer_of(order: Order, buf: BufMut) -> Answer {
    let Order { requester, request, asked, part, charge, long, .. } = order;
    let (request, result) = (Request { offset: asked, ..request }, Ok(ClientReply::Data(buf)));
    Answer { requester, request, part, charge, long, allocation: Vec::new(), result }
}

/// What arrays tell requesters.
#[derive(Debug)]
pub(super) enum Outcome {
    /// An order has ended.
    Answer(Answer),
    /// An order waits for others: its volume does not have it.
    Waits { requester: Requester, ticket: LaneTicket, modifies: bool },
    /// A waiting order may go on.
    MayGoOn { requester: Requester, ticket: LaneTicket, modifies: bool },
    /// An order was dropped: its array is gone, or its client gave it up. `waited`: its ticket, if it waited
    /// for others.
    Dropped { order: Order, waited: Option<LaneTicket> },
    /// For everybody.
    News(News),
}

/// What everybody is told of an array.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum News {
    /// Acknowledged writes that were not flushed are lost: the next flush of every client that may have made
    /// them must fail.
    WritesLost(ArrayId),
    /// It is to stop, or is gone: its clients are dismissed.
    Leaves(ArrayId),
}

impl Outcome {
    /// The requester that it is for; none: everybody.
    pub(super) fn requester(&self) -> Option<Requester> {
        match self {
            Outcome::Answer(answer) => Some(answer.requester),
            Outcome::Waits { requester, .. } | Outcome::MayGoOn { requester, .. } => Some(*requester),
            Outcome::Dropped { order, .. } => Some(order.requester),
            Outcome::News(_) => None,
        }
    }
}

/// A request without payload in a volume's terms; none for a request with payload, or one that needs no
/// volume.
pub(super) fn client_request(request: &Request) -> Option<ClientRequest> {
    let (offset, len) = (VolumeOffset(request.offset), request.length);
    Some(match request.command {
        Command::Flush => ClientRequest::Flush,
        Command::Trim => ClientRequest::Trim { offset, len, fua: request.fua },
        Command::WriteZeroes => ClientRequest::WriteZeroes {
            offset,
            len,
            may_unmap: !request.no_hole,
            fast_only: request.fast_zero,
            fua: request.fua,
        },
        Command::BlockStatus if request.contexts.allocation => ClientRequest::BlockStatus { offset, len },
        Command::BlockStatus => ClientRequest::Health { offset, len },
        Command::Read | Command::Write | Command::Cache => return None,
    })
}

/// Runs of base:allocation, as (bytes, flags).
pub(super) fn allocation_of(extents: &[VolumeExtent]) -> Vec<(u64, u32)> {
    extents.iter().map(|e| (e.len, if e.hole { STATE_HOLE | STATE_ZERO } else { 0 })).collect()
}

/// Runs of calpe:health, as (bytes, flags).
pub(super) fn health_of(runs: &[(u64, Health)]) -> Vec<(u64, u32)> {
    let flags = |health| match health {
        Health::Clean => 0,
        Health::Degraded => HEALTH_DEGRADED,
        Health::Lost => HEALTH_LOST,
    };
    runs.iter().map(|&(len, health)| (len, flags(health))).collect()
}

pub(super) fn errno_of(error: ClientError) -> Errno {
    match error {
        ClientError::Io | ClientError::Stopping => Errno::Io,
        ClientError::NoSpace => Errno::NoSpc,
        ClientError::NotSupported => Errno::NotSup,
    }
}
