//! What clients have asked for and what is under way for it: values without rules of their own.

use super::locks::BlockLocks;
use super::{Facts, Purpose};
use crate::array::StripeRequest;
use crate::block_io::{Buf, BufMut, Pool};
use crate::format::cas::{CAS_BLOCK_BYTES, CatalogueSlot, ChunkHash, ChunkId, PageName, SegmentIndex};
use crate::units::StripeIndex;
use crate::volume::api::{ClientError, ClientRequest, Health, RequestId};
use crate::volume::reply::Part;
use slab::Slab;
use std::collections::{HashMap, VecDeque};
use std::ops::Range;

/// Most blocks of an operation.
pub(super) const PART_BLOCKS: u64 = 256;
/// Blocks covered by one part of a request without payload.
pub(super) const PART_SPAN: u64 = 2048;

/// Everything under way in one life of the volume.
#[derive(Default)]
pub(super) struct Work {
    pub requests: Slab<Request>,
    pub ops: Slab<Op>,
    /// Operations to be advanced.
    pub ready: VecDeque<usize>,
    pub page_waiters: HashMap<PageName, Vec<usize>>,
    pub locks: BlockLocks,
    /// New chunks that have no place yet: operation, and which of its blocks.
    pub pending: VecDeque<(usize, usize)>,
    /// Hashes of these, and of those that are being written, and who else has such a block.
    pub placing: HashMap<ChunkHash, Vec<(usize, usize)>>,
    /// Segments of chunks that are being written.
    pub filling: Slab<Filling>,
    /// Writes that found no space on a member.
    pub retries: Vec<Purpose>,
    /// Requests that came before the volume had started.
    pub early: Vec<(RequestId, ClientRequest)>,
    /// Operations that wait for free segments.
    pub starved: Vec<usize>,
}

/// A client's request.
pub(super) struct Request {
    pub id: RequestId,
    pub kind: RequestKind,
    /// Parts that have not ended.
    pub pending: usize,
    pub error: Option<ClientError>,
    /// Bytes that it is about.
    pub len: u64,
}

pub(super) enum RequestKind {
    /// The parts of the reply in the order of their offsets.
    Read {
        parts: Vec<Option<Part>>,
        sparse: bool,
    },
    /// A write or zeroing, which is followed by a flush if it has to be durable.
    Change {
        fua: bool,
    },
    /// Runs of (bytes, whether they are holes).
    Extents(Vec<(u64, bool)>),
    Health(Health),
    Plain,
}

/// An operation.
pub(super) enum Op {
    Read(Read),
    Write(Write),
    Extents(Extents),
}

/// For whom something is read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Reader {
    /// A client's request, and which part of it.
    Client { request: usize, place: usize },
    /// A write that changes a part of a block: the operation, and which of its blocks.
    Edge { op: usize, at: usize },
}

/// A part of a read.
pub(super) struct Read {
    pub reader: Reader,
    pub volume: CatalogueSlot,
    /// First block, and the bytes of it before the asked ones.
    pub first: u64,
    pub skip: usize,
    /// Where the client wants its bytes, if these are not whole blocks.
    pub target: Option<BufMut>,
    /// Bytes that are asked for.
    pub len: usize,
    pub pieces: Vec<Piece>,
    pub pending: usize,
    pub error: Option<ClientError>,
    pub attempts: u32,
}

/// A run of blocks of a read.
pub(super) struct Piece {
    pub buf: Option<BufMut>,
    /// The chunks, one for each block; none for holes.
    pub chunks: Vec<(ChunkId, ChunkHash)>,
}

/// A part of a write or zeroing.
pub(super) struct Write {
    pub request: usize,
    pub volume: CatalogueSlot,
    pub first: u64,
    pub body: Body,
    pub stage: WriteStage,
    /// The locked range.
    pub range: Range<u64>,
    /// Edges that are being read, or chunks without a place.
    pub pending: usize,
    /// It ends with this when nothing of it is under way.
    pub failed: Option<ClientError>,
}

pub(super) enum Body {
    Blocks(Vec<NewBlock>),
    Holes(u64),
}

/// A block of a write.
pub(super) struct NewBlock {
    pub data: Buf,
    /// Of a block that is changed in part: where the new bytes go.
    pub edge: Option<usize>,
    pub hash: ChunkHash,
    pub found: Found,
    /// It is stored anew even if its chunk is stored already.
    pub is_fresh: bool,
}

/// What is known of the chunk of a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Found {
    Unknown,
    /// All zeroes.
    Hole,
    /// It is stored already.
    Stored(ChunkId),
    /// It is new, will have this id, and has no place yet.
    Pending(ChunkId),
    /// It is new, and lies here.
    Placed(ChunkId, SegmentIndex, u32),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum WriteStage {
    /// Waits for its range.
    Lock,
    /// Reads blocks that it changes in part.
    Edges,
    /// Looks for duplicates.
    Find,
    /// Waits until its chunks have places.
    Place,
    Join,
    /// Waits until its entry of the journal is answered.
    Logged,
}

/// A look at which blocks are holes.
pub(super) struct Extents {
    pub request: usize,
    pub volume: CatalogueSlot,
    pub range: Range<u64>,
}

/// A segment of chunks that is being written.
pub(super) struct Filling {
    pub segment: SegmentIndex,
    /// Each block's hash and bytes.
    pub chunks: Vec<(ChunkHash, Buf)>,
}

impl Filling {
    /// The write.
    pub(super) fn request(&self, facts: &Facts, pool: &Pool) -> StripeRequest {
        let mut parts: Vec<Buf> = self.chunks.iter().map(|(_, data)| data.clone()).collect();
        let left = facts.segment_blocks as usize - parts.len();
        if left > 0 {
            parts.push(pool.alloc_zeroed(left * CAS_BLOCK_BYTES).freeze());
        }
        StripeRequest::WriteStripe { stripe: StripeIndex(self.segment.0.into()), parts, fua: false }
    }
}
