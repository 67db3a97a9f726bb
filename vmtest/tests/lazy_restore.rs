//! Lazy restore, as a guest and its operator see it: a guest saved at one moment continues from there, any number of times.
//!
//! - `saves`: effects on the machine that is saved.
//! - `shared_blocks`: its disks need not be copied.
//! - `restores`: the restored guest is the saved one.
//! - `dedup`: pages that the disks hold are not stored.
//! - `scans`: Hearth finds the guest's working set before a save.
//! - `freeze`: file systems are consistent on the snapshot's disks.
//! - `identity`: a clone knows that it is one.
//! - `faults`: damaged snapshots.
//! - `memory_on_disk`: a memory folder that is not on a tmpfs.
//! - `deaths`: keepers killed at each step.
//! - `completion`: what is kept when all memory has arrived.
//! - `object_store`: restores from an object store over an unreliable wire.
//! - `uploads`: uploads to it during a save.
//! - `arrivals`: disks that arrive from it while the guest runs.
//! - `services`: a Debian with a web server and a database; `soak`: a hundred restores. `make soak` runs both.

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
#[path = "lazy_restore/memory_on_disk.rs"]
mod memory_on_disk;
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

use hearth_api::RestoreStatus;
use hearth_vmtest::known::{SEED, count, fill, start_counter, verify};
use hearth_vmtest::{Drives, Result, TestVm, TestVmBuilder, event, patience, pattern};

/// Memory of the guests in these tests, and the part of it that has known contents.
const MEMORY_MIB: u64 = 384;
const MOST_MIB: u64 = 216;

/// A guest most of whose memory has known contents: more than a temporary folder holds by default.
fn boot_filled(builder: TestVmBuilder) -> Result<TestVm> {
    let vm = builder.memory_mib(MEMORY_MIB).boot()?;
    vm.sh("mount -t tmpfs -o remount,size=90% tmp /tmp")?;
    fill(&vm, MOST_MIB)?;
    Ok(vm)
}

/// The pages of a pattern, keyed by their first words.
fn first_words(name: &str, mib: usize) -> HashMap<u64, Vec<u8>> {
    let bytes = pattern::bytes(name, mib << 20, SEED);
    bytes.chunks_exact(4096).map(|page| (first_word(page), page.to_vec())).collect()
}

fn first_word(page: &[u8]) -> u64 {
    u64::from_ne_bytes(page[..8].try_into().expect("8 bytes"))
}

/// Waits until the restore has come to a state that `look` accepts.
fn wait_restore(clone: &TestVm, what: &str, look: impl Fn(&RestoreStatus) -> bool) -> Result<RestoreStatus> {
    let status = clone.wait_status(what, |status| status.restore.as_ref().is_some_and(&look))?;
    Ok(status.restore.expect("`look` saw it"))
}

/// Waits until a command of the clone has verified the pattern and all memory has arrived; the guest is the one that was saved.
fn comes_whole(clone: &TestVm, verifying: u64, nonce: &str) -> Result<()> {
    let verified = clone.wait_console("the pattern is verified", patience(60), |heard| heard.take_answer(verifying))?;
    assert_eq!(verified.status, 0, "{:?}", String::from_utf8_lossy(&verified.output));
    clone.wait_event("all memory is there", event!(RestoreComplete))?;
    assert_eq!(clone.nonce()?, nonce);
    Ok(())
}
