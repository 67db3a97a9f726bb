//! Budget: dead and new memory together never exceed the machine's budget, and blocks released for that are read from the disk
//! again.

use hearth_vmtest::residency::Watch;
use hearth_vmtest::{Disk, Drives, Result, TestVm, faults};

use crate::shelf::{self, Ember, Reads, SHELF, assert_disk_reads_as_its_image};

const RAM_MIB: u64 = 512;
/// Default of `budget_slack`.
const SLACK_PERCENT: u64 = 3;

#[test]
fn memory_never_exceeds_the_budget() -> Result<()> {
    // The second disk holds more than fits into memory.
    let vm = TestVm::busybox("budget").memory_mib(RAM_MIB).disk(SHELF.ext4()).disk(Disk::empty(2 * RAM_MIB)).boot()?;
    let watch = Watch::start(vm.memory_folder())?;
    SHELF.verify(&vm)?;
    vm.sh("cat /dev/vdb >/dev/null")?;
    vm.panic()?;
    vm.wait_incarnation(2)?;
    // Reading the guest's last blocks moves pages from the old memory to the new; then the new memory outgrows the old.
    SHELF.verify(&vm)?;
    vm.sh(&format!("dd if=/dev/vdb of=/dev/null bs=1M skip={}", 2 * RAM_MIB - 100))?;
    shelf::hog(&vm)?;
    let ember = Ember::of(&vm)?;
    assert!(ember.served > 0 && ember.trimmed > 0, "{ember:?}");
    // A second death at the worst moment: memory is full, and partly still the first guest's.
    vm.kill_qemu()?;
    vm.wait_incarnation(3)?;
    SHELF.verify(&vm)?;
    shelf::hog(&vm)?;
    let seen = watch.end()?;
    println!("{seen:?}, {} % of the RAM", seen.peak_bytes * 100 / (RAM_MIB << 20));
    assert!(seen.peak_bytes <= (RAM_MIB << 20) * (100 + SLACK_PERCENT) / 100, "{seen:?}");
    assert!(seen.peak_bytes >= (RAM_MIB << 20) * 9 / 10, "the memory was never full: {seen:?}");
    Ok(())
}

/// With 3 GiB, the upper third of the RAM file is at guest addresses above 4 GiB, and Linux fills that first.
#[test]
fn memory_above_4_gib_is_kept_too() -> Result<()> {
    let vm = TestVm::busybox("large").memory_mib(3072).disk(SHELF.ext4()).boot()?;
    let first = SHELF.verify_counted(&vm, Reads::of(&vm)?)?;
    let high_bytes = faults::resident_bytes(&vm.ram_file(1), 2 << 30..3 << 30)?;
    assert!(high_bytes >= SHELF.bytes(), "only {high_bytes} bytes above 4 GiB are in use");
    let before = Reads::of(&vm)?;
    vm.panic()?;
    vm.wait_incarnation(2)?;
    let again = SHELF.verify_counted(&vm, before)?;
    assert!(again.image_bytes <= first.image_bytes / 50, "first {first:?}, again {again:?}");
    assert!(Ember::of(&vm)?.served >= SHELF.pages() * 98 / 100);
    assert_disk_reads_as_its_image(&vm)
}
