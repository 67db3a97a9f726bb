//! Saving: copies of a disk and of guest memory, made while the guest runs.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::sync::Arc;

use hearth_disk::write_log::WriteLog;
use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, memfd_create};

use super::{World, log};
use crate::guest::Pages;
use crate::memory_copy::MemoryCopy;
use crate::storage::lock;

fn read(file: &File) -> Vec<u8> {
    let mut bytes = vec![0; file.metadata().unwrap().len() as usize];
    file.read_exact_at(&mut bytes, 0).unwrap();
    bytes
}

impl World {
    /// Copies the image while the guest runs. The target disk may fail.
    pub(super) fn copy_image(&mut self) {
        let Some(keeper) = self.keeper.as_mut().filter(|_| !self.is_saving) else { return };
        let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
        let target: File = memfd_create("copy", flags).unwrap().into();
        let Some(frozen) = keeper.worker.freeze(target.try_clone().unwrap()) else { return };
        log!(self, "the image is copied");
        let frozen = frozen.unwrap();
        let before = read(lock(&self.storage).file());
        let mut steps_to_failure = self.random.one_in(4).then(|| self.random.below(4));
        let mut has_failed = false;
        self.is_saving = true;
        let mut steps = |most| {
            if steps_to_failure == Some(0) {
                fcntl_add_seals(&target, SealFlags::WRITE).unwrap();
                has_failed = true;
            }
            steps_to_failure = steps_to_failure.and_then(|steps| steps.checked_sub(1));
            for _ in 0..self.random.below(most) {
                self.step();
            }
            self.keeper.is_some()
        };
        let mut steps = |most| {
            frozen.settle();
            let goes_on = steps(most);
            frozen.settle();
            goes_on
        };
        // Nothing was copied: the copy waits for its thread, for a time that no seed tells.
        let copied = steps(40).then(|| frozen.copy(|copied| copied == 0 || steps(20)));
        self.is_saving = false;
        match copied {
            Some(Ok(())) if read(&target) != before => {
                self.fault("the copy of the image is not of the moment when it was begun".into());
            }
            Some(Ok(())) => self.counts.image_copies += 1,
            Some(Err(_)) if has_failed => self.counts.failed_image_copies += 1,
            Some(Err(error)) if self.keeper.is_some() => self.fault(format!("the image cannot be copied: {error}")),
            _ => {}
        }
    }

    /// A save or a migration of guest memory begins, continues or ends.
    pub(super) fn copy_memory(&mut self) {
        match self.random.below(4) {
            0 => self.save_memory(),
            1 | 2 => self.migrate_memory(),
            _ => self.pass_over_memory(),
        }
    }

    /// The keeper copies, with its own log.
    fn save_memory(&mut self) {
        self.check_copies();
        let (Some(keeper), Some(guest)) = (&mut self.keeper, &self.guest) else { return };
        if self.saved.take().is_some() {
            log!(self, "guest memory is saved");
            self.counts.saved_memories += 1;
            return keeper.worker.set_write_log(None);
        }
        log!(self, "a save of guest memory begins");
        let ram = &self.incarnation.as_ref().expect("a guest has one").ram;
        let log = Arc::new(WriteLog::new(ram.identity(), ram.pages()));
        keeper.worker.set_write_log(Some(Arc::clone(&log)));
        guest.take_written();
        self.saved = Some((MemoryCopy::begin(&guest.ram), log));
    }

    /// QEMU copies, with vhost-user's log.
    fn migrate_memory(&mut self) {
        if self.guest.is_none() || !self.qemu.is_silent() {
            return;
        }
        log!(self, "QEMU's log: {}", !self.qemu.is_logging);
        self.end_migration();
        self.qemu.set_logging(!self.qemu.is_logging);
    }

    pub(super) fn end_migration(&mut self) {
        self.check_copies();
        self.counts.migrated_memories += u64::from(self.migrated.take().is_some());
    }

    /// QEMU copies all memory once its disk has confirmed that it logs, or if nobody serves the disk.
    pub(super) fn begin_migration(&mut self) {
        if self.migrated.is_some() || !self.qemu.is_logging || !self.qemu.is_silent() {
            return;
        }
        self.check_copies();
        if let Some(guest) = &self.guest {
            guest.take_written();
            self.migrated = Some(MemoryCopy::begin(&guest.ram));
        }
    }

    fn pass_over_memory(&mut self) {
        self.check_copies();
        let Some(guest) = &self.guest else { return };
        let saved = self.saved.as_mut().map(|(copy, _)| copy);
        saved.into_iter().chain(&mut self.migrated).for_each(|copy| copy.pass(&guest.ram));
    }

    /// Everything written to guest memory is marked in each log.
    pub(super) fn check_copies(&mut self) {
        let Some(guest) = self.guest.as_ref().filter(|_| self.saved.is_some() || self.migrated.is_some()) else {
            return;
        };
        let own = guest.take_written();
        let mut wrong = Vec::new();
        let mut check = |copy: &mut MemoryCopy, logged: Pages, whose| {
            copy.mark(own | logged);
            if let Some(page) = copy.forgotten(&guest.ram) {
                wrong.push(format!("page {page} was written to and is not in {whose} log"));
            }
            self.counts.logged_pages += u64::from((logged & !own).count_ones());
        };
        if let Some((copy, log)) = &mut self.saved {
            let mut logged: Pages = 0;
            log.take(|page| logged |= 1 << page);
            check(copy, logged, "the keeper's");
        }
        if let Some(copy) = &mut self.migrated {
            check(copy, self.qemu.take_log(), "QEMU's");
        }
        wrong.into_iter().for_each(|what| self.fault(what));
    }
}
