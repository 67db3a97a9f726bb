//! State of a boot set, under its lock: members, pages, and the ledger that names them.

use std::cmp::Reverse;
use std::collections::HashMap;
use std::path::Path;

use super::heat::Heat;
use super::pages::{Pages, ZEROES};
use super::room::Free;
use super::tally::Tally;
use super::{BootSet, BootSetError, Key, LEDGER_FILE, SLOTS_PER_PAGE};
use crate::block::{BLOCK_BYTES, DiskId, RamPage};
use crate::ledger::Ledger;
use crate::tag::{Tag, Tagger};

/// A member goes after this many complete boots without a read of it: what an update has replaced, or what is read
/// after one kind of end only, is not held for ever.
const BOOTS_WITHOUT: usize = 4;
/// Bytes for a slot of a hash table that has just grown. There may be as many hot blocks as members.
const TABLE_BYTES_PER_SLOT: usize = ((size_of::<(Key, Member)>() + 1 + size_of::<(Key, u32)>() + 1) * 16).div_ceil(7);
/// Most bytes that the lists need for a slot: members, heat, victims, free slots, which of them are filled, the ledger's index.
pub(super) const LIST_BYTES_PER_SLOT: u64 =
    (TABLE_BYTES_PER_SLOT + size_of::<Key>() + 4 * size_of::<u32>() + 1 + 6) as u64;
/// Marks a block in the ledger that no boot has read. A machine has fewer disks.
const UNREAD: u8 = 0x80;

pub(super) struct State {
    pub(super) pages: Pages,
    pub(super) ledger: Ledger,
    /// Pages of the file. At most `pages_max` of them take memory.
    pub(super) slots: u32,
    pub(super) pages_max: usize,
    pub(super) free: Free,
    pub(super) members: HashMap<Key, Member>,
    /// Counts resets, from 1.
    pub(super) boot: u32,
    /// The last boots that became ready, the newest at the end.
    completed: [u32; BOOTS_WITHOUT],
    /// Counts what is read during a boot.
    pub(super) order: u32,
    /// Members that may be given up during this boot, the oldest last.
    pub(super) victims: Vec<Key>,
    pub(super) heat: Heat,
    pub(super) tally: Tally,
    pub(super) damaged: u64,
}

pub(super) struct Member {
    /// The last boot that read it, and when in it.
    pub(super) boot: u32,
    pub(super) order: u32,
    pub(super) kind: Kind,
    /// In that boot.
    pub(super) reads: Reads,
    pub(super) place: Place,
}

/// Why a block is held.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Kind {
    /// A boot has read it before its end.
    Boot,
    /// It is read often after ready (see `heat`).
    Late,
}

/// How often a boot has read a block, by what answered.
#[derive(Clone, Copy, Default)]
pub(super) struct Reads {
    pub(super) hits: u32,
    pub(super) misses: u32,
}

#[derive(Clone, Copy)]
pub(super) enum Place {
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

impl Member {
    /// Whether it may be given up for a block that a boot reads.
    fn may_go(&self, complete: u32) -> bool {
        self.kind != Kind::Boot || self.boot < complete
    }

    fn disk_in_ledger(&self, DiskId(disk): DiskId) -> DiskId {
        DiskId(if self.kind == Kind::Boot { disk } else { disk | UNREAD })
    }
}

impl State {
    pub(super) fn create(folder: &Path, pages_max: u32) -> Result<Self, BootSetError> {
        let failed = |source| BootSetError::File { path: folder.to_owned(), action: "remove old files from", source };
        BootSet::discard(folder).map_err(failed)?;
        let slots = pages_max * SLOTS_PER_PAGE as u32;
        let pages = Pages::create(folder, slots)?;
        let ledger = Ledger::create(&folder.join(LEDGER_FILE), slots)?;
        ledger.take_room()?;
        Ok(Self::over(pages, ledger, pages_max))
    }

    /// Opens what an earlier keeper left, whatever its limit was. `None` if it cannot be used.
    pub(super) fn find(folder: &Path, tagger: &Tagger) -> Option<Self> {
        let ledger = Ledger::open(&folder.join(LEDGER_FILE)).ok()?;
        let pages = Pages::open(folder, ledger.ram_pages())?;
        let pages_max = ledger.ram_pages() / SLOTS_PER_PAGE as u32;
        let mut state = Self::over(pages, ledger, pages_max);
        state.adopt(tagger);
        Some(state)
    }

    /// Whether it can be used with this limit as it is.
    pub(super) fn fits(&self, pages_max: u32) -> bool {
        let is_as_large = self.slots == pages_max * SLOTS_PER_PAGE as u32;
        is_as_large && self.pages.filled_pages() <= self.pages_max && self.ledger.take_room().is_ok()
    }

    fn over(pages: Pages, ledger: Ledger, pages_max: u32) -> Self {
        let slots = pages_max * SLOTS_PER_PAGE as u32;
        let (filled, empty) = (0..slots).rev().partition(|&slot| pages.is_filled(slot));
        Self {
            pages,
            ledger,
            slots,
            pages_max: pages_max as usize,
            free: Free { empty, filled },
            members: HashMap::new(),
            boot: 0,
            completed: [0; BOOTS_WITHOUT],
            order: 0,
            victims: Vec::new(),
            heat: Heat::default(),
            tally: Tally::default(),
            damaged: 0,
        }
    }

    /// Host memory of the lists.
    pub(super) fn list_bytes(&self) -> u64 {
        // Seven eighths of a table can be used.
        let table = |capacity: usize, entry: usize| (capacity * 8 / 7).next_power_of_two() * (entry + 1);
        let members = table(self.members.capacity(), size_of::<(Key, Member)>());
        let heat = table(self.heat.capacity(), size_of::<(Key, u32)>());
        let free = (self.free.empty.capacity() + self.free.filled.capacity()) * size_of::<u32>();
        let victims = self.victims.capacity() * size_of::<Key>();
        (members + heat + free + victims + self.ledger.index_bytes()) as u64 + u64::from(self.slots)
    }

    pub(super) fn holds(&self, key: Key) -> bool {
        matches!(self.members.get(&key), Some(Member { place: Place::Held { .. }, .. }))
    }

    /// The last boot that became ready.
    pub(super) fn complete(&self) -> u32 {
        self.completed[BOOTS_WITHOUT - 1]
    }

    /// This boot has become ready.
    pub(super) fn completes(&mut self) {
        self.completed.rotate_left(1);
        self.completed[BOOTS_WITHOUT - 1] = self.boot;
        self.victims = Vec::new();
    }

    /// A block in the ledger counts as read by the last boot, unless the ledger says that no boot has read it.
    fn adopt(&mut self, tagger: &Tagger) {
        let mut entries: Vec<_> = self.ledger.entries().collect();
        entries.sort_by(|one, other| self.ledger.older_first(one.age, other.age));
        self.take_for_read();
        let mut bytes = ZEROES;
        for entry in entries {
            if !self.read_tagged(entry.page.0, entry.tag, tagger, &mut bytes) {
                self.ledger.forget_page(entry.page);
                self.damaged += 1;
                continue;
            }
            self.order += 1;
            let key = (DiskId(entry.disk.0 & !UNREAD), entry.block);
            let is_read = entry.disk == key.0;
            let kind = if is_read { Kind::Boot } else { Kind::Late };
            let place = Place::Held { slot: entry.page.0 };
            self.members.insert(key, Member { boot: 1, order: self.order, kind, reads: Reads::default(), place });
        }
        let is_free = |slot: &u32| self.ledger.entry(RamPage(*slot)).is_none();
        self.free.empty.retain(is_free);
        self.free.filled.retain(is_free);
    }

    /// Counts what is held from now on as read by an earlier boot.
    pub(super) fn take_for_read(&mut self) {
        (self.boot, self.completed) = (1, [0; BOOTS_WITHOUT]);
        self.completed[BOOTS_WITHOUT - 1] = 1;
    }

    pub(super) fn clear(&mut self) -> Result<(), BootSetError> {
        let taken: Vec<RamPage> = self.ledger.entries().map(|entry| entry.page).collect();
        taken.into_iter().for_each(|page| self.ledger.forget_page(page));
        // Their memory goes too.
        self.members = HashMap::new();
        self.heat = Heat::default();
        self.victims = Vec::new();
        self.tally = Tally::default();
        self.free = Free { empty: (0..self.slots).rev().collect(), filled: Vec::new() };
        self.pages.give_back_all()
    }

    /// Whether there is room for a block that a boot reads, or can be made.
    pub(super) fn can_make_room(&self) -> bool {
        self.has_room(None) || !self.victims.is_empty()
    }

    /// A boot begins: what the last ones did without is given up.
    pub(super) fn drop_stale(&mut self) {
        let since = self.completed[0];
        self.remove_all(|member| member.kind == Kind::Boot && member.boot < since);
    }

    pub(super) fn remove_all(&mut self, may_go: impl Fn(&Member) -> bool) {
        let gone = self.members.iter().filter(|(_, member)| may_go(member));
        let gone: Vec<Key> = gone.map(|(key, _)| *key).collect();
        gone.into_iter().for_each(|key| self.remove(key));
    }

    /// The oldest last, so that it is taken first.
    pub(super) fn find_victims(&mut self) {
        let complete = self.complete();
        let age = |member: &Member| (member.boot, member.order);
        let old = self.members.iter().filter(|(_, member)| member.may_go(complete));
        let mut old: Vec<_> = old.map(|(key, member)| (age(member), *key)).collect();
        old.sort_unstable_by_key(|(age, _)| Reverse(*age));
        self.victims = old.into_iter().map(|(_, key)| key).collect();
    }

    /// This boot reads the block. `None` if there is no room for it.
    pub(super) fn admit(&mut self, key: Key, bytes: Option<&[u8; BLOCK_BYTES]>) -> Option<&mut Member> {
        if !self.members.contains_key(&key) {
            if !self.has_room(bytes) && !self.evict() {
                self.tally.of(key.0).no_room += 1;
                return None;
            }
            let (kind, reads) = (Kind::Boot, Reads::default());
            self.members.insert(key, Member { boot: self.boot, order: 0, kind, reads, place: Place::Missing });
        }
        self.touch(key)
    }

    pub(super) fn touch(&mut self, key: Key) -> Option<&mut Member> {
        self.order += 1;
        let member = self.members.get_mut(&key)?;
        if member.boot != self.boot || member.kind != Kind::Boot {
            member.reads = Reads::default();
        }
        (member.boot, member.order) = (self.boot, self.order);
        let before = std::mem::replace(&mut member.kind, Kind::Boot);
        // The ledger says of it that a boot has read it.
        if before != Kind::Boot
            && let Place::Held { slot } = member.place
            && let Some(entry) = self.ledger.entry(RamPage(slot))
        {
            self.ledger.record(entry.page, key.0, key.1, entry.tag);
        }
        Some(member)
    }

    pub(super) fn evict(&mut self) -> bool {
        let complete = self.complete();
        while let Some(key) = self.victims.pop() {
            if self.members.get(&key).is_some_and(|member| member.may_go(complete)) {
                self.remove(key);
                return true;
            }
        }
        false
    }

    /// Holds a member's bytes. One for which there is no page any more is given up.
    pub(super) fn hold(&mut self, key: Key, bytes: &[u8; BLOCK_BYTES], tag: Tag) {
        let Some(slot) = self.slot_for(key, *bytes == ZEROES) else { return };
        let Some(member) = self.members.get_mut(&key) else { return self.release(slot) };
        match self.pages.write(slot, bytes) {
            Ok(()) => {
                self.ledger.record(RamPage(slot), member.disk_in_ledger(key.0), key.1, tag);
                member.place = Place::Held { slot };
            }
            // The memory file system is full, perhaps.
            Err(error) => {
                tracing::debug!(%error, "a block cannot be held in the boot set");
                member.place = Place::Missing;
                self.release(slot);
            }
        }
    }

    pub(super) fn void(&mut self, key: Key) {
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

    /// The contents of a member after a write of these bytes, if they are known: they lie over the old copy where the write has
    /// changed a part.
    pub(super) fn after_write(
        &self,
        key: Key,
        start: usize,
        bytes: &[u8],
        tagger: &Tagger,
    ) -> Option<[u8; BLOCK_BYTES]> {
        let mut page = ZEROES;
        if bytes.len() < BLOCK_BYTES {
            let Place::Void { slot, tag } = self.members.get(&key)?.place else { return None };
            if !self.read_tagged(slot, tag, tagger, &mut page) {
                return None;
            }
        }
        page[start..start + bytes.len()].copy_from_slice(bytes);
        Some(page)
    }

    /// The member is still expected to be read.
    pub(super) fn drop_copy(&mut self, key: Key) {
        let Some(member) = self.members.get_mut(&key) else { return };
        let place = std::mem::replace(&mut member.place, Place::Missing);
        if let Place::Held { slot } | Place::Void { slot, .. } = place {
            self.ledger.forget_page(RamPage(slot));
            self.release(slot);
        }
    }

    pub(super) fn remove(&mut self, key: Key) {
        self.drop_copy(key);
        self.members.remove(&key);
    }

    /// Fills `bytes` with a page that the ledger names. `None` if its tag is not the ledger's.
    pub(super) fn read(&self, slot: u32, tagger: &Tagger, bytes: &mut [u8; BLOCK_BYTES]) -> Option<Tag> {
        let tag = self.ledger.entry(RamPage(slot))?.tag;
        self.read_tagged(slot, tag, tagger, bytes).then_some(tag)
    }

    /// False: the page has another tag.
    pub(super) fn read_tagged(&self, slot: u32, tag: Tag, tagger: &Tagger, bytes: &mut [u8; BLOCK_BYTES]) -> bool {
        self.pages.read(slot, bytes);
        tagger.tag(bytes) == tag
    }
}
