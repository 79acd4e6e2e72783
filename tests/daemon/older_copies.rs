//! More members than the array survives are older copies of themselves, and one is as it was last: what is
//! said of that, and that the one which is newer is not built over.

use crate::support::serve::{Serve, array, both, create};
use crate::support::{calpe, try_run};
use serde_json::Value;
use std::fs;
use std::path::Path;

/// The action that a status advises, and the notes on its members.
fn told(array: &Value) -> (String, Vec<String>) {
    let notes = array["members"].as_array().expect("members").iter();
    let notes = notes.map(|member| member["reason"].as_str().unwrap_or_default().to_owned());
    (array["action"].as_str().expect("text").to_owned(), notes.collect())
}

fn check(there: &Path) -> String {
    both(&try_run(calpe().arg("check").args((0..3).map(|index| there.join(format!("m{index}"))))))
}

#[test]
fn of_older_copies_and_a_newer_member_it_is_said_which_is_which_and_the_newer_is_kept() {
    let dir = tempfile::tempdir().expect("a directory");
    let there = dir.path().join("there");
    create(&there, "tank", 2, 1);
    let config = array("tank", &[&there]);
    let name = |index: usize, kind: &str| dir.path().join(format!("{kind}{index}"));
    let member = |index: usize| there.join(format!("m{index}"));
    for index in 0..2 {
        fs::copy(member(index), name(index, "old")).expect("copied");
    }
    let mut serve = Serve::start(dir.path(), &config);
    serve.array_when("it is served", |array| array["state"] == "ONLINE");
    serve.stop();
    for index in 0..2 {
        fs::rename(member(index), name(index, "current")).expect("moved");
        fs::copy(name(index, "old"), member(index)).expect("copied");
    }
    let text = check(&there);
    assert!(text.contains("members 0, 1 are older copies of themselves. Member 2 ("), "{text}");

    // None is missing, and the current ones are to be put back.
    let mut serve = Serve::start(dir.path(), &config);
    let tank = serve.array_when("it was tried", |array| array["state"] == "FAILED");
    let (action, notes) = told(&tank);
    assert!(action.starts_with("Put the current devices or files of the older copies back"), "{action}");
    assert!(action.contains("serves the older state, without what was written since"), "{action}");
    assert_eq!(notes, ["an older copy of itself", "an older copy of itself", "newer than the others"]);
    let refused = serve.refuses("import tank");
    assert!(refused.contains("Put the current device or file of members 0, 1 back"), "{refused}");
    let forced = serve.says("import --force -n tank");
    assert!(forced.contains("would import array 'tank' with 2 of 3 members"), "{forced}");
    assert!(forced.contains("What was written since they were copied is not served"), "{forced}");

    // Forced all the same, the newer one is kept.
    serve.says("import --force tank");
    let kept = |serve: &mut Serve| {
        let tank = serve.array_when("it is served", |array| array["state"] == "DEGRADED");
        let (action, _) = told(&tank);
        assert!(action.starts_with("Keep the device of 2: "), "{action}");
        for command in ["online -n tank 2", "online tank 2"] {
            let refused = serve.refuses(command);
            assert!(refused.contains("newer than the array") && refused.contains("Keep it"), "{refused}");
        }
    };
    kept(&mut serve);
    let path = member(2).display().to_string();
    assert!(serve.refuses(&format!("replace tank 2 {path}")).contains("--force"));
    serve.stop();
    let text = check(&there);
    assert!(text.contains("it is newer than the array") && !text.contains("missed writes"), "{text}");
    let mut serve = Serve::start(dir.path(), &config);
    serve.until("it is tried", |serve| {
        serve.arrays().iter().any(|array| ["FAILED", "DEGRADED"].iter().any(|state| array["state"] == *state))
    });
    if serve.arrays()[0]["state"] == "FAILED" {
        serve.says("import --force tank");
    }
    kept(&mut serve);
    serve.stop();

    // With the current ones in their places the array is whole.
    (0..2).for_each(|index| fs::rename(name(index, "current"), member(index)).expect("moved"));
    let mut serve = Serve::start(dir.path(), &config);
    serve.array_when("it is whole", |array| array["state"] == "ONLINE");
    serve.stop();
}

/// The newer device comes when the array serves already, and is refused: that is known from then
/// on.
#[test]
fn a_newer_device_that_was_refused_is_told_to_be_kept() {
    let dir = tempfile::tempdir().expect("a directory");
    let there = dir.path().join("there");
    create(&there, "tank", 2, 1);
    let config = array("tank", &[&there]);
    let member = |index: usize| there.join(format!("m{index}"));
    let aside = |index: usize| dir.path().join(format!("aside{index}"));
    for index in 0..2 {
        fs::copy(member(index), aside(index)).expect("copied");
    }
    let mut serve = Serve::start(dir.path(), &config);
    serve.array_when("it is served", |array| array["state"] == "ONLINE");
    serve.stop();
    (0..2).for_each(|index| fs::rename(aside(index), member(index)).expect("moved"));
    for command in ["online tank 2 -n", "online tank 2"] {
        fs::rename(member(2), aside(2)).expect("moved");
        let mut serve = Serve::start(dir.path(), &config);
        serve.array_when("it is served", |array| array["state"] == "DEGRADED");
        fs::rename(aside(2), member(2)).expect("moved");
        let refused = serve.refuses(command);
        assert!(refused.contains("newer than the array") && refused.contains("Keep it"), "{refused}");
        let tank = serve.arrays().remove(0);
        let (action, notes) = told(&tank);
        assert!(action.starts_with("Keep the device of 2: "), "{command}: {action}");
        assert!(!action.contains("bring it back"), "{command}: {action}");
        assert!(notes[2].contains("newer than the array"), "{command}: {notes:?}");
        assert!(tank["members"][2]["conditions"].as_array().expect("a list").contains(&"kept".into()));
        let text = both(&serve.ask("wait tank"));
        assert!(!text.contains("calpe online tank 2"), "{text}");
        serve.stop();
    }
}
