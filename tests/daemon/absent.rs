//! Arrays that are to be served and are not: they are part of every status, with what is missing and what was
//! found.

use crate::support::serve::{Serve, array, both, create};
use std::fs;
use std::path::Path;

/// The exit code of `status --test`.
fn tested(serve: &Serve, name: &str) -> Option<i32> {
    serve.ask(&format!("status --test {name}")).status.code()
}

#[test]
fn an_array_of_which_nothing_is_found_is_failed_and_not_left_out() {
    let dir = tempfile::tempdir().expect("a directory");
    let (there, nowhere) = (dir.path().join("there"), dir.path().join("nowhere"));
    create(&there, "pond", 2, 1);
    fs::create_dir(&nowhere).expect("a directory");
    let mut serve = Serve::start(dir.path(), &(array("pond", &[&there]) + &array("tank", &[&nowhere])));
    serve.until("both were tried", |serve| {
        serve.arrays().iter().map(|array| array["state"].clone()).collect::<Vec<_>>() == ["ONLINE", "FAILED"]
    });
    let tank = &serve.arrays()[1];
    assert_eq!((tank["name"].as_str(), tank["members"].as_array().map(Vec::len)), (Some("tank"), Some(0)));
    let problem = tank["start"]["problem"].as_str().expect("a problem");
    assert!(problem.contains("no member of it was found in") && problem.contains("nowhere"), "{problem}");
    assert_eq!(
        (tested(&serve, ""), tested(&serve, "tank"), tested(&serve, "pond")),
        (Some(2), Some(2), Some(0))
    );
    let text = serve.says("status -x");
    assert!(text.contains("tank") && text.contains("FAILED") && !text.contains("pond"), "{text}");
    let told = serve.events().into_iter().filter(|event| event["array"] == "tank").collect::<Vec<_>>();
    assert_eq!(told.len(), 1, "told once: {told:?}");
    assert_eq!(told[0]["severity"], "error");
    let refused = serve.refuses("scrub tank");
    assert!(refused.contains("'tank' is not served: no member of it was found"), "{refused}");
    serve.stop();
}

#[test]
fn an_array_with_too_few_members_tells_which_are_missing_and_where_the_others_are() {
    let dir = tempfile::tempdir().expect("a directory");
    let there = dir.path().join("there");
    create(&there, "tank", 2, 1);
    for gone in ["m0", "m2"] {
        fs::rename(there.join(gone), dir.path().join(gone)).expect("moved");
    }
    let mut serve = Serve::start(dir.path(), &array("tank", &[&there]));
    let tank = serve.array_when("it was tried", |array| array["state"] == "FAILED");
    let states: Vec<_> =
        tank["members"].as_array().expect("members").iter().map(|m| m["state"].clone()).collect();
    assert_eq!(states, ["MISSING", "FOUND", "MISSING"]);
    assert_eq!(tank["members"][1]["name"], there.join("m1").display().to_string());
    let text = serve.says("status tank");
    assert!(text.contains("It is not served: array 'tank' (2+1) cannot start: 1 of 2"), "{text}");
    // What is tried again by itself is not to be imported again.
    let (status, action) = (tank["status"].as_str().expect("text"), tank["action"].as_str().expect("text"));
    assert!(!status.contains("import again"), "{status}");
    assert_eq!(action, "Bring back the members that are missing: it is tried again by itself.");
    assert_eq!(tested(&serve, ""), Some(2));
    // It is served as soon as it can be.
    fs::rename(dir.path().join("m0"), there.join("m0")).expect("moved");
    let tank = serve.array_when("it is served", |array| array["state"] == "DEGRADED");
    assert!(tank["start"].is_null(), "{tank}");
    assert_eq!((serve.arrays().len(), tested(&serve, "")), (1, Some(1)));
    // What it can do without comes back as well.
    fs::rename(dir.path().join("m2"), there.join("m2")).expect("moved");
    serve.array_when("all are back", |array| array["state"] == "ONLINE");
    serve.stop();
}

/// Whether the state directory says so of a device.
fn has_failed_without(dir: &Path, device: &str) -> bool {
    let known = fs::read_to_string(dir.join("state/arrays.json")).unwrap_or_default();
    let without = known.split("failed_without").nth(1).and_then(|rest| rest.split(']').next());
    without.is_some_and(|without| without.contains(device))
}

#[test]
fn what_an_array_had_failed_without_comes_back_by_itself_after_the_daemon_was_killed() {
    let dir = tempfile::tempdir().expect("a directory");
    let there = dir.path().join("there");
    create(&there, "tank", 2, 1);
    let section = array("tank", &[&there]);
    let move_away = |name: &str| fs::rename(there.join(name), dir.path().join(name)).expect("moved");
    move_away("m0");
    let mut serve = Serve::start(dir.path(), &section);
    let tank = serve.array_when("it is served", |array| array["state"] == "DEGRADED");
    move_away("m1");
    serve.array_when("it has failed", |array| array["state"] == "FAILED");
    let missing = tank["members"][0]["uuid"].as_str().expect("a uuid").to_owned();
    serve.until("it is remembered", |_| has_failed_without(dir.path(), &missing));
    serve.kill();
    ["m0", "m1"].iter().for_each(|name| fs::rename(dir.path().join(name), there.join(name)).expect("moved"));
    let mut serve = Serve::start(dir.path(), &section);
    serve.array_when("all are back", |array| array["state"] == "ONLINE");
    let told = serve.events();
    let is_back = |event: &serde_json::Value| event["kind"] == "member_returned" && event["member"] == 0;
    assert!(told.iter().any(is_back), "{told:?}");
    serve.stop();
}

#[test]
fn what_an_array_waits_for_comes_back_by_itself_after_the_daemon_was_killed_meanwhile() {
    let dir = tempfile::tempdir().expect("a directory");
    let there = dir.path().join("there");
    create(&there, "tank", 2, 1);
    let section = array("tank", &[&there]);
    let move_away = |name: &str| fs::rename(there.join(name), dir.path().join(name)).expect("moved");
    let mut serve = Serve::start(dir.path(), &section);
    let tank = serve.array_when("it is served", |array| array["state"] == "ONLINE");
    let missing = tank["members"][1]["uuid"].as_str().expect("a uuid").to_owned();
    serve.kill();
    // Killed so soon the array may be on record or not: here it is not.
    fs::remove_dir_all(dir.path().join("state")).expect("forgotten");
    ["m0", "m1"].iter().for_each(|name| move_away(name));
    let mut serve = Serve::start(dir.path(), &section);
    serve.array_when("it was tried", |array| array["state"] == "FAILED");
    serve.until("it is remembered", |_| has_failed_without(dir.path(), &missing));
    serve.kill();
    fs::rename(dir.path().join("m0"), there.join("m0")).expect("moved");
    let mut serve = Serve::start(dir.path(), &section);
    serve.array_when("it is served without", |array| array["state"] == "DEGRADED");
    fs::rename(dir.path().join("m1"), there.join("m1")).expect("moved");
    serve.array_when("all are back", |array| array["state"] == "ONLINE");
    serve.stop();
}

/// Its section names the directory of its members by another path.
#[test]
fn an_array_that_is_exported_is_not_served_again_by_a_section_that_had_looked_for_it() {
    let dir = tempfile::tempdir().expect("a directory");
    fs::create_dir(dir.path().join("members")).expect("a directory");
    let link = dir.path().join("link");
    std::os::unix::fs::symlink("members", &link).expect("a link");
    let mut serve = Serve::start(dir.path(), &array("tank", &[&link]));
    serve.array_when("it is looked for", |tank| tank["state"] == "FAILED");
    create(&dir.path().join("members"), "tank", 2, 1);
    serve.says("import tank --dir members");
    serve.says("export tank");
    assert!(serve.arrays().is_empty(), "{:?}", serve.arrays());
    // Unless its section had found it served before that.
    serve.until("its section has given up", |serve| {
        serve.log().contains("stays out of service") || serve.log().contains("is ONLINE")
    });
    assert!(serve.arrays().is_empty(), "{:?}", serve.arrays());
    let imports = || serve.events().iter().filter(|event| event["kind"] == "imported").count();
    assert_eq!(imports(), 1);
    serve.says("import tank --dir members");
    serve.array_when("it is served again", |tank| tank["state"] == "ONLINE");
    serve.stop();
}

#[test]
fn an_array_whose_import_is_refused_tells_why() {
    let dir = tempfile::tempdir().expect("a directory");
    let there = dir.path().join("there");
    create(&there, "tank", 2, 1);
    let holder = dir.path().join("holder");
    fs::create_dir(&holder).expect("a directory");
    let mut first = Serve::start(&holder, &array("tank", &[&there]));
    first.array_when("it is served", |array| array["state"] == "ONLINE");
    let mut serve = Serve::start(dir.path(), &array("tank", &[&there]));
    let tank = serve.array_when("it was tried", |array| array["state"] == "FAILED");
    let status = tank["status"].as_str().expect("a sentence");
    assert!(status.contains("It is not served:") && status.contains("in use"), "{status}");
    assert_eq!(tested(&serve, ""), Some(2));
    serve.stop();
    first.stop();
}

#[test]
fn nothing_configured_is_not_healthy_either() {
    let dir = tempfile::tempdir().expect("a directory");
    let serve = Serve::start(dir.path(), "");
    let output = serve.ask("status --test");
    assert_eq!(output.status.code(), Some(4), "{}", both(&output));
    serve.stop();
}
