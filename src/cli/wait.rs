//! Waits for passes over an array. [`Waiter`] decides from successive statuses whether an operation is still
//! running, succeeded or failed. [`Progress`] shows it, as a bar on a terminal and as lines elsewhere.
//! [`Waiter`] is pure: the caller asks the daemon and sleeps.

use super::text::{duration, retried, scan_line, scan_line_in};
use crate::control::{
    ArrayReport, ArrayState, LastScrub, LostReport, MemberReport, MemberState, ScanKind, ScanReport,
    ScanState,
};
use calpe_core::units::{Count, HumanSize, Printable};
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressState, ProgressStyle};
use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::io::{self, IsTerminal, Write};
use std::time::Duration;
use uuid::Uuid;

/// Time between two statuses: short enough for a smooth bar, and for catching a pass over a small array at
/// all.
pub(super) const POLL: Duration = Duration::from_millis(250);

/// After this many statuses in a row in which every pass rests without a stated reason, the passes count as
/// paused by an administrator.
const PAUSED_LOOKS: u32 = 8;

/// The end that is waited for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Goal {
    /// The end of all passes of these kinds that run.
    Passes {
        /// The kinds.
        kinds: Vec<ScanKind>,
        /// The kinds were named by the user: if none runs, the result of the last one is judged.
        are_named: bool,
        /// When the waiting began.
        since: ScrubMark,
    },
    /// The end of a scrub that was just started.
    Scrub {
        /// A moment before its start.
        since: ScrubMark,
    },
    /// The end of a repair that was just started.
    Repair,
    /// The moment at which this device is in service.
    Replacement {
        /// Its path as it was given to the daemon.
        new: String,
    },
}

impl Goal {
    /// Whether passes of this kind are waited for.
    fn wants(&self, kind: ScanKind) -> bool {
        match self {
            Goal::Passes { kinds, .. } => kinds.contains(&kind),
            Goal::Scrub { .. } => kind == ScanKind::Scrub,
            Goal::Repair => kind == ScanKind::Repair,
            Goal::Replacement { .. } => kind == ScanKind::Rebuild,
        }
    }
}

/// A moment before a scrub, to tell its result from that of an earlier one. Neither field suffices alone: two
/// scrubs of a small array may end within one second with the same result, and the daemon's clock may be a
/// little behind.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct ScrubMark {
    /// Seconds since 1970.
    pub unix: u64,
    /// The result of the last scrub at that time.
    pub last: Option<LastScrub>,
}

impl ScrubMark {
    /// The result of a scrub that ended after this moment.
    fn result_after(&self, array: &ArrayReport) -> Option<LastScrub> {
        array.last_scrub.filter(|scrub| Some(*scrub) != self.last || scrub.finished_unix >= self.unix)
    }
}

/// The verdict on one status.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum Look {
    /// The operation goes on; the pass to show, if one is under way.
    Running(Option<ScanReport>),
    /// The operation succeeded; what to say.
    Succeeded(String),
    /// The operation failed; what to say.
    Failed(String),
}

/// Follows an array until the goal is reached or has become impossible.
#[derive(Debug)]
pub(super) struct Waiter {
    goal: Goal,
    scrub_seen: bool,
    repair_seen: bool,
    /// The devices that were being built in the last status, by member.
    built: BTreeMap<u16, Built>,
    paused_looks: u32,
}

/// A device that is being built.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Built {
    name: String,
    /// None if the daemon does not know it.
    uuid: Option<Uuid>,
}

impl Built {
    /// The device that is being built for a member, if there is one.
    fn for_member(member: &MemberReport) -> Option<Built> {
        if let Some(replacement) = &member.replacement {
            return Some(Built { name: replacement.name.clone(), uuid: replacement.uuid });
        }
        let is_rebuilding = member.state == MemberState::Rebuilding;
        is_rebuilding.then(|| Built { name: member.name.clone(), uuid: Some(member.uuid) })
    }

    /// Whether the member is this device by now.
    fn is(&self, member: &MemberReport) -> bool {
        self.uuid.map_or(self.name == member.name, |uuid| uuid == member.uuid)
    }
}

impl Waiter {
    /// Begins to wait.
    #[must_use]
    pub(super) fn new(goal: Goal) -> Waiter {
        Waiter { goal, scrub_seen: false, repair_seen: false, built: BTreeMap::new(), paused_looks: 0 }
    }

    /// Judges the next status of the array.
    pub(super) fn look(&mut self, array: &ArrayReport) -> Look {
        if array.state == ArrayState::Waiting {
            return Look::Running(None);
        }
        if array.state == ArrayState::Failed {
            return Look::Failed(format!("array '{}' is FAILED: {}", array.name, array.status));
        }
        let look = match &self.goal {
            Goal::Replacement { new } => look_at_replacement(array, new),
            Goal::Scrub { since } => look_at_scrub(array, since),
            Goal::Repair => look_at_repair(array),
            Goal::Passes { kinds, are_named, since } => {
                let (kinds, are_named, since) = (kinds.clone(), *are_named, *since);
                self.look_at_passes(array, &kinds, are_named, &since)
            }
        };
        match look {
            Look::Running(shown) => self.unless_paused(array, shown),
            over => over,
        }
    }

    fn look_at_passes(
        &mut self,
        array: &ArrayReport,
        kinds: &[ScanKind],
        are_named: bool,
        since: &ScrubMark,
    ) -> Look {
        let wanted = |kind: ScanKind| kinds.contains(&kind);
        let running: Vec<_> = array.scan.iter().filter(|scan| wanted(scan.kind)).collect();
        self.scrub_seen |= running.iter().any(|scan| scan.kind == ScanKind::Scrub);
        self.repair_seen |= running.iter().any(|scan| scan.kind == ScanKind::Repair);
        let mut is_building = false;
        for member in array.members.iter().filter(|_| wanted(ScanKind::Rebuild)) {
            if let Some(built) = Built::for_member(member) {
                self.built.insert(member.index, built);
                is_building = true;
            }
        }
        if !running.is_empty() || is_building {
            let shown = running.iter().find(|scan| !scan.paused).or(running.first());
            return Look::Running(shown.map(|scan| (*scan).clone()));
        }
        self.result(array, kinds, are_named, since)
    }

    /// The verdict once none of the awaited passes runs any more.
    fn result(&self, array: &ArrayReport, kinds: &[ScanKind], are_named: bool, since: &ScrubMark) -> Look {
        let built = array.members.iter().filter_map(|member| Some((member, self.built.get(&member.index)?)));
        let (complete, ended): (Vec<_>, Vec<_>) =
            built.partition(|(member, built)| in_service(member) && built.is(member) && !member.is_split());
        let problems: Vec<_> = ended.iter().map(|(member, built)| ended_early(member, built)).collect();
        let complete = match complete.len() {
            0 => None,
            1 => Some("rebuild is complete: 1 member".to_owned()),
            many => Some(format!("rebuild is complete: {many} members")),
        };
        if !problems.is_empty() {
            return Look::Failed(problems.into_iter().chain(complete).collect::<Vec<_>>().join("; "));
        }
        let complete = complete.map(|text| Look::Succeeded(text + &without_data(array)));
        let scrub = self.scrub_seen.then(|| scrub_result(array, since));
        let repair = self.repair_seen.then(|| look_at_repair(array));
        let is_built = complete.is_some();
        let looks = [complete, scrub, repair].into_iter().flatten();
        match looks.reduce(both) {
            None => nothing_runs(array, kinds, are_named),
            Some(Look::Succeeded(text)) if !is_built && is_degraded(array, kinds) => {
                Look::Failed(format!("{text}; array '{}' is {}", array.name, what_it_is(array)))
            }
            Some(look) => look,
        }
    }

    /// Gives up on paused passes, which would be waited for without end.
    fn unless_paused(&mut self, array: &ArrayReport, shown: Option<ScanReport>) -> Look {
        // A pass that waits for room goes on by itself once there is room, and lanes do not wait for long;
        // the progress line says so.
        let goes_on = |state| matches!(state, ScanState::WaitsForRoom | ScanState::WaitsForLanes);
        let rests = |scan: &ScanReport| scan.paused && !goes_on(scan.state);
        let all_rest = !array.scan.is_empty() && array.scan.iter().all(rests);
        self.paused_looks = if all_rest { self.paused_looks + 1 } else { 0 };
        let mut wanted = array.scan.iter().filter(|scan| self.goal.wants(scan.kind)).peekable();
        let first = wanted.peek().copied();
        let is_building = self.goal.wants(ScanKind::Rebuild) && array.members.iter().any(is_rebuilding);
        let is_paused = !is_building && wanted.all(|scan| scan.state == ScanState::Paused);
        match first.or(array.scan.first()) {
            Some(scan) if (is_paused && first.is_some()) || self.paused_looks >= PAUSED_LOOKS => {
                let kind = scan.kind.word();
                let hint = match scan.kind {
                    ScanKind::Scrub => format!("; 'calpe scrub {}' goes on with it", array.name),
                    ScanKind::Rebuild | ScanKind::Repair => String::new(),
                };
                Look::Failed(format!("the {kind} is paused at {:.1} %{hint}", scan.percent))
            }
            _ => Look::Running(shown),
        }
    }
}

/// The verdict on two operations together.
fn both(first: Look, second: Look) -> Look {
    match (first, second) {
        (Look::Running(shown), _) | (_, Look::Running(shown)) => Look::Running(shown),
        (Look::Succeeded(first), Look::Succeeded(second)) => Look::Succeeded(format!("{first}; {second}")),
        (Look::Succeeded(first) | Look::Failed(first), Look::Succeeded(second) | Look::Failed(second)) => {
            Look::Failed(format!("{first}; {second}"))
        }
    }
}

/// The verdict if none of these passes was seen running. A pass that has just ended cannot be told from one
/// that ended long ago, so named kinds are judged by the result of their last pass. A wait for all passes
/// does not report an old scrub when a rebuild is over.
fn nothing_runs(array: &ArrayReport, kinds: &[ScanKind], are_named: bool) -> Look {
    let is_judged = |kind| are_named && kinds.contains(&kind);
    let what = match are_named {
        false => "nothing".to_owned(),
        true => {
            let words: Vec<&str> = kinds.iter().map(|kind| kind.word()).collect();
            format!("no {}", words.join(" or "))
        }
    };
    let text = format!("{what} runs on array '{}'", array.name);
    if is_degraded(array, kinds) {
        return Look::Failed(format!("{text}, and it is {}", what_it_is(array)));
    }
    let scrub = array.last_scrub.filter(|scrub| is_judged(ScanKind::Scrub) && scrub.errors > 0);
    if let Some(LastScrub { errors, repaired, .. }) = scrub {
        return Look::Failed(format!(
            "{text}, and the last scrub found {}, {} repaired; see 'calpe events'",
            Count(errors, "error"),
            Count(repaired, "block")
        ));
    }
    if is_judged(ScanKind::Scrub) && array.last_scrub.is_some() && !array.last_scrub_compared() {
        return Look::Failed(format!("{text}, and {}", compared_nothing(array)));
    }
    let unverified = if is_judged(ScanKind::Scrub) { unverified(array) } else { String::new() };
    match repair_left(array).filter(|_| is_judged(ScanKind::Repair)) {
        Some(left) => Look::Failed(format!("{text}; {left}")),
        None if !unverified.is_empty() => Look::Succeeded(format!("{text}{unverified}")),
        None => Look::Succeeded(text),
    }
}

/// Whether rebuilds are waited for and the array is still DEGRADED, or a member of it is on several devices.
fn is_degraded(array: &ArrayReport, kinds: &[ScanKind]) -> bool {
    kinds.contains(&ScanKind::Rebuild)
        && (array.state != ArrayState::Online || array.members.iter().any(MemberReport::is_split))
}

fn what_it_is(array: &ArrayReport) -> String {
    format!("{}: {} {}", array.state, array.status, array.action)
}

fn look_at_replacement(array: &ArrayReport, new: &str) -> Look {
    let rebuild = || {
        let of_kind = |kind| array.scan.iter().find(|scan| scan.kind == kind && !scan.paused).cloned();
        of_kind(ScanKind::Rebuild).or_else(|| array.scan.first().cloned())
    };
    for member in &array.members {
        if member.replacement.as_ref().is_some_and(|replacement| replacement.name == new) {
            return Look::Running(rebuild());
        }
        if member.name == new {
            return match member.state {
                MemberState::Online | MemberState::Degraded if member.is_split() => {
                    Look::Failed(only_in_part(member))
                }
                MemberState::Online | MemberState::Degraded => {
                    let (index, new) = (member.index, Printable(new));
                    Look::Succeeded(format!("member {index} is rebuilt on {new}{}", without_data(array)))
                }
                MemberState::Rebuilding => Look::Running(rebuild()),
                _ => Look::Failed(out_of_service(member)),
            };
        }
    }
    Look::Failed(format!("the rebuild onto {} was given up: see 'calpe events'", Printable(new)))
}

/// Says how much a complete rebuild could not build because no member has it.
fn without_data(array: &ArrayReport) -> String {
    let bytes: u64 =
        array.lost.iter().chain(&array.set_aside).chain(&array.unreadable).map(|part| part.bytes).sum();
    match bytes {
        0 => String::new(),
        bytes => format!(
            "; {} of the volume cannot be read: 'calpe status -v {}' lists where",
            HumanSize(bytes),
            array.name
        ),
    }
}

fn look_at_scrub(array: &ArrayReport, since: &ScrubMark) -> Look {
    match array.scan.iter().find(|scan| scan.kind == ScanKind::Scrub) {
        Some(scan) => Look::Running(Some(scan.clone())),
        None => scrub_result(array, since),
    }
}

fn look_at_repair(array: &ArrayReport) -> Look {
    if let Some(scan) = array.scan.iter().find(|scan| scan.kind == ScanKind::Repair) {
        return Look::Running(Some(scan.clone()));
    }
    match repair_left(array) {
        Some(left) => Look::Failed(format!("repair is complete: {left}")),
        None => {
            Look::Succeeded("repair is complete: everything that was known to be damaged can be read".into())
        }
    }
}

/// What is still damaged after a repair.
fn repair_left(array: &ArrayReport) -> Option<String> {
    let bytes = |parts: &[LostReport]| HumanSize(parts.iter().map(|part| part.bytes).sum());
    let lists = [&array.lost, &array.set_aside, &array.unreadable, &array.unconfirmed];
    if lists.iter().all(|list| list.is_empty()) && array.unreadable_pages == 0 {
        // Superblocks keep the result of the last scrub; this daemon may not know where the errors were.
        let scrub = array.last_scrub.filter(|scrub| scrub.errors > scrub.repaired)?;
        return Some(format!(
            "what was known to be damaged can be read, but the last scrub found {} that it could not repair: 'calpe scrub {} -w' \
             tells whether they are good by now",
            Count(scrub.errors - scrub.repaired, "block"),
            array.name
        ));
    }
    let pages = match array.unreadable_pages {
        0 => String::new(),
        many => format!(", as {many} metadata pages cannot be read, too"),
    };
    Some(format!(
        "{} are beyond repair, {} set aside, {} unreadable for now{pages}; 'calpe status -v {}' lists where",
        bytes(&array.lost),
        bytes(&array.set_aside),
        HumanSize(bytes(&array.unreadable).0 + bytes(&array.unconfirmed).0),
        array.name
    ))
}

fn scrub_result(array: &ArrayReport, since: &ScrubMark) -> Look {
    let unverified = unverified(array);
    match since.result_after(array) {
        Some(LastScrub { errors, .. }) if !array.last_scrub_compared() => {
            let standing = match errors {
                0 => String::new(),
                _ => format!("; {} of this scrub or an earlier one stand", Count(errors, "error")),
            };
            Look::Failed(format!("scrub is complete: {}{unverified}{standing}", compared_nothing(array)))
        }
        Some(LastScrub { errors: 0, .. }) => {
            Look::Succeeded(format!("scrub is complete: no errors{unverified}"))
        }
        Some(LastScrub { errors, repaired, .. }) => {
            // Errors in what this scrub did not check may have been counted by an earlier one.
            let whose = if unverified.is_empty() { "" } else { " of this scrub or an earlier one" };
            Look::Failed(format!(
                "scrub is complete: {}{whose}, {} repaired; see 'calpe events'{unverified}",
                Count(errors, "error"),
                Count(repaired, "block")
            ))
        }
        None => Look::Failed("the scrub was stopped before its end".into()),
    }
}

/// The members that the last scrub did not check everywhere. A scrub checks only members in service: those
/// that were not are named even if they are back by now.
fn unverified(array: &ArrayReport) -> String {
    let numbers: Vec<String> = array.last_scrub_unchecked.iter().map(u16::to_string).collect();
    let members = match &numbers[..] {
        [] => return String::new(),
        [one] => format!("member {one}"),
        several => format!("members {}", several.join(", ")),
    };
    format!("; not verified everywhere, as out of service or for a lack of resources: {members}")
}

fn compared_nothing(array: &ArrayReport) -> String {
    format!(
        "the last scrub verified nothing where fewer than {} members were in service: without checksums it has nothing to compare \
         then",
        array.data + 1
    )
}

/// The message for a device that was being built for a member and is not any more.
fn ended_early(member: &MemberReport, built: &Built) -> String {
    if !in_service(member) {
        return out_of_service(member);
    }
    if member.is_split() {
        return only_in_part(member);
    }
    let Built { name, .. } = built;
    let MemberReport { index, name: own, .. } = member;
    match &member.reason {
        Some(reason) => format!("member {index} ({own}) was not replaced by {name}: {reason}"),
        None => format!(
            "member {index} ({own}) was not replaced by {name}: the replacement was cancelled or given up, see 'calpe events'"
        ),
    }
}

fn out_of_service(member: &MemberReport) -> String {
    let reason = member.reason.as_ref().map(|reason| format!(": {reason}")).unwrap_or_default();
    format!("member {} ({}) is {}{reason}", member.index, Printable(&member.name), member.state)
}

/// The message for a member that lanes have on different devices.
fn only_in_part(member: &MemberReport) -> String {
    let reason = member.reason.as_deref().unwrap_or("its lanes are on different devices");
    format!("member {} is replaced in some lanes only: {reason}", member.index)
}

fn in_service(member: &MemberReport) -> bool {
    matches!(member.state, MemberState::Online | MemberState::Degraded)
}

fn is_rebuilding(member: &MemberReport) -> bool {
    member.state == MemberState::Rebuilding || member.replacement.is_some()
}

/// Shows the progress of a pass.
#[derive(Debug)]
pub(super) struct Progress {
    /// The bar, on a terminal.
    bar: Option<ProgressBar>,
    /// What the last line showed: the pass, the tenth of the way, whether something was being tried again,
    /// and the state.
    told: Option<(ScanKind, u64, bool, ScanState)>,
    /// The name of the pass, and the word for errors that redundancy could make good, if they differ from
    /// those of its kind.
    words: Option<[&'static str; 2]>,
}

impl Progress {
    /// A bar when standard output is a terminal, lines otherwise.
    #[must_use]
    pub(super) fn new() -> Progress {
        let bar = io::stdout().is_terminal().then(|| {
            // The bar stays hidden until there is something to show.
            let bar = ProgressBar::hidden();
            let template = "{prefix:>8} [{bar:40}] {percent_precise:>5} %  {msg}";
            let precise = |state: &ProgressState, out: &mut dyn std::fmt::Write| {
                let percent = ScanReport::percent_of(state.pos(), state.len().unwrap_or(0));
                let _ = write!(out, "{:.1}", percent.min(ScanReport::RUNNING_PERCENT_MAX));
            };
            let style = ProgressStyle::with_template(template).expect("the template is valid");
            bar.set_style(style.with_key("percent_precise", precise).progress_chars("=> "));
            bar
        });
        Progress { bar, told: None, words: None }
    }

    /// The same for a check, which repairs nothing.
    #[must_use]
    pub(super) fn of_check() -> Progress {
        Progress { words: Some(["check", "repairable"]), ..Progress::new() }
    }

    /// Shows a pass.
    ///
    /// # Errors
    /// When standard output fails.
    pub(super) fn show(&mut self, scan: &ScanReport) -> io::Result<()> {
        match &self.bar {
            Some(bar) => {
                bar.set_prefix(self.words.map_or(scan.kind.word(), |[pass, _]| pass));
                bar.set_length(scan.total);
                bar.set_position(scan.done);
                bar.set_message(remark(scan));
                if self.told.is_none() {
                    bar.set_draw_target(ProgressDrawTarget::stdout());
                }
                self.told = Some((scan.kind, 0, false, scan.state));
                Ok(())
            }
            None => match self.line(scan) {
                Some(line) => writeln!(io::stdout(), "{line}"),
                None => Ok(()),
            },
        }
    }

    /// Removes the bar.
    pub(super) fn clear(&self) {
        if let Some(bar) = &self.bar {
            bar.finish_and_clear();
        }
    }

    /// A line for every tenth of the way, when slots or pages are first tried again, and when the pass begins
    /// or stops waiting.
    fn line(&mut self, scan: &ScanReport) -> Option<String> {
        let tenth = scan.percent as u64 / 10;
        let shown = (scan.kind, tenth, scan.retried + scan.retried_pages > 0, scan.state);
        let told = self.told.replace(shown);
        let line = || match self.words {
            Some([pass, repaired]) => scan_line_in(scan, pass, repaired),
            None => scan_line(scan),
        };
        (told != Some(shown)).then(line)
    }
}

impl Default for Progress {
    fn default() -> Progress {
        Progress::new()
    }
}

/// The text behind the bar.
fn remark(scan: &ScanReport) -> String {
    if let Some(words) = scan.state.words() {
        return words.into();
    }
    let mut text = String::new();
    if let Some(rate) = scan.rate_bytes_per_s {
        let _ = write!(text, "{}/s", HumanSize(rate));
    }
    if let Some(eta) = scan.eta_s {
        let _ = write!(text, "  {} left", duration(eta));
    }
    if scan.errors > 0 {
        let _ = write!(text, "  {}", Count(scan.errors, "error"));
    }
    if let Some(retried) = retried(scan) {
        let _ = write!(text, "  {retried}");
    }
    text
}

#[cfg(test)]
mod tests {
    use super::super::text::tests::{array, scan};
    use super::*;
    use crate::control::{Condition, ReplacementReport};

    const MARK: ScrubMark =
        ScrubMark { unix: 100, last: Some(LastScrub { finished_unix: 99, errors: 0, repaired: 0 }) };

    fn passes(kinds: &[ScanKind]) -> Waiter {
        Waiter::new(Goal::Passes { kinds: kinds.to_vec(), are_named: true, since: MARK })
    }

    fn all() -> Waiter {
        passes(&[ScanKind::Rebuild, ScanKind::Scrub])
    }

    fn rebuilding() -> ArrayReport {
        let mut array = array("tank");
        array.state = ArrayState::Degraded;
        array.members[1].state = MemberState::Rebuilding;
        array.scan = vec![scan(ScanKind::Rebuild, 1, 10)];
        array
    }

    fn is_bad(look: &Look, part: &str) -> bool {
        matches!(look, Look::Failed(text) if text.contains(part))
    }

    #[test]
    fn a_check_does_not_say_that_it_repairs() {
        let scan = ScanReport { errors: 3, repaired: 2, ..scan(ScanKind::Scrub, 1, 10) };
        let line = Progress { bar: None, ..Progress::of_check() }.line(&scan).expect("the first line");
        assert!(line.starts_with("check ") && line.ends_with("3 errors, 2 repairable"), "{line}");
        let line = Progress { bar: None, ..Progress::new() }.line(&scan).expect("the first line");
        assert!(line.starts_with("scrub ") && line.ends_with("3 errors, 2 repaired"), "{line}");
    }

    #[test]
    fn a_rebuild_ends_well_only_when_its_member_is_in_service() {
        let mut waiter = all();
        assert!(matches!(waiter.look(&rebuilding()), Look::Running(Some(_))));
        assert!(matches!(waiter.look(&array("tank")), Look::Succeeded(text) if text.contains("1 member")));

        let mut waiter = all();
        waiter.look(&rebuilding());
        let mut lost = rebuilding();
        lost.scan.clear();
        lost.members[1].state = MemberState::Faulted;
        lost.members[1].reason = Some("write failed".into());
        let look = waiter.look(&lost);
        assert!(is_bad(&look, "member 1 (/srv/m1) is FAULTED: write failed"), "{look:?}");
    }

    #[test]
    fn a_replacement_that_was_given_up_or_cancelled_is_no_complete_rebuild() {
        let uuids = [None, Some(Uuid::from_u128(77))];
        for (uuid, goal) in
            uuids.into_iter().flat_map(|uuid| [(uuid, all()), (uuid, passes(&[ScanKind::Rebuild]))])
        {
            let mut replaced = array("tank");
            replaced.members[1].replacement = Some(ReplacementReport { name: "/srv/new".into(), uuid });
            replaced.scan = vec![scan(ScanKind::Rebuild, 1, 10)];
            let waiter = || {
                let mut waiter = Waiter::new(goal.goal.clone());
                assert!(matches!(waiter.look(&replaced), Look::Running(Some(_))));
                waiter
            };
            let mut over = array("tank");
            let cancelled = waiter().look(&over);
            assert!(is_bad(&cancelled, "member 1 (/srv/m1) was not replaced by /srv/new"), "{cancelled:?}");
            over.members[1].reason = Some("its replacement was given up: no device".into());
            let given_up = waiter().look(&over);
            assert!(is_bad(&given_up, "/srv/new: its replacement was given up: no device"), "{given_up:?}");
            let mut complete = array("tank");
            complete.members[1].name = "/srv/new".into();
            complete.members[1].uuid = Uuid::from_u128(77);
            assert_eq!(waiter().look(&complete), Look::Succeeded("rebuild is complete: 1 member".into()));
        }
    }

    #[test]
    fn a_replacement_that_some_lanes_alone_have_completed_is_no_success() {
        let mut split = array("tank");
        split.members[1].conditions = vec![Condition::Split];
        split.members[1].reason = Some("its lanes are on 2 devices".into());
        let told = "member 1 is replaced in some lanes only: its lanes are on 2 devices";
        let mut waiter = Waiter::new(Goal::Replacement { new: "/srv/m1".into() });
        assert!(is_bad(&waiter.look(&split), told));
        let mut waiter = all();
        waiter.look(&rebuilding());
        assert!(is_bad(&waiter.look(&split), told));
        assert!(is_bad(&all().look(&split), "nothing runs") || is_bad(&all().look(&split), "no rebuild"));
    }

    #[test]
    fn of_two_rebuilds_one_that_was_given_up_is_told() {
        let mut both = rebuilding();
        both.members[0].replacement = Some(ReplacementReport { name: "/srv/new".into(), uuid: None });
        let mut waiter = all();
        waiter.look(&both);
        let look = waiter.look(&array("tank"));
        assert!(is_bad(&look, "was not replaced by /srv/new"), "{look:?}");
        assert!(is_bad(&look, "rebuild is complete: 1 member"), "{look:?}");
    }

    #[test]
    fn between_two_passes_a_rebuilding_member_is_still_waited_for() {
        let mut waiter = all();
        let mut gap = rebuilding();
        gap.scan.clear();
        assert_eq!(waiter.look(&gap), Look::Running(None));
    }

    #[test]
    fn one_rebuild_ends_well_although_other_members_are_gone() {
        let mut waiter = all();
        let mut degraded = rebuilding();
        degraded.members[2].state = MemberState::Missing;
        waiter.look(&degraded);
        degraded.members[1].state = MemberState::Online;
        degraded.scan.clear();
        assert!(matches!(waiter.look(&degraded), Look::Succeeded(_)));
    }

    #[test]
    fn a_complete_rebuild_says_how_much_it_could_not_build() {
        let mut waiter = all();
        waiter.look(&rebuilding());
        let mut complete = array("tank");
        complete.lost.push(LostReport { offset: 4096, bytes: 8192 });
        let told = "8 KiB of the volume cannot be read: 'calpe status -v tank' lists where";
        assert_eq!(waiter.look(&complete), Look::Succeeded(format!("rebuild is complete: 1 member; {told}")));
        let mut waiter = Waiter::new(Goal::Replacement { new: "/srv/m1".into() });
        assert_eq!(
            waiter.look(&complete),
            Look::Succeeded(format!("member 1 is rebuilt on /srv/m1; {told}"))
        );
    }

    #[test]
    fn nothing_to_wait_for_is_well_only_when_nothing_is_missing() {
        assert!(matches!(all().look(&array("tank")), Look::Succeeded(_)));
        let mut degraded = array("tank");
        degraded.state = ArrayState::Degraded;
        degraded.members[0].state = MemberState::Missing;
        assert!(is_bad(&all().look(&degraded), "it is DEGRADED"));
        assert!(matches!(passes(&[ScanKind::Scrub]).look(&degraded), Look::Succeeded(_)));
    }

    #[test]
    fn a_scrub_is_judged_by_its_own_result() {
        let mut running = array("tank");
        running.scan = vec![scan(ScanKind::Scrub, 1, 10)];
        running.last_scrub = MARK.last;
        for goal in [Goal::Scrub { since: MARK }, all().goal] {
            let ended = |finished_unix, errors| {
                let mut waiter = Waiter::new(goal.clone());
                assert!(matches!(waiter.look(&running), Look::Running(_)));
                let mut over = array("tank");
                over.last_scrub = Some(LastScrub { finished_unix, errors, repaired: errors });
                waiter.look(&over)
            };
            assert!(matches!(ended(100, 0), Look::Succeeded(_)));
            assert!(is_bad(&ended(100, 3), "3 errors, 3 blocks repaired"));
            assert!(is_bad(&ended(99, 0), "stopped before its end"));
            assert!(matches!(ended(98, 0), Look::Succeeded(_)), "another result, by a clock that is behind");
        }
    }

    #[test]
    fn a_scrub_that_is_over_before_the_first_look_counts() {
        let mut over = array("tank");
        over.last_scrub = Some(LastScrub { finished_unix: 100, errors: 0, repaired: 0 });
        assert!(matches!(Waiter::new(Goal::Scrub { since: MARK }).look(&over), Look::Succeeded(_)));
    }

    #[test]
    fn a_scrub_says_which_part_of_the_array_it_has_not_seen() {
        let mut degraded = array("tank");
        degraded.state = ArrayState::Degraded;
        degraded.members[0].state = MemberState::Offline;
        degraded.last_scrub = Some(LastScrub { finished_unix: 100, errors: 0, repaired: 0 });
        // The member has left since.
        let look = Waiter::new(Goal::Scrub { since: MARK }).look(&degraded);
        assert!(matches!(&look, Look::Succeeded(text) if text.ends_with("no errors")), "{look:?}");
        degraded.last_scrub_unchecked = vec![0];
        let look = Waiter::new(Goal::Scrub { since: MARK }).look(&degraded);
        let told = "resources: member 0";
        assert!(matches!(&look, Look::Succeeded(text) if text.contains(told)), "{look:?}");
        // The member has come back since, but the scrub passed without it.
        degraded.members[0].state = MemberState::Online;
        let look = Waiter::new(Goal::Scrub { since: MARK }).look(&degraded);
        assert!(matches!(&look, Look::Succeeded(text) if text.contains(told)), "{look:?}");
        let look = passes(&[ScanKind::Scrub]).look(&degraded);
        assert!(matches!(&look, Look::Succeeded(text) if text.contains(told)), "{look:?}");
    }

    #[test]
    fn a_scrub_that_went_well_does_not_hide_that_the_array_is_degraded() {
        let mut degraded = array("tank");
        degraded.state = ArrayState::Degraded;
        degraded.members[0].state = MemberState::Offline;
        for (kinds, is_well) in
            [(vec![ScanKind::Scrub], true), (vec![ScanKind::Rebuild, ScanKind::Scrub], false)]
        {
            let mut waiter = passes(&kinds);
            degraded.scan = vec![scan(ScanKind::Scrub, 1, 10)];
            assert!(matches!(waiter.look(&degraded), Look::Running(_)));
            degraded.scan.clear();
            degraded.last_scrub = Some(LastScrub { finished_unix: 100, errors: 0, repaired: 0 });
            let look = waiter.look(&degraded);
            assert_eq!(matches!(look, Look::Succeeded(_)), is_well, "{look:?}");
            if let Look::Failed(text) = look {
                assert!(text.contains("no errors") && text.contains("is DEGRADED"), "{text}");
            }
            degraded.last_scrub = None;
        }
    }

    #[test]
    fn kinds_not_asked_for_are_not_waited_for() {
        let mut running = array("tank");
        running.scan = vec![scan(ScanKind::Scrub, 1, 10)];
        let told = |kinds| passes(kinds).look(&running);
        assert_eq!(told(&[ScanKind::Rebuild]), Look::Succeeded("no rebuild runs on array 'tank'".into()));
        let both = told(&[ScanKind::Rebuild, ScanKind::Repair]);
        assert_eq!(both, Look::Succeeded("no rebuild or repair runs on array 'tank'".into()));
    }

    #[test]
    fn a_pass_that_ended_before_the_waiting_began_is_judged_by_what_it_left() {
        let kinds = [ScanKind::Rebuild, ScanKind::Scrub, ScanKind::Repair];
        let every = || Waiter::new(Goal::Passes { kinds: kinds.to_vec(), are_named: false, since: MARK });
        assert_eq!(every().look(&array("tank")), Look::Succeeded("nothing runs on array 'tank'".into()));
        let mut scrubbed = array("tank");
        scrubbed.last_scrub = Some(LastScrub { finished_unix: 99, errors: 3, repaired: 2 });
        let look = passes(&[ScanKind::Scrub]).look(&scrubbed);
        assert!(is_bad(&look, "and the last scrub found 3 errors, 2 blocks repaired"), "{look:?}");
        for mut waiter in [every(), passes(&[ScanKind::Rebuild])] {
            assert!(
                matches!(waiter.look(&scrubbed), Look::Succeeded(_)),
                "whatever was found before a rebuild"
            );
        }
        assert!(is_bad(&passes(&kinds).look(&scrubbed), "the last scrub found 3 errors"), "all were named");
        let mut lost = array("tank");
        lost.lost.push(LostReport { offset: 4096, bytes: 8192 });
        let look = passes(&[ScanKind::Repair]).look(&lost);
        assert!(
            is_bad(&look, "no repair runs on array 'tank'; 8 KiB are beyond repair, 0 B set aside"),
            "{look:?}"
        );
        for mut waiter in [every(), passes(&[ScanKind::Scrub])] {
            assert!(matches!(waiter.look(&lost), Look::Succeeded(_)));
        }
    }

    #[test]
    fn a_repair_that_is_waited_for_is_judged_by_its_own_result() {
        for (bytes, well) in [(0, true), (8192, false)] {
            let mut array = array("tank");
            array.scan = vec![scan(ScanKind::Repair, 1, 10)];
            let mut waiter = passes(&[ScanKind::Repair]);
            assert!(matches!(waiter.look(&array), Look::Running(Some(_))));
            array.scan.clear();
            array.lost.extend((bytes > 0).then_some(LostReport { offset: 4096, bytes }));
            let look = waiter.look(&array);
            assert_eq!(matches!(look, Look::Succeeded(_)), well, "{look:?}");
            assert!(well || is_bad(&look, "8 KiB are beyond repair"), "{look:?}");
        }
    }

    #[test]
    fn a_failed_array_ends_the_waiting() {
        let mut failed = rebuilding();
        failed.state = ArrayState::Failed;
        assert!(is_bad(&all().look(&failed), "FAILED"));
    }

    #[test]
    fn a_paused_pass_is_not_waited_for_without_end() {
        let mut paused = array("tank");
        paused.scan = vec![scan(ScanKind::Scrub, 1, 10)];
        paused.scan[0].paused = true;
        let mut waiter = all();
        for _ in 1..PAUSED_LOOKS {
            assert!(matches!(waiter.look(&paused), Look::Running(Some(_))));
        }
        assert!(is_bad(&waiter.look(&paused), "paused at 10.0 %; 'calpe scrub tank'"));
        let mut waiting = rebuilding();
        waiting.scan.push(paused.scan[0].clone());
        let mut waiter = all();
        for _ in 0..3 * PAUSED_LOOKS {
            assert!(matches!(waiter.look(&waiting), Look::Running(Some(_))));
        }
    }

    #[test]
    fn a_paused_scrub_is_told_at_once_although_a_rebuild_runs_beside_it() {
        let mut array = rebuilding();
        let mut paused = scan(ScanKind::Scrub, 1, 10);
        (paused.paused, paused.state) = (true, ScanState::Paused);
        array.scan.push(paused);
        for goal in [passes(&[ScanKind::Scrub]), Waiter::new(Goal::Scrub { since: MARK })] {
            let look = Waiter::new(goal.goal).look(&array);
            assert!(is_bad(&look, "the scrub is paused at 10.0 %"), "{look:?}");
        }
        for goal in [all(), passes(&[ScanKind::Rebuild])] {
            let look = Waiter::new(goal.goal).look(&array);
            assert!(matches!(look, Look::Running(Some(_))), "{look:?}");
        }
        array.scan[1].state = ScanState::WaitsForRebuild;
        let mut waiter = passes(&[ScanKind::Scrub]);
        for _ in 0..3 * PAUSED_LOOKS {
            assert!(matches!(waiter.look(&array), Look::Running(Some(_))));
        }
        // All passes rest, and go on by themselves when there is room.
        for scan in &mut array.scan {
            (scan.paused, scan.state) = (true, ScanState::WaitsForRoom);
        }
        let mut waiter = all();
        for _ in 0..3 * PAUSED_LOOKS {
            let Look::Running(Some(scan)) = waiter.look(&array) else { panic!("it is waited for") };
            assert!(scan_line(&scan).ends_with("that is full: make room"));
        }
    }

    #[test]
    fn a_replacement_is_followed_by_its_path() {
        let waiter = || Waiter::new(Goal::Replacement { new: "/srv/new".into() });
        let mut beside = array("tank");
        beside.members[1].replacement = Some(ReplacementReport { name: "/srv/new".into(), uuid: None });
        beside.scan = vec![scan(ScanKind::Rebuild, 1, 10)];
        assert!(matches!(waiter().look(&beside), Look::Running(Some(_))));
        let mut in_place = rebuilding();
        in_place.members[1].name = "/srv/new".into();
        assert!(matches!(waiter().look(&in_place), Look::Running(Some(_))));
        in_place.members[1].state = MemberState::Online;
        assert!(matches!(waiter().look(&in_place), Look::Succeeded(_)));
        in_place.members[1].state = MemberState::Faulted;
        assert!(is_bad(&waiter().look(&in_place), "FAULTED"));
        assert!(is_bad(&waiter().look(&array("tank")), "given up"));
    }

    #[test]
    fn lines_come_once_for_every_tenth() {
        let mut progress = Progress { bar: None, told: None, words: None };
        let told: Vec<_> =
            (0..=100).filter_map(|done| progress.line(&scan(ScanKind::Rebuild, done, 100))).collect();
        assert_eq!(told.len(), 11);
        assert!(progress.line(&scan(ScanKind::Scrub, 100, 100)).is_some(), "another pass");
        let mut check = Progress { bar: None, ..Progress::of_check() };
        let told = check.line(&scan(ScanKind::Scrub, 30, 100)).unwrap();
        assert!(told.starts_with("check 30.0 %"), "{told}");
    }

    #[test]
    fn a_repair_that_was_seen_is_judged_also_beside_a_scrub() {
        let mut array = array("tank");
        array.scan = vec![scan(ScanKind::Repair, 1, 10), scan(ScanKind::Scrub, 1, 10)];
        let mut waiter = passes(&[ScanKind::Scrub, ScanKind::Repair]);
        assert!(matches!(waiter.look(&array), Look::Running(Some(_))));
        array.scan.clear();
        array.last_scrub = Some(LastScrub { finished_unix: u64::MAX, errors: 0, repaired: 0 });
        array.set_aside = vec![LostReport { offset: 4096, bytes: 8192 }];
        let look = waiter.look(&array);
        assert!(!matches!(look, Look::Succeeded(_)), "{look:?}");
    }

    #[test]
    fn a_scrub_that_compared_nothing_is_judged_as_that_also_when_it_is_over() {
        let mut array = array("tank");
        array.last_scrub = Some(LastScrub { finished_unix: 99, errors: 0, repaired: 0 });
        array.checksum = "none".into();
        array.last_scrub_unchecked = (0..array.parity).collect();
        assert!(!array.last_scrub_compared());
        let look = passes(&[ScanKind::Scrub]).look(&array);
        assert!(!matches!(look, Look::Succeeded(_)), "{look:?}");
    }
}
