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

use std::os::unix::fs::{FileExt, MetadataExt};
use std::time::Instant;

use hearth_vmtest::{Disk, Drives, Result, START_AGENT, TestVm, TestVmBuilder, Volumes, patience, web};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;
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

fn plan(vm: &TestVm) -> Result<Value> {
    let text = vm.cli(&["remount-plan", vm.name(), "--json"])?;
    Ok(serde_json::from_str(&text).unwrap_or_else(|error| panic!("{error} in {text}")))
}

#[track_caller]
fn number(plan: &Value, key: &str) -> u64 {
    plan.pointer(key).and_then(Value::as_u64).unwrap_or_else(|| panic!("no {key} in {plan}"))
}

/// Ends the boot with `hearth ready`, and returns the plan.
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
    // Blocks that are being written at this moment are not held.
    assert!(number(&first, "/held_blocks") >= number(&first, "/blocks") * 9 / 10, "{first}");
    volumes.append(&vm, "one")?;
    vm.panic()?;

    // Now the journals are replayed. They were empty at the first boot, which read none of them.
    vm.wait_incarnation(2)?;
    volumes.mount(&vm)?;
    assert_eq!(volumes.read(&vm)?, volumes.expected(&["one"]));
    let second = ready(&vm)?;
    assert!(number(&second, "/disks/0/hits") >= number(&first, "/held_blocks") * 9 / 10, "{first} {second}");
    volumes.append(&vm, "two")?;
    vm.panic()?;

    // Now blocks that the second boot took from the ember or read are held as well.
    vm.wait_incarnation(3)?;
    volumes.mount(&vm)?;
    assert_eq!(volumes.read(&vm)?, volumes.expected(&["one", "two"]));
    let third = ready(&vm)?;
    assert!(third["hit_pct"].as_f64() >= Some(99.0), "{second} {third}");
    compare_volumes(&vm, &third)?;
    let memory = &vm.status_json()?["memory"];
    assert!(number(memory, "/boot_set_bytes") > 0 && number(memory, "/boot_set_bytes") <= 32 << 20, "{memory}");
    assert!(number(memory, "/peak_bytes") <= number(memory, "/budget_bytes"), "{memory}");

    // Reads past the guest's own cache return what was on the disk all the time.
    vm.sh("echo 3 >/proc/sys/vm/drop_caches")?;
    assert_eq!(volumes.read(&vm)?, volumes.expected(&["one", "two"]));
    compare_late_reads(&plan(&vm)?);
    volumes.unmount_and_check(&vm)
}

/// Reads after ready are counted by volume, too.
fn compare_late_reads(plan: &Value) {
    let volumes = plan["volumes"].as_array().expect("a plan has volumes");
    for who in ["hits", "ember_hits", "misses"] {
        let volumes_sum: u64 = volumes.iter().map(|volume| number(volume, &format!("/later/{who}"))).sum();
        assert_eq!(volumes_sum, number(plan, &format!("/later/{who}")), "{who}: {plan}");
    }
    let is_read = |volume: &&Value| ["hits", "ember_hits", "misses"].iter().any(|who| volume["later"][who] != 0);
    assert!(volumes.iter().filter(is_read).count() >= 24, "each volume was read: {plan}");
}

/// The plan's partitions are those that the guest's kernel found, and every read is in one of them or outside of all.
fn compare_volumes(vm: &TestVm, plan: &Value) -> Result<()> {
    let said =
        vm.sh("for p in /sys/block/vda/vda*; do cat $p/partition $p/start $p/size | tr '\\n' ' '; echo; done")?;
    let numbers =
        |line: &str| line.split_whitespace().map(|word| word.parse().expect("a number")).collect::<Vec<u64>>();
    // Linux counts the extended partition, which holds the others, as one.
    let mut found: Vec<_> = said.lines().map(numbers).filter(|numbers| numbers[0] >= 5).collect();
    found.sort_unstable();
    let volumes = plan["volumes"].as_array().expect("a plan has volumes");
    let of = |volume: &Value, key: &str| volume[key].as_u64().unwrap_or_else(|| panic!("no {key} in {volume}"));
    let partitions = volumes.iter().filter(|volume| volume["partition"].is_u64());
    let mut planned: Vec<_> = partitions
        .map(|volume| vec![of(volume, "partition"), of(volume, "offset") / 512, of(volume, "bytes") / 512])
        .collect();
    planned.sort_unstable();
    assert_eq!(planned, found);
    let sum = |key: &str| volumes.iter().map(|volume| of(volume, key)).sum::<u64>();
    let all = [sum("blocks"), sum("hits"), sum("misses")];
    let hits = number(plan, "/disks/0/hits") + number(plan, "/disks/0/ember_hits");
    assert_eq!(all, [number(plan, "/blocks"), hits, number(plan, "/disks/0/misses")], "{plan}");
    let reads = plan["reads"].as_array().expect("a plan says what will be read");
    let bytes_of = |held: bool| reads.iter().filter(|run| run["held"] == held).map(|run| of(run, "bytes")).sum::<u64>();
    let (blocks, held) = (number(plan, "/blocks"), number(plan, "/held_blocks"));
    assert_eq!([bytes_of(true), bytes_of(false)], [held * 4096, (blocks - held) * 4096], "{plan}");
    let first = &reads[0];
    assert_eq!(
        (&first["disk"], &first["offset"], &first["held"]),
        (&"disk0".into(), &0.into(), &true.into()),
        "the table comes first"
    );
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
    let held = number(&plan(&vm)?, "/held_blocks");
    end_all(&vm)?;
    vm.restart_keeper()?;
    vm.wait_incarnation(2)?;
    volumes.mount(&vm)?;
    assert_eq!(volumes.read(&vm)?, volumes.expected(&["one"]));
    vm.sh("umount /v/*")?;
    let again = ready(&vm)?;
    assert!(held > 0 && number(&again, "/disks/0/hits") >= held / 2, "{held} blocks were held: {again}");
    assert!(dropped(&vm).is_none(), "{:#?}", vm.events_json());

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
    let missed = third["missed"].as_array().is_some_and(|runs| runs.iter().any(|run| run["offset"] == 0));
    assert!(missed, "the partition table was read from the image: {third}");
    volumes.unmount_and_check(&vm)
}

#[test]
fn smaller_limit_drops_only_what_does_not_fit() -> Result<()> {
    let volumes = Volumes::make(4)?;
    let vm = machine("limit", &volumes).boot()?;
    let give = |old: &str, new: &str| -> Result<Value> {
        wait_noted(&vm);
        vm.kill_keeper()?;
        let file = vm.folder().join("machine.toml");
        let text = std::fs::read_to_string(&file).expect("our own file");
        assert!(text.contains(old), "{text}");
        std::fs::write(&file, text.replace(old, new)).expect("our own file");
        vm.restart_keeper()?;
        vm.wait_running_json()?;
        plan(&vm)
    };
    let reduced = || vm.events_json().into_iter().find(|event| event["kind"] == "boot_set_reduced");
    volumes.mount(&vm)?;
    volumes.append(&vm, "one")?;
    vm.sh("umount /v/*")?;
    let first = ready(&vm)?;
    let held = number(&first, "/held_blocks");
    let larger = give("32MiB", "48MiB")?;
    assert_eq!((number(&larger, "/limit_bytes"), reduced()), (48 << 20, None));
    assert!(held > 0 && number(&larger, "/held_blocks") >= held, "{first} {larger}");

    let smaller = give("48MiB", "128KiB")?;
    let event = reduced().expect("an event counts the blocks that do not fit");
    assert!(event["left_out"].as_u64() > Some(0), "{event}");
    let kept = number(&smaller, "/held_blocks");
    assert!(kept > 0 && kept < held && number(&smaller, "/resident_bytes") <= 128 << 10, "{smaller}");
    assert!(smaller["expected_hit_pct"].as_f64() < Some(100.0), "the plan counts the blocks left out: {smaller}");
    vm.panic()?;
    vm.wait_incarnation(2)?;
    volumes.mount(&vm)?;
    assert_eq!(volumes.read(&vm)?, volumes.expected(&["one"]));
    let second = ready(&vm)?;
    assert!(number(&second, "/disks/0/hits") >= kept / 2, "{smaller} {second}");
    assert!(dropped(&vm).is_none(), "{:#?}", vm.events_json());
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
    assert_eq!(plan(&vm)?["ready"], false, "nothing answers at the port");
    vm.sh("net-up")?;
    web::serve(&vm, "up")?;
    vm.wait_event_json("readiness by port", |event| event["kind"] == "ready" && event["why"] == "its port answers")?;
    vm.sh("umount /v/*")?;
    let held = number(&plan(&vm)?, "/held_blocks");
    vm.stop()?;
    assert!(file.is_file() && !vm.memory_folder().join("boot-set-pages").exists(), "{:#?}", vm.events_json());
    vm.restart_keeper()?;
    vm.wait_boots(2)?;
    let loaded = vm.wait_event_json("the saved boot set is loaded", |event| event["kind"] == "boot_set_loaded")?;
    assert!(held > 0 && loaded["blocks"].as_u64() >= Some(held), "{held} blocks were held: {loaded}");
    volumes.mount(&vm)?;
    assert_eq!(volumes.read(&vm)?, volumes.expected(&["one"]));
    let again = ready(&vm)?;
    assert!(number(&again, "/disks/0/hits") >= held / 2, "{held} blocks were held: {again}");
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
    assert_eq!(plan(&vm)?["ready"], false, "the unit is not active");
    // The next QEMU has a new channel to the agent.
    vm.rejuvenate()?;
    vm.sh_within(&format!(": >/run/asked; {twice}"), patience(60))?;
    vm.sh("touch /run/web.service")?;
    vm.wait_event_json("readiness by unit", |event| event["kind"] == "ready" && event["why"] == "its unit is active")?;
    assert!(number(&plan(&vm)?, "/blocks") > 0, "{}", plan(&vm)?);

    // An agent that refuses to run programs is reported once, and the boot lasts until it is ended another way.
    vm.panic()?;
    vm.wait_incarnation(2)?;
    begin(&format!("{START_AGENT} -b guest-exec"))?;
    let refusal = "cannot find out whether the guest is ready: the guest agent refuses (guest-exec)";
    let is_told = |event: &Value| event["message"].as_str().is_some_and(|message| message.starts_with(refusal));
    vm.wait_event_json("the agent refuses", is_told)?;
    assert_eq!(plan(&vm)?["ready"], false);
    ready(&vm)?;
    assert_eq!(vm.events_json().iter().filter(|event| is_told(event)).count(), 1, "{:#?}", vm.events_json());
    Ok(())
}

/// Kills keeper and QEMU, once the image's state is noted.
fn end_all(vm: &TestVm) -> Result<()> {
    wait_noted(vm);
    kill_all(vm)
}

/// Waits until the keeper has noted the image's present state.
fn wait_noted(vm: &TestVm) {
    let (note, image) = (vm.memory_folder().join("image-notes"), vm.folder().join("disk0.img"));
    let deadline = Instant::now() + patience(20);
    loop {
        let image = std::fs::metadata(&image).expect("our own image");
        let text = std::fs::read(&note).unwrap_or_default();
        let noted: Value = serde_json::from_slice(&text).unwrap_or_default();
        let changed = serde_json::json!([image.ctime(), image.ctime_nsec()]);
        if noted["disks"][0]["rest"][0]["changed"] == changed {
            break;
        }
        assert!(Instant::now() < deadline, "the note does not match the image: {noted}");
        std::thread::sleep(std::time::Duration::from_millis(20));
    }
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
    let event = vm.events_json().into_iter().find(|event| event["kind"] == "disk_forgotten")?;
    Some(event["why"].as_str().unwrap_or_default().to_owned())
}
