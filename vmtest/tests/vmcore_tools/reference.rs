//! Dumps by QEMU: if these tests fail, the cause is not Hearth.

use std::path::Path;

use hearth_vmtest::artifacts::Linux;
use hearth_vmtest::{PlainVm, Result, images, patience, qemu_dump};
use serde_json::json;

use super::panics::{self, Panic};
use super::tools;

/// Boots a guest, fills its memory, makes it panic, and has QEMU dump all of its memory.
fn qemu_dump(linux: Linux, panic: Panic, dump: &Path) -> Result<()> {
    let home = tempfile::tempdir().unwrap();
    let image = home.path().join("disk.img");
    images::ext4(&image, 128, &[panics::module(linux)])?;
    let vm = PlainVm::busybox_on("reference", linux).memory_mib(512).drive(&image, "");
    let vm = vm.args(["-action", "panic=pause", "-device", "vmcoreinfo"]).boot()?;
    panics::fill(&vm, 256)?;
    panic.start(&vm)?;
    if panic == Panic::Nmi {
        vm.qmp().execute("inject-nmi", json!({}))?;
    }
    vm.qmp().wait_event("GUEST_PANICKED", patience(10))?;
    let protocol = format!("file:{}", dump.display());
    vm.qmp().execute("dump-guest-memory", json!({ "paging": false, "protocol": protocol }))?;
    qemu_dump::move_program_headers(dump)
}

fn check(linux: Linux, panic: Panic) -> Result<()> {
    println!("{linux:?}, {panic:?}");
    let (_folder, file) = tools::scratch();
    let dump = file("qemu.elf");
    qemu_dump(linux, panic, &dump)?;
    tools::check_traces(linux, &dump, panic, "probe");
    let counts = tools::makedumpfile(linux, "-l", 31, &dump, &file("filtered"));
    if panic == Panic::OutOfMemory {
        // Most of its memory was filled by the process that ran out of it.
        return Ok(());
    }
    // Pages that `fill` made: file cache on disk and in memory, anonymous memory, freed memory.
    let pages = |mib: u64| mib << 8;
    for (class, least) in
        [("Non-private cache pages", pages(32)), ("User process data pages", pages(64)), ("Free pages", pages(64))]
    {
        assert!(counts[class] >= least, "{class}: {counts:#?}");
    }
    Ok(())
}

#[test]
#[ignore = "make test-vmcore"]
fn every_panic_is_found_in_qemus_dump() -> Result<()> {
    Panic::ALL.into_iter().try_for_each(|panic| check(Linux::Stable, panic))
}

#[test]
#[ignore = "make test-vmcore"]
fn qemus_dump_shows_linux_6_12_panic() -> Result<()> {
    check(Linux::Newer, Panic::NullPointer)
}
