//! An array whose log cannot be replayed, and which no force starts: everything says that it is FAILED, and
//! what helps.

use super::blank_pages::recover;
use crate::support::image::Image;
use crate::support::load::Client;
use crate::support::serve::{Serve, both, create};
use calpe_core::format::RegionKind;
use calpe_core::nbd::{Command as NbdCommand, Request};
use calpe_core::testing::Random;

/// Bytes of the volume that are written.
const LEN: usize = 4 << 20;

/// Bytes of one write: a part of a stripe, which goes to the log.
const WRITE: usize = 64 << 10;

#[test]
fn an_array_whose_log_is_lost_beyond_parity_is_told_as_failed_and_read_without_calpe() {
    let dir = tempfile::tempdir().expect("a directory");
    let there = dir.path().join("there");
    create(&there, "tank", 2, 1);
    let ring = |member: &str| {
        let image = Image::open(&there.join(member));
        let ring = image.superblock.region(RegionKind::Log).expect("a logged array");
        (ring.offset.0, ring.len)
    };
    let serve = Serve::start(dir.path(), "");
    assert!(serve.says("import tank --dir there -n --once").ends_with("with 3 of 3 members\n"));
    serve.says("import tank --dir there");
    // Enough for the log to go round.
    let mut client = Client::connect(&serve.nbd()).expect("connected");
    let mut call = |command, offset, data: &[u8]| {
        client
            .call(&Request::new(command, offset, data.len() as u64), data)
            .expect("connected")
            .expect("done");
    };
    let mut random = Random::new(1);
    let mut volume = vec![0; LEN];
    let mut written = 0;
    let mut before = Vec::new();
    while written < 3 * ring("m0").1 {
        before.push(volume.clone());
        for at in (0..LEN).step_by(WRITE) {
            let data = &mut volume[at..at + WRITE];
            random.fill(data);
            call(NbdCommand::Write, at as u64, data);
            written += WRITE as u64;
        }
        call(NbdCommand::Flush, 0, &[]);
    }
    drop(client);
    serve.kill();
    for member in ["m0", "m1"] {
        let (offset, len) = ring(member);
        Image::open(&there.join(member)).write(offset, &vec![0x5c; len as usize]);
    }

    let mut serve = Serve::start(dir.path(), "");
    serve.array_when("it was tried", |array| array["state"] == "FAILED");
    for line in ["import tank --dir there", "import tank --dir there --force"] {
        serve.says("export tank");
        let outlook = serve.says(&format!("{line} -n"));
        assert!(outlook.contains("whether its redo log can be replayed shows only when"), "{outlook}");
        let output = serve.ask(line);
        let said = both(&output);
        assert_eq!(output.status.code(), Some(1), "{said}");
        assert!(
            said.contains("is FAILED") && said.contains("calpe: array 'tank' cannot be served: "),
            "{said}"
        );
        let tank = serve.arrays().remove(0);
        assert_eq!(tank["log"]["yields_to_force"], false, "{tank:#}");
        let action = tank["action"].as_str().expect("text");
        assert!(!action.contains("import --force") && !action.contains("missing"), "{action}");
        assert!(action.contains("scripts/recover.py --force"), "{action}");
    }
    let events = serve.says("events");
    assert!(
        events.contains("imported, with 3 of 3 members") && !events.contains("imported, ONLINE"),
        "{events}"
    );
    assert!(events.contains("the array cannot be served: "), "{events}");
    serve.stop();

    // That gives what is not lost, and says where the rest is.
    let members = [0, 1, 2];
    let (code, text, _) = recover(dir.path(), &there, &members, &[]);
    assert!(code == Some(2) && text.contains("too few members that were not rolled back"), "{text}");
    let (code, text, found) = recover(dir.path(), &there, &members, &["--force"]);
    assert!(matches!(code, Some(0 | 1)), "{text}");
    // Writes whose batches no member has whole any more are as they were before, or zeroes. How
    // many these are depends on how much was in its place when the daemon was killed.
    let block = |volume: &[u8], at: usize| volume[at..at + 4096].to_vec();
    let differs = |at: &usize| block(&found, *at) != block(&volume, *at);
    let differing: Vec<usize> = (0..LEN).step_by(4096).filter(differs).collect();
    let is_older = |at: usize| before.iter().any(|volume| block(volume, at) == block(&found, at));
    let wrong: Vec<&usize> = differing.iter().filter(|at| !is_older(**at)).collect();
    assert!(wrong.is_empty(), "neither old nor new at {wrong:?}: {text}");
    let count = differing.len();
    assert!(count < LEN / 4096 / 2, "{count} blocks differ: {text}");
}
