//! Fetches blocks that members in service cannot give from devices that are being built.
//!
//! A device that comes back holds most of its blocks, and one whose build is tried again holds some. A block
//! that matches its checksum is right, whichever device gives it. One that does not was not built yet: that
//! is no error of the device, and does not show that anything is lost. Must not know what the bytes are for.

use crate::array::Core;
use crate::array::blocks::{Why, runs};
use crate::array::client::fetch::{BLOCK, Fetch, Part, State};
use crate::array::{Array, Inflight, Owner};
use crate::block_io::{DeviceId, IoFault, IoFaultKind, IoOp, IoValue};
use crate::format::MemberState;
use crate::units::MemberIndex;

impl Fetch {
    /// The rows of a column whose block this device has given although it is being built: they are on it, and
    /// perhaps nowhere else.
    pub(crate) fn rows_from_unbuilt(&self, column: usize, device: DeviceId) -> Vec<usize> {
        let of = self.parts.iter().filter(|part| part.column == column && part.unbuilt == Some(device));
        of.flat_map(|part| part.rows.clone().zip(&part.blocks))
            .filter(|(_, state)| **state == State::Good)
            .map(|(row, _)| row)
            .collect()
    }
}

impl Array {
    /// Reads, once, from devices that are being built, what is missing in rows that cannot be read. False:
    /// there is nothing to read.
    pub(super) fn ask_unbuilt(&mut self, key: usize, fetch: &mut Fetch) -> bool {
        // Without checksums nothing tells a block that was built from one that was not.
        let may_ask = !fetch.asked_unbuilt && !fetch.rules.in_service_only;
        if !may_ask || self.pages.checksums().is_none() || !self.core.any_building() {
            return false;
        }
        fetch.asked_unbuilt = true;
        let is_short = |row: usize| {
            fetch.found.missing.iter().any(|block| (block.row, block.why) == (row, Why::Unreadable))
        };
        let mut found = Vec::new();
        for column in 0..self.core.map.width() {
            let member = self.core.member_at(fetch.slot, column);
            let Some(device) = self.core.unbuilt(member) else { continue };
            if self.core.readable(member, fetch.slot).is_some() {
                continue;
            }
            let is_absent = |row: usize| fetch.state(column, row) == Some(State::Absent) && is_short(row);
            found.extend(
                runs(0..self.core.map.chunk / BLOCK, is_absent)
                    .into_iter()
                    .map(|run| (column, run, member, device)),
            );
        }
        for (column, rows, member, device) in found {
            let buf = self.core.pool.alloc_zeroed(rows.len() * BLOCK);
            let at = fetch.parts.len();
            fetch.parts.push(Part { unbuilt: Some(device), ..Part::new(column, rows.clone(), false, buf) });
            for (block, row) in rows.enumerate() {
                let offset =
                    self.core.map.device_offset(self.core.shape.data_offset, fetch.slot, row * BLOCK);
                let item = at << crate::array::client::fetch::ITEM_ROW_BITS | (block + 1);
                let read = IoOp::Read { offset, buf: self.core.pool.alloc(BLOCK) };
                self.core.submit_io(Owner::Op { key, item }, member, device, read);
                fetch.pending += 1;
            }
        }
        fetch.pending > 0
    }

    /// Takes the end of a read of a device that is being built.
    pub(super) fn unbuilt_io(
        &mut self,
        fetch: &mut Fetch,
        at: usize,
        block: usize,
        entry: &Inflight,
        result: Result<IoValue, IoFault>,
    ) {
        let (column, row) = (fetch.parts[at].column, fetch.parts[at].rows.start + block);
        let is_good = match result {
            Ok(IoValue::Data(bytes)) if self.pages.verifies(fetch.slot, row, column, &bytes) => {
                if let Some(buf) = &mut fetch.parts[at].buf {
                    buf[block * BLOCK..(block + 1) * BLOCK].copy_from_slice(&bytes);
                }
                true
            }
            Ok(_) => false,
            Err(fault) => {
                fetch.found.host_is_short |= fault.kind.passes();
                if fault.kind == IoFaultKind::Gone {
                    self.read_fault(entry.member, entry.device, fault);
                }
                false
            }
        };
        fetch.parts[at].blocks[block] = if is_good { State::Good } else { State::Absent };
    }
}

impl Core {
    /// The device of a member that is being built.
    fn unbuilt(&self, member: MemberIndex) -> Option<DeviceId> {
        let member = self.member(member);
        let own = member.device.filter(|_| member.state == MemberState::Rebuilding);
        own.or(member.replacement.as_ref().map(|new| new.device)).map(|device| device.id)
    }
}
