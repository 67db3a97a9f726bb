//! Full folders of the keeper: the reboot is cold or waits, and continues by itself when there is space again.

use std::fs::{self, File};
use std::io::Write;
use std::path::{Path, PathBuf};

use hearth_vmtest::images::File as DiskFile;
use hearth_vmtest::{Disk, Drives, Mounted, Result, TestVm, artifacts, event, processes, write_program};

use super::memory_files;

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

/// The file system of the runtime folder is full before a machine's first start, and then while its first QEMU starts. Nothing of
/// either start is left, and with space the next one works.
#[test]
fn first_start_in_a_full_runtime_folder_leaves_nothing() -> Result<()> {
    let Some(runtime) = Mounted::tmpfs(4)? else { return Ok(()) };
    let (own, folder) = (tempfile::tempdir().expect("a folder"), runtime.path().join("first"));
    let (qemu, filled, fills) = (own.path().join("qemu"), runtime.path().join("filled"), own.path().join("fills"));
    let program = artifacts::qemu()?.display().to_string();
    let fill_all = format!("(unset LD_PRELOAD; cat /dev/zero >{} 2>/dev/null)", filled.display());
    let of_guest = format!("case \"$*\" in *memory-backend-file*) [ -e {} ] && {fill_all};; esac", fills.display());
    write_program(&qemu, &format!("#!/bin/sh\n{of_guest}\nexec {program} \"$@\"\n"));
    let failed = |vm: &TestVm| -> Result<()> {
        let ended = vm.wait_keeper_end()?;
        let said = vm.keeper_log();
        assert_eq!(ended.code(), Some(1), "{said}");
        let last = said.lines().last().unwrap_or_default();
        assert!(last.contains(&folder.display().to_string()) && last.contains("No space left on device"), "{last}");
        assert!(processes::mentioning(vm.memory_folder()).is_empty(), "a QEMU without a keeper");
        assert_eq!(memory_files(vm), [] as [&str; 0]);
        Ok(())
    };
    let filler = fill(runtime.path());
    let builder = TestVm::busybox("first").disk(Disk::empty(16)).setting("qemu", qemu.display().to_string());
    let vm = builder.setting("runtime_folder", folder.display().to_string()).start()?;
    failed(&vm)?;

    fs::remove_file(&filler).expect("it is there");
    fs::write(&fills, "").expect("our own folder");
    vm.restart_keeper()?;
    failed(&vm)?;
    assert!(filled.exists(), "a QEMU was started");

    fs::remove_file(&fills).and_then(|()| fs::remove_file(&filled)).expect("they are there");
    vm.restart_keeper()?;
    vm.wait_boots(1).map(drop)
}
