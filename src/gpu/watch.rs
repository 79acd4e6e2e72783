//! Watches for batches that do not end: a device with a batch that takes too long is given up, even
//! if the thread that manages it is stuck in a call of the driver. Sleeps while nothing is under
//! way. Must not know devices themselves.

use std::sync::Arc;
use std::time::Instant;

use super::metrics::GpuEventKind;
use super::shared::Shared;

/// Runs until the runtime is over.
pub(super) fn run(shared: &Arc<Shared>) {
    loop {
        shared.alarm.clear();
        let deadline = look(shared, Instant::now());
        if !shared.alarm.sleep(deadline, || shared.is_over()) {
            return;
        }
    }
}

/// Gives up devices that hang, and returns when the next one would.
fn look(shared: &Shared, now: Instant) -> Option<Instant> {
    let hang_after = shared.settings.config.hang_after;
    let mut next: Option<Instant> = None;
    for (number, lane) in shared.lanes.iter().enumerate() {
        let state = lane.lock();
        let (oldest, generation) = (state.oldest(), state.generation());
        drop(state);
        let Some(started) = oldest else { continue };
        let deadline = started + hang_after;
        if deadline <= now {
            let text = format!("no answer to a batch in {hang_after:?}");
            shared.give_up(number, generation, GpuEventKind::Hung, &text);
        } else {
            next = Some(next.map_or(deadline, |next| next.min(deadline)));
        }
    }
    next
}
