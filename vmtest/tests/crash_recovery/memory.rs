//! Memory: the next guest wants all of its RAM while the dead one's is not yet in the dump, because the dump's disk is full. The
//! guest waits within the budget until the dump continues.

use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::Instant;

use hearth_api::AdmissionStatus;
use hearth_vmtest::images::File;
use hearth_vmtest::residency::Watch;
use hearth_vmtest::{Disk, Drives, Result, TestVm, event, patience};

use crate::dump::{assert_nothing_held, dumping, wait_complete};
use crate::small_folder;

const RAM_MIB: u64 = 256;
/// Default of `budget_slack`.
const SLACK_PERCENT: u64 = 3;
const HEADROOM_PERCENT: u64 = 20;
/// Memory that a guest can fill beside what it touched during its boot. The dead guest left about 100 MiB: more than the spare
/// memory then, but not so much that the next guest could not boot.
const FILL_MIB: u64 = 140;

fn admission(vm: &TestVm) -> Result<AdmissionStatus> {
    Ok(vm.status()?.memory.admission.expect("QEMU handed its page faults over"))
}

/// Makes the guest fill and verify memory. Returns once it waits for memory; its command continues.
pub fn fill_until_it_waits(vm: &TestVm) -> Result<u64> {
    let fill = format!("probe fill /m/f {} 7 && probe verify /m/f 7", FILL_MIB << 20);
    let id = vm.guest().start(&format!("mkdir /m && mount -t tmpfs -o size=100% m /m && {fill}"))?;
    let deadline = Instant::now() + patience(20);
    loop {
        let admission = admission(vm)?;
        if admission.waiting > 0 {
            return Ok(id);
        }
        assert!(Instant::now() < deadline, "the guest never waited: {admission:?}");
    }
}

/// Fills memory that a dump of level 1 keeps and no method compresses.
fn make_noise(vm: &TestVm, mib: u64) -> Result<()> {
    let noise = format!("dd if=/dev/urandom of=/noise/a bs=1M count={mib}");
    vm.sh(&format!("mkdir -p /noise && mount -t tmpfs -o size=95% t /noise && {noise}")).map(drop)
}

#[test]
fn guest_uses_headroom_during_a_dump_then_waits() -> Result<()> {
    let builder =
        dumping("headroom").crash_setting("level", 1).crash_setting("headroom", format!("{HEADROOM_PERCENT}%"));
    let Some((vm, folder)) = small_folder::boot(builder, "headroom", "8M")? else { return Ok(()) };
    let watch = Watch::start(vm.memory_folder())?;
    vm.panic()?;
    vm.wait_event("a full disk", event!(DumpWaits))?;
    vm.wait_incarnation(2)?;
    let id = fill_until_it_waits(&vm)?;
    let short = watch.so_far();
    folder.grow("512M");
    vm.cli(&["dump", vm.name(), "--resume", "--no-wait"])?;
    let filled = vm.wait_console("the guest filled its memory", patience(60), |heard| heard.take_answer(id))?;
    assert_eq!(filled.status, 0, "{filled:?}");
    let after = admission(&vm)?;
    wait_complete(&vm, 1)?;
    assert_nothing_held(&vm)?;
    let seen = watch.end()?;
    println!("{after:?}, when it had to wait {short:?}, in all {seen:?}");
    assert!(after.guest_wait_ms > 0, "{after:?}");
    let percent = |bytes: u64| (bytes * 100).div_ceil(RAM_MIB << 20);
    assert!(percent(seen.peak_bytes) <= 100 + SLACK_PERCENT + HEADROOM_PERCENT, "over budget: {seen:?}");
    assert!(percent(short.peak_bytes) > 100 + SLACK_PERCENT, "the headroom was not used: {short:?}");
    Ok(())
}

/// `HEARTH_BIN=... cargo test -p hearth-vmtest --test crash_recovery -- --ignored --nocapture measures`: the time that a guest
/// waits for
/// memory that a dump holds, on a host with all processors busy, and when it reads from the disk that the dump is written to.
#[test]
#[ignore = "a measurement"]
fn measures_a_guests_wait_for_a_dump() -> Result<()> {
    const MIB: u64 = 300;
    let fill = format!("mkdir /m && mount -t tmpfs -o size=100% m /m && probe fill /m/f {} 7", MIB << 20);
    let read = "mount -t ext4 -o ro,noload /dev/vda /mnt && probe verify /mnt/big 5".to_owned();
    for (what, busy_host, command) in [("a busy host", true, fill), ("a shared disk", false, read)] {
        let disk = Disk::ext4(MIB + 100).with_files([File::pattern("big", (MIB as usize) << 20, 5)]);
        let vm = dumping("waits").memory_mib(512).crash_setting("level", 1).disk(disk).boot()?;
        make_noise(&vm, 250)?;
        let over = AtomicBool::new(false);
        let output = std::thread::scope(|scope| {
            let hogs = if busy_host { std::thread::available_parallelism().map_or(1, usize::from) } else { 0 };
            for _ in 0..hogs {
                scope.spawn(|| {
                    while !over.load(Relaxed) {
                        std::hint::spin_loop();
                    }
                });
            }
            vm.panic()?;
            let outcome = vm.wait_incarnation(2).and_then(|_| vm.run_within(&command, patience(60)));
            over.store(true, Relaxed);
            outcome
        })?;
        assert_eq!(output.status, 0, "{output:?}");
        println!("{what}: {:?}", admission(&vm)?);
        wait_complete(&vm, 1)?;
        println!("{what}: the dump took {} s", crate::dump::status(&vm, 1)?.duration_s);
    }
    Ok(())
}
