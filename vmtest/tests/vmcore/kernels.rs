//! What is found in the memory of a guest that panicked, on each kernel.

use hearth_recovery::vmcore::linux::{Linux, log};
use hearth_recovery::vmcore::{DumpLevel, PhysicalMemory};
use hearth_vmtest::artifacts::Linux as Kernel;
use hearth_vmtest::{PlainVm, Result};

use super::dead::{Dead, work};

const MIB_PAGES: u64 = 256;

fn check(kernel: Kernel, release: &str) -> Result<()> {
    let dead = Dead::of(PlainVm::busybox_on("kernels", kernel), 512, work)?;
    let linux = Linux::find(&dead.ram, &dead.notes).unwrap();
    let names = linux.utsname().unwrap();
    assert!(names.release.starts_with(release), "{names:?}");
    assert_eq!((names.sysname.as_str(), names.nodename.as_str(), names.machine.as_str()), ("Linux", "guest", "x86_64"));

    // Guests without the driver for it hand no VMCOREINFO over.
    let found = Linux::find(&dead.ram, &[]).unwrap();
    assert_eq!(found.vmcoreinfo(), linux.vmcoreinfo());

    let lines = linux.log().unwrap();
    assert!(lines[0].text.starts_with("Linux version "), "{}", lines[0]);
    assert!(lines.iter().any(|line| line.text.starts_with("sysrq: Trigger a crash")));
    assert_eq!(log::panic_reason(&lines), Some("sysrq triggered crash"));
    assert!(lines.windows(2).all(|pair| pair[0].nanoseconds <= pair[1].nanoseconds + 1_000_000_000));

    let found = linux.classify(DumpLevel::KERNEL).unwrap();
    assert_eq!(found.counts.unjudged, 0);
    assert_eq!(found.counts.excluded() + found.kept.count(), dead.ram.ram_pages());
    for (class, pages, mib) in
        [("cache", found.counts.cache, 28), ("user", found.counts.user, 32 + 16), ("free", found.counts.free, 300)]
    {
        assert!(pages >= mib * MIB_PAGES, "{class}: {pages} pages, expected {mib} MiB: {:?}", found.counts);
    }
    Ok(())
}

#[test]
fn linux_6_1_is_understood_without_its_symbols() -> Result<()> {
    check(Kernel::Stable, "6.1.")
}

#[test]
fn linux_6_12_is_understood_without_its_symbols() -> Result<()> {
    check(Kernel::Newer, "6.12.")
}
