//! What goes on over a hop: memory, processes, disks under load, console, clock, several processors, both QEMU versions.

use hearth_vmtest::{Disk, Drives, Result, TestVm, artifacts, patience};
use serde_json::Value;

/// Each block is read again and compared; larger than what a hop could hide.
const FIO: &str = "fio --name=load --filename=/dev/vda --rw=randwrite --bsrange=4k-64k --size=32m --loops=4 \
    --ioengine=io_uring --iodepth=16 --direct=1 --thread --verify=crc32c --verify_backlog=64 --verify_fatal=1";

#[test]
fn a_guest_under_load_goes_through_both_versions_and_back() -> Result<()> {
    let vm = TestVm::busybox_with_fio("hops").cpus(2).disk(Disk::empty(48)).boot()?;
    let nonce = vm.nonce()?;
    vm.sh(&format!("({FIO} >/tmp/fio.log 2>&1; echo $? >/tmp/fio.status) &"))?;
    let (old, new) = (artifacts::installed_qemu()?, artifacts::qemu_10()?);
    for (round, qemu) in [&new, &old, &old, &new, &new, &old].into_iter().enumerate() {
        let before = vm.qemu_pid()?;
        let hop = vm.rejuvenate_to(qemu)?;
        assert_eq!(hop.status, 0, "hop {round}: {}", hop.text());
        assert_ne!(vm.qemu_pid()?, before);
        assert_eq!(vm.nonce()?, nonce, "hop {round}: it is the same guest");
    }
    let going_on = vm.sh("[ -e /tmp/fio.status ] && echo over || echo going on")?;
    assert_eq!(going_on.trim(), "going on", "the load was too short");
    let ended = "while [ ! -e /tmp/fio.status ]; do sleep 1; done; cat /tmp/fio.log; exit $(cat /tmp/fio.status)";
    let fio = vm.run_within(ended, patience(60))?;
    assert_eq!(fio.status, 0, "{}", fio.text());
    assert!(!fio.text().contains("verify:"), "{}", fio.text());
    let status = vm.status()?;
    assert_eq!((&status["incarnation"], &status["qemu"]["generation"]), (&Value::from(1), &Value::from(7)), "{status}");
    let disk = &status["disks"][0];
    assert_eq!((&disk["io_errors"], &disk["bad_requests"]), (&Value::from(0), &Value::from(0)), "{disk}");
    let complaints: Vec<_> = vm.guest().kernel_log().into_iter().filter(|line| line.contains("error")).collect();
    assert!(complaints.is_empty(), "{complaints:?}");
    let pauses: Vec<_> = vm.events().iter().filter_map(|event| event["pause_ms"].as_f64()).collect();
    eprintln!("pauses: {pauses:?}");
    Ok(())
}
