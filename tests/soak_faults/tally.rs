//! What was done and seen, and the table that says so.

use std::collections::BTreeMap;
use std::fmt::Write;

/// Something that must never happen.
#[derive(Debug)]
pub(crate) enum Violation {
    /// Blocks that cannot be read though all faults are over.
    Lost { blocks: usize, text: String },
    /// Blocks that show what they cannot.
    Wrong { blocks: usize, text: String },
    /// The array stays FAILED.
    StaysFailed(String),
    /// Anything else: the daemon dies or hangs, a member stays away, a request is never answered.
    Other(String),
}

impl Violation {
    pub(crate) fn text(&self) -> &str {
        match self {
            Violation::Lost { text, .. } | Violation::Wrong { text, .. } => text,
            Violation::StaysFailed(text) | Violation::Other(text) => text,
        }
    }
}

/// Figures of one geometry.
#[derive(Debug, Default)]
pub(crate) struct Tally {
    pub arrays: u64,
    pub rounds: u64,
    pub waves: u64,
    pub kills: u64,
    pub power_cuts: u64,
    pub stops: u64,
    pub requests: u64,
    /// Requests that ended in an error while faults lasted.
    pub errors_during: u64,
    pub compared: u64,
    /// Blocks that could be read at a second attempt only, with all faults over.
    pub late: u64,
    pub lost: u64,
    pub wrong: u64,
    pub stays_failed: u64,
    pub others: u64,
    /// Members that were brought back by a command, and that came back by themselves.
    pub by_command: u64,
    pub by_itself: u64,
    /// Blocks that scrubs found wrong after rounds in which nothing was damaged behind the array's back.
    pub found_by_scrub: u64,
    pub struck: BTreeMap<String, u64>,
    /// What was violated, with the line that replays it.
    pub told: Vec<String>,
}

impl Tally {
    pub(crate) fn note(&mut self, violation: &Violation) {
        match violation {
            Violation::Lost { blocks, .. } => self.lost += *blocks as u64,
            Violation::Wrong { blocks, .. } => self.wrong += *blocks as u64,
            Violation::StaysFailed(_) => self.stays_failed += 1,
            Violation::Other(_) => self.others += 1,
        }
    }

    pub(crate) fn add_struck(&mut self, struck: BTreeMap<String, u64>) {
        for (kind, count) in struck {
            *self.struck.entry(kind).or_default() += count;
        }
    }
}

/// The closing table: a row for each figure, a column for each geometry.
pub(crate) fn table(tallies: &[(String, Tally)]) -> String {
    let mut out = String::new();
    let mut row = |name: &str, value: &dyn Fn(&Tally) -> u64| {
        let _ = write!(out, "{name:<42}");
        for (_, tally) in tallies {
            let _ = write!(out, "{:>12}", value(tally));
        }
        out.push('\n');
    };
    row("arrays", &|t| t.arrays);
    row("rounds", &|t| t.rounds);
    row("waves of faults", &|t| t.waves);
    row("kills", &|t| t.kills);
    row("kills with power cuts of all servers", &|t| t.power_cuts);
    row("stops", &|t| t.stops);
    let mut kinds: Vec<&String> = tallies.iter().flat_map(|(_, tally)| tally.struck.keys()).collect();
    kinds.sort();
    kinds.dedup();
    for kind in kinds {
        row(&format!("faults: {kind}"), &|t| t.struck.get(kind).copied().unwrap_or(0));
    }
    row("requests of clients", &|t| t.requests);
    row("errors while faults lasted", &|t| t.errors_during);
    row("members back by themselves", &|t| t.by_itself);
    row("members back by a command", &|t| t.by_command);
    row("found by scrubs, nothing having been damaged", &|t| t.found_by_scrub);
    row("blocks compared", &|t| t.compared);
    row("blocks late (EIO once, faults over)", &|t| t.late);
    row("blocks LOST (EIO, faults over)", &|t| t.lost);
    row("blocks WRONG", &|t| t.wrong);
    row("arrays that stayed FAILED", &|t| t.stays_failed);
    row("other violations", &|t| t.others);
    let mut head = format!("{:<42}", "");
    for (name, _) in tallies {
        let _ = write!(head, "{name:>12}");
    }
    format!("{head}\n{out}")
}
