//! A guest that can be told from any other: memory that is known page by page, a process that counts, a disk under a load that
//! knows what it has written.

use crate::error::Result;
use crate::guest::Drives;
use crate::wait::patience;

/// Each block is read again and compared.
const FIO: &str = "fio --name=load --rw=randwrite --bsrange=4k-64k --size=32m --ioengine=io_uring \
    --iodepth=16 --direct=1 --thread --verify=crc32c --verify_backlog=64 --verify_fatal=1";

const FIRST_DISK: &str = "/dev/vda";

/// Seed of the pattern in the guest's memory.
pub const SEED: u64 = 77;

/// Memory that is known page by page: a file in the guest's own RAM.
pub fn fill(vm: &impl Drives, mib: u64) -> Result<()> {
    vm.sh(&format!("probe fill /tmp/memory {} {SEED}", mib << 20)).map(drop)
}

/// Every byte of it is as it was.
pub fn verify(vm: &impl Drives) -> Result<()> {
    vm.sh(&format!("probe verify /tmp/memory {SEED}")).map(drop)
}

/// A process that counts, and notes how far it is.
pub fn start_counter(vm: &impl Drives) -> Result<()> {
    vm.sh("(i=0; while :; do i=$((i+1)); echo $i >/tmp/count.new; mv /tmp/count.new /tmp/count; sleep 0.05; done) >/dev/null 2>&1 &")
        .map(drop)
}

pub fn count(vm: &impl Drives) -> Result<u64> {
    let said = vm.sh("while [ ! -s /tmp/count ]; do sleep 0.1; done; cat /tmp/count")?;
    Ok(said.trim().parse().expect("the counter writes numbers"))
}

/// It counts on from there.
pub fn counts_beyond(vm: &impl Drives, counted: u64) -> Result<()> {
    vm.sh(&format!("while [ $(cat /tmp/count) -le {counted} ]; do sleep 0.1; done")).map(drop)
}

/// Some passes of a verifying load over the first disk, of 48 MiB at least. The guest has to be one with fio.
pub fn start_fio(vm: &impl Drives) -> Result<()> {
    start_fio_on(vm, FIRST_DISK)
}

/// The same over another disk, or a part of one.
pub fn start_fio_on(vm: &impl Drives, device: &str) -> Result<()> {
    start(vm, device, "--loops=4")
}

/// The same for as long as the guest lives.
pub fn start_endless_fio(vm: &impl Drives) -> Result<()> {
    start(vm, FIRST_DISK, "--time_based --runtime=360000")
}

fn start(vm: &impl Drives, device: &str, length: &str) -> Result<()> {
    vm.sh(&format!("({FIO} --filename={device} {length} >/tmp/fio.log 2>&1; echo $? >/tmp/fio.status) &")).map(drop)
}

/// The endless load goes on, and has found every block as it was written so far.
pub fn fio_is_content(vm: &impl Drives) -> Result<bool> {
    Ok(vm.sh("cat /tmp/fio.status 2>/dev/null; cat /tmp/fio.log | grep -c 'verify:'; true")?.trim() == "0")
}

/// The endless load is told to end, and does: a request that was lost on the way would hold it for ever.
pub fn end_endless_fio(vm: &impl Drives) -> Result<()> {
    assert!(fio_is_content(vm)?, "{}", vm.sh("cat /tmp/fio.log")?);
    vm.sh_within("killall -INT fio; while [ ! -e /tmp/fio.status ]; do sleep 1; done", patience(5))?;
    let log = vm.sh("cat /tmp/fio.log")?;
    assert!(!log.contains("verify:"), "{log}");
    Ok(())
}

/// The load is not over.
pub fn fio_goes_on(vm: &impl Drives) -> Result<()> {
    let going_on = vm.sh("[ -e /tmp/fio.status ] && echo over || echo going on")?;
    assert_eq!(going_on.trim(), "going on", "the load was too short");
    Ok(())
}

/// The load goes to its end, and finds every block as it was written.
pub fn fio_ends_well(vm: &impl Drives) -> Result<()> {
    let ended = "while [ ! -e /tmp/fio.status ]; do sleep 1; done; cat /tmp/fio.log; exit $(cat /tmp/fio.status)";
    let fio = vm.run_within(ended, patience(60))?;
    assert_eq!(fio.status, 0, "{}", fio.text());
    assert!(!fio.text().contains("verify:"), "{}", fio.text());
    Ok(())
}
