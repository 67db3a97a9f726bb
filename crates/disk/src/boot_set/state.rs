//! What a boot set knows, under its lock: members, pages, and the ledger that names them.

use std::cmp::Reverse;
use std::collections::HashMap;
use std::fs::{File, OpenOptions};
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use super::heat::Heat;
use super::tally::Tally;
use super::{BLOCK, BootSet, BootSetError, Key, LEDGER_FILE, PAGES_FILE};
use crate::block::{BLOCK_BYTES, RamPage};
use crate::ledger::Ledger;
use crate::tag::{Tag, Tagger};

pub(super) struct State {
    pub(super) pages: File,
    pub(super) pages_path: PathBuf,
    pub(super) ledger: Ledger,
    pub(super) slots: u32,
    pub(super) free: Vec<u32>,
    pub(super) members: HashMap<Key, Member>,
    /// Counts resets, from 1.
    pub(super) boot: u32,
    /// The last boot that came to be ready.
    pub(super) complete: u32,
    /// Counts what is read during a boot.
    pub(super) order: u32,
    /// What may be given up during this boot, the oldest last.
    pub(super) victims: Vec<Key>,
    pub(super) heat: Heat,
    pub(super) tally: Tally,
    pub(super) damaged: u64,
}

pub(super) struct Member {
    /// The last boot that read it, and when in it.
    pub(super) boot: u32,
    pub(super) order: u32,
    /// No boot has read it before its end: it is held for its heat.
    pub(super) is_late: bool,
    pub(super) place: Place,
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
    /// For what a boot reads.
    fn may_go(&self, complete: u32) -> bool {
        self.is_late || self.boot < complete
    }
}

impl State {
    pub(super) fn create(folder: &Path, slots: u32) -> Result<Self, BootSetError> {
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
    pub(super) fn reopen(folder: &Path, slots: u32, tagger: &Tagger) -> Option<Self> {
        let pages_path = folder.join(PAGES_FILE);
        let pages = OpenOptions::new().read(true).write(true).open(&pages_path).ok()?;
        let ledger = Ledger::open(&folder.join(LEDGER_FILE)).ok()?;
        let fits = pages.metadata().ok()?.len() == u64::from(slots) * BLOCK && ledger.ram_pages() == slots;
        let mut state = fits.then(|| Self::over(pages, pages_path, ledger, slots))?;
        state.adopt(tagger);
        Some(state)
    }

    pub(super) fn over(pages: File, pages_path: PathBuf, ledger: Ledger, slots: u32) -> Self {
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
            heat: Heat::default(),
            tally: Tally::default(),
            damaged: 0,
        }
    }

    /// What the ledger names is taken for what the last boot read.
    pub(super) fn adopt(&mut self, tagger: &Tagger) {
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
            let member =
                Member { boot: 1, order: self.order, is_late: false, place: Place::Held { slot: entry.page.0 } };
            self.members.insert((entry.disk, entry.block), member);
        }
        let ledger = &self.ledger;
        self.free.retain(|&slot| ledger.entry(RamPage(slot)).is_none());
    }

    pub(super) fn clear(&mut self) -> Result<(), BootSetError> {
        let taken: Vec<RamPage> = self.ledger.entries().map(|entry| entry.page).collect();
        taken.into_iter().for_each(|page| self.ledger.forget_page(page));
        self.members.clear();
        self.heat = Heat::default();
        self.victims.clear();
        self.tally = Tally::default();
        self.free = (0..self.slots).rev().collect();
        let failed = |source| BootSetError::File { path: self.pages_path.clone(), action: "empty", source };
        self.pages.set_len(0).and_then(|()| self.pages.set_len(u64::from(self.slots) * BLOCK)).map_err(failed)
    }

    pub(super) fn has_room(&self) -> bool {
        self.members.len() < self.slots as usize
    }

    /// The oldest last, so that it is taken first.
    pub(super) fn find_victims(&mut self) {
        let complete = self.complete;
        let age = |member: &Member| (member.boot, member.order);
        let old = self.members.iter().filter(|(_, member)| member.may_go(complete));
        let mut old: Vec<_> = old.map(|(key, member)| (age(member), *key)).collect();
        old.sort_unstable_by_key(|(age, _)| Reverse(*age));
        self.victims = old.into_iter().map(|(_, key)| key).collect();
    }

    /// This boot reads the block. False: there is no room for it.
    pub(super) fn admit(&mut self, key: Key) -> bool {
        if !self.members.contains_key(&key) {
            if !self.has_room() && !self.evict() {
                self.tally.of(key.0).no_room += 1;
                return false;
            }
            self.members.insert(key, Member { boot: 0, order: 0, is_late: false, place: Place::Missing });
        }
        self.touch(key);
        true
    }

    pub(super) fn touch(&mut self, key: Key) {
        self.order += 1;
        if let Some(member) = self.members.get_mut(&key) {
            (member.boot, member.order, member.is_late) = (self.boot, self.order, false);
        }
    }

    pub(super) fn evict(&mut self) -> bool {
        while let Some(key) = self.victims.pop() {
            if self.members.get(&key).is_some_and(|member| member.may_go(self.complete)) {
                self.drop_copy(key);
                self.members.remove(&key);
                return true;
            }
        }
        false
    }

    /// Only for members: each has a page within the limit.
    pub(super) fn hold(&mut self, key: Key, bytes: &[u8; BLOCK_BYTES], tag: Tag) {
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

    pub(super) fn drop_copy(&mut self, key: Key) {
        let Some(member) = self.members.get_mut(&key) else { return };
        if let Place::Held { slot } | Place::Void { slot, .. } = member.place {
            self.ledger.forget_page(RamPage(slot));
            self.free.push(slot);
        }
        member.place = Place::Missing;
    }

    /// A page that the ledger names, if it is what the ledger says.
    pub(super) fn read(&self, slot: u32, tagger: &Tagger) -> Option<([u8; BLOCK_BYTES], Tag)> {
        let tag = self.ledger.entry(RamPage(slot))?.tag;
        Some((self.read_tagged(slot, tag, tagger)?, tag))
    }

    pub(super) fn read_tagged(&self, slot: u32, tag: Tag, tagger: &Tagger) -> Option<[u8; BLOCK_BYTES]> {
        let mut bytes = [0; BLOCK_BYTES];
        self.pages.read_exact_at(&mut bytes, u64::from(slot) * BLOCK).ok()?;
        (tagger.tag(&bytes) == tag).then_some(bytes)
    }
}
