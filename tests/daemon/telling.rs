//! What the daemon says of members and arrays, and answers to commands, is what is the case.

use crate::support::load::Client;
use crate::support::serve::{Serve, array, create};
use serde_json::Value;
use std::path::PathBuf;

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
