//! Disk server: one virtual disk, served to stock QEMU over vhost-user-blk.
//!
//! guest request -> virtqueue -> parse -> RAM has it? answer in line : engine (io_uring, O_DIRECT) -> tag -> ledger -> guest
//!
//! One thread per disk owns queues, engine and image, so a RAM hit never changes thread. State shared between disks
//! of a machine (ledger, warm memory) is behind short locks.

#![warn(missing_docs)]

#[cfg(test)]
mod allocation;
pub mod arrival;
pub mod block;
pub mod boot_set;
pub mod buffer;
pub mod clock;
pub mod device;
pub mod engine;
pub mod fault_point;
pub mod gate;
pub mod heartbeat;
pub mod image;
pub mod ledger;
pub mod limit;
pub mod nvram;
pub mod partitions;
mod populate;
pub mod pressure;
pub mod server;
pub mod tag;
pub mod warm;
pub mod write_log;
