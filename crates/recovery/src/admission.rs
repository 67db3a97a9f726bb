//! Admission: grants the living guest memory only as the budget allows, while dead memory cannot be freed fast enough.
//!
//! first touch of a unit (page fault of QEMU, request of a disk) -> does it fit the budget? -> trim the ember -> grant
//! it, or make the requester wait -> all memory fits, or the dump has let go: admission ends
//!
//! Each request checks for that end, and so does the memory monitor (`review`): a guest that asks for nothing more
//! would otherwise never end admission.
//!
//! The memory monitor alone is not enough: between two checks a guest takes any amount, and pages not yet dumped cannot
//! be trimmed. Admission alone is not enough either: the monitor trims the ember ahead of the guest, so that the guest
//! does not wait for a hole punch.
//!
//! The charge includes each granted unit as a whole, because the guest may fill it without asking. It also includes the
//! whole ledger, what the machine's other memory files hold now, and what other parts of the keeper have reserved. It does
//! not include the boot set and NVRAM, whose sizes are configured on top of RAM and slack.
//!
//! No thread that waits here holds up what frees memory: the dump reads dead memory and writes to a file of the host. A
//! grant is never taken back, and all grants fit once the dead memory is gone, as long as the machine's other memory
//! files fit into the slack. Then every wait ends unless the dump stalls, which the operator is told (`stalled_for`).

use std::fs;
use std::io;
use std::ops::Range;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use hearth_disk::gate::{Gate, RamGate};
use hearth_disk::{boot_set, nvram};
use hearth_memory::MemoryError;
use hearth_memory::faults::Userfault;
use hearth_memory::faults::admission::{AdmissionError, GatedRam, UNIT_BYTES, Verdict, Waits};

use crate::budget::Budget;
use crate::ember::Ember;
use crate::incarnation::{Incarnation, ledger_path, lock};

/// Pause before the ember is asked again. One with nothing to trim may have visited each of its pages.
const TRIM_AGAIN: Duration = Duration::from_millis(50);

/// Facts on which admission decides.
#[derive(Clone)]
pub struct AdmissionInputs {
    /// Folder of all memory files of the machine.
    pub folder: PathBuf,
    /// Limits of the machine's memory.
    pub budget: Budget,
    /// Dead memory, which is given up for the guest.
    pub ember: Arc<Ember>,
    /// If set, admission ends as soon as no dump holds dead memory. If not, it also lasts while an ember does not fit.
    pub only_for_dumps: bool,
}

/// Grants memory to one incarnation under one QEMU.
pub struct Admission {
    terms: AdmissionInputs,
    live: Incarnation,
    ram: GatedRam,
    ledger_bytes: u64,
    /// Memory outside of the folder that counts as well, in bytes.
    reserved_bytes: AtomicU64,
    /// Locked while a unit is decided, so that one thread at a time counts free memory.
    shortage: Mutex<Shortage>,
}

#[derive(Default)]
struct Shortage {
    /// When the first request was refused since the last grant.
    since: Option<Instant>,
    /// When the ember last had nothing to trim.
    trimmed_in_vain: Option<Instant>,
}

impl Admission {
    /// Starts admission: from now on each first touch of a unit needs a grant. QEMU must be stopped.
    pub fn register(terms: AdmissionInputs, live: &Incarnation, userfault: &Userfault) -> Result<Self, AdmissionError> {
        let ram = GatedRam::register(userfault, &live.ram, UNIT_BYTES)?;
        Ok(Self::new(terms, live, ram))
    }

    /// Continues the admission of a keeper that died. Returns `None` if everything has been granted.
    pub fn resume(
        terms: AdmissionInputs,
        live: &Incarnation,
        userfault: &Userfault,
    ) -> Result<Option<Self>, AdmissionError> {
        let ram = GatedRam::resume(userfault, &live.ram, UNIT_BYTES)?;
        Ok(ram.map(|ram| Self::new(terms, live, ram)))
    }

    fn new(terms: AdmissionInputs, live: &Incarnation, ram: GatedRam) -> Self {
        // Its length counts, because it fills without asking as the guest reads.
        let ledger = fs::metadata(ledger_path(&terms.folder, live.number));
        let ledger_bytes = ledger.map_or(0, |ledger| ledger.len());
        let reserved_bytes = AtomicU64::new(0);
        Self { terms, live: live.clone(), ram, ledger_bytes, reserved_bytes, shortage: Mutex::default() }
    }

    /// Serves QEMU's page faults until `stop`, until QEMU ends, or until everything is granted. Calls `waits` each time
    /// that a fault has to wait.
    pub fn serve(&self, mut waits: impl FnMut(&Self)) -> Result<(), AdmissionError> {
        self.ram.serve(|unit| {
            let verdict = self.ask(unit)?;
            if verdict == Verdict::Wait {
                waits(self);
            }
            Ok(verdict)
        })
    }

    /// Makes `serve` return.
    pub fn stop(&self) {
        self.ram.stop();
    }

    /// Grants all memory, whatever the budget says.
    pub fn finish(&self) -> Result<(), AdmissionError> {
        let _deciding = lock(&self.shortage);
        self.ram.finish()
    }

    /// Whether all memory is granted.
    pub fn is_over(&self) -> bool {
        self.ram.is_finished()
    }

    /// Ends admission if it is no longer needed. The memory monitor calls this regularly, because the guest may never
    /// ask again.
    pub fn review(&self) -> Result<(), AdmissionError> {
        let mut shortage = lock(&self.shortage);
        if self.is_over() {
            return Ok(());
        }
        let has_let_go = self.terms.only_for_dumps && !self.terms.ember.is_held();
        if has_let_go || self.could_hold_all(self.others_bytes()?) {
            self.ram.finish()?;
            *shortage = Shortage::default();
        }
        Ok(())
    }

    /// Ends admission by trimming the ember, for an operation that needs all memory granted. Returns false if a dump or
    /// another file of the folder holds what is missing.
    pub fn end_for_ember(&self) -> Result<bool, AdmissionError> {
        self.review()?;
        let shortage = lock(&self.shortage);
        if !self.is_over() && !self.terms.ember.is_held() {
            let missing = self.all_bytes(self.others_bytes()?).saturating_sub(self.limit_bytes());
            self.terms.ember.trim(missing)?;
        }
        drop(shortage);
        self.review()?;
        Ok(self.is_over())
    }

    /// Sets how many bytes of the keeper's own memory count, such as a dump's buffers.
    pub fn reserve(&self, bytes: u64) {
        self.reserved_bytes.store(bytes, Relaxed);
    }

    /// Maximum that the living incarnation's files can hold under the present grants, in bytes.
    pub fn committed_bytes(&self) -> u64 {
        self.ram.committed_bytes() + self.ledger_bytes
    }

    /// Bytes granted so far.
    pub fn granted_bytes(&self) -> u64 {
        self.ram.granted_bytes()
    }

    /// Numbers of requests that wait or have waited for a grant.
    pub fn waits(&self) -> Waits {
        self.ram.waits()
    }

    /// Whether a request still waits for its grant.
    pub fn is_waited_for(&self) -> bool {
        !self.is_over() && (self.waits().waiting > 0 || !self.stalled_for().is_zero())
    }

    /// Time since the first refusal after the last grant; zero if there was none.
    pub fn stalled_for(&self) -> Duration {
        lock(&self.shortage).since.map_or(Duration::ZERO, |since| since.elapsed())
    }

    /// Gate that the machine's disks ask before they touch guest memory.
    pub fn gate(self: &Arc<Self>) -> Gate {
        let (ram_device, ram_inode) = self.live.ram.identity();
        Gate { ram_device, ram_inode, keeper: self.clone() }
    }

    /// Grants the unit if it fits the budget, at once or after trimming.
    fn ask(&self, unit: usize) -> Result<Verdict, AdmissionError> {
        let mut shortage = lock(&self.shortage);
        let charge = self.ram.charge_bytes(unit);
        if charge > 0 {
            let others = self.others_bytes()?;
            if self.could_hold_all(others) {
                self.ram.finish()?;
                *shortage = Shortage::default();
                return Ok(Verdict::Granted);
            }
            let missing = self.missing_bytes(charge, others);
            if missing > 0 && (!self.trim(missing, &mut shortage)? || self.is_short(charge)?) {
                shortage.since.get_or_insert_with(Instant::now);
                return Ok(Verdict::Wait);
            }
        }
        self.ram.grant(unit)?;
        shortage.since = None;
        Ok(Verdict::Granted)
    }

    /// Trims the ember. Returns whether it gave up anything.
    fn trim(&self, bytes: u64, shortage: &mut Shortage) -> Result<bool, MemoryError> {
        if shortage.trimmed_in_vain.is_some_and(|then| then.elapsed() < TRIM_AGAIN) {
            return Ok(false);
        }
        let trimmed = self.terms.ember.trim(bytes)? > 0;
        shortage.trimmed_in_vain = (!trimmed).then(Instant::now);
        Ok(trimmed)
    }

    fn is_short(&self, charge: u64) -> Result<bool, AdmissionError> {
        Ok(self.missing_bytes(charge, self.others_bytes()?) > 0)
    }

    fn missing_bytes(&self, charge: u64, others: u64) -> u64 {
        (self.committed_bytes() + charge + others).saturating_sub(self.limit_bytes())
    }

    /// Whether all memory fits: then nothing is left to decide.
    fn could_hold_all(&self, others: u64) -> bool {
        self.all_bytes(others) <= self.limit_bytes()
    }

    /// Bytes that the machine's files hold when the guest has all its memory.
    fn all_bytes(&self, others: u64) -> u64 {
        self.live.ram.bytes() + self.ledger_bytes + others
    }

    fn limit_bytes(&self) -> u64 {
        self.terms.budget.limit_bytes(self.terms.ember.is_held())
    }

    /// Bytes held by everything except the living incarnation's files, the boot set and NVRAM.
    fn others_bytes(&self) -> Result<u64, MemoryError> {
        let folder = &self.terms.folder;
        let ours = [self.live.ram.path().to_owned(), ledger_path(folder, self.live.number)];
        let files = files_bytes(folder, &ours);
        let files = files.map_err(|source| MemoryError::Measure { path: folder.clone(), source })?;
        let is_held = self.terms.ember.is_held();
        Ok(files + self.terms.budget.buffer_bytes(self.reserved_bytes.load(Relaxed), is_held))
    }
}

impl RamGate for Admission {
    fn is_granted(&self, file: Range<u64>) -> bool {
        self.ram.units_of(file).all(|unit| self.ram.is_granted(unit))
    }

    fn admit(&self, file: Range<u64>) -> bool {
        // An error that means QEMU's end needs no report, because its requests end with it. The faults' own thread
        // meets and reports every other error.
        self.ram.units_of(file).all(|unit| self.ram.is_granted(unit) || matches!(self.ask(unit), Ok(Verdict::Granted)))
    }
}

/// Bytes of host memory that a folder's files hold, except the named ones and those on top of the budget. Files come and go
/// meanwhile.
fn files_bytes(folder: &Path, but: &[PathBuf]) -> io::Result<u64> {
    let on_top = [boot_set::FILE_PREFIX, nvram::FILE_PREFIX].map(str::as_bytes);
    let mut total = 0;
    for entry in fs::read_dir(folder)? {
        let entry = entry?;
        let name = entry.file_name();
        if on_top.iter().any(|prefix| name.as_bytes().starts_with(prefix)) {
            continue;
        }
        match entry.metadata() {
            Ok(_) if but.contains(&entry.path()) => {}
            Ok(file) => total += file.blocks() * 512,
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            Err(error) => return Err(error),
        }
    }
    Ok(total)
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::os::unix::fs::FileExt;

    use hearth_disk::block::{BLOCK_BYTES, DiskId, RamPage};
    use hearth_disk::tag::Tagger;
    use hearth_memory::PAGE_BYTES;
    use rustix::mm::{MapFlags, ProtFlags, UserfaultfdFlags, mmap, userfaultfd};

    use super::*;
    use crate::hold::Hold;

    const MIB: u64 = 1 << 20;
    const BUDGET: Budget =
        Budget { ram_bytes: 16 * MIB, slack_bytes: MIB, headroom_bytes: 5 * MIB, dump_buffer_bytes: MIB };
    const BYTES: [u8; BLOCK_BYTES] = [7; BLOCK_BYTES];

    /// A machine whose QEMU is this test process.
    struct Machine {
        admission: Admission,
        ember: Arc<Ember>,
        folder: tempfile::TempDir,
        most_bytes: u64,
    }

    impl Machine {
        /// An ember with `dead_mib` of disk blocks, and `ballast_mib` in a file that nobody frees.
        fn new(dead_mib: u64, ballast_mib: u64) -> Self {
            Self::held(dead_mib, ballast_mib, None)
        }

        /// Same as `new`, but a dump holds the dead incarnation.
        fn held(dead_mib: u64, ballast_mib: u64, hold: Option<Arc<Hold>>) -> Self {
            Self::with(dead_mib, ballast_mib, hold, false)
        }

        fn with(dead_mib: u64, ballast_mib: u64, hold: Option<Arc<Hold>>, only_for_dumps: bool) -> Self {
            let folder = tempfile::tempdir_in("/dev/shm").unwrap();
            let tagger = Tagger::new(b"a key like noise");
            let ember = Arc::new(Ember::new(folder.path(), tagger.clone()));
            let dead = Incarnation::create(folder.path(), 1, BUDGET.ram_bytes, true).unwrap();
            let ram = File::options().write(true).open(dead.ram.path()).unwrap();
            for page in 0..dead_mib * MIB / PAGE_BYTES {
                ram.write_all_at(&BYTES, page * PAGE_BYTES).unwrap();
                let ledger = dead.ledger.as_ref().unwrap();
                lock(ledger).record(RamPage(page as u32), DiskId(0), page, tagger.tag(&BYTES));
            }
            let most_bytes = BUDGET.limit_bytes(hold.is_some());
            match hold {
                Some(hold) => ember.bank_held(dead, hold).unwrap(),
                None => ember.bank(dead).unwrap(),
            }
            ember.settle().unwrap();
            fs::write(folder.path().join("ballast"), vec![1; (ballast_mib * MIB) as usize]).unwrap();
            let live = Incarnation::create(folder.path(), 2, BUDGET.ram_bytes, true).unwrap();
            let terms = AdmissionInputs {
                folder: folder.path().to_owned(),
                budget: BUDGET,
                ember: ember.clone(),
                only_for_dumps,
            };
            let admission = Admission::register(terms, &live, &map_here(&live)).unwrap();
            Self { admission, ember, folder, most_bytes }
        }

        fn admit(&self, unit: u64) -> bool {
            let admitted = self.admission.admit(unit * UNIT_BYTES..unit * UNIT_BYTES + 1);
            assert_eq!(admitted, self.admission.is_granted(unit * UNIT_BYTES..(unit + 1) * UNIT_BYTES));
            let promised = self.promised_bytes();
            assert!(promised <= self.most_bytes, "{promised} bytes are promised");
            admitted
        }

        fn promised_bytes(&self) -> u64 {
            self.admission.committed_bytes() + self.admission.others_bytes().unwrap()
        }
    }

    /// Maps the RAM for the rest of the test, without touching it.
    fn map_here(live: &Incarnation) -> Userfault {
        let file = File::options().read(true).write(true).open(live.ram.path()).unwrap();
        let (protection, bytes) = (ProtFlags::READ | ProtFlags::WRITE, BUDGET.ram_bytes as usize);
        // SAFETY: a new mapping at an address of the kernel's choice touches no other memory.
        unsafe { mmap(std::ptr::null_mut(), bytes, protection, MapFlags::SHARED, &file, 0) }.unwrap();
        // SAFETY: a descriptor that acts on the mapping above only, as nothing else is registered with it.
        let fd = unsafe { userfaultfd(UserfaultfdFlags::CLOEXEC | UserfaultfdFlags::NONBLOCK) }.unwrap();
        Userfault { fd, fd_in_qemu: 0, qemu_pid: std::process::id(), helper: None }
    }

    #[test]
    fn ember_is_trimmed_before_anyone_waits() {
        let machine = Machine::new(12, 0);
        let kept = machine.ember.counts().remaining;
        assert!((0..2).all(|unit| machine.admit(unit)));
        assert_eq!(machine.ember.counts().remaining, kept, "trimmed although both fit");
        assert!((2..8).all(|unit| machine.admit(unit)));
        assert!(machine.ember.counts().remaining < kept);
        assert!(machine.admission.stalled_for().is_zero());
    }

    #[test]
    fn guest_waits_for_memory_that_cannot_be_freed() {
        let machine = Machine::new(0, 12);
        assert_eq!((0..8).map(|unit| machine.admit(unit)).filter(|&admitted| admitted).count(), 2);
        assert!(machine.admit(1), "what was granted stays granted");
        assert!(!machine.admission.stalled_for().is_zero());
        let ballast = File::options().write(true).open(machine.folder.path().join("ballast")).unwrap();
        ballast.set_len(10 * MIB).unwrap();
        assert!(machine.admit(7) && !machine.admit(6));
        machine.admission.reserve(10 * MIB);
        ballast.set_len(0).unwrap();
        assert!(!machine.admit(6), "what the keeper reserves counts as well");
        machine.admission.reserve(0);
        assert!(machine.admit(6) && machine.admission.is_over(), "everything would fit, and is still asked for");
        assert!((0..8).all(|unit| machine.admit(unit)));
    }

    #[test]
    fn guest_never_waits_for_nvram_and_boot_set() {
        for name in ["nvram-log", "boot-set-pages"] {
            let machine = Machine::new(12, 0);
            fs::write(machine.folder.path().join(name), vec![1; 4 * MIB as usize]).unwrap();
            assert!((0..8).all(|unit| machine.admit(unit)), "{name} is not the slack's");
            machine.admission.review().unwrap();
            assert!(machine.admission.is_over(), "{name}");
        }
    }

    #[test]
    fn headroom_lasts_while_a_dump_holds_memory() {
        let hold = Arc::new(Hold::everything(BUDGET.ram_bytes / PAGE_BYTES));
        let machine = Machine::held(12, 0, Some(hold.clone()));
        let admitted = || (0..8).filter(|&unit| machine.admit(unit)).count();
        assert_eq!(admitted(), 4, "of 17 MiB and 5 of headroom 12 are held and one is the dump's");
        hold.let_go(0..MIB / PAGE_BYTES);
        assert_eq!(admitted(), 4, "less than a unit came free");
        hold.end();
        // An ember that had nothing to trim is not asked again at once.
        let deadline = Instant::now() + Duration::from_secs(60);
        while admitted() < 8 {
            assert!(Instant::now() < deadline, "what came free is not granted");
        }
        assert!(machine.promised_bytes() <= BUDGET.limit_bytes(false), "the headroom outlived the dump");
    }

    #[test]
    fn admission_ends_with_the_dump_without_a_request() {
        let hold = Arc::new(Hold::everything(BUDGET.ram_bytes / PAGE_BYTES));
        let machine = Machine::with(12, 0, Some(hold.clone()), true);
        machine.admission.review().unwrap();
        assert!(!machine.admission.end_for_ember().unwrap(), "the dump holds the memory");
        let kept = machine.ember.counts().remaining;
        hold.end();
        machine.admission.review().unwrap();
        assert!(machine.admission.is_over());
        assert_eq!(machine.ember.counts().remaining, kept, "only the memory monitor trims the ember");
    }

    #[test]
    fn admission_ends_when_ember_fits_or_is_trimmed() {
        for (dead_mib, ballast_mib) in [(12, 0), (0, 12)] {
            let machine = Machine::new(dead_mib, ballast_mib);
            machine.admission.review().unwrap();
            assert!(!machine.admission.is_over());
            let ends = machine.admission.end_for_ember().unwrap();
            assert_eq!(ends, ballast_mib == 0, "what is not the ember's is nobody's to give up");
            let ballast = File::options().write(true).open(machine.folder.path().join("ballast")).unwrap();
            ballast.set_len(0).unwrap();
            machine.admission.review().unwrap();
            assert!(machine.admission.is_over() && machine.promised_bytes() <= machine.most_bytes);
        }
    }

    #[test]
    fn finish_ends_admission_despite_the_budget() {
        let machine = Machine::new(0, 16);
        assert!(!machine.admission.admit(0..1));
        machine.admission.finish().unwrap();
        assert!(machine.admission.admit(0..BUDGET.ram_bytes));
    }
}
