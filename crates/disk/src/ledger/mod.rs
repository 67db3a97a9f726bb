//! Which disk block each page of guest RAM holds, and the tag of what is on the disk. One page a block, one block a page,
//! over all disks of the machine.
//!
//! record: drop the block's older entry, drop the page's older entry, write the new one -> find, entries
//!
//! The table (a file mapped into memory, see `table`) is the truth and survives the keeper, killed at any instruction:
//! an entry is void before its parts change and valid only when they are whole. The index from block to page (see
//! `index`) is memory of this process and rebuilt by `open`. A block that no entry can hold (beyond 4 PiB), a page
//! outside the RAM, and one for whose entry a full folder has no memory are not recorded: a missing entry costs a disk read,
//! never data.
//!
//! Together 22 bytes a page of RAM: 16 in the table, 6 in the index.

use std::cmp::Ordering;
use std::io;
use std::ops::Range;
use std::path::{Path, PathBuf};

use crate::block::{DiskId, RamPage};
use crate::tag::Tag;

mod index;
mod table;
#[cfg(test)]
mod tests;

use index::Index;
use table::{BLOCK_MAX, Table};

/// Ages in one turnover of the RAM: `trim oldest first` is right to within 1/256 of it.
const AGES_PER_TURNOVER: u32 = 256;

/// When an entry was recorded: a counter that advances every `ram_pages / 256` records and wraps after 256 turnovers of
/// the RAM. Compare with `Ledger::older_first`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Age(pub u16);

/// The disk block that one page of guest RAM holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Entry {
    /// The page.
    pub page: RamPage,
    /// The disk of the block.
    pub disk: DiskId,
    /// The block that the page holds.
    pub block: u64,
    /// Tag of the block's contents on the disk.
    pub tag: Tag,
    /// When the entry was recorded.
    pub age: Age,
}

/// Why a ledger cannot be used.
#[allow(missing_docs, reason = "each variant's message describes it")]
#[derive(Debug, thiserror::Error)]
pub enum LedgerError {
    #[error("cannot {action} ledger {path}")]
    Access { path: PathBuf, action: &'static str, source: io::Error },
    #[error("ledger {path} cannot cover {ram_pages} pages of RAM; it can cover 1 to {max}", max = table::RAM_PAGES_MAX)]
    RamSize { path: PathBuf, ram_pages: u32 },
    #[error("{path} is not a ledger; remove it to start cold")]
    NotALedger { path: PathBuf },
    #[error("ledger {path} has version {found}, this is version {expected}; remove it to start cold")]
    Version { path: PathBuf, found: u32, expected: u32 },
    #[error("the head of ledger {path} is damaged; remove it to start cold")]
    DamagedHead { path: PathBuf },
    #[error("ledger {path} is {found} bytes long and should be {expected}; remove it to start cold")]
    WrongLength { path: PathBuf, found: u64, expected: u64 },
}

/// The ledger of one incarnation, or of a boot set.
pub struct Ledger {
    path: PathBuf,
    table: Table,
    index: Index,
    /// Records until the age advances.
    until_next_age: u32,
    dropped_at_open: u32,
    /// Entries for which there was no memory.
    unrecorded: u64,
}

impl Ledger {
    /// A new, empty ledger. Sparse: what is never recorded takes no space.
    pub fn create(path: &Path, ram_pages: u32) -> Result<Self, LedgerError> {
        Ok(Self::over(path, Table::create(path, ram_pages)?))
    }

    /// Opens a ledger that an earlier keeper left. Entries that contradict an earlier one in the table are dropped: nothing shows
    /// which of the two is right, and the tag decides at the time of serving anyway.
    pub fn open(path: &Path) -> Result<Self, LedgerError> {
        let mut ledger = Self::over(path, Table::open(path)?);
        for part in 0..ledger.table.parts() {
            for page in ledger.table.pages_of(part) {
                ledger.adopt(RamPage(page));
            }
        }
        Ok(ledger)
    }

    /// Allocates all the space that it will ever need, so that every entry has some.
    pub(crate) fn take_room(&self) -> Result<(), LedgerError> {
        let failed = |source| LedgerError::Access { path: self.path.clone(), action: "allocate the space of", source };
        self.table.take_all().map_err(failed)
    }

    fn over(path: &Path, table: Table) -> Self {
        let index = Index::new(table.ram_pages());
        let until_next_age = records_per_age(table.ram_pages());
        Self { path: path.into(), table, index, until_next_age, dropped_at_open: 0, unrecorded: 0 }
    }

    fn adopt(&mut self, page: RamPage) {
        match self.table.entry(page) {
            Some(entry) if self.index.find(&self.table, entry.disk, entry.block).is_none() => {
                self.index.insert(&self.table, page);
            }
            Some(_) => {
                self.table.clear(page);
                self.dropped_at_open += 1;
            }
            None => self.dropped_at_open += u32::from(self.table.clear_if_malformed(page)),
        }
    }

    /// Records that `page` holds `block` as it is on the disk.
    pub fn record(&mut self, page: RamPage, disk: DiskId, block: u64, tag: Tag) {
        if let Some(holder) = self.index.find(&self.table, disk, block)
            && holder != page
        {
            self.forget_page(holder);
        }
        self.forget_page(page);
        if page.0 >= self.table.ram_pages() || block > BLOCK_MAX {
            return;
        }
        if let Err(error) = self.table.set(Entry { page, disk, block, tag, age: self.table.age() }) {
            return self.is_full(&error);
        }
        self.index.insert(&self.table, page);
        self.until_next_age -= 1;
        if self.until_next_age == 0 {
            self.until_next_age = records_per_age(self.table.ram_pages());
            self.table.set_age(Age(self.table.age().0.wrapping_add(1)));
        }
    }

    fn is_full(&mut self, error: &io::Error) {
        if self.unrecorded == 0 {
            let (ledger, folder) = (self.path.display(), self.path.parent().unwrap_or(Path::new("/")).display());
            tracing::warn!(%ledger, %error, "{folder} is full: what the guest reads is not recorded, and the next boot reads more from disk; enlarge it");
        }
        self.unrecorded += 1;
    }

    /// Removes the entries of these blocks: they are about to change on the disk, or have changed.
    pub fn forget(&mut self, disk: DiskId, blocks: Range<u64>) {
        let blocks = blocks.start..blocks.end.min(BLOCK_MAX + 1);
        let asked = blocks.end.saturating_sub(blocks.start);
        // A look-up costs as much as reading some 16 entries in a row; a discard of a whole disk names billions.
        if asked <= (self.table.touched_pages() / 16).max(64) {
            for block in blocks {
                if let Some(page) = self.index.find(&self.table, disk, block) {
                    self.forget_page(page);
                }
            }
        } else {
            self.forget_by_scan(disk, blocks);
        }
    }

    /// Removes all entries of this disk. Returns how many those were.
    pub fn forget_disk(&mut self, disk: DiskId) -> u64 {
        let before = self.len();
        self.forget_by_scan(disk, 0..BLOCK_MAX + 1);
        (before - self.len()) as u64
    }

    fn forget_by_scan(&mut self, disk: DiskId, blocks: Range<u64>) {
        for part in 0..self.table.parts() {
            for page in self.table.pages_of(part).map(RamPage) {
                if self.table.entry(page).is_some_and(|entry| entry.disk == disk && blocks.contains(&entry.block)) {
                    self.forget_page(page);
                }
            }
        }
    }

    /// Removes the page's entry: its contents no longer come from the disk, or are given up.
    pub fn forget_page(&mut self, page: RamPage) {
        if self.entry(page).is_some() {
            self.index.remove(&self.table, page);
            self.table.clear(page);
        }
    }

    /// The entry of a block, if a page holds it.
    pub fn find(&self, disk: DiskId, block: u64) -> Option<Entry> {
        self.table.entry(self.index.find(&self.table, disk, block)?)
    }

    /// The entry of a page, if it holds a block.
    pub fn entry(&self, page: RamPage) -> Option<Entry> {
        if page.0 < self.table.ram_pages() && self.table.is_touched(page) { self.table.entry(page) } else { None }
    }

    /// All entries, by page.
    pub fn entries(&self) -> impl Iterator<Item = Entry> + '_ {
        let pages = (0..self.table.parts()).flat_map(|part| self.table.pages_of(part));
        pages.filter_map(|page| self.table.entry(RamPage(page)))
    }

    /// Number of entries.
    pub fn len(&self) -> usize {
        self.index.len()
    }

    /// Whether it has no entry.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Pages of RAM that it covers.
    pub fn ram_pages(&self) -> u32 {
        self.table.ram_pages()
    }

    /// The age that the next record gets.
    pub fn age(&self) -> Age {
        self.table.age()
    }

    /// Orders by age, the oldest first.
    pub fn older_first(&self, one: Age, other: Age) -> Ordering {
        let years = |age: Age| self.table.age().0.wrapping_sub(age.0);
        years(other).cmp(&years(one))
    }

    /// Entries that `open` dropped because they were malformed or named a block a second time.
    pub fn dropped_at_open(&self) -> u32 {
        self.dropped_at_open
    }

    /// Entries that were not recorded because the folder was full.
    pub fn unrecorded(&self) -> u64 {
        self.unrecorded
    }

    /// Bytes of table and index for each page of RAM, when the ledger is full.
    pub fn bytes_per_page(&self) -> f64 {
        (self.table.bytes() + self.index.bytes()) as f64 / f64::from(self.table.ram_pages())
    }

    /// Bytes of the index, for all pages. It is memory of this process.
    pub fn index_bytes(&self) -> usize {
        self.index.bytes()
    }

    /// Path of its file.
    pub fn path(&self) -> &Path {
        &self.path
    }
}

fn records_per_age(ram_pages: u32) -> u32 {
    (ram_pages / AGES_PER_TURNOVER).max(1)
}
