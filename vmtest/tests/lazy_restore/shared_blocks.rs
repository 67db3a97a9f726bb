//! On a file system that can share blocks a save copies no disk: the guest's later writes go elsewhere, and both disks are right.

use std::fs;

use hearth_recovery::snapshot::Snapshot;
use hearth_vmtest::{Disk, Drives, Mounted, Result, TestVm, pattern};

use super::saves::{CHURN, TURNS, await_turns};
use super::{SEED, fill, verify};

const MIB: usize = 1 << 20;
const DISK_BYTES: usize = 96 * MIB;
/// The first part of the disk, which the guest writes.
const WRITTEN_BYTES: usize = 32 * MIB;

#[test]
fn disk_with_shared_blocks_is_saved_without_copy() -> Result<()> {
    let Some(xfs) = Mounted::xfs(1024)? else { return Ok(()) };
    let (image, snapshot) = (xfs.path().join("disk.img"), xfs.path().join("snapshot"));
    let content = pattern::bytes("disk", DISK_BYTES, SEED);
    fs::write(&image, &content).expect("there is room");
    let vm = TestVm::busybox("shared").disk(Disk::in_place(&image)).boot()?;
    let nonce = vm.nonce()?;
    fill(&vm, 16)?;
    vm.sh(TURNS)?;
    vm.sh(CHURN)?;
    await_turns(&vm, 5)?;
    let before = xfs.used_bytes()?;
    vm.save(&snapshot)?;
    let grown = xfs.used_bytes()? - before;
    let written = |name: &str| fs::metadata(snapshot.join(name)).expect("it was saved").len();
    let memory = written("ram") + written("state");
    assert!(grown < memory + (DISK_BYTES / 4) as u64, "the save takes {grown} bytes, {memory} of them for memory");
    await_turns(&vm, 5)?;
    verify(&vm)?;
    vm.stop_at_once()?;

    let opened = Snapshot::open(&snapshot).expect("it was saved");
    let saved = fs::read(opened.disk_path(&opened.manifest.disks[0].name)).expect("it was saved");
    assert!(saved.len() == DISK_BYTES && saved[WRITTEN_BYTES..] == content[WRITTEN_BYTES..]);
    assert!(saved != fs::read(&image).expect("it is there"), "the guest has continued to write");
    let clone = vm.restore(&snapshot, "clone", &["--lazy"])?;
    clone.wait_running()?;
    assert_eq!(clone.nonce()?, nonce);
    await_turns(&clone, 5)?;
    verify(&clone)?;
    clone.stop_at_once()?;
    let saved_still = fs::read(opened.disk_path(&opened.manifest.disks[0].name)).expect("it was saved");
    assert!(saved_still == saved, "the clone writes to its own image");
    Ok(())
}
