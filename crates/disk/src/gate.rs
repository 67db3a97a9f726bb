//! The gate before guest memory: while memory is short, what has not been granted to the guest must not be taken by its
//! disks either.
//!
//! The server writes to the guest through a mapping of its own, so no page fault of QEMU's tells of it: it has to ask.
//! It asks before it begins a request, for all that the request will write to; a request whose memory is not to be had
//! is begun later, and the others go on. Reading needs no leave: memory that was not granted is read from the file,
//! where a hole is zeroes and stays a hole.
//!
//! Nothing that waits here holds anything that memory's coming free could depend on.
//!
//! Memory whose contents are still on their way (`bring`) is asked for before each look at it: there a hole is not zeroes.

use std::ops::Range;
use std::sync::Arc;

/// Who grants memory. Asked from the disk threads for every request: an implementation answers what it has granted
/// before with one load.
pub trait RamGate: Send + Sync {
    /// Was all of this part of the RAM file granted?
    fn is_granted(&self, file: Range<u64>) -> bool;

    /// The same, but what is missing is granted if it can be had now.
    fn admit(&self, file: Range<u64>) -> bool;

    /// Sees to it that this part of the file holds what the guest knows to be there, and waits for that. False: it will
    /// not come any more.
    fn bring(&self, _file: Range<u64>) -> bool {
        true
    }
}

/// A gate before the RAM file with this identity; other memory of the guest is free.
#[derive(Clone)]
pub struct Gate {
    pub ram_device: u64,
    pub ram_inode: u64,
    pub keeper: Arc<dyn RamGate>,
}
