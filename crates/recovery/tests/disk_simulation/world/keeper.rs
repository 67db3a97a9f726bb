//! Keeper: the process that serves the disk, from its start to its death, and its other work.

use std::fs::File;
use std::os::fd::{AsFd, AsRawFd};
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use hearth_disk::boot_set::BootSet;
use hearth_disk::buffer::BufferPool;
use hearth_disk::fault_point;
use hearth_disk::image::{Format, Image, ImageOptions};
use hearth_disk::server::{Backing, DiskOptions, Expected, Handle, Pause, Tracking, Worker};
use hearth_disk::tag::Tagger;
use hearth_recovery::ember::Ember;
use hearth_recovery::fast_remount::WarmSources;
use hearth_recovery::incarnation::{Incarnation, discard_files};
use hearth_recovery::warm_reboot;
use rustix::event::{PollFd, PollFlags, Timespec, poll};

use super::settings::Settings;
use super::{BLOCKS_MAX, BLOCKS_MIN, DISK, Then, World, log, new_folder};
use crate::guest::QUEUES;
use crate::memory::{Dead, Memory};
use crate::storage::{BLOCK, Killed, SECTOR, SECTORS_A_BLOCK, Storage, burn_at_fault_point, lock};

pub(super) struct Keeper {
    pub(super) worker: Worker,
    handle: Handle,
    at_once: bool,
    pub(super) alarm: Option<Instant>,
}

impl Keeper {
    /// Whether the guest has switched its write cache off, as far as the disk's server knows.
    pub(super) fn is_write_through(&self) -> bool {
        self.handle.counters().write_through
    }
}

impl World {
    pub(super) fn open_keeper(&mut self) {
        log!(self, "a keeper starts");
        if self.guest.is_some() {
            self.take_over();
        } else {
            self.start_cold();
        }
        let file = lock(&self.storage).file().try_clone().unwrap();
        let path = format!("/proc/self/fd/{}", file.as_raw_fd()).into();
        let lock_patience = Duration::ZERO;
        let image =
            ImageOptions { path, format: Format::Raw, read_only: false, direct: false, lock_patience, owner: None };
        let image = Image::open(&image).unwrap();
        let bytes = image.bytes();
        let pool = BufferPool::new(self.settings.pool_bytes).unwrap();
        let engine = image.guard(Storage::engine(&self.storage, &pool));
        let Settings { depth, hold_back, limits, .. } = self.settings;
        let backing = Backing { image, pool, engine, depth, hold_back };
        lock(&self.storage).meter.restart();
        let options = DiskOptions {
            serial: "serial".into(),
            queues: QUEUES as u16,
            queue_size: 64,
            limits,
            expected: Expected::anyone(),
            write_through: self.guest.is_some() && self.noted_through,
            ..DiskOptions::new(DISK, "simulated", self.socket())
        };
        let tracking = self.tracking();
        let (worker, handle) = Worker::open(options, backing, tracking, self.clock.clone()).unwrap();
        let storage = Arc::clone(&self.storage);
        fault_point::set_hook(move || burn_at_fault_point(&storage));
        self.keeper = Some(Keeper { worker, handle, at_once: false, alarm: None });
        // A late write may have made the file longer than the operator's size.
        self.adopt_length(bytes / SECTOR);
    }

    pub(super) fn socket(&self) -> PathBuf {
        self.folder.path().join("disk.sock")
    }

    /// The guest lives, so the files about its memory are valid.
    pub(super) fn take_over(&mut self) {
        let numbers = self.warm.ember.incarnations();
        self.dead.lock().unwrap().clear();
        self.incarnation = Some(Incarnation::open(self.folder.path(), self.number).unwrap());
        // Drop the old keeper's mappings first: those of a dead process are gone.
        self.warm = open_warm(self.folder.path(), &self.settings, &self.tagger);
        for number in numbers {
            self.bank(Incarnation::open(self.folder.path(), number).unwrap());
        }
    }

    /// Nobody has guarded the image.
    pub(super) fn start_cold(&mut self) {
        for number in self.warm.ember.incarnations().into_iter().chain([self.number]) {
            discard_files(self.folder.path(), number);
        }
        self.dead.lock().unwrap().clear();
        self.incarnation = None;
        BootSet::discard(self.folder.path()).unwrap();
        self.warm = open_warm(self.folder.path(), &self.settings, &self.tagger);
    }

    pub(super) fn bank(&mut self, dead: Incarnation) {
        let ram = File::options().write(true).open(dead.ram.path()).unwrap();
        let ledger = dead.ledger.clone().unwrap();
        self.dead.lock().unwrap().push(Dead { number: dead.number, ram, ledger });
        self.warm.ember.bank(dead).unwrap();
        self.forget_dropped();
    }

    /// Forgets incarnations that the ember has dropped: nobody keeps their ledgers current.
    pub(super) fn forget_dropped(&mut self) {
        let kept = self.warm.ember.incarnations();
        self.dead.lock().unwrap().retain(|dead| kept.contains(&dead.number));
    }

    pub(super) fn tracking(&self) -> Option<Tracking> {
        let tracking = warm_reboot::tracking(self.incarnation.as_ref()?, &self.tagger, &self.warm)?;
        let memory = Memory {
            inner: tracking.warm?,
            storage: Arc::clone(&self.storage),
            dead: Arc::clone(&self.dead),
            haunted: self.settings.haunted,
        };
        Some(Tracking { warm: Some(memory.for_disk()), ..tracking })
    }

    /// Runs the keeper's loop once, if anything wakes it.
    pub(super) fn turn(&mut self) {
        // The speed of the thread that closes descriptors must not matter.
        while background_close::is_backed_up() {
            std::thread::yield_now();
        }
        let Some(keeper) = &mut self.keeper else { return };
        let is_due = keeper.alarm.is_some_and(|alarm| alarm <= self.clock.now());
        if !keeper.at_once && !is_due && !is_readable(&keeper.worker) {
            return;
        }
        keeper.alarm = keeper.alarm.filter(|_| !is_due);
        lock(&self.storage).meter.is_stopping =
            self.qemu.waits_for_stop() || std::mem::take(&mut self.last_message_was_stop);
        let worker = &mut keeper.worker;
        match catch_unwind(AssertUnwindSafe(|| worker.turn(Some(Duration::ZERO)))) {
            Ok(Ok(pause)) => {
                keeper.at_once = pause == Pause::None;
                if let Pause::AtMost(wait) = pause {
                    keeper.alarm = Some(self.clock.now() + wait);
                }
                self.receive();
            }
            Ok(Err(error)) => self.fault(format!("the loop failed: {error}")),
            Err(payload) => {
                let Some(Killed { at_fault_point }) = payload.downcast_ref() else { resume_unwind(payload) };
                log!(self, "the keeper dies in the middle of its work; at a fault point: {at_fault_point}");
                self.counts.kills_at_fault_points += u64::from(*at_fault_point && !self.fuse_cuts_power);
                match self.fuse_cuts_power {
                    true => self.cut_power(),
                    false => self.killed(),
                }
            }
        }
    }

    pub(super) fn kill(&mut self) {
        if self.keeper.is_some() {
            log!(self, "the keeper is killed");
            self.killed();
        }
    }

    pub(super) fn light_fuse(&mut self) {
        if self.keeper.is_some() {
            lock(&self.storage).fuse = Some(self.random.below(80));
            self.fuse_cuts_power = self.random.one_in(3);
        }
    }

    /// The host loses its power: keeper, QEMU and guest are gone, with everything in memory.
    pub(super) fn cut_power(&mut self) {
        log!(self, "power is cut");
        self.counts.power_cuts += 1;
        drop(self.keeper.take());
        self.lose_guest();
        self.folder = new_folder();
        self.start_cold();
        let mut storage = lock(&self.storage);
        storage.lose_power(&mut self.random);
        self.model.end_all(&storage);
        let lost = self.model.lose_power(&storage);
        drop(storage);
        if let Err(what) = lost {
            self.fault(what);
        }
    }

    pub(super) fn killed(&mut self) {
        self.counts.kills += 1;
        drop(self.keeper.take());
        lock(&self.storage).abandon(&mut self.random);
        let was_connected = self.qemu.is_connected();
        self.qemu.lose_server();
        (self.successor, self.saved) = (None, None);
        if let Some(mut old) = self.leaving.take()
            && was_connected
            && !self.qemu.has_kicked
            && self.random.one_in(2)
        {
            log!(self, "the old QEMU goes on");
            old.hang_up();
            old.bases = vec![None; QUEUES];
            self.qemu = old;
            self.migrated = None;
        }
        // The guest's processors continue: the hop has failed or is over.
        if self.then.take() == Some(Then::Reset) {
            self.reset_driver();
        }
        if self.guest.is_none() {
            self.model.end_all(&lock(&self.storage));
        }
    }

    pub(super) fn resize(&mut self) {
        let Some(keeper) = self.keeper.as_mut().filter(|_| !self.is_saving) else { return };
        let blocks = BLOCKS_MIN + self.random.below(BLOCKS_MAX - BLOCKS_MIN);
        log!(self, "the disk gets {blocks} blocks");
        self.counts.resizes += 1;
        let mut storage = lock(&self.storage);
        storage.set_blocks(blocks);
        storage.fuse = None;
        drop(storage);
        let bytes = keeper.worker.resize().unwrap();
        assert_eq!(bytes, blocks * BLOCK);
        self.adopt_length(blocks * SECTORS_A_BLOCK);
    }

    pub(super) fn adopt_length(&mut self, sectors: u64) {
        self.model.resize(sectors);
        if let Some(guest) = &mut self.guest {
            guest.shrink_to(sectors);
        }
    }

    pub(super) fn ready(&mut self) {
        if let Some(set) = &self.warm.boot_set {
            set.ready();
        }
    }

    /// The keeper maintains the ember: settle, assay, trim or sweep.
    pub(super) fn tend(&mut self) {
        let ember = &self.warm.ember;
        match self.random.below(4) {
            0 => drop(ember.settle().unwrap()),
            1 => drop(ember.assay(20)),
            2 => drop(ember.trim(self.random.below(6) * BLOCK).unwrap()),
            _ => drop(ember.sweep().unwrap()),
        }
        self.forget_dropped();
    }
}

pub(super) fn open_warm(folder: &Path, settings: &Settings, tagger: &Tagger) -> Arc<WarmSources> {
    let ember = Arc::new(Ember::new(folder, tagger.clone()));
    let open = |bytes| Arc::new(BootSet::open(folder, bytes, tagger.clone()).unwrap());
    Arc::new(WarmSources { ember, boot_set: settings.boot_set_bytes.map(open) })
}

fn is_readable(worker: &Worker) -> bool {
    let fd = worker.as_fd();
    let mut polled = [PollFd::new(&fd, PollFlags::IN)];
    poll(&mut polled, Some(&Timespec { tv_sec: 0, tv_nsec: 0 })).unwrap() > 0
}
