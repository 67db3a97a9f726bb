//! Strangers: somebody writes to an image while its machine has no guest. What is held of it is dropped, with a word, and the next
//! guest reads what is on the disk.

use std::os::unix::fs::FileExt;
use std::path::Path;

use hearth_vmtest::{Disk, Drives, LoopDevice, Result, TestVm, TestVmBuilder, Volumes};
use serde_json::Value;

use super::{dropped, kill_all, machine, number, plan, ready, remount};

/// Between the table of partitions and the first one: no file system sees it.
const GAP: u64 = 4096;
const STRANGER: &str = "a stranger";

/// Two crashes are a loop, and only an order ends it.
fn looping(name: &str, volumes: &Volumes) -> TestVmBuilder {
    [("loop_count", 2), ("loop_window_s", 86_400), ("loop_delay_s", 86_400), ("loop_delay_max_s", 86_400)]
        .into_iter()
        .fold(machine(name, volumes), |builder, (key, value)| builder.crash_setting(key, value))
}

/// One that has crashed once.
fn boot_and_crash(builder: TestVmBuilder) -> Result<TestVm> {
    let vm = builder.boot()?;
    vm.panic()?;
    vm.wait_incarnation(2)?;
    Ok(vm)
}

/// What a guest finds there. It has read it, so the next boot would have it from memory.
fn gap(vm: &TestVm) -> Result<String> {
    let said = vm.sh(&format!("dd if=/dev/vda bs={GAP} skip=1 count=1 2>/dev/null | head -c {}", STRANGER.len()))?;
    Ok(said.trim_matches('\0').trim_end().to_owned())
}

fn write_behind(vm: &TestVm) {
    write_to(&vm.folder().join("disk0.img"));
}

fn write_to(image: &Path) {
    let image = std::fs::File::options().write(true).open(image).expect("our own image");
    image.write_all_at(STRANGER.as_bytes(), GAP).and_then(|()| image.sync_all()).expect("our own image");
}

/// Mounts, looks, and is ready; and leaves the image alone from then on.
fn boot_and_rest(vm: &TestVm, volumes: &Volumes) -> Result<Value> {
    volumes.mount(vm)?;
    vm.sh("umount /v/*")?;
    ready(vm)
}

fn crash_and_wait(vm: &TestVm, incarnation: u64) -> Result<()> {
    vm.panic()?;
    let waits = |event: &Value| event["kind"] == "crash_loop" && event["incarnation"] == incarnation;
    vm.wait_event("it waits for its next start", waits).map(drop)
}

#[test]
fn an_image_that_is_changed_between_two_guests_is_not_read_from_memory() -> Result<()> {
    let volumes = Volumes::make(4)?;
    let vm = boot_and_crash(looping("between", &volumes))?;
    assert_eq!(gap(&vm)?, "");
    boot_and_rest(&vm, &volumes)?;
    crash_and_wait(&vm, 2)?;
    vm.reboot()?;
    vm.wait_incarnation(3)?;
    assert_eq!((gap(&vm)?.as_str(), dropped(&vm)), ("", None), "nobody was there");
    let plan = boot_and_rest(&vm, &volumes)?;
    assert!(plan["hit_pct"].as_f64() >= Some(95.0), "{plan}");

    crash_and_wait(&vm, 3)?;
    write_behind(&vm);
    vm.reboot()?;
    vm.wait_incarnation(4)?;
    assert_eq!(gap(&vm)?, STRANGER);
    let why = dropped(&vm).expect("what was held is dropped, with a word");
    assert!(why.ends_with("disk0.img was changed while nobody guarded it"), "{why}");
    let recovery = vm.explain()?["recovery"].clone();
    assert_eq!((&recovery["warm"], &recovery["why_cold"]), (&false.into(), &why.into()), "{recovery}");
    volumes.mount(&vm)?;
    volumes.unmount_and_check(&vm)
}

/// The boot set of a keeper that is killed while there is no guest is as old as the guest's end, whatever became of the image since.
#[test]
fn a_keeper_that_dies_without_a_guest_does_not_vouch_for_what_came_after_it() -> Result<()> {
    let volumes = Volumes::make(4)?;
    let vm = boot_and_crash(looping("vouches", &volumes))?;
    assert_eq!(gap(&vm)?, "");
    boot_and_rest(&vm, &volumes)?;
    crash_and_wait(&vm, 2)?;
    write_behind(&vm);
    // Long enough for a keeper that goes on noting what the images are, about once a second.
    std::thread::sleep(std::time::Duration::from_secs(3));
    vm.kill_keeper()?;
    vm.restart_keeper()?;
    vm.wait_incarnation(3)?;
    assert_eq!(gap(&vm)?, STRANGER);
    let why = dropped(&vm).expect("what was held is dropped, with a word");
    assert!(why.ends_with("disk0.img was changed while nobody guarded it"), "{why}");
    Ok(())
}

/// Nobody notes when a block device was written to: what is held of one outlives its guest, and not its keeper as well.
#[test]
fn of_a_block_device_nothing_is_held_once_nobody_was_there() -> Result<()> {
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
    assert!(number(&second, "/disks/0/hits") > 0, "{second}");
    volumes.append(&vm, "two")?;

    kill_all(&vm)?;
    write_to(device.path());
    vm.restart_keeper()?;
    vm.wait_incarnation(3)?;
    assert_eq!(gap(&vm)?, STRANGER);
    let why = dropped(&vm).expect("what was held is dropped, with a word");
    assert!(why.ends_with("is a block device, of which nobody can tell whether it was written to"), "{why}");
    volumes.mount(&vm)?;
    assert_eq!(volumes.read(&vm)?, volumes.expected(&["one", "two"]));
    volumes.unmount_and_check(&vm)?;
    vm.stop().map(drop)
}

#[test]
fn an_image_that_is_changed_before_the_stop_or_after_it_is_not_read_from_what_was_saved() -> Result<()> {
    let volumes = Volumes::make(4)?;
    let state = tempfile::tempdir().expect("a temporary folder");
    let file = state.path().join("boot-set");
    let kept = remount([("persist", true.into()), ("persist_file", file.display().to_string().into())]);
    let builder = looping("saved", &volumes).setting("remount", kept).dumps();
    // A dump that takes as long as the test wants.
    let builder =
        builder.crash_setting("level", 1).crash_setting("compression", "none").crash_setting("mib_per_second", 4);
    let vm = builder.boot()?;
    assert_eq!(gap(&vm)?, "");
    boot_and_rest(&vm, &volumes)?;
    vm.stop()?;
    assert!(file.is_file(), "{:#?}", vm.events());
    write_behind(&vm);
    vm.restart_keeper()?;
    vm.wait_boots(2)?;
    assert_eq!(gap(&vm)?, STRANGER);
    let why = dropped(&vm).expect("what was saved is dropped, with a word");
    assert!(why.ends_with("disk0.img was changed while nobody guarded it"), "{why}");
    vm.sh(&format!("dd if=/dev/zero of=/dev/vda bs={GAP} seek=1 count=1 conv=fsync,notrunc 2>/dev/null"))?;
    boot_and_rest(&vm, &volumes)?;
    assert!(number(&plan(&vm)?, "/held_blocks") > 0);

    // While its last dump is written the machine stops, and has no guest.
    let before = vm.events().len();
    vm.panic()?;
    vm.wait_boots(3)?;
    assert_eq!(gap(&vm)?, "");
    vm.panic()?;
    vm.wait_event("it waits for its next start", |event| event["kind"] == "crash_loop")?;
    vm.cli(&["stop", vm.name(), "--no-wait"])?;
    vm.wait_status("it waits for its dump", |status| {
        status["state_why"].as_str().is_some_and(|why| why.starts_with("a dump is being written"))
    })?;
    write_behind(&vm);
    vm.stop_at_once()?;
    let word =
        |event: &Value| event["kind"] == "disk_forgotten" && event["why"].to_string().contains("nobody guarded it");
    assert!(vm.events()[before..].iter().any(word), "{:#?}", vm.events());
    vm.restart_keeper()?;
    vm.wait_boots(4)?;
    assert_eq!(gap(&vm)?, STRANGER);
    Ok(())
}
