//! Explores all states of a model, breadth first, so that the first violation has the shortest trace; and
//! runs the scenarios and mutations of a model as its program does.

use std::collections::{HashSet, VecDeque};
use std::hash::{BuildHasherDefault, Hash, Hasher};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Instant;

/// One scenario of a model.
pub trait Model: Sync {
    /// What the system is like between two steps.
    type State: Clone + Hash;

    /// Its name; the first character is what the command line calls it by.
    fn name(&self) -> &str;
    /// The state with which it begins.
    fn start(&self) -> Self::State;
    /// All that can happen next.
    fn steps(&self, state: &Self::State, steps: &mut Vec<Step<Self::State>>);
}

/// Something that happens.
pub struct Step<S> {
    /// What happens, in words.
    pub text: String,
    /// The state afterwards.
    pub after: S,
    /// What is wrong afterwards, if anything is.
    pub wrong: Option<String>,
}

impl<S> Step<S> {
    /// One after which nothing is wrong.
    pub fn new(text: impl Into<String>, after: S) -> Step<S> {
        Step { text: text.into(), after, wrong: None }
    }
}

/// A fast hash: states are kept as 64 bits each.
struct Fingerprint(u64);

impl Fingerprint {
    #[inline]
    fn add(&mut self, word: u64) {
        self.0 = (self.0.rotate_left(5) ^ word).wrapping_mul(0x517c_c1b7_2722_0a95);
        self.0 ^= self.0 >> 29;
    }
}

impl Hasher for Fingerprint {
    #[inline]
    fn finish(&self) -> u64 {
        let hash = (self.0 ^ self.0 >> 32).wrapping_mul(0xd6e8_feb8_6659_fd93);
        hash ^ hash >> 32
    }

    #[inline]
    fn write(&mut self, bytes: &[u8]) {
        for chunk in bytes.chunks(8) {
            let mut word = [0; 8];
            word[..chunk.len()].copy_from_slice(chunk);
            self.add(u64::from_le_bytes(word));
        }
    }

    #[inline]
    fn write_u8(&mut self, byte: u8) {
        self.add(byte.into());
    }

    #[inline]
    fn write_u64(&mut self, word: u64) {
        self.add(word);
    }
}

fn fingerprint(state: &impl Hash) -> u64 {
    let mut hasher = Fingerprint(0x9e37_79b9_7f4a_7c15);
    state.hash(&mut hasher);
    hasher.finish()
}

/// The fingerprints are hashes already.
#[derive(Default)]
struct AsIs(u64);

impl Hasher for AsIs {
    fn finish(&self) -> u64 {
        self.0
    }

    fn write(&mut self, _: &[u8]) {
        unreachable!("only whole words are hashed");
    }

    fn write_u64(&mut self, word: u64) {
        self.0 = word;
    }
}

struct Found {
    states: usize,
    is_whole: bool,
    /// What led there, and what is wrong.
    violation: Option<(Vec<String>, String)>,
}

/// With more states a scenario counts as not explored.
const STATES_MAX: usize = 12_000_000;

fn explore<M: Model>(model: &M) -> Found {
    let mut seen: HashSet<u64, BuildHasherDefault<AsIs>> = HashSet::default();
    let mut parents: Vec<(u32, String)> = vec![(0, String::new())];
    let mut queue = VecDeque::new();
    let start = model.start();
    seen.insert(fingerprint(&start));
    queue.push_back((start, 0));
    let mut steps = Vec::new();
    while let Some((state, at)) = queue.pop_front() {
        model.steps(&state, &mut steps);
        for Step { text, after, wrong } in steps.drain(..) {
            if let Some(wrong) = wrong {
                let (mut trace, mut up) = (vec![text], at);
                while up != 0 {
                    trace.push(parents[up as usize].1.clone());
                    up = parents[up as usize].0;
                }
                trace.reverse();
                return Found { states: seen.len(), is_whole: false, violation: Some((trace, wrong)) };
            }
            if seen.insert(fingerprint(&after)) {
                if seen.len() > STATES_MAX {
                    return Found { states: seen.len(), is_whole: false, violation: None };
                }
                parents.push((at, text));
                queue.push_back((after, parents.len() as u32 - 1));
            }
        }
    }
    Found { states: seen.len(), is_whole: true, violation: None }
}

/// The program of a model: `rules [LETTER..]` explores its scenarios, in which no violation may appear;
/// `mutations [NAME..]` takes each rule away, and each time one of the scenarios named beside it must show a
/// violation, whose steps are printed where names are given; `variants [NAME..]` explores all scenarios with
/// other rules that do as well; without arguments, the first two. Exit status 1 if that is not so.
pub fn run<M: Model, R: Copy + Sync>(
    scenarios: impl Fn(R) -> Vec<M> + Sync,
    rules: R,
    mutations: &[(&'static str, R, &'static str)],
    variants: &[(&'static str, R)],
) {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let mode = arguments.first().map_or("all", String::as_str);
    let is_picked = |name: &str| arguments.len() < 2 || arguments[1..].iter().any(|wanted| name == wanted);
    let mut is_good = true;
    let none_violates = |jobs: &[M]| {
        in_parallel(jobs, |model| {
            let started = Instant::now();
            let found = explore(model);
            let took = started.elapsed().as_secs_f32();
            let mut text = format!("{:40} {:>8} states, {took:.1} s", model.name(), found.states);
            match &found.violation {
                Some((trace, wrong)) => text += &format!(": VIOLATION: {wrong}\n   {}", trace.join("\n   ")),
                None if !found.is_whole => text += ": NOT EXPLORED TO THE END",
                None => {}
            }
            (found.is_whole, text)
        })
    };
    if matches!(mode, "all" | "rules") {
        let mut jobs = scenarios(rules);
        jobs.retain(|model| is_picked(&model.name()[..1]));
        is_good &= none_violates(&jobs);
    }
    for (name, rules) in variants.iter().filter(|variant| mode == "variants" && is_picked(variant.0)) {
        println!("variant {name}");
        is_good &= none_violates(&scenarios(*rules));
    }
    if matches!(mode, "all" | "mutations") {
        let jobs: Vec<_> = mutations.iter().filter(|job| is_picked(job.0)).collect();
        is_good &= in_parallel(&jobs, |(name, rules, letters)| {
            for model in scenarios(*rules).iter().filter(|model| letters.contains(&model.name()[..1])) {
                let Found { states, violation: Some((trace, wrong)), .. } = explore(model) else { continue };
                let mut text = format!("without {name}: {wrong}, after {states} states of {}", model.name());
                if arguments.len() > 1 {
                    text += &format!("\n   {}", trace.join("\n   "));
                }
                return (true, text);
            }
            (false, format!("without {name}: NO VIOLATION in {letters}"))
        });
    }
    std::process::exit(i32::from(!is_good));
}

fn in_parallel<T: Sync>(jobs: &[T], work: impl Fn(&T) -> (bool, String) + Sync) -> bool {
    let (next, is_good) = (AtomicUsize::new(0), AtomicBool::new(true));
    std::thread::scope(|scope| {
        for _ in 0..2 {
            scope.spawn(|| {
                while let Some(job) = jobs.get(next.fetch_add(1, Ordering::Relaxed)) {
                    let (good, text) = work(job);
                    is_good.fetch_and(good, Ordering::Relaxed);
                    println!("{text}");
                }
            });
        }
    });
    is_good.into_inner()
}
