//! What the vector engines share: `walk!` generates the code that picks a width and walks a range in steps of
//! vectors. It is a macro because `target_feature` takes a literal: a function generic over engines could not
//! be compiled for the instructions of each. Must not know what a step computes.

/// The variants of [`super::Store`] as values that the compiler specialises for.
pub(super) const REPLACE: u8 = 0;
pub(super) const STREAM: u8 = 1;
pub(super) const ADD: u8 = 2;

/// The shapes of a step: over whole vectors, fetching those further on; over whole vectors; over part of a
/// vector.
pub(super) const AHEAD: u8 = 0;
pub(super) const WHOLE: u8 = 1;
pub(super) const PART: u8 = 2;

/// Bytes of a cache line on every x86-64 CPU.
pub(super) const CACHE_LINE: usize = 64;

/// Whether every output can be written around the cache from byte `start` on, by steps of whole cache lines:
/// lines that are not filled in one go cost several times what streaming saves.
pub(super) fn aligned(outputs: &[*mut u8], start: usize) -> bool {
    outputs.iter().all(|output| (output.addr() + start).is_multiple_of(CACHE_LINE))
}

/// Generates `Kernel::apply` and `run`. Arguments: the engine's target features, the type of a table entry,
/// and for each number of outputs, how many vectors of them one step computes (outputs x vectors). The file
/// of the engine defines `Kernel`, `VECTOR`, `OUTPUTS_PER_PASS` and
///
/// ```ignore
/// unsafe fn step<const R: usize, const S: usize, const STORE: u8, const SHAPE: u8>(
///     tables: &[Table],
///     inputs: &[&[u8]],
///     outputs: &[*mut u8; R],
///     at: usize,
///     ahead: usize,
///     part: usize,
/// );
/// ```
///
/// A step computes `S` vectors of the `R` outputs at byte `at`; of shape [`AHEAD`], it also fetches those at
/// `ahead`; of shape [`PART`], it computes the first `part` bytes of one vector and touches no others.
macro_rules! walk {
    ($features:literal, [$table:ty], $($width:literal x $strips:literal),*) => {
        impl Kernel {
            /// Applies `tables` (for each input, an entry per output) to bytes `range` of the columns.
            pub(super) fn apply(
                self,
                tables: &[$table],
                inputs: &[&[u8]],
                outputs: &mut [super::Output<'_>],
                range: std::ops::Range<usize>,
                store: super::Store,
            ) {
                use super::Store;
                use super::walk::{ADD, CACHE_LINE, REPLACE, STREAM, aligned};
                assert_eq!(tables.len(), inputs.len() * outputs.len());
                assert!(range.start <= range.end);
                assert!(inputs.iter().all(|column| column.len() >= range.end));
                assert!(outputs.iter().all(|(_, column)| column.len() >= range.end));
                match outputs.len() {
                    0 => {}
                    // SAFETY: `self` proves the instructions; the assertions above are the function's
                    // contract, the array length being the one just matched.
                    $($width => unsafe {
                        let pointers: [*mut u8; $width] = std::array::from_fn(|i| outputs[i].1.as_mut_ptr());
                        match store {
                            Store::Add => run::<$width, $strips, ADD>(tables, inputs, pointers, range),
                            Store::Stream
                                if ($strips * VECTOR).is_multiple_of(CACHE_LINE)
                                    && aligned(&pointers, range.start) =>
                            {
                                run::<$width, $strips, STREAM>(tables, inputs, pointers, range);
                            }
                            Store::Stream | Store::Replace => {
                                run::<$width, $strips, REPLACE>(tables, inputs, pointers, range);
                            }
                        }
                    },)*
                    wider => unreachable!("{wider} outputs in a pass of at most {OUTPUTS_PER_PASS}"),
                }
            }
        }

        /// Walks `range` in steps of `S` vectors, then of one, then of the bytes that are left.
        ///
        /// # Safety
        /// The CPU has the instructions; `inputs` and `outputs` are valid up to `range.end`, outputs writable
        /// and disjoint from everything else; `tables` holds `R` entries per input.
        #[target_feature(enable = $features)]
        unsafe fn run<const R: usize, const S: usize, const STORE: u8>(
            tables: &[$table],
            inputs: &[&[u8]],
            outputs: [*mut u8; R],
            range: std::ops::Range<usize>,
        ) {
            use super::PREFETCH_BYTES;
            use super::walk::{AHEAD, PART, STREAM, WHOLE};
            let mut at = range.start;
            // SAFETY: every step stays below `range.end`, up to which the caller vouches for all columns.
            unsafe {
                while range.end - at >= S * VECTOR {
                    let ahead = (at + PREFETCH_BYTES).min(range.end - S * VECTOR);
                    step::<R, S, STORE, AHEAD>(tables, inputs, &outputs, at, ahead, VECTOR);
                    at += S * VECTOR;
                }
                while range.end - at >= VECTOR {
                    step::<R, 1, STORE, WHOLE>(tables, inputs, &outputs, at, at, VECTOR);
                    at += VECTOR;
                }
                if at < range.end {
                    step::<R, 1, STORE, PART>(tables, inputs, &outputs, at, at, range.end - at);
                }
                if STORE == STREAM {
                    // Streaming stores reach other threads and devices in order only after a fence.
                    std::arch::x86_64::_mm_sfence();
                }
            }
        }
    };
}
pub(super) use walk;
