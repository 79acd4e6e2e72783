//! New devices that are added while an epoch is not yet on all its members, or that join in such an epoch.

use crate::scenes::unfinished as scenes;

#[test]
fn a_device_that_comes_in_before_an_epoch_is_complete_is_built() {
    scenes::a_device_that_comes_in_before_an_epoch_is_complete_is_built();
}

#[cfg(debug_assertions)]
#[test]
fn a_device_that_is_named_by_an_epoch_from_before_it_is_built() {
    scenes::a_device_that_is_named_by_an_epoch_from_before_it_is_built();
}

#[test]
fn a_device_that_leaves_before_an_epoch_is_complete_is_not_caught_up() {
    scenes::a_device_that_leaves_before_an_epoch_is_complete_is_not_caught_up();
}

#[test]
fn a_device_that_comes_in_before_an_array_fails_is_built() {
    scenes::a_device_that_comes_in_before_an_array_fails_is_built();
}

#[test]
fn a_device_as_it_was_while_it_was_built_is_not_taken_for_whole() {
    scenes::a_device_as_it_was_while_it_was_built_is_not_taken_for_whole();
}

#[test]
fn a_device_as_it_was_while_it_was_built_is_not_caught_up() {
    scenes::a_device_as_it_was_while_it_was_built_is_not_caught_up();
}

#[test]
fn a_replacement_that_takes_over_before_an_epoch_is_complete_is_built() {
    scenes::a_replacement_that_takes_over_before_an_epoch_is_complete_is_built();
}

#[test]
fn an_update_that_reached_a_device_under_construction_alone_makes_no_claim() {
    scenes::an_update_that_reached_a_device_under_construction_alone_makes_no_claim();
}
