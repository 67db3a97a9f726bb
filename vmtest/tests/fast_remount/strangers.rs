//! Strangers: another program writes to an image while its machine has no guest. Memory of that image is dropped with an event,
//! and the next guest reads what is on the disk.

use std::os::unix::fs::FileExt;
use std::path::Path;

use hearth_api::RemountPlan;
use hearth_vmtest::{Disk, Drives, LoopDevice, Result, TestVm, TestVmBuilder, Volumes, event};

use super::{dropped, kill_all, machine, ready, remount};

/// An offset between the partition table and the first partition, which no file system reads.
const GAP: u64 = 4096;
const STRANGER: &str = "a stranger";

/// A machine for which two crashes are a crash loop that only a request ends.
fn looping(name: &str, volumes: &Volumes) -> TestVmBuilder {
    [("loop_count", 2), ("loop_window_s", 86_400), ("loop_delay_s", 86_400), ("loop_delay_max_s", 86_400)]
        .into_iter()
        .fold(machine(name, volumes), |builder, (key, value)| builder.crash_setting(key, value))
}

/// A machine that has crashed once.
fn boot_and_crash(builder: TestVmBuilder) -> Result<TestVm> {
    let vm = builder.boot()?;
    vm.panic()?;
    vm.wait_incarnation(2)?;
    Ok(vm)
}

/// The gap's contents as the guest reads them. Having read it, the guest's next boot would get it from memory.
fn gap(vm: &TestVm) -> Result<String> {
    let said = vm.sh(&format!("dd if=/dev/vda bs={GAP} skip=1 count=1 2>/dev/null | head -c {}", STRANGER.len()))?;
    Ok(said.trim_matches('\0').trim_end().to_owned())
}

fn write_as_stranger(vm: &TestVm) {
    write_to(&vm.folder().join("disk0.img"));
}

fn write_to(image: &Path) {
    let image = std::fs::File::options().write(true).open(image).expect("our own image");
    image.write_all_at(STRANGER.as_bytes(), GAP).and_then(|()| image.sync_all()).expect("our own image");
}

/// Mounts, unmounts and ends the boot; the guest does not use the image after that.
fn boot_and_rest(vm: &TestVm, volumes: &Volumes) -> Result<RemountPlan> {
    volumes.mount(vm)?;
    vm.sh("umount /v/*")?;
    ready(vm)
}

fn crash_and_wait(vm: &TestVm, incarnation: u32) -> Result<()> {
    vm.panic()?;
    let waits = event!(|event| CrashLoop if event.incarnation == incarnation);
    vm.wait_event("a crash loop", waits).map(drop)
}

#[test]
fn image_changed_between_guests_is_reread() -> Result<()> {
    let volumes = Volumes::make(4)?;
    let vm = boot_and_crash(looping("between", &volumes))?;
    assert_eq!(gap(&vm)?, "");
    boot_and_rest(&vm, &volumes)?;
    crash_and_wait(&vm, 2)?;
    vm.reboot()?;
    vm.wait_incarnation(3)?;
    assert_eq!((gap(&vm)?.as_str(), dropped(&vm)), ("", None), "the image was not changed");
    let plan = boot_and_rest(&vm, &volumes)?;
    assert!(plan.hit_pct >= Some(95.0), "{plan:?}");

    crash_and_wait(&vm, 3)?;
    write_as_stranger(&vm);
    vm.reboot()?;
    vm.wait_incarnation(4)?;
    assert_eq!(gap(&vm)?, STRANGER);
    let why = dropped(&vm).expect("an event names the dropped disk");
    assert!(why.ends_with("disk0.img was changed while nobody guarded it"), "{why}");
    let recovery = vm.explain()?.recovery.expect("the machine has recovered");
    assert_eq!((recovery.warm, &recovery.why_cold), (false, &Some(why)), "{recovery:?}");
    volumes.mount(&vm)?;
    volumes.unmount_and_check(&vm)
}

/// A keeper killed while there is no guest has noted the image as it was at the guest's end, whatever happened to the image
/// since.
#[test]
fn image_changed_before_keeper_dies_is_reread() -> Result<()> {
    let volumes = Volumes::make(4)?;
    let vm = boot_and_crash(looping("vouches", &volumes))?;
    assert_eq!(gap(&vm)?, "");
    boot_and_rest(&vm, &volumes)?;
    crash_and_wait(&vm, 2)?;
    write_as_stranger(&vm);
    // Long enough for a keeper that would note the images again, about once a second.
    std::thread::sleep(std::time::Duration::from_secs(3));
    vm.kill_keeper()?;
    vm.restart_keeper()?;
    vm.wait_incarnation(3)?;
    assert_eq!(gap(&vm)?, STRANGER);
    let why = dropped(&vm).expect("an event names the dropped disk");
    assert!(why.ends_with("disk0.img was changed while nobody guarded it"), "{why}");
    Ok(())
}

/// A block device has no modification time, so memory of it survives its guest, but not its keeper as well.
#[test]
fn unguarded_block_device_is_reread() -> Result<()> {
    let volumes = Volumes::make(4)?;
    let Some(device) = LoopDevice::over(&volumes.images()[0]) else { return Ok(()) };
    let builder = TestVm::busybox("device").memory_mib(256).setting("remount", remount([]));
    let vm = builder.disk(Disk::in_place(device.path())).boot()?;
    assert_eq!(gap(&vm)?, "");
    volumes.mount(&vm)?;
    volumes.append(&vm, "one")?;
    ready(&vm)?;
    vm.panic()?;
    vm.wait_incarnation(2)?;
    volumes.mount(&vm)?;
    assert_eq!(volumes.read(&vm)?, volumes.expected(&["one"]));
    let second = ready(&vm)?;
    assert!(second.disks[0].hits > 0, "{second:?}");
    volumes.append(&vm, "two")?;

    kill_all(&vm)?;
    write_to(device.path());
    vm.restart_keeper()?;
    vm.wait_incarnation(3)?;
    assert_eq!(gap(&vm)?, STRANGER);
    let why = dropped(&vm).expect("an event names the dropped disk");
    assert!(why.ends_with("is a block device, on which writes leave no trace"), "{why}");
    volumes.mount(&vm)?;
    assert_eq!(volumes.read(&vm)?, volumes.expected(&["one", "two"]));
    volumes.unmount_and_check(&vm)?;
    vm.stop().map(drop)
}

#[test]
fn image_changed_around_a_stop_is_reread() -> Result<()> {
    let volumes = Volumes::make(4)?;
    let state = tempfile::tempdir().expect("a temporary folder");
    let file = state.path().join("boot-set");
    let kept = remount([("persist", true.into()), ("persist_file", file.display().to_string().into())]);
    let builder = looping("saved", &volumes).setting("remount", kept).dumps();
    // A slow dump.
    let builder =
        builder.crash_setting("level", 1).crash_setting("compression", "none").crash_setting("mib_per_second", 4);
    let vm = builder.boot()?;
    assert_eq!(gap(&vm)?, "");
    boot_and_rest(&vm, &volumes)?;
    vm.stop()?;
    assert!(file.is_file(), "{:#?}", vm.events());
    write_as_stranger(&vm);
    vm.restart_keeper()?;
    vm.wait_boots(2)?;
    assert_eq!(gap(&vm)?, STRANGER);
    let why = dropped(&vm).expect("an event names the dropped disk");
    assert!(why.ends_with("disk0.img was changed while nobody guarded it"), "{why}");
    vm.sh(&format!("dd if=/dev/zero of=/dev/vda bs={GAP} seek=1 count=1 conv=fsync,notrunc 2>/dev/null"))?;
    boot_and_rest(&vm, &volumes)?;
    assert!(vm.remount_plan()?.held_blocks > 0);

    // The machine is stopping and has no guest while its last dump is written.
    let before = vm.events().len();
    vm.panic()?;
    vm.wait_boots(3)?;
    assert_eq!(gap(&vm)?, "");
    vm.panic()?;
    vm.wait_event("a crash loop", event!(CrashLoop))?;
    vm.cli(&["stop", vm.name(), "--no-wait"])?;
    vm.wait_status("the stop waits for the dump", |status| {
        status.state_why.as_ref().is_some_and(|why| why.starts_with("a dump is being written"))
    })?;
    write_as_stranger(&vm);
    vm.stop_at_once()?;
    let dropped_disk = event!(DiskForgotten { why, .. } if why.contains("nobody guarded it"));
    assert!(vm.events()[before..].iter().find_map(dropped_disk).is_some(), "{:#?}", vm.events());
    vm.restart_keeper()?;
    vm.wait_boots(4)?;
    assert_eq!(gap(&vm)?, STRANGER);
    Ok(())
}
