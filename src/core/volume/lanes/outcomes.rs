//! Administrators' requests to an array of several lanes: one request for each lane, and their outcomes as
//! one.
//!
//! A request is given to no lane before a dry run (`would`) was merged over all of them: so it is done by all
//! or by none, unless something happens in between. Lanes do not begin and end their passes at the same
//! moment, nor lose a member at the same moment: one in which nothing is left to do is passed over.

use crate::array::{AdminOutcome, AdminRefusal, AdminRequest, NewDevice};

/// The request that a lane gets of one to the whole array. `device`: the new device as that lane sees it,
/// with its own handle, superblock and size; for requests that bring one in.
///
/// # Panics
/// When such a request has no device.
#[must_use]
pub fn for_lane(request: &AdminRequest, device: Option<NewDevice>) -> AdminRequest {
    let device = || device.expect("the lane's view of the new device");
    match *request {
        AdminRequest::Fail { member } => AdminRequest::Fail { member },
        AdminRequest::Offline { member } => AdminRequest::Offline { member },
        AdminRequest::Online { member, .. } => AdminRequest::Online { member, device: device() },
        AdminRequest::Replace { member, .. } => AdminRequest::Replace { member, device: device() },
        AdminRequest::Pace { rebuild_min, rebuild_max } => AdminRequest::Pace { rebuild_min, rebuild_max },
        AdminRequest::CancelReplace { member, device } => AdminRequest::CancelReplace { member, device },
        AdminRequest::ScrubStart => AdminRequest::ScrubStart,
        AdminRequest::ScrubPause => AdminRequest::ScrubPause,
        AdminRequest::ScrubStop => AdminRequest::ScrubStop,
        AdminRequest::Repair => AdminRequest::Repair,
        AdminRequest::Clear { member } => AdminRequest::Clear { member },
        AdminRequest::Stop => AdminRequest::Stop,
    }
}

/// The outcome for the whole array, of those of its lanes in their order: the first refusal, if there is one,
/// except those of lanes in which nothing is to do, while there is something to do in others. For a dry run,
/// the lanes whose outcome is no refusal are to be given the request.
///
/// As a rule all lanes say the same. Where they do not, some add something that went less well, and
/// "stopped cleanly" is the shortest text of a stop: the longest text says most, and is told as that lane's.
///
/// # Errors
/// The first refusal.
///
/// # Panics
/// When there is no outcome.
pub fn merge_outcomes(
    of_lane: impl IntoIterator<Item = Result<AdminOutcome, AdminRefusal>>,
) -> Result<AdminOutcome, AdminRefusal> {
    let (mut done, mut left_out) = (Vec::new(), None);
    for (lane, outcome) in of_lane.into_iter().enumerate() {
        match outcome {
            Ok(outcome) => done.push((lane, outcome)),
            Err(refusal) if is_done_already(&refusal) => _ = left_out.get_or_insert(refusal),
            Err(refusal) => return Err(refusal),
        }
    }
    // The first of equals is the last of a list that goes backwards.
    match done.iter().rev().max_by_key(|(_, outcome)| outcome.0.len()) {
        Some((lane, told)) => {
            let is_same = done.iter().all(|(_, outcome)| outcome == told);
            Ok(if is_same { told.clone() } else { AdminOutcome(format!("lane {lane}: {}", told.0)) })
        }
        None => Err(left_out.expect("an outcome of each lane")),
    }
}

/// Whether a lane refuses a request because nothing is to do there, or not yet: lanes may have lost members
/// in another order, and each has to get back first what it lost last.
fn is_done_already(refusal: &AdminRefusal) -> bool {
    matches!(
        refusal,
        AdminRefusal::OutAlready { .. }
            | AdminRefusal::ScrubAlready { .. }
            | AdminRefusal::ScrubPausedAlready { .. }
            | AdminRefusal::NoScrub
            | AdminRefusal::RepairAlready
            | AdminRefusal::InAlready { .. }
            | AdminRefusal::OthersFirst { .. }
            | AdminRefusal::NotBeingReplaced { .. }
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::array::STOPPED_CLEANLY;
    use crate::format::{MemberSet, MemberState};
    use crate::units::MemberIndex;

    fn done(text: &str) -> Result<AdminOutcome, AdminRefusal> {
        Ok(AdminOutcome(text.into()))
    }

    #[test]
    fn one_refusal_refuses_the_request() {
        let refused = Err(AdminRefusal::StoppingAlready);
        assert_eq!(merge_outcomes([done("a"), refused.clone(), Err(AdminRefusal::Stopping)]), refused);
        assert_eq!(merge_outcomes([done("a"), done("a")]), done("a"));
    }

    #[test]
    fn lanes_in_which_nothing_is_to_do_do_not_refuse_for_the_others() {
        assert_eq!(merge_outcomes([Err(AdminRefusal::NoScrub), done("a")]), done("a"));
        let nothing = Err(AdminRefusal::NoScrub);
        assert_eq!(merge_outcomes([nothing.clone(), Err(AdminRefusal::RepairAlready)]), nothing);
        let refused = Err(AdminRefusal::NothingToScrub);
        assert_eq!(merge_outcomes([done("a"), Err(AdminRefusal::NoScrub), refused.clone()]), refused);
    }

    #[test]
    fn a_lane_gets_a_member_back_although_others_have_it_or_need_another_one_first() {
        let member = MemberIndex(1);
        let has_it = Err(AdminRefusal::InAlready { member, state: MemberState::Online });
        let later = Err(AdminRefusal::OthersFirst { array: "a".into(), member, first: MemberSet::default() });
        assert_eq!(merge_outcomes([later.clone(), done("a"), has_it.clone()]), done("a"));
        assert_eq!(merge_outcomes([later.clone(), has_it]), later);
    }

    #[test]
    fn a_replacement_is_cancelled_where_it_is_built_unless_a_lane_has_changed_over() {
        let member = MemberIndex(1);
        let without = Err(AdminRefusal::NotBeingReplaced { member });
        assert_eq!(merge_outcomes([without.clone(), done("a")]), done("a"));
        assert_eq!(merge_outcomes([without.clone(), without.clone()]), without);
        let changes_over = Err(AdminRefusal::ChangesOver { array: "a".into(), member });
        assert_eq!(merge_outcomes([without, done("a"), changes_over.clone()]), changes_over);
    }

    #[test]
    fn a_stop_is_clean_when_it_is_in_every_lane() {
        let unclean = "stopped, and not cleanly: its log is replayed at the next start";
        assert_eq!(merge_outcomes([done(STOPPED_CLEANLY), done(STOPPED_CLEANLY)]), done(STOPPED_CLEANLY));
        let told = done("lane 1: stopped, and not cleanly: its log is replayed at the next start");
        assert_eq!(merge_outcomes([done(STOPPED_CLEANLY), done(unclean), done(STOPPED_CLEANLY)]), told);
        assert_eq!(merge_outcomes([done(unclean), done(unclean)]), done(unclean));
    }
}
