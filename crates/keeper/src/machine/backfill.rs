//! Backfill: fetches the disks of a restored machine from their object store while the machine runs.
//!
//! notes of the missing blocks -> threads fetch what the guest reads, and the rest in the background -> nothing is
//! missing
//!
//! A read of a missing block waits, also while the store is unreachable; it never fails. Only when the guest has ended,
//! and nobody sees the result, such a read ends with an error, so that the disk can be drained.
//!
//! The notes beside the images below the machine's own say what is missing. They do not depend on the guest: it may crash,
//! reboot or lose its keeper while its disks are fetched. For a domain of libvirt a backfill lives as long as its images are
//! open: while it is off, its owner may put other files in their place.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::time::Instant;

use hearth_api::{ArrivalStatus, EventKind};
use hearth_disk::arrival::{Arrival, MissPolicy};
use hearth_disk::image::arriving_images;
use hearth_recovery::snapshot::{ArrivingDisk, SnapshotError};
use hearth_store::Scheduler;

use super::{Context, launch};
use crate::config::{Config, ObjectStoreConfig};
use crate::event::{BackfillMessage, Event};
use crate::object_store::{far, saved_disks};

/// Threads for each disk. These are more than may fetch in the background at a time (`hearth_store::Scheduler`), so that
/// some are left for the guest's own reads.
const THREADS: usize = 4;

/// The disks of a machine that are still in an object store. When this is dropped the threads end by themselves, within
/// seconds if the store is unreachable; what they fetch after that is not used.
#[derive(Default)]
pub struct Backfill {
    disks: Vec<ArrivingOne>,
    /// Scheduler of requests to the store, shared with the restore of the guest's memory: what the guest waits for
    /// goes first.
    scheduler: Arc<Scheduler>,
}

struct ArrivingOne {
    /// Name of the disk.
    name: String,
    disk: Arc<ArrivingDisk>,
}

impl Drop for Backfill {
    fn drop(&mut self) {
        self.disks.iter().for_each(|one| one.disk.arrival.stop());
    }
}

impl Backfill {
    /// Finds what is missing of the machine's disks, and of those of its snapshot: pages of its memory may be on them.
    pub fn find(config: &Config) -> Result<Self, SnapshotError> {
        let mut backfill = Self::default();
        for disk in &config.devices.disks {
            let found = arriving_images(&disk.path, launch::image_options(disk).format);
            let failed = |source| SnapshotError::Io { path: disk.path.clone(), what: "read", source };
            for arrival in found.map_err(failed)? {
                backfill.add(&disk.name, arrival, &config.object_store)?;
            }
        }
        let saved = config.file.parent().map(|folder| std::fs::read_dir(saved_disks(folder)));
        for path in saved.into_iter().flatten().flatten().flatten().map(|entry| entry.path()) {
            let name = path.file_name().and_then(|name| name.to_str()?.strip_prefix("disk-"));
            let Some(name) = name.filter(|name| !name.ends_with(".arrival")) else { continue };
            let failed = |source| SnapshotError::Io { path: path.clone(), what: "read", source };
            if let Some(arrival) = Arrival::open(&path).map_err(failed)? {
                backfill.add(name, arrival, &config.object_store)?;
            }
        }
        Ok(backfill)
    }

    /// Two images may be over the same file.
    fn add(&mut self, name: &str, arrival: Arrival, config: &ObjectStoreConfig) -> Result<(), SnapshotError> {
        if self.disks.iter().any(|one| one.disk.arrival.is_same_file(&arrival)) {
            return Ok(());
        }
        let far = far(ArrivingDisk::folder_of(&arrival).as_ref(), config, &self.scheduler)?;
        let disk = Arc::new(ArrivingDisk::new(Arc::new(arrival), far));
        self.disks.push(ArrivingOne { name: name.to_owned(), disk });
        Ok(())
    }

    /// The disks as the image layer needs them to open an image over a missing one.
    pub fn images(&self) -> hearth_disk::arrival::Arrivals {
        hearth_disk::arrival::Arrivals(self.disks.iter().map(|one| one.disk.arrival.clone()).collect())
    }

    pub fn is_complete(&self) -> bool {
        self.disks.iter().all(|one| one.disk.arrival.is_complete())
    }

    /// None if the disk is complete or was never in an object store.
    pub fn status(&self, disk: &str) -> Option<ArrivalStatus> {
        let one = self.disks.iter().find(|one| one.name == disk && !one.disk.arrival.is_complete())?;
        let counts = one.disk.arrival.counts();
        Some(ArrivalStatus {
            source: one.disk.arrival.source().to_owned(),
            bytes: counts.bytes,
            missing_bytes: counts.missing_bytes,
            waits: one.disk.arrival.stuck(),
        })
    }

    /// Sets what a read of a missing block does: wait, or fail.
    pub fn set_miss_policy(&self, conduct: MissPolicy) {
        self.disks.iter().for_each(|one| one.disk.arrival.set_miss_policy(conduct));
    }

    /// Scheduler of requests to the store. Everything that is fetched for this guest must use it.
    pub fn scheduler(&self) -> &Arc<Scheduler> {
        &self.scheduler
    }

    /// Its threads go on until the process ends: a read that waits for a missing block must not fail.
    pub fn leave(mut self) {
        self.disks.clear();
    }

    pub fn start(&self, tell: &std::sync::mpsc::Sender<Event>) -> std::io::Result<()> {
        for one in &self.disks {
            let (began, running) = (Instant::now(), Arc::new(AtomicUsize::new(THREADS)));
            for _ in 0..THREADS {
                let (name, disk) = (one.name.clone(), one.disk.clone());
                let (tell, running) = (tell.clone(), running.clone());
                // Fails only when the loop is gone, and then nobody wants to know.
                let say = move |message| drop(tell.send(Event::Backfill(message)));
                let bring = move || {
                    let complete = disk.bring(|why| say(BackfillMessage::Waits { why }));
                    if running.fetch_sub(1, Relaxed) == 1 && complete {
                        let (bytes, duration_ms) = (disk.arrival.counts().bytes, began.elapsed().as_secs_f64() * 1e3);
                        say(BackfillMessage::Complete { disk: name, bytes, duration_ms });
                    }
                };
                std::thread::Builder::new().name(format!("fetch-{}", one.name)).spawn(bring)?;
            }
        }
        Ok(())
    }
}

/// Records a message from the backfill.
pub fn handle_backfill(context: &Context, message: BackfillMessage) {
    context.record(match message {
        BackfillMessage::Waits { why } => EventKind::RestoreWaits { why },
        BackfillMessage::Complete { disk, bytes, duration_ms } => EventKind::DiskComplete { disk, bytes, duration_ms },
    });
}
