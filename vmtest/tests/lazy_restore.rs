//! Lazy restore, as a guest and its operator see it: saved at one moment, it goes on from there, any number of times.
//!
//! `saves`: what saving does to the machine that is saved. `shared_blocks`: its disks need not be copied. `restores`: the guest that
//! comes back is the one that was saved. `dedup`: what its disks hold is not stored. `scans`: what the guest uses is seen before it is
//! saved. `freeze`: its file systems are whole on the snapshot's disks. `identity`: a clone knows that it is one. `faults`: what a
//! damaged snapshot makes of it. `deaths`: keepers that are killed at each step. `completion`: what is kept when all memory is there.
//! `object_store`: the same out of an object store, over a wire that is not to be relied on. `uploads`: it goes there while it is saved.
//! `services`: a Debian with a web server and a database; `soak`: a hundred restores. Both by `make soak`.
//! `arrivals`: disks that come out of it while the guest runs.

#[path = "lazy_restore/arrivals.rs"]
mod arrivals;
#[path = "lazy_restore/completion.rs"]
mod completion;
#[path = "lazy_restore/deaths.rs"]
mod deaths;
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
#[path = "lazy_restore/services.rs"]
mod services;
#[path = "lazy_restore/shared_blocks.rs"]
mod shared_blocks;
#[path = "lazy_restore/soak.rs"]
mod soak;
#[path = "lazy_restore/uploads.rs"]
mod uploads;

use std::collections::HashMap;

use hearth_vmtest::known::{SEED, count, fill, start_counter, verify};
use hearth_vmtest::{Drives, Result, TestVm, TestVmBuilder, patience, pattern};

/// Of guests most of whose memory is known.
const MEMORY_MIB: u64 = 384;
const MOST_MIB: u64 = 216;

/// A guest most of whose memory is known page by page: more than a temporary folder holds of itself.
fn boot_filled(builder: TestVmBuilder) -> Result<TestVm> {
    let vm = builder.memory_mib(MEMORY_MIB).boot()?;
    vm.sh("mount -t tmpfs -o remount,size=90% tmp /tmp")?;
    fill(&vm, MOST_MIB)?;
    Ok(vm)
}

/// The pages of a pattern, by their first words.
fn first_words(name: &str, mib: usize) -> HashMap<u64, Vec<u8>> {
    let bytes = pattern::bytes(name, mib << 20, SEED);
    bytes.chunks_exact(4096).map(|page| (first_word(page), page.to_vec())).collect()
}

fn first_word(page: &[u8]) -> u64 {
    u64::from_ne_bytes(page[..8].try_into().expect("8 bytes"))
}

/// The pattern that a command of the clone verifies is right, all its memory comes, and it is the guest that was saved.
fn comes_whole(clone: &TestVm, verifying: u64, nonce: &str) -> Result<()> {
    let verified = clone.wait_console("the pattern is verified", patience(60), |heard| heard.take_answer(verifying))?;
    assert_eq!(verified.status, 0, "{:?}", String::from_utf8_lossy(&verified.output));
    clone.wait_event("all memory is there", |event| event["kind"] == "restore_complete")?;
    assert_eq!(clone.nonce()?, nonce);
    Ok(())
}
