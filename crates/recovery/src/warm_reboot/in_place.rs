//! In place: a guest OS that is reset inside a QEMU that goes on, in memory that stays. What the old kernel had cached is moved out of
//! that memory before the new kernel overwrites it.
//!
//! the guest stands still -> newest blocks first: copied to a file of the keeper's, checked, released in the guest -> that file and
//! the old ledger are the dead incarnation; the memory is the next one's
//!
//! A block's page is released in the guest only where the caller knows that the guest was reset: then no kernel has it any more.
//! Otherwise it is only copied. That is right whatever the guest does, because the tag is checked on the copy.
//!
//! The guest waits meanwhile, so the time is limited. Blocks that were not reached are forgotten.

use std::path::Path;
use std::sync::{Arc, Mutex};
use std::thread::{Builder, available_parallelism};
use std::time::Instant;

use hearth_disk::block::RamPage;
use hearth_disk::ledger::{Entry, Ledger};
use hearth_disk::tag::Tagger;
use hearth_memory::{FileOffset, MemoryError, PAGE_BYTES, RamFile};

use crate::ember::trim_order;
use crate::incarnation::{Incarnation, IncarnationError, discard_files, lock, ram_path, remove};

const PAGE: usize = PAGE_BYTES as usize;
/// Blocks that are moved in the order of their pages, so that neighbours are read, written and released together.
const BATCH: usize = 4 << 10;
/// Longest run of neighbours. Each is released as soon as it is written: the copies of the next ones get its memory, which the
/// processor still has in its caches. Releasing after a whole batch took 1.5 times as long.
const RUN: usize = 256;
/// Most threads that move blocks. More would wait for the lock of the file that is written.
const THREADS_MAX: usize = 4;

/// What becomes of a page in the guest's memory whose block was copied.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Original {
    /// It is released, because the guest was reset: the memory in use stays the same.
    Release,
    /// It stays: the memory in use grows.
    Keep,
}

/// A rescue: from which guest, and within which limits.
pub struct Rescue<'a> {
    /// The guest that was reset.
    pub dead: &'a Incarnation,
    /// Makes the tags of its blocks.
    pub tagger: &'a Tagger,
    /// What becomes of its pages.
    pub original: Original,
    /// Most blocks to take.
    pub blocks_max: usize,
    /// When the guest must go on.
    pub until: Instant,
}

/// How far a rescue came, in blocks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Rescued {
    /// They are in the keeper's file.
    pub taken: u64,
    /// Their pages held something else.
    pub refused: u64,
    /// There was no time or memory for them.
    pub left: u64,
}

impl Rescue<'_> {
    /// Moves the blocks to a RAM file in this folder. Returns the dead incarnation, to be banked.
    pub fn run(&self, folder: &Path) -> Result<(Incarnation, Rescued), IncarnationError> {
        let (number, ledger) = (self.dead.number, self.dead.ledger.clone());
        let failed = |source| IncarnationError::Ram { number, source };
        let path = ram_path(folder, number);
        // One of an earlier keeper's.
        remove(&path);
        let ram = RamFile::create(&path, self.dead.ram.bytes()).map_err(failed)?;
        let rescued = ledger.as_ref().map(|ledger| self.move_blocks(&ram, ledger)).transpose();
        let rescued = rescued.inspect_err(|_| discard_files(folder, number)).map_err(failed)?;
        Ok((Incarnation { number, ram: Arc::new(ram), ledger }, rescued.unwrap_or_default()))
    }

    fn move_blocks(&self, to: &RamFile, ledger: &Mutex<Ledger>) -> Result<Rescued, MemoryError> {
        let mut newest_first = trim_order(&lock(ledger));
        newest_first.reverse();
        let mut rescued = Rescued::default();
        let mut reached = 0;
        for batch in newest_first[..self.blocks_max.min(newest_first.len())].chunks(BATCH) {
            if Instant::now() >= self.until {
                break;
            }
            let mut entries: Vec<Entry> = {
                let ledger = lock(ledger);
                batch.iter().filter_map(|page| ledger.entry(RamPage(*page))).collect()
            };
            entries.sort_unstable_by_key(|entry| entry.page.0);
            let refused = self.move_batch(&entries, to)?;
            rescued.taken += (entries.len() - refused.len()) as u64;
            rescued.refused += refused.len() as u64;
            forget(ledger, refused);
            reached += batch.len();
        }
        rescued.left = (newest_first.len() - reached) as u64;
        forget(ledger, newest_first.split_off(reached));
        Ok(rescued)
    }

    /// Moves blocks that are sorted by page, with several threads. Returns the pages that do not hold theirs.
    fn move_batch(&self, entries: &[Entry], to: &RamFile) -> Result<Vec<u32>, MemoryError> {
        let threads = available_parallelism().map_or(1, usize::from).min(THREADS_MAX);
        let share = entries.len().div_ceil(threads).max(RUN);
        let mut refused = Vec::new();
        std::thread::scope(|scope| {
            let begin = |share| (share, Builder::new().spawn_scoped(scope, move || self.move_share(share, to)));
            let shares: Vec<_> = entries.chunks(share).map(begin).collect();
            shares.into_iter().try_for_each(|(share, thread)| {
                let moved = match thread {
                    Ok(thread) => thread.join().expect("a share of a rescue does not panic"),
                    // The host has no more threads for this process.
                    Err(_) => self.move_share(share, to),
                };
                refused.extend(moved?);
                Ok(())
            })
        })?;
        Ok(refused)
    }

    fn move_share(&self, entries: &[Entry], to: &RamFile) -> Result<Vec<u32>, MemoryError> {
        let mut space = vec![0; RUN * PAGE];
        let mut refused = Vec::new();
        let neighbours = entries.chunk_by(|one, next| one.page.0 + 1 == next.page.0).flat_map(|run| run.chunks(RUN));
        for run in neighbours {
            let bytes = &mut space[..run.len() * PAGE];
            self.dead.ram.read(offset_of(run[0].page.0), bytes)?;
            let holds = |entry: &Entry, page: &[u8]| {
                page.try_into().is_ok_and(|page: &[u8; PAGE]| self.tagger.tag(page) == entry.tag)
            };
            let good: Vec<bool> =
                run.iter().zip(bytes.chunks_exact(PAGE)).map(|(entry, page)| holds(entry, page)).collect();
            let mut at = 0;
            for part in good.chunk_by(|one, next| one == next) {
                let (first, end) = (run[at].page.0, at + part.len());
                if part[0] {
                    to.write(offset_of(first), &bytes[at * PAGE..end * PAGE])?;
                    if self.original == Original::Release {
                        let first = u64::from(first);
                        self.dead.ram.release(first..first + part.len() as u64)?;
                    }
                } else {
                    refused.extend(run[at..end].iter().map(|entry| entry.page.0));
                }
                at = end;
            }
        }
        Ok(refused)
    }
}

fn offset_of(page: u32) -> FileOffset {
    FileOffset(u64::from(page) * PAGE_BYTES)
}

fn forget(ledger: &Mutex<Ledger>, pages: Vec<u32>) {
    let mut ledger = lock(ledger);
    pages.into_iter().for_each(|page| ledger.forget_page(RamPage(page)));
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::os::unix::fs::FileExt;
    use std::time::Duration;

    use hearth_disk::block::DiskId;
    use hearth_disk::warm::{AfterServing, WarmSource};

    use super::*;
    use crate::ember::Ember;

    const PAGES: u32 = 4096;

    struct Guest {
        folder: tempfile::TempDir,
        tagger: Tagger,
        incarnation: Incarnation,
    }

    fn contents(block: u64) -> [u8; PAGE] {
        let mut bytes = [0; PAGE];
        bytes.chunks_exact_mut(8).enumerate().for_each(|(word, chunk)| {
            chunk.copy_from_slice(&(block * 1_000_003 + word as u64).to_ne_bytes());
        });
        bytes
    }

    impl Guest {
        /// Every third page holds no block, every seventh something else than its block.
        fn new() -> Self {
            let (folder, tagger) = (tempfile::tempdir_in("/dev/shm").unwrap(), Tagger::new(b"a key like noise"));
            let incarnation = Incarnation::create(folder.path(), 1, u64::from(PAGES) * PAGE_BYTES, true).unwrap();
            let ram = File::options().write(true).open(incarnation.ram.path()).unwrap();
            let ledger = incarnation.ledger.clone().unwrap();
            for page in 0..PAGES {
                let block = u64::from(page) + 7;
                ram.write_all_at(&contents(block), u64::from(page) * PAGE_BYTES).unwrap();
                if known(page) {
                    let tagged = contents(if page % 7 == 0 { block + 1 } else { block });
                    lock(&ledger).record(RamPage(page), DiskId(0), block, tagger.tag(&tagged));
                }
            }
            // The keeper's file gets the same name, as it does where the guest's memory has none.
            std::fs::remove_file(incarnation.ram.path()).unwrap();
            Self { folder, tagger, incarnation }
        }

        fn rescue(&self, original: Original, blocks_max: usize, time: Duration) -> (Incarnation, Rescued) {
            let until = Instant::now() + time;
            let rescue = Rescue { dead: &self.incarnation, tagger: &self.tagger, original, blocks_max, until };
            rescue.run(self.folder.path()).unwrap()
        }

        /// Blocks that are served after the rescue.
        fn served(&self, dead: Incarnation) -> Vec<u64> {
            let ember = Ember::new(self.folder.path(), self.tagger.clone());
            ember.bank(dead).unwrap();
            let mut served = Vec::new();
            for block in 0..u64::from(PAGES) + 8 {
                let mut copied = None;
                if ember.serve(DiskId(0), block, AfterServing::Release, &mut |bytes| copied = Some(*bytes)).is_some() {
                    assert_eq!(copied, Some(contents(block)), "block {block}");
                    served.push(block);
                }
            }
            served
        }
    }

    fn known(page: u32) -> bool {
        !page.is_multiple_of(3)
    }

    fn good(page: u32) -> bool {
        known(page) && !page.is_multiple_of(7)
    }

    fn count(which: fn(u32) -> bool) -> u64 {
        (0..PAGES).filter(|page| which(*page)).count() as u64
    }

    const LONG: Duration = Duration::from_secs(60);

    #[test]
    fn whole_blocks_are_moved_and_the_memory_in_use_stays() {
        let guest = Guest::new();
        let before = guest.incarnation.ram.residency_bytes().unwrap();
        let (dead, rescued) = guest.rescue(Original::Release, usize::MAX, LONG);
        let expect = Rescued { taken: count(good), refused: count(known) - count(good), left: 0 };
        assert_eq!(rescued, expect);
        let [left, moved] = [&guest.incarnation.ram, &dead.ram].map(|ram| ram.residency_bytes().unwrap());
        assert_eq!((left + moved, moved), (before, count(good) * PAGE_BYTES));
        let blocks: Vec<_> = (0..PAGES).filter(|page| good(*page)).map(|page| u64::from(page) + 7).collect();
        assert_eq!(guest.served(dead), blocks);
    }

    #[test]
    fn memory_of_a_guest_that_may_live_is_not_touched() {
        let guest = Guest::new();
        let before = guest.incarnation.ram.residency_bytes().unwrap();
        let (dead, rescued) = guest.rescue(Original::Keep, usize::MAX, LONG);
        assert_eq!((rescued.taken, guest.incarnation.ram.residency_bytes().unwrap()), (count(good), before));
        assert_eq!(guest.served(dead).len() as u64, count(good));
    }

    #[test]
    fn newest_blocks_are_taken_within_the_limits() {
        let guest = Guest::new();
        let (dead, rescued) = guest.rescue(Original::Release, 500, LONG);
        assert_eq!((rescued.taken + rescued.refused, rescued.left), (500, count(known) - 500));
        let served = guest.served(dead);
        // An age is shared by a 256th of the memory.
        let oldest = u64::from(PAGES) - 500 * 3 / 2 - u64::from(PAGES) / 256 * 3;
        assert!(served.iter().all(|block| *block >= oldest), "{:?}", served.first());
        let guest = Guest::new();
        let (dead, rescued) = guest.rescue(Original::Release, usize::MAX, Duration::ZERO);
        assert_eq!(rescued, Rescued { left: count(known), ..Rescued::default() });
        assert_eq!(guest.served(dead), [0; 0]);
    }
}
