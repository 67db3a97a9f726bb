//! Faults: what a keeper does through QEMU's page faults.
//!
//! hand-over (QEMU's userfaultfd comes to the keeper) -> admission (guest memory is granted unit by unit), or supply (its
//! contents are brought page by page); beside them `writes` and `access`: which pages a running QEMU has written to, or used

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
