//! The gate before guest memory: while memory is short, a guest's disks must not take what was not granted to the guest.
//!
//! The server writes to the guest through a mapping of its own, so QEMU has no page fault that shows it: the server has to ask.
//! It asks before it begins a request, for all that the request will write to. A request whose memory is not available
//! begins later, and the others go on. Reading needs no permission: memory that was not granted is read from the file,
//! where a hole is zeroes and stays a hole.
//!
//! Nothing that waits here holds anything that must be released before memory becomes free.
//!
//! Memory whose contents have not arrived yet (`bring`) is asked for before each access: there a hole is not zeroes.

use std::ops::Range;
use std::sync::Arc;

/// Grants memory. Asked by the disks' threads for every request, so an implementation recognises what it has granted with
/// one load.
pub trait RamGate: Send + Sync {
    /// Whether all of this part of the RAM file was granted.
    fn is_granted(&self, file: Range<u64>) -> bool;

    /// The same, but missing memory is granted if there is some now.
    fn admit(&self, file: Range<u64>) -> bool;

    /// Waits until this part of the file holds the guest's bytes. False: they will never arrive.
    fn bring(&self, _file: Range<u64>) -> bool {
        true
    }
}

/// A gate before one RAM file. Other memory of the guest needs no permission.
#[derive(Clone)]
pub struct Gate {
    /// Device number of the file system that holds the RAM file.
    pub ram_device: u64,
    /// Inode number of the RAM file.
    pub ram_inode: u64,
    /// Grants memory.
    pub keeper: Arc<dyn RamGate>,
}
