//! Memory of real guests that died, looked at from outside.
//!
//! `kernels`: what is found in it, on each kernel. `damage`: what is found when the guest's own tables are broken.
//! `dead`: guests that die with their memory kept. How the pages are told apart is compared with makedumpfile's way in
//! `vmcore_tools`.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

#[path = "vmcore/damage.rs"]
mod damage;
#[path = "vmcore/dead.rs"]
mod dead;
#[path = "vmcore/kernels.rs"]
mod kernels;
