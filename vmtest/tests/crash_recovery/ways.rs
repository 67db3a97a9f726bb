//! Every way in which a guest can crash: the next one serves, and the dump gives the reason.

use std::path::Path;

use hearth_api::{DumpState, DumpStatus, EndCause};
use hearth_vmtest::residency::Watch;
use hearth_vmtest::{Disk, Drives, Result, TestVm, TestVmBuilder, event};

use crate::dump::{self, assert_nothing_held, dumping, file_of, wait_complete};

const PANIC: (EndCause, &str) = (EndCause::Panic, "sysrq triggered crash");

/// Crashes the guest, and asserts that it recovers with a dump that gives this cause and reason.
fn recovers_with_dump(
    vm: &TestVm,
    crash: impl Fn(&TestVm) -> Result<()>,
    (cause, reason): (EndCause, &str),
) -> Result<DumpStatus> {
    let nonce = vm.nonce()?;
    crash(vm)?;
    assert_ne!(vm.wait_incarnation(2)?.nonce, nonce);
    let complete = wait_complete(vm, 1)?;
    assert_eq!(dump::files(&vm.dump_folder()), [file_of(&complete)]);
    assert_nothing_held(vm)?;
    let dumped = dump::status(vm, 1)?;
    assert_eq!((dumped.state, dumped.percent), (DumpState::Complete, 100.0), "{dumped:?}");
    assert_eq!(dumped.pages, dumped.pages_written);
    assert!(dumped.panic.as_deref().unwrap_or_default().contains(reason), "{dumped:?}");
    let recovery = vm.explain()?.recovery.expect("the machine has recovered");
    assert_eq!((recovery.cause, recovery.warm), (cause, true), "{recovery:?}");
    assert_eq!(recovery.dump.as_ref().map(|dump| &dump.file), Some(&dumped.file));
    Ok(dumped)
}

fn panic_recovers_with_dump(builder: TestVmBuilder) -> Result<DumpStatus> {
    let vm = builder.disk(Disk::empty(8)).running()?;
    let watch = Watch::start(vm.memory_folder())?;
    let dumped = recovers_with_dump(&vm, TestVm::panic, PANIC)?;
    assert_eq!(dumped.warnings, [""; 0], "{dumped:?}");
    let seen = watch.end()?;
    assert!(seen.peak_bytes <= (256 << 20) * 103 / 100, "over budget: {seen:?}");
    // The keeper's own peak includes the dump's buffers, which are in no file.
    let memory = vm.status()?.memory;
    assert!(memory.peak_bytes <= memory.budget_bytes, "over budget: {memory:?}");
    assert_eq!(dump::last_words(Path::new(&dumped.file)).as_deref(), Some(PANIC.1));
    let phases = vm.explain()?.recovery.expect("the machine has recovered").phases;
    let named = |name: &str| phases.iter().any(|phase| phase.phase == name);
    assert!(["harvest", "plan", "write", "finish", "launch"].into_iter().all(named), "{phases:?}");
    Ok(dumped)
}

#[test]
fn panic_is_dumped_beside_the_next_guest() -> Result<()> {
    let dumped = panic_recovers_with_dump(dumping("panic"))?;
    assert_eq!((dumped.level, dumped.excluded.unjudged), (31, 0), "{dumped:?}");
    assert!(dumped.excluded.free > 10_000, "{dumped:?}");
    Ok(())
}

#[test]
fn panic_of_a_newer_kernel_is_dumped() -> Result<()> {
    let builder = TestVm::busybox_on_linux_6_12("newer").memory_mib(256).dumps();
    let dumped = panic_recovers_with_dump(builder)?;
    assert_eq!((dumped.level, dumped.excluded.unjudged), (31, 0), "{dumped:?}");
    Ok(())
}

/// A chunk's memory is released in one step, and not held twice while it is written.
#[test]
fn huge_chunk_stays_within_the_budget() -> Result<()> {
    panic_recovers_with_dump(dumping("chunk").crash_setting("level", 1).crash_setting("chunk", "1GiB")).map(drop)
}

#[test]
fn every_compression_and_format_is_written() -> Result<()> {
    for (format, compression) in [("kdump", "lzo"), ("kdump", "zlib"), ("kdump", "none"), ("elf", "none")] {
        let builder = dumping(&format!("{format}-{compression}")).crash_setting("format", format);
        panic_recovers_with_dump(builder.crash_setting("compression", compression).crash_setting("threads", 1))?;
    }
    Ok(())
}

#[test]
fn an_nmi_is_dumped() -> Result<()> {
    let vm = dumping("nmi").running()?;
    vm.sh("echo 1 >/proc/sys/kernel/unknown_nmi_panic")?;
    recovers_with_dump(&vm, TestVm::crash, (EndCause::Panic, "NMI")).map(drop)
}

#[test]
fn running_out_of_memory_is_dumped() -> Result<()> {
    let vm = dumping("oom").running()?;
    vm.sh("echo 2 >/proc/sys/vm/panic_on_oom")?;
    recovers_with_dump(&vm, |vm| vm.guest().start("tail /dev/zero").map(drop), (EndCause::Panic, "Out of memory"))
        .map(drop)
}

#[test]
fn a_hung_task_is_dumped() -> Result<()> {
    let vm = dumping("hung").disk(Disk::ext4(64)).boot()?;
    vm.sh("mount -t ext4 /dev/vda /mnt; cd /proc/sys/kernel; echo 1 >hung_task_panic; echo 2 >hung_task_timeout_secs")?;
    let hang = |vm: &TestVm| vm.guest().start("fsfreeze --freeze /mnt; touch /mnt/never").map(drop);
    recovers_with_dump(&vm, hang, (EndCause::Panic, "hung_task: blocked tasks")).map(drop)
}

/// Starts the watchdog by writing to its registers, since Debian's cloud kernel has no driver for it: two stages of a second
/// each, no interrupt after the first, start. Nothing resets the timer.
const START_WATCHDOG: &str = "device=$(dirname $(grep -l 0x25ab /sys/bus/pci/devices/*/device)); \
    printf '\\007\\000' | dd of=$device/config bs=2 seek=48 count=1 conv=notrunc; \
    printf '\\002' | dd of=$device/config bs=1 seek=104 count=1 conv=notrunc";

#[test]
fn expired_watchdog_is_dumped() -> Result<()> {
    let action: toml::Table = [("action".to_owned(), "crash".into())].into_iter().collect();
    let vm = dumping("watchdog").setting("watchdog", action).boot()?;
    let dumped = recovers_with_dump(&vm, |vm| vm.guest().start(START_WATCHDOG).map(drop), (EndCause::Watchdog, ""))?;
    assert_eq!((dumped.warnings.len(), dumped.level), (0, 31), "{dumped:?}");
    vm.wait_event("an expired watchdog", event!(WatchdogExpired { action } if action == "pause")).map(drop)
}

/// The registers are lost with QEMU; the kernel's own note is found in memory.
#[test]
fn killed_qemu_is_dumped_without_registers() -> Result<()> {
    let vm = dumping("killed").running()?;
    let dumped = recovers_with_dump(&vm, TestVm::kill_qemu, (EndCause::QemuDied, ""))?;
    let warnings = dumped.warnings.concat();
    assert!(warnings.contains("no registers: QEMU had exited"), "{dumped:?}");
    assert_eq!((dumped.level, dumped.excluded.unjudged), (31, 0), "{dumped:?}");
    Ok(())
}

#[test]
fn guest_without_linux_is_dumped_whole() -> Result<()> {
    // SeaBIOS finds nothing to boot from on an empty disk.
    let boot: toml::Table = [("firmware".to_owned(), "bios".into())].into_iter().collect();
    let vm = dumping("bios").setting("boot", boot).disk(Disk::empty(8)).start()?;
    vm.wait_event("the first incarnation", event!(IncarnationStarted))?;
    vm.kill_qemu()?;
    wait_complete(&vm, 1)?;
    let dumped = dump::status(&vm, 1)?;
    assert_eq!((dumped.level, dumped.pages), (1, 65_536), "{dumped:?}");
    assert!(dumped.warnings.concat().contains("everything is dumped (level 1): no Linux kernel"), "{dumped:?}");
    Ok(())
}

/// The dump folder cannot be made, so there is no dump; the recovery does not wait for it.
#[test]
fn unusable_dump_folder_costs_only_the_dump() -> Result<()> {
    let vm = dumping("nowhere").crash_setting("dump_folder", "/proc/nowhere").running()?;
    vm.panic()?;
    vm.wait_incarnation(2)?;
    let why = vm.wait_event("a skipped dump", event!(DumpSkipped { why } => why))?;
    assert!(why.contains("/proc/nowhere"), "{why}");
    assert_eq!(vm.status()?.dumps, []);
    Ok(())
}
