//! `hearth copy-disk` and `hearth export`: a disk of a running guest, as it is at one moment, while the guest writes to it.
//!
//! The guest writes each number first to the disk's end and then to its beginning, and never has two writes in flight. A copy of one
//! moment has the same number in both, or the end is one ahead. One that is made while the guest goes on has read the beginning long
//! before the end.

use std::fs;
use std::io::{BufRead, BufReader, Read};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use hearth_api::EventKind;
use hearth_vmtest::{
    Disk, Drives, Error, LoopDevice, Mounted, Result, START_AGENT, TestVm, artifacts, images, patience,
};

use super::{MIB, fill, tool};

const DISK_MIB: usize = 256;
/// Where the guest writes: the first and the last block.
const END: u64 = (DISK_MIB * MIB - 4096) as u64;
/// Numbers what it writes to /dev/vda, and says how far it is. A flush follows each write. Reads keep the disk busy: a copy gives way to
/// them, and takes long.
const WRITER: &str = "
(while dd if=/dev/vda of=/dev/null bs=64k iflag=direct; do :; done) >/dev/null 2>&1 &
(i=0; end=$(($(cat /sys/block/vda/size) / 8 - 1)); set -e
while :; do
  i=$((i+1))
  printf 'number %08d\\n' $i >/tmp/number
  dd if=/tmp/number of=/dev/vda bs=4096 seek=$end count=1 conv=notrunc,fsync 2>/dev/null
  dd if=/tmp/number of=/dev/vda bs=4096 seek=0 count=1 conv=notrunc,fsync 2>/dev/null
  echo $i >/tmp/written.new; mv /tmp/written.new /tmp/written
done) >/dev/null 2>&1 &
";

/// Waits until the writer is this much further than now.
fn await_writer(vm: &impl Drives, more: u32) -> Result<()> {
    let wait = format!(
        "while [ ! -s /tmp/written ]; do sleep 0.05; done; to=$(($(cat /tmp/written) + {more}))
        while [ $(cat /tmp/written) -lt $to ]; do sleep 0.05; done"
    );
    vm.sh_within(&wait, patience(60)).map(drop)
}

/// The numbers at the beginning and at the end.
fn numbers(image: &Path) -> (u32, u32) {
    let file = fs::File::open(image).expect("the copy");
    let number = |offset| {
        let mut text = [0; 16];
        file.read_exact_at(&mut text, offset).expect("the copy is complete");
        let text = String::from_utf8_lossy(&text).into_owned();
        text.strip_prefix("number ").and_then(|rest| rest.trim().parse().ok()).unwrap_or_else(|| panic!("{text:?}"))
    };
    (number(0), number(END))
}

/// Fails unless the copy is of one moment, of a guest that writes, and whole. Returns its number.
#[track_caller]
fn assert_one_moment(copy: &Path, content: &[u8]) -> u32 {
    let (first, last) = numbers(copy);
    assert!(first > 0 && (last == first || last == first + 1), "the copy is of two moments: {first} and {last}");
    let bytes = fs::read(copy).expect("the copy");
    let end = END as usize;
    assert!(bytes.len() == content.len() && bytes[4096..end] == content[4096..end], "the copy has other data");
    first
}

/// A guest that writes numbers to a raw image here, or where `folder` is.
fn writing(name: &str, folder: &Path) -> Result<(TestVm, PathBuf, Vec<u8>)> {
    let image = folder.join("numbers.img");
    fill(&image, DISK_MIB * MIB, 3);
    let content = fs::read(&image).expect("our own image");
    let vm = TestVm::busybox(name).disk(Disk::in_place(&image).setting("name", "numbers")).boot()?;
    vm.sh(WRITER)?;
    await_writer(&vm, 3)?;
    Ok((vm, image, content))
}

fn text(path: &Path) -> &str {
    path.to_str().expect("a path of ours")
}

fn names_in(folder: &Path) -> Vec<String> {
    let mut names: Vec<_> = fs::read_dir(folder)
        .expect("our own folder")
        .map(|entry| entry.expect("its entries").file_name().to_string_lossy().into_owned())
        .collect();
    names.sort();
    names
}

/// The event that the moment was taken: whether blocks are shared, and how long the disk was held.
fn taken(vm: &TestVm) -> Result<(bool, f64, Option<u64>, Option<String>)> {
    vm.wait_event("a copy", |record| match &record.event {
        EventKind::DiskCopyTaken { shared, held_ms, file_systems, not_frozen, .. } => {
            Some((*shared, *held_ms, *file_systems, not_frozen.clone()))
        }
        _ => None,
    })
}

/// A limit on the disk makes the guest slower than the copy, and a guest that has no agent gets a crash-consistent one.
#[test]
fn copy_without_shared_blocks_is_of_one_moment() -> Result<()> {
    let home = tempfile::tempdir().expect("a folder");
    let (vm, image, content) = writing("copied", home.path())?;
    let copy = home.path().join("copy.img");
    let said = vm.cli(&["copy-disk", "copied", "numbers", text(&copy)])?;
    assert!(said.contains("crash-consistent") && said.contains("no guest agent"), "{said}");
    assert!(said.contains(&format!("disk numbers copied to {}", copy.display())), "{said}");
    let (shared, held_ms, ..) = taken(&vm)?;
    assert!(!shared && held_ms < 5000.0, "{held_ms}");
    let number = assert_one_moment(&copy, &content);
    await_writer(&vm, 3)?;
    assert!(numbers(&image).0 > number, "the guest has gone on");
    // What exists is not replaced.
    let again = vm.cli_output(&["copy-disk", "copied", "numbers", text(&copy)])?;
    assert!(again.status == 1 && again.text().contains("exists already"), "{}", again.text());
    assert_eq!(assert_one_moment(&copy, &content), number);
    assert_eq!(names_in(home.path()), ["copy.img", "numbers.img"]);
    vm.has_no_disk_errors()
}

#[test]
fn copy_shares_blocks_where_it_can() -> Result<()> {
    let Some(xfs) = Mounted::xfs(1024)? else { return Ok(()) };
    let (vm, _, content) = writing("shares", xfs.path())?;
    let (copy, before) = (xfs.path().join("copy.img"), xfs.used_bytes()?);
    vm.cli(&["copy-disk", "shares", "numbers", text(&copy)])?;
    assert!(taken(&vm)?.0, "the copy shares its blocks");
    let grown = xfs.used_bytes()?.saturating_sub(before);
    assert!(grown < (DISK_MIB * MIB / 8) as u64, "the copy takes {grown} bytes");
    assert_one_moment(&copy, &content);
    await_writer(&vm, 3)
}

#[test]
fn block_device_is_copied_to_a_file_and_exported() -> Result<()> {
    let home = tempfile::tempdir().expect("a folder");
    let image = home.path().join("behind.img");
    fill(&image, DISK_MIB * MIB, 5);
    let content = fs::read(&image).expect("our own image");
    let Some(device) = LoopDevice::over(&image) else { return Ok(()) };
    let vm = TestVm::busybox("device").disk(Disk::in_place(device.path()).setting("name", "numbers")).boot()?;
    vm.sh(WRITER)?;
    await_writer(&vm, 3)?;
    let (copy, read) = (home.path().join("copy.img"), home.path().join("read.img"));
    vm.cli(&["copy-disk", "device", "numbers", text(&copy)])?;
    assert_one_moment(&copy, &content);
    let mut export = hearth(&vm, &["export", "device", "numbers"])?;
    let uri = first_line(&mut export);
    tool("qemu-img", &["convert", "-f", "raw", "-O", "raw", &uri, text(&read)]);
    assert_one_moment(&read, &content);
    interrupt(&export);
    assert!(export.wait().expect("our own child").success());
    await_writer(&vm, 3)
}

#[test]
fn qcow2_copy_is_whole() -> Result<()> {
    let said = qcow2_copy("whole", &["convert", "-O", "qcow2"])?;
    assert!(said.contains("(qcow2)"), "{said}");
    Ok(())
}

#[test]
fn qcow2_copy_names_what_it_lies_over() -> Result<()> {
    let said = qcow2_copy("overlay", &["create", "-q", "-f", "qcow2", "-F", "raw", "-b"])?;
    assert!(said.contains("qcow2, over /") && said.contains("base.img, which it needs"), "{said}");
    Ok(())
}

/// Copies a qcow2 image that `make` makes of a raw one. Returns what the command said.
fn qcow2_copy(name: &str, make: &[&str]) -> Result<String> {
    let home = tempfile::tempdir().expect("a folder");
    let (base, image) = (home.path().join("base.img"), home.path().join("numbers.qcow2"));
    fill(&base, DISK_MIB * MIB, 4);
    let content = fs::read(&base).expect("our own image");
    tool("qemu-img", &[make, &[text(&base), text(&image)]].concat());
    let disk = Disk::in_place(&image).setting("name", "numbers").setting("format", "qcow2");
    let vm = TestVm::busybox(name).disk(disk).boot()?;
    vm.sh(WRITER)?;
    await_writer(&vm, 3)?;
    let (copy, raw) = (home.path().join("copy.qcow2"), home.path().join("raw.img"));
    let said = vm.cli(&["copy-disk", name, "numbers", text(&copy)])?;
    tool("qemu-img", &["check", "-q", text(&copy)]);
    tool("qemu-img", &["convert", "-O", "raw", text(&copy), text(&raw)]);
    assert_one_moment(&raw, &content);
    await_writer(&vm, 3)?;
    Ok(said)
}

const FILES_WRITER: &str = r#"
mount -t ext4 /dev/vda /mnt
(i=0
while :; do
  i=$((i+1)); printf 'record %08d\n' $i >>/mnt/records
  mkdir -p /mnt/$((i % 20)); dd if=/dev/urandom of=/mnt/$((i % 20))/$i bs=16k count=1 2>/dev/null
  rm -f /mnt/$(((i + 1) % 20))/*
  sync -f /mnt/records
  echo $i >/tmp/written.new; mv /tmp/written.new /tmp/written
done) >/dev/null 2>&1 &
"#;

/// The copy's file system, after its journal is replayed, has the first so many records and nothing else of them.
#[track_caller]
fn assert_records(copy: &Path) {
    let checked = Command::new("/usr/sbin/e2fsck").args(["-f", "-y"]).arg(copy).output().expect("e2fsck");
    // 1: it was corrected, as by a replay.
    assert!(matches!(checked.status.code(), Some(0 | 1)), "{}", String::from_utf8_lossy(&checked.stdout));
    images::check_ext4(copy, 0).expect("it is clean now");
    let records = tool("/usr/sbin/debugfs", &["-R", "cat /records", text(copy)]);
    let records: Vec<_> = records.lines().filter(|line| line.starts_with("record ")).collect();
    assert!(records.len() > 2, "{records:?}");
    for (at, record) in records.iter().enumerate() {
        assert_eq!(*record, format!("record {:08}", at + 1));
    }
}

#[test]
fn crash_consistent_copy_is_repaired_by_its_journal() -> Result<()> {
    let vm = TestVm::busybox("journal").disk(Disk::ext4(64)).boot()?;
    vm.sh(FILES_WRITER)?;
    await_writer(&vm, 3)?;
    for number in 0..3 {
        let copy = vm.folder().join(format!("copy-{number}"));
        vm.cli(&["copy-disk", "journal", "disk0", text(&copy)])?;
        assert_records(&copy);
        await_writer(&vm, 2)?;
    }
    Ok(())
}

#[test]
fn agent_freezes_file_systems_for_the_moment_alone() -> Result<()> {
    let vm = TestVm::busybox_with_agent("agent").disk(Disk::ext4(64)).boot()?;
    vm.sh(START_AGENT)?;
    vm.sh(FILES_WRITER)?;
    await_writer(&vm, 3)?;
    let copy = vm.folder().join("copy");
    let said = vm.cli(&["copy-disk", "agent", "disk0", text(&copy)])?;
    assert!(said.contains("file systems frozen") && !said.contains("crash-consistent"), "{said}");
    let (_, _, file_systems, not_frozen) = taken(&vm)?;
    assert!(file_systems.is_some_and(|count| count > 0) && not_frozen.is_none(), "{file_systems:?} {not_frozen:?}");
    assert!(!images::ext4_needs_recovery(&copy)?, "a frozen file system has nothing to replay");
    assert_records(&copy);
    vm.wait_status("thawed", |status| status.frozen.is_none())?;
    await_writer(&vm, 3)?;
    // An agent that does not answer costs consistency, and no more.
    vm.sh("kill $(cat /run/qemu-ga.pid)")?;
    let second = vm.folder().join("second");
    let said = vm.cli(&["copy-disk", "agent", "disk0", text(&second)])?;
    assert!(said.contains("crash-consistent, as after a power cut (the guest agent"), "{said}");
    assert_records(&second);
    await_writer(&vm, 3)
}

#[test]
fn refused_or_interrupted_copy_leaves_nothing() -> Result<()> {
    let home = tempfile::tempdir().expect("a folder");
    let (vm, ..) = writing("refuses", home.path())?;
    let refused = |arguments: &[&str], code: i32, why: &str| -> Result<()> {
        let output = vm.cli_output(&[&["copy-disk"], arguments].concat())?;
        assert!(
            output.status == code && output.text().contains(why),
            "{arguments:?}: {}: {}",
            output.status,
            output.text()
        );
        Ok(())
    };
    let copy = home.path().join("copy");
    refused(&["nobody", "numbers", text(&copy)], 3, "nobody is not running")?;
    refused(&["refuses", "other", text(&copy)], 1, "its disks are: numbers")?;
    refused(&["refuses", "numbers", "/no/such/folder/copy"], 1, "No such file or directory")?;
    if let Some(small) = Mounted::tmpfs(16)? {
        let copy = small.path().join("copy");
        refused(&["refuses", "numbers", text(&copy)], 1, "no space left in")?;
        assert!(names_in(small.path()).is_empty());
        // It becomes full while the copy is written.
        let filler = small.path().join("filler");
        refused(&["refuses", "numbers", text(&filler)], 1, "no space left")?;
    }
    let partial = home.path().join("copy.partial");
    fs::write(&partial, "of somebody").expect("our own folder");
    refused(&["refuses", "numbers", text(&copy)], 1, "copy.partial exists")?;
    assert_eq!(fs::read_to_string(&partial).expect("it is left alone"), "of somebody");
    fs::remove_file(&partial).expect("our own file");

    // Interrupted.
    let mut command = hearth(&vm, &["copy-disk", "refuses", "numbers", text(&copy)])?;
    wait_for("the copy begins", || partial.exists() || copy.exists());
    interrupt(&command);
    let status = command.wait().expect("our own child");
    assert!(!status.success() || copy.exists(), "{status}");
    if !copy.exists() {
        assert_eq!(names_in(home.path()), ["numbers.img"]);
    }
    vm.has_no_disk_errors()?;
    await_writer(&vm, 3)
}

/// A copy to a file system that hangs, as an NFS does whose server is gone. Thawed at the end, whatever happens.
struct Hung(Mounted);

impl Hung {
    fn begin(mounted: Mounted) -> Result<Self> {
        mounted.freeze().map(|()| Self(mounted))
    }
}

impl Drop for Hung {
    fn drop(&mut self) {
        let _ = self.0.thaw();
    }
}

#[test]
fn hung_target_fails_the_copy_and_not_the_guest() -> Result<()> {
    let home = tempfile::tempdir().expect("a folder");
    let Some(elsewhere) = Mounted::ext4(512)? else { return Ok(()) };
    let (vm, ..) = writing("hangs", home.path())?;
    let copy = elsewhere.path().join("copy");
    let mut command = hearth(&vm, &["copy-disk", "hangs", "numbers", text(&copy)])?;
    vm.wait_event("the moment", |record| matches!(record.event, EventKind::DiskCopyTaken { .. }).then_some(()))?;
    let hung = Hung::begin(elsewhere)?;
    // More than is held for the copy. Each write of the guest's is a change.
    vm.sh_within("dd if=/dev/zero of=/dev/vda bs=1M seek=64 count=96 oflag=direct", patience(60))?;
    let why = vm.wait_event("the failure", |record| match &record.event {
        EventKind::DiskCopyFailed { why, .. } => Some(why.clone()),
        _ => None,
    })?;
    assert!(why.contains("its storage hangs or is too slow"), "{why}");
    assert!(!command.wait().expect("our own child").success());
    await_writer(&vm, 3)?;
    // Another one is refused within its time, and can be cancelled before that.
    let second = hung.0.path().join("second");
    let mut command = hearth(&vm, &["copy-disk", "hangs", "numbers", text(&second)])?;
    std::thread::sleep(Duration::from_millis(500));
    interrupt(&command);
    assert!(!command.wait().expect("our own child").success());
    await_writer(&vm, 3)?;
    let here = home.path().join("copy");
    vm.cli(&["copy-disk", "hangs", "numbers", text(&here)])?;
    hung.0.thaw()?;
    wait_for("what was begun there is removed", || {
        names_in(hung.0.path()).iter().all(|name| !name.starts_with("copy") && !name.starts_with("second"))
    });
    vm.has_no_disk_errors()?;
    await_writer(&vm, 3)
}

/// What lies at the image's path by now is another file.
#[test]
fn renamed_image_is_copied_and_not_what_has_its_name() -> Result<()> {
    let Some(xfs) = Mounted::xfs(1024)? else { return Ok(()) };
    let (vm, image, content) = writing("renamed", xfs.path())?;
    fs::rename(&image, xfs.path().join("moved.img")).expect("our own file");
    fill(&image, DISK_MIB * MIB, 9);
    let copy = xfs.path().join("copy.img");
    vm.cli(&["copy-disk", "renamed", "numbers", text(&copy)])?;
    assert!(taken(&vm)?.0, "the copy shares its blocks");
    assert_one_moment(&copy, &content);
    // The image's path is no place for a copy, whatever is there.
    fs::remove_file(&image).expect("our own file");
    let refused = vm.cli_output(&["copy-disk", "renamed", "numbers", text(&image)])?;
    assert!(refused.text().contains("is the path of the image of disk numbers"), "{}", refused.text());
    await_writer(&vm, 3)
}

/// Whatever dies during a copy, no file has its name that is not complete, and the guest's disk goes on.
#[test]
fn killed_keeper_leaves_no_half_copy_under_its_name() -> Result<()> {
    let home = tempfile::tempdir().expect("a folder");
    let (vm, _, content) = writing("dies", home.path())?;
    let (copy, partial) = (home.path().join("copy"), home.path().join("copy.partial"));
    let mut command = hearth(&vm, &["copy-disk", "dies", "numbers", text(&copy)])?;
    wait_for("the copy begins", || partial.exists() || copy.exists());
    vm.kill_keeper()?;
    let was_complete = copy.exists();
    let status = command.wait().expect("our own child");
    assert!(was_complete || !status.success(), "{status}");
    if was_complete {
        assert_one_moment(&copy, &content);
    }
    vm.restart_keeper()?;
    vm.wait_running()?;
    vm.await_console()?;
    await_writer(&vm, 3)?;
    let _ = (fs::remove_file(&partial), fs::remove_file(&copy));
    vm.cli(&["copy-disk", "dies", "numbers", text(&copy)])?;
    assert_one_moment(&copy, &content);
    Ok(())
}

#[test]
fn export_serves_one_moment_and_leaves_nothing() -> Result<()> {
    let home = tempfile::tempdir().expect("a folder");
    let (vm, image, content) = writing("exports", home.path())?;
    let mut export = hearth(&vm, &["export", "exports", "numbers"])?;
    let uri = first_line(&mut export);
    assert!(uri.starts_with("nbd+unix:///?socket=/"), "{uri}");
    assert_eq!(names_in(home.path()), ["numbers.img"], "what is served has no name");
    let copy = home.path().join("read.img");
    await_writer(&vm, 3)?;
    let read = || {
        let _ = fs::remove_file(&copy);
        tool("qemu-img", &["convert", "-f", "raw", "-O", "raw", &uri, text(&copy)]);
        assert_one_moment(&copy, &content)
    };
    let number = read();
    assert!(numbers(&image).0 > number, "the guest has gone on");
    assert_eq!(read(), number, "it stays the same");
    let written = Command::new("qemu-io").args(["-f", "raw", "-c", "write 0 4096", &uri]).output().expect("qemu-io");
    assert!(!written.status.success() || String::from_utf8_lossy(&written.stderr).contains("ead"), "{written:?}");
    assert_eq!(read(), number, "nobody can write to it");
    let socket = PathBuf::from(uri.trim_start_matches("nbd+unix:///?socket="));
    assert!(socket.exists());
    interrupt(&export);
    assert!(export.wait().expect("our own child").success());
    let sockets = || vm.runtime_files().into_iter().filter(|name| name.starts_with("export-")).collect::<Vec<_>>();
    assert!(!socket.exists() && sockets().is_empty(), "{:?}", sockets());
    fs::remove_file(&copy).expect("our own file");
    assert_eq!(names_in(home.path()), ["numbers.img"]);

    // A command that is killed takes its server along.
    let mut export = hearth(&vm, &["export", "exports", "numbers"])?;
    let uri = first_line(&mut export);
    export.kill().expect("our own child");
    export.wait().expect("our own child");
    let is_served = || Command::new("qemu-img").args(["info", &uri]).output().is_ok_and(|info| info.status.success());
    wait_for("its server ends", || !is_served());
    assert_eq!(names_in(home.path()), ["numbers.img"]);
    // The next one removes the socket that it left.
    let mut export = hearth(&vm, &["export", "exports", "numbers"])?;
    first_line(&mut export);
    interrupt(&export);
    assert!(export.wait().expect("our own child").success() && sockets().is_empty(), "{:?}", sockets());
    let other = vm.cli_output(&["export", "exports", "other"])?;
    assert!(other.status == 1 && other.text().contains("its disks are: numbers"), "{}", other.text());
    await_writer(&vm, 3)
}

#[test]
fn changes_of_a_raw_disk_make_the_newer_backup() -> Result<()> {
    changes_since("since-raw", "raw")
}

#[test]
fn changes_of_a_qcow2_disk_make_the_newer_backup() -> Result<()> {
    changes_since("since-qcow2", "qcow2")
}

/// Blocks of a checkpoint.
const BLOCK: u64 = 64 << 10;

fn changes_since(name: &str, format: &str) -> Result<()> {
    let home = tempfile::tempdir().expect("a folder");
    let (base, image) = (home.path().join("base.img"), home.path().join("numbers.img"));
    fill(&base, DISK_MIB * MIB, 6);
    tool("qemu-img", &["convert", "-f", "raw", "-O", format, text(&base), text(&image)]);
    fs::remove_file(&base).expect("our own file");
    let disk = Disk::in_place(&image).setting("name", "numbers").setting("format", format);
    let vm = TestVm::busybox(name).disk(disk).boot()?;
    let refused = |since: &str, why: &str| -> Result<()> {
        let output = vm.cli_output(&["export", name, "numbers", "--since", since])?;
        assert!(output.status == 1 && output.text().contains(why), "{}", output.text());
        Ok(())
    };
    let write = |block: u64, blocks: u64, offset: u64| {
        let (seek, count) = ((block * BLOCK + offset) / 4096, blocks);
        vm.sh(&format!("dd if=/dev/urandom of=/dev/vda bs=4096 seek={seek} count={count} oflag=direct 2>/dev/null"))
    };
    refused("monday", "the checkpoint monday (there are: none)")?;
    write(1, 1, 0)?;
    let mut backup = exported(&vm, name, &["--checkpoint", "monday"], None)?.0;
    // One page, the ends of two blocks, a run, the last block; once more what was written before.
    write(7, 1, 8192)?;
    write(20, 2, BLOCK - 4096)?;
    write(100, 40, 0)?;
    write(DISK_MIB as u64 * 16 - 1, 16, 0)?;
    write(1, 1, 0)?;
    let (tuesday, changed) = exported(&vm, name, &["--since", "monday", "--checkpoint", "tuesday"], Some("monday"))?;
    let last = DISK_MIB as u64 * 16 - 1;
    assert_eq!(changed, [1, 7, 20, 21, 100, 101, 102, last]);
    assert!(backup != tuesday);
    apply(&mut backup, &tuesday, &changed);
    assert!(backup == tuesday, "the changes make the newer state");
    // What is written while an export is served is of the next one.
    write(300, 1, 0)?;
    vm.sh("blkdiscard -o $((400 * 65536)) -l 131072 /dev/vda")?;
    let (wednesday, changed) = exported(&vm, name, &["--since", "tuesday"], Some("tuesday"))?;
    assert_eq!(changed, [300, 400, 401]);
    apply(&mut backup, &wednesday, &changed);
    assert!(backup == wednesday);
    let (now, changed) = exported(&vm, name, &["--since", "monday"], Some("monday"))?;
    assert_eq!(changed, [1, 7, 20, 21, 100, 101, 102, 300, 400, 401, last]);
    assert!(now == wednesday);
    let taken = vm.cli_output(&["export", name, "numbers", "--checkpoint", "monday"])?;
    assert!(taken.status == 1 && taken.text().contains("has a checkpoint monday already"), "{}", taken.text());
    assert_eq!(names_in(home.path()), ["numbers.img"]);
    // What nobody saw is not guessed.
    vm.kill_keeper()?;
    vm.restart_keeper()?;
    vm.wait_running()?;
    vm.await_console()?;
    refused("tuesday", "make a full backup")?;
    vm.has_no_disk_errors()
}

/// The disk as it is exported, and its blocks that were written since this checkpoint, as QEMU's programs see them.
fn exported(vm: &TestVm, name: &str, options: &[&str], since: Option<&str>) -> Result<(Vec<u8>, Vec<u64>)> {
    let mut export = hearth(vm, &[&["export", name, "numbers"], options].concat())?;
    let uri = first_line(&mut export);
    let copy = vm.folder().join("exported.img");
    tool("qemu-img", &["convert", "-f", "raw", "-O", "raw", &uri, text(&copy)]);
    let content = fs::read(&copy).expect("our own copy");
    fs::remove_file(&copy).expect("our own copy");
    let mut changed = Vec::new();
    if let Some(since) = since {
        let socket = uri.trim_start_matches("nbd+unix:///?socket=");
        let source =
            format!("driver=nbd,server.type=unix,server.path={socket},x-dirty-bitmap=qemu:dirty-bitmap:{since}");
        let map = tool("qemu-img", &["map", "--output=json", "--image-opts", &source]);
        let map: serde_json::Value = serde_json::from_str(&map).expect("qemu-img's own output");
        let number = |extent: &serde_json::Value, key: &str| extent[key].as_u64().expect("a number");
        // It shows what is dirty as no data.
        for extent in map.as_array().expect("a list").iter().filter(|extent| extent["data"] == false) {
            let (start, length) = (number(extent, "start"), number(extent, "length"));
            changed.extend(start / BLOCK..(start + length) / BLOCK);
        }
    }
    interrupt(&export);
    assert!(export.wait().expect("our own child").success());
    Ok((content, changed))
}

fn apply(backup: &mut [u8], newer: &[u8], changed: &[u64]) {
    for block in changed {
        let bytes = (block * BLOCK) as usize..((block + 1) * BLOCK) as usize;
        backup[bytes.clone()].copy_from_slice(&newer[bytes]);
    }
}

/// A command that goes on beside the test.
fn hearth(vm: &TestVm, arguments: &[&str]) -> Result<Child> {
    let program = artifacts::hearth()?;
    let mut command = Command::new(&program);
    command.args(arguments).env("HEARTH_RUNTIME_ROOT", vm.runtime_root());
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::inherit());
    command.spawn().map_err(|source| Error::Start { program: "hearth".into(), source })
}

fn interrupt(child: &Child) {
    let pid = rustix::process::Pid::from_child(child);
    rustix::process::kill_process(pid, rustix::process::Signal::INT).expect("our own child");
}

fn first_line(child: &mut Child) -> String {
    let mut line = String::new();
    let output = child.stdout.as_mut().expect("it is piped").by_ref();
    BufReader::new(output).read_line(&mut line).expect("it writes text");
    line.trim().to_owned()
}

fn wait_for(what: &str, holds: impl Fn() -> bool) {
    let deadline = std::time::Instant::now() + patience(60);
    while !holds() {
        assert!(std::time::Instant::now() < deadline, "{what}: not within {:?}", patience(60));
        std::thread::sleep(Duration::from_millis(1));
    }
}
