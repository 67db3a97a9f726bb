//! Admission: while dead memory cannot be given up fast enough, the living guest gets memory only as the budget allows.
//!
//! a unit is touched for the first time (page fault of QEMU, request of a disk) -> does it fit into the budget? -> trim the
//! ember for it -> granted, or the one who asked waits -> everything would fit, or the dump has let go: admission is over
//!
//! That it is over is found by whoever asks, and by the warden's look (`review`): a guest that asks for nothing more would
//! keep it up for ever.
//!
//! The warden's look is not enough here: between two looks a guest takes what it likes, and what a dump has not written
//! yet cannot be trimmed in its place. Nor is admission enough for the ember: the warden makes room ahead of the guest,
//! so that it does not have to wait for a punch.
//!
//! What is charged: a granted unit whole, for the guest may fill it without a word; the ledger whole; what the other
//! memory files of the machine hold now, which can only become less; and what others of the keeper have reserved.
//!
//! Nobody who waits here holds what memory's coming free depends on: the dump reads dead memory and writes to a file of
//! the host's. A grant is never taken back, and all grants together fit once the dead memory is gone. So a wait ends,
//! unless the dump stands still; then the operator is told (`stalled_for`).

use std::fs;
use std::io;
use std::ops::Range;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use hearth_disk::gate::{Gate, RamGate};
use hearth_memory::MemoryError;
use hearth_memory::faults::Userfault;
use hearth_memory::faults::admission::{AdmissionError, GatedRam, UNIT_BYTES, Verdict, Waits};

use crate::budget::Budget;
use crate::ember::Ember;
use crate::incarnation::{Incarnation, ledger_path, lock};

/// An ember that has nothing to trim may have looked at each of its pages for that.
const TRIM_AGAIN: Duration = Duration::from_millis(50);

/// What admission is decided by.
#[derive(Clone)]
pub struct Terms {
    /// All memory files of the machine are here.
    pub folder: PathBuf,
    pub budget: Budget,
    pub ember: Arc<Ember>,
    /// Memory is granted only while a dump holds dead memory. Otherwise an ember alone is enough.
    pub only_for_dumps: bool,
}

/// Grants memory to one incarnation under one QEMU.
pub struct Admission {
    terms: Terms,
    live: Incarnation,
    ram: GatedRam,
    ledger_bytes: u64,
    /// Memory outside of the folder that counts as well.
    reserved_bytes: AtomicU64,
    /// Held while a unit is decided on: what is free is counted by one at a time.
    shortage: Mutex<Shortage>,
}

#[derive(Default)]
struct Shortage {
    /// Since when nothing was to be had.
    since: Option<Instant>,
    /// When the ember had nothing to trim.
    trimmed_in_vain: Option<Instant>,
}

impl Admission {
    /// From now on the guest asks. QEMU must hold still.
    pub fn register(terms: Terms, live: &Incarnation, userfault: &Userfault) -> Result<Self, AdmissionError> {
        let ram = GatedRam::register(userfault, &live.ram, UNIT_BYTES)?;
        Ok(Self::new(terms, live, ram))
    }

    /// Goes on where a keeper that died left off; none if nothing is left to be granted.
    pub fn resume(terms: Terms, live: &Incarnation, userfault: &Userfault) -> Result<Option<Self>, AdmissionError> {
        let ram = GatedRam::resume(userfault, &live.ram, UNIT_BYTES)?;
        Ok(ram.map(|ram| Self::new(terms, live, ram)))
    }

    fn new(terms: Terms, live: &Incarnation, ram: GatedRam) -> Self {
        // Its length: it fills as the guest reads, without asking.
        let ledger = fs::metadata(ledger_path(&terms.folder, live.number));
        let ledger_bytes = ledger.map_or(0, |ledger| ledger.len());
        let reserved_bytes = AtomicU64::new(0);
        Self { terms, live: live.clone(), ram, ledger_bytes, reserved_bytes, shortage: Mutex::default() }
    }

    /// Serves QEMU's page faults until `stop`, QEMU's end, or until nothing is left to be granted. `waits` is told each
    /// time that somebody has to wait.
    pub fn serve(&self, mut waits: impl FnMut(&Self)) -> Result<(), AdmissionError> {
        self.ram.serve(|unit| {
            let verdict = self.ask(unit)?;
            if verdict == Verdict::Wait {
                waits(self);
            }
            Ok(verdict)
        })
    }

    pub fn stop(&self) {
        self.ram.stop();
    }

    /// Grants everything, whatever the budget says.
    pub fn finish(&self) -> Result<(), AdmissionError> {
        let _deciding = lock(&self.shortage);
        self.ram.finish()
    }

    pub fn is_over(&self) -> bool {
        self.ram.is_finished()
    }

    /// Ends admission if it has become needless. To be called now and then: the guest may never ask again.
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

    /// Ends admission at the cost of the ember, for an operation that needs all memory granted. False: a dump, or another
    /// file of the folder, holds what is missing.
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

    /// Memory of the keeper's that is to count: buffers of a dump.
    pub fn reserve(&self, bytes: u64) {
        self.reserved_bytes.store(bytes, Relaxed);
    }

    /// The most that the living incarnation's files can hold as things stand.
    pub fn committed_bytes(&self) -> u64 {
        self.ram.committed_bytes() + self.ledger_bytes
    }

    pub fn granted_bytes(&self) -> u64 {
        self.ram.granted_bytes()
    }

    pub fn waits(&self) -> Waits {
        self.ram.waits()
    }

    /// Is there somebody who asked and has not got it?
    pub fn is_waited_for(&self) -> bool {
        !self.is_over() && (self.waits().waiting > 0 || !self.stalled_for().is_zero())
    }

    /// How long nothing has been granted although it was asked for.
    pub fn stalled_for(&self) -> Duration {
        lock(&self.shortage).since.map_or(Duration::ZERO, |since| since.elapsed())
    }

    /// What the disks of the machine have to ask.
    pub fn gate(self: &Arc<Self>) -> Gate {
        let (ram_device, ram_inode) = self.live.ram.identity();
        Gate { ram_device, ram_inode, keeper: self.clone() }
    }

    /// Grants the unit if the budget has it, now or after trimming.
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

    /// Has the ember given up anything?
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

    /// Then there is nothing left to decide.
    fn could_hold_all(&self, others: u64) -> bool {
        self.all_bytes(others) <= self.limit_bytes()
    }

    /// What the machine's files hold when the guest has all its memory.
    fn all_bytes(&self, others: u64) -> u64 {
        self.live.ram.bytes() + self.ledger_bytes + others
    }

    fn limit_bytes(&self) -> u64 {
        self.terms.budget.limit_bytes(self.terms.ember.is_held())
    }

    /// What everything but the living incarnation's files holds.
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
        // An error is QEMU's end: its requests end with it. What else it can be the faults' own thread meets too, and
        // tells.
        self.ram.units_of(file).all(|unit| self.ram.is_granted(unit) || matches!(self.ask(unit), Ok(Verdict::Granted)))
    }
}

/// Host memory that a folder's files hold, but for those named. Files come and go meanwhile.
fn files_bytes(folder: &Path, but: &[PathBuf]) -> io::Result<u64> {
    let mut total = 0;
    for entry in fs::read_dir(folder)? {
        let entry = entry?;
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

    /// A machine whose QEMU is this very process.
    struct Machine {
        admission: Admission,
        ember: Arc<Ember>,
        folder: tempfile::TempDir,
        most_bytes: u64,
    }

    impl Machine {
        /// `dead_mib` of disk blocks in the memory of a dead incarnation, `ballast_mib` that nobody gives up.
        fn new(dead_mib: u64, ballast_mib: u64) -> Self {
            Self::held(dead_mib, ballast_mib, None)
        }

        /// The same, while a dump holds the dead incarnation.
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
            let terms =
                Terms { folder: folder.path().to_owned(), budget: BUDGET, ember: ember.clone(), only_for_dumps };
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

    /// Maps the RAM for good: nothing of it is touched.
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
    fn the_ember_gives_way_and_nobody_waits() {
        let machine = Machine::new(12, 0);
        let kept = machine.ember.counts().remaining;
        assert!((0..2).all(|unit| machine.admit(unit)));
        assert_eq!(machine.ember.counts().remaining, kept, "trimmed although both fit");
        assert!((2..8).all(|unit| machine.admit(unit)));
        assert!(machine.ember.counts().remaining < kept);
        assert!(machine.admission.stalled_for().is_zero());
    }

    #[test]
    fn what_cannot_be_given_up_is_waited_for() {
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
    fn a_dump_that_holds_dead_memory_gives_headroom_until_it_lets_go() {
        let hold = Arc::new(Hold::everything(BUDGET.ram_bytes / PAGE_BYTES));
        let machine = Machine::held(12, 0, Some(hold.clone()));
        let admitted = || (0..8).filter(|&unit| machine.admit(unit)).count();
        assert_eq!(admitted(), 4, "of 17 MiB and 5 of headroom 12 are held and one is the dump's");
        hold.let_go(0..MIB / PAGE_BYTES);
        assert_eq!(admitted(), 4, "less than a unit came free");
        hold.end();
        // The ember that had nothing to trim is not asked again at once.
        let deadline = Instant::now() + Duration::from_secs(60);
        while admitted() < 8 {
            assert!(Instant::now() < deadline, "what came free is not granted");
        }
        assert!(machine.promised_bytes() <= BUDGET.limit_bytes(false), "the headroom outlived the dump");
    }

    #[test]
    fn admission_ends_with_the_dump_though_nobody_asks() {
        let hold = Arc::new(Hold::everything(BUDGET.ram_bytes / PAGE_BYTES));
        let machine = Machine::with(12, 0, Some(hold.clone()), true);
        machine.admission.review().unwrap();
        assert!(!machine.admission.end_for_ember().unwrap(), "the dump holds the memory");
        let kept = machine.ember.counts().remaining;
        hold.end();
        machine.admission.review().unwrap();
        assert!(machine.admission.is_over());
        assert_eq!(machine.ember.counts().remaining, kept, "the ember is the warden's to trim");
    }

    #[test]
    fn admission_for_the_ember_ends_when_it_fits_or_is_given_up() {
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
    fn admission_can_be_ended_whatever_the_budget_says() {
        let machine = Machine::new(0, 16);
        assert!(!machine.admission.admit(0..1));
        machine.admission.finish().unwrap();
        assert!(machine.admission.admit(0..BUDGET.ram_bytes));
    }
}
