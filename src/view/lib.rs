//! What the owner of an array shows to readers on other threads, so that these can read blocks without asking
//! it: where each stripe is, the hashes of the blocks of cached pages, which version of the other pages is
//! the newest and where, which slots have newer images in the redo log, which device serves each member, and
//! whether anything may be read here at all.
//!
//! One thread publishes ([`Publisher`]), any number look up ([`View`]); there are no locks, and all memory is
//! taken when the view is made and stays where it is while anyone holds the view. A look-up answers or says
//! "ask the owner" ([`View::look`]). What it answers was true, all of it together, at one moment while it
//! ran: it reads the words that show a change (service, the stripe's word, the slot's generation), then the
//! rest, and then these words again. The publisher makes a generation odd before it changes what the
//! generation stands for, and gives it its next even value afterwards. No generation is ever reset.
//!
//! Orders of memory: every store of the publisher is a release and every load of a reader an acquire. So a
//! reader that has seen any store of a change also sees, when it looks at the generation again, that the
//! change had begun; and a reader that has seen a generation sees everything that was published before it.
//!
//! The look-up is the read's point in time. So it is sound to read the device afterwards, without a lock on
//! the rows, and to answer with bytes that match the hash: the block had this content at the look-up. What
//! may happen between the look-up and the read of the device:
//! * The stripe moves, and another stripe is written to its old slot: the bytes do not match.
//! * A checkpoint writes a newer image in place, or a discarded slot is punched: the bytes do not match.
//! * A wrong block is mended: the bytes match before or after, or they do not match.
//! * The member leaves, or its device is used for something else: the bytes match or they do not.
//! * The array fails, or its log is replayed: the same.
//!
//! A page that is not in memory ([`Look::on_members`]) is read from a member like the data, and afterwards.
//! Its version is named when no entry of it differs from that version in memory, and no longer: the owner
//! names another place, or none, before it changes an entry. So the entries of the slot in that version are
//! the block's hashes at the look-up, whenever they are read; a version never changes. What was read counts
//! only if it proves to be exactly that version.
//!
//! Bytes that do not match go to the owner, which reads under its lock and mends. Where there is no hash, or
//! one as short as a CRC, the ticket of the look-up is compared after the read ([`View::still`]): all of
//! these but mending change a word of the ticket before they touch the device; a checkpoint did when the slot
//! began to show the images that it writes. Mending changes a block that nobody may rely on.
//!
//! Duties of the owner, beyond calling the publisher:
//! * All that a write changes is published before the write is acknowledged. The acknowledgement leaves
//!   through a lock or a system call, which orders it after these stores.
//! * A slot shows images before anything else of the write that makes them is published, and until they are
//!   in place, flushed and forgotten; or until no stripe with data is in the slot.
//! * A page is named as being on the members while it is not in memory, its newest version is known, and that
//!   was flushed there.
//! * A member's device is shown while the member is in service and whole, and no longer.
//!
//! This crate knows numbers: stripes, slots, pages, entries, members. It must not know of arrays, geometry,
//! or what a hash is a hash of.

mod atomics;
mod look;
#[cfg(all(test, loom))]
mod model;
mod publish;
mod rules;
mod shared;
#[cfg(all(test, not(loom)))]
mod stress;

pub use look::{Look, Ticket};
pub use publish::{Change, Publisher};
pub use shared::{Orphan, Size, View};

/// The hash of a block as the view keeps it. Zero: the owner has to be asked.
pub type Hash = [u64; 2];
