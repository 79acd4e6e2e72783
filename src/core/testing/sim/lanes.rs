//! The volume of a simulated array: one plain volume for each lane, in its window of every disk, joined by
//! the code that the daemon uses as well (`volume/lanes/`).
//!
//! A lane takes its events in order, from an inbox of its own; when it takes the next one is up to the
//! caller, so lanes run ahead of one another as on several threads. Outcomes take their time on the way back,
//! too (`front.rs`). With one lane there is no inbox, and every event is taken at once.

use super::front::{Arrived, Front, Outcome};
use super::volume::SimVolume;
use crate::array::mutation::{Mutation, is_off};
use crate::block_io::{Completion, DeviceId, IoOp, IoToken, Pool};
use crate::format::{LanePart, MemberState};
use crate::units::{BlockHash, ByteOffset, LaneIndex, MemberIndex, Timestamp, VolumeOffset};
use crate::volume::{
    AdminOutcome, AdminRefusal, AdminRequest, ArrayAction, ArrayState, JobDone, LaneCut, LaneNotices,
    MemberStatus, NoticeKind, OutOfStep, PlainVolume, ReplacementOrder, ReplacementStatus, ReplacementStep,
    RequestId, ViewReader, VolumeEvent, VolumeOutput, VolumeStatus, merge_outcomes, merge_status,
    new_device_of, out_of_step, replacement_orders,
};
use std::collections::{BTreeMap, BTreeSet, HashMap, VecDeque};
use uuid::Uuid;

/// Bits of a lane's handle of a device, or token, below those that name the lane.
const DEVICE_BITS: u32 = 24;
const TOKEN_BITS: u32 = 56;
/// Ids of requests that take members out of step out, from here on: nobody waits for their ends.
const OWN_REQUESTS: u64 = 1 << 60;

/// See the head of this file.
pub(in crate::testing) struct SimLanes {
    cut: LaneCut,
    part: LanePart,
    /// Where slots begin in every window.
    data_offset: u64,
    volumes: Vec<SimVolume>,
    /// What each lane has not taken yet.
    inboxes: Vec<VecDeque<VolumeEvent>>,
    front: Front,
    notices: LaneNotices,
    /// The ends of administrators' requests in lanes: how many are missing, and those that there are.
    admin: HashMap<u64, Vec<Option<Result<AdminOutcome, AdminRefusal>>>>,
    keeper: Keeper,
    /// The lanes that have each disk and have not released it.
    holders: BTreeMap<u32, BTreeSet<u16>>,
    /// The lanes that the jobs just given away belong to.
    pub worked_for: VecDeque<LaneIndex>,
    /// Lanes that have taken events since they settled.
    unsettled: BTreeSet<LaneIndex>,
    /// Lanes take events and do not settle.
    pub gathers: bool,
    output: VolumeOutput,
}

/// What is done so that lanes have the same devices, without anybody asking for it.
struct Keeper {
    /// Requests for that so far.
    requests: u64,
    /// Lanes that were told to let go of a device.
    told: BTreeSet<(u16, u32)>,
    /// Whether lanes may have to be told what becomes of replacements.
    looks_at_replacements: bool,
}

/// Something that waits is taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Turn {
    /// A lane takes the next event of its inbox.
    Of(LaneIndex),
    /// Clients take the next outcome of a lane.
    ClientsHear(LaneIndex),
}

/// A lane's handle of a disk.
pub(in crate::testing) fn handle_in(lane: LaneIndex, disk: u32) -> DeviceId {
    assert!(disk < 1 << DEVICE_BITS, "few disks");
    DeviceId(disk | u32::from(lane.0) << DEVICE_BITS)
}

/// The disk of a lane's handle.
pub(in crate::testing) fn disk_of(device: DeviceId) -> DeviceId {
    DeviceId(device.0 & ((1 << DEVICE_BITS) - 1))
}

impl SimLanes {
    /// The volumes of all lanes, on these disks.
    pub(super) fn new(
        cut: LaneCut,
        (part, data_offset): (LanePart, u64),
        volumes: Vec<SimVolume>,
        (pool, disks): (Pool, impl Iterator<Item = u32>),
    ) -> SimLanes {
        let statuses: Vec<VolumeStatus> = volumes.iter().map(SimVolume::status).collect();
        let all: BTreeSet<u16> = (0..cut.count()).collect();
        SimLanes {
            cut,
            part,
            data_offset,
            inboxes: volumes.iter().map(|_| VecDeque::new()).collect(),
            front: Front::new(volumes.len(), pool),
            notices: LaneNotices::new(cut, &statuses),
            volumes,
            admin: HashMap::new(),
            keeper: Keeper { requests: OWN_REQUESTS, told: BTreeSet::new(), looks_at_replacements: true },
            holders: disks.map(|disk| (disk, all.clone())).collect(),
            worked_for: VecDeque::new(),
            unsettled: BTreeSet::new(),
            gathers: false,
            output: VolumeOutput::default(),
        }
    }

    /// How the volume is cut.
    pub(in crate::testing) fn cut(&self) -> &LaneCut {
        &self.cut
    }

    /// As [`CasVolume::audit`].
    ///
    /// [`CasVolume::audit`]: crate::volume::CasVolume::audit
    pub(super) fn audit(&mut self) -> Option<Vec<String>> {
        self.volumes[0].audit()
    }

    fn is_one(&self) -> bool {
        self.volumes.len() == 1
    }

    /// Takes an event for the array, but none of an administrator or of a job where there are several lanes.
    pub(super) fn step(&mut self, now: Timestamp, event: VolumeEvent, out: &mut VolumeOutput) {
        if self.is_one() {
            self.give(now, LaneIndex(0), event, out);
            return;
        }
        match event {
            VolumeEvent::Client(id, request) => match self.front.begin(&self.cut, id, request) {
                Err(error) => out.replies.push((id, Err(error))),
                Ok(parts) => {
                    for (lane, id, request) in parts {
                        self.post(lane.0, VolumeEvent::Client(id, request));
                    }
                }
            },
            VolumeEvent::Io(Completion { token, result }) => {
                let lane = (token.0 >> TOKEN_BITS) as u16;
                let token = IoToken(token.0 & ((1 << TOKEN_BITS) - 1));
                self.post(lane, VolumeEvent::Io(Completion { token, result }));
            }
            VolumeEvent::DeviceGone(disk, fault) => {
                let lanes: Vec<u16> = self.holders.get(&disk.0).into_iter().flatten().copied().collect();
                for lane in lanes {
                    let device = handle_in(LaneIndex(lane), disk.0);
                    self.post(lane, VolumeEvent::DeviceGone(device, fault));
                }
            }
            VolumeEvent::Tick => {
                self.order_replacements();
                // Lanes that have kept something may not need it any more.
                if !std::mem::take(&mut self.keeper.told).is_empty() {
                    self.bring_into_step();
                }
                (0..self.cut.count()).for_each(|lane| self.post(lane, VolumeEvent::Tick));
            }
            VolumeEvent::ReadElsewhere => {
                (0..self.cut.count()).for_each(|lane| self.post(lane, VolumeEvent::ReadElsewhere));
            }
            VolumeEvent::Admin(..)
            | VolumeEvent::Worked(_)
            | VolumeEvent::Replacement(_)
            | VolumeEvent::LeftElsewhere(..) => {
                unreachable!("they are given with their lanes")
            }
        }
    }

    fn post(&mut self, lane: u16, event: VolumeEvent) {
        self.inboxes[usize::from(lane)].push_back(event);
    }

    /// Takes the end of a job of a lane.
    pub(super) fn worked(
        &mut self,
        now: Timestamp,
        (lane, done): (LaneIndex, JobDone),
        out: &mut VolumeOutput,
    ) {
        match self.is_one() {
            true => self.step(now, VolumeEvent::Worked(done), out),
            false => self.post(lane.0, VolumeEvent::Worked(done)),
        }
    }

    /// Takes an administrator's request, in the words of each lane. No lane is given it unless all would take
    /// it. No lane may have anything in its inbox.
    pub(super) fn administer(
        &mut self,
        now: Timestamp,
        (id, requests): (RequestId, Vec<AdminRequest>),
        out: &mut VolumeOutput,
    ) {
        if self.is_one() {
            let request = requests.into_iter().next().expect("one lane");
            return self.step(now, VolumeEvent::Admin(id, request), out);
        }
        let would: Vec<_> =
            self.volumes.iter().zip(&requests).map(|(volume, request)| volume.would(request)).collect();
        if let Err(refusal) = merge_outcomes(would.clone()) {
            out.actions.push(ArrayAction::AdminDone(id, Err(refusal)));
            return;
        }
        // Lanes in which nothing is to do have said so.
        let asked: Vec<bool> = would.iter().map(Result::is_ok).collect();
        self.admin.insert(id.0, would.into_iter().map(|would| would.is_err().then_some(would)).collect());
        for ((lane, request), asked) in (0..).zip(requests).zip(asked) {
            if !asked {
                continue;
            }
            if let AdminRequest::Online { device, .. } | AdminRequest::Replace { device, .. } = &request {
                self.holders.entry(disk_of(device.device).0).or_default().insert(lane);
                self.keeper.told.remove(&(lane, disk_of(device.device).0));
            }
            self.post(lane, VolumeEvent::Admin(id, request));
        }
    }

    /// Tells the lanes what becomes of the device that they build for a member.
    pub(super) fn order_replacement(
        &mut self,
        now: Timestamp,
        (member, step): (MemberIndex, &ReplacementStep),
        out: &mut VolumeOutput,
    ) {
        let device = self.new_device_of(member).expect("a new device");
        for lane in (0..self.cut.count()).map(LaneIndex) {
            let order = ReplacementOrder { member, device, step: step.clone() };
            self.give(now, lane, VolumeEvent::Replacement(order), out);
        }
    }

    /// The new device of a member that lanes build.
    pub(super) fn new_device_of(&self, member: MemberIndex) -> Option<Uuid> {
        let statuses: Vec<VolumeStatus> = self.volumes.iter().map(SimVolume::status).collect();
        new_device_of(&statuses, member)
    }

    /// The result of a dry run of a request, in the words of each lane.
    pub(in crate::testing) fn would(&self, requests: &[AdminRequest]) -> Result<AdminOutcome, AdminRefusal> {
        merge_outcomes(self.volumes.iter().zip(requests).map(|(volume, request)| volume.would(request)))
    }

    /// What may be taken next: by lanes that have something to take, or by clients, of what lanes have said.
    pub(super) fn waiting(&self) -> impl Iterator<Item = Turn> {
        let has_event = |(_, inbox): &(LaneIndex, &VecDeque<VolumeEvent>)| !inbox.is_empty();
        let lanes = (0..).map(LaneIndex).zip(&self.inboxes).filter(has_event).map(|(lane, _)| Turn::Of(lane));
        lanes.chain(self.front.lanes_heard().map(Turn::ClientsHear))
    }

    /// How many events and outcomes are under way.
    pub(super) fn backlog(&self) -> usize {
        self.inboxes.iter().map(VecDeque::len).sum::<usize>() + self.front.backlog()
    }

    /// Whether a lane has yet to hear of something for which it may let go of a member.
    pub(super) fn has_bad_news(&self) -> bool {
        let is_bad = |event: &VolumeEvent| {
            matches!(
                event,
                VolumeEvent::Io(Completion { result: Err(_), .. })
                    | VolumeEvent::DeviceGone(..)
                    | VolumeEvent::LeftElsewhere(..)
                    | VolumeEvent::Admin(_, AdminRequest::Fail { .. } | AdminRequest::Offline { .. })
            )
        };
        self.inboxes.iter().flatten().any(is_bad)
    }

    /// Has a lane take the next event of its inbox, or clients the next outcome of a lane.
    pub(super) fn deliver(&mut self, now: Timestamp, turn: Turn, out: &mut VolumeOutput) {
        let lane = match turn {
            Turn::Of(lane) => lane,
            Turn::ClientsHear(lane) => {
                match self.front.hear(lane) {
                    Some(Arrived::Answer(answer)) => out.replies.push(answer),
                    Some(Arrived::WritesLost) => out.actions.push(ArrayAction::WritesLost),
                    None => {}
                }
                return;
            }
        };
        let Some(event) = self.inboxes[usize::from(lane.0)].pop_front() else { return };
        self.give(now, lane, event, out);
    }

    /// Gives an event to a lane, which settles at once unless events gather.
    fn give(&mut self, now: Timestamp, lane: LaneIndex, event: VolumeEvent, out: &mut VolumeOutput) {
        self.volumes[usize::from(lane.0)].take(now, event);
        self.unsettled.insert(lane);
        if !self.gathers {
            self.settle(now, out);
        }
    }

    /// Lets the lanes settle that have taken events.
    pub(super) fn settle(&mut self, now: Timestamp, out: &mut VolumeOutput) {
        while let Some(lane) = self.unsettled.pop_first() {
            let mut own = std::mem::take(&mut self.output);
            self.volumes[usize::from(lane.0)].settle(now, &mut own);
            if self.is_one() {
                let jobs = own.actions.iter().filter(|action| matches!(action, ArrayAction::Work(_)));
                self.worked_for.extend(jobs.map(|_| LaneIndex(0)));
                out.replies.append(&mut own.replies);
                out.actions.append(&mut own.actions);
            }
            for ended in own.replies.drain(..) {
                self.front.say(lane, Outcome::Ended(ended));
            }
            for action in own.actions.drain(..) {
                self.act(lane, action, out);
            }
            self.output = own;
        }
        self.order_replacements();
    }

    /// Passes on the action of a lane as one of the array.
    fn act(&mut self, lane: LaneIndex, action: ArrayAction, out: &mut VolumeOutput) {
        match action {
            ArrayAction::Io { device, token, op, may_wait } => {
                let disk = disk_of(device);
                let holds = self.holders.get(&disk.0).is_some_and(|lanes| lanes.contains(&lane.0));
                assert!(holds, "lane {lane} has released disk {}", disk.0);
                assert!(token.0 < 1 << TOKEN_BITS, "tokens are small");
                let token = IoToken(token.0 | u64::from(lane.0) << TOKEN_BITS);
                out.actions.push(ArrayAction::Io {
                    device: disk,
                    token,
                    op: self.in_window(lane, op),
                    may_wait,
                });
            }
            ArrayAction::Work(job) => {
                self.worked_for.push_back(lane);
                out.actions.push(ArrayAction::Work(job));
            }
            ArrayAction::AdminDone(id, result) => {
                let Some(ends) = self.admin.get_mut(&id.0) else { return };
                ends[usize::from(lane.0)] = Some(result);
                if ends.iter().all(Option::is_some) {
                    let ends = self.admin.remove(&id.0).into_iter().flatten().flatten();
                    out.actions.push(ArrayAction::AdminDone(id, merge_outcomes(ends)));
                }
            }
            ArrayAction::Release(device) => {
                let disk = disk_of(device);
                let lanes = self.holders.entry(disk.0).or_default();
                assert!(lanes.remove(&lane.0), "released twice");
                if lanes.is_empty() {
                    out.actions.push(ArrayAction::Release(disk));
                }
            }
            ArrayAction::Notice(notice) => {
                let is_out = notice.kind == NoticeKind::MemberOut;
                self.keeper.looks_at_replacements |= is_out
                    || matches!(
                        notice.kind,
                        NoticeKind::ReplacementWaits
                            | NoticeKind::ReplacementGivenUp
                            | NoticeKind::MemberReplaced
                            | NoticeKind::MemberRebuilt
                    );
                out.actions.extend(self.notices.take(lane, notice).map(ArrayAction::Notice));
                if is_out {
                    self.bring_into_step();
                }
            }
            ArrayAction::WritesLost => {
                if lane.0 == 0 || !is_off(Mutation::LostWritesOfALaneUntold) {
                    self.front.say(lane, Outcome::WritesLost);
                }
            }
        }
    }

    /// Has lanes let go of devices that have left another one.
    fn bring_into_step(&mut self) {
        let statuses: Vec<VolumeStatus> = self.volumes.iter().map(SimVolume::status).collect();
        for OutOfStep { lane, member, device, why } in out_of_step(&statuses) {
            if !self.keeper.told.insert((lane.0, disk_of(device).0)) {
                continue;
            }
            self.keeper.requests += 1;
            let id = RequestId(self.keeper.requests);
            self.post(
                lane.0,
                match why {
                    Some(why) => VolumeEvent::LeftElsewhere(device, why),
                    None => VolumeEvent::Admin(id, AdminRequest::Offline { member }),
                },
            );
        }
    }

    /// Tells lanes what becomes of the replacements that they build, once all have taken what an
    /// administrator has asked for.
    fn order_replacements(&mut self) {
        if self.is_one() || !self.keeper.looks_at_replacements {
            return;
        }
        let is_asked =
            |event: &VolumeEvent| matches!(event, VolumeEvent::Admin(..) | VolumeEvent::Replacement(_));
        if !self.admin.is_empty() || self.inboxes.iter().flatten().any(is_asked) {
            return;
        }
        let statuses: Vec<VolumeStatus> = self.volumes.iter().map(SimVolume::status).collect();
        // One that has failed is waited for.
        self.keeper.looks_at_replacements = statuses.iter().any(|status| status.state == ArrayState::Failed);
        for (lane, order) in replacement_orders(&statuses) {
            self.post(lane.0, VolumeEvent::Replacement(order));
        }
    }

    /// The operation where the window of the lane lies.
    fn in_window(&self, lane: LaneIndex, op: IoOp) -> IoOp {
        let next = LaneIndex((lane.0 + 1) % self.cut.count());
        let (reads, writes) = (is_off(Mutation::ReadsOtherWindow), is_off(Mutation::WritesOtherWindow));
        let start = |is_other: bool| u64::from(if is_other { next } else { lane }.0) * self.part.stride;
        let at = |offset: ByteOffset, is_other: bool| ByteOffset(offset.0 + start(is_other));
        match op {
            IoOp::Read { offset, buf } => IoOp::Read { offset: at(offset, reads), buf },
            IoOp::Write { offset, buf, fua } => {
                // Superblocks and logs would not even be found again.
                let is_other = writes && lane.0 == 1 && offset.0 >= self.data_offset;
                IoOp::Write { offset: at(offset, is_other), buf, fua }
            }
            IoOp::Zero { offset, len, may_unmap } => IoOp::Zero { offset: at(offset, false), len, may_unmap },
            IoOp::Extents { offset, len } => IoOp::Extents { offset: at(offset, false), len },
            IoOp::Flush => IoOp::Flush,
        }
    }

    /// The status of the array; devices are disks.
    pub(super) fn status(&self) -> VolumeStatus {
        let statuses: Vec<VolumeStatus> = self.volumes.iter().map(SimVolume::status).collect();
        let mut status = merge_status(&self.cut, &statuses);
        for member in &mut status.members {
            member.device = member.device.map(disk_of);
            member.replacement =
                member.replacement.map(|new| ReplacementStatus { device: disk_of(new.device), ..new });
        }
        status
    }

    /// Whether a lane has the disk in service, or builds it.
    pub(super) fn uses(&self, disk: u32) -> bool {
        let is_it = |device: Option<DeviceId>| device.is_some_and(|device| disk_of(device).0 == disk);
        let status = |volume: &SimVolume| volume.status().members;
        let new = |member: &MemberStatus| member.replacement.map(|new| new.device);
        self.volumes.iter().flat_map(status).any(|member| is_it(member.device) || is_it(new(&member)))
    }

    /// By lane: the members that it has in service, each with its disk.
    pub(in crate::testing) fn serving(&self) -> Vec<Vec<(u16, u32)>> {
        let serving = |volume: &SimVolume| {
            let members = volume.status().members.into_iter();
            let online = members.filter(|member| member.state == MemberState::Online);
            online.filter_map(|member| Some((member.index.0, disk_of(member.device?).0))).collect()
        };
        self.volumes.iter().map(serving).collect()
    }

    /// When a tick is due at the latest.
    pub(super) fn due(&self) -> Option<Timestamp> {
        self.volumes.iter().filter_map(SimVolume::due).min()
    }

    /// Tells the lanes of bytes that an earlier run could not read.
    pub(super) fn expect_damage(&mut self, ranges: &[(VolumeOffset, u64)], is_beyond_repair: bool) {
        for (lane, volume) in (0..).zip(&mut self.volumes) {
            volume.expect_damage(&self.cut.within(LaneIndex(lane), ranges), is_beyond_repair);
        }
    }

    /// The only lane.
    pub(in crate::testing) fn only(&mut self) -> &mut PlainVolume {
        assert!(self.is_one(), "there are several lanes");
        self.volumes[0].plain()
    }

    /// The only lane, of kind cas.
    #[cfg(test)]
    pub(super) fn cas(&mut self) -> &mut crate::volume::CasVolume {
        self.volumes[0].cas()
    }

    /// The hash of a block of the volume according to cached pages.
    pub(super) fn cached_hash(&self, offset: VolumeOffset) -> Option<BlockHash> {
        let (lane, within) = self.cut.place_of(offset);
        self.volumes[usize::from(lane.0)].cached_hash(within)
    }

    /// For reads of a lane on other threads than its own, where there are any.
    pub(in crate::testing) fn view_reader(&self, lane: LaneIndex) -> Option<ViewReader> {
        self.volumes[usize::from(lane.0)].view_reader()
    }

    /// Checks that readers on other threads are shown the pages as they are.
    #[cfg(test)]
    pub(in crate::testing) fn check_shown(&self) {
        self.volumes.iter().for_each(SimVolume::check_shown);
    }
}
