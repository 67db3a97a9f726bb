//! Effects of a save on the machine: none, or it stops.

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::Command;

use hearth_api::MachineState;
use hearth_recovery::snapshot::Snapshot;
use hearth_vmtest::known::{fio_ends_well, fio_goes_on, start_fio};
use hearth_vmtest::{Disk, Drives, Result, TestVm, event, patience};

use super::{count, fill, start_counter, verify};

#[test]
fn saved_guest_continues_and_snapshot_is_whole() -> Result<()> {
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
    assert_eq!(vm.status()?.state, MachineState::Running);
    vm.rejuvenate()?;
    assert_eq!(vm.nonce()?, nonce, "the guest can still hop");
    Ok(())
}

/// Starts a save that takes some seconds, so that it can be interrupted.
fn begin_save(vm: &TestVm, folder: &Path) -> Result<()> {
    vm.cli(&["save", vm.name(), "-o", &folder.display().to_string(), "--compress", "--no-wait"]).map(drop)
}

#[test]
fn cancelled_save_leaves_guest_unchanged_and_no_files() -> Result<()> {
    let vm = TestVm::busybox("cancelled").memory_mib(768).running()?;
    let nonce = vm.nonce()?;
    fill(&vm, 220)?;
    // The save may complete before the cancellation; then the snapshot must be whole.
    let mut cancelled = false;
    for attempt in 0..5 {
        let folder = vm.folder().join(format!("snapshot{attempt}"));
        begin_save(&vm, &folder)?;
        vm.cli_output(&["save", vm.name(), "--cancel"])?;
        vm.wait_status("the save's end", |status| status.save.is_none() && status.state == MachineState::Running)?;
        assert_eq!(vm.nonce()?, nonce);
        assert_eq!(folder.exists(), Snapshot::open(&folder).is_ok());
        cancelled |= !folder.exists();
        if cancelled {
            break;
        }
    }
    assert!(cancelled, "each of five saves completed before its cancellation");
    verify(&vm)?;
    // A stop ends a save too.
    let folder = vm.folder().join("stopped");
    begin_save(&vm, &folder)?;
    let stopped = vm.cli_output(&["stop", vm.name(), "--force"])?;
    assert_eq!((stopped.status, vm.wait_keeper_end()?.code()), (0, Some(0)), "{}", stopped.text());
    assert_eq!(folder.exists(), Snapshot::open(&folder).is_ok());
    Ok(())
}

/// A file system that can be made to hang: processes that write to it wait.
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

    fn resume(&self) {
        self.run(&["fsfreeze", "--unfreeze"], &self.folder());
    }

    fn run(&self, words: &[&str], last: &Path) {
        let status = Command::new(words[0]).args(&words[1..]).arg(last).status().expect("it is installed");
        assert!(status.success(), "{words:?}");
    }
}

impl Drop for Volume {
    fn drop(&mut self) {
        // It may not be frozen.
        let _ = Command::new("fsfreeze").arg("--unfreeze").arg(self.folder()).output();
        let _ = Command::new("umount").arg("--lazy").arg(self.folder()).output();
    }
}

#[test]
fn hanging_disk_of_a_save_delays_nothing_else() -> Result<()> {
    if !rustix::process::geteuid().is_root() {
        eprintln!("skipped: only root can make a file system that hangs");
        return Ok(());
    }
    let vm = TestVm::busybox("hangs").memory_mib(768).running()?;
    fill(&vm, 220)?;
    let volume = Volume::mount(2048);
    let folder = volume.folder().join("snapshot");
    // The save may complete before its disk hangs.
    for _ in 0..5 {
        begin_save(&vm, &folder)?;
        volume.hang();
        if vm.status()?.save.is_some() {
            break;
        }
        volume.resume();
        fs::remove_dir_all(&folder).expect("it was saved");
    }
    // All of this is done while the disk hangs: a loop that waited for the save would not come back.
    vm.cli(&["save", vm.name(), "--cancel", "--no-wait"])?;
    note_longest_stall(&vm)?;
    verify(&vm)?;
    let another = vm.folder().join("another").display().to_string();
    let refused = vm.cli_output(&["save", vm.name(), "-o", &another])?;
    assert!(refused.status != 0 && refused.text().contains("a cancelled save has not ended yet"), "{}", refused.text());
    vm.reboot_forced()?;
    vm.wait_incarnation(2)?;
    volume.resume();
    let why = vm.wait_event("the save's end", event!(SaveFailed { why, .. } => why))?;
    assert!(why.contains("cancelled by the operator"), "{why}");
    assert!(!folder.exists(), "the cancelled save leaves nothing");
    vm.save(Path::new(&another))
}

/// A figure for whoever reads the log; how long the loop may take depends on the host.
fn note_longest_stall(vm: &TestVm) -> Result<()> {
    eprintln!("{}: longest stall of the loop: {} ms", vm.name(), vm.status()?.keeper.loop_stall_ms_max);
    Ok(())
}

#[test]
fn keeper_answers_while_a_saves_folder_hangs() -> Result<()> {
    if !rustix::process::geteuid().is_root() {
        eprintln!("skipped: only root can make a file system that hangs");
        return Ok(());
    }
    let vm = TestVm::busybox("hangsfirst").running()?;
    let volume = Volume::mount(1024);
    let folder = volume.folder().join("snapshot").display().to_string();
    volume.hang();
    let (asked, during) = std::thread::scope(|scope| {
        let asked = scope.spawn(|| vm.cli_output(&["save", vm.name(), "-o", &folder]));
        let during = vm
            .wait_event("the request", event!(Request { verb } if verb == "save"))
            .and_then(|_| vm.cli_output(&["save", vm.name(), "-o", "/tmp/another"]));
        let answered_first = !asked.is_finished();
        volume.resume();
        (asked.join().expect("it does not panic"), during.map(|during| (during, answered_first)))
    });
    let (asked, (during, answered_first)) = (asked?, during?);
    assert!(answered_first, "the save was answered while its folder hung");
    assert!(during.status != 0 && during.text().contains("another save is running"), "{}", during.text());
    assert_eq!(asked.status, 0, "{}", asked.text());
    Snapshot::open(Path::new(&folder)).expect("it was saved");
    note_longest_stall(&vm)
}

#[test]
fn guest_continues_after_keeper_dies_in_save() -> Result<()> {
    let vm = TestVm::busybox("killedsave").memory_mib(768).running()?;
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

/// Writes four blocks, 8 MiB apart, in turn. The block that memory records as last must be on the disk, and a later one must not;
/// otherwise the script notes it in /tmp/odd.
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

/// Writes memory again and again, and verifies it each time.
pub(super) const CHURN: &str = r#"
(n=0
while :; do
  n=$((n+1))
  sleep 0.1
  probe fill /tmp/churn 4194304 $n && probe verify /tmp/churn $n || echo "memory is odd in round $n" >>/tmp/odd
done) >/dev/null 2>&1 &
"#;

/// Waits for more turns, and asserts that both scripts found nothing odd.
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
fn busy_guest_is_saved_at_one_moment() -> Result<()> {
    let vm = TestVm::busybox("busy").disk(Disk::empty(32)).running()?;
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
    clone.wait_event("all memory is there", event!(RestoreComplete))?;
    // The clone's disk is a qcow2 image.
    clone.save(&second)?;
    let rounds = clone.wait_event("the save's end", event!(Saved { rounds, .. } => rounds))?;
    let held_why = clone.wait_event("the save's start", event!(SaveStarted { held_why, .. } => held_why))?;
    await_turns(&clone, 3)?;
    clone.stop_at_once()?;
    let last = vm.restore(&second, "last", &["--eager"])?;
    last.wait_running()?;
    assert_eq!(last.nonce()?, nonce);
    await_turns(&last, 3)?;
    verify(&last)?;
    assert!(rounds > 0 || held_why.is_some());
    Ok(())
}

#[test]
fn verifying_load_completes_in_guest_and_clone() -> Result<()> {
    let vm = TestVm::busybox_with_fio("verified").cpus(2).disk(Disk::empty(48)).boot()?;
    let (nonce, snapshot) = (vm.nonce()?, vm.folder().join("snapshot"));
    fill(&vm, 32)?;
    start_fio(&vm)?;
    vm.sh(CHURN)?;
    vm.wait_status("a running load", |status| status.disks[0].written_bytes > (1 << 20))?;
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
fn images_are_copied_if_blocks_cannot_be_shared() -> Result<()> {
    let vm = TestVm::busybox("unshared").disk(Disk::empty(16)).boot()?;
    // A file system other than the image's, which cannot share blocks with it.
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
