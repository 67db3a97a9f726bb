//! What saving does to the machine that is saved: nothing, or it stops.

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::Command;

use hearth_recovery::snapshot::Snapshot;
use hearth_vmtest::known::{fio_ends_well, fio_goes_on, start_fio};
use hearth_vmtest::{Disk, Drives, Result, TestVm, patience};

use super::{count, fill, start_counter, verify};

#[test]
fn a_guest_that_is_saved_goes_on_and_what_is_saved_is_whole() -> Result<()> {
    let vm = TestVm::busybox("saved").boot()?;
    let (nonce, folder) = (vm.nonce()?, vm.folder().join("snapshot"));
    fill(&vm, 32)?;
    start_counter(&vm)?;
    let before = count(&vm)?;
    vm.save(&folder)?;
    assert_eq!(vm.nonce()?, nonce);
    vm.sh(&format!("while [ $(cat /tmp/count) -le {before} ]; do sleep 0.1; done"))?;
    verify(&vm)?;
    let snapshot = Snapshot::open(&folder).expect("it was saved");
    assert!(snapshot.ram.pages().len() > (32 << 20) / 4096, "{}", snapshot.ram.pages().len());
    let mut reading = snapshot.ram.reading();
    for chunk in 0..snapshot.ram.chunks() {
        snapshot.ram.read(chunk, &mut reading).expect("each chunk is whole");
    }
    let again = vm.cli_output(&["save", vm.name(), "-o", &folder.display().to_string()])?;
    assert!(again.status != 0 && again.text().contains("exists already"), "{}", again.text());
    assert_eq!(vm.status()?["state"], "running");
    vm.rejuvenate()?;
    assert_eq!(vm.nonce()?, nonce, "and can be handed over");
    Ok(())
}

/// Some seconds of writing: a chance to break in.
fn begin_save(vm: &TestVm, folder: &Path) -> Result<()> {
    vm.cli(&["save", vm.name(), "-o", &folder.display().to_string(), "--compress", "--no-wait"]).map(drop)
}

#[test]
fn a_save_that_is_called_off_leaves_the_guest_as_it_was_and_nothing_behind() -> Result<()> {
    let vm = TestVm::busybox("calledoff").memory_mib(768).boot()?;
    let nonce = vm.nonce()?;
    fill(&vm, 220)?;
    // It may be over before it can be called off; then all of it is there.
    let mut called_off = false;
    for attempt in 0..5 {
        let folder = vm.folder().join(format!("snapshot{attempt}"));
        begin_save(&vm, &folder)?;
        vm.cli_output(&["save", vm.name(), "--cancel"])?;
        vm.wait_status("no save is under way", |status| status["save"].is_null() && status["state"] == "running")?;
        assert_eq!(vm.nonce()?, nonce);
        assert_eq!(folder.exists(), Snapshot::open(&folder).is_ok());
        called_off |= !folder.exists();
        if called_off {
            break;
        }
    }
    assert!(called_off, "each of five saves was over before it could be called off");
    verify(&vm)
}

/// A file system whose disk can be made to hang: whoever writes to it waits.
struct Volume(tempfile::TempDir);

impl Volume {
    fn mount(mib: u64) -> Self {
        let volume = Self(tempfile::tempdir().expect("a folder"));
        let image = volume.0.path().join("image");
        File::create(&image).and_then(|file| file.set_len(mib << 20)).expect("a sparse file");
        fs::create_dir(volume.folder()).expect("a folder");
        volume.run(&["mkfs.ext4", "-q"], &image);
        let mount = format!("mount -o loop {}", image.display());
        volume.run(&mount.split(' ').collect::<Vec<_>>(), &volume.folder());
        volume
    }

    fn folder(&self) -> PathBuf {
        self.0.path().join("mounted")
    }

    fn hang(&self) {
        self.run(&["fsfreeze", "--freeze"], &self.folder());
    }

    fn go_on(&self) {
        self.run(&["fsfreeze", "--unfreeze"], &self.folder());
    }

    fn run(&self, words: &[&str], last: &Path) {
        let status = Command::new(words[0]).args(&words[1..]).arg(last).status().expect("it is installed");
        assert!(status.success(), "{words:?}");
    }
}

impl Drop for Volume {
    fn drop(&mut self) {
        // It may not hang.
        let _ = Command::new("fsfreeze").arg("--unfreeze").arg(self.folder()).output();
        let _ = Command::new("umount").arg("--lazy").arg(self.folder()).output();
    }
}

#[test]
fn a_save_whose_disk_hangs_is_called_off_and_holds_up_neither_machine_nor_guest() -> Result<()> {
    if !rustix::process::geteuid().is_root() {
        eprintln!("not tried: only root can make a file system that hangs");
        return Ok(());
    }
    let vm = TestVm::busybox("hangs").memory_mib(768).boot()?;
    fill(&vm, 220)?;
    let volume = Volume::mount(2048);
    let folder = volume.folder().join("snapshot");
    // It may be over before its disk hangs.
    for _ in 0..5 {
        begin_save(&vm, &folder)?;
        volume.hang();
        if !vm.status()?["save"].is_null() {
            break;
        }
        volume.go_on();
        fs::remove_dir_all(&folder).expect("it was saved");
    }
    vm.cli(&["save", vm.name(), "--cancel", "--no-wait"])?;
    verify(&vm)?;
    let another = vm.folder().join("another").display().to_string();
    let refused = vm.cli_output(&["save", vm.name(), "-o", &another])?;
    assert!(refused.status != 0 && refused.text().contains("still waits for its disk"), "{}", refused.text());
    vm.reboot_forced()?;
    vm.wait_incarnation(2)?;
    volume.go_on();
    let failed = vm.wait_event("the save is over", |event| event["kind"] == "save_failed")?;
    assert!(failed["why"].as_str().is_some_and(|why| why.contains("cancelled by the operator")), "{failed}");
    assert!(!folder.exists(), "nothing is left of it");
    vm.save(Path::new(&another))
}

#[test]
fn a_keeper_killed_while_it_saves_is_followed_by_one_that_lets_the_guest_go_on() -> Result<()> {
    let vm = TestVm::busybox("killedsave").memory_mib(768).boot()?;
    let (nonce, folder) = (vm.nonce()?, vm.folder().join("snapshot"));
    fill(&vm, 220)?;
    begin_save(&vm, &folder)?;
    vm.restart_keeper()?;
    vm.wait_running()?;
    vm.await_console()?;
    assert_eq!(vm.nonce()?, nonce);
    verify(&vm)?;
    vm.save(&vm.folder().join("another"))
}

/// Four blocks, 8 MiB apart, are written in turn. What memory says was written
/// last is on the disk, and what it does not know of is not; else it is noted.
pub(super) const TURNS: &str = r#"
at() { dd if=/dev/vda bs=512 skip=$(( $1 % 4 * 16384 )) count=1 iflag=direct 2>/dev/null | head -n 1; }
(i=0
while :; do
  i=$((i+1))
  echo $i | dd of=/dev/vda bs=512 seek=$(( i % 4 * 16384 )) conv=notrunc,fsync,sync 2>/dev/null
  [ "$(at $i)" = $i ] || echo "memory says $i, the disk $(at $i)" >>/tmp/odd
  [ $i -lt 4 ] || [ "$(at $((i+1)))" = $((i-3)) ] || echo "after $i the disk says $(at $((i+1)))" >>/tmp/odd
  echo $i >/tmp/turn.new; mv /tmp/turn.new /tmp/turn
done) >/dev/null 2>&1 &
"#;

/// Memory is written again and again, and read each time.
pub(super) const CHURN: &str = r#"
(n=0
while :; do
  n=$((n+1))
  sleep 0.1
  probe fill /tmp/churn 4194304 $n && probe verify /tmp/churn $n || echo "memory is odd in round $n" >>/tmp/odd
done) >/dev/null 2>&1 &
"#;

/// Both writers go on for a while, and find everything as they left it.
pub(super) fn await_turns(vm: &TestVm, turns: u32) -> Result<()> {
    let wait = format!(
        "while [ ! -s /tmp/turn ]; do sleep 0.1; done; from=$(cat /tmp/turn)
         while [ $(cat /tmp/turn) -lt $((from + {turns})) ] && [ ! -e /tmp/odd ]; do sleep 0.1; done; cat /tmp/odd"
    );
    let waited = vm.run_within(&wait, patience(60))?.text();
    assert!(waited.contains("No such file"), "{}: {waited}", vm.name());
    Ok(())
}

#[test]
fn a_guest_that_writes_all_the_time_is_saved_at_one_moment_and_so_is_its_clone() -> Result<()> {
    let vm = TestVm::busybox("busy").disk(Disk::empty(32)).boot()?;
    let (nonce, first, second) = (vm.nonce()?, vm.folder().join("first"), vm.folder().join("second"));
    fill(&vm, 16)?;
    vm.sh(TURNS)?;
    vm.sh(CHURN)?;
    await_turns(&vm, 5)?;
    vm.save_with(&first, &["--scan", "300ms,3"])?;
    await_turns(&vm, 3)?;
    vm.stop_at_once()?;
    let clone = vm.restore(&first, "clone", &["--lazy"])?;
    clone.wait_running()?;
    assert_eq!(clone.nonce()?, nonce);
    await_turns(&clone, 3)?;
    clone.wait_event("all memory is there", |event| event["kind"] == "restore_complete")?;
    // Its disk is a qcow2 image.
    clone.save(&second)?;
    let saved = clone.wait_event("it is saved", |event| event["kind"] == "saved")?;
    let held = clone.wait_event("a save began", |event| event["kind"] == "save_started")?["held_why"].clone();
    await_turns(&clone, 3)?;
    clone.stop_at_once()?;
    let last = vm.restore(&second, "last", &["--eager"])?;
    last.wait_running()?;
    assert_eq!(last.nonce()?, nonce);
    await_turns(&last, 3)?;
    verify(&last)?;
    assert!(saved["rounds"].as_u64() > Some(0) || held.is_string(), "{saved}");
    Ok(())
}

#[test]
fn a_load_that_verifies_its_disk_goes_through_a_save_and_to_its_end_in_the_clone_too() -> Result<()> {
    let vm = TestVm::busybox_with_fio("verified").cpus(2).disk(Disk::empty(48)).boot()?;
    let (nonce, snapshot) = (vm.nonce()?, vm.folder().join("snapshot"));
    fill(&vm, 32)?;
    start_fio(&vm)?;
    vm.sh(CHURN)?;
    vm.wait_status("the load is under way", |status| status["disks"][0]["written_bytes"].as_u64() > Some(1 << 20))?;
    vm.save(&snapshot)?;
    fio_goes_on(&vm)?;
    loads_end_well(&vm)?;
    vm.stop_at_once()?;
    let clone = vm.restore(&snapshot, "clone", &["--lazy"])?;
    clone.wait_running()?;
    assert_eq!(clone.nonce()?, nonce);
    fio_goes_on(&clone)?;
    loads_end_well(&clone)
}

fn loads_end_well(vm: &TestVm) -> Result<()> {
    fio_ends_well(vm)?;
    vm.sh("[ ! -e /tmp/odd ]")?;
    verify(vm)?;
    vm.has_no_disk_errors()
}

#[test]
fn where_blocks_cannot_be_shared_images_are_copied_behind_the_guest() -> Result<()> {
    let vm = TestVm::busybox("unshared").disk(Disk::empty(16)).boot()?;
    // Not the file system of the image: there nothing can be shared.
    let elsewhere = tempfile::tempdir_in("/dev/shm").expect("a folder");
    let folder = elsewhere.path().join("snapshot");
    let write = |word: &str| vm.sh(&format!("echo {word} | dd of=/dev/vda bs=512 seek=7 conv=notrunc,fsync,sync 2>&1"));
    write("before")?;
    vm.save(&folder)?;
    write("after")?;
    let snapshot = Snapshot::open(&folder).expect("it was saved");
    assert_eq!(snapshot.manifest.disks[0].bytes, 16 << 20);
    let disk = std::fs::read(snapshot.disk_path(&snapshot.manifest.disks[0].name)).expect("the disk");
    assert_eq!(&disk[7 * 512..7 * 512 + 7], b"before\n");
    Ok(())
}
