//! Helpers: machines that dump, and their dumps as `hearth status` and the events show them.

use std::path::{Path, PathBuf};

use hearth_api::{DumpStatus, EventKind, EventRecord};
use hearth_recovery::vmcore::VmcoreFile;
use hearth_recovery::vmcore::linux::{Linux, log};
use hearth_vmtest::{Result, TestVm, TestVmBuilder, event, patience};

/// A machine that dumps its crashes. It is small, so that its dump is short.
pub fn dumping(name: &str) -> TestVmBuilder {
    TestVm::busybox(name).memory_mib(256).dumps()
}

/// A machine whose dumps are slow: every page that was ever touched, uncompressed, with a limited rate.
pub fn slow(name: &str) -> TestVmBuilder {
    dumping(name).crash_setting("level", 1).crash_setting("compression", "none").crash_setting("mib_per_second", 4)
}

/// Waits until the dump of an incarnation is complete, and returns the event.
pub fn wait_complete(vm: &TestVm, incarnation: u32) -> Result<EventRecord> {
    wait_event(vm, event!(DumpComplete), incarnation)
}

/// Waits for an event that names the file of this incarnation's dump.
pub fn wait_event(
    vm: &TestVm,
    look: impl Fn(&EventRecord) -> Option<EventRecord>,
    incarnation: u32,
) -> Result<EventRecord> {
    let mark = format!("/{}-{incarnation}-", vm.name());
    vm.wait_event_within(&format!("an event of the dump of incarnation {incarnation}"), patience(60), |event| {
        look(event).filter(|event| file_of(event).to_string_lossy().contains(&mark))
    })
}

/// The last dump of an incarnation in `hearth status`.
pub fn status(vm: &TestVm, incarnation: u32) -> Result<DumpStatus> {
    let mut dumps = vm.status()?.dumps.into_iter().rev();
    Ok(dumps.find(|dump| dump.incarnation == incarnation).expect("the incarnation is dumped"))
}

/// Files in the dump folder.
pub fn files(folder: &Path) -> Vec<PathBuf> {
    let entries = std::fs::read_dir(folder).into_iter().flatten();
    let mut files: Vec<PathBuf> = entries.map(|entry| entry.expect("the folder is the test's").path()).collect();
    files.sort();
    files
}

pub fn file_of(event: &EventRecord) -> PathBuf {
    use EventKind::{DumpComplete, DumpIncomplete, DumpProgress, DumpStarted, DumpWaits};
    match &event.event {
        DumpStarted { file, .. }
        | DumpProgress { file, .. }
        | DumpWaits { file, .. }
        | DumpComplete { file, .. }
        | DumpIncomplete { file, .. } => file.into(),
        other => panic!("not about a dump: {other:?}"),
    }
}

/// The guest's panic message, read from the dump file alone. `None` if the dump is incomplete.
pub fn last_words(file: &Path) -> Option<String> {
    let vmcore = VmcoreFile::open(file).expect("the dump can be read");
    if !vmcore.is_complete() {
        return None;
    }
    let linux = Linux::find(&vmcore, &vmcore.notes().to_bytes()).expect("the dump holds a Linux kernel");
    let lines = linux.log().expect("the kernel log is in the dump");
    log::panic_reason(&lines).map(str::to_owned)
}

/// Asserts that a finished dump holds no memory any more.
pub fn assert_nothing_held(vm: &TestVm) -> Result<()> {
    let status = vm.status()?;
    assert_eq!(status.memory.held_bytes, 0, "{status:?}");
    assert_eq!(status.memory.dump_buffer_bytes, 0, "{status:?}");
    Ok(())
}
