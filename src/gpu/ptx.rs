//! Programs printed as kernels: PTX text that a driver assembles for the device at hand.
//!
//! Invariants: a kernel executes the operations of its program in order, once per word; it reads
//! and writes bytes 0..len of every column and no others; the same program and shape give the same
//! text. Must not know of devices, launches or memory, nor where a program comes from.
//!
//! As assembled by ptxas 12.9 for compute capability 9.0, with the shape of [`shape`], nothing
//! spilled (nor for 8.0 and 10.0, nor for 37 other codes of up to 250 columns, encoding and
//! recovering). "Logic" is the instructions of the pipe that XORs and byte permutes share,
//! addresses included, per word of input, of one strip; of a doubling's three operations one runs
//! on the multiplier's pipe, beside it.
//!
//! | k+m | operations a word of input | live words | words a thread | registers | logic |
//! |---|---|---|---|---|---|
//! | 4+2 | 8.75 | 7 | 4 | 32 | 6.0 |
//! | 8+2 | 8.50 | 14 | 4 | 56 | 7.5 |
//! | 8+3 | 12.62 | 18 | 4 | 68 | 10.7 |
//! | 8+4 | 16.75 | 16 | 4 | 64 | 14.0 |
//! | 10+4 | 13.40 | 21 | 4 | 80 | 10.3 |
//! | 16+4 | 10.44 | 39 | 2 | 80 | 9.7 |
//! | 24+8 | 17.08 | 80 | 1 | 80 | 16.9 |
//! | 32+16 | 28.00 | 115 | 1 | 128 | - |
//!
//! Loads and stores have no cache hints: with `no_allocate` and `cs` an H200 moves 4.07 TB/s at 8+4
//! and 3.80 at 24+8, without them 4.26 and 4.00.

use std::fmt::Write as _;

use super::xor_program::{Op, Value, XorProgram};

/// Name of the entry of every kernel.
pub(super) const ENTRY: &str = "rs_xor";

/// Most bytes of every column that one block handles, for the shapes of [`shape`].
pub(super) const BLOCK_BYTES_MAX: usize = 4096;

/// Most arithmetic operations of one kernel. Straight code beyond the instruction caches runs at
/// the speed of their misses, and assembling takes seconds.
pub(super) const OPERATIONS_MAX: usize = 20_000;

/// Most rows of one kernel: where columns are cut into chunks, each row is a word that stays alive.
pub(super) const ROWS_PER_PASS_MAX: usize = 64;

/// Registers a thread may have: 512 threads of 128 fill the registers of a multiprocessor.
const REGISTERS_MAX: usize = 128;

/// Registers beside live words: the position, the addresses, and what the assembler keeps for
/// latency.
const REGISTERS_BESIDE: usize = 16;

/// The fewest of them with which nothing was spilled.
const REGISTERS_BESIDE_AT_LEAST: usize = 6;

/// The same where the words of a second strip are loaded while the first is computed.
const REGISTERS_BESIDE_STRIPS: usize = 24;

/// Most inputs whose addresses are computed independently of each other; two registers each until
/// they are used. With more, the columns come in chunks, and the assembler must be kept from
/// loading all of them at the start.
const WIDE_ADDRESSES_MAX: usize = 48;

/// How the work is cut into threads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Shape {
    /// Adjacent words that a thread loads and stores at a time: 1, 2 or 4.
    pub vector: usize,
    /// How often a thread does so, a whole block's width apart. The words of one strip are done
    /// before those of the next, so that strips take time but no registers.
    pub strips: usize,
    /// Threads of a block; the launch must use the same.
    pub block: usize,
    /// What the assembler may use per thread; `None` leaves it to choose.
    pub registers_max: Option<usize>,
}

impl Shape {
    /// Words of every column that one thread handles.
    #[must_use]
    pub(super) fn words(&self) -> usize {
        self.vector * self.strips
    }

    /// Bytes of every column that one block handles: the grid has `len` divided by this blocks,
    /// rounded up.
    #[must_use]
    pub(super) fn block_bytes(&self) -> usize {
        self.words() * size_of::<u32>() * self.block
    }
}

/// The shape that suits a program: as wide accesses as its live words leave registers for.
///
/// Measured on an H200, TB/s moved: 24+8 with 256 threads a block 3.25, with 128 3.75, with 64
/// 3.80; with two strips of 64 threads 4.05 to 4.26 for encoding and two ways of recovering, since
/// the second one's words are on their way while the first is computed. 32+16 with no limit to its
/// registers 2.70 to 3.18, with 128 of them 3.22 to 3.32: the assembler takes up to 164 if it may,
/// and gains nothing by them.
#[must_use]
pub(super) fn shape(program: &XorProgram) -> Shape {
    let live = program.live_words();
    let fits = |vector: &usize| vector * live + REGISTERS_BESIDE <= REGISTERS_MAX;
    let vector = [4, 2].into_iter().find(fits).unwrap_or(1);
    if vector * live + REGISTERS_BESIDE <= REGISTERS_MAX / 2 {
        return Shape { vector, strips: 1, block: 256, registers_max: None };
    }
    // Where columns come in chunks the assembler would load those of a second strip at the start,
    // and what a limit leaves no room for is spilled.
    let whole = loads_first(program);
    let limited = whole && live + REGISTERS_BESIDE_AT_LEAST <= REGISTERS_MAX;
    let ahead = whole && live + program.inputs() + REGISTERS_BESIDE_STRIPS <= REGISTERS_MAX;
    let strips = if vector == 1 && ahead { 2 } else { 1 };
    // Small blocks waste fewer registers where only a few of them fit on a multiprocessor.
    Shape { vector, strips, block: 64, registers_max: limited.then_some(REGISTERS_MAX) }
}

/// Whether all words are loaded before any is computed.
fn loads_first(program: &XorProgram) -> bool {
    let computes = |op: &&Op| !matches!(op, Op::Load(_));
    program.ops().iter().skip_while(|op| !computes(op)).all(|op| computes(&op))
}

/// A kernel and the rows of the matrix that it computes.
#[derive(Clone, Debug)]
pub(super) struct Pass {
    /// First row; the kernel's output column 0 is this one.
    pub row: usize,
    /// The program of these rows.
    pub program: XorProgram,
    /// How to launch it.
    pub shape: Shape,
    /// Its PTX.
    pub text: String,
}

/// Kernels for all rows of a matrix, in as few passes over the inputs as [`OPERATIONS_MAX`] and
/// [`ROWS_PER_PASS_MAX`] allow. `matrix` as for [`XorProgram::compile`]; without rows there are no
/// kernels.
///
/// # Panics
/// When the matrix is not of that size or has no input.
#[must_use]
pub(super) fn kernels_for(matrix: &[u8], inputs: usize, outputs: usize) -> Vec<Pass> {
    let mut passes = outputs.div_ceil(ROWS_PER_PASS_MAX);
    loop {
        let programs: Vec<(usize, XorProgram)> = (0..passes)
            .map(|pass| (pass * outputs / passes, (pass + 1) * outputs / passes))
            .map(|(row, end)| {
                (row, XorProgram::compile(&matrix[row * inputs..end * inputs], inputs, end - row))
            })
            .collect();
        let short = programs.iter().all(|(_, program)| program.counts().operations() <= OPERATIONS_MAX);
        if short || passes >= outputs {
            return programs
                .into_iter()
                .map(|(row, program)| {
                    let shape = shape(&program);
                    Pass { row, shape, text: kernel(&program, shape), program }
                })
                .collect();
        }
        passes += 1;
    }
}

/// The program as PTX for every device since compute capability 8.0: entry [`ENTRY`] with the
/// 64-bit parameters in, in_ld, out, out_ld, len. Column c of the inputs lies at in + c * in_ld,
/// outputs likewise; all five are multiples of 16, in_ld is below 4 GiB, and inputs and outputs do
/// not overlap.
///
/// # Panics
/// When the shape's vector is not 1, 2 or 4, or it has no strip or no thread.
#[must_use]
pub(super) fn kernel(program: &XorProgram, shape: Shape) -> String {
    assert!(matches!(shape.vector, 1 | 2 | 4), "vectors of {} words", shape.vector);
    assert!(shape.strips > 0 && shape.block > 0, "an empty shape");
    let mut printer = Printer { program, shape, body: String::new(), temporaries: 0, chained: 0 };
    printer.print_body();
    printer.with_head()
}

struct Printer<'a> {
    program: &'a XorProgram,
    shape: Shape,
    body: String,
    temporaries: usize,
    /// The column whose address was printed last, where they are chained.
    chained: usize,
}

impl Printer<'_> {
    fn line(&mut self, text: std::fmt::Arguments<'_>) {
        // Writing to a String cannot fail.
        let _ = writeln!(self.body, "    {text}");
    }

    /// The register of a value: one per word of the vector and strip.
    fn register(&self, strip: usize, word: usize, value: Value) -> String {
        format!("%v{}", (strip * self.program.ops().len() + value as usize) * self.shape.vector + word)
    }

    fn registers(&self, strip: usize, value: Value) -> String {
        let all: Vec<String> = (0..self.shape.vector).map(|word| self.register(strip, word, value)).collect();
        if all.len() == 1 { all.concat() } else { format!("{{{}}}", all.join(", ")) }
    }

    fn print_body(&mut self) {
        for strip in 0..self.shape.strips {
            for (at, &op) in self.program.ops().iter().enumerate() {
                self.print(strip, at as Value, op);
            }
        }
    }

    fn print(&mut self, strip: usize, at: Value, op: Op) {
        let width = match self.shape.vector {
            1 => "",
            2 => ".v2",
            _ => ".v4",
        };
        let offset = strip * self.shape.block * self.shape.vector * size_of::<u32>();
        match op {
            Op::Load(column) => {
                if self.are_addresses_chained() && strip == 0 {
                    self.chain_to(column as usize, at);
                }
                let registers = self.registers(strip, at);
                self.line(format_args!(
                    "@%inside{strip} ld.global.nc{width}.u32 {registers}, [%from{column}+{offset}];"
                ));
            }
            Op::Store(column, value) => {
                let registers = self.registers(strip, value);
                self.line(format_args!(
                    "@%inside{strip} st.global{width}.u32 [%to{column}+{offset}], {registers};"
                ));
            }
            _ => {
                for word in 0..self.shape.vector {
                    self.print_word(strip, word, at, op);
                }
            }
        }
    }

    fn are_addresses_chained(&self) -> bool {
        self.program.inputs() > WIDE_ADDRESSES_MAX
    }

    /// Prints the addresses of inputs up to `column`, which operation `at` loads. Where loads
    /// follow arithmetic, a chunk begins: its addresses are made to depend on the last word before
    /// by a zero that only the device knows to be one. Otherwise its loads would be moved to the
    /// start of the kernel, and the registers spilled.
    fn chain_to(&mut self, column: usize, at: Value) {
        let before = at.checked_sub(1).map(|before| (before, self.program.ops()[before as usize]));
        if let Some((before, op)) = before
            && !matches!(op, Op::Load(_) | Op::Store(..))
        {
            let (word, chained) = (self.register(0, 0, before), self.chained);
            self.line(format_args!("and.b32 %nothing, {word}, %zero;"));
            self.line(format_args!("cvt.u64.u32 %strip, %nothing;"));
            self.line(format_args!("add.u64 %from{chained}, %from{chained}, %strip;"));
        }
        for next in self.chained + 1..=column {
            self.line(format_args!("add.u64 %from{next}, %from{}, %in_ld;", next - 1));
        }
        self.chained = self.chained.max(column);
    }

    fn print_word(&mut self, strip: usize, word: usize, at: Value, op: Op) {
        let result = self.register(strip, word, at);
        let register = |value: Value| self.register(strip, word, value);
        match op {
            Op::Load(_) | Op::Store(..) => {}
            Op::Zero => self.line(format_args!("mov.u32 {result}, 0;")),
            Op::Xor2(a, b) => {
                let (a, b) = (register(a), register(b));
                self.line(format_args!("xor.b32 {result}, {a}, {b};"));
            }
            Op::Xor3(a, b, c) => {
                let (a, b, c) = (register(a), register(b), register(c));
                self.line(format_args!("lop3.b32 {result}, {a}, {b}, {c}, 0x96;"));
            }
            Op::Double(a) => {
                let a = register(a);
                let (sign, folded, minus) = (self.temporaries, self.temporaries + 1, self.temporaries + 2);
                self.temporaries += 3;
                // Nibble 8+i selects the sign of byte i, replicated. 0x78 is the table of a ^ (b &
                // c).
                self.line(format_args!("prmt.b32 %t{sign}, {a}, 0, 0xba98;"));
                self.line(format_args!("lop3.b32 %t{folded}, {a}, %t{sign}, 0x0e0e0e0e, 0x78;"));
                self.line(format_args!("neg.s32 %t{minus}, %t{sign};"));
                self.line(format_args!("mad.lo.s32 {result}, %t{folded}, 2, %t{minus};"));
            }
        }
    }

    fn with_head(self) -> String {
        let Printer { program, shape, body, temporaries, .. } = &self;
        let mut text = String::with_capacity(body.len() + 4096);
        text.push_str(".version 8.0\n.target sm_80\n.address_size 64\n\n");
        let _ = writeln!(
            text,
            "// {} inputs, {} outputs, {} operations a word\n.visible .entry {ENTRY}(",
            program.inputs(),
            program.outputs(),
            program.counts().operations()
        );
        text.push_str(
            "    .param .u64 in,\n    .param .u64 in_ld,\n    .param .u64 out,\n    .param .u64 out_ld,\n    .param .u64 len)\n",
        );
        let _ = writeln!(text, ".reqntid {}, 1, 1", shape.block);
        if let Some(registers) = shape.registers_max {
            let _ = writeln!(text, ".maxnreg {registers}");
        }
        text.push_str("{\n");
        let values = program.ops().len() * shape.words();
        let vector_bytes = shape.vector * size_of::<u32>();
        let strip_bytes = shape.block * vector_bytes;
        let _ = write!(
            text,
            "    .reg .pred %inside<{strips}>;
    .reg .b32 %v<{values}>, %t<{temporaries}>, %block, %thread, %ld_low, %zero, %nothing;
    .reg .b64 %from<{inputs}>, %to<{outputs}>;
    .reg .b64 %in_ld, %out_ld, %len, %at, %strip, %thread_at;
    ld.param.u64 %len, [len];
    mov.u32 %block, %ctaid.x;
    mov.u32 %thread, %tid.x;
    mul.wide.u32 %at, %block, {block_bytes};
    mul.wide.u32 %thread_at, %thread, {vector_bytes};
    add.u64 %at, %at, %thread_at;
    setp.lt.u64 %inside0, %at, %len;
    @!%inside0 ret;
",
            strips = shape.strips,
            values = values.max(1),
            temporaries = (*temporaries).max(1),
            inputs = program.inputs(),
            outputs = program.outputs().max(1),
            block_bytes = shape.block_bytes(),
        );
        for strip in 1..shape.strips {
            let _ = writeln!(
                text,
                "    add.u64 %strip, %at, {};\n    setp.lt.u64 %inside{strip}, %strip, %len;",
                strip * strip_bytes
            );
        }
        let outputs = program.outputs();
        for (columns, base) in [("from", "in"), ("to", "out")] {
            let _ = write!(
                text,
                "    ld.param.u64 %{base}_ld, [{base}_ld];
    ld.param.u64 %{columns}0, [{base}];
    cvta.to.global.u64 %{columns}0, %{columns}0;
    add.u64 %{columns}0, %{columns}0, %at;
"
            );
        }
        // A wide multiply-add takes an address off the busy pipe of the logic operations, but the
        // assembler then has all addresses ready at once. A chain of additions holds one at a time:
        // that is for outputs, which are needed late, and for inputs that are too many for the
        // registers anyway.
        if self.are_addresses_chained() {
            text.push_str("    mov.u32 %zero, %lanemask_eq;\n");
            text.push_str("    popc.b32 %zero, %zero;\n    sub.u32 %zero, %zero, 1;\n");
        } else {
            text.push_str("    cvt.u32.u64 %ld_low, %in_ld;\n");
            for column in 1..program.inputs() {
                let _ = writeln!(text, "    mad.wide.u32 %from{column}, %ld_low, {column}, %from0;");
            }
        }
        for column in 1..outputs {
            let _ = writeln!(text, "    add.u64 %to{column}, %to{}, %out_ld;", column - 1);
        }
        text.push_str(body);
        text.push_str("    ret;\n}\n");
        text
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;

    use super::*;

    /// Where inputs begin in the memory of [`Machine`].
    const BASE: u64 = 4096;
    const POISON: u8 = 0xA5;

    /// Executes the PTX that the printer uses, one thread at a time, on memory that begins at
    /// [`BASE`].
    struct Machine<'a> {
        memory: Vec<u8>,
        parameters: HashMap<&'a str, u64>,
    }

    impl Machine<'_> {
        fn launch(&mut self, text: &str, blocks: u64, threads: u64) {
            let body = text.split_once("\n{\n").expect("a body").1;
            for thread in 0..blocks * threads {
                let special = HashMap::from([
                    ("%ctaid.x".to_owned(), thread / threads),
                    ("%tid.x".to_owned(), thread % threads),
                    ("%lanemask_eq".to_owned(), 1 << (thread % threads % 32)),
                ]);
                self.run_thread(body, special);
            }
        }

        fn run_thread(&mut self, body: &str, mut registers: HashMap<String, u64>) {
            for line in body.lines().map(str::trim).filter(|line| !line.starts_with(".reg") && *line != "}") {
                let mut line = line.strip_suffix(';').expect("an instruction");
                if let Some(guarded) = line.strip_prefix('@') {
                    let (guard, rest) = guarded.split_once(' ').expect("a guard");
                    let wanted = u64::from(!guard.starts_with('!'));
                    if registers[guard.trim_start_matches('!')] != wanted {
                        // What a skipped load leaves may be computed with, but must not be stored.
                        let skipped =
                            rest.split(['{', '}', ' ', ',', ';']).filter(|word| word.starts_with("%v"));
                        registers.extend(skipped.map(|register| (register.to_owned(), 0xDEAD_BEEF)));
                        continue;
                    }
                    line = rest;
                }
                if line == "ret" {
                    return;
                }
                let (name, rest) = line.split_once(' ').expect("operands");
                let operands: Vec<&str> =
                    rest.split([',', ' ', '{', '}', '[', ']']).filter(|word| !word.is_empty()).collect();
                self.step(name, &operands, &mut registers);
            }
            panic!("a thread runs past the end");
        }

        fn step(&mut self, name: &str, operands: &[&str], registers: &mut HashMap<String, u64>) {
            let number = |text: &str| match text.strip_prefix("0x") {
                Some(digits) => u64::from_str_radix(digits, 16).ok(),
                None => text.parse().ok(),
            };
            let value = |at: usize| {
                let text = operands[at];
                number(text)
                    .unwrap_or_else(|| *registers.get(text).unwrap_or_else(|| panic!("{text} is not set")))
            };
            let word = |at: usize| value(at) as u32;
            let place = |text: &str| {
                let (register, offset) = text.split_once('+').expect("an offset");
                (registers[register] - BASE + number(offset).expect("a number")) as usize
            };
            let result = match name {
                "ld.param.u64" => self.parameters[operands[1]],
                "mov.u32" | "cvta.to.global.u64" => value(1),
                "popc.b32" => u64::from(word(1).count_ones()),
                "sub.u32" => u64::from(word(1).wrapping_sub(word(2))),
                "and.b32" => u64::from(word(1) & word(2)),
                "cvt.u64.u32" => u64::from(word(1)),
                "cvt.u32.u64" => u64::from(word(1)),
                "mul.wide.u32" => u64::from(word(1)) * u64::from(word(2)),
                "mad.wide.u32" => u64::from(word(1)) * u64::from(word(2)) + value(3),
                "add.u64" => value(1) + value(2),
                "setp.lt.u64" => u64::from(value(1) < value(2)),
                "xor.b32" => u64::from(word(1) ^ word(2)),
                "lop3.b32" if operands[4] == "0x96" => u64::from(word(1) ^ word(2) ^ word(3)),
                "lop3.b32" if operands[4] == "0x78" => u64::from(word(1) ^ (word(2) & word(3))),
                "prmt.b32" if operands[2..] == ["0", "0xba98"] => {
                    let sign = word(1).to_le_bytes().map(|byte| if byte >= 0x80 { 0xFF } else { 0 });
                    u64::from(u32::from_le_bytes(sign))
                }
                "neg.s32" => u64::from(word(1).wrapping_neg()),
                "mad.lo.s32" => u64::from(word(1).wrapping_mul(word(2)).wrapping_add(word(3))),
                _ if name.starts_with("ld.global.nc") => {
                    let (from, to) = operands.split_last().expect("an address");
                    let from = place(from);
                    assert!(from.is_multiple_of(4 * to.len()), "misaligned load");
                    for (register, bytes) in to.iter().zip(self.memory[from..].chunks_exact(4)) {
                        let bytes = bytes.try_into().expect("four bytes");
                        registers.insert((*register).to_owned(), u64::from(u32::from_le_bytes(bytes)));
                    }
                    return;
                }
                _ if name.starts_with("st.global") => {
                    let at = place(operands[0]);
                    assert!(at.is_multiple_of(4 * (operands.len() - 1)), "misaligned store");
                    for index in 1..operands.len() {
                        let at = at + 4 * (index - 1);
                        self.memory[at..at + 4].copy_from_slice(&word(index).to_le_bytes());
                    }
                    return;
                }
                _ => panic!("{name} is not an instruction of the printer"),
            };
            registers.insert(operands[0].to_owned(), result);
        }
    }

    /// Factors without a pattern, some of them 0 and 1.
    fn matrix(inputs: usize, outputs: usize) -> Vec<u8> {
        let mut state = 12345u32;
        (0..inputs * outputs)
            .map(|_| {
                state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
                if state >> 30 == 0 { (state >> 29) as u8 & 1 } else { (state >> 16) as u8 }
            })
            .collect()
    }

    /// Runs the kernel on columns of `length` bytes and compares all of memory with the
    /// interpreter.
    fn check(program: &XorProgram, text: &str, shape: Shape, length: usize) {
        let (in_ld, out_ld) = (length + 32, length + 16);
        let out = program.inputs() * in_ld;
        let mut memory: Vec<u8> = (0..out).map(|at| (at * 7 + at / 251) as u8).collect();
        memory.resize(out + program.outputs() * out_ld, POISON);
        let mut expected = memory.clone();
        let (inputs, outputs) = expected.split_at_mut(out);
        let inputs: Vec<&[u8]> = inputs.chunks(in_ld).map(|column| &column[..length]).collect();
        let mut outputs: Vec<&mut [u8]> =
            outputs.chunks_mut(out_ld).map(|column| &mut column[..length]).collect();
        program.run(&inputs, &mut outputs);

        let parameters = HashMap::from([
            ("in", BASE),
            ("in_ld", in_ld as u64),
            ("out", BASE + out as u64),
            ("out_ld", out_ld as u64),
            ("len", length as u64),
        ]);
        let mut machine = Machine { memory, parameters };
        machine.launch(text, length.div_ceil(shape.block_bytes()) as u64, shape.block as u64);
        assert!(machine.memory == expected, "{shape:?}, {length} bytes");
    }

    #[test]
    fn a_kernel_of_any_shape_writes_what_the_interpreter_writes_and_nothing_else() {
        for (inputs, outputs) in [(1, 1), (3, 2), (6, 4), (1, 12)] {
            let program = XorProgram::compile(&matrix(inputs, outputs), inputs, outputs);
            for (vector, strips, block) in [(1, 1, 8), (2, 1, 4), (4, 1, 4), (1, 3, 4), (2, 2, 8), (4, 2, 2)]
            {
                let shape = Shape { vector, strips, block, registers_max: None };
                let text = kernel(&program, shape);
                for length in [16, 48, 64, 80, 96, 160] {
                    check(&program, &text, shape, length);
                }
            }
        }
    }

    #[test]
    fn inputs_that_come_in_chunks_are_addressed_alike() {
        let (inputs, outputs) = (60, 3);
        let mut matrix = matrix(inputs, outputs);
        for unused in [0, 30, 31, 59] {
            matrix.iter_mut().skip(unused).step_by(inputs).for_each(|factor| *factor = 0);
        }
        let program = XorProgram::compile_within(&matrix, inputs, outputs, 40);
        for (vector, strips, block) in [(1, 1, 8), (4, 1, 4), (2, 2, 4)] {
            let shape = Shape { vector, strips, block, registers_max: None };
            let text = kernel(&program, shape);
            assert!(text.contains("and.b32 %nothing"), "the matrix fits in one chunk");
            check(&program, &text, shape, 80);
        }
    }

    #[test]
    fn passes_cover_all_rows_in_order_and_each_is_short_enough_to_assemble() {
        for (inputs, outputs, passes) in [(4, 2, 1), (100, 28, 1), (20, 65, 2), (255, 128, 3), (3, 0, 0)] {
            let matrix = matrix(inputs, outputs);
            let kernels = kernels_for(&matrix, inputs, outputs);
            assert_eq!(kernels.len(), passes, "{inputs}, {outputs}");
            let mut row = 0;
            for pass in kernels {
                assert_eq!(pass.row, row);
                let rows = pass.program.outputs();
                assert_eq!(
                    pass.program,
                    XorProgram::compile(&matrix[row * inputs..(row + rows) * inputs], inputs, rows)
                );
                assert!(pass.program.counts().operations() <= OPERATIONS_MAX && rows <= ROWS_PER_PASS_MAX);
                assert_eq!(pass.text, kernel(&pass.program, pass.shape));
                row += rows;
            }
            assert_eq!(row, outputs);
        }
    }

    #[test]
    fn accesses_are_as_wide_as_live_words_leave_registers_for() {
        for (inputs, outputs, vector) in [(1, 1, 4), (8, 4, 4), (16, 4, 2), (24, 8, 1), (32, 16, 1)] {
            let program = XorProgram::compile(&matrix(inputs, outputs), inputs, outputs);
            assert_eq!(shape(&program).vector, vector, "{inputs}+{outputs}");
        }
    }

    #[test]
    fn block_size_and_register_limit_are_in_the_text() {
        let program = XorProgram::compile(&[2], 1, 1);
        let text = kernel(&program, Shape { vector: 1, strips: 2, block: 128, registers_max: Some(96) });
        assert!(text.contains("\n.reqntid 128, 1, 1\n.maxnreg 96\n{"), "{text}");
        assert!(!kernel(&program, shape(&program)).contains(".maxnreg"));
    }
}
