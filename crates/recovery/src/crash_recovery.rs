//! Crash recovery: writes the dump of a crashed guest while the next guest already runs.
//!
//! ```text
//!   guest crashed
//!       | harvest: registers and notes, 1 ms, from the QEMU that keeps the guest stopped
//!        v
//!   QEMU ends ----> drain, bank, attach, launch, settle (as in warm reboot): the next guest boots
//!        |
//!       +--------> plan: classify each page; what the dump leaves out comes free
//!                     | write, chunk by chunk: what is in the file comes free
//!                     v
//!                   finish: the file is complete, nothing is held
//! ```
//! Point of no return: the end of QEMU, after which there are no registers. A dump is made without them too. Only
//! memory waits for the dump. The dead RAM has two claimants: the ledger (clean disk blocks) and the dump (`Hold`). A
//! page goes back to the host when neither claims it. A failure in `plan` makes the dump larger. A failure in `write`
//! or `finish` leaves the dump to the operator. None affects the next guest.

use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use hearth_memory::{FileOffset, GuestPhysicalAddress, Layout, MemoryError, PAGE_BYTES, RamFile};
use plain_text::{beginning, printable};

use crate::ember::Ember;
use crate::hold::Hold;
use crate::vmcore::linux::{ClassCounts, Classification, Linux, NotUnderstood, Utsname, log};
use crate::vmcore::{Bitmap, DumpLevel, PhysicalMemory};

/// Time that QEMU may take to report its guest's registers. It takes 1 ms, and 5 ms at worst; a hung QEMU must not
/// delay the next guest.
pub const HARVEST_PATIENCE: Duration = Duration::from_secs(2);
/// Maximum length of a panic message, in characters. The guest wrote it.
const PANIC_CHARS_MAX: usize = 300;

/// Steps of a dump, in order; the same words in events, metrics and `hearth explain`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Phase {
    /// Take registers and notes from QEMU.
    Harvest,
    /// Decide by the guest's own page descriptors what the dump leaves out.
    Plan,
    /// Write memory to the file and return it to the host.
    Write,
    /// Complete the file.
    Finish,
}

impl Phase {
    /// All phases, in order.
    pub const ALL: [Self; 4] = [Self::Harvest, Self::Plan, Self::Write, Self::Finish];

    /// Name of the phase in events, metrics and `hearth explain`.
    pub fn name(self) -> &'static str {
        match self {
            Self::Harvest => "harvest",
            Self::Plan => "plan",
            Self::Write => "write",
            Self::Finish => "finish",
        }
    }
}

/// Facts about a dead guest's memory that are known before it is dumped.
#[derive(Clone, Debug)]
pub struct Assessment {
    /// Pages that the dump keeps, and counts of the pages it leaves out.
    pub pages: Classification,
    /// The requested level, or a lower one if the guest's kernel was not understood.
    pub level: DumpLevel,
    /// Name and release of the guest's kernel.
    pub utsname: Option<Utsname>,
    /// Text of the kernel's VMCOREINFO, wherever it was found.
    pub vmcoreinfo: Option<Vec<u8>>,
    /// Panic message from the guest's kernel log.
    pub panic: Option<String>,
    /// Why more is kept than requested, or what could not be read.
    pub warnings: Vec<String>,
}

/// Classifies a dead guest's memory by the data of its own kernel. `notes` come from QEMU and may be empty. Never
/// fails: pages that are not understood are kept.
pub fn judge(memory: &impl PhysicalMemory, notes: &[u8], level: DumpLevel) -> Assessment {
    let linux = match Linux::find(memory, notes) {
        Ok(linux) => linux,
        Err(error) => return not_understood(memory, level, &error),
    };
    let mut judgement = match linux.classify(level) {
        Ok(pages) => Assessment { pages, level, ..not_judged(memory, level) },
        Err(error) => not_understood(memory, level, &error),
    };
    let ClassCounts { unjudged, undescribed, .. } = judgement.pages.counts;
    let mut kept = |pages: u64, why: &str| {
        if pages > 0 {
            judgement.warnings.push(format!("{pages} pages are kept unclassified: {why}"));
        }
    };
    kept(unjudged, "their page descriptors cannot be read or make no sense");
    kept(undescribed, "the guest's kernel does not use that memory (`mem=`, or taken offline)");
    judgement.utsname = linux.utsname();
    judgement.vmcoreinfo = Some(linux.vmcoreinfo().text().to_vec());
    judgement.panic = match linux.log() {
        Ok(lines) => log::panic_reason(&lines).map(shown_reason),
        Err(error) => {
            judgement.warnings.push(format!("the kernel log cannot be read: {error}"));
            None
        }
    };
    judgement
}

fn not_judged(memory: &impl PhysicalMemory, level: DumpLevel) -> Assessment {
    let pages = Classification::everything(memory);
    Assessment { pages, level, utsname: None, vmcoreinfo: None, panic: None, warnings: Vec::new() }
}

fn not_understood(memory: &impl PhysicalMemory, level: DumpLevel, error: &NotUnderstood) -> Assessment {
    let mut judgement = not_judged(memory, level);
    if level.needs_classification() {
        judgement.level = if level.excludes_zero() { DumpLevel::NOT_ZERO } else { DumpLevel::ALL };
        let kept = judgement.level.number();
        judgement.warnings.push(format!("everything is dumped (level {kept}): {error}"));
    }
    judgement
}

/// A guest's own words for why it died, made fit for events.
fn shown_reason(text: &str) -> String {
    printable(beginning(text, PANIC_CHARS_MAX))
}

/// A dump's claim on dead memory, given up as the dump proceeds. Page frames are the guest's.
#[derive(Clone)]
pub struct Claim {
    ember: Arc<Ember>,
    hold: Arc<Hold>,
    incarnation: u32,
    layout: Layout,
    ram_pages: u64,
}

impl Claim {
    /// Claims an incarnation that was banked with this `hold`. `ram`: its RAM.
    pub fn new(ember: Arc<Ember>, hold: Arc<Hold>, incarnation: u32, ram: &RamFile) -> Self {
        Self { ember, hold, incarnation, layout: ram.layout().clone(), ram_pages: ram.pages() }
    }

    /// Gives up all page frames except `kept`. Returns the bytes that come free at once.
    pub fn narrow(&self, kept: &Bitmap) -> Result<u64, MemoryError> {
        let mut pages = Bitmap::new(self.ram_pages);
        for run in kept.runs() {
            file_pages(&self.layout, run).into_iter().for_each(|run| pages.set_range(run));
        }
        self.hold.narrow(&pages);
        self.ember.let_go(self.incarnation, 0..self.ram_pages)
    }

    /// Gives up page frames that are in the file or left out. Returns the bytes that come free.
    pub fn written(&self, pfns: Range<u64>) -> Result<u64, MemoryError> {
        let mut released_bytes = 0;
        for run in file_pages(&self.layout, pfns) {
            self.hold.let_go(run.clone());
            released_bytes += self.ember.let_go_written(self.incarnation, run)?;
        }
        Ok(released_bytes)
    }

    /// Gives up everything, dumped or not. Returns the bytes that come free.
    pub fn end(&self) -> Result<u64, MemoryError> {
        self.hold.end();
        let released_bytes = self.ember.let_go_written(self.incarnation, 0..self.ram_pages)?;
        // Removes its files too, unless they still are ember.
        self.ember.sweep()?;
        Ok(released_bytes)
    }

    /// Bytes of host memory that are still claimed.
    pub fn held_bytes(&self) -> u64 {
        self.ember.held_bytes_of(self.incarnation)
    }
}

/// RAM file pages that hold these page frames. Page frames outside of RAM have none.
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
    fn high_page_frames_lie_lower_in_the_file() {
        let layout = Layout::q35(3 << 30);
        assert_eq!(file_pages(&layout, 10..20), [Range { start: 10, end: 20 }]);
        assert_eq!(file_pages(&layout, 3 * GIB_PAGES..4 * GIB_PAGES), []);
        assert_eq!(file_pages(&layout, GIB_PAGES..u64::MAX), [GIB_PAGES..2 * GIB_PAGES, 2 * GIB_PAGES..3 * GIB_PAGES]);
    }

    /// RAM of 3 GiB in two parts, with data in one page of each.
    fn dead(folder: &tempfile::TempDir) -> (Incarnation, [u64; 2]) {
        use std::os::unix::fs::FileExt;
        let dead = Incarnation::create(folder.path(), 1, 3 << 30, true).unwrap();
        let pages = [5, 2 * GIB_PAGES + 5];
        let file = std::fs::File::options().write(true).open(dead.ram.path()).unwrap();
        pages.iter().for_each(|page| file.write_all_at(&[1; 4096], page * PAGE_BYTES).unwrap());
        (dead, pages)
    }

    #[test]
    fn both_parts_of_ram_are_freed_as_written() {
        let folder = tempfile::tempdir_in("/dev/shm").unwrap();
        let (dead, pages) = dead(&folder);
        let (ram, hold) = (dead.ram.clone(), Arc::new(Hold::everything(dead.ram.pages())));
        let ember = Arc::new(Ember::new(folder.path(), Tagger::new(b"a key like noise")));
        ember.bank_held(dead, hold.clone()).unwrap();
        ember.settle().unwrap();
        let claim = Claim::new(ember.clone(), hold, 1, &ram);
        let above = 4 * GIB_PAGES;
        claim.narrow(&Bitmap::of(above + GIB_PAGES, &[0..10, above..above + 10])).unwrap();
        assert_eq!(claim.held_bytes(), 2 * PAGE_BYTES, "of 20 pages two hold something");
        assert_eq!(claim.written(above..above + 512).unwrap(), PAGE_BYTES);
        assert_eq!(ram.resident_ranges().unwrap(), [Range { start: pages[0], end: pages[0] + 1 }]);
        // The dump file still lacks its final name. If the keeper died now, the next one would need the RAM file.
        assert_eq!(claim.written(0..10).unwrap(), PAGE_BYTES);
        ember.sweep().unwrap();
        assert!(ram.path().exists() && !ember.is_held());
        claim.end().unwrap();
        assert!(!ram.path().exists());
    }

    #[test]
    fn memory_without_linux_is_kept_with_reason() {
        let folder = tempfile::tempdir_in("/dev/shm").unwrap();
        let (dead, _) = dead(&folder);
        let memory = DeadRam::new(dead.ram);
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
    fn guest_text_is_shortened_and_cleaned() {
        assert_eq!(shown_reason("a\x1b[2Jb\nc"), "a [2Jb c");
        assert_eq!(shown_reason(&"x".repeat(1000)).len(), PANIC_CHARS_MAX);
    }
}
