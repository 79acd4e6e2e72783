//! When the lanes of an array change over to a new device that they build beside the old one, and when they
//! give it up.
//!
//! Each lane builds its part of the new device, and holds it when it is complete: until the device is whole,
//! the old one is the member in every lane. When all lanes hold it they change over. If one is without the
//! device before that, the others give it up, and nothing is lost. A lane without the old device keeps the
//! new one: it has changed over already, in the moments between the first and the last one, or has lost the
//! old one. What lanes are told follows from their states alone. So after a crash between the first
//! changeover and the last one, the lanes that still have both devices finish the build and change over, if
//! the new device is there.
//!
//! A lane that has failed, and has the new device, is waited for: it may come back without.

use crate::array::{
    ArrayState, GIVEN_UP, MemberStatus, ReplacementOrder, ReplacementStatus, ReplacementStep, VolumeStatus,
};
use crate::format::MemberState;
use crate::units::{LaneIndex, MemberIndex};
use uuid::Uuid;

/// How far a lane is with a new device of a member.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Stage {
    /// It builds it, or was told to change over.
    Builds,
    /// It is complete, and held.
    Holds,
    /// It is the member.
    Has,
    /// Neither: it was given up, or has failed.
    Without,
}

/// What to tell which lanes now, of the states of all. No lane may have an administrator's request that
/// others have not got yet.
#[must_use]
pub fn replacement_orders(of_lane: &[VolumeStatus]) -> Vec<(LaneIndex, ReplacementOrder)> {
    let width = of_lane.first().filter(|_| of_lane.len() > 1).map_or(0, |lane| lane.members.len());
    let has_failed = of_lane.iter().any(|lane| lane.state == ArrayState::Failed);
    let mut all = Vec::new();
    for at in 0..width {
        let members: Vec<&MemberStatus> = of_lane.iter().map(|lane| &lane.members[at]).collect();
        let mut devices: Vec<Uuid> =
            members.iter().filter_map(|member| member.replacement).map(|new| new.uuid).collect();
        devices.sort_unstable();
        devices.dedup();
        for device in devices {
            let stages: Vec<Stage> = of_lane.iter().map(|lane| stage(lane, at, device)).collect();
            let step = match stages.iter().position(|stage| *stage == Stage::Without) {
                Some(lane) => ReplacementStep::GiveUp(why_without(lane, members[lane])),
                None if stages.contains(&Stage::Builds) || has_failed => continue,
                None => ReplacementStep::ChangeOver,
            };
            // A lane without the old device has no other one.
            let has_both = |member: &MemberStatus| {
                member.state == MemberState::Online
                    && member.replacement.is_some_and(|new| new.uuid == device)
            };
            let order = ReplacementOrder { member: members[0].index, device, step };
            let lanes = (0..).map(LaneIndex).zip(&members).filter(|(_, member)| has_both(member));
            all.extend(lanes.map(|(lane, _)| (lane, order.clone())));
        }
    }
    all
}

/// The device that lanes build beside the old one of a member, if they do.
#[must_use]
pub fn new_device_of(of_lane: &[VolumeStatus], member: MemberIndex) -> Option<Uuid> {
    let mut members = of_lane.iter().filter_map(|lane| lane.members.get(usize::from(member.0)));
    members.find_map(|member| member.replacement).map(|new| new.uuid)
}

/// `at`: the member's index.
fn stage(lane: &VolumeStatus, at: usize, device: Uuid) -> Stage {
    let member = &lane.members[at];
    match (member.replacement.filter(|new| new.uuid == device), member.state) {
        (Some(ReplacementStatus { is_held: true, .. }), _) => Stage::Holds,
        (Some(_), _) => Stage::Builds,
        (None, MemberState::Online) if member.uuid == device => Stage::Has,
        // Where the old device was missing, the new one is built in its place.
        (None, MemberState::Rebuilding) if member.uuid == device => Stage::Builds,
        // It may come back, with this device.
        (None, _) if member.uuid == device && lane.state == ArrayState::Failed => Stage::Builds,
        (None, _) => Stage::Without,
    }
}

fn why_without(lane: usize, member: &MemberStatus) -> String {
    let reason = member.reason.as_deref();
    match reason.map(|reason| reason.strip_prefix(GIVEN_UP).unwrap_or(reason)) {
        Some(reason) => format!("lane {lane} is without it: {reason}"),
        None => format!("lane {lane} is without it"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::block_io::DeviceId;
    use crate::testing::{SimArray, SimShape};

    const OLD: Uuid = Uuid::from_u128(1);
    const NEW: Uuid = Uuid::from_u128(2);

    /// The states of three lanes, of which member 1 is in these stages; it is online on the old device or the
    /// new one.
    fn lanes(stages: [Stage; 3]) -> Vec<VolumeStatus> {
        let whole = SimArray::create(SimShape::new(2, 1, 4096, 4), 1).status();
        let of =
            |stage| {
                let mut lane = whole.clone();
                let member = &mut lane.members[1];
                member.uuid = if stage == Stage::Has { NEW } else { OLD };
                let is_held = stage == Stage::Holds;
                member.replacement = matches!(stage, Stage::Builds | Stage::Holds)
                    .then_some(ReplacementStatus { device: DeviceId(9), uuid: NEW, is_held });
                lane
            };
        stages.map(of).to_vec()
    }

    /// The lanes that are told something, and what.
    fn told(of_lane: &[VolumeStatus]) -> (Vec<u16>, Option<ReplacementStep>) {
        let orders = replacement_orders(of_lane);
        assert!(orders.iter().all(|(_, order)| (order.member, order.device) == (MemberIndex(1), NEW)));
        let steps: Vec<_> = orders.iter().map(|(_, order)| order.step.clone()).collect();
        assert!(steps.windows(2).all(|steps| steps[0] == steps[1]), "{steps:?}");
        (orders.iter().map(|(lane, _)| lane.0).collect(), steps.first().cloned())
    }

    #[test]
    fn lanes_change_over_when_none_builds_any_more() {
        use Stage::{Builds, Has, Holds};
        let change_over = Some(ReplacementStep::ChangeOver);
        assert_eq!(told(&lanes([Holds, Holds, Holds])), (vec![0, 1, 2], change_over.clone()));
        assert_eq!(told(&lanes([Holds, Builds, Holds])), (vec![], None));
        assert_eq!(told(&lanes([Has, Has, Has])), (vec![], None));
        // After a crash between the first changeover and the last.
        assert_eq!(told(&lanes([Has, Holds, Holds])), (vec![1, 2], change_over));
        assert_eq!(told(&lanes([Has, Holds, Builds])), (vec![], None));
    }

    #[test]
    fn what_one_lane_is_without_the_others_give_up() {
        use Stage::{Builds, Has, Holds, Without};
        let mut of_lane = lanes([Holds, Builds, Without]);
        of_lane[2].members[1].reason = Some(format!("{GIVEN_UP}worn out"));
        let give_up = |why: &str| Some(ReplacementStep::GiveUp(why.into()));
        assert_eq!(told(&of_lane), (vec![0, 1], give_up("lane 2 is without it: worn out")));
        assert_eq!(told(&lanes([Without, Without, Without])), (vec![], None));
        // One that has changed over has no other device.
        assert_eq!(told(&lanes([Has, Holds, Without])), (vec![1], give_up("lane 2 is without it")));
        let mut of_lane = lanes([Has, Holds, Holds]);
        of_lane[0].members[1].state = MemberState::Faulted;
        assert_eq!(told(&of_lane).0, [1, 2], "it has failed where it was the member");
        assert!(matches!(told(&of_lane).1, Some(ReplacementStep::GiveUp(_))));
        // Where the old device is out, the new one is all that there is.
        let mut of_lane = lanes([Holds, Builds, Without]);
        of_lane[1].members[1].state = MemberState::Offline;
        assert_eq!(told(&of_lane).0, [0]);
    }

    #[test]
    fn a_lane_in_which_the_old_device_was_missing_is_waited_for() {
        use Stage::{Has, Holds};
        let mut of_lane = lanes([Has, Holds, Holds]);
        of_lane[0].members[1].state = MemberState::Rebuilding;
        assert_eq!(told(&of_lane), (vec![], None));
    }

    #[test]
    fn a_lane_that_has_failed_is_waited_for_unless_it_is_without_the_new_device() {
        use Stage::{Has, Holds, Without};
        let failed = |stages| {
            let mut of_lane = lanes(stages);
            of_lane[2].state = ArrayState::Failed;
            told(&of_lane)
        };
        assert_eq!(failed([Holds, Holds, Holds]), (vec![], None));
        assert_eq!(failed([Has, Holds, Holds]), (vec![], None));
        let mut of_lane = lanes([Holds, Holds, Has]);
        (of_lane[2].state, of_lane[2].members[1].state) = (ArrayState::Failed, MemberState::Missing);
        assert_eq!(told(&of_lane), (vec![], None), "it has no other device, and may come back with this one");
        let give_up = Some(ReplacementStep::GiveUp("lane 2 is without it".into()));
        assert_eq!(failed([Holds, Holds, Without]), (vec![0, 1], give_up));
    }

    #[test]
    fn one_lane_is_told_nothing() {
        assert_eq!(told(&lanes([Stage::Holds; 3])[..1]), (vec![], None));
    }
}
