//! The numbers that decide how a device is driven, in one place, so that the benchmark can try others. Pure.

/// How outputs are computed from inputs. All give the same bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Method {
    /// By a program of the matrix once it is compiled, by product tables before.
    Auto,
    /// By product tables.
    Table,
    /// By a program; a batch with a new matrix waits for its compilation.
    Xor,
    /// By logarithms.
    LogExp,
    /// By product tables, hashing in the same pass; by tables alone if the fused kernel cannot take that many
    /// columns.
    Fused,
}

/// How a device is driven.
#[derive(Clone, Debug, PartialEq)]
pub struct Tuning {
    /// Batches that can be under way at a time: one coming in, one being computed, one going out, and one
    /// waiting, so that none of the three stages ever waits.
    pub slots: usize,
    /// Most bytes of a slot. A link takes 2 ms for this much, so launches cost next to nothing; a smaller
    /// device gets smaller slots.
    pub slot_bytes_max: usize,
    /// Streams for computing, which batches use in turn, so that small batches, which leave most of the
    /// device idle, run side by side.
    pub compute_streams: usize,
    /// Fraction of the free device memory that slots may take.
    pub memory_fraction: f64,
    /// Pinned bytes of a slot for ranges in memory unknown to the driver; as many as the slot has when slabs
    /// could not be registered.
    pub staging_bytes: usize,
    /// Blocks of the kernel that reads scattered ranges from host memory.
    pub gather_blocks: u32,
    /// Blocks of the kernel that writes scattered ranges to host memory.
    pub scatter_blocks: u32,
    /// Bytes that a warp of these kernels copies at a time; a multiple of 4096.
    pub chunk_bytes: usize,
    /// Average length of joined ranges, in bytes, from which on the copy engine brings them in; 0: always,
    /// MAX: never.
    pub engine_run_in: usize,
    /// The same for bringing them out.
    pub engine_run_out: usize,
    /// Whether copies take precedence over computing when both want the multiprocessors.
    pub priorities: bool,
    /// How outputs are computed.
    pub method: Method,
    /// Batches in which a matrix must have occurred before it is compiled: most sets of lost columns occur
    /// once.
    pub compile_after: u32,
    /// Below this number of 4 KiB blocks, four lanes hash each leaf: with one lane each they would not fill
    /// the device.
    pub lanes_below: usize,
}

impl Default for Tuning {
    fn default() -> Tuning {
        Tuning {
            slots: 4,
            slot_bytes_max: 128 << 20,
            compute_streams: 4,
            memory_fraction: 0.5,
            staging_bytes: 16 << 20,
            gather_blocks: 32,
            scatter_blocks: 6,
            chunk_bytes: 32 << 10,
            engine_run_in: 1 << 20,
            engine_run_out: 1 << 20,
            priorities: true,
            method: Method::Auto,
            compile_after: 2,
            lanes_below: 2048,
        }
    }
}
