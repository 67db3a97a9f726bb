//! Warm reboot, as a guest and its operator see it: however an incarnation ends, the next one reads what the disk holds, from
//! memory where that equals it.
//!
//! - `ways`: reboots that keep the cache, and those that do not.
//! - `truth`: memory that differs from the disk is never served.
//! - `budget`: memory never exceeds the machine's budget.
//! - `refill`: the next guest's file cache is filled before it is asked for.
//! - `shelf`: the files that these tests read.
//! - `soak`: hundreds of reboots in a row.

#[path = "warm_reboot/budget.rs"]
mod budget;
#[path = "warm_reboot/refill.rs"]
mod refill;
#[path = "warm_reboot/shelf.rs"]
mod shelf;
#[path = "warm_reboot/soak.rs"]
mod soak;
#[path = "warm_reboot/truth.rs"]
mod truth;
#[path = "warm_reboot/ways.rs"]
mod ways;
