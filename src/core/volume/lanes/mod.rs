//! An array of several lanes as one: what its lanes say is joined to what its clients and its operators see,
//! and what these ask for is cut into what each lane is asked for.
//!
//! Pure values and functions, for whatever drives the lanes: the daemon's reactors, or the simulator.
//! Invariant: with one lane nothing is changed. No lane looks at another one; neither does anything here
//! decide what a lane does with its members, with two exceptions: a device that fails in one lane is out of
//! all of them ([`out_of_step`]), and all change over to a new device together ([`replacement_orders`]).

mod members;
mod notices;
mod outcomes;
mod replacements;
mod requests;
mod status;

pub use members::{OutOfStep, out_of_step};
pub use notices::LaneNotices;
pub use outcomes::{for_lane, merge_outcomes};
pub use replacements::{new_device_of, replacement_orders};
pub use requests::{Begun, Joined, LaneRequest, LaneRequests, PartId, WholeRequest};
pub use status::merge_status;
