//! Every rule of the crash-safety design is needed: with one of them broken, the explorer finds a violation.
//! If a rule can be broken unnoticed, the explorer has a gap.
//!
//! Rules can be broken in builds with debug assertions only. CALPE_MUTATION: only the mutation of this name.
//! CALPE_SIM_SCENARIO: hunt it only in the scenarios of these names. CALPE_SIM_SEED: start with this seed.

use crate::log_review;
use crate::scenes::{changeover, cold_pages, lanes, page_faults, returning, rollback, trouble, unfinished};
use calpe_core::testing::{
    Aim, Damage, Mutation, OpKinds, PassingFault, Place, SCENARIOS, Scenario, SimWorld, Totals, Trouble,
    atlas, explore, wrong_read_elsewhere,
};
use calpe_core::units::{MemberIndex, Timestamp};
use calpe_core::volume::AdminRequest;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Instant;

/// Most crash points in which a violation must be found; most violations need a few hundred.
const POINTS_MAX: u64 = 300_000;
/// Crash points of one seed.
const POINTS_OF_SEED_MAX: u64 = 3_000;
const POOL_BYTES: usize = 4 << 20;

/// The scenarios in which a mutation shows soonest, and their first seed. If a change elsewhere makes another
/// seed the first to show it, later seeds find it.
fn first(mutation: Mutation) -> (&'static [&'static str], u64) {
    match mutation {
        Mutation::DynamicMajority => (&["halves-2+2"], 2016),
        Mutation::NoQuorum | Mutation::EpochWithoutId | Mutation::BumpNotFinishedFirst => {
            (&["halves-2+2"], 1)
        }
        Mutation::InPlaceBeforeBump | Mutation::AckBeforeBump => (&["lost-2+1", "lost-3+2"], 1),
        Mutation::NoNoteBeforeRedo | Mutation::EpochAfterRedoNorNote => (&["redone-2+1", "redone-3+2"], 1),
        Mutation::BatchByBatch => (&["again-2+1", "again-2+2"], 1),
        Mutation::NoCut => (&["again-2+1", "bare-2+1"], 7),
        Mutation::OverwriteBeforeTailDurable => (&["round-2+1", "round-2+2"], 3),
        Mutation::ReuseBeforeDurable
        | Mutation::FreshDoesNotVoid
        | Mutation::DestageBySlotNumber
        | Mutation::RebuildAfterNote
        | Mutation::PagesNotRewritten => (&["fresh-2+1", "fresh-3+2"], 1),
        Mutation::MapPagesCountedUnflushed => (&["lost-2+1", "lost-3+2"], 1),
        Mutation::LoneLogStartBelieved => (&["hostile-4+2"], 90222),
        Mutation::WritesWhatItReadBefore => (&["blind-bare-2+1", "blind-2+1"], 20),
        Mutation::LanesRefuseAlone | Mutation::JoinedAsTheyEnd => {
            (&["2-lanes-joined-2+1", "8-lanes-joined-2+1"], 1)
        }
        Mutation::FlushForgetsALane
        | Mutation::AnsweredByFirstPart
        | Mutation::LastPartAlone
        | Mutation::ReadsOtherWindow
        | Mutation::WritesOtherWindow
        | Mutation::CutForgotten => (&["2-lanes-2+1", "2-lanes-steady-2+1"], 1),
        Mutation::CasNoStartEntry | Mutation::CasNoRandomNumber => (&["cas-again-2+1"], 1),
        Mutation::CasEntryBeforeChunks
        | Mutation::CasAnsweredBeforeEntry
        | Mutation::CasEntriesNotInOrder
        | Mutation::CasRootBeforePages
        | Mutation::CasRootBeforeEntries
        | Mutation::CasRootNotMended
        | Mutation::CasReuseBeforeEntry
        | Mutation::CasPagesReusedEarly
        | Mutation::CasJournalGivenUpEarly
        | Mutation::CasDuplicateNotCheckedAgain
        | Mutation::CasDuplicateByItsTag
        | Mutation::CasMoveNotChecked
        | Mutation::CasReadNotCompared => (&["cas-tight-2+1", "cas-full-2+1", "cas-cold-2+1"], 1),
        _ => (&["steady-2+1", "bare-2+1"], 1),
    }
}

/// Hunts the rule that a damaged block of data does not damage its row.
fn hunt_by_damage(mutation: Mutation) -> Result<String, String> {
    let scenario = SCENARIOS.iter().find(|scenario| scenario.name == "logged-8+3").expect("a scenario");
    let world = SimWorld::new(scenario.shape, POOL_BYTES);
    let aim = Aim { place: Some(Place::Parity), damage: Some(Damage::Flip), beyond: false };
    for seed in 0..200 {
        if let Err(what) = mutation.with(|| atlas(&world, scenario, aim, seed)) {
            let what: String = what.chars().take(160).collect();
            return Ok(format!("{}: {what}", mutation.name()));
        }
    }
    Err(format!("{}: NOT FOUND by damage", mutation.name()))
}

/// Hunts the rule that an error that goes away leaves nothing behind.
fn hunt_by_page_faults(mutation: Mutation) -> Result<String, String> {
    let moment = Timestamp(500_000_000);
    for seed in 0..24 {
        let scene = || {
            page_faults::old_map_page(moment, seed)?;
            page_faults::pages_unreadable_for_a_moment(seed.is_multiple_of(2), 1_000, seed)?;
            page_faults::pages_unreadable_and_a_power_cut(seed)?;
            page_faults::flushed_batch_unreadable(500, seed)?;
            let others = page_faults::OtherCopies::Rotten;
            page_faults::only_a_returning_member_has_pages(page_faults::shape(2, 1, 200), others, seed)?;
            let (own, others) =
                (returning::Harm::Rotten, (returning::Harm::Rotten, returning::OthersHarmed::Both));
            returning::an_older_version_is_there(page_faults::shape(2, 1, 200), own, others, seed)?;
            page_faults::member_comes_late(seed).map(drop)
        };
        let result = mutation.with(|| catch_unwind(AssertUnwindSafe(scene)));
        if let Err(what) = result.unwrap_or_else(|_| Err("panic".into())) {
            let what: String = what.chars().take(160).collect();
            return Ok(format!("{}: seed {seed}: {what}", mutation.name()));
        }
    }
    Err(format!("{}: NOT FOUND by page faults", mutation.name()))
}

/// Hunts the rules of pages that are read from one copy.
fn hunt_by_cold_pages(mutation: Mutation) -> Result<String, String> {
    for seed in 0..12 {
        let shape = cold_pages::shape(2, 1);
        let scene = || match mutation {
            Mutation::AnyVersionBelieved => cold_pages::copies_that_lost_a_write(shape, seed),
            Mutation::NewestWrittenOver => cold_pages::writes_of_pages_cut_off(shape, seed),
            Mutation::ViewPagePlaceKept | Mutation::ViewPageVersionNotCompared => {
                cold_pages::old_blocks_and_pages_read_elsewhere(shape, seed)
            }
            _ => cold_pages::a_device_that_joins_without_pages(shape, seed),
        };
        let result = mutation.with(|| catch_unwind(AssertUnwindSafe(scene)));
        if let Err(what) = result.unwrap_or_else(|_| Err("panic".into())) {
            let what: String = what.chars().take(160).collect();
            return Ok(format!("{}: seed {seed}: {what}", mutation.name()));
        }
    }
    Err(format!("{}: NOT FOUND by cold pages", mutation.name()))
}

/// Hunts the rules of lanes that a crash alone does not show. The scenes pass while the rule is kept
/// (tests/sim/lanes.rs, tests/sim/changeover.rs).
fn hunt_by_lanes(mutation: Mutation) -> Result<String, String> {
    for seed in 0..8 {
        let scene = || match mutation {
            Mutation::LostWritesOfALaneUntold => lanes::lost_writes_are_told(seed % 4),
            Mutation::FastZeroesInLastLane => lanes::fast_zeroes(2),
            Mutation::PartErrorForgotten => lanes::errors_of_one_lane_are_told(seed as u64),
            Mutation::LaneChangesOverAlone => changeover::new_disk_fails_in_the_last_lane(2, seed as u64),
            Mutation::LetsGoOfWhatItNeeds => lanes::kept_for_last_copies(seed as u64),
            Mutation::CancelledInSomeLanes => {
                changeover::cancelled_at_any_moment(2, true, seed as u64).map(drop)
            }
            _ => lanes::page_written_into_another_lane(seed as u64),
        };
        let result = mutation.with(|| catch_unwind(AssertUnwindSafe(scene)));
        if let Err(what) = result.unwrap_or_else(|_| Err("panic".into())) {
            let what: String = what.chars().take(160).collect();
            return Ok(format!("{}: {seed}: {what}", mutation.name()));
        }
    }
    Err(format!("{}: NOT FOUND by lanes", mutation.name()))
}

fn hunt_by_trouble(mutation: Mutation) -> Result<String, String> {
    assert_eq!(trouble::cost_of_faults(mutation), None, "{} while it is kept", mutation.name());
    match mutation.with(|| trouble::cost_of_faults(mutation)) {
        Some(what) => Ok(format!("{}: {what}", mutation.name())),
        None => Err(format!("{}: NOT FOUND by trouble", mutation.name())),
    }
}

/// Hunts the rule that rolled-back members are recognised, and no honest one is taken for one. The scenes
/// pass while the rule is kept (tests/sim/rollback.rs).
fn hunt_by_rollback(mutation: Mutation) -> Result<String, String> {
    let scene: fn() = match mutation {
        Mutation::NoUpdateCount => rollback::a_member_as_it_was_one_start_earlier_is_rebuilt_and_never_read,
        Mutation::CompleteOfItself => rollback::members_that_an_update_did_not_reach_are_not_old,
        Mutation::RewrittenTailBelieved => {
            rollback::a_replay_over_a_rolled_back_member_that_is_cut_off_is_done_again
        }
        Mutation::NewerIsStale => rollback::the_member_that_is_newer_than_what_is_served_is_not_built_over,
        Mutation::OtherHistoryIsStale => log_review::a_device_of_another_history_is_not_built_over,
        Mutation::MapPagesNotCounted => {
            rollback::pages_of_the_map_that_look_unwritten_and_were_written_are_missed
        }
        Mutation::LostWritesUntold => {
            log_review::clients_are_told_when_writes_are_lost_that_they_did_not_flush_and_only_then
        }
        Mutation::LeftTailNotChecked => rollback::a_member_rolled_back_while_it_is_out_returns_whole,
        Mutation::ToldTailAlone => {
            rollback::a_member_that_leaves_before_it_is_told_what_is_in_place_is_caught_up
        }
        Mutation::NewDeviceInOldEpoch => unfinished::a_device_that_comes_in_before_an_epoch_is_complete_is_built,
        Mutation::CaughtUpFromBeforeJoin => unfinished::a_device_as_it_was_while_it_was_built_is_not_caught_up,
        Mutation::BelievesWhatWasBuilt => {
            rollback::a_device_that_is_built_and_was_rolled_back_over_a_kill_is_whole_when_it_joins
        }
        Mutation::CleanOfOthersBelieved => rollback::slots_not_compared_before_a_stop_are_not_believed,
        Mutation::WritesInEpochPassedOver => {
            rollback::a_rolled_back_member_and_as_many_others_out_as_there_is_parity_read_nothing_old_without_a_word
        }
        _ => rollback::a_member_as_it_was_while_the_array_ran_counts_as_one_fault_and_no_more,
    };
    let Err(panic) = mutation.with(|| catch_unwind(AssertUnwindSafe(scene))) else {
        return Err(format!("{}: NOT FOUND by rollback", mutation.name()));
    };
    let what = panic.downcast_ref::<String>().map_or("panic", String::as_str);
    let what: String = what.chars().take(160).collect();
    Ok(format!("{}: {what}", mutation.name()))
}

/// What read errors that should cost nothing did cost: block 0 cannot be read afterwards.
fn cost_of_read_errors(mutation: Mutation) -> Option<String> {
    let parity = if mutation == Mutation::NoPatience { 2 } else { 1 };
    let mut sim = trouble::filled(2, parity);
    let start = sim.data_region().start;
    let away = if parity == 2 { 3 } else { 0 };
    let disk = sim.disk_of(away).expect("in service");
    sim.admin(AdminRequest::Offline { member: MemberIndex(away) }).expect("it leaves");
    let bad = if parity == 2 { 0 } else { 1 };
    sim.disks.get_mut(&bad).expect("a disk").bad_blocks.insert(start / 4096);
    if parity == 2 {
        let moment = Timestamp(sim.now().0 + 1_000_000_000);
        let fault = PassingFault::new(Trouble::Medium)
            .on(OpKinds::READS)
            .within(std::iter::once(start..start + 4096));
        sim.disks.get_mut(&2).expect("a disk").inject(fault.until(moment));
    }
    sim.write(trouble::CHUNK as u64, &[9; 4096]).expect("the row can be written all the same");
    if parity == 1 {
        let device = sim.reopen_disk(disk);
        sim.admin(AdminRequest::Online { member: MemberIndex(away), device }).expect("it returns");
        sim.settle();
    }
    sim.read(0, 4096).err().map(|error| format!("block 0: {error}"))
}

/// What was lost when a member was replaced while a row could not be read for some seconds, and then another
/// member was lost.
fn cost_of_a_replacement() -> Option<String> {
    let mut sim = trouble::filled(2, 1);
    let start = sim.data_region().start;
    let until = Timestamp(sim.now().0 + 9_000_000_000);
    for disk in 0..2 {
        let fault = PassingFault::new(Trouble::Medium)
            .on(OpKinds::READS)
            .within(std::iter::once(start..start + 4096));
        sim.disks.get_mut(&disk).expect("a disk").inject(fault.until(until));
    }
    let device = sim.add_blank_disk();
    sim.admin(AdminRequest::Replace { member: MemberIndex(1), device }).expect("it begins");
    while sim.status().members[1].replacement.is_some() {
        if !sim.step() {
            sim.sleep(100);
        }
    }
    sim.admin(AdminRequest::Offline { member: MemberIndex(0) }).expect("it leaves");
    sim.sleep(10_000);
    sim.read(0, 4096).err().map(|error| format!("block 0: {error}"))
}

/// Wrong bytes that are read without an error after a write of three columns of four, in a stripe in which
/// two blocks of a row are damaged and one may be.
fn wrong_after_a_large_write() -> Option<String> {
    for (one, other) in (0..5).flat_map(|one| (0..one).map(move |other| (one, other))) {
        let mut sim = trouble::filled(4, 1);
        let before = sim.read(3 * trouble::CHUNK as u64, trouble::CHUNK).expect("it is filled");
        for disk in [one, other] {
            let start = sim.data_region().start;
            sim.disks.get_mut(&disk).expect("a disk").flip(start, 4);
        }
        sim.write(0, &[9; 3 * trouble::CHUNK]).expect("what is lost is set aside");
        for block in 0..trouble::CHUNK / 4096 {
            let bytes = block * 4096..(block + 1) * 4096;
            match sim.read((3 * trouble::CHUNK + bytes.start) as u64, 4096) {
                Ok(read) if read[..] != before[bytes] => {
                    return Some(format!("block {block}, with disks {one} and {other} damaged"));
                }
                Ok(_) | Err(_) => {}
            }
        }
    }
    None
}

fn hunt_by_read_errors(mutation: Mutation) -> Result<String, String> {
    let cost = || match mutation {
        Mutation::JoinsLacking => cost_of_a_replacement(),
        Mutation::TakesAlongWhatIsMissing => wrong_after_a_large_write(),
        _ => cost_of_read_errors(mutation),
    };
    assert_eq!(cost(), None, "{} while it is kept", mutation.name());
    match mutation.with(cost) {
        Some(what) => Ok(format!("{}: {what}", mutation.name())),
        None => Err(format!("{}: NOT FOUND by errors of reads", mutation.name())),
    }
}

/// Hunts the rules of what readers on other threads are shown, by loads without crashes.
fn hunt_by_reads_elsewhere(mutation: Mutation) -> Result<String, String> {
    match wrong_read_elsewhere(mutation) {
        Some(what) => Ok(format!("{}: {}", mutation.name(), what.chars().take(160).collect::<String>())),
        None => Err(format!("{}: NOT FOUND by reads elsewhere", mutation.name())),
    }
}

fn hunt(mutation: Mutation) -> Result<String, String> {
    match mutation {
        Mutation::ViewWriteLate
        | Mutation::ViewImagesLate
        | Mutation::ViewMoveLate
        | Mutation::ViewDiscardLate
        | Mutation::ViewMembersLate
        | Mutation::ViewTicketNotCompared => return hunt_by_reads_elsewhere(mutation),
        Mutation::ViewPagePlaceKept | Mutation::ViewPageVersionNotCompared => {
            return hunt_by_cold_pages(mutation);
        }
        Mutation::UnreadTakenForOld
        | Mutation::UnreadTakenForLost
        | Mutation::UnreadWrittenOver
        | Mutation::UnreadTailDropped
        | Mutation::ReturningCopyVoided
        | Mutation::OfferNotWeighed
        | Mutation::AbsentTakenForLost => return hunt_by_page_faults(mutation),
        Mutation::AnyVersionBelieved | Mutation::NewestWrittenOver | Mutation::PlacesOutliveReturn => {
            return hunt_by_cold_pages(mutation);
        }
        Mutation::ShortageIsAFault
        | Mutation::HeldThroughShortage
        | Mutation::LastCopyNotSpared
        | Mutation::HealedErrorsCount => {
            return hunt_by_trouble(mutation);
        }
        Mutation::NoPatience
        | Mutation::LostWithoutEvidence
        | Mutation::RebuildWritesWhatItLacks
        | Mutation::TakesAlongWhatIsMissing
        | Mutation::JoinsLacking => return hunt_by_read_errors(mutation),
        Mutation::NoUpdateCount
        | Mutation::CompleteOfItself
        | Mutation::NoReusedSpace
        | Mutation::NoOwnRedo
        | Mutation::RewrittenTailBelieved
        | Mutation::LeftTailNotChecked
        | Mutation::OtherHistoryIsStale
        | Mutation::NewerIsStale
        | Mutation::MapPagesNotCounted
        | Mutation::LostWritesUntold
        | Mutation::ToldTailAlone
        | Mutation::NewDeviceInOldEpoch
        | Mutation::CaughtUpFromBeforeJoin
        | Mutation::BelievesWhatWasBuilt
        | Mutation::CleanOfOthersBelieved
        | Mutation::WritesInEpochPassedOver => return hunt_by_rollback(mutation),
        Mutation::LostWritesOfALaneUntold
        | Mutation::LanesShareASecret
        | Mutation::LaneChangesOverAlone
        | Mutation::CancelledInSomeLanes
        | Mutation::LetsGoOfWhatItNeeds
        | Mutation::FastZeroesInLastLane
        | Mutation::PartErrorForgotten => return hunt_by_lanes(mutation),
        _ => {}
    }
    if matches!(mutation, Mutation::OldParityNotVerified | Mutation::BlendNotVerified) {
        return hunt_by_damage(mutation);
    }
    let wanted = std::env::var("CALPE_SIM_SCENARIO").ok();
    let wanted: Option<Vec<&str>> = wanted.as_ref().map(|names| names.split(',').collect());
    let (names, first_seed) = first(mutation);
    let names = wanted.as_deref().unwrap_or(names);
    let scenarios: Vec<&Scenario> =
        names.iter().filter_map(|name| SCENARIOS.iter().find(|scenario| scenario.name == *name)).collect();
    let worlds: Vec<SimWorld> =
        scenarios.iter().map(|scenario| SimWorld::new(scenario.shape, POOL_BYTES)).collect();
    let started = Instant::now();
    let mut totals = Totals::default();
    let mut seed =
        std::env::var("CALPE_SIM_SEED").ok().and_then(|text| text.parse().ok()).unwrap_or(first_seed);
    while totals.points < POINTS_MAX {
        for (scenario, world) in scenarios.iter().zip(&worlds) {
            let (found, violation) = mutation.with(|| explore(world, scenario, seed, POINTS_OF_SEED_MAX));
            totals.add(&found);
            if let Some(violation) = violation {
                let what: String = violation.what.chars().take(160).collect();
                return Ok(format!(
                    "{}: after {} points, {:.1} s, {}: {what}",
                    mutation.name(),
                    totals.points,
                    started.elapsed().as_secs_f64(),
                    violation.token
                ));
            }
        }
        seed += 1;
    }
    Err(format!("{}: NOT FOUND in {} points", mutation.name(), totals.points))
}

#[test]
fn a_broken_rule_is_noticed() {
    let wanted = std::env::var("CALPE_MUTATION").ok();
    let jobs: Vec<Mutation> = Mutation::ALL
        .iter()
        .filter(|mutation| match &wanted {
            Some(wanted) => wanted == mutation.name(),
            // Those of the cas volume, which is being built, are looked for by name.
            None => !mutation.name().starts_with("cas-"),
        })
        .copied()
        .collect();
    let next = AtomicUsize::new(0);
    let missed = Mutex::new(Vec::new());
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    std::thread::scope(|scope| {
        for _ in 0..threads {
            scope.spawn(|| {
                // A broken rule may make the code panic; that counts as found and is not printed.
                while let Some(mutation) = jobs.get(next.fetch_add(1, Ordering::Relaxed)) {
                    match hunt(*mutation) {
                        Ok(found) => println!("{found}"),
                        Err(error) => {
                            println!("{error}");
                            missed.lock().expect("no thread panics with it").push(mutation.name());
                        }
                    }
                }
            });
        }
    });
    let missed = missed.into_inner().expect("no thread panics with it");
    assert!(missed.is_empty(), "broken and not noticed: {missed:?}");
}
