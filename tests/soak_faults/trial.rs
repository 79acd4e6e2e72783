//! Rounds on one array after the other: faults under load, the daemon killed in the middle, and when all
//! faults are over, every block compared. Must not know which faults there are.

use crate::bed::{Bed, Build, Shape, VOLUME};
use crate::load::{BLOCK, Compared, Control, End, Load, until};
use crate::plan::{Bench, Crash, Event, Kind, Plan, Step, Wave, What, lasts};
use crate::tally::{Tally, Violation};
use calpe::control::{ArrayReport, ArrayState, MemberReport, MemberState, ScanKind};
use calpe_core::testing::Random;
use std::collections::BTreeMap;
use std::iter::Peekable;
use std::path::{Path, PathBuf};
use std::slice::Iter;
use std::sync::atomic::Ordering;
use std::thread::{self, sleep};
use std::time::{Duration, Instant};

/// Rounds until an array is given up for another one of the same geometry.
const ROUNDS_OF_ARRAY: u64 = 40;

/// Directories of violations that are kept.
const KEPT_MAX: usize = 6;

/// An array whose members are all there is served within this time: servers are looked for every five
/// seconds.
const SERVED_WITHIN: Duration = Duration::from_secs(60);
/// A member that lost its connection is back within this time: 7 s of quarantine, 15 s between two attempts,
/// 2 s until what is on it is believed to stay, and the work.
const BACK_BY_ITSELF_WITHIN: Duration = Duration::from_secs(45);
/// An administrator looks first, and then acts, ...
const COMMAND_AFTER: Duration = Duration::from_millis(500);
/// ... again after this time.
const COMMAND_EVERY: Duration = Duration::from_secs(3);
/// An array that is FAILED for so long is restarted, as docs tell people to.
const RESTART_AFTER: Duration = Duration::from_secs(60);
/// Everything is whole again within this time.
const WHOLE_WITHIN: Duration = Duration::from_secs(150);
/// It is believed to be when it was so often in a row.
const WHOLE_LOOKS: u32 = 2;
const LOOK: Duration = Duration::from_millis(50);
/// Turns that are left after this time are not had.
const ROLLING_MAX: Duration = Duration::from_secs(40);
const SCRUB_WITHIN: Duration = Duration::from_secs(120);

/// A daemon that starts knows that a member was given up, and not that its connection was lost: it does not
/// come back by itself.
const RESTART_FORGETS_LOSSES: bool = true;

/// What is tried.
#[derive(Clone)]
pub(crate) struct Settings {
    pub seed: u64,
    /// This round, over and over, in place of others.
    pub round: Option<u64>,
    pub kinds: Vec<&'static Kind>,
    pub binary: PathBuf,
    pub keep: PathBuf,
    pub until: Instant,
}

/// Rounds of one geometry until the time is over.
pub(crate) fn trial(shape: Shape, settings: &Settings) -> Tally {
    let mut tally = Tally::default();
    let mut seeds = Random::new(settings.seed ^ ((shape.data as u64) << 40 | (shape.parity as u64) << 32));
    let mut kept = 0;
    while Instant::now() < settings.until {
        // To do a round again takes the array that it was on.
        let array_seed = if settings.round.is_some() { settings.seed } else { seeds.next_u64() };
        let dir = tempfile::tempdir().expect("a directory");
        let build = Build::draw(shape, array_seed);
        let bed = Bed::new(dir.path(), &settings.binary, build, array_seed);
        let load = Load::new(&bed.socket(), VOLUME, build.stripe_bytes(), array_seed, bed.begun);
        tally.arrays += 1;
        let mut array = Array { field: Field { bed, tally: &mut tally }, load };
        let violation = array.rounds(array_seed, settings);
        let Array { field: Field { mut bed, .. }, load } = array;
        tally.requests += load.done.requests;
        if let Some((violation, plan)) = violation {
            tally.note(&violation);
            bed.note(&format!("VIOLATION: {}", violation.text()));
            let place = settings.keep.join(format!("{shape}-{array_seed:x}-{:x}", plan.seed));
            let told = format!(
                "{shape}: {}\n{plan}  replay: SEED={array_seed} ROUND={} scripts/soak-faults 5 {shape}",
                violation.text(),
                plan.seed,
            );
            if kept < KEPT_MAX {
                kept += 1;
                bed.keep(&place);
                tally.told.push(format!("{told}\n  kept: {}", place.display()));
            } else {
                tally.told.push(told);
            }
            println!("VIOLATION {}", tally.told.last().expect("just told"));
        }
        tally.add_struck(bed.struck());
    }
    tally
}

/// An array, and the clients that work on it.
struct Array<'t> {
    field: Field<'t>,
    load: Load,
}

/// An array and what is done to it.
struct Field<'t> {
    bed: Bed,
    tally: &'t mut Tally,
}

type Result<T> = std::result::Result<T, Violation>;

fn other<T>(text: impl Into<String>) -> Result<T> {
    Err(Violation::Other(text.into()))
}

impl Array<'_> {
    /// Rounds until something is violated, the time is over, or the array has had its share.
    fn rounds(&mut self, seed: u64, settings: &Settings) -> Option<(Violation, Plan)> {
        let mut seeds = Random::new(seed ^ 0x0072_6f75_6e64);
        self.field.bed.start();
        for _ in 0..ROUNDS_OF_ARRAY {
            if Instant::now() >= settings.until {
                break;
            }
            let drawn = seeds.next_u64();
            let bed = &mut self.field.bed;
            let Shape { data, parity } = bed.build.shape;
            let bench = Bench { width: data + parity, parity, remote: &bed.remote(), kinds: &settings.kinds };
            let plan = Plan::draw(settings.round.unwrap_or(drawn), &bench);
            bed.note(&plan.to_string());
            let errors = self.load.done.errors;
            let outcome = self.round(&plan);
            let tally = &mut *self.field.tally;
            tally.rounds += 1;
            tally.waves += plan.waves.len() as u64;
            tally.errors_during += self.load.done.errors - errors;
            if let Err(violation) = outcome {
                return Some((violation, plan));
            }
        }
        None
    }

    fn round(&mut self, plan: &Plan) -> Result<()> {
        let Array { field, load } = self;
        field.served()?;
        let control = Control::default();
        let shared = &control;
        let end = thread::scope(|scope| {
            let running = scope.spawn(move || {
                let end = load.run(shared, plan.pace);
                shared.over.store(true, Ordering::Release);
                end
            });
            let outcome = plan.waves.iter().try_for_each(|wave| field.wave(wave, &control));
            control.stop.store(true, Ordering::Release);
            let end = running.join().expect("the load judges, and does not panic");
            // What clients saw comes first: what followed may follow from it.
            match end {
                End::Wrong(..) => Ok(end),
                end => outcome.map(|()| end),
            }
        })?;
        match end {
            End::Stopped => {}
            End::Gone(error) => match self.field.bed.ended() {
                Some(status) => return other(format!("the daemon ended by itself: {status}")),
                None => return other(format!("the daemon ended the connection of a client: {error}")),
            },
            End::Stalled => return other("a request was not answered"),
            End::Wrong(wrong, history) => {
                let text = format!("under load: {wrong}{history}");
                return Err(Violation::Wrong { blocks: 1, text });
            }
        }
        if plan.scrub {
            self.field.scrub(false)?;
        }
        self.compare(plan.cuts_power(), "")?;
        self.compare_without(plan)
    }

    fn compare(&mut self, power_was_cut: bool, how: &str) -> Result<()> {
        let compared = match self.load.compare(power_was_cut) {
            Ok(compared) => compared,
            Err(error) => {
                let end = self.field.bed.ended();
                return other(format!("comparing{how}: {error}; the daemon: {end:?}"));
            }
        };
        let Compared { blocks, late, lost, wrong } = compared;
        self.field.tally.compared += blocks;
        self.field.tally.late += late;
        if !wrong.is_empty() {
            let told: Vec<String> = wrong.iter().take(4).map(ToString::to_string).collect();
            let history = self.load.history(wrong[0].sector);
            let text = format!("{} blocks are wrong{how}: {}{history}", wrong.len(), told.join("; "));
            return Err(Violation::Wrong { blocks: wrong.len(), text });
        }
        if !lost.is_empty() {
            let history = self.load.history(lost[0] * BLOCK / 512);
            let text = format!("{} blocks cannot be read{how}: {lost:?}{history}", lost.len());
            return Err(Violation::Lost { blocks: lost.len(), text });
        }
        self.load.turn_page();
        if late > 0 {
            return other(format!("{late} blocks could not be read at first{how}"));
        }
        Ok(())
    }

    /// What the members that were sick hold is good: others are taken out, and everything is compared again.
    fn compare_without(&mut self, plan: &Plan) -> Result<()> {
        for &member in &plan.without {
            if !self.field.bed.offline(member) {
                return other(format!("member {member} of an array that is whole cannot be taken out"));
            }
        }
        if plan.without.is_empty() {
            return Ok(());
        }
        self.compare(false, &format!(" without members {:?}", plan.without))?;
        let by_command: Vec<bool> =
            (0..self.field.bed.build.shape.width()).map(|member| plan.without.contains(&member)).collect();
        self.field.whole_again(&by_command, &Control::default())
    }
}

impl Field<'_> {
    /// Waits until the array is served.
    fn served(&mut self) -> Result<()> {
        let bed = &mut self.bed;
        if until(SERVED_WITHIN, || bed.report().is_some()) {
            return Ok(());
        }
        other("the array is not served")
    }

    /// Faults under load, with a crash in the middle, until everything is whole again.
    fn wave(&mut self, wave: &Wave, control: &Control) -> Result<()> {
        let width = self.bed.build.shape.width();
        let errors: Vec<u64> = (0..width).map(|member| self.bed.errors_of(member)).collect();
        if wave.scrub_at_start {
            self.bed.scrub();
        }
        if !wave.turns.is_empty() {
            return self.roll(wave, control);
        }
        timeline(&mut self.bed, &wave.before, Duration::from_millis(wave.before_ms), control)?;
        if let Some(crash) = wave.crash {
            control.last.store(matches!(crash, Crash::Power(_)), Ordering::Release);
            control.crashes.fetch_add(1, Ordering::AcqRel);
            self.crash(crash)?;
            for &member in &wave.rolled_back {
                self.bed.roll_back(member);
            }
            if let Some((one, other)) = wave.swap {
                self.bed.swap(one, other);
            }
            self.bed.start();
            timeline(&mut self.bed, &wave.after, Duration::from_millis(wave.after_ms), control)?;
        }
        self.bed.heal();
        let steps = || wave.before.iter().chain(&wave.after);
        let taken_out = |member: usize| {
            let mut own = steps().filter(|step| step.member == member);
            own.any(|step| matches!(step.event, Event::Fail | Event::Offline))
        };
        let by_command: Vec<bool> = (0..width)
            .map(|member| {
                taken_out(member)
                    || (RESTART_FORGETS_LOSSES && wave.crash.is_some())
                    || self.bed.errors_of(member) > errors[member]
                    || wave.rolled_back.contains(&member)
                    || !self.bed.remote().contains(&member)
            })
            .collect();
        self.whole_again(&by_command, control)?;
        if wave.is_silent() {
            self.scrub(true)?;
        }
        Ok(())
    }

    /// Members have their turns, as long as no more than m are sick or not whole yet.
    fn roll(&mut self, wave: &Wave, control: &Control) -> Result<()> {
        let Shape { data, parity } = self.bed.build.shape;
        let width = data + parity;
        let begun = Instant::now();
        let mut turns = wave.turns.iter().peekable();
        let mut crash = wave.crash.map(|crash| (begun + Duration::from_millis(2 * wave.before_ms), crash));
        let mut patients: BTreeMap<usize, Patient> = BTreeMap::new();
        let mut seen = None;
        while (turns.peek().is_some() || crash.is_some())
            && begun.elapsed() < ROLLING_MAX
            && !control.over_by_itself()
        {
            sleep(Duration::from_millis(5));
            self.bed.tick();
            if let Some(status) = self.bed.ended() {
                return other(format!("the daemon ended by itself: {status}"));
            }
            for (&member, patient) in &mut patients {
                let since = patient.began.elapsed();
                while let Some((_, event)) =
                    patient.events.next_if(|(at_ms, _)| since >= Duration::from_millis(*at_ms))
                {
                    self.bed.do_event(member, *event);
                    let over = Instant::now() + Duration::from_millis(lasts(event));
                    patient.over = patient.over.max(over);
                }
            }
            if let Some((_, how)) = crash.take_if(|(at, _)| *at <= Instant::now()) {
                control.last.store(matches!(how, Crash::Power(_)), Ordering::Release);
                control.crashes.fetch_add(1, Ordering::AcqRel);
                self.crash(how)?;
                self.bed.start();
                patients.values_mut().for_each(|patient| patient.by_command |= RESTART_FORGETS_LOSSES);
                seen = None;
            }
            if seen.is_some_and(|at: Instant| at.elapsed() < LOOK) {
                continue;
            }
            let Some(report) = self.bed.report() else { continue };
            seen = Some(Instant::now());
            self.bed.settle_replacements(&report);
            self.attend(&report, &mut patients);
            patients.retain(|member, patient| {
                let whole = is_member_whole(&report.members[*member])
                    && patient.is_over()
                    && self.bed.server_is_well(*member);
                !whole
            });
            if patients.len() >= parity {
                continue;
            }
            let Some(turn) = turns.next() else { continue };
            let local = matches!(turn.kind.what, What::Admin | What::Replace);
            let remote = self.bed.remote();
            let able: Vec<usize> = (0..width)
                .filter(|member| !patients.contains_key(member) && (local || remote.contains(member)))
                .collect();
            if let Some(&member) = able.get((turn.pick % able.len().max(1) as u64) as usize) {
                let patient = Patient::new(&turn.events, turn.kind.what, self.bed.errors_of(member));
                patients.insert(member, patient);
            }
        }
        self.bed.heal();
        let by_command: Vec<bool> = (0..width)
            .map(|member| {
                let sick = patients.get(&member);
                (RESTART_FORGETS_LOSSES && wave.crash.is_some())
                    || !self.bed.remote().contains(&member)
                    || sick.is_some_and(|p| p.by_command || self.bed.errors_of(member) > p.errors)
            })
            .collect();
        self.whole_again(&by_command, control)
    }

    /// Brings members back that do not come by themselves, and takes note of those nobody has made sick.
    fn attend(&mut self, report: &ArrayReport, patients: &mut BTreeMap<usize, Patient<'_>>) {
        for (member, seat) in report.members.iter().enumerate() {
            if is_member_whole(seat) {
                continue;
            }
            let errors = self.bed.errors_of(member);
            let patient = patients.entry(member).or_insert_with(|| {
                self.bed.note(&format!("member {member} is not whole: {seat:?}"));
                let mut patient = Patient::new(&[], What::Cuts, errors);
                patient.by_command = true;
                patient
            });
            let out =
                matches!(seat.state, MemberState::Faulted | MemberState::Offline | MemberState::Missing);
            let due = patient.commanded.is_none_or(|at| at.elapsed() > COMMAND_EVERY);
            let by_command = patient.by_command || errors > patient.errors;
            if out
                && by_command
                && due
                && seat.replacement.is_none()
                && patient.is_over()
                && patient.over.elapsed() > COMMAND_AFTER
            {
                patient.commanded = Some(Instant::now());
                self.bed.online(member);
                self.tally.by_command += 1;
            }
        }
    }

    fn crash(&mut self, crash: Crash) -> Result<()> {
        match crash {
            Crash::Stop => {
                self.tally.stops += 1;
                match self.bed.stop() {
                    Some(status) if status.success() => {}
                    Some(status) => {
                        return other(format!("the daemon was told to stop and ended with {status}"));
                    }
                    None => return other("the daemon does not stop within 10 s"),
                }
            }
            Crash::Kill => {
                self.bed.kill();
                self.tally.kills += 1;
            }
            Crash::Power(keep) => {
                self.bed.kill();
                self.bed.power_cut(keep);
                self.tally.kills += 1;
                self.tally.power_cuts += 1;
            }
        }
        Ok(())
    }

    /// Waits until every member is in service and nothing is left to be done, with the commands that the
    /// documents tell people to use. `by_command`: members that need not come back by themselves.
    fn whole_again(&mut self, by_command: &[bool], control: &Control) -> Result<()> {
        let begun = Instant::now();
        let mut commanded: BTreeMap<usize, Instant> = BTreeMap::new();
        let mut away = vec![false; by_command.len()];
        let (mut started, mut restarted) = (begun, false);
        let mut whole = 0;
        while whole < WHOLE_LOOKS && !control.over_by_itself() {
            sleep(LOOK);
            self.bed.tick();
            if let Some(status) = self.bed.ended() {
                return other(format!("the daemon ended by itself: {status}"));
            }
            let Some(report) = self.bed.report() else {
                if started.elapsed() > SERVED_WITHIN {
                    return other("the array is not served though all its members are there");
                }
                continue;
            };
            self.bed.settle_replacements(&report);
            if is_whole(&report) && (0..by_command.len()).all(|member| self.bed.server_is_well(member)) {
                whole += 1;
                continue;
            }
            whole = 0;
            for (member, seat) in report.members.iter().enumerate() {
                let out =
                    matches!(seat.state, MemberState::Faulted | MemberState::Offline | MemberState::Missing);
                away[member] |= out;
                if !out || seat.replacement.is_some() {
                    continue;
                }
                let due = commanded.get(&member).is_none_or(|at| at.elapsed() > COMMAND_EVERY);
                // One that is taken out for its errors is not trusted until a person has looked.
                let by_errors =
                    seat.reason.as_deref().is_some_and(|why| why.contains("its errors do not end"));
                if by_command[member] || by_errors {
                    if due && begun.elapsed() > COMMAND_AFTER {
                        self.bed.online(member);
                        commanded.insert(member, Instant::now());
                    }
                } else if begun.elapsed() > BACK_BY_ITSELF_WITHIN {
                    return other(format!("member {member} does not come back by itself: {seat:?}"));
                }
            }
            let failed = report.state == ArrayState::Failed;
            if failed && begun.elapsed() > RESTART_AFTER && !restarted {
                (started, restarted) = (Instant::now(), true);
                self.bed.note("the array stays FAILED: the daemon is restarted");
                control.crashes.fetch_add(1, Ordering::AcqRel);
                if self.bed.stop().is_none() {
                    return other("the daemon of a FAILED array does not stop within 10 s");
                }
                self.bed.start();
            }
            if begun.elapsed() > WHOLE_WITHIN {
                let text = format!("not whole again: {}", describe(&report));
                return if failed { Err(Violation::StaysFailed(text)) } else { other(text) };
            }
        }
        self.bed.note("whole");
        self.tally.by_command += commanded.len() as u64;
        let by_itself =
            away.iter().enumerate().filter(|(member, away)| **away && !commanded.contains_key(member));
        self.tally.by_itself += by_itself.count() as u64;
        Ok(())
    }

    /// Scrubs until nothing is found: the second time at the latest. `damaged`: there is something to find.
    fn scrub(&mut self, damaged: bool) -> Result<()> {
        let bed = &self.bed;
        if !until(SCRUB_WITHIN, || bed.report().is_some_and(|report| report.scan.is_empty())) {
            return other("a scrub does not end");
        }
        for attempt in 0..2 {
            let (_, since) = self.bed.events(0);
            if !self.bed.scrub() {
                return other("a scrub of an array that is whole is refused");
            }
            let bed = &self.bed;
            if !until(SCRUB_WITHIN, || {
                bed.events(since).0.iter().any(|text| text.starts_with("scrub finished"))
            }) {
                return other("a scrub does not end");
            }
            let errors = self.bed.report().and_then(|report| report.last_scrub).map_or(0, |last| last.errors);
            self.bed.note(&format!("scrub: {errors} errors"));
            if errors == 0 {
                return Ok(());
            }
            if attempt == 0 && !damaged {
                self.tally.found_by_scrub += errors;
            }
        }
        other("a scrub that follows a scrub finds errors")
    }
}

/// A member that has its turn, or is not whole yet.
struct Patient<'p> {
    began: Instant,
    events: Peekable<Iter<'p, (u64, Event)>>,
    /// When the last of its events so far has ended.
    over: Instant,
    /// Answers with errors before.
    errors: u64,
    /// It need not come back by itself.
    by_command: bool,
    commanded: Option<Instant>,
}

impl<'p> Patient<'p> {
    fn new(events: &'p [(u64, Event)], what: What, errors: u64) -> Patient<'p> {
        let now = Instant::now();
        Patient {
            began: now,
            over: now,
            events: events.iter().peekable(),
            errors,
            by_command: what == What::Admin,
            commanded: None,
        }
    }

    /// Nothing more is done to it.
    fn is_over(&mut self) -> bool {
        self.events.peek().is_none() && self.over <= Instant::now()
    }
}

/// Does events at their time, until the span is over or the daemon has ended.
fn timeline(bed: &mut Bed, steps: &[Step], span: Duration, control: &Control) -> Result<()> {
    let begun = Instant::now();
    let mut steps = steps.iter().peekable();
    while (begun.elapsed() < span || steps.peek().is_some()) && !control.over_by_itself() {
        bed.tick();
        while let Some(step) = steps.next_if(|step| begun.elapsed() >= Duration::from_millis(step.at_ms)) {
            bed.do_event(step.member, step.event);
        }
        if let Some(status) = bed.ended() {
            return other(format!("the daemon ended by itself: {status}"));
        }
        sleep(Duration::from_millis(5));
    }
    Ok(())
}

fn is_whole(report: &ArrayReport) -> bool {
    let scrubs = |kind: ScanKind| kind == ScanKind::Scrub;
    report.state == ArrayState::Online
        && report.members.iter().all(is_member_whole)
        && report.scan.iter().all(|scan| scrubs(scan.kind))
}

fn is_member_whole(seat: &MemberReport) -> bool {
    matches!(seat.state, MemberState::Online | MemberState::Degraded) && seat.replacement.is_none()
}

fn describe(report: &ArrayReport) -> String {
    let member = |seat: &MemberReport| {
        format!(
            "{} {}{}",
            seat.index,
            seat.state,
            seat.reason.as_ref().map_or(String::new(), |r| format!(" ({r})"))
        )
    };
    let members: Vec<String> = report.members.iter().map(member).collect();
    format!(
        "{}, log {:?}, {} parts lost, members {}",
        report.state,
        report.log,
        report.lost.len(),
        members.join(", ")
    )
}

/// Where violations are kept.
pub(crate) fn keep_dir() -> PathBuf {
    std::env::var_os("CALPE_SOAK_FAULTS_KEEP")
        .map_or_else(|| Path::new(env!("CARGO_TARGET_TMPDIR")).join("soak-faults"), PathBuf::from)
}
