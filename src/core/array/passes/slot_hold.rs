//! Holds a slot of a logged array still for a pass: no stripe moves into it or out of it, its stripe is not
//! written, and none of its blocks has an image that is not in place. Rebuild and scrub work on slots held
//! like this.
//!
//! A slot that a stripe has left, or whose stripe was discarded, is empty only once a crash cannot bring that
//! back. If a device under construction skipped the slot sooner, it would count as built and lack the stripe.
//!
//! Where a stripe is in the slot, its lock is enough: no operation moves the stripe without it. A free slot
//! is locked as a slot, like the target of a whole-stripe write. Never both, so that no two operations wait
//! for each other here.

use crate::array::Array;
use crate::array::base::lock::{LockKey, LockMode};
use crate::array::mutation::{Mutation, is_off};
use crate::array::pages::hold::{PageHold, PagesHeld};
use crate::units::{ROW_BYTES, SlotIndex, StripeIndex};

/// See the head of this file.
#[derive(Debug)]
pub(super) struct SlotHold {
    slot: SlotIndex,
    /// The stripe that is locked.
    stripe: Option<StripeIndex>,
    stage: Stage,
    pages: PageHold,
    /// Needs of devices under construction, if it is held for those.
    builds: Option<Builds>,
    life: u64,
}

/// What devices under construction need.
#[derive(Clone, Copy, Debug)]
struct Builds {
    /// The devices need data written later than in this epoch; all data, if none.
    since: Option<u64>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Stage {
    New,
    Slot,
    Stripe,
    Drain,
    Held,
}

/// How far holding has come.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Held {
    /// Not done: the operation is advanced when that may have changed.
    Wait,
    /// The slot is free, its stripe holds no data, or the devices under construction have its content. Its
    /// pages are not loaded.
    Empty,
    /// It holds this stripe, and its pages are loaded.
    Stripe(StripeIndex),
    /// Its pages cannot be read now. They were tried for as long as a request may wait, unless the slot is
    /// held to build devices.
    Unreadable,
}

impl SlotHold {
    pub(super) fn new(slot: SlotIndex, life: u64) -> SlotHold {
        SlotHold { slot, stripe: None, stage: Stage::New, pages: PageHold::default(), builds: None, life }
    }

    /// For devices that need data written later than in epoch `since`, or all data: an empty slot is then one
    /// that a crash leaves empty.
    pub(super) fn to_build(slot: SlotIndex, since: Option<u64>, life: u64) -> SlotHold {
        SlotHold { builds: Some(Builds { since }), ..SlotHold::new(slot, life) }
    }

    /// The slot that is held, or will be.
    pub(super) fn slot(&self) -> SlotIndex {
        self.slot
    }

    pub(super) fn waits(&self) -> bool {
        self.stage != Stage::Held
    }
}

impl Array {
    pub(super) fn hold_slot(&mut self, key: usize, hold: &mut SlotHold) -> Held {
        let slot_lock = LockKey::Slot(hold.slot);
        let rows = 0..self.core.map.chunk;
        loop {
            match hold.stage {
                Stage::New => match self.pages.stripes().stripe_at(hold.slot) {
                    Some(stripe) => {
                        hold.stripe = Some(stripe);
                        hold.stage = Stage::Stripe;
                        self.core.locks.acquire(
                            LockKey::Stripe(stripe),
                            rows.clone(),
                            LockMode::Exclusive,
                            key,
                        );
                    }
                    None => {
                        hold.stage = Stage::Slot;
                        self.core.locks.acquire(slot_lock, rows.clone(), LockMode::Exclusive, key);
                    }
                },
                Stage::Slot => {
                    if !self.core.locks.is_held(slot_lock, key) {
                        return Held::Wait;
                    }
                    if self.pages.stripes().is_retired(hold.slot) && hold.builds.is_some() {
                        return self.wait_for_checkpoint(key, hold);
                    }
                    if self.pages.stripes().stripe_at(hold.slot).is_none() {
                        return Held::Empty;
                    }
                    // A stripe was written into it while it waited for the lock.
                    self.core.unlock(slot_lock, key);
                    hold.stage = Stage::New;
                }
                Stage::Stripe => {
                    let Some(stripe) = hold.stripe else { unreachable!("a stripe is being locked") };
                    if !self.core.locks.is_held(LockKey::Stripe(stripe), key) {
                        return Held::Wait;
                    }
                    if self.pages.stripes().stripe_at(hold.slot) != Some(stripe) {
                        // The stripe moved away while it waited for the lock.
                        self.core.unlock(LockKey::Stripe(stripe), key);
                        hold.stripe = None;
                        hold.stage = Stage::New;
                        continue;
                    }
                    if !self.pages.holds_data(stripe) {
                        if self.redo.is_in_log(stripe) && hold.builds.is_some() {
                            return self.wait_for_checkpoint(key, hold);
                        }
                        return Held::Empty;
                    }
                    let pages = self.pages.hash_pages(hold.slot, 0..self.core.map.chunk / ROW_BYTES as usize);
                    hold.pages = match hold.builds {
                        // The build comes back to such pages.
                        Some(_) => PageHold::at_once(pages, hold.life),
                        None => PageHold::new(pages, hold.life),
                    };
                    hold.stage = Stage::Drain;
                }
                Stage::Drain => {
                    if self.redo.has_images(hold.slot) {
                        return self.wait_for_checkpoint(key, hold);
                    }
                    let since = hold.builds.and_then(|builds| builds.since);
                    if let (Some(stripe), Some(since)) = (hold.stripe, since)
                        && !self.is_missed(stripe, since)
                    {
                        return Held::Empty;
                    }
                    match self.hold_pages(key, &mut hold.pages) {
                        PagesHeld::Wait => return Held::Wait,
                        PagesHeld::Unreadable => return Held::Unreadable,
                        PagesHeld::All { .. } => hold.stage = Stage::Held,
                    }
                }
                Stage::Held => {
                    let Some(stripe) = hold.stripe else { unreachable!("held with its stripe") };
                    return Held::Stripe(stripe);
                }
            }
        }
    }

    /// Waits with the lock, so that clients cannot put it off for ever. But not while the checkpoint itself
    /// waits for room on a member, which may take until a person makes some: clients read and write the
    /// stripe meanwhile.
    fn wait_for_checkpoint(&mut self, key: usize, hold: &mut SlotHold) -> Held {
        if self.core.is_short_of_host() && !is_off(Mutation::HeldThroughShortage) {
            self.release_slot(key, hold);
        }
        self.redo.wait_for_checkpoint(key);
        Held::Wait
    }

    /// Gives up the slot, held or waited for.
    pub(super) fn release_slot(&mut self, key: usize, hold: &mut SlotHold) {
        self.release_pages(&mut hold.pages);
        if let Some(stripe) = hold.stripe.take() {
            self.core.unlock(LockKey::Stripe(stripe), key);
        }
        if hold.stage == Stage::Slot {
            self.core.unlock(LockKey::Slot(hold.slot), key);
        }
        hold.stage = Stage::New;
    }
}
