//! Crash recovery: the dump is written while the next guest already serves.
//!
//! ```text
//!   guest crashed
//!        | harvest: registers and notes, 1 ms, from the QEMU that holds the guest still
//!        v
//!   QEMU ends ----> drain, bank, attach, launch, settle (as in warm reboot): the next guest boots
//!        |
//!        +--------> plan: what is each page? what the dump leaves out comes free
//!                     | write, chunk by chunk: what is in the file comes free
//!                     v
//!                   finish: the file is complete, nothing is held
//! ```
//! Point of no return: the end of QEMU, after which there are no registers; without them the dump is made all the same.
//! Nothing here waits for the dump but memory: the dead RAM has two claimants, the ledger (clean disk blocks) and the dump
//! (`Hold`), and a page goes back to the host when neither wants it. A fault in `plan` makes the dump larger, a fault in
//! `write` or `finish` makes it wait for a person; none touches the next guest.

use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use hearth_memory::{FileOffset, GuestPhysicalAddress, Layout, MemoryError, PAGE_BYTES};

use crate::ember::Ember;
use crate::hold::Hold;
use crate::vmcore::linux::{ClassCounts, Classification, Linux, NotUnderstood, Utsname, log};
use crate::vmcore::{Bitmap, DumpLevel, PhysicalMemory};

/// How long a QEMU may take to say its guest's registers. It takes 1 ms, and 5 ms at worst; one that hangs must not keep
/// the next guest waiting.
pub const HARVEST_PATIENCE: Duration = Duration::from_secs(2);
/// Of a panic message, which the guest wrote.
const PANIC_CHARS_MAX: usize = 300;

/// Steps of a dump, in order; the same words in events, metrics and `hearth explain`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Phase {
    /// Registers and notes are taken from QEMU.
    Harvest,
    /// The guest's own page descriptors say what the dump leaves out.
    Plan,
    /// Memory goes into the file and back to the host.
    Write,
    /// The file becomes complete.
    Finish,
}

impl Phase {
    pub const ALL: [Self; 4] = [Self::Harvest, Self::Plan, Self::Write, Self::Finish];

    pub fn name(self) -> &'static str {
        match self {
            Self::Harvest => "harvest",
            Self::Plan => "plan",
            Self::Write => "write",
            Self::Finish => "finish",
        }
    }
}

/// What is to be said of a dead guest's memory before it is dumped.
#[derive(Clone, Debug)]
pub struct Judgement {
    /// What the dump keeps, and why not the rest.
    pub pages: Classification,
    /// As asked, or less where the guest's kernel was not understood.
    pub level: DumpLevel,
    pub utsname: Option<Utsname>,
    /// Text of the kernel's VMCOREINFO, wherever it was found.
    pub vmcoreinfo: Option<Vec<u8>>,
    /// The guest's own last words.
    pub panic: Option<String>,
    /// Why more is kept than was asked, or less is known.
    pub warnings: Vec<String>,
}

/// Asks a dead guest's kernel. `notes` are what QEMU gave; none are fine. Never fails: what is not understood is kept.
pub fn judge(memory: &impl PhysicalMemory, notes: &[u8], level: DumpLevel) -> Judgement {
    let linux = match Linux::find(memory, notes) {
        Ok(linux) => linux,
        Err(error) => return not_understood(memory, level, &error),
    };
    let mut judgement = match linux.classify(level) {
        Ok(pages) => Judgement { pages, level, ..not_judged(memory, level) },
        Err(error) => not_understood(memory, level, &error),
    };
    let ClassCounts { unjudged, undescribed, .. } = judgement.pages.counts;
    let mut kept = |pages: u64, why: &str| {
        if pages > 0 {
            judgement.warnings.push(format!("{pages} pages are kept whatever they hold: {why}"));
        }
    };
    kept(unjudged, "their page descriptors cannot be read or make no sense");
    kept(undescribed, "the guest's kernel does not use that memory (`mem=`, or taken offline)");
    judgement.utsname = linux.utsname();
    judgement.vmcoreinfo = Some(linux.vmcoreinfo().text().to_vec());
    judgement.panic = match linux.log() {
        Ok(lines) => log::panic_reason(&lines).map(printable),
        Err(error) => {
            judgement.warnings.push(format!("the kernel log cannot be read: {error}"));
            None
        }
    };
    judgement
}

fn not_judged(memory: &impl PhysicalMemory, level: DumpLevel) -> Judgement {
    let pages = Classification::everything(memory);
    Judgement { pages, level, utsname: None, vmcoreinfo: None, panic: None, warnings: Vec::new() }
}

fn not_understood(memory: &impl PhysicalMemory, level: DumpLevel, error: &NotUnderstood) -> Judgement {
    let mut judgement = not_judged(memory, level);
    if level.needs_classification() {
        judgement.level = if level.excludes_zero() { DumpLevel::NOT_ZERO } else { DumpLevel::ALL };
        let kept = judgement.level.number();
        judgement.warnings.push(format!("everything is dumped (level {kept}): {error}"));
    }
    judgement
}

/// Of what a guest says only what a terminal can show.
fn printable(text: &str) -> String {
    text.chars().map(|letter| if letter.is_control() { ' ' } else { letter }).take(PANIC_CHARS_MAX).collect()
}

/// A dump's claim on dead memory, given up as the dump goes on. Page frames are the guest's.
#[derive(Clone)]
pub struct Claim {
    ember: Arc<Ember>,
    hold: Arc<Hold>,
    incarnation: u32,
    layout: Layout,
    ram_pages: u64,
}

impl Claim {
    /// On an incarnation that was banked with this hold.
    pub fn new(ember: Arc<Ember>, hold: Arc<Hold>, incarnation: u32, layout: Layout, ram_pages: u64) -> Self {
        Self { ember, hold, incarnation, layout, ram_pages }
    }

    /// Nothing but these page frames is needed. Returns the bytes that come free at once.
    pub fn narrow(&self, kept: &Bitmap) -> Result<u64, MemoryError> {
        let mut pages = Bitmap::new(self.ram_pages);
        for run in kept.runs() {
            file_pages(&self.layout, run).into_iter().for_each(|run| pages.set_range(run));
        }
        self.hold.narrow(&pages);
        self.ember.let_go(self.incarnation, 0..self.ram_pages)
    }

    /// These page frames are in the file, or are left out.
    pub fn written(&self, pfns: Range<u64>) -> Result<u64, MemoryError> {
        let mut released_bytes = 0;
        for run in file_pages(&self.layout, pfns) {
            self.hold.let_go(run.clone());
            released_bytes += self.ember.let_go(self.incarnation, run)?;
        }
        Ok(released_bytes)
    }

    /// Nothing is needed any more, dumped or not.
    pub fn end(&self) -> Result<u64, MemoryError> {
        self.hold.end();
        let released_bytes = self.ember.let_go(self.incarnation, 0..self.ram_pages)?;
        // Its files, too, if it is no ember.
        self.ember.sweep()?;
        Ok(released_bytes)
    }

    /// Host memory that is not released yet.
    pub fn held_bytes(&self) -> u64 {
        self.ember.held_bytes_of(self.incarnation)
    }
}

/// The pages of the RAM file that hold these page frames. What is no RAM has none.
fn file_pages(layout: &Layout, pfns: Range<u64>) -> Vec<Range<u64>> {
    let pfn = |address: GuestPhysicalAddress| address.0 / PAGE_BYTES;
    let inside = |range: Range<GuestPhysicalAddress>| {
        let run = pfns.start.max(pfn(range.start))..pfns.end.min(pfn(range.end));
        let FileOffset(first) = layout.offset_of(range.start)?;
        let shift = |pfn_inside: u64| first / PAGE_BYTES + (pfn_inside - pfn(range.start));
        (run.start < run.end).then(|| shift(run.start)..shift(run.end))
    };
    layout.ranges().into_iter().filter_map(inside).collect()
}

#[cfg(test)]
mod tests {
    use hearth_disk::tag::Tagger;

    use super::*;
    use crate::incarnation::Incarnation;
    use crate::vmcore::DeadRam;

    const GIB_PAGES: u64 = (1 << 30) / PAGE_BYTES;

    #[test]
    fn page_frames_above_4_gib_lie_lower_in_the_file() {
        let layout = Layout::q35(3 << 30);
        assert_eq!(file_pages(&layout, 10..20), [Range { start: 10, end: 20 }]);
        assert_eq!(file_pages(&layout, 3 * GIB_PAGES..4 * GIB_PAGES), []);
        assert_eq!(file_pages(&layout, GIB_PAGES..u64::MAX), [GIB_PAGES..2 * GIB_PAGES, 2 * GIB_PAGES..3 * GIB_PAGES]);
    }

    /// 3 GiB, in two parts; one page in each holds something.
    fn dead(folder: &tempfile::TempDir) -> (Incarnation, [u64; 2]) {
        use std::os::unix::fs::FileExt;
        let dead = Incarnation::create(folder.path(), 1, 3 << 30, true).unwrap();
        let pages = [5, 2 * GIB_PAGES + 5];
        let file = std::fs::File::options().write(true).open(dead.ram.path()).unwrap();
        pages.iter().for_each(|page| file.write_all_at(&[1; 4096], page * PAGE_BYTES).unwrap());
        (dead, pages)
    }

    #[test]
    fn memory_comes_free_as_it_is_written_in_both_parts_of_ram() {
        let folder = tempfile::tempdir_in("/dev/shm").unwrap();
        let (dead, pages) = dead(&folder);
        let (ram, hold) = (dead.ram.clone(), Arc::new(Hold::everything(dead.ram.pages())));
        let ember = Arc::new(Ember::new(folder.path(), Tagger::new(b"a key like noise")));
        ember.bank_held(dead, hold.clone()).unwrap();
        ember.settle().unwrap();
        let claim = Claim::new(ember.clone(), hold, 1, Layout::q35(3 << 30), ram.pages());
        let above = 4 * GIB_PAGES;
        claim.narrow(&Bitmap::of(above + GIB_PAGES, &[0..10, above..above + 10])).unwrap();
        assert_eq!(claim.held_bytes(), 2 * PAGE_BYTES, "of 20 pages two hold something");
        assert_eq!(claim.written(above..above + 512).unwrap(), PAGE_BYTES);
        assert_eq!(ram.resident_ranges().unwrap(), [Range { start: pages[0], end: pages[0] + 1 }]);
        // All that is left is to give the file its name: a keeper that dies now is followed by one that looks for this.
        assert_eq!(claim.written(0..10).unwrap(), PAGE_BYTES);
        ember.sweep().unwrap();
        assert!(ram.path().exists() && !ember.is_held());
        claim.end().unwrap();
        assert!(!ram.path().exists());
    }

    #[test]
    fn memory_without_a_linux_is_kept_whole_and_says_why() {
        let folder = tempfile::tempdir_in("/dev/shm").unwrap();
        let (dead, _) = dead(&folder);
        let memory = DeadRam::new(dead.ram, Layout::q35(3 << 30));
        let check = |asked: u8, level: u8, warned: bool| {
            let judgement = judge(&memory, &[], DumpLevel::new(asked).unwrap());
            assert_eq!(judgement.pages.kept.count(), 3 * GIB_PAGES);
            assert_eq!((judgement.level.number(), !judgement.warnings.is_empty()), (level, warned), "{judgement:?}");
        };
        check(31, 1, true);
        check(16, 0, true);
        check(1, 1, false);
        check(0, 0, false);
    }

    #[test]
    fn what_a_guest_says_is_cut_and_cleaned() {
        assert_eq!(printable("a\x1b[2Jb\nc"), "a [2Jb c");
        assert_eq!(printable(&"x".repeat(1000)).len(), PANIC_CHARS_MAX);
    }
}
