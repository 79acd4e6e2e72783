//! Requests that concern several lanes of an array: they are cut into parts, an order for one lane each, and
//! answered when all parts have ended.
//!
//! Invariants: a request is answered once, after its last part; the first error is its answer. One of which a
//! part was dropped is dropped. Must not know connections, or what volumes do.

use super::orders::{Answer, Order, PartId};
use calpe_core::block_io::{BufMut, Pool};
use calpe_core::nbd::{Command, Request};
use calpe_core::units::{LaneIndex, ROW_BYTES, VolumeOffset};
use calpe_core::volume::{ClientError, ClientReply, LaneCut, LanePiece, ReadRun};
use slab::Slab;

/// See the head of this file.
#[derive(Debug)]
pub(super) struct Joins {
    all: Slab<Whole>,
    pool: Pool,
}

/// A request whose parts are under way.
#[derive(Debug)]
struct Whole {
    /// It, without its payload.
    order: Order,
    /// What its parts have read, in the order of the volume.
    read: Vec<Option<ClientReply>>,
    left: usize,
    error: Option<ClientError>,
    was_dropped: bool,
}

/// A request of which the last part has ended.
#[derive(Debug)]
pub(super) enum Joined {
    Answer(Answer),
    Dropped(Order),
}

impl Joins {
    pub(super) fn new(pool: Pool) -> Joins {
        Joins { all: Slab::new(), pool }
    }

    /// Cuts an order of an array into orders of its lanes.
    pub(super) fn cut(&mut self, cut: LaneCut, mut order: Order) -> Vec<(LaneIndex, Order)> {
        let Request { offset, length, .. } = order.request;
        if order.request.command == Command::Flush {
            let lanes = (0..cut.count()).map(LaneIndex);
            let zero = VolumeOffset(0);
            return self.part(order, lanes.map(|lane| LanePiece { at: zero, lane, within: zero, len: 0 }));
        }
        let mut pieces = cut.pieces(VolumeOffset(offset), length);
        let first = pieces.next().expect("a request has at least one byte");
        if first.len == length {
            order.request.offset = first.within.0;
            return vec![(first.lane, order)];
        }
        let is_refused = order.request.no_hole || !cut.is_of_stripes(VolumeOffset(offset), length);
        if order.request.command == Command::WriteZeroes && is_refused {
            // It is to be done fast, and cannot be: the lane of the piece that shows it refuses it, before
            // anything is done in another one.
            let begins_within = order.request.no_hole || !offset.is_multiple_of(cut.stripe_bytes());
            let piece = if begins_within { first } else { pieces.last().expect("it has several pieces") };
            return self.part(order, std::iter::once(piece));
        }
        self.part(order, std::iter::once(first).chain(pieces))
    }

    fn part(&mut self, mut order: Order, pieces: impl Iterator<Item = LanePiece>) -> Vec<(LaneIndex, Order)> {
        let mut rest = match (order.request.command, order.payload.take()) {
            (Command::Read, None) => Some(self.pool.alloc(order.request.length as usize)),
            (_, payload) => payload,
        };
        let (pool, whole) = (&self.pool, self.all.vacant_key());
        let (requester, request, sparse) = (order.requester, order.request, order.sparse);
        let part = |(nth, piece): (usize, LanePiece)| {
            let payload = rest.take().map(|mut buf| {
                rest = Some(buf.split_off(piece.len as usize));
                buf
            });
            // Volumes take page-aligned memory for page-aligned offsets.
            let is_aligned = (piece.at.0 - request.offset).is_multiple_of(ROW_BYTES);
            let payload = payload.filter(|_| is_aligned || request.command == Command::Write);
            let payload = payload.map(|buf| if is_aligned { buf } else { copied(pool, &buf) });
            let request = Request { offset: piece.within.0, length: piece.len, ..request };
            let (asked, part) = (piece.at.0, Some(PartId { whole, nth }));
            (piece.lane, Order { requester, request, payload, asked, part, charge: 0, long: None, sparse })
        };
        let parts: Vec<_> = pieces.enumerate().map(part).collect();
        let read = parts.iter().map(|_| None).collect();
        self.all.insert(Whole { order, read, left: parts.len(), error: None, was_dropped: false });
        parts
    }

    /// Takes the answer to a part. Returns the request, if it was the last one.
    pub(super) fn answered(&mut self, PartId { whole, nth }: PartId, answer: Answer) -> Option<Joined> {
        let parts = &mut self.all[whole];
        match answer.result {
            Ok(reply) => parts.read[nth] = Some(reply),
            Err(error) => drop(parts.error.get_or_insert(error)),
        }
        self.ended(whole)
    }

    /// A part was dropped. Returns the request, if it was the last one.
    pub(super) fn dropped(&mut self, PartId { whole, .. }: PartId) -> Option<Joined> {
        self.all[whole].was_dropped = true;
        self.ended(whole)
    }

    fn ended(&mut self, whole: usize) -> Option<Joined> {
        self.all[whole].left -= 1;
        if self.all[whole].left > 0 {
            return None;
        }
        let Whole { order, read, error, was_dropped, .. } = self.all.remove(whole);
        if was_dropped {
            return Some(Joined::Dropped(order));
        }
        let Order { requester, request, charge, long, .. } = order;
        let result = match (error, request.command) {
            (Some(error), _) => Err(error),
            (None, Command::Read) => Ok(join(&self.pool, read.into_iter().flatten().collect())),
            (None, _) => Ok(ClientReply::Done),
        };
        let allocation = Vec::new();
        Some(Joined::Answer(Answer { requester, request, part: None, charge, long, allocation, result }))
    }
}

/// The same bytes in memory of their own.
fn copied(pool: &Pool, bytes: &[u8]) -> BufMut {
    let mut buf = pool.alloc(bytes.len());
    buf.copy_from_slice(bytes);
    buf
}

/// Joins what parts have read, in the order of the volume.
fn join(pool: &Pool, parts: Vec<ClientReply>) -> ClientReply {
    if parts.iter().all(|part| matches!(part, ClientReply::Data(_))) {
        let bytes = parts.into_iter().filter_map(|part| match part {
            ClientReply::Data(buf) => Some(buf),
            _ => None,
        });
        return ClientReply::Data(join_bytes(pool, bytes));
    }
    let runs = parts.into_iter().flat_map(|part| match part {
        ClientReply::Data(buf) => vec![ReadRun::Data(buf)],
        ClientReply::Sparse(runs) => runs,
        _ => unreachable!("reads bring bytes"),
    });
    ClientReply::Sparse(runs.collect())
}

/// Joins buffers: without a copy, where they were one.
pub(super) fn join_bytes(pool: &Pool, mut parts: impl Iterator<Item = BufMut>) -> BufMut {
    let mut whole = parts.next().expect("there is at least one part");
    for part in parts {
        if let Err(part) = whole.try_unsplit(part) {
            let mut longer = pool.alloc(whole.len() + part.len());
            longer[..whole.len()].copy_from_slice(&whole);
            longer[whole.len()..].copy_from_slice(&part);
            whole = longer;
        }
    }
    whole
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::daemon::reactor::orders::{ConnectionId, ReactorId, Requester};
    use calpe_core::format::Lanes;

    const MIB: u64 = 1 << 20;

    fn order(command: Command, offset: u64, length: u64, payload: Option<BufMut>) -> Order {
        let requester = Requester { reactor: ReactorId(0), connection: ConnectionId(0) };
        let request = Request::new(command, offset, length);
        let (asked, charge) = (offset, length as usize);
        Order { requester, request, payload, asked, part: None, charge, long: None, sparse: false }
    }

    fn answer(order: Order, result: Result<ClientReply, ClientError>) -> (PartId, Answer) {
        let Order { requester, request, asked, part, charge, long, .. } = order;
        let request = Request { offset: asked, ..request };
        let answer = Answer { requester, request, part, charge, long, allocation: Vec::new(), result };
        (part.expect("a part"), answer)
    }

    /// Four lanes, a mebibyte to each in turn.
    fn cut() -> LaneCut {
        LaneCut::new(Lanes { count: 4, group: 4 }, 256 << 10, 64 * MIB)
    }

    #[test]
    fn what_lies_in_one_lane_goes_there_whole() {
        let mut joins = Joins::new(Pool::new(1 << 22).unwrap());
        let mut orders = joins.cut(cut(), order(Command::Write, 5 * MIB + 8192, 4096, None));
        let (lane, order) = orders.pop().unwrap();
        assert!(orders.is_empty() && order.part.is_none());
        assert_eq!((lane, order.request.offset, order.asked), (LaneIndex(1), MIB + 8192, 5 * MIB + 8192));
        assert_eq!(order.charge, 4096);
    }

    #[test]
    fn a_read_of_several_lanes_is_joined_in_its_order_whatever_comes_first() {
        let pool = Pool::new(1 << 23).unwrap();
        let mut joins = Joins::new(pool.clone());
        let orders = joins.cut(cut(), order(Command::Read, MIB - 4096, MIB + 8192, None));
        let places: Vec<_> =
            orders.iter().map(|(lane, o)| (lane.0, o.request.offset, o.request.length)).collect();
        assert_eq!(places, [(0, MIB - 4096, 4096), (1, 0, MIB), (2, 0, 4096)]);
        assert_eq!(
            orders.iter().map(|(_, order)| order.asked).collect::<Vec<_>>(),
            [MIB - 4096, MIB, 2 * MIB]
        );
        let mut last = None;
        for (lane, mut order) in orders.into_iter().rev() {
            assert!(last.is_none());
            let mut buf = order.payload.take().unwrap();
            buf.fill(lane.0 as u8 + 1);
            let (part, answer) = answer(order, Ok(ClientReply::Data(buf)));
            last = joins.answered(part, answer);
        }
        let Some(Joined::Answer(answer)) = last else { panic!("no answer") };
        assert_eq!((answer.request.offset, answer.request.length), (MIB - 4096, MIB + 8192));
        assert_eq!(answer.charge as u64, MIB + 8192);
        let Ok(ClientReply::Data(buf)) = answer.result else { panic!("no bytes") };
        assert!(
            buf[..4096].iter().all(|&byte| byte == 1) && buf[4096..][..MIB as usize].iter().all(|&b| b == 2)
        );
        assert!(buf[4096 + MIB as usize..].iter().all(|&byte| byte == 3) && joins.all.is_empty());
    }

    #[test]
    fn a_read_that_describes_zeroes_in_a_part_describes_them_in_the_whole() {
        let pool = Pool::new(1 << 23).unwrap();
        let mut joins = Joins::new(pool.clone());
        let orders = joins.cut(cut(), order(Command::Read, MIB - 4096, 8192, None));
        let mut last = None;
        for (lane, order) in orders {
            let reply = match lane.0 {
                0 => ClientReply::Data(pool.alloc(4096)),
                _ => ClientReply::Sparse(vec![ReadRun::Zeroes(4096)]),
            };
            let (part, answer) = answer(order, Ok(reply));
            last = joins.answered(part, answer);
        }
        let Some(Joined::Answer(Answer { result: Ok(ClientReply::Sparse(runs)), .. })) = last else {
            panic!()
        };
        assert!(matches!(&runs[..], [ReadRun::Data(buf), ReadRun::Zeroes(4096)] if buf.len() == 4096));
    }

    #[test]
    fn a_write_is_cut_with_its_payload_and_fails_with_the_first_error() {
        let pool = Pool::new(1 << 23).unwrap();
        let mut joins = Joins::new(pool.clone());
        let mut payload = pool.alloc(8192);
        payload[..4096].fill(1);
        payload[4096..].fill(2);
        let orders = joins.cut(cut(), order(Command::Write, 4 * MIB - 4096, 8192, Some(payload)));
        assert_eq!(orders.iter().map(|(lane, _)| lane.0).collect::<Vec<_>>(), [3, 0]);
        for (nth, (_, order)) in orders.iter().enumerate() {
            let payload = order.payload.as_ref().unwrap();
            assert!(payload.len() == 4096 && payload.iter().all(|&byte| byte as usize == nth + 1));
        }
        let mut ended = orders
            .into_iter()
            .zip([Err(ClientError::NoSpace), Ok(ClientReply::Done)])
            .filter_map(|((_, order), result)| {
                let (part, answer) = answer(order, result);
                joins.answered(part, answer)
            });
        let Some(Joined::Answer(answer)) = ended.next() else { panic!("no answer") };
        assert!(ended.next().is_none() && matches!(answer.result, Err(ClientError::NoSpace)));
    }

    #[test]
    fn a_flush_goes_to_all_lanes_and_one_that_is_dropped_in_one_is_dropped() {
        let mut joins = Joins::new(Pool::new(1 << 20).unwrap());
        for drops in [false, true] {
            let orders = joins.cut(cut(), order(Command::Flush, 0, 0, None));
            assert_eq!(orders.len(), 4);
            let mut last = None;
            for (lane, order) in orders {
                assert!(last.is_none(), "answered before lane {lane} has flushed");
                last = if drops && lane.0 == 1 {
                    joins.dropped(order.part.unwrap())
                } else {
                    let (part, answer) = answer(order, Ok(ClientReply::Done));
                    joins.answered(part, answer)
                };
            }
            assert_eq!(matches!(last, Some(Joined::Dropped(_))), drops);
        }
    }

    #[test]
    fn zeroes_that_cannot_be_had_fast_go_to_the_lane_that_refuses_them() {
        let mut joins = Joins::new(Pool::new(1 << 20).unwrap());
        for (offset, length, lane) in [(4096, 2 * MIB, 0), (0, 2 * MIB + 4096, 2)] {
            let orders = joins.cut(cut(), order(Command::WriteZeroes, offset, length, None));
            assert_eq!(orders.len(), 1);
            let (of, order) = orders.into_iter().next().unwrap();
            assert_eq!(of, LaneIndex(lane));
            let whole_stripes = |bytes: u64| bytes.is_multiple_of(256 << 10);
            assert!(!(whole_stripes(order.request.offset) && whole_stripes(order.request.length)));
            let (part, answer) = answer(order, Err(ClientError::NotSupported));
            let Some(Joined::Answer(answer)) = joins.answered(part, answer) else { panic!("no answer") };
            assert_eq!((answer.request.offset, answer.request.length), (offset, length));
        }
    }

    #[test]
    fn zeroes_of_whole_stripes_go_to_all_lanes() {
        let mut joins = Joins::new(Pool::new(1 << 20).unwrap());
        let orders = joins.cut(cut(), order(Command::WriteZeroes, 256 << 10, 2 * MIB, None));
        let places: Vec<_> = orders.iter().map(|(lane, order)| (lane.0, order.request.length)).collect();
        assert_eq!(places, [(0, 768 << 10), (1, MIB), (2, 256 << 10)]);
    }
}
