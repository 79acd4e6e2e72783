//! GPUs: the runtime against devices in memory, here and in processes of their own, and a real device where
//! there is one.

mod device;
mod helper;
mod runtime;
