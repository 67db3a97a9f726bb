//! The guest is reset inside its QEMU.

use hearth_api::EventKind;
use hearth_vmtest::libvirt::{Domain, DomainDisk, LibvirtVm};
use hearth_vmtest::{Drives, Result, artifacts, boot_disk};

use super::{
    Deed, Files, MEMORY_MIB, PAGES, assert_warm_with, assert_within_budget, image_folder, make_files, verify,
    verify_both,
};

/// Resets the guest in each of these ways. Each time the old blocks of this disk are moved out, at least so many, and the next guest
/// finds them.
#[track_caller]
fn assert_warm_after_each(vm: &LibvirtVm, disk: &str, pages_kept: u64, resets: &[(&str, Deed)]) -> Result<()> {
    vm.start_host()?;
    for (number, (what, reset)) in resets.iter().enumerate() {
        verify(vm, disk)?;
        let pid = vm.qemu_pid()?;
        reset(vm)?;
        vm.wait_next_boot()?;
        assert_eq!(vm.qemu_pid()?, pid, "{what}: the same QEMU");
        assert_eq!(vm.status()?.incarnation, number as u32 + 2, "{what}");
        assert_warm_with(vm, disk, pages_kept)?;
        let moved = |event: &EventKind| matches!(event, EventKind::BlocksRescued { released: true, left: 0, .. });
        let events = vm.events()?;
        assert_eq!(events.iter().filter(|record| moved(&record.event)).count(), number + 1, "{what}: {events:?}");
        assert_within_budget(vm)?;
    }
    Ok(())
}

/// SeaBIOS, which uses the disk before the kernel does.
#[test]
fn cache_survives_resets_in_place() -> Result<()> {
    let Some(files) = Files::running_with("resets", "on_panic = \"recover\"", "")? else { return Ok(()) };
    let resets: [(&str, Deed); 3] = [
        ("reboot from inside", |vm| vm.guest().start("umount /mnt; reboot -f").map(drop)),
        ("virsh reset", |vm| vm.virsh("reset", &[]).map(drop)),
        ("panic", Drives::panic),
    ];
    assert_warm_after_each(&files.vm, "vda", PAGES, &resets)
}

/// Nobody says that the guest was reset, so no page of it is touched.
#[test]
fn blocks_are_copied_within_the_budget_without_word_of_the_reset() -> Result<()> {
    let Some(files) = Files::running("unsure")? else { return Ok(()) };
    let vm = &files.vm;
    files.verify()?;
    vm.virsh("reset", &[])?;
    vm.wait_next_boot()?;
    let copied = |event: &EventKind| matches!(event, EventKind::BlocksRescued { released: false, .. });
    assert!(vm.events()?.iter().any(|record| copied(&record.event)));
    files.verify()?;
    assert_within_budget(vm)
}

/// A driver that takes the disk anew, and a pause, are no reset.
#[test]
fn rebind_and_suspend_change_nothing() -> Result<()> {
    let Some(files) = Files::running("rebind")? else { return Ok(()) };
    let vm = &files.vm;
    vm.start_host()?;
    files.verify()?;
    vm.virsh("suspend", &[])?;
    vm.virsh("resume", &[])?;
    let device = "d=$(basename $(readlink /sys/block/vda/device)); cd /sys/bus/virtio/drivers/virtio_blk";
    vm.sh(&format!("umount /mnt; {device}; echo $d >unbind; echo $d >bind"))?;
    files.verify()?;
    let status = vm.status()?;
    assert!(status.incarnation == 1 && status.ledger_pages >= PAGES * 9 / 10, "{status:?}");
    assert!(!vm.events()?.iter().any(|record| matches!(record.event, EventKind::BlocksRescued { .. })));
    Ok(())
}

/// UEFI's own driver reads the boot loader and the kernel before the next kernel runs.
#[test]
fn cache_survives_resets_of_a_domain_that_uefi_boots() -> Result<()> {
    let images = image_folder();
    let [boot, data] = ["boot.img", "data.img"].map(|name| images.path().join(name));
    boot_disk::uefi(&boot, &artifacts::busybox(false)?)?;
    make_files(&data)?;
    let disks = [("vda", &boot), ("vdb", &data)];
    let disks = disks.map(|(target, image)| DomainDisk { target, image, format: "raw", limits: None });
    let domain = Domain { boot: None, ..Domain::of_busybox("uefi", MEMORY_MIB, &disks)? };
    let Some(vm) = LibvirtVm::define_domain(domain)? else { return Ok(()) };
    vm.hearth(&["attach", "uefi", "--yes"])?;
    vm.start()?;
    let reset: (&str, Deed) = ("virsh reset", |vm| vm.virsh("reset", &[]).map(drop));
    // UEFI writes over some memory before it comes to the disks, for example that from 9 to 16 MiB.
    assert_warm_after_each(&vm, "vdb", PAGES * 49 / 50, &[reset; 2])
}

/// Both disks wait while the blocks are moved, and libvirt's next order waits for QEMU.
#[test]
fn order_that_comes_while_the_guest_is_held_loses_nothing() -> Result<()> {
    let images = image_folder();
    let disks = ["vda", "vdb"].map(|disk| (disk, images.path().join(disk)));
    disks.iter().try_for_each(|(_, image)| make_files(image))?;
    let of_domain = disks.each_ref().map(|(target, image)| DomainDisk { target, image, format: "raw", limits: None });
    let Some(vm) = LibvirtVm::define("held", MEMORY_MIB, &of_domain)? else { return Ok(()) };
    vm.hearth(&["attach", "held", "--yes"])?;
    vm.start()?;
    vm.start_host()?;
    let orders: [(&str, Deed); 2] = [
        ("suspend", |vm| {
            vm.virsh("suspend", &[])?;
            vm.virsh("resume", &[]).map(drop)
        }),
        ("reset", |vm| vm.virsh("reset", &[]).map(drop)),
    ];
    verify_both(&vm)?;
    for (what, order) in orders {
        let before = vm.status()?.incarnation;
        vm.virsh("reset", &[])?;
        order(&vm)?;
        vm.wait_next_boot()?;
        assert!(vm.status()?.incarnation > before, "{what}");
        verify_both(&vm)?;
        let ember = vm.status()?.ember;
        assert!(ember.pages_served >= 2 * PAGES * 9 / 10, "{what}: {ember:?}");
        assert_within_budget(&vm)?;
    }
    Ok(())
}
