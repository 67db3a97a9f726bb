//! Images of a machine's disks: opened and locked, noted, and compared after a gap in which nobody guarded them.
//! `hearth_recovery::images` says what a note contains.
//!
//! start or take-over: locked -> compared with the last keeper's notes -> served
//! a wait without a guest, or a crashed guest that stands still: noted -> the wait ends -> compared -> the next guest
//!
//! Blocks in memory of a disk that was changed, or may have been, are dropped, with an event; other disks keep theirs.
//! If another file has replaced an open image, the next guest gets the new file. The living guest keeps the file that
//! it has: its keeper holds it open, and a new keeper does not take the guest over with another file.

mod guard;

use hearth_api::EventKind;
use hearth_disk::block::DiskId;
use hearth_disk::gate::Gate;
use hearth_disk::image::{Format, Image, ImageOptions, LockOwner, Unwritten};
use hearth_disk::server::{DiskOptions, DiskServer};
use hearth_recovery::images::{self, DiskNote, Watch};
use hearth_recovery::incarnation::Incarnation;
use hearth_recovery::warm_reboot;

use guard::Gap;
pub use guard::Images;

use super::disks::Disks;
use super::timeline::LastRecovery;
use super::warm_reboot::WarmReboot;
use super::{Context, MachineError, cache_map, launch};
use crate::config::Owner;
use crate::folders::lock_owner;

impl Disks {
    /// Opens all images, and serves them once it is known which blocks in memory are valid. `unwritten` says whether
    /// the guest that a killed keeper left is still alive. `incarnation`: None if QEMU has yet to tell of its memory.
    pub fn open(
        &mut self,
        context: &mut Context,
        warm: &WarmReboot,
        gate: Option<&Gate>,
        incarnation: Option<&Incarnation>,
        unwritten: Unwritten,
    ) -> Result<(), MachineError> {
        self.images.open.clear();
        context.qemu.locks.0.clear();
        let opened: Result<Vec<Image>, _> =
            (0..context.config.devices.disks.len()).map(|position| self.open_image(context, position)).collect();
        // Clear the locks after a failure too: those of the opened images end with the images.
        let opened = opened.inspect_err(|_| context.qemu.locks.0.clear())?;
        self.judge(context, warm, incarnation, unwritten);
        for (position, image) in opened.into_iter().enumerate() {
            let server = Self::serve(context, warm, gate, (position, image), incarnation, unwritten)?;
            self.servers.push(server);
        }
        self.show_pressures(context);
        self.note(context, warm);
        self.open_nvram(context, gate)?;
        self.open_cache_map(context, gate)?;
        self.images.qemu_lives = false;
        Ok(())
    }

    /// Disks whose write cache the living guest has switched off.
    pub fn write_through(&self) -> Vec<String> {
        let disks = self.servers.iter().filter(|disk| disk.counters().write_through);
        disks.map(|disk| disk.name().to_owned()).collect()
    }

    /// Owner of the locks of images and mirrors.
    pub fn lock_owner(&self, context: &Context) -> Option<LockOwner> {
        let owner = lock_owner(&context.folders.runtime);
        owner.map(|owner| owner.with_living_qemu(self.images.qemu_lives))
    }

    fn open_image(&mut self, context: &mut Context, position: usize) -> Result<Image, MachineError> {
        let disk = &context.config.devices.disks[position];
        let failed = |source| MachineError::Image { disk: disk.name.clone(), source };
        let options = ImageOptions { owner: self.lock_owner(context), ..launch::image_options(disk) };
        let image = Image::open_over(&options, &self.backfill.images()).map_err(failed)?;
        let locks = image.inheritable_locks().map_err(failed)?;
        let files = image.files().map_err(|source| MachineError::ImageFiles { disk: disk.name.clone(), source })?;
        let note = DiskNote::of_open(&disk.name, files);
        if position < self.images.open.len() {
            (self.images.open[position], context.qemu.locks.0[position]) = (note, locks);
        } else {
            self.images.open.push(note);
            context.qemu.locks.0.push(locks);
        }
        Ok(image)
    }

    fn serve(
        context: &Context,
        warm: &WarmReboot,
        gate: Option<&Gate>,
        (position, mut image): (usize, Image),
        incarnation: Option<&Incarnation>,
        unwritten: Unwritten,
    ) -> Result<DiskServer, MachineError> {
        let disk = &context.config.devices.disks[position];
        image.note_changes_in(&context.folders.disk_tables(&disk.name), unwritten);
        let socket = context.folders.disk_socket(&disk.name);
        let tell = Some(Self::notices(context, &disk.name));
        let (gate, write_through) = (gate.cloned(), context.journal.write_through.contains(&disk.name));
        let ask = (context.config.owner == Owner::Libvirt).then(|| Self::questions(context));
        let options = DiskOptions { gate, tell, ask, write_through, ..launch::disk_options(position, disk, socket) };
        let tracking = incarnation.and_then(|it| warm_reboot::tracking(it, &warm.tagger, &warm.sources));
        let server = DiskServer::start(options, image, tracking)
            .map_err(|source| MachineError::Server { disk: disk.name.clone(), source })?;
        Self::watch(context, &server);
        Ok(server)
    }

    /// Serves the cache map, if the machine has one. Call it after all other disks are served: the guest sees it after them.
    fn open_cache_map(&mut self, context: &Context, gate: Option<&Gate>) -> Result<(), MachineError> {
        if context.config.guest.refill.is_none() {
            return Ok(());
        }
        let failed = |source| MachineError::Image { disk: cache_map::NAME.to_owned(), source };
        let image = ImageOptions {
            path: cache_map::path(&context.folders.memory),
            format: Format::Raw,
            read_only: true,
            direct: false,
            lock_patience: launch::LOCK_PATIENCE,
            owner: self.lock_owner(context),
        };
        let image = Image::open(&image).map_err(failed)?;
        let id = DiskId(u8::try_from(self.servers.len()).expect("a machine has fewer disks than PCI slots"));
        let options = DiskOptions {
            serial: cache_map::SERIAL.to_owned(),
            queues: launch::CACHE_MAP_QUEUES,
            read_only: true,
            tracked: false,
            gate: gate.cloned(),
            expected: launch::nobody_yet(),
            tell: Some(Self::notices(context, cache_map::NAME)),
            ..DiskOptions::new(id, cache_map::NAME, context.folders.disk_socket(cache_map::NAME))
        };
        let server = DiskServer::start(options, image, None)
            .map_err(|source| MachineError::Server { disk: cache_map::NAME.to_owned(), source })?;
        Self::watch(context, &server);
        self.servers.push(server);
        Ok(())
    }

    /// Compares the images with the last keeper's notes. All are locked, so nobody else changes them from now on.
    /// `incarnation`: a living guest that this keeper took over; its ledger may hold blocks of the images.
    fn judge(&mut self, context: &Context, warm: &WarmReboot, incarnation: Option<&Incarnation>, unwritten: Unwritten) {
        let Some(Gap { noted, is_upgrade, is_start }) = self.images.gap.take() else { return };
        if !is_upgrade {
            for (position, open) in self.images.open.iter().enumerate() {
                let tables = context.folders.disk_tables(&open.disk);
                let drops = unwritten == Unwritten::Drop && tables.metadata().is_ok_and(|file| file.len() > 0);
                let doubt = match &noted {
                    _ if drops => Some("its guest died with unflushed writes".to_owned()),
                    Some(noted) => noted.doubt(position, open),
                    None => Some("there is no note of the image's earlier state".to_owned()),
                };
                if let Some(why) = doubt {
                    let is_unlocked = unwritten == Unwritten::Keep && context.config.owner == Owner::Libvirt;
                    let why = if is_unlocked { under_living_guest(&why) } else { why };
                    warm.forget_disk(context, position, why, incarnation);
                }
            }
        }
        if is_start {
            warm.load_boot_set(context, &self.images.open);
        }
    }

    /// Keeps notes of the images from now on, for the next keeper. The last notes stay if the images are closed, so that others may
    /// change them, or if they are still to be compared with the beginning of a wait.
    pub fn note(&self, context: &Context, warm: &WarmReboot) {
        if self.servers.is_empty() || self.images.idle.is_some() {
            return;
        }
        let watch = Watch::new(&context.folders.memory, &self.images.open);
        let watch = watch.and_then(|mut watch| watch.renew().map(|()| watch));
        warm.monitor.note_images(watch.inspect_err(unnoted).ok());
    }

    /// Notes the images before a wait in which neither keeper nor guest writes to them. The last keeper's notes stay if the images
    /// were never compared with them.
    pub fn note_idle(&mut self, context: &Context, warm: &WarmReboot) {
        if self.images.idle.is_some() || !self.images.are_judged() {
            return;
        }
        // From now on, any change was made by another program.
        warm.monitor.note_images(None);
        let noted = images::write_at_rest(&context.folders.memory, &self.images.open);
        self.images.idle = Some(noted.unwrap_or_else(|error| {
            unnoted(&error);
            self.images.at_rest()
        }));
    }

    /// Closes the images before a wait in which other programs may use them. Call it when the disks are drained.
    pub fn close_for_wait(&mut self, context: &mut Context, warm: &WarmReboot) {
        // Tables of a qcow2 image that are held outside of it would change the image after its note.
        for disk in &self.servers {
            if let Err(error) = disk.commit() {
                tracing::warn!(disk = disk.name(), %error, "cannot write the image's tables; its blocks will be dropped");
            }
        }
        self.note_idle(context, warm);
        std::mem::take(&mut self.servers).into_iter().for_each(DiskServer::stop);
        context.qemu.locks.0.clear();
    }

    /// Compares the images after the wait, before blocks in memory are used or saved. Returns the disks whose blocks
    /// were dropped, by index.
    pub fn judge_idle(&mut self, context: &Context, warm: &WarmReboot, recovery: &mut LastRecovery) -> Vec<usize> {
        let Some(idle) = self.images.idle.take() else { return Vec::new() };
        let doubts: Vec<_> = idle.iter().map(DiskNote::doubt).collect();
        if let (true, Some(Some(why)), Some(timeline)) =
            (doubts.iter().all(Option::is_some), doubts.first(), &mut recovery.timeline)
        {
            timeline.set_cold(why.clone());
        }
        let doubts = doubts.into_iter().enumerate().filter_map(|(position, why)| Some((position, why?)));
        let doubted = doubts.map(|(position, why)| {
            warm.forget_disk(context, position, why, None);
            position
        });
        let doubted = doubted.collect();
        self.note(context, warm);
        doubted
    }

    /// Prepares the images for the next guest. An image that another program changed may have another size, or other
    /// qcow2 tables, so it is opened again; so is an image that was replaced by another file. An image that is missing
    /// is served as long as it is open.
    pub fn renew(
        &mut self,
        context: &mut Context,
        warm: &WarmReboot,
        recovery: &mut LastRecovery,
        gate: Option<&Gate>,
        next: &Incarnation,
    ) -> Result<(), MachineError> {
        let doubted = self.judge_idle(context, warm, recovery);
        for position in 0..self.images.open.len() {
            let open = &self.images.open[position];
            if let Some(gone) = open.missing() {
                let message = format!(
                    "disk {}: {} is missing; the guest continues with the deleted file until the machine stops, then \
                     it is lost: copy what you need from inside the guest",
                    open.disk,
                    gone.display()
                );
                context.record(EventKind::Error { message });
                continue;
            }
            if let Some(other) = open.exchanged() {
                let why = format!("{} was replaced by another file", other.display());
                warm.forget_disk(context, position, why, None);
            } else if !doubted.contains(&position) {
                continue;
            }
            self.open_again(context, warm, gate, position, next)?;
            self.note(context, warm);
        }
        Ok(())
    }

    fn open_again(
        &mut self,
        context: &mut Context,
        warm: &WarmReboot,
        gate: Option<&Gate>,
        position: usize,
        next: &Incarnation,
    ) -> Result<(), MachineError> {
        // Stop its server first: it holds the lock, also if the qcow2 image has another backing file now.
        let after = self.servers.split_off(position + 1);
        self.servers.pop().into_iter().for_each(DiskServer::stop);
        context.qemu.locks.0[position].clear();
        let image = self.open_image(context, position)?;
        let server = Self::serve(context, warm, gate, (position, image), Some(next), Unwritten::Drop)?;
        self.servers.push(server);
        self.servers.extend(after);
        self.show_pressures(context);
        Ok(())
    }
}

/// Why the image of a domain that has outlived its keeper may have changed, and what to do then. Hearth's own QEMUs hold the lock
/// meanwhile.
fn under_living_guest(why: &str) -> String {
    format!(
        "{why}; so it is after the dead keeper's own last writes, but if another program has written to the image, the running guest's \
         file system is damaged: shut it down, then check it"
    )
}

fn unnoted(error: &std::io::Error) {
    tracing::warn!(%error, "cannot note the images' state: the next keeper drops all blocks held in memory");
}
