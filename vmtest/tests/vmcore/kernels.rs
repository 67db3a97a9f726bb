//! Information found in the memory of a guest that panicked, on each kernel.

use hearth_recovery::vmcore::linux::{Linux, log};
use hearth_recovery::vmcore::{DumpLevel, PhysicalMemory};
use hearth_vmtest::artifacts::Linux as Kernel;
use hearth_vmtest::{Drives, PlainVm, Result, artifacts, images};

use super::dead::{Dead, work};

const MIB_PAGES: u64 = 256;

fn check(kernel: Kernel, release: &str) -> Result<()> {
    let dead = Dead::of(PlainVm::busybox_on("kernels", kernel), 512, work)?;
    let linux = Linux::find(&dead.ram, &dead.notes).unwrap();
    let names = linux.utsname().unwrap();
    assert!(names.release.starts_with(release), "{names:?}");
    assert_eq!((names.sysname.as_str(), names.nodename.as_str(), names.machine.as_str()), ("Linux", "guest", "x86_64"));

    // Guests without the driver pass no VMCOREINFO to QEMU.
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
fn linux_6_1_is_parsed_without_symbols() -> Result<()> {
    check(Kernel::Stable, "6.1.")
}

#[test]
fn linux_6_12_is_parsed_without_symbols() -> Result<()> {
    check(Kernel::Newer, "6.12.")
}

/// The kernel takes these pages out of use with their contents: their descriptors are not damage.
#[test]
fn soft_offlined_pages_are_recognised() -> Result<()> {
    // One page in each MiB: free pages, page cache, process memory. The kernel refuses its own.
    let offline = "for mib in $(seq 64 480); do \
                   echo $((mib * 1048576 + 409600)) >/sys/devices/system/memory/soft_offline_page; done 2>/dev/null; \
                   sed -n 's/HardwareCorrupted: *\\([0-9]*\\) kB/\\1/p' /proc/meminfo";
    let mut pages = 0;
    let dead = Dead::of(PlainVm::busybox_on("offlined", Kernel::Newer), 512, |vm| {
        work(vm)?;
        pages = vm.sh(offline)?.trim().parse::<u64>().expect("a number of KiB") / 4;
        Ok(())
    })?;
    assert!(pages > 100, "{pages} pages were taken out of use");
    let linux = Linux::find(&dead.ram, &dead.notes).unwrap();
    for bits in 2..32 {
        let found = linux.classify(DumpLevel::new(bits).unwrap()).unwrap().counts;
        assert_eq!(found.unjudged, 0, "{bits}: {found:?}");
        // Some still look like their old class, which levels may exclude as well.
        assert!(found.poisoned <= pages && found.excluded() >= pages, "{bits}: {pages} pages, {found:?}");
    }
    Ok(())
}

/// The first kernel's memory is mostly unchanged after kexec; only the processors' registers show that it no longer runs.
#[test]
fn old_kernel_after_kexec_is_ignored() -> Result<()> {
    let (home, next) = (tempfile::tempdir().unwrap(), artifacts::busybox_on(Kernel::Newer)?);
    let file =
        |path: &str, of: &std::path::Path| images::File { path: path.into(), contents: std::fs::read(of).unwrap() };
    let (system, script) = (home.path().join("system.img"), home.path().join("script.img"));
    images::ext4(&system, 64, &[file("vmlinuz", &next.kernel), file("initrd", &next.initrd)])?;
    std::fs::write(&script, format!("{:512}", "echo c >/proc/sysrq-trigger; exit 0\n#")).unwrap();
    // The driver that would pass its own note to QEMU is disabled.
    let cmdline = "console=ttyS0 module_blacklist=qemu_fw_cfg boot_script=vdb";
    let vm = PlainVm::busybox_on("kexec", Kernel::Stable).drive(&system, "").drive(&script, "");
    let dead = Dead::that_died(vm, 512, |vm| {
        vm.sh("mkdir /system && mount /dev/vda /system")?;
        vm.sh(&format!("(sleep 1; probe kexec /system/vmlinuz /system/initrd '{cmdline}') &")).map(drop)
    })?;
    let linux = Linux::find(&dead.ram, &dead.notes).unwrap();
    assert!(linux.vmcoreinfo().release().starts_with("6.12."), "{}", linux.vmcoreinfo().release());
    assert_eq!(log::panic_reason(&linux.log().unwrap()), Some("sysrq triggered crash"));
    Ok(())
}
