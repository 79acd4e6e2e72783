//! Scrubs that do not run: one that somebody has paused stays so, and one that waits for a rebuild says so.

use crate::support::image::Image;
use crate::support::load::Client;
use crate::support::serve::{Serve, array, both, create};
use crate::support::{calpe, run, try_run};
use calpe_core::format::RegionKind;
use calpe_core::nbd::{Command, Request};
use serde_json::Value;
use std::path::Path;

/// A section for 'tank' whose passes are slow enough to be met under way.
fn slow(there: &Path) -> String {
    array("tank", &[there]) + "rebuild_min = \"1MiB\"\nrebuild_max = \"1MiB\"\n"
}

/// The state of the scrub, if there is one.
fn scrub(array: &Value) -> Option<&str> {
    let scans = array["scan"].as_array()?;
    scans.iter().find(|scan| scan["kind"] == "scrub")?["state"].as_str()
}

fn is_served(array: &Value) -> bool {
    array["log"]["state"] == "serving"
}

#[test]
fn a_scrub_that_was_paused_stays_so_over_restarts_and_imports() {
    let dir = tempfile::tempdir().expect("a directory");
    let there = dir.path().join("there");
    create(&there, "tank", 2, 1);
    let mut serve = Serve::start(dir.path(), &slow(&there));
    serve.array_when("it is served", is_served);
    serve.says("scrub tank");
    assert_eq!(scrub(&serve.arrays()[0]), Some("running"));
    let said = serve.says("scrub tank -p");
    assert!(!said.contains("not remembered"), "{said}");
    assert!(serve.refuses("scrub tank -p").contains("is paused already: 'calpe scrub tank'"));
    assert!(serve.refuses("scrub tank -p -n").contains("is paused already"));
    serve.kill();
    let mut serve = Serve::start(dir.path(), &slow(&there));
    assert_eq!(scrub(&serve.array_when("it is served", is_served)), Some("paused"));
    let events = serve.says("events");
    assert!(events.contains("imported, with 3 of 3 members; a scrub that was under way, at "), "{events}");
    serve.stop();

    let mut serve = Serve::start(dir.path(), &slow(&there));
    serve.array_when("it is served", is_served);
    serve.says("export tank");
    serve.says("import tank");
    assert_eq!(scrub(&serve.arrays()[0]), Some("paused"));
    serve.stop();
    // Nobody pauses it for ever.
    let mut serve = Serve::start(dir.path(), &slow(&there));
    serve.array_when("it is served", is_served);
    serve.says("scrub tank");
    serve.kill();
    let mut serve = Serve::start(dir.path(), &slow(&there));
    assert_eq!(scrub(&serve.array_when("it is served", is_served)), Some("running"));
    let events = serve.says("events");
    assert!(events.contains("%, goes on"), "{events}");
    serve.says("scrub tank -s");
    assert!(serve.refuses("scrub tank -p").contains("no scrub is running"));
    serve.stop();
}

#[test]
fn a_scrub_that_waits_for_a_rebuild_is_not_called_paused() {
    let dir = tempfile::tempdir().expect("a directory");
    let there = dir.path().join("there");
    create(&there, "tank", 2, 1);
    let mut serve = Serve::start(dir.path(), &slow(&there));
    serve.array_when("it is served", is_served);
    let mut client = Client::connect(&serve.nbd()).expect("connected");
    let write = Request::new(Command::Write, 0, 4 << 20);
    client.call(&write, &vec![7; 4 << 20]).expect("connected").expect("written");
    serve.says("replace tank 1 new");
    assert!(serve.says("scrub tank -n").contains("the scrub waits for the rebuild"));
    assert!(serve.says("scrub tank").contains("the scrub waits for the rebuild, and runs then"));
    assert_eq!(scrub(&serve.arrays()[0]), Some("waits_for_rebuild"));
    let status = serve.says("status");
    let line = status.lines().find(|line| line.contains("scrub 0.0 %"));
    assert!(line.is_some_and(|line| line.ends_with(", waits for the rebuild")), "{status}");
    let again = serve.refuses("scrub tank");
    assert!(again.contains("waits for a rebuild already: 'calpe wait tank -t scrub'"), "{again}");
    serve.says("scrub tank -p");
    assert_eq!(scrub(&serve.arrays()[0]), Some("paused"));
    assert!(serve.refuses("scrub tank -p").contains("is paused already"));
    serve.says("replace tank --cancel 1");
    assert_eq!(scrub(&serve.arrays()[0]), Some("paused"), "not only while there is something to wait for");
    serve.stop();
}

/// "No errors" of a scrub says nothing about members that it has not seen.
#[test]
fn a_scrub_without_a_member_says_so_as_long_as_it_is_the_last() {
    let dir = tempfile::tempdir().expect("a directory");
    let there = dir.path().join("there");
    create(&there, "tank", 2, 1);
    let section = array("tank", &[&there]);
    let mut serve = Serve::start(dir.path(), &section);
    serve.array_when("it is served", is_served);
    let mut client = Client::connect(&serve.nbd()).expect("connected");
    client
        .call(&Request::new(Command::Write, 0, 1 << 20), &[7; 1 << 20])
        .expect("connected")
        .expect("written");
    serve.says("offline tank 1");
    serve.says("scrub tank -w");
    let events = serve.events();
    let ended = events.iter().find(|event| event["kind"] == "scrub_ended").expect("it has ended");
    let text = ended["text"].as_str().expect("a text");
    let part = "not checked everywhere, as out of service or for a lack of resources: member 1";
    assert!(text.contains(part), "{text}");
    let says_so = |serve: &Serve| {
        let text = both(&serve.ask("status tank"));
        let is_listed = serve.arrays()[0]["last_scrub_unchecked"] == Value::from(vec![1]);
        let text = text.split_whitespace().collect::<Vec<_>>().join(" ");
        let told = "found no errors, without all of member 1 (out of service, or";
        assert_eq!(text.contains(told), is_listed, "{text}");
        is_listed
    };
    serve.says("online tank 1");
    serve.says("wait tank");
    assert!(says_so(&serve));
    drop(client);
    serve.stop();
    let mut serve = Serve::start(dir.path(), &section);
    serve.array_when("it is served", is_served);
    assert!(says_so(&serve), "a restart has forgotten it");
    serve.says("scrub tank -w");
    assert!(!says_so(&serve));
    serve.stop();
}

/// Where a scrub is to go on, it is known also what it has passed by.
#[test]
fn what_a_scrub_has_not_checked_is_kept_with_its_position() {
    let dir = tempfile::tempdir().expect("a directory");
    let there = dir.path().join("there");
    create(&there, "tank", 2, 1);
    let section = array("tank", &[&there]) + "rebuild_min = \"2MiB\"\nrebuild_max = \"2MiB\"\n";
    let mut serve = Serve::start(dir.path(), &section);
    serve.array_when("it is served", is_served);
    for end in ["nothing", "kill", "export"] {
        let mut client = Client::connect(&serve.nbd()).expect("connected");
        let write = Request::new(Command::Write, 0, 4 << 20);
        client.call(&write, &vec![7; 4 << 20]).expect("connected").expect("written");
        drop(client);
        serve.says("offline tank 1");
        serve.says("scrub tank");
        serve.array_when("the scrub has begun", |array| {
            array["scan"].as_array().is_some_and(|scans| scans.iter().any(|scan| scan["done"] != 0))
        });
        serve.says("scrub tank -p");
        serve.says("online tank 1");
        serve.says("wait tank -t rebuild");
        match end {
            "kill" => {
                serve.kill();
                // What the state directory knows of the scrub before says nothing of this one.
                serve = Serve::start(dir.path(), &section);
            }
            "export" => {
                serve.says("export tank");
                serve.says("import tank");
            }
            _ => {}
        }
        serve.array_when("it is served", is_served);
        let told = serve.says("scrub tank -w");
        let part =
            "no errors; not verified everywhere, as out of service or for a lack of resources: member 1";
        assert!(told.contains(part), "{end}: {told}");
        assert_eq!(serve.arrays()[0]["last_scrub_unchecked"], Value::from(vec![1]), "{end}");
        let status = serve.says("status tank");
        assert!(status.contains("without all of member 1"), "{end}: {status}");
        let ended = serve.events().into_iter().rfind(|event| event["kind"] == "scrub_ended");
        let text = ended.expect("it has ended")["text"].to_string();
        assert!(
            text.contains("not checked everywhere, as out of service or for a lack of resources: member 1"),
            "{end}: {text}"
        );
        serve.says("scrub tank -w");
        assert_eq!(serve.arrays()[0]["last_scrub_unchecked"], Value::from(Vec::<u16>::new()), "{end}");
    }
    serve.stop();
}

/// With as many members as hold data there is no parity to compare with.
#[test]
fn without_checksums_and_without_members_a_scrub_and_a_check_say_that_they_compared_nothing() {
    let dir = tempfile::tempdir().expect("a directory");
    let paths = ["m0", "m1", "m2"].map(|name| dir.path().join(name));
    let shape = ["create", "tank", "-k", "2", "-m", "1", "--size", "8MiB", "--checksum", "none"];
    run(calpe().args(shape).args(&paths));
    let serve = Serve::start(dir.path(), "");
    serve.says("import tank --dir .");
    let mut client = Client::connect(&serve.nbd()).expect("connected");
    let request = Request::new(Command::Write, 0, 1 << 20);
    client.call(&request, &vec![7; 1 << 20]).expect("connected").expect("written");
    drop(client);
    let scrubbed = |code: i32| {
        let output = serve.ask("scrub tank -w");
        let said = both(&output).split_whitespace().collect::<Vec<_>>().join(" ");
        assert_eq!(output.status.code(), Some(code), "{said}");
        said
    };
    assert!(scrubbed(0).contains("no errors"));
    // Nothing was found before, and nothing is known after.
    serve.says("offline tank 2");
    let said = scrubbed(1);
    assert!(said.contains("verified nothing") && !said.contains("no errors"), "{said}");
    let part = "not verified everywhere, as out of service or for a lack of resources: member 2";
    assert!(said.contains(part), "{said}");
    let status = serve.says("status tank");
    assert!(status.contains("verified nothing") && !status.contains("found no errors"), "{status}");
    serve.says("online tank 2");
    serve.says("wait tank");
    assert!(scrubbed(0).contains("no errors"));
    serve.says("export tank");
    let image = Image::open(&paths[0]);
    let data = image.superblock.region(RegionKind::Data).expect("data").offset.0;
    image.write(data, &[0x5c; 4096]);
    serve.says("import tank --dir .");
    let found = scrubbed(1);
    assert!(found.contains("1 error"), "{found}");
    // What was found stands until it can be compared again.
    serve.says("offline tank 2");
    let said = scrubbed(1);
    assert!(said.contains("1 error of this scrub or an earlier one stand"), "{said}");
    let events = serve.says("events");
    assert!(
        events.contains("nothing could be compared while they were out; 1 error of an earlier scrub"),
        "{events}"
    );
    serve.says("online tank 2");
    serve.says("wait tank");
    let tank = serve.arrays().remove(0);
    assert_eq!(tank["last_scrub"]["errors"], 1, "{tank:#}");
    serve.says("export tank");
    serve.stop();

    let output = try_run(calpe().arg("check").args(&paths[..2]));
    let said = both(&output).split_whitespace().collect::<Vec<_>>().join(" ");
    assert_eq!(output.status.code(), Some(1), "{said}");
    assert!(said.contains("cannot be told") && !said.contains("consistent"), "{said}");
}
