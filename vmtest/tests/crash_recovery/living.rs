//! Dumps of guests that continue, and of one that stays paused after its dump.

use hearth_api::{EndCause, MachineState};
use hearth_recovery::vmcore::VmcoreFile;
use hearth_vmtest::{Drives, Result, TestVm, event};

use crate::dump::{self, dumping, last_words, wait_complete};

fn living(name: &str) -> Result<TestVm> {
    TestVm::busybox(name).memory_mib(256).running()
}

#[test]
fn living_guest_continues_after_its_dump() -> Result<()> {
    let vm = living("living")?;
    let nonce = vm.nonce()?;
    let file = vm.folder().join("x.vmcore");
    vm.cli(&["dump", vm.name(), "--level", "17", "--compress", "lzo", "-o", &file.display().to_string()])?;
    assert_eq!(vm.nonce()?, nonce);
    assert_eq!(vm.status()?.state, MachineState::Running);
    let vmcore = VmcoreFile::open(&file).expect("the dump can be read");
    assert!(vmcore.is_complete() && vmcore.notes().cpus() == 1);
    assert_eq!(vmcore.level(), Some(17));
    let again = vm.cli_output(&["dump", vm.name(), "-o", &file.display().to_string(), "--no-wait"])?;
    assert_eq!(again.status, 0);
    let why = vm.wait_event("a file in the way", event!(DumpWaits { why, .. } => why))?;
    assert!(why.contains("exists already"), "{why}");
    vm.cli(&["dump", vm.name(), "--discard"]).map(drop)
}

#[test]
fn guest_paused_for_its_dump_continues() -> Result<()> {
    let vm = living("paused")?;
    vm.cli(&["dump", vm.name(), "--pause", "--format", "elf"])?;
    vm.sh("true")?;
    assert_eq!(dump::files(&vm.dump_folder()).len(), 1);
    Ok(())
}

/// Starts a long dump for which the guest is paused.
fn begin_held_dump(vm: &TestVm) -> Result<()> {
    vm.cli(&["dump", vm.name(), "--pause", "--level", "0", "--no-wait"])?;
    vm.wait_status("the guest paused for the dump", |status| status.state == MachineState::Paused).map(drop)
}

fn wait_continued(vm: &TestVm) -> Result<()> {
    vm.wait_event("the dump's end", event!(DumpIncomplete))?;
    vm.wait_status("the guest continued", |status| status.state == MachineState::Running).map(drop)
}

/// Requests that would continue the guest during its dump are refused. A keeper's death continues it, and so do a discarded dump
/// and a forced reboot.
#[test]
fn guest_paused_for_its_dump_always_continues() -> Result<()> {
    let vm = TestVm::busybox("held").memory_mib(256).crash_setting("mib_per_second", 1).running()?;
    vm.sh("probe fill /tmp/memory 33554432 1")?;
    let nonce = vm.nonce()?;
    begin_held_dump(&vm)?;
    let snapshot = vm.folder().join("snapshot").display().to_string();
    for request in [vec!["rejuvenate", vm.name()], vec!["save", vm.name(), "-o", &snapshot]] {
        let said = vm.cli_output(&request)?;
        assert!(said.status == 1 && said.text().contains("the machine is paused"), "{}", said.text());
    }
    assert_eq!(vm.status()?.state, MachineState::Paused, "a refused request does not continue the guest");
    vm.kill_keeper()?;
    vm.restart_keeper()?;
    wait_continued(&vm)?;
    assert_eq!(vm.nonce()?, nonce, "it is the same guest");
    begin_held_dump(&vm)?;
    vm.cli(&["dump", vm.name(), "--discard"])?;
    vm.wait_status("the guest continued", |status| status.state == MachineState::Running)?;
    assert_eq!(vm.nonce()?, nonce);
    begin_held_dump(&vm)?;
    vm.reboot_forced()?;
    vm.wait_incarnation(2).map(drop)
}

#[test]
fn on_panic_dump_leaves_the_guest_paused() -> Result<()> {
    let vm = dumping("looked-at").setting("on_panic", "dump").running()?;
    vm.panic()?;
    let complete = wait_complete(&vm, 1)?;
    assert_eq!(last_words(&dump::file_of(&complete)).as_deref(), Some("sysrq triggered crash"));
    let status = vm.status()?;
    assert_eq!(status.state, MachineState::Paused, "{status:?}");
    vm.reboot()?;
    vm.wait_incarnation(2)?;
    assert_eq!(vm.explain()?.recovery.map(|recovery| recovery.cause), Some(EndCause::Panic));
    Ok(())
}
