//! Fast remount, as a guest and its operator see it: what a machine reads until it is ready, its next boot finds in memory,
//! and it is what the disk holds. Guests mount many small volumes, crash, and mount them again.

use std::os::unix::fs::{FileExt, MetadataExt};
use std::time::Instant;

use hearth_vmtest::{Disk, Drives, Result, TestVm, TestVmBuilder, Volumes, patience, web};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;
use toml::Table;

/// A boot that ends when the test says so.
const LONG: [(&str, &str); 2] = [("limit", "32MiB"), ("ready_after", "1d")];

fn machine(name: &str, volumes: &Volumes) -> TestVmBuilder {
    let remount = Table::from_iter(LONG.map(|(key, value)| (key.to_owned(), value.into())));
    let builder = TestVm::busybox(name).memory_mib(256).setting("remount", remount);
    volumes.copies().into_iter().fold(builder, TestVmBuilder::disk)
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

#[test]
fn a_port_tells_that_a_boot_is_over_and_a_stop_keeps_what_it_read() -> Result<()> {
    let volumes = Volumes::make(4)?;
    let state = tempfile::tempdir().expect("a temporary folder");
    let builder = machine("stopped", &volumes).http();
    let port = builder.http_port().expect("it was asked for");
    let file = state.path().join("boot-set");
    let mut remount = Table::from_iter(LONG.map(|(key, value)| (key.to_owned(), value.into())));
    remount.insert("persist".into(), true.into());
    remount.insert("persist_file".into(), file.display().to_string().into());
    remount.insert("ready".into(), Table::from_iter([("port".to_owned(), toml::Value::from(i64::from(port)))]).into());
    let vm = builder.setting("remount", remount).boot()?;
    volumes.mount(&vm)?;
    volumes.append(&vm, "one")?;
    assert_eq!(plan(&vm)?["ready"], false, "nobody answers there");
    vm.sh("net-up")?;
    web::serve(&vm, "up")?;
    vm.wait_event("it is ready", |event| event["kind"] == "ready" && event["why"] == "its port answers")?;
    vm.sh("umount /v/*")?;
    let held = number(&plan(&vm)?, "/held_blocks");
    vm.stop()?;
    assert!(file.is_file() && !vm.memory_folder().join("boot-set-pages").exists(), "{:#?}", vm.events());
    vm.restart_keeper()?;
    vm.wait_boots(2)?;
    let loaded = vm.wait_event("what was saved is held", |event| event["kind"] == "boot_set_loaded")?;
    assert!(held > 0 && loaded["blocks"].as_u64() >= Some(held), "{held} blocks were held: {loaded}");
    volumes.mount(&vm)?;
    assert_eq!(volumes.read(&vm)?, volumes.expected(&["one"]));
    let again = ready(&vm)?;
    assert!(number(&again, "/disks/0/hits") >= held / 2, "{held} blocks were held: {again}");
    volumes.unmount_and_check(&vm)
}

/// What was flushed to NVRAM is there again: after the end of its QEMU, of keeper and QEMU together, and, with a mirror,
/// of the host's memory.
#[test]
fn nvram_is_what_its_last_flush_promised() -> Result<()> {
    let files = tempfile::tempdir().expect("a temporary folder");
    let mirror = |policy: &str| files.path().join(policy).display().to_string();
    let device = |policy: &str| {
        let mut device = Table::from_iter([
            ("name".to_owned(), toml::Value::from(policy)),
            ("size".to_owned(), "8MiB".into()),
            ("mirror".to_owned(), policy.into()),
        ]);
        if policy != "none" {
            device.insert("mirror_file".into(), mirror(policy).into());
        }
        toml::Value::from(device)
    };
    let policies = ["none", "async", "sync"];
    let nvram: Vec<_> = policies.into_iter().map(device).collect();
    // Behind one disk: vdb, vdc, vdd.
    let vm = TestVm::busybox("nvram").memory_mib(256).disk(Disk::empty(4)).setting("nvram", nvram).boot()?;
    let write = |what: &str| {
        let each = format!("echo {what} $d | dd of=/dev/$d bs=512 seek=100 conv=fsync,notrunc 2>/dev/null || exit");
        vm.sh(&format!("for d in vdb vdc vdd; do {each}; done"))
    };
    let read = || vm.sh("for d in vdb vdc vdd; do dd if=/dev/$d bs=512 skip=100 count=1 2>/dev/null | head -n 1; done");
    let expected = |what: &str| format!("{what} vdb\n{what} vdc\n{what} vdd\n");
    write("one")?;
    vm.kill_qemu()?;
    vm.wait_incarnation(2)?;
    assert_eq!(read()?, expected("one"));

    vm.kill_keeper()?;
    vm.restart_keeper()?;
    vm.wait_running()?;
    assert_eq!(read()?, expected("one"));
    write("two")?;
    kill_all(&vm)?;
    vm.restart_keeper()?;
    vm.wait_incarnation(3)?;
    assert_eq!(read()?, expected("two"));

    // The host has lost its memory. An asynchronous mirror is waited for, a synchronous one need not be.
    write("three")?;
    let in_mirror =
        |policy: &str| std::fs::read(mirror(policy)).is_ok_and(|bytes| bytes[51200..].starts_with(b"three"));
    assert!(in_mirror("sync"));
    let deadline = Instant::now() + patience(20);
    while !in_mirror("async") {
        assert!(Instant::now() < deadline, "nothing comes to the mirror: {}", vm.status()?);
        std::thread::sleep(std::time::Duration::from_millis(20));
    }
    kill_all(&vm)?;
    for policy in policies {
        std::fs::remove_file(vm.memory_folder().join(format!("nvram-{policy}"))).expect("its memory is a file");
    }
    vm.restart_keeper()?;
    vm.wait_incarnation(4)?;
    assert_eq!(read()?.replace('\0', ""), "three vdc\nthree vdd\n");
    Ok(())
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
    kill_all(vm)
}

fn kill_all(vm: &TestVm) -> Result<()> {
    let qemu = vm.qemu_pid()?;
    vm.kill_keeper()?;
    kill_process(qemu, Signal::KILL).expect("QEMU runs");
    let deadline = Instant::now() + patience(20);
    while !is_over(qemu) {
        assert!(Instant::now() < deadline, "QEMU does not end");
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
