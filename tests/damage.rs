//! Silent damage under load: bytes flipped, sectors zeroed, blocks swapped on up to m members, in every region of a
//! member, while clients write and read. Every client gets right data, the damage is counted against the members that
//! were damaged and no others, and a scrub leaves nothing to find.

mod support;

use calpe::control::ArrayReport;
use calpe::format::RegionKind;
use calpe::testing::Random;
use std::path::Path;
use std::sync::atomic::AtomicBool;
use std::time::Duration;
use support::image::{Damage, Image, live_log};
use support::load::{Client, Counts, Load};
use support::process::{Daemon, Setup, member};
use support::{calpe, run};

const DAMAGES: [Damage; 3] = [Damage::Flip, Damage::ZeroSector, Damage::Swap];

/// Blocks damaged at a time on each member.
const BLOCKS: usize = 40;

struct Bench<'a> {
    dir: &'a Path,
    setup: Setup,
    random: Random,
    load: Load,
    /// The members that are damaged: always the same, since what lies in free space stays damaged.
    liars: Vec<usize>,
}

impl Bench<'_> {
    fn images(&self) -> Vec<Image> {
        (0..self.setup.width()).map(|index| Image::open(&member(self.dir, index))).collect()
    }

    /// Damages blocks of the liars; returns how many have changed.
    fn damage(&mut self, damage: Damage, blocks: impl Fn(&Image) -> Vec<u64>) -> usize {
        let mut changed = 0;
        for &liar in &self.liars {
            let image = Image::open(&member(self.dir, liar));
            let all = blocks(&image);
            for at in self.random.choose(BLOCKS, all.len()) {
                changed += usize::from(image.damage(damage, all[at], &all, &mut self.random));
            }
        }
        changed
    }

    /// Runs the load while something is done; with `kill` the daemon is killed at its end.
    fn under_load<T>(
        &mut self,
        daemon: Daemon,
        kill: bool,
        act: impl FnOnce(&mut Self) -> T,
    ) -> (Option<Daemon>, T) {
        let mut client = Client::connect(&daemon.socket()).expect("connected");
        let (stop, counts) = (AtomicBool::new(false), Counts::default());
        let mut load = std::mem::replace(&mut self.load, Load::new(0, 1, 0));
        let (daemon, result) = std::thread::scope(|scope| {
            let running = scope.spawn(|| {
                let ended = load.run(&mut client, &stop, &counts);
                assert_eq!(ended.is_err(), kill, "{ended:?}");
            });
            std::thread::sleep(Duration::from_millis(150));
            let result = act(self);
            std::thread::sleep(Duration::from_millis(150));
            let daemon = if kill {
                daemon.kill();
                None
            } else {
                stop.store(true, std::sync::atomic::Ordering::Relaxed);
                Some(daemon)
            };
            running.join().expect("the load saw nothing wrong");
            (daemon, result)
        });
        self.load = load;
        (daemon, result)
    }

    /// Only liars are blamed, and no client saw an error; with `all` every liar is blamed.
    #[track_caller]
    fn assert_blame(&self, report: &ArrayReport, all: bool, what: &str) {
        for member in &report.members {
            let blamed = member.cksum > 0;
            let liar = self.liars.contains(&usize::from(member.index));
            assert!(liar || !blamed, "{what}: member {} is innocent: {report:?}", member.index);
            assert!(blamed || !liar || !all, "{what}: member {} got away with it: {report:?}", member.index);
            assert_eq!(member.read + member.write, 0, "{what}: {report:?}");
        }
        assert_eq!((report.errors.client, report.lost.len()), (0, 0), "{what}: {report:?}");
    }
}

fn every_region_of_a_member(checksum: &'static str) {
    let setup = Setup { data: 3, parity: 2, checksum, bytes: 8 << 20, chunk: 16 << 10 };
    let dir = tempfile::tempdir().expect("a directory");
    let mut random = Random::new(checksum.len() as u64);
    let liars = random.choose(setup.parity, setup.width());
    let load = Load::new(setup.bytes, setup.stripe_bytes(), random.next_u64());
    let mut bench = Bench { dir: dir.path(), setup, random, load, liars };
    let mut daemon = Daemon::start(dir.path(), &setup);
    // Something to damage.
    daemon =
        bench.under_load(daemon, false, |_| std::thread::sleep(Duration::from_millis(500))).0.expect("alive");

    for damage in DAMAGES {
        for kind in [RegionKind::Data, RegionKind::Pages] {
            let what = format!("{damage:?} in {kind}");
            let under_load =
                bench.under_load(daemon, false, |bench| bench.damage(damage, |image| image.blocks(kind)));
            daemon = under_load.0.expect("alive");
            assert!(under_load.1 > 0, "{what} has changed nothing");
            // Pages that are written all the time are right again before anybody looks.
            let cold = kind == RegionKind::Data;
            let found = daemon.scrub();
            bench.assert_blame(&daemon.report(), cold, &what);
            let changed = bench.damage(damage, |image| image.blocks(kind));
            let found = found + daemon.scrub();
            bench.assert_blame(&daemon.report(), true, &what);
            assert!(found > 0, "{what}: the scrub did not count what it found in {changed} blocks");
            assert_eq!(
                daemon.scrub(),
                0,
                "{what}: {found} errors were found and not repaired\n{}",
                daemon.log()
            );
            // Everything is right, and stays so over a restart, which reads all pages anew.
            bench
                .load
                .settle(&mut Client::connect(&daemon.socket()).expect("connected"))
                .expect("all is read");
            daemon.stop();
            daemon = Daemon::start(dir.path(), &setup);
            bench
                .load
                .settle(&mut Client::connect(&daemon.socket()).expect("connected"))
                .expect("all is read");
            bench.assert_blame(&daemon.report(), false, &what);
        }
        // The log counts only after a crash.
        let mut blamed = 0;
        for _ in 0..5 {
            let what = format!("{damage:?} in the log");
            bench.under_load(daemon, true, |_| ());
            let live = live_log(&bench.images());
            let changed = bench.damage(damage, |image| live[usize::from(image.superblock.member.0)].clone());
            daemon = Daemon::start(dir.path(), &setup);
            bench
                .load
                .settle(&mut Client::connect(&daemon.socket()).expect("connected"))
                .expect("all is read");
            let report = daemon.report();
            bench.assert_blame(&report, false, &what);
            let counted: u64 = report.members.iter().map(|member| member.cksum).sum();
            assert!(counted > 0 || changed == 0, "{what}: {changed} blocks: {report:?}\n{}", daemon.log());
            blamed += counted;
        }
        assert!(blamed > 0, "the log was never in use");
        // Superblocks are read at the start. One copy of four is damaged, under load.
        let what = format!("{damage:?} in a superblock");
        bench.under_load(daemon, true, |_| ());
        for &liar in &bench.liars {
            let image = Image::open(&member(dir.path(), liar));
            let copies = image.copies();
            let copy = &copies[bench.random.below(4) as usize];
            match damage {
                Damage::Flip => drop(image.flip(copy.clone(), &mut bench.random)),
                Damage::ZeroSector => image.write(copy.start, &[0; 512]),
                Damage::Swap => {
                    let (first, second) = (image.read(copy.start, 4096), image.read(copy.start + 4096, 4096));
                    image.write(copy.start, &second);
                    image.write(copy.start + 4096, &first);
                }
            }
        }
        daemon = Daemon::start(dir.path(), &setup);
        bench.load.settle(&mut Client::connect(&daemon.socket()).expect("connected")).expect("all is read");
        bench.assert_blame(&daemon.report(), true, &what);
        assert_eq!(daemon.scrub(), 0, "{what}\n{}", daemon.log());
    }
    daemon.stop();
    let members = (0..setup.width()).map(|index| member(dir.path(), index));
    run(calpe().arg("check").args(members));
}

#[test]
fn damage_in_every_region_is_served_counted_and_healed_blake3() {
    every_region_of_a_member("blake3");
}

#[test]
fn damage_in_every_region_is_served_counted_and_healed_crc32c() {
    every_region_of_a_member("crc32c");
}
