//! Lazy restore, as a guest and its operator see it: saved at one moment, it goes on from there, any number of times.
//!
//! `saves`: what saving does to the machine that is saved. `restores`: the guest that comes back is the one that was saved.
//! `dedup`: what its disks hold is not stored. `scans`: what the guest uses is seen before it is saved. `freeze`: its file systems
//! are whole on the snapshot's disks. `identity`: a clone knows that it is one. `faults`: what a damaged snapshot and killed keepers
//! make of it.
//! `object_store`: the same out of an object store, over a wire that is not to be relied on.

#[path = "lazy_restore/dedup.rs"]
mod dedup;
#[path = "lazy_restore/faults.rs"]
mod faults;
#[path = "lazy_restore/freeze.rs"]
mod freeze;
#[path = "lazy_restore/identity.rs"]
mod identity;
#[path = "lazy_restore/object_store.rs"]
mod object_store;
#[path = "lazy_restore/restores.rs"]
mod restores;
#[path = "lazy_restore/saves.rs"]
mod saves;
#[path = "lazy_restore/scans.rs"]
mod scans;

use hearth_vmtest::known::{SEED, count, fill, start_counter, verify};
use hearth_vmtest::{Drives, Result, TestVm, patience};

/// What is typed while the console changes hands may be lost: until something is answered.
fn await_console(vm: &TestVm) -> Result<()> {
    for _ in 0..20 {
        let asked = vm.guest().start("true")?;
        let answered = vm.wait_console("an answer", patience(2), |heard| heard.take_answer(asked));
        if answered.is_ok() {
            return Ok(());
        }
    }
    vm.sh("true").map(drop)
}

/// The pattern that a command of the clone verifies is right, all its memory comes, and it is the guest that was saved.
fn comes_whole(clone: &TestVm, verifying: u64, nonce: &str) -> Result<()> {
    let verified = clone.wait_console("the pattern is verified", patience(60), |heard| heard.take_answer(verifying))?;
    assert_eq!(verified.status, 0, "{:?}", String::from_utf8_lossy(&verified.output));
    clone.wait_event("all memory is there", |event| event["kind"] == "restore_complete")?;
    assert_eq!(clone.nonce()?, nonce);
    Ok(())
}
