//! Source: one dead incarnation in the ember: its RAM, the claims on its pages, and the order in which they are given
//! up.

use std::ops::Range;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::{Arc, Mutex};

use hearth_disk::block::{BLOCK_BYTES, DiskId, RamPage};
use hearth_disk::ledger::Ledger;
use hearth_disk::tag::{Tag, Tagger};
use hearth_disk::warm::AfterServing;
use hearth_memory::{MemoryError, PAGE_BYTES, RamFile, RamView};

use super::Counters;
use crate::hold::Hold;
use crate::incarnation::{file_residency_bytes, lock};

pub(super) struct Source {
    pub(super) incarnation: u32,
    pub(super) ram: Arc<RamFile>,
    pub(super) view: RamView,
    pub(super) ledger: Arc<Mutex<Ledger>>,
    /// Pages that a dump still needs.
    pub(super) hold: Option<Arc<Hold>>,
    /// Pages in the order they are given up, oldest first; `None` until `settle`.
    pub(super) trim_order: Option<Vec<u32>>,
    /// How many entries of `trim_order` `trim` has handled.
    pub(super) trimmed: usize,
    /// Pages that `trim` passed over because they were held: the next `trim_order`.
    pub(super) passed_over: Vec<u32>,
    /// Number of held pages when only held ones were left: until it changes there is nothing to trim.
    pub(super) stuck_at: Option<u64>,
    /// How many pages `assay` has handled.
    pub(super) assayed: u32,
    /// Pages that left the ledger and are not released yet.
    pub(super) released: Vec<u32>,
}

impl Source {
    pub(super) fn remaining(&self) -> u64 {
        lock(&self.ledger).len() as u64
    }

    pub(super) fn resident_bytes(&self) -> Result<u64, MemoryError> {
        Ok(self.ram.residency_bytes()? + file_residency_bytes(lock(&self.ledger).path()))
    }

    /// Whether all that is not a block of a disk was released.
    pub(super) fn is_settled(&self) -> bool {
        self.trim_order.is_some()
    }

    pub(super) fn is_held(&self) -> bool {
        self.hold.as_ref().is_some_and(|hold| !hold.is_empty())
    }

    /// Whether its dump is not over yet, so that its files are needed.
    pub(super) fn is_dumped(&self) -> bool {
        self.hold.as_ref().is_some_and(|hold| !hold.is_over())
    }

    /// Bytes that wait to be dumped. Pages that the guest never touched are held as well, but take no memory.
    pub(super) fn held_bytes(&self) -> u64 {
        let held_bytes = self.hold.as_ref().map_or(0, |hold| hold.count() * PAGE_BYTES);
        self.ram.residency_bytes().map_or(held_bytes, |resident_bytes| held_bytes.min(resident_bytes))
    }

    fn holds(&self, page: u32) -> bool {
        self.hold.as_ref().is_some_and(|hold| hold.holds(u64::from(page)))
    }

    pub(super) fn claims(&self) -> Claims {
        (self.ram.clone(), self.ledger.clone(), self.hold.clone())
    }

    /// Takes those of the released pages that no dump needs. The others go when the dump lets go of them
    /// (`Ember::let_go`).
    pub(super) fn take_released(&mut self) -> Vec<u32> {
        let mut released = std::mem::take(&mut self.released);
        released.retain(|&page| !self.holds(page));
        released
    }

    pub(super) fn forget_everything(&mut self) {
        let mut ledger = lock(&self.ledger);
        let pages: Vec<_> = ledger.entries().map(|entry| entry.page).collect();
        for page in pages {
            ledger.forget_page(page);
            self.released.push(page.0);
        }
    }

    pub(super) fn is_assayed(&self) -> bool {
        self.assayed >= lock(&self.ledger).ram_pages()
    }

    pub(super) fn serve(
        &mut self,
        disk: DiskId,
        block: u64,
        after: AfterServing,
        tagger: &Tagger,
        counters: &Counters,
        copy: &mut dyn FnMut(&[u8; BLOCK_BYTES]),
    ) -> Option<Tag> {
        let mut ledger = lock(&self.ledger);
        let entry = ledger.find(disk, block)?;
        let bytes = copy_of(&self.view, entry.page);
        if tagger.tag(&bytes) != entry.tag {
            ledger.forget_page(entry.page);
            self.released.push(entry.page.0);
            counters.tag_mismatch.fetch_add(1, Relaxed);
            return None;
        }
        copy(&bytes);
        match after {
            AfterServing::Release => {
                ledger.forget_page(entry.page);
                self.released.push(entry.page.0);
                counters.served.fetch_add(1, Relaxed);
            }
            AfterServing::Keep => {
                counters.served_in_part.fetch_add(1, Relaxed);
            }
        }
        Some(entry.tag)
    }

    pub(super) fn forget(&mut self, disk: DiskId, blocks: Range<u64>) -> u64 {
        let mut ledger = lock(&self.ledger);
        let count = blocks.end.saturating_sub(blocks.start);
        // A discard may cover the whole disk: then the ledger is shorter than the range.
        let pages: Vec<RamPage> = if count > ledger.len() as u64 {
            let inside = |entry: &hearth_disk::ledger::Entry| entry.disk == disk && blocks.contains(&entry.block);
            ledger.entries().filter(inside).map(|entry| entry.page).collect()
        } else {
            blocks.filter_map(|block| ledger.find(disk, block)).map(|entry| entry.page).collect()
        };
        for &page in &pages {
            ledger.forget_page(page);
            self.released.push(page.0);
        }
        pages.len() as u64
    }

    pub(super) fn assay(&mut self, pages: u32, tagger: &Tagger, counters: &Counters) -> u32 {
        let mut ledger = lock(&self.ledger);
        let (mut tested, end) = (0, ledger.ram_pages());
        while tested < pages && self.assayed < end {
            let page = RamPage(self.assayed);
            self.assayed += 1;
            let Some(entry) = ledger.entry(page) else { continue };
            tested += 1;
            if tagger.tag(&copy_of(&self.view, page)) != entry.tag {
                ledger.forget_page(page);
                self.released.push(page.0);
                counters.tag_mismatch.fetch_add(1, Relaxed);
            }
        }
        tested
    }

    /// Gives up pages that only the ledger claims: a held page would free no memory.
    pub(super) fn trim(&mut self, pages: u64) -> u64 {
        if self.is_stuck() {
            return 0;
        }
        // Before `settle` has run the order is unknown; then the lowest pages go, which is as good as any.
        let order = match self.trim_order.take() {
            Some(order) => order,
            None => return self.trim_unsettled(pages),
        };
        let mut given_up = 0;
        while given_up < pages && self.trimmed < order.len() {
            let page = order[self.trimmed];
            self.trimmed += 1;
            if self.holds(page) {
                self.passed_over.push(page);
            } else {
                given_up += self.give_up(page);
            }
        }
        let over = self.trimmed == order.len() && !self.passed_over.is_empty();
        self.trim_order = Some(if over { std::mem::take(&mut self.passed_over) } else { order });
        if over {
            self.trimmed = 0;
        }
        if over && given_up == 0 {
            self.stuck_at = self.hold.as_ref().map(|hold| hold.count());
        }
        given_up
    }

    /// The memory monitor asks every 2 ms: visiting all pages each time would hold up the disks.
    fn is_stuck(&self) -> bool {
        self.stuck_at.is_some() && self.stuck_at == self.hold.as_ref().map(|hold| hold.count())
    }

    fn trim_unsettled(&mut self, pages: u64) -> u64 {
        let unsorted: Vec<u32> = {
            let ledger = lock(&self.ledger);
            let pages_of_ledger = ledger.entries().map(|entry| entry.page.0);
            pages_of_ledger.filter(|&page| !self.holds(page)).take(pages as usize).collect()
        };
        unsorted.into_iter().map(|page| self.give_up(page)).sum()
    }

    /// Returns 1 if the ledger named the page, else 0.
    fn give_up(&mut self, page: u32) -> u64 {
        let mut ledger = lock(&self.ledger);
        if ledger.entry(RamPage(page)).is_none() {
            return 0;
        }
        ledger.forget_page(RamPage(page));
        self.released.push(page);
        1
    }
}

/// Copy of the page at one moment: the bytes that are tested are the bytes that are served. Its QEMU is gone, but a
/// process to which that QEMU gave the file may still write to it.
fn copy_of(view: &RamView, page: RamPage) -> [u8; BLOCK_BYTES] {
    let mut bytes = [0; BLOCK_BYTES];
    view.copy_page(u64::from(page.0), &mut bytes);
    bytes
}

/// Everything that may claim a page of a dead incarnation.
pub(super) type Claims = (Arc<RamFile>, Arc<Mutex<Ledger>>, Option<Arc<Hold>>);

/// Punches those of the pages that neither the ledger names nor a dump needs, in runs. Returns the bytes released. They
/// are measured, because punching a page that the guest never touched frees nothing.
pub(super) fn release_strangers(
    ram: &RamFile,
    ledger: &Mutex<Ledger>,
    hold: Option<&Hold>,
    pages: Range<u64>,
) -> Result<u64, MemoryError> {
    let before = ram.residency_bytes()?;
    let free = hold.map_or(vec![pages.clone()], |hold| hold.free_in(pages));
    for run in free {
        release_unnamed(ram, ledger, run.start as u32..run.end as u32)?;
    }
    Ok(before.saturating_sub(ram.residency_bytes()?))
}

/// Punches every page that the ledger does not name, in runs.
fn release_unnamed(ram: &RamFile, ledger: &Mutex<Ledger>, pages: Range<u32>) -> Result<(), MemoryError> {
    let (mut next, end) = (pages.start, pages.end);
    while next < end {
        let run = {
            let ledger = lock(ledger);
            let start = (next..end).find(|&page| ledger.entry(RamPage(page)).is_none()).unwrap_or(end);
            let stop = (start..end).find(|&page| ledger.entry(RamPage(page)).is_some()).unwrap_or(end);
            start..stop
        };
        if !run.is_empty() {
            ram.release(u64::from(run.start)..u64::from(run.end))?;
        }
        next = run.end;
    }
    Ok(())
}

/// Pages oldest first; pages of one age by number, so that punches come in runs.
pub(crate) fn trim_order(ledger: &Ledger) -> Vec<u32> {
    let mut pages: Vec<_> = ledger.entries().map(|entry| (entry.age, entry.page.0)).collect();
    pages.sort_unstable_by(|one, other| ledger.older_first(one.0, other.0).then(one.1.cmp(&other.1)));
    pages.into_iter().map(|(_, page)| page).collect()
}
