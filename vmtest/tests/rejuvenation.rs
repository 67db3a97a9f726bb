//! Rejuvenation, as a guest and its operator see it: another QEMU, and nothing else changes.
//!
//! `hops`: what goes on over a hop. `failures`: each way in which it can fail leaves the guest where it was. `deaths`: the
//! keeper is killed after each phase, and the next one finds a way.

#[path = "rejuvenation/deaths.rs"]
mod deaths;
#[path = "rejuvenation/failures.rs"]
mod failures;
#[path = "rejuvenation/hops.rs"]
mod hops;
