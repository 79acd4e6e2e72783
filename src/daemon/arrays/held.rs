//! What lanes of an array have of the device of a member that others are without. Must not know what comes of
//! that.

use crate::daemon::reactor::{ArrayFacts, ArrayId, ReactorHandle};
use crate::member::Device;
use calpe_core::format::MemberState;
use calpe_core::units::{LaneIndex, MemberIndex};

/// See the head of this file.
pub(crate) enum Held {
    /// None has it.
    Nowhere,
    /// The whole device, locked: others can get their windows of it.
    Shared(Device),
    /// It can be used where it is only.
    Alone,
}

/// The device of a member, where lanes of the array have it in service, and not all.
pub(crate) fn held_by_lanes(
    reactor: &ReactorHandle,
    array: ArrayId,
    facts: &ArrayFacts,
    index: MemberIndex,
) -> Held {
    let uuid = facts.status.members[usize::from(index.0)].uuid;
    let members = facts.of_lane.iter().map(|lane| &lane.members[usize::from(index.0)]);
    let holders = (0..).map(LaneIndex).zip(members).filter(|(_, member)| member.uuid == uuid);
    let mut holders = holders.filter_map(|(lane, member)| Some((lane, member.device?))).peekable();
    if holders.peek().is_none() {
        return Held::Nowhere;
    }
    let shared = holders.find_map(|(lane, device)| reactor.whole_device(array, lane, device));
    shared.map_or(Held::Alone, Held::Shared)
}

/// The members that are out of service in some lanes and in service in others, where those must let go of
/// them before they can come back.
pub(crate) fn held_alone(reactor: &ReactorHandle, array: ArrayId, facts: &ArrayFacts) -> Vec<MemberIndex> {
    let is_out = |state| !matches!(state, MemberState::Online | MemberState::Rebuilding);
    let out = facts.status.members.iter().filter(|member| is_out(member.state)).map(|member| member.index);
    out.filter(|index| matches!(held_by_lanes(reactor, array, facts, *index), Held::Alone)).collect()
}
