//! A guest whose state can be checked: memory with known contents, a process that counts, a disk under a verifying load.

use crate::error::Result;
use crate::guest::Drives;
use crate::wait::patience;

/// fio reads each written block back and verifies it.
const FIO: &str = "fio --name=load --rw=randwrite --bsrange=4k-64k --size=32m --ioengine=io_uring \
    --iodepth=16 --direct=1 --thread --verify=crc32c --verify_backlog=64 --verify_fatal=1";

const FIRST_DISK: &str = "/dev/vda";

/// Seed of the pattern in the guest's memory.
pub const SEED: u64 = 77;

/// Fills memory of the guest with a known pattern, as a file in a RAM-based file system.
pub fn fill(vm: &impl Drives, mib: u64) -> Result<()> {
    vm.sh(&format!("probe fill /tmp/memory {} {SEED}", mib << 20)).map(drop)
}

/// Checks that every byte of the filled memory is unchanged.
pub fn verify(vm: &impl Drives) -> Result<()> {
    vm.sh(&format!("probe verify /tmp/memory {SEED}")).map(drop)
}

/// Starts a process that counts, and writes its count to a file.
pub fn start_counter(vm: &impl Drives) -> Result<()> {
    vm.sh("(i=0; while :; do i=$((i+1)); echo $i >/tmp/count.new; mv /tmp/count.new /tmp/count; sleep 0.05; done) >/dev/null 2>&1 &")
        .map(drop)
}

pub fn count(vm: &impl Drives) -> Result<u64> {
    let said = vm.sh("while [ ! -s /tmp/count ]; do sleep 0.1; done; cat /tmp/count")?;
    Ok(said.trim().parse().expect("the counter writes numbers"))
}

/// Waits until the counter passes `counted`.
pub fn counts_beyond(vm: &impl Drives, counted: u64) -> Result<()> {
    vm.sh(&format!("while [ $(cat /tmp/count) -le {counted} ]; do sleep 0.1; done")).map(drop)
}

/// Starts four passes of a verifying load over the first disk, which must have at least 48 MiB. The guest must have fio.
pub fn start_fio(vm: &impl Drives) -> Result<()> {
    start_fio_on(vm, FIRST_DISK)
}

/// Starts the same load on another disk or partition.
pub fn start_fio_on(vm: &impl Drives, device: &str) -> Result<()> {
    start(vm, device, "--loops=4")
}

/// Starts the load on the first disk for as long as the guest lives.
pub fn start_endless_fio(vm: &impl Drives) -> Result<()> {
    start_endless_fio_on(vm, FIRST_DISK)
}

/// Starts the same load on another disk.
pub fn start_endless_fio_on(vm: &impl Drives, device: &str) -> Result<()> {
    start(vm, device, "--time_based --runtime=360000")
}

fn start(vm: &impl Drives, device: &str, length: &str) -> Result<()> {
    vm.sh(&format!("({FIO} --filename={device} {length} >/tmp/fio.log 2>&1; echo $? >/tmp/fio.status) &")).map(drop)
}

/// Whether the endless load still runs and has found no wrong block.
pub fn fio_is_content(vm: &impl Drives) -> Result<bool> {
    Ok(vm.sh("cat /tmp/fio.status 2>/dev/null; cat /tmp/fio.log | grep -c 'verify:'; true")?.trim() == "0")
}

/// Ends the endless load. A request lost on the way would keep it from ending.
pub fn end_endless_fio(vm: &impl Drives) -> Result<()> {
    assert!(fio_is_content(vm)?, "{}", vm.sh("cat /tmp/fio.log")?);
    vm.sh_within("killall -INT fio; while [ ! -e /tmp/fio.status ]; do sleep 1; done", patience(5))?;
    let log = vm.sh("cat /tmp/fio.log")?;
    assert!(!log.contains("verify:"), "{log}");
    Ok(())
}

/// Asserts that the load still runs.
pub fn fio_goes_on(vm: &impl Drives) -> Result<()> {
    let going_on = vm.sh("[ -e /tmp/fio.status ] && echo over || echo going on")?;
    assert_eq!(going_on.trim(), "going on", "the load ended too early");
    Ok(())
}

/// Waits for the end of the load, and asserts that it found no wrong block.
pub fn fio_ends_well(vm: &impl Drives) -> Result<()> {
    let ended = "while [ ! -e /tmp/fio.status ]; do sleep 1; done; cat /tmp/fio.log; exit $(cat /tmp/fio.status)";
    let fio = vm.run_within(ended, patience(60))?;
    assert_eq!(fio.status, 0, "{}", fio.text());
    assert!(!fio.text().contains("verify:"), "{}", fio.text());
    Ok(())
}
