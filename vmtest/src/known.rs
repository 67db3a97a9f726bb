//! A guest that can be told from any other: memory that is known page by page, and a process that counts.

use crate::error::Result;
use crate::guest::Drives;

/// Seed of the pattern in the guest's memory.
pub const SEED: u64 = 77;

/// Memory that is known page by page: a file in the guest's own RAM.
pub fn fill(vm: &impl Drives, mib: u64) -> Result<()> {
    vm.sh(&format!("probe fill /tmp/memory {} {SEED}", mib << 20)).map(drop)
}

/// Every byte of it is as it was.
pub fn verify(vm: &impl Drives) -> Result<()> {
    vm.sh(&format!("probe verify /tmp/memory {SEED}")).map(drop)
}

/// A process that counts, and notes how far it is.
pub fn start_counter(vm: &impl Drives) -> Result<()> {
    vm.sh("(i=0; while :; do i=$((i+1)); echo $i >/tmp/count.new; mv /tmp/count.new /tmp/count; sleep 0.05; done) >/dev/null 2>&1 &")
        .map(drop)
}

pub fn count(vm: &impl Drives) -> Result<u64> {
    let said = vm.sh("while [ ! -s /tmp/count ]; do sleep 0.1; done; cat /tmp/count")?;
    Ok(said.trim().parse().expect("the counter writes numbers"))
}

/// It counts on from there.
pub fn counts_beyond(vm: &impl Drives, counted: u64) -> Result<()> {
    vm.sh(&format!("while [ $(cat /tmp/count) -le {counted} ]; do sleep 0.1; done")).map(drop)
}
