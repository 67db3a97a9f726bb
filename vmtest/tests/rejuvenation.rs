//! Rejuvenation, as a guest and its operator see it: another QEMU, and nothing else changes.
//!
//! `hops`: what goes on over a hop. `failures`: each way in which it can fail leaves the guest where it was. `deaths`: the
//! keeper is killed after each phase, and the next one finds a way. `age`: what speaks for a hop, and hops that nobody
//! asked for. `networks`: connections over hops. `firmware`: a guest before its system. `many`: several machines with one
//! command. `keeper`: another keeper, under the same guest. `host_reload`: guests in memory, without QEMU and keeper.
//! `host_check`: a host that could not keep them.
//! `soak`: hundreds of hops, by hand.

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
#[path = "rejuvenation/soak.rs"]
mod soak;
