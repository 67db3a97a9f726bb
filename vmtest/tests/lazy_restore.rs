//! Lazy restore, as a guest and its operator see it: saved at one moment, it goes on from there, any number of times.
//!
//! `saves`: what saving does to the machine that is saved. `restores`: the guest that comes back is the one that was saved.
//! `scans`: what the guest uses is seen before it is saved. `faults`: what a damaged snapshot and killed keepers make of it.

#[path = "lazy_restore/faults.rs"]
mod faults;
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
