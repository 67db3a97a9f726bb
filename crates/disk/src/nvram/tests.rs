//! Tests of what NVRAM and its mirror hold after the end of guest, server or keeper.

use std::os::unix::fs::FileExt;
use std::time::Instant;

use super::*;
use crate::engine::{Completion, Operation, Submission};

const BYTES: u64 = 1 << 20;
/// Far off: only a hang meets it.
const PATIENCE: Duration = Duration::from_secs(60);

struct Bench {
    folder: tempfile::TempDir,
    policy: Option<MirrorPolicy>,
}

/// A device as its server has it.
struct Device {
    nvram: Nvram,
    backing: Backing,
}

impl Bench {
    fn new(policy: Option<MirrorPolicy>) -> Self {
        Self { folder: tempfile::tempdir().unwrap(), policy }
    }

    fn options(&self) -> NvramOptions {
        let mirror = self.policy.map(|policy| (self.mirror(), policy));
        NvramOptions { name: "log".into(), folder: self.folder.path().to_owned(), bytes: BYTES, mirror, owner: None }
    }

    fn mirror(&self) -> PathBuf {
        self.folder.path().join("mirror")
    }

    fn open(&self) -> Device {
        let (nvram, backing) = Nvram::open(&self.options()).unwrap();
        Device { nvram, backing }
    }

    /// The host has lost its memory.
    fn lose_memory(&self) {
        fs::remove_file(self.options().memory_file()).unwrap();
    }

    fn mirrored(&self, offset: u64) -> u8 {
        let mut byte = [0];
        File::open(self.mirror()).unwrap().read_exact_at(&mut byte, offset).unwrap();
        byte[0]
    }
}

impl Device {
    fn perform(&mut self, operation: Operation, offset: u64, bytes: u64) -> io::Result<()> {
        let engine = &mut self.backing.engine;
        engine.push(Submission { token: 7, operation, offset, bytes });
        engine.submit().unwrap();
        let mut ended: Vec<Completion> = Vec::new();
        let deadline = Instant::now() + PATIENCE;
        while ended.is_empty() {
            assert!(Instant::now() < deadline, "an operation does not end");
            engine.wait(PATIENCE).unwrap();
            engine.reap(&mut ended);
        }
        assert_eq!((ended.len(), ended[0].token, engine.in_flight()), (1, 7, 0));
        ended.remove(0).result
    }

    fn write(&mut self, offset: u64, fill: u8, bytes: u64) {
        let slot = self.backing.pool.take(bytes as usize).unwrap();
        // SAFETY: the slot was just taken, and no operation is on it.
        unsafe { self.backing.pool.bytes_mut(slot) }.fill(fill);
        self.perform(Operation::Write(slot), offset, bytes).unwrap();
        self.backing.pool.give_back(slot);
    }

    fn read(&mut self, offset: u64) -> u8 {
        let slot = self.backing.pool.take(4096).unwrap();
        self.perform(Operation::Read(slot), offset, 4096).unwrap();
        // SAFETY: its only operation has ended.
        let byte = unsafe { self.backing.pool.bytes_mut(slot) }[0];
        self.backing.pool.give_back(slot);
        byte
    }

    fn flush(&mut self) {
        self.perform(Operation::Flush, 0, 0).unwrap();
    }

    /// The machine stops: its server ends, then its memory may go.
    fn stop(self) -> bool {
        drop(self.backing);
        self.nvram.give_back().unwrap()
    }
}

#[test]
fn memory_outlives_its_server() {
    let bench = Bench::new(None);
    let mut device = bench.open();
    assert_eq!((device.nvram.origin, device.read(4096), device.nvram.dirty_bytes()), (Origin::Zeroes, 0, None));
    device.write(4096, 5, 8192);
    device.flush();
    device.perform(Operation::WriteZeroes { unmap: true }, 8192, 4096).unwrap();
    device.perform(Operation::Discard, 4096, 4096).unwrap();
    drop(device);
    let mut device = bench.open();
    assert_eq!((device.nvram.origin, device.read(4096), device.read(8192)), (Origin::Memory, 5, 0));
    assert!(!device.stop(), "nothing else has it");
    bench.lose_memory();
    assert_eq!(bench.open().read(4096), 0);
}

#[test]
fn a_flush_returns_when_the_mirror_has_it() {
    let bench = Bench::new(Some(MirrorPolicy::Sync));
    let mut device = bench.open();
    device.write(4096, 5, 4096);
    device.write(200 << 10, 6, 256 << 10);
    assert_eq!(bench.mirrored(4096), 0, "nothing is written before it is asked for");
    device.flush();
    assert_eq!([4096, (200 << 10), (456 << 10) - 1].map(|at| bench.mirrored(at)), [5, 6, 6]);
    device.write(4096, 7, 4096);
    // A keeper that is killed stops nothing properly.
    std::mem::forget(device.backing);
    let copy = bench.folder.path().join("host-died");
    fs::copy(bench.mirror(), &copy).unwrap();
    bench.lose_memory();
    // The lock of the one that was forgotten is its own: another file, with the same content.
    fs::rename(&copy, bench.mirror()).unwrap();
    let mut device = bench.open();
    assert_eq!((device.nvram.origin, device.read(4096), device.read(300 << 10)), (Origin::Mirror, 5, 6));
}

#[test]
fn an_asynchronous_mirror_follows_by_itself() {
    let bench = Bench::new(Some(MirrorPolicy::Async));
    let mut device = bench.open();
    device.write(4096, 5, 4096);
    device.flush();
    let deadline = Instant::now() + PATIENCE;
    while bench.mirrored(4096) != 5 {
        assert!(Instant::now() < deadline, "it never comes");
        std::thread::sleep(Duration::from_millis(5));
    }
    device.write(8192, 6, 4096);
    assert!(device.stop(), "what is left is written at the end");
    assert_eq!(bench.mirrored(8192), 6);
    let mut device = bench.open();
    assert_eq!((device.nvram.origin, device.read(8192)), (Origin::Mirror, 6));
}

#[test]
fn dead_keepers_memory_reaches_the_mirror() {
    let bench = Bench::new(None);
    let mut device = bench.open();
    device.write(4096, 5, 4096);
    drop(device);
    let bench = Bench { policy: Some(MirrorPolicy::Sync), ..bench };
    let mut device = bench.open();
    assert_eq!((device.nvram.origin, device.nvram.dirty_bytes()), (Origin::Memory, Some(BYTES)));
    device.flush();
    assert_eq!((bench.mirrored(4096), device.nvram.dirty_bytes()), (5, Some(0)));
    assert!(device.stop());
}

#[test]
fn unwritable_mirror_fails_the_flush() {
    let bench = Bench::new(Some(MirrorPolicy::Sync));
    let Device { nvram, backing } = bench.open();
    // A file that takes no writes, in the mirror's place.
    let memory = OpenOptions::new().read(true).write(true).open(bench.options().memory_file()).unwrap();
    let closed = (File::open(bench.mirror()).unwrap(), bench.mirror());
    let mirror = Mirror::new("log", MirrorPolicy::Sync, Arc::new(memory), (closed.0, closed.1.as_path()), BYTES, false);
    let nvram = Nvram { mirror: Some(Arc::new(mirror)), ..nvram };
    let memory = OpenOptions::new().read(true).write(true).open(&nvram.path).unwrap();
    let engine = NvramEngine::start(Arc::new(memory), Arc::clone(&backing.pool), nvram.mirror.clone()).unwrap();
    let mut device = Device { nvram, backing: Backing { engine: Box::new(engine), ..backing } };
    device.write(0, 5, 4096);
    device.perform(Operation::Flush, 0, 0).unwrap_err();
    assert!(device.nvram.problem().unwrap().contains("mirror"), "{:?}", device.nvram.problem());
    assert_eq!(device.nvram.dirty_bytes(), Some(4096));
    assert!(!device.stop(), "it is nowhere else");
}

#[test]
fn wrong_sizes_are_reported() {
    let bench = Bench::new(Some(MirrorPolicy::Sync));
    let check = |options: &NvramOptions, expect: &str| {
        let error = Nvram::open(options).err().expect("it does not fit").to_string();
        assert_eq!(error, expect);
    };
    let device = bench.open();
    let other = NvramOptions { name: "other".into(), ..bench.options() };
    let mirror = bench.mirror();
    let mirror = mirror.display();
    check(&other, &format!("nvram other: another process mirrors to {mirror}; give each device a mirror of its own"));
    drop(device);
    let other = NvramOptions { bytes: BYTES / 2, ..bench.options() };
    check(
        &other,
        &format!(
            "nvram log: {mirror} has 1048576 bytes instead of 524288; set its size to that, or move the file away"
        ),
    );
}

#[test]
fn a_mirror_is_a_file() {
    let mirror = PathBuf::from("/dev/null");
    let options = NvramOptions { mirror: Some((mirror, MirrorPolicy::Sync)), ..Bench::new(None).options() };
    let expect = "nvram log: /dev/null is not a regular file; a mirror must be one";
    assert_eq!(options.check().unwrap_err().to_string(), expect);
    fs::create_dir_all(&options.folder).unwrap();
    assert_eq!(Nvram::open(&options).err().expect("it is refused").to_string(), expect);
    fs::remove_dir_all(&options.folder).unwrap();
}

/// A device that is made does not take what belongs to one whose name ends alike.
#[test]
fn names_with_equal_ends_have_own_files() {
    let folder = tempfile::tempdir().unwrap();
    let names = ["log.2", "log.3", "log.old"];
    let options = |name: &str| NvramOptions {
        name: name.to_owned(),
        folder: folder.path().to_owned(),
        bytes: BYTES,
        mirror: None,
        owner: None,
    };
    let neighbour = folder.path().join("nvram-log.new");
    fs::write(&neighbour, "a device called log.new").unwrap();
    let devices = names.map(|name| Nvram::open(&options(name)).unwrap());
    assert_eq!(fs::read(&neighbour).unwrap(), b"a device called log.new", "log.2 is no log.new");
    assert_eq!(fs::read_dir(folder.path()).unwrap().count(), names.len() + 1);
    drop(devices);
}
