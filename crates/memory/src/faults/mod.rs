//! Faults: what a keeper does through QEMU's page faults.
//!
//! hand-over (QEMU's userfaultfd comes to the keeper) -> admission (guest memory is granted unit by unit)

pub mod admission;
mod handover;
mod mapping;
mod userfault;

pub use handover::{HandoverError, HandoverListener, Userfault};
