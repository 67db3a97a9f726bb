//! Truth: whatever the dead memory holds, the guest reads what the disk holds.
//!
//! Each test also shows that there was memory that differed from the disk, and that it was refused.

use std::hash::{BuildHasher, RandomState};

use hearth_vmtest::{Drives, Result, TestVm, TestVmBuilder, faults};

use crate::shelf::{self, Ember, ORIGINAL, PAGES_PER_FILE, SHELF, Shelf, assert_disk_reads_as_its_image};

#[test]
fn dirty_pages_are_never_reused() -> Result<()> {
    let vm = ext4("dirty", SHELF).boot()?;
    SHELF.verify(&vm)?;
    // From here on the guest writes nothing back by itself.
    vm.sh("sync; echo 0 >/proc/sys/vm/dirty_writeback_centisecs; echo 90 >/proc/sys/vm/dirty_background_ratio")?;
    let dirty = shelf::names(0..4);
    vm.sh(&format!("cd /mnt && for f in {dirty}; do dd if=/dev/zero of=$f bs=1M count=1 conv=notrunc; done"))?;
    vm.kill_qemu()?;
    vm.wait_incarnation(2)?;
    SHELF.verify(&vm)?;
    let ember = Ember::of(&vm)?;
    assert!(ember.tag_mismatch >= 4 * PAGES_PER_FILE, "{ember:?}");
    assert_disk_reads_as_its_image(&vm)
}

/// The kernel drops clean pages silently, and a process fills their frames.
#[test]
fn reused_page_frames_are_never_served() -> Result<()> {
    let shelf = Shelf { files: 64 };
    let vm = ext4("reused", shelf).boot()?;
    shelf.verify(&vm)?;
    shelf::hog(&vm)?;
    vm.panic()?;
    vm.wait_incarnation(2)?;
    shelf.verify(&vm)?;
    let ember = Ember::of(&vm)?;
    assert!(ember.tag_mismatch >= shelf.pages() / 2, "{ember:?}");
    assert_disk_reads_as_its_image(&vm)
}

/// Files whose new contents are only in the journal, while the guest also holds clean pages of their old blocks. The next mount
/// replays the journal, which makes those pages stale.
#[test]
fn blocks_changed_by_journal_replay_are_new() -> Result<()> {
    let vm = ext4("replay", SHELF).memory_mib(512).boot()?;
    shelf::mount(&vm, "data=journal")?;
    SHELF.verify(&vm)?;
    shelf::change(&vm, 0..2)?;
    vm.sh("cat /dev/vda >/dev/null")?;
    vm.kill_qemu()?;
    vm.wait_incarnation(2)?;
    SHELF.verify_changed(&vm, 2)?;
    vm.sh("dmesg | grep 'recovery complete'")?;
    let ember = Ember::of(&vm)?;
    assert!(ember.overwritten >= 2 * PAGES_PER_FILE, "{ember:?}");
    vm.kill_qemu()?;
    vm.wait_incarnation(3)?;
    SHELF.verify_changed(&vm, 2)?;
    assert_disk_reads_as_its_image(&vm)
}

#[test]
fn discarded_blocks_are_not_served() -> Result<()> {
    let vm = ext4("discards", SHELF).boot()?;
    shelf::mount(&vm, "discard")?;
    SHELF.verify(&vm)?;
    remove(&vm, 0..8)?;
    vm.kill_qemu()?;
    vm.wait_incarnation(2)?;
    // This time the ember holds the discarded blocks.
    shelf::mount(&vm, "discard")?;
    remove(&vm, 8..16)?;
    let ember = Ember::of(&vm)?;
    assert!(ember.overwritten >= 8 * PAGES_PER_FILE, "{ember:?}");
    shelf::verify(&vm, 16..SHELF.files, ORIGINAL)?;
    shelf::change(&vm, 0..16)?;
    vm.kill_qemu()?;
    vm.wait_incarnation(3)?;
    SHELF.verify_changed(&vm, 16)?;
    assert_disk_reads_as_its_image(&vm)
}

/// Removes files and tells the disk that their blocks are free.
fn remove(vm: &TestVm, files: std::ops::Range<usize>) -> Result<()> {
    let before = vm.status()?.disks[0].discards;
    vm.sh(&format!("cd /mnt && rm {} && sync && fstrim /mnt", shelf::names(files)))?;
    assert!(vm.status()?.disks[0].discards > before, "the guest discarded nothing");
    Ok(())
}

/// The second incarnation replaces files that it has not read. The third must not get the first one's contents.
#[test]
fn files_replaced_since_the_crash_are_served_new() -> Result<()> {
    let vm = TestVm::busybox("replaced").memory_mib(256).disk(SHELF.xfs()).boot()?;
    SHELF.verify(&vm)?;
    vm.kill_qemu()?;
    vm.wait_incarnation(2)?;
    shelf::mount(&vm, "rw")?;
    shelf::change(&vm, 0..12)?;
    let ember = Ember::of(&vm)?;
    assert!(ember.overwritten >= 12 * PAGES_PER_FILE, "{ember:?}");
    vm.kill_qemu()?;
    vm.wait_incarnation(3)?;
    SHELF.verify_changed(&vm, 12)?;
    // Files that the second one did not change still come from the first one's memory.
    let ember = Ember::of(&vm)?;
    assert!(ember.served >= (SHELF.files as u64 - 12) * PAGES_PER_FILE, "{ember:?}");
    assert_disk_reads_as_its_image(&vm)
}

/// Fault injection. `HEARTH_FAULT_ROUNDS` and `HEARTH_FAULT_PAGES` make it longer; `HEARTH_FAULT_SEED` repeats a run.
#[test]
fn damaged_memory_is_never_served() -> Result<()> {
    let (rounds, pages) = (from_environment("HEARTH_FAULT_ROUNDS", 3), from_environment("HEARTH_FAULT_PAGES", 4000));
    let seed = from_environment("HEARTH_FAULT_SEED", RandomState::new().hash_one("faults"));
    let shelf = Shelf { files: 96 };
    let vm = ext4("faults", shelf).boot()?;
    read_all(&vm, shelf)?;
    for round in 1..=rounds {
        let ledger_pages = vm.status()?.ledger_pages;
        // The guest must not run on with its damage: a damaged kernel may write anything to its disk.
        vm.freeze_qemu()?;
        let damage = faults::overwrite_pages(&vm.ram_file(round), pages, seed.wrapping_add(round))?;
        vm.reboot_forced()?;
        vm.wait_incarnation(round + 1)?;
        read_all(&vm, shelf)?;
        let ember = Ember::of(&vm)?;
        println!("round {round}, HEARTH_FAULT_SEED={seed}: {damage:?}, {ember:?}");
        // Disk blocks are about as large a part of the damaged pages as of all pages. On a busy host, where the keeper tests
        // pages rarely, the budget may trim some before they are tested, damaged or not.
        let expected = pages * ledger_pages / damage.resident_pages;
        let expected = expected * (ember.kept - ember.trimmed) / ember.kept;
        assert!(ember.tag_mismatch >= expected * 8 / 10, "expected {expected}, {ember:?}");
        assert!(ember.served >= shelf.pages().saturating_sub(ember.trimmed) / 2, "{ember:?}");
    }
    assert_disk_reads_as_its_image(&vm)
}

/// Reads every file, from a disk mounted read-only.
fn read_all(vm: &TestVm, shelf: Shelf) -> Result<()> {
    shelf::mount(vm, "ro")?;
    shelf::verify(vm, 0..shelf.files, ORIGINAL)
}

fn from_environment(name: &str, default: u64) -> u64 {
    match std::env::var(name) {
        Ok(text) => text.parse().unwrap_or_else(|_| panic!("{name}={text} is not a number")),
        Err(_) => default,
    }
}

fn ext4(name: &str, shelf: Shelf) -> TestVmBuilder {
    TestVm::busybox(name).memory_mib(256).disk(shelf.ext4())
}
