//! Locks that QEMU inherits.

use std::os::fd::{AsRawFd, OwnedFd, RawFd};

/// Locks on the images, by disk, and on the mirrors of NVRAM. A QEMU inherits them, so that they outlive the keeper.
#[derive(Debug, Default)]
pub struct InheritedLocks(pub(super) Vec<Vec<OwnedFd>>);

impl InheritedLocks {
    /// Adds the mirrors' locks, after those of the disks.
    pub fn of_mirrors(&mut self, locks: Vec<OwnedFd>) {
        self.0.push(locks);
    }

    pub fn numbers(&self) -> Vec<RawFd> {
        self.0.iter().flatten().map(AsRawFd::as_raw_fd).collect()
    }
}
