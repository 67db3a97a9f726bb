//! QEMU or the keeper ends, and what is kept.

use std::path::Path;
use std::process::Command;

use hearth_api::{DumpState, EventKind, MachineState, RemountPlan};
use hearth_vmtest::libvirt::{DomainDisk, LibvirtVm};
use hearth_vmtest::{Drives, LoopDevice, Result};

use super::crashes::assert_dump;
use super::{
    Deed, Files, MEMORY_MIB, PAGES, assert_within_budget, image_folder, make_files, replace_keeper, verify_both,
    wait_off,
};

#[test]
fn cache_survives_every_end_of_qemu() -> Result<()> {
    let Some(files) = Files::running("ends")? else { return Ok(()) };
    let vm = &files.vm;
    let status = vm.status()?;
    assert_eq!((status.state, status.incarnation), (MachineState::Running, 1));
    files.verify()?;
    assert!(vm.status()?.ledger_pages >= PAGES);
    // QEMU dies; libvirt ends it; the guest powers off.
    let ends: [(&str, Deed); 3] = [
        ("kill", LibvirtVm::kill_qemu),
        ("destroy", |vm| vm.virsh("destroy", &[]).map(drop)),
        ("poweroff", |vm| {
            vm.guest().start("umount /mnt; poweroff -f")?;
            vm.wait_state("shut off")
        }),
    ];
    for (what, end) in ends {
        end(vm)?;
        wait_off(vm)?;
        assert!(files.ember()?.pages_remaining >= PAGES * 9 / 10, "{what}: {:?}", files.ember()?);
        vm.start()?;
        files.assert_warm()?;
    }
    assert_eq!(vm.status()?.incarnation, 4);
    assert_within_budget(vm)
}

#[test]
fn guest_goes_on_under_the_next_keeper() -> Result<()> {
    let Some(files) = Files::running("orphan")? else { return Ok(()) };
    let vm = &files.vm;
    files.verify()?;
    let (nonce, uptime_s) = (vm.nonce()?, vm.status()?.uptime_s);
    vm.kill_keeper()?;
    vm.start_keeper()?;
    assert!(vm.status()?.uptime_s > uptime_s);
    vm.wait_until("QEMU is connected", || Ok(vm.status()?.disks.iter().all(|disk| disk.connected)))?;
    vm.sh("echo 3 >/proc/sys/vm/drop_caches")?;
    files.verify()?;
    assert_eq!(vm.nonce()?, nonce);
    assert!(vm.events()?.iter().any(|record| matches!(record.event, EventKind::KeeperTookOver { .. })));
    vm.virsh("destroy", &[])?;
    vm.start()?;
    files.assert_warm()
}

/// Nothing locks the images of a domain without a keeper.
#[test]
fn image_changed_under_a_living_domain_is_told() -> Result<()> {
    let Some(files) = Files::running("beneath")? else { return Ok(()) };
    let vm = &files.vm;
    files.verify()?;
    vm.sh("umount /mnt")?;
    let nonce = vm.nonce()?;
    vm.kill_keeper()?;
    make_files(&files.image)?;
    vm.start_keeper()?;
    let forgotten = |event: EventKind| match event {
        EventKind::DiskForgotten { why, .. } => Some(why),
        _ => None,
    };
    let why = vm.events()?.into_iter().find_map(|record| forgotten(record.event)).expect("the disk is forgotten");
    assert!(why.contains("the running guest's file system is damaged"), "{why}");
    files.verify()?;
    assert_eq!(vm.nonce()?, nonce);
    Ok(())
}

#[test]
fn changed_image_is_not_answered_from_memory() -> Result<()> {
    let Some(files) = Files::running("changed")? else { return Ok(()) };
    let vm = &files.vm;
    files.verify()?;
    vm.sh("umount /mnt")?;
    vm.virsh("destroy", &[])?;
    wait_off(vm)?;
    // The image is nobody's now.
    make_files(&files.image)?;
    vm.start()?;
    assert!(vm.events()?.iter().any(|record| matches!(record.event, EventKind::DiskForgotten { .. })));
    files.verify()?;
    assert_eq!(files.ember()?.pages_served, 0);
    Ok(())
}

/// What the domain reads until it is ready outlives its memory and its keeper.
#[test]
fn boot_set_of_a_domain_is_kept_without_its_memory() -> Result<()> {
    let folder = tempfile::tempdir().expect("a folder");
    let file = folder.path().join("boot-set").display().to_string();
    let remount =
        format!("[remount]\nlimit = \"64MiB\"\nready_after = \"1d\"\npersist = true\npersist_file = {file:?}");
    let Some(files) = Files::running_with("remounts", "", &remount)? else { return Ok(()) };
    let vm = &files.vm;
    let ready = || {
        vm.hearth(&["ready", "remounts"])?;
        let text = vm.hearth(&["remount-plan", "remounts", "--json"])?;
        Ok::<RemountPlan, hearth_vmtest::Error>(serde_json::from_str(&text).expect("a plan"))
    };
    files.verify()?;
    let held = ready()?.held_blocks;
    assert!(held >= PAGES * 9 / 10, "{held}");
    vm.virsh("destroy", &[])?;
    wait_off(vm)?;
    vm.hearth(&["stop", "remounts"])?;
    vm.start()?;
    files.verify()?;
    let plan = ready()?;
    assert!(plan.disks[0].hits >= held * 9 / 10, "{held} blocks were held: {plan:?}");
    assert_eq!(files.ember()?.pages_served, 0);
    Ok(())
}

/// An image changes while no keeper lives, and the next keeper ends before all images could be opened and compared.
#[test]
fn images_not_compared_yet_keep_their_notes() -> Result<()> {
    let images = image_folder();
    let [changed, missing] = ["changed.img", "missing.img"].map(|name| images.path().join(name));
    make_files(&changed)?;
    make_files(&missing)?;
    let disks = [("vda", &changed), ("vdb", &missing)];
    let disks = disks.map(|(target, image)| DomainDisk { target, image, format: "raw", limits: None });
    let Some(vm) = LibvirtVm::define("uncompared", MEMORY_MIB, &disks)? else { return Ok(()) };
    vm.attach_with("", "[remount]\nlimit = \"128MiB\"\nready_after = \"1d\"")?;
    vm.start()?;
    verify_both(&vm)?;
    vm.hearth(&["ready", "uncompared"])?;
    vm.virsh("destroy", &[])?;
    wait_off(&vm)?;
    vm.kill_keeper()?;
    make_files(&changed)?;
    vm.start_keeper()?;
    let away = missing.with_extension("away");
    std::fs::rename(&missing, &away).expect("our own file");
    assert!(vm.virsh("start", &[]).is_err(), "an image is missing");
    vm.kill_keeper()?;
    std::fs::rename(&away, &missing).expect("our own file");
    vm.start_keeper()?;
    vm.start()?;
    let forgotten = |event: EventKind| match event {
        EventKind::DiskForgotten { disk, .. } => Some(disk),
        _ => None,
    };
    let forgotten: Vec<_> = vm.events()?.into_iter().filter_map(|record| forgotten(record.event)).collect();
    assert!(forgotten.iter().any(|disk| disk == "vda"), "{forgotten:?}");
    verify_both(&vm)
}

/// Nobody notes what a guest writes whose memory cannot be kept.
#[test]
fn nothing_is_served_after_a_guest_whose_memory_is_not_kept() -> Result<()> {
    const MEMFD: &str = "<source type='memfd'/>";
    let Some(files) = Files::running("untracked")? else { return Ok(()) };
    let vm = &files.vm;
    files.verify()?;
    let definition = vm.must(&["virsh", "dumpxml", "--inactive", "untracked"], "")?;
    assert!(definition.contains(MEMFD), "{definition}");
    let restart_as = |definition: &str| {
        vm.virsh("destroy", &[])?;
        wait_off(vm)?;
        vm.must(&["virsh", "define", "/dev/stdin"], definition)?;
        vm.start()
    };
    restart_as(&definition.replace(MEMFD, "<source type='file'/>"))?;
    let is_told = |event: &EventKind| matches!(event, EventKind::Error { message } if message.contains("will be kept"));
    assert!(vm.events()?.iter().any(|record| is_told(&record.event)));
    assert_eq!(files.ember()?.pages_remaining, 0);
    vm.sh("mount /dev/vda /mnt && dd if=/dev/zero of=/mnt/f0 bs=1M count=1 conv=notrunc,fsync 2>&1 && umount /mnt")?;
    restart_as(&definition)?;
    vm.sh("mount /dev/vda /mnt && cmp -n 1048576 /mnt/f0 /dev/zero")?;
    assert_eq!(files.ember()?.pages_served, 0);
    Ok(())
}

/// The domain's disk is a partition. What was written to it, past it to the disk, or past both to the disk's file is the same as before.
#[test]
fn block_device_is_cold_only_if_it_was_written_to() -> Result<()> {
    const SECTOR: usize = 512;
    const OFFSET: usize = 1 << 20;
    let images = image_folder();
    let (data, image) = (images.path().join("data.img"), images.path().join("disk.img"));
    make_files(&data)?;
    let content = [vec![0; OFFSET], std::fs::read(&data).expect("it was just made")].concat();
    std::fs::write(&image, content).expect("there is space");
    let Some(mut disk) = LoopDevice::over(&image) else { return Ok(()) };
    let partition = disk.add_partition((OFFSET / SECTOR) as u64)?;
    let of_domain = DomainDisk { target: "vda", image: &partition, format: "raw", limits: None };
    let Some(vm) = LibvirtVm::define("device", MEMORY_MIB, &[of_domain])? else { return Ok(()) };
    let files = Files { vm, image: image.clone(), _images: images };
    let vm = &files.vm;
    [disk.path(), &partition].into_iter().try_for_each(|node| vm.add_device(node))?;
    let touch = |path: &Path, offset: usize| {
        let path = path.display();
        let dd = format!("dd if={path} of={path} bs={SECTOR} count=1 skip={offset} seek={offset} conv=notrunc");
        vm.must(&["sh", "-c", &dd], "").map(drop)
    };
    let sector = OFFSET / SECTOR + 4096;
    let deeds: [(&str, &dyn Fn() -> Result<()>); 4] = [
        ("nothing", &|| Ok(())),
        ("partition", &|| touch(&partition, 4096)),
        ("disk", &|| touch(disk.path(), sector)),
        ("file", &|| touch(&image, sector)),
    ];
    vm.hearth(&["attach", "device", "--yes"])?;
    vm.start()?;
    for (number, (what, deed)) in deeds.into_iter().enumerate() {
        files.verify()?;
        vm.virsh("destroy", &[])?;
        wait_off(vm)?;
        assert!(files.ember()?.pages_remaining >= PAGES * 9 / 10, "{what}: {:?}", files.ember()?);
        deed()?;
        vm.start()?;
        if number == 0 {
            files.assert_warm()?;
            continue;
        }
        let forgotten =
            |event: &EventKind| matches!(event, EventKind::DiskForgotten { why, .. } if why.contains("was "));
        assert_eq!(vm.events()?.iter().filter(|record| forgotten(&record.event)).count(), number, "{what}");
        files.verify()?;
        assert_eq!(files.ember()?.pages_served, 0, "{what}");
    }
    Ok(())
}

/// A raw and a qcow2 disk, both Hearth's: a start and a reset each count once.
#[test]
fn both_disks_of_a_domain_are_warm() -> Result<()> {
    let images = image_folder();
    let [raw, qcow2] = ["raw.img", "disk.qcow2"].map(|name| images.path().join(name));
    make_files(&raw)?;
    let convert = ["convert", "-O", "qcow2"];
    let converted = Command::new("qemu-img").args(convert).args([&raw, &qcow2]).status();
    assert!(converted.is_ok_and(|status| status.success()));
    let disks = [("vda", &raw, "raw"), ("vdb", &qcow2, "qcow2")];
    let disks = disks.map(|(target, image, format)| DomainDisk { target, image, format, limits: None });
    let Some(vm) = LibvirtVm::define("two", MEMORY_MIB, &disks)? else { return Ok(()) };
    vm.hearth(&["attach", "two", "--yes"])?;
    vm.start()?;
    vm.start_host()?;
    let verify = || verify_both(&vm);
    verify()?;
    vm.virsh("destroy", &[])?;
    vm.start()?;
    verify()?;
    let of_start = vm.status()?.ember;
    assert!(of_start.pages_served >= 2 * PAGES * 9 / 10, "{of_start:?}");
    vm.virsh("reset", &[])?;
    vm.wait_next_boot()?;
    verify()?;
    let status = vm.status()?;
    assert!(status.ember.pages_served >= 2 * PAGES * 9 / 10, "{:?}", status.ember);
    assert_eq!(status.incarnation, 3);
    Ok(())
}

/// libvirt saves the guest's memory and restores it in another QEMU, which fills its memory. No guest has ended.
#[test]
fn guest_goes_on_after_libvirt_has_saved_and_restored_it() -> Result<()> {
    let Some(files) = Files::running("saved")? else { return Ok(()) };
    let vm = &files.vm;
    for restores in 1..=2 {
        files.verify()?;
        let nonce = vm.nonce()?;
        vm.virsh("managedsave", &[])?;
        vm.wait_state("shut off")?;
        vm.virsh("start", &[])?;
        assert_eq!(vm.nonce()?, nonce, "the same guest");
        // It has its blocks itself.
        let status = vm.status()?;
        assert!(status.ledger_pages >= PAGES * 9 / 10, "{status:?}");
        let carried = |event: &EventKind| matches!(event, EventKind::BlocksCarriedOver { left: 0, .. });
        assert_eq!(vm.events()?.iter().filter(|record| carried(&record.event)).count(), restores);
        if restores == 2 {
            vm.sh("echo 3 >/proc/sys/vm/drop_caches")?;
            files.verify()?;
        }
        assert_within_budget(vm)?;
        vm.kill_qemu()?;
        vm.start()?;
        files.assert_warm()?;
    }
    Ok(())
}

fn start_with_dumps(files: &Files) -> Result<()> {
    files.vm.start_host()?;
    files.start_with("", "")
}

/// The dump of this incarnation is whole, and nothing has failed on the way.
fn assert_dumped(files: &Files, incarnation: u32, cpus: usize) -> Result<()> {
    let vm = &files.vm;
    let dumped = files.wait_dump(incarnation)?;
    assert_eq!((dumped.state, dumped.excluded.unjudged), (DumpState::Complete, 0), "{dumped:?}");
    assert_dump(Path::new(&dumped.file), cpus);
    assert_within_budget(vm)?;
    assert!(!vm.events()?.iter().any(|record| matches!(record.event, EventKind::Error { .. })), "{:?}", vm.events()?);
    Ok(())
}

/// A memory module lies above the board's memory, here with a gap between them. The guest's kernel uses it when it is told to.
#[test]
fn memory_module_is_kept() -> Result<()> {
    let Some(files) = Files::define("module")? else { return Ok(()) };
    let vm = &files.vm;
    let xml = vm.virsh("dumpxml", &["--inactive"])?;
    let cells = format!("<numa><cell id='0' cpus='0' memory='{MEMORY_MIB}' unit='MiB'/></numa></cpu>");
    let module = "<memory model='dimm'><target><size unit='MiB'>256</size><node>0</node></target>\
                  <address type='dimm' slot='0' base='0x140000000'/></memory></devices>";
    let xml = xml
        .replace("<vcpu ", "<maxMemory slots='2' unit='GiB'>8</maxMemory><vcpu ")
        .replace("</cpu>", &cells)
        .replace("</devices>", module);
    vm.must(&["virsh", "define", "/dev/stdin"], &xml)?;
    // 5 GiB in blocks of 128 MiB. Movable memory is where a kernel has its cache first.
    let plug_in =
        || vm.sh("for block in 40 41; do echo online_movable >/sys/devices/system/memory/memory$block/state; done");
    start_with_dumps(&files)?;
    plug_in()?;
    files.verify()?;
    let cached = "awk '/, zone/ { there = /Movable/ } there && /nr_zone_.*active_file/ { sum += $2 } END { print sum }' /proc/zoneinfo";
    let cached: u64 = vm.sh(cached)?.trim().parse().expect("a number");
    assert!(cached >= PAGES * 9 / 10, "{cached} pages");
    vm.virsh("destroy", &[])?;
    vm.start()?;
    plug_in()?;
    files.assert_warm()?;
    replace_keeper(vm)?;
    files.verify()?;
    let before = vm.status()?.incarnation;
    vm.virsh("reset", &[])?;
    vm.wait_next_boot()?;
    assert_eq!(vm.status()?.incarnation, before + 1);
    plug_in()?;
    files.assert_warm()?;
    // One that is plugged in now gets the addresses from 4 GiB on. It is neither kept nor dumped.
    let another = "<memory model='dimm'><target><size unit='MiB'>256</size><node>0</node></target></memory>";
    vm.must(&["virsh", "attach-device", "module", "/dev/stdin", "--live"], another)?;
    vm.sh("until [ -e /sys/devices/system/memory/memory33/state ]; do sleep 0.1; done")?;
    vm.sh("for block in 32 33; do echo online_movable >/sys/devices/system/memory/memory$block/state; done")?;
    vm.panic()?;
    vm.wait_next_boot()?;
    plug_in()?;
    files.assert_warm()?;
    assert_dumped(&files, before + 1, 1)
}

/// Each NUMA cell has memory of its own.
#[test]
fn memory_of_several_cells_is_kept() -> Result<()> {
    let Some(files) = Files::define("cells")? else { return Ok(()) };
    let vm = &files.vm;
    let half = MEMORY_MIB / 2;
    let cells = format!(
        "<numa><cell id='0' cpus='0' memory='{half}' unit='MiB'/><cell id='1' cpus='1' memory='{half}' unit='MiB'/></numa></cpu>"
    );
    let xml = vm.virsh("dumpxml", &["--inactive"])?;
    let xml = xml.replace("<vcpu placement='static'>1<", "<vcpu placement='static'>2<").replace("</cpu>", &cells);
    vm.must(&["virsh", "define", "/dev/stdin"], &xml)?;
    // The kernel is in the first cell, and the cache beside the second processor.
    let verify_there = || {
        vm.sh(
            "grep -q ' /mnt ' /proc/mounts || mount -o noatime /dev/vda /mnt; taskset 2 sh -c 'cat /mnt/f* >/dev/null'",
        )?;
        files.verify()
    };
    start_with_dumps(&files)?;
    verify_there()?;
    let cached = "awk '/FilePages/ { print $4 }' /sys/devices/system/node/node1/meminfo";
    let cached_kib: u64 = vm.sh(cached)?.trim().parse().expect("a number");
    assert!(cached_kib / 4 >= PAGES, "{cached_kib} KiB");
    vm.virsh("destroy", &[])?;
    vm.start()?;
    files.assert_warm()?;
    replace_keeper(vm)?;
    verify_there()?;
    let before = vm.status()?.incarnation;
    vm.virsh("reset", &[])?;
    vm.wait_next_boot()?;
    assert_eq!(vm.status()?.incarnation, before + 1);
    files.assert_warm()?;
    vm.panic()?;
    vm.wait_next_boot()?;
    files.assert_warm()?;
    assert_dumped(&files, before + 1, 2)
}
