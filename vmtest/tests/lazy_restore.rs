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

use hearth_vmtest::{Drives, Result, TestVm, patience};

/// Seed of the pattern in the guest's memory.
const SEED: u64 = 77;

/// Memory that is known page by page: a file in the guest's own RAM.
fn fill(vm: &TestVm, mib: u64) -> Result<()> {
    vm.sh(&format!("probe fill /tmp/memory {} {SEED}", mib << 20)).map(drop)
}

/// Every byte of it is as it was.
fn verify(vm: &TestVm) -> Result<()> {
    vm.sh(&format!("probe verify /tmp/memory {SEED}")).map(drop)
}

/// A process that counts, and notes how far it is.
fn start_counter(vm: &TestVm) -> Result<()> {
    vm.sh("(i=0; while :; do i=$((i+1)); echo $i >/tmp/count.new; mv /tmp/count.new /tmp/count; sleep 0.05; done) >/dev/null 2>&1 &")
        .map(drop)
}

fn count(vm: &TestVm) -> Result<u64> {
    let said = vm.sh("while [ ! -s /tmp/count ]; do sleep 0.1; done; cat /tmp/count")?;
    Ok(said.trim().parse().expect("the counter writes numbers"))
}

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
