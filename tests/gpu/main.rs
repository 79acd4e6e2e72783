//! GPUs: the runtime against devices in memory, and a real device where there is one.

mod device;
mod runtime;
