//! The status of an array of several lanes, made of those of its lanes.
//!
//! What goes wrong in one lane is wrong with the array, so the worst state is told; what is counted is added
//! up; what lies somewhere in the volume of a lane is told by its place in the whole volume.

use crate::array::{
    Activity, ActivityKind, ArrayState, LogState, MemberCondition, MemberCounters, MemberStatus,
    PageCacheStatus, ReplacementStatus, Rest, ScrubResult, VolumeStatus,
};
use crate::format::{Geometry, MemberState};
use crate::units::{LaneIndex, SlotIndex, VolumeOffset};
use crate::volume::LaneCut;
use uuid::Uuid;

/// The status of the whole, of those of its lanes in their order.
///
/// # Panics
/// When there are not as many as the array has lanes.
#[must_use]
pub fn merge_status(cut: &LaneCut, of_lane: &[VolumeStatus]) -> VolumeStatus {
    assert_eq!(of_lane.len(), usize::from(cut.count()), "a status of each lane");
    let first = &of_lane[0];
    if of_lane.len() == 1 {
        return first.clone();
    }
    let ranges = |of: fn(&VolumeStatus) -> &[(VolumeOffset, u64)]| whole_ranges(cut, of_lane, of);
    VolumeStatus {
        state: worst_state(of_lane),
        geometry: Geometry {
            slots: of_lane.iter().map(|lane| lane.geometry.slots).sum(),
            volume_bytes: cut.volume_bytes(),
            ..first.geometry
        },
        // Each lane counts its own epochs: the highest number changes at least as often as a member leaves
        // or joins everywhere.
        epoch: of_lane.iter().map(|lane| lane.epoch).max().unwrap_or(0),
        dirty: of_lane.iter().any(|lane| lane.dirty),
        members: (0..first.members.len()).map(|at| merge_member(cut, of_lane, at)).collect(),
        activities: merge_activities(of_lane),
        last_scrub: merge_scrubs(of_lane),
        engine: first.engine,
        // A request that failed in two lanes counts in both.
        client_errors: of_lane.iter().map(|lane| lane.client_errors).sum(),
        checksum: first.checksum,
        log: merge_logs(of_lane),
        // A forced start must go on in every lane that is refused now.
        yields_to_force: {
            let mut refused = of_lane.iter().filter(|lane| matches!(lane.log, LogState::Refused(_)));
            refused.clone().next().is_some() && refused.all(|lane| lane.yields_to_force)
        },
        lost: ranges(|lane| &lane.lost),
        set_aside: ranges(|lane| &lane.set_aside),
        set_aside_on: of_lane.iter().flat_map(|lane| lane.set_aside_on.iter()).collect(),
        unreadable: ranges(|lane| &lane.unreadable),
        page_cache: PageCacheStatus {
            pages: of_lane.iter().map(|lane| lane.page_cache.pages).sum(),
            pages_max: of_lane.iter().map(|lane| lane.page_cache.pages_max).sum(),
            pages_needed: of_lane.iter().map(|lane| lane.page_cache.pages_needed).sum(),
            hits: of_lane.iter().map(|lane| lane.page_cache.hits).sum(),
            misses: of_lane.iter().map(|lane| lane.page_cache.misses).sum(),
        },
        unreadable_pages: of_lane.iter().map(|lane| lane.unreadable_pages).sum(),
        unconfirmed_lost: ranges(|lane| &lane.unconfirmed_lost),
        unconfirmed: ranges(|lane| &lane.unconfirmed),
    }
}

/// The worst state: a volume of which a part cannot be served has failed.
fn worst_state(of_lane: &[VolumeStatus]) -> ArrayState {
    let badness = |state: ArrayState| match state {
        ArrayState::Online => 0,
        ArrayState::Degraded => 1,
        ArrayState::Failed => 2,
    };
    of_lane.iter().map(|lane| lane.state).max_by_key(|state| badness(*state)).expect("there are lanes")
}

/// A member as the lane has it in which it is worst: its state, and the devices and the reason that go with
/// that. Among equals a lane speaks in which a replacement is still being built, and then the first one:
/// while all lanes agree, that is lane 0, whose handles of devices the driver has to know.
fn merge_member(cut: &LaneCut, of_lane: &[VolumeStatus], at: usize) -> MemberStatus {
    let members = || of_lane.iter().map(|lane| &lane.members[at]);
    // The first of equals is the last of a list that goes backwards.
    let speaker = members().rev().max_by_key(|member| (badness(member.state), member.replacement.is_some()));
    let speaker = speaker.expect("there are lanes");
    let counters = members().fold(MemberCounters::default(), |all, member| MemberCounters {
        read_errors: all.read_errors + member.counters.read_errors,
        write_errors: all.write_errors + member.counters.write_errors,
        checksum_errors: all.checksum_errors + member.counters.checksum_errors,
        repaired: all.repaired + member.counters.repaired,
    });
    let mut conditions: Vec<_> = members().flat_map(|member| member.conditions.iter().copied()).collect();
    let split = split(of_lane, at);
    conditions.extend(split.as_ref().map(|_| MemberCondition::Split));
    conditions.sort_unstable();
    conditions.dedup();
    let is_out = |member: &&MemberStatus| badness(member.state) > badness(MemberState::Rebuilding);
    // It may be back in the lanes that were without it.
    let is_kept = members().any(|member| is_out(&member));
    conditions.retain(|condition| *condition != MemberCondition::KeptByLanes || is_kept);
    MemberStatus {
        index: speaker.index,
        uuid: speaker.uuid,
        state: speaker.state,
        device: speaker.device,
        replacement: speaker.replacement.map(|new| {
            let mut all = members().filter_map(|member| member.replacement);
            ReplacementStatus { is_held: all.all(|new| new.is_held), ..new }
        }),
        counters,
        reason: split
            .or_else(|| speaker.reason.clone())
            .or_else(|| members().find_map(|member| member.reason.clone())),
        conditions,
        has_left: members().any(|member| member.has_left),
        // One lane that must not have it back without a request keeps it out.
        returns: speaker.returns && members().filter(is_out).all(|member| member.returns),
        lacking: merge_lacking(cut, of_lane, at),
    }
}

/// That lanes use different devices as one member, and none is being built to end that: a replacement was
/// given up or cancelled in some lanes after others had completed it.
fn split(of_lane: &[VolumeStatus], at: usize) -> Option<String> {
    let members = || of_lane.iter().map(|lane| &lane.members[at]);
    let is_building = members().any(|member| member.replacement.is_some());
    let mut uuids: Vec<Uuid> = members().map(|member| member.uuid).collect();
    uuids.sort_unstable();
    uuids.dedup();
    (uuids.len() > 1 && !is_building).then(|| {
        let uuids: Vec<String> = uuids.iter().map(Uuid::to_string).collect();
        format!(
            "its lanes are on {} devices ({}): keep all of them, and replace the member by one with 'calpe \
             replace'",
            uuids.len(),
            uuids.join(" and ")
        )
    })
}

/// How bad it is that a member is in a state: one that is out needs somebody, one that failed most of all.
fn badness(state: MemberState) -> u8 {
    match state {
        MemberState::Online => 0,
        MemberState::Rebuilding => 1,
        MemberState::Offline => 2,
        MemberState::Missing => 3,
        MemberState::Faulted => 4,
    }
}

/// What the devices of a member went without, in places of the whole array ([`LaneCut::places_of`]).
fn merge_lacking(cut: &LaneCut, of_lane: &[VolumeStatus], at: usize) -> Vec<(Uuid, Vec<(SlotIndex, u64)>)> {
    let mut all: Vec<(Uuid, Vec<(SlotIndex, u64)>)> = Vec::new();
    for (lane, status) in (0..).map(LaneIndex).zip(of_lane) {
        for (device, runs) in &status.members[at].lacking {
            let at = all.iter().position(|(other, _)| other == device).unwrap_or_else(|| {
                all.push((*device, Vec::new()));
                all.len() - 1
            });
            all[at].1.extend(runs.iter().flat_map(|&(first, count)| cut.places_of(lane, first, count)));
        }
    }
    for (_, runs) in &mut all {
        let joined = join_runs(runs.iter().map(|&(first, count)| (first.0, count)).collect());
        *runs = joined.into_iter().map(|(first, count)| (SlotIndex(first), count)).collect();
    }
    all
}

/// The passes of all lanes, one of a kind. A lane that has no pass of a kind which others have has ended it,
/// or is about to begin: it counts as done, so that progress does not go back when lanes end.
fn merge_activities(of_lane: &[VolumeStatus]) -> Vec<Activity> {
    let mut all = Vec::new();
    for kind in [ActivityKind::Rebuild, ActivityKind::Scrub, ActivityKind::Repair] {
        let of = |lane: &VolumeStatus| lane.activities.iter().find(|activity| activity.kind == kind).cloned();
        let under_way: Vec<Activity> = of_lane.iter().filter_map(of).collect();
        let Some(first) = under_way.first() else { continue };
        let ended = of_lane.iter().filter(|lane| of(lane).is_none());
        let ended: u64 = ended.map(|lane| lane.geometry.slots * lane.geometry.stripe_bytes()).sum();
        let sum = |of: fn(&Activity) -> u64| under_way.iter().map(of).sum::<u64>();
        // It rests where all rest. Then the first reason is told that is not another lane.
        let works = under_way.iter().any(|activity| activity.rest.is_none());
        let mut rests = under_way.iter().filter_map(|activity| activity.rest);
        let rest = rests.find(|rest| *rest != Rest::ForLanes).or(first.rest).filter(|_| !works);
        all.push(Activity {
            kind,
            done_bytes: sum(|activity| activity.done_bytes) + ended,
            total_bytes: sum(|activity| activity.total_bytes) + ended,
            retried: sum(|activity| activity.retried),
            retried_pages: sum(|activity| activity.retried_pages),
            rest,
            errors: sum(|activity| activity.errors),
            repaired: sum(|activity| activity.repaired),
        });
    }
    // As each lane does: what works is told before what waits.
    all.sort_by_key(|activity: &Activity| activity.rest.is_some());
    all
}

/// The last complete scrub of the whole. None while a lane has never ended one. While lanes scrub, others may
/// have ended theirs: the whole was scrubbed when the one was that is longest ago.
fn merge_scrubs(of_lane: &[VolumeStatus]) -> Option<ScrubResult> {
    let all: Vec<ScrubResult> = of_lane.iter().map(|lane| lane.last_scrub).collect::<Option<_>>()?;
    let is_scrub = |activity: &Activity| activity.kind == ActivityKind::Scrub;
    let is_under_way = of_lane.iter().any(|lane| lane.activities.iter().any(is_scrub));
    let ends = all.iter().map(|scrub| scrub.finished_unix);
    let finished_unix = if is_under_way { ends.min()? } else { ends.max()? };
    Some(ScrubResult {
        finished_unix,
        errors: all.iter().map(|scrub| scrub.errors).sum(),
        repaired: all.iter().map(|scrub| scrub.repaired).sum(),
        unchecked: all.iter().flat_map(|scrub| scrub.unchecked.iter()).collect(),
    })
}

/// The stage that is furthest from service. The reasons of all refused lanes are told, each with its lanes.
fn merge_logs(of_lane: &[VolumeStatus]) -> LogState {
    let mut reasons: Vec<(&str, Vec<String>)> = Vec::new();
    for (lane, status) in of_lane.iter().enumerate() {
        if let LogState::Refused(reason) = &status.log {
            match reasons.iter_mut().find(|(other, _)| other == reason) {
                Some((_, lanes)) => lanes.push(lane.to_string()),
                None => reasons.push((reason, vec![lane.to_string()])),
            }
        }
    }
    let any = |stage: &LogState| of_lane.iter().any(|lane| lane.log == *stage);
    match &reasons[..] {
        [] if any(&LogState::Replaying) => LogState::Replaying,
        [] if any(&LogState::Settling) => LogState::Settling,
        [] => LogState::Serving,
        [(reason, lanes)] if lanes.len() == of_lane.len() => LogState::Refused((*reason).to_owned()),
        some => {
            let told = some.iter().map(|(reason, lanes)| {
                let plural = if lanes.len() == 1 { "" } else { "s" };
                format!("lane{plural} {}: {reason}", lanes.join(", "))
            });
            LogState::Refused(told.collect::<Vec<_>>().join("; "))
        }
    }
}

/// Ranges of all lanes' volumes as ranges of the whole volume: ascending, neighbours joined.
fn whole_ranges(
    cut: &LaneCut,
    of_lane: &[VolumeStatus],
    of: fn(&VolumeStatus) -> &[(VolumeOffset, u64)],
) -> Vec<(VolumeOffset, u64)> {
    let mut all = Vec::new();
    for (lane, status) in (0..).map(LaneIndex).zip(of_lane) {
        for &(within, len) in of(status) {
            all.extend(cut.runs_of(lane, within, len).map(|(offset, run)| (offset.0, run)));
        }
    }
    join_runs(all).into_iter().map(|(offset, len)| (VolumeOffset(offset), len)).collect()
}

/// Sorts runs (start, length) and joins neighbours.
fn join_runs(mut runs: Vec<(u64, u64)>) -> Vec<(u64, u64)> {
    runs.sort_unstable();
    let mut joined: Vec<(u64, u64)> = Vec::with_capacity(runs.len());
    for (start, len) in runs {
        match joined.last_mut() {
            Some((first, count)) if *first + *count >= start => {
                *count = (*count).max(start + len - *first);
            }
            _ => joined.push((start, len)),
        }
    }
    joined
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::array::MemberCondition;
    use crate::block_io::DeviceId;
    use crate::format::{ChecksumKind, Lanes, MemberSet};
    use crate::units::MemberIndex;

    const STRIPE: u64 = 8192;
    const NEW: ReplacementStatus =
        ReplacementStatus { device: DeviceId(9), uuid: Uuid::from_u128(9), is_held: false };

    fn cut() -> LaneCut {
        LaneCut::new(Lanes { count: 3, group: 2 }, STRIPE, 20 * STRIPE)
    }

    fn member(at: u16) -> MemberStatus {
        MemberStatus {
            index: MemberIndex(at),
            uuid: Uuid::from_u128(u128::from(at)),
            state: MemberState::Online,
            device: Some(DeviceId(u32::from(at))),
            replacement: None,
            counters: MemberCounters::default(),
            reason: None,
            conditions: Vec::new(),
            has_left: false,
            returns: false,
            lacking: Vec::new(),
        }
    }

    fn lane(volume_bytes: u64) -> VolumeStatus {
        VolumeStatus {
            state: ArrayState::Online,
            geometry: Geometry {
                data: 2,
                parity: 1,
                chunk: 4096,
                sector: 512,
                slots: 10,
                volume_bytes,
                ahead: 0,
            },
            epoch: 1,
            dirty: false,
            members: (0..3).map(member).collect(),
            activities: Vec::new(),
            last_scrub: None,
            engine: "portable",
            client_errors: 0,
            checksum: ChecksumKind::Crc32c,
            log: LogState::Serving,
            yields_to_force: false,
            lost: Vec::new(),
            set_aside: Vec::new(),
            set_aside_on: MemberSet::new(),
            unreadable: Vec::new(),
            page_cache: PageCacheStatus { pages: 1, pages_max: 10, pages_needed: 4, hits: 5, misses: 2 },
            unreadable_pages: 0,
            unconfirmed_lost: Vec::new(),
            unconfirmed: Vec::new(),
        }
    }

    /// Lanes of 8, 6 and 6 stripes.
    fn lanes() -> [VolumeStatus; 3] {
        [8, 6, 6].map(|stripes| lane(stripes * STRIPE))
    }

    #[test]
    fn one_lane_is_told_as_it_is() {
        let one = VolumeStatus { lost: vec![(VolumeOffset(7), 9)], client_errors: 3, ..lane(20 * STRIPE) };
        let cut = LaneCut::new(Lanes::ONE, STRIPE, 20 * STRIPE);
        assert_eq!(merge_status(&cut, std::slice::from_ref(&one)), one);
    }

    #[test]
    fn what_is_wrong_in_one_lane_is_wrong_with_the_array() {
        let mut lanes = lanes();
        assert_eq!(merge_status(&cut(), &lanes).state, ArrayState::Online);
        lanes[1].state = ArrayState::Degraded;
        lanes[1].dirty = true;
        lanes[1].members[2] = MemberStatus {
            state: MemberState::Faulted,
            device: None,
            reason: Some("worn out".into()),
            conditions: vec![MemberCondition::Slow],
            ..member(2)
        };
        lanes[2].members[2].conditions = vec![MemberCondition::Full, MemberCondition::Slow];
        let whole = merge_status(&cut(), &lanes);
        assert_eq!((whole.state, whole.dirty), (ArrayState::Degraded, true));
        assert_eq!((whole.geometry.volume_bytes, whole.geometry.slots), (20 * STRIPE, 30));
        let told = &whole.members[2];
        assert_eq!((told.state, told.device), (MemberState::Faulted, None));
        assert_eq!(told.reason.as_deref(), Some("worn out"));
        assert_eq!(told.conditions, [MemberCondition::Full, MemberCondition::Slow]);
        assert_eq!(whole.members[0], member(0));
        lanes[2].state = ArrayState::Failed;
        assert_eq!(merge_status(&cut(), &lanes).state, ArrayState::Failed);
    }

    #[test]
    fn a_member_returns_by_itself_only_where_every_lane_lets_it() {
        let mut lanes = lanes();
        for lane in &mut lanes[1..] {
            lane.members[0] =
                MemberStatus { state: MemberState::Missing, device: None, returns: true, ..member(0) };
        }
        assert!(merge_status(&cut(), &lanes).members[0].returns, "lane 0 has it still");
        lanes[1].members[0].returns = false;
        assert!(!merge_status(&cut(), &lanes).members[0].returns);
    }

    #[test]
    fn a_replacement_is_told_until_the_last_lane_has_built_it() {
        let mut lanes = lanes();
        let (old, new) = (Some(DeviceId(1)), Some(DeviceId(9)));
        lanes[0].members[1] = MemberStatus { device: new, uuid: Uuid::from_u128(9), ..member(1) };
        lanes[1].members[1].replacement = Some(NEW);
        let told = merge_status(&cut(), &lanes).members[1].clone();
        assert_eq!((told.state, told.device, told.replacement), (MemberState::Online, old, Some(NEW)));
        assert_eq!(told.uuid, Uuid::from_u128(1));
    }

    #[test]
    fn a_replacement_that_waits_for_other_lanes_is_told_so() {
        let mut lanes = lanes();
        let rebuild = |rest| Activity {
            kind: ActivityKind::Rebuild,
            done_bytes: STRIPE,
            total_bytes: STRIPE,
            retried: 0,
            retried_pages: 0,
            rest,
            errors: 0,
            repaired: 0,
        };
        for lane in &mut lanes {
            lane.members[1].replacement = Some(ReplacementStatus { is_held: true, ..NEW });
            lane.members[1].conditions = vec![MemberCondition::NewDeviceWaits];
            lane.activities = vec![rebuild(Some(Rest::ForLanes))];
        }
        let told = merge_status(&cut(), &lanes);
        assert!(told.members[1].replacement.is_some_and(|new| new.is_held));
        assert_eq!(told.activities[0].rest, Some(Rest::ForLanes));
        lanes[2].members[1].replacement = Some(NEW);
        lanes[2].members[1].conditions.clear();
        lanes[2].activities = vec![rebuild(None)];
        let told = merge_status(&cut(), &lanes);
        assert!(told.members[1].replacement.is_some_and(|new| !new.is_held));
        assert_eq!(told.members[1].conditions, [MemberCondition::NewDeviceWaits]);
        assert_eq!(told.activities[0].rest, None);
        lanes[2].activities = vec![rebuild(Some(Rest::ForRoom))];
        assert_eq!(merge_status(&cut(), &lanes).activities[0].rest, Some(Rest::ForRoom));
    }

    #[test]
    fn lanes_on_different_devices_are_told_once_none_is_being_built() {
        let mut lanes = lanes();
        lanes[0].members[1].uuid = Uuid::from_u128(9);
        let told = merge_status(&cut(), &lanes).members[1].clone();
        let reason = told.reason.expect("a reason");
        assert!(
            reason.contains("its lanes are on 2 devices") && reason.contains(&Uuid::from_u128(9).to_string())
        );
        assert_eq!(told.conditions, [MemberCondition::Split]);
        lanes[1].members[1].replacement = Some(NEW);
        let told = merge_status(&cut(), &lanes).members[1].clone();
        assert_eq!((told.reason, told.conditions), (None, vec![]));
    }

    #[test]
    fn counters_are_added_up_and_what_devices_lack_is_told_by_place() {
        let mut lanes = lanes();
        let device = Uuid::from_u128(7);
        for (at, lane) in lanes.iter_mut().enumerate() {
            lane.client_errors = 1 + at as u64;
            lane.members[0].counters = MemberCounters {
                read_errors: 1,
                write_errors: 2,
                checksum_errors: 3 * at as u64,
                repaired: 4,
            };
        }
        lanes[0].members[0].lacking = vec![(device, vec![(SlotIndex(1), 2)])];
        lanes[1].members[0].lacking = vec![(device, vec![(SlotIndex(0), 2)])];
        let whole = merge_status(&cut(), &lanes);
        let wanted = MemberCounters { read_errors: 3, write_errors: 6, checksum_errors: 9, repaired: 12 };
        assert_eq!((whole.client_errors, whole.members[0].counters), (6, wanted));
        assert_eq!((whole.page_cache.pages_needed, whole.page_cache.hits), (12, 15));
        // Slots 1 and 2 of lane 0 are places 1 and 6; slots 0 and 1 of lane 1 are places 2 and 3.
        let places = vec![(SlotIndex(1), 3), (SlotIndex(6), 1)];
        assert_eq!(whole.members[0].lacking, [(device, places)]);
    }

    #[test]
    fn ranges_are_told_by_their_place_in_the_volume() {
        let mut lanes = lanes();
        // The last stripe of the first group of each lane, and the first of the second.
        lanes[0].unreadable = vec![(VolumeOffset(STRIPE), 2 * STRIPE)];
        lanes[1].unreadable = vec![(VolumeOffset(0), 4096), (VolumeOffset(STRIPE + 4096), 4096)];
        let whole = merge_status(&cut(), &lanes);
        let wanted = [(STRIPE, STRIPE + 4096), (3 * STRIPE + 4096, 4096), (6 * STRIPE, STRIPE)];
        assert_eq!(whole.unreadable, wanted.map(|(offset, len)| (VolumeOffset(offset), len)));
        assert!(whole.lost.is_empty() && whole.unconfirmed.is_empty());
    }

    #[test]
    fn passes_of_a_kind_are_one_and_lanes_that_have_ended_theirs_count_as_done() {
        let mut lanes = lanes();
        let pass = |kind, done_bytes, rest| Activity {
            kind,
            done_bytes,
            total_bytes: 10 * STRIPE,
            retried: 1,
            retried_pages: 0,
            rest,
            errors: 2,
            repaired: 1,
        };
        lanes[0].activities = vec![pass(ActivityKind::Scrub, STRIPE, Some(Rest::Paused))];
        lanes[1].activities =
            vec![pass(ActivityKind::Rebuild, 0, None), pass(ActivityKind::Scrub, 0, Some(Rest::ForRebuild))];
        let told = merge_status(&cut(), &lanes).activities;
        assert_eq!(
            told.iter().map(|pass| pass.kind).collect::<Vec<_>>(),
            [ActivityKind::Rebuild, ActivityKind::Scrub]
        );
        assert_eq!((told[0].done_bytes, told[0].total_bytes, told[0].rest), (20 * STRIPE, 30 * STRIPE, None));
        assert_eq!((told[1].done_bytes, told[1].rest), (11 * STRIPE, Some(Rest::Paused)));
        assert_eq!((told[1].errors, told[1].retried), (4, 2));
    }

    #[test]
    fn a_scrub_is_complete_when_every_lane_has_ended_one() {
        let mut lanes = lanes();
        let ended = |finished_unix, errors, unchecked: &[u16]| {
            let unchecked = unchecked.iter().map(|&at| MemberIndex(at)).collect();
            Some(ScrubResult { finished_unix, errors, repaired: errors, unchecked })
        };
        lanes[0].last_scrub = ended(100, 1, &[0]);
        lanes[1].last_scrub = ended(200, 2, &[2]);
        assert_eq!(merge_status(&cut(), &lanes).last_scrub, None);
        lanes[2].last_scrub = ended(150, 0, &[]);
        assert_eq!(merge_status(&cut(), &lanes).last_scrub, ended(200, 3, &[0, 2]));
    }

    #[test]
    fn a_log_is_told_by_its_worst_lane_and_a_refusal_says_which() {
        let mut lanes = lanes();
        lanes[1].log = LogState::Replaying;
        assert_eq!(merge_status(&cut(), &lanes).log, LogState::Replaying);
        lanes[2].log = LogState::Refused("too few".into());
        lanes[2].yields_to_force = true;
        let whole = merge_status(&cut(), &lanes);
        assert_eq!((whole.log, whole.yields_to_force), (LogState::Refused("lane 2: too few".into()), true));
        lanes[0].log = LogState::Refused("too few".into());
        lanes[1].log = LogState::Refused("torn".into());
        let whole = merge_status(&cut(), &lanes);
        assert_eq!(whole.log, LogState::Refused("lanes 0, 2: too few; lane 1: torn".into()));
        assert!(!whole.yields_to_force);
        lanes[1].log = lanes[0].log.clone();
        assert_eq!(merge_status(&cut(), &lanes).log, LogState::Refused("too few".into()));
    }
}
