//! Fast remount, as a guest and its operator see it: what a machine reads until it is ready, its next boot finds in memory,
//! and it is what the disk holds. Guests mount many small volumes, crash, and mount them again.

use std::os::unix::fs::{FileExt, MetadataExt};
use std::time::Instant;

use hearth_vmtest::{Disk, Drives, Result, TestVm, TestVmBuilder, Volumes, patience};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;
use toml::Table;

/// With a boot set that ends when the test says so.
fn machine(name: &str, volumes: &Volumes) -> TestVmBuilder {
    let settings = [("limit", "32MiB"), ("ready_after", "1d")];
    let remount: Table = settings.into_iter().map(|(key, value)| (key.to_owned(), value.into())).collect();
    TestVm::busybox(name).memory_mib(256).setting("remount", remount).disk(Disk::copy_of(volumes.image()))
}

fn plan(vm: &TestVm) -> Result<Value> {
    let text = vm.cli(&["remount-plan", vm.name(), "--json"])?;
    Ok(serde_json::from_str(&text).unwrap_or_else(|error| panic!("{error} in {text}")))
}

#[track_caller]
fn number(plan: &Value, key: &str) -> u64 {
    plan.pointer(key).and_then(Value::as_u64).unwrap_or_else(|| panic!("no {key} in {plan}"))
}

/// The boot is over; what came of it.
fn ready(vm: &TestVm) -> Result<Value> {
    vm.cli(&["ready", vm.name()])?;
    let plan = plan(vm)?;
    assert_eq!(plan["ready"], true, "{plan}");
    Ok(plan)
}

#[test]
fn every_volume_comes_back_from_memory() -> Result<()> {
    let volumes = Volumes::make(24)?;
    let vm = machine("volumes", &volumes).boot()?;
    volumes.mount(&vm)?;
    let first = ready(&vm)?;
    assert!(number(&first, "/disks/0/misses") >= 24 * 4, "a cold boot reads from the image: {first}");
    // But for what is being written at this moment.
    assert!(number(&first, "/held_blocks") >= number(&first, "/blocks") * 9 / 10, "{first}");
    volumes.append(&vm, "one")?;
    vm.panic()?;

    // The journals are replayed, of which the first boot had none to read.
    vm.wait_incarnation(2)?;
    volumes.mount(&vm)?;
    assert_eq!(volumes.read(&vm)?, volumes.expected(&["one"]));
    let second = ready(&vm)?;
    assert!(number(&second, "/disks/0/hits") >= number(&first, "/held_blocks") * 9 / 10, "{first} {second}");
    volumes.append(&vm, "two")?;
    vm.panic()?;

    // What the second boot took from the ember, or read, is held as well now.
    vm.wait_incarnation(3)?;
    volumes.mount(&vm)?;
    assert_eq!(volumes.read(&vm)?, volumes.expected(&["one", "two"]));
    let third = ready(&vm)?;
    assert!(third["hit_pct"].as_f64() >= Some(95.0), "{second} {third}");
    let memory = &vm.status()?["memory"];
    assert!(number(memory, "/boot_set_bytes") > 0 && number(memory, "/boot_set_bytes") <= 32 << 20, "{memory}");
    assert!(number(memory, "/peak_bytes") <= number(memory, "/budget_bytes"), "{memory}");

    // What the guest reads around its own cache is what was on the disk all the time.
    vm.sh("echo 3 >/proc/sys/vm/drop_caches")?;
    assert_eq!(volumes.read(&vm)?, volumes.expected(&["one", "two"]));
    volumes.unmount_and_check(&vm)
}

#[test]
fn what_is_held_outlives_everybody_unless_the_image_was_changed() -> Result<()> {
    let volumes = Volumes::make(4)?;
    let vm = machine("outlived", &volumes).boot()?;
    volumes.mount(&vm)?;
    volumes.append(&vm, "one")?;
    vm.sh("umount /v/*")?;
    ready(&vm)?;
    let held = number(&plan(&vm)?, "/held_blocks");
    end_all(&vm)?;
    vm.restart_keeper()?;
    vm.wait_incarnation(2)?;
    volumes.mount(&vm)?;
    assert_eq!(volumes.read(&vm)?, volumes.expected(&["one"]));
    vm.sh("umount /v/*")?;
    let again = ready(&vm)?;
    assert!(held > 0 && number(&again, "/disks/0/hits") >= held / 2, "{held} blocks were held: {again}");
    assert!(dropped(&vm).is_none(), "{:#?}", vm.events());

    // Somebody writes to the image while nobody guards it: into the gap between two partitions, and no file system sees it.
    end_all(&vm)?;
    let image = std::fs::File::options().write(true).open(vm.folder().join("disk0.img")).expect("our own image");
    image.write_all_at(b"a stranger", 4096).expect("our own image");
    vm.restart_keeper()?;
    vm.wait_incarnation(3)?;
    let why = dropped(&vm).expect("what was held is dropped, with a word");
    assert!(why.contains("disk0.img was changed after it was noted what it is"), "{why}");
    volumes.mount(&vm)?;
    assert_eq!(volumes.read(&vm)?, volumes.expected(&["one"]));
    let third = ready(&vm)?;
    let missed = third["missed"].as_array().is_some_and(|runs| runs.iter().any(|run| run["offset"] == 0));
    assert!(missed, "the partition table was read from the image: {third}");
    volumes.unmount_and_check(&vm)
}

/// Keeper and QEMU die, once it is noted what the image is.
fn end_all(vm: &TestVm) -> Result<()> {
    let (note, image) = (vm.memory_folder().join("boot-set-images"), vm.folder().join("disk0.img"));
    let deadline = Instant::now() + patience(20);
    loop {
        let image = std::fs::metadata(&image).expect("our own image");
        let text = std::fs::read(&note).unwrap_or_default();
        let noted: Value = serde_json::from_slice(&text).unwrap_or_default();
        let changed = serde_json::json!([image.ctime(), image.ctime_nsec()]);
        if noted[0]["changed"] == changed {
            break;
        }
        assert!(Instant::now() < deadline, "it is not noted what the image is: {noted}");
        std::thread::sleep(std::time::Duration::from_millis(20));
    }
    let qemu = vm.qemu_pid()?;
    vm.kill_keeper()?;
    kill_process(qemu, Signal::KILL).expect("QEMU runs");
    while !is_over(qemu) {
        assert!(Instant::now() < deadline + patience(20), "QEMU does not end");
        std::thread::yield_now();
    }
    Ok(())
}

fn is_over(pid: Pid) -> bool {
    let stat = std::fs::read_to_string(format!("/proc/{}/stat", pid.as_raw_nonzero()));
    stat.map_or(true, |stat| stat.contains(") Z "))
}

/// The word that was said when what was held was dropped.
fn dropped(vm: &TestVm) -> Option<String> {
    let event = vm.events().into_iter().find(|event| event["kind"] == "boot_set_dropped")?;
    Some(event["why"].as_str().unwrap_or_default().to_owned())
}
