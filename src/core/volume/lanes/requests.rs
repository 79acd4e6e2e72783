//! Clients' requests to a volume of several lanes: cut into requests to its lanes, and answered when the last
//! of these has ended.
//!
//! Invariants: a request is answered once; its first error is its answer; a flush goes to every lane, as each
//! lane has writes of its own. Must not know how a request gets to its lane.

use super::super::api::{ClientError, ClientReply, ClientRequest, EndedRequest, Health, RequestId};
use super::super::api::{ReadRun, VolumeExtent};
use crate::array::mutation::{Mutation, is_off};
use crate::block_io::{BufMut, Pool};
use crate::units::{LaneIndex, VolumeOffset};
use crate::volume::{LaneCut, LanePiece};
use slab::Slab;

/// A request to one lane. Its id is the one under which its end is given to [`LaneRequests::ended`].
#[derive(Debug)]
pub struct LaneRequest {
    /// Which lane.
    pub lane: LaneIndex,
    /// Names it there.
    pub id: RequestId,
    /// What is asked.
    pub request: ClientRequest,
}

/// See the head of this file.
pub struct LaneRequests {
    cut: LaneCut,
    pool: Pool,
    open: Slab<Open>,
}

/// A request under way.
struct Open {
    id: RequestId,
    /// Parts that have not ended.
    pending: usize,
    error: Option<ClientError>,
    /// The replies to its parts, in the order of the volume.
    replies: Vec<Option<ClientReply>>,
    kind: Kind,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Kind {
    Done,
    Read,
    Extents,
    Health,
}

/// Low bits of the id of a part, which hold its index in its request: a request of 32 MiB has 2^13 pieces of
/// the smallest group (one stripe of one 4 KiB chunk), and one without payload is cut before.
const PART_BITS: u32 = 24;

impl LaneRequests {
    /// Buffers of replies that lie apart are joined in memory of the pool.
    #[must_use]
    pub fn new(cut: LaneCut, pool: Pool) -> LaneRequests {
        LaneRequests { cut, pool, open: Slab::new() }
    }

    /// Whether nothing is under way.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.open.is_empty()
    }

    /// Begins a request: its parts are to be given to their lanes, those of one lane in this order.
    ///
    /// # Errors
    /// When it is refused before any part of it is done.
    pub fn begin(&mut self, id: RequestId, request: ClientRequest) -> Result<Vec<LaneRequest>, ClientError> {
        let (kind, parts) = self.parts(request)?;
        let replies = parts.iter().map(|_| None).collect();
        let key = self.open.insert(Open { id, pending: parts.len(), error: None, replies, kind });
        let name = |at: usize| RequestId((key as u64) << PART_BITS | at as u64);
        let parts = parts.into_iter().enumerate();
        Ok(parts.map(|(at, (lane, request))| LaneRequest { lane, id: name(at), request }).collect())
    }

    fn parts(&self, request: ClientRequest) -> Result<(Kind, Vec<(LaneIndex, ClientRequest)>), ClientError> {
        let pieces = |offset, len| self.cut.pieces(offset, len);
        Ok(match request {
            ClientRequest::Read { offset, buf } => (Kind::Read, self.reads(offset, buf, false)),
            ClientRequest::ReadSparse { offset, buf } => (Kind::Read, self.reads(offset, buf, true)),
            ClientRequest::Write { offset, data, fua } => {
                let mut at = 0;
                let part = |LanePiece { lane, within, len, .. }| {
                    let data = data.slice(at..at + len as usize);
                    at += len as usize;
                    (lane, ClientRequest::Write { offset: within, data, fua })
                };
                (Kind::Done, pieces(offset, data.len() as u64).map(part).collect())
            }
            ClientRequest::Flush => {
                let lanes = if is_off(Mutation::FlushForgetsALane) { 1 } else { self.cut.count() };
                (Kind::Done, (0..lanes).map(|lane| (LaneIndex(lane), ClientRequest::Flush)).collect())
            }
            ClientRequest::Trim { offset, len, fua } => {
                let part = |LanePiece { lane, within, len, .. }| {
                    (lane, ClientRequest::Trim { offset: within, len, fua })
                };
                (Kind::Done, pieces(offset, len).map(part).collect())
            }
            ClientRequest::WriteZeroes { offset, len, may_unmap, fast_only, fua } => {
                // A lane cannot know that another one refuses its part: it must be all or nothing.
                if fast_only && !(may_unmap && self.cut.is_of_stripes(offset, len)) {
                    return Err(ClientError::NotSupported);
                }
                let part = |LanePiece { lane, within, len, .. }| {
                    (lane, ClientRequest::WriteZeroes { offset: within, len, may_unmap, fast_only, fua })
                };
                (Kind::Done, pieces(offset, len).map(part).collect())
            }
            ClientRequest::BlockStatus { offset, len } => {
                let part = |LanePiece { lane, within, len, .. }| {
                    (lane, ClientRequest::BlockStatus { offset: within, len })
                };
                (Kind::Extents, pieces(offset, len).map(part).collect())
            }
            ClientRequest::Health { offset, len } => {
                let part = |LanePiece { lane, within, len, .. }| {
                    (lane, ClientRequest::Health { offset: within, len })
                };
                (Kind::Health, pieces(offset, len).map(part).collect())
            }
        })
    }

    fn reads(&self, offset: VolumeOffset, buf: BufMut, sparse: bool) -> Vec<(LaneIndex, ClientRequest)> {
        let mut rest = buf;
        let len = rest.len() as u64;
        let part = |LanePiece { lane, within: offset, len, .. }| {
            let tail = rest.split_off(len as usize);
            let buf = std::mem::replace(&mut rest, tail);
            (
                lane,
                match sparse {
                    true => ClientRequest::ReadSparse { offset, buf },
                    false => ClientRequest::Read { offset, buf },
                },
            )
        };
        self.cut.pieces(offset, len).map(part).collect()
    }

    /// Takes the end of a part. Returns the answer to its request if that was the last one.
    ///
    /// # Panics
    /// When no such part is under way.
    pub fn ended(&mut self, id: RequestId, result: Result<ClientReply, ClientError>) -> Option<EndedRequest> {
        let (key, at) = ((id.0 >> PART_BITS) as usize, (id.0 & ((1 << PART_BITS) - 1)) as usize);
        let open = &mut self.open[key];
        open.pending -= 1;
        match result {
            Ok(reply) => open.replies[at] = Some(reply),
            Err(error) => _ = open.error.get_or_insert(error),
        }
        if open.pending > 0 {
            return None;
        }
        let Open { id, error, replies, kind, .. } = self.open.remove(key);
        if let Some(error) = error {
            return Some((id, Err(error)));
        }
        let replies = replies.into_iter().flatten();
        let reply = match kind {
            Kind::Done => ClientReply::Done,
            Kind::Read => join_reads(&self.pool, replies),
            Kind::Extents => ClientReply::Extents(join_extents(replies)),
            Kind::Health => ClientReply::Health(join_health(replies)),
        };
        Some((id, Ok(reply)))
    }
}

/// Joins what was read: one buffer, unless a part has runs of zeroes.
fn join_reads(pool: &Pool, replies: impl Iterator<Item = ClientReply>) -> ClientReply {
    let mut runs: Vec<ReadRun> = Vec::new();
    for reply in replies {
        match reply {
            ClientReply::Data(buf) => push_run(&mut runs, ReadRun::Data(buf)),
            ClientReply::Sparse(some) => some.into_iter().for_each(|run| push_run(&mut runs, run)),
            other => unreachable!("a read was answered with {other:?}"),
        }
    }
    if runs.iter().any(|run| matches!(run, ReadRun::Zeroes(_))) {
        return ClientReply::Sparse(runs);
    }
    let mut parts: Vec<BufMut> = runs
        .into_iter()
        .filter_map(|run| match run {
            ReadRun::Data(buf) => Some(buf),
            ReadRun::Zeroes(_) => None,
        })
        .collect();
    if parts.len() == 1 {
        return ClientReply::Data(parts.remove(0));
    }
    let mut whole = pool.alloc(parts.iter().map(|part| part.len()).sum());
    let mut at = 0;
    for part in parts {
        whole[at..at + part.len()].copy_from_slice(&part);
        at += part.len();
    }
    ClientReply::Data(whole)
}

/// Appends a run: to the last one if both are of zeroes, or adjacent in memory.
fn push_run(runs: &mut Vec<ReadRun>, run: ReadRun) {
    let rest = match (runs.last_mut(), run) {
        (Some(ReadRun::Zeroes(len)), ReadRun::Zeroes(more)) => {
            *len += more;
            None
        }
        (Some(ReadRun::Data(last)), ReadRun::Data(more)) => last.try_unsplit(more).err().map(ReadRun::Data),
        (_, run) => Some(run),
    };
    runs.extend(rest);
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
mod tests {
    use super::*;
    use crate::format::Lanes;

    const STRIPE: u64 = 8192;

    fn requests() -> LaneRequests {
        let cut = LaneCut::new(Lanes { count: 3, group: 2 }, STRIPE, 100 * STRIPE);
        LaneRequests::new(cut, Pool::new(4 << 20).expect("address space"))
    }

    fn begin(requests: &mut LaneRequests, request: ClientRequest) -> Vec<LaneRequest> {
        requests.begin(RequestId(7), request).expect("it is taken")
    }

    /// Ends parts with these replies, in an order that is not theirs; the answer.
    fn end(
        requests: &mut LaneRequests,
        parts: &[LaneRequest],
        mut replies: Vec<Result<ClientReply, ClientError>>,
    ) -> Result<ClientReply, ClientError> {
        for part in parts[1..].iter().rev() {
            assert!(requests.ended(part.id, replies.pop().expect("one for each")).is_none());
        }
        let (id, result) = requests.ended(parts[0].id, replies.remove(0)).expect("the last part");
        assert!(id == RequestId(7) && requests.is_empty());
        result
    }

    fn done() -> Result<ClientReply, ClientError> {
        Ok(ClientReply::Done)
    }

    #[test]
    fn a_flush_goes_to_every_lane_and_ends_with_the_last() {
        let mut requests = requests();
        let parts = begin(&mut requests, ClientRequest::Flush);
        assert_eq!(parts.iter().map(|part| part.lane.0).collect::<Vec<_>>(), [0, 1, 2]);
        assert!(parts.iter().all(|part| matches!(part.request, ClientRequest::Flush)));
        let result =
            end(&mut requests, &parts, vec![done(), Err(ClientError::NoSpace), Err(ClientError::Io)]);
        assert_eq!(result.err(), Some(ClientError::Io), "the first error to come is the answer");
        let parts = begin(&mut requests, ClientRequest::Flush);
        assert!(matches!(end(&mut requests, &parts, vec![done(), done(), done()]), Ok(ClientReply::Done)));
    }

    #[test]
    fn a_write_is_cut_where_lanes_change_and_its_bytes_go_where_they_belong() {
        let mut requests = requests();
        let mut buf = requests.pool.alloc(5 * STRIPE as usize);
        for (at, byte) in buf.iter_mut().enumerate() {
            *byte = (at as u64 / 4096) as u8;
        }
        let write =
            ClientRequest::Write { offset: VolumeOffset(STRIPE + 4096), data: buf.freeze(), fua: true };
        let parts = begin(&mut requests, write);
        let places: Vec<_> = parts
            .iter()
            .map(|part| match &part.request {
                ClientRequest::Write { offset, data, fua: true } => {
                    (part.lane.0, offset.0, data.len() as u64, data[0])
                }
                other => panic!("{other:?}"),
            })
            .collect();
        assert_eq!(
            places,
            [
                (0, STRIPE + 4096, 4096, 0),
                (1, 0, 2 * STRIPE, 1),
                (2, 0, 2 * STRIPE, 5),
                (0, 2 * STRIPE, 4096, 9)
            ]
        );
    }

    #[test]
    fn a_read_is_put_together_in_the_order_of_the_volume() {
        let mut requests = requests();
        let buf = requests.pool.alloc(4 * STRIPE as usize);
        let mut parts = begin(&mut requests, ClientRequest::ReadSparse { offset: VolumeOffset(STRIPE), buf });
        assert_eq!(parts.len(), 3);
        let replies = parts.iter_mut().enumerate().map(|(at, part)| {
            let request = std::mem::replace(&mut part.request, ClientRequest::Flush);
            let ClientRequest::ReadSparse { mut buf, .. } = request else { panic!("{request:?}") };
            buf.fill(1 + at as u8);
            Ok(match at {
                1 => ClientReply::Sparse(vec![
                    ReadRun::Zeroes(STRIPE),
                    ReadRun::Data(buf.split_off(STRIPE as usize)),
                ]),
                _ => ClientReply::Data(buf),
            })
        });
        let replies = replies.collect();
        let ClientReply::Sparse(runs) = end(&mut requests, &parts, replies).expect("it is read") else {
            panic!("there are zeroes");
        };
        let shape: Vec<_> = runs
            .iter()
            .map(|run| match run {
                ReadRun::Zeroes(len) => (0, *len),
                ReadRun::Data(buf) => (buf[0], buf.len() as u64),
            })
            .collect();
        // The two last parts are adjacent in memory.
        assert_eq!(shape, [(1, STRIPE), (0, STRIPE), (2, 2 * STRIPE)]);
    }

    #[test]
    fn a_read_is_one_buffer_also_where_a_lane_used_another() {
        let mut requests = requests();
        let buf = requests.pool.alloc(4 * STRIPE as usize);
        let parts = begin(&mut requests, ClientRequest::Read { offset: VolumeOffset(STRIPE), buf });
        let replies = parts.iter().zip(1..).map(|(part, byte)| {
            let ClientRequest::Read { buf, .. } = &part.request else { panic!("{part:?}") };
            let mut other = requests.pool.alloc(buf.len());
            other.fill(byte);
            Ok(ClientReply::Data(other))
        });
        let replies = replies.collect();
        let ClientReply::Data(whole) = end(&mut requests, &parts, replies).expect("it is read") else {
            panic!("one buffer");
        };
        let stripes: Vec<u8> =
            whole.chunks(STRIPE as usize).map(|stripe| stripe[STRIPE as usize - 1]).collect();
        assert_eq!(stripes, [1, 2, 2, 3]);
    }

    #[test]
    fn fast_zeroes_are_refused_before_any_lane_writes_some() {
        let mut requests = requests();
        let zeroes = |offset, len| ClientRequest::WriteZeroes {
            offset: VolumeOffset(offset),
            len,
            may_unmap: true,
            fast_only: true,
            fua: false,
        };
        let refused = requests.begin(RequestId(7), zeroes(0, 3 * STRIPE + 4096));
        assert_eq!(refused.err(), Some(ClientError::NotSupported));
        assert!(requests.is_empty());
        assert_eq!(begin(&mut requests, zeroes(0, 3 * STRIPE)).len(), 2);
    }

    #[test]
    fn block_status_and_health_cover_the_range_once() {
        let mut requests = requests();
        let (offset, len) = (VolumeOffset(STRIPE), 4 * STRIPE);
        let parts = begin(&mut requests, ClientRequest::BlockStatus { offset, len });
        let extents = |runs: &[(u64, bool)]| {
            let extents = runs.iter().map(|&(len, hole)| VolumeExtent { len, hole });
            Ok(ClientReply::Extents(extents.collect()))
        };
        let replies = vec![
            extents(&[(STRIPE, true)]),
            extents(&[(STRIPE, true), (STRIPE, false)]),
            extents(&[(STRIPE, false)]),
        ];
        let Ok(ClientReply::Extents(all)) = end(&mut requests, &parts, replies) else { panic!("extents") };
        let all: Vec<_> = all.iter().map(|extent| (extent.len, extent.hole)).collect();
        assert_eq!(all, [(2 * STRIPE, true), (2 * STRIPE, false)]);
        let parts = begin(&mut requests, ClientRequest::Health { offset, len });
        let health = |runs: &[(u64, Health)]| Ok(ClientReply::Health(runs.to_vec()));
        let replies = vec![
            health(&[(STRIPE, Health::Clean)]),
            health(&[(2 * STRIPE, Health::Lost)]),
            health(&[(STRIPE, Health::Lost)]),
        ];
        let Ok(ClientReply::Health(all)) = end(&mut requests, &parts, replies) else { panic!("health") };
        assert_eq!(all, [(STRIPE, Health::Clean), (3 * STRIPE, Health::Lost)]);
    }
}
