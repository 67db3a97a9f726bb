//! Disks as a guest sees them: formats, limits, queues, discards, sizes, caches, and requests in flight when their server dies.
//!
//! `gaps`: images that change while no keeper guards them. `full`: a full file system of the host.
//! `write_cache`: a cache that the guest switches off. `copies`: copies of a disk of one moment, and exports.

#[path = "disk/gaps.rs"]
mod gaps;

use std::fs;
use std::io::{BufRead, BufReader};
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use hearth_api::{DiskSize, DiskStatus};
use hearth_vmtest::images::File;
use hearth_vmtest::{Disk, Drives, PlainVm, Result, TestVm, artifacts, event, pattern};

#[path = "disk/copies.rs"]
mod copies;
#[path = "disk/full.rs"]
mod full;
#[path = "disk/write_cache.rs"]
mod write_cache;

fn disk_status(vm: &TestVm, disk: usize) -> Result<DiskStatus> {
    Ok(vm.status()?.disks.swap_remove(disk))
}

/// Storage that the image occupies on the host.
fn held_bytes(image: &Path) -> u64 {
    fs::metadata(image).expect("the image").blocks() * 512
}

fn fill(image: &Path, bytes: usize, seed: u64) {
    fs::write(image, pattern::bytes("image", bytes, seed)).expect("our own image");
}

fn tool(program: &str, arguments: &[&str]) -> String {
    let output = Command::new(program).args(arguments).output().unwrap_or_else(|error| panic!("{program}: {error}"));
    let said = String::from_utf8_lossy(&[output.stdout, output.stderr].concat()).into_owned();
    assert!(output.status.success(), "{program} {arguments:?}: {said}");
    said
}

fn sum(bytes: &[u8]) -> String {
    let home = tempfile::NamedTempFile::new().expect("a file");
    fs::write(home.path(), bytes).expect("our own file");
    let said = tool("md5sum", &[home.path().to_str().expect("a path of ours")]);
    said.split_whitespace().next().expect("a sum").to_owned()
}

const MIB: usize = 1 << 20;

/// Without a flush, the image's changed tables are only in the keeper's memory.
#[test]
fn unflushed_qcow2_write_survives_the_keeper() -> Result<()> {
    let home = tempfile::tempdir().expect("a folder");
    let (base, overlay) = (home.path().join("base.img"), home.path().join("overlay.qcow2"));
    fill(&base, 8 * MIB, 6);
    let base_text = base.display().to_string();
    tool("qemu-img", &["create", "-q", "-f", "qcow2", "-F", "raw", "-b", &base_text, overlay.to_str().expect("ours")]);
    let vm = TestVm::busybox("tables")
        .disk(Disk::in_place(&overlay).setting("format", "qcow2").setting("name", "layers"))
        .boot()?;
    vm.sh("tr '\\0' x </dev/zero | dd of=/dev/vda bs=64k seek=3 count=5 iflag=fullblock oflag=direct")?;
    let read = "dd if=/dev/vda bs=64k iflag=direct 2>/dev/null | md5sum | cut -d' ' -f1";
    let written = vm.sh(read)?;
    assert_ne!(written.trim(), sum(&fs::read(&base).expect("the image")));
    vm.kill_keeper()?;
    vm.restart_keeper()?;
    vm.wait_event("take-over", event!(KeeperTookOver))?;
    assert_eq!(vm.sh(read)?, written);
    assert_eq!(vm.stop()?.code(), Some(0));
    tool("qemu-img", &["check", "-q", overlay.to_str().expect("ours")]);
    Ok(())
}

#[test]
fn guest_sees_formats_settings_and_counters() -> Result<()> {
    let home = tempfile::tempdir().expect("a folder");
    let (base, overlay) = (home.path().join("base.img"), home.path().join("overlay.qcow2"));
    fill(&base, 16 * MIB, 5);
    let base_text = base.display().to_string();
    tool("qemu-img", &["create", "-q", "-f", "qcow2", "-F", "raw", "-b", &base_text, overlay.to_str().expect("ours")]);
    let kept = || [File::pattern("kept.bin", 2 * MIB, 3)];
    let vm = TestVm::busybox("disks")
        .cpus(2)
        .disk(Disk::ext4(64).setting("serial", "SER-0001").setting("queues", 2))
        .disk(Disk::in_place(&overlay).setting("format", "qcow2").setting("name", "layers"))
        .disk(Disk::ext4(32).with_files(kept()).read_only())
        .disk(Disk::ext4(32).with_files([File::pattern("slow.bin", 8 * MIB, 9)]).limited(8, 1000))
        .boot()?;

    // Names, queues, sizes.
    assert_eq!(vm.sh("cat /sys/block/vda/serial /sys/block/vdb/serial")?, "SER-0001layers");
    assert_eq!(vm.sh("ls /sys/block/vda/mq | wc -l; ls /sys/block/vdb/mq | wc -l")?, "2\n1\n");
    assert_eq!(vm.sh("cat /sys/block/vda/queue/physical_block_size")?, "4096\n");

    // An overlay reads old blocks from its base image, and keeps written ones itself.
    let base_sum = sum(&fs::read(&base).expect("the image"));
    assert_eq!(vm.sh("md5sum </dev/vdb | cut -d' ' -f1")?.trim(), base_sum);
    vm.sh("tr '\\0' x </dev/zero | dd of=/dev/vdb bs=64k seek=1 count=3 iflag=fullblock conv=fsync")?;
    let layered = vm.sh("echo 3 >/proc/sys/vm/drop_caches; md5sum </dev/vdb | cut -d' ' -f1")?;

    // The device itself refuses writes; it does not rely on the driver.
    assert_eq!(vm.sh("cat /sys/block/vdc/ro")?, "1\n");
    vm.sh("mkdir -p /a /c /d && mount -o ro,noload /dev/vdc /c && probe verify /c/kept.bin 3")?;
    assert_ne!(vm.run("dd if=/dev/zero of=/dev/vdc bs=4k count=1")?.status, 0);
    assert_eq!(disk_status(&vm, 2)?.writes, 0);

    // A limit makes requests wait, and all bytes are counted.
    vm.sh("mount /dev/vdd /d && probe verify /d/slow.bin 9")?;
    assert!(disk_status(&vm, 3)?.read_image_bytes >= 8 * MIB as u64);
    assert!(disk_status(&vm, 3)?.throttled_ms > 0);
    assert_eq!(disk_status(&vm, 0)?.throttled_ms, 0);

    // Each fsync of the guest arrives as a flush.
    vm.sh("mount /dev/vda /a && probe fill /a/first 3000000 1")?;
    let before = disk_status(&vm, 0)?.flushes;
    vm.sh("for i in 1 2 3; do dd if=/dev/urandom of=/a/note bs=4k count=1 conv=fsync; done")?;
    assert!(disk_status(&vm, 0)?.flushes >= before + 3);

    // The guest switches its write cache, and still reads all its data after that.
    assert_eq!(vm.sh("cat /sys/block/vda/queue/write_cache")?, "write back\n");
    vm.sh("echo 'write through' >/sys/block/vda/queue/write_cache && probe fill /a/through 2000000 2 && sync")?;
    assert_eq!(vm.sh("cat /sys/block/vda/queue/write_cache")?, "write through\n");
    vm.sh("echo 'write back' >/sys/block/vda/queue/write_cache")?;
    assert_eq!(vm.sh("cat /sys/block/vda/queue/write_cache")?, "write back\n");

    // Two disks and both processors at the same time.
    vm.sh("probe fill /a/both 8000000 11 & probe fill /d/both 4000000 12 & wait; sync; probe drop-caches")?;
    vm.sh("(probe verify /a/both 11 || echo bad >/run/bad) & (probe verify /d/both 12 || echo bad >/run/bad) & wait; [ ! -e /run/bad ]")?;
    for disk in 0..4 {
        let status = disk_status(&vm, disk)?;
        assert_eq!((status.io_errors, status.bad_requests), (0, 0), "disk {disk}");
    }

    vm.sh("umount /a /c /d; sync")?;
    assert_eq!(vm.stop()?.code(), Some(0));
    tool("qemu-img", &["check", "-q", overlay.to_str().expect("ours")]);
    let flat = home.path().join("flat.img");
    tool("qemu-img", &["convert", "-O", "raw", overlay.to_str().expect("ours"), flat.to_str().expect("ours")]);
    assert_eq!(sum(&fs::read(&flat).expect("the copy")), layered.trim());
    assert_eq!(sum(&fs::read(&base).expect("the image")), base_sum, "the base image is unchanged");
    for image in ["disk0.img", "disk3.img"] {
        tool("/usr/sbin/e2fsck", &["-fn", vm.folder().join(image).to_str().expect("ours")]);
    }
    Ok(())
}

/// Discarded blocks are freed on the host, and zeroed ones read as zeros, on any file system of the image.
#[test]
fn discards_and_zeroes_reach_the_image() -> Result<()> {
    let shared_memory = tempfile::tempdir_in("/dev/shm").expect("a tmpfs");
    let on_tmpfs = shared_memory.path().join("memory.img");
    fill(&on_tmpfs, 32 * MIB, 6);
    let home = tempfile::tempdir().expect("a folder");
    let full = home.path().join("full.img");
    fill(&full, 32 * MIB, 7);
    let disks = [Disk::in_place(&full), Disk::in_place(&on_tmpfs), Disk::ext4(64)];
    let vm = disks.into_iter().fold(TestVm::busybox("discard"), |builder, disk| builder.disk(disk)).boot()?;
    let fs_image = vm.folder().join("disk2.img");

    for (device, image) in [("vda", &full), ("vdb", &on_tmpfs)] {
        assert_eq!(held_bytes(image), 32 << 20);
        vm.sh(&format!("blkdiscard -o {} -l {} /dev/{device}", 8 * MIB, 16 * MIB))?;
        assert_eq!(held_bytes(image), 16 << 20, "{device}");
        let expect = pattern::bytes("image", 32 * MIB, if device == "vda" { 7 } else { 6 });
        let left = [&expect[..8 * MIB], &vec![0; 16 * MIB], &expect[24 * MIB..]].concat();
        assert_eq!(vm.sh(&format!("md5sum </dev/{device} | cut -d' ' -f1"))?.trim(), sum(&left), "{device}");
    }
    // mke2fs zeroes its inode tables with WRITE_ZEROES, which carries no data. tmpfs lacks it, so the server falls back.
    for (disk, device) in [(0, "vda"), (1, "vdb")] {
        vm.sh(&format!("yes x | dd of=/dev/{device} bs=1M count=32 iflag=fullblock oflag=direct"))?;
        let (before, written) = (disk_status(&vm, disk)?.discards, disk_status(&vm, disk)?.written_bytes);
        vm.sh(&format!("mkfs.ext4 -q -F -N 65536 -E nodiscard,lazy_itable_init=0 /dev/{device}"))?;
        assert!(disk_status(&vm, disk)?.discards > before, "{device}: no WRITE_ZEROES arrived");
        assert!(
            disk_status(&vm, disk)?.written_bytes - written < 8 << 20,
            "{device}: 16 MiB of inode tables were written"
        );
        vm.sh(&format!("mkdir -p /{device} && mount /dev/{device} /{device} && probe fill /{device}/a 1000000 1"))?;
        vm.sh(&format!("umount /{device} && e2fsck -fn /dev/{device}"))?;
    }
    assert!(disk_status(&vm, 1)?.engine.contains("page cache"), "{}", disk_status(&vm, 1)?.engine);
    assert!(disk_status(&vm, 0)?.engine.contains("O_DIRECT"), "{}", disk_status(&vm, 0)?.engine);

    // fstrim discards what the file system does not use.
    vm.sh("mkdir -p /f && mount /dev/vdc /f && probe fill /f/large 30000000 1 && sync")?;
    let filled = held_bytes(&fs_image);
    vm.sh("rm /f/large && sync && fstrim /f")?;
    assert!(held_bytes(&fs_image) + (24 << 20) < filled, "{filled} before, {} after", held_bytes(&fs_image));
    for disk in 0..3 {
        assert_eq!(disk_status(&vm, disk)?.io_errors, 0, "disk {disk}");
    }
    Ok(())
}

#[test]
fn image_grows_under_a_running_guest() -> Result<()> {
    let vm = TestVm::busybox("grow").disk(Disk::empty(16)).disk(Disk::ext4(32).setting("name", "data")).boot()?;
    let images: Vec<PathBuf> = (0..2).map(|disk| vm.folder().join(format!("disk{disk}.img"))).collect();
    fs::OpenOptions::new().write(true).open(&images[1]).and_then(|file| file.set_len(48 << 20)).expect("the image");
    assert_eq!(vm.sh("blockdev --getsize64 /dev/vdb")?.trim(), (32 << 20).to_string(), "there was no resize yet");
    let told = vm.cli(&["resize", "grow", "data", "--json"])?;
    assert_eq!(serde_json::from_str::<DiskSize>(&told).expect("JSON").bytes, 48 << 20);
    vm.sh("while [ $(blockdev --getsize64 /dev/vdb) -ne 50331648 ]; do usleep 20000; done")?;
    vm.sh("tr '\\0' y </dev/zero | dd of=/dev/vdb bs=1M seek=40 count=8 iflag=fullblock oflag=direct")?;
    let mut tail = [0; 4096];
    fs::File::open(&images[1]).and_then(|file| file.read_exact_at(&mut tail, (48 << 20) - 4096)).expect("the image");
    assert_eq!(tail, [b'y'; 4096]);
    assert_eq!(disk_status(&vm, 1)?.bytes, 48 << 20);
    vm.wait_event("resize", event!(DiskResized { disk, .. } if disk == "data"))?;
    // The other disk is unchanged, and the next incarnation sees the same sizes.
    assert_eq!(vm.sh("blockdev --getsize64 /dev/vda")?.trim(), (16 << 20).to_string());
    vm.reset()?;
    vm.wait_incarnation(2)?;
    assert_eq!(vm.sh("blockdev --getsize64 /dev/vdb")?.trim(), (48 << 20).to_string());
    Ok(())
}

/// The disk server alone, in a process that can be killed.
struct Server {
    child: Child,
}

impl Server {
    /// Serves `image`, and holds back the completion of operation `held`.
    fn start(socket: &Path, image: &Path, held: Option<u64>) -> Self {
        let program = artifacts::hearth().expect("hearth is built").with_file_name("examples").join("serve");
        let mut command = Command::new(&program);
        command.arg(socket).arg(image).args(held.map(|operation| format!("hold={operation}")));
        let hint = || format!("{}: build it with `cargo build -p hearth-disk --examples`", program.display());
        let child = command.stdin(Stdio::null()).stdout(Stdio::piped()).spawn();
        let mut child = child.unwrap_or_else(|error| panic!("{error}: {}", hint()));
        let mut lines =
            BufReader::new(child.stdout.take().expect("it is piped")).lines().map_while(std::io::Result::ok);
        assert!(lines.any(|line| line.starts_with("serving ")), "the server ended");
        // The server prints its counters every second; they must be read, or the pipe would fill.
        std::thread::spawn(move || lines.for_each(drop));
        Self { child }
    }
}

impl Drop for Server {
    /// Kills the server, as a crash would.
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

const READERS: usize = 8;
const PART: usize = 2 * MIB;

/// Requests that the server took and did not answer are carried out by the next server, even if later ones were answered. QEMU's
/// own resumption would skip or repeat some, since it assumes that requests end in order.
#[test]
fn next_server_completes_held_back_requests() -> Result<()> {
    let home = tempfile::tempdir().expect("a folder");
    let (socket, image) = (home.path().join("disk.sock"), home.path().join("disk.img"));
    fill(&image, READERS * PART, 8);
    let contents = fs::read(&image).expect("our own image");
    let mut server = Some(Server::start(&socket, &image, Some(700)));
    let reconnect = if is_before_9_2()? { "reconnect=1" } else { "reconnect-ms=500" };
    let chardev = format!("socket,id=disk,path={},{reconnect}", socket.display());
    let vm = PlainVm::busybox("held")
        .machine("q35,memory-backend=ram")
        .args(["-object", "memory-backend-memfd,id=ram,size=512M,share=on"])
        .args(["-chardev", &chardev, "-device", "vhost-user-blk-pci,chardev=disk,num-queues=1"])
        .boot()?;

    // One reader has the request that is held back; the others finish.
    vm.sh(&format!(
        "for i in $(seq 0 7); do (dd if=/dev/vda bs=4k skip=$((i*512)) count=512 iflag=direct 2>/dev/null | md5sum >/run/part.$i; echo >/run/end.$i) & done; \
         while [ $(ls /run/end.* 2>/dev/null | wc -l) -lt {} ]; do usleep 20000; done",
        READERS - 1
    ))?;
    assert_eq!(vm.sh("ls /run/end.* | wc -l")?, "7\n", "no request was held back");
    drop(server.take());
    server = Some(Server::start(&socket, &image, Some(900)));
    vm.sh("while [ $(ls /run/end.* | wc -l) -lt 8 ]; do usleep 20000; done")?;
    let sums = vm.sh("cat /run/part.*")?;
    let seen: Vec<_> = sums.lines().map(|line| line.split_whitespace().next().unwrap_or_default().to_owned()).collect();
    let expect: Vec<_> = contents.chunks(PART).map(sum).collect();
    assert_eq!(seen, expect);

    // Writers instead of readers: each block carries its writer's number.
    vm.sh(
        "rm /run/end.*; for i in $(seq 0 7); do (tr '\\0' $i </dev/zero | dd of=/dev/vda bs=4k seek=$((i*512)) count=512 iflag=fullblock oflag=direct 2>/dev/null || echo >/run/bad; echo >/run/end.$i) & done; \
         while [ $(ls /run/end.* 2>/dev/null | wc -l) -lt 7 ]; do usleep 20000; done",
    )?;
    assert_eq!(vm.sh("ls /run/end.* | wc -l")?, "7\n", "no request was held back");
    drop(server.take());
    let _server = Server::start(&socket, &image, None);
    vm.sh("while [ $(ls /run/end.* | wc -l) -lt 8 ]; do usleep 20000; done; [ ! -e /run/bad ]")?;
    let written = fs::read(&image).expect("our own image");
    for (writer, part) in written.chunks(PART).enumerate() {
        let digit = b'0' + writer as u8;
        assert_eq!(part.iter().position(|&byte| byte != digit), None, "blocks of writer {writer}");
    }
    let complaints: Vec<_> = vm.guest().kernel_log().into_iter().filter(|line| line.contains("error")).collect();
    assert!(complaints.is_empty(), "{complaints:?}");
    Ok(())
}

/// Whether QEMU is older than 9.2, which renamed a socket's `reconnect`.
fn is_before_9_2() -> Result<bool> {
    let output = Command::new(artifacts::qemu()?).arg("--version").output().expect("QEMU is installed");
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    let version = text.split_whitespace().nth(3).expect("QEMU emulator version X.Y.Z");
    let mut numbers = version.split('.').map(|number| number.parse::<u32>().unwrap_or(0));
    Ok((numbers.next(), numbers.next()) < (Some(9), Some(2)))
}
