//! Reads the log of a member that comes back before it is caught up: only the log shows whether the device is
//! as the member left it, or was rolled back since to a copy of itself (rule T6). A device that does not show
//! the former is rebuilt.
//!
//! Only reads; a block that cannot be read shows nothing. If the log lacks what it must show because of such
//! blocks, all of it is read again for a while: an error that passes is no reason to build a whole device
//! anew (T1). Must not know of devices, batches or slots.

use crate::array::base::members::{MemberDevice, Which};
use crate::array::members::current::{Mark, is_current};
use crate::array::recovery::{Ring, RingRead, RingTail};
use crate::array::refusal::Behind;
use crate::array::{Array, Core, Flow, NoticeKind, NoticeLevel, Op, Owner};
use crate::block_io::{DeviceId, IoFault, IoOp, IoValue};
use crate::format::{LOG_BLOCK_BYTES, Superblock};
use crate::units::{ByteOffset, MemberIndex, Timestamp};

/// How long a log with blocks that cannot be read is read again.
const PATIENCE_NS: u64 = 10_000_000_000;

/// The time between two attempts.
const RETRY_NS: u64 = 500_000_000;

pub(in crate::array) struct RingCheck {
    device: MemberDevice,
    /// The superblock of the device when it came.
    superblock: Superblock,
    /// What it must show.
    mark: Mark,
    log: Log,
    tail: RingTail,
    reading: Option<RingRead>,
    /// When an attempt first failed for errors, and when the next begins.
    unreadable_since: Option<Timestamp>,
    not_before: Timestamp,
}

/// The log of a member: the facts that are the same for all, and where it lies.
struct Log {
    ring: Ring,
    offset: ByteOffset,
}

impl Array {
    /// Reads the log of a member that is to be caught up, which waits for the result.
    pub(super) fn start_ring_check(
        &mut self,
        member: MemberIndex,
        device: DeviceId,
        superblock: Superblock,
        mark: Mark,
    ) {
        let log = Log { ring: self.ring(), offset: self.redo.region().offset };
        let check = RingCheck {
            device: MemberDevice { member, which: Which::Primary, id: device },
            tail: log.tail(member, &superblock),
            superblock,
            mark,
            log,
            reading: None,
            unreadable_since: None,
            not_before: self.core.now,
        };
        let key = self.ops.insert(Op::RingCheck(Box::new(check)));
        self.core.work.ready.push_back(key);
    }
}

impl Log {
    fn tail(&self, member: MemberIndex, superblock: &Superblock) -> RingTail {
        let epochs = superblock.log_start.epoch..=superblock.epoch.number;
        RingTail::new(self.ring, member, epochs)
    }
}

impl RingCheck {
    pub(in crate::array) fn advance(&mut self, core: &mut Core, key: usize) -> Flow {
        if self.reading.is_some() {
            return Flow::Wait;
        }
        if core.now < self.not_before && !core.stop.hurried {
            // Woken early: an array that fails wakes all operations that wait.
            core.work.patient.push((self.not_before, key));
            return Flow::Wait;
        }
        if !core.still_has(self.device) {
            return Flow::Finished;
        }
        let Some(read) = self.tail.next_read() else {
            if self.reads_again(core, key) {
                return Flow::Wait;
            }
            core.end_ring_check(self);
            return Flow::Finished;
        };
        let offset = self.log.offset.plus(u64::from(read.blocks.start) * LOG_BLOCK_BYTES as u64);
        let buf = core.pool.alloc(read.blocks.len() * LOG_BLOCK_BYTES);
        self.reading = Some(read);
        let owner = Owner::Op { key, item: 0 };
        core.submit_io(owner, self.device.member, self.device.id, IoOp::Read { offset, buf });
        Flow::Wait
    }

    /// Takes the end of a read. Its fault, if any, was judged before.
    pub(in crate::array) fn io_ended(
        &mut self,
        core: &mut Core,
        key: usize,
        result: Result<IoValue, IoFault>,
    ) -> Flow {
        let read = self.reading.take().expect("a read was under way");
        match result {
            Ok(IoValue::Data(bytes)) => self.tail.done(read, Some(&bytes)),
            Ok(_) | Err(_) => self.tail.done(read, None),
        }
        self.advance(core, key)
    }

    /// Whether blocks that could not be read may hold what the log must show, and are read again.
    fn reads_again(&mut self, core: &mut Core, key: usize) -> bool {
        let since = self.unreadable_since.unwrap_or(core.now);
        let is_over = core.now.nanos_since(since) >= PATIENCE_NS || core.stop.hurried;
        if self.verdict().is_ok() || self.tail.was_read() || is_over {
            return false;
        }
        self.unreadable_since = Some(since);
        self.tail = self.log.tail(self.device.member, &self.superblock);
        self.not_before = Timestamp(core.now.0 + RETRY_NS);
        core.work.patient.push((self.not_before, key));
        true
    }

    fn verdict(&self) -> Result<(), Behind> {
        is_current(&self.superblock, self.tail.tail(), &self.mark)
    }
}

impl Core {
    fn end_ring_check(&mut self, check: &RingCheck) {
        let verdict = check.verdict();
        let index = check.device.member;
        let member = self.member_mut(index);
        let Some(progress) = member.progress.as_mut() else { return };
        progress.awaits_ring = false;
        if let Err(why) = verdict {
            progress.since = None;
            member.reason = Some(format!("being rebuilt: {why}"));
            let text = format!("member {index} is rebuilt and not only caught up: {why}");
            self.notice(NoticeKind::MemberRebuiltWhole, NoticeLevel::Warning, Some(index), text);
        }
    }
}
