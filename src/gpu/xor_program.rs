//! A matrix over GF(2^8) compiled to a list of operations, without branches, on 32-bit words: four
//! bytes of a column at a time.
//!
//! Multiplication by a constant is linear over the bits of the constant, so a row of the matrix is
//! eight sums of inputs, one per bit of the coefficients, joined by Horner's rule: double, add the
//! next sum. Sums need only XOR; terms common to several sums are computed once (`schedule`), and
//! three-input XORs are one operation.
//!
//! Invariants: the list is in static single assignment, every operand is an earlier operation,
//! every output is stored exactly once, and tests run the very list that a printer prints. Must not
//! know how or where the list is printed, nor which code or erasure a matrix stands for.

#[cfg(test)]
mod interpreter;
mod schedule;
#[cfg(test)]
mod suite;

/// Live words per position that [`XorProgram::compile`] allows itself. An assembler, which may
/// reorder the list, fits the words of 32+16 into 128 registers, and the GPUs that the list is
/// printed for have enough registers for 512 threads with 128 each on a multiprocessor.
pub(super) const LIVE_WORDS_MAX: usize = 128;

/// Arithmetic operations of one doubling, see [`Op::Double`].
pub(super) const DOUBLE_OPERATIONS: usize = 3;

/// A word of an earlier operation: the index of the operation that makes it.
pub(super) type Value = u32;

/// One step of a program. A step that makes a value gives it the step's own index.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Op {
    /// The word of input column `.0` at this position.
    Load(u32),
    /// The word 0.
    Zero,
    /// The XOR of two values.
    Xor2(Value, Value),
    /// The XOR of three values, a single operation where there is a three-input logic instruction.
    Xor3(Value, Value, Value),
    /// Each of the four bytes times 2 in GF(2^8)/0x11D, in three operations.
    ///
    /// Let M have 0xFF in every byte whose top bit h is set and 0x00 elsewhere (one byte-permute in
    /// its sign-replicating mode). 2x is x shifted left in every byte, plus 0x1D where h was set.
    /// XOR with 0x0E where h is set, before the shift, gives bits 2, 3 and 4 of that (one
    /// three-input logic operation): z. The shift as 2z also carries every h into bit 0 of the next
    /// byte, and bit 0 of each byte still lacks its own h. Subtracting M mends both: M is 255 H,
    /// where H has h in bit 0 of every byte, so 2z - M = 2z - 256 H + H (one multiply-add, off the
    /// logic pipe).
    Double(Value),
    /// Value `.1` is the word of output column `.0` at this position; makes no value.
    Store(u32, Value),
}

impl Op {
    /// The values that the operation reads.
    pub(super) fn operands(self) -> impl Iterator<Item = Value> {
        let (values, count) = match self {
            Op::Load(_) | Op::Zero => ([0; 3], 0),
            Op::Double(a) | Op::Store(_, a) => ([a, 0, 0], 1),
            Op::Xor2(a, b) => ([a, b, 0], 2),
            Op::Xor3(a, b, c) => ([a, b, c], 3),
        };
        values.into_iter().take(count)
    }
}

/// How many operations of each kind a program has.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub(super) struct Counts {
    /// XORs of two values.
    pub xor2: usize,
    /// XORs of three values.
    pub xor3: usize,
    /// Doublings, each [`DOUBLE_OPERATIONS`] operations.
    pub doubles: usize,
    /// Words loaded.
    pub loads: usize,
    /// Words stored.
    pub stores: usize,
}

impl Counts {
    /// Arithmetic operations per word position, loads and stores not counted.
    #[must_use]
    pub(super) fn operations(&self) -> usize {
        self.xor2 + self.xor3 + self.doubles * DOUBLE_OPERATIONS
    }
}

/// A matrix as a list of operations.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct XorProgram {
    inputs: usize,
    outputs: usize,
    ops: Vec<Op>,
}

impl XorProgram {
    /// Compiles `matrix`, `outputs` rows of `inputs` factors, row after row, within
    /// [`LIVE_WORDS_MAX`].
    ///
    /// # Panics
    /// When the matrix is not of that size or has no input.
    #[must_use]
    pub(super) fn compile(matrix: &[u8], inputs: usize, outputs: usize) -> XorProgram {
        XorProgram::compile_within(matrix, inputs, outputs, LIVE_WORDS_MAX)
    }

    /// As [`XorProgram::compile`], with the fewest operations found that keep at most
    /// `live_words_max` words alive at a time. Where no list is that small, as with very many
    /// outputs, the list with the fewest live words is taken.
    ///
    /// # Panics
    /// When the matrix is not of that size or has no input.
    #[must_use]
    pub(super) fn compile_within(
        matrix: &[u8],
        inputs: usize,
        outputs: usize,
        live_words_max: usize,
    ) -> XorProgram {
        assert!(inputs > 0, "a matrix without inputs");
        assert_eq!(matrix.len(), inputs * outputs, "factors of {inputs} inputs and {outputs} outputs");
        let program = schedule::cheapest(matrix, inputs, outputs, live_words_max);
        program.check();
        program
    }

    /// Number of input columns.
    #[must_use]
    pub(super) fn inputs(&self) -> usize {
        self.inputs
    }

    /// Number of output columns.
    #[must_use]
    pub(super) fn outputs(&self) -> usize {
        self.outputs
    }

    /// The operations, in order.
    #[must_use]
    pub(super) fn ops(&self) -> &[Op] {
        &self.ops
    }

    /// How many operations of each kind there are.
    #[must_use]
    pub(super) fn counts(&self) -> Counts {
        let mut counts = Counts::default();
        for op in &self.ops {
            match op {
                Op::Load(_) => counts.loads += 1,
                Op::Zero => {}
                Op::Xor2(..) => counts.xor2 += 1,
                Op::Xor3(..) => counts.xor3 += 1,
                Op::Double(_) => counts.doubles += 1,
                Op::Store(..) => counts.stores += 1,
            }
        }
        counts
    }

    /// The most values alive at a time when the list is executed in order: a lower bound of the
    /// registers for one word position.
    #[must_use]
    pub(super) fn live_words(&self) -> usize {
        let mut last_use = vec![0; self.ops.len()];
        for (at, op) in self.ops.iter().enumerate() {
            for value in op.operands() {
                last_use[value as usize] = at;
            }
        }
        let (mut live, mut most) = (0usize, 0);
        for (at, op) in self.ops.iter().enumerate() {
            let mut operands: Vec<Value> = op.operands().collect();
            operands.sort_unstable();
            operands.dedup();
            live -= operands.iter().filter(|&&value| last_use[value as usize] == at).count();
            live += usize::from(last_use[at] > at);
            most = most.max(live);
        }
        most
    }

    /// Panics unless the list keeps the invariants of this module.
    fn check(&self) {
        let mut stored = vec![false; self.outputs];
        for (at, op) in self.ops.iter().enumerate() {
            for value in op.operands() {
                let made = self.ops[..at].get(value as usize);
                assert!(
                    made.is_some_and(|op| !matches!(op, Op::Store(..))),
                    "operation {at} reads {value}, which is no earlier value"
                );
            }
            match *op {
                Op::Load(column) => assert!((column as usize) < self.inputs, "input {column}"),
                Op::Store(column, _) => {
                    let before = std::mem::replace(&mut stored[column as usize], true);
                    assert!(!before, "output {column} is stored twice");
                }
                _ => {}
            }
        }
        assert!(stored.iter().all(|&stored| stored), "an output is not stored");
    }
}
