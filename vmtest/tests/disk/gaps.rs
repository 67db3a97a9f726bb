//! Gaps: times in which nobody guards a machine's images. Whatever a stranger does to one of them meanwhile, the next guest reads
//! what the image holds, and what memory holds of the others is as good as before.

use std::collections::BTreeSet;
use std::fs;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Instant;

use hearth_vmtest::{Disk, Drives, LoopDevice, Result, TestVm, TestVmBuilder, patience, pattern, processes};
use serde_json::Value;
use toml::Table;

use super::{MIB, count, fill, tool};

/// What a stranger does to the image of a disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Deed {
    Nothing,
    Edit,
    /// Another file takes its name.
    Exchange,
    Grow,
    EditBase,
    EditDevice,
}

/// A disk for each deed, by its place.
const DEEDS: [Deed; 6] = [Deed::Nothing, Deed::Edit, Deed::Exchange, Deed::Grow, Deed::EditBase, Deed::EditDevice];

/// Images of which a stranger gets hold.
struct Images {
    home: tempfile::TempDir,
    /// None: this host has no loop devices for us.
    device: Option<LoopDevice>,
}

impl Images {
    fn make() -> Self {
        let home = tempfile::tempdir_in("/var/tmp").expect("a folder");
        for place in 0..DEEDS.len() {
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

    /// Which of the disks there are.
    fn places(&self) -> std::ops::Range<usize> {
        0..if self.device.is_some() { 6 } else { 5 }
    }

    fn disk(&self, place: usize) -> Disk {
        match (DEEDS[place], &self.device) {
            (Deed::EditBase, _) => Disk::in_place(&self.home.path().join("4.qcow2")).setting("format", "qcow2"),
            (Deed::EditDevice, Some(device)) => Disk::in_place(device.path()),
            _ => Disk::in_place(&self.file(place)),
        }
    }

    fn attach(&self, builder: TestVmBuilder) -> TestVmBuilder {
        self.places().map(|place| self.disk(place)).fold(builder, TestVmBuilder::disk)
    }

    fn strike(&self, place: usize) {
        let file = self.file(place);
        match (DEEDS[place], &self.device) {
            (Deed::Nothing, _) => {}
            (Deed::Edit | Deed::EditBase, _) => edit(&file),
            (Deed::EditDevice, Some(device)) => edit(device.path()),
            (Deed::EditDevice, None) => {}
            (Deed::Exchange, _) => {
                let other = self.home.path().join("other.img");
                fill(&other, MIB, 99);
                fs::rename(&other, &file).expect("our own image");
            }
            (Deed::Grow, _) => {
                edit(&file);
                let grown = fs::File::options().write(true).open(&file).expect("our own image");
                grown.set_len(2 * MIB as u64).expect("our own image");
            }
        }
    }

    /// What the image holds now, as a sum of its first MiB.
    fn sum(&self, place: usize) -> String {
        let path = match (DEEDS[place], &self.device) {
            (Deed::EditDevice, Some(device)) => device.path().to_owned(),
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

/// Reads each disk as the guest has it, which keeps what it has read: it drops that when nobody has the device open any more.
fn guest_sums(vm: &TestVm, images: &Images) -> Result<Vec<String>> {
    let read = |place: usize| {
        let letter = char::from(b'a' + place as u8);
        let device = format!("/dev/vd{letter}");
        let hold = format!("(sleep 99999 <{device} >/dev/null 2>&1 &)");
        vm.sh(&format!("{hold}; dd if={device} bs=64k count=16 2>/dev/null | md5sum")).map(|said| first_word(&said))
    };
    images.places().map(read).collect()
}

/// The next guest reads what the images hold. Each deed was done to its own disk, and costs what was held of that one alone.
fn check(vm: &TestVm, images: &Images, deeds: &[Deed]) -> Result<()> {
    let sums = guest_sums(vm, images)?;
    for place in images.places() {
        assert_eq!(sums[place], images.sum(place), "{:?} of disk {place}: {:#?}", DEEDS[place], vm.events());
    }
    let warm_bytes = count(vm, 0, "read_warm_bytes")?;
    assert!(warm_bytes >= MIB as u64 * 9 / 10, "the disk that nobody touched is read from memory: {warm_bytes}");
    let forgotten: BTreeSet<String> = forgotten(vm).into_iter().map(|event| text(&event["disk"])).collect();
    let struck = images.places().filter(|place| DEEDS[*place] != Deed::Nothing && deeds.contains(&DEEDS[*place]));
    assert_eq!(forgotten, struck.map(|place| format!("disk{place}")).collect(), "{:#?}", vm.events());
    Ok(())
}

fn text(value: &Value) -> String {
    value.as_str().unwrap_or_default().to_owned()
}

fn forgotten(vm: &TestVm) -> Vec<Value> {
    vm.events().into_iter().filter(|event| event["kind"] == "disk_forgotten").collect()
}

fn machine(name: &str) -> TestVmBuilder {
    let builder = TestVm::busybox(name).memory_mib(192);
    [("loop_count", 2), ("loop_window_s", 86_400), ("loop_delay_s", 86_400), ("loop_delay_max_s", 86_400)]
        .into_iter()
        .fold(builder, |builder, (key, value)| builder.crash_setting(key, value))
}

/// What outlives keeper and QEMU together.
fn with_boot_set(builder: TestVmBuilder) -> TestVmBuilder {
    let remount = [("limit", "32MiB"), ("ready_after", "1d")].map(|(key, value)| (key.to_owned(), value.into()));
    builder.setting("remount", Table::from_iter(remount))
}

#[test]
fn images_changed_in_a_crash_loop_are_read_anew() -> Result<()> {
    let images = Images::make();
    let vm = images.attach(machine("gap-loop")).boot()?;
    vm.kill_qemu()?;
    vm.wait_incarnation(2)?;
    guest_sums(&vm, &images)?;
    vm.kill_qemu()?;
    vm.wait_event("it waits for its next start", |event| event["kind"] == "crash_loop")?;
    images.places().for_each(|place| images.strike(place));
    vm.reboot()?;
    vm.wait_incarnation(3)?;
    check(&vm, &images, &DEEDS)?;
    assert_eq!(vm.sh("blockdev --getsize64 /dev/vdd")?.trim(), (2 * MIB).to_string(), "it has grown");
    vm.sh("echo from the guest | dd of=/dev/vdc seek=9 conv=fsync,notrunc 2>/dev/null")?;
    let exchanged = fs::read(images.file(2)).expect("our own image");
    assert!(exchanged[9 * 512..].starts_with(b"from the guest"), "it is the file that the path leads to");
    Ok(())
}

#[test]
fn images_changed_under_a_paused_guest_are_read_anew() -> Result<()> {
    let images = Images::make();
    let vm = images.attach(machine("gap-pause")).setting("on_panic", "pause").boot()?;
    guest_sums(&vm, &images)?;
    vm.panic()?;
    vm.wait_event("pause", |event| event["kind"] == "state_changed" && event["to"] == "paused")?;
    images.places().for_each(|place| images.strike(place));
    vm.reboot()?;
    vm.wait_incarnation(2)?;
    check(&vm, &images, &DEEDS)
}

/// The guest keeps the file that it has, which the next keeper insists on.
#[test]
fn images_changed_under_a_living_qemu_are_read_anew() -> Result<()> {
    let images = Images::make();
    let vm = images.attach(machine("gap-keeper")).boot()?;
    guest_sums(&vm, &images)?;
    let (nonce, qemu) = (vm.nonce()?, vm.qemu_pid()?.as_raw_nonzero());
    vm.kill_keeper()?;

    // Nobody else gets an image that a guest has.
    let holder = format!("is in use by process {qemu} (qemu");
    for place in images.places() {
        let said = TestVm::busybox("gap-other").disk(images.disk(place)).check()?;
        assert!(said.status != 0 && said.text().contains(&holder), "{:?}: {}", DEEDS[place], said.text());
    }
    images.places().filter(|place| DEEDS[*place] != Deed::Exchange).for_each(|place| images.strike(place));
    let (image, aside) = (images.file(2), images.home.path().join("aside"));
    fs::rename(&image, &aside).expect("our own image");
    fill(&image, MIB, 7);
    vm.restart_keeper()?;
    assert!(!vm.wait_keeper_end()?.success());
    let why = format!("with another file as disk disk2: {} was replaced", image.display());
    assert!(vm.keeper_log().contains(&why), "{}", vm.keeper_log());
    fs::rename(&aside, &image).expect("our own image");

    vm.restart_keeper()?;
    vm.wait_event("take-over", |event| event["kind"] == "keeper_took_over")?;
    vm.wait_running()?;
    assert_eq!(vm.nonce()?, nonce, "it is the same guest");
    vm.reboot_forced()?;
    vm.wait_incarnation(2)?;
    // That it was put back has changed it, too.
    check(&vm, &images, &DEEDS)?;
    vm.stop_at_once()?;
    // The kernel lets go of what io_uring had open a moment after the keeper's end.
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

/// A hop gives the lock to the second QEMU, and a keeper that is exchanged in its process leaves no gap.
#[test]
fn a_replaced_qemu_or_keeper_leaves_no_gap() -> Result<()> {
    let images = Images::make();
    let vm = images.attach(machine("gap-none")).boot()?;
    guest_sums(&vm, &images)?;
    vm.rejuvenate()?;
    vm.cli(&["upgrade-keeper", vm.name()])?;
    vm.wait_event("take-over", |event| event["kind"] == "keeper_took_over")?;
    vm.wait_running()?;
    assert_eq!(forgotten(&vm), [] as [Value; 0]);
    vm.kill_keeper()?;
    let said = TestVm::busybox("gap-none-other").disk(images.disk(1)).check()?;
    assert!(said.status != 0 && said.text().contains("is in use by process"), "{}", said.text());
    vm.restart_keeper()?;
    vm.wait_running()?;
    vm.reboot_forced()?;
    vm.wait_incarnation(2)?;
    check(&vm, &images, &[Deed::EditDevice])
}

#[test]
fn images_changed_while_all_is_dead_are_read_anew() -> Result<()> {
    let images = Images::make();
    let vm = with_boot_set(images.attach(machine("gap-dead"))).boot()?;
    guest_sums(&vm, &images)?;
    let qemu = vm.qemu_pid()?;
    vm.kill_keeper()?;
    processes::kill(qemu).expect("QEMU runs");
    assert!(processes::wait_end(qemu, patience(20)));
    images.places().for_each(|place| images.strike(place));
    vm.restart_keeper()?;
    vm.wait_incarnation(2)?;
    check(&vm, &images, &DEEDS)
}

/// The guest that was parked is given up for that.
#[test]
fn images_changed_under_a_parked_guest_are_read_anew() -> Result<()> {
    let images = Images::make();
    let vm = with_boot_set(images.attach(machine("gap-parked"))).boot()?;
    guest_sums(&vm, &images)?;
    let record = vm.folder().join("record.json").display().to_string();
    vm.cli(&["host-reload", "prepare", "--drill", "--record", &record])?;
    assert!(vm.wait_keeper_end()?.success());
    images.places().for_each(|place| images.strike(place));
    vm.restart_keeper()?;
    let lost = vm.wait_event("the guest is given up", |event| event["kind"] == "parked_lost")?;
    assert!(text(&lost["why"]).contains("was changed since"), "{lost}");
    vm.wait_incarnation(2)?;
    check(&vm, &images, &DEEDS)
}
