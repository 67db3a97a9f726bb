//! Admission against a real process in QEMU's place: the test program starts itself as a child, which maps the RAM
//! file, hands over its userfaultfd and touches pages on request.

use std::io::{BufRead, BufReader, Write};
use std::os::fd::AsRawFd;
use std::path::Path;
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::AtomicUsize;
use std::time::Instant;

use super::*;

const MIB: u64 = 1 << 20;
const UNITS: u64 = 8;
const RAM_BYTES: u64 = UNITS * UNIT_BYTES;
const PATIENCE: Duration = Duration::from_secs(30);
/// Environment variable of the child: path of the RAM file.
const CHILD: &str = "HEARTH_TEST_ADMISSION_CHILD";

/// The child process in QEMU's place.
struct Guest {
    process: Child,
    orders: ChildStdin,
    answers: BufReader<ChildStdout>,
    userfault: Userfault,
}

impl Guest {
    fn start(ram: &RamFile) -> Self {
        let mut process = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "faults::admission::tests::child", "--nocapture"])
            .env(CHILD, ram.path())
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let orders = process.stdin.take().unwrap();
        let mut answers = BufReader::new(process.stdout.take().unwrap());
        let number = answer(&mut answers).parse().unwrap();
        let userfault = Userfault::fetch(process.id(), number, None).unwrap();
        Self { process, orders, answers, userfault }
    }

    /// Asks the child to write a pattern into each page of these bytes. Does not wait.
    fn touch(&mut self, bytes: Range<u64>) {
        writeln!(self.orders, "touch {} {}", bytes.start, bytes.end).unwrap();
    }

    /// Waits for the end of the last request. Returns the sum of the pattern as the child reads it.
    fn done(&mut self) -> u64 {
        answer(&mut self.answers).parse().unwrap()
    }
}

impl Drop for Guest {
    fn drop(&mut self) {
        // The child may have died already.
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

/// Reads the child's next answer. Answers begin with an @; other output comes from the test harness.
fn answer(answers: &mut impl BufRead) -> String {
    answers.lines().find_map(|line| line.unwrap().split_once('@').map(|(_, answer)| answer.to_owned())).unwrap()
}

fn pattern(page: u64) -> u64 {
    (page + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15)
}

fn sum(bytes: Range<u64>) -> u64 {
    (bytes.start / PAGE_BYTES..bytes.end / PAGE_BYTES).map(pattern).fold(0, u64::wrapping_add)
}

/// Not a test: the body of the child. Without the environment variable it does nothing.
#[test]
fn child() {
    let Some(path) = std::env::var_os(CHILD) else { return };
    let ram = RamFile::open(Path::new(&path)).unwrap();
    let file = std::fs::File::options().read(true).write(true).open(&path).unwrap();
    let (protection, flags) = (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_SHARED);
    // SAFETY: a new mapping at an address of the kernel's choice touches no other memory.
    let start =
        unsafe { libc::mmap(std::ptr::null_mut(), ram.bytes() as usize, protection, flags, file.as_raw_fd(), 0) };
    assert_ne!(start, libc::MAP_FAILED);
    // SAFETY: the system call only creates a descriptor.
    let userfault = unsafe { libc::syscall(libc::SYS_userfaultfd, libc::O_CLOEXEC | libc::O_NONBLOCK) };
    println!("@{userfault}");
    for line in std::io::stdin().lines() {
        let line = line.unwrap();
        let numbers: Vec<u64> = line.split(' ').filter_map(|word| word.parse().ok()).collect();
        let pages = numbers[0] / PAGE_BYTES..numbers[1] / PAGE_BYTES;
        // SAFETY: the tests name bytes of the mapping only.
        let word = |page: u64| unsafe { start.cast::<u64>().add((page * PAGE_BYTES / 8) as usize) };
        // SAFETY: as above.
        pages.clone().for_each(|page| unsafe { word(page).write_volatile(pattern(page)) });
        // SAFETY: as above.
        let total = pages.map(|page| unsafe { word(page).read_volatile() }).fold(0, u64::wrapping_add);
        println!("@{total}");
    }
}

struct Place {
    _folder: tempfile::TempDir,
    ram: RamFile,
}

fn place() -> Place {
    let folder = tempfile::tempdir_in("/dev/shm").unwrap();
    let ram = RamFile::create(&folder.path().join("ram-1"), RAM_BYTES).unwrap();
    Place { _folder: folder, ram }
}

/// Serves faults and grants `credit` units. The caller adds units through the returned counter.
fn serve(
    gated: &Arc<GatedRam>,
    credit: usize,
) -> (Arc<AtomicUsize>, std::thread::JoinHandle<Result<(), AdmissionError>>) {
    let credit = Arc::new(AtomicUsize::new(credit));
    let (gated, left) = (gated.clone(), credit.clone());
    let server = std::thread::spawn(move || {
        gated.serve(|unit| {
            if !gated.is_granted(unit) && left.fetch_update(Relaxed, Relaxed, |left| left.checked_sub(1)).is_err() {
                return Ok(Verdict::Wait);
            }
            gated.grant(unit).map(|()| Verdict::Granted)
        })
    });
    (credit, server)
}

#[track_caller]
fn wait_until(what: &str, mut look: impl FnMut() -> bool) {
    let deadline = Instant::now() + PATIENCE;
    while !look() {
        assert!(Instant::now() < deadline, "{what}");
        std::thread::sleep(Duration::from_millis(1));
    }
}

#[test]
fn guest_waits_for_memory_beyond_its_grant() {
    let place = place();
    let mut guest = Guest::start(&place.ram);
    let gated = Arc::new(GatedRam::register(&guest.userfault, &place.ram, UNIT_BYTES).unwrap());
    let (credit, server) = serve(&gated, 3);
    guest.touch(0..RAM_BYTES);
    for granted in 3..=UNITS {
        if granted > 3 {
            credit.fetch_add(1, Relaxed);
        }
        let full = granted * UNIT_BYTES;
        wait_until("the guest fills what it has", || place.ram.residency_bytes().unwrap() == full);
        assert_eq!((gated.granted_bytes(), gated.committed_bytes()), (full, full));
        if granted < UNITS {
            wait_until("the guest waits", || gated.waits().waiting == 1);
            assert_eq!(place.ram.residency_bytes().unwrap(), full);
        }
    }
    assert_eq!(guest.done(), sum(0..RAM_BYTES));
    // One fault per unit, not per page.
    assert_eq!(gated.waits().faults, UNITS);
    wait_until("nobody waits any more", || gated.waits().waiting == 0);
    assert!(gated.waits().waited > Duration::ZERO);
    gated.stop();
    server.join().unwrap().unwrap();
}

#[test]
fn resident_pages_count_once_and_need_no_fault() {
    let place = place();
    let mut guest = Guest::start(&place.ram);
    guest.touch(4096..12288);
    guest.done();
    let gated = Arc::new(GatedRam::register(&guest.userfault, &place.ram, UNIT_BYTES).unwrap());
    assert_eq!((gated.committed_bytes(), gated.granted_bytes()), (8192, 0));
    assert_eq!((gated.charge_bytes(0), gated.charge_bytes(1)), (UNIT_BYTES - 8192, UNIT_BYTES));
    let (credit, server) = serve(&gated, 0);
    guest.touch(4096..12288);
    guest.done();
    credit.fetch_add(1, Relaxed);
    guest.touch(0..8192);
    assert_eq!(guest.done(), sum(0..8192));
    assert_eq!((gated.committed_bytes(), gated.charge_bytes(0), gated.waits().faults), (UNIT_BYTES, 0, 1));
    gated.stop();
    server.join().unwrap().unwrap();
}

#[test]
fn finish_wakes_all_waiting_threads() {
    let place = place();
    let mut guest = Guest::start(&place.ram);
    let gated = Arc::new(GatedRam::register(&guest.userfault, &place.ram, UNIT_BYTES).unwrap());
    let (_credit, server) = serve(&gated, 1);
    guest.touch(0..RAM_BYTES);
    wait_until("the guest waits", || gated.waits().waiting == 1);
    gated.finish().unwrap();
    assert_eq!(guest.done(), sum(0..RAM_BYTES));
    server.join().unwrap().unwrap();
    assert!(gated.is_finished() && gated.is_granted(UNITS as usize - 1));
    let left = GatedRam::resume(&guest.userfault, &place.ram, UNIT_BYTES).unwrap();
    assert!(left.is_none(), "something is still registered");
}

/// The first keeper closes its descriptor with faults unread or unanswered; only QEMU's own copy is left.
#[test]
fn next_keeper_resumes_admission() {
    let place = place();
    let mut guest = Guest::start(&place.ram);
    let number = guest.userfault.fd_in_qemu;
    {
        let first = Arc::new(GatedRam::register(&guest.userfault, &place.ram, UNIT_BYTES).unwrap());
        let (_credit, server) = serve(&first, 2);
        guest.touch(0..RAM_BYTES);
        wait_until("the guest waits", || first.waits().waiting == 1);
        first.stop();
        server.join().unwrap().unwrap();
    }
    guest.userfault = Userfault::fetch(guest.process.id(), number, None).unwrap();
    let second = GatedRam::resume(&guest.userfault, &place.ram, UNIT_BYTES).unwrap().expect("most of it is registered");
    let second = Arc::new(second);
    assert_eq!((second.granted_bytes(), second.committed_bytes()), (2 * UNIT_BYTES, 2 * UNIT_BYTES));
    let (_credit, server) = serve(&second, UNITS as usize);
    assert_eq!(guest.done(), sum(0..RAM_BYTES));
    assert_eq!(second.granted_bytes(), RAM_BYTES);
    second.stop();
    server.join().unwrap().unwrap();
}

#[test]
fn dead_guest_is_reported_as_gone() {
    let place = place();
    let mut guest = Guest::start(&place.ram);
    let gated = Arc::new(GatedRam::register(&guest.userfault, &place.ram, UNIT_BYTES).unwrap());
    let (_credit, server) = serve(&gated, 1);
    guest.touch(0..RAM_BYTES);
    wait_until("the guest waits", || gated.waits().waiting == 1);
    guest.process.kill().unwrap();
    guest.process.wait().unwrap();
    assert!(matches!(gated.grant(5), Err(AdmissionError::Gone { .. })));
    gated.stop();
    server.join().unwrap().unwrap();
    assert_eq!(place.ram.residency_bytes().unwrap(), UNIT_BYTES);
}

#[test]
fn unmapped_ram_file_is_refused() {
    let (place, other) = (place(), place());
    let guest = Guest::start(&place.ram);
    let refusal = GatedRam::register(&guest.userfault, &other.ram, UNIT_BYTES).unwrap_err().to_string();
    assert!(refusal.ends_with("must map the whole file exactly once, but has mapped 0 of 16777216 bytes"), "{refusal}");
}

#[test]
fn reused_userfaultfd_number_is_refused() {
    let place = place();
    let guest = Guest::start(&place.ram);
    let refusal = Userfault::fetch(guest.process.id(), 0, None).unwrap_err();
    let why = std::error::Error::source(&refusal).unwrap().to_string();
    assert!(why.starts_with("it is pipe:"), "{why}");
}

#[test]
fn units_fit_page_size_and_mapping_limit() {
    assert_eq!(fitting_unit(UNIT_BYTES, PAGE_BYTES, 512 * MIB), UNIT_BYTES);
    assert_eq!(fitting_unit(64 << 10, 2 * MIB, 512 * MIB), 2 * MIB);
    assert_eq!(fitting_unit(UNIT_BYTES, 1 << 30, 1 << 40), 1 << 30);
    for ram_bytes in [1_u64 << 30, 32 << 30, 33 << 30, 16 << 40] {
        assert!(ram_bytes.div_ceil(fitting_unit(1, PAGE_BYTES, ram_bytes)) <= 1 << 14);
    }
    assert_eq!(fitting_unit(UNIT_BYTES, PAGE_BYTES, 32 << 30), UNIT_BYTES);
}

/// Granting every second unit creates the largest number of mappings.
#[test]
fn scattered_grants_create_one_mapping_per_unit() {
    let place = place();
    let guest = Guest::start(&place.ram);
    let gated = GatedRam::register(&guest.userfault, &place.ram, UNIT_BYTES).unwrap();
    (0..UNITS as usize).step_by(2).for_each(|unit| gated.grant(unit).unwrap());
    let pieces = mapping::find_registered(guest.process.id(), place.ram.identity()).unwrap();
    assert_eq!(pieces.len() as u64, UNITS);
    assert_eq!(pieces.iter().filter(|piece| piece.registered).count() as u64, UNITS / 2);
    gated.finish().unwrap();
    assert_eq!(mapping::find(guest.process.id(), place.ram.identity()).unwrap().len(), 1);
}

/// `cargo test -p hearth-memory -- --ignored --nocapture measures`: the cost of admission for a guest that never waits
/// for memory.
#[test]
#[ignore = "a measurement"]
fn measures_touching_1_gib_with_and_without_admission() {
    const BYTES: u64 = 1 << 30;
    for round in 0..5 {
        for gate in [false, true] {
            let folder = tempfile::tempdir_in("/dev/shm").unwrap();
            let ram = RamFile::create(&folder.path().join("ram-1"), BYTES).unwrap();
            let mut guest = Guest::start(&ram);
            let gated = gate.then(|| Arc::new(GatedRam::register(&guest.userfault, &ram, UNIT_BYTES).unwrap()));
            let server = gated.as_ref().map(|gated| serve(gated, usize::MAX));
            let began = Instant::now();
            guest.touch(0..BYTES);
            guest.done();
            let took = began.elapsed();
            let waits = gated.as_ref().map_or(Waits::default(), |gated| gated.waits());
            println!("round {round}, gate {gate}: {took:?}, {waits:?}");
            if let (Some(gated), Some((_, server))) = (gated, server) {
                gated.stop();
                server.join().unwrap().unwrap();
            }
        }
    }
}
