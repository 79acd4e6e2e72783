//! Orders that concern several lanes of an array: they are cut into orders for one lane each, and answered
//! when all of these have ended. The rules are in the core, where the simulator keeps them, too
//! (`volume/lanes/requests.rs`); here they are put in terms of orders and answers.
//!
//! Must not know connections, or what volumes do.

use super::orders::{Answer, Order, Requester, client_request};
use calpe_core::block_io::Pool;
use calpe_core::nbd::{Command, Request};
use calpe_core::units::{LaneIndex, VolumeOffset};
use calpe_core::volume::{
    Begun, ClientError, ClientReply, Joined, LaneCut, LaneRequest, LaneRequests, PartId, WholeRequest,
};

/// See the head of this file. An order is kept without its payload.
#[derive(Debug)]
pub(super) struct Joins {
    requests: LaneRequests<Order>,
}

/// An order as it goes to lanes.
#[derive(Debug)]
pub(super) enum Cut {
    /// To one lane.
    Whole(LaneIndex, Order),
    /// To several.
    Parts(Parts),
    /// To none: it is refused.
    Refused(Answer),
}

/// The orders for lanes that one order was cut into.
#[derive(Debug)]
pub(super) struct Parts {
    requester: Requester,
    request: Request,
    sparse: bool,
    left: std::vec::IntoIter<LaneRequest>,
}

impl Iterator for Parts {
    type Item = (LaneIndex, Order);

    fn next(&mut self) -> Option<(LaneIndex, Order)> {
        let LaneRequest { piece, payload, part } = self.left.next()?;
        let Parts { requester, request, sparse, .. } = *self;
        let request = Request { offset: piece.within.0, length: piece.len, ..request };
        let (asked, part) = (piece.at.0, Some(part));
        let order = Order { requester, request, payload, asked, part, charge: 0, long: None, sparse };
        Some((piece.lane, order))
    }

    fn size_hint(&self) -> (usize, Option<usize>) {
        self.left.size_hint()
    }
}

impl ExactSizeIterator for Parts {}

impl Joins {
    pub(super) fn new(pool: Pool) -> Joins {
        Joins { requests: LaneRequests::new(pool) }
    }

    /// Cuts an order of an array into orders of its lanes.
    pub(super) fn cut(&mut self, cut: &LaneCut, mut order: Order) -> Cut {
        let Order { requester, request, sparse, .. } = order;
        let offset = VolumeOffset(request.offset);
        let whole = match (request.command, order.payload.take()) {
            (Command::Read, buf) => WholeRequest::Read { offset, len: request.length, buf },
            (_, Some(data)) => WholeRequest::Write { offset, data },
            (_, None) => WholeRequest::Plain(client_request(&request).expect("a request without payload")),
        };
        match self.requests.begin(cut, whole, order) {
            Begun::InOneLane(piece, payload, mut order) => {
                (order.request.offset, order.payload) = (piece.within.0, payload);
                Cut::Whole(piece.lane, order)
            }
            Begun::InParts(parts) => {
                Cut::Parts(Parts { requester, request, sparse, left: parts.into_iter() })
            }
            Begun::Refused(order, error) => Cut::Refused(answer_to(order, Err(error))),
        }
    }

    /// Takes the answer to a part. Returns the request, if it was the last one.
    pub(super) fn answered(&mut self, part: PartId, answer: Answer) -> Option<Joined<Order>> {
        // A question about two contexts is asked in parts that lie in one lane: they need not be joined here.
        debug_assert!(answer.allocation.is_empty());
        self.requests.ended(part, answer.result)
    }

    /// A part was dropped. Returns the request, if it was the last one.
    pub(super) fn dropped(&mut self, part: PartId) -> Option<Joined<Order>> {
        self.requests.dropped(part)
    }
}

/// The answer to an order, whose offset is the one in the volume of the array.
pub(super) fn answer_to(order: Order, result: Result<ClientReply, ClientError>) -> Answer {
    let Order { requester, request, charge, long, .. } = order;
    Answer { requester, request, part: None, charge, long, allocation: Vec::new(), result }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::daemon::reactor::orders::{ConnectionId, ReactorId};
    use calpe_core::block_io::BufMut;
    use calpe_core::format::Lanes;

    const MIB: u64 = 1 << 20;

    fn order(command: Command, offset: u64, length: u64, payload: Option<BufMut>) -> Order {
        let requester = Requester { reactor: ReactorId(0), connection: ConnectionId(0) };
        let request = Request::new(command, offset, length);
        let (asked, charge) = (offset, length as usize);
        Order { requester, request, payload, asked, part: None, charge, long: None, sparse: false }
    }

    fn answer(order: Order, result: Result<ClientReply, ClientError>) -> (PartId, Answer) {
        let part = order.part.expect("a part");
        let request = Request { offset: order.asked, ..order.request };
        (part, Answer { request, part: Some(part), ..answer_to(order, result) })
    }

    /// Four lanes, a mebibyte to each in turn.
    fn cut() -> LaneCut {
        LaneCut::new(Lanes { count: 4, group: 4 }, 256 << 10, 64 * MIB)
    }

    fn parts(joins: &mut Joins, order: Order) -> Vec<(LaneIndex, Order)> {
        match joins.cut(&cut(), order) {
            Cut::Parts(parts) => parts.collect(),
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn what_lies_in_one_lane_goes_there_whole() {
        let pool = Pool::new(1 << 22).unwrap();
        let mut joins = Joins::new(pool.clone());
        let payload = pool.alloc(4096);
        let order = order(Command::Write, 5 * MIB + 8192, 4096, Some(payload));
        let Cut::Whole(lane, order) = joins.cut(&cut(), order) else { panic!("it is not whole") };
        assert!(order.part.is_none() && order.payload.is_some_and(|payload| payload.len() == 4096));
        assert_eq!((lane, order.request.offset, order.asked), (LaneIndex(1), MIB + 8192, 5 * MIB + 8192));
        assert_eq!(order.charge, 4096);
    }

    #[test]
    fn parts_of_a_read_ask_for_their_places_and_the_answer_is_that_of_the_whole() {
        let mut joins = Joins::new(Pool::new(1 << 23).unwrap());
        let orders = parts(&mut joins, order(Command::Read, MIB - 4096, MIB + 8192, None));
        let places: Vec<_> = orders
            .iter()
            .map(|(lane, order)| (lane.0, order.request.offset, order.request.length, order.asked))
            .collect();
        assert_eq!(places, [(0, MIB - 4096, 4096, MIB - 4096), (1, 0, MIB, MIB), (2, 0, 4096, 2 * MIB)]);
        assert!(orders.iter().all(|(_, order)| order.charge == 0));
        let mut last = None;
        for (lane, mut order) in orders.into_iter().rev() {
            assert!(last.is_none());
            let mut buf = order.payload.take().unwrap();
            buf.fill(lane.0 as u8 + 1);
            let (part, answer) = answer(order, Ok(ClientReply::Data(buf)));
            last = joins.answered(part, answer);
        }
        let Some(Joined::Answer(order, Ok(ClientReply::Data(buf)))) = last else { panic!("{last:?}") };
        let answer = answer_to(order, Ok(ClientReply::Done));
        assert_eq!((answer.request.offset, answer.request.length), (MIB - 4096, MIB + 8192));
        assert_eq!(answer.charge as u64, MIB + 8192);
        let byte = |at: u64| buf[at as usize];
        assert_eq!((byte(0), byte(4096), byte(4095 + MIB), byte(4096 + MIB)), (1, 2, 2, 3));
        assert!(joins.requests.is_empty());
    }

    #[test]
    fn a_flush_goes_to_all_lanes_and_one_that_is_dropped_in_one_is_dropped() {
        let mut joins = Joins::new(Pool::new(1 << 20).unwrap());
        for drops in [false, true] {
            let orders = parts(&mut joins, order(Command::Flush, 0, 0, None));
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
    fn zeroes_that_cannot_be_had_fast_are_refused_for_what_they_are() {
        let mut joins = Joins::new(Pool::new(1 << 20).unwrap());
        for (fast_zero, no_hole) in [(true, false), (true, true), (false, false)] {
            let mut order = order(Command::WriteZeroes, 0, 2 * MIB + 4096, None);
            (order.request.fast_zero, order.request.no_hole) = (fast_zero, no_hole);
            match joins.cut(&cut(), order) {
                Cut::Refused(answer) if fast_zero => {
                    assert_eq!(answer.result.err(), Some(ClientError::NotSupported));
                    assert_eq!(answer.charge as u64, 2 * MIB + 4096);
                }
                Cut::Parts(parts) if !fast_zero => assert_eq!(parts.len(), 3),
                other => panic!("{other:?}"),
            }
        }
        let mut order = order(Command::WriteZeroes, 256 << 10, 2 * MIB, None);
        order.request.fast_zero = true;
        let orders = parts(&mut joins, order);
        let places: Vec<_> = orders.iter().map(|(lane, order)| (lane.0, order.request.length)).collect();
        assert_eq!(places, [(0, 768 << 10), (1, MIB), (2, 256 << 10)]);
        assert!(orders.iter().all(|(_, order)| order.request.fast_zero));
    }
}
