//! Cache map: which pages of which files a dead guest had in its page cache, for the next guest to bring back.
//!
//! dead kernel's page cache (`vmcore::linux::page_cache`) x blocks in memory -> chunks of files, most used first -> text
//!
//! Only pages whose disk block is known, by the ledger or by the boot set, are listed: pages that were never written, and those of file systems in
//! memory or behind a network, are not. The map comes from a guest that nobody trusts. A wrong one makes the next guest read ahead
//! what it does not need; what it reads is decided by its file systems and disks alone.
//!
//! The map is text, one item a line, so that any guest can read it:
//! ```text
//! fs NUMBER TYPE UUID
//! file NUMBER FS INODE GENERATION
//! device NUMBER FS
//! read NUMBER FIRST PAGES
//! ```
//! A `device` is the device of a file system, whose page cache holds metadata. `read` lines are in the order in which they should be
//! read. They count pages of 4 KiB, and no line has more than 1 MiB: the kernel cuts longer requests to read ahead.

use std::cmp::Reverse;
use std::collections::HashMap;
use std::fmt::Write;
use std::ops::Range;
use std::sync::{Arc, Mutex, OnceLock};

use hearth_disk::block::RamPage;
use hearth_disk::ledger::{Entry, Ledger};
use hearth_memory::{GuestPhysicalAddress, Layout, PAGE_BYTES, RamFile};

use crate::incarnation::lock;
use crate::vmcore::linux::page_cache::{CachedRun, FileKind, FileSystem, PageCache};
use crate::vmcore::linux::{Linux, NotUnderstood};
use crate::vmcore::memory::address_of_pfn;
use crate::vmcore::{DeadRam, PhysicalMemory, Unreadable};

/// Pages that are read ahead together, and in one line: 1 MiB.
const CHUNK_PAGES: u64 = 256;
/// Ledger entries looked up each time its lock is taken, for which reads of the next guest wait.
const LOOKED_UP_PER_HOLD: usize = 64;
/// Blocks that are apart on the disk make several pieces of a run. Of a guest with more pieces the rest is left out.
const PAGES_PER_PIECE: u64 = 8;
const PIECES_MIN: usize = 1 << 14;
/// Pages of the longest file: offsets are signed numbers of 64 bits (`MAX_LFS_FILESIZE` in Linux's include/linux/fs.h).
const FILE_PAGES_MAX: u64 = i64::MAX.cast_unsigned() / PAGE_BYTES;
/// Number that btrfs gives to an inode without a name, whose pages are the metadata (`BTRFS_BTREE_INODE_OBJECTID`).
const BTRFS_METADATA_INODE: u64 = 1;
/// Metadata comes first: without it every file has to wait for its own.
const METADATA_HEAT: u8 = u8::MAX;

/// What a dead guest had cached.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct CacheMap {
    text: String,
    pages: u64,
    files: u64,
    omitted_pages: u64,
}

/// Neighbouring pages of one file whose blocks are neighbours, too.
#[derive(Clone, Copy)]
struct Piece {
    file: u32,
    heat: u8,
    index: u64,
    pages: u64,
    place: (u8, u64),
}

/// Which disk block each page of a dead guest's RAM held.
pub struct Blocks<'a> {
    ledger: &'a Mutex<Ledger>,
    parted: HashMap<RamPage, Entry>,
}

impl<'a> Blocks<'a> {
    /// The guest's ledger, and what that has lost to the boot set.
    pub fn new(ledger: &'a Mutex<Ledger>, parted: &[Entry]) -> Self {
        Self { ledger, parted: parted.iter().map(|entry| (entry.page, *entry)).collect() }
    }

    /// Calls `found` with each of these pages that held a block, in order, and its number.
    fn of(&self, pages: Range<u64>, layout: &Layout, mut found: impl FnMut(u64, Entry)) {
        let ledger = lock(self.ledger);
        for pfn in pages {
            let Some(page) = ram_page(pfn, layout) else { continue };
            if let Some(entry) = ledger.entry(page).or_else(|| self.parted.get(&page).copied()) {
                found(pfn, entry);
            }
        }
    }
}

/// Pieces of one chunk of a file.
struct Chunk<'a> {
    heat: u8,
    place: (u8, u64),
    pieces: &'a [Piece],
}

/// Ends the reading of a map early, from any thread.
#[derive(Debug, Default)]
pub struct GiveUp(OnceLock<&'static str>);

impl GiveUp {
    /// Has the reading end. `why`: what its error says; the first one counts.
    pub fn because(&self, why: &'static str) {
        // Fails if it was given up already.
        let _ = self.0.set(why);
    }

    /// Why the reading was given up, if it was.
    pub fn why(&self) -> Option<&'static str> {
        self.0.get().copied()
    }
}

/// Why there is no map.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "each variant's message describes it")]
pub enum CacheMapError {
    #[error(transparent)]
    NotUnderstood(#[from] NotUnderstood),
    #[error("reading it was given up: {0}")]
    GivenUp(&'static str),
}

/// Dead memory that cannot be read any more once that is given up.
struct Abandonable<'a> {
    dead: DeadRam,
    give_up: &'a GiveUp,
}

impl PhysicalMemory for Abandonable<'_> {
    fn read(&self, address: GuestPhysicalAddress, into: &mut [u8]) -> Result<(), Unreadable> {
        if self.is_given_up() { Err(Unreadable::at(address.0)) } else { self.dead.read(address, into) }
    }

    fn ranges(&self) -> &[Range<u64>] {
        self.dead.ranges()
    }

    fn is_given_up(&self) -> bool {
        self.give_up.why().is_some()
    }
}

impl CacheMap {
    /// Reads the map of the guest whose memory and blocks these are. `notes`: ELF notes with its registers; may be empty. The map's
    /// text has at most `limit_bytes`.
    pub fn read(
        ram: Arc<RamFile>,
        notes: &[u8],
        blocks: &Blocks<'_>,
        limit_bytes: usize,
        give_up: &GiveUp,
    ) -> Result<Self, CacheMapError> {
        let layout = ram.layout().clone();
        let memory = Abandonable { dead: DeadRam::new(ram), give_up };
        let cache = Linux::find(&memory, notes).and_then(|linux| linux.page_cache());
        match give_up.why() {
            Some(why) => Err(CacheMapError::GivenUp(why)),
            None => Ok(Self::new(&cache?, &layout, blocks, limit_bytes)),
        }
    }

    /// Lists the pages of `cache` whose disk block is in `blocks`. `layout`: of the dead guest's memory. The least used pages are left
    /// out if the text would be longer than `limit_bytes`.
    pub fn new(cache: &PageCache, layout: &Layout, blocks: &Blocks<'_>, limit_bytes: usize) -> Self {
        let targets: Vec<_> = (0..cache.files.len()).map(|file| target(cache, file)).collect();
        let mut pieces = Vec::new();
        let pages: u64 = cache.runs.iter().map(|run| u64::from(run.pages)).sum();
        let pieces_max = PIECES_MIN + cache.runs.len() + (pages / PAGES_PER_PIECE) as usize;
        for run in &cache.runs {
            if let Some(target) = targets[run.file as usize] {
                let heat = if target.is_device { METADATA_HEAT } else { run.heat };
                add_pieces(&mut pieces, pieces_max, CachedRun { heat, ..*run }, layout, blocks);
            }
        }
        pieces.sort_unstable_by_key(|piece| (piece.file, piece.index));
        let mut chunks: Vec<_> = pieces.chunk_by(|one, next| chunk_of(one) == chunk_of(next)).map(Chunk::new).collect();
        chunks.sort_by_key(|chunk| (Reverse(chunk.heat), chunk.place));
        Writer::new(cache, &targets, limit_bytes).write(&chunks)
    }

    /// The map as the guest reads it.
    pub fn text(&self) -> &str {
        &self.text
    }

    /// Number of pages listed.
    pub fn pages(&self) -> u64 {
        self.pages
    }

    /// Number of files and devices listed.
    pub fn files(&self) -> u64 {
        self.files
    }

    /// Number of pages left out, because the map would have been too long.
    pub fn omitted_pages(&self) -> u64 {
        self.omitted_pages
    }
}

/// The file system in which a next guest finds a cached file.
#[derive(Clone, Copy)]
struct Target {
    file_system: u32,
    is_device: bool,
}

/// `None` if the next guest could not find it: a file system without a UUID, a device without a file system, or what btrfs has its
/// metadata in.
fn target(cache: &PageCache, file: usize) -> Option<Target> {
    let file = cache.files[file];
    let (file_system, is_device) = match file.what {
        FileKind::File { inode: BTRFS_METADATA_INODE, .. }
            if cache.file_systems[file.file_system as usize].kind == "btrfs" =>
        {
            return None;
        }
        FileKind::File { .. } => (file.file_system, false),
        FileKind::Device(device) => {
            let on_device = |system: &FileSystem| system.device == device && system.uuid != [0; 16];
            (cache.file_systems.iter().position(on_device)? as u32, true)
        }
    };
    let has_uuid = cache.file_systems[file_system as usize].uuid != [0; 16];
    has_uuid.then_some(Target { file_system, is_device })
}

/// Adds the pieces of a run, as long as there are not more than `pieces_max` in all.
fn add_pieces(pieces: &mut Vec<Piece>, pieces_max: usize, run: CachedRun, layout: &Layout, blocks: &Blocks<'_>) {
    let all = run.pfn..run.pfn + u64::from(run.pages);
    for first in all.clone().step_by(LOOKED_UP_PER_HOLD) {
        if pieces.len() >= pieces_max {
            return;
        }
        blocks.of(first..all.end.min(first + LOOKED_UP_PER_HOLD as u64), layout, |pfn, entry| {
            // The kernel's index is not checked, and may be any number.
            let index = run.index.checked_add(pfn - run.pfn).filter(|index| *index < FILE_PAGES_MAX);
            let Some(index) = index else { return };
            let piece = Piece { file: run.file, heat: run.heat, index, pages: 1, place: (entry.disk.0, entry.block) };
            match pieces.last_mut() {
                Some(last) if last.goes_on_with(&piece) => last.pages += 1,
                _ => pieces.push(piece),
            }
        });
    }
}

fn ram_page(pfn: u64, layout: &Layout) -> Option<RamPage> {
    let page = layout.offset_of(address_of_pfn(pfn))?.0 / PAGE_BYTES;
    Some(RamPage(u32::try_from(page).ok()?))
}

fn chunk_of(piece: &Piece) -> (u32, u64) {
    (piece.file, piece.index / CHUNK_PAGES)
}

impl Piece {
    fn goes_on_with(&self, next: &Self) -> bool {
        chunk_of(self) == chunk_of(next)
            && self.heat == next.heat
            && self.index + self.pages == next.index
            && (self.place.0, self.place.1 + self.pages) == next.place
    }
}

impl<'a> Chunk<'a> {
    fn new(pieces: &'a [Piece]) -> Self {
        let heat = pieces.iter().map(|piece| piece.heat).max().expect("a chunk has a piece");
        let place = pieces.iter().map(|piece| piece.place).min().expect("a chunk has a piece");
        Self { heat, place, pieces }
    }

    /// Ranges of pages, first page and number, as long as possible.
    fn ranges(&self) -> Vec<(u64, u64)> {
        let mut ranges: Vec<(u64, u64)> = Vec::new();
        for piece in self.pieces {
            match ranges.last_mut() {
                // Two pages of a dead kernel may claim to be the same one.
                Some((first, pages)) if piece.index <= *first + *pages => {
                    *pages = (*pages).max(piece.index + piece.pages - *first);
                }
                _ => ranges.push((piece.index, piece.pages)),
            }
        }
        ranges
    }
}

struct Writer<'a> {
    cache: &'a PageCache,
    targets: &'a [Option<Target>],
    limit_bytes: usize,
    is_system_named: Vec<bool>,
    is_file_named: Vec<bool>,
    map: CacheMap,
}

impl<'a> Writer<'a> {
    fn new(cache: &'a PageCache, targets: &'a [Option<Target>], limit_bytes: usize) -> Self {
        Self {
            cache,
            targets,
            limit_bytes,
            is_system_named: vec![false; cache.file_systems.len()],
            is_file_named: vec![false; cache.files.len()],
            map: CacheMap::default(),
        }
    }

    fn write(mut self, chunks: &[Chunk<'_>]) -> CacheMap {
        let mut lines = String::new();
        for chunk in chunks {
            let ranges = chunk.ranges();
            let pages: u64 = ranges.iter().map(|(_, pages)| pages).sum();
            if self.map.omitted_pages > 0 {
                self.map.omitted_pages += pages;
                continue;
            }
            lines.clear();
            let file = chunk.pieces[0].file;
            self.name(file, &mut lines);
            for (first, pages) in ranges {
                writeln!(lines, "read {file} {first} {pages}").expect("text can be written");
            }
            if self.map.text.len() + lines.len() > self.limit_bytes {
                self.map.omitted_pages += pages;
                continue;
            }
            self.map.text.push_str(&lines);
            self.map.pages += pages;
        }
        self.map.files = self.is_file_named.iter().filter(|named| **named).count() as u64;
        self.map
    }

    /// Says what a file is before its first line.
    fn name(&mut self, file: u32, lines: &mut String) {
        if std::mem::replace(&mut self.is_file_named[file as usize], true) {
            return;
        }
        let Some(Target { file_system, .. }) = self.targets[file as usize] else { return };
        if !std::mem::replace(&mut self.is_system_named[file_system as usize], true) {
            let system = &self.cache.file_systems[file_system as usize];
            let kind: String = system.kind.chars().filter(char::is_ascii_graphic).collect();
            writeln!(lines, "fs {file_system} {kind} {}", hex(&system.uuid)).expect("text can be written");
        }
        match self.cache.files[file as usize].what {
            FileKind::File { inode, generation } => {
                writeln!(lines, "file {file} {file_system} {inode} {generation}").expect("text can be written");
            }
            FileKind::Device(_) => writeln!(lines, "device {file} {file_system}").expect("text can be written"),
        }
    }
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use hearth_disk::block::DiskId;
    use hearth_disk::tag::{TAG_KEY_BYTES, Tag, Tagger};
    use proptest::collection::vec;
    use proptest::prelude::*;

    use super::*;
    use crate::vmcore::linux::page_cache::{CachedFile, FileSystem};

    const RAM_PAGES: u32 = 4096;
    const ROOT: FileKind = FileKind::File { inode: 12, generation: 99 };

    fn tag() -> Tag {
        Tagger::new(&[1; TAG_KEY_BYTES]).tag(&[0; 4096])
    }

    /// A ledger in which each of these pages holds the block that follows.
    fn ledger(folder: &Path, pages: impl IntoIterator<Item = (u32, u64)>) -> Mutex<Ledger> {
        let mut ledger = Ledger::create(&folder.join("ledger"), RAM_PAGES).unwrap();
        for (page, block) in pages {
            ledger.record(RamPage(page), DiskId(0), block, tag());
        }
        Mutex::new(ledger)
    }

    fn system(kind: &str, uuid: u8, device: u32) -> FileSystem {
        FileSystem { kind: kind.to_owned(), uuid: [uuid; 16], device }
    }

    fn cache(files: &[(u32, FileKind)], runs: &[CachedRun]) -> PageCache {
        let files = files.iter().map(|(file_system, what)| CachedFile { file_system: *file_system, what: *what });
        PageCache {
            file_systems: vec![
                system("ext4", 0xab, 5),
                system("tmpfs", 0, 6),
                system("bdev", 0, 1),
                system("btrfs", 0xcd, 7),
            ],
            files: files.collect(),
            runs: runs.to_vec(),
            unknown_pages: 0,
        }
    }

    fn map_of(cache: &PageCache, blocks: impl IntoIterator<Item = (u32, u64)>, limit_bytes: usize) -> CacheMap {
        let folder = tempfile::tempdir().unwrap();
        let layout = Layout::q35(u64::from(RAM_PAGES) * PAGE_BYTES);
        CacheMap::new(cache, &layout, &Blocks::new(&ledger(folder.path(), blocks), &[]), limit_bytes)
    }

    #[track_caller]
    fn check(cache: &PageCache, blocks: impl IntoIterator<Item = (u32, u64)>, expect: &str) {
        let map = map_of(cache, blocks, 1 << 20);
        let uuid = "ab".repeat(16);
        assert_eq!(map.text(), expect.replace("UUID", &uuid));
        assert_eq!(map.omitted_pages(), 0);
    }

    const RUN: CachedRun = CachedRun { pfn: 100, pages: 4, file: 0, heat: 0, index: 0 };

    #[test]
    fn only_pages_whose_block_is_known_are_listed() {
        let cache = cache(&[(0, ROOT)], &[RUN]);
        let blocks = [(100, 7), (101, 8), (103, 10), (900, 1)];
        check(&cache, blocks, "fs 0 ext4 UUID\nfile 0 0 12 99\nread 0 0 2\nread 0 3 1\n");
        check(&cache, [], "");
    }

    #[test]
    fn pages_whose_block_is_in_the_boot_set_are_listed() {
        let (folder, layout) = (tempfile::tempdir().unwrap(), Layout::q35(u64::from(RAM_PAGES) * PAGE_BYTES));
        let ledger = ledger(folder.path(), (100..104).map(|page| (page, u64::from(page))));
        let parted: Vec<_> = [101, 102].map(|page| lock(&ledger).entry(RamPage(page)).unwrap()).into();
        parted.iter().for_each(|entry| lock(&ledger).forget_page(entry.page));
        let map = |parted| CacheMap::new(&cache(&[(0, ROOT)], &[RUN]), &layout, &Blocks::new(&ledger, parted), 1 << 20);
        assert_eq!((map(&[]).pages(), map(&parted).pages()), (2, 4));
        assert!(map(&parted).text().ends_with("read 0 0 4\n"), "{}", map(&parted).text());
    }

    #[test]
    fn scattered_pages_of_a_file_become_ranges() {
        let runs = [3, 0, 2, 1].map(|index| CachedRun { pfn: 100 + 10 * index, pages: 1, index, ..RUN });
        let blocks = (0..4).map(|index| (100 + 10 * index, 50 - u64::from(index)));
        check(&cache(&[(0, ROOT)], &runs), blocks, "fs 0 ext4 UUID\nfile 0 0 12 99\nread 0 0 4\n");
    }

    #[test]
    fn most_used_chunks_come_first_and_metadata_before_all() {
        let other = FileKind::File { inode: 13, generation: 1 };
        let files = [(0, ROOT), (0, other), (2, FileKind::Device(5))];
        let runs = [
            CachedRun { pages: 1, ..RUN },
            CachedRun { pfn: 200, pages: 1, index: 256, heat: 3, ..RUN },
            CachedRun { pfn: 300, pages: 2, file: 1, heat: 2, ..RUN },
            CachedRun { pfn: 400, pages: 1, file: 2, index: 9, ..RUN },
        ];
        let blocks = [(100, 1), (200, 2), (300, 3), (301, 9), (400, 4)];
        check(
            &cache(&files, &runs),
            blocks,
            "fs 0 ext4 UUID\ndevice 2 0\nread 2 9 1\nfile 0 0 12 99\nread 0 256 1\nfile 1 0 13 1\nread 1 0 2\nread 0 0 1\n",
        );
    }

    #[test]
    fn what_a_next_guest_cannot_find_is_not_listed() {
        let metadata_of_btrfs = FileKind::File { inode: BTRFS_METADATA_INODE, generation: 0 };
        let files = [(1, ROOT), (2, FileKind::Device(77)), (2, FileKind::Device(6)), (3, metadata_of_btrfs)];
        let runs = [0, 1, 2, 3].map(|file| CachedRun { pfn: 100 + 10 * u64::from(file), pages: 1, file, ..RUN });
        check(&cache(&files, &runs), [(100, 1), (110, 2), (120, 3), (130, 4)], "");
    }

    #[test]
    fn no_line_is_longer_than_a_mebibyte() {
        let run = CachedRun { pfn: 0, pages: 600, index: 200, ..RUN };
        let blocks = (0..600).map(|page| (page, u64::from(page)));
        let expect = "fs 0 ext4 UUID\nfile 0 0 12 99\nread 0 200 56\nread 0 256 256\nread 0 512 256\nread 0 768 32\n";
        check(&cache(&[(0, ROOT)], &[run]), blocks, expect);
    }

    #[test]
    fn least_used_pages_are_left_out_of_a_map_that_is_too_long() {
        let runs: Vec<_> =
            (0..20).map(|index| CachedRun { pfn: index, pages: 1, index: index * 300, heat: 0, ..RUN }).collect();
        let blocks = (0..20).map(|page| (page, u64::from(page)));
        let map = map_of(&cache(&[(0, ROOT)], &runs), blocks, 120);
        assert!(map.text().len() <= 120);
        assert_eq!((map.pages() + map.omitted_pages(), map.text().lines().count() as u64), (20, 2 + map.pages()));
        assert!(map.text().ends_with(&format!("read 0 {} 1\n", (map.pages() - 1) * 300)));
    }

    #[test]
    fn impossible_numbers_do_no_harm() {
        let runs = [
            CachedRun { index: u64::MAX - 1, ..RUN },
            CachedRun { pfn: 400, index: u64::MAX - 1, ..RUN },
            CachedRun { pfn: 500, index: FILE_PAGES_MAX - 1, ..RUN },
            CachedRun { pfn: u64::from(RAM_PAGES) - 2, file: 0, index: 9, ..RUN },
            CachedRun { pfn: 200, pages: 3, ..RUN },
            CachedRun { pfn: 300, pages: 3, index: 1, ..RUN },
        ];
        let blocks = (0..RAM_PAGES).map(|page| (page, u64::from(page)));
        let map = map_of(&cache(&[(0, ROOT)], &runs), blocks, 1 << 20);
        assert!(map.text().contains("read 0 0 4\n"), "pages claimed twice are read once: {}", map.text());
        let last = format!("read 0 {} 1\n", FILE_PAGES_MAX - 1);
        assert!(map.text().ends_with(&last), "no page is beyond the end of the longest file: {}", map.text());
    }

    fn index() -> impl Strategy<Value = u64> {
        prop_oneof![0..2000_u64, FILE_PAGES_MAX - 99..FILE_PAGES_MAX + 99, u64::MAX - 99..=u64::MAX]
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]

        /// A dead kernel may claim anything.
        #[test]
        fn any_page_cache_makes_a_map_within_its_bounds(
            runs in vec((0..u64::from(RAM_PAGES), 1..70_u32, 0..3_u32, 0..4_u8, index()), 0..40),
            limit_bytes in 0..2000_usize,
        ) {
            let files = [(0, ROOT), (0, FileKind::File { inode: 13, generation: 1 }), (2, FileKind::Device(5))];
            let runs = runs.into_iter().map(|(pfn, pages, file, heat, index)| CachedRun { pfn, pages, file, heat, index });
            let blocks = (0..RAM_PAGES).map(|page| (page, u64::from(page / 3)));
            let map = map_of(&cache(&files, &runs.collect::<Vec<_>>()), blocks, limit_bytes);
            prop_assert!(map.text().len() <= limit_bytes);
            let reads = map.text().lines().filter_map(|line| line.strip_prefix("read "));
            let numbers = reads.map(|read| read.split(' ').map(|number| number.parse::<u64>().unwrap()).collect::<Vec<_>>());
            let mut pages = 0;
            for read in numbers {
                prop_assert!(read[2] <= CHUNK_PAGES && read[1] + read[2] <= FILE_PAGES_MAX, "{read:?}");
                pages += read[2];
            }
            prop_assert_eq!(pages, map.pages());
        }
    }
}
