//! Memory between the server and what answers in the disk's place: a place for the keeper's death, and for a process that writes to
//! dead memory at the worst moment.

use std::fs::File;
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::sync::{Arc, Mutex};

use hearth_disk::block::{BLOCK_BYTES, DiskId};
use hearth_disk::ledger::Ledger;
use hearth_disk::tag::Tag;
use hearth_disk::warm::{AfterServing, Answered, RequestObserver, WarmMemory, WarmSource};

use crate::storage::{BLOCK, Shared, burn};

/// An incarnation in the ember.
pub struct Dead {
    pub number: u32,
    pub ram: File,
    pub ledger: Arc<Mutex<Ledger>>,
}

pub struct Memory {
    pub inner: WarmMemory,
    pub storage: Shared,
    pub dead: Arc<Mutex<Vec<Dead>>>,
    pub haunted: bool,
}

impl Memory {
    /// Itself, in the roles of the memory behind it.
    pub fn for_disk(self) -> WarmMemory {
        let observes = self.inner.observer.is_some();
        let WarmMemory { source, observer } = WarmMemory::in_both_roles(Arc::new(self));
        WarmMemory { source, observer: observer.filter(|_| observes) }
    }

    fn observer(&self) -> &dyn RequestObserver {
        self.inner.observer.as_deref().expect("it is in this role only if the inner one is")
    }

    /// Where the block lies in dead memory.
    fn find(&self, disk: DiskId, block: u64) -> Option<(File, u64)> {
        let dead = self.dead.lock().unwrap();
        dead.iter().find_map(|dead| {
            let entry = dead.ledger.lock().unwrap().find(disk, block)?;
            Some((dead.ram.try_clone().unwrap(), u64::from(entry.page.0) * BLOCK))
        })
    }
}

impl WarmSource for Memory {
    fn serve(
        &self,
        disk: DiskId,
        block: u64,
        after: AfterServing,
        copy: &mut dyn FnMut(&[u8; BLOCK_BYTES]),
    ) -> Option<Tag> {
        burn(&self.storage);
        let place = if self.haunted { self.find(disk, block) } else { None };
        self.inner.source.serve(disk, block, after, &mut |bytes| {
            if let Some((ram, offset)) = &place {
                ram.write_all_at(&[0xee; BLOCK_BYTES], *offset).unwrap();
            }
            copy(bytes);
        })
    }

    fn may_hold(&self, disk: DiskId, blocks: Range<u64>) -> bool {
        self.inner.source.may_hold(disk, blocks)
    }

    fn forget(&self, disk: DiskId, blocks: Range<u64>) {
        self.inner.source.forget(disk, blocks);
        burn(&self.storage);
    }
}

impl RequestObserver for Memory {
    fn learns(&self) -> bool {
        self.observer().learns()
    }

    fn wants(&self, bytes: u64) -> bool {
        self.observer().wants(bytes)
    }

    fn read_from_image(&self, disk: DiskId, block: u64, bytes: Option<&[u8; BLOCK_BYTES]>) {
        burn(&self.storage);
        self.observer().read_from_image(disk, block, bytes);
    }

    fn missed(&self, disk: DiskId, blocks: Range<u64>) {
        self.observer().missed(disk, blocks);
    }

    fn answered(&self, disk: DiskId, how: Answered) {
        self.observer().answered(disk, how);
    }

    fn written(&self, disk: DiskId, block: u64, start: usize, bytes: &[u8]) {
        burn(&self.storage);
        self.observer().written(disk, block, start, bytes);
    }
}
