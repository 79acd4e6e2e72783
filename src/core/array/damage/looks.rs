//! When the array looks again at blocks that could not be had: at all in turn, now and then; soon at those
//! that an earlier run has listed, and at those that became readable or unreadable because a member has left
//! or come back.
//!
//! A member that was built joins after everything listed was looked at with it. So when an event or `calpe
//! wait` reports that it is back, the list is true. Must not know how a block is read.

use crate::array::blocks::{BlockName, Why};
use crate::array::damage::Damage;
use crate::array::{Array, Core};
use crate::units::{MemberIndex, Timestamp};
use std::collections::{BTreeMap, HashMap};

/// Damaged blocks that the array itself looks at together, and the time between such rounds.
const LOOK_ROUND: usize = 64;
const LOOK_INTERVAL_NS: u64 = 5_000_000_000;
/// The time for blocks that are due: the status should be true soon after a start, and after a member has
/// left or come back. 64 reads in this time are far fewer than members do for clients.
const DUE_INTERVAL_NS: u64 = 20_000_000;
/// The time after a round that found blocks readable: the cause that kept them from being read has ended, for
/// others too.
const FOUND_INTERVAL_NS: u64 = 20_000_000;
/// How long a member that was built waits until everything listed was looked at: in this time that is 64 MiB.
/// With more damage than that the list becomes true a little later.
const JOIN_LOOKS_NS: u64 = 5_000_000_000;

/// Looks at damaged blocks: those under way, and when the next are due.
#[derive(Default)]
pub(in crate::array) struct Looks {
    /// Blocks that are being looked at, with the operations that wait for the outcome.
    blocks: HashMap<BlockName, Vec<usize>>,
    /// Reads of blocks under way.
    reads: usize,
    /// Where the last round ended, and when it began.
    after: Option<BlockName>,
    last_round: Timestamp,
    /// Whether the last round found a block readable.
    has_found: bool,
    /// Since when members that are built wait until everything listed was looked at with them; none where
    /// that is over.
    with: BTreeMap<MemberIndex, Option<Timestamp>>,
}

impl Looks {
    /// Begins a look at a block, for which an operation may wait. Returns whether that look is not under way
    /// already.
    pub(in crate::array) fn begin(
        &mut self,
        block: BlockName,
        waiters: impl IntoIterator<Item = usize>,
    ) -> bool {
        let is_new = !self.blocks.contains_key(&block);
        self.blocks.entry(block).or_default().extend(waiters);
        is_new
    }

    /// Ends the look at a block. Returns the operations that wait for it.
    pub(in crate::array) fn end(&mut self, block: BlockName) -> Vec<usize> {
        self.blocks.remove(&block).unwrap_or_default()
    }

    /// Whether a block is being looked at.
    pub(in crate::array) fn is_under_way(&self, block: BlockName) -> bool {
        self.blocks.contains_key(&block)
    }

    /// Whether no block is being looked at.
    pub(in crate::array) fn is_idle(&self) -> bool {
        self.blocks.is_empty()
    }

    /// Whether an operation waits for some block.
    pub(in crate::array) fn is_waiting(&self, key: usize) -> bool {
        self.blocks.values().any(|waiters| waiters.contains(&key))
    }

    /// Counts a read of a block that begins.
    pub(in crate::array) fn read_began(&mut self) {
        self.reads += 1;
    }

    /// Counts a read of a block that has ended.
    pub(in crate::array) fn read_ended(&mut self) {
        self.reads -= 1;
    }

    /// Whether blocks are being read.
    pub(in crate::array) fn reads(&self) -> bool {
        self.reads > 0
    }

    /// Records that a block was found readable: the cause that kept it from being read may have ended for
    /// others too.
    pub(in crate::array) fn found(&mut self) {
        self.has_found = true;
    }
}

impl Looks {
    /// The blocks to look at now, a few at a time, if it is time.
    fn take_round(&mut self, damage: &mut Damage, core: &Core, is_serving: bool) -> Vec<(BlockName, Why)> {
        if !self.may_begin(damage, core, is_serving) || self.round_due(damage) > core.now {
            return Vec::new();
        }
        self.last_round = core.now;
        self.has_found = false;
        if !damage.has_due() && self.is_idle() {
            damage.forget_exchanges();
        }
        let mut blocks = damage.some_due(LOOK_ROUND);
        if blocks.is_empty() {
            blocks = damage.next(self.after, LOOK_ROUND);
            self.after = blocks.last().map(|(block, _)| *block);
        }
        blocks
    }

    fn may_begin(&self, damage: &Damage, core: &Core, is_serving: bool) -> bool {
        !self.reads() && !damage.is_empty() && !core.stop.hurried && !core.is_failed() && is_serving
    }

    fn round_due(&self, damage: &Damage) -> Timestamp {
        let interval = match (damage.has_due(), self.has_found) {
            (true, _) => DUE_INTERVAL_NS,
            (false, true) => FOUND_INTERVAL_NS,
            (false, false) => LOOK_INTERVAL_NS,
        };
        Timestamp(self.last_round.0 + interval)
    }

    /// When a tick is due for blocks that are to be looked at soon, or that are likely to be
    /// readable again.
    pub(in crate::array) fn due(&self, damage: &Damage, core: &Core, is_serving: bool) -> Option<Timestamp> {
        let is_soon = damage.has_due() || self.has_found;
        let soon = (is_soon && self.may_begin(damage, core, is_serving)).then(|| self.round_due(damage));
        [soon, damage.lacking_soon(core, is_serving)].into_iter().flatten().min()
    }

    /// Whether everything listed was looked at since the member was built: then the list shows what cannot be
    /// read with it. It stays so until the member has joined, or is built anew.
    pub(in crate::array) fn has_looked_with(
        &mut self,
        damage: &mut Damage,
        core: &Core,
        member: MemberIndex,
    ) -> bool {
        let since = match self.with.get(&member) {
            Some(None) => return true,
            Some(Some(since)) => *since,
            None => {
                damage.look_at_all();
                self.with.insert(member, Some(core.now));
                core.now
            }
        };
        let is_over = !damage.has_due() && self.is_idle();
        let is_over = is_over || core.stop.hurried || core.now.nanos_since(since) >= JOIN_LOOKS_NS;
        if is_over {
            self.with.insert(member, None);
        }
        is_over
    }

    /// Records that a member has joined, or is not built yet.
    pub(in crate::array) fn forget_with(&mut self, damage: &mut Damage, core: &Core, member: MemberIndex) {
        let was_looked_with = self.with.remove(&member).is_some();
        let at = core.member(member);
        // Its new device has replaced the one that may have the blocks which are set aside.
        if was_looked_with && at.progress.is_none() && at.replacement.is_none() {
            damage.exchange(member);
        }
    }
}

impl Array {
    /// Tick: looks again at blocks that could not be had, a few at a time.
    pub(in crate::array) fn look_at_damage(&mut self) {
        self.look_at_lacking();
        let is_serving = self.redo.is_serving();
        for (block, why) in self.looks.take_round(&mut self.damage, &self.core, is_serving) {
            match why {
                Why::SetAside | Why::Gone => {
                    // Otherwise it stays due for ever, and blocks that are not due never get their turn.
                    self.damage.looked_at(block);
                    self.start_repay(block, None);
                }
                Why::Lost | Why::Unreadable | Why::Proven => self.look_again(block, None),
            }
        }
    }
}
