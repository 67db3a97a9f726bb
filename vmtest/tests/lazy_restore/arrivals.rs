//! Disks fetched from an object store: the guest reads right blocks before all have arrived, even while the store fails, is gone
//! or comes back, while its keeper or its QEMU is killed, and while it is stopped.

use std::fs;
use std::path::Path;
use std::process::Command;

use hearth_api::MachineStatus;
use hearth_vmtest::{Disk, Drives, Result, TestVm, event, patience};
use loopback_s3::Wire;

use super::SEED;
use super::object_store::{Stand, address};

const MIB: u64 = 1 << 20;
const FILE_MIB: u64 = 32;

/// A machine with a file on its disk that is in no memory, and its nonce. [`save`] saves it to the store and ends it.
fn saved(stand: &Stand, name: &str, disks: impl IntoIterator<Item = Disk>) -> Result<(TestVm, String)> {
    let mut builder = TestVm::busybox(name).disk(Disk::ext4(64));
    for disk in disks {
        builder = builder.disk(disk);
    }
    let vm = stand.machine(builder)?;
    let nonce = vm.nonce()?;
    vm.sh("mkdir -p /d && mount /dev/vda /d")?;
    vm.sh_within(&format!("probe fill /d/file {} {SEED} && sync && probe drop-caches", FILE_MIB * MIB), patience(60))?;
    Ok((vm, nonce))
}

fn save(vm: &TestVm) -> Result<()> {
    vm.save(Path::new(&address("one")))?;
    vm.stop_at_once().map(drop)
}

fn verify_file(vm: &TestVm) -> Result<()> {
    vm.sh_within(&format!("probe verify /d/file {SEED}"), patience(90)).map(drop)
}

/// Verifies the file in the background, so that the guest's shell answers while its disk does not.
fn begin_verifying(clone: &TestVm) -> Result<()> {
    let verify =
        format!("probe verify /d/file {SEED} >/tmp/said 2>&1; echo $? >/tmp/status; mv /tmp/status /tmp/verified");
    clone.sh(&format!("({verify}) >/dev/null 2>&1 </dev/null &")).map(drop)
}

/// Asserts that the verification has not ended: a part of the file is missing.
fn still_verifies(clone: &TestVm) -> Result<()> {
    clone.sh("[ ! -e /tmp/verified ]").map(drop)
}

fn verified(clone: &TestVm) -> Result<()> {
    let end = "while [ ! -e /tmp/verified ]; do sleep 0.1; done; cat /tmp/said; exit $(cat /tmp/verified)";
    clone.sh_within(end, patience(90)).map(drop)
}

/// A guest with all its memory that reads a file of which most had not arrived when the store went away.
fn waiting(stand: &Stand, vm: &TestVm, name: &str) -> Result<TestVm> {
    let (object, away) = (stand.object("disk-disk0"), stand.folder.path().join("away"));
    stand.server.set_wire(Wire::Slow(MIB));
    let clone = stand.clone(vm, name, name, &["--lazy"])?;
    clone.wait_running()?;
    fs::rename(&object, &away).expect("it was saved");
    stand.server.set_wire(Wire::Whole);
    clone.wait_event("all memory is there", event!(RestoreComplete))?;
    begin_verifying(&clone)?;
    stand.server.set_wire(Wire::Dead);
    fs::rename(&away, &object).expect("the object was moved away");
    await_waiting(&clone, "the store gave no valid answer")?;
    still_verifies(&clone)?;
    Ok(clone)
}

fn await_waiting(clone: &TestVm, why: &str) -> Result<MachineStatus> {
    clone.wait_status(&format!("a waiting disk: {why}"), |status| {
        let arrivals = status.disks.iter().filter_map(|disk| disk.arrival.as_ref());
        arrivals.flat_map(|arrival| &arrival.waits).any(|said| said.contains(why))
    })
}

/// Missing bytes of all disks; `None` if all have arrived.
fn missing_bytes(status: &MachineStatus) -> Option<u64> {
    let arrivals = status.disks.iter().filter_map(|disk| disk.arrival.as_ref());
    arrivals.map(|arrival| arrival.missing_bytes).reduce(|one, other| one + other)
}

fn io_errors(status: &MachineStatus) -> u64 {
    status.disks.iter().map(|disk| disk.io_errors).sum()
}

/// Waits until the disks have arrived. Asserts that this many requests failed: those that a dead QEMU left unanswered.
fn wait_disks(clone: &TestVm, unanswered: u64) -> Result<()> {
    clone.wait_event_within("a complete disk", patience(60), event!(DiskComplete))?;
    let status = clone.wait_status("complete disks", |status| missing_bytes(status).is_none())?;
    assert_eq!(io_errors(&status), unanswered, "{status:?}");
    Ok(())
}

/// The snapshot's disks that have arrived, with their names.
fn disks_of(clone: &TestVm) -> Vec<(String, Vec<u8>)> {
    let files = fs::read_dir(clone.folder().join("machine/saved-disks")).expect("a folder").flatten();
    let read = |file: fs::DirEntry| {
        (file.file_name().to_string_lossy().into_owned(), fs::read(file.path()).expect("it can be read"))
    };
    let mut disks: Vec<_> = files.map(read).collect();
    disks.sort_unstable();
    disks
}

#[test]
fn guest_reads_saved_disks_while_they_arrive() -> Result<()> {
    let stand = Stand::new();
    let image = stand.path("second.qcow2");
    let made = Command::new("qemu-img").args(["create", "-q", "-f", "qcow2", &image, "32M"]).status();
    assert!(made.expect("qemu-img is installed").success());
    let second = Disk::in_place(Path::new(&image)).setting("format", "qcow2").setting("name", "second");
    let (vm, nonce) = saved(&stand, "early", [second])?;
    vm.sh("dd if=/dev/urandom of=/dev/vdb bs=1M count=12 conv=fsync 2>&1")?;
    let sum = |vm: &TestVm| vm.sh_within("probe drop-caches; md5sum </dev/vdb", patience(60));
    let expected = sum(&vm)?;
    save(&vm)?;
    let whole = stand.clone(&vm, "whole", "first", &["--eager"])?;
    whole.wait_running()?;
    assert_eq!(missing_bytes(&whole.status()?), None, "an eager restore has fetched everything before it runs");
    let disks = disks_of(&whole);
    assert_eq!(disks.len(), 2);
    verify_file(&whole)?;
    assert_eq!(sum(&whole)?, expected);
    whole.stop_at_once()?;
    for (name, mode, wire) in [
        ("slow", "--lazy", Wire::Slow(2 * MIB)),
        ("cut", "--working-set", Wire::Cut(3 * MIB)),
        ("fast", "--lazy", Wire::Whole),
    ] {
        stand.server.set_wire(wire);
        let clone = stand.clone(&vm, name, name, &[mode])?;
        clone.wait_running()?;
        if name == "slow" {
            assert!(
                missing_bytes(&clone.status()?) > Some(FILE_MIB / 2 * MIB),
                "the disk arrived too early for this test"
            );
        }
        assert_eq!(clone.nonce()?, nonce);
        clone.sh("echo new >/d/written && sync")?;
        verify_file(&clone)?;
        assert_eq!(sum(&clone)?, expected, "{name}");
        wait_disks(&clone, 0)?;
        assert!(disks_of(&clone) == disks, "{name}: the disks equal those of an eager restore");
        clone.sh("probe drop-caches")?;
        verify_file(&clone)?;
        assert_eq!(clone.sh("cat /d/written")?.trim(), "new");
        clone.stop_at_once()?;
    }
    Ok(())
}

#[test]
fn disk_waits_for_a_lost_store_across_keepers() -> Result<()> {
    let stand = Stand::new();
    let (vm, nonce) = saved(&stand, "patient", [])?;
    save(&vm)?;
    let clone = waiting(&stand, &vm, "waits")?;
    let folder = stand.path("never");
    for request in
        [&["save", clone.name(), "-o", &folder][..], &["rejuvenate", clone.name()], &["upgrade-keeper", clone.name()]]
    {
        let refused = clone.cli_output(request)?;
        let expect = "the guest's disks are still being fetched from the object store";
        assert!(refused.status != 0 && refused.text().contains(expect), "{request:?}: {}", refused.text());
    }
    let names_disk = event!(RestoreWaits { why } if why.contains("one/disk-"));
    clone.wait_event("an event about the waiting disk", names_disk)?;
    clone.restart_keeper()?;
    await_waiting(&clone, "the store gave no valid answer")?;
    clone.await_console()?;
    still_verifies(&clone)?;
    stand.server.set_wire(Wire::Failing);
    let status = await_waiting(&clone, "500")?;
    assert!(missing_bytes(&status) > Some(FILE_MIB / 2 * MIB), "{status:?}");
    still_verifies(&clone)?;
    stand.server.set_wire(Wire::Whole);
    verified(&clone)?;
    assert_eq!(clone.nonce()?, nonce);
    wait_disks(&clone, 0)?;
    clone.sh("probe drop-caches")?;
    verify_file(&clone)?;
    // Now a rejuvenation works.
    clone.rejuvenate()
}

#[test]
fn arrival_continues_after_keeper_is_killed() -> Result<()> {
    let stand = Stand::new();
    let (vm, nonce) = saved(&stand, "followed", [])?;
    save(&vm)?;
    stand.server.set_wire(Wire::Slow(MIB));
    let clone = stand.clone(&vm, "follows", "cache", &["--lazy"])?;
    clone.wait_running()?;
    begin_verifying(&clone)?;
    for (missing_mib, wire) in [(FILE_MIB - 4, Wire::Slow(2 * MIB)), (FILE_MIB / 2, Wire::Whole)] {
        let has_come =
            |status: &MachineStatus| missing_bytes(status).is_some_and(|missing| missing < missing_mib * MIB);
        clone.wait_status("part of the disk", has_come)?;
        stand.server.set_wire(wire);
        clone.restart_keeper()?;
    }
    clone.await_console()?;
    verified(&clone)?;
    assert_eq!(clone.nonce()?, nonce);
    wait_disks(&clone, 0)
}

#[test]
fn guest_waiting_for_lost_store_stops_or_reboots() -> Result<()> {
    let stand = Stand::new();
    let (vm, _) = saved(&stand, "stuck", [])?;
    save(&vm)?;
    assert!(waiting(&stand, &vm, "stopped")?.stop_at_once()?.success());
    let dies = waiting(&stand, &vm, "dies")?;
    dies.kill_qemu()?;
    dies.wait_event("a drained disk", event!(Phase { phase, .. } if phase == "drain"))?;
    stand.server.set_wire(Wire::Whole);
    dies.wait_incarnation(2)?;
    let unanswered = io_errors(&dies.status()?);
    dies.sh("mkdir -p /d && mount /dev/vda /d")?;
    verify_file(&dies)?;
    wait_disks(&dies, unanswered)
}
