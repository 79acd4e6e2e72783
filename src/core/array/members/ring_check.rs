//! The log of a member that comes back is read before it is caught up: only what it shows tells whether the device is as the
//! member left it, or was rolled back since to a copy of itself (rule T6). One that does not show it is rebuilt.
//!
//! Reads alone; a block that cannot be read shows nothing. Where it then lacks what it must show, all of it is read again for a
//! while: an error that passes is no reason to build a whole device anew (T1). Must not know of devices, batches or slots.

use crate::array::base::members::Which;
use crate::array::members::current::{Mark, is_current};
use crate::array::recovery::{RingRead, RingTail};
use crate::array::refusal::Behind;
use crate::array::{Array, Core, Flow, Inflight, NoticeKind, NoticeLevel, Op, Owner};
use crate::block_io::{DeviceId, IoFault, IoFaultKind, IoOp, IoValue};
use crate::format::{LOG_BLOCK_BYTES, Superblock};
use crate::units::{MemberIndex, Timestamp};

/// A log with blocks that cannot be read is read again for so long.
const PATIENCE_NS: u64 = 10_000_000_000;

/// The time between two attempts.
const RETRY_NS: u64 = 500_000_000;

pub(in crate::array) struct RingCheck {
    member: MemberIndex,
    device: DeviceId,
    /// What the device said of itself when it came.
    superblock: Superblock,
    /// What it must show.
    mark: Mark,
    ring: RingTail,
    reading: Option<RingRead>,
    /// When an attempt first failed for errors, and when the next begins.
    unreadable_since: Option<Timestamp>,
    not_before: Timestamp,
}

impl Array {
    /// Reads the log of a member that is to be caught up, which waits for that.
    pub(super) fn start_ring_check(
        &mut self,
        member: MemberIndex,
        device: DeviceId,
        superblock: Superblock,
        mark: Mark,
    ) {
        let ring = self.ring_tail(member, &superblock);
        let check = RingCheck {
            member,
            device,
            superblock,
            mark,
            ring,
            reading: None,
            unreadable_since: None,
            not_before: self.core.now,
        };
        let key = self.ops.insert(Op::RingCheck(Box::new(check)));
        self.core.work.ready.push_back(key);
    }

    fn ring_tail(&self, member: MemberIndex, superblock: &Superblock) -> RingTail {
        let epochs = superblock.redo.start.epoch..=superblock.epoch.number;
        RingTail::new(self.ring(), member, epochs)
    }

    pub(in crate::array) fn advance_ring_check(&mut self, key: usize, check: &mut RingCheck) -> Flow {
        if check.reading.is_some() {
            return Flow::Wait;
        }
        if self.core.now < check.not_before && !self.core.stop.hurried {
            // Woken early: an array that fails wakes all that wait.
            self.core.work.patient.push((check.not_before, key));
            return Flow::Wait;
        }
        if self.core.device_of(check.member, Which::Primary) != Some(check.device) {
            return Flow::Finished;
        }
        let Some(read) = check.ring.next_read() else {
            if self.reads_ring_again(key, check) {
                return Flow::Wait;
            }
            self.core.end_ring_check(check);
            return Flow::Finished;
        };
        let offset = self.redo().place.log_offset.plus(u64::from(read.blocks.start) * LOG_BLOCK_BYTES as u64);
        let buf = self.core.pool.alloc(read.blocks.len() * LOG_BLOCK_BYTES);
        check.reading = Some(read);
        let owner = Owner::Op { key, item: 0 };
        self.core.submit_io(owner, check.member, check.device, IoOp::Read { offset, buf });
        Flow::Wait
    }

    pub(in crate::array) fn ring_check_io(
        &mut self,
        key: usize,
        check: &mut RingCheck,
        entry: Inflight,
        result: Result<IoValue, IoFault>,
    ) -> Flow {
        let read = check.reading.take().expect("a read was under way");
        match result {
            Ok(IoValue::Data(bytes)) => check.ring.done(read, Some(&bytes)),
            Ok(_) => check.ring.done(read, None),
            Err(fault) => {
                if fault.kind == IoFaultKind::Gone {
                    self.read_fault(entry.member, entry.device, fault);
                }
                check.ring.done(read, None);
            }
        }
        self.advance_ring_check(key, check)
    }

    /// Whether blocks that could not be read may hold what the log must show, and are read again.
    fn reads_ring_again(&mut self, key: usize, check: &mut RingCheck) -> bool {
        let since = check.unreadable_since.unwrap_or(self.core.now);
        let is_over = self.core.now.nanos_since(since) >= PATIENCE_NS || self.core.stop.hurried;
        if check.verdict().is_ok() || check.ring.was_read() || is_over {
            return false;
        }
        check.unreadable_since = Some(since);
        check.ring = self.ring_tail(check.member, &check.superblock);
        check.not_before = Timestamp(self.core.now.0 + RETRY_NS);
        self.core.work.patient.push((check.not_before, key));
        true
    }
}

impl Core {
    fn end_ring_check(&mut self, check: &RingCheck) {
        let verdict = check.verdict();
        let member = self.member_mut(check.member);
        let Some(progress) = member.progress.as_mut() else { return };
        progress.awaits_ring = false;
        if let Err(why) = verdict {
            progress.since = None;
            member.reason = Some(format!("being rebuilt: {why}"));
            let text = format!("member {} is rebuilt and not only caught up: {why}", check.member);
            self.notice(NoticeKind::MemberRebuiltWhole, NoticeLevel::Warning, Some(check.member), text);
        }
    }
}

impl RingCheck {
    fn verdict(&self) -> Result<(), Behind> {
        is_current(&self.superblock, self.ring.tail(), &self.mark)
    }
}
