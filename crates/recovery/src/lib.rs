//! The capabilities: what Hearth does when a guest, a QEMU or a host kernel dies.
//!
//! This crate composes the ground crates (memory, disk, qemu). It starts no threads and reads no configuration: it is
//! handed what it needs and says what it did.

pub mod admission;
pub mod boot_set;
pub mod budget;
pub mod crash_recovery;
pub mod ember;
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
