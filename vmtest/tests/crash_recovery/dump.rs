//! Dumps as `hearth status` and the events show them.

use std::path::{Path, PathBuf};

use hearth_recovery::vmcore::VmcoreFile;
use hearth_recovery::vmcore::linux::{Linux, log};
use hearth_vmtest::{Result, TestVm, TestVmBuilder, patience};
use serde_json::Value;

/// Small, so that its memory is soon copied, and dumping.
pub fn dumping(name: &str) -> TestVmBuilder {
    TestVm::busybox(name).memory_mib(256).dumps()
}

/// A dump that takes as long as the test wants: everything that was ever touched, uncompressed, slowly.
pub fn slow(name: &str) -> TestVmBuilder {
    dumping(name).crash_setting("level", 1).crash_setting("compression", "none").crash_setting("mib_per_second", 4)
}

/// Waits until the dump of an incarnation is complete, and returns what the event says.
pub fn wait_complete(vm: &TestVm, incarnation: u64) -> Result<Value> {
    wait_event(vm, "dump_complete", incarnation)
}

/// Waits for an event that names the file of this incarnation's dump.
pub fn wait_event(vm: &TestVm, kind: &str, incarnation: u64) -> Result<Value> {
    let mark = format!("/{}-{incarnation}-", vm.name());
    vm.wait_event_within(&format!("{kind} of incarnation {incarnation}"), patience(60), |event| {
        event["kind"] == kind && event["file"].as_str().is_some_and(|file| file.contains(&mark))
    })
}

/// The last dump of an incarnation in `hearth status`.
pub fn status(vm: &TestVm, incarnation: u64) -> Result<Value> {
    let status = vm.status()?;
    let dumps = status["dumps"].as_array().into_iter().flatten();
    Ok(dumps.rev().find(|dump| dump["incarnation"] == incarnation).cloned().unwrap_or_default())
}

/// Files in the dump folder.
pub fn files(folder: &Path) -> Vec<PathBuf> {
    let entries = std::fs::read_dir(folder).into_iter().flatten();
    let mut files: Vec<PathBuf> = entries.map(|entry| entry.expect("the folder is the test's").path()).collect();
    files.sort();
    files
}

pub fn file_of(event: &Value) -> PathBuf {
    event["file"].as_str().map(PathBuf::from).unwrap_or_default()
}

/// The last words of the guest, out of a dump alone; none if the dump is not whole.
pub fn last_words(file: &Path) -> Option<String> {
    let vmcore = VmcoreFile::open(file).expect("the dump can be read");
    if !vmcore.is_complete() {
        return None;
    }
    let linux = Linux::find(&vmcore, &vmcore.notes().to_bytes()).expect("a Linux is found in it");
    let lines = linux.log().expect("it has its kernel log");
    log::panic_reason(&lines).map(str::to_owned)
}

/// Once a dump is over nothing is held for it any more.
pub fn assert_nothing_held(vm: &TestVm) -> Result<()> {
    let status = vm.status()?;
    assert_eq!(status["memory"]["held_bytes"], 0, "{status}");
    assert_eq!(status["memory"]["dump_buffer_bytes"], 0, "{status}");
    Ok(())
}
