//! Ways: however an incarnation ends, its cache is kept for the next one, unless a cold reboot was asked for.

use hearth_api::{EndCause, Recovery};
use hearth_vmtest::{Drives, Result, TestVm, TestVmBuilder, event};

use crate::shelf::{Ember, Reads, SHELF};

type Way = fn(&TestVm) -> Result<()>;

/// A way to end an incarnation, and its cause in `hearth status`.
#[derive(Clone, Copy)]
struct End {
    way: Way,
    cause: EndCause,
}

const REBOOT_FROM_INSIDE: End = End { way: |vm| vm.guest().start("reboot -f").map(drop), cause: EndCause::GuestReset };
const REBOOT_ASKED_FOR: End = End { way: TestVm::reboot, cause: EndCause::OperatorReboot };
const REBOOT_FORCED: End = End { way: TestVm::reboot_forced, cause: EndCause::OperatorReboot };
const PANIC: End = End { way: Drives::panic, cause: EndCause::Panic };
const NMI: End = End { way: TestVm::crash, cause: EndCause::Panic };
const QEMU_KILLED: End = End { way: TestVm::kill_qemu, cause: EndCause::QemuDied };

#[test]
fn reboot_from_inside_keeps_the_cache() -> Result<()> {
    keeps_the_cache(ext4("inside"), REBOOT_FROM_INSIDE)
}

#[test]
fn requested_reboot_keeps_the_cache() -> Result<()> {
    keeps_the_cache(ext4("asked"), REBOOT_ASKED_FOR)
}

#[test]
fn a_forced_reboot_keeps_the_cache() -> Result<()> {
    keeps_the_cache(ext4("forced"), REBOOT_FORCED)
}

#[test]
fn a_panic_keeps_the_cache() -> Result<()> {
    keeps_the_cache(ext4("panic"), PANIC)
}

#[test]
fn a_crash_drill_keeps_the_cache() -> Result<()> {
    keeps_the_cache(ext4("drill"), NMI)
}

#[test]
fn killed_qemu_keeps_the_cache() -> Result<()> {
    keeps_the_cache(ext4("killed"), QEMU_KILLED)
}

/// The kernel is configured to reboot by triple fault. QEMU reports it like any other reset.
#[test]
fn a_triple_fault_keeps_the_cache() -> Result<()> {
    keeps_the_cache(ext4("triple").cmdline("reboot=t"), REBOOT_FROM_INSIDE)
}

#[test]
fn cache_survives_every_end_in_turn_on_xfs() -> Result<()> {
    let vm = TestVm::busybox("xfs").memory_mib(256).disk(SHELF.xfs()).boot()?;
    let first = SHELF.verify_counted(&vm, Reads::of(&vm)?)?;
    let ways = [REBOOT_FROM_INSIDE, REBOOT_ASKED_FOR, REBOOT_FORCED, PANIC, NMI, QEMU_KILLED];
    for (end, incarnation) in ways.into_iter().zip(2..) {
        is_warm_after(&vm, end, incarnation, first)?;
    }
    Ok(())
}

fn ext4(name: &str) -> TestVmBuilder {
    TestVm::busybox(name).memory_mib(256).disk(SHELF.ext4())
}

fn keeps_the_cache(builder: TestVmBuilder, end: End) -> Result<()> {
    let vm = builder.boot()?;
    let first = SHELF.verify_counted(&vm, Reads::of(&vm)?)?;
    assert!(first.image_bytes >= SHELF.bytes(), "{first:?}");
    is_warm_after(&vm, end, 2, first)
}

fn is_warm_after(vm: &TestVm, end: End, incarnation: u32, first: Reads) -> Result<()> {
    let (before, nonce) = (Reads::of(vm)?, vm.nonce()?);
    (end.way)(vm)?;
    let ready = vm.wait_incarnation(incarnation.into())?;
    assert_ne!(ready.nonce, nonce, "a new incarnation, not the old one resumed");
    assert_eq!(vm.nonce()?, ready.nonce);
    let again = SHELF.verify_counted(vm, before)?;
    // The file system's own blocks change with every mount, so a few are always reread.
    assert!(again.image_bytes <= first.image_bytes / 50, "first {first:?}, again {again:?}");
    let ember = Ember::of(vm)?;
    assert!(ember.kept >= ember.served && ember.served >= SHELF.pages() * 98 / 100, "{ember:?}");
    is_explained(vm, end, incarnation)
}

fn recovery(vm: &TestVm) -> Result<Recovery> {
    Ok(vm.explain()?.recovery.expect("the machine has recovered"))
}

/// Asserts that `hearth explain` lists the recovery's phases.
fn is_explained(vm: &TestVm, end: End, incarnation: u32) -> Result<()> {
    vm.wait_event("the end of settling", event!(|event| EmberSettled if event.incarnation == incarnation))?;
    assert_eq!(vm.status()?.cause_of_last_end, Some(end.cause));
    let recovery = recovery(vm)?;
    assert_eq!((recovery.warm, recovery.cause, recovery.incarnation), (true, end.cause, incarnation), "{recovery:?}");
    assert!(recovery.pages_kept >= SHELF.pages(), "{recovery:?}");
    let phases = recovery.phases.iter().map(|phase| &*phase.phase);
    // Settling goes on beside the others, and ends before the launch or after it.
    let (settled, phases): (Vec<_>, Vec<_>) = phases.partition(|phase| *phase == "settle");
    assert_eq!((phases, settled.len()), (vec!["drain", "bank", "attach", "launch"], 1), "{recovery:?}");
    Ok(())
}

#[test]
fn a_cold_reboot_serves_nothing_from_memory() -> Result<()> {
    let vm = ext4("cold").boot()?;
    is_cold_after(&vm, TestVm::reboot_cold)?;
    assert_eq!(recovery(&vm)?.why_cold.as_deref(), Some("requested by the operator"));
    Ok(())
}

#[test]
fn without_an_ember_nothing_is_served_from_memory() -> Result<()> {
    let vm = ext4("off").without_ember().boot()?;
    is_cold_after(&vm, TestVm::kill_qemu)?;
    assert_eq!(recovery(&vm)?.why_cold.as_deref(), Some("ember = \"off\""));
    Ok(())
}

fn is_cold_after(vm: &TestVm, way: Way) -> Result<()> {
    SHELF.verify(vm)?;
    let (before, nonce) = (Reads::of(vm)?, vm.nonce()?);
    way(vm)?;
    assert_ne!(vm.wait_incarnation(2)?.nonce, nonce);
    let again = SHELF.verify_counted(vm, before)?;
    assert!(again.warm_bytes == 0 && again.image_bytes >= SHELF.bytes(), "{again:?}");
    let ember = Ember::of(vm)?;
    assert_eq!((ember.kept, ember.served), (0, 0));
    assert!(!recovery(vm)?.warm);
    Ok(())
}

/// Two incarnations die before their guests read anything; the fourth still gets the first one's blocks.
#[test]
fn crashes_during_boot_leave_the_older_ember() -> Result<()> {
    let vm = ext4("again").boot()?;
    let first = SHELF.verify_counted(&vm, Reads::of(&vm)?)?;
    let before = Reads::of(&vm)?;
    vm.kill_qemu()?;
    for incarnation in [2, 3] {
        vm.wait_event("the next incarnation", event!(|event| IncarnationStarted if event.incarnation == incarnation))?;
        vm.kill_qemu()?;
    }
    vm.wait_incarnation(4)?;
    let again = SHELF.verify_counted(&vm, before)?;
    assert!(again.image_bytes <= first.image_bytes / 50, "first {first:?}, again {again:?}");
    assert!(Ember::of(&vm)?.served >= SHELF.pages() * 98 / 100);
    Ok(())
}
