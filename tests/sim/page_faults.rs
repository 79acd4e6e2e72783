//! Metadata pages and the end of the log that cannot be read for a moment, or for long (rules T3, R5 and T8): an error that
//! goes away leaves nothing behind, and what is not known is never served as if it were. Each test is named after what must
//! hold.

use crate::scenes::page_faults::*;
use calpe::units::Timestamp;

/// Longer than a start tries.
const FOR_GOOD: Timestamp = Timestamp(u64::MAX);

#[test]
fn pages_that_cannot_be_read_for_a_moment_cost_nothing() {
    for offline in [false, true] {
        for seed in 0..6 {
            pages_unreadable_for_a_moment(offline, 1_000, seed)
                .unwrap_or_else(|what| panic!("{seed}: {what}"));
        }
    }
}

#[test]
fn pages_that_cannot_be_read_for_long_cost_errors_as_long() {
    for offline in [false, true] {
        for seed in 0..6 {
            pages_unreadable_for_a_moment(offline, 8_000, seed)
                .unwrap_or_else(|what| panic!("{seed}: {what}"));
        }
    }
}

#[test]
fn an_old_page_of_the_stripe_map_is_not_taken_for_the_newest() {
    for seed in 0..12 {
        for until in [Timestamp(500_000_000), FOR_GOOD] {
            old_map_page(until, seed).unwrap_or_else(|what| panic!("{seed} {until:?}: {what}"));
        }
    }
}

#[test]
fn pages_that_cannot_be_read_for_a_moment_during_a_replay_cost_nothing() {
    for seed in 0..6 {
        pages_unreadable_during_replay(500, seed).unwrap_or_else(|what| panic!("{seed}: {what}"));
    }
}

#[test]
fn what_could_not_be_read_for_a_moment_survives_a_power_cut_later() {
    for seed in 0..12 {
        pages_unreadable_and_a_power_cut(seed).unwrap_or_else(|what| panic!("{seed}: {what}"));
    }
}

#[test]
fn what_only_a_returning_member_can_tell_of_pages_is_not_destroyed() {
    use OtherCopies::*;
    for others in [Rotten, Unreadable, SomeRotten, RottenAndOneOwnPlace] {
        for (data, parity) in [(2, 1), (3, 1), (2, 2)] {
            for seed in 0..4 {
                only_a_returning_member_has_pages(shape(data, parity, 200), others, seed)
                    .unwrap_or_else(|what| panic!("{data}+{parity} {others:?} {seed}: {what}"));
            }
        }
    }
}

/// Of many seeds, faults of half a second never make a start refuse. Returns how many that do not end did.
fn refusals(scene: fn(u64, u64) -> Result<bool, String>) -> usize {
    let run = |millis, seed| scene(millis, seed).unwrap_or_else(|what| panic!("{seed} {millis}: {what}"));
    let refused = |seed: &u64| {
        assert!(!run(500, *seed), "{seed}: it can be read again");
        run(u64::MAX / 1_000_000, *seed)
    };
    (0..12).filter(refused).count()
}

#[test]
fn a_flushed_batch_is_not_dropped_because_it_cannot_be_read_now() {
    assert!(refusals(flushed_batch_unreadable) > 3);
}

#[test]
fn what_was_flushed_is_not_lost_because_the_logs_cannot_be_read_now() {
    assert!(refusals(logs_unreadable) > 6);
}

#[test]
fn an_error_that_passes_costs_nothing_where_a_block_of_the_log_is_rotten_besides() {
    assert!(refusals(image_rotten_and_log_unreadable) > 3);
}

#[test]
fn rings_that_cannot_be_read_where_the_log_is_not_do_not_keep_an_array_from_starting() {
    for seed in 0..6 {
        unused_ring_unreadable(seed).unwrap_or_else(|what| panic!("{seed}: {what}"));
    }
}

#[test]
fn a_member_that_cannot_be_read_at_all_is_one_fault_and_no_more() {
    for seed in 0..12 {
        one_member_unreadable(seed).unwrap_or_else(|what| panic!("{seed}: {what}"));
    }
}

#[test]
fn what_was_flushed_is_not_lost_because_a_member_comes_late() {
    let scene = |seed| member_comes_late(seed).unwrap_or_else(|what| panic!("{seed}: {what}"));
    assert!((0..12).filter(|seed| scene(*seed)).count() > 2, "hardly any start had to be refused");
}
