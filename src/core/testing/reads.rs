//! Reads the whole volume while an array recovers, and waits for the array's own activities.

use super::SimArray;
use crate::volume::{ClientReply, LogState};

/// Prefix of errors that say that the array does not start or does not serve, as it may with too few members.
pub(super) const REFUSED: &str = "the start is refused";
/// A recovery that takes more operations than this counts as hung.
pub(super) const STEPS_MAX: usize = 200_000;
/// A recovery that waits for time more often than this, with nothing in flight, counts as hung.
pub(super) const IDLE_MAX: usize = 600;

/// Reads of the whole volume after a start.
pub(super) struct Reads {
    /// Requests, each with its first block.
    pub pending: Vec<(u64, usize)>,
    pub idle: usize,
}

impl Reads {
    pub(super) fn are_over(&self) -> bool {
        self.pending.is_empty()
    }

    /// Passes the bytes of finished reads to the callback.
    pub(super) fn poll(
        &mut self,
        sim: &mut SimArray,
        mut take: impl FnMut(usize, &[u8]) -> Result<(), String>,
    ) -> Result<(), String> {
        let mut at = 0;
        while at < self.pending.len() {
            let (id, first) = self.pending[at];
            match sim.poll(id) {
                None => at += 1,
                Some(Ok(ClientReply::Data(bytes))) => {
                    take(first, &bytes)?;
                    self.pending.swap_remove(at);
                }
                Some(other) => {
                    let status = sim.status();
                    if let LogState::Refused(reason) = status.log {
                        return Err(format!("{REFUSED}: {reason}"));
                    }
                    let said: Vec<&str> = sim.notices.iter().map(|notice| notice.text.as_str()).collect();
                    return Err(format!(
                        "a read of block {first} after the crash: {other:?} with {status:?}, which said {said:?}"
                    ));
                }
            }
        }
        Ok(())
    }

    /// Executes one operation, or lets time pass.
    pub(super) fn step(&mut self, sim: &mut SimArray) -> Result<(), String> {
        if !sim.step() {
            sim.sleep(100);
            self.idle += 1;
            if self.idle > IDLE_MAX {
                return Err(format!("the recovery hangs: {:?}", sim.status()));
            }
        }
        Ok(())
    }
}

/// Executes operations, and lets time pass, until `done`.
pub(super) fn run_until(
    sim: &mut SimArray,
    what: &str,
    done: impl Fn(&SimArray) -> bool,
) -> Result<(), String> {
    for _ in 0..IDLE_MAX {
        for step in 0.. {
            if !sim.step() {
                break;
            }
            if step > STEPS_MAX {
                return Err(format!("{what} does not end: {:?}", sim.status()));
            }
        }
        if done(sim) {
            return Ok(());
        }
        sim.sleep(100);
    }
    Err(format!("{what} hangs: {:?}", sim.status()))
}
