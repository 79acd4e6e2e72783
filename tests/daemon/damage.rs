//! Silent damage under load: bytes flipped, sectors zeroed, blocks swapped on up to m members, in every
//! region of a member, while clients write and read. Every client gets right data, the damage is counted
//! against the members that were damaged and no others, and a scrub leaves nothing to find.
//!
//! Superblocks are read at a start and the log after a kill only: they are damaged under load, and after the
//! kill that ends it, and looked at with the restart that follows.

use crate::support::image::{Damage, Image, live_log};
use crate::support::load::{Client, Counts, Load};
use crate::support::process::{Daemon, Setup, member};
use crate::support::{calpe, run};
use calpe::control::{ArrayReport, Request};
use calpe_core::format::RegionKind;
use calpe_core::testing::Random;
use std::collections::HashMap;
use std::path::Path;
use std::sync::atomic::AtomicBool;
use std::time::Duration;

const DAMAGES: [Damage; 3] = [Damage::Flip, Damage::ZeroSector, Damage::Swap];

/// Blocks damaged at a time on each member.
const BLOCKS: usize = 40;

/// Rounds of damage under load until it is seen on every member that was damaged; mostly one or two.
const ROUNDS_MAX: usize = 40;

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

    /// Damages blocks of the liars; returns how many have changed. Of blocks that were swapped and swapped
    /// back, none has.
    fn damage(&mut self, damage: Damage, blocks: impl Fn(&Image) -> Vec<u64>) -> usize {
        let mut changed = 0;
        for &liar in &self.liars {
            let image = Image::open(&member(self.dir, liar));
            let all = blocks(&image);
            let mut before = HashMap::new();
            for at in self.random.choose(BLOCKS, all.len()) {
                for (offset, bytes) in image.damage(damage, all[at], &all, &mut self.random) {
                    before.entry(offset).or_insert(bytes);
                }
            }
            changed += before.iter().filter(|(at, bytes)| image.read(**at, bytes.len()) != **bytes).count();
        }
        changed
    }

    /// Runs the load while something is done; with `kill` the daemon is killed at its end.
    fn under_load<T>(
        &mut self,
        mut daemon: Daemon,
        kill: bool,
        act: impl FnOnce(&mut Self, &mut Daemon) -> T,
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
            let result = act(self, &mut daemon);
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

/// Where blocks are damaged that count at any time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Place {
    Data,
    Parity,
    Pages,
}

impl Place {
    fn blocks(self, image: &Image) -> Vec<u64> {
        match self {
            Place::Data => image.columns(|column, data| column < data),
            Place::Parity => image.columns(|column, data| column >= data),
            Place::Pages => image.blocks(RegionKind::Pages),
        }
    }
}

impl Bench<'_> {
    /// Blocks that are read sooner or later: under load, and then with nobody else at work.
    fn damage_in_place(&mut self, damage: Damage, place: Place, mut daemon: Daemon) -> Daemon {
        let what = format!("{damage:?} in {place:?}");
        let mut found = 0;
        // What is written under load is right again before anybody looks.
        for round in 0.. {
            assert!(round < ROUNDS_MAX, "{what}: nobody is blamed\n{}", daemon.log());
            let (alive, errors) = self.under_load(daemon, false, |bench, daemon| {
                let changed = bench.damage(damage, |image| place.blocks(image));
                assert!(changed > 0, "{what} has changed nothing");
                daemon.scrub()
            });
            daemon = alive.expect("alive");
            found += errors + daemon.scrub();
            let report = daemon.report();
            self.assert_blame(&report, false, &what);
            // The few pages of a small array are all written several times a second.
            if place == Place::Pages || self.liars.iter().all(|&liar| report.members[liar].cksum > 0) {
                break;
            }
        }
        let changed = self.damage(damage, |image| place.blocks(image));
        found += daemon.scrub();
        self.assert_blame(&daemon.report(), true, &what);
        assert!(found > 0, "{what}: the scrub did not count what it found in {changed} blocks");
        assert_eq!(daemon.scrub(), 0, "{what}: {found} errors, not all of them repaired\n{}", daemon.log());
        self.restart(daemon, &what)
    }

    /// Everything is right, and stays so over a restart, which reads all pages anew and keeps the counts as
    /// they are.
    fn restart(&mut self, daemon: Daemon, what: &str) -> Daemon {
        let counts = |report: &ArrayReport| report.members.iter().map(|m| m.cksum).collect::<Vec<_>>();
        self.settle(&daemon);
        let before = counts(&daemon.report());
        daemon.stop();
        let daemon = Daemon::start(self.dir, &self.setup);
        self.settle(&daemon);
        let report = daemon.report();
        assert_eq!(counts(&report), before, "{what}: {report:?}");
        self.assert_blame(&report, false, what);
        clear(&daemon);
        daemon
    }

    /// Blocks of the log, which count after a kill only.
    fn damage_in_log(&mut self, damage: Damage, mut daemon: Daemon) -> Daemon {
        let mut blamed = 0;
        for round in 0..5 {
            let what = format!("{damage:?} in the log, round {round}");
            clear(&daemon);
            // What nobody needs, mostly; whatever a replay needs of it is on others.
            self.under_load(daemon, true, |bench, _| {
                bench.damage(damage, |image| image.blocks(RegionKind::Log))
            });
            let live = live_log(&self.images(), &self.liars);
            let changed = self.damage(damage, |image| live[usize::from(image.superblock.member.0)].clone());
            let of = live.iter().map(Vec::len).collect::<Vec<_>>();
            daemon = Daemon::start(self.dir, &self.setup);
            self.settle(&daemon);
            let report = daemon.report();
            self.assert_blame(&report, false, &what);
            let counted: u64 = report.members.iter().map(|member| member.cksum).sum();
            assert!(
                counted > 0 || changed == 0,
                "{what}: {changed} of {of:?} blocks: {report:?}\n{}",
                daemon.log()
            );
            assert_eq!(daemon.scrub(), 0, "{what}\n{}", daemon.log());
            blamed += counted;
        }
        assert!(blamed > 0, "the log was never in use");
        daemon
    }

    /// One copy of four of the superblock of each liar, under load. Then the daemon is killed.
    fn damage_superblocks(&mut self, damage: Damage) {
        for &liar in &self.liars {
            let image = Image::open(&member(self.dir, liar));
            let copies = image.copies();
            let copy = &copies[self.random.below(4) as usize];
            match damage {
                Damage::Flip => drop(image.flip(copy.clone(), &mut self.random)),
                Damage::ZeroSector => image.write(copy.start, &[0; 512]),
                Damage::Swap => {
                    let (first, second) = (image.read(copy.start, 4096), image.read(copy.start + 4096, 4096));
                    image.write(copy.start, &second);
                    image.write(copy.start + 4096, &first);
                }
            }
        }
    }

    fn damage_in_superblocks(&mut self, damage: Damage, daemon: Daemon) -> Daemon {
        let what = format!("{damage:?} in a superblock");
        clear(&daemon);
        self.under_load(daemon, true, |bench, _| bench.damage_superblocks(damage));
        let mut daemon = Daemon::start(self.dir, &self.setup);
        self.settle(&daemon);
        self.assert_blame(&daemon.report(), true, &what);
        assert_eq!(daemon.scrub(), 0, "{what}\n{}", daemon.log());
        daemon
    }

    /// All of it at once, and a kill on top.
    fn damage_everywhere(&mut self, damage: Damage, daemon: Daemon) -> Daemon {
        let what = format!("{damage:?} everywhere");
        clear(&daemon);
        self.under_load(daemon, true, |bench, _| {
            for place in [Place::Data, Place::Parity, Place::Pages] {
                bench.damage(damage, |image| place.blocks(image));
            }
            bench.damage_superblocks(damage);
        });
        let live = live_log(&self.images(), &self.liars);
        self.damage(damage, |image| live[usize::from(image.superblock.member.0)].clone());
        let daemon = Daemon::start(self.dir, &self.setup);
        self.settle(&daemon);
        let mut daemon = self.under_load(daemon, false, |_, _| ()).0.expect("alive");
        daemon.scrub();
        self.assert_blame(&daemon.report(), true, &what);
        assert_eq!(daemon.scrub(), 0, "{what}\n{}", daemon.log());
        self.restart(daemon, &what)
    }

    fn settle(&mut self, daemon: &Daemon) {
        self.load.settle(&mut Client::connect(&daemon.socket()).expect("connected")).expect("all is read");
    }
}

/// What is counted from here on is news, also after a kill.
fn clear(daemon: &Daemon) {
    daemon.done(&Request::Clear { array: "calpe".into(), member: None, dry_run: false });
    assert!(daemon.report().members.iter().all(|member| member.cksum + member.repaired == 0));
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
    daemon = bench
        .under_load(daemon, false, |_, _| std::thread::sleep(Duration::from_millis(500)))
        .0
        .expect("alive");
    for damage in DAMAGES {
        for place in [Place::Data, Place::Parity, Place::Pages] {
            daemon = bench.damage_in_place(damage, place, daemon);
        }
        daemon = bench.damage_in_log(damage, daemon);
        daemon = bench.damage_in_superblocks(damage, daemon);
        daemon = bench.damage_everywhere(damage, daemon);
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
