//! What goes wrong in one round: drawn from a seed, and written down before anything is done. A round is made
//! of waves. In most of them up to m members are sick, as often and as differently as it comes; when the
//! array says that all are whole again, others are next. In a rolling wave each member has its turn as soon
//! as there is room for it: when fewer than m are sick or not whole yet.

use crate::fault_server::{Act, Cut, Door, Effect, Errno, Keep, Op, Ops};
use calpe_core::testing::Random;
use std::fmt;
use std::time::Duration;

/// A kind of fault, and the rule of the crash-safety design ("Faults that pass") without which arrays do not
/// stand it.
#[derive(Debug)]
pub(crate) struct Kind {
    pub name: &'static str,
    /// How often it is drawn, relative to others.
    pub weight: u64,
    pub what: What,
}

/// What a kind is made of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum What {
    /// Reads fail for a moment.
    ReadErrors,
    /// Hundreds of reads fail.
    ManyReadErrors,
    /// Writes fail, with what they were to do done in part.
    WriteErrors,
    /// Flushes fail, and may lose the cache.
    FlushErrors,
    /// ENOSPC and ENOMEM, on whatever changes something.
    Shortages,
    /// EPERM on everything.
    Refusals,
    /// ESHUTDOWN.
    Shutdown,
    /// Answers come late, but in time.
    Delays,
    /// Answers never come, or too late.
    Hangs,
    /// Connections end in every way.
    Cuts,
    /// The server cannot be reached for a while.
    Door,
    /// The server loses its power, and its cache.
    ServerPower,
    /// An administrator takes the member out and brings it back.
    Admin,
    /// Another device takes its place.
    Replace,
    /// Bits flip; a scrub follows.
    Rot,
    /// The image of an earlier moment takes its place while nothing serves it.
    Rollback,
    /// Reads fail on all members at once, for some while others are out.
    AllReadErrors,
    /// Hundreds of reads fail on all members.
    AllManyReadErrors,
    /// All members are short of memory or space.
    AllShortages,
    /// All members lose their connections.
    AllCuts,
}

impl What {
    /// More members than the parity covers have it at once. Nothing may be lost all the same, for nothing is
    /// damaged; only errors while it lasts are nobody's fault.
    pub(crate) fn is_storm(self) -> bool {
        matches!(self, What::AllReadErrors | What::AllManyReadErrors | What::AllShortages | What::AllCuts)
    }
}

/// All kinds.
pub(crate) const KINDS: &[Kind] = &[
    Kind { name: "read-errors", weight: 6, what: What::ReadErrors },
    Kind { name: "many-read-errors", weight: 2, what: What::ManyReadErrors },
    Kind { name: "write-errors", weight: 3, what: What::WriteErrors },
    Kind { name: "flush-errors", weight: 2, what: What::FlushErrors },
    Kind { name: "shortages", weight: 3, what: What::Shortages },
    Kind { name: "refusals", weight: 1, what: What::Refusals },
    Kind { name: "shutdown", weight: 1, what: What::Shutdown },
    Kind { name: "delays", weight: 2, what: What::Delays },
    Kind { name: "hangs", weight: 2, what: What::Hangs },
    Kind { name: "cuts", weight: 4, what: What::Cuts },
    Kind { name: "door", weight: 2, what: What::Door },
    Kind { name: "server-power", weight: 4, what: What::ServerPower },
    Kind { name: "admin", weight: 2, what: What::Admin },
    Kind { name: "replace", weight: 1, what: What::Replace },
    Kind { name: "rot", weight: 2, what: What::Rot },
    Kind { name: "rollback", weight: 2, what: What::Rollback },
    Kind { name: "all-read-errors", weight: 3, what: What::AllReadErrors },
    Kind { name: "all-many-read-errors", weight: 2, what: What::AllManyReadErrors },
    Kind { name: "all-shortages", weight: 2, what: What::AllShortages },
    Kind { name: "all-cuts", weight: 2, what: What::AllCuts },
];

/// A daemon that starts after a kill opens its members, and reads on when they have been reachable for two
/// seconds; its replay is what follows.
const OPENED_MS: u64 = 1900;

/// A part of a member.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Part {
    All,
    Superblocks,
    Log,
    Pages,
    Data,
    /// So many blocks of the pages and of the data, drawn with this seed.
    Spots(u64, u64),
}

/// Something that happens to a member.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Event {
    /// Requests meet this fault; `count` at most, one in `one_in`, for `ms`.
    Fault {
        ops: Ops,
        part: Part,
        act: Act,
        one_in: u64,
        count: u64,
        ms: u64,
    },
    /// All its connections end.
    Cut,
    /// For so many milliseconds.
    Door(Door, u64),
    /// The server is away for so many milliseconds afterwards.
    Power(Keep, u64),
    Offline,
    Fail,
    Online,
    Replace,
    /// Some bits of a part flip.
    Rot(Part, u64),
    /// Its image is kept for later.
    Copy,
}

/// What happens to the daemon in the middle of a round.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Crash {
    Kill,
    /// The daemon is killed, and every server loses its power.
    Power(Keep),
    /// The daemon is told to stop.
    Stop,
}

/// An event, with its time since the phase began and its member.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Step {
    pub at_ms: u64,
    pub member: usize,
    pub event: Event,
}

/// Some members are sick for a while. When all of them are whole again, others may be next.
#[derive(Clone, Debug)]
pub(crate) struct Wave {
    /// Members that may be sick.
    pub sick: Vec<usize>,
    pub kinds: Vec<&'static Kind>,
    pub scrub_at_start: bool,
    pub before: Vec<Step>,
    pub before_ms: u64,
    pub crash: Option<Crash>,
    /// Members that are rolled back to their copy while the daemon is away.
    pub rolled_back: Vec<usize>,
    /// Two members whose devices change places while the daemon is away.
    pub swap: Option<(usize, usize)>,
    /// From the start of the next daemon on.
    pub after: Vec<Step>,
    pub after_ms: u64,
    /// Not empty: a rolling wave, which has nothing of the above but the crash.
    pub turns: Vec<Turn>,
}

/// The turn of a member in a rolling wave.
#[derive(Clone, Debug)]
pub(crate) struct Turn {
    /// Chooses among those who can have it.
    pub pick: u64,
    pub kind: &'static Kind,
    /// Events, and when, since the turn began.
    pub events: Vec<(u64, Event)>,
}

/// See the head of this file.
#[derive(Clone, Debug)]
pub(crate) struct Plan {
    pub seed: u64,
    pub waves: Vec<Wave>,
    /// What a client waits for after each answer.
    pub pace: Duration,
    /// At the end, when clients rest.
    pub scrub: bool,
    /// Everything is compared once more with these members out: the members of the last wave show what they
    /// hold.
    pub without: Vec<usize>,
}

/// What there is to draw from.
pub(crate) struct Bench<'a> {
    pub width: usize,
    pub parity: usize,
    /// Members that have a server.
    pub remote: &'a [usize],
    pub kinds: &'a [&'static Kind],
}

impl Plan {
    pub(crate) fn draw(seed: u64, bench: &Bench<'_>) -> Plan {
        let mut random = Random::new(seed);
        let mut waves: Vec<Wave> = Vec::new();
        for _ in 0..1 + random.below(4) {
            waves.push(Wave::draw(bench, &mut random));
            // What clients may see after a power cut is settled before they go on.
            if waves.last().is_some_and(Wave::cuts_power) {
                break;
            }
        }
        let last = waves.last().expect("at least one");
        let mut without = Vec::new();
        if last.rolled_back.is_empty() && !random.one_in(3) {
            without = (0..bench.width).filter(|at| !last.sick.contains(at)).collect();
            random.shuffle(&mut without);
            without.truncate(bench.parity);
        }
        let pace = Duration::from_micros([0, 300, 2000][random.index(3)]);
        Plan { seed, waves, pace, scrub: random.one_in(5), without }
    }

    /// Whether every server loses its power.
    pub(crate) fn cuts_power(&self) -> bool {
        self.waves.iter().any(Wave::cuts_power)
    }
}

impl Wave {
    fn cuts_power(&self) -> bool {
        matches!(self.crash, Some(Crash::Power(_)))
    }

    fn draw(bench: &Bench<'_>, random: &mut Random) -> Wave {
        let count = 1 + random.index(bench.parity);
        let sick = random.choose(count, bench.width);
        let mut kinds: Vec<&'static Kind> =
            (0..1 + random.below(3)).map(|_| draw_kind(bench, random)).collect();
        let storm = kinds[0].what.is_storm();
        if storm {
            kinds.truncate(1);
        } else {
            kinds.retain(|kind| !kind.what.is_storm());
        }
        let crash = match random.below(20) {
            0..4 => Some(Crash::Kill),
            4..6 => Some(Crash::Power(keep(random))),
            6 => Some(Crash::Stop),
            _ => None,
        };
        let mut wave = Wave {
            sick,
            kinds: kinds.clone(),
            scrub_at_start: random.one_in(8),
            before: Vec::new(),
            before_ms: 200 + random.below(2000),
            crash,
            rolled_back: Vec::new(),
            swap: None,
            after: Vec::new(),
            after_ms: OPENED_MS + 500 + random.below(2500),
            turns: Vec::new(),
        };
        if storm {
            wave.storm(bench, random);
            return wave;
        }
        if random.one_in(2) {
            wave.sick.clear();
            wave.kinds.clear();
            wave.roll(bench, random);
            return wave;
        }
        for kind in kinds {
            wave.add(kind.what, bench, random);
        }
        if wave.crash.is_some() && random.one_in(6) {
            let pair = random.choose(2, bench.remote.len());
            wave.swap = pair.get(1).map(|_| (bench.remote[pair[0]], bench.remote[pair[1]]));
        }
        wave.before.sort_by_key(|step| step.at_ms);
        wave.after.sort_by_key(|step| step.at_ms);
        wave
    }

    /// The same for all members, at about the same time.
    fn storm(&mut self, bench: &Bench<'_>, random: &mut Random) {
        let what = self.kinds[0].what;
        let out: Vec<usize> = if what == What::AllReadErrors && random.one_in(2) {
            let mut out = std::mem::take(&mut self.sick);
            out.truncate(1 + random.index(bench.parity));
            out
        } else {
            Vec::new()
        };
        self.sick = (0..bench.width).collect();
        for &member in &out {
            self.before.push(Step { at_ms: 0, member, event: Event::Offline });
        }
        for _ in 0..1 + random.below(4) {
            let later = self.crash.is_some() && random.one_in(2);
            let at_ms = match (later, random.below(3)) {
                (false, _) => random.below(self.before_ms),
                (true, 0) => 0,
                (true, _) => OPENED_MS + random.below(self.after_ms - OPENED_MS),
            };
            let event = event(what, random);
            let spread = [0, 0, 30, 300][random.index(4)];
            for &member in bench.remote.iter().filter(|member| !out.contains(member)) {
                let steps = if later { &mut self.after } else { &mut self.before };
                steps.push(Step { at_ms: at_ms + random.below(spread + 1), member, event });
            }
        }
        self.before.sort_by_key(|step| step.at_ms);
        self.after.sort_by_key(|step| step.at_ms);
    }

    fn roll(&mut self, bench: &Bench<'_>, random: &mut Random) {
        for _ in 0..4 + random.below(12) {
            let kind = draw_kind(bench, random);
            let pick = random.next_u64();
            let mut events = match kind.what {
                // Nothing tells when they are whole again.
                What::Rot | What::Rollback => continue,
                storm if storm.is_storm() => continue,
                What::Admin => {
                    vec![(0, event(kind.what, random)), (random.below(800), Event::Online)]
                }
                What::Replace | What::Hangs => vec![(0, event(kind.what, random))],
                _ => {
                    let strikes = 1 + random.below(4);
                    (0..strikes).map(|_| (random.below(600), event(kind.what, random))).collect()
                }
            };
            events.sort_by_key(|(at_ms, _)| *at_ms);
            self.turns.push(Turn { pick, kind, events });
        }
    }

    /// Whether only a scrub finds what was done.
    pub(crate) fn is_silent(&self) -> bool {
        self.kinds.iter().any(|kind| kind.what == What::Rot)
    }

    fn add(&mut self, what: What, bench: &Bench<'_>, random: &mut Random) {
        let local = matches!(what, What::Admin | What::Replace | What::Rot | What::Rollback);
        let able: Vec<usize> =
            self.sick.iter().copied().filter(|at| local || bench.remote.contains(at)).collect();
        if able.is_empty() {
            return;
        }
        if what == What::Rollback {
            let member = able[random.index(able.len())];
            let at_ms = random.below(self.before_ms);
            self.before.push(Step { at_ms, member, event: Event::Copy });
            self.rolled_back.push(member);
            self.crash.get_or_insert(if random.one_in(2) { Crash::Stop } else { Crash::Kill });
            return;
        }
        let strikes = match what {
            What::Admin | What::Replace | What::Hangs | What::ManyReadErrors => 1,
            What::Door | What::ServerPower | What::Rot => 1 + random.below(3),
            _ => 1 + random.below(10),
        };
        for _ in 0..strikes {
            // Half of what happens around a crash happens to the daemon that starts.
            let later = self.crash.is_some() && random.one_in(2) && what != What::Replace;
            let at_ms = match (later, random.below(3)) {
                (false, _) => random.below(self.before_ms),
                (true, 0) => 0,
                (true, _) => OPENED_MS + random.below(self.after_ms - OPENED_MS),
            };
            // One, or all at the same moment.
            let event = event(what, random);
            let members = if random.one_in(3) { able.clone() } else { vec![able[random.index(able.len())]] };
            let steps = if later { &mut self.after } else { &mut self.before };
            for member in members {
                steps.push(Step { at_ms, member, event });
                if what == What::Admin {
                    steps.push(Step { at_ms: at_ms + random.below(800), member, event: Event::Online });
                }
            }
        }
    }
}

fn draw_kind(bench: &Bench<'_>, random: &mut Random) -> &'static Kind {
    let mut left = random.below(bench.kinds.iter().map(|kind| kind.weight).sum());
    for kind in bench.kinds {
        if left < kind.weight {
            return kind;
        }
        left -= kind.weight;
    }
    unreachable!("less was drawn than all weights")
}

/// How long an event goes on.
pub(crate) fn lasts(event: &Event) -> u64 {
    match event {
        Event::Fault { ms, .. } | Event::Door(_, ms) | Event::Power(_, ms) => *ms,
        _ => 0,
    }
}

fn event(what: What, random: &mut Random) -> Event {
    let ms = 20 + random.below(580);
    let part = part(random);
    let one_in = [1, 1, 1, 3, 10][random.index(5)];
    let fault = |ops, part, act, one_in, count| Event::Fault { ops, part, act, one_in, count, ms };
    let error = |errno, effect| Act::Error { errno, effect };
    let read = Ops::of(Op::Read);
    let pick = |random: &mut Random, all: &[Errno]| all[random.index(all.len())];
    match what {
        What::ReadErrors | What::AllReadErrors => {
            let errno = pick(random, &[Errno::Io, Errno::Io, Errno::NoMem, Errno::NoSpc, Errno::Perm]);
            let count = if random.one_in(3) { 1 + random.below(8) } else { u64::MAX };
            fault(read, part, error(errno, Effect::Nothing), one_in, count)
        }
        What::ManyReadErrors | What::AllManyReadErrors => {
            let part = if random.one_in(2) { Part::Spots(400, random.next_u64()) } else { Part::Data };
            let (count, act) = (250 + random.below(400), error(Errno::Io, Effect::Nothing));
            Event::Fault { ops: read, part, act, one_in: 1, count, ms: 3000 }
        }
        What::WriteErrors => {
            let effect = [Effect::Nothing, Effect::Half, Effect::Whole][random.index(3)];
            fault(Ops::of(Op::Write), part, error(Errno::Io, effect), one_in, u64::MAX)
        }
        What::FlushErrors => {
            let effect = if random.one_in(2) { Effect::CacheLost } else { Effect::Nothing };
            fault(Ops::of(Op::Flush), Part::All, error(Errno::Io, effect), 1, 1 + random.below(3))
        }
        What::Shortages | What::AllShortages => {
            let ops = match random.below(4) {
                0 => Ops::ALL,
                1 => Ops::of(Op::Flush),
                2 => Ops::of(Op::Write),
                _ => Ops::CHANGES,
            };
            let errno = pick(random, &[Errno::NoMem, Errno::NoSpc]);
            fault(ops, part, error(errno, Effect::Nothing), one_in, u64::MAX)
        }
        What::Refusals => fault(Ops::ALL, part, error(Errno::Perm, Effect::Nothing), one_in, u64::MAX),
        What::Shutdown => {
            fault(Ops::ALL, Part::All, error(Errno::Shutdown, Effect::Nothing), one_in, 1 + random.below(4))
        }
        What::Delays => {
            let time = Duration::from_millis(1 + random.below(900));
            let act = if random.one_in(2) { Act::Delay(time) } else { Act::LateReply(time) };
            fault(Ops::ALL, part, act, one_in, u64::MAX)
        }
        What::Hangs => {
            let ops = [Ops::ALL, Ops::of(Op::Write), Ops::of(Op::Flush), read][random.index(4)];
            let late = Duration::from_millis(1800 + random.below(4000));
            let act = match random.below(4) {
                0 => Act::Delay(late),
                1 => Act::LateReply(late),
                2 => Act::Hang(Effect::Whole),
                _ => Act::Hang(Effect::Nothing),
            };
            fault(ops, part, act, one_in, u64::MAX)
        }
        What::Cuts | What::AllCuts => {
            let cut = [Cut::Close, Cut::Reset, Cut::MidReply][random.index(3)];
            match random.below(4) {
                0 => Event::Cut,
                1 => fault(Ops::of(Op::Flush), Part::All, Act::Cut(cut), 1, 1),
                2 => fault(Ops::of(Op::Write), part, Act::Cut(cut), 1 + random.below(40), 1),
                _ => fault(Ops::ALL, part, Act::Cut(cut), 1 + random.below(40), 1 + random.below(3)),
            }
        }
        What::Door => {
            let door = [Door::Shut, Door::Dropping, Door::Silent][random.index(3)];
            Event::Door(door, 100 + random.below(3000))
        }
        What::ServerPower => {
            let away = if random.one_in(2) { 0 } else { random.below(2500) };
            Event::Power(keep(random), away)
        }
        What::Rot => {
            let part = [Part::Data, Part::Data, Part::Pages][random.index(3)];
            Event::Rot(part, 1 + random.below(60))
        }
        What::Admin => [Event::Fail, Event::Offline][random.index(2)],
        What::Replace => Event::Replace,
        What::Rollback => Event::Copy,
    }
}

fn part(random: &mut Random) -> Part {
    match random.below(10) {
        0..4 => Part::All,
        4 => Part::Superblocks,
        5 => Part::Log,
        6 | 7 => Part::Pages,
        8 => Part::Spots(40, random.next_u64()),
        _ => Part::Data,
    }
}

fn keep(random: &mut Random) -> Keep {
    [Keep::Nothing, Keep::Blocks, Keep::Sectors, Keep::Everything][random.index(4)]
}

impl fmt::Display for Plan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let scrub = if self.scrub { ", a scrub" } else { "" };
        writeln!(f, "round {:#x}: {} waves, pace {:?}{scrub}", self.seed, self.waves.len(), self.pace)?;
        for (at, wave) in self.waves.iter().enumerate() {
            write!(f, "  wave {at}: {wave}")?;
        }
        if !self.without.is_empty() {
            writeln!(f, "  compared without {:?}", self.without)?;
        }
        Ok(())
    }
}

impl fmt::Display for Wave {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if !self.turns.is_empty() {
            writeln!(f, "rolling, {} turns, crash {:?}", self.turns.len(), self.crash)?;
            return self.turns.iter().try_for_each(|turn| {
                writeln!(f, "    {} {:x}: {:?}", turn.kind.name, turn.pick, turn.events)
            });
        }
        let kinds: Vec<&str> = self.kinds.iter().map(|kind| kind.name).collect();
        write!(f, "members {:?} may be sick: {}; crash {:?}", self.sick, kinds.join(", "), self.crash)?;
        if self.scrub_at_start {
            write!(f, ", scrub")?;
        }
        if !self.rolled_back.is_empty() {
            write!(f, ", {:?} rolled back", self.rolled_back)?;
        }
        if let Some((one, other)) = self.swap {
            write!(f, ", {one} and {other} change places")?;
        }
        writeln!(f)?;
        for (word, span, steps) in
            [("before", self.before_ms, &self.before), ("after", self.after_ms, &self.after)]
        {
            for step in steps {
                writeln!(
                    f,
                    "    {word} +{} of {span} ms, member {}: {:?}",
                    step.at_ms, step.member, step.event
                )?;
            }
        }
        Ok(())
    }
}
