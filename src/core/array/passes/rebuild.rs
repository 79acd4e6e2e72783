//! Chooses the slot that is rebuilt next, and the devices to build it on. The work on a slot is in `walk.rs`.

use crate::array::Array;
use crate::array::Core;
use crate::array::base::members::{Device, MemberDevice, Progress, Which};
use crate::array::base::proofs::Proof;
use crate::units::{MemberIndex, SlotIndex, StripeIndex};

/// A device that is to get a slot.
// Plain data: given to the operation that builds it.
#[derive(Clone, Copy)]
pub(in crate::array) struct Target {
    pub device: MemberDevice,
    pub column: usize,
}

impl Array {
    /// Records that a slot is built except for blocks that a target lacks, because they cannot be read for
    /// now.
    pub(super) fn slot_lacks(&mut self, slot: SlotIndex, target: &Target) {
        let (slots, now) = (self.core.map.slots, self.core.now);
        let goes_without = self
            .core
            .builds_mut()
            .any(|(device, progress)| device == target.device && !progress.lacks(slot.0, slots, now));
        if goes_without {
            self.damage.note_lacking(&self.core, slot, target);
        }
    }

    /// Whether data of the stripe was written later than in epoch `since`, or may have been.
    pub(in crate::array) fn is_missed(&self, stripe: StripeIndex, since: u64) -> bool {
        self.redo.is_to_remark(stripe) || self.pages.map_entry(stripe).epoch > since
    }
}

impl Core {
    /// The progress of every device that is being built.
    pub(in crate::array) fn builds_mut(&mut self) -> impl Iterator<Item = (MemberDevice, &mut Progress)> {
        self.roster.members.iter_mut().enumerate().flat_map(|(at, member)| {
            let of = move |which, device: Device| MemberDevice {
                member: MemberIndex(at as u16),
                which,
                id: device.id,
            };
            let primary = member.device.zip(member.progress.as_mut());
            let primary = primary.map(|(device, progress)| (of(Which::Primary, device), progress));
            let second = member.replacement.as_mut();
            let second = second.map(|r| (of(Which::Replacement, r.device), &mut r.progress));
            [primary, second].into_iter().flatten()
        })
    }

    /// The next slot that a device under construction needs. The lowest of all, so that devices which join
    /// later catch up and then share the reads of the others.
    pub(super) fn next_build_slot(&self) -> Option<SlotIndex> {
        self.progresses().filter_map(|progress| progress.due(self.map.slots, self.now)).min().map(SlotIndex)
    }

    /// Begins to build the slot that is due next, on the devices that need it.
    pub(super) fn begin_build(&mut self) -> Option<(SlotIndex, Vec<Target>)> {
        let slot = self.next_build_slot()?;
        let (map, now) = (self.map, self.now);
        let mut targets = Vec::new();
        for (device, progress) in self.builds_mut() {
            if progress.due(map.slots, now) == Some(slot.0) {
                progress.begin(slot.0);
                let column = usize::from(map.column_of(slot, device.member).0);
                targets.push(Target { device, column });
            }
        }
        Some((slot, targets))
    }

    /// Begins to compare a slot that was built before an unclean stop.
    pub(super) fn begin_proof(&mut self) -> Option<(SlotIndex, Target)> {
        let map = self.map;
        let now = self.now;
        let (slot, device) = self.builds_mut().find_map(|(device, progress)| {
            let slot = progress.next_unproven(now)?;
            progress.proofs.begin(slot);
            Some((SlotIndex(slot), device))
        })?;
        Some((slot, Target { device, column: usize::from(map.column_of(slot, device.member).0) }))
    }

    /// Whether a slot of some device has to be compared.
    pub(super) fn has_unproven(&self) -> bool {
        self.progresses().any(|progress| progress.next_unproven(self.now).is_some())
    }

    /// Whether a slot that was found wrong has to be built, or one of a device of which nothing is to be
    /// compared.
    pub(super) fn has_others_to_build(&self) -> bool {
        let is_due = |progress: &Progress| progress.due(self.map.slots, self.now).is_some();
        self.progresses().any(|progress| match progress.proofs.are_over() {
            true => is_due(progress),
            false => progress.proofs.due().is_some(),
        })
    }

    /// Whether something on a device under construction was not compared yet, or is built once more.
    pub(in crate::array) fn has_open_proofs(&self) -> bool {
        self.any_building() && self.progresses().any(|progress| !progress.proofs.are_over())
    }

    /// Takes the outcome for a slot that was compared.
    pub(super) fn end_proof(&mut self, slot: SlotIndex, target: &Target, outcome: Proof) {
        let now = self.now;
        if let Some((_, progress)) = self.builds_mut().find(|(device, _)| *device == target.device) {
            progress.end_proof(slot.0, outcome, now);
        }
    }

    fn progresses(&self) -> impl Iterator<Item = &Progress> {
        self.roster.members.iter().flat_map(|member| {
            [member.progress.as_ref(), member.replacement.as_ref().map(|r| &r.progress)].into_iter().flatten()
        })
    }

    /// Moves the progress of the targets over a slot, or back to it.
    pub(super) fn built_slot(&mut self, slot: SlotIndex, targets: &[Target], complete: bool) {
        for target in targets {
            let build = self.builds_mut().find(|(device, _)| *device == target.device);
            if let Some((_, progress)) = build {
                progress.built(slot.0, complete);
            }
        }
    }

    /// The epoch up to which a device under construction is current already.
    pub(super) fn needs_since(&self, target: &Target) -> Option<u64> {
        let MemberDevice { member, which, id } = target.device;
        let member = self.member(member);
        let (device, progress) = match which {
            Which::Primary => (member.device?, member.progress.as_ref()?),
            Which::Replacement => member.replacement.as_ref().map(|new| (new.device, &new.progress))?,
        };
        progress.since.filter(|_| device.id == id)
    }
}
