//! Images against stock QEMU's tools: same locks, same qcow2; and the errors that an operator reads.

use std::error::Error;
use std::io::{BufRead, BufReader, Write};
use std::os::unix::fs::FileExt;
use std::process::{Child, Command, Stdio};
use std::time::Instant;

use rustix::mm::{MapFlags, ProtFlags, mmap, munmap};
use tempfile::TempDir;

use super::*;
use crate::engine::tests::{Noise, SLOT_BYTES, bytes_of, fill, pool_of, run, slot_at};
use crate::engine::{Operation, Submission};

mod crash;
mod damage;
mod devices;
mod kills;
mod locks;
mod qcow2;
mod served;

const DISK_BYTES: usize = 8 << 20;

/// On a disk: /tmp may be a tmpfs, where O_DIRECT means nothing.
fn folder() -> TempDir {
    tempfile::tempdir_in("/var/tmp").unwrap()
}

/// Waits for the lock: another test's child may hold the file between its fork and its exec.
fn options(path: &Path, format: Format) -> ImageOptions {
    let lock_patience = Duration::from_secs(60);
    ImageOptions { path: path.into(), format, read_only: false, direct: true, lock_patience, owner: None }
}

/// Does not wait for the lock.
fn options_at_once(path: &Path, format: Format) -> ImageOptions {
    ImageOptions { lock_patience: Duration::ZERO, ..options(path, format) }
}

fn raw_image(folder: &TempDir, bytes: u64) -> PathBuf {
    let path = folder.path().join("disk.raw");
    fs::File::create(&path).unwrap().set_len(bytes).unwrap();
    path
}

fn qemu_img(arguments: &[&str]) -> Result<String, String> {
    let output = Command::new("qemu-img").args(arguments).output().expect("qemu-img is installed");
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    if output.status.success() { Ok(text(&output.stdout)) } else { Err(text(&output.stderr)) }
}

fn as_str(path: &Path) -> &str {
    path.to_str().unwrap()
}

#[track_caller]
fn refused(options: &ImageOptions, expect: &str) {
    let error = Image::open(options).expect_err("the image is refused");
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        text = format!("{text}: {error}");
        cause = error.source();
    }
    assert_eq!(text.replace(as_str(options.path.parent().unwrap()), "DIR"), expect);
}

#[test]
fn non_images_are_refused_by_name() {
    let folder = folder();
    let at = |name: &str| options(&folder.path().join(name), Format::Auto);
    refused(&at("missing"), "disk image DIR/missing does not exist");
    fs::create_dir(folder.path().join("sub")).unwrap();
    refused(&at("sub"), "disk image DIR/sub is a directory; it must be a regular file or a block device");
    fs::write(folder.path().join("empty"), "").unwrap();
    refused(&at("empty"), "disk image DIR/empty is empty; make one with qemu-img create");
    refused(
        &options(Path::new("/dev/null"), Format::Raw),
        "disk image DIR/null is a character device; it must be a regular file or a block device",
    );
}

#[test]
fn qcow2_header_in_raw_disk_is_ignored() {
    let folder = folder();
    let path = folder.path().join("disk");
    qemu_img(&["create", "-q", "-f", "qcow2", as_str(&path), "1M"]).unwrap();
    refused(
        &options(&path, Format::Auto),
        "disk image DIR/disk begins with a qcow2 header; set format = \"qcow2\" if it is a qcow2 image, or format = \"raw\" if a guest wrote that header to its raw disk",
    );
    let raw = Image::open(&options(&path, Format::Raw)).unwrap();
    assert_eq!(raw.bytes(), path.metadata().unwrap().len().next_multiple_of(512));
}

#[test]
fn inspecting_an_image_leaves_it_unchanged() {
    let folder = folder();
    let path = raw_image(&folder, 1 << 20);
    let long_ago = std::time::SystemTime::UNIX_EPOCH + Duration::from_secs(1 << 30);
    fs::File::options().write(true).open(&path).unwrap().set_modified(long_ago).unwrap();
    drop(Image::open(&options(&path, Format::Auto)).unwrap());
    assert_eq!(path.metadata().unwrap().modified().unwrap(), long_ago);
}

#[test]
fn raw_images_say_how_they_are_served() {
    let folder = folder();
    let path = raw_image(&folder, 1 << 20);
    let mut image = Image::open(&options(&path, Format::Raw)).unwrap();
    let told = image.describe();
    assert!(told.starts_with("raw, io_uring, O_DIRECT in units of "), "{told}");
    assert!(image.supports_discard());
    assert_eq!((image.bytes(), image.logical_block_bytes(), image.physical_block_bytes()), (1 << 20, 512, 4096));

    fs::File::options().write(true).open(&path).unwrap().set_len(2 << 20).unwrap();
    assert_eq!((image.bytes(), image.refresh_bytes().unwrap(), image.bytes()), (1 << 20, 2 << 20, 2 << 20));
    drop(image);

    fs::File::options().write(true).open(&path).unwrap().set_len(1000).unwrap();
    let image = Image::open(&options(&path, Format::Raw)).unwrap();
    assert_eq!(image.bytes(), 1024);
    let told = image.describe();
    assert!(told.contains("through the page cache (the image is not a multiple of"), "{told}");

    let memory = tempfile::NamedTempFile::new_in("/dev/shm").unwrap();
    memory.as_file().set_len(4096).unwrap();
    let told = Image::open(&options(memory.path(), Format::Raw)).unwrap().describe();
    assert!(told.ends_with("through the page cache (tmpfs is memory itself)"), "{told}");
}

#[test]
fn host_reads_only_requested_bytes() {
    let folder = folder();
    let [raw, top] = ["disk.raw", "top.qcow2"].map(|name| folder.path().join(name));
    fs::write(&raw, vec![7; DISK_BYTES]).unwrap();
    create_overlay(&top, &raw, "raw").unwrap();
    drop_cache(&raw);
    File::open(&raw).unwrap().read_exact_at(&mut [0; 4096], 0).unwrap();
    assert!(cached_pages(&raw).len() > 1, "the host does not read ahead here: nothing can be shown");
    for (image, format) in [(&raw, Format::Raw), (&top, Format::Qcow2)] {
        drop_cache(&raw);
        let through_cache = ImageOptions { direct: false, ..options(image, format) };
        let image = Image::open(&through_cache).unwrap();
        let pool = pool_of(1);
        let mut engine = image.engine(pool, 4).unwrap();
        // In order, as what makes a host read ahead more and more.
        for page in [0, 1, 2, 3, 4, 100] {
            run(&mut *engine, Operation::Read(slot_at(0)), page * 4096, 4096).unwrap();
        }
        assert_eq!(cached_pages(&raw), [0, 1, 2, 3, 4, 100], "{format:?}");
    }
}

fn drop_cache(path: &Path) {
    let file = File::open(path).unwrap();
    file.sync_all().unwrap();
    rustix::fs::fadvise(&file, 0, None, rustix::fs::Advice::DontNeed).unwrap();
    assert!(cached_pages(path).is_empty(), "a file system that keeps its pages");
}

/// Pages of a file that are in the host's page cache.
fn cached_pages(path: &Path) -> Vec<usize> {
    let file = File::open(path).unwrap();
    let bytes = file.metadata().unwrap().len() as usize;
    let mut states = vec![0; bytes.div_ceil(4096)];
    // SAFETY: a fresh mapping at an address of the kernel's choice, through which nothing is read.
    let map = unsafe { mmap(std::ptr::null_mut(), bytes, ProtFlags::READ, MapFlags::SHARED, &file, 0).unwrap() };
    // SAFETY: the mapping has these bytes, and there is a state for each page of it.
    assert_eq!(unsafe { libc::mincore(map, bytes, states.as_mut_ptr()) }, 0);
    // SAFETY: the mapping from above; nothing refers to it.
    unsafe { munmap(map, bytes).unwrap() };
    (0..states.len()).filter(|&page| states[page] & 1 == 1).collect()
}

#[test]
fn last_partial_sector_belongs_to_the_disk() {
    let folder = folder();
    let path = folder.path().join("odd");
    fs::write(&path, [7; 700]).unwrap();
    let image = Image::open(&options(&path, Format::Raw)).unwrap();
    let pool = pool_of(1);
    let mut engine = image.engine(pool.clone(), 4).unwrap();
    fill(&pool, slot_at(0), 1024, &mut Noise(3));
    run(&mut *engine, Operation::Read(slot_at(0)), 0, 1024).unwrap();
    let (data, rest) = bytes_of(&pool, slot_at(0), 1024).split_at(700);
    assert!(data.iter().all(|&byte| byte == 7) && rest.iter().all(|&byte| byte == 0));
}

/// Whether an error names this process as a holder of the image. Another test's child may be named too.
fn names_holder(error: &str, pid: u32) -> bool {
    error.contains("is in use by process") && error.contains(&format!("process {pid} ("))
}

/// Another process that holds the image until told to go.
struct Holder(Child);

impl Holder {
    /// This test binary again, in the role of `holds_an_image_for_another_test`.
    fn hearth(path: &Path, read_only: bool) -> Self {
        let mut command = Command::new(std::env::current_exe().unwrap());
        command.args(["--exact", "image::tests::holds_an_image_for_another_test", "--nocapture", "-q"]);
        command.env("HELD_IMAGE", path).env("HELD_READ_ONLY", read_only.to_string());
        Self::start(command, "held")
    }

    fn qemu(path: &Path, read_only: bool) -> Self {
        let mut command = Command::new("qemu-io");
        command.args(["-f", "raw"]).args(read_only.then_some("-r")).arg(path);
        Self::start(command, "1 MiB")
    }

    fn start(mut command: Command, sign: &str) -> Self {
        let mut holder = Self(command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().expect("the holder starts"));
        holder.ask("length", sign);
        holder
    }

    fn ask(&mut self, word: &str, sign: &str) {
        writeln!(self.0.stdin.as_mut().unwrap(), "{word}").unwrap();
        let mut lines = BufReader::new(self.0.stdout.as_mut().unwrap()).lines();
        assert!(lines.any(|line| line.unwrap().contains(sign)), "the holder answers {word} with {sign}");
    }

    fn kill(&mut self) {
        self.0.kill().unwrap();
        self.0.wait().unwrap();
    }
}

impl Drop for Holder {
    fn drop(&mut self) {
        self.kill();
    }
}

#[test]
fn holds_an_image_for_another_test() {
    let Some(path) = std::env::var_os("HELD_IMAGE") else { return };
    let read_only = std::env::var("HELD_READ_ONLY").unwrap() == "true";
    let image = Image::open(&ImageOptions { read_only, ..options(Path::new(&path), Format::Raw) }).unwrap();
    println!("held");
    // Until the other side closes the pipe, or kills us. The word "write" starts a write whose end nobody waits for.
    let pool = pool_of(1);
    let mut engine = image.engine(pool, 1).unwrap();
    for line in std::io::stdin().lines() {
        if line.unwrap() == "write" {
            engine.push(Submission { token: 0, operation: Operation::Write(slot_at(0)), offset: 0, bytes: 4096 });
            engine.submit().unwrap();
            println!("started");
        }
    }
}

#[test]
fn our_locks_and_qemus_exclude_each_other() {
    type Start = fn(&Path, bool) -> Holder;
    for (maker, start) in [("hearth", Holder::hearth as Start), ("qemu-io", Holder::qemu)] {
        for (holder_reads, we_read, refused) in
            [(false, false, true), (false, true, true), (true, false, true), (true, true, false)]
        {
            let folder = folder();
            let path = raw_image(&folder, 1 << 20);
            if maker == "qemu-io" && holder_reads && !we_read {
                // As a reader of a raw image it lets others write (a QEMU that serves the image to a guest does not).
                continue;
            }
            let holder = start(&path, holder_reads);
            let opened = Image::open(&ImageOptions { read_only: we_read, ..options_at_once(&path, Format::Raw) });
            let place = format!("{maker}, holder reads: {holder_reads}, we read: {we_read}");
            assert_eq!(opened.is_err(), refused, "{place}: {opened:?}");
            if let Err(error) = opened {
                assert!(names_holder(&error.to_string(), holder.0.id()), "{place}: {error}");
            }
        }
    }
}

#[test]
fn qemu_img_refuses_an_image_that_we_hold() {
    let folder = folder();
    let path = raw_image(&folder, 1 << 20);
    let image = Image::open(&options(&path, Format::Raw)).unwrap();
    let resize = || qemu_img(&["resize", "-q", "-f", "raw", as_str(&path), "2M"]);
    let error = resize().unwrap_err();
    assert!(error.contains("Is another process using the image"), "{error}");
    drop(image);
    let options = ImageOptions { read_only: true, ..options(&path, Format::Raw) };
    let reader = Image::open(&options).unwrap();
    qemu_img(&["info", "-f", "raw", as_str(&path)]).unwrap();
    let error = resize().unwrap_err();
    assert!(error.contains("Is another process using the image"), "{error}");
    drop(reader);
    let deadline = Instant::now() + options.lock_patience;
    while let Err(error) = resize() {
        assert!(Instant::now() < deadline, "{error}");
    }
}

#[test]
fn the_next_keeper_waits_for_a_dying_one() {
    let folder = folder();
    let path = raw_image(&folder, 1 << 20);
    let mut holder = Holder::hearth(&path, false);
    std::thread::scope(|scope| {
        let next = scope.spawn(|| Image::open(&options(&path, Format::Raw)).map(drop));
        holder.kill();
        next.join().unwrap().unwrap();
    });
}

#[test]
fn lock_lives_until_last_engine_ends() {
    let folder = folder();
    let path = raw_image(&folder, 1 << 20);
    let image = Image::open(&options(&path, Format::Raw)).unwrap();
    let engine = image.engine(pool_of(1), 4).unwrap();
    drop(image);
    assert!(matches!(Image::open(&options_at_once(&path, Format::Raw)), Err(ImageError::InUse { .. })));
    drop(engine);
    // The kernel lets go of a ring's registered file a moment after the ring is closed.
    Image::open(&options(&path, Format::Raw)).unwrap();
}
