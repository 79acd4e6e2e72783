//! Faults of requests: rules that match by operation, range, time and count, and what they do. Must not know
//! connections.

use std::collections::BTreeMap;
use std::ops::Range;
use std::time::{Duration, Instant};

/// An error in a reply.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Errno {
    Perm,
    Io,
    NoMem,
    Inval,
    NoSpc,
    Shutdown,
}

impl Errno {
    pub(crate) const fn code(self) -> u32 {
        match self {
            Errno::Perm => 1,
            Errno::Io => 5,
            Errno::NoMem => 12,
            Errno::Inval => 22,
            Errno::NoSpc => 28,
            Errno::Shutdown => 108,
        }
    }

    pub(crate) const fn name(self) -> &'static str {
        match self {
            Errno::Perm => "EPERM",
            Errno::Io => "EIO",
            Errno::NoMem => "ENOMEM",
            Errno::Inval => "EINVAL",
            Errno::NoSpc => "ENOSPC",
            Errno::Shutdown => "ESHUTDOWN",
        }
    }
}

/// The kind of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub(crate) enum Op {
    Read,
    Write,
    Flush,
    Trim,
    Zero,
}

/// A set of operations.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Ops(u8);

impl Ops {
    pub(crate) const ALL: Ops = Ops(0b11111);
    /// Everything that changes data, and flushes.
    pub(crate) const CHANGES: Ops = Ops(0b11110);

    pub(crate) const fn of(op: Op) -> Ops {
        Ops(1 << op as u8)
    }

    pub(crate) const fn or(self, other: Ops) -> Ops {
        Ops(self.0 | other.0)
    }

    pub(crate) const fn has(self, op: Op) -> bool {
        self.0 >> op as u8 & 1 == 1
    }
}

/// How much of a request is done although it does not succeed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Effect {
    Nothing,
    /// The first half of a write.
    Half,
    Whole,
    /// For a flush: the cache is lost, as in some kernels after a failed write-back.
    CacheLost,
}

/// How a connection ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Cut {
    /// Cleanly; pending requests are not answered.
    Close,
    /// With bytes left unread, which the peer sees as a reset.
    Reset,
    /// In the middle of the reply; the request is done.
    MidReply,
}

/// What happens to a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Act {
    Error {
        errno: Errno,
        effect: Effect,
    },
    /// Done after this time, and answered then.
    Delay(Duration),
    /// Done at once, answered after this time.
    LateReply(Duration),
    /// Never answered.
    Hang(Effect),
    /// All connections of the export end.
    Cut(Cut),
    /// Answered with success but not done: a device that lies.
    Lie,
}

impl Act {
    /// Name of the kind, for counts.
    pub(crate) const fn kind(self) -> &'static str {
        match self {
            Act::Error { errno, .. } => errno.name(),
            Act::Delay(_) => "delay",
            Act::LateReply(_) => "late reply",
            Act::Hang(_) => "hang",
            Act::Cut(_) => "cut",
            Act::Lie => "lie",
        }
    }
}

/// A fault: when it strikes, and what it does.
#[derive(Clone, Debug)]
pub(crate) struct Rule {
    pub ops: Ops,
    /// Only requests that touch one of these ranges match; flushes always do. Empty: all.
    pub ranges: Vec<Range<u64>>,
    pub act: Act,
    /// Strikes one in this many of the matching requests.
    pub one_in: u64,
    /// Strikes at most this many requests.
    pub count: u64,
    /// Strikes until then.
    pub until: Option<Instant>,
}

impl Rule {
    /// A rule for all requests of some operations, until it is cleared.
    pub(crate) fn new(ops: Ops, act: Act) -> Rule {
        Rule { ops, ranges: Vec::new(), act, one_in: 1, count: u64::MAX, until: None }
    }

    pub(crate) fn within(self, ranges: Vec<Range<u64>>) -> Rule {
        Rule { ranges, ..self }
    }

    pub(crate) fn times(self, count: u64) -> Rule {
        Rule { count, ..self }
    }

    pub(crate) fn one_in(self, one_in: u64) -> Rule {
        Rule { one_in, ..self }
    }

    pub(crate) fn lasting(self, span: Duration) -> Rule {
        Rule { until: Some(Instant::now() + span), ..self }
    }

    fn matches(&self, op: Op, range: &Range<u64>) -> bool {
        let touches = |other: &Range<u64>| range.start < other.end && other.start < range.end;
        self.ops.has(op) && (self.ranges.is_empty() || op == Op::Flush || self.ranges.iter().any(touches))
    }
}

/// The rules of one export, and how often each kind has struck.
#[derive(Default)]
pub(super) struct Faults {
    rules: Vec<Rule>,
    struck: BTreeMap<&'static str, u64>,
}

impl Faults {
    pub(super) fn add(&mut self, rule: Rule) {
        self.rules.push(rule);
    }

    pub(super) fn clear(&mut self) {
        self.rules.clear();
    }

    /// What happens to a request: the first rule that matches decides. `random` draws a number below its
    /// argument.
    pub(super) fn strike(
        &mut self,
        op: Op,
        range: &Range<u64>,
        now: Instant,
        mut random: impl FnMut(u64) -> u64,
    ) -> Option<Act> {
        self.rules.retain(|rule| rule.count > 0 && rule.until.is_none_or(|until| now < until));
        let rule = self.rules.iter_mut().find(|rule| rule.matches(op, range) && random(rule.one_in) == 0)?;
        rule.count -= 1;
        let act = rule.act;
        *self.struck.entry(act.kind()).or_default() += 1;
        Some(act)
    }

    /// Counts a fault that strikes no request.
    pub(super) fn note(&mut self, kind: &'static str) {
        *self.struck.entry(kind).or_default() += 1;
    }

    pub(super) fn struck(&self) -> &BTreeMap<&'static str, u64> {
        &self.struck
    }
}
