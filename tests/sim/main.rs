//! Arrays in the simulator: every order of disk operations, every fault, every crash. No file, no socket, no
//! clock.

mod array;
mod atlas;
mod bad_sectors;
mod catching_up;
mod changeover;
mod chaos;
mod cold_pages;
mod explore;
mod full_replay;
mod gathering;
mod health;
mod host_trouble;
mod hung;
mod interleavings;
mod jobs;
mod lanes;
mod log_edges;
mod log_review;
#[cfg(debug_assertions)]
mod mutations;
mod page_faults;
mod read_faults;
mod rollback;
mod scenes;
mod settling;
mod telling;
mod unbuilt;
mod unfinished;
mod unreadable;
