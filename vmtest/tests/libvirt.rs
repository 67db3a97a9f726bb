//! Domains of libvirt: attached, started and ended in every way, and detached.

use std::fs::Permissions;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use hearth_api::{DumpState, DumpStatus, EmberStatus, EndCause, EventKind, MachineState};
use hearth_recovery::vmcore::VmcoreFile;
use hearth_recovery::vmcore::linux::{Linux, log};
use hearth_vmtest::images::{self, File};
use hearth_vmtest::libvirt::{Domain, DomainDisk, LibvirtVm};
use hearth_vmtest::{Drives, LoopDevice, Result, START_AGENT, artifacts, boot_disk};

const FILES: usize = 48;
const FILE_BYTES: usize = 1 << 20;
const PAGES: u64 = (FILES * FILE_BYTES / 4096) as u64;
const SEED: u64 = 1;
/// So much that the next guest's own memory does not take the ember's place, also after several resets.
const MEMORY_MIB: u64 = 768;

/// What is done to a domain.
type Deed = fn(&LibvirtVm) -> Result<()>;

/// A domain with one disk of files, not yet attached.
struct Files {
    vm: LibvirtVm,
    image: PathBuf,
    _images: tempfile::TempDir,
}

/// An image with all files.
fn make_files(image: &Path) -> Result<()> {
    let files: Vec<_> = (0..FILES).map(|file| File::pattern(&format!("f{file}"), FILE_BYTES, SEED)).collect();
    images::ext4(image, FILES as u64 + 64, &files)
}

impl Files {
    fn define(name: &str) -> Result<Option<Self>> {
        let images = tempfile::tempdir().expect("a folder");
        // A QEMU without Hearth opens the image as a user of its own.
        std::fs::set_permissions(images.path(), Permissions::from_mode(0o755)).expect("our own folder");
        let image = images.path().join("data.img");
        make_files(&image)?;
        let disk = DomainDisk { target: "vda", image: &image, format: "raw", limits: None };
        let vm = LibvirtVm::define(name, MEMORY_MIB, &[disk])?;
        Ok(vm.map(|vm| Self { vm, image, _images: images }))
    }

    /// Attached and started.
    fn running(name: &str) -> Result<Option<Self>> {
        let Some(files) = Self::define(name)? else { return Ok(None) };
        files.vm.hearth(&["attach", name, "--yes"])?;
        files.vm.start()?;
        Ok(Some(files))
    }

    /// Attached and started, with these keys in its file, and these of `[crash]`.
    fn running_with(name: &str, keys: &str, crash: &str) -> Result<Option<Self>> {
        let Some(files) = Self::define(name)? else { return Ok(None) };
        let folder = files.dump_folder();
        files.vm.attach_with(keys, &format!("[crash]\ndump_folder = \"{}\"\n{crash}", folder.display()))?;
        files.vm.start()?;
        Ok(Some(files))
    }

    /// Where its dumps are, with keys of its own.
    fn dump_folder(&self) -> PathBuf {
        self.vm.folder().join("dumps")
    }

    /// Waits for the dump of an incarnation. Returns its status.
    fn wait_dump(&self, incarnation: u32) -> Result<DumpStatus> {
        let find = || {
            let mut dumps = self.vm.status()?.dumps.into_iter();
            Ok::<_, hearth_vmtest::Error>(dumps.find(|dump| dump.incarnation == incarnation && dump.state.is_over()))
        };
        self.vm.wait_until("the dump", || Ok(find()?.is_some()))?;
        Ok(find()?.expect("it was just there"))
    }

    /// Reads and checks all files.
    fn verify(&self) -> Result<()> {
        self.vm.sh("grep -q ' /mnt ' /proc/mounts || mount -o noatime /dev/vda /mnt")?;
        let verify = format!("for f in /mnt/f*; do probe verify $f {SEED} || {{ echo in $f; exit 1; }}; done");
        self.vm.sh(&verify).map(drop)
    }

    fn ember(&self) -> Result<EmberStatus> {
        Ok(self.vm.status()?.ember)
    }

    /// The next guest reads all files, and the memory of the last one answers.
    #[track_caller]
    fn assert_warm(&self) -> Result<()> {
        let before = self.ember()?;
        assert!(before.pages_kept >= PAGES, "{before:?}");
        self.verify()?;
        let after = self.ember()?;
        assert!(after.pages_served >= PAGES * 9 / 10, "{after:?}");
        // A guest that was killed had some dirty blocks.
        assert!(after.refused.tag_mismatch <= PAGES / 50, "{after:?}");
        Ok(())
    }
}

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
        vm.wait_until("the domain is off", || Ok(vm.status()?.state == MachineState::Stopped))?;
        assert!(files.ember()?.pages_remaining >= PAGES * 9 / 10, "{what}: {:?}", files.ember()?);
        vm.start()?;
        files.assert_warm()?;
    }
    let status = vm.status()?;
    assert_eq!(status.incarnation, 4);
    assert!(status.memory.peak_bytes <= status.memory.budget_bytes * 103 / 100, "{:?}", status.memory);
    Ok(())
}

#[test]
fn guest_goes_on_under_the_next_keeper() -> Result<()> {
    let Some(files) = Files::running("orphan")? else { return Ok(()) };
    let vm = &files.vm;
    files.verify()?;
    let nonce = vm.nonce()?;
    vm.kill_keeper()?;
    vm.start_keeper()?;
    vm.wait_until("QEMU is connected", || Ok(vm.status()?.disks.iter().all(|disk| disk.connected)))?;
    vm.sh("echo 3 >/proc/sys/vm/drop_caches")?;
    files.verify()?;
    assert_eq!(vm.nonce()?, nonce);
    assert!(vm.events()?.iter().any(|record| matches!(record.event, EventKind::KeeperTookOver { .. })));
    vm.virsh("destroy", &[])?;
    vm.start()?;
    files.assert_warm()
}

#[test]
fn changed_image_is_not_answered_from_memory() -> Result<()> {
    let Some(files) = Files::running("changed")? else { return Ok(()) };
    let vm = &files.vm;
    files.verify()?;
    vm.sh("umount /mnt")?;
    vm.virsh("destroy", &[])?;
    vm.wait_until("the domain is off", || Ok(vm.status()?.state == MachineState::Stopped))?;
    // The image is nobody's now.
    make_files(&files.image)?;
    vm.start()?;
    assert!(vm.events()?.iter().any(|record| matches!(record.event, EventKind::DiskForgotten { .. })));
    files.verify()?;
    assert_eq!(files.ember()?.pages_served, 0);
    Ok(())
}

/// The domain's disk is a partition. What was written to it, past it to the disk, or past both to the disk's file is the same as before.
#[test]
fn block_device_is_cold_only_if_it_was_written_to() -> Result<()> {
    const SECTOR: usize = 512;
    const OFFSET: usize = 1 << 20;
    let images = tempfile::tempdir().expect("a folder");
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
        vm.wait_until("the domain is off", || Ok(vm.status()?.state == MachineState::Stopped))?;
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

#[test]
fn attaching_changes_the_definition_and_detaching_restores_it() -> Result<()> {
    let Some(files) = Files::define("there")? else { return Ok(()) };
    let vm = &files.vm;
    let before = vm.virsh("dumpxml", &["--inactive"])?;
    let shown = vm.hearth(&["attach", "there", "--check"])?;
    for words in ["+    <disk type='vhostuser' device='disk'>", "vda: Hearth serves it from", "live migration"] {
        assert!(shown.contains(words), "{words} is missing in {shown}");
    }
    assert_eq!(vm.virsh("dumpxml", &["--inactive"])?, before, "a check changes nothing");
    // Nobody can be asked here.
    let (code, said) = vm.try_hearth(&["attach", "there"])?;
    assert!(code == 1 && said.contains("add --yes"), "{said}");
    vm.hearth(&["attach", "there", "--yes"])?;
    let attached = vm.virsh("dumpxml", &["--inactive"])?;
    assert!(attached.contains("/run/hearth/there/disk-vda.sock"), "{attached}");
    let (code, said) = vm.try_hearth(&["import", "there"])?;
    assert!(code == 1 && said.contains("hearth detach there"), "{said}");
    // Once more changes nothing.
    vm.hearth(&["attach", "there", "--yes"])?;
    assert_eq!(vm.virsh("dumpxml", &["--inactive"])?, attached);
    vm.start()?;
    files.verify()?;
    // While it runs: from its next start on.
    vm.hearth(&["detach", "there"])?;
    assert_eq!(vm.virsh("dumpxml", &["--inactive"])?, before);
    files.verify()?;
    vm.virsh("destroy", &[])?;
    vm.wait_until("its keeper has ended", || Ok(vm.try_hearth(&["status", "there"])?.0 == 3))?;
    vm.start()?;
    files.verify()?;
    let (code, said) = vm.try_hearth(&["detach", "there"])?;
    assert!(code == 1 && said.contains("is not attached"), "{said}");
    let left = vm.must(&["sh", "-c", "ls /etc/hearth /var/lib/hearth"], "")?;
    assert!(!left.contains("there"), "{left}");
    Ok(())
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
        vm.sh("taskset -p 2 $$")?;
        files.verify()
    };
    vm.attach_with("", &format!("[crash]\ndump_folder = \"{}\"", files.dump_folder().display()))?;
    vm.start_host()?;
    vm.start()?;
    verify_there()?;
    let cached = "awk '/FilePages/ { print $4 }' /sys/devices/system/node/node1/meminfo";
    let cached_kib: u64 = vm.sh(cached)?.trim().parse().expect("a number");
    assert!(cached_kib / 4 >= PAGES, "{cached_kib} KiB");
    vm.virsh("destroy", &[])?;
    vm.start()?;
    files.assert_warm()?;
    vm.kill_keeper()?;
    vm.start_keeper()?;
    vm.wait_until("QEMU is connected", || Ok(vm.status()?.disks.iter().all(|disk| disk.connected)))?;
    vm.sh("echo 3 >/proc/sys/vm/drop_caches")?;
    verify_there()?;
    let before = vm.status()?.incarnation;
    vm.virsh("reset", &[])?;
    vm.wait_next_boot()?;
    assert_eq!(vm.status()?.incarnation, before + 1);
    files.assert_warm()?;
    vm.panic()?;
    vm.wait_next_boot()?;
    files.assert_warm()?;
    let dumped = files.wait_dump(before + 1)?;
    assert_eq!((dumped.state, dumped.excluded.unjudged), (DumpState::Complete, 0), "{dumped:?}");
    assert_dump(Path::new(&dumped.file), 2);
    let memory = vm.status()?.memory;
    assert!(memory.peak_bytes <= memory.budget_bytes * 103 / 100, "{memory:?}");
    assert!(!vm.events()?.iter().any(|record| matches!(record.event, EventKind::Error { .. })), "{:?}", vm.events()?);
    Ok(())
}

#[test]
fn domain_is_detached_while_its_keeper_is_dead() -> Result<()> {
    let Some(files) = Files::running("late")? else { return Ok(()) };
    let vm = &files.vm;
    let left = || vm.must(&["sh", "-c", "ls /etc/hearth /var/lib/hearth"], "");
    files.verify()?;
    vm.kill_keeper()?;
    let said = vm.hearth(&["detach", "late"])?;
    assert!(said.contains("until then Hearth serves its disks"), "{said}");
    assert!(left()?.contains("late.toml"), "the next keeper needs them: {}", left()?);
    vm.start_keeper()?;
    vm.sh("echo 3 >/proc/sys/vm/drop_caches")?;
    files.verify()?;
    // Its guest ends while there is no keeper either.
    vm.kill_keeper()?;
    vm.virsh("destroy", &[])?;
    vm.run_keeper()?;
    vm.wait_until("its files are gone", || Ok(!left()?.contains("late")))?;
    vm.start()?;
    files.verify()
}

#[test]
fn start_that_cannot_be_served_fails_with_a_remedy() -> Result<()> {
    let Some(files) = Files::define("broken")? else { return Ok(()) };
    let vm = &files.vm;
    vm.hearth(&["attach", "broken", "--yes"])?;
    let moved = files.image.with_extension("moved");
    std::fs::rename(&files.image, &moved).expect("the image can be moved");
    let start = vm.command(&["virsh", "start", "broken"], "")?;
    let said = String::from_utf8_lossy(&start.stderr).into_owned();
    assert!(!start.status.success() && said.contains("data.img"), "{said}");
    std::fs::rename(&moved, &files.image).expect("and back");
    vm.must(&["rm", "/etc/hearth/broken.toml"], "")?;
    vm.try_hearth(&["stop", "broken"])?;
    let start = vm.command(&["virsh", "start", "broken"], "")?;
    let said = String::from_utf8_lossy(&start.stderr).into_owned();
    assert!(said.contains("hearth attach broken"), "{said}");
    vm.hearth(&["attach", "broken", "--yes"])?;
    vm.start()?;
    files.verify()
}

#[test]
fn requests_that_are_libvirts_are_refused() -> Result<()> {
    let Some(files) = Files::running("whose")? else { return Ok(()) };
    let vm = &files.vm;
    for (words, remedy) in [
        (&["reboot", "whose"][..], "virsh reboot whose"),
        (&["crash", "whose"], "virsh inject-nmi whose"),
        (&["stop", "whose"], "virsh shutdown whose"),
        (&["rejuvenate", "whose"], "only a machine whose QEMU Hearth starts"),
        (&["save", "whose", "-o", "/tmp/whose"], "virsh save whose"),
        (&["upgrade-keeper", "whose"], "systemctl restart hearth@whose"),
    ] {
        let (code, said) = vm.try_hearth(words)?;
        assert!(code == 1 && said.contains(remedy), "{words:?}: {code}: {said}");
    }
    // The memory of the last guest is given back on request.
    files.verify()?;
    vm.virsh("destroy", &[])?;
    vm.wait_until("the domain is off", || Ok(vm.status()?.state == MachineState::Stopped))?;
    vm.hearth(&["stop", "whose"])?;
    let left = vm.must(&["sh", "-c", "ls /dev/shm/hearth/whose 2>&1 || true"], "")?;
    assert!(!left.contains("ledger"), "{left}");
    Ok(())
}

/// The guest reboots inside its QEMU.
#[test]
fn cache_survives_resets_in_place() -> Result<()> {
    let Some(files) = Files::running_with("resets", "on_panic = \"recover\"", "")? else { return Ok(()) };
    let vm = &files.vm;
    vm.start_host()?;
    let resets: [(&str, Deed); 3] = [
        ("reboot from inside", |vm| vm.guest().start("umount /mnt; reboot -f").map(drop)),
        ("virsh reset", |vm| vm.virsh("reset", &[]).map(drop)),
        ("panic", Drives::panic),
    ];
    for (number, (what, reset)) in resets.into_iter().enumerate() {
        files.verify()?;
        let pid = vm.qemu_pid()?;
        reset(vm)?;
        vm.wait_next_boot()?;
        assert_eq!(vm.qemu_pid()?, pid, "{what}: the same QEMU");
        let status = vm.status()?;
        assert_eq!(status.incarnation, number as u32 + 2, "{what}");
        files.assert_warm()?;
        let moved = |event: &EventKind| matches!(event, EventKind::BlocksRescued { released: true, left: 0, .. });
        assert_eq!(vm.events()?.iter().filter(|record| moved(&record.event)).count(), number + 1, "{what}");
        let memory = vm.status()?.memory;
        assert!(memory.peak_bytes <= memory.budget_bytes * 103 / 100, "{what}: {memory:?}");
    }
    Ok(())
}

#[test]
fn panic_is_dumped_beside_the_next_guest() -> Result<()> {
    let loops = "loop_count = 2\nloop_delay_s = 3";
    let Some(files) = Files::running_with("panics", "", loops)? else { return Ok(()) };
    let vm = &files.vm;
    vm.start_host()?;
    files.verify()?;
    let pid = vm.qemu_pid()?;
    vm.panic()?;
    vm.wait_next_boot()?;
    assert_ne!(vm.qemu_pid()?, pid);
    files.assert_warm()?;
    let dumped = files.wait_dump(1)?;
    assert_eq!((dumped.state, dumped.level, dumped.excluded.unjudged), (DumpState::Complete, 31, 0), "{dumped:?}");
    assert!(dumped.panic.as_deref().is_some_and(|why| why.contains("sysrq triggered crash")), "{dumped:?}");
    assert_eq!(dumped.warnings, [""; 0], "{dumped:?}");
    assert_dump(Path::new(&dumped.file), 1);
    let status = vm.status()?;
    assert_eq!((status.incarnation, status.memory.held_bytes), (2, 0), "{status:?}");
    assert!(status.memory.peak_bytes <= status.memory.budget_bytes * 103 / 100, "{:?}", status.memory);
    let recovery = status.last_recovery.expect("it has recovered");
    assert_eq!((recovery.cause, recovery.warm), (EndCause::Panic, true), "{recovery:?}");
    assert_eq!(recovery.dump.map(|dump| dump.file), Some(dumped.file));
    let harvest = recovery.phases.iter().find(|phase| phase.phase == "harvest");
    assert!(harvest.is_some_and(|harvest| harvest.duration_ms < recovery.duration_ms), "{:?}", recovery.phases);
    let named = |name: &str| recovery.phases.iter().any(|phase| phase.phase == name);
    assert!(["harvest", "drain", "bank", "plan", "write", "finish"].into_iter().all(named), "{:?}", recovery.phases);
    // The second crash is a loop: the domain is off for a while.
    vm.panic()?;
    vm.wait_state("shut off")?;
    let waits = vm.status()?;
    assert_eq!(waits.state, MachineState::Recovering);
    assert!(waits.next_start.is_some() && waits.state_why.is_some_and(|why| why.contains("virsh start panics")));
    vm.wait_next_boot()?;
    files.assert_warm()?;
    assert!(vm.events()?.iter().any(|record| matches!(record.event, EventKind::CrashLoop { delay_s: 3, .. })));
    assert_eq!(files.wait_dump(2)?.state, DumpState::Complete);
    let left = vm.must(&["ls", "/run/hearth/panics"], "")?;
    assert!(!left.contains("registers") && !left.contains("harvest"), "{left}");
    Ok(())
}

/// The dump is read with Hearth's own reader.
#[track_caller]
fn assert_dump(file: &Path, processors: usize) {
    let dump = VmcoreFile::open(file).expect("the dump can be read");
    assert!(dump.is_complete());
    let registers: Vec<_> = dump.notes().registers().collect();
    assert!(
        registers.len() == processors && registers[0].get("rip").is_some_and(|rip| rip >> 63 == 1),
        "{registers:x?}"
    );
    let linux = Linux::find(&dump, &dump.notes().to_bytes()).expect("it holds a Linux kernel");
    let lines = linux.log().expect("the kernel's log is in it");
    assert_eq!(log::panic_reason(&lines), Some("sysrq triggered crash"));
}

/// Nobody looks after it, its keeper is another one, and its QEMU hangs.
#[test]
fn crashed_guest_waits_for_the_host_daemon() -> Result<()> {
    let crash = "loop_count = 2\nloop_delay_s = 5";
    let Some(files) = Files::running_with("waits", "", crash)? else { return Ok(()) };
    let vm = &files.vm;
    files.verify()?;
    vm.panic()?;
    vm.wait_state("crashed")?;
    vm.kill_keeper()?;
    vm.start_keeper()?;
    let status = vm.status()?;
    assert_eq!((status.state, status.incarnation), (MachineState::Paused, 1));
    let why = status.state_why.unwrap_or_default();
    assert!(why.contains("systemctl start hearth-host") && why.contains("virsh destroy waits"), "{why}");
    vm.must(&["kill", "-STOP", &vm.qemu_pid()?], "")?;
    vm.start_host()?;
    vm.wait_next_boot()?;
    files.assert_warm()?;
    let dumped = files.wait_dump(1)?;
    assert_eq!(dumped.state, DumpState::Complete);
    assert!(dumped.warnings.iter().any(|warning| warning.contains("no registers")), "{dumped:?}");
    let dump = VmcoreFile::open(Path::new(&dumped.file)).expect("the dump can be read");
    assert!(dump.is_complete() && dump.notes().registers().count() == 0);
    // Its next keeper dies before its next start.
    vm.panic()?;
    vm.wait_until("the wait of a crash loop", || Ok(vm.status()?.next_start.is_some()))?;
    vm.kill_keeper()?;
    vm.wait_next_boot()?;
    files.verify()
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
    let memory = vm.status()?.memory;
    assert!(memory.peak_bytes <= memory.budget_bytes * 103 / 100, "{memory:?}");
    Ok(())
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

/// The machine of its own that `hearth import` makes, with the same disk. libvirt's domain stays, and works again afterwards.
#[test]
fn shut_off_domain_becomes_a_machine_of_its_own() -> Result<()> {
    let Some(files) = Files::define("moves")? else { return Ok(()) };
    let vm = &files.vm;
    let definition = vm.virsh("dumpxml", &["--inactive"])?;
    let folder = vm.folder().join("machine").display().to_string();
    let import = ["import", "moves", "--folder", &folder];
    vm.start()?;
    let (code, said) = vm.try_hearth(&import)?;
    assert!(code == 1 && said.contains("virsh shutdown moves") && !vm.folder().join("machine").exists(), "{said}");
    vm.virsh("managedsave", &[])?;
    let (code, said) = vm.try_hearth(&import)?;
    assert!(code == 1 && said.contains("virsh managedsave-remove moves"), "{said}");
    vm.virsh("managedsave-remove", &[])?;
    let said = vm.hearth(&import)?;
    for words in ["vda: ", "data.img (raw)", "uuid: a machine has none", "memballoon: ", "Start it with `hearth run"] {
        assert!(said.contains(words), "{words} is missing in {said}");
    }
    assert_eq!(vm.virsh("dumpxml", &["--inactive"])?, definition, "the domain is unchanged");
    let (code, said) = vm.try_hearth(&import)?;
    assert!(code == 1 && said.contains("File exists"), "{said}");
    let file = format!("{folder}/machine.toml");
    vm.hearth(&["check", &file])?;

    let program = artifacts::hearth()?.display().to_string();
    let log = vm.folder().join("keeper.log").display().to_string();
    vm.must(&["sh", "-c", &format!("setsid '{program}' run {file} </dev/null >>{log} 2>&1 &")], "")?;
    vm.wait_until("it runs", || {
        let (code, said) = vm.try_hearth(&["status", "moves", "--json"])?;
        Ok(code == 0 && said.contains(r#""state":"running""#))
    })?;
    let verify = format!(
        "{{ grep -q ' /mnt ' /proc/mounts || mount /dev/vda /mnt; }} && for f in /mnt/f*; do probe verify $f {SEED} || exit 1; \
         done; sync; echo the files are w''hole >/dev/console"
    );
    // Its console takes commands as those of other test guests do.
    let ask = format!(
        "echo \"$1\" | base64 -w0 >{log}.command; {{ echo; echo 1 $(cat {log}.command); sleep 2; }} | \
         timeout 4 '{program}' console moves"
    );
    vm.wait_until("the machine's guest has its files", || {
        let said = vm.command(&["sh", "-c", &ask, "sh", &verify], "")?;
        Ok(String::from_utf8_lossy(&said.stdout).contains("the files are whole"))
    })?;
    // Two guests never have the disk.
    assert!(!vm.command(&["virsh", "start", "moves"], "")?.status.success());
    vm.hearth(&["stop", "moves", "--force"])?;
    vm.start()?;
    files.verify()
}

/// Writes records to the file system all the time.
const RECORDS: &str = r#"
mount -o noatime /dev/vda /mnt
(i=0
while :; do
  i=$((i+1)); printf 'record %08d\n' $i >>/mnt/records; cp /mnt/f1 /mnt/copy; sync -f /mnt/records
  echo $i >/tmp/written.new; mv /tmp/written.new /tmp/written
done) >/dev/null 2>&1 &
"#;
const MORE_RECORDS: &str = "while [ ! -s /tmp/written ]; do sleep 0.1; done; to=$(($(cat /tmp/written) + 3))
while [ $(cat /tmp/written) -lt $to ]; do sleep 0.1; done";

/// What the guest has written to a copy of its disk: the first so many records. Its file system is repaired first.
#[track_caller]
fn assert_records(copy: &Path) {
    let checked = Command::new("/usr/sbin/e2fsck").args(["-f", "-y"]).arg(copy).output().expect("e2fsck");
    assert!(matches!(checked.status.code(), Some(0 | 1)), "{}", String::from_utf8_lossy(&checked.stdout));
    images::check_ext4(copy, 0).expect("it is clean now");
    let read = Command::new("/usr/sbin/debugfs").args(["-R", "cat /records"]).arg(copy).output().expect("debugfs");
    let records = String::from_utf8_lossy(&read.stdout).into_owned();
    assert!(records.lines().count() > 2, "{records}");
    for (at, record) in records.lines().enumerate() {
        assert_eq!(record, format!("record {:08}", at + 1));
    }
}

/// The guest's agent is asked through libvirt. Without one the copy is crash-consistent, and says so.
#[test]
fn disk_of_a_domain_is_copied_and_exported() -> Result<()> {
    let images = tempfile::tempdir().expect("a folder");
    std::fs::set_permissions(images.path(), Permissions::from_mode(0o755)).expect("our own folder");
    let image = images.path().join("data.img");
    let files: Vec<_> = (0..FILES).map(|file| File::pattern(&format!("f{file}"), FILE_BYTES, SEED)).collect();
    images::ext4(&image, FILES as u64 + 64, &files)?;
    let disk = DomainDisk { target: "vda", image: &image, format: "raw", limits: None };
    let Some(vm) = LibvirtVm::define_with_agent("backup", MEMORY_MIB, &[disk])? else { return Ok(()) };
    let path = |name: &str| images.path().join(name);
    let copy =
        |name: &str| vm.try_hearth(&["copy-disk", "backup", "vda", path(name).to_str().expect("a path of ours")]);
    vm.hearth(&["attach", "backup", "--yes"])?;
    vm.start()?;
    vm.sh(RECORDS)?;
    vm.sh(MORE_RECORDS)?;

    let (code, said) = copy("crash")?;
    assert!(
        code == 0 && said.contains("are not frozen: virsh domfsfreeze") && said.contains("crash-consistent"),
        "{said}"
    );
    assert_records(&path("crash"));
    vm.sh(START_AGENT)?;
    vm.wait_until("libvirt sees the agent", || Ok(vm.virsh("guestinfo", &["--os"]).is_ok()))?;
    let (code, said) = copy("frozen")?;
    assert!(code == 0 && said.contains("file systems frozen") && !said.contains("crash-consistent"), "{said}");
    assert!(!images::ext4_needs_recovery(&path("frozen"))?, "a frozen file system has nothing to replay");
    assert_records(&path("frozen"));
    vm.sh(MORE_RECORDS)?;

    // A file that cannot be made: nobody has frozen the guest for it.
    let refused = format!(
        "mkdir {w}; printf '#!/bin/sh\necho \"$@\" >>{w}/log\nexec /usr/bin/virsh \"$@\"\n' >{w}/virsh; chmod 755 {w}/virsh
         touch {w}/log; export PATH={w}:$PATH
         if '{hearth}' copy-disk backup vda {taken}; then exit 1; fi
         if grep fsfreeze {w}/log; then exit 1; fi
         '{hearth}' copy-disk backup vda {w}/copy
         grep domfsfreeze {w}/log; grep domfsthaw {w}/log",
        w = path("wrapped").display(),
        hearth = artifacts::hearth()?.display(),
        taken = path("frozen").display(),
    );
    vm.must(&["sh", "-ec", &refused], "")?;

    // Served, read, and ended by a signal.
    let export = format!(
        "'{}' export backup vda >{out} 2>{out}.err & pid=$!
         for i in $(seq 600); do [ -s {out} ] && break; sleep 0.1; done
         qemu-img convert -f raw -O raw \"$(cat {out})\" {out}.img && kill $pid && wait $pid || {{ cat {out}.err; exit 1; }}",
        artifacts::hearth()?.display(),
        out = path("export").display()
    );
    vm.must(&["sh", "-c", &export], "")?;
    assert_records(&path("export.img"));
    vm.sh(MORE_RECORDS)?;
    let left = vm.must(&["sh", "-c", &format!("ls -A {} /run/hearth/backup", images.path().display())], "")?;
    assert!(!left.contains(".data.img") && !left.contains("export-"), "{left}");

    vm.virsh("destroy", &[])?;
    vm.wait_until("the domain is off", || Ok(vm.status()?.state == MachineState::Stopped))?;
    let (code, said) = copy("off")?;
    assert!(code == 1 && said.contains("the domain does not run"), "{said}");
    assert!(!path("off").exists());
    Ok(())
}

/// A raw and a qcow2 disk, both Hearth's: a start and a reset each count once.
#[test]
fn both_disks_of_a_domain_are_warm() -> Result<()> {
    let images = tempfile::tempdir().expect("a folder");
    std::fs::set_permissions(images.path(), Permissions::from_mode(0o755)).expect("our own folder");
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
    let verify = || {
        for disk in ["vda", "vdb"] {
            vm.sh(&format!("mkdir -p /{disk} && mount -o noatime /dev/{disk} /{disk}"))?;
            vm.sh(&format!("for f in /{disk}/f*; do probe verify $f {SEED} || {{ echo in $f; exit 1; }}; done"))?;
        }
        Ok::<_, hearth_vmtest::Error>(())
    };
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

/// UEFI's own driver reads the boot loader and the kernel before the next kernel runs.
#[test]
fn cache_survives_resets_of_a_domain_that_uefi_boots() -> Result<()> {
    let images = tempfile::tempdir().expect("a folder");
    std::fs::set_permissions(images.path(), Permissions::from_mode(0o755)).expect("our own folder");
    let [boot, data] = ["boot.img", "data.img"].map(|name| images.path().join(name));
    boot_disk::uefi(&boot, &artifacts::busybox(false)?)?;
    make_files(&data)?;
    let disks = [("vda", &boot), ("vdb", &data)];
    let disks = disks.map(|(target, image)| DomainDisk { target, image, format: "raw", limits: None });
    let name = "uefi";
    let domain = Domain { boot: None, ..Domain::of_busybox(name, MEMORY_MIB, &disks)? };
    let Some(vm) = LibvirtVm::define_domain(domain)? else { return Ok(()) };
    vm.hearth(&["attach", name, "--yes"])?;
    vm.start()?;
    vm.start_host()?;
    let verify = || {
        vm.sh("grep -q ' /mnt ' /proc/mounts || mount -o noatime /dev/vdb /mnt")?;
        vm.sh(&format!("for f in /mnt/f*; do probe verify $f {SEED} || {{ echo in $f; exit 1; }}; done"))
    };
    for number in 1..=2 {
        verify()?;
        vm.virsh("reset", &[])?;
        vm.wait_next_boot()?;
        let moved = |event: &EventKind| matches!(event, EventKind::BlocksRescued { released: true, left: 0, .. });
        let events = vm.events()?;
        assert_eq!(events.iter().filter(|record| moved(&record.event)).count(), number, "{events:?}");
        verify()?;
        let status = vm.status()?;
        assert!(status.ember.pages_served >= PAGES * 9 / 10, "{:?}", status.ember);
        let memory = status.memory;
        assert!(memory.peak_bytes <= memory.budget_bytes * 103 / 100, "{memory:?}");
    }
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
        let memory = vm.status()?.memory;
        assert!(memory.peak_bytes <= memory.budget_bytes * 103 / 100, "{memory:?}");
        vm.kill_qemu()?;
        vm.start()?;
        files.assert_warm()?;
        assert_eq!(files.ember()?.refused.trimmed, 0, "{:?}", files.ember()?);
    }
    Ok(())
}

/// Its definition is libvirt's own again, and its keeper ends with the crashed guest.
#[test]
fn domain_detached_while_it_ran_comes_back_from_its_crash() -> Result<()> {
    let Some(files) = Files::running("left")? else { return Ok(()) };
    let vm = &files.vm;
    vm.start_host()?;
    files.verify()?;
    vm.hearth(&["detach", "left"])?;
    vm.panic()?;
    vm.wait_next_boot()?;
    files.verify()?;
    assert_eq!(vm.try_hearth(&["status", "left"])?.0, 3, "it has no keeper");
    Ok(())
}
