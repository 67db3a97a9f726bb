//! Arrivals: disks of a snapshot that are still on their way out of its object store, under a machine that runs.
//!
//! notes of what is missing -> threads that bring what the guest reads, and the rest behind it -> nothing is missing
//!
//! The guest's disk is slow where it has not come, and never broken: what reads there waits, also for a store that is gone. Only when
//! the guest has ended, and nobody is going to see it, such a read ends with an error, so that its disk can be drained.
//!
//! What is missing is known from the machine's folder alone, whatever became of the guest that was restored: it crashes, reboots and
//! loses its keeper while its disks come.

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::time::Instant;

use hearth_api::{ApiError, ArrivalStatus, ErrorWord, EventKind};
use hearth_disk::arrival::{Arrival, Conduct};
use hearth_recovery::snapshot::{ArrivingDisk, SnapshotError};
use hearth_store::Turns;

use super::{Machine, MachineError};
use crate::config::ObjectStoreConfig;
use crate::event::{BackfillMessage, Event};
use crate::object_store::{far, saved_disks};

/// Of each disk: more than bring what nobody waits for at a time (`hearth_store::Turns`), so that some are left for the guest.
const THREADS: usize = 4;

/// The disks of a machine that are on their way. Dropped, nobody brings anything any more; the threads end by themselves: a
/// request to a store that is gone takes seconds to fail, and what it brings then is not used.
#[derive(Default)]
pub struct Arrivals {
    disks: Vec<ArrivingOne>,
    /// With the memory of the guest that was restored: what it waits for goes first.
    turns: Arc<Turns>,
}

struct ArrivingOne {
    /// As the snapshot calls it.
    name: String,
    disk: Arc<ArrivingDisk>,
}

impl Drop for Arrivals {
    fn drop(&mut self) {
        self.disks.iter().for_each(|one| one.disk.arrival.stop());
    }
}

impl Arrivals {
    /// What is noted in the machine's folder.
    fn find(folder: &Path, config: &ObjectStoreConfig) -> Result<Self, SnapshotError> {
        let mut arrivals = Self::default();
        let Ok(entries) = std::fs::read_dir(saved_disks(folder)) else { return Ok(arrivals) };
        for path in entries.flatten().map(|entry| entry.path()) {
            let name = path.file_name().and_then(|name| name.to_str()?.strip_prefix("disk-"));
            let Some(name) = name.filter(|name| !name.ends_with(".arrival")) else { continue };
            let failed = |source| SnapshotError::Io { path: path.clone(), what: "read", source };
            let Some(arrival) = Arrival::open(&path).map_err(failed)? else { continue };
            let far = far(ArrivingDisk::folder_of(&arrival).as_ref(), config, &arrivals.turns)?;
            let disk = Arc::new(ArrivingDisk::new(Arc::new(arrival), far));
            arrivals.disks.push(ArrivingOne { name: name.to_owned(), disk });
        }
        Ok(arrivals)
    }

    /// For whoever opens images over them.
    pub fn images(&self) -> hearth_disk::arrival::Arrivals {
        hearth_disk::arrival::Arrivals(self.disks.iter().map(|one| one.disk.arrival.clone()).collect())
    }

    pub fn is_complete(&self) -> bool {
        self.disks.iter().all(|one| one.disk.arrival.is_complete())
    }

    /// None: it is not on its way.
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

    /// What becomes of whoever reads what is missing.
    pub fn set_conduct(&self, conduct: Conduct) {
        self.disks.iter().for_each(|one| one.disk.arrival.set_conduct(conduct));
    }

    /// For whatever else is fetched for the guest.
    pub fn turns(&self) -> &Arc<Turns> {
        &self.turns
    }

    fn start(&self, tell: &std::sync::mpsc::Sender<Event>) -> std::io::Result<()> {
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

impl Machine {
    /// Before anything opens the disks. Nothing is asked of a store yet.
    pub(super) fn expect_disks(&mut self) -> Result<(), MachineError> {
        let config = &self.parts.config;
        let Some(folder) = config.file.parent() else { return Ok(()) };
        self.arrivals = Arrivals::find(folder, &config.object_store).map_err(MachineError::Arrival)?;
        self.arrivals.set_conduct(Conduct::Wait);
        self.arrivals.start(&self.parts.tell).map_err(MachineError::ArrivalThread)
    }

    pub(super) fn backfill_says(&mut self, message: BackfillMessage) {
        match message {
            BackfillMessage::Waits { why } => self.record(EventKind::RestoreWaits { why }),
            BackfillMessage::Complete { disk, bytes, duration_ms } => {
                self.record(EventKind::DiskComplete { disk, bytes, duration_ms });
            }
        }
    }

    /// What copies the disks, or lets go of them, needs all of them.
    pub(super) fn disks_must_be_complete(&self, what: &str) -> Result<(), ApiError> {
        if self.arrivals.is_complete() {
            return Ok(());
        }
        let message = format!("cannot {what}: the guest's disks are still being fetched from the object store");
        Err(ApiError::new(ErrorWord::WrongState, message).hint("`hearth status` shows how much is missing"))
    }
}
