//! Scrubs that do not run: one that somebody has paused stays so, and one that waits for a rebuild says so.

use crate::support::load::Client;
use crate::support::serve::{Serve, array, both, create};
use calpe::nbd::{Command, Request};
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
    assert!(events.contains("imported, ONLINE; a scrub that was under way, at "), "{events}");
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
    assert!(ended["text"].as_str().expect("a text").contains("not checked, as out of service: member 1"));
    let says_so = |serve: &Serve| {
        let text = both(&serve.ask("status tank"));
        let is_listed = serve.arrays()[0]["last_scrub_unchecked"] == Value::from(vec![1]);
        let text = text.split_whitespace().collect::<Vec<_>>().join(" ");
        let told = "found no errors, without member 1, which was out of service";
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
        assert!(told.contains("no errors; not verified, as out of service: 1 of 3 members"), "{end}: {told}");
        assert_eq!(serve.arrays()[0]["last_scrub_unchecked"], Value::from(vec![1]), "{end}");
        let status = serve.says("status tank");
        assert!(status.contains("without member 1"), "{end}: {status}");
        let ended = serve.events().into_iter().rfind(|event| event["kind"] == "scrub_ended");
        let text = ended.expect("it has ended")["text"].to_string();
        assert!(text.contains("not checked, as out of service: member 1"), "{end}: {text}");
        serve.says("scrub tank -w");
        assert_eq!(serve.arrays()[0]["last_scrub_unchecked"], Value::from(Vec::<u16>::new()), "{end}");
    }
    serve.stop();
}
