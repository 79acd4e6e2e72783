//! New devices that are added while an epoch is not yet on all its members: the epoch includes the member,
//! but not the new device. The scenes panic when such a device is taken for one with the member's data.
//! Shared by `tests/sim/unfinished.rs`, where no scene may panic, and `tests/sim/mutations.rs`, where a scene
//! must panic with a rule broken.

use super::rollback::{BLOCK, CHUNK, Checked, disk, states, trial};
#[cfg(debug_assertions)]
use calpe_core::array::mutation::Mutation;
use calpe_core::format::{ChecksumKind, MemberState};
use calpe_core::testing::{DiskCopy, Fate, Random, SimArray, SimShape, SimWorld};
use calpe_core::units::MemberIndex;
use calpe_core::volume::{AdminRequest, ClientRequest};

const KINDS: [ChecksumKind; 3] = [ChecksumKind::None, ChecksumKind::Blake3, ChecksumKind::Crc32c];

/// An array of 3+2 that was killed `gap` operations after it began to lose member 0, and starts without
/// member 1 as well: the epoch without member 0 may be on only some of its members. None if no such array
/// comes about.
fn cut_off(gap: u64, kind: ChecksumKind) -> Option<Checked> {
    let mut array = Checked::filled(3, 2, kind, gap);
    array.load(4, &mut Random::new(gap));
    array.sim.settle();
    let ids = [0, 1].map(|member| array.sim.disk_of(member).expect("in service"));
    array.begin_to_lose(ids[0], gap);
    disk(&mut array.sim, ids[1]).dead = true;
    let Checked { sim, model } = array;
    let mut random = Random::new(gap);
    let sim = sim.kill_where(false, |_, _| random.one_in(2)).ok()?;
    Some(Checked { sim, model })
}

/// Writes block 0 again, since the last write to it may or may not be there.
fn write_again(array: &mut Checked) {
    array.sim.write(0, &[7; BLOCK]).expect("enough members");
}

/// Moments of the first kill, each with a checksum kind and the number of operations until the next event.
fn moments() -> impl Iterator<Item = (u64, ChecksumKind, u64)> {
    let gaps = (0..48).map(|gap| (gap, KINDS[gap as usize % KINDS.len()]));
    gaps.flat_map(|(gap, kind)| (0..60).step_by(3).map(move |steps| (gap, kind, steps + gap % 3)))
}

/// A member that a start finds missing is replaced at once, and the daemon is killed before the device is
/// built. `written_by` runs the code that writes superblocks until then.
fn comes_in_before_an_epoch_is_complete(written_by: impl Fn(&mut dyn FnMut())) {
    for (gap, kind, steps) in moments() {
        let Some(mut array) = cut_off(gap, kind) else { continue };
        let device = array.sim.add_blank_disk();
        array.sim.submit_admin(AdminRequest::Replace { member: MemberIndex(1), device });
        written_by(&mut || {
            for _ in 0..steps {
                array.sim.step();
            }
        });
        let Checked { sim, model } = array;
        let sim = sim.kill_where(false, |_, _| true);
        let sim = sim.unwrap_or_else(|error| panic!("{kind}, gap {gap}, {steps} steps: {error}"));
        let mut array = Checked { sim, model };
        let found = states(&array.sim)[1];
        assert_ne!(found, MemberState::Online, "{kind}, gap {gap}, {steps} steps: it holds nothing yet");
        write_again(&mut array);
        array.sim.settle();
        array.verify();
    }
}

/// A member that a start finds missing is replaced at once, and the daemon is killed before the device is
/// built.
pub(crate) fn a_device_that_comes_in_before_an_epoch_is_complete_is_built() {
    comes_in_before_an_epoch_is_complete(|steps| steps());
}

/// The same with superblocks as written before the code kept that rule.
#[cfg(debug_assertions)]
pub(crate) fn a_device_that_is_named_by_an_epoch_from_before_it_is_built() {
    comes_in_before_an_epoch_is_complete(|steps| Mutation::NewDeviceInOldEpoch.with(steps));
}

/// A device that was added like that leaves and comes back: it is built, not caught up.
pub(crate) fn a_device_that_leaves_before_an_epoch_is_complete_is_not_caught_up() {
    for (gap, kind, steps) in moments() {
        let Some(mut array) = cut_off(gap, kind) else { continue };
        let device = array.sim.add_blank_disk();
        let id = device.device.0;
        array.sim.submit_admin(AdminRequest::Replace { member: MemberIndex(1), device });
        array.step(steps);
        disk(&mut array.sim, id).dead = true;
        write_again(&mut array);
        array.sim.settle();
        if states(&array.sim)[1] == MemberState::Online {
            continue;
        }
        disk(&mut array.sim, id).dead = false;
        let device = array.sim.reopen_disk(id);
        let request = AdminRequest::Online { member: MemberIndex(1), device };
        array.sim.admin(request).unwrap_or_else(|error| panic!("{kind}, gap {gap}, {steps}: {error:?}"));
        array.sim.settle();
        assert_eq!(states(&array.sim)[1], MemberState::Online, "{kind}, gap {gap}, {steps} steps");
        array.offline(2);
        array.verify();
    }
}

/// A member whose replacement is being built leaves while an epoch is written, and the replacement takes its
/// place; then the daemon is killed.
pub(crate) fn a_replacement_that_takes_over_before_an_epoch_is_complete_is_built() {
    for (gap, kind, steps) in moments() {
        let random = &mut Random::new(gap * 100 + steps);
        let mut array = Checked::filled(3, 2, kind, gap);
        array.load(4, random);
        array.sim.settle();
        let ids = [0, 1].map(|member| array.sim.disk_of(member).expect("in service"));
        let device = array.sim.add_blank_disk();
        array.sim.submit_admin(AdminRequest::Replace { member: MemberIndex(1), device });
        array.step(random.below(60));
        array.begin_to_lose(ids[0], gap);
        disk(&mut array.sim, ids[1]).dead = true;
        array.step(steps);
        let Checked { sim, model } = array;
        let Ok(sim) = sim.kill_where(false, |_, _| random.one_in(2)) else { continue };
        let mut array = Checked { sim, model };
        write_again(&mut array);
        array.sim.settle();
        array.verify();
        if states(&array.sim)[1] == MemberState::Online {
            array.offline(2);
            array.verify();
        }
    }
}

/// A member leaves while an epoch is written, and is replaced; then the array fails, gets all its other
/// members back, and is killed.
pub(crate) fn a_device_that_comes_in_before_an_array_fails_is_built() {
    for (gap, kind, steps) in moments() {
        let random = &mut Random::new(gap * 100 + steps);
        let mut array = Checked::filled(3, 2, kind, gap);
        array.load(4, random);
        array.sim.settle();
        let ids = [0, 1, 2].map(|member| array.sim.disk_of(member).expect("in service"));
        array.begin_to_lose(ids[0], gap);
        array.sim.submit_admin(AdminRequest::Fail { member: MemberIndex(1) });
        let device = array.sim.add_blank_disk();
        array.sim.submit_admin(AdminRequest::Replace { member: MemberIndex(1), device });
        array.step(random.below(12));
        disk(&mut array.sim, ids[2]).dead = true;
        array.sim.settle();
        disk(&mut array.sim, ids[2]).dead = false;
        let device = array.sim.reopen_disk(ids[2]);
        array.sim.submit_admin(AdminRequest::Online { member: MemberIndex(2), device });
        array.step(steps);
        let Checked { sim, model } = array;
        let Ok(sim) = sim.kill_where(false, |_, _| true) else { continue };
        let mut array = Checked { sim, model };
        write_again(&mut array);
        array.sim.settle();
        array.verify();
    }
}

/// An array whose member 1 was rebuilt, while no client wrote, until the device had joined; and copies of the
/// device from before that.
fn built_while_idle(seed: u64, random: &mut Random) -> (Checked, u32, Vec<DiskCopy>) {
    let kind = KINDS[seed as usize % KINDS.len()];
    let mut array = Checked::filled(2, 2, kind, seed);
    array.offline(1);
    // Until the array is known to be clean.
    for _ in 0..60 {
        array.sim.sleep(100);
        array.sim.settle();
    }
    let device = array.sim.add_blank_disk();
    let id = device.device.0;
    array.sim.submit_admin(AdminRequest::Replace { member: MemberIndex(1), device });
    let mut copies = Vec::new();
    while states(&array.sim)[1] != MemberState::Online {
        if copies.is_empty() || random.one_in(8) {
            copies.push(array.copy(id));
        }
        if !array.sim.step() || random.one_in(30) {
            array.sim.sleep(if random.one_in(3) { 5_100 } else { 100 });
        }
    }
    (array, id, copies)
}

/// One of the copies.
fn one<'c>(copies: &'c [DiskCopy], random: &mut Random) -> &'c DiskCopy {
    &copies[random.below(copies.len() as u64) as usize]
}

/// A device has just joined when the daemon is killed, and is then rolled back to a copy made while it was
/// being built.
pub(crate) fn a_device_as_it_was_while_it_was_built_is_not_taken_for_whole() {
    for seed in 0..trial(150) {
        let random = &mut Random::new(0x0_b111 + seed);
        let (mut array, id, copies) = built_while_idle(seed, random);
        array.step(random.below(48));
        let copy = one(&copies, random);
        let Ok(mut array) = array.restart_with(&[(id, copy)], false) else { continue };
        array.sim.settle();
        if states(&array.sim)[1] == MemberState::Online {
            array.offline(0);
            array.offline(2);
        }
        array.verify();
    }
}

/// The same, but the device dies and comes back as the copy while the daemon runs.
pub(crate) fn a_device_as_it_was_while_it_was_built_is_not_caught_up() {
    for seed in 0..trial(150) {
        let random = &mut Random::new(0x0_ca7c + seed);
        let (mut array, id, copies) = built_while_idle(seed, random);
        array.step(random.below(16));
        disk(&mut array.sim, id).dead = true;
        array.sim.write(0, &array.model[..BLOCK]).expect("enough members");
        array.sim.settle();
        disk(&mut array.sim, id).restore(one(&copies, random));
        let device = array.sim.reopen_disk(id);
        if array.sim.admin(AdminRequest::Online { member: MemberIndex(1), device }).is_err() {
            continue;
        }
        array.sim.settle();
        array.offline(0);
        array.offline(2);
        array.verify();
    }
}

/// A member of a new array is replaced before the array is known to be idle. An update of the superblocks is
/// cut off and reaches the device that is being built alone; a start without that device, with the old one
/// instead, is cut off as well, while it finishes the epoch with an update of the same number. The two differ
/// in where the log starts. A start with all devices is not refused for that.
pub(crate) fn an_update_that_reached_a_device_under_construction_alone_makes_no_claim() {
    for seed in 0..trial(3) {
        let shape =
            SimShape::new(2, 1, CHUNK as u32, 8).logged(KINDS[seed as usize % KINDS.len()], 256 << 10);
        let world = SimWorld::new(shape, 4 << 20);
        for (first, second) in (30..64).flat_map(|first| (4..28).map(move |second| (first, second))) {
            let mut sim = SimArray::create_in(&world, seed);
            let old = sim.disk_of(1).expect("in service");
            disk(&mut sim, old).dead = true;
            sim.submit(ClientRequest::Flush);
            while states(&sim)[1] == MemberState::Online {
                sim.step();
            }
            let device = sim.add_blank_disk();
            let new = device.device.0;
            sim.submit_admin(AdminRequest::Replace { member: MemberIndex(1), device });
            for _ in 0..first {
                if !sim.step() {
                    sim.sleep(100);
                }
            }
            let cut = |sim: &SimArray, kept: &dyn Fn(u32) -> bool| {
                sim.wreck().settle(true, |_, id| if kept(id) { Fate::Kept } else { Fate::Lost })
            };
            let start = |disks| {
                let started = world.start(disks, false, Random::new(second));
                started.unwrap_or_else(|error| panic!("seed {seed}, {first} and {second} steps: {error}"))
            };
            let mut disks = cut(&sim, &|id| id == new);
            disks.get_mut(&old).expect("a disk").dead = false;
            disks.get_mut(&new).expect("a disk").dead = true;
            let mut sim = start(disks);
            (0..second).for_each(|_| _ = sim.step());
            let mut disks = cut(&sim, &|id| id != old);
            disks.get_mut(&new).expect("a disk").dead = false;
            let mut array = Checked { sim: start(disks), model: vec![0; shape.volume_bytes as usize] };
            write_again(&mut array);
            array.model[..BLOCK].fill(7);
            array.sim.settle();
            array.verify();
        }
    }
}
