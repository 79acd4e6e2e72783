//! Daemons that do not answer: every command ends within its time limit, and says so.

use super::support::serve::{Serve, both};
use super::support::{calpe, try_run};
use std::os::unix::net::UnixListener;

#[test]
fn a_socket_that_nobody_accepts_from_is_given_up_and_named() {
    let dir = tempfile::tempdir().unwrap();
    let socket = dir.path().join("s");
    let _listener = UnixListener::bind(&socket).unwrap();
    for (line, code) in [("status --test", 4), ("status", 1), ("export tank", 1)] {
        let mut command = calpe();
        command.arg("--socket").arg(&socket).args(["--patience", "1"]).args(line.split_whitespace());
        let output = try_run(&mut command);
        let said = both(&output);
        assert_eq!(output.status.code(), Some(code), "{said}");
        assert!(said.contains("does not answer (waited 1 s)"), "{said}");
        assert!(said.contains(&socket.display().to_string()) && said.contains("--socket"), "{said}");
    }
}

#[test]
fn a_stopped_daemon_is_given_up_and_answers_again_when_it_goes_on() {
    let dir = tempfile::tempdir().unwrap();
    let serve = Serve::start(dir.path(), "");
    serve.signal("STOP");
    let test = serve.ask("status --test --patience 1");
    assert_eq!(test.status.code(), Some(4), "{}", both(&test));
    assert!(both(&test).contains("does not answer"), "{}", both(&test));
    assert!(serve.refuses("scrub tank --patience 1").contains("does not answer"));
    serve.signal("CONT");
    assert!(serve.says("status").contains("no arrays"));
}
