//! Members that failed in some lanes of an array are taken out of the others, too; and lanes change over to a
//! new device together, or give it up together.
//!
//! Each lane judges its own operations, so a device that fails is noticed by the lanes that use it at that
//! moment. No lane counts on another one, but a device is one thing, which comes back or is replaced as a
//! whole: while a lane has it in service, nobody else can open it. Must not know why members fail.

use crate::daemon::arrays::changes::Change;
use crate::daemon::arrays::registry::Arrays;
use crate::daemon::reactor::ArrayId;
use calpe_core::volume::{AdminRequest, ArrayState, VolumeStatus, out_of_step, replacement_orders};

/// Whether there is nothing to do for [`keep_in_step`].
pub(crate) fn are_in_step(of_lane: &[VolumeStatus]) -> bool {
    out_of_step(of_lane).is_empty() && replacement_orders(of_lane).is_empty()
}

/// Takes members out of lanes of an array that still have them in service, and tells lanes what becomes of
/// replacements; to be called about once a second, as a change of the array. A lane that needs a member to
/// serve keeps it.
pub(crate) fn keep_in_step(arrays: &Arrays, array: ArrayId, _change: &Change) {
    // Asked here: lanes take back a member at different moments of one change.
    let Ok(facts) = arrays.facts(array) else { return };
    for (lane, order) in replacement_orders(&facts.of_lane) {
        arrays.reactor.order_replacement(array, lane, order);
    }
    // Members are brought back one by one then, and lanes that serve keep what they have.
    if facts.of_lane.iter().any(|lane| lane.state == ArrayState::Failed) {
        return;
    }
    for late in out_of_step(&facts.of_lane) {
        if let Some(why) = late.why {
            arrays.reactor.left_elsewhere(array, late.lane, late.device, why);
            continue;
        }
        let member = late.member;
        let request = AdminRequest::Offline { member };
        if let Err(error) = arrays.reactor.admin_lane(array, late.lane, request) {
            tracing::debug!(%error, lane = %late.lane, %member, "a lane keeps a member that others are without");
        }
    }
}
