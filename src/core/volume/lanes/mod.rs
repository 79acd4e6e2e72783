mod members;
mod outcomes;
mod status;
pub use members::{OutOfStep, out_of_step};
pub use outcomes::{for_lane, merge_outcomes};
pub use status::merge_status;
