//! Every way in which a guest can crash: the next one serves, and the dump says why the last one died.

use hearth_vmtest::residency::Watch;
use hearth_vmtest::{Disk, Drives, Result, TestVm, TestVmBuilder};
use serde_json::Value;

use crate::dump::{self, assert_nothing_held, dumping, file_of, wait_complete};

const PANIC: (&str, &str) = ("panic", "sysrq triggered crash");

/// Crashes it and sees it recover with a dump that gives this cause and reason.
fn is_dumped(vm: &TestVm, crash: impl Fn(&TestVm) -> Result<()>, (cause, reason): (&str, &str)) -> Result<Value> {
    let nonce = vm.nonce()?;
    crash(vm)?;
    assert_ne!(vm.wait_incarnation(2)?.nonce, nonce);
    let complete = wait_complete(vm, 1)?;
    assert_eq!(dump::files(&vm.dump_folder()), [file_of(&complete)]);
    assert_nothing_held(vm)?;
    let dumped = dump::status(vm, 1)?;
    assert_eq!((&dumped["state"], &dumped["percent"]), (&"complete".into(), &100.0.into()), "{dumped}");
    assert_eq!(dumped["pages"], dumped["pages_written"]);
    assert!(dumped["panic"].as_str().unwrap_or_default().contains(reason), "{dumped}");
    let recovery = &vm.explain()?["recovery"];
    assert_eq!((&recovery["cause"], &recovery["warm"]), (&cause.into(), &true.into()), "{recovery}");
    assert_eq!(recovery["dump"]["file"], dumped["file"]);
    Ok(dumped)
}

fn panics_and_is_dumped(builder: TestVmBuilder) -> Result<Value> {
    let vm = builder.disk(Disk::empty(8)).boot()?;
    let watch = Watch::start(vm.memory_folder())?;
    let dumped = is_dumped(&vm, TestVm::panic, PANIC)?;
    assert_eq!(dumped["warnings"], Value::Null, "{dumped}");
    let seen = watch.end()?;
    assert!(seen.peak_bytes <= (256 << 20) * 103 / 100, "over budget: {seen:?}");
    // With what the dump had in its hands, which no file shows.
    let memory = &vm.status()?["memory"];
    assert!(memory["peak_bytes"].as_u64() <= memory["budget_bytes"].as_u64(), "over budget: {memory}");
    assert_eq!(dump::last_words(&file_of(&dumped)).as_deref(), Some(PANIC.1));
    let phases = vm.explain()?["recovery"]["phases"].clone();
    let named = |name: &str| phases.as_array().into_iter().flatten().any(|phase| phase["phase"] == name);
    assert!(["harvest", "plan", "write", "finish", "launch"].into_iter().all(named), "{phases}");
    Ok(dumped)
}

#[test]
fn a_panic_is_dumped_beside_the_next_guest() -> Result<()> {
    let dumped = panics_and_is_dumped(dumping("panic"))?;
    assert_eq!((&dumped["level"], &dumped["excluded"]["unjudged"]), (&31.into(), &0.into()), "{dumped}");
    assert!(dumped["excluded"]["free"].as_u64() > Some(10_000), "{dumped}");
    Ok(())
}

#[test]
fn a_panic_of_a_newer_kernel_is_dumped() -> Result<()> {
    let builder = TestVm::busybox_on_linux_6_12("newer").memory_mib(256).dumps();
    let dumped = panics_and_is_dumped(builder)?;
    assert_eq!((&dumped["level"], &dumped["excluded"]["unjudged"]), (&31.into(), &0.into()), "{dumped}");
    Ok(())
}

/// Memory comes free in one step, but is not held a second time while it is written.
#[test]
fn a_chunk_larger_than_the_machine_stays_within_its_budget() -> Result<()> {
    panics_and_is_dumped(dumping("chunk").crash_setting("level", 1).crash_setting("chunk", "1GiB")).map(drop)
}

#[test]
fn every_compression_and_format_is_written() -> Result<()> {
    for (format, compression) in [("kdump", "lzo"), ("kdump", "zlib"), ("kdump", "none"), ("elf", "none")] {
        let builder = dumping(&format!("{format}-{compression}")).crash_setting("format", format);
        panics_and_is_dumped(builder.crash_setting("compression", compression).crash_setting("threads", 1))?;
    }
    Ok(())
}

#[test]
fn an_nmi_is_dumped() -> Result<()> {
    let vm = dumping("nmi").boot()?;
    vm.sh("echo 1 >/proc/sys/kernel/unknown_nmi_panic")?;
    is_dumped(&vm, TestVm::crash, ("panic", "NMI")).map(drop)
}

#[test]
fn running_out_of_memory_is_dumped() -> Result<()> {
    let vm = dumping("oom").boot()?;
    vm.sh("echo 2 >/proc/sys/vm/panic_on_oom")?;
    is_dumped(&vm, |vm| vm.guest().start("tail /dev/zero").map(drop), ("panic", "Out of memory")).map(drop)
}

#[test]
fn a_hung_task_is_dumped() -> Result<()> {
    let vm = dumping("hung").disk(Disk::ext4(64)).boot()?;
    vm.sh("mount -t ext4 /dev/vda /mnt; cd /proc/sys/kernel; echo 1 >hung_task_panic; echo 2 >hung_task_timeout_secs")?;
    let hang = |vm: &TestVm| vm.guest().start("fsfreeze --freeze /mnt; touch /mnt/never").map(drop);
    is_dumped(&vm, hang, ("panic", "hung_task: blocked tasks")).map(drop)
}

/// Debian's cloud kernel has no driver for the device. A shell writes to its registers what a driver would: two stages of
/// a second each, no interrupt after the first, go. Nobody feeds it.
const START_WATCHDOG: &str = "device=$(dirname $(grep -l 0x25ab /sys/bus/pci/devices/*/device)); \
    printf '\\007\\000' | dd of=$device/config bs=2 seek=48 count=1 conv=notrunc; \
    printf '\\002' | dd of=$device/config bs=1 seek=104 count=1 conv=notrunc";

#[test]
fn a_watchdog_that_nobody_feeds_is_dumped() -> Result<()> {
    let action: toml::Table = [("action".to_owned(), "crash".into())].into_iter().collect();
    let vm = dumping("watchdog").setting("watchdog", action).boot()?;
    let dumped = is_dumped(&vm, |vm| vm.guest().start(START_WATCHDOG).map(drop), ("watchdog", ""))?;
    assert_eq!((&dumped["warnings"], &dumped["level"]), (&Value::Null, &31.into()), "{dumped}");
    vm.wait_event("its word", |event| event["kind"] == "watchdog_expired" && event["action"] == "pause").map(drop)
}

/// The guest is gone with all its registers; the kernel's own note is found in its memory.
#[test]
fn the_end_of_qemu_is_dumped_without_registers() -> Result<()> {
    let vm = dumping("killed").boot()?;
    let dumped = is_dumped(&vm, TestVm::kill_qemu, ("qemu_died", ""))?;
    let warnings = dumped["warnings"].to_string();
    assert!(warnings.contains("no registers: QEMU had exited"), "{dumped}");
    assert_eq!((&dumped["level"], &dumped["excluded"]["unjudged"]), (&31.into(), &0.into()), "{dumped}");
    Ok(())
}

#[test]
fn a_guest_that_is_no_linux_is_dumped_whole() -> Result<()> {
    // SeaBIOS finds nothing to boot from on an empty disk.
    let boot: toml::Table = [("firmware".to_owned(), "bios".into())].into_iter().collect();
    let vm = dumping("bios").setting("boot", boot).disk(Disk::empty(8)).start()?;
    vm.wait_event("the first life", |event| event["kind"] == "incarnation_started")?;
    vm.kill_qemu()?;
    wait_complete(&vm, 1)?;
    let dumped = dump::status(&vm, 1)?;
    assert_eq!((&dumped["level"], &dumped["pages"]), (&1.into(), &(65_536).into()), "{dumped}");
    assert!(dumped["warnings"].to_string().contains("everything is dumped (level 1): no Linux kernel"), "{dumped}");
    Ok(())
}

/// Nobody asked for a dump, or it cannot be: the recovery does not wait for that.
#[test]
fn a_folder_that_cannot_be_used_costs_the_dump_and_not_the_recovery() -> Result<()> {
    let vm = dumping("nowhere").crash_setting("dump_folder", "/proc/nowhere").boot()?;
    vm.panic()?;
    vm.wait_incarnation(2)?;
    let skipped = vm.wait_event("word of it", |event| event["kind"] == "dump_skipped")?;
    assert!(skipped["why"].as_str().unwrap_or_default().contains("/proc/nowhere"), "{skipped}");
    assert_eq!(vm.status()?["dumps"], serde_json::json!([]));
    Ok(())
}
