//! Full folders of the keeper: the reboot is cold or waits, and continues by itself when there is space again.

use std::fs::{self, File};
use std::io::Write;
use std::path::{Path, PathBuf};

use hearth_vmtest::images::File as DiskFile;
use hearth_vmtest::{Disk, Drives, Mounted, Result, TestVm, event};

/// Fills the file system.
fn fill(folder: &Path) -> PathBuf {
    let path = folder.join("filler");
    let mut file = File::create(&path).expect("an inode is left");
    for bytes in [1 << 20, 4096, 1] {
        while file.write_all(&vec![1; bytes]).is_ok() {}
    }
    path
}

const VERIFY: &str = "mkdir -p /d && mount -o ro /dev/vda /d && probe verify /d/kept.bin 3";

/// A machine whose memory folder and runtime folder are small file systems.
fn machine(name: &str) -> Result<Option<(TestVm, Mounted, Mounted)>> {
    let (Some(memory), Some(runtime)) = (Mounted::tmpfs(600)?, Mounted::tmpfs(4)?) else { return Ok(None) };
    let disk = Disk::ext4(64).with_files([DiskFile::pattern("kept.bin", 8 << 20, 3)]);
    let folder_of = |mounted: &Mounted| mounted.path().join(name).display().to_string();
    let vm = TestVm::busybox(name).disk(disk).setting("memory_folder", folder_of(&memory));
    let vm = vm.setting("runtime_folder", folder_of(&runtime)).boot()?;
    vm.sh(VERIFY)?;
    Ok(Some((vm, memory, runtime)))
}

#[test]
fn full_memory_folder_costs_only_kept_memory() -> Result<()> {
    let Some((vm, memory, _runtime)) = machine("full-memory")? else { return Ok(()) };
    let filler = fill(memory.path());
    vm.reset()?;
    // The dead guest's memory is released for the next one. If that needs more, it dies, and another one follows.
    vm.wait_event("the next guest", event!(|event| IncarnationStarted if event.incarnation == 2))?;
    fs::remove_file(filler).expect("it is there");
    vm.await_console()?;
    vm.sh(VERIFY)?;
    vm.has_no_disk_errors()?;
    vm.stop_at_once().map(drop)
}

#[test]
fn full_runtime_folder_makes_a_reboot_wait() -> Result<()> {
    let Some((vm, _memory, runtime)) = machine("full-runtime")? else { return Ok(()) };
    let filler = fill(runtime.path());
    vm.reset()?;
    let waits = vm.wait_status("a waiting start", |status| status.next_start.is_some())?;
    let why = waits.state_why.unwrap_or_default();
    assert!(why.contains("journal.json") && why.contains("No space left on device"), "{why}");
    // Events arrive over their own connection, and a thread releases the dead guest's memory, so both are waited for.
    vm.wait_event("a waiting start", event!(StartWaits))?;
    vm.wait_event("released memory", event!(EmberSettled))?;
    // Further attempts add no events.
    let (first, events) = (waits.next_start, vm.events().len());
    vm.wait_status("another attempt", |status| status.next_start.is_some() && status.next_start != first)?;
    assert_eq!(vm.events().len(), events);
    fs::remove_file(filler).expect("it is there");
    vm.wait_incarnation(2)?;
    vm.sh(VERIFY)?;
    vm.has_no_disk_errors()?;
    vm.stop_at_once().map(drop)
}
