//! Saving: copies of a running machine's disk.

use std::fs::File;
use std::os::unix::fs::FileExt;

use rustix::fs::{MemfdFlags, memfd_create};

use super::{World, log};
use crate::storage::lock;

impl World {
    /// The image is copied while the guest goes on.
    pub(super) fn save(&mut self) {
        let Some(keeper) = self.keeper.as_mut().filter(|_| !self.is_saving) else { return };
        let target: File = memfd_create("copy", MemfdFlags::CLOEXEC).unwrap().into();
        let Some(frozen) = keeper.worker.freeze(target.try_clone().unwrap()) else { return };
        log!(self, "the image is copied");
        let frozen = frozen.unwrap();
        let read = |file: &File| {
            let mut bytes = vec![0; file.metadata().unwrap().len() as usize];
            file.read_exact_at(&mut bytes, 0).unwrap();
            bytes
        };
        let before = read(lock(&self.storage).file());
        self.is_saving = true;
        let mut steps = |most| {
            for _ in 0..self.random.below(most) {
                self.step();
            }
            self.keeper.is_some()
        };
        let is_alive = steps(40);
        let copied = is_alive && frozen.copy(|_| steps(20)).is_ok();
        self.is_saving = false;
        if copied && read(&target) != before {
            self.fault("the copy of the image is not of the moment when it was begun".into());
        }
        self.counts.saves += u64::from(copied);
    }
}
