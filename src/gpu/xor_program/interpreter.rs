//! Programs run on the CPU, operation by operation: what kernels are compared with in tests.

use super::{Op, Value, XorProgram};

/// Words that [`XorProgram::run`] takes through one operation at a time, to pay for its dispatch
/// once.
const LANES: usize = 16;

/// Bytes of a column that one pass over the list computes.
const LANE_BYTES: usize = LANES * size_of::<u32>();

impl XorProgram {
    /// Computes the outputs from the inputs on the CPU, operation by operation. Slow. Columns have
    /// any one length.
    ///
    /// # Panics
    /// When the numbers of columns are not the program's or lengths differ.
    pub(crate) fn run(&self, inputs: &[&[u8]], outputs: &mut [&mut [u8]]) {
        assert_eq!(inputs.len(), self.inputs, "number of input columns");
        assert_eq!(outputs.len(), self.outputs, "number of output columns");
        let length = inputs[0].len();
        assert!(inputs.iter().all(|column| column.len() == length), "input columns differ in length");
        assert!(outputs.iter().all(|column| column.len() == length), "output columns differ in length");

        let mut values = vec![[0u32; LANES]; self.ops.len()];
        for start in (0..length).step_by(LANE_BYTES) {
            let range = start..length.min(start + LANE_BYTES);
            for (at, &op) in self.ops.iter().enumerate() {
                let value = |value: Value| values[value as usize];
                values[at] = match op {
                    Op::Load(column) => words(&inputs[column as usize][range.clone()]),
                    Op::Zero => [0; LANES],
                    Op::Xor2(a, b) => combine(value(a), value(b), |a, b| a ^ b),
                    Op::Xor3(a, b, c) => {
                        combine(combine(value(a), value(b), |a, b| a ^ b), value(c), |ab, c| ab ^ c)
                    }
                    Op::Double(a) => value(a).map(double),
                    Op::Store(column, a) => {
                        let bytes = value(a).map(u32::to_le_bytes);
                        let output = &mut outputs[column as usize][range.clone()];
                        output.copy_from_slice(&bytes.as_flattened()[..range.len()]);
                        continue;
                    }
                };
            }
        }
    }
}

/// See [`Op::Double`].
pub(super) fn double(word: u32) -> u32 {
    let sign = (word >> 7 & 0x0101_0101) * 0xFF;
    (word ^ sign & 0x0E0E_0E0E).wrapping_mul(2).wrapping_sub(sign)
}

fn combine(a: [u32; LANES], b: [u32; LANES], f: impl Fn(u32, u32) -> u32) -> [u32; LANES] {
    std::array::from_fn(|lane| f(a[lane], b[lane]))
}

/// At most [`LANE_BYTES`] bytes as words, the rest 0.
fn words(bytes: &[u8]) -> [u32; LANES] {
    let mut padded = [[0u8; 4]; LANES];
    padded.as_flattened_mut()[..bytes.len()].copy_from_slice(bytes);
    padded.map(u32::from_le_bytes)
}
