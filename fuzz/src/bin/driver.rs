//! Drives the targets without libFuzzer, blindly: no compiler but rustc is needed. Also writes the seeds, and
//! tries single inputs.
//!
//!     driver mutate TARGET SECONDS CRASHES    mutated seeds for so long; an input that fails is left in the folder CRASHES
//!     driver replay TARGET FILE               one input
//!     driver seeds                            rewrites fuzz/seeds

use calpe_fuzz::{TARGETS, Target, recorded, seed_folder};
use std::error::Error;
use std::path::Path;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

/// Changes made to an input before it goes back to a seed, so that most stay near something valid.
const MUTATIONS_MAX: u64 = 8;
/// Inputs between two looks at the clock.
const CLOCK_EVERY: u64 = 256;

fn main() -> Result<(), Box<dyn Error>> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let words: Vec<&str> = arguments.iter().map(String::as_str).collect();
    match words.as_slice() {
        ["mutate", target, seconds, crashes] => {
            mutate(find(target)?, Duration::from_secs(seconds.parse()?), Path::new(crashes))
        }
        ["replay", target, file] => {
            (find(target)?.run)(&std::fs::read(file)?);
            Ok(())
        }
        ["seeds"] => write_seeds(),
        _ => Err("usage: driver mutate TARGET SECONDS CRASHES | replay TARGET FILE | seeds".into()),
    }
}

fn find(name: &str) -> Result<&'static Target, String> {
    TARGETS.iter().find(|target| target.name == name).ok_or_else(|| format!("no target is called '{name}'"))
}

fn write_seeds() -> Result<(), Box<dyn Error>> {
    for target in &TARGETS {
        let folder = seed_folder(target);
        if folder.exists() {
            std::fs::remove_dir_all(&folder)?;
        }
        std::fs::create_dir_all(&folder)?;
        for (name, seed) in (target.seeds)() {
            std::fs::write(folder.join(name), seed)?;
        }
    }
    Ok(())
}

fn mutate(target: &Target, time: Duration, crashes: &Path) -> Result<(), Box<dyn Error>> {
    let mut seeds: Vec<Vec<u8>> = (target.seeds)().into_iter().map(|(_, seed)| seed).collect();
    seeds.extend(recorded(target)?.into_iter().map(|(_, stream)| stream));
    let started = Instant::now();
    let mut random = Random(SystemTime::now().duration_since(UNIX_EPOCH)?.as_nanos() as u64 | 1);
    let mut inputs = 0u64;
    while started.elapsed() < time {
        for _ in 0..CLOCK_EVERY {
            let mut input = seeds[random.below(seeds.len())].clone();
            for _ in 0..=random.next() % MUTATIONS_MAX {
                change(&mut input, &seeds, &mut random);
            }
            input.truncate(target.bytes_max);
            inputs += 1;
            if std::panic::catch_unwind(|| (target.run)(&input)).is_err() {
                std::fs::create_dir_all(crashes)?;
                let file = crashes.join(format!("{}-{:016x}", target.name, random.next()));
                std::fs::write(&file, &input)?;
                return Err(format!("failed; the input is in {}", file.display()).into());
            }
        }
    }
    println!("{inputs} inputs in {} s", started.elapsed().as_secs());
    Ok(())
}

/// One change: a flipped bit, a byte, a number at the edge of its range, bytes put in, taken out, or from
/// another seed.
fn change(input: &mut Vec<u8>, seeds: &[Vec<u8>], random: &mut Random) {
    let at = random.below(input.len() + 1);
    let (tail, some) = (input.len() - at, 1 + random.below(16));
    match random.next() % 6 {
        0 if tail > 0 => input[at] ^= 1 << random.below(8),
        1 if tail > 0 => input[at] = random.next() as u8,
        2 => {
            let edges = [
                0,
                1,
                0x7f,
                0x80,
                0xff,
                0x100,
                0x7fff,
                0xffff,
                0x7fff_ffff,
                0xffff_ffff,
                i64::MAX as u64,
                u64::MAX,
            ];
            let bytes = edges[random.below(edges.len())].to_le_bytes();
            let len = [1, 2, 4, 8][random.below(4)].min(tail);
            input[at..at + len].copy_from_slice(&bytes[..len]);
        }
        3 => drop(input.splice(at..at, (0..some).map(|_| 0u8))),
        4 => drop(input.drain(at..at + some.min(tail))),
        _ => {
            let other = &seeds[random.below(seeds.len())];
            let from = random.below(other.len() + 1);
            let len = (other.len() - from).min(some).min(tail);
            input[at..at + len].copy_from_slice(&other[from..from + len]);
        }
    }
}

/// Xorshift (Marsaglia 2003): quality enough to stir bytes.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0
    }

    fn below(&mut self, limit: usize) -> usize {
        (self.next() % limit as u64) as usize
    }
}
