//! Refill: the files that the last guest had cached are in the next guest's cache before anybody reads them.

use std::time::{Duration, Instant};

use hearth_api::EventKind;
use hearth_vmtest::artifacts::Linux;
use hearth_vmtest::{Disk, Drives, Result, TestVm, TestVmBuilder, event, patience};
use toml::Table;

use crate::shelf::{CHANGED, Reads, SHELF, Shelf, change, hog, mount, names, verify};

fn machine(name: &str) -> TestVmBuilder {
    with_refill(TestVm::busybox(name)).disk(SHELF.ext4())
}

fn with_refill(builder: TestVmBuilder) -> TestVmBuilder {
    builder.memory_mib(512).setting("refill", "on")
}

/// Boots a guest that has read all files, and makes it end; the next one has mounted its disk.
fn reborn(builder: TestVmBuilder, end: fn(&TestVm) -> Result<()>) -> Result<TestVm> {
    let vm = builder.boot()?;
    SHELF.verify(&vm)?;
    end(&vm)?;
    vm.wait_incarnation(2)?;
    mount(&vm, "rw")?;
    Ok(vm)
}

/// Runs the helper, and waits until what it has asked for has arrived.
fn refill(vm: &TestVm) -> Result<String> {
    let before = Reads::of(vm)?;
    let said = vm.sh("hearth-refill")?;
    wait_arrived(vm, before, &said)?;
    let status = vm.status()?.refill.expect("the machine has a cache map");
    // A keeper that took the guest over does not know what it has read before.
    assert!(status.incarnation_read_bytes.is_none_or(|bytes| bytes >= status.map_bytes), "{status:?}");
    Ok(said)
}

fn wait_arrived(vm: &TestVm, before: Reads, said: &str) -> Result<()> {
    let deadline = Instant::now() + patience(20);
    loop {
        let read = Reads::of(vm)?.since(before);
        if read.warm_bytes + read.image_bytes >= SHELF.bytes() {
            return Ok(());
        }
        assert!(Instant::now() < deadline, "{read:?}, and the helper says: {said}");
        std::thread::sleep(Duration::from_millis(50));
    }
}

#[track_caller]
fn assert_cached(vm: &TestVm) -> Result<()> {
    let read = SHELF.verify_counted(vm, Reads::of(vm)?)?;
    assert!(read.warm_bytes + read.image_bytes <= SHELF.bytes() / 50, "all files are in the cache: {read:?}");
    Ok(())
}

fn is_refilled_after(builder: TestVmBuilder, end: fn(&TestVm) -> Result<()>) -> Result<()> {
    let vm = reborn(builder, end)?;
    vm.wait_event("the cache map", event!(CacheMapRead { pages, .. } if pages >= SHELF.pages()))?;
    let before = Reads::of(&vm)?;
    refill(&vm)?;
    assert!(vm.status()?.refill.is_some_and(|refill| refill.incarnation_read_bytes.is_some()), "one keeper saw it all");
    let read = Reads::of(&vm)?.since(before);
    assert!(read.image_bytes <= SHELF.bytes() / 50, "the host's memory has the files: {read:?}");
    assert_cached(&vm)
}

#[test]
fn files_of_ext4_are_cached_after_a_panic() -> Result<()> {
    is_refilled_after(machine("ext4"), Drives::panic)
}

/// The memory of the dead guest was full, so the next one waits for the dump to release some, while the map is read.
#[test]
fn map_of_a_full_guest_is_read_beside_its_dump() -> Result<()> {
    const FULL: Shelf = Shelf { files: 320 };
    let vm = with_refill(TestVm::busybox("dumped")).disk(FULL.ext4()).dumps().boot()?;
    FULL.verify(&vm)?;
    let known = vm.status()?.ledger_pages;
    vm.panic()?;
    vm.wait_incarnation(2)?;
    let of = |event: &EventKind| match event {
        EventKind::CacheMapRead { pages, .. } => Some(Ok(*pages)),
        EventKind::CacheMapMissing { why } => Some(Err(why.clone())),
        _ => None,
    };
    let listed = vm.wait_event("the cache map", |record| of(&record.event))?;
    assert!(listed.as_ref().is_ok_and(|pages| *pages > known / 2), "{listed:?} of {known} pages");
    mount(&vm, "rw")?;
    vm.sh("hearth-refill")?;
    vm.wait_event("the dump", event!(DumpComplete))?;
    FULL.verify(&vm)
}

#[test]
fn files_of_xfs_are_cached_after_a_sudden_reboot() -> Result<()> {
    is_refilled_after(with_refill(TestVm::busybox("xfs")).disk(SHELF.xfs()), |vm| {
        vm.guest().start("reboot -f").map(drop)
    })
}

#[test]
fn files_are_cached_after_the_death_of_qemu_with_linux_6_12() -> Result<()> {
    let builder = with_refill(TestVm::busybox_on_linux_6_12("newer")).disk(SHELF.ext4());
    is_refilled_after(builder, TestVm::kill_qemu)
}

#[test]
fn files_of_btrfs_are_cached_after_the_death_of_qemu_with_linux_6_12() -> Result<()> {
    let builder = with_refill(TestVm::busybox_with_btrfs("newer-btrfs", Linux::Newer)).disk(SHELF.btrfs());
    is_refilled_after(builder, TestVm::kill_qemu)
}

/// Each subvolume of btrfs numbers its inodes by itself, and may be mounted when the helper already runs. Files that share their
/// blocks have pages of their own.
#[test]
fn copies_in_a_subvolume_are_cached_when_that_is_mounted() -> Result<()> {
    let vm = with_refill(TestVm::busybox_with_btrfs("subvolume", Linux::Stable)).disk(SHELF.btrfs()).boot()?;
    mount(&vm, "rw")?;
    let all = names(0..SHELF.files);
    vm.sh(&format!("cd /mnt && btrfs subvolume create apart && cp --reflink=always {all} apart && sync"))?;
    vm.sh(&format!("echo 3 >/proc/sys/vm/drop_caches && cd /mnt/apart && cat {all} >/dev/null"))?;
    vm.panic()?;
    vm.wait_incarnation(2)?;
    mount(&vm, "rw")?;
    let before = Reads::of(&vm)?;
    vm.sh("mkdir /apart; hearth-refill >/tmp/said & sleep 1")?;
    assert_eq!(vm.sh("cat /tmp/said")?, "", "the helper waits for the subvolume");
    // While it waits, it keeps nothing busy.
    vm.sh("umount /mnt && mount -o noatime,subvol=apart /dev/vda /apart")?;
    wait_arrived(&vm, before, "")?;
    let said = vm.sh("until [ -s /tmp/said ]; do sleep 0.1; done; cat /tmp/said")?;
    assert!(!said.contains("are gone"), "{said}");
    let before = Reads::of(&vm)?;
    vm.sh(&format!("cd /apart && for f in {all}; do probe verify $f {} || exit; done", crate::shelf::ORIGINAL))?;
    let read = Reads::of(&vm)?.since(before);
    assert!(read.warm_bytes + read.image_bytes <= SHELF.bytes() / 50, "the copies are in the cache: {read:?}");
    SHELF.verify(&vm)
}

#[test]
fn files_that_have_changed_since_are_read_as_they_are() -> Result<()> {
    let vm = reborn(machine("changed"), Drives::panic)?;
    change(&vm, 0..4)?;
    vm.sh(&format!("cd /mnt && rm {} && truncate -s 5000 f010 && mv f011 f012", names(4..8)))?;
    vm.sh("hearth-refill")?;
    verify(&vm, 0..4, CHANGED)?;
    verify(&vm, 13..SHELF.files, crate::shelf::ORIGINAL)
}

/// Blocks are kept in memory if they are whole aligned 4 KiB, and small ones need not be.
#[test]
fn files_of_small_blocks_are_read_as_they_are() -> Result<()> {
    let vm = reborn(with_refill(TestVm::busybox("small")).disk(SHELF.ext4_of_small_blocks()), Drives::panic)?;
    vm.sh("hearth-refill")?;
    SHELF.verify(&vm)
}

#[test]
fn files_are_right_after_a_guest_with_full_memory() -> Result<()> {
    let vm = machine("hogged").boot()?;
    SHELF.verify(&vm)?;
    hog(&vm)?;
    vm.panic()?;
    vm.wait_incarnation(2)?;
    mount(&vm, "rw")?;
    vm.sh("hearth-refill")?;
    SHELF.verify(&vm)
}

/// The unit starts before the boot has mounted most file systems. While it waits for one, it keeps no other busy.
#[test]
fn file_system_is_read_when_it_is_mounted_at_last() -> Result<()> {
    let vm = reborn(machine("late").disk(Disk::ext4(16)), Drives::panic)?;
    vm.sh("umount /mnt && mkdir /other && mount -t ext4 /dev/vdb /other")?;
    let before = Reads::of(&vm)?;
    vm.sh("hearth-refill >/tmp/said & sleep 1; umount /other")?;
    assert_eq!(vm.sh("cat /tmp/said")?, "", "the helper waits for the file system");
    mount(&vm, "rw")?;
    wait_arrived(&vm, before, "")?;
    let said = vm.sh("until [ -s /tmp/said ]; do sleep 0.1; done; cat /tmp/said")?;
    assert!(!said.contains("are gone"), "{said}");
    assert_cached(&vm)
}

#[test]
fn nothing_is_read_where_memory_is_full() -> Result<()> {
    let vm = reborn(machine("full"), Drives::panic)?;
    hog(&vm)?;
    let said = vm.sh("hearth-refill")?;
    assert!(said.contains("stopped because memory is full"), "{said}");
    Ok(())
}

#[test]
fn first_and_cold_boots_have_nothing_to_read() -> Result<()> {
    let vm = machine("cold").boot()?;
    let said = vm.sh("hearth-refill")?;
    assert!(said.contains("nothing to bring back"), "after a first boot: {said}");
    vm.reboot_cold()?;
    vm.wait_incarnation(2)?;
    let said = vm.sh("hearth-refill")?;
    assert!(said.contains("nothing to bring back"), "after a cold reboot: {said}");
    let has_map = |event: &EventKind| matches!(event, EventKind::CacheMapRead { .. });
    assert!(!vm.events().iter().any(|record| has_map(&record.event)));
    Ok(())
}

#[test]
fn machines_without_refill_have_no_map() -> Result<()> {
    let vm = TestVm::busybox("off").running()?;
    let said = vm.sh("hearth-refill")?;
    assert!(said.contains("nothing to do"), "{said}");
    Ok(())
}

/// What the boot reads until it is ready stays in memory apart from the ember, and that is all that was brought back.
#[test]
fn blocks_of_the_boot_set_are_in_the_next_map() -> Result<()> {
    let remount = [("limit", "64MiB"), ("ready_after", "1d")].map(|(key, value)| (key.to_owned(), value.into()));
    let vm = reborn(machine("remount").setting("remount", remount.into_iter().collect::<Table>()), Drives::panic)?;
    refill(&vm)?;
    vm.cli(&["ready", vm.name()])?;
    vm.wait_status("the files in the boot set", |status| status.memory.boot_set_bytes >= SHELF.bytes())?;
    vm.panic()?;
    vm.wait_incarnation(3)?;
    let read = event!(|record| CacheMapRead { pages, .. } if record.incarnation == 3 => pages);
    let pages = vm.wait_event("the next map", read)?;
    assert!(pages >= SHELF.pages(), "{pages} of {} pages", SHELF.pages());
    mount(&vm, "rw")?;
    refill(&vm)?;
    let status = vm.status()?.refill.expect("the machine has a cache map");
    assert!(status.incarnation_read_bytes < Some(status.read_bytes), "its predecessor read some of that: {status:?}");
    assert_cached(&vm)
}

#[test]
fn restored_machine_gets_its_map_at_its_next_boot() -> Result<()> {
    let vm = machine("restored").running()?;
    let said = vm.sh("hearth-refill")?;
    assert!(said.contains("nothing to bring back"), "{said}");
    SHELF.verify(&vm)?;
    vm.panic()?;
    vm.wait_incarnation(2)?;
    mount(&vm, "rw")?;
    refill(&vm)?;
    assert_cached(&vm)
}

/// A stop frees all memory, but the map is there for the next start, whose guest reads the files from the disk.
#[test]
fn map_is_kept_while_the_machine_is_stopped() -> Result<()> {
    let vm = machine("stopped-refill").boot()?;
    SHELF.verify(&vm)?;
    vm.stop_at_once()?;
    let pages = vm.events().iter().find_map(event!(CacheMapRead { pages, .. } => pages));
    assert!(pages >= Some(SHELF.pages()), "{pages:?}");
    vm.restart_keeper()?;
    vm.wait_boots(2)?;
    mount(&vm, "rw")?;
    refill(&vm)?;
    assert_cached(&vm)?;
    vm.panic()?;
    vm.wait_boots(3)?;
    mount(&vm, "rw")?;
    refill(&vm)?;
    assert_cached(&vm)?;
    let kept = std::path::Path::new("/var/lib/hearth/stopped-refill/cache-map");
    assert!(!kept.exists(), "it is good for one start");
    Ok(())
}

/// The disk is there for the guest's next QEMU, too, and for a keeper that takes over.
#[test]
fn map_outlives_qemu_and_keeper() -> Result<()> {
    let vm = reborn(machine("hops"), Drives::panic)?;
    vm.wait_event("the cache map", event!(CacheMapRead))?;
    vm.rejuvenate()?;
    vm.kill_keeper()?;
    vm.restart_keeper()?;
    vm.wait_event("take-over", event!(KeeperTookOver))?;
    vm.wait_running()?;
    refill(&vm)?;
    assert_cached(&vm)
}

/// With systemd, from the package: nobody has to start anything.
#[test]
fn unit_reads_files_back_by_itself() -> Result<()> {
    let vm = TestVm::debian("unit").cpus(2).setting("refill", "on").boot()?;
    vm.sh(&format!("cat {FILES} >/dev/null"))?;
    vm.panic()?;
    vm.wait_incarnation(2)?;
    vm.sh("until ! systemctl is-active -q hearth-refill; do sleep 0.2; done")?;
    let cached = vm.run(&format!("probe cached {FILES}"))?;
    let figure = |name| cached.number(name).expect("the probe prints it");
    assert!(figure("cached_pages") >= figure("all_pages") * 0.95, "{}", cached.text());
    files_that_change_during_a_refill_are_right(&vm)
}

const FILES: &str = "/var/www/html/files/0*.bin";

/// Each file has one of these done to it while it is read back. What the cache has then is what the disk has.
fn files_that_change_during_a_refill_are_right(vm: &TestVm) -> Result<()> {
    const CHANGES: &str = r#"
        case $((n % 9)) in
        0) truncate -s 5000 $f ;;
        1) fallocate -p -o 65536 -l 300000 $f ;;
        2) mv $f $f.moved ;;
        3) probe fill $f 1048576 2 ;;
        4) dd if=/dev/urandom of=$f bs=64k count=4 seek=3 oflag=direct conv=notrunc status=none ;;
        5) rm $f ;;
        6) fallocate -l 2000000 $f ;;
        7) cat /etc/passwd >$f.new; mv $f.new $f ;;
        8) truncate -s 0 $f; truncate -s 700000 $f; dd if=/dev/urandom of=$f bs=4k count=3 seek=9 conv=notrunc status=none ;;
        esac"#;
    vm.sh("sync; echo 3 >/proc/sys/vm/drop_caches")?;
    vm.sh(&format!(
        "/usr/lib/hearth/hearth-refill >/run/said & n=0; for f in {FILES}; do {CHANGES}
         n=$((n+1)); [ $((n % 20)) = 0 ] && mount -o remount /; done; wait"
    ))?;
    let said = vm.sh("cat /run/said")?;
    assert!(said.contains("read ahead"), "{said}");
    let sums = || vm.sh("cd /var/www/html/files && md5sum 0*");
    let cached = sums()?;
    vm.sh("sync; echo 3 >/proc/sys/vm/drop_caches")?;
    assert_eq!(cached, sums()?, "the cache and the disk differ");
    Ok(())
}
