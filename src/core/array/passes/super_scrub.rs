//! Superblocks in a scrub: every copy of every member's is read, and compared with what was written
//! last. This begins with the scrub, and goes on beside its first slots.
//!
//! A copy that is damaged, overwritten or that cannot be read costs nothing while the array runs,
//! and may keep its member from being found at the next start. It is written anew by the next
//! update that goes to its slot; then all copies are read again, and those that are whole count as
//! repaired. The scrub records its own progress after the first look. Must not know when updates
//! are made otherwise, nor what they say.

use crate::array::Core;
use crate::array::base::members::Which;
use crate::array::{ActivityKind, Array, Flow, Inflight, NoticeKind, NoticeLevel, Op, Owner};
use crate::block_io::{DeviceId, IoFault, IoOp, IoValue};
use crate::format::{
    COPY_BYTES, CopyPlace, FormatError, Superblock, all_copy_offsets, damaged_copies, decode_copy,
};
use crate::units::{MemberIndex, Timestamp};
use std::collections::BTreeMap;
use uuid::Uuid;

/// Time between two looks at an update that is under way.
const RETRY_NS: u64 = 100_000_000;

/// How long copies are read again that a shortage of the host keeps from being read.
const SHORT_PATIENCE_NS: u64 = 30_000_000_000;

/// What was read of a copy: an I/O error as text, or what it decodes to.
type CopyRead = Result<Result<Superblock, FormatError>, String>;

/// A damaged copy: its device, and which of [`CopyPlace::ALL`] it is.
type BadCopy = (DeviceId, usize);

/// See the head of this file.
pub(in crate::array) struct SuperScrub {
    /// Scrubs that had been stopped when it began: of another one it is no part.
    scrubs_stopped: u64,
    life: u64,
    stage: Stage,
    devices: Vec<OfDevice>,
    pending: usize,
    /// The update that had been made when the copies were asked for.
    update: u64,
    /// Since when a shortage keeps copies from being read.
    short_since: Option<Timestamp>,
    /// What the first look has found.
    found: Option<BTreeMap<BadCopy, String>>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Stage {
    /// The copies are to be read.
    Look,
    Read,
    /// The bad copies that were found are to be written anew.
    Update,
}

/// The copies of a device.
struct OfDevice {
    device: DeviceId,
    uuid: Uuid,
    sequence: u64,
    written: [Option<u64>; 2],
    /// None: not known, for a reason that is not the device's.
    copies: [Option<CopyRead>; 4],
}

impl Array {
    pub(super) fn start_super_scrub(&mut self) {
        let life = self.redo.lives();
        let (devices, stage) = (Vec::new(), Stage::Look);
        let scrubs_stopped = self.passes.scrubs_stopped;
        let (pending, update, short_since, found) = (0, 0, None, None);
        let scrub = SuperScrub { scrubs_stopped, life, stage, devices, pending, update, short_since, found };
        let key = self.ops.insert(Op::SuperScrub(Box::new(scrub)));
        self.core.work.ready.push_back(key);
    }

    pub(in crate::array) fn advance_super_scrub(&mut self, key: usize, scrub: &mut SuperScrub) -> Flow {
        if scrub.pending > 0 {
            return Flow::Wait;
        }
        let is_void = self.core.is_failed() || scrub.life != self.redo.lives() || !self.redo.is_serving();
        if is_void || self.core.stop.stopping.is_some() || scrub.scrubs_stopped != self.passes.scrubs_stopped
        {
            return self.end_super_scrub(key, scrub, false);
        }
        if self.passes.scrub_is_paused()
            && let Some(since) = &mut scrub.short_since
        {
            *since = self.core.now;
            return self.core.look_later(key);
        }
        match scrub.stage {
            Stage::Look if !self.supers.is_busy() => self.read_copies(key, scrub),
            Stage::Look => self.core.look_later(key),
            Stage::Read => self.judge_copies(key, scrub),
            Stage::Update
                if scrub.found.iter().flatten().all(|(copy, _)| self.core.is_rewritten(scrub, *copy)) =>
            {
                scrub.stage = Stage::Look;
                self.advance_super_scrub(key, scrub)
            }
            Stage::Update => {
                if !self.supers.is_busy() {
                    self.supers.want();
                }
                self.core.look_later(key)
            }
        }
    }

    fn read_copies(&mut self, key: usize, scrub: &mut SuperScrub) -> Flow {
        scrub.stage = Stage::Read;
        if scrub.short_since.is_some() && scrub.update == self.supers.template().update {
            self.core.read_missing_copies(key, scrub);
            return if scrub.pending > 0 { Flow::Wait } else { self.judge_copies(key, scrub) };
        }
        scrub.update = self.supers.template().update;
        scrub.devices.clear();
        for (index, which, device) in self.core.devices().into_iter().filter(|(_, _, device)| device.recorded)
        {
            let member = self.core.member(index);
            let uuid = match (which, &member.replacement) {
                (Which::Replacement, Some(replacement)) => replacement.uuid,
                _ => member.uuid,
            };
            let copies = [const { None }; 4];
            let (device, sequence, written) = (device.id, device.sequence, device.written);
            scrub.devices.push(OfDevice { device, uuid, sequence, written, copies });
        }
        self.core.read_missing_copies(key, scrub);
        if scrub.pending > 0 { Flow::Wait } else { self.end_super_scrub(key, scrub, true) }
    }

    pub(in crate::array) fn super_scrub_io(
        &mut self,
        key: usize,
        scrub: &mut SuperScrub,
        item: usize,
        entry: Inflight,
        result: Result<IoValue, IoFault>,
    ) -> Flow {
        scrub.pending -= 1;
        scrub.devices[item / 4].copies[item % 4] = match result {
            Ok(IoValue::Data(bytes)) => Some(Ok(decode_copy(CopyPlace::ALL[item % 4], &bytes))),
            Ok(_) => unreachable!("a read yields data"),
            Err(fault) if fault.kind.passes() => None,
            Err(fault) => {
                self.read_fault(entry.member, entry.device, fault);
                Some(Err(fault.to_string()))
            }
        };
        self.advance_super_scrub(key, scrub)
    }

    /// All copies were read.
    fn judge_copies(&mut self, key: usize, scrub: &mut SuperScrub) -> Flow {
        scrub.stage = Stage::Look;
        let is_short = self.waits_for_copies(scrub);
        if is_short == Some(true) {
            return self.core.look_later(key);
        }
        if self.supers.is_busy() || self.supers.template().update != scrub.update {
            // They were being written. A look that takes long would be in vain each time.
            return match is_short {
                None => self.core.look_later(key),
                Some(_) => self.end_super_scrub(key, scrub, true),
            };
        }
        let array = self.supers.template().array;
        let bad: BTreeMap<BadCopy, String> = scrub
            .devices
            .iter()
            .filter(|of| self.core.find_device(of.device).is_some())
            .flat_map(|of| of.bad(array).into_iter().map(|(copy, why)| ((of.device, copy), why)))
            .collect();
        let Some(found) = scrub.found.take() else {
            self.core.note_bad_copies_of_supers(scrub, &bad);
            if bad.is_empty() {
                return self.end_super_scrub(key, scrub, true);
            }
            scrub.stage = Stage::Update;
            scrub.found = Some(bad);
            return self.advance_super_scrub(key, scrub);
        };
        let is_whole = |copy: &&BadCopy| !bad.contains_key(*copy) && self.core.find_device(copy.0).is_some();
        let mended: Vec<DeviceId> = found.keys().filter(is_whole).map(|(device, _)| *device).collect();
        if let Some(pass) = self.passes.pass_mut(ActivityKind::Scrub) {
            pass.errors += found.len() as u64;
            pass.repaired += mended.len() as u64;
        }
        for device in mended {
            if let Some((member, Which::Primary)) = self.core.find_device(device) {
                self.core.member_mut(member).counters.repaired += 1;
            }
        }
        for ((device, copy), why) in bad.iter().filter(|(copy, _)| found.contains_key(*copy)) {
            let Some((index, _)) = self.core.find_device(*device) else { continue };
            let text = format!(
                "member {index}: superblock copy {} was written anew, and is bad again: {why}",
                CopyPlace::ALL[*copy].word()
            );
            self.core.notice(NoticeKind::SuperblockDamaged, NoticeLevel::Error, Some(index), text);
        }
        self.end_super_scrub(key, scrub, true)
    }

    /// Whether copies are to be read again that a shortage has kept from being read; none where
    /// there are none. When that was done for long enough, their members count as not checked
    /// everywhere.
    fn waits_for_copies(&mut self, scrub: &mut SuperScrub) -> Option<bool> {
        let is_short = |of: &&OfDevice| of.copies.iter().any(Option::is_none);
        let short = scrub.devices.iter().filter(is_short).map(|of| of.device);
        let short: Vec<(MemberIndex, Which)> =
            short.filter_map(|device| self.core.find_device(device)).collect();
        if short.is_empty() {
            scrub.short_since = None;
            return None;
        }
        let since = *scrub.short_since.get_or_insert(self.core.now);
        if self.core.now.nanos_since(since) < SHORT_PATIENCE_NS {
            return Some(true);
        }
        if let Some(pass) = self.passes.pass_mut(ActivityKind::Scrub) {
            for (member, _) in short.into_iter().filter(|(_, which)| *which == Which::Primary) {
                pass.unchecked.insert(member);
            }
        }
        Some(false)
    }

    pub(super) fn end_super_scrub(&mut self, key: usize, scrub: &mut SuperScrub, complete: bool) -> Flow {
        self.core.work.patient.retain(|(_, other)| *other != key);
        if scrub.scrubs_stopped == self.passes.scrubs_stopped {
            self.verified_supers(complete);
        }
        if complete {
            // The scrub has kept back its own.
            self.supers.want();
        }
        Flow::Finished
    }
}

impl Core {
    /// Whether a bad copy was written since it was read, or its device has left.
    fn is_rewritten(&self, scrub: &SuperScrub, (device, copy): BadCopy) -> bool {
        let mut devices = self.devices().into_iter().map(|(_, _, device)| device);
        let Some(now) = devices.find(|other| other.id == device) else { return true };
        let then = scrub.devices.iter().find(|of| of.device == device).map(|of| of.sequence);
        now.written[copy % 2] > then
    }

    fn look_later(&mut self, key: usize) -> Flow {
        self.work.patient.retain(|(_, other)| *other != key);
        self.work.patient.push((Timestamp(self.now.0 + RETRY_NS), key));
        Flow::Wait
    }

    /// Asks for the copies that were not read so far.
    fn read_missing_copies(&mut self, key: usize, scrub: &mut SuperScrub) {
        for (index, _, device) in self.devices() {
            let Some(at) = scrub.devices.iter().position(|of| of.device == device.id) else { continue };
            for (copy, offset) in all_copy_offsets(device.bytes).into_iter().enumerate() {
                if scrub.devices[at].copies[copy].is_none() {
                    let read = IoOp::Read { offset, buf: self.pool.alloc(COPY_BYTES) };
                    self.submit_io(Owner::Op { key, item: at * 4 + copy }, index, device.id, read);
                    scrub.pending += 1;
                }
            }
        }
    }

    /// Copies of a member that comes back were damaged while it was away, in words: which, and what is wrong.
    pub(in crate::array) fn note_bad_supers(&mut self, index: MemberIndex, copies: &[String]) {
        self.member_mut(index).counters.checksum_errors += copies.len() as u64;
        for copy in copies {
            let text = format!("member {index}: superblock copy {copy}; it is written anew");
            self.notice(NoticeKind::SuperblockDamaged, NoticeLevel::Warning, Some(index), text);
        }
    }

    fn note_bad_copies_of_supers(&mut self, scrub: &SuperScrub, bad: &BTreeMap<BadCopy, String>) {
        for ((device, copy), why) in bad {
            let Some((index, which)) = self.find_device(*device) else { continue };
            let of = scrub.devices.iter().find(|of| of.device == *device);
            // That it gave an error was counted when it did.
            let was_read = of.is_some_and(|of| matches!(of.copies[*copy], Some(Ok(_))));
            if was_read && which == Which::Primary {
                self.member_mut(index).counters.checksum_errors += 1;
            }
            let what = if was_read { "is damaged" } else { "cannot be read" };
            let text = format!(
                "member {index}: superblock copy {} {what}: {why}; it is written anew",
                CopyPlace::ALL[*copy].word()
            );
            self.notice(NoticeKind::SuperblockDamaged, NoticeLevel::Warning, Some(index), text);
        }
    }
}

impl SuperScrub {
    /// Whether it has nothing in flight.
    pub(super) fn waits(&self) -> bool {
        self.pending == 0
    }
}

impl OfDevice {
    /// The copies that are not as they should be, and why.
    fn bad(&self, array: Uuid) -> Vec<(usize, String)> {
        // What is not known is taken for what it should be.
        let known: Vec<bool> = self.copies.iter().map(Option::is_some).collect();
        let as_read = |copy: &Option<CopyRead>| copy.clone().unwrap_or(Ok(Err(FormatError::Cleared)));
        let copies = [0, 1, 2, 3].map(|at: usize| as_read(&self.copies[at]));
        let damaged: BTreeMap<usize, String> = damaged_copies(&copies)
            .into_iter()
            .filter_map(|(place, why)| Some((CopyPlace::ALL.iter().position(|other| *other == place)?, why)))
            .collect();
        let why = |at: usize| match &copies[at] {
            Ok(Ok(copy)) if (copy.array, copy.device) != (array, self.uuid) => {
                Some("it is that of another device".to_owned())
            }
            Ok(Ok(copy)) if at % 2 == (self.sequence % 2) as usize && copy.sequence != self.sequence => {
                Some(format!("it is that of update {}, and {} is the newest", copy.sequence, self.sequence))
            }
            Ok(Ok(copy)) if copy.sequence > self.sequence => {
                Some(format!("it is that of update {}, and {} is the newest", copy.sequence, self.sequence))
            }
            Ok(Err(FormatError::NoMagic)) if self.written[at % 2].is_some() => {
                Some("it is not there".to_owned())
            }
            Ok(Err(FormatError::NoMagic | FormatError::Cleared))
                if at % 2 == (self.sequence % 2) as usize =>
            {
                Some("it is not there".to_owned())
            }
            _ => damaged.get(&at).cloned(),
        };
        (0..4).filter(|at| known[*at]).filter_map(|at| Some((at, why(at)?))).collect()
    }
}
