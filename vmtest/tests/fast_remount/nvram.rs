//! NVRAM: flushed data survives the death of QEMU, of the keeper, of both, and of the host's memory with them, also in the middle
//! of writing.

use std::iter::repeat_n;
use std::path::Path;
use std::time::Instant;

use hearth_vmtest::{Disk, Drives, Result, TestVm, TestVmBuilder, patience};
use toml::Table;

use super::kill_all;

/// Mirror policies. Each has a device that is named after it.
const POLICIES: [&str; 3] = ["none", "async", "sync"];
/// The guest's names of the devices, which come after one disk.
const DEVICES: [&str; 3] = ["vdb", "vdc", "vdd"];

/// Every line of a record holds the record's number, and a record is flushed as a whole. Records fill a ring at the device's
/// start.
const LINE_BYTES: usize = 16;
const BLOCK_BYTES: usize = 4096;
const BLOCK_LINES: usize = BLOCK_BYTES / LINE_BYTES;
const RECORD_BLOCKS: usize = 8;
const RECORDS: usize = 8;
const RING_BLOCKS: usize = RECORDS * RECORD_BLOCKS;
/// Records between two kills: more than the ring holds, so that all of it is rewritten.
const RECORDS_BETWEEN: u64 = 12;

fn machine(name: &str, mirrors: &Path) -> TestVmBuilder {
    let device = |policy: &str| {
        let mut device = Table::from_iter([
            ("name".to_owned(), toml::Value::from(policy)),
            ("size".to_owned(), "8MiB".into()),
            ("mirror".to_owned(), policy.into()),
        ]);
        if policy != "none" {
            device.insert("mirror_file".into(), mirrors.join(policy).display().to_string().into());
        }
        toml::Value::from(device)
    };
    let nvram: Vec<_> = POLICIES.into_iter().map(device).collect();
    TestVm::busybox(name).memory_mib(256).disk(Disk::empty(4)).setting("nvram", nvram)
}

/// Flushed data is there after the end of QEMU, of keeper and QEMU together, and, with a mirror, of the host's memory.
#[test]
fn flushed_nvram_survives_every_death() -> Result<()> {
    let files = tempfile::tempdir().expect("a temporary folder");
    let vm = machine("nvram", files.path()).boot()?;
    let write = |what: &str| {
        let each = format!("echo {what} $d | dd of=/dev/$d bs=512 seek=100 conv=fsync,notrunc 2>/dev/null || exit");
        vm.sh(&format!("for d in vdb vdc vdd; do {each}; done"))
    };
    let read = || vm.sh("for d in vdb vdc vdd; do dd if=/dev/$d bs=512 skip=100 count=1 2>/dev/null | head -n 1; done");
    let expected = |what: &str| format!("{what} vdb\n{what} vdc\n{what} vdd\n");
    let counted = || -> Result<()> {
        let memory = vm.status()?.memory;
        assert_eq!(memory.nvram_bytes, 3 * (8 << 20), "{memory:?}");
        let (peak, budget) = (memory.peak_bytes, memory.budget_bytes);
        assert!(peak > 3 * (8 << 20) && peak <= budget && budget > (256 + 3 * 8) << 20, "{memory:?}");
        Ok(())
    };
    counted()?;
    let resized = vm.cli_output(&["resize", vm.name(), "sync"])?;
    assert!(
        resized.status == 1 && resized.text().contains("nvram has no disk sync; its disks are: disk0"),
        "{}",
        resized.text()
    );
    write("one")?;
    vm.kill_qemu()?;
    vm.wait_incarnation(2)?;
    assert_eq!(read()?, expected("one"));

    vm.kill_keeper()?;
    vm.restart_keeper()?;
    vm.wait_running()?;
    assert_eq!(read()?, expected("one"));
    counted()?;
    write("two")?;
    kill_all(&vm)?;
    vm.restart_keeper()?;
    vm.wait_incarnation(3)?;
    assert_eq!(read()?, expected("two"));

    // The host loses its memory. The test must wait for an asynchronous mirror, but not for a synchronous one.
    write("three")?;
    let in_mirror =
        |policy: &str| std::fs::read(files.path().join(policy)).is_ok_and(|bytes| bytes[51200..].starts_with(b"three"));
    assert!(in_mirror("sync"));
    let deadline = Instant::now() + patience(20);
    while !in_mirror("async") {
        assert!(Instant::now() < deadline, "nothing reaches the mirror: {:?}", vm.status()?);
        std::thread::sleep(std::time::Duration::from_millis(20));
    }
    kill_all(&vm)?;
    for policy in POLICIES {
        std::fs::remove_file(vm.memory_folder().join(format!("nvram-{policy}"))).expect("its memory is a file");
    }
    vm.restart_keeper()?;
    vm.wait_incarnation(4)?;
    assert_eq!(read()?.replace('\0', ""), "three vdc\nthree vdd\n");
    Ok(())
}

/// Numbered records are written to each device, flushed, and then acknowledged. Processes are killed meanwhile, and all acknowledged
/// records are found, each of them whole.
#[test]
fn kills_during_writes_lose_no_flushed_data() -> Result<()> {
    let files = tempfile::tempdir().expect("a temporary folder");
    let vm = machine("torn", files.path()).boot()?;
    let memory_file = |policy: &str| vm.memory_folder().join(format!("nvram-{policy}"));
    let mirror = files.path().join("sync");
    write_after(&vm, [0; 3])?;

    // Kill the keeper: the guest and its writers wait for the next one, and continue.
    for _ in 0..3 {
        await_records(&vm)?;
        vm.kill_keeper()?;
        for (policy, acknowledged) in POLICIES.into_iter().zip(acknowledged(&vm)) {
            check(&in_file(&memory_file(policy)), acknowledged, policy);
        }
        check(&in_file(&mirror), acknowledged(&vm)[2], "the mirror");
        vm.restart_keeper()?;
        vm.wait_running()?;
    }

    // Kill QEMU: the next guest reads what the last one wrote.
    await_records(&vm)?;
    vm.kill_qemu()?;
    vm.wait_incarnation(2)?;
    let promised = acknowledged(&vm);
    check(&in_file(&mirror), promised[2], "the mirror");
    let mut found = [0; 3];
    for ((device, promised), found) in DEVICES.into_iter().zip(promised).zip(&mut found) {
        *found = check(&in_guest(&vm, device)?, promised, device);
    }
    write_after(&vm, found)?;

    // Kill both: the memory survives whatever the mirror's policy, so the next guest finds it.
    await_records(&vm)?;
    kill_all(&vm)?;
    let promised = acknowledged(&vm);
    for (policy, acknowledged) in POLICIES.into_iter().zip(promised) {
        check(&in_file(&memory_file(policy)), acknowledged, policy);
    }
    check(&in_file(&mirror), promised[2], "the mirror");
    vm.restart_keeper()?;
    vm.wait_boots(3)?;
    for ((device, promised), found) in DEVICES.into_iter().zip(promised).zip(&mut found) {
        *found = check(&in_guest(&vm, device)?, promised, device);
    }
    write_after(&vm, found)?;

    // Kill both and lose the host's memory: only the mirrors are left.
    await_records(&vm)?;
    kill_all(&vm)?;
    let promised = acknowledged(&vm);
    for (policy, acknowledged) in POLICIES.into_iter().zip(promised) {
        check(&in_file(&memory_file(policy)), acknowledged, policy);
    }
    for folder in [vm.memory_folder(), vm.runtime_root().join(vm.name()).as_path()] {
        std::fs::remove_dir_all(folder).expect("the machine's own folder");
    }
    check(&in_file(&mirror), promised[2], "the mirror");
    // Blocks may reach an asynchronous mirror at any time and in any order, but each arrives whole.
    blocks(&in_file(&files.path().join("async")), "the asynchronous mirror");
    vm.restart_keeper()?;
    vm.wait_boots(4)?;
    check(&in_guest(&vm, DEVICES[2])?, promised[2], DEVICES[2]);
    Ok(())
}

/// Starts a writer in the guest for each device. It continues after these numbers for as long as the guest lives.
fn write_after(vm: &TestVm, last: [u64; 3]) -> Result<()> {
    let writer = |(device, last): (&str, u64)| {
        let place = format!("of=/dev/{device} bs={BLOCK_BYTES} seek=$((i % {RECORDS} * {RECORD_BLOCKS}))");
        let write = format!("yes $n | dd {place} count={RECORD_BLOCKS} iflag=fullblock conv=fsync,notrunc");
        // A process's line in the kernel log differs from the kernel's own by its priority only, and reaches the console at once.
        let say = format!("echo \"<3>acknowledged {device} $n\" >/dev/kmsg");
        format!(
            "(i={last}; while :; do i=$((i+1)); n=$(printf %015d $i); {write} || exit; {say}; done) >/dev/null 2>&1 &\n"
        )
    };
    let writers: String = DEVICES.into_iter().zip(last).map(writer).collect();
    vm.sh(&format!("echo on >/proc/sys/kernel/printk_devkmsg\n{writers}")).map(drop)
}

/// The last acknowledged number of each device.
fn acknowledged(vm: &TestVm) -> [u64; 3] {
    last_acknowledged(&vm.guest().kernel_log())
}

fn last_acknowledged(kernel: &[String]) -> [u64; 3] {
    let number_of = |message: &String, device: &str| {
        let words: Vec<&str> = message.split_whitespace().rev().take(3).collect();
        let is_whole = words.len() == 3 && words[0].len() == LINE_BYTES - 1 && words[1..] == [device, "acknowledged"];
        is_whole.then(|| words[0].parse::<u64>().ok())?
    };
    DEVICES.map(|device| kernel.iter().filter_map(|message| number_of(message, device)).max().unwrap_or(0))
}

fn await_records(vm: &TestVm) -> Result<()> {
    let before = acknowledged(vm);
    vm.wait_console("more records on each device", patience(60), |heard| {
        let now = last_acknowledged(heard.kernel());
        now.iter().zip(before).all(|(now, before)| *now >= before + RECORDS_BETWEEN).then_some(())
    })
}

/// The ring's lines in a file that is not being written. Unwritten lines count as 0.
fn in_file(path: &Path) -> Vec<u64> {
    let bytes = std::fs::read(path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
    let line = |line: &[u8]| match line.strip_suffix(b"\n").map(str::from_utf8) {
        _ if line.iter().all(|&byte| byte == 0) => 0,
        Some(Ok(number)) => number.parse().unwrap_or_else(|error| panic!("{error}: {number} in {}", path.display())),
        _ => panic!("{}: half a line: {line:?}", path.display()),
    };
    bytes[..RING_BLOCKS * BLOCK_BYTES].chunks(LINE_BYTES).map(line).collect()
}

/// The ring's lines as the guest reads them.
fn in_guest(vm: &TestVm, device: &str) -> Result<Vec<u64>> {
    let said = vm.sh(&format!("dd if=/dev/{device} bs={BLOCK_BYTES} count={RING_BLOCKS} 2>/dev/null | uniq -c"))?;
    let lines = |run: &str| {
        let words: Vec<u64> = run.split_whitespace().map_while(|word| word.parse().ok()).collect();
        let [count, number] = words[..] else { panic!("half a line of {device}: {run}") };
        repeat_n(number, count as usize)
    };
    Ok(said.lines().flat_map(lines).collect())
}

/// The number of each block, which all its lines must hold.
#[track_caller]
fn blocks(lines: &[u64], place: &str) -> Vec<u64> {
    assert_eq!(lines.len(), RING_BLOCKS * BLOCK_LINES, "{place}");
    let number = |(at, block): (usize, &[u64])| {
        assert!(block.iter().all(|line| *line == block[0]), "{place}: block {at} mixes two records: {block:?}");
        block[0]
    };
    lines.chunks(BLOCK_LINES).enumerate().map(number).collect()
}

/// Returns the number of the last whole record, which must be acknowledged or later. All older records that fit into the ring
/// must be whole; only the record after it may be partly there.
#[track_caller]
fn check(lines: &[u64], acknowledged: u64, place: &str) -> u64 {
    let blocks = blocks(lines, place);
    let places: Vec<&[u64]> = blocks.chunks(RECORD_BLOCKS).collect();
    let newest = *blocks.iter().max().expect("a ring has blocks");
    let place_of = |number: u64| (number % RECORDS as u64) as usize;
    let is_whole = places[place_of(newest)].iter().all(|number| *number == newest);
    let last = if is_whole { newest } else { newest - 1 };
    assert!(
        acknowledged > 0 && last >= acknowledged,
        "{place}: record {acknowledged} was flushed, but the last one found is {last}: {blocks:?}"
    );
    for record in last + 1 - RECORDS as u64..=last {
        let begun = |number: u64| number == record + RECORDS as u64 && number == last + 1;
        let is_there = places[place_of(record)].iter().all(|&number| number == record || begun(number));
        assert!(is_there, "{place}: record {record} is missing, record {last} is there: {blocks:?}");
    }
    last
}
