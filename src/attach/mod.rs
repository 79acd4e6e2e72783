//! An export as a block device of this machine: /dev/nbdN by way of the kernel's NBD driver.
//!
//! This process opens the connections, negotiates each, and gives the sockets to the driver by
//! netlink; data never passes through it. A keeper process stays and offers new sockets when the
//! server was restarted, so that requests wait meanwhile instead of failing.
//!
//! Invariants: a device is attached and connected again only to the export that it was attached to,
//! by identity and by size; a device that is in use is neither attached over nor detached; the
//! driver is offered simple replies only. Must not know how an array works, and must not run in a
//! reactor: netlink may block.

mod attachment;
mod detach;
mod device;
mod dial;
mod keeper;
mod netlink;
mod server;
mod state;

pub(crate) use attachment::{Attachment, Options, keep, plan};
pub(crate) use detach::{detach, plan_detach};
pub(crate) use device::{DeviceError, DeviceIndex, Host};
pub(crate) use dial::DialError;
pub(crate) use netlink::NetlinkError;
pub(crate) use server::{Directory, LookupError, Target};
pub(crate) use state::{Kept, STATE_DIR, StateDir, StateError};

use calpe_core::nbd::UriError;
use std::io;

/// Why a device was not attached or detached.
#[derive(Debug, thiserror::Error)]
pub(crate) enum AttachError {
    /// About the device.
    #[error(transparent)]
    Device(#[from] DeviceError),
    /// About the driver.
    #[error(transparent)]
    Netlink(#[from] NetlinkError),
    /// About the server.
    #[error(transparent)]
    Dial(#[from] DialError),
    /// About the daemon.
    #[error(transparent)]
    Lookup(#[from] LookupError),
    /// About the runtime directory.
    #[error(transparent)]
    State(#[from] StateError),
    /// The daemon gives an address that cannot be used.
    #[error("the daemon's address cannot be used: {0}")]
    Uri(#[from] UriError),
    /// The daemon has no address for the array.
    #[error("array '{array}' is served on no socket")]
    NoAddress {
        /// Which.
        array: String,
    },
    /// The device is attached to something else.
    #[error("{device}: attached already, to {backend}: detach it first, or choose another device")]
    Taken {
        /// Which device.
        device: DeviceIndex,
        /// To what.
        backend: String,
    },
    /// The same array is on another device.
    #[error(
        "{what} is attached for writing as {other}: two devices with caches of their own would damage it: use that one, or --read-only"
    )]
    Twin {
        /// The array.
        what: String,
        /// Where it is.
        other: DeviceIndex,
    },
    /// The device is attached to the requested export, but with other settings.
    #[error("{device}: attached to the same array with {differs}: detach it first")]
    Differs {
        /// Which device.
        device: DeviceIndex,
        /// In what.
        differs: String,
    },
    /// This kernel cannot make the export a device.
    #[error("{what}: {why}")]
    Unfit {
        /// The export.
        what: String,
        /// Why not.
        why: String,
    },
    /// The export that answers is not the requested one, or not the same on each connection.
    #[error("{what}: {differs}")]
    Stranger {
        /// The export.
        what: String,
        /// How it differs.
        differs: String,
    },
    /// Nothing is attached.
    #[error("{device}: nothing is attached")]
    NotAttached {
        /// Which device.
        device: DeviceIndex,
    },
    /// Not by us.
    #[error("{device}: attached by another program ({backend}): use that program to detach it")]
    Foreign {
        /// Which device.
        device: DeviceIndex,
        /// What it says it is.
        backend: String,
    },
    /// The device's writes could not be flushed to the server.
    #[error("{device}: not detached: what was written to it cannot be flushed: {source}")]
    Flush {
        /// Which device.
        device: DeviceIndex,
        /// What the system said.
        source: io::Error,
    },
    /// It did not come free.
    #[error("{device}: {what} did not end within {seconds} s")]
    Stuck {
        /// Which device.
        device: DeviceIndex,
        /// What was waited for.
        what: &'static str,
        /// How long.
        seconds: u64,
    },
    /// The device was detached or changed without its keeper.
    #[error("{device}: {why}: its keeper ends")]
    Lost {
        /// Which device.
        device: DeviceIndex,
        /// How.
        why: String,
    },
    /// The system refuses.
    #[error("cannot {action}: {source}")]
    System {
        /// What was tried.
        action: &'static str,
        /// What the system said.
        source: io::Error,
    },
}

fn system(action: &'static str) -> impl Fn(io::Error) -> AttachError {
    move |source| AttachError::System { action, source }
}
