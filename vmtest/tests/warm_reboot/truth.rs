//! Truth: whatever is in the dead memory, the guest reads what the disk holds.
//!
//! Each test also shows that it was on trial: that memory unlike the disk was there, and was refused.

use std::hash::{BuildHasher, RandomState};

use hearth_vmtest::{Drives, Result, TestVm, TestVmBuilder, faults};

use crate::shelf::{self, Ember, ORIGINAL, PAGES_PER_FILE, SHELF, Shelf, assert_disk_reads_as_its_image, number};

#[test]
fn dirty_pages_are_never_reused() -> Result<()> {
    let vm = ext4("dirty", SHELF).boot()?;
    SHELF.verify(&vm)?;
    // From here on the guest writes nothing to the disk by itself.
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

/// The kernel drops clean pages without a word, and a process of the guest fills their frames.
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

/// Files whose new contents are in the journal only, while the guest also holds clean pages of where they belong, as
/// the disk had them: the next mount replays the journal, and from then on those pages are wrong.
#[test]
fn blocks_changed_by_a_journal_replay_are_served_new() -> Result<()> {
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
    // This time the ember holds what is discarded.
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
    let before = number(&vm.status()?, "/disks/0/discards");
    vm.sh(&format!("cd /mnt && rm {} && sync && fstrim /mnt", shelf::names(files)))?;
    let after = number(&vm.status()?, "/disks/0/discards");
    assert!(after > before, "the guest discarded nothing");
    Ok(())
}

/// The second incarnation replaces files that it has not read: the third must not see what the first one knew of them.
#[test]
fn files_replaced_while_the_ember_glows_are_served_new() -> Result<()> {
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
    // What the second one left alone comes from the first one's memory still.
    let ember = Ember::of(&vm)?;
    assert!(ember.served >= (SHELF.files as u64 - 12) * PAGES_PER_FILE, "{ember:?}");
    assert_disk_reads_as_its_image(&vm)
}

/// Fault injection. `HEARTH_FAULT_ROUNDS` and `HEARTH_FAULT_PAGES` make it longer, `HEARTH_FAULT_SEED` repeats a run.
#[test]
fn damaged_memory_is_never_served() -> Result<()> {
    let (rounds, pages) = (from_environment("HEARTH_FAULT_ROUNDS", 3), from_environment("HEARTH_FAULT_PAGES", 4000));
    let seed = from_environment("HEARTH_FAULT_SEED", RandomState::new().hash_one("faults"));
    let shelf = Shelf { files: 96 };
    let vm = ext4("faults", shelf).boot()?;
    read_all(&vm, shelf)?;
    for round in 1..=rounds {
        let ledger_pages = number(&vm.status()?, "/ledger_pages");
        // The guest must not act on its damage: a mad kernel may write anything to its disk.
        vm.freeze_qemu()?;
        let damage = faults::overwrite_pages(&vm.ram_file(round), pages, seed.wrapping_add(round))?;
        vm.reboot_forced()?;
        vm.wait_incarnation(round + 1)?;
        read_all(&vm, shelf)?;
        let ember = Ember::of(&vm)?;
        println!("round {round}, HEARTH_FAULT_SEED={seed}: {damage:?}, {ember:?}");
        // Of the damaged pages about as large a part held disk blocks as of all pages. On a busy host, where the keeper's looks
        // are far apart, the budget may take some before they are tested, damaged or not.
        let expected = pages * ledger_pages / damage.resident_pages;
        let expected = expected * (ember.kept - ember.trimmed) / ember.kept;
        assert!(ember.tag_mismatch >= expected * 8 / 10, "expected {expected}, {ember:?}");
        assert!(ember.served >= shelf.pages().saturating_sub(ember.trimmed) / 2, "{ember:?}");
    }
    assert_disk_reads_as_its_image(&vm)
}

/// Every file, from a disk that the guest cannot write to.
fn read_all(vm: &TestVm, shelf: Shelf) -> Result<()> {
    shelf::mount(vm, "ro")?;
    shelf::verify(vm, 0..shelf.files, ORIGINAL)
}

fn from_environment(name: &str, default: u64) -> u64 {
    match std::env::var(name) {
        Ok(text) => text.parse().unwrap_or_else(|_| panic!("{name}={text} is no number")),
        Err(_) => default,
    }
}

fn ext4(name: &str, shelf: Shelf) -> TestVmBuilder {
    TestVm::busybox(name).memory_mib(256).disk(shelf.ext4())
}
