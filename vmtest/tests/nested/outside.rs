//! Run by `make test-nested`: starts the emulated host, and checks the tests inside.

use std::path::PathBuf;

use hearth_vmtest::host_reload::{Figures, KEEP_IN};
use hearth_vmtest::{Drives, Output, Result};

use crate::host::Host;

/// Number of tests in `inside`, so that a missing one is noticed.
const INSIDE: usize = 4;

#[test]
#[ignore = "make test-nested"]
fn tests_inside_pass_under_kvm() -> Result<()> {
    let host = Host::boot("kvm")?;
    let said = host.run_tests("inside::")?;
    eprintln!("{}", said.text());
    assert_eq!(said.status, 0);
    assert!(said.text().contains(&format!("ok. {INSIDE} passed; 0 failed")), "not all tests ran");
    Ok(())
}

/// Memory of the host that its kernels do not use.
const RESERVED: &str = "memmap=512M!1G";
/// Mounts the reserved memory, whose device appears some time after its driver.
const MOUNT: &str = "until [ -b /dev/pmem0 ]; do sleep 0.1; done; mkdir -p /host/run/pmem && mount -t ext4 -o dax \
/dev/pmem0 /host/run/pmem && grep pmem /proc/mounts | grep dax";
const MAKE: &str = "until [ -b /dev/pmem0 ]; do sleep 0.1; done; mkfs.ext4 -F -q -b 4096 -O ^has_journal /dev/pmem0";
const LEAVE: &str = "sync && umount /host/run/pmem && mount -o remount,ro /host/hearth";

/// Runs one test of `reload`.
fn run(host: &Host, test: &str) -> Result<Output> {
    let said = host.run_test(test)?;
    eprintln!("{}", said.text());
    Ok(said)
}

fn must(said: &Output) {
    assert!(said.status == 0 && said.text().contains("ok. 1 passed; 0 failed"));
}

#[test]
#[ignore = "make test-nested"]
fn guests_continue_under_another_host_kernel() -> Result<()> {
    let host = Host::boot_with("reload", RESERVED)?;
    host.vm().sh(MAKE)?;
    host.vm().sh(MOUNT)?;
    must(&run(&host, "reload::before")?);
    host.vm().sh(LEAVE)?;
    host.start_test("reload::kexec")?;
    host.vm().wait_boots(2)?;
    host.enter_the_image()?;
    host.vm().sh(MOUNT)?;
    let said = run(&host, "reload::after")?;
    let figures = Figures::find(&said.text());
    if let (Some(figures), Some(file)) = (&figures, std::env::var_os(KEEP_IN)) {
        figures.save(&PathBuf::from(file))?;
    }
    must(&said);
    assert!(figures.is_some_and(|figures| figures.all_well()));
    Ok(())
}
