//! `--dedup-disk`: pages that are also on the disks are not stored, and are restored all the same.

use std::fs::{self, File};
use std::os::unix::fs::FileExt;
use std::path::Path;

use hearth_recovery::snapshot::Snapshot;
use hearth_vmtest::{Disk, Drives, Result, TestVm, event, patience, pattern};

use super::{SEED, comes_whole, fill, verify, wait_restore};

const FILE_BYTES: usize = 24 << 20;

/// Makes the guest read a file from its disk, and fill memory with contents that no disk holds.
pub fn read_file(vm: &TestVm) -> Result<()> {
    fill(vm, 16)?;
    vm.sh(&format!("mkdir -p /d && mount /dev/vda /d && probe fill /d/file {FILE_BYTES} {SEED} && probe drop-caches"))?;
    verify_file(vm)
}

pub fn verify_file(vm: &TestVm) -> Result<()> {
    vm.sh_within(&format!("probe verify /d/file {SEED}"), patience(60)).map(drop)
}

/// Waits for the save's end. Returns the size of the memory file, and the number of pages that are only on the disks.
fn saved(vm: &TestVm, folder: &Path) -> Result<(u64, u64)> {
    let path = folder.display().to_string();
    let saved = event!(Saved { folder, bytes, pages_on_disks, .. } if folder == path => (bytes, pages_on_disks));
    vm.wait_event("the save's end", saved)
}

fn read_all(folder: &Path) {
    let snapshot = Snapshot::open(folder).expect("it was saved");
    let mut reading = snapshot.ram.reading();
    for chunk in 0..snapshot.ram.chunks() {
        snapshot.ram.read(chunk, &mut reading).expect("each chunk is whole");
    }
}

#[test]
fn pages_on_disks_are_restored_without_being_stored() -> Result<()> {
    let vm = TestVm::busybox("dedup").disk(Disk::ext4(64)).running()?;
    let (nonce, plain, first) = (vm.nonce()?, vm.folder().join("plain"), vm.folder().join("first"));
    read_file(&vm)?;
    vm.save(&plain)?;
    vm.save_with(&first, &["--dedup-disk", "--scan", "200ms,2"])?;
    verify_file(&vm)?;
    vm.stop_at_once()?;
    let ((whole, whole_on_disks), (shared, on_disks)) = (saved(&vm, &plain)?, saved(&vm, &first)?);
    eprintln!("{on_disks} pages on disks; {whole} and {shared} bytes");
    assert_eq!(whole_on_disks, 0);
    assert!(on_disks as usize * 4096 >= FILE_BYTES / 10 * 9, "{on_disks}");
    assert!(shared + on_disks * 3500 < whole, "{whole} and {shared}");
    read_all(&first);

    let clone = vm.restore(&first, "clone", &["--lazy"])?;
    clone.wait_running()?;
    assert_eq!(clone.nonce()?, nonce);
    verify_file(&clone)?;
    verify(&clone)?;
    clone.wait_event("all memory is there", event!(RestoreComplete))?;
    // The clone's disk is a qcow2 image over the snapshot's.
    clone.sh("probe drop-caches")?;
    verify_file(&clone)?;
    let second = vm.folder().join("second");
    clone.save_with(&second, &["--dedup-disk", "--compress"])?;
    clone.stop_at_once()?;
    assert!(saved(&clone, &second)?.1 > FILE_BYTES as u64 / 8192);
    read_all(&second);
    let last = vm.restore(&second, "last", &["--eager"])?;
    last.wait_running()?;
    assert_eq!(last.nonce()?, nonce);
    verify_file(&last)?;
    verify(&last)
}

#[test]
fn guest_waits_until_an_altered_block_is_repaired() -> Result<()> {
    let vm = TestVm::busybox("altered").disk(Disk::ext4(64)).running()?;
    let (nonce, snapshot) = (vm.nonce()?, vm.folder().join("snapshot"));
    read_file(&vm)?;
    vm.save_with(&snapshot, &["--dedup-disk"])?;
    vm.stop_at_once()?;
    let opened = Snapshot::open(&snapshot).expect("it was saved");
    let path = opened.disk_path(&opened.manifest.disks[0].name);
    drop(opened);
    let first = &pattern::bytes("file", FILE_BYTES, SEED)[FILE_BYTES / 2..][..4096];
    let whole = fs::read(&path).expect("it can be read");
    let place = whole.chunks_exact(4096).position(|block| block == first).expect("it is on the disk") * 4096;
    let disk = File::options().write(true).open(&path).expect("it is there");
    // The file keeps its time, as when the medium fails: a file that was written to would be refused earlier.
    let times =
        fs::FileTimes::new().set_modified(disk.metadata().and_then(|file| file.modified()).expect("it has one"));
    disk.write_all_at(&[whole[place] ^ 1], place as u64).expect("it can be written");
    disk.set_times(times).expect("it is ours");
    let clone = vm.restore(&snapshot, "waits", &["--lazy"])?;
    clone.wait_running()?;
    let why = clone.wait_event("an event about the damage", event!(RestoreWaits { why } => why))?;
    let (named, block) = (format!("{}: pages ", path.display()), place / 4096);
    assert!(why.contains(&named) && why.contains("are not what they were when it was saved"), "{block}: {why}");
    let verifying = clone.guest().start(&format!("probe verify /d/file {SEED}"))?;
    wait_restore(&clone, "only the damaged pages missing", |restore| restore.pages_missing <= 16)?;
    assert!(clone.guest().take_answer(verifying).is_none(), "the verification waits for the damaged page");
    disk.write_all_at(&[whole[place]], place as u64).expect("it can be written");
    disk.set_times(times).expect("it is ours");
    comes_whole(&clone, verifying, &nonce)
}

#[test]
fn dedup_without_a_ledger_is_refused() -> Result<()> {
    let vm = TestVm::busybox("noledger").without_ember().boot()?;
    let folder = vm.folder().join("snapshot").display().to_string();
    let refused = vm.cli_output(&["save", vm.name(), "-o", &folder, "--dedup-disk"])?;
    assert!(refused.status != 0 && refused.text().contains("`ember = \"off\"`"), "{}", refused.text());
    vm.cli(&["save", vm.name(), "-o", &folder]).map(drop)
}
