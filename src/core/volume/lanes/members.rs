//! Members that are out of service in some lanes and in service in others, with the same device.
//!
//! Each lane judges its own operations, so a device that fails is noticed by the lanes that use it at that
//! moment. That is safe, as no lane counts on another one; but a device is one thing, which is brought back
//! or replaced as a whole. So whoever drives the lanes has the others let go of it, too: a lane that may need
//! it to read something keeps it. So does one in which nothing has happened to it, where others were started
//! without it: perhaps their superblocks are damaged; or a lane kept the device before the start, and what it
//! needs it for will be known when it meets that again.

use crate::array::{LetGo, MemberCondition, MemberStatus, VolumeStatus};
use crate::block_io::DeviceId;
use crate::format::MemberState;
use crate::units::{LaneIndex, MemberIndex};

/// A lane that still has a member which others are without.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OutOfStep {
    /// Which lane.
    pub lane: LaneIndex,
    /// Which member.
    pub member: MemberIndex,
    /// Its device there.
    pub device: DeviceId,
    /// Why the others are without it; none where an administrator has taken it offline.
    pub why: Option<LetGo>,
}

/// The members to take out of lanes, because others are without the same device.
#[must_use]
pub fn out_of_step(of_lane: &[VolumeStatus]) -> Vec<OutOfStep> {
    let width = of_lane.first().map_or(0, |lane| lane.members.len());
    let mut all = Vec::new();
    for at in 0..width {
        let members = || of_lane.iter().map(|lane| &lane.members[at]);
        let is_in = |state| matches!(state, MemberState::Online | MemberState::Rebuilding);
        for (lane, own) in (0..).map(LaneIndex).zip(members()) {
            let Some(device) = own.device.filter(|_| is_in(own.state)) else { continue };
            let others = || members().filter(|other| !is_in(other.state) && other.uuid == own.uuid);
            let in_state =
                |state| others().filter(|other| other.state == state).max_by_key(|other| other.has_left);
            let why = match (in_state(MemberState::Offline), in_state(MemberState::Faulted)) {
                (Some(_), _) => None,
                (None, Some(failed)) if failed.has_left => Some(LetGo::Failed(failed.reason.clone())),
                (None, _) => match others().find_map(lack) {
                    Some(lacks) => Some(LetGo::Lacks(lacks)),
                    None => continue,
                },
            };
            all.push(OutOfStep { lane, member: own.index, device, why });
        }
    }
    all
}

/// What a member lacks that has left a lane for that, and comes back by itself.
fn lack(member: &MemberStatus) -> Option<MemberCondition> {
    let is_lack = |condition: &&MemberCondition| {
        matches!(condition, MemberCondition::Full | MemberCondition::ShortOfResources)
    };
    member.conditions.iter().find(is_lack).copied().filter(|_| member.returns)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{SimArray, SimShape};
    use crate::volume::AdminRequest;
    use std::slice::from_ref;
    use uuid::Uuid;

    #[test]
    fn a_device_that_is_out_of_one_lane_is_to_leave_the_others_but_another_device_is_not() {
        let mut sim = SimArray::create(SimShape::new(2, 1, 4096, 4), 1);
        let whole = sim.status();
        sim.admin(AdminRequest::Offline { member: MemberIndex(1) }).expect("it leaves");
        let out = sim.status();
        assert_eq!(out_of_step(&[whole.clone(), whole.clone()]), []);
        assert_eq!(out_of_step(&[out.clone(), out.clone()]), []);
        let wanted = OutOfStep { lane: LaneIndex(1), member: MemberIndex(1), device: DeviceId(1), why: None };
        assert_eq!(out_of_step(&[out.clone(), whole.clone()]), from_ref(&wanted));
        let mut full = out.clone();
        let member = &mut full.members[1];
        (member.state, member.returns) = (MemberState::Missing, true);
        member.conditions = vec![MemberCondition::Full];
        let wanted = OutOfStep { why: Some(LetGo::Lacks(MemberCondition::Full)), ..wanted };
        assert_eq!(out_of_step(&[full.clone(), whole.clone()]), from_ref(&wanted));
        full.members[1].returns = false;
        assert_eq!(out_of_step(&[full.clone(), whole.clone()]), [], "perhaps it was started without");
        let mut failed = full.clone();
        failed.members[1].state = MemberState::Faulted;
        let reason = failed.members[1].reason.clone();
        let wanted = OutOfStep { lane: LaneIndex(2), why: Some(LetGo::Failed(reason)), ..wanted };
        let mut before = failed.clone();
        before.members[1].has_left = false;
        assert_eq!(out_of_step(&[before.clone(), failed, whole.clone()]), [wanted]);
        assert_eq!(out_of_step(&[full, before, whole.clone()]), [], "it had failed before the start");
        let mut other = whole;
        other.members[1].uuid = Uuid::from_u128(5);
        assert_eq!(out_of_step(&[out, other]), []);
    }
}
