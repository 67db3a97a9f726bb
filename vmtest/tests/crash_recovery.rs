//! Crash recovery, as a guest and its operator see it: a guest crashes in a real way, the next one serves at once, and the
//! dump beside it holds what the dead memory held.
//!
//! `ways`: crashes of all kinds are dumped, and what each dump says. `truth`: a dump's pages are the dead guest's.
//! `faults`: full disks, killed keepers, crashes in a row. `memory`: a guest that outruns the dump. `living`: dumps of
//! guests that live on. `dump`, `small_folder`: what all of them ask and use.

#[path = "crash_recovery/dump.rs"]
mod dump;
#[path = "crash_recovery/faults.rs"]
mod faults;
#[path = "crash_recovery/living.rs"]
mod living;
#[path = "crash_recovery/memory.rs"]
mod memory;
#[path = "crash_recovery/small_folder.rs"]
mod small_folder;
#[path = "crash_recovery/truth.rs"]
mod truth;
#[path = "crash_recovery/ways.rs"]
mod ways;
