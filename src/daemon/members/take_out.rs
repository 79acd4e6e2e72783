//! Takes members out of service, or keeps them out, and clears their counts of errors. A member is failed or
//! taken offline at once, whatever other requests run. Must not know how requests arrive.

use super::target::{self, Target, state_of};
use crate::control::{MemberRef, RequestError};
use crate::daemon::arrays::outcome::{Done, Outcome};
use crate::daemon::arrays::registry::Arrays;
use crate::member;
use calpe_core::format::MemberState;
use calpe_core::units::Printable;
use calpe_core::volume::{AdminRequest, ArrayState};

/// Sets error counts back to zero.
pub(crate) fn clear(arrays: &Arrays, array: &str, member: Option<&MemberRef>, dry_run: bool) -> Outcome {
    let (id, name) = arrays.find(array, |served| (served.id, served.names.name.clone()))?;
    let target = member.map(|member| target::find(arrays, array, member)).transpose()?;
    let member = target.map(|target| target.index);
    let message = arrays.ask(id, &name, AdminRequest::Clear { member }, dry_run)?;
    if dry_run {
        return Ok(Done::line(message));
    }
    arrays.served.with_names(id, |names| names.clear(member));
    arrays.remember_now(id);
    let unkept = arrays.memory.await_kept().map(|why| format!("a restart may bring the counts back: {why}"));
    Ok(Done { message, warnings: unkept.into_iter().collect(), ..Done::default() })
}

/// Takes a member out of service as failed, or offline, or only says what would happen.
pub(crate) fn take_out(
    arrays: &Arrays,
    array: &str,
    member: &MemberRef,
    failed: bool,
    dry_run: bool,
) -> Outcome {
    let target = target::find(arrays, array, member)?;
    let member = target.index;
    let returns = returns_by_itself(arrays, &target)?;
    let (state, is_away) = {
        // While the guard lives, a member that is away does not come back by itself.
        let _alone = arrays.returns.alone();
        let state = state_of(arrays, &target)?;
        let is_away = matches!(state, MemberState::Missing | MemberState::Faulted);
        if returns && is_away && !dry_run {
            arrays.returns.keep_out(target.superblock.array, member);
        }
        (state, is_away)
    };
    let request = if failed { AdminRequest::Fail { member } } else { AdminRequest::Offline { member } };
    let array = &target.name;
    let asked = arrays.ask(target.array, array, request, dry_run);
    // The daemon keeps the member away even where the array refuses.
    let is_kept = asked.is_err() && returns && is_away;
    let text = match asked {
        Ok(text) => text,
        Err(_) if is_kept && dry_run => {
            format!("would be done on array '{array}': member {member} is {}", state.as_str())
        }
        Err(_) if is_kept => {
            note_kept_away(arrays, &target)?;
            format!("array '{array}': member {member} is {}", state.as_str())
        }
        Err(error) => return Err(error.into()),
    };
    let stays = match is_kept || is_away && !dry_run {
        true => stays_away(arrays, &target)?,
        false => "",
    };
    let place = if dry_run { String::new() } else { format!(" ({})", Printable(&target.seat.name())) };
    Ok(Done::line(format!("{text}{stays}{place}")))
}

/// Records that the member is kept away: the array does not record it, and the status must say so.
fn note_kept_away(arrays: &Arrays, target: &Target) -> Result<(), RequestError> {
    let facts = arrays.facts(target.array)?;
    let reason = facts.status.members[usize::from(target.index.0)].reason.as_deref().unwrap_or("");
    let kept = "kept away by an administrator until 'calpe online' brings it back";
    let text = if reason.is_empty() { kept.to_owned() } else { format!("{kept}; {reason}") };
    arrays.served.with_names(target.array, |names| names.note_finding(target.seat.uuid, text));
    Ok(())
}

/// What the reply says of a member that is kept away. A FAILED array records nothing of it.
fn stays_away(arrays: &Arrays, target: &Target) -> Result<&'static str, RequestError> {
    let has_failed = arrays.facts(target.array)?.status.state == ArrayState::Failed;
    Ok(match has_failed {
        true => {
            ", and stays away until 'calpe online' brings it back; a start of the array forgets that, as nothing can be \
                 recorded while it has FAILED"
        }
        false => ", and stays away until 'calpe online' brings it back",
    })
}

/// Whether the member comes back by itself unless it is kept away.
fn returns_by_itself(arrays: &Arrays, target: &Target) -> Result<bool, RequestError> {
    let is_remote = target.seat.path.as_deref().is_some_and(member::is_remote);
    let was_missing = arrays.returns.was_missing(target.superblock.array, target.index);
    let status = arrays.facts(target.array)?.status;
    let member = &status.members[usize::from(target.index.0)];
    // As `Returns::note` will record it at the next observation.
    let is_missing = status.state == ArrayState::Failed && member.state == MemberState::Missing;
    Ok(is_remote || was_missing || is_missing || member.returns)
}
