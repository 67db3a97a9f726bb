//! Boot set: the blocks that a machine reads between reset and ready, held in memory from one incarnation to the next.
//!
//! begin (a reset) -> blocks that are read become members -> ready -> forget, written: kept current -> serve, next time
//!
//! A member is a block that is wanted, with or without a copy. The copies lie in a file of their own, and a ledger names
//! the block and the tag of each, so that they survive the keeper. A block leaves the ledger before its page changes and
//! comes back when the page is whole: a keeper that is killed in between leaves a block that is not held, never a wrong
//! one.
//!
//! As far as what boots read leaves room, blocks that are often read later are held too (`heat`).
//!
//! A copy is void from the moment that a change of its block begins. The same change, if it ended well and met no other
//! request, makes it valid again: with its own bytes, laid over the old ones where it changed a part. Any doubt (a second
//! change, a failure, a discard) costs the copy and not the membership: the next read or whole write brings it back.
//!
//! The guest chooses what it reads, so everything is bounded: no more pages take memory than the limit allows, there are
//! never more members than twice that (a block of zeroes takes a place in the ledger and no memory), and what a boot that came to its end has read is not given up for what another one reads before its own end.

use std::fs;
use std::io;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

use crate::block::{BLOCK_BYTES, DiskId};
use crate::ledger::{Entry, Ledger, LedgerError};
use crate::tag::{Tag, Tagger};
use crate::warm::{AfterServing, Answered, RequestObserver, WarmSource};

mod carry;
mod heat;
mod pages;
mod room;
mod state;
mod tally;

use pages::resident;
use state::{Kind, LIST_BYTES_PER_SLOT, Member, Place, State};
pub use tally::{Answers, DiskTally, PhaseTally, Plan, PlannedRun, Share};
use tally::{Tally, part_of};

/// Prefix of a boot set's files.
pub const FILE_PREFIX: &str = "boot-set";
const PAGES_FILE: &str = "boot-set-pages";
const LEDGER_FILE: &str = "boot-set-ledger";
const BLOCK: u64 = BLOCK_BYTES as u64;
/// Pages given back under one lock. No read is answered meanwhile: some 5 us each.
const PUNCHES_AT_ONCE: usize = 16;
/// Slots for each page that takes memory: a second one for a block of zeroes, which takes none.
const SLOTS_PER_PAGE: u64 = 2;
/// A page of the file, the entries in the ledger, which has a head of a page and ends with a whole one, and the lists.
const BYTES_PER_PAGE: u64 = BLOCK + SLOTS_PER_PAGE * (16 + LIST_BYTES_PER_SLOT);

/// Why a boot set cannot be used.
#[allow(missing_docs, reason = "each variant's message describes it")]
#[derive(Debug, thiserror::Error)]
pub enum BootSetError {
    #[error("cannot {action} {path}, which holds the boot set")]
    File { path: PathBuf, action: &'static str, source: io::Error },
    #[error("the ledger of the boot set")]
    Ledger(#[from] LedgerError),
}

/// A machine's boot set. Shared by its disks.
pub struct BootSet {
    tagger: Tagger,
    limit_bytes: u64,
    left_out: u64,
    /// Between reset and ready.
    learning: AtomicBool,
    state: Mutex<State>,
}

type Key = (DiskId, u64);

impl BootSet {
    /// Opens what an earlier keeper left in this folder, or makes an empty boot set. Copies whose bytes do not fit their tag are
    /// dropped. Files and lists together never hold more than the limit.
    pub fn open(folder: &Path, limit_bytes: u64, tagger: Tagger) -> Result<Self, BootSetError> {
        let pages = limit_bytes.saturating_sub(2 * BLOCK) / BYTES_PER_PAGE;
        let pages = pages.clamp(1, u64::from(u32::MAX) / 2 / SLOTS_PER_PAGE) as u32;
        let (state, left_out) = match State::find(folder, &tagger) {
            Some(found) if found.fits(pages) => (found, 0),
            found => {
                let mut fresh = State::create(folder, pages)?;
                let left_out = found.map_or(0, |found| fresh.carry_over(found, &tagger));
                (fresh, left_out)
            }
        };
        Ok(Self { tagger, limit_bytes, left_out, learning: AtomicBool::new(false), state: Mutex::new(state) })
    }

    /// Removes the files of a boot set that is no longer wanted.
    pub fn discard(folder: &Path) -> io::Result<()> {
        for name in [PAGES_FILE, LEDGER_FILE] {
            match fs::remove_file(folder.join(name)) {
                Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
                _ => {}
            }
        }
        Ok(())
    }

    /// The machine is reset: what it reads from now on becomes its next boot set.
    pub fn begin(&self) {
        let mut state = self.lock();
        state.boot += 1;
        state.order = 0;
        state.tally = Tally::default();
        state.cool_down();
        state.drop_stale();
        state.find_victims();
        self.learning.store(true, Ordering::Relaxed);
    }

    /// The boot is over. False if it was over before.
    pub fn ready(&self) -> bool {
        let mut state = self.lock();
        let was_learning = self.learning.swap(false, Ordering::Relaxed);
        if was_learning {
            state.completes();
            drop(state);
            // The guest runs, and its reads wait for the lock.
            while self.lock().give_back_free(PUNCHES_AT_ONCE) {
                std::thread::yield_now();
            }
        }
        was_learning
    }

    pub(crate) fn is_learning(&self) -> bool {
        self.learning.load(Ordering::Relaxed)
    }

    /// Gives up everything, membership and copies, and the memory.
    pub fn clear(&self) -> Result<(), BootSetError> {
        self.lock().clear()
    }

    /// Gives up the copies of this disk's blocks, and still expects them to be read. Returns how many copies those were.
    pub fn forget_disk(&self, disk: DiskId) -> u64 {
        let mut state = self.lock();
        let held = |(key, member): (&Key, &Member)| {
            (key.0 == disk && !matches!(member.place, Place::Missing))
                .then_some((*key, matches!(member.place, Place::Held { .. })))
        };
        let copies: Vec<_> = state.members.iter().filter_map(held).collect();
        copies.iter().for_each(|(key, _)| state.drop_copy(*key));
        copies.iter().filter(|(_, was_held)| *was_held).count() as u64
    }

    /// Whether a copy of this block would be taken now.
    pub fn has_room_for(&self, disk: DiskId, block: u64) -> bool {
        let state = self.lock();
        self.is_learning() && (state.can_make_room() || state.members.contains_key(&(disk, block)))
    }

    /// Counts a read that the ember answered, and whose block it kept.
    pub fn ember_answered(&self, disk: DiskId, block: u64) {
        let learning = self.is_learning();
        let mut state = self.lock();
        if learning {
            state.tally.of(disk).boot.ember_hits += 1;
        } else {
            state.tally.later(disk, block, |phase| phase.ember_hits += 1);
        }
    }

    /// Takes a block that the guest read, and that came from elsewhere in memory.
    pub fn read_from_memory(&self, disk: DiskId, block: u64, bytes: &[u8; BLOCK_BYTES]) {
        let mut state = self.lock();
        if self.is_learning()
            && let Some(member) = state.admit((disk, block), Some(bytes))
        {
            member.reads.hits += 1;
            state.tally.of(disk).boot.ember_hits += 1;
            state.hold((disk, block), bytes, self.tagger.tag(bytes));
        }
    }

    /// The entries of a ledger whose blocks are held here.
    pub fn common_with(&self, ledger: &Ledger) -> Vec<Entry> {
        let state = self.lock();
        let held = state.members.iter().filter(|(_, member)| matches!(member.place, Place::Held { .. }));
        held.filter_map(|((disk, block), _)| ledger.find(*disk, *block)).collect()
    }

    /// Removes from a ledger what is held here, so that no block is kept twice.
    pub fn take_over_from(&self, ledger: &mut Ledger) {
        self.common_with(ledger).iter().for_each(|entry| ledger.forget_page(entry.page));
    }

    /// The blocks that the next boot will read if it is like the last one, and how the current or last boot went.
    pub fn plan(&self) -> Plan {
        let state = self.lock();
        let mut plan = state.tally.plan();
        let mut reads = Vec::new();
        plan.learning = self.is_learning();
        plan.damaged = state.damaged;
        for (key, member) in &state.members {
            let disk = plan.disks.entry(key.0).or_default();
            let held = u64::from(matches!(member.place, Place::Held { .. }));
            match member.kind {
                Kind::Boot if member.boot >= state.complete() => {
                    disk.blocks += 1;
                    disk.held += held;
                    reads.push((member.boot, member.order, *key, held == 1));
                }
                Kind::Boot => {}
                Kind::Late => disk.late += held,
            }
        }
        drop(state);
        reads.sort_unstable();
        plan.list(reads.into_iter().map(|(_, _, key, is_held)| (key, is_held)));
        plan
    }

    /// From now on, what is read of a disk is also counted by these parts, which are sorted and do not overlap. Call it when the boot
    /// is over.
    pub fn divide(&self, disk: DiskId, parts: &[Range<u64>]) {
        self.lock().tally.divide(disk, parts);
    }

    /// Parts of a disk, which are sorted and do not overlap, in the last boot and the next one. The last element is for all blocks
    /// beside them.
    pub fn shares(&self, disk: DiskId, parts: &[Range<u64>]) -> Vec<Share> {
        let state = self.lock();
        let later = state.tally.later_of(disk, parts);
        let mut shares: Vec<Share> = later.into_iter().map(|later| Share { later, ..Share::default() }).collect();
        let of_boots = state.members.iter().filter(|(key, member)| key.0 == disk && member.kind == Kind::Boot);
        for ((_, block), member) in of_boots {
            let share = &mut shares[part_of(parts, *block)];
            if member.boot >= state.complete() {
                share.blocks += 1;
                share.held += u64::from(matches!(member.place, Place::Held { .. }));
            }
            if member.boot == state.boot {
                share.hits += u64::from(member.reads.hits);
                share.misses += u64::from(member.reads.misses);
            }
        }
        shares
    }

    /// The held blocks that the next boot is expected to read, in the order in which they were read, and those held for their
    /// heat.
    pub fn held(&self) -> Vec<(DiskId, u64)> {
        let state = self.lock();
        let is_held = |member: &Member| matches!(member.place, Place::Held { .. });
        let held = state.members.iter().filter(|(_, member)| is_held(member));
        let mut held: Vec<_> = held.map(|(key, member)| ((member.boot, member.order), *key)).collect();
        held.sort_unstable_by_key(|(age, _)| *age);
        held.into_iter().map(|(_, key)| key).collect()
    }

    /// A copy of a block. `None` if it is not held, or is damaged.
    pub fn copy_of(&self, disk: DiskId, block: u64) -> Option<[u8; BLOCK_BYTES]> {
        let state = self.lock();
        let Place::Held { slot } = state.members.get(&(disk, block))?.place else { return None };
        let mut bytes = [0; BLOCK_BYTES];
        state.read(slot, &self.tagger, &mut bytes).map(|_| bytes)
    }

    /// Takes back a block that was held when the machine was stopped. For the time before the first boot. False if there is no
    /// space for it.
    pub fn put_back(&self, disk: DiskId, block: u64, bytes: &[u8; BLOCK_BYTES]) -> bool {
        let mut state = self.lock();
        state.take_for_read();
        if state.admit((disk, block), Some(bytes)).is_none() {
            return false;
        }
        state.hold((disk, block), bytes, self.tagger.tag(bytes));
        state.members.contains_key(&(disk, block))
    }

    /// Whether nothing is held.
    pub fn is_empty(&self) -> bool {
        self.lock().ledger.is_empty()
    }

    /// The most host memory that its files and lists may hold.
    pub fn limit_bytes(&self) -> u64 {
        self.limit_bytes
    }

    /// Blocks of an earlier keeper's boot set for which a lower limit has no space.
    pub fn left_out(&self) -> u64 {
        self.left_out
    }

    /// Host memory that files and lists hold now.
    pub fn resident_bytes(&self) -> u64 {
        let state = self.lock();
        state.pages.resident_bytes() + resident(fs::metadata(state.ledger.path())) + state.list_bytes()
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        // Each change leaves the files right; what a panic may lose is a slot.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl WarmSource for BootSet {
    fn serve(
        &self,
        disk: DiskId,
        block: u64,
        _after: AfterServing,
        copy: &mut dyn FnMut(&[u8; BLOCK_BYTES]),
    ) -> Option<Tag> {
        let mut state = self.lock();
        let Place::Held { slot } = state.members.get(&(disk, block))?.place else { return None };
        let mut bytes = [0; BLOCK_BYTES];
        let Some(tag) = state.read(slot, &self.tagger, &mut bytes) else {
            state.damaged += 1;
            state.drop_copy((disk, block));
            return None;
        };
        // The guest's memory may still be arriving, and nobody else may wait for that. Only this disk's thread changes its blocks.
        drop(state);
        copy(&bytes);
        let mut state = self.lock();
        if self.is_learning() {
            if let Some(member) = state.touch((disk, block)) {
                member.reads.hits += 1;
            }
            state.tally.of(disk).boot.hits += 1;
        } else {
            state.tally.later(disk, block, |phase| phase.hits += 1);
            let boot = state.boot;
            if let Some(member) = state.members.get_mut(&(disk, block)).filter(|member| member.kind == Kind::Late) {
                member.boot = boot;
            }
        }
        Some(tag)
    }

    fn may_hold(&self, disk: DiskId, mut blocks: Range<u64>) -> bool {
        let state = self.lock();
        blocks.any(|block| state.holds((disk, block)))
    }

    fn forget(&self, disk: DiskId, blocks: Range<u64>) {
        let mut state = self.lock();
        // A discard may cover the whole disk: then there are fewer members.
        if blocks.end.saturating_sub(blocks.start) > state.members.len() as u64 {
            let inside = |key: &&Key| key.0 == disk && blocks.contains(&key.1);
            let keys: Vec<Key> = state.members.keys().filter(inside).copied().collect();
            keys.into_iter().for_each(|key| state.void(key));
        } else {
            blocks.for_each(|block| state.void((disk, block)));
        }
    }
}

impl RequestObserver for BootSet {
    fn learns(&self) -> bool {
        self.is_learning()
    }

    fn wants(&self, bytes: u64) -> bool {
        self.is_learning() || bytes <= heat::BYTES_MAX
    }

    fn missed(&self, disk: DiskId, blocks: Range<u64>) {
        let mut state = self.lock();
        blocks.for_each(|block| state.tally.later(disk, block, |phase| phase.misses += 1));
    }

    fn read_from_image(&self, disk: DiskId, block: u64, bytes: Option<&[u8; BLOCK_BYTES]>) {
        let mut state = self.lock();
        let member = state.members.get(&(disk, block));
        // A held block was read beside one that is not, or while a write of it was in flight.
        if matches!(member, Some(Member { place: Place::Held { .. }, .. })) {
            return;
        }
        if !self.is_learning() {
            state.tally.later(disk, block, |phase| phase.misses += 1);
            return state.read_late((disk, block), bytes, &self.tagger);
        }
        state.tally.missed(disk, block);
        let Some(member) = state.admit((disk, block), bytes) else { return };
        member.reads.misses += 1;
        if let Some(bytes) = bytes {
            state.hold((disk, block), bytes, self.tagger.tag(bytes));
        }
    }

    fn answered(&self, _disk: DiskId, how: Answered) {
        self.lock().tally.answers.add(how);
    }

    fn written(&self, disk: DiskId, block: u64, start: usize, bytes: &[u8]) {
        let (mut state, key) = (self.lock(), (disk, block));
        if !state.members.contains_key(&key) {
            return;
        }
        match state.after_write(key, start, bytes, &self.tagger) {
            Some(page) => state.hold(key, &page, self.tagger.tag(&page)),
            None => state.drop_copy(key),
        }
    }
}
