//! Rejuvenation, as a guest and its operator see it: another QEMU, and nothing else changes.
//!
//! - `hops`: what survives a hop.
//! - `failures`: each failure leaves the guest where it was.
//! - `deaths`: the keeper is killed after each phase, and the next one recovers.
//! - `age`: reasons for a hop, and hops by the keeper's own policy.
//! - `networks`: connections over hops.
//! - `firmware`: a guest before its operating system starts.
//! - `many`: several machines with one command.
//! - `keeper`: another keeper for the same guest.
//! - `host_reload`: guests in memory, without QEMU and keeper.
//! - `host_check`: a host that would lose them.
//! - `screen`: the picture that a VNC viewer sees.
//! - `soak`: hundreds of hops, run by hand.

#[path = "rejuvenation/age.rs"]
mod age;
#[path = "rejuvenation/deaths.rs"]
mod deaths;
#[path = "rejuvenation/failures.rs"]
mod failures;
#[path = "rejuvenation/firmware.rs"]
mod firmware;
#[path = "rejuvenation/hops.rs"]
mod hops;
#[path = "rejuvenation/host_check.rs"]
mod host_check;
#[path = "rejuvenation/host_reload.rs"]
mod host_reload;
#[path = "rejuvenation/keeper.rs"]
mod keeper;
#[path = "rejuvenation/many.rs"]
mod many;
#[path = "rejuvenation/networks.rs"]
mod networks;
#[path = "rejuvenation/programs.rs"]
mod programs;
#[path = "rejuvenation/screen.rs"]
mod screen;
#[path = "rejuvenation/soak.rs"]
mod soak;
