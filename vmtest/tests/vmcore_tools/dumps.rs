//! Dumps by Hearth: of every kind of panic, and with the same pages excluded as makedumpfile excludes from the same memory.

use std::path::{Path, PathBuf};

use hearth_api::{DumpExcluded, DumpStatus};
use hearth_vmtest::artifacts::Linux;
use hearth_vmtest::{Disk, Result, TestVm, event, patience};

use super::elf::{self, Core};
use super::panics::{self, Panic};
use super::tools;

/// A guest with memory of every class.
fn guest(linux: Linux, memory_mib: u64, on_panic: &str, dumps: &Path) -> Result<TestVm> {
    let builder = match linux {
        Linux::Stable => TestVm::busybox("vmcore"),
        Linux::Newer => TestVm::busybox_on_linux_6_12("vmcore"),
    };
    let disk = Disk::ext4(256).with_files([panics::module(linux)]);
    let vm = builder.memory_mib(memory_mib).disk(disk).setting("on_panic", on_panic);
    let vm = vm.crash_setting("dump_folder", dumps.display().to_string()).boot()?;
    panics::fill(&vm, 256)?;
    Ok(vm)
}

fn panic(vm: &TestVm, panic: Panic) -> Result<()> {
    panic.start(vm)?;
    if panic == Panic::Nmi { vm.crash() } else { Ok(()) }
}

/// Makes a guest panic and waits for its dump, while the next incarnation boots; then reads the dump with every tool.
fn check_traces(linux: Linux, way: Panic) -> Result<()> {
    println!("{linux:?}, {way:?}");
    let (folder, _) = tools::scratch();
    let vm = guest(linux, 512, "dump+recover", folder.path())?;
    panic(&vm, way)?;
    let dump = vm.wait_event_within("the dump", patience(60), event!(DumpComplete { file, .. } => file))?;
    vm.wait_incarnation(2)?;
    // The status shows the reason, too, without any tool.
    let reason = way.traces().log.trim_start_matches("Kernel panic - not syncing: ");
    let status = vm.status()?;
    for shown in [status.last_recovery.and_then(|recovery| recovery.panic), status.dumps[0].panic.clone()] {
        assert!(shown.as_ref().is_some_and(|shown| shown.contains(reason)), "{way:?}: {shown:?}");
    }
    tools::check_traces(linux, &folder.path().join(dump), way, "probe");
    Ok(())
}

/// Dumps the same memory with Hearth and makedumpfile: the excluded pages must match in number, and the kept ones in every byte.
fn check_classes(linux: Linux, memory_mib: u64) -> Result<()> {
    let (folder, file) = tools::scratch();
    let vm = guest(linux, memory_mib, "pause", folder.path())?;
    Panic::Sysrq.start(&vm)?;
    vm.wait_event("the panic", event!(GuestPanicked))?;
    let dump = |name: &str, options: &[&str]| -> Result<PathBuf> {
        let path = file(name);
        let path_text = path.display().to_string();
        vm.cli(&[&["dump", vm.name(), "-o", &path_text][..], options].concat())?;
        Ok(path)
    };
    let ours = dump("lzo", &["--level", "31", "--compress", "lzo"])?;
    let status = vm.status()?.dumps.pop().expect("the dump is recent");
    let as_elf = dump("elf", &["--level", "31", "--format", "elf"])?;
    // The reference is the RAM file itself with an ELF header; only its notes come from Hearth.
    let reference = file("reference");
    elf::from_ram(&vm.ram_file(1), &Core::open(&as_elf), &reference);
    let counts = tools::makedumpfile(linux, "-l", 31, &reference, &file("theirs"));
    println!("{linux:?}, {memory_mib} MiB: {counts:?}\nHearth: {status:?}");
    assert_counts(&status, &counts);
    // makedumpfile's own ELF output would not do: it keeps short runs of excluded pages.
    let (ram, kept) = (Core::open(&reference), Core::open(&as_elf));
    assert_eq!(ram.assert_holds(&kept), counts["Remaining pages"], "kept pages that are not zero");
    let addresses = kept.some_addresses();
    assert!(addresses.len() >= 1000, "only {} pages to compare", addresses.len());
    for name in ["lzo", "zlib"] {
        let ours = if name == "lzo" { ours.clone() } else { dump(name, &["--level", "31", "--compress", name])? };
        let again = tools::makedumpfile(linux, "-l", 31, &ours, &file(&format!("{name}-again")));
        for class in ["Remaining pages", "Pages filled with zero"] {
            assert_eq!(again[class], counts[class], "{name}, filtered again: {class}");
        }
        let pages = tools::read_pages(linux, &ours, &addresses);
        assert!(pages == ram.pages(&addresses), "{name}: drgn's pages differ from the RAM file");
    }
    tools::check_traces(linux, &as_elf, Panic::Sysrq, "probe");
    let whole = dump("zlib-1", &["--level", "1", "--compress", "zlib"])?;
    tools::check_traces(linux, &whole, Panic::Sysrq, "probe");
    // makedumpfile excludes at level 31 what level 1 kept.
    let again = tools::makedumpfile(linux, "-l", 31, &whole, &file("whole-again"));
    for class in ["Non-private cache pages", "User process data pages", "Free pages", "Remaining pages"] {
        assert_eq!(again[class], counts[class], "level 1, filtered at 31: {class}");
    }
    Ok(())
}

fn assert_counts(ours: &DumpStatus, theirs: &tools::Counts) {
    let expect = DumpExcluded {
        cache: theirs["Non-private cache pages"],
        private_cache: theirs["Private cache pages"],
        user: theirs["User process data pages"],
        free: theirs["Free pages"],
        poisoned: theirs["Hwpoison pages"],
        offline: theirs["Offline pages"],
        unjudged: 0,
    };
    assert_eq!(ours.excluded, expect);
    assert_eq!(ours.pages, theirs["Remaining pages"] + theirs["Pages filled with zero"], "{ours:?} {theirs:#?}");
}

#[test]
#[ignore = "make test-vmcore"]
fn every_panic_is_found_in_its_dump() -> Result<()> {
    Panic::ALL.into_iter().try_for_each(|panic| check_traces(Linux::Stable, panic))
}

#[test]
#[ignore = "make test-vmcore"]
fn dump_shows_linux_6_12_panic() -> Result<()> {
    check_traces(Linux::Newer, Panic::NullPointer)
}

#[test]
#[ignore = "make test-vmcore"]
fn excluded_pages_match_makedumpfile() -> Result<()> {
    check_classes(Linux::Stable, 1024)
}

#[test]
#[ignore = "make test-vmcore"]
fn excluded_pages_above_4_gib_match_makedumpfile() -> Result<()> {
    check_classes(Linux::Stable, 5120)
}

#[test]
#[ignore = "make test-vmcore"]
fn excluded_pages_of_linux_6_12_match_makedumpfile() -> Result<()> {
    check_classes(Linux::Newer, 3072)
}
