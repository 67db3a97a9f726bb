//! Boot set: the blocks that a machine reads between reset and ready, held in memory from one incarnation to the next.
//!
//! begin (a reset) -> blocks that are read become members -> ready -> forget, written: kept current -> serve, next time
//!
//! A member is a block that is wanted, with or without a copy. The copies lie in a file of their own, and a ledger names
//! the block and the tag of each, so that they survive the keeper. A block leaves the ledger before its page changes and
//! comes back when the page is whole: a keeper that is killed in between leaves a block that is not held, never a wrong
//! one.
//!
//! A copy is void from the moment that a change of its block begins. The same change, if it ended well and met no other
//! request, makes it valid again: with its own bytes, laid over the old ones where it changed a part. Any doubt (a second
//! change, a failure, a discard) costs the copy and not the membership: the next read or whole write brings it back.
//!
//! The guest chooses what it reads, so everything is bounded: there are never more members than pages within the limit,
//! and what a boot that came to its end has read is not given up for what another one reads before its own end.

use std::cmp::Reverse;
use std::collections::HashMap;
use std::fs::{self, File, OpenOptions};
use std::io;
use std::ops::Range;
use std::os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

use crate::block::{BLOCK_BYTES, DiskId, RamPage};
use crate::ledger::{Ledger, LedgerError};
use crate::tag::{Tag, Tagger};
use crate::warm::{AfterServing, WarmSource};

mod tally;

use tally::Tally;
pub use tally::{DiskTally, Plan};

/// All files of a boot set begin so.
pub const FILE_PREFIX: &str = "boot-set";
const PAGES_FILE: &str = "boot-set-pages";
const LEDGER_FILE: &str = "boot-set-ledger";
const BLOCK: u64 = BLOCK_BYTES as u64;
/// A page of the file, and its entry in the ledger, which has a head of a page and ends with a whole one.
const BYTES_PER_SLOT: u64 = BLOCK + 16;

#[derive(Debug, thiserror::Error)]
pub enum BootSetError {
    #[error("cannot {action} {path}, which holds the boot set")]
    File { path: PathBuf, action: &'static str, source: io::Error },
    #[error("the ledger of the boot set")]
    Ledger(#[from] LedgerError),
}

pub struct BootSet {
    tagger: Tagger,
    limit_bytes: u64,
    /// Between reset and ready.
    learning: AtomicBool,
    state: Mutex<State>,
}

type Key = (DiskId, u64);

struct State {
    pages: File,
    pages_path: PathBuf,
    ledger: Ledger,
    slots: u32,
    free: Vec<u32>,
    members: HashMap<Key, Member>,
    /// Counts resets, from 1.
    boot: u32,
    /// The last boot that came to be ready.
    complete: u32,
    /// Counts what is read during a boot.
    order: u32,
    /// What may be given up during this boot, the oldest last.
    victims: Vec<Key>,
    tally: Tally,
    damaged: u64,
}

struct Member {
    /// The last boot that read it, and when in it.
    boot: u32,
    order: u32,
    place: Place,
}

#[derive(Clone, Copy)]
enum Place {
    Missing,
    /// A change of the block has begun: the page holds what was there before it.
    Void {
        slot: u32,
        tag: Tag,
    },
    /// In the ledger as well, with its tag.
    Held {
        slot: u32,
    },
}

impl BootSet {
    /// What an earlier keeper left in this folder, or an empty one. Copies whose bytes are not what their tag says are
    /// dropped. Files, with all that belongs to them, never hold more than the limit.
    pub fn open(folder: &Path, limit_bytes: u64, tagger: Tagger) -> Result<Self, BootSetError> {
        let slots = (limit_bytes.saturating_sub(2 * BLOCK) / BYTES_PER_SLOT).clamp(1, u64::from(u32::MAX) / 2) as u32;
        let state = match State::reopen(folder, slots, &tagger) {
            Some(state) => state,
            None => State::create(folder, slots)?,
        };
        Ok(Self { tagger, limit_bytes, learning: AtomicBool::new(false), state: Mutex::new(state) })
    }

    /// Removes the files of a boot set that nobody wants any more.
    pub fn discard(folder: &Path) -> io::Result<()> {
        for name in [PAGES_FILE, LEDGER_FILE] {
            match fs::remove_file(folder.join(name)) {
                Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
                _ => {}
            }
        }
        Ok(())
    }

    /// The machine is reset: what it reads from now on is its next boot set.
    pub fn begin(&self) {
        let mut state = self.lock();
        state.boot += 1;
        state.order = 0;
        state.tally = Tally::default();
        state.find_victims();
        self.learning.store(true, Ordering::Relaxed);
    }

    /// The boot is over. False: it was over before.
    pub fn ready(&self) -> bool {
        let mut state = self.lock();
        let was_learning = self.learning.swap(false, Ordering::Relaxed);
        if was_learning {
            state.complete = state.boot;
            state.victims = Vec::new();
        }
        was_learning
    }

    pub fn is_learning(&self) -> bool {
        self.learning.load(Ordering::Relaxed)
    }

    /// Gives up everything, membership and copies, and the memory.
    pub fn clear(&self) -> Result<(), BootSetError> {
        self.lock().clear()
    }

    /// Would a copy of this block be taken now, if it were offered?
    pub fn has_room_for(&self, disk: DiskId, block: u64) -> bool {
        let state = self.lock();
        self.is_learning()
            && (state.has_room() || !state.victims.is_empty() || state.members.contains_key(&(disk, block)))
    }

    /// The guest read the block, and it came from elsewhere in memory.
    pub fn read_from_memory(&self, disk: DiskId, block: u64, bytes: &[u8; BLOCK_BYTES]) {
        let mut state = self.lock();
        if self.is_learning() && state.admit((disk, block)) {
            state.tally.of(disk).ember_hits += 1;
            state.hold((disk, block), bytes, self.tagger.tag(bytes));
        }
    }

    /// Takes from a ledger what is held here: no block is kept twice.
    pub fn take_over_from(&self, ledger: &mut Ledger) {
        let state = self.lock();
        let held = state.members.iter().filter(|(_, member)| matches!(member.place, Place::Held { .. }));
        for ((disk, block), _) in held {
            if let Some(entry) = ledger.find(*disk, *block) {
                ledger.forget_page(entry.page);
            }
        }
    }

    /// What the next boot will read if it is like the last one, and how this one, or the last one, went.
    pub fn plan(&self) -> Plan {
        let state = self.lock();
        let wanted = |member: &&Member| member.boot >= state.complete;
        let mut plan = state.tally.plan();
        plan.learning = self.is_learning();
        plan.damaged = state.damaged;
        for (key, member) in state.members.iter().filter(|(_, member)| wanted(member)) {
            let disk = plan.disks.entry(key.0).or_default();
            disk.blocks += 1;
            disk.held += u64::from(matches!(member.place, Place::Held { .. }));
        }
        plan
    }

    pub fn is_empty(&self) -> bool {
        self.lock().ledger.is_empty()
    }

    pub fn limit_bytes(&self) -> u64 {
        self.limit_bytes
    }

    /// Host memory that the files hold now.
    pub fn resident_bytes(&self) -> u64 {
        let state = self.lock();
        let of_file = |metadata: io::Result<fs::Metadata>| metadata.map_or(0, |metadata| metadata.blocks() * 512);
        of_file(state.pages.metadata()) + of_file(fs::metadata(state.ledger.path()))
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
        let Some((bytes, tag)) = state.read(slot, &self.tagger) else {
            state.damaged += 1;
            state.drop_copy((disk, block));
            return None;
        };
        copy(&bytes);
        if self.is_learning() {
            state.touch((disk, block));
            state.tally.of(disk).hits += 1;
        }
        Some(tag)
    }

    fn may_hold(&self, disk: DiskId, mut blocks: Range<u64>) -> bool {
        let state = self.lock();
        let held = |block| matches!(state.members.get(&(disk, block)), Some(Member { place: Place::Held { .. }, .. }));
        blocks.any(held)
    }

    fn learns(&self) -> bool {
        self.is_learning()
    }

    fn read_from_image(&self, disk: DiskId, block: u64, bytes: Option<&[u8; BLOCK_BYTES]>) {
        let mut state = self.lock();
        let member = state.members.get(&(disk, block));
        // One that is held was read beside one that is not, or while a write of it was on its way.
        if !self.is_learning() || matches!(member, Some(Member { place: Place::Held { .. }, .. })) {
            return;
        }
        state.tally.missed(disk, block);
        if state.admit((disk, block))
            && let Some(bytes) = bytes
        {
            state.hold((disk, block), bytes, self.tagger.tag(bytes));
        }
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

    fn written(&self, disk: DiskId, block: u64, start: usize, bytes: &[u8]) {
        let mut state = self.lock();
        let Some(member) = state.members.get(&(disk, block)) else { return };
        if let Ok(bytes) = bytes.try_into() {
            return state.hold((disk, block), bytes, self.tagger.tag(bytes));
        }
        let Place::Void { slot, tag } = member.place else { return state.drop_copy((disk, block)) };
        let Some(mut whole) = state.read_tagged(slot, tag, &self.tagger) else { return state.drop_copy((disk, block)) };
        whole[start..start + bytes.len()].copy_from_slice(bytes);
        state.hold((disk, block), &whole, self.tagger.tag(&whole));
    }
}

impl State {
    fn create(folder: &Path, slots: u32) -> Result<Self, BootSetError> {
        let pages_path = folder.join(PAGES_FILE);
        let failed = |action| {
            let path = pages_path.clone();
            move |source| BootSetError::File { path, action, source }
        };
        BootSet::discard(folder).map_err(failed("remove the old"))?;
        let options = &mut OpenOptions::new();
        let pages = options.read(true).write(true).create_new(true).mode(0o600).open(&pages_path);
        let pages = pages.map_err(failed("make"))?;
        pages.set_len(u64::from(slots) * BLOCK).map_err(failed("size"))?;
        let ledger = Ledger::create(&folder.join(LEDGER_FILE), slots)?;
        Ok(Self::over(pages, pages_path, ledger, slots))
    }

    /// None: there is nothing that fits.
    fn reopen(folder: &Path, slots: u32, tagger: &Tagger) -> Option<Self> {
        let pages_path = folder.join(PAGES_FILE);
        let pages = OpenOptions::new().read(true).write(true).open(&pages_path).ok()?;
        let ledger = Ledger::open(&folder.join(LEDGER_FILE)).ok()?;
        let fits = pages.metadata().ok()?.len() == u64::from(slots) * BLOCK && ledger.ram_pages() == slots;
        let mut state = fits.then(|| Self::over(pages, pages_path, ledger, slots))?;
        state.adopt(tagger);
        Some(state)
    }

    fn over(pages: File, pages_path: PathBuf, ledger: Ledger, slots: u32) -> Self {
        Self {
            pages,
            pages_path,
            ledger,
            slots,
            free: (0..slots).rev().collect(),
            members: HashMap::new(),
            boot: 0,
            complete: 0,
            order: 0,
            victims: Vec::new(),
            tally: Tally::default(),
            damaged: 0,
        }
    }

    /// What the ledger names is taken for what the last boot read.
    fn adopt(&mut self, tagger: &Tagger) {
        let mut entries: Vec<_> = self.ledger.entries().collect();
        entries.sort_by(|one, other| self.ledger.older_first(one.age, other.age));
        (self.boot, self.complete) = (1, 1);
        for entry in entries {
            if self.read_tagged(entry.page.0, entry.tag, tagger).is_none() {
                self.ledger.forget_page(entry.page);
                self.damaged += 1;
                continue;
            }
            self.order += 1;
            let member = Member { boot: 1, order: self.order, place: Place::Held { slot: entry.page.0 } };
            self.members.insert((entry.disk, entry.block), member);
        }
        let ledger = &self.ledger;
        self.free.retain(|&slot| ledger.entry(RamPage(slot)).is_none());
    }

    fn clear(&mut self) -> Result<(), BootSetError> {
        let taken: Vec<RamPage> = self.ledger.entries().map(|entry| entry.page).collect();
        taken.into_iter().for_each(|page| self.ledger.forget_page(page));
        self.members.clear();
        self.victims.clear();
        self.tally = Tally::default();
        self.free = (0..self.slots).rev().collect();
        let failed = |source| BootSetError::File { path: self.pages_path.clone(), action: "empty", source };
        self.pages.set_len(0).and_then(|()| self.pages.set_len(u64::from(self.slots) * BLOCK)).map_err(failed)
    }

    fn has_room(&self) -> bool {
        self.members.len() < self.slots as usize
    }

    /// The oldest last, so that it is taken first.
    fn find_victims(&mut self) {
        let complete = self.complete;
        let age = |member: &Member| (member.boot, member.order);
        let old = self.members.iter().filter(|(_, member)| member.boot < complete);
        let mut old: Vec<_> = old.map(|(key, member)| (age(member), *key)).collect();
        old.sort_unstable_by_key(|(age, _)| Reverse(*age));
        self.victims = old.into_iter().map(|(_, key)| key).collect();
    }

    /// This boot reads the block. False: there is no room for it.
    fn admit(&mut self, key: Key) -> bool {
        if !self.members.contains_key(&key) {
            if !self.has_room() && !self.evict() {
                self.tally.of(key.0).no_room += 1;
                return false;
            }
            self.members.insert(key, Member { boot: 0, order: 0, place: Place::Missing });
        }
        self.touch(key);
        true
    }

    fn touch(&mut self, key: Key) {
        self.order += 1;
        if let Some(member) = self.members.get_mut(&key) {
            (member.boot, member.order) = (self.boot, self.order);
        }
    }

    fn evict(&mut self) -> bool {
        while let Some(key) = self.victims.pop() {
            if self.members.get(&key).is_some_and(|member| member.boot < self.complete) {
                self.drop_copy(key);
                self.members.remove(&key);
                return true;
            }
        }
        false
    }

    /// Only for members: each has a page within the limit.
    fn hold(&mut self, key: Key, bytes: &[u8; BLOCK_BYTES], tag: Tag) {
        let Some(member) = self.members.get_mut(&key) else { return };
        let slot = match member.place {
            Place::Held { slot } | Place::Void { slot, .. } => Some(slot),
            Place::Missing => self.free.pop(),
        };
        let Some(slot) = slot else { return };
        self.ledger.forget_page(RamPage(slot));
        match self.pages.write_all_at(bytes, u64::from(slot) * BLOCK) {
            Ok(()) => {
                self.ledger.record(RamPage(slot), key.0, key.1, tag);
                member.place = Place::Held { slot };
            }
            // The memory file system is full, perhaps.
            Err(error) => {
                tracing::debug!(%error, "a block cannot be held in the boot set");
                member.place = Place::Missing;
                self.free.push(slot);
            }
        }
    }

    fn void(&mut self, key: Key) {
        let Some(member) = self.members.get_mut(&key) else { return };
        match member.place {
            Place::Missing => {}
            Place::Held { slot } => {
                let entry = self.ledger.entry(RamPage(slot));
                self.ledger.forget_page(RamPage(slot));
                match entry {
                    Some(entry) => member.place = Place::Void { slot, tag: entry.tag },
                    None => self.drop_copy(key),
                }
            }
            // Two changes: what the block holds after both is not known.
            Place::Void { .. } => self.drop_copy(key),
        }
    }

    fn drop_copy(&mut self, key: Key) {
        let Some(member) = self.members.get_mut(&key) else { return };
        if let Place::Held { slot } | Place::Void { slot, .. } = member.place {
            self.ledger.forget_page(RamPage(slot));
            self.free.push(slot);
        }
        member.place = Place::Missing;
    }

    /// A page that the ledger names, if it is what the ledger says.
    fn read(&self, slot: u32, tagger: &Tagger) -> Option<([u8; BLOCK_BYTES], Tag)> {
        let tag = self.ledger.entry(RamPage(slot))?.tag;
        Some((self.read_tagged(slot, tag, tagger)?, tag))
    }

    fn read_tagged(&self, slot: u32, tag: Tag, tagger: &Tagger) -> Option<[u8; BLOCK_BYTES]> {
        let mut bytes = [0; BLOCK_BYTES];
        self.pages.read_exact_at(&mut bytes, u64::from(slot) * BLOCK).ok()?;
        (tagger.tag(&bytes) == tag).then_some(bytes)
    }
}
