//! The plain volume: logical stripe `i` is slot `i`. Cuts client requests into parts of one slot each, hands
//! them to the array with bounded parallelism, and answers when the last part is done.
//!
//! Invariant: a request is answered once, after all its parts have ended; the first error is its answer. A
//! zeroing request of any length has a bounded number of parts under way. Must not know of members.

use super::api::{
    AdminOutcome, AdminRefusal, AdminRequest, ClientError, ClientReply, ClientRequest, RequestId,
    VolumeEvent, VolumeExtent, VolumeOutput,
};
use super::cut::refuses;
use super::driven::DrivenArray;
use super::gather::{Gather, Offered, WritePart};
use super::reply::{Part, clip, read_reply};
use super::{LaneCut, PartLen, ViewReader, Volume, VolumeStatus};
use crate::array::assembly::Assembled;
use crate::array::{
    Array, ArrayConfig, OpenDevice, StripeReply, StripeRequest, StripeRequestId, ZERO_RUN_STRIPES,
};
use crate::block_io::{Buf, BufMut, Pool};
use crate::codec::Codec;
use crate::units::{
    BlockHash, ColumnIndex, LaneIndex, ROW_BYTES, SlotIndex, StripeIndex, Timestamp, VolumeOffset,
};
use slab::Slab;
use std::ops::Range;
use std::sync::Arc;
use uuid::Uuid;

/// See the head of this file.
pub struct PlainVolume {
    driven: DrivenArray,
    pool: Pool,
    stripe_bytes: u64,
    /// The whole volume of which it is one lane's.
    whole: (LaneCut, LaneIndex),
    requests: Slab<Request>,
    /// Parts of writes that wait for others of their stripe.
    gather: Gather,
    /// Requests that were refused at once.
    refused: Vec<(RequestId, ClientError)>,
    /// One stripe of zeroes, for the ends of zeroing requests that are not whole stripes; allocated at first
    /// use.
    zeroes: Option<Buf>,
    /// Name and byte range, for messages, of the request that is being started.
    named: (&'static str, Option<(VolumeOffset, u64)>),
}

struct Request {
    id: RequestId,
    kind: Kind,
    /// Its name and byte range in the volume, for messages.
    what: &'static str,
    place: Option<(VolumeOffset, u64)>,
    pending: usize,
    error: Option<ClientError>,
}

enum Kind {
    /// The parts of the reply in the order of their offsets. `sparse`: the reply may describe zeroes instead
    /// of holding them.
    Read {
        parts: Vec<Option<Part>>,
        sparse: bool,
    },
    Write,
    Flush,
    /// What is left to zero.
    Zero {
        left: Range<u64>,
        fua: bool,
    },
    /// The asked range.
    Extents(Range<u64>),
    /// The asked range.
    Health(Range<u64>),
}

/// Most parts of one zeroing request under way at one time.
const ZERO_PARTS_MAX: usize = 4;

/// Chunks, parity included, covered by one part of a request without payload. A discard takes 60 ns for each,
/// so one part holds the thread that serves all clients for 50 us.
const PART_CHUNKS: u64 = 768;

/// Low bits of a [`StripeRequestId`], which hold the part's index in its request: a request of 32 MiB in the
/// smallest stripes (one 4 KiB chunk) has 2^13 parts.
const PLACE_BITS: u32 = 20;

impl PlainVolume {
    /// Serves the plain volume of an assembled array.
    #[must_use]
    pub fn new(
        assembled: Assembled<OpenDevice>,
        codec: Codec,
        pool: Pool,
        config: ArrayConfig,
    ) -> PlainVolume {
        let whole = (LaneCut::of(&assembled.superblock), assembled.superblock.part.lane);
        let array = Array::new(assembled, codec, pool.clone(), config);
        let stripe_bytes = array.map().stripe_bytes() as u64;
        PlainVolume {
            driven: DrivenArray::new(array),
            pool,
            stripe_bytes,
            whole,
            requests: Slab::new(),
            gather: Gather::new(stripe_bytes as usize),
            refused: Vec::new(),
            zeroes: None,
            named: ("request", None),
        }
    }

    /// What an earlier run could not read: see [`Array::expect_damage`].
    pub fn expect_damage(&mut self, ranges: &[(VolumeOffset, u64)], is_beyond_repair: bool) {
        self.driven.array_mut().expect_damage(ranges, is_beyond_repair);
    }

    /// What a device went into service without in an earlier run: see [`Array::expect_lacking`].
    pub fn expect_lacking(&mut self, device: Uuid, runs: &[(SlotIndex, u64)]) {
        self.driven.array_mut().expect_lacking(device, runs);
    }

    /// A scrub under way stays paused: see [`Array::keep_scrub_paused`].
    pub fn keep_scrub_paused(&mut self) {
        self.driven.array_mut().keep_scrub_paused();
    }

    /// The hash of the block at `offset` according to the array's cached pages, or None when its page is not
    /// cached; for tests.
    pub(crate) fn cached_hash(&self, offset: VolumeOffset) -> Option<BlockHash> {
        let (stripe, within) = (offset.0 / self.stripe_bytes, offset.0 % self.stripe_bytes);
        let chunk = u64::from(self.driven.array().geometry().chunk);
        let column = ColumnIndex((within / chunk) as u16);
        self.driven.array().cached_hash(StripeIndex(stripe), column, (within % chunk / ROW_BYTES) as usize)
    }

    /// Cuts a byte range of the volume at stripe boundaries: (stripe, offset in it, length).
    fn parts(&self, offset: u64, len: u64) -> impl Iterator<Item = (StripeIndex, usize, usize)> + use<> {
        let (stripe_bytes, end) = (self.stripe_bytes, offset + len);
        let mut at = offset;
        std::iter::from_fn(move || {
            if at >= end {
                return None;
            }
            let within = at % stripe_bytes;
            let part = (stripe_bytes - within).min(end - at);
            let stripe = StripeIndex(at / stripe_bytes);
            at += part;
            Some((stripe, within as usize, part as usize))
        })
    }

    fn client(&mut self, now: Timestamp, id: RequestId, request: ClientRequest) {
        if self.driven.is_stopping() {
            self.refused.push((id, ClientError::Stopping));
            return;
        }
        if refuses(self.stripe_bytes, &request) {
            self.refused.push((id, ClientError::NotSupported));
            return;
        }
        self.named = (name_of(&request), request.range());
        match request {
            ClientRequest::Read { offset, buf } => self.read(now, id, offset, buf, false),
            ClientRequest::ReadSparse { offset, buf } => self.read(now, id, offset, buf, true),
            ClientRequest::Write { offset, data, fua } => self.write(now, id, offset, &data, fua),
            ClientRequest::Flush => {
                let request = self.start(id, Kind::Flush);
                self.submit(now, request, 0, StripeRequest::Flush);
            }
            ClientRequest::Trim { offset, len, fua } => {
                // Only whole stripes are trimmed; the ragged ends of the range keep their bytes.
                let start = offset.0.next_multiple_of(self.stripe_bytes);
                let end = (offset.0 + len) / self.stripe_bytes * self.stripe_bytes;
                self.zero(now, id, start..end.max(start), fua);
            }
            ClientRequest::WriteZeroes { offset, len, fua, .. } => {
                self.zero(now, id, offset.0..offset.0 + len, fua);
            }
            ClientRequest::BlockStatus { offset, len } => self.block_status(now, id, offset, len),
            ClientRequest::Health { offset, len } => {
                let (first, count) = self.stripes_of(offset, len);
                let request = self.start(id, Kind::Health(offset.0..offset.0 + len));
                self.submit(now, request, 0, StripeRequest::Health { first, count });
            }
        }
    }

    fn start(&mut self, id: RequestId, kind: Kind) -> usize {
        let (what, place) = self.named;
        self.requests.insert(Request { id, kind, what, place, pending: 0, error: None })
    }

    fn submit(&mut self, now: Timestamp, request: usize, place: usize, stripe_request: StripeRequest) {
        let id = self.begin_part(request, place);
        self.driven.submit(now, id, stripe_request);
    }

    /// Names a part of a request.
    fn begin_part(&mut self, request: usize, place: usize) -> StripeRequestId {
        self.requests[request].pending += 1;
        StripeRequestId((request as u64) << PLACE_BITS | place as u64)
    }

    /// Writes a part, alone or with others of its stripe.
    fn write_part(&mut self, now: Timestamp, part: WritePart) {
        let range = part.offset..part.offset + part.data.len();
        let earlier = self.gather.disturb(part.stripe, &range);
        self.submit_parts(now, earlier);
        match self.gather.offer(now, part) {
            Offered::Alone(part) => self.submit_parts(now, [part]),
            Offered::Apart(parts) => self.submit_parts(now, parts),
            Offered::Kept => {}
            Offered::Whole(parts) => {
                let (stripe, fua) = (parts[0].stripe, parts.iter().any(|part| part.fua));
                let bytes = parts.iter().map(|part| part.data.clone()).collect();
                let id = self.gather.begin_whole(parts);
                self.driven.submit(now, id, StripeRequest::WriteStripe { stripe, parts: bytes, fua });
            }
        }
    }

    /// Has the array write parts one by one.
    fn submit_parts(&mut self, now: Timestamp, parts: impl IntoIterator<Item = WritePart>) {
        for WritePart { id, stripe, offset, data, fua } in parts {
            self.driven.submit(now, id, StripeRequest::Write { stripe, offset, data, fua });
        }
    }

    fn read(&mut self, now: Timestamp, id: RequestId, offset: VolumeOffset, buf: BufMut, sparse: bool) {
        let cut = self.parts(offset.0, buf.len() as u64);
        let request = self.start(id, Kind::Read { parts: Vec::new(), sparse });
        let mut rest = buf;
        for (place, (stripe, within, len)) in cut.enumerate() {
            let tail = rest.split_off(len);
            let buf = std::mem::replace(&mut rest, tail);
            if let Kind::Read { parts, .. } = &mut self.requests[request].kind {
                parts.push(None);
            }
            self.submit(now, request, place, StripeRequest::Read { stripe, offset: within, buf });
        }
    }

    fn write(&mut self, now: Timestamp, id: RequestId, offset: VolumeOffset, data: &Buf, fua: bool) {
        let request = self.start(id, Kind::Write);
        let mut at = 0;
        for (place, (stripe, within, len)) in self.parts(offset.0, data.len() as u64).enumerate() {
            let id = self.begin_part(request, place);
            let part = WritePart { id, stripe, offset: within, data: data.slice(at..at + len), fua };
            self.write_part(now, part);
            at += len;
        }
    }

    fn zero(&mut self, now: Timestamp, id: RequestId, left: Range<u64>, fua: bool) {
        let request = self.start(id, Kind::Zero { left, fua });
        self.continue_zero(now, request);
        if self.requests[request].pending == 0 {
            // Nothing to zero: a flush is the cheapest way to end like every other request.
            if let Kind::Zero { fua, .. } = &mut self.requests[request].kind {
                *fua = false;
            }
            self.submit(now, request, 0, StripeRequest::Flush);
        }
    }

    /// Sends the next parts of a zeroing request.
    fn continue_zero(&mut self, now: Timestamp, request: usize) {
        while self.requests[request].pending < ZERO_PARTS_MAX && self.requests[request].error.is_none() {
            let Kind::Zero { left, .. } = &mut self.requests[request].kind else {
                return;
            };
            if left.is_empty() {
                return;
            }
            let stripe = left.start / self.stripe_bytes;
            let whole = (left.end / self.stripe_bytes).saturating_sub(stripe);
            if left.start.is_multiple_of(self.stripe_bytes) && whole > 0 {
                let count = whole.min(ZERO_RUN_STRIPES);
                left.start += count * self.stripe_bytes;
                let kept = self.gather.disturb_run(&(stripe..stripe + count));
                self.submit_parts(now, kept);
                let first = StripeIndex(stripe);
                self.submit(now, request, 0, StripeRequest::Zero { first, count });
                continue;
            }
            let within = left.start % self.stripe_bytes;
            let len = (self.stripe_bytes - within).min(left.end - left.start);
            left.start += len;
            let data = self.zero_buf(len as usize);
            let (stripe, offset) = (StripeIndex(stripe), within as usize);
            let kept = self.gather.disturb(stripe, &(offset..offset + data.len()));
            self.submit_parts(now, kept);
            self.submit(now, request, 0, StripeRequest::Write { stripe, offset, data, fua: false });
        }
    }

    fn zero_buf(&mut self, len: usize) -> Buf {
        let pool = &self.pool;
        let stripe = self.stripe_bytes as usize;
        self.zeroes.get_or_insert_with(|| pool.alloc_zeroed(stripe).freeze()).slice(0..len)
    }

    fn block_status(&mut self, now: Timestamp, id: RequestId, offset: VolumeOffset, len: u64) {
        let (first, count) = self.stripes_of(offset, len);
        let request = self.start(id, Kind::Extents(offset.0..offset.0 + len));
        self.submit(now, request, 0, StripeRequest::Extents { first, count });
    }

    /// The stripes of a range: the first, and how many.
    fn stripes_of(&self, offset: VolumeOffset, len: u64) -> (StripeIndex, u64) {
        let first = offset.0 / self.stripe_bytes;
        let end = (offset.0 + len).div_ceil(self.stripe_bytes);
        (StripeIndex(first), end - first)
    }

    /// Takes the end of what the array did.
    fn ended(
        &mut self,
        now: Timestamp,
        id: StripeRequestId,
        result: Result<StripeReply, ClientError>,
        out: &mut VolumeOutput,
    ) {
        let Some(parts) = self.gather.end_whole(id) else {
            self.gather.ended(id);
            return self.part_done(now, id, result, out);
        };
        for part in parts {
            let result = result.as_ref().map(|_| StripeReply::Done).map_err(|error| *error);
            self.part_done(now, part.id, result, out);
        }
    }

    fn part_done(
        &mut self,
        now: Timestamp,
        id: StripeRequestId,
        result: Result<StripeReply, ClientError>,
        out: &mut VolumeOutput,
    ) {
        let key = (id.0 >> PLACE_BITS) as usize;
        let place = (id.0 & ((1 << PLACE_BITS) - 1)) as usize;
        let request = &mut self.requests[key];
        request.pending -= 1;
        let (mut holes, mut health) = (None, Vec::new());
        match (result, &mut request.kind) {
            (Err(error), _) => {
                request.error.get_or_insert(error);
            }
            (Ok(StripeReply::Data(buf)), Kind::Read { parts, .. }) => parts[place] = Some((buf, Vec::new())),
            (Ok(StripeReply::Sparse(buf, zeroes)), Kind::Read { parts, .. }) => {
                parts[place] = Some((buf, zeroes))
            }
            (Ok(StripeReply::Holes(found)), Kind::Extents(_)) => holes = Some(found),
            (Ok(StripeReply::Health(found)), Kind::Health(_)) => health = found,
            (Ok(_), _) => {}
        }
        if matches!(request.kind, Kind::Zero { .. }) && request.error.is_none() {
            self.continue_zero(now, key);
        }
        let request = &mut self.requests[key];
        if request.pending > 0 {
            return;
        }
        if let (Kind::Zero { fua, .. }, None) = (&mut request.kind, request.error)
            && std::mem::take(fua)
        {
            self.submit(now, key, 0, StripeRequest::Flush);
            return;
        }
        let request = self.requests.remove(key);
        if let Some(error @ (ClientError::Io | ClientError::NoSpace)) = request.error {
            // The operator knows the whole volume.
            let (cut, lane) = self.whole;
            let place = request.place.map(|(offset, len)| (cut.whole_of(lane, offset), len));
            self.driven.array_mut().note_client_error(request.what, place, error);
        }
        let reply = match (request.error, request.kind) {
            (Some(error), _) => Err(error),
            (None, Kind::Read { parts, sparse }) => Ok(read_reply(&self.pool, parts, sparse)),
            (None, Kind::Health(range)) => Ok(ClientReply::Health(clip(
                &health,
                range.start % self.stripe_bytes,
                range.end - range.start,
            ))),
            (None, Kind::Extents(range)) => {
                let runs: Vec<(u64, bool)> = holes
                    .iter()
                    .flatten()
                    .map(|&(stripes, hole)| (stripes * self.stripe_bytes, hole))
                    .collect();
                let runs = clip(&runs, range.start % self.stripe_bytes, range.end - range.start);
                let extents = runs.into_iter().map(|(len, hole)| VolumeExtent { len, hole });
                Ok(ClientReply::Extents(extents.collect()))
            }
            (None, _) => Ok(ClientReply::Done),
        };
        out.replies.push((request.id, reply));
    }
}

#[cfg(test)]
impl PlainVolume {
    /// Checks that readers on other threads are shown the pages of the array as they are.
    pub(crate) fn check_shown(&self) {
        self.driven.array().check_shown();
    }
}

impl Volume for PlainVolume {
    fn take(&mut self, now: Timestamp, event: VolumeEvent) {
        if let Some((id, request)) = self.driven.take(now, event) {
            self.client(now, id, request);
        }
        if self.driven.is_stopping() {
            let kept = self.gather.take_all();
            self.submit_parts(now, kept);
        }
    }

    fn settle(&mut self, now: Timestamp, out: &mut VolumeOutput) {
        out.replies.extend(self.refused.drain(..).map(|(id, error)| (id, Err(error))));
        let overdue = self.gather.overdue(now);
        self.submit_parts(now, overdue);
        while let Some((id, result)) = self.driven.next_ended() {
            self.ended(now, id, result, out);
        }
        self.driven.pass_on(now, self.requests.is_empty(), out);
    }

    fn would(&self, request: &AdminRequest) -> Result<AdminOutcome, AdminRefusal> {
        self.driven.would(request)
    }

    fn part_len(&self) -> PartLen {
        let (stripe_bytes, width) = (self.stripe_bytes, self.driven.array().map().width());
        Arc::new(move |request| part_len(stripe_bytes, width, request))
    }

    fn due(&self) -> Option<Timestamp> {
        [self.driven.array().due(), self.gather.due()].into_iter().flatten().min()
    }

    fn damage_revision(&self) -> u64 {
        self.driven.array().damage_revision()
    }

    fn view_reader(&self) -> Option<ViewReader> {
        Some(self.driven.array().view_reader())
    }

    fn status(&self) -> VolumeStatus {
        self.driven.array().status()
    }
}

/// See [`PartLen`].
fn part_len(stripe_bytes: u64, width: usize, request: &ClientRequest) -> u64 {
    let Some((offset, len)) = request.range().filter(|_| !request.has_payload()) else { return u64::MAX };
    // Such a request must fail before any part of it is done.
    if refuses(stripe_bytes, request) {
        return len;
    }
    let stripes = (PART_CHUNKS / width as u64).max(1);
    // Cut between stripes, so that whole ones stay whole.
    let end = (offset.0 / stripe_bytes + stripes) * stripe_bytes;
    len.min(end - offset.0)
}

/// The name of a request in messages.
fn name_of(request: &ClientRequest) -> &'static str {
    match request {
        ClientRequest::Read { .. } | ClientRequest::ReadSparse { .. } => "read",
        ClientRequest::Write { .. } => "write",
        ClientRequest::Flush => "flush",
        ClientRequest::Trim { .. } => "trim",
        ClientRequest::WriteZeroes { .. } => "write of zeroes",
        ClientRequest::BlockStatus { .. } => "request for block status",
        ClientRequest::Health { .. } => "request for health",
    }
}
