//! The scenarios explored in every run of the tests: small arrays of several geometries under mixed loads.

use super::{FaultKind, FaultKinds, Next, Scenario, SimShape, Workload};
use crate::format::ChecksumKind;

const SMALL: u32 = 4096;
const TWO_ROWS: u32 = 8192;

const LOAD: Workload = Workload::MIXED;

const fn scenario(name: &'static str, shape: SimShape) -> Scenario {
    Scenario {
        name,
        shape,
        workload: LOAD,
        steps: 3000,
        moments_one_in: 24,
        variants: 16,
        depth_max: 3,
        sweep_one_in: 24,
        any_one_in: 4,
        sides_one_in: 0,
        scrub_one_in: 4,
        spoil_one_in: 8,
        loss_within: 0,
        next: Next::MIXED,
        steps_after: 60,
    }
}

/// A ring that is full after a few dozen batches.
const RING: u64 = 256 << 10;

/// A ring that is full after a few batches, so that wrapping, waiting for room and moving the tail happen all
/// the time.
const SMALL_RING: u64 = 96 << 10;

/// The smallest ring that works.
const FULL_RING: u64 = 64 << 10;

/// No member fails and none is replaced: only the log is tested.
const fn steady(name: &'static str, shape: SimShape) -> Scenario {
    let workload = Workload { faults: 0, admin: 0, ..LOAD };
    Scenario { workload, ..scenario(name, shape) }
}

/// Whole stripes all the time, with two free slots for them: slots pass from stripe to stripe.
const fn fresh(name: &'static str, shape: SimShape) -> Scenario {
    let workload = Workload { stripe_writes: 20, small_writes: 10, faults: 0, admin: 0, ..LOAD };
    let shape = SimShape { free_slots: Some(2), ..shape };
    Scenario { workload, ..scenario(name, shape) }
}

/// More writes than the ring has room for: it is always full, and its space is reused as soon as possible.
const fn full(name: &'static str, shape: SimShape) -> Scenario {
    let workload = Workload {
        operations: 40,
        small_writes: 30,
        stripe_writes: 0,
        flushes: 1,
        fua_one_in: 12,
        depth: 16,
        slow_flushes: true,
        faults: 0,
        admin: 0,
        ..LOAD
    };
    let shape = SimShape { log_bytes: Some(FULL_RING), ..shape };
    Scenario { workload, ..scenario(name, shape) }
}

/// Members come and go, and starts are cut short again and again, where only k of 2k members are needed.
const fn epochs(name: &'static str, shape: SimShape) -> Scenario {
    let workload = Workload { operations: 40, small_writes: 6, faults: 2, admin: 2, ..LOAD };
    let scenario = scenario(name, shape);
    Scenario { workload, depth_max: 5, sweep_one_in: 6, any_one_in: 2, ..scenario }
}

/// One stripe is written again and again while flushes take long: the ring wraps round within the caches.
const fn round(name: &'static str, shape: SimShape) -> Scenario {
    let workload = Workload {
        operations: 40,
        small_writes: 30,
        stripe_writes: 0,
        other_writes: 0,
        zeroes: 0,
        reads: 0,
        flushes: 1,
        fua_one_in: 30,
        depth: 8,
        slow_flushes: true,
        faults: 0,
        admin: 0,
        ..LOAD
    };
    Scenario { workload, ..scenario(name, shape) }
}

/// The same blocks are written again and again, each write durable: nearly every image in the log is replaced
/// by a newer one.
const fn again(name: &'static str, shape: SimShape) -> Scenario {
    let workload =
        Workload { small_writes: 10, stripe_writes: 0, other_writes: 0, zeroes: 0, fua_one_in: 2, ..LOAD };
    let scenario = steady(name, shape);
    Scenario {
        workload: Workload { faults: 0, admin: 0, ..workload },
        steps: 1000,
        spoil_one_in: 2,
        ..scenario
    }
}

/// A member is lost soon; runs are short, and every moment after the loss is explored.
const fn lost(name: &'static str, shape: SimShape) -> Scenario {
    let workload = Workload { small_writes: 20, fua_one_in: 3, faults: 0, admin: 0, ..LOAD };
    let scenario = scenario(name, shape);
    Scenario { workload, steps: 320, loss_within: 240, moments_one_in: 96, any_one_in: 2, ..scenario }
}

/// Recoveries are cut short again and again, and their results so far are damaged.
const fn redone(name: &'static str, shape: SimShape) -> Scenario {
    let scenario = steady(name, shape);
    Scenario { next: Next { end: 1, sweep: 6, crash: 0, load: 1 }, sweep_one_in: 8, ..scenario }
}

/// Members that were missing at a start come back soon after it.
const fn back(name: &'static str, shape: SimShape) -> Scenario {
    let workload = Workload { small_writes: 10, faults: 0, admin: 4, ..LOAD };
    let next = Next { end: 1, sweep: 0, crash: 1, load: 4 };
    let scenario = scenario(name, shape);
    Scenario { workload, steps: 400, next, steps_after: 400, any_one_in: 16, ..scenario }
}

/// Hardly any load, but members are lost and starts are cut short while they write their epochs, with an
/// arbitrary choice of members at the next start, where only k of 2k members are needed.
const fn halves(name: &'static str, shape: SimShape) -> Scenario {
    let workload = Workload { small_writes: 6, fua_one_in: 1, faults: 0, admin: 0, ..LOAD };
    let next = Next { end: 1, sweep: 4, crash: 1, load: 2 };
    let scenario = scenario(name, shape);
    Scenario {
        workload,
        steps: 80,
        loss_within: 40,
        depth_max: 5,
        sweep_one_in: 4,
        any_one_in: 1,
        sides_one_in: 2,
        next,
        ..scenario
    }
}

/// Whether the array survives a kind of fault.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Standing {
    /// It does: scenarios with that kind are explored.
    Kept,
    /// It does not yet. Scenarios with that kind are explored only when asked for by name.
    Pending,
}

/// The kinds of faults, each with the rules that it tests, and whether the array keeps them: the only list of
/// kinds that are left out.
pub const FAULT_RULES: &[(FaultKind, &str, Standing)] = &[
    (FaultKind::ReadErrors, "T1, T2", Standing::Kept),
    (FaultKind::WriteErrors, "T2, T5", Standing::Kept),
    (FaultKind::Shortage, "T4", Standing::Kept),
    (FaultKind::NoSpace, "T4", Standing::Kept),
    (FaultKind::Hang, "T7", Standing::Kept),
    (FaultKind::BadSectors, "T1, T5", Standing::Kept),
    (FaultKind::StartErrors, "T3", Standing::Kept),
    (FaultKind::Rollback, "T6", Standing::Kept),
    (FaultKind::Hostile, "T6", Standing::Kept),
    (FaultKind::ReadsEverywhere, "T1, T2", Standing::Kept),
    (FaultKind::Everywhere, "T4", Standing::Kept),
    (FaultKind::RollbackMany, "T6, T8", Standing::Kept),
];

/// The kinds of faults that the array survives.
const KEPT: FaultKinds = {
    let (mut kept, mut at) = (FaultKinds::NONE, 0);
    while at < FAULT_RULES.len() {
        if let (kind, _, Standing::Kept) = FAULT_RULES[at] {
            kept = kept.with(kind);
        }
        at += 1;
    }
    kept
};

/// Whether the array is expected to survive all kinds of faults of this scenario.
#[must_use]
pub const fn is_kept(scenario: &Scenario) -> bool {
    scenario.workload.kinds.without(KEPT).is_empty()
}

/// Members have passing trouble, one after the other.
const fn sick(name: &'static str, shape: SimShape, kinds: FaultKinds) -> Scenario {
    let workload = Workload { passing: 6, kinds, reads: 8, faults: 0, admin: 1, ..LOAD };
    let scenario = scenario(name, shape);
    Scenario { workload, steps: 1500, moments_one_in: 48, variants: 6, ..scenario }
}

/// The same, and members die and are replaced.
const fn sick_and_dying(name: &'static str, shape: SimShape, kinds: FaultKinds) -> Scenario {
    let scenario = sick(name, shape, kinds);
    let workload = Workload { faults: 1, admin: 2, ..scenario.workload };
    Scenario { workload, ..scenario }
}

/// Members have trouble while pages of checksums must be read again and again.
const fn cold(name: &'static str, shape: SimShape, kinds: FaultKinds) -> Scenario {
    let scenario = sick(name, shape, kinds);
    Scenario { steps: 800, moments_one_in: 128, variants: 3, ..scenario }
}

/// Hundreds of sectors cannot be read while everything is read again and again.
const fn sectors(name: &'static str, shape: SimShape) -> Scenario {
    let scenario = sick(name, shape, SECTORS);
    let workload = Workload { passing: 1, small_writes: 20, ..scenario.workload };
    Scenario { workload, steps: 600, moments_one_in: 192, variants: 3, ..scenario }
}

const READS: FaultKinds = FaultKinds::of(&[FaultKind::ReadErrors]);
const WRITES: FaultKinds = FaultKinds::of(&[FaultKind::WriteErrors]);
const SHORTAGE: FaultKinds = FaultKinds::of(&[FaultKind::Shortage]);
const SPACE: FaultKinds = FaultKinds::of(&[FaultKind::NoSpace]);
const HANG: FaultKinds = FaultKinds::of(&[FaultKind::Hang]);
const SECTORS: FaultKinds = FaultKinds::of(&[FaultKind::BadSectors]);
const START: FaultKinds = FaultKinds::of(&[FaultKind::StartErrors, FaultKind::ReadErrors]);
const START_ANY: FaultKinds = FaultKinds::of(&[
    FaultKind::StartErrors,
    FaultKind::ReadErrors,
    FaultKind::WriteErrors,
    FaultKind::Shortage,
    FaultKind::NoSpace,
]);
const ROLLBACK: FaultKinds = FaultKinds::of(&[FaultKind::Rollback]);
const HOSTILE: FaultKinds = FaultKinds::of(&[FaultKind::Hostile]);
const ROLLBACK_MANY: FaultKinds = FaultKinds::of(&[FaultKind::RollbackMany]);
const BLIND: FaultKinds = FaultKinds::of(&[FaultKind::ReadsEverywhere]);
const EVERYWHERE: FaultKinds = FaultKinds::of(&[FaultKind::Everywhere]);

/// All survived kinds except forged superblocks. With those and read errors, a start was refused within the
/// budget: a member with a forged sequence was taken for a rolled-back one.
const HONEST: FaultKinds = KEPT.without(HOSTILE);
const WITHOUT_READ_ERRORS: FaultKinds = FaultKinds::of(&[
    FaultKind::WriteErrors,
    FaultKind::Shortage,
    FaultKind::NoSpace,
    FaultKind::Hang,
    FaultKind::Hostile,
    FaultKind::Everywhere,
]);

/// In two lanes, with a stripe at a time.
const fn in_2(data: u16, parity: u16, chunk: u32, stripes: u64) -> SimShape {
    SimShape::new(data, parity, chunk, stripes).in_lanes(2, 1)
}

/// In eight lanes, with a stripe at a time.
const fn in_8(data: u16, parity: u16, chunk: u32, stripes: u64) -> SimShape {
    SimShape::new(data, parity, chunk, stripes).in_lanes(8, 1)
}

/// Zeroes and reads over several lanes, most of the time. Few requests are under way: zeroes that overlap
/// one are left out.
const fn joined(name: &'static str, shape: SimShape) -> Scenario {
    let workload = Workload { zeroes: 20, reads: 16, small_writes: 6, other_writes: 10, depth: 3, ..LOAD };
    Scenario { workload, ..scenario(name, shape) }
}

/// Crashes at fewer moments: each start is one of eight lanes.
const fn rarer(scenario: Scenario) -> Scenario {
    Scenario { moments_one_in: scenario.moments_one_in * 4, ..scenario }
}

const CRC_2_1: SimShape = SimShape::new(2, 1, SMALL, 5).logged(ChecksumKind::Crc32c, RING);
const CRC_3_2: SimShape = SimShape::new(3, 2, TWO_ROWS, 4).logged(ChecksumKind::Crc32c, RING);
const CRC_2_2: SimShape = SimShape::new(2, 2, SMALL, 4).logged(ChecksumKind::Crc32c, SMALL_RING);
const BLAKE_2_1: SimShape = SimShape::new(2, 1, SMALL, 5).logged(ChecksumKind::Blake3, RING);
const BLAKE_4_2: SimShape = SimShape::new(4, 2, SMALL, 4).logged(ChecksumKind::Blake3, RING);
const BARE_2_1: SimShape = SimShape::new(2, 1, SMALL, 5).logged(ChecksumKind::None, RING);
const BARE_2_2: SimShape = SimShape::new(2, 2, SMALL, 4).logged(ChecksumKind::None, RING);
/// An array with more pages of checksums than memory holds.
const COLD_2_1: SimShape = SimShape {
    page_cache: Some(8 << 10),
    ..SimShape::new(2, 1, 32 << 10, 24).logged(ChecksumKind::Crc32c, RING)
};
/// An array with more blocks on every member than the number of errors that makes a member suspect.
const LARGE_2_1: SimShape = SimShape::new(2, 1, 64 << 10, 40).logged(ChecksumKind::Crc32c, RING);

/// A cas volume of 32 blocks on an array of `stripes` stripes of 2 + 1 chunks of 16 KiB.
const fn cas_2_1(stripes: u64) -> SimShape {
    let shape = SimShape { volume_bytes: 32 * 4096, ..SimShape::new(2, 1, 16 << 10, 1) };
    shape.logged(ChecksumKind::Blake3, RING).cas_on(stripes)
}

/// A cas volume: the array below takes care of members, so the load is on the volume.
const fn cas(name: &'static str, shape: SimShape) -> Scenario {
    let scenario = scenario(name, shape);
    let workload = Workload { common_one_in: 2, zeroes: 3, ..LOAD };
    Scenario { workload, spoil_one_in: u64::MAX, steps: 1500, moments_one_in: 48, ..scenario }
}

/// A cas volume that has no room for all its blocks: segments and ids are used again and again.
const fn cas_full(name: &'static str, shape: SimShape) -> Scenario {
    let scenario = cas(name, shape);
    let workload = Workload { common_one_in: 6, small_writes: 8, stripe_writes: 10, zeroes: 4, ..LOAD };
    Scenario { workload, ..scenario }
}

/// The same few writes to a cas volume again and again, and crashes soon after starts: entries of the journal
/// are made that may equal lost ones.
const fn cas_again(name: &'static str) -> Scenario {
    let scenario = cas(name, SimShape { volume_bytes: 2 * 4096, ..cas_2_1(32) });
    let workload = Workload {
        operations: 20,
        small_writes: 10,
        stripe_writes: 0,
        other_writes: 0,
        reads: 0,
        flushes: 1,
        common_one_in: 1,
        zeroes: 0,
        faults: 0,
        admin: 0,
        ..scenario.workload
    };
    let next = Next { end: 1, sweep: 2, crash: 1, load: 4 };
    let (steps, moments_one_in) = (300, 16);
    Scenario {
        workload,
        steps,
        moments_one_in,
        depth_max: 6,
        sweep_one_in: 6,
        any_one_in: 16,
        next,
        steps_after: 30,
        ..scenario
    }
}

/// A cas volume on an array whose members have passing trouble, die and are replaced.
const fn cas_sick(name: &'static str, kinds: FaultKinds) -> Scenario {
    let scenario = cas(name, cas_2_1(48));
    let workload = Workload { passing: 6, kinds, reads: 8, faults: 1, admin: 2, ..scenario.workload };
    Scenario { workload, variants: 6, ..scenario }
}

/// The scenarios; a replay token begins with the name of one.
pub const SCENARIOS: &[Scenario] = &[
    scenario("logged-2+1", SimShape::new(2, 1, SMALL, 5).logged(ChecksumKind::Crc32c, RING)),
    scenario("logged-3+2", SimShape::new(3, 2, TWO_ROWS, 4).logged(ChecksumKind::Crc32c, RING)),
    scenario("logged-4+2", SimShape::new(4, 2, SMALL, 4).logged(ChecksumKind::Blake3, RING)),
    scenario("logged-8+3", SimShape::new(8, 3, SMALL, 3).logged(ChecksumKind::Crc32c, RING)),
    scenario("logged-5+5", SimShape::new(5, 5, SMALL, 3).logged(ChecksumKind::Crc32c, RING)),
    scenario("bare-2+1", SimShape::new(2, 1, SMALL, 5).logged(ChecksumKind::None, RING)),
    scenario("bare-3+2", SimShape::new(3, 2, TWO_ROWS, 4).logged(ChecksumKind::None, RING)),
    scenario("tight-2+1", SimShape::new(2, 1, TWO_ROWS, 5).logged(ChecksumKind::Blake3, SMALL_RING)),
    scenario("tight-2+2", SimShape::new(2, 2, SMALL, 4).logged(ChecksumKind::Crc32c, SMALL_RING)),
    steady("steady-2+1", SimShape::new(2, 1, SMALL, 5).logged(ChecksumKind::None, SMALL_RING)),
    steady("steady-4+2", SimShape::new(4, 2, TWO_ROWS, 4).logged(ChecksumKind::Crc32c, SMALL_RING)),
    fresh("fresh-2+1", SimShape::new(2, 1, SMALL, 3).logged(ChecksumKind::None, RING)),
    fresh("fresh-3+2", SimShape::new(3, 2, SMALL, 3).logged(ChecksumKind::Crc32c, SMALL_RING)),
    full("full-2+1", SimShape::new(2, 1, SMALL, 5).logged(ChecksumKind::None, FULL_RING)),
    full("full-3+2", SimShape::new(3, 2, SMALL, 4).logged(ChecksumKind::Crc32c, FULL_RING)),
    epochs("epochs-2+2", SimShape::new(2, 2, SMALL, 2).logged(ChecksumKind::None, RING)),
    epochs("epochs-2+1", SimShape::new(2, 1, SMALL, 2).logged(ChecksumKind::Crc32c, RING)),
    round("round-2+1", SimShape::new(2, 1, SMALL, 2).logged(ChecksumKind::None, RING)),
    round("round-2+2", SimShape::new(2, 2, SMALL, 2).logged(ChecksumKind::Crc32c, RING)),
    again("again-2+1", SimShape::new(2, 1, SMALL, 1).logged(ChecksumKind::None, SMALL_RING)),
    again("again-2+2", SimShape::new(2, 2, SMALL, 2).logged(ChecksumKind::Crc32c, SMALL_RING)),
    redone("redone-2+1", SimShape::new(2, 1, SMALL, 3).logged(ChecksumKind::None, SMALL_RING)),
    redone("redone-3+2", SimShape::new(3, 2, SMALL, 3).logged(ChecksumKind::Crc32c, SMALL_RING)),
    back("back-2+1", SimShape::new(2, 1, SMALL, 3).logged(ChecksumKind::None, SMALL_RING)),
    back("back-3+2", SimShape::new(3, 2, SMALL, 3).logged(ChecksumKind::Crc32c, SMALL_RING)),
    lost("lost-2+1", SimShape::new(2, 1, SMALL, 3).logged(ChecksumKind::None, SMALL_RING)),
    lost("lost-3+2", SimShape::new(3, 2, SMALL, 3).logged(ChecksumKind::Crc32c, SMALL_RING)),
    halves("halves-2+2", SimShape::new(2, 2, SMALL, 1).logged(ChecksumKind::None, RING)),
    sick("reads-2+1", CRC_2_1, READS),
    sick("reads-3+2", CRC_3_2, READS),
    sick("reads-bare-2+2", BARE_2_2, READS),
    cold("reads-cold-2+1", COLD_2_1, READS),
    sick("writes-2+1", CRC_2_1, WRITES),
    sick("writes-3+2", CRC_3_2, WRITES),
    sick("shortage-2+1", CRC_2_1, SHORTAGE),
    sick("shortage-4+2", BLAKE_4_2, SHORTAGE),
    sick("space-2+1", CRC_2_1, SPACE),
    sick("space-4+2", BLAKE_4_2, SPACE),
    sick("hang-2+1", CRC_2_1, HANG),
    sick("hang-3+2", CRC_3_2, HANG),
    sectors("sectors-2+1", LARGE_2_1),
    sick("sectors-3+2", CRC_3_2, SECTORS),
    sick("start-2+1", CRC_2_1, START),
    sick("start-3+2", CRC_3_2, START),
    sick("start-any-4+2", BLAKE_4_2, START_ANY),
    sick("rollback-2+1", BLAKE_2_1, ROLLBACK),
    sick("rollback-3+2", CRC_3_2, ROLLBACK),
    sick("rollback-bare-2+1", BARE_2_1, ROLLBACK),
    sick("hostile-2+1", CRC_2_1, HOSTILE),
    sick("hostile-4+2", BLAKE_4_2, HOSTILE),
    sick("rollback-many-2+1", CRC_2_1, ROLLBACK_MANY),
    sick("rollback-many-4+2", BLAKE_4_2, ROLLBACK_MANY),
    sick("blind-2+1", CRC_2_1, BLIND),
    sick("blind-3+2", CRC_3_2, BLIND),
    sick("blind-bare-2+1", BARE_2_1, BLIND),
    cold("blind-cold-2+1", COLD_2_1, BLIND),
    sick("everywhere-2+1", CRC_2_1, EVERYWHERE),
    sick("everywhere-4+2", BLAKE_4_2, EVERYWHERE),
    sick_and_dying("sick-2+1", CRC_2_1, WITHOUT_READ_ERRORS),
    sick_and_dying("sick-2+2", CRC_2_2, WITHOUT_READ_ERRORS),
    sick_and_dying("sick-4+2", BLAKE_4_2, WITHOUT_READ_ERRORS),
    cold("sick-cold-2+1", COLD_2_1, WITHOUT_READ_ERRORS),
    sick_and_dying("mixed-2+1", CRC_2_1, HONEST),
    sick_and_dying("mixed-2+2", CRC_2_2, HONEST),
    sick_and_dying("mixed-4+2", BLAKE_4_2, HONEST),
    cold("mixed-cold-2+1", COLD_2_1, HONEST),
    scenario("2-lanes-2+1", in_2(2, 1, SMALL, 5).logged(ChecksumKind::Crc32c, RING)),
    scenario(
        "2-lanes-3+2",
        SimShape::new(3, 2, TWO_ROWS, 8).in_lanes(2, 2).logged(ChecksumKind::Blake3, RING),
    ),
    steady("2-lanes-steady-2+1", in_2(2, 1, SMALL, 5).logged(ChecksumKind::None, SMALL_RING)),
    joined("2-lanes-joined-2+1", in_2(2, 1, SMALL, 7).logged(ChecksumKind::Crc32c, RING)),
    fresh("2-lanes-fresh-3+2", in_2(3, 2, SMALL, 5).logged(ChecksumKind::Crc32c, SMALL_RING)),
    full("2-lanes-full-2+1", in_2(2, 1, SMALL, 6).logged(ChecksumKind::None, FULL_RING)),
    epochs("2-lanes-epochs-2+2", in_2(2, 2, SMALL, 4).logged(ChecksumKind::None, RING)),
    epochs("2-lanes-epochs-2+1", in_2(2, 1, SMALL, 4).logged(ChecksumKind::Crc32c, RING)),
    redone("2-lanes-redone-3+2", in_2(3, 2, SMALL, 4).logged(ChecksumKind::Crc32c, SMALL_RING)),
    back("2-lanes-back-2+1", in_2(2, 1, SMALL, 4).logged(ChecksumKind::None, SMALL_RING)),
    back("2-lanes-back-3+2", in_2(3, 2, SMALL, 4).logged(ChecksumKind::Crc32c, SMALL_RING)),
    lost("2-lanes-lost-2+1", in_2(2, 1, SMALL, 4).logged(ChecksumKind::None, SMALL_RING)),
    sick("2-lanes-writes-3+2", in_2(3, 2, SMALL, 6).logged(ChecksumKind::Crc32c, RING), WRITES),
    sick("2-lanes-start-2+1", in_2(2, 1, SMALL, 6).logged(ChecksumKind::Crc32c, RING), START),
    sick("2-lanes-rollback-3+2", in_2(3, 2, SMALL, 6).logged(ChecksumKind::Crc32c, RING), ROLLBACK),
    sick_and_dying("2-lanes-mixed-2+1", in_2(2, 1, SMALL, 6).logged(ChecksumKind::Crc32c, RING), HONEST),
    sick_and_dying("2-lanes-mixed-4+2", in_2(4, 2, SMALL, 6).logged(ChecksumKind::Blake3, RING), HONEST),
    rarer(scenario("8-lanes-2+1", in_8(2, 1, SMALL, 18).logged(ChecksumKind::Crc32c, RING))),
    rarer(steady("8-lanes-steady-4+2", in_8(4, 2, SMALL, 14).logged(ChecksumKind::Blake3, SMALL_RING))),
    rarer(joined("8-lanes-joined-2+1", in_8(2, 1, SMALL, 18).logged(ChecksumKind::Crc32c, RING))),
    rarer(epochs("8-lanes-epochs-2+1", in_8(2, 1, SMALL, 9).logged(ChecksumKind::Crc32c, RING))),
    rarer(redone("8-lanes-redone-2+1", in_8(2, 1, SMALL, 9).logged(ChecksumKind::None, SMALL_RING))),
    rarer(back("8-lanes-back-3+2", in_8(3, 2, SMALL, 9).logged(ChecksumKind::Crc32c, SMALL_RING))),
    rarer(lost("8-lanes-lost-2+1", in_8(2, 1, SMALL, 9).logged(ChecksumKind::None, SMALL_RING))),
    cas("cas-2+1", cas_2_1(64)),
    cas("cas-tight-2+1", cas_2_1(32)),
    cas("cas-cold-2+1", SimShape { page_cache: Some(8 << 10), ..cas_2_1(48) }),
    cas_full("cas-full-2+1", SimShape { volume_bytes: 256 * 4096, ..cas_2_1(32) }),
    cas_again("cas-again-2+1"),
    cas_sick("cas-reads-2+1", READS),
    cas_sick("cas-writes-2+1", WRITES),
    cas_sick("cas-shortage-2+1", SHORTAGE),
    cas_sick("cas-space-2+1", SPACE),
    cas_sick("cas-hang-2+1", HANG),
    cas_sick("cas-sectors-2+1", SECTORS),
    cas_sick("cas-start-2+1", START),
    cas_sick("cas-rollback-2+1", ROLLBACK),
    cas_sick("cas-rollback-many-2+1", ROLLBACK_MANY),
    cas_sick("cas-blind-2+1", BLIND),
    cas_sick("cas-everywhere-2+1", EVERYWHERE),
    cas_sick("cas-mixed-2+1", HONEST),
    rarer(sick_and_dying(
        "8-lanes-mixed-2+1",
        in_8(2, 1, SMALL, 16).logged(ChecksumKind::Crc32c, RING),
        HONEST,
    )),
];

/// The scenario that a replay token names.
#[must_use]
pub fn scenario_of(token: &str) -> Option<Scenario> {
    let name = token.split(':').next()?;
    SCENARIOS.iter().find(|scenario| scenario.name == name).copied()
}
