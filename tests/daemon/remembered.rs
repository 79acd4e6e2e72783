//! What the daemon knows survives a restart: events, counts, imports, and where devices are. And a state
//! directory that is damaged, full or gone never keeps anything from being served.

use crate::support::image::Image;
use crate::support::load::Client;
use crate::support::run;
use crate::support::serve::{Serve, array, both, create};
use calpe_core::nbd::{self, Request};
use serde_json::Value;
use std::fs;
use std::io;
use std::os::unix::fs::{FileExt, PermissionsExt};
use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

/// A folder with 'tank', 2+1, in DIR/there.
fn scene() -> (tempfile::TempDir, std::path::PathBuf) {
    let dir = tempfile::tempdir().expect("a directory");
    let there = dir.path().join("there");
    create(&there, "tank", 2, 1);
    (dir, there)
}

fn is(state: &str) -> impl Fn(&Value) -> bool {
    move |array| array["state"] == state && array["scan"].as_array().is_some_and(Vec::is_empty)
}

fn kinds(events: &[Value]) -> Vec<&str> {
    events.iter().map(|event| event["kind"].as_str().expect("a kind")).collect()
}

#[test]
fn events_go_on_over_restarts_and_tell_who_did_what() {
    let (dir, there) = scene();
    let section = array("tank", &[&there]);
    let mut serve = Serve::start(dir.path(), &section);
    serve.array_when("it is served", is("ONLINE"));
    serve.says("offline tank 1");
    serve.refuses("offline tank 2");
    let before = serve.events();
    serve.stop();
    let mut serve = Serve::start(dir.path(), &section);
    serve.array_when("it is served", |array| array["state"] == "DEGRADED");
    let after = serve.events();
    assert_eq!(after[..before.len()], before[..], "nothing is lost");
    let numbers: Vec<u64> = after.iter().map(|event| event["sequence"].as_u64().expect("a number")).collect();
    assert!(numbers.is_sorted() && numbers.windows(2).all(|pair| pair[0] != pair[1]), "{numbers:?}");
    let commands: Vec<_> = after.iter().filter(|event| event["kind"] == "command").collect();
    assert_eq!(commands.len(), 2, "{after:?}");
    let uid = run(Command::new("id").arg("-u")).trim().parse::<u64>().expect("a uid");
    for (command, word) in commands.iter().zip(["OFFLINE", "refused"]) {
        assert_eq!((&command["array"], &command["uid"]), (&"tank".into(), &uid.into()));
        assert!(command["text"].as_str().expect("a text").contains(word), "{command}");
    }
    assert_eq!(commands[0]["member"], 1);
    // What was done, and what state it was in; not of other arrays.
    let history = serve.says("history tank --json");
    let history: Vec<Value> = history.lines().map(|line| serde_json::from_str(line).expect("JSON")).collect();
    let expected = ["imported", "member_out", "command", "command", "imported", "import_note"];
    assert_eq!(kinds(&history), expected, "{history:?}");
    assert!(serve.says("history tank").contains("command 'offline 1'"));
    assert!(serve.refuses("history pond").contains("no array 'pond'"));
    serve.stop();
}

#[test]
fn counts_survive_a_restart_and_a_kill_until_they_are_cleared() {
    let (dir, there) = scene();
    let section = array("tank", &[&there]);
    // A damaged copy of a superblock counts as a wrong block.
    let damage = || {
        let file = fs::File::options().write(true).open(there.join("m1")).expect("a member");
        file.write_all_at(b"x", 16384 + 77).expect("written");
    };
    damage();
    let mut serve = Serve::start(dir.path(), &section);
    let of = |array: &Value| array["members"][1]["cksum"].as_u64().expect("a count");
    assert_eq!(of(&serve.array_when("it is served", is("ONLINE"))), 1);
    serve.stop();
    let mut serve = Serve::start(dir.path(), &section);
    let tank = serve.array_when("it is served", is("ONLINE"));
    assert_eq!((of(&tank), &tank["members"][1]["state"]), (1, &"DEGRADED".into()));
    serve.stop();
    damage();
    let mut serve = Serve::start(dir.path(), &section);
    assert_eq!(of(&serve.array_when("it is served", is("ONLINE"))), 2, "they add up");
    serve.stop();
    // The copy is whole again: what counts from here on is what was kept.
    let mut serve = Serve::start(dir.path(), &section);
    serve.array_when("it is served", is("ONLINE"));
    let counters = dir.path().join("state/counters.json");
    serve.until("it is kept", |_| {
        fs::read_to_string(&counters).is_ok_and(|text| text.contains("\"cksum\": 2"))
    });
    serve.kill();
    let mut serve = Serve::start(dir.path(), &section);
    assert_eq!(of(&serve.array_when("it is served", is("ONLINE"))), 2);
    serve.says("clear tank 1");
    assert_eq!(of(&serve.arrays()[0]), 0);
    serve.stop();
    let mut serve = Serve::start(dir.path(), &section);
    assert_eq!(of(&serve.array_when("it is served", is("ONLINE"))), 0);
    serve.stop();
}

/// Whoever is told that a scrub has ended may count on what it has counted.
#[test]
fn what_a_scrub_has_counted_survives_a_kill_right_after_its_end() {
    let (dir, there) = scene();
    let section = array("tank", &[&there]);
    let mut serve = Serve::start(dir.path(), &section);
    serve.array_when("it is served", is("ONLINE"));
    let mut client = Client::connect(&serve.nbd()).expect("connected");
    let write = Request::new(nbd::Command::Write, 0, 1 << 20);
    client.call(&write, &[7; 1 << 20]).expect("connected").expect("written");
    serve.stop();
    let image = Image::open(&there.join("m1"));
    let mut cksum = 0;
    for round in 0..4 {
        image.flip_at(image.superblock.data_region().offset.0 + 4096 * round, 1);
        let mut serve = Serve::start(dir.path(), &section);
        serve.array_when("it is served", is("ONLINE"));
        serve.ask("scrub tank -w");
        let tank = serve.arrays()[0].clone();
        serve.kill();
        let counted = tank["members"][1]["cksum"].as_u64().expect("a count");
        assert!(counted > cksum, "round {round}: {tank:#}");
        cksum = counted;
        let mut serve = Serve::start(dir.path(), &section);
        let tank = serve.array_when("it is served", is("ONLINE"));
        assert_eq!(tank["members"][1]["cksum"], cksum, "round {round}");
        serve.stop();
    }
}

/// Where blocks are beyond repair is a fact that no member keeps: forgotten, a repair would call the volume
/// readable.
#[test]
fn lost_blocks_stay_listed_over_a_restart_until_they_are_written() {
    let (dir, there) = scene();
    let section = array("tank", &[&there]);
    let listed = |array: &Value, list: &str| array[list].as_array().cloned().unwrap_or_default();
    let list = |array: &Value| listed(array, "lost");
    let is_known = |array: &Value| !list(array).is_empty();
    let mut serve = Serve::start(dir.path(), &section);
    serve.array_when("it is served", is("ONLINE"));
    let mut client = Client::connect(&serve.nbd()).expect("connected");
    let write = Request::new(nbd::Command::Write, 0, 1 << 20);
    client.call(&write, &[7; 1 << 20]).expect("connected").expect("written");
    serve.stop();
    for index in 0..2 {
        let image = Image::open(&there.join(format!("m{index}")));
        image.flip_at(image.superblock.data_region().offset.0, 1);
    }
    let mut serve = Serve::start(dir.path(), &section);
    serve.array_when("it is served", is("ONLINE"));
    serve.ask("scrub tank -w");
    let before = list(&serve.array_when("it is known", is_known));
    serve.stop();

    let mut serve = Serve::start(dir.path(), &section);
    let tank = &serve.array_when("it is served", is("ONLINE"));
    // It is asserted only when it was seen.
    let told = [list(tank), listed(tank, "unconfirmed")].concat();
    assert_eq!((&told, listed(tank, "unreadable").len()), (&before, 0), "{tank:#}");
    let is_seen = |array: &Value| listed(array, "unconfirmed").is_empty();
    assert_eq!(list(&serve.array_when("it was looked at", is_seen)), before);
    let repair = both(&serve.ask("repair tank -w"));
    assert!(repair.contains("beyond repair"), "{repair}");
    serve.kill();

    // Without what is remembered nothing says where, but the superblocks say that there is something.
    fs::remove_file(dir.path().join("state/damage.json")).expect("it was there");
    let mut serve = Serve::start(dir.path(), &section);
    serve.array_when("its log is replayed", |array| array["log"]["state"] == "serving");
    let repair = serve.refuses("repair tank -w");
    assert!(repair.contains("the last scrub found"), "{repair}");
    serve.ask("scrub tank -w");
    let file = dir.path().join("state/damage.json");
    serve.until("it is kept", |_| file.exists());
    let mut client = Client::connect(&serve.nbd()).expect("connected");
    client.call(&write, &[8; 1 << 20]).expect("connected").expect("written");
    serve.says("scrub tank -w");
    assert_eq!(list(&serve.arrays()[0]).len(), 0);
    serve.says("repair tank -w");
    serve.stop();
    let damage = fs::read_to_string(file).expect("it is there");
    assert!(damage.contains("\"content\": {}"), "{damage}");
}

#[test]
fn what_a_device_lacked_before_a_restart_is_looked_at_and_then_forgotten() {
    let (dir, there) = scene();
    let section = array("tank", &[&there]);
    let mut serve = Serve::start(dir.path(), &section);
    let tank = serve.array_when("it is served", is("ONLINE"));
    serve.stop();
    let text = |value: &Value| value.as_str().expect("text").to_owned();
    let (uuid, device) = (text(&tank["uuid"]), text(&tank["members"][1]["uuid"]));
    let file = dir.path().join("state/lacking.json");
    assert!(!file.exists(), "nothing is lacking");
    let counters = fs::read_to_string(dir.path().join("state/arrays.json")).expect("kept");
    let counters: Value = serde_json::from_str(&counters).expect("JSON");
    let kept =
        serde_json::json!({ "version": counters["version"], "content": { &uuid: { &device: [[0, 2]] } } });
    fs::write(&file, kept.to_string()).expect("written");
    let mut serve = Serve::start(dir.path(), &section);
    serve
        .until("it was found whole", |_| fs::read_to_string(&file).is_ok_and(|text| !text.contains(&device)));
    let events = serve.says("events");
    assert!(!events.contains("lacking.json"), "{events}");
    serve.kill();
}

#[test]
fn an_import_is_remembered_until_the_export_and_one_with_once_is_not() {
    let (dir, there) = scene();
    let start = || Serve::start(dir.path(), "");
    let import = format!("import tank --dir {}", there.display());
    let serve = start();
    serve.says(&format!("{import} --once"));
    serve.stop();
    let serve = start();
    assert_eq!(serve.arrays().len(), 0);
    serve.says(&import);
    serve.stop();
    let mut serve = start();
    serve.array_when("it is served again", is("ONLINE"));
    serve.says("export tank");
    serve.stop();
    let serve = start();
    assert_eq!(serve.arrays().len(), 0);
    // What cannot be served is in the status, by name, until it is exported.
    serve.says(&import);
    serve.stop();
    fs::rename(&there, dir.path().join("elsewhere")).expect("moved");
    let mut serve = start();
    let tank = serve.array_when("it was tried", |array| array["state"] == "FAILED");
    assert_eq!(tank["name"], "tank");
    let names: Vec<_> =
        tank["members"].as_array().expect("members").iter().map(|m| m["name"].clone()).collect();
    assert_eq!(names, ["m0", "m1", "m2"].map(|name| there.join(name).display().to_string()));
    assert!(serve.says("export tank").contains("no longer"));
    assert_eq!(serve.arrays().len(), 0);
    serve.stop();
    assert_eq!(start().arrays().len(), 0);
}

#[test]
fn of_arrays_of_one_name_the_one_that_was_imported_is_served_where_the_configuration_leaves_it_open() {
    let (dir, one) = scene();
    let other = dir.path().join("other");
    create(&other, "tank", 2, 1);
    let both = array("tank", &[&one, &other]);
    let uuid = |array: &Value| array["uuid"].as_str().expect("a uuid").to_owned();
    let mut serve = Serve::start(dir.path(), &both);
    let tank = serve.array_when("it was tried", |array| array["state"] == "FAILED");
    assert!(tank["status"].as_str().is_some_and(|status| status.contains("2 arrays are named")), "{tank}");
    assert!(tank["action"].as_str().is_some_and(|action| action.contains("'calpe import UUID'")), "{tank}");
    assert_eq!(tank["members"], Value::Array(Vec::new()), "nothing tells which is meant");
    let of = |place: &Path| Image::open(&place.join("m0")).superblock.array.to_string();
    let (first, second) = (of(&one), of(&other));
    let said = serve.says(&format!("import {second}"));
    assert!(!said.contains("in the configuration"), "{said}");
    serve.stop();
    let mut serve = Serve::start(dir.path(), &both);
    assert_eq!(uuid(&serve.array_when("it is served", is("ONLINE"))), second);
    serve.says("export tank");
    let said = serve.says(&format!("import {second} --once"));
    assert!(said.contains("the next start serves it all the same"), "{said}");
    serve.stop();
    let mut serve = Serve::start(dir.path(), &both);
    assert_eq!(uuid(&serve.array_when("it is served", is("ONLINE"))), second);
    serve.stop();
    // Where the configuration leads to one alone, it is that one, and the import of the other says so.
    let mut serve = Serve::start(dir.path(), &array("tank", &[&one]));
    assert_eq!(uuid(&serve.array_when("it is served", is("ONLINE"))), first);
    serve.says("offline tank 1");
    serve.brings_back("online tank 1");
    serve.array_when("it is whole again", is("ONLINE"));
    for (which, has) in [(&first, true), (&second, false)] {
        let told = serve.says(&format!("history {which}"));
        assert_eq!(told.contains("OFFLINE"), has, "{told}");
    }
    let said = serve.says("export tank");
    assert!(said.contains("if that is one"), "{said}");
    let said = serve.says(&format!("import {second} --dir {}", other.display()));
    assert!(said.contains(&format!("in the configuration, array 'tank' is {first}")), "{said}");
    serve.stop();
    let mut serve = Serve::start(dir.path(), &array("tank", &[&one]));
    assert_eq!(uuid(&serve.array_when("it is served", is("ONLINE"))), first);
}

#[test]
fn an_import_with_once_promises_nothing_of_the_next_start_that_a_section_leaves_open() {
    let (dir, one) = scene();
    let other = dir.path().join("other");
    create(&other, "tank", 2, 1);
    let section = array("tank", &[&one, &other]);
    let of = |place: &Path| Image::open(&place.join("m0")).superblock.array.to_string();
    let (first, second) = (of(&one), of(&other));
    let mut serve = Serve::start(dir.path(), &section);
    serve.array_when("it was tried", is("FAILED"));
    serve.says(&format!("import {first}"));
    serve.says("export tank");
    for command in [format!("import {second} --once -n"), format!("import {second} --once")] {
        let said = serve.says(&command);
        assert!(said.contains("which can mean several arrays of that name: unless one alone"), "{said}");
        assert!(!said.contains("all the same"), "{said}");
    }
    serve.stop();
    let mut serve = Serve::start(dir.path(), &section);
    let tank = serve.array_when("it was tried", |array| array["state"] != "WAITING");
    assert!(tank["status"].as_str().is_some_and(|status| status.contains("2 arrays are named")), "{tank}");
    // One that is remembered is taken for it, whatever is imported once meanwhile.
    serve.says(&format!("import {first}"));
    serve.stop();
    let mut serve = Serve::start(dir.path(), &array("tank", &[&one]));
    serve.array_when("it is served", is("ONLINE"));
    serve.says("export tank");
    let said = serve.says(&format!("import {second} --once --dir other"));
    assert!(said.contains(&format!("the next start takes {first} for it")), "{said}");
    serve.stop();
}

#[test]
fn a_section_with_a_uuid_means_that_array_and_history_keeps_apart_those_of_one_name() {
    let (dir, one) = scene();
    let other = dir.path().join("other");
    create(&other, "tank", 2, 1);
    let of = |place: &Path| Image::open(&place.join("m0")).superblock.array.to_string();
    let (first, second) = (of(&one), of(&other));
    let section = array(&first, &[&one]).replace("name =", "uuid =");
    let mut serve = Serve::start(dir.path(), &section);
    serve.array_when("it is served", is("ONLINE"));
    // Not served yet, and known by nothing but this.
    assert!(serve.refuses(&format!("import {second} --dir other")).contains("served already"));
    serve.says("export tank");
    for command in [format!("import {second} --dir other -n"), format!("import {second} --dir other")] {
        let said = serve.says(&command);
        assert!(said.contains(&format!("in the configuration, array 'tank' is {first}")), "{said}");
    }
    serve.stop();
    let mut serve = Serve::start(dir.path(), &section);
    serve.until("both were tried", |serve| {
        let arrays = serve.arrays();
        arrays.len() == 2 && arrays.iter().all(|array| array["state"] != "WAITING")
    });
    let said = serve.says(&format!("export {first} -n"));
    assert!(said.contains("the next start serves it again"), "{said}");
    let history = |serve: &Serve, which: &str| serve.says(&format!("history {which}"));
    let (ours, theirs) = (history(&serve, &first), history(&serve, &second));
    for told in ["cannot import it: an array named 'tank'", "was refused: an array named 'tank'"] {
        assert!(!ours.contains(told) && theirs.contains(told), "{told}: {ours}\n{theirs}");
    }
    assert!(ours.contains("exported") && !theirs.contains("exported"), "{ours}\n{theirs}");
    serve.stop();
}

#[test]
fn a_configured_array_that_cannot_be_served_is_given_up_until_the_next_start_and_no_longer() {
    let (dir, there) = scene();
    let section = array("tank", &[&there]);
    let aside = dir.path().join("aside");
    let mut serve = Serve::start(dir.path(), &section);
    serve.array_when("it is served", is("ONLINE"));
    for is_remembered in [true, false] {
        if is_remembered {
            serve.says("export tank");
            serve.says("import tank");
        }
        serve.stop();
        fs::rename(&there, &aside).expect("moved");
        serve = Serve::start(dir.path(), &section);
        serve.array_when("it was tried", |array| array["state"] == "FAILED");
        for command in ["export tank -n", "export tank"] {
            let said = serve.says(command);
            let told = [
                "would no longer try to import array 'tank' until",
                "is no longer tried to be imported until",
            ];
            assert!(told.iter().any(|told| said.contains(&format!("{told} the next start"))), "{said}");
            assert!(said.contains("the next start tries to import it again"), "{said}");
        }
        assert_eq!(serve.arrays().len(), 0);
        serve.stop();
        fs::rename(&aside, &there).expect("moved back");
        serve = Serve::start(dir.path(), &section);
        serve.array_when("it is served", is("ONLINE"));
    }
    serve.stop();
}

#[test]
fn a_state_directory_that_cannot_be_used_is_told_at_the_start_although_nothing_is_served() {
    let dir = tempfile::tempdir().expect("a directory");
    fs::write(dir.path().join("state"), "in the way").expect("written");
    let mut serve = Serve::start(dir.path(), "");
    serve.until("it is told", |serve| kinds(&serve.events()).contains(&"state_dir"));
    let said = serve.says("status");
    assert!(said.contains("daemon: ") && said.contains("may not be known: it is a file"), "{said}");
}

#[test]
fn an_export_is_refused_while_clients_are_attached() {
    let (dir, there) = scene();
    let mut serve = Serve::start(dir.path(), &array("tank", &[&there]));
    serve.array_when("it is served", is("ONLINE"));
    let client = Client::connect(&serve.nbd()).expect("connected");
    for line in ["export tank", "export tank -n"] {
        let refused = serve.refuses(line);
        assert!(
            refused.contains("1 connection of a client is open") && refused.contains("--force"),
            "{refused}"
        );
    }
    assert_eq!(serve.arrays()[0]["state"], "ONLINE");
    let said = serve.says("export tank --force");
    assert!(said.contains("is stopped") && said.contains("loses it"), "{said}");
    drop(client);
    serve.stop();
}

#[test]
fn a_device_outside_of_the_search_is_found_again_and_a_missing_member_keeps_its_path() {
    let (dir, there) = scene();
    let section = array("tank", &[&there]);
    let mut serve = Serve::start(dir.path(), &section);
    serve.array_when("it is served", is("ONLINE"));
    let said = serve.says("replace tank 1 far -w");
    assert!(said.contains("outside of the places"), "{said}");
    serve.stop();
    let far = dir.path().join("far");
    let name_of = |tank: &Value| tank["members"][1]["name"].as_str().expect("a name").to_owned();
    let mut serve = Serve::start(dir.path(), &section);
    assert_eq!(name_of(&serve.array_when("it is whole", is("ONLINE"))), far.display().to_string());
    serve.stop();
    fs::rename(&far, dir.path().join("gone")).expect("moved");
    let mut serve = Serve::start(dir.path(), &section);
    let tank = serve.array_when("it is served", |array| array["state"] == "DEGRADED");
    assert_eq!(
        (name_of(&tank), &tank["members"][1]["state"]),
        (far.display().to_string(), &"MISSING".into())
    );
    serve.stop();
}

#[test]
fn a_replacement_is_cancelled_and_one_that_a_restart_interrupts_goes_on() {
    let (dir, there) = scene();
    // Slow enough to be met under way.
    let section = array("tank", &[&there]) + "rebuild_min = \"1MiB\"\nrebuild_max = \"1MiB\"\n";
    let mut serve = Serve::start(dir.path(), &section);
    serve.array_when("it is served", is("ONLINE"));
    let image = dir.path().join("image");
    fs::write(&image, vec![7; 8 << 20]).expect("an image");
    let uri = format!("nbd+unix:///tank?socket={}", serve.nbd().display());
    run(Command::new("nbdcopy").arg("--flush").arg(&image).arg(uri));
    assert!(serve.refuses("replace tank --cancel 1").contains("is not being replaced"));
    serve.says("replace tank 1 new1");
    serve.stop();
    let mut serve = Serve::start(dir.path(), &section);
    let tank = serve.array_when("it is served", |array| array["state"] == "ONLINE");
    let new = dir.path().join("new1").display().to_string();
    assert_eq!(tank["members"][1]["replacement"]["name"], new, "{tank}");
    assert!(serve.says("replace tank --cancel 1 -n").starts_with("would be done"));
    assert!(serve.says("replace tank --cancel 1").contains("is cancelled"));
    let tank = serve.array_when("it is over", is("ONLINE"));
    assert!(tank["members"][1]["replacement"].is_null(), "{tank}");
    // One whose device is gone at the next start is named.
    serve.says("replace tank 2 new2");
    serve.stop();
    fs::remove_file(dir.path().join("new2")).expect("removed");
    let mut serve = Serve::start(dir.path(), &section);
    serve.array_when("it is served", is("ONLINE"));
    let told = serve.says("events");
    let new = dir.path().join("new2").display().to_string();
    assert!(told.contains(&format!("is given up: {new} was not there at the start")), "{told}");
    // Of one that is there and cannot be used it is told what is wrong with it.
    serve.says("replace tank 2 new3");
    serve.stop();
    let file = fs::File::options().write(true).open(dir.path().join("new3")).expect("a device");
    file.set_len(1 << 20).expect("cut");
    let mut serve = Serve::start(dir.path(), &section);
    let tank = serve.array_when("it is served", is("ONLINE"));
    let new = dir.path().join("new3").display().to_string();
    let told = serve.says("events") + &tank["members"][2]["reason"].to_string();
    let given_up: Vec<&str> =
        told.lines().filter(|line| line.contains("given up") && line.contains(&new)).collect();
    assert!(given_up.len() >= 2, "{told}");
    for line in given_up {
        assert!(!line.contains("not there") && line.contains("1 MiB"), "{line}");
        assert!(line.contains("a device that was being built to replace member 2"), "{line}");
    }
    serve.stop();
}

#[test]
fn damaged_and_newer_files_are_set_aside_and_nothing_waits_for_them() {
    let (dir, there) = scene();
    let state = dir.path().join("state");
    fs::create_dir(&state).expect("a directory");
    fs::write(state.join("arrays.json"), "{ not json").expect("written");
    fs::write(state.join("counters.json"), "{\"version\": 99, \"content\": {}}").expect("written");
    fs::write(state.join("events.jsonl"), "half a li").expect("written");
    let mut serve = Serve::start(dir.path(), &array("tank", &[&there]));
    serve.array_when("it is served", is("ONLINE"));
    let told = serve.says("events");
    for word in ["arrays.json is damaged", "version 99", "events.jsonl: 1 lines are damaged"] {
        assert!(told.contains(word), "no '{word}' in\n{told}");
    }
    assert!(state.join("arrays.json.damaged").exists() && state.join("counters.json.newer").exists());
    serve.stop();
}

#[test]
fn a_state_directory_that_cannot_be_written_is_told_once_and_stops_nothing() {
    let (dir, there) = scene();
    // Where a directory should be is a file; root may write wherever it wants.
    fs::write(dir.path().join("state"), "in the way").expect("written");
    let mut serve = Serve::start(dir.path(), &array("tank", &[&there]));
    serve.array_when("it is served", is("ONLINE"));
    serve.until("it is told", |serve| kinds(&serve.events()).contains(&"state_dir"));
    serve.says("offline tank 1");
    serve.brings_back("online tank 1");
    let tank = serve.array_when("it is whole again", is("ONLINE"));
    assert_eq!(tank["name"], "tank");
    let events = serve.events();
    let told = events.iter().filter(|event| event["kind"] == "state_dir").collect::<Vec<_>>();
    assert_eq!(told.len(), 1, "{told:?}");
    let status: Value = serde_json::from_slice(&serve.ask("status --json").stdout).expect("JSON");
    let problem = status["problems"][0].as_str().expect("a problem");
    assert!(problem.contains("cannot be written") && serve.says("status").contains("daemon: "), "{status}");
    // But whoever counts on it is told.
    let said = serve.says("replace tank 1 outside -w");
    assert!(said.contains("is forgotten at a restart (") && !said.contains("is remembered"), "{said}");
    create(&dir.path().join("other"), "pond", 1, 1);
    let said = serve.says("import pond --dir other");
    assert!(said.contains("the import is not remembered"), "{said}");
    assert!(!said.contains("a restart does not serve"), "what was remembered before may say so: {said}");
    assert!(!serve.says("export pond").is_empty());
    for line in ["import pond --dir other --once -n", "import pond --dir other --once"] {
        let said = serve.says(line);
        assert!(said.contains("served only once, and a restart may serve it"), "{said}");
    }
    assert!(!serve.says("export pond").is_empty());
    let text = told[0]["text"].as_str().expect("a text");
    assert!(text.contains("cannot be written") && text.contains("'state_dir'"), "{text}");
    serve.stop();
}

/// An array is promised to be served again only where the next start finds its members.
#[test]
fn what_the_next_start_does_with_a_configured_array_that_is_elsewhere_is_told_as_it_is() {
    for is_kept in [true, false] {
        let dir = tempfile::tempdir().expect("a directory");
        let (none, there) = (dir.path().join("none"), dir.path().join("there"));
        fs::create_dir(&none).expect("a directory");
        create(&there, "tank", 2, 1);
        if !is_kept {
            fs::write(dir.path().join("state"), "in the way").expect("written");
        }
        let section = array("tank", &[&none]);
        let serve = Serve::start(dir.path(), &section);
        serve.says("import tank --dir there");
        let again = "the next start serves it";
        for line in ["export -n tank", "export tank", "import tank --dir there --once", "export tank"] {
            let said = serve.says(line);
            assert_eq!(said.contains(again), is_kept, "{line}: {said}");
            assert_eq!(said.contains("the next start may not find it"), !is_kept, "{line}: {said}");
        }
        serve.stop();
        let mut serve = Serve::start(dir.path(), &section);
        let state = if is_kept { "ONLINE" } else { "FAILED" };
        serve.array_when("it is known whether it is found", is(state));
        // Where its section looks, it is served whatever is remembered.
        serve.stop();
        let mut serve = Serve::start(dir.path(), &array("tank", &[&there]));
        serve.array_when("it is served", is("ONLINE"));
        let said = serve.says("export tank");
        assert!(said.contains(again) && !said.contains("may not find"), "{said}");
        serve.stop();
    }
}

#[test]
fn a_state_directory_that_is_deleted_is_told_and_what_is_known_is_written_anew() {
    let (dir, there) = scene();
    create(&dir.path().join("other"), "pond", 1, 1);
    let section = array("tank", &[&there]);
    let mut serve = Serve::start(dir.path(), &section);
    serve.array_when("it is served", is("ONLINE"));
    assert!(!serve.says("import pond --dir other").contains("not remembered"));
    // Again where the daemon writes a file there meanwhile.
    serve.until("the directory is deleted", |_| match fs::remove_dir_all(dir.path().join("state")) {
        Err(error) if error.kind() == io::ErrorKind::DirectoryNotEmpty => false,
        deleted => deleted.map(|()| true).expect("deleted"),
    });
    serve.until("it is told", |serve| {
        let is_told = |event: &Value| event["text"].as_str().is_some_and(|text| text.contains("was deleted"));
        serve.events().iter().any(is_told)
    });
    serve.stop();
    let mut serve = Serve::start(dir.path(), &section);
    serve.until("both are served", |serve| serve.arrays().len() == 2);
    serve.stop();
}

/// What a machine under load takes longer than the limits that are tested.
const SLACK: Duration = Duration::from_secs(6);

/// A file of the directory is a pipe that nobody reads: opening it for writing does not return, as on a
/// filesystem that hangs.
#[test]
fn a_state_directory_that_does_not_answer_holds_up_nobody_and_is_told() {
    let (dir, there) = scene();
    create(&dir.path().join("other"), "pond", 1, 1);
    let state = dir.path().join("state");
    fs::create_dir(&state).expect("a directory");
    let pipe = state.join("arrays.json.new");
    run(Command::new("mkfifo").arg(&pipe));
    let mut serve = Serve::start(dir.path(), &array("tank", &[&there]));
    serve.array_when("it is served", is("ONLINE"));
    let mut client = Client::connect(&serve.nbd()).expect("the daemon accepts");
    let mut calls = |count: u64| {
        for at in 0..count {
            let block = (at % 64) * 4096;
            let write = Request { fua: at % 8 == 0, ..Request::new(nbd::Command::Write, block, 4096) };
            let read = Request::new(nbd::Command::Read, block, 4096);
            for (request, payload) in [(write, &[7; 4096][..]), (read, &[])] {
                let begun = Instant::now();
                client.call(&request, payload).expect("the daemon goes on").expect("done");
                assert!(begun.elapsed() < SLACK, "{:?}", begun.elapsed());
            }
        }
    };
    let quick = |serve: &Serve, line: &str, limit: Duration| {
        let begun = Instant::now();
        let said = serve.says(line);
        assert!(begun.elapsed() < limit + SLACK, "calpe {line}: {:?}", begun.elapsed());
        said
    };
    let none = Duration::ZERO;
    // Until it is known, whoever counts on the directory waits for it, but not for long, and is told.
    let said = quick(&serve, "import pond --dir other", Duration::from_secs(2));
    assert!(said.contains("the import is not remembered") && said.contains("does not answer"), "{said}");
    for line in ["status", "offline tank 1", "online tank 1", "events", "scrub pond"] {
        calls(32);
        quick(&serve, line, none);
    }
    serve.until("it is told", |serve| {
        calls(8);
        kinds(&serve.events()).contains(&"state_dir")
    });
    let status: Value = serde_json::from_slice(&serve.ask("status --json").stdout).expect("JSON");
    let problem = status["problems"][0].as_str().expect("a problem");
    assert!(problem.contains("the state directory does not answer; until it does"), "{problem}");
    // Now nobody waits for it any more.
    for _ in 0..2 {
        let said = quick(&serve, "export pond", none);
        assert!(said.contains("the export is not remembered"), "{said}");
        quick(&serve, "import pond --dir other", none);
        calls(8);
    }
    // It goes on: the next attempt writes what has gathered.
    fs::read(&pipe).expect("what was being written");
    serve.until("its end is told", |serve| {
        serve.events().iter().any(|e| e["text"].as_str().is_some_and(|text| text.contains("to again")))
    });
    serve.stop();
    let kept = fs::read_to_string(state.join("arrays.json")).expect("kept");
    assert!(kept.contains("tank") && kept.contains("\"import\": true"), "{kept}");
}

#[test]
fn two_daemons_never_share_a_state_directory_and_it_is_private() {
    let (dir, there) = scene();
    let mut first = Serve::start(dir.path(), &array("tank", &[&there]));
    first.array_when("it is served", is("ONLINE"));
    let state = dir.path().join("state");
    first.until("it is used", |_| state.join("events.jsonl").exists());
    let mode = |path: &Path| fs::metadata(path).expect("there").permissions().mode() & 0o777;
    assert_eq!((mode(&state), mode(&state.join("events.jsonl"))), (0o700, 0o600));
    let second = dir.path().join("second");
    fs::create_dir(&second).expect("a directory");
    std::os::unix::fs::symlink(&state, second.join("state")).expect("a link");
    let serve = Serve::start(&second, "");
    let told = serve.says("events");
    assert!(told.contains("another daemon uses this state directory"), "{told}");
    serve.stop();
    first.stop();
}
