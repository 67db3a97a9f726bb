//! Dumps of guests that live on, and of one that is held still to be looked at.

use hearth_recovery::vmcore::VmcoreFile;
use hearth_vmtest::{Drives, Result, TestVm};

use crate::dump::{self, dumping, last_words, wait_complete};

fn living(name: &str) -> Result<TestVm> {
    TestVm::busybox(name).memory_mib(256).boot()
}

#[test]
fn a_living_guest_is_dumped_and_lives_on() -> Result<()> {
    let vm = living("living")?;
    let nonce = vm.nonce()?;
    let file = vm.folder().join("x.vmcore");
    vm.cli(&["dump", vm.name(), "--level", "17", "--compress", "lzo", "-o", &file.display().to_string()])?;
    assert_eq!(vm.nonce()?, nonce);
    assert_eq!(vm.status()?["state"], "running");
    let vmcore = VmcoreFile::open(&file).expect("the dump can be read");
    assert!(vmcore.is_complete() && vmcore.notes().cpus() == 1);
    assert_eq!(vmcore.level(), Some(17));
    let again = vm.cli_output(&["dump", vm.name(), "-o", &file.display().to_string(), "--no-wait"])?;
    assert_eq!(again.status, 0);
    let waits = vm.wait_event("a file in the way", |event| event["kind"] == "dump_waits")?;
    assert!(waits["why"].to_string().contains("exists already"), "{waits}");
    vm.cli(&["dump", vm.name(), "--discard"]).map(drop)
}

#[test]
fn a_guest_that_was_paused_for_its_dump_goes_on() -> Result<()> {
    let vm = living("paused")?;
    vm.cli(&["dump", vm.name(), "--pause", "--format", "elf"])?;
    vm.sh("true")?;
    assert_eq!(dump::files(&vm.dump_folder()).len(), 1);
    Ok(())
}

#[test]
fn a_crash_may_be_dumped_and_left_to_be_looked_at() -> Result<()> {
    let vm = dumping("looked-at").setting("on_panic", "dump").boot()?;
    vm.panic()?;
    let complete = wait_complete(&vm, 1)?;
    assert_eq!(last_words(&dump::file_of(&complete)).as_deref(), Some("sysrq triggered crash"));
    let status = vm.status()?;
    assert_eq!(status["state"], "paused", "{status}");
    vm.reboot()?;
    vm.wait_incarnation(2)?;
    assert_eq!(vm.explain()?["recovery"]["cause"], "panic");
    Ok(())
}
