//! Dedup: finds pages of memory that are also on a snapshot's disks, so that only their location is stored.
//!
//! ledger -> candidates -> read each block from the snapshot's own disk and compare it with the page, byte by byte ->
//! equal pages, in the order of the disks
//!
//! The ledger only says where to look, and may be of another moment than the snapshot: a page that has changed since is
//! not equal.

use std::sync::Mutex;

use hearth_disk::block::RamPage;
use hearth_disk::ledger::Ledger;

use super::PAGE;
use super::blocks::{BlockRef, DiskBlocks};
use super::pages::{CHUNK_PAGES, Elsewhere, PageReader};
use super::save::{SaveError, Watcher};
use crate::incarnation::lock;

/// Pages looked up under one lock, while the machine's disks wait: some 10 us.
const LOOK_PAGES: u32 = 4096;
/// Blocks further apart than this do not share a chunk, because one page fault reads a whole chunk.
const GAP_BLOCKS: u64 = 16;

/// A page that may equal a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Candidate {
    /// The block.
    pub at: BlockRef,
    /// Number of the page.
    pub page: u32,
}

/// All pages whose block the ledger knows, in the order of the disks.
pub fn candidates(ledger: &Mutex<Ledger>) -> Vec<Candidate> {
    let mut found = Vec::new();
    let ram_pages = lock(ledger).ram_pages();
    for first in (0..ram_pages).step_by(LOOK_PAGES as usize) {
        let ledger = lock(ledger);
        let known = (first..ram_pages.min(first + LOOK_PAGES)).filter_map(|page| ledger.entry(RamPage(page)));
        found.extend(known.map(|entry| Candidate {
            at: BlockRef { disk: u32::from(entry.disk.0), block: entry.block },
            page: entry.page.0,
        }));
    }
    found.sort_unstable();
    found
}

/// Candidates whose bytes in `memory` equal those on the disks, chunk by chunk.
pub fn compare(
    candidates: &[Candidate],
    memory: &PageReader,
    disks: &DiskBlocks,
    watcher: &mut dyn Watcher,
) -> Result<Vec<Elsewhere>, SaveError> {
    let mut chunks = Vec::new();
    let mut chunk = Elsewhere::default();
    let mut blocks = vec![0; CHUNK_PAGES * PAGE];
    watcher.more(candidates.len() as u64);
    let is_next = |one: &Candidate, next: &Candidate| one.at.is_followed_by(&next.at);
    for run in candidates.chunk_by(is_next).flat_map(|run| run.chunks(CHUNK_PAGES)) {
        let places: Vec<_> = run.iter().map(|candidate| candidate.at).collect();
        let blocks = &mut blocks[..run.len() * PAGE];
        // A page whose block cannot be read is stored in the file.
        if disks.read(&places, blocks).is_ok() {
            for (candidate, bytes) in run.iter().zip(blocks.chunks_exact(PAGE)) {
                if memory.holds(candidate.page, bytes.try_into().expect("a page"))? {
                    if !belongs(&chunk, candidate.at) {
                        chunks.extend(std::mem::take(&mut chunk).sealed());
                    }
                    chunk.add(candidate.page, candidate.at, bytes);
                }
            }
        }
        watcher.done(run.len() as u64)?;
    }
    chunks.extend(chunk.sealed());
    Ok(chunks)
}

fn belongs(chunk: &Elsewhere, at: BlockRef) -> bool {
    let is_near = |last: &BlockRef| last.disk == at.disk && at.block - last.block <= GAP_BLOCKS;
    chunk.blocks().len() < CHUNK_PAGES && chunk.blocks().last().is_none_or(is_near)
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::sync::Arc;

    use hearth_disk::block::DiskId;
    use hearth_disk::tag::Tag;

    use super::super::LocalDisks;
    use super::super::manifest::{DiskPart, disk_file};
    use super::super::pages::{Compression, PageWriter};
    use super::super::save::pack;
    use super::*;

    const RAM_PAGES: u64 = 300;
    const BLOCKS: u64 = 200;

    struct Unwatched;

    impl Watcher for Unwatched {
        fn more(&mut self, _pages: u64) {}

        fn done(&mut self, _pages: u64) -> Result<(), SaveError> {
            Ok(())
        }
    }

    fn bytes_of(seed: u64) -> [u8; PAGE] {
        let mut bytes = [seed as u8 | 1; PAGE];
        bytes[..8].copy_from_slice(&seed.to_le_bytes());
        bytes
    }

    /// A folder with a disk whose block B holds the bytes of B. In its memory page P holds the bytes of block P + 10,
    /// up to page 100; later pages hold others.
    struct Stand {
        home: tempfile::TempDir,
        parts: Vec<DiskPart>,
    }

    impl Stand {
        fn new() -> Self {
            let home = tempfile::tempdir().unwrap();
            let disk: Vec<u8> = (0..BLOCKS).flat_map(bytes_of).collect();
            fs::write(home.path().join(disk_file("root")), &disk).unwrap();
            let mut writer = PageWriter::create(&home.path().join("plain"), RAM_PAGES, Compression::None).unwrap();
            for page in 0..200 {
                writer.add(page, &Self::page(page)).unwrap();
            }
            writer.finish().unwrap();
            let part = DiskPart {
                name: "root".into(),
                format: "raw".into(),
                bytes: disk.len() as u64,
                modified: None,
                stored: None,
            };
            Self { home, parts: vec![part] }
        }

        fn page(page: u32) -> [u8; PAGE] {
            bytes_of(if page < 100 { u64::from(page) + 10 } else { 1000 + u64::from(page) })
        }

        fn disks(&self) -> DiskBlocks {
            DiskBlocks::open(&LocalDisks::complete(self.home.path()), &self.parts).unwrap()
        }

        fn plain(&self) -> PageReader {
            PageReader::open(&self.home.path().join("plain")).unwrap()
        }
    }

    #[test]
    fn candidates_are_in_the_order_of_the_disks() {
        let home = tempfile::tempdir().unwrap();
        let mut ledger = Ledger::create(&home.path().join("ledger"), 10_000).unwrap();
        for (page, disk, block) in [(9000, 0, 7), (3, 1, 2), (4, 0, 9)] {
            ledger.record(RamPage(page), DiskId(disk), block, Tag(0));
        }
        let found = candidates(&Mutex::new(ledger));
        let found: Vec<_> = found.iter().map(|found| (found.at.disk, found.at.block, found.page)).collect();
        assert_eq!(found, [(0, 7, 9000), (0, 9, 4), (1, 2, 3)]);
    }

    #[test]
    fn shared_pages_come_from_disk_others_from_file() {
        let stand = Stand::new();
        let at = |block| BlockRef { disk: 0, block };
        let mut candidates: Vec<_> = (0..150).map(|page| Candidate { at: at(u64::from(page) + 10), page }).collect();
        // A block past the end of the disk, and a page that is not stored.
        candidates.extend([(BLOCKS + 5, 160), (180, 250)].map(|(block, page)| Candidate { at: at(block), page }));
        candidates.push(Candidate { at: BlockRef { disk: 7, block: 1 }, page: 170 });
        candidates.sort_unstable();
        let chunks = compare(&candidates, &stand.plain(), &stand.disks(), &mut Unwatched).unwrap();
        let shared: Vec<u32> = chunks.iter().flat_map(|chunk| chunk.pages().to_vec()).collect();
        assert_eq!(shared, (0..100).collect::<Vec<_>>());
        for compression in [Compression::None, Compression::Zstd] {
            let path = stand.home.path().join("packed");
            let sealed = pack(&stand.plain(), &path, compression, &chunks, None, &mut Unwatched).unwrap();
            assert_eq!(sealed.pages, 200);
            assert!(sealed.bytes < fs::metadata(stand.plain().path()).unwrap().len() - 90 * PAGE as u64, "{sealed:?}");
            let reader = PageReader::open(&path).unwrap();
            assert!(reader.needs_disks());
            let alone = reader.page(5, &mut reader.reading()).unwrap_err().to_string();
            assert!(alone.contains("the disks that hold them are not known"), "{alone}");
            let (reader, mut reading) = (reader.with_disks(Arc::new(stand.disks())), stand.plain().reading());
            for page in 0..200 {
                assert!(reader.page(page, &mut reading).unwrap().unwrap() == &Stand::page(page), "page {page}");
            }
        }
    }

    #[test]
    fn altered_block_is_named_and_spoils_no_others() {
        let stand = Stand::new();
        let candidates: Vec<_> =
            (0..40).map(|page| Candidate { at: BlockRef { disk: 0, block: u64::from(page) + 10 }, page }).collect();
        let chunks = compare(&candidates, &stand.plain(), &stand.disks(), &mut Unwatched).unwrap();
        let path = stand.home.path().join("packed");
        pack(&stand.plain(), &path, Compression::None, &chunks, None, &mut Unwatched).unwrap();
        let disk = stand.home.path().join(disk_file("root"));
        let bytes = fs::read(&disk).unwrap();
        let mut altered = bytes.clone();
        altered[30 * PAGE + 77] ^= 4;
        fs::write(&disk, &altered).unwrap();
        let reader = PageReader::open(&path).unwrap().with_disks(Arc::new(stand.disks()));
        let mut reading = reader.reading();
        let refusal = reader.page(17, &mut reading).unwrap_err().to_string();
        let expect = "disk-root: pages 16 to 31 of the guest's memory are damaged: blocks 26 to 41 of this disk, which hold \
                      them, are not what they were when it was saved";
        assert!(refusal.ends_with(expect), "{refusal}");
        assert!(reader.page(15, &mut reading).is_ok() && reader.page(32, &mut reading).is_ok());
        let copy = stand.home.path().join("copy");
        fs::write(&copy, &bytes).unwrap();
        fs::rename(&copy, &disk).unwrap();
        assert!(
            reader.page(17, &mut reading).unwrap().unwrap() == &Stand::page(17),
            "another file was put in its place"
        );
        fs::write(&disk, &bytes[..20 * PAGE]).unwrap();
        let reader = PageReader::open(&path).unwrap().with_disks(Arc::new(stand.disks()));
        let refusal = reader.page(17, &mut reader.reading()).unwrap_err().to_string();
        assert!(refusal.ends_with("which hold them, cannot be read"), "{refusal}");
    }

    #[test]
    fn chunk_has_only_nearby_blocks() {
        let mut chunk = Elsewhere::default();
        chunk.add(1, BlockRef { disk: 0, block: 100 }, &[1; PAGE]);
        let check =
            |disk, block, expect| assert_eq!(belongs(&chunk, BlockRef { disk, block }), expect, "{disk} {block}");
        check(0, 101, true);
        check(0, 100 + GAP_BLOCKS, true);
        check(0, 101 + GAP_BLOCKS, false);
        check(1, 101, false);
    }
}
