//! From a matrix to the cheapest list of operations that was found.
//!
//! Two ways are tried. *Doubled outputs*: per row Horner's rule over the eight bit planes of the
//! coefficients, 7 doublings a row. *Doubled inputs*: every input times 1, 2, 4 .. 128 once, then
//! every row is one sum; cheaper when there are far more rows than inputs. In both, what remains is
//! a set of sums over common items, and pairs of items that occur in many sums are made items
//! themselves, the most frequent pair first (C. Paar, "Optimized arithmetic for Reed-Solomon
//! encoders", ISIT 1997). Each shared pair stays alive, so their number is bounded by the live
//! words that are allowed; where the inputs alone would take those, the columns are cut into
//! chunks, each with its own doublings, and the rows' words are carried from chunk to chunk. Must
//! not know of registers or instructions beyond their number.

use std::ops::Range;

use super::{Op, Value, XorProgram};

/// Bits of a coefficient.
const BITS: usize = 8;

/// Words alive beside the items: the accumulators of two rows, the sums that are added to them, and
/// a carry.
const TEMPORARIES: usize = 6;

/// Rows whose Horner chains are interleaved, so that one need not wait for the other's doubling.
const ROWS_TOGETHER: usize = 2;

/// Numbers of chunks tried beyond the first that fits.
const CHUNKINGS_TRIED: usize = 4;

/// Fewest shared pairs that a chunk leaves room for when the number of chunks is chosen.
const SHARED_MIN: usize = 16;

/// Doubled inputs are tried up to this many: each is eight words, and beyond a dozen they fill the
/// registers.
const DOUBLED_INPUTS_MAX: usize = 12;

/// The cheapest list found for the matrix that keeps within `live_words_max`, or else the one with
/// the fewest live words.
pub(super) fn cheapest(matrix: &[u8], inputs: usize, outputs: usize, live_words_max: usize) -> XorProgram {
    let matrix = Matrix { factors: matrix, inputs };
    let mut candidates = Vec::new();
    // Rows are held between chunks, but not if there is but one.
    let room = live_words_max.saturating_sub(outputs + TEMPORARIES + SHARED_MIN).max(BITS);
    let fits = if inputs + TEMPORARIES <= live_words_max { 1 } else { inputs.div_ceil(room) };
    for chunks in fits..=(fits + CHUNKINGS_TRIED).min(inputs) {
        candidates.push(doubled_outputs(&matrix, outputs, chunks, live_words_max));
        // With everything in one chunk and room to share, another cut only adds doublings.
        if chunks == 1 && 2 * inputs + TEMPORARIES <= live_words_max {
            break;
        }
    }
    if inputs <= DOUBLED_INPUTS_MAX {
        candidates.push(doubled_inputs(&matrix, outputs, live_words_max));
    }
    let best = candidates.into_iter().map(|ops| XorProgram { inputs, outputs, ops }).min_by_key(|program| {
        let excess = program.live_words().saturating_sub(live_words_max);
        (excess, program.counts().operations())
    });
    best.expect("at least one number of chunks is tried")
}

struct Matrix<'a> {
    factors: &'a [u8],
    inputs: usize,
}

impl Matrix<'_> {
    fn factor(&self, row: usize, column: usize) -> u8 {
        self.factors[row * self.inputs + column]
    }
}

/// Horner's rule over bit planes, columns in `chunks` parts.
fn doubled_outputs(matrix: &Matrix<'_>, rows: usize, chunks: usize, live_words_max: usize) -> Vec<Op> {
    let mut list = List::default();
    let mut carried: Vec<Option<Value>> = vec![None; rows];
    let held = if chunks == 1 { 0 } else { rows };
    for chunk in 0..chunks {
        let columns = chunk * matrix.inputs / chunks..(chunk + 1) * matrix.inputs / chunks;
        let last = chunk + 1 == chunks;
        let sums = Sums::planes(matrix, rows, columns.clone(), chunk > 0);
        let room = live_words_max.saturating_sub(columns.len() + held + TEMPORARIES);
        let shared = sums.share(room);
        let mut items = Items::load(&mut list, &shared, columns.map(|column| column as u32));
        for first in (0..rows).step_by(ROWS_TOGETHER) {
            let group = first..rows.min(first + ROWS_TOGETHER);
            let mut accumulators = [None; ROWS_TOGETHER];
            for bit in (0..BITS).rev() {
                for (accumulator, row) in accumulators.iter_mut().zip(group.clone()) {
                    let mut parts = items.of_sum(&mut list, row * BITS + bit);
                    if bit == 0 {
                        parts.extend(carried[row]);
                    }
                    parts.extend(accumulator.map(|value| list.push(Op::Double(value))));
                    *accumulator = list.sum(&parts);
                }
            }
            for (accumulator, row) in accumulators.into_iter().zip(group) {
                carried[row] = accumulator;
                if last {
                    list.store(row, accumulator);
                }
            }
        }
    }
    list.ops
}

/// Every input times the powers of 2 that occur, then one sum a row.
fn doubled_inputs(matrix: &Matrix<'_>, rows: usize, live_words_max: usize) -> Vec<Op> {
    let sums = Sums::powers(matrix, rows);
    let mut list = List::default();
    let shared = sums.share(live_words_max.saturating_sub(sums.sets.len() + TEMPORARIES));
    let loaded: Vec<Option<Value>> = (0..matrix.inputs)
        .map(|column| sums.powers_of(column).next().map(|_| list.push(Op::Load(column as u32))))
        .collect();
    let mut items = Items::none(&shared);
    for (column, loaded) in loaded.into_iter().enumerate() {
        let top = sums.powers_of(column).max().unwrap_or(0);
        let mut power = loaded;
        for bit in 0..=top {
            if bit > 0 {
                power = power.map(|value| list.push(Op::Double(value)));
            }
            items.values[column * BITS + bit] = power;
        }
    }
    for row in 0..rows {
        let parts = items.of_sum(&mut list, row);
        let value = list.sum(&parts);
        list.store(row, value);
    }
    list.ops
}

/// A list under construction.
#[derive(Default)]
struct List {
    ops: Vec<Op>,
}

impl List {
    fn push(&mut self, op: Op) -> Value {
        self.ops.push(op);
        (self.ops.len() - 1) as Value
    }

    /// The XOR of the parts, `None` of nothing. The last part enters with the last operation: it is
    /// the one that others wait for.
    fn sum(&mut self, parts: &[Value]) -> Option<Value> {
        let (&first, mut rest) = parts.split_first()?;
        let mut sum = first;
        if !rest.len().is_multiple_of(2) {
            sum = self.push(Op::Xor2(sum, rest[0]));
            rest = &rest[1..];
        }
        for pair in rest.chunks_exact(2) {
            sum = self.push(Op::Xor3(sum, pair[0], pair[1]));
        }
        Some(sum)
    }

    fn store(&mut self, row: usize, value: Option<Value>) {
        let value = value.unwrap_or_else(|| self.push(Op::Zero));
        self.push(Op::Store(row as u32, value));
    }
}

/// A set of sums, one bit each.
type Set = Vec<u64>;

fn contains(set: &Set, sum: usize) -> bool {
    set[sum / 64] >> (sum % 64) & 1 == 1
}

fn common(a: &Set, b: &Set) -> u32 {
    a.iter().zip(b).map(|(a, b)| (a & b).count_ones()).sum()
}

/// Which items each sum consists of, seen from the items.
struct Sums {
    /// Per item, the sums that contain it.
    sets: Vec<Set>,
    /// Per sum, the parts that it has beside items: a doubled accumulator, a word carried from the
    /// chunk before.
    others: Vec<u16>,
}

impl Sums {
    fn empty(items: usize, sums: usize) -> Sums {
        Sums { sets: vec![vec![0; sums.div_ceil(64)]; items], others: vec![0; sums] }
    }

    fn insert(&mut self, item: usize, sum: usize) {
        self.sets[item][sum / 64] |= 1 << (sum % 64);
    }

    /// Sum `row * 8 + bit`: the columns whose factor in the row has the bit.
    fn planes(matrix: &Matrix<'_>, rows: usize, columns: Range<usize>, carried: bool) -> Sums {
        let mut sums = Sums::empty(columns.len(), rows * BITS);
        for row in 0..rows {
            let mut seen = 0u8;
            for (item, column) in columns.clone().enumerate() {
                let factor = matrix.factor(row, column);
                seen |= factor;
                for bit in (0..BITS).filter(|bit| factor >> bit & 1 == 1) {
                    sums.insert(item, row * BITS + bit);
                }
            }
            for bit in 0..BITS {
                sums.others[row * BITS + bit] =
                    u16::from(u16::from(seen) >> (bit + 1) != 0) + u16::from(carried && bit == 0);
            }
        }
        sums
    }

    /// Sum `row` over items `column * 8 + bit`.
    fn powers(matrix: &Matrix<'_>, rows: usize) -> Sums {
        let mut sums = Sums::empty(matrix.inputs * BITS, rows);
        for row in 0..rows {
            for column in 0..matrix.inputs {
                let factor = matrix.factor(row, column);
                for bit in (0..BITS).filter(|bit| factor >> bit & 1 == 1) {
                    sums.insert(column * BITS + bit, row);
                }
            }
        }
        sums
    }

    /// The powers of 2 of a column that occur in any row.
    fn powers_of(&self, column: usize) -> impl Iterator<Item = usize> {
        (0..BITS).filter(move |bit| self.sets[column * BITS + bit].iter().any(|&word| word != 0))
    }

    /// Makes the pairs that occur most often items of their own, at most `room` of them, and of all
    /// numbers of pairs the one after which the fewest operations remain.
    fn share(&self, room: usize) -> Shared {
        let mut trial = Sharing::new(self, room);
        let mut cost = self.operations();
        let (mut best, mut best_cost) = (0, cost);
        while trial.pairs.len() < room {
            let Some(pair) = trial.most_frequent() else { break };
            let both = trial.take(pair);
            cost += 1;
            for sum in (0..self.others.len()).filter(|&sum| contains(&both, sum)) {
                cost -= trial.parts[sum] / 2;
                trial.parts[sum] -= 1;
                cost += trial.parts[sum] / 2;
            }
            if cost < best_cost {
                (best, best_cost) = (trial.pairs.len(), cost);
            }
        }
        let mut shared = Shared { sets: self.sets.clone(), bases: self.sets.len(), pairs: Vec::new() };
        for &pair in &trial.pairs[..best] {
            split(&mut shared.sets, pair);
            shared.pairs.push(pair);
        }
        shared
    }

    /// Parts of every sum, items and others.
    fn parts(&self) -> Vec<usize> {
        (0..self.others.len())
            .map(|sum| {
                let items = self.sets.iter().filter(|set| contains(set, sum)).count();
                items + usize::from(self.others[sum])
            })
            .collect()
    }

    /// Operations that add up all sums as they are: n parts take n/2, rounded down, with
    /// three-input XORs.
    fn operations(&self) -> usize {
        self.parts().into_iter().map(|parts| parts / 2).sum()
    }
}

/// Replaces a pair of items by a new one in all sums that contain both; those sums are the result.
fn split(sets: &mut Vec<Set>, (a, b): (usize, usize)) -> Set {
    let both: Set = sets[a].iter().zip(&sets[b]).map(|(a, b)| a & b).collect();
    for item in [a, b] {
        for (word, both) in sets[item].iter_mut().zip(&both) {
            *word &= !both;
        }
    }
    sets.push(both.clone());
    both
}

/// The greedy search of [`Sums::share`].
struct Sharing {
    sets: Vec<Set>,
    pairs: Vec<(usize, usize)>,
    /// Parts left in every sum.
    parts: Vec<usize>,
    /// For items a > b at `a * stride + b`, the sums that contain both.
    counts: Vec<u16>,
    stride: usize,
}

impl Sharing {
    fn new(sums: &Sums, room: usize) -> Sharing {
        let bases = sums.sets.len();
        let stride = bases + room;
        let mut sharing = Sharing {
            sets: sums.sets.clone(),
            pairs: Vec::new(),
            parts: sums.parts(),
            counts: vec![0; stride * stride],
            stride,
        };
        for item in 0..bases {
            sharing.recount(item);
        }
        sharing
    }

    /// Counts the sums that `item` has in common with every other.
    fn recount(&mut self, item: usize) {
        for other in (0..self.sets.len()).filter(|&other| other != item) {
            let (low, high) = (item.min(other), item.max(other));
            self.counts[high * self.stride + low] = common(&self.sets[item], &self.sets[other]) as u16;
        }
    }

    /// The pair that most sums have in common, if any two have.
    fn most_frequent(&self) -> Option<(usize, usize)> {
        let (mut best, mut most) = (None, 1);
        for high in 1..self.sets.len() {
            let row = &self.counts[high * self.stride..high * self.stride + high];
            for (low, &count) in row.iter().enumerate() {
                if count > most {
                    (best, most) = (Some((high, low)), count);
                }
            }
        }
        best
    }

    fn take(&mut self, pair: (usize, usize)) -> Set {
        let both = split(&mut self.sets, pair);
        self.pairs.push(pair);
        for item in [pair.0, pair.1, self.sets.len() - 1] {
            self.recount(item);
        }
        both
    }
}

/// Sums over base items and shared pairs.
struct Shared {
    sets: Vec<Set>,
    /// Items below this are not pairs.
    bases: usize,
    pairs: Vec<(usize, usize)>,
}

impl Shared {
    /// The two items of a pair that nothing but one other pair uses: it need not exist, that pair
    /// is a triple.
    fn only_for_a_pair(&self, item: usize) -> Option<(usize, usize)> {
        let pair = *self.pairs.get(item.checked_sub(self.bases)?)?;
        let in_no_sum = self.sets[item].iter().all(|&word| word == 0);
        let users = self.pairs.iter().filter(|&&(a, b)| a == item || b == item).count();
        (in_no_sum && users == 1).then_some(pair)
    }
}

/// The values of items, made when they are first needed.
struct Items<'a> {
    shared: &'a Shared,
    values: Vec<Option<Value>>,
}

impl<'a> Items<'a> {
    fn none(shared: &'a Shared) -> Items<'a> {
        Items { shared, values: vec![None; shared.sets.len()] }
    }

    /// Base items are columns, all of them loaded at once, so that they are on their way together.
    fn load(list: &mut List, shared: &'a Shared, columns: impl Iterator<Item = u32>) -> Items<'a> {
        let mut items = Items::none(shared);
        let mut used = vec![false; shared.sets.len()];
        for &(a, b) in &shared.pairs {
            (used[a], used[b]) = (true, true);
        }
        for (item, column) in columns.enumerate() {
            if used[item] || shared.sets[item].iter().any(|&word| word != 0) {
                items.values[item] = Some(list.push(Op::Load(column)));
            }
        }
        items
    }

    fn of_sum(&mut self, list: &mut List, sum: usize) -> Vec<Value> {
        let shared = self.shared;
        (0..shared.sets.len())
            .filter(|&item| contains(&shared.sets[item], sum))
            .map(|item| self.value(list, item))
            .collect()
    }

    fn value(&mut self, list: &mut List, item: usize) -> Value {
        if let Some(value) = self.values[item] {
            return value;
        }
        let (a, b) = self.shared.pairs[item - self.shared.bases];
        let folded = match (self.shared.only_for_a_pair(a), self.shared.only_for_a_pair(b)) {
            (Some((c, d)), _) => Some((b, c, d)),
            (None, Some((c, d))) => Some((a, c, d)),
            (None, None) => None,
        };
        let op = match folded {
            Some((a, b, c)) => Op::Xor3(self.value(list, a), self.value(list, b), self.value(list, c)),
            None => Op::Xor2(self.value(list, a), self.value(list, b)),
        };
        let value = list.push(op);
        self.values[item] = Some(value);
        value
    }
}
