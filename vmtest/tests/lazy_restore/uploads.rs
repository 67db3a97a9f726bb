//! Uploads to an object store during a save: what has arrived leaves the host, whatever the wire does, and exactly the saved
//! guest is restored.

use std::fs;
use std::path::Path;

use hearth_api::{MachineState, MachineStatus};
use hearth_vmtest::{Disk, Drives, Result, TestVm, event};
use loopback_s3::Wire;

use super::dedup::{read_file, verify_file};
use super::object_store::{Stand, address};
use super::saves::{TURNS, await_turns};
use super::{fill, verify};

const MIB: u64 = 1 << 20;
/// Rate of each of the four connections: the upload of the guest's memory takes about ten seconds.
const SLOW: Wire = Wire::Slow(3 * MIB);

/// A machine with known memory and a known disk.
fn machine(stand: &Stand, name: &str) -> Result<TestVm> {
    let vm = stand.machine(TestVm::busybox(name).memory_mib(512).disk(Disk::ext4(64)))?;
    fill(&vm, 100)?;
    read_file(&vm)?;
    Ok(vm)
}

fn begin_save(vm: &TestVm, name: &str, options: &[&str]) -> Result<()> {
    vm.cli(&[&["save", vm.name(), "-o", &address(name), "--no-wait"], options].concat()).map(drop)
}

fn saved(vm: &TestVm, name: &str) -> Result<()> {
    vm.wait_event("the save's end", event!(Saved { folder, .. } if folder == address(name) => ()))
}

/// Asserts that the guest restored from the store is the one that was saved.
fn comes_back(stand: &Stand, vm: &TestVm, nonce: &str) -> Result<()> {
    let clone = stand.clone(vm, "clone", "cache", &["--eager"])?;
    clone.wait_running()?;
    assert_eq!(clone.nonce()?, nonce);
    verify(&clone)?;
    verify_file(&clone)?;
    clone.sh("probe drop-caches")?;
    verify_file(&clone)?;
    clone.stop_at_once().map(drop)
}

/// Names in a folder, which may be missing.
fn names(folder: &Path) -> Vec<String> {
    let entries = fs::read_dir(folder).into_iter().flatten().flatten();
    entries.filter_map(|entry| entry.file_name().into_string().ok()).collect()
}

#[test]
fn uploaded_disks_are_unstaged_despite_a_bad_wire() -> Result<()> {
    let stand = Stand::new();
    let vm = machine(&stand, "stream")?;
    let (nonce, staged) = (vm.nonce()?, stand.folder.path().join("keeper/staging-stream/snapshot"));
    stand.server.set_wire(SLOW);
    begin_save(&vm, "one", &["--compress"])?;
    let has_disk = |folder: &Path| names(folder).iter().any(|name| name.starts_with("disk-"));
    let status = vm.wait_status("a disk that is in the store and no longer staged", |status| {
        assert!(status.save.is_some(), "the save ended too early for this test: {status:?}");
        has_disk(&stand.object("")) && !has_disk(&staged) && staged.join("state").exists()
    })?;
    let save = status.save.expect("the save still runs");
    assert!(save.upload_bytes_done > 0 && save.percent < 100.0, "{save:?}");
    assert!(!stand.object("manifest").exists(), "the manifest comes after the memory");
    for wire in [Wire::Failing, SLOW, Wire::Cut(1), SLOW, Wire::Dead, Wire::Whole] {
        stand.server.set_wire(wire);
        verify(&vm)?;
    }
    saved(&vm, "one")?;
    assert!(names(&stand.folder.path().join("keeper")).is_empty(), "the staging folder is empty");
    vm.stop_at_once()?;
    comes_back(&stand, &vm, &nonce)
}

#[test]
fn busy_guest_is_uploaded_as_of_one_moment() -> Result<()> {
    let stand = Stand::new();
    let vm = stand.machine(TestVm::busybox("restless").memory_mib(512).disk(Disk::empty(32)))?;
    let nonce = vm.nonce()?;
    fill(&vm, 64)?;
    vm.sh(TURNS)?;
    await_turns(&vm, 3)?;
    for (name, options) in [("one", &[][..]), ("two", &["--dedup-disk", "--scan", "200ms,2"])] {
        vm.save_with(Path::new(&address(name)), options)?;
        await_turns(&vm, 3)?;
        let clone = stand.clone_of(name, &vm, &format!("clone-{name}"), "cache", &["--eager"])?;
        clone.wait_running()?;
        assert_eq!(clone.nonce()?, nonce);
        await_turns(&clone, 3)?;
        verify(&clone)?;
        clone.stop_at_once()?;
    }
    Ok(())
}

#[test]
fn interrupted_upload_leaves_the_guest_as_it_was() -> Result<()> {
    let stand = Stand::new();
    let vm = machine(&stand, "halfway")?;
    let nonce = vm.nonce()?;
    let is_as_it_was = |what: &str| -> Result<()> {
        vm.wait_status(what, |status| status.save.is_none() && status.state == MachineState::Running)?;
        assert_eq!(vm.nonce()?, nonce, "{what}");
        verify(&vm)?;
        verify_file(&vm)
    };
    let begin_upload = |options: &[&str]| -> Result<()> {
        stand.server.set_wire(SLOW);
        begin_save(&vm, "one", options)?;
        let some = |status: &MachineStatus| status.save.as_ref().is_some_and(|save| save.upload_bytes_done > 9 * MIB);
        vm.wait_status("part of the upload", some).map(drop)
    };
    for options in [&[][..], &["--stop"], &["--compress"]] {
        begin_upload(options)?;
        vm.cli_output(&["save", vm.name(), "--cancel"])?;
        is_as_it_was("cancelled")?;
        stand.server.set_wire(Wire::Whole);
        stand.server.await_empty();
        assert!(names(&stand.folder.path().join("keeper")).is_empty(), "{options:?}");
    }
    begin_upload(&[])?;
    stand.server.set_wire(Wire::Refusing);
    let refusal = event!(SaveFailed { folder, why } if why.contains("the store refuses") => folder);
    assert_eq!(vm.wait_event("a refusal by the store", refusal)?, address("one"));
    is_as_it_was("refused")?;
    begin_upload(&[])?;
    vm.restart_keeper()?;
    vm.wait_running()?;
    vm.await_console()?;
    is_as_it_was("after its keeper was killed")?;
    stand.server.set_wire(Wire::Whole);
    // Leftovers of the earlier saves do not disturb the next.
    vm.save(Path::new(&address("one")))?;
    assert!(names(&stand.folder.path().join("keeper")).is_empty(), "the staging folder is empty");
    vm.stop_at_once()?;
    comes_back(&stand, &vm, &nonce)
}
