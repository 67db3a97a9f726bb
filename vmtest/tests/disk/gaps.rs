//! Gaps: times in which no keeper guards a machine's images. Another program changes one of them then; the next guest reads what
//! that image holds, and memory of the other images stays valid.

use std::collections::BTreeSet;
use std::fs;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Instant;

use hearth_api::MachineState;
use hearth_vmtest::{Disk, Drives, LoopDevice, Result, TestVm, TestVmBuilder, event, patience, pattern, processes};
use toml::Table;

use super::{MIB, disk_status, fill, tool};

/// A change to a disk's image from outside.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Change {
    Nothing,
    Edit,
    /// Another file takes the image's name.
    Exchange,
    Grow,
    EditBase,
    EditDevice,
}

/// The change to each disk, by its position.
const CHANGES: [Change; 6] =
    [Change::Nothing, Change::Edit, Change::Exchange, Change::Grow, Change::EditBase, Change::EditDevice];

/// Images that the test changes from outside.
struct Images {
    home: tempfile::TempDir,
    /// `None` without permission to make a loop device.
    device: Option<LoopDevice>,
}

impl Images {
    fn make() -> Self {
        let home = tempfile::tempdir_in("/var/tmp").expect("a folder");
        for place in 0..CHANGES.len() {
            fill(&home.path().join(format!("{place}.img")), MIB, place as u64);
        }
        let (base, overlay) = (home.path().join("4.img"), home.path().join("4.qcow2"));
        let [base, overlay] = [&base, &overlay].map(|path| path.to_str().expect("a path of ours"));
        tool("qemu-img", &["create", "-q", "-f", "qcow2", "-F", "raw", "-b", base, overlay]);
        let device = LoopDevice::over(&home.path().join("5.img"));
        Self { home, device }
    }

    fn file(&self, place: usize) -> PathBuf {
        self.home.path().join(format!("{place}.img"))
    }

    /// Positions of the disks that exist.
    fn places(&self) -> std::ops::Range<usize> {
        0..if self.device.is_some() { 6 } else { 5 }
    }

    fn disk(&self, place: usize) -> Disk {
        match (CHANGES[place], &self.device) {
            (Change::EditBase, _) => Disk::in_place(&self.home.path().join("4.qcow2")).setting("format", "qcow2"),
            (Change::EditDevice, Some(device)) => Disk::in_place(device.path()),
            _ => Disk::in_place(&self.file(place)),
        }
    }

    fn attach(&self, builder: TestVmBuilder) -> TestVmBuilder {
        self.places().map(|place| self.disk(place)).fold(builder, TestVmBuilder::disk)
    }

    fn change(&self, place: usize) {
        let file = self.file(place);
        match (CHANGES[place], &self.device) {
            (Change::Nothing, _) => {}
            (Change::Edit | Change::EditBase, _) => edit(&file),
            (Change::EditDevice, Some(device)) => edit(device.path()),
            (Change::EditDevice, None) => {}
            (Change::Exchange, _) => {
                let other = self.home.path().join("other.img");
                fill(&other, MIB, 99);
                fs::rename(&other, &file).expect("our own image");
            }
            (Change::Grow, _) => {
                edit(&file);
                let grown = fs::File::options().write(true).open(&file).expect("our own image");
                grown.set_len(2 * MIB as u64).expect("our own image");
            }
        }
    }

    /// Checksum of the image's first MiB.
    fn sum(&self, place: usize) -> String {
        let path = match (CHANGES[place], &self.device) {
            (Change::EditDevice, Some(device)) => device.path().to_owned(),
            _ => self.file(place),
        };
        sum_with(&format!("dd if={} bs=64k count=16 2>/dev/null | md5sum", path.display()))
    }
}

fn edit(path: &Path) {
    let image = fs::File::options().write(true).open(path).expect("our own image");
    let strange = pattern::bytes("a stranger", 8192, 3);
    image.write_all_at(&strange, 5 * 4096).and_then(|()| image.sync_all()).expect("our own image");
}

fn sum_with(command: &str) -> String {
    let output = Command::new("sh").args(["-c", command]).output().expect("sh is everywhere");
    first_word(&String::from_utf8_lossy(&output.stdout))
}

fn first_word(text: &str) -> String {
    text.split_whitespace().next().unwrap_or_default().to_owned()
}

/// Checksums of the disks as the guest reads them. A process keeps each device open, since the guest drops its cache of a device
/// that nobody has open.
fn guest_sums(vm: &TestVm, images: &Images) -> Result<Vec<String>> {
    let read = |place: usize| {
        let letter = char::from(b'a' + place as u8);
        let device = format!("/dev/vd{letter}");
        let hold = format!("(sleep 99999 <{device} >/dev/null 2>&1 &)");
        vm.sh(&format!("{hold}; dd if={device} bs=64k count=16 2>/dev/null | md5sum")).map(|said| first_word(&said))
    };
    images.places().map(read).collect()
}

/// Asserts that the guest reads what the images hold, and that exactly the disks with these changes lost their memory.
fn check(vm: &TestVm, images: &Images, changes: &[Change]) -> Result<()> {
    let sums = guest_sums(vm, images)?;
    for place in images.places() {
        assert_eq!(sums[place], images.sum(place), "{:?} of disk {place}: {:#?}", CHANGES[place], vm.events());
    }
    let warm_bytes = disk_status(vm, 0)?.read_warm_bytes;
    assert!(warm_bytes >= MIB as u64 * 9 / 10, "the unchanged disk must be read from memory: {warm_bytes}");
    let changed =
        images.places().filter(|place| CHANGES[*place] != Change::Nothing && changes.contains(&CHANGES[*place]));
    assert_eq!(forgotten(vm), changed.map(|place| format!("disk{place}")).collect(), "{:#?}", vm.events());
    Ok(())
}

/// The disks that lost their memory.
fn forgotten(vm: &TestVm) -> BTreeSet<String> {
    vm.events().iter().filter_map(event!(DiskForgotten { disk, .. } => disk)).collect()
}

fn machine(name: &str) -> TestVmBuilder {
    let builder = TestVm::busybox(name).memory_mib(192);
    [("loop_count", 2), ("loop_window_s", 86_400), ("loop_delay_s", 86_400), ("loop_delay_max_s", 86_400)]
        .into_iter()
        .fold(builder, |builder, (key, value)| builder.crash_setting(key, value))
}

/// Adds a boot set, which survives keeper and QEMU together.
fn with_boot_set(builder: TestVmBuilder) -> TestVmBuilder {
    let remount = [("limit", "32MiB"), ("ready_after", "1d")].map(|(key, value)| (key.to_owned(), value.into()));
    builder.setting("remount", Table::from_iter(remount))
}

#[test]
fn images_changed_in_a_crash_loop_are_reread() -> Result<()> {
    let images = Images::make();
    let vm = images.attach(machine("gap-loop")).boot()?;
    vm.kill_qemu()?;
    vm.wait_incarnation(2)?;
    guest_sums(&vm, &images)?;
    vm.kill_qemu()?;
    vm.wait_event("a crash loop", event!(CrashLoop))?;
    images.places().for_each(|place| images.change(place));
    vm.reboot()?;
    vm.wait_incarnation(3)?;
    check(&vm, &images, &CHANGES)?;
    assert_eq!(vm.sh("blockdev --getsize64 /dev/vdd")?.trim(), (2 * MIB).to_string(), "the disk has grown");
    vm.sh("echo from the guest | dd of=/dev/vdc seek=9 conv=fsync,notrunc 2>/dev/null")?;
    let exchanged = fs::read(images.file(2)).expect("our own image");
    assert!(exchanged[9 * 512..].starts_with(b"from the guest"), "the guest uses the file at the path");
    Ok(())
}

#[test]
fn images_changed_under_a_paused_guest_are_reread() -> Result<()> {
    let images = Images::make();
    let vm = images.attach(machine("gap-pause")).setting("on_panic", "pause").boot()?;
    guest_sums(&vm, &images)?;
    vm.panic()?;
    vm.wait_event("pause", event!(StateChanged { to: MachineState::Paused, .. }))?;
    images.places().for_each(|place| images.change(place));
    vm.reboot()?;
    vm.wait_incarnation(2)?;
    check(&vm, &images, &CHANGES)
}

/// The guest keeps its file, so the next keeper refuses another one at the path.
#[test]
fn images_changed_under_a_living_qemu_are_reread() -> Result<()> {
    let images = Images::make();
    let vm = images.attach(machine("gap-keeper")).boot()?;
    guest_sums(&vm, &images)?;
    let (nonce, qemu) = (vm.nonce()?, vm.qemu_pid()?.as_raw_nonzero());
    vm.kill_keeper()?;

    // No other machine gets an image that a guest uses.
    let holder = format!("is in use by process {qemu} (qemu");
    for place in images.places() {
        let said = TestVm::busybox("gap-other").disk(images.disk(place)).check()?;
        assert!(said.status != 0 && said.text().contains(&holder), "{:?}: {}", CHANGES[place], said.text());
    }
    images.places().filter(|place| CHANGES[*place] != Change::Exchange).for_each(|place| images.change(place));
    let (image, aside) = (images.file(2), images.home.path().join("aside"));
    fs::rename(&image, &aside).expect("our own image");
    fill(&image, MIB, 7);
    vm.restart_keeper()?;
    assert!(!vm.wait_keeper_end()?.success());
    let why = format!("with another file as disk disk2: {} was replaced", image.display());
    assert!(vm.keeper_log().contains(&why), "{}", vm.keeper_log());
    fs::rename(&aside, &image).expect("our own image");

    vm.restart_keeper()?;
    vm.wait_event("take-over", event!(KeeperTookOver))?;
    vm.wait_running()?;
    assert_eq!(vm.nonce()?, nonce, "it is the same guest");
    vm.reboot_forced()?;
    vm.wait_incarnation(2)?;
    // Moving the file back has changed it, too.
    check(&vm, &images, &CHANGES)?;
    vm.stop_at_once()?;
    // The kernel closes what io_uring had open shortly after the keeper's end.
    let deadline = Instant::now() + patience(10);
    loop {
        let said = TestVm::busybox("gap-other").disk(images.disk(1)).check()?;
        if !said.text().contains("in use") {
            break;
        }
        assert!(Instant::now() < deadline, "{}", said.text());
    }
    Ok(())
}

/// A hop passes the lock to the second QEMU, and a keeper that is upgraded in its process leaves no gap.
#[test]
fn replaced_qemu_or_keeper_leaves_no_gap() -> Result<()> {
    let images = Images::make();
    let vm = images.attach(machine("gap-none")).boot()?;
    guest_sums(&vm, &images)?;
    vm.rejuvenate()?;
    vm.cli(&["upgrade-keeper", vm.name()])?;
    vm.wait_event("take-over", event!(KeeperTookOver))?;
    vm.wait_running()?;
    assert_eq!(forgotten(&vm), BTreeSet::new());
    vm.kill_keeper()?;
    let said = TestVm::busybox("gap-none-other").disk(images.disk(1)).check()?;
    assert!(said.status != 0 && said.text().contains("is in use by process"), "{}", said.text());
    vm.restart_keeper()?;
    vm.wait_running()?;
    vm.reboot_forced()?;
    vm.wait_incarnation(2)?;
    check(&vm, &images, &[Change::EditDevice])
}

#[test]
fn images_changed_while_all_is_dead_are_reread() -> Result<()> {
    let images = Images::make();
    let vm = with_boot_set(images.attach(machine("gap-dead"))).boot()?;
    guest_sums(&vm, &images)?;
    let qemu = vm.qemu_pid()?;
    vm.kill_keeper()?;
    processes::kill(qemu).expect("QEMU runs");
    assert!(processes::wait_end(qemu, patience(20)));
    images.places().for_each(|place| images.change(place));
    vm.restart_keeper()?;
    vm.wait_incarnation(2)?;
    check(&vm, &images, &CHANGES)
}

/// The parked guest is discarded because of the changes.
#[test]
fn images_changed_under_a_parked_guest_are_reread() -> Result<()> {
    let images = Images::make();
    let vm = with_boot_set(images.attach(machine("gap-parked"))).boot()?;
    guest_sums(&vm, &images)?;
    let record = vm.folder().join("record.json").display().to_string();
    vm.cli(&["host-reload", "prepare", "--drill", "--record", &record])?;
    assert!(vm.wait_keeper_end()?.success());
    images.places().for_each(|place| images.change(place));
    vm.restart_keeper()?;
    let why = vm.wait_event("a lost parked guest", event!(ParkedLost { why } => why))?;
    assert!(why.contains("was changed since"), "{why}");
    vm.wait_incarnation(2)?;
    check(&vm, &images, &CHANGES)
}
