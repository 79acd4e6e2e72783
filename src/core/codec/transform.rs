//! Linear combinations of columns as values: all parities of a stripe, its missing columns, or its parities
//! after a change of some columns. So the computation can be described in one place and done in another, by
//! this CPU or by a device that gets only the matrix. Must not know of jobs or devices.

use std::fmt;
use std::sync::Arc;

use super::{Codec, CodecError, matrix, xor};

/// Bytes of a column whose change is computed at a time: the size of the scratch of [`Transform::apply`].
const DELTA_TILE_BYTES: usize = 16 << 10;

/// Some output columns as a combination of input columns. Cheap to clone.
#[derive(Clone)]
pub struct Transform(Arc<Inner>);

struct Inner {
    codec: Codec,
    form: Form,
    matrix: Vec<u8>,
    inputs: usize,
    outputs: usize,
}

/// What the columns of a [`Transform`] are.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Form {
    /// From the k data columns to the m parities.
    Encode,
    /// From k columns to others.
    Recover {
        /// The inputs.
        present: Vec<usize>,
        /// The outputs.
        wanted: Vec<usize>,
    },
    /// From the old bytes of some data columns, then their new bytes in the same order, then the m old
    /// parities to the m new parities.
    Update {
        /// The data columns that change.
        columns: Vec<usize>,
    },
}

impl Codec {
    /// All parities from all data columns.
    #[must_use]
    pub fn encoding(&self) -> Transform {
        let data: Vec<u8> = (0..self.data() as u8).collect();
        let parity: Vec<u8> = (self.data()..self.data() + self.parity()).map(|column| column as u8).collect();
        let matrix = matrix::coefficients(&data, &parity);
        Transform::new(self, Form::Encode, matrix, self.data(), self.parity())
    }

    /// `wanted` columns from exactly k distinct `present` ones, in the order given.
    ///
    /// # Errors
    /// As [`Codec::recover`].
    pub fn recovery(&self, present: &[usize], wanted: &[usize]) -> Result<Transform, CodecError> {
        if present.len() != self.data() {
            return Err(CodecError::PresentCount { given: present.len(), needed: self.data() });
        }
        self.shared.check_columns(present.iter().chain(wanted).copied())?;
        let bytes = |columns: &[usize]| columns.iter().map(|&column| column as u8).collect::<Vec<u8>>();
        let matrix = matrix::coefficients(&bytes(present), &bytes(wanted));
        let form = Form::Recover { present: present.to_vec(), wanted: wanted.to_vec() };
        Ok(Transform::new(self, form, matrix, present.len(), wanted.len()))
    }

    /// The parities after a change of some data columns: see [`Form::Update`] for the inputs.
    ///
    /// # Errors
    /// `NoSuchColumn` unless all columns are data columns; `Repeated`.
    pub fn updating(&self, columns: &[usize]) -> Result<Transform, CodecError> {
        self.shared.check_columns(columns.iter().copied())?;
        if let Some(&column) = columns.iter().find(|&&column| column >= self.data()) {
            return Err(CodecError::NoSuchColumn { column, columns: self.data() });
        }
        let encode = self.encoding();
        let (changed, parity) = (columns.len(), self.parity());
        let inputs = 2 * changed + parity;
        let mut matrix = vec![0; inputs * parity];
        for row in 0..parity {
            for (at, &column) in columns.iter().enumerate() {
                let factor = encode.matrix()[row * self.data() + column];
                matrix[row * inputs + at] = factor;
                matrix[row * inputs + changed + at] = factor;
            }
            matrix[row * inputs + 2 * changed + row] = 1;
        }
        Ok(Transform::new(self, Form::Update { columns: columns.to_vec() }, matrix, inputs, parity))
    }
}

impl Transform {
    fn new(codec: &Codec, form: Form, matrix: Vec<u8>, inputs: usize, outputs: usize) -> Transform {
        Transform(Arc::new(Inner { codec: codec.clone(), form, matrix, inputs, outputs }))
    }

    /// What the columns are.
    #[must_use]
    pub fn form(&self) -> &Form {
        &self.0.form
    }

    /// The code whose columns these are.
    #[must_use]
    pub fn codec(&self) -> &Codec {
        &self.0.codec
    }

    /// Number of input columns.
    #[must_use]
    pub fn inputs(&self) -> usize {
        self.0.inputs
    }

    /// Number of output columns.
    #[must_use]
    pub fn outputs(&self) -> usize {
        self.0.outputs
    }

    /// The factors over GF(2^8), 0x11D: a row of `inputs` for each output.
    #[must_use]
    pub fn matrix(&self) -> &[u8] {
        &self.0.matrix
    }

    /// Whether both compute the same outputs from the same inputs.
    #[must_use]
    pub fn same(&self, other: &Transform) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
            || (self.inputs() == other.inputs()
                && self.form() == other.form()
                && self.matrix() == other.matrix())
    }

    /// Computes the outputs on this CPU. All columns have one length, any, at any alignment.
    ///
    /// # Panics
    /// When the number of columns is not the transform's, or lengths differ.
    pub fn apply(&self, inputs: &[&[u8]], outputs: &mut [&mut [u8]]) {
        let Inner { codec, form, .. } = &*self.0;
        assert_eq!(inputs.len(), self.inputs(), "number of input columns");
        assert_eq!(outputs.len(), self.outputs(), "number of output columns");
        let length = inputs[0].len();
        assert!(inputs.iter().all(|column| column.len() == length), "input columns differ in length");
        assert!(outputs.iter().all(|column| column.len() == length), "output columns differ in length");
        match form {
            Form::Encode => {
                let mut outputs: Vec<_> =
                    outputs.iter_mut().enumerate().map(|(row, bytes)| (row, &mut **bytes)).collect();
                codec.encode(inputs, &mut outputs);
            }
            Form::Recover { present, wanted } => {
                let inputs: Vec<_> = present.iter().copied().zip(inputs.iter().copied()).collect();
                let mut outputs: Vec<_> =
                    wanted.iter().copied().zip(outputs.iter_mut().map(|bytes| &mut **bytes)).collect();
                codec.recover(&inputs, &mut outputs).expect("checked when the transform was made");
            }
            Form::Update { columns } => self.update(columns, inputs, outputs),
        }
    }

    fn update(&self, columns: &[usize], inputs: &[&[u8]], outputs: &mut [&mut [u8]]) {
        let (old, rest) = inputs.split_at(columns.len());
        let (new, parity) = rest.split_at(columns.len());
        for (output, parity) in outputs.iter_mut().zip(parity) {
            output.copy_from_slice(parity);
        }
        let length = inputs[0].len();
        let mut delta = vec![0; DELTA_TILE_BYTES.min(length)];
        for start in (0..length).step_by(DELTA_TILE_BYTES) {
            let end = length.min(start + DELTA_TILE_BYTES);
            for ((&column, old), new) in columns.iter().zip(old).zip(new) {
                let delta = &mut delta[..end - start];
                xor(delta, &old[start..end], &new[start..end]);
                let mut outputs: Vec<_> = outputs
                    .iter_mut()
                    .enumerate()
                    .map(|(row, bytes)| (row, &mut bytes[start..end]))
                    .collect();
                self.0.codec.update(column, delta, &mut outputs);
            }
        }
    }
}

impl fmt::Debug for Transform {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Transform").field(self.form()).finish()
    }
}

#[cfg(test)]
mod tests {
    use super::super::gf;
    use super::*;

    fn column(nth: usize, length: usize) -> Vec<u8> {
        (0..length).map(|at| (at * 31 + nth * 7 + (at * nth) % 251) as u8).collect()
    }

    /// The product with the matrix, by definition.
    fn product(transform: &Transform, inputs: &[Vec<u8>]) -> Vec<Vec<u8>> {
        let rows = transform.matrix().chunks(transform.inputs());
        let times = |factor: u8, byte: u8| {
            if factor == 0 || byte == 0 {
                return 0;
            }
            let log = u32::from(gf::LOG[usize::from(factor)]) + u32::from(gf::LOG[usize::from(byte)]);
            gf::EXP[(log % gf::ORDER) as usize]
        };
        let byte = |row: &[u8], at: usize| {
            row.iter().zip(inputs).fold(0, |sum, (&factor, column)| sum ^ times(factor, column[at]))
        };
        rows.map(|row| (0..inputs[0].len()).map(|at| byte(row, at)).collect()).collect()
    }

    #[test]
    fn every_form_is_the_product_with_its_matrix() {
        let codec = Codec::new(5, 3).expect("a geometry");
        let forms = [
            codec.encoding(),
            codec.recovery(&[7, 1, 2, 5, 4], &[0, 6, 3]).expect("a pattern"),
            codec.updating(&[3]).expect("a data column"),
            codec.updating(&[4, 0]).expect("data columns"),
        ];
        for transform in forms {
            for length in [1, 4096, 40_001] {
                let inputs: Vec<Vec<u8>> = (0..transform.inputs()).map(|nth| column(nth, length)).collect();
                let mut outputs = vec![vec![0xa5; length]; transform.outputs()];
                let inputs_given: Vec<&[u8]> = inputs.iter().map(|c| &c[..]).collect();
                let mut outputs_given: Vec<&mut [u8]> = outputs.iter_mut().map(|c| &mut c[..]).collect();
                transform.apply(&inputs_given, &mut outputs_given);
                assert_eq!(outputs, product(&transform, &inputs), "{transform:?}, {length} bytes");
            }
        }
    }

    #[test]
    fn columns_that_do_not_exist_are_refused() {
        let codec = Codec::new(3, 2).expect("a geometry");
        assert!(matches!(codec.recovery(&[0, 1], &[2]), Err(CodecError::PresentCount { .. })));
        assert!(matches!(codec.recovery(&[0, 1, 1], &[2]), Err(CodecError::Repeated { column: 1 })));
        assert!(matches!(codec.recovery(&[0, 1, 5], &[2]), Err(CodecError::NoSuchColumn { column: 5, .. })));
        assert!(matches!(codec.updating(&[3]), Err(CodecError::NoSuchColumn { column: 3, columns: 3 })));
        assert!(matches!(codec.updating(&[1, 1]), Err(CodecError::Repeated { column: 1 })));
    }

    #[test]
    fn transforms_are_the_same_by_what_they_compute() {
        let codec = Codec::new(3, 2).expect("a geometry");
        assert!(codec.encoding().same(&codec.encoding()));
        assert!(!codec.encoding().same(&Codec::new(3, 1).expect("a geometry").encoding()));
        assert!(!codec.updating(&[0]).expect("a column").same(&codec.updating(&[1]).expect("a column")));
    }
}
