//! The report about an array, of those about its lanes. Pure.

use super::report::{CheckReport, CheckedMember, LostPart};
use calpe_core::units::{LaneIndex, VolumeOffset};
use calpe_core::volume::LaneCut;

/// One report of those of all lanes, in order; what is to be concluded from it is left open.
///
/// # Panics
/// When there is none.
pub(super) fn merged(cut: LaneCut, mut lanes: Vec<CheckReport>) -> CheckReport {
    if lanes.len() > 1 {
        for (report, lane) in lanes.iter_mut().zip(0..) {
            place(cut, LaneIndex(lane), report);
        }
        name_lanes(&mut lanes);
    }
    let mut whole = lanes.into_iter().reduce(add).expect("an array has a lane");
    let CheckReport { lost, set_aside, kept_aside, unreadable, .. } = &mut whole;
    for parts in [lost, set_aside, kept_aside, unreadable] {
        join(parts);
    }
    whole
}

/// Makes the places in the report of a lane those of the whole volume.
fn place(cut: LaneCut, lane: LaneIndex, report: &mut CheckReport) {
    let CheckReport { lost, set_aside, kept_aside, unreadable, .. } = report;
    for parts in [lost, set_aside, kept_aside, unreadable] {
        let runs = |part: &LostPart| {
            let runs = cut.runs_of(lane, VolumeOffset(part.offset), part.bytes);
            runs.map(|(at, bytes)| LostPart { offset: at.0, bytes })
        };
        *parts = parts.iter().flat_map(runs).collect();
    }
}

/// Makes lines say which lane they are about. What is said of every lane is said once, of the whole.
fn name_lanes(lanes: &mut [CheckReport]) {
    let shared = |lines: &dyn Fn(&CheckReport) -> Vec<String>| -> Vec<String> {
        let (first, others) = lanes.split_first().expect("checked by the caller");
        let is_in_all = |line: &String| others.iter().all(|report| lines(report).contains(line));
        lines(first).into_iter().filter(is_in_all).collect()
    };
    let problems = shared(&|report| report.problems.clone());
    let notices = shared(&|report| report.notices.clone());
    let same_reason: Vec<bool> = (0..lanes[0].members.len())
        .map(|at| lanes.iter().all(|report| report.members[at].reason == lanes[0].members[at].reason))
        .collect();
    for (report, lane) in lanes.iter_mut().zip(0..) {
        let name = |line: &mut String| *line = format!("lane {lane}: {line}");
        for (lines, shared) in [(&mut report.problems, &problems), (&mut report.notices, &notices)] {
            lines.retain(|line| lane == 0 || !shared.contains(line));
            lines.iter_mut().filter(|line| !shared.contains(line)).for_each(name);
        }
        let members = report.members.iter_mut().zip(&same_reason).filter(|(_, same)| !**same);
        members.filter_map(|(member, _)| member.reason.as_mut()).for_each(name);
    }
}

fn add(mut whole: CheckReport, lane: CheckReport) -> CheckReport {
    whole.clean &= lane.clean;
    for (member, more) in whole.members.iter_mut().zip(lane.members) {
        let CheckedMember { path, verified, reason, read, cksum, superblock, .. } = more;
        member.path = member.path.take().or(path);
        member.verified &= verified;
        // The first is enough for what is the same in all lanes.
        member.reason = member.reason.take().or(reason);
        (member.read, member.cksum) = (member.read + read, member.cksum + cksum);
        member.superblock += superblock;
    }
    whole.errors = sum(whole.errors, lane.errors);
    whole.repairable = sum(whole.repairable, lane.repairable);
    whole.lost.extend(lane.lost);
    whole.set_aside.extend(lane.set_aside);
    whole.kept_aside.extend(lane.kept_aside);
    whole.unreadable.extend(lane.unreadable);
    whole.problems.extend(lane.problems);
    whole.notices.extend(lane.notices);
    whole
}

/// Errors of lanes: where one was not compared to its end, only errors count, not that there are none.
fn sum(one: Option<u64>, other: Option<u64>) -> Option<u64> {
    match (one, other) {
        (Some(one), Some(other)) => Some(one + other),
        (one, other) => one.or(other).filter(|&errors| errors > 0),
    }
}

/// Sorts parts, and joins those that touch.
fn join(parts: &mut Vec<LostPart>) {
    parts.sort_unstable_by_key(|part| part.offset);
    let mut joined: Vec<LostPart> = Vec::new();
    for part in parts.drain(..) {
        match joined.last_mut() {
            Some(last) if last.offset + last.bytes == part.offset => last.bytes += part.bytes,
            _ => joined.push(part),
        }
    }
    *parts = joined;
}

#[cfg(test)]
mod tests {
    use super::super::report::tests::report;
    use super::*;
    use calpe_core::format::Lanes;

    const STRIPE: u64 = 8192;

    #[test]
    fn parts_of_lanes_are_told_where_they_are_in_the_volume() {
        let cut = LaneCut::new(Lanes { count: 2, group: 1 }, STRIPE, 8 * STRIPE);
        let lost = |offset, bytes| CheckReport { lost: vec![LostPart { offset, bytes }], ..report() };
        // Stripes 0 and 1 of lane 0 are 0 and 2 of the volume; the first one of lane 1 lies between them.
        let whole = merged(cut, vec![lost(4096, STRIPE), lost(0, STRIPE)]);
        assert_eq!(whole.lost, [LostPart { offset: 4096, bytes: 2 * STRIPE }]);
    }

    #[test]
    fn an_array_is_good_only_if_every_lane_is() {
        let cut = LaneCut::new(Lanes { count: 2, group: 1 }, STRIPE, 8 * STRIPE);
        let good = || CheckReport { errors: Some(0), repairable: Some(0), ..report() };
        assert!(merged(cut, vec![good(), good()]).concluded().good);
        let mut bad: [CheckReport; 5] = std::array::from_fn(|_| good());
        bad[0].errors = Some(1);
        bad[1].errors = None;
        bad[2].problems.push("it".into());
        bad[3].members[1].cksum = 1;
        (bad[4].members[2].verified, bad[4].members[2].reason) = (false, Some("not given".into()));
        for bad in bad {
            for lanes in [vec![good(), bad.clone()], vec![bad, good()]] {
                let report = merged(cut, lanes).concluded();
                assert!(!report.good, "{report:?}");
                let reason = report.members[2].reason.as_deref();
                assert!(reason.is_none_or(|reason| reason.starts_with("lane ")), "{reason:?}");
            }
        }
    }

    #[test]
    fn what_is_said_of_every_lane_is_said_once() {
        let cut = LaneCut::new(Lanes { count: 2, group: 1 }, STRIPE, 8 * STRIPE);
        let mut lanes = [report(), report()];
        for (report, own) in lanes.iter_mut().zip(["one", "two"]) {
            report.notices = vec!["both".into(), own.into()];
            report.members[0].reason = Some("not given".into());
            report.members[1].reason = Some(own.into());
        }
        let whole = merged(cut, lanes.into());
        assert_eq!(whole.notices, ["both", "lane 0: one", "lane 1: two"]);
        assert_eq!(whole.members[0].reason.as_deref(), Some("not given"));
        assert_eq!(whole.members[1].reason.as_deref(), Some("lane 0: one"));
    }
}
