//! Uploads to an object store during a save: what has arrived leaves the host, whatever the wire does, and exactly the saved
//! guest is restored.

use std::fs;
use std::path::Path;

use hearth_vmtest::{Disk, Drives, Result, TestVm};
use loopback_s3::Wire;
use serde_json::Value;

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

fn saved(vm: &TestVm, name: &str) -> Result<Value> {
    vm.wait_event_json("the save's end", |event| event["kind"] == "saved" && event["folder"] == address(name))
}

/// Asserts that the guest restored from the store is the one that was saved.
fn comes_back(stand: &Stand, vm: &TestVm, nonce: &str) -> Result<()> {
    let clone = stand.clone(vm, "clone", "cache", &["--eager"])?;
    clone.wait_running_json()?;
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
    let status = vm.wait_status_json("a disk that is in the store and no longer staged", |status| {
        assert!(!status["save"].is_null(), "the save ended too early for this test: {status}");
        has_disk(&stand.object("")) && !has_disk(&staged) && staged.join("state").exists()
    })?;
    let save = &status["save"];
    assert!(save["upload_bytes_done"].as_u64() > Some(0) && save["percent"].as_f64() < Some(100.0), "{save}");
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
        clone.wait_running_json()?;
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
        vm.wait_status_json(what, |status| status["save"].is_null() && status["state"] == "running")?;
        assert_eq!(vm.nonce()?, nonce, "{what}");
        verify(&vm)?;
        verify_file(&vm)
    };
    let begin_upload = |options: &[&str]| -> Result<()> {
        stand.server.set_wire(SLOW);
        begin_save(&vm, "one", options)?;
        let some = |status: &Value| status["save"]["upload_bytes_done"].as_u64() > Some(9 * MIB);
        vm.wait_status_json("part of the upload", some).map(drop)
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
    let refused = vm.wait_event_json("a refusal by the store", |event| {
        let why = event["why"].as_str().unwrap_or_default();
        event["kind"] == "save_failed" && why.contains("the store refuses")
    })?;
    assert_eq!(refused["folder"], address("one"));
    is_as_it_was("refused")?;
    begin_upload(&[])?;
    vm.restart_keeper()?;
    vm.wait_running_json()?;
    vm.await_console()?;
    is_as_it_was("after its keeper was killed")?;
    stand.server.set_wire(Wire::Whole);
    // Leftovers of the earlier saves do not disturb the next.
    vm.save(Path::new(&address("one")))?;
    assert!(names(&stand.folder.path().join("keeper")).is_empty(), "the staging folder is empty");
    vm.stop_at_once()?;
    comes_back(&stand, &vm, &nonce)
}
