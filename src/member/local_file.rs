//! The open file behind a local device: its identity, how it is closed, and when its lock is
//! forgotten. Windows of a device share it: the last one closes it. Must not know what is in it.

use super::DeviceError;
use super::held::{self, Held, Stage};
use std::fs::{File, Metadata};
use std::io;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::Path;
use std::sync::Arc;

/// Identity of the file or device that a path leads to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Node {
    pub device: u64,
    pub inode: u64,
    /// Device numbers of a block device, 0 for a file.
    pub rdev: u64,
}

impl Node {
    pub(super) fn of(meta: &Metadata) -> Node {
        let rdev = if meta.file_type().is_block_device() { meta.rdev() } else { 0 };
        Node { device: meta.dev(), inode: meta.ino(), rdev }
    }

    /// Refuses a path that led to this node and leads to another now.
    pub(super) fn check_same(self, path: &Path, now: &Metadata) -> Result<(), DeviceError> {
        if Node::of(now) == self {
            return Ok(());
        }
        let source = io::Error::other("it was replaced at the same moment");
        Err(DeviceError::Io { path: path.into(), action: "open it".into(), source })
    }

    pub(super) fn key(self) -> held::Key {
        if self.rdev != 0 { (0, self.rdev) } else { (self.device, self.inode) }
    }

    /// Nodes with the same block device behind them are the same device, even if the nodes differ.
    pub(super) fn same_device(self, other: Node) -> bool {
        if self.rdev != 0 || other.rdev != 0 { self.rdev == other.rdev } else { self == other }
    }
}

/// An open file or block device.
#[derive(Debug)]
pub(super) struct LocalFile {
    /// Some until it is closed, or a ring beside the engine's has it.
    file: Option<Arc<File>>,
    pub node: Node,
    /// Some when it is locked; a ring that has the file shares it.
    pub held: Option<Arc<Held>>,
    /// Closing it may take long.
    pub closes_slowly: bool,
    /// Starting an operation on it may block in its filesystem.
    pub holds_up: bool,
}

impl LocalFile {
    pub(super) fn new(
        file: File,
        node: Node,
        held: Option<Held>,
        closes_slowly: bool,
        holds_up: bool,
    ) -> LocalFile {
        let (file, held) = (Some(Arc::new(file)), held.map(Arc::new));
        LocalFile { file, node, held, closes_slowly, holds_up }
    }

    /// The same open file once more, with a mark of its own.
    pub(super) fn share(&self) -> LocalFile {
        let held = self.held.as_ref().map(|held| Arc::new(held.share()));
        LocalFile { file: self.file.clone(), held, ..*self }
    }

    /// Whether this descriptor is open.
    pub(super) fn can_be_shared(&self) -> bool {
        self.file.is_some()
    }

    pub(super) fn file(&self) -> &File {
        self.file.as_ref().expect("open until it is dropped or handed over")
    }

    /// Closes this descriptor, since a ring beside the engine's has one of its own: this one would
    /// hold the file when the process is killed. It stays open while other windows use it.
    pub(super) fn hand_over(&mut self) {
        if let Some(file) = self.file.take().and_then(Arc::into_inner) {
            let held = self.held.clone();
            // The mark stays until this descriptor is closed, since it holds the lock, too.
            close(move || {
                drop(file);
                drop(held);
            });
        }
    }
}

impl Drop for LocalFile {
    fn drop(&mut self) {
        // None where another window has it: that one has a mark, too.
        let (file, held) = (self.file.take().and_then(Arc::into_inner), self.held.take());
        if !self.closes_slowly {
            // The mark ends only after the lock is gone.
            drop(file);
            drop(held);
            return;
        }
        if let Some(held) = &held {
            held.set(Stage::Closing);
        }
        if file.is_some() {
            close(move || {
                drop(file);
                drop(held);
            });
        }
    }
}

/// Closes something on a thread of its own; without a thread, here, when the closure is dropped.
fn close(close: impl FnOnce() + Send + 'static) {
    let _ = std::thread::Builder::new().name("close".into()).spawn(close);
}
