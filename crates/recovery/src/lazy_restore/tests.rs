//! Tests of lazy restore in one process, which is QEMU, guest and keeper at once.

use std::fs::{self, File};
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::time::Instant;

use hearth_disk::gate::RamGate;
use rustix::mm::{MapFlags, ProtFlags, UserfaultfdFlags, mmap, userfaultfd};

use super::*;
use crate::snapshot::pages::{Compression, PageWriter, Sealed};
use crate::snapshot::{Draft, Manifest, RamPart, SNAPSHOT_VERSION};

const PAGES: u64 = 128;
/// Pages 10 to 89 are stored, the others are zero.
const STORED: Range<u32> = 10..90;

/// A machine whose QEMU is this test process.
struct Stand {
    home: tempfile::TempDir,
    ram: RamFile,
    userfault: Userfault,
    start: usize,
}

fn save(folder: &std::path::Path) {
    save_of(folder, |page| page as u8);
}

/// Saves a snapshot in which each stored page is full of one byte.
fn save_of(folder: &std::path::Path, byte: impl Fn(u32) -> u8) {
    let mut draft = Draft::create(folder).unwrap();
    let mut writer = PageWriter::create(&draft.ram_path(), PAGES, Compression::None).unwrap();
    for page in STORED {
        writer.add(page, &[byte(page); 4096]).unwrap();
    }
    let Sealed { bytes, pages, seal } = writer.finish().unwrap();
    let manifest = Manifest {
        version: SNAPSHOT_VERSION,
        machine: "web".into(),
        saved_at: String::new(),
        hearth_version: String::new(),
        qemu_version: String::new(),
        accelerator: "tcg".into(),
        configuration: None,
        ram_bytes: PAGES * PAGE_BYTES,
        vmgenid: true,
        guest_agent: false,
        write_through: Vec::new(),
        frozen: false,
        machine_file: draft.write_machine("").unwrap(),
        state: draft.write_state(&[]).unwrap(),
        ram: RamPart { bytes, pages, seal },
        disks: Vec::new(),
    };
    draft.finish(&manifest).unwrap();
}

impl Stand {
    fn new() -> Self {
        let home = tempfile::tempdir_in("/dev/shm").unwrap();
        let ram = home.path().join("ram-1");
        Self::with_ram(home, &ram)
    }

    fn with_ram(home: tempfile::TempDir, ram: &std::path::Path) -> Self {
        save(&home.path().join("snapshot"));
        let ram = RamFile::create(ram, PAGES * PAGE_BYTES).unwrap();
        let file = File::options().read(true).write(true).open(ram.path()).unwrap();
        let (protection, bytes) = (ProtFlags::READ | ProtFlags::WRITE, (PAGES * PAGE_BYTES) as usize);
        // SAFETY: a new mapping at an address of the kernel's choice touches no other memory. It stays for good.
        let start = unsafe { mmap(std::ptr::null_mut(), bytes, protection, MapFlags::SHARED, &file, 0) }.unwrap();
        // SAFETY: a descriptor that acts on the mapping above only, as nothing else is registered with it.
        let fd = unsafe { userfaultfd(UserfaultfdFlags::CLOEXEC | UserfaultfdFlags::NONBLOCK) }.unwrap();
        let userfault = Userfault { fd, fd_in_qemu: 0, qemu_pid: std::process::id(), helper: None };
        Self { home, ram, userfault, start: start as usize }
    }

    fn snapshot(&self) -> Arc<Snapshot> {
        Arc::new(Snapshot::open(&self.home.path().join("snapshot")).unwrap())
    }

    fn lazy(&self, tracing: bool) -> Arc<LazyRam> {
        Arc::new(LazyRam::register(self.snapshot(), &self.ram, &self.userfault, None, tracing, |_| ()).unwrap())
    }

    /// Touches a page as a processor of the guest does.
    fn touch(&self, page: u32) -> u8 {
        let address = (self.start + page as usize * PAGE_BYTES as usize) as *const u8;
        // SAFETY: within the mapping, which stays; any byte is a valid one.
        unsafe { address.read_volatile() }
    }

    fn see(&self) -> Vec<u8> {
        (0..PAGES as u32).map(|page| self.touch(page)).collect()
    }
}

/// Waits for these counts: a thread that waited for a page runs again a moment before the page is counted.
fn await_counts(lazy: &LazyRam, expect: Counts) {
    let deadline = Instant::now() + Duration::from_secs(60);
    while lazy.counts() != expect && Instant::now() < deadline {
        std::thread::yield_now();
    }
    assert_eq!(lazy.counts(), expect);
}

fn saved() -> Vec<u8> {
    (0..PAGES as u32).map(|page| if STORED.contains(&page) { page as u8 } else { 0 }).collect()
}

fn served<T>(lazy: &LazyRam, work: impl FnOnce() -> T) -> T {
    /// Stops even if the work fails.
    struct Stops<'a>(&'a LazyRam);
    impl Drop for Stops<'_> {
        fn drop(&mut self) {
            self.0.stop();
        }
    }
    std::thread::scope(|scope| {
        scope.spawn(|| lazy.serve().unwrap());
        let _stops = Stops(lazy);
        work()
    })
}

#[test]
fn guest_sees_saved_memory_until_nothing_is_missing() {
    let stand = Stand::new();
    let lazy = stand.lazy(false);
    served(&lazy, || {
        assert_eq!((stand.touch(40), stand.touch(5)), (40, 0));
        await_counts(&lazy, Counts { stored: 80, prefetched: 0, lazy: 1, filled: 15, missing: 64 });
        assert!(lazy.fill(|_, _| 1 << 20).unwrap());
        assert_eq!(stand.see(), saved());
        lazy.finish().unwrap();
    });
    assert_eq!(stand.see(), saved());
    let counts = lazy.counts();
    assert_eq!((counts.lazy + counts.filled, counts.missing), (80, 0));
}

#[test]
fn prefetched_pages_cause_no_fault() {
    let stand = Stand::new();
    stand.snapshot().add_trace(&[70, 12, 11, 3]).unwrap();
    let set = stand.snapshot();
    let set = set.working_set.as_ref().unwrap().as_ref();
    assert_eq!(prefetch(set.unwrap(), &stand.ram, |_| true).unwrap(), 3);
    let register =
        |prefetched| LazyRam::register(stand.snapshot(), &stand.ram, &stand.userfault, prefetched, false, |_| ());
    let lazy = register(set).unwrap();
    assert_eq!((stand.touch(70), stand.touch(12), stand.touch(11)), (70, 12, 11));
    assert_eq!(lazy.counts(), Counts { stored: 80, prefetched: 3, missing: 77, ..Counts::default() });
    served(&lazy, || {
        assert_eq!(stand.see(), saved());
        let counts = Counts { stored: 80, prefetched: 3, lazy: 5, filled: 72, missing: 0 };
        await_counts(&lazy, counts);
    });
}

#[test]
fn cancelled_prefetch_stops() {
    let stand = Stand::new();
    let cancelled = prefetch(&stand.snapshot().ram, &stand.ram, |chunk| chunk < 2);
    assert!(matches!(cancelled, Err(RestoreError::CalledOff)));
    let there: Vec<u64> = stand.ram.resident_ranges().unwrap().into_iter().flatten().collect();
    assert_eq!(there, (10..42).collect::<Vec<_>>());
}

#[test]
fn memory_touched_too_early_is_refused() {
    let stand = Stand::new();
    let register = || LazyRam::register(stand.snapshot(), &stand.ram, &stand.userfault, None, false, |_| ());
    // In the snapshot these pages are zero too.
    assert_eq!((stand.touch(3), stand.touch(120)), (0, 0));
    assert_eq!(stand.touch(33), 0);
    let refused = register().err().map(|error| error.to_string());
    assert!(refused.as_ref().is_some_and(|said| said.starts_with("QEMU has touched page 33 of")), "{refused:?}");
}

#[test]
fn fault_waits_count_from_receipt_zeroes_apart() {
    let stand = Stand::new();
    let lazy = stand.lazy(false);
    let mut reading = lazy.snapshot.ram.reading();
    let heard = Instant::now().checked_sub(Duration::from_secs(1)).unwrap();
    assert!(lazy.answer(5, Instant::now(), &mut reading).unwrap());
    assert_eq!(lazy.wait_us_stored(100), None);
    assert!(lazy.answer(40, heard, &mut reading).unwrap());
    assert!(lazy.wait_us_stored(50) >= Some(1_000_000) && lazy.wait_us(100) >= Some(1_000_000));
    assert!(lazy.wait_us(50) < Some(1_000_000) && lazy.waited_us() >= 1_000_000);
}

#[test]
fn zero_page_brings_only_zero_neighbours() {
    let stand = Stand::new();
    let there = |lazy: &LazyRam| (0..PAGES as u32).filter(|page| lazy.is_there(*page)).collect::<Vec<_>>();
    let lazy = stand.lazy(false);
    // Pages 80 to 89 are stored.
    served(&lazy, || assert_eq!(stand.touch(92), 0));
    assert_eq!(there(&lazy), (90..96).collect::<Vec<_>>());
    let resident = |stand: &Stand| stand.ram.resident_ranges().unwrap().into_iter().flatten().collect::<Vec<_>>();
    assert_eq!(resident(&stand), (90..96).collect::<Vec<_>>());
    assert_eq!(lazy.counts(), Counts { stored: 80, missing: 80, ..Counts::default() });
    let stand = Stand::new();
    served(&stand.lazy(true), || assert_eq!(stand.touch(100), 0));
    assert_eq!(resident(&stand), [100], "a trace sees each");
}

#[test]
fn trace_lists_each_page_once_in_order() {
    let stand = Stand::new();
    let lazy = stand.lazy(true);
    served(&lazy, || {
        for page in [80, 20, 21, 80, 100, 19] {
            stand.touch(page);
        }
        assert!(lazy.bring(30 * PAGE_BYTES..31 * PAGE_BYTES + 1), "a disk's look counts as well");
        assert_eq!(lazy.end_trace(), [80, 20, 21, 19, 30, 31]);
        stand.touch(60);
        assert_eq!(lazy.end_trace(), [0; 0]);
    });
}

#[test]
fn disks_never_see_a_missing_page() {
    let stand = Stand::new();
    let lazy = stand.lazy(false);
    let gate = lazy.gate();
    assert!(gate.keeper.bring(88 * PAGE_BYTES + 7..92 * PAGE_BYTES));
    assert_eq!([88, 89, 90, 91].map(|page| stand.touch(page)), [88, 89, 0, 0]);
    assert_eq!((gate.ram_device, gate.ram_inode), stand.ram.identity());
}

#[test]
fn touched_damaged_page_waits_until_image_is_mended() {
    let stand = Stand::new();
    let path = stand.home.path().join("snapshot/ram");
    let whole = fs::read(&path).unwrap();
    let told = Arc::new(Mutex::new(Vec::new()));
    let heard = told.clone();
    let tell = move |trouble| lock(&heard).push(trouble);
    let lazy = LazyRam::register(stand.snapshot(), &stand.ram, &stand.userfault, None, false, tell).unwrap();
    let image = File::options().write(true).open(&path).unwrap();
    // The second chunk holds pages 26 to 41.
    image.write_all_at(&[0xee], 4096 + 16 * PAGE_BYTES + 9).unwrap();
    served(&lazy, || {
        assert!(!lazy.fill(|_, _| 0).unwrap(), "something is missing");
        assert_eq!(lazy.counts().missing, 16);
        assert_eq!(stand.touch(25), 25);
        let touching = std::thread::scope(|scope| {
            let guest = scope.spawn(|| (stand.touch(30), Instant::now()));
            while lazy.stuck().is_empty() {
                std::thread::yield_now();
            }
            let mended = Instant::now();
            image.write_all_at(&whole, 0).unwrap();
            let (seen, at) = guest.join().unwrap();
            assert!(at > mended);
            seen
        });
        assert_eq!(touching, 30);
        assert_eq!(lazy.stuck(), Vec::<String>::new());
        assert!(lazy.fill(|_, _| 0).unwrap());
    });
    let told = lock(&told);
    assert_eq!(told.len(), 1, "told once: {told:?}");
    assert!(told[0].why.contains("pages 26 to 41 of the guest's memory are damaged"), "{told:?}");
    assert!(told[0].is_damage);
}

#[test]
fn replaced_image_is_used_only_if_it_matches() {
    let stand = Stand::new();
    let [path, away, copy, other] = ["snapshot/ram", "away", "copy", "other"].map(|name| stand.home.path().join(name));
    let whole = fs::read(&path).unwrap();
    save_of(&other, |page| !(page as u8));
    let told = Arc::new(Mutex::new(Vec::new()));
    let heard = told.clone();
    let tell = move |trouble| lock(&heard).push(trouble);
    let lazy = LazyRam::register(stand.snapshot(), &stand.ram, &stand.userfault, None, false, tell).unwrap();
    let image = File::options().write(true).open(&path).unwrap();
    image.write_all_at(&[0xee], 4096 + 16 * PAGE_BYTES + 9).unwrap();
    // The open file stays the damaged one.
    fs::rename(&path, &away).unwrap();
    served(&lazy, || {
        assert!(!lazy.fill(|_, _| 0).unwrap());
        for not_it in [&fs::read(other.join("ram")).unwrap(), &whole[..9000]] {
            fs::write(&copy, not_it).unwrap();
            fs::rename(&copy, &path).unwrap();
            assert!(!lazy.fill(|_, _| 0).unwrap());
            let stuck = lazy.stuck();
            assert!(stuck.len() == 1 && stuck[0].contains("nor a whole copy of it"), "{stuck:?}");
        }
        fs::write(&copy, &whole).unwrap();
        fs::rename(&copy, &path).unwrap();
        assert_eq!(stand.touch(30), 30);
        assert!(lazy.fill(|_, _| 0).unwrap());
        assert_eq!(stand.see(), saved());
    });
    let told = lock(&told);
    assert_eq!(told.len(), 2, "once for each reason: {told:?}");
    assert!(told[0].why.contains("their checksum is wrong"), "{told:?}");
}

#[test]
fn next_keeper_loads_what_is_missing() {
    let stand = Stand::new();
    let first = stand.lazy(false);
    served(&first, || assert_eq!(stand.touch(50), 50));
    drop(first);
    let resume = || LazyRam::resume(stand.snapshot(), &stand.ram, &stand.userfault, |_| ()).unwrap();
    let second = resume().expect("something is missing");
    served(&second, || {
        assert_eq!(stand.see(), saved());
        second.finish().unwrap();
    });
    assert!(resume().is_none());
}

#[test]
fn late_request_after_finish_is_no_failure() {
    let stand = Stand::new();
    let lazy = stand.lazy(false);
    assert!(lazy.fill(|_, _| 0).unwrap());
    lazy.finish().unwrap();
    // Both requests come from before the end, when the memory was still registered.
    assert!(lazy.bring(100 * PAGE_BYTES..101 * PAGE_BYTES));
    assert!(lazy.answer(101, Instant::now(), &mut lazy.snapshot.ram.reading()).unwrap());
    assert_eq!(stand.see(), saved());
}

#[test]
fn page_given_back_reads_as_zeroes() {
    let stand = Arc::new(Stand::new());
    let lazy = stand.lazy(false);
    served(&lazy, || {
        assert_eq!(stand.touch(40), 40);
        stand.ram.release(40..41).unwrap();
        let (saw, seen) = std::sync::mpsc::channel();
        let guest = stand.clone();
        std::thread::spawn(move || saw.send(guest.touch(40)));
        assert_eq!(seen.recv_timeout(Duration::from_secs(60)), Ok(0));
    });
}

/// A file system with space for 64 pages, and its folder.
struct Small(tempfile::TempDir);

impl Small {
    /// Makes a machine whose RAM is in that file system; `None` without root.
    fn stand() -> Option<(Self, Stand)> {
        if !rustix::process::geteuid().is_root() {
            eprintln!("not tried: only root can make a file system that is full");
            return None;
        }
        let small = Self(tempfile::tempdir().unwrap());
        small.run(&["mount", "-t", "tmpfs", "-o", "size=256k", "small"]);
        let stand = Stand::with_ram(tempfile::tempdir_in("/dev/shm").unwrap(), &small.0.path().join("ram-1"));
        Some((small, stand))
    }

    fn run(&self, words: &[&str]) {
        let status = std::process::Command::new(words[0]).args(&words[1..]).arg(self.0.path()).status().unwrap();
        assert!(status.success(), "{words:?}");
    }
}

impl Drop for Small {
    fn drop(&mut self) {
        self.run(&["umount", "--lazy"]);
    }
}

#[test]
fn guest_without_space_waits_until_there_is_some() {
    let Some((small, stand)) = Small::stand() else { return };
    let told = Arc::new(Mutex::new(Vec::new()));
    let heard = told.clone();
    let tell = move |trouble| lock(&heard).push(trouble);
    let lazy = LazyRam::register(stand.snapshot(), &stand.ram, &stand.userfault, None, false, tell).unwrap();
    served(&lazy, || {
        assert!(!lazy.fill(|_, _| 0).unwrap(), "there is room for 64 pages, and 80 are stored");
        let waiting = lazy.stuck();
        assert!(waiting[0].contains("has no space for the guest's missing memory; enlarge"), "{waiting:?}");
        let seen = std::thread::scope(|scope| {
            let guest = scope.spawn(|| stand.touch(89));
            let disk = scope.spawn(|| lazy.bring(88 * PAGE_BYTES..89 * PAGE_BYTES));
            while !lazy.is_asked() {
                std::thread::yield_now();
            }
            small.run(&["mount", "-o", "remount,size=1m"]);
            (guest.join().unwrap(), disk.join().unwrap())
        });
        assert_eq!(seen, (89, true));
        assert!(lazy.fill(|_, _| 0).unwrap());
        assert_eq!(lazy.stuck(), Vec::<String>::new());
    });
    let told = lock(&told);
    assert!(told.len() == 1 && !told[0].is_damage, "{told:?}");
}

#[test]
fn space_for_the_touched_page_is_enough() {
    let Some((_small, stand)) = Small::stand() else { return };
    let lazy = stand.lazy(false);
    served(&lazy, || {
        // Three chunks and ten pages of zeroes leave six of 64 pages.
        assert!(lazy.bring(10 * PAGE_BYTES..58 * PAGE_BYTES) && lazy.bring(0..PAGE_BYTES));
        let counts = |lazy, filled, missing| Counts { stored: 80, prefetched: 0, lazy, filled, missing };
        assert_eq!(lazy.counts(), counts(3, 45, 32));
        assert_eq!(stand.touch(70), 70);
        // It is reported afterwards that the rest of the chunk finds no space.
        while lazy.stuck().is_empty() {
            std::thread::yield_now();
        }
        assert_eq!(lazy.counts(), counts(4, 45, 31));
        assert!(lazy.stuck()[0].contains("has no space for the guest's missing memory"), "{:?}", lazy.stuck());
    });
}
