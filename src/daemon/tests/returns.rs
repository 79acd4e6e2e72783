//! Members that come back by themselves, and arrays that are awaited, as an administrator meets
//! them.

use super::{Bench, member, offline, online, replace};
use crate::control::{ArrayReport, ArrayState, Condition, MemberState, Reply, Request};
use crate::daemon::arrays::settings::ServeOptions;
use crate::daemon::arrays::waiting::Waiting;
use crate::daemon::config::ArrayChoice;
use crate::daemon::devices::import::tests::created_in;
use crate::daemon::devices::search::search;
use crate::daemon::imports::opening::open_and_serve_awaited;
use crate::daemon::members::hand_over::By;
use crate::daemon::members::online::bring_online;
use crate::daemon::members::own_device::open_own;
use crate::daemon::members::target;
use crate::member::{Access, DEFAULT_MEMBER_TIMEOUT, Device, DeviceError};
use std::path::{Path, PathBuf};
use uuid::Uuid;

fn export(array: &str) -> Request {
    Request::Export { array: array.into(), force: false, dry_run: false }
}

fn import(array: &str, dirs: &[PathBuf]) -> Request {
    let (array, dirs) = (Some(array.into()), dirs.to_vec());
    Request::Import { array, all: false, dirs, force: false, once: true, dry_run: false }
}

/// Missing members are recorded only once in a while.
fn observed(bench: &Bench, is_so: impl Fn(&ArrayReport) -> bool) -> ArrayReport {
    let report = bench.wait_until(|report| {
        bench.daemon.observe();
        is_so(report)
    });
    bench.daemon.observe();
    report
}

fn move_away(bench: &Bench, names: &[&str]) {
    for name in names {
        std::fs::rename(bench.path(name), bench.path(&format!("{name}.away"))).unwrap();
    }
}

fn move_back(bench: &Bench, names: &[&str]) {
    for name in names {
        std::fs::rename(bench.path(&format!("{name}.away")), bench.path(name)).unwrap();
    }
}

const ALL_BUT_ONE: [&str; 3] = ["m0", "m1", "m2"];

/// All but one member leave. Returns one that was in service until the array failed.
fn fail(bench: &Bench) -> u16 {
    move_away(bench, &ALL_BUT_ONE);
    let report = observed(bench, |report| {
        let missing = report.members.iter().filter(|member| member.state == MemberState::Missing);
        report.state == ArrayState::Failed && missing.count() == 3
    });
    let mut members = report.members.iter();
    members
        .find(|member| member.conditions.contains(&Condition::ServedLast))
        .expect("one can come back")
        .index
}

/// The array starts without m0, and m1 and m2 leave then.
fn start_without_one_and_fail(bench: &Bench) {
    bench.done(export("tank"));
    move_away(bench, &["m0"]);
    bench.done(import("tank", &[]));
    move_away(bench, &["m1", "m2"]);
    observed(bench, |report| report.state == ArrayState::Failed);
}

fn is_whole(report: &ArrayReport) -> bool {
    report.state == ArrayState::Online && report.scan.is_empty()
}

#[test]
fn a_member_that_was_to_stay_away_until_a_start_comes_back_by_itself_after_it() {
    let bench = Bench::new();
    let kept = fail(&bench);
    let told = bench.done(offline(kept, false));
    assert!(told.contains("stays away until 'calpe online'") && told.contains("a start"), "{told}");
    let says_so = |reason: &str| reason.contains("kept away by an administrator until 'calpe online'");
    observed(&bench, |report| report.members[usize::from(kept)].reason.as_deref().is_some_and(says_so));
    bench.done(export("tank"));
    move_back(&bench, &ALL_BUT_ONE);
    bench.done(import("tank", &[]));
    // Also the members that the array had gone on without before it failed.
    observed(&bench, is_whole);
    fail(&bench);
    move_back(&bench, &ALL_BUT_ONE);
    observed(&bench, is_whole);
}

#[test]
fn a_member_that_was_missing_at_the_start_comes_back_after_the_array_had_failed() {
    let bench = Bench::new();
    start_without_one_and_fail(&bench);
    move_back(&bench, &ALL_BUT_ONE);
    observed(&bench, is_whole);
}

#[test]
fn a_member_that_is_taken_out_while_it_is_on_its_way_back_does_not_come_in() {
    let bench = Bench::new();
    let kept = fail(&bench);
    let target = target::find(bench.daemon.arrays(), "tank", &member(kept)).unwrap();
    // While this guard lives, a member that is being looked for is not brought back.
    let change = bench.daemon.arrays().begin_change(bench.report().uuid).unwrap();
    move_back(&bench, &ALL_BUT_ONE);
    let path = bench.path(&format!("m{kept}"));
    let own = open_own(bench.daemon.arrays(), &target, Some(&path), &change).unwrap();
    let told = bench.done(offline(kept, false));
    assert!(told.contains("MISSING, and stays away"), "{told}");
    let error = bring_online(bench.daemon.arrays(), &target, own, By::Itself).unwrap_err();
    assert!(error.message.contains("taken it out"), "{error}");
    drop(change);
    bench.daemon.observe();
    assert_eq!(bench.report().members[usize::from(kept)].state, MemberState::Missing);
    // Its device may not be closed yet.
    bench.wait_until(|_| matches!(bench.daemon.handle(online(kept, None)), Reply::Done { .. }));
    observed(&bench, is_whole);
}

#[test]
fn a_member_can_be_kept_away_as_soon_as_its_array_has_failed() {
    let bench = Bench::new();
    move_away(&bench, &["m0", "m1", "m2"]);
    while bench.report().state != ArrayState::Failed {
        bench.daemon.observe();
    }
    let report = bench.report();
    let missing = report.members.iter().find(|member| member.state == MemberState::Missing).unwrap();
    // Before the daemon has observed it by itself.
    let told = bench.done(offline(missing.index, false));
    assert!(told.contains("MISSING, and stays away"), "{told}");
}

fn is_locked(path: &Path) -> bool {
    matches!(Device::open(path, Access::Exclusive), Err(DeviceError::Locked { .. }))
}

/// The array serves without m0, which an attempt has locked: it waits to see that m0 stays reachable.
fn have_one_on_its_way_back(bench: &Bench) {
    start_without_one_and_fail(bench);
    move_back(bench, &["m1", "m2"]);
    observed(bench, |report| report.members[1..].iter().all(|m| m.state == MemberState::Online));
    bench.wait_until(|report| report.log.state == crate::control::LogState::Serving);
    move_back(bench, &["m0"]);
    bench.wait_until(|_| {
        bench.daemon.observe();
        is_locked(&bench.path("m0"))
    });
}

#[test]
fn a_member_is_replaced_on_its_own_device_while_that_is_on_its_way_back() {
    let bench = Bench::new();
    have_one_on_its_way_back(&bench);
    assert_eq!(bench.report().members[0].state, MemberState::Missing);
    bench.done(replace(member(0), bench.path("m0"), true, false));
    observed(&bench, is_whole);
}

#[test]
fn an_array_is_imported_at_once_that_was_exported_while_a_member_of_it_was_on_its_way_back() {
    let bench = Bench::new();
    have_one_on_its_way_back(&bench);
    bench.done(export("tank"));
    assert!(is_locked(&bench.path("m0")), "the attempt has it still");
    bench.done(import("tank", &[]));
    observed(&bench, is_whole);
}

/// The identity of the array whose members are in a directory.
fn array_in(dir: &tempfile::TempDir) -> Uuid {
    *search(&[dir.path().into()], DEFAULT_MEMBER_TIMEOUT).arrays.keys().next().unwrap()
}

#[test]
fn a_configured_array_stays_awaited_while_another_one_of_its_name_is_served_and_after_that() {
    let bench = Bench::new();
    let (own, elsewhere) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    created_in(elsewhere.path(), "pond", 1, 1);
    let which = ArrayChoice::Name("pond".into());
    bench
        .daemon
        .arrays()
        .awaited
        .await_array(Waiting::new(which.clone(), vec![own.path().into()]), &bench.daemon.arrays().memory);
    let other = array_in(&elsewhere).to_string();
    bench.done(import(&other, &[elsewhere.path().into()]));
    let listed =
        || bench.daemon.arrays().status(None).unwrap().iter().filter(|array| array.name == "pond").count();
    assert_eq!(listed(), 1, "it may be the one that is meant");
    assert!(bench.daemon.arrays().awaited.is_awaited(&which));
    assert!(
        bench.daemon.arrays().awaited.remembered_paths(&which).is_empty(),
        "what is served is another one"
    );
    bench.done(export(&other));
    assert!(bench.daemon.arrays().awaited.is_awaited(&which));
    assert_eq!(listed(), 0, "it may be the one that was exported");
    let found = search(&[own.path().into()], DEFAULT_MEMBER_TIMEOUT);
    let error = found.choose("pond", &[own.path().into()]).unwrap_err();
    let arrays = bench.daemon.arrays();
    arrays.awaited.still_awaited(&which, (&found, error.into()), &arrays.memory, &arrays.events);
    assert_eq!(listed(), 1, "it is not");
    // The one that is where the section looks is the one that is meant.
    created_in(own.path(), "pond", 1, 1);
    let meant = array_in(&own).to_string();
    bench.done(import(&meant, &[own.path().into()]));
    assert!(!bench.daemon.arrays().awaited.is_awaited(&which));
    assert_eq!(listed(), 1);
    bench.done(export(&meant));
}

#[test]
fn an_array_that_is_given_up_while_its_devices_are_being_opened_is_not_served() {
    let bench = Bench::new();
    bench.done(export("tank"));
    let which = ArrayChoice::Name("tank".into());
    bench.daemon.arrays().awaited.await_array(
        Waiting::new(which.clone(), vec![bench.dir.path().into()]),
        &bench.daemon.arrays().memory,
    );
    let found = search(&[bench.dir.path().into()], DEFAULT_MEMBER_TIMEOUT);
    let uuid = *found.arrays.keys().next().unwrap();
    let serve =
        || open_and_serve_awaited(bench.daemon.arrays(), &which, &found, uuid, ServeOptions::default());
    let told = bench.done(export("tank"));
    assert!(told.contains("no longer tried"), "{told}");
    let error = serve().unwrap_err().error;
    assert!(error.message.contains("not awaited any more"), "{error}");
    assert!(bench.daemon.arrays().status(None).unwrap().is_empty());
    // The devices are free, so an export that came later than the attempt is an export of what is served.
    bench.daemon.arrays().awaited.await_array(
        Waiting::new(which.clone(), vec![bench.dir.path().into()]),
        &bench.daemon.arrays().memory,
    );
    bench.wait_until(|_| serve().is_ok());
    assert!(!bench.daemon.arrays().awaited.is_awaited(&which));
    let told = bench.done(export("tank"));
    assert!(told.contains("is stopped"), "{told}");
}
