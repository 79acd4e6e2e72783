//! A lane that a reactor serves: its volume, the orders that the volume has, and those that wait for others.
//!
//! Invariants: an order is answered once, or dropped; a modifying order keeps its place in the order of its
//! array until it has ended. Must not know members, jobs, or what comes of a volume's actions.

use super::directory::{Listed, ListedLane};
use super::edges::{Edges, middle};
use super::order::{Precedence, Span, Ticket, blocks_of};
use super::orders::{Answer, LaneId, Order, Outcome, Requester, allocation_of, client_request};
use super::stopping::{StopStep, Stopping};
use calpe_core::block_io::Pool;
use calpe_core::format::MemberState;
use calpe_core::nbd::{Command, Request};
use calpe_core::units::{Timestamp, VolumeOffset};
use calpe_core::volume::{
    ClientError, ClientReply, ClientRequest, MemberCondition, Orphan, PartId, RequestId, Volume, VolumeEvent,
};
use slab::Slab;
use std::collections::VecDeque;
use std::sync::Arc;

/// How long after the last request an array counts as busy, in nanoseconds: volumes then write back what they
/// had held up while more might come.
const BUSY_NANOS: u64 = 2_000_000_000;

/// A lane of an array in service.
pub(super) struct Hosted {
    pub(super) id: LaneId,
    pub(super) volume: Box<dyn Volume>,
    /// What clients see of its array.
    pub(super) listed: Arc<Listed>,
    pub(super) stopping: Stopping,
    /// Orders that the volume has.
    pub(super) pending: Slab<Pending>,
    /// Those of them that modify.
    pub(super) modifying: usize,
    /// Which order waits for which, and those that wait.
    pub(super) order: Precedence<Order>,
    pub(super) waiting: usize,
    /// Reads of its clients so far, wherever they were made.
    pub(super) reads: u64,
    pub(super) last_request: Timestamp,
    /// Whether its volume has taken events since it settled.
    pub(super) is_unsettled: bool,
    /// What the volume said last of its damage ([`Volume::damage_revision`]).
    pub(super) damage_revision: u64,
    /// Whether something ran by itself at the last tick.
    pub(super) active: bool,
}

/// An order inside a volume.
#[derive(Debug)]
pub(super) struct Pending {
    pub(super) requester: Requester,
    /// With its offset in the volume of the lane.
    pub(super) request: Request,
    /// Its offset in the volume of the array.
    pub(super) asked: u64,
    /// The part of a request of several lanes that it is.
    pub(super) part: Option<PartId>,
    /// Its place in the order of its array, if it modifies.
    pub(super) ticket: Ticket,
    /// Whether later requests wait for it: its client has hung up.
    pub(super) is_orphan: bool,
    /// Has all reads come here meanwhile.
    pub(super) hold: Option<Orphan>,
    /// Bytes of its requester's memory that it holds.
    pub(super) charge: usize,
    /// The long request that it is a part of.
    pub(super) long: Option<usize>,
    /// State of a write that does not lie on blocks.
    pub(super) edges: Option<Box<Edges>>,
    /// Of a question about two contexts: the part of the answer that is known, as (bytes, flags) of
    /// base:allocation.
    pub(super) allocation: Vec<(u64, u32)>,
}

impl Hosted {
    pub(super) fn is_busy(&self, now: Timestamp) -> bool {
        self.active
            || self.in_flight() > 0
            || !self.is_serving()
            || now.nanos_since(self.last_request) < BUSY_NANOS
    }

    /// Orders that the volume has, or that wait for others.
    pub(super) fn in_flight(&self) -> usize {
        self.pending.len() + self.waiting
    }

    /// Moves the stop of the array on to the next stage.
    pub(super) fn stop_step(&mut self, now: Timestamp) -> StopStep {
        let (in_flight, volume) = (self.in_flight(), &self.volume);
        self.stopping.step(now, in_flight, || is_short(&**volume))
    }

    pub(super) fn is_serving(&self) -> bool {
        self.stopping.is_serving()
    }

    /// Latest time at which its volume wants a tick, if sooner than usual.
    pub(super) fn due(&self) -> Option<Timestamp> {
        if self.stopping.is_over() { None } else { self.volume.due() }
    }

    /// The minimum block of its export, in bytes.
    pub(super) fn block(&self) -> u64 {
        self.listed.block()
    }

    pub(super) fn lane(&self) -> &Arc<ListedLane> {
        self.listed.lane(self.id.lane())
    }

    pub(super) fn name(&self) -> &str {
        &self.listed.export().name
    }

    pub(super) fn span_of(&self, request: &Request) -> Span {
        Span::of(request, self.block())
    }

    /// Records how busy an event shows the array to be.
    pub(super) fn note(&mut self, event: &VolumeEvent, now: Timestamp) {
        match event {
            VolumeEvent::Client(..) | VolumeEvent::ReadElsewhere => self.last_request = now,
            VolumeEvent::Tick => {
                let status = self.volume.status();
                self.active =
                    status.dirty || status.activities.iter().any(|activity| activity.rest.is_none());
            }
            _ => {}
        }
    }

    /// Takes an order that may begin. Returns what to ask of the volume.
    pub(super) fn begin(&mut self, order: Order, ticket: Ticket, pool: &Pool) -> VolumeEvent {
        let Order { requester, request, payload, asked, part, charge, long, sparse } = order;
        let (offset, block) = (VolumeOffset(request.offset), self.block());
        let blocks = blocks_of(&request, block);
        let is_uneven = blocks != (request.offset..request.offset + request.length);
        let mut edges = None;
        let question = match (request.command, payload) {
            (Command::Read, _) if is_uneven => {
                let buf = pool.alloc((blocks.end - blocks.start) as usize);
                ClientRequest::Read { offset: VolumeOffset(blocks.start), buf }
            }
            (Command::Read, memory) => {
                let buf = memory.unwrap_or_else(|| pool.alloc(request.length as usize));
                match sparse {
                    true => ClientRequest::ReadSparse { offset, buf },
                    false => ClientRequest::Read { offset, buf },
                }
            }
            (Command::Write, Some(payload)) if is_uneven => {
                let edges = edges.insert(Box::new(Edges::new(&request, &payload, block, pool)));
                edges.next(&request, None, block, pool)
            }
            (Command::Write, Some(buf)) => {
                ClientRequest::Write { offset, data: buf.freeze(), fua: request.fua }
            }
            (Command::Write, None) => unreachable!("a write starts with its payload"),
            _ => client_request(&request).expect("a request without payload"),
        };
        self.modifying += usize::from(request.command.modifies());
        let allocation = Vec::new();
        let (is_orphan, hold) = (false, None);
        let pending = Pending {
            requester,
            request,
            asked,
            part,
            ticket,
            is_orphan,
            hold,
            charge,
            long,
            edges,
            allocation,
        };
        VolumeEvent::Client(RequestId(self.pending.insert(pending) as u64), question)
    }

    /// Takes a volume's answer. Returns the next question under the same id, if the request needs one.
    pub(super) fn end(
        &mut self,
        id: RequestId,
        result: Result<ClientReply, ClientError>,
        pool: &Pool,
        outcomes: &mut VecDeque<Outcome>,
    ) -> Option<ClientRequest> {
        let (key, block) = (id.0 as usize, self.block());
        let pending = &mut self.pending[key];
        let request = pending.request;
        let result = match (result, &mut pending.edges) {
            (Ok(ClientReply::Data(read)), Some(edges)) => {
                return Some(edges.next(&request, Some(read), block, pool));
            }
            (Ok(ClientReply::Data(blocks)), None) if blocks.len() as u64 != request.length => {
                Ok(ClientReply::Data(middle(blocks, &request, block)))
            }
            // A question about both contexts: the second one is another question to the same volume.
            (Ok(ClientReply::Extents(extents)), _) if request.contexts.health => {
                pending.allocation = allocation_of(&extents);
                let offset = VolumeOffset(request.offset);
                return Some(ClientRequest::Health { offset, len: request.length });
            }
            (result, _) => result,
        };
        let Pending { requester, asked, part, ticket, charge, long, allocation, .. } =
            self.pending.remove(key);
        if request.command.modifies() {
            self.modifying -= 1;
            self.leave(&request, ticket, outcomes);
        }
        let request = Request { offset: asked, ..request };
        let answer = Answer { requester, request, part, charge, long, allocation, result };
        outcomes.push_back(Outcome::Answer(answer));
        None
    }

    /// Removes an order that has ended or is given up: those that waited for it may go on.
    pub(super) fn leave(&mut self, request: &Request, ticket: Ticket, outcomes: &mut VecDeque<Outcome>) {
        let span = self.span_of(request);
        for woken in self.order.leave(&span, ticket) {
            if let Some(order) = self.order.waiting(woken) {
                let (requester, modifies) = (order.requester, order.request.command.modifies());
                let ticket = (self.id, woken);
                outcomes.push_back(Outcome::MayGoOn { requester, ticket, modifies });
            }
        }
    }

    /// Starts an order, or makes it wait for another one. Returns what to ask of the volume.
    pub(super) fn begin_or_wait(
        &mut self,
        order: Order,
        ticket: Ticket,
        behind: Option<Ticket>,
        pool: &Pool,
        outcomes: &mut VecDeque<Outcome>,
    ) -> Option<VolumeEvent> {
        let Some(behind) = behind else { return Some(self.begin(order, ticket, pool)) };
        let (requester, modifies) = (order.requester, order.request.command.modifies());
        outcomes.push_back(Outcome::Waits { requester, ticket: (self.id, ticket), modifies });
        self.waiting += 1;
        self.order.wait(ticket, behind, order);
        None
    }

    /// Takes back a waiting order; it keeps its place.
    pub(super) fn take_waiting(&mut self, ticket: Ticket) -> Option<Order> {
        let order = self.order.resume(ticket)?;
        self.waiting -= 1;
        Some(order)
    }
}

/// Whether some member of a volume lacks room or resources.
fn is_short(volume: &dyn Volume) -> bool {
    let serves = |state| matches!(state, MemberState::Online | MemberState::Rebuilding);
    let members = volume.status().members;
    members.iter().any(|member| serves(member.state) && member.conditions.iter().any(is_shortage))
}

pub(super) fn is_shortage(condition: &MemberCondition) -> bool {
    matches!(condition, MemberCondition::Full | MemberCondition::ShortOfResources)
}
