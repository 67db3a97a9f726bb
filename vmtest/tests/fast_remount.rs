//! Fast remount, as a guest and its operator see it: the next boot finds in memory what this boot reads until it is ready, and it
//! equals what the disk holds. Guests mount many small volumes, crash, and mount them again.
//!
//! - `many`: a hundred volumes that are all being written to when their guest crashes.
//! - `journals`: volumes whose journals are NVRAM.
//! - `nvram`: contents of such a device after the death of any process.
//! - `pmem`: the same as persistent memory.
//! - `strangers`: images that another program changes while there is no guest.

#[path = "fast_remount/journals.rs"]
mod journals;
#[path = "fast_remount/many.rs"]
mod many;
#[path = "fast_remount/nvram.rs"]
mod nvram;
#[path = "fast_remount/pmem.rs"]
mod pmem;
#[path = "fast_remount/strangers.rs"]
mod strangers;

use std::os::unix::fs::FileExt;
use std::time::Instant;

use hearth_api::{RemountLater, RemountPlan, RemountVolume};
use hearth_vmtest::{Disk, Drives, Result, START_AGENT, TestVm, TestVmBuilder, Volumes, event, images, patience, web};
use rustix::process::{Pid, Signal, kill_process};
use toml::Table;

/// A boot that ends only when the test says so.
const LONG: [(&str, &str); 2] = [("limit", "32MiB"), ("ready_after", "1d")];

/// `[remount]` with these keys and more.
fn remount<const N: usize>(more: [(&str, toml::Value); N]) -> Table {
    let long = LONG.map(|(key, value)| (key, toml::Value::from(value)));
    long.into_iter().chain(more).map(|(key, value)| (key.to_owned(), value)).collect()
}

/// The key `ready` of `[remount]`.
fn sign(key: &str, value: impl Into<toml::Value>) -> (&'static str, toml::Value) {
    ("ready", Table::from_iter([(key.to_owned(), value.into())]).into())
}

fn machine(name: &str, volumes: &Volumes) -> TestVmBuilder {
    let builder = TestVm::busybox(name).memory_mib(256).setting("remount", remount([]));
    volumes.copies().into_iter().fold(builder, TestVmBuilder::disk)
}

/// Ends the boot with `hearth ready`, and returns the plan.
fn ready(vm: &TestVm) -> Result<RemountPlan> {
    vm.cli(&["ready", vm.name()])?;
    let plan = vm.remount_plan()?;
    assert!(plan.ready, "{plan:?}");
    Ok(plan)
}

#[test]
fn every_volume_comes_back_from_memory() -> Result<()> {
    let volumes = Volumes::make(24)?;
    let vm = machine("volumes", &volumes).boot()?;
    volumes.mount(&vm)?;
    let first = ready(&vm)?;
    assert!(first.disks[0].misses >= 24 * 4, "a cold boot reads from the image: {first:?}");
    // Blocks that are being written at this moment are not held.
    assert!(first.held_blocks >= first.blocks * 9 / 10, "{first:?}");
    volumes.append(&vm, "one")?;
    vm.panic()?;

    // Now the journals are replayed. They were empty at the first boot, which read none of them.
    vm.wait_incarnation(2)?;
    volumes.mount(&vm)?;
    assert_eq!(volumes.read(&vm)?, volumes.expected(&["one"]));
    let second = ready(&vm)?;
    assert!(second.disks[0].hits >= first.held_blocks * 9 / 10, "{first:?} {second:?}");
    volumes.append(&vm, "two")?;
    vm.panic()?;

    // Now blocks that the second boot took from the ember or read are held as well.
    vm.wait_incarnation(3)?;
    volumes.mount(&vm)?;
    assert_eq!(volumes.read(&vm)?, volumes.expected(&["one", "two"]));
    let third = ready(&vm)?;
    assert!(third.hit_pct >= Some(99.0), "{second:?} {third:?}");
    compare_volumes(&vm, &third)?;
    let memory = vm.status()?.memory;
    assert!(memory.boot_set_bytes > 0 && memory.boot_set_bytes <= 32 << 20, "{memory:?}");
    assert!(memory.peak_bytes <= memory.budget_bytes, "{memory:?}");

    // Reads past the guest's own cache return what was on the disk all the time.
    vm.sh("echo 3 >/proc/sys/vm/drop_caches")?;
    assert_eq!(volumes.read(&vm)?, volumes.expected(&["one", "two"]));
    compare_late_reads(&vm.remount_plan()?);
    volumes.unmount_and_check(&vm)
}

/// Reads after ready are counted by volume, too.
fn compare_late_reads(plan: &RemountPlan) {
    let sum = |count: fn(&RemountLater) -> u64| plan.volumes.iter().map(|volume| count(&volume.later)).sum();
    let later = RemountLater {
        hits: sum(|later| later.hits),
        ember_hits: sum(|later| later.ember_hits),
        misses: sum(|later| later.misses),
    };
    assert_eq!(later, plan.later, "{plan:?}");
    let read = plan.volumes.iter().filter(|volume| volume.later != RemountLater::default());
    assert!(read.count() >= 24, "each volume was read: {plan:?}");
}

/// The plan's partitions are those that the guest's kernel found, and every read is in one of them or outside of all.
fn compare_volumes(vm: &TestVm, plan: &RemountPlan) -> Result<()> {
    let said =
        vm.sh("for p in /sys/block/vda/vda*; do cat $p/partition $p/start $p/size | tr '\\n' ' '; echo; done")?;
    let numbers =
        |line: &str| line.split_whitespace().map(|word| word.parse().expect("a number")).collect::<Vec<u64>>();
    // Linux counts the extended partition, which holds the others, as one.
    let mut found: Vec<_> = said.lines().map(numbers).filter(|numbers| numbers[0] >= 5).collect();
    found.sort_unstable();
    let volume =
        |volume: &RemountVolume| Some(vec![u64::from(volume.partition?), volume.offset / 512, volume.bytes / 512]);
    let mut planned: Vec<_> = plan.volumes.iter().filter_map(volume).collect();
    planned.sort_unstable();
    assert_eq!(planned, found);
    let sum = |count: fn(&RemountVolume) -> u64| plan.volumes.iter().map(count).sum::<u64>();
    let all = [sum(|volume| volume.blocks), sum(|volume| volume.hits), sum(|volume| volume.misses)];
    let disk = &plan.disks[0];
    assert_eq!(all, [plan.blocks, disk.hits + disk.ember_hits, disk.misses], "{plan:?}");
    let bytes_of = |held: bool| plan.reads.iter().filter(|run| run.held == held).map(|run| run.bytes).sum::<u64>();
    let (blocks, held) = (plan.blocks, plan.held_blocks);
    assert_eq!([bytes_of(true), bytes_of(false)], [held * 4096, (blocks - held) * 4096], "{plan:?}");
    let first = &plan.reads[0];
    assert_eq!((first.disk.as_str(), first.offset, first.held), ("disk0", 0, true), "the table comes first");
    Ok(())
}

#[test]
fn boot_set_survives_unless_the_image_changed() -> Result<()> {
    let volumes = Volumes::make(4)?;
    let vm = machine("outlived", &volumes).boot()?;
    volumes.mount(&vm)?;
    volumes.append(&vm, "one")?;
    vm.sh("umount /v/*")?;
    ready(&vm)?;
    let held = vm.remount_plan()?.held_blocks;
    end_all(&vm)?;
    vm.restart_keeper()?;
    vm.wait_incarnation(2)?;
    volumes.mount(&vm)?;
    assert_eq!(volumes.read(&vm)?, volumes.expected(&["one"]));
    vm.sh("umount /v/*")?;
    let again = ready(&vm)?;
    assert!(held > 0 && again.disks[0].hits >= held / 2, "{held} blocks were held: {again:?}");
    assert!(dropped(&vm).is_none(), "{:#?}", vm.events());

    // Another program writes to the unguarded image, into the gap between two partitions, which no file system reads.
    end_all(&vm)?;
    let image = std::fs::File::options().write(true).open(vm.folder().join("disk0.img")).expect("our own image");
    image.write_all_at(b"a stranger", 4096).expect("our own image");
    vm.restart_keeper()?;
    vm.wait_incarnation(3)?;
    let why = dropped(&vm).expect("an event names the dropped disk");
    assert!(why.contains("disk0.img was changed while nobody guarded it"), "{why}");
    volumes.mount(&vm)?;
    assert_eq!(volumes.read(&vm)?, volumes.expected(&["one"]));
    let third = ready(&vm)?;
    let missed = third.missed.iter().any(|run| run.offset == 0);
    assert!(missed, "the partition table was read from the image: {third:?}");
    volumes.unmount_and_check(&vm)
}

#[test]
fn smaller_limit_drops_only_what_does_not_fit() -> Result<()> {
    let volumes = Volumes::make(4)?;
    let vm = machine("limit", &volumes).boot()?;
    let give = |old: &str, new: &str| -> Result<RemountPlan> {
        wait_noted(&vm)?;
        vm.kill_keeper()?;
        let file = vm.folder().join("machine.toml");
        let text = std::fs::read_to_string(&file).expect("our own file");
        assert!(text.contains(old), "{text}");
        std::fs::write(&file, text.replace(old, new)).expect("our own file");
        vm.restart_keeper()?;
        vm.wait_running()?;
        vm.remount_plan()
    };
    let reduced = || vm.events().iter().find_map(event!(BootSetReduced { left_out } => left_out));
    volumes.mount(&vm)?;
    volumes.append(&vm, "one")?;
    vm.sh("umount /v/*")?;
    let first = ready(&vm)?;
    let held = first.held_blocks;
    let larger = give("32MiB", "48MiB")?;
    assert_eq!((larger.limit_bytes, reduced()), (48 << 20, None));
    assert!(held > 0 && larger.held_blocks >= held, "{first:?} {larger:?}");

    let smaller = give("48MiB", "128KiB")?;
    assert!(reduced().expect("an event counts the blocks that do not fit") > 0);
    let kept = smaller.held_blocks;
    assert!(kept > 0 && kept < held && smaller.resident_bytes <= 128 << 10, "{smaller:?}");
    assert!(smaller.expected_hit_pct < Some(100.0), "the plan counts the blocks left out: {smaller:?}");
    vm.panic()?;
    vm.wait_incarnation(2)?;
    volumes.mount(&vm)?;
    assert_eq!(volumes.read(&vm)?, volumes.expected(&["one"]));
    let second = ready(&vm)?;
    assert!(second.disks[0].hits >= kept / 2, "{smaller:?} {second:?}");
    assert!(dropped(&vm).is_none(), "{:#?}", vm.events());
    volumes.unmount_and_check(&vm)
}

#[test]
fn open_port_ends_boot_stop_saves_boot_set() -> Result<()> {
    let volumes = Volumes::make(4)?;
    let state = tempfile::tempdir().expect("a temporary folder");
    let builder = machine("stopped", &volumes).http();
    let port = builder.http_port().expect("the builder has a forwarded port");
    let file = state.path().join("boot-set");
    let file_name = file.display().to_string();
    let kept = remount([("persist", true.into()), ("persist_file", file_name.into()), sign("port", i64::from(port))]);
    let vm = builder.setting("remount", kept).boot()?;
    volumes.mount(&vm)?;
    volumes.append(&vm, "one")?;
    assert!(!vm.remount_plan()?.ready, "nothing answers at the port");
    vm.sh("net-up")?;
    web::serve(&vm, "up")?;
    vm.wait_event("readiness by port", event!(Ready { why, .. } if why == "its port answers"))?;
    vm.sh("umount /v/*")?;
    let held = vm.remount_plan()?.held_blocks;
    vm.stop()?;
    assert!(file.is_file() && !vm.memory_folder().join("boot-set-pages").exists(), "{:#?}", vm.events());
    vm.restart_keeper()?;
    vm.wait_boots(2)?;
    let loaded = vm.wait_event("the saved boot set is loaded", event!(BootSetLoaded { blocks } => blocks))?;
    assert!(held > 0 && loaded >= held, "{held} blocks were held, {loaded} were loaded");
    volumes.mount(&vm)?;
    assert_eq!(volumes.read(&vm)?, volumes.expected(&["one"]));
    let again = ready(&vm)?;
    assert!(again.disks[0].hits >= held / 2, "{held} blocks were held: {again:?}");
    volumes.unmount_and_check(&vm)
}

/// The small guest has no systemd: a script stands in for `systemctl`.
#[test]
fn active_unit_ends_the_boot() -> Result<()> {
    const SYSTEMCTL: &str = r#"cat >/usr/bin/systemctl <<'END'
#!/bin/sh
echo "$@" >>/run/asked
[ -e /run/web.service ]
END
chmod +x /usr/bin/systemctl
touch /run/asked"#;
    let builder = TestVm::busybox_with_agent("unit").disk(Disk::ext4(16));
    let vm = builder.setting("remount", remount([sign("unit", "web.service")])).boot()?;
    let begin = |agent: &str| vm.sh(&format!("{SYSTEMCTL}\n{agent}\nmount -t ext4 /dev/vda /mnt"));
    let twice = "while [ $(grep -cx 'is-active --quiet web.service' /run/asked) -lt 2 ]; do sleep 0.1; done";
    begin(START_AGENT)?;
    vm.sh_within(twice, patience(60))?;
    assert!(!vm.remount_plan()?.ready, "the unit is not active");
    // The next QEMU has a new channel to the agent.
    vm.rejuvenate()?;
    vm.sh_within(&format!(": >/run/asked; {twice}"), patience(60))?;
    vm.sh("touch /run/web.service")?;
    vm.wait_event("readiness by unit", event!(Ready { why, .. } if why == "its unit is active"))?;
    assert!(vm.remount_plan()?.blocks > 0, "{:?}", vm.remount_plan()?);

    // An agent that refuses to run programs is reported once, and the boot lasts until it is ended another way.
    vm.panic()?;
    vm.wait_incarnation(2)?;
    begin(&format!("{START_AGENT} -b guest-exec"))?;
    let refusal = "cannot find out whether the guest is ready: the guest agent refuses (guest-exec)";
    let is_told = event!(Error { message } if message.starts_with(refusal));
    vm.wait_event("the agent refuses", is_told)?;
    assert!(!vm.remount_plan()?.ready);
    ready(&vm)?;
    assert_eq!(vm.events().iter().filter_map(is_told).count(), 1, "{:#?}", vm.events());
    Ok(())
}

/// Kills keeper and QEMU, once the image's state is noted.
fn end_all(vm: &TestVm) -> Result<()> {
    wait_noted(vm)?;
    kill_all(vm)
}

/// Waits until the keeper has noted the image's present state.
fn wait_noted(vm: &TestVm) -> Result<()> {
    let (note, image) = (vm.memory_folder().join("image-notes"), vm.folder().join("disk0.img"));
    let deadline = Instant::now() + patience(20);
    let read = || std::fs::read(&note).unwrap_or_default();
    while !images::is_noted(&read(), &image)? {
        assert!(Instant::now() < deadline, "the note does not match the image: {}", String::from_utf8_lossy(&read()));
        std::thread::sleep(std::time::Duration::from_millis(20));
    }
    Ok(())
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

/// The reason in the event that reports a dropped disk.
fn dropped(vm: &TestVm) -> Option<String> {
    vm.events().iter().find_map(event!(DiskForgotten { why, .. } => why))
}
