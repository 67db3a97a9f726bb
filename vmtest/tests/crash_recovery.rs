//! Crash recovery, as a guest and its operator see it: a guest crashes in a real way, the next one serves at once, and the dump
//! holds what the dead memory held.
//!
//! - `ways`: crashes of all kinds are dumped, and each dump gives the reason.
//! - `truth`: a dump's pages equal the dead guest's memory.
//! - `faults`: full disks, killed keepers, crashes in a row.
//! - `memory`: a guest that needs memory faster than the dump releases it.
//! - `living`: dumps of guests that continue.
//! - `report`: the report of a crash agrees with the status.
//! - `dump`, `small_folder`: shared helpers.

#[path = "crash_recovery/dump.rs"]
mod dump;
#[path = "crash_recovery/faults.rs"]
mod faults;
#[path = "crash_recovery/living.rs"]
mod living;
#[path = "crash_recovery/memory.rs"]
mod memory;
#[path = "crash_recovery/report.rs"]
mod report;
#[path = "crash_recovery/small_folder.rs"]
mod small_folder;
#[path = "crash_recovery/truth.rs"]
mod truth;
#[path = "crash_recovery/ways.rs"]
mod ways;
