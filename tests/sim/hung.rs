//! Operations that never end (rule T7): once their device has left service nothing waits for them, and if
//! they end after all, that has no effect. With simulated members; the daemon's part is in
//! `tests/daemon/hung_members.rs`.

use calpe_core::format::{ChecksumKind, MemberState};
use calpe_core::testing::{Random, SimArray, SimShape};
use calpe_core::units::{MemberIndex, VolumeOffset};
use calpe_core::volume::{AdminRequest, ArrayState, ClientReply, ClientRequest};

const CHUNK: usize = 16384;

/// The disk whose operations do not end.
const HUNG: u32 = 1;

/// An array and the expected content of its volume.
struct Checked {
    sim: SimArray,
    model: Vec<u8>,
}

/// What an array does by itself and a test waits for.
enum Until {
    Client(u64),
    Admin(u64),
    Done(fn(&SimArray) -> bool),
}

impl Checked {
    /// A clean 2+2 array full of random bytes.
    fn filled(seed: u64) -> Checked {
        let volume_bytes = 6 * 2 * CHUNK as u64;
        let shape = SimShape { volume_bytes, ..SimShape::new(2, 2, CHUNK as u32, 1) };
        let mut model = vec![0; volume_bytes as usize];
        Random::new(seed ^ 0xf111).fill(&mut model);
        let mut sim = SimArray::create(shape.logged(ChecksumKind::Blake3, 1 << 20), seed);
        sim.write(0, &model).expect("written");
        sim.settle();
        Checked { sim, model }
    }

    fn begin_write(&mut self, start: usize, len: usize) -> u64 {
        let mut bytes = vec![0; len];
        self.sim.random().fill(&mut bytes);
        self.model[start..start + len].copy_from_slice(&bytes);
        self.sim.submit_write(start as u64, &bytes, false)
    }

    /// Executes the operations of other disks until the goal is reached or there was nothing to do for two
    /// seconds. Returns the reply if it was reached.
    fn drive(&mut self, until: &Until) -> Option<Option<ClientReply>> {
        for _ in 0..20 {
            loop {
                match until {
                    Until::Client(id) => {
                        if let Some(result) = self.sim.poll(*id) {
                            return Some(Some(result.expect("within the budget")));
                        }
                    }
                    Until::Admin(id) => {
                        if let Some(result) = self.sim.poll_admin(*id) {
                            result.expect("within the budget");
                            return Some(None);
                        }
                    }
                    Until::Done(test) if test(&self.sim) => return Some(None),
                    Until::Done(_) => {}
                }
                if !self.sim.step_where(|disk, _| disk != HUNG) {
                    break;
                }
            }
            self.sim.sleep(100);
        }
        None
    }

    /// Asserts that something does not end while operations of a disk hang, and does once the array is told
    /// of them.
    #[track_caller]
    fn waits_and_goes_on(&mut self, until: Until) -> Option<ClientReply> {
        assert!(self.drive(&until).is_none(), "nothing hangs");
        assert!(self.sim.queued().any(|(disk, _)| disk == HUNG), "nothing hangs");
        self.sim.device_hangs(HUNG);
        self.drive(&until).expect("it goes on without the disk that hangs")
    }

    /// Ends the hung operations, brings the disk back, and checks that everything is right.
    #[track_caller]
    fn ends_late_and_returns(mut self) {
        let state = self.sim.status().members[1].state;
        assert_eq!(state, MemberState::Missing, "{:?}", self.sim.notices);
        assert_eq!(self.sim.status().members[1].counters.write_errors, 0, "it did not fail");
        let fresh: Vec<u8> = (0..self.model.len()).map(|at| (at % 253) as u8).collect();
        let write = self.sim.submit_write(0, &fresh, true);
        self.drive(&Until::Client(write)).expect("written without the disk that hangs");
        self.model = fresh;
        let device = self.sim.reopen_disk(HUNG);
        self.sim.admin(AdminRequest::Online { member: MemberIndex(1), device }).expect("admitted");
        self.sim.settle();
        assert_eq!(self.sim.status().state, ArrayState::Online, "{:?}", self.sim.notices);
        assert!(self.sim.read(0, self.model.len()).expect("readable") == self.model);
        self.sim.assert_scrub_clean();
    }
}

#[test]
fn a_write_goes_on_without_a_member_whose_log_does_not_end() {
    let mut array = Checked::filled(1);
    let write = array.begin_write(4096, 4096);
    array.waits_and_goes_on(Until::Client(write));
    array.ends_late_and_returns();
}

#[test]
fn a_whole_stripe_goes_on_without_a_member_that_does_not_write_it() {
    let mut array = Checked::filled(2);
    let write = array.begin_write(2 * CHUNK, 2 * CHUNK);
    array.waits_and_goes_on(Until::Client(write));
    array.ends_late_and_returns();
}

#[test]
fn a_flush_goes_on_without_a_member_that_does_not_end_it() {
    let mut array = Checked::filled(3);
    let write = array.begin_write(0, 4096);
    array.sim.wait(write).expect("written");
    let flush = array.sim.submit(ClientRequest::Flush);
    array.waits_and_goes_on(Until::Client(flush));
    array.ends_late_and_returns();
}

#[test]
fn a_read_that_does_not_end_is_answered_by_the_others() {
    let mut array = Checked::filled(4);
    let len = array.model.len();
    let read = array.sim.submit_read(0, len);
    match array.waits_and_goes_on(Until::Client(read)) {
        Some(ClientReply::Data(buf)) => assert!(buf[..] == array.model[..]),
        other => panic!("{other:?}"),
    }
    array.ends_late_and_returns();
}

#[test]
fn a_discard_goes_on_without_a_member_that_does_not_record_it() {
    let mut array = Checked::filled(5);
    let len = 2 * CHUNK as u64;
    let request = ClientRequest::Trim { offset: VolumeOffset(0), len, fua: true };
    let trim = array.sim.submit(request);
    array.model[..len as usize].fill(0);
    array.waits_and_goes_on(Until::Client(trim));
    array.ends_late_and_returns();
}

#[test]
fn a_checkpoint_goes_on_without_a_member_that_does_not_write_in_place() {
    let mut array = Checked::filled(6);
    let write = array.begin_write(0, 4096);
    array.sim.wait(write).expect("written");
    // After a quiet time the log is put in place and the array is marked clean.
    array.waits_and_goes_on(Until::Done(|sim| !sim.status().dirty));
    array.ends_late_and_returns();
}

#[test]
fn an_update_of_superblocks_goes_on_without_a_member_that_does_not_take_it() {
    let mut array = Checked::filled(7);
    let fail = array.sim.submit_admin(AdminRequest::Fail { member: MemberIndex(0) });
    let write = array.begin_write(0, 4096);
    array.waits_and_goes_on(Until::Client(write));
    array.drive(&Until::Admin(fail)).expect("it is recorded by then");
    let device = array.sim.reopen_disk(0);
    array.sim.device_hangs(HUNG);
    let online = array.sim.submit_admin(AdminRequest::Online { member: MemberIndex(0), device });
    array.drive(&Until::Admin(online)).expect("admitted");
    array
        .drive(&Until::Done(|sim| sim.status().members[0].state == MemberState::Online))
        .expect("caught up without the disk that hangs");
    array.ends_late_and_returns();
}

#[test]
fn a_rebuild_goes_on_without_a_source_that_does_not_answer() {
    let mut array = Checked::filled(8);
    array.sim.admin(AdminRequest::Fail { member: MemberIndex(2) }).expect("failed");
    array.sim.settle();
    let device = array.sim.add_blank_disk();
    array.sim.admin(AdminRequest::Replace { member: MemberIndex(2), device }).expect("admitted");
    array.waits_and_goes_on(Until::Done(|sim| sim.status().members[2].state == MemberState::Online));
    array.ends_late_and_returns();
}

#[test]
fn a_rebuild_whose_target_hangs_is_given_up() {
    let mut array = Checked::filled(9);
    array.sim.admin(AdminRequest::Fail { member: MemberIndex(1) }).expect("failed");
    array.sim.settle();
    let device = array.sim.reopen_disk(HUNG);
    let target = device.device.0;
    array.sim.admin(AdminRequest::Online { member: MemberIndex(1), device }).expect("admitted");
    for _ in 0..20 {
        while array.sim.step_where(|disk, _| disk != target) {}
        array.sim.sleep(100);
    }
    assert!(array.sim.queued().any(|(disk, _)| disk == target), "nothing hangs");
    array.sim.device_hangs(target);
    let write = array.begin_write(0, 3 * 4096);
    while array.sim.poll(write).is_none() {
        if !array.sim.step_where(|disk, _| disk != target) {
            array.sim.sleep(100);
        }
    }
    assert_eq!(array.sim.status().members[1].state, MemberState::Missing);
    let device = array.sim.reopen_disk(target);
    array.sim.admin(AdminRequest::Online { member: MemberIndex(1), device }).expect("admitted");
    array.sim.settle();
    assert_eq!(array.sim.status().state, ArrayState::Online, "{:?}", array.sim.notices);
    array.sim.assert_scrub_clean();
}

#[test]
fn a_clean_stop_leaves_a_member_out_that_does_not_end() {
    let mut array = Checked::filled(10);
    let write = array.begin_write(0, 4096);
    array.sim.wait(write).expect("written");
    let stop = array.sim.submit_admin(AdminRequest::Stop);
    array.waits_and_goes_on(Until::Admin(stop));
    let model = array.model;
    let mut sim = array.sim.kill_and_restart(false).expect("assembled");
    assert!(!sim.status().dirty, "the others say that it was stopped cleanly");
    assert_eq!(sim.status().members[1].state, MemberState::Missing, "it missed the stop");
    assert!(sim.read(0, model.len()).expect("readable") == model);
}

#[test]
fn a_member_failed_by_command_delays_no_request() {
    let mut array = Checked::filled(11);
    let write = array.begin_write(0, 4096);
    assert!(array.drive(&Until::Client(write)).is_none(), "nothing hangs");
    let fail = array.sim.submit_admin(AdminRequest::Fail { member: MemberIndex(1) });
    array.drive(&Until::Admin(fail)).expect("at once");
    array.drive(&Until::Client(write)).expect("it goes on without the disk that hangs");
    assert!(array.sim.released.contains(&HUNG));
    assert_eq!(array.sim.status().members[1].state, MemberState::Faulted);
}

#[test]
fn what_hangs_while_more_than_m_are_away_is_current_when_it_is_back() {
    let mut array = Checked::filled(12);
    for member in [0, 2] {
        array.sim.admin(AdminRequest::Fail { member: MemberIndex(member) }).expect("failed");
        array.sim.settle();
    }
    let read = array.sim.submit_read(0, array.model.len());
    while array.sim.step_where(|disk, _| disk != HUNG) {}
    array.sim.device_hangs(HUNG);
    assert_eq!(array.sim.status().state, ArrayState::Failed);
    while array.sim.step_where(|disk, _| disk != HUNG) {}
    assert!(array.sim.poll(read).is_some_and(|result| result.is_err()), "the read has ended");
    let device = array.sim.reopen_disk(HUNG);
    array.sim.admin(AdminRequest::Online { member: MemberIndex(1), device }).expect("it is current");
    array.sim.settle();
    assert_eq!(array.sim.status().state, ArrayState::Degraded);
    assert!(array.sim.read(0, array.model.len()).expect("readable") == array.model);
}

#[test]
fn a_replacement_that_is_cancelled_before_it_is_recorded_is_not_said_to_be_under_way() {
    let mut array = Checked::filled(3);
    let device = array.sim.add_blank_disk();
    let member = MemberIndex(0);
    let replace = array.sim.submit_admin(AdminRequest::Replace { member, device });
    let cancel = array.sim.submit_admin(AdminRequest::CancelReplace { member, device: None });
    array.sim.settle();
    assert!(array.sim.poll_admin(cancel).expect("answered").is_ok());
    let told = array.sim.poll_admin(replace).expect("answered").expect_err("nothing is built").to_string();
    assert!(told.contains("was cancelled or given up meanwhile"), "{told}");
}
