//! What saving does to the machine that is saved: nothing, or it stops.

use std::path::Path;

use hearth_recovery::snapshot::Snapshot;
use hearth_vmtest::{Disk, Drives, Result, TestVm};

use super::{count, fill, start_counter, verify};

#[test]
fn a_guest_that_is_saved_goes_on_and_what_is_saved_is_whole() -> Result<()> {
    let vm = TestVm::busybox("saved").boot()?;
    let (nonce, folder) = (vm.nonce()?, vm.folder().join("snapshot"));
    fill(&vm, 32)?;
    start_counter(&vm)?;
    let before = count(&vm)?;
    vm.save(&folder)?;
    assert_eq!(vm.nonce()?, nonce);
    vm.sh(&format!("while [ $(cat /tmp/count) -le {before} ]; do sleep 0.1; done"))?;
    verify(&vm)?;
    let snapshot = Snapshot::open(&folder).expect("it was saved");
    assert!(snapshot.ram.pages().len() > (32 << 20) / 4096, "{}", snapshot.ram.pages().len());
    let mut reading = snapshot.ram.reading();
    for chunk in 0..snapshot.ram.chunks() {
        snapshot.ram.read(chunk, &mut reading).expect("each chunk is whole");
    }
    let again = vm.cli_output(&["save", vm.name(), "-o", &folder.display().to_string()])?;
    assert!(again.status != 0 && again.text().contains("exists already"), "{}", again.text());
    assert_eq!(vm.status()?["state"], "running");
    vm.rejuvenate()?;
    assert_eq!(vm.nonce()?, nonce, "and can be handed over");
    Ok(())
}

/// Some seconds of writing: a chance to break in.
fn begin_save(vm: &TestVm, folder: &Path) -> Result<()> {
    vm.cli(&["save", vm.name(), "-o", &folder.display().to_string(), "--compress", "--no-wait"]).map(drop)
}

#[test]
fn a_save_that_is_called_off_leaves_the_guest_as_it_was_and_nothing_behind() -> Result<()> {
    let vm = TestVm::busybox("calledoff").memory_mib(768).boot()?;
    let nonce = vm.nonce()?;
    fill(&vm, 220)?;
    // It may be over before it can be called off; then all of it is there.
    let mut called_off = false;
    for attempt in 0..5 {
        let folder = vm.folder().join(format!("snapshot{attempt}"));
        begin_save(&vm, &folder)?;
        vm.cli_output(&["save", vm.name(), "--cancel"])?;
        vm.wait_status("no save is under way", |status| status["save"].is_null() && status["state"] == "running")?;
        assert_eq!(vm.nonce()?, nonce);
        assert_eq!(folder.exists(), Snapshot::open(&folder).is_ok());
        called_off |= !folder.exists();
        if called_off {
            break;
        }
    }
    assert!(called_off, "each of five saves was over before it could be called off");
    verify(&vm)
}

/// What is typed while the console changes hands may be lost: until something is answered.
fn await_console(vm: &TestVm) -> Result<()> {
    for _ in 0..20 {
        let asked = vm.guest().start("true")?;
        let answered = vm.wait_console("an answer", hearth_vmtest::patience(2), |heard| heard.take_answer(asked));
        if answered.is_ok() {
            return Ok(());
        }
    }
    vm.sh("true").map(drop)
}

#[test]
fn a_keeper_killed_while_it_saves_is_followed_by_one_that_lets_the_guest_go_on() -> Result<()> {
    let vm = TestVm::busybox("killedsave").memory_mib(768).boot()?;
    let (nonce, folder) = (vm.nonce()?, vm.folder().join("snapshot"));
    fill(&vm, 220)?;
    begin_save(&vm, &folder)?;
    vm.restart_keeper()?;
    vm.wait_running()?;
    await_console(&vm)?;
    assert_eq!(vm.nonce()?, nonce);
    verify(&vm)?;
    vm.save(&vm.folder().join("another"))
}

#[test]
fn where_blocks_cannot_be_shared_a_running_machine_is_not_saved_and_it_is_said_why() -> Result<()> {
    let vm = TestVm::busybox("unshared").disk(Disk::empty(16)).boot()?;
    // Not the file system of the image: there nothing can be shared.
    let elsewhere = tempfile::tempdir_in("/dev/shm").expect("a folder");
    let folder = elsewhere.path().join("snapshot");
    let refused = vm.cli_output(&["save", vm.name(), "-o", &folder.display().to_string()])?;
    assert!(refused.status != 0 && refused.text().contains("save with --stop"), "{}", refused.text());
    assert!(!folder.exists());
    vm.sh("dd if=/dev/zero of=/dev/vda bs=64k count=4 conv=fsync 2>&1")?;
    assert_eq!(vm.save_and_stop(&folder)?.code(), Some(0));
    let snapshot = Snapshot::open(&folder).expect("it was saved");
    assert_eq!(snapshot.manifest.disks[0].bytes, 16 << 20);
    Ok(())
}
