//! Requests for a replacement that meet each other.

use crate::support::serve::{Serve, array, both, create};
use std::process::Stdio;

#[test]
fn of_replacements_by_one_new_file_at_once_one_succeeds_and_its_file_stays() {
    let dir = tempfile::tempdir().expect("a directory");
    let there = dir.path().join("there");
    create(&there, "tank", 2, 1);
    let mut serve = Serve::start(dir.path(), &array("tank", &[&there]));
    serve.array_when("it is served", |array| array["state"] == "ONLINE");
    for round in 0..8 {
        let new = there.join(format!("new{round}"));
        let line = format!("replace tank 2 {}", new.display());
        let begin = || serve.command(&line).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn();
        let begun: Vec<_> = (0..3).map(|_| begin().expect("begun")).collect();
        let ended: Vec<_> =
            begun.into_iter().map(|child| child.wait_with_output().expect("an answer")).collect();
        let told: String = ended.iter().map(both).collect();
        assert_eq!(ended.iter().filter(|output| output.status.success()).count(), 1, "{told}");
        assert!(new.exists(), "the file in service was removed: {told}");
        serve.says("wait tank");
        let tank = serve.array_when("it is whole", |array| array["state"] == "ONLINE");
        assert_eq!(tank["members"][2]["name"], new.display().to_string(), "{tank}");
    }
    serve.stop();
}
