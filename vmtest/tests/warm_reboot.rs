//! Warm reboot, as a guest and its operator see it: each way in which an incarnation can end, and the next one reads what
//! the disk holds, from memory where that is the same.
//!
//! `ways`: what keeps the cache and what does not. `truth`: memory that is not what the disk holds is never served.
//! `budget`: memory never grows beyond what the machine may have. `shelf`: the files all of them read.

#[path = "warm_reboot/budget.rs"]
mod budget;
#[path = "warm_reboot/shelf.rs"]
mod shelf;
#[path = "warm_reboot/truth.rs"]
mod truth;
#[path = "warm_reboot/ways.rs"]
mod ways;
