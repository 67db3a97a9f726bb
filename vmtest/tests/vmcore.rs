//! Memory of real guests that died, read from outside.
//!
//! - `cached_files`: what was in its page cache.
//! - `kernels`: information found in it, on each kernel.
//! - `damage`: information found when the guest's own tables are damaged.
//! - `dead`: guests that die with their memory kept.
//!
//! `vmcore_tools` compares the classes of pages with makedumpfile's.

#![allow(clippy::unwrap_used, reason = "a test may panic")]

#[path = "vmcore/cached_files.rs"]
mod cached_files;
#[path = "vmcore/damage.rs"]
mod damage;
#[path = "vmcore/dead.rs"]
mod dead;
#[path = "vmcore/kernels.rs"]
mod kernels;
