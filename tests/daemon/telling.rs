//! What the daemon says of members and arrays, and answers to commands, is what is the case.

use crate::support::load::Client;
use crate::support::serve::{Serve, array, both, create};
use crate::support::try_run;
use calpe_core::nbd::{Command, Request};
use serde_json::Value;
use std::fs;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

/// A folder with 'tank', 2+1, in DIR/there.
fn scene() -> (tempfile::TempDir, PathBuf) {
    let dir = tempfile::tempdir().expect("a directory");
    let there = dir.path().join("there");
    create(&there, "tank", 2, 1);
    (dir, there)
}

fn is_quiet(array: &Value) -> bool {
    let rests = array["scan"].as_array().is_some_and(Vec::is_empty);
    rests && array["log"]["state"] == "serving"
}

fn is_whole(array: &Value) -> bool {
    array["state"] == "ONLINE" && is_quiet(array)
}

fn member(array: &Value, index: usize) -> (&str, &str) {
    let member = &array["members"][index];
    (member["state"].as_str().expect("a state"), member["reason"].as_str().unwrap_or_default())
}

/// Both superblocks of a member's start, and both of its end.
fn overwrite_superblocks(path: &Path) {
    const ENDS: u64 = 32768;
    let file = fs::File::options().write(true).open(path).expect("a member");
    let len = file.metadata().expect("a length").len();
    for at in [0, len - ENDS] {
        file.write_all_at(&[0x55; ENDS as usize], at).expect("written");
    }
}

#[test]
fn a_member_that_is_there_and_cannot_be_used_is_not_called_not_found() {
    let (dir, there) = scene();
    let section = array("tank", &[&there]);
    let older = dir.path().join("older");
    fs::copy(there.join("m1"), &older).expect("a copy");
    let mut serve = Serve::start(dir.path(), &section);
    serve.array_when("it is served", is_whole);
    serve.says("offline tank 2");
    serve.says("online tank 2");
    serve.array_when("it is caught up", is_whole);
    serve.stop();

    fs::copy(&older, there.join("m1")).expect("put back");
    let mut serve = Serve::start(dir.path(), &section);
    let tank = serve.array_when("it is served", is_quiet);
    let (state, reason) = member(&tank, 1);
    assert!(state == "MISSING" && reason.contains("there/m1: not used: stale: it holds epoch"), "{reason}");
    serve.says("online tank 1");
    serve.array_when("it is rebuilt", is_whole);
    serve.stop();

    overwrite_superblocks(&there.join("m0"));
    let mut serve = Serve::start(dir.path(), &section);
    let tank = serve.array_when("it is served", is_quiet);
    let (state, reason) = member(&tank, 0);
    assert!(
        state == "MISSING" && reason.contains("there/m0: holds no Calpe superblock any more"),
        "{reason}"
    );
    let events = serve.events();
    let is_told = |event: &&Value| event["kind"] == "member_left_out" && event["member"] == 0;
    assert!(events.iter().any(|event| is_told(&event)), "{events:#?}");
    let action = tank["action"].as_str().expect("a sentence");
    assert!(action.contains("'calpe replace tank 0 ") && !action.contains("calpe online"), "{action}");
    let said = serve.refuses("online tank 0");
    assert!(said.contains("there/m0: holds no Calpe superblock") && said.contains("overwritten"), "{said}");
    serve.says("replace tank 0 there/m0 --force");
    serve.array_when("it is rebuilt", is_whole);
    serve.stop();
}

#[test]
fn files_whose_superblocks_are_gone_are_named_where_members_are_missing() {
    let (dir, there) = scene();
    fs::write(there.join("notes.txt"), "no member").expect("written");
    let serve = Serve::start(dir.path(), "");
    overwrite_superblocks(&there.join("m1"));
    let listed = serve.says("import --dir there");
    assert!(listed.contains("can be imported"), "{listed}");
    let told = listed.lines().find(|line| line.contains("  1  not found")).expect(&listed);
    assert!(told.contains("there/m1, which holds no Calpe superblock"), "{listed}");
    overwrite_superblocks(&there.join("m0"));
    for told in [serve.says("import --dir there"), serve.refuses("import tank --dir there")] {
        let named = told.contains("there/m0, ") && told.contains("there/m1, which hold no Calpe superblock");
        assert!(named && !told.contains("notes.txt"), "{told}");
    }
    let told = serve.refuses("check there/m0 there/m1 there/m2");
    let line = |member| format!("there/{member}: no Calpe superblock");
    assert!(told.contains(&line("m0")) && told.contains(&line("m1")), "{told}");
    assert!(told.contains("were given and cannot be used") && !told.contains("there/m2:"), "{told}");
    overwrite_superblocks(&there.join("m2"));
    for told in [serve.says("import --dir there"), serve.refuses("import tank --dir there")] {
        assert!(told.contains("m2, which hold no Calpe superblock") && !told.contains("notes.txt"), "{told}");
    }
    serve.stop();
}

#[test]
fn another_member_in_the_place_of_a_missing_one_is_named() {
    let (dir, there) = scene();
    create(&dir.path().join("other"), "pond", 1, 0);
    let section = array("tank", &[&there]);
    let mut serve = Serve::start(dir.path(), &section);
    serve.array_when("it is served", is_whole);
    fs::rename(dir.path().join("other/m0"), there.join("m1")).expect("put there");
    let tank = serve.array_when("it is noticed", |tank| tank["state"] == "DEGRADED");
    assert!(member(&tank, 1).1.contains("another file is at its path now"), "{tank}");
    serve.stop();
    let mut serve = Serve::start(dir.path(), &section);
    let tank = serve.array_when("it is served", is_quiet);
    assert!(member(&tank, 1).1.contains("another device is there now, member 0 of array 'pond'"), "{tank}");
    // When that is gone, too, it is not told any more.
    overwrite_superblocks(&there.join("m1"));
    serve.refuses("online tank 1");
    let tank = serve.arrays().remove(0);
    let (_, reason) = member(&tank, 1);
    assert!(reason.contains("holds no Calpe superblock any more") && !reason.contains("pond"), "{tank}");
    serve.stop();
}

#[test]
fn a_cancelled_replacement_tells_what_the_member_is_then() {
    let (dir, there) = scene();
    // Slow enough to be met under way.
    let section = array("tank", &[&there]) + "rebuild_min = \"1MiB\"\nrebuild_max = \"1MiB\"\n";
    let mut serve = Serve::start(dir.path(), &section);
    serve.array_when("it is served", is_whole);
    let mut client = Client::connect(&serve.nbd()).expect("connected");
    let write = Request::new(Command::Write, 0, 4 << 20);
    client.call(&write, &vec![7; 4 << 20]).expect("connected").expect("written");
    let said = serve.refuses("replace tank 0 there/m2");
    assert!(said.contains("there/m2 is member 2 of array 'tank': name a device that is no member"), "{said}");
    assert!(!serve.says("replace tank 1 new -n").contains("begins again"));
    serve.says("replace tank 1 new");
    let said = serve.refuses("replace tank 0 new");
    assert!(said.contains("new is being built as member 1 of array 'tank'"), "{said}");
    assert!(serve.says("replace tank 2 other -n").contains("the progress shown begins again"));
    let said = serve.refuses("replace tank 1 other");
    assert!(said.contains("'calpe replace --cancel tank 1'"), "{said}");
    assert!(serve.says("replace tank --cancel 1 -n").contains("the old device stays in service"));
    serve.says("offline tank 1");
    let said = serve.refuses("online tank 1");
    assert!(said.contains("'calpe replace --cancel tank 1'"), "{said}");
    for command in ["replace tank --cancel 1 -n", "replace tank --cancel 1"] {
        let said = serve.says(command);
        assert!(said.contains("member 1 stays OFFLINE") && !said.contains("in service"), "{said}");
    }
    let events = serve.says("events");
    assert!(events.contains("the replacement of member 1 was cancelled; member 1 stays OFFLINE"), "{events}");
    fs::write(dir.path().join("other"), vec![1; 64 << 20]).expect("a file");
    assert!(serve.says("replace tank 1 other -n").contains("what it holds is overwritten"));
    serve.stop();
}

#[test]
fn a_member_that_is_missing_can_be_taken_out_and_stays_out() {
    let (dir, there) = scene();
    let section = array("tank", &[&there]);
    let (m2, aside) = (there.join("m2"), dir.path().join("m2"));
    fs::rename(&m2, &aside).expect("moved");
    let mut serve = Serve::start(dir.path(), &section);
    let tank = serve.array_when("it is served", is_quiet);
    assert_eq!(member(&tank, 2).0, "MISSING");
    assert!(serve.says("fail tank 2 -n").contains("member 2 is FAULTED"));
    let said = serve.says("fail tank 2");
    assert!(said.contains("member 2 is FAULTED, and stays away until 'calpe online'"), "{said}");
    assert_eq!(member(&serve.arrays()[0], 2), ("FAULTED", "failed by an administrator"));
    assert!(serve.refuses("fail tank 2").contains("is FAULTED already"));
    serve.says("offline tank 2");
    assert_eq!(member(&serve.arrays()[0], 2), ("OFFLINE", "taken offline by an administrator"));
    serve.stop();
    fs::rename(&aside, &m2).expect("moved back");
    let mut serve = Serve::start(dir.path(), &section);
    assert_eq!(member(&serve.array_when("it is served", is_quiet), 2).0, "OFFLINE");
    serve.says("online tank 2");
    serve.array_when("it is whole", is_whole);
    serve.stop();
}

#[test]
fn clients_and_read_only_arrays_are_in_the_status_and_what_is_not_known_is_null() {
    let (dir, there) = scene();
    let nowhere = array("pond", &[&dir.path().join("nowhere")]);
    let section = nowhere + &array("tank", &[&there]) + "read_only = true\n";
    let mut serve = Serve::start(dir.path(), &section);
    serve.until("tank is served", |serve| serve.arrays().get(1).is_some_and(is_whole));
    let of = |serve: &Serve, index: usize| serve.arrays()[index].clone();
    assert!(of(&serve, 0)["uuid"].is_null(), "{}", of(&serve, 0));
    assert_eq!((&of(&serve, 1)["read_only"], &of(&serve, 1)["clients"]), (&true.into(), &0.into()));
    assert!(serve.says("status tank").contains("read-only: clients cannot write"));
    assert!(serve.says("status -v pond").contains("uuid: not known"));
    let client = Client::connect(&serve.nbd()).expect("connected");
    assert_eq!(of(&serve, 1)["clients"], 1);
    assert!(serve.says("status -v tank").contains("clients: 1 connection"));
    drop(client);
    serve.stop();
}

#[test]
fn a_scrub_that_is_refused_is_an_event() {
    let dir = tempfile::tempdir().expect("a directory");
    let serve = Serve::start(dir.path(), "");
    serve.refuses("scrub nothing");
    serve.refuses("scrub nothing -w");
    let events = serve.events();
    let refused = |event: &&Value| {
        event["kind"] == "command" && event["text"].as_str().is_some_and(|text| text.contains("was refused"))
    };
    assert_eq!(events.iter().filter(refused).count(), 2, "{events:#?}");
    serve.stop();
}

#[test]
fn of_two_arrays_of_one_name_the_served_one_has_to_go_first() {
    let (dir, there) = scene();
    let other = dir.path().join("other");
    create(&other, "tank", 1, 1);
    let mut serve = Serve::start(dir.path(), &array("tank", &[&there]));
    serve.array_when("it is served", is_whole);
    let said = serve.refuses("import tank --dir other");
    let advice = "is served already; another one of that name";
    assert!(said.contains(advice) && said.contains("'calpe export tank', then 'calpe import "), "{said}");
    let listed = serve.says("import --dir other").split_whitespace().collect::<Vec<_>>().join(" ");
    assert!(listed.contains("can be imported only when that is exported"), "{listed}");
    assert!(listed.contains("--dir /") && listed.contains("other'"), "{listed}");
    // What is advised works as it stands.
    let (_, import) = said.split_once("then 'calpe ").expect(&said);
    let import = import.trim_end().trim_end_matches('\'').to_owned();
    serve.says("export tank");
    assert!(serve.says(&import).contains("is ONLINE"));
    serve.stop();
}

/// The section says how it is served, whoever imports it.
#[test]
fn an_array_that_is_imported_by_command_is_served_as_its_section_says() {
    let dir = tempfile::tempdir().expect("a directory");
    let there = dir.path().join("there");
    create(&there, "tank", 2, 1);
    let mut serve = Serve::start(dir.path(), &(array("tank", &[&there]) + "read_only = true\n"));
    let is_served = |array: &Value| array["log"]["state"] == "serving";
    assert_eq!(serve.array_when("it is served", is_served)["read_only"], true);
    for import in ["import tank", "import -a"] {
        serve.says("export tank");
        serve.says(import);
        assert_eq!(serve.array_when("it is served", is_served)["read_only"], true, "{import}");
    }
    serve.stop();
}

#[test]
fn of_two_equal_copies_none_comes_online_unless_it_is_named() {
    let (dir, place) = scene();
    fs::copy(place.join("m1"), place.join("a-copy")).unwrap();
    let mut serve = Serve::start(dir.path(), "");
    serve.says(&format!("import tank --dir {}", place.display()));
    let told = serve.says("status tank");
    assert!(told.contains("calpe online tank 1"), "{told}");
    for line in ["online tank 1 -n", "online tank 1"] {
        let told = serve.refuses(line);
        for part in [
            "a-copy",
            "/m1",
            "nothing tells which is the copy",
            "move the copy away",
            "'calpe online tank 1 --path PATH'",
        ] {
            assert!(told.contains(part), "no '{part}' in {told}");
        }
    }
    serve.says(&format!("online tank 1 --path {}", place.join("m1").display()));
    serve.says("offline tank 1");
    // Where it has been in service is known.
    let log = serve.brings_back("online tank 1");
    let back = log.lines().rfind(|line| line.contains("command 'online 1'")).expect("it is logged");
    assert!(back.contains("/m1"), "{back}");
    serve.stop();
}

#[test]
fn a_line_break_in_a_path_makes_no_line_anywhere() {
    let dir = tempfile::tempdir().unwrap();
    let place = dir.path().join("there");
    create(&place, "tank", 1, 2);
    let path = place.join("m2\nstate: FINE");
    fs::rename(place.join("m2"), &path).unwrap();
    let mut serve = Serve::start(dir.path(), "");
    serve.says(&format!("import tank --dir {}", place.display()));
    serve.says("fail tank 2");
    serve.array_when("it is degraded", |array| array["state"] == "DEGRADED");
    let new = place.join("new\nstate: FINE");
    let mut told = vec![serve.says("status tank"), serve.says("status tank -v")];
    let mut replace = serve.command("replace tank 2 -w");
    told.push(both(&try_run(replace.arg(&new))));
    assert!(told[2].contains("is rebuilt on"), "{}", told[2]);
    told.push(serve.says("events"));
    told.push(serve.log());
    for text in &told {
        assert!(text.contains("\\nstate: FINE"), "{text}");
        assert!(!text.contains("; state: FINE"), "{text}");
        assert!(text.lines().all(|line| !line.trim_start().starts_with("state: FINE")), "{text}");
    }
    serve.stop();
}
