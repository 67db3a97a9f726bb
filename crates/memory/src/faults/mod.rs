//! Faults: what a keeper does through QEMU's page faults.
//!
//! hand-over (the keeper gets QEMU's userfaultfd) -> admission (memory is granted unit by unit) or supply (pages are
//! brought one by one). Beside them, `writes` and `access` find the pages that a running QEMU has written or used.

pub mod access;
pub mod admission;
mod bell;
mod handover;
mod mapping;
mod processor;
#[cfg(test)]
mod stand;
pub mod supply;
mod tables;
mod userfault;
pub mod writes;

pub use handover::{HandoverError, HandoverListener, Helper, Userfault};
