//! The capabilities: what Hearth does when a guest, a QEMU or a host kernel dies.
//!
//! This crate composes the ground crates (memory, disk, store, qemu). It reads no configuration, and no thread that it
//! starts outlives the call: its callers pass in what it needs, and it returns what it did.

#![warn(missing_docs)]

pub mod admission;
pub mod budget;
pub mod crash_recovery;
pub mod ember;
pub mod fast_remount;
pub mod hold;
pub mod images;
pub mod incarnation;
pub mod journal;
pub mod lazy_restore;
pub mod random;
pub mod rejuvenation;
pub mod snapshot;
pub mod vmcore;
pub mod warm_reboot;
