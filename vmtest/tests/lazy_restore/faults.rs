//! Damaged snapshots: a guest waits or does not start; it never sees data that was not saved.

use std::collections::HashSet;
use std::fs::{self, File};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use hearth_recovery::snapshot::Snapshot;
use hearth_vmtest::{Disk, Drives, Result, TestVm, event, processes};

use super::{comes_whole, fill, verify, wait_restore};

/// Pages that a snapshot stores together.
const CHUNK_PAGES: usize = 16;

/// A machine with 64 MiB of known memory that was saved and stopped, its nonce, and its snapshot.
pub fn saved(name: &str) -> Result<(TestVm, String, PathBuf)> {
    let vm = TestVm::busybox(name).running()?;
    let (nonce, snapshot) = (vm.nonce()?, vm.folder().join("snapshot"));
    fill(&vm, 64)?;
    vm.save(&snapshot)?;
    vm.stop_at_once()?;
    Ok((vm, nonce, snapshot))
}

#[test]
fn incomplete_snapshot_is_refused_by_name() -> Result<()> {
    let (vm, nonce, snapshot) = saved("refused")?;
    let refused = |what: &str, expect: &str| -> Result<()> {
        let clone = vm.restore(&snapshot, "never", &[])?;
        assert_eq!(clone.wait_keeper_end()?.code(), Some(1), "{what}");
        assert!(clone.keeper_log().contains(expect), "{what}: {}", clone.keeper_log());
        Ok(())
    };
    let put_back = |path: &Path, bytes: &[u8]| fs::write(path, bytes).expect("it can be written");
    for (name, expect) in
        [("manifest", "it has no manifest"), ("state", "state: cannot be read"), ("ram", "ram: cannot be read")]
    {
        let path = snapshot.join(name);
        let away = snapshot.join("away");
        fs::rename(&path, &away).expect("it is there");
        refused(name, expect)?;
        fs::rename(&away, &path).expect("it is there");
        let whole = fs::read(&path).expect("it is there");
        let cut = File::options().write(true).open(&path).expect("it is there");
        cut.set_len(whole.len() as u64 - 10).expect("it can be cut");
        refused(name, name)?;
        put_back(&path, &whole);
    }
    let clone = vm.restore(&snapshot, "whole", &[])?;
    clone.wait_running()?;
    assert_eq!(clone.nonce()?, nonce);
    verify(&clone)
}

/// Damages a byte of a page of the pattern. It has only pages of the pattern around it: what is stored together is loaded together,
/// and neither QEMU's start nor the guest's answers may need that. Returns the image, its old contents and the page's offset.
fn damage(snapshot: &Path) -> (File, Vec<u8>, usize) {
    let ram = snapshot.join("ram");
    let bytes = Snapshot::open(snapshot).expect("it was saved").ram.sealed().bytes;
    let image = File::options().read(true).write(true).open(&ram).expect("it is there");
    let whole = fs::read(&ram).expect("it can be read");
    let pattern = hearth_vmtest::pattern::bytes("memory", 64 << 20, super::SEED);
    let of_pattern: HashSet<&[u8]> = pattern.chunks_exact(4096).collect();
    let places: Vec<usize> = (4096..bytes as usize - 4096).step_by(4096).collect();
    let is_around = |places: &&[usize]| places.iter().all(|at| of_pattern.contains(&whole[*at..*at + 4096]));
    let around = places.windows(2 * CHUNK_PAGES - 1).find(is_around).expect("the pattern is in the image");
    let place = around[CHUNK_PAGES - 1];
    image.write_all_at(&[whole[place] ^ 1], place as u64).expect("it can be written");
    (image, whole, place)
}

#[test]
fn failed_restore_leaves_its_name_free() -> Result<()> {
    let vm = TestVm::busybox("poison").disk(Disk::empty(16)).running()?;
    let (nonce, snapshot) = (vm.nonce()?, vm.folder().join("snapshot"));
    fill(&vm, 64)?;
    vm.save_and_stop(&snapshot)?;
    let (image, whole, place) = damage(&snapshot);
    let folder = vm.folder().join("clone");
    // The restore has the name and the runtime folder of the machine that was saved.
    let text = |path: &Path| path.display().to_string();
    let refused = vm.cli_output(&["restore", &text(&snapshot), "--eager", "--folder", &text(&folder)])?;
    assert!(refused.status == 1 && refused.text().contains("are damaged"), "{}", refused.text());
    assert!(!refused.text().contains(" ERROR "), "nothing else has failed: {}", refused.text());
    image.write_all_at(&[whole[place]], place as u64).expect("it can be written");
    vm.restart_keeper()?;
    vm.wait_boots(2)?;
    assert_ne!(vm.nonce()?, nonce, "the machine boots from its own disk");
    vm.stop_at_once()?;
    // The machine that the restore made starts from the snapshot, which can be read now.
    vm.run_configuration(&folder.join("machine.toml"))?;
    vm.wait_running()?;
    vm.await_console()?;
    assert_eq!(vm.nonce()?, nonce);
    verify(&vm)
}

/// Everything is damaged, also pages that a start touches: the rings of the disks and what QEMU loads.
#[test]
fn damaged_restore_leaves_nothing_and_works_after_repair() -> Result<()> {
    let vm = TestVm::busybox("nothing-left").disk(Disk::empty(16)).running()?;
    let (nonce, snapshot) = (vm.nonce()?, vm.folder().join("snapshot"));
    fill(&vm, 16)?;
    vm.save_and_stop(&snapshot)?;
    let bytes = Snapshot::open(&snapshot).expect("it was saved").ram.sealed().bytes;
    let image = File::options().read(true).write(true).open(snapshot.join("ram")).expect("it is there");
    let whole = fs::read(snapshot.join("ram")).expect("it can be read");
    // The list of pages, behind the pages, stays whole.
    for at in (4096..bytes as usize / 100 * 98).step_by(4096) {
        image.write_all_at(&[!whole[at]], at as u64).expect("it can be written");
    }
    let clone = vm.restore(&snapshot, "from-damage", &["--lazy"])?;
    assert_eq!(clone.wait_keeper_end()?.code(), Some(1), "{}", clone.keeper_log());
    assert!(clone.keeper_log().contains("are damaged"), "{}", clone.keeper_log());
    assert!(
        !clone.keeper_log().contains("no answer within"),
        "the restore must not wait for a hanging QEMU: {}",
        clone.keeper_log()
    );
    assert!(processes::mentioning(clone.memory_folder()).is_empty(), "a QEMU without a keeper");
    assert_eq!(clone.runtime_files(), ["events.jsonl", "journal.json", "keeper.lock", "preload.so"]);
    image.write_all_at(&whole, 0).expect("it can be written");
    clone.restart_keeper()?;
    clone.wait_running()?;
    clone.await_console()?;
    assert_eq!(clone.nonce()?, nonce);
    verify(&clone)
}

#[test]
fn guest_waits_until_a_damaged_page_is_repaired() -> Result<()> {
    let (vm, nonce, snapshot) = saved("mended")?;
    let (image, whole, place) = damage(&snapshot);
    let clone = vm.restore(&snapshot, "waits", &["--lazy"])?;
    clone.wait_running()?;
    let why = clone.wait_event("an event about the damage", event!(RestoreWaits { why } => why))?;
    assert!(why.contains("of the guest's memory are damaged"), "{why}");
    let restore = clone.status()?.restore.expect("it is being restored");
    assert_eq!((restore.complete, restore.waits.len()), (false, 1), "{restore:?}");
    let refused = clone.cli_output(&["save", clone.name(), "-o", &vm.folder().join("half").display().to_string()])?;
    assert!(
        refused.status != 0 && refused.text().contains("memory is still being loaded from its snapshot"),
        "{}",
        refused.text()
    );
    let refused = clone.cli_output(&["resize", clone.name(), "data"])?;
    assert!(refused.status != 0 && refused.text().contains("cannot resize: the guest's memory"), "{}", refused.text());
    let verifying = clone.guest().start(&format!("probe verify /tmp/memory {}", super::SEED))?;
    wait_restore(&clone, "only the damaged pages missing", |restore| restore.pages_missing <= 16)?;
    assert!(clone.guest().take_answer(verifying).is_none(), "the verification waits for the damaged page");
    image.write_all_at(&[whole[place]], place as u64).expect("it can be written");
    comes_whole(&clone, verifying, &nonce)
}

#[test]
fn guest_waits_until_a_truncated_image_is_whole() -> Result<()> {
    let (vm, nonce, snapshot) = saved("cut")?;
    let (ram, over) = (snapshot.join("ram"), vm.folder().join("over"));
    let whole = fs::read(&ram).expect("it can be read");
    let image = File::options().write(true).open(&ram).expect("it is there");
    // A trace prevents the backfill, so that the restore stays unfinished.
    let until = format!("test -e {}", over.display());
    let clone = vm.restore(&snapshot, "waits", &["--trace", "3600", "--until", &until])?;
    clone.wait_running()?;
    let verifying = clone.guest().start(&format!("probe verify /tmp/memory {}", super::SEED))?;
    wait_restore(&clone, "touched pages", |restore| restore.pages_lazy > 2000)?;
    image.set_len(0).expect("it can be cut off");
    let waits = event!(RestoreWaits { why } => why);
    let (why, named) = (clone.wait_event("a waiting guest", waits)?, format!("{}: pages ", ram.display()));
    assert!(why.starts_with(&named) && why.ends_with("the file cannot be read there"), "{why}");
    fs::write(&over, "").expect("a file");
    // From now on the backfill runs, and meets the missing image.
    clone.wait_event("the trace is over", event!(Error))?;
    let is_rest = |line: &String| line.starts_with("and ") && line.ends_with(" more");
    wait_restore(&clone, "a list of all that is missing", |restore| restore.waits.last().is_some_and(is_rest))?;
    let count = clone.events().iter().filter_map(waits).count();
    assert!(count <= 16, "too many events about missing memory: {count}");
    assert!(clone.guest().take_answer(verifying).is_none(), "the verification waits for the missing image");
    image.write_all_at(&whole, 0).expect("it can be written");
    comes_whole(&clone, verifying, &nonce)
}

#[test]
fn whole_copy_replaces_damaged_image_another_is_refused() -> Result<()> {
    let vm = TestVm::busybox("replaced").running()?;
    let (nonce, snapshot, other) = (vm.nonce()?, vm.folder().join("snapshot"), vm.folder().join("other"));
    fill(&vm, 64)?;
    vm.save(&snapshot)?;
    vm.save(&other)?;
    vm.stop_at_once()?;
    let (_, whole, _) = damage(&snapshot);
    let put = |bytes: &[u8]| {
        let new = snapshot.join("ram.new");
        fs::write(&new, bytes).and_then(|()| fs::rename(&new, snapshot.join("ram"))).expect("it can be put there");
    };
    let clone = vm.restore(&snapshot, "waits", &["--lazy"])?;
    clone.wait_running()?;
    let waits_for = |what: &str| {
        let damaged = "of the guest's memory are damaged";
        clone.wait_event(what, event!(RestoreWaits { why } if why.contains(damaged) && why.contains(what)))
    };
    waits_for("their checksum is wrong")?;
    let verifying = clone.guest().start(&format!("probe verify /tmp/memory {}", super::SEED))?;
    put(&fs::read(other.join("ram")).expect("it was saved"));
    waits_for("is not the file that was opened, nor a whole copy of it")?;
    wait_restore(&clone, "only the damaged pages missing", |restore| restore.pages_missing <= 16)?;
    assert!(clone.guest().take_answer(verifying).is_none(), "the verification waits for the damaged page");
    put(&whole);
    comes_whole(&clone, verifying, &nonce)
}

#[test]
fn clone_waits_for_its_original_base_image() -> Result<()> {
    let vm = TestVm::busybox("lower").disk(Disk::ext4(64)).running()?;
    let snapshot = vm.folder().join("snapshot");
    vm.save(&snapshot)?;
    vm.stop_at_once()?;
    let clone = vm.restore(&snapshot, "upper", &[])?;
    clone.wait_event("all memory is there", event!(RestoreComplete))?;
    clone.sh("mkdir -p /d && mount /dev/vda /d && echo kept >/d/kept && umount /d")?;
    clone.stop_at_once()?;
    let opened = Snapshot::open(&snapshot).expect("it was saved");
    let (disk, away) = (opened.disk_path(&opened.manifest.disks[0].name), snapshot.join("away"));
    fs::rename(&disk, &away).expect("it is there");
    fs::copy(&away, &disk).expect("there is room");
    clone.restart_keeper()?;
    assert_eq!(clone.wait_keeper_end()?.code(), Some(75));
    let (said, named) = (clone.keeper_log(), format!("was made over {} as that was at @", disk.display()));
    assert!(said.contains(&named), "{said}");
    fs::rename(&away, &disk).expect("it is there");
    clone.restart_keeper()?;
    clone.wait_incarnation(1)?;
    assert_eq!(clone.sh("mkdir -p /d && mount /dev/vda /d && cat /d/kept")?.trim(), "kept");
    Ok(())
}
