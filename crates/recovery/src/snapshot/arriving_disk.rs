//! Arriving disk: a disk of a snapshot in an object store, fetched to this host block by block.
//!
//! ```text
//! (stored_disk::expect) -> a file full of holes, and the sums of its blocks -> what somebody waits for | the rest -> complete
//! ```
//! Each block is checked against what was saved. So an object that was replaced meanwhile is noticed, and never mixed
//! with the blocks that have arrived. A reader that needs a block of it waits, as for a store that does not answer.

use std::io;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use hearth_disk::arrival::{Arrival, Arrivals, MissPolicy, Order};
use hearth_disk::image::{Format, Image, ImageOptions};
use hearth_store::{Object, Slot, Urgency};

use super::place::Far;
use super::{DiskPart, SnapshotError};
use crate::incarnation::lock;

/// Pause before a store that did not answer is asked again. It had ten seconds to answer.
const AWAY_PAUSE: Duration = Duration::from_millis(500);
/// Pause before wrong bytes are fetched again.
const WRONG_PAUSE: Duration = Duration::from_secs(5);
/// How far `bring_all` reads ahead, in bytes.
const AHEAD_BYTES: u64 = 32 << 20;

/// A disk that is being fetched from an object store.
pub struct ArrivingDisk {
    /// Its blocks that have arrived.
    pub arrival: Arc<Arrival>,
    far: Far,
    /// Name of the object in its store.
    name: String,
    /// The object as it was last found.
    object: Mutex<Option<Arc<Object>>>,
}

impl ArrivingDisk {
    /// `far` is where `Arrival::source` says. The object's name is the last part of that source.
    pub fn new(arrival: Arc<Arrival>, far: Far) -> Self {
        let name = arrival.source().rsplit('/').next().unwrap_or_default().to_owned();
        Self { arrival, far, name, object: Mutex::default() }
    }

    /// Address of the folder that holds the object: the source without its last part.
    pub fn folder_of(arrival: &Arrival) -> &str {
        arrival.source().rsplit_once('/').map_or("", |(folder, _)| folder)
    }

    /// Fetches the blocks that somebody waits for, and the others in their slot. Several threads may call it at once.
    /// Calls `tell` once for each block that cannot be fetched; of a store that does not answer, for the first one
    /// only. Returns true if nothing is missing any more.
    pub fn bring(&self, tell: impl Fn(String)) -> bool {
        let scheduler = &self.far.scheduler;
        // Does not wait for a slot: a block that waits for its own would be in flight when somebody wants it.
        while let Some((order, slot)) = self.arrival.next(|| scheduler.try_take(Urgency::Disks)) {
            let slot = slot.unwrap_or_else(|| scheduler.take(Urgency::Demand));
            let fetched = self.fetch(order, Some(&slot));
            drop(slot);
            if let Err(error) = fetched {
                let why = match std::error::Error::source(&error) {
                    Some(source) => format!("{error}: {source}"),
                    None => error.to_string(),
                };
                if self.arrival.failed(order, &why, error.is_away()) {
                    tell(why);
                }
                self.arrival.give_back(order, if error.is_away() { AWAY_PAUSE } else { WRONG_PAUSE });
            }
        }
        self.arrival.is_complete()
    }

    /// Fetches everything now. Calls `progress` with the bytes that are present and the total.
    pub(crate) fn bring_all(&self, progress: &mut dyn FnMut(u64, u64)) -> Result<(), SnapshotError> {
        self.arrival.set_miss_policy(MissPolicy::Wait);
        let mut asked_to = 0;
        while let Some((order, _)) = self.arrival.next(|| Some(())) {
            let place = self.arrival.place_of(order.unit).unwrap_or_default();
            if place.start >= asked_to {
                self.object()?.read_ahead(place.start..place.start + AHEAD_BYTES, Urgency::WorkingSet);
                asked_to = place.start + AHEAD_BYTES / 2;
            }
            self.fetch(order, None)?;
            let counts = self.arrival.counts();
            progress(counts.bytes - counts.missing_bytes, counts.bytes);
        }
        Ok(())
    }

    /// Fetches the image's tables, without which no image over it can be opened.
    pub(crate) fn bring_tables(&self, disk: &DiskPart) -> Result<(), SnapshotError> {
        let options = ImageOptions {
            path: self.arrival.path().to_owned(),
            format: if disk.format == "qcow2" { Format::Qcow2 } else { Format::Raw },
            read_only: true,
            direct: false,
            lock_patience: Duration::ZERO,
            owner: None,
        };
        let arrivals = Arrivals(vec![self.arrival.clone()]);
        // An open that fails requests the block that it lacks.
        while let Err(error) = Image::open_over(&options, &arrivals) {
            let order = self.arrival.take_wanted().ok_or(error)?;
            self.fetch(order, None)?;
        }
        self.arrival.note_landed().map_err(SnapshotError::io(self.arrival.path(), "written"))
    }

    /// Fetches one unit. `slot` is `None` before the guest runs, when everything is fetched without one.
    fn fetch(&self, order: Order, slot: Option<&Slot>) -> Result<(), SnapshotError> {
        self.try_fetch(order, slot).inspect_err(|_| *lock(&self.object) = None)
    }

    fn try_fetch(&self, order: Order, slot: Option<&Slot>) -> Result<(), SnapshotError> {
        let (object, place) = (self.object()?, self.arrival.place_of(order.unit).unwrap_or_default());
        let mut bytes = vec![0; (place.end - place.start) as usize];
        let read = |bytes: &mut [u8]| match slot {
            Some(slot) => object.read_in_slot(bytes, place.start, slot),
            None => object.read_at(bytes, place.start, Urgency::WorkingSet),
        };
        read(&mut bytes)?;
        if self.arrival.is_stopped() || self.land(order, &bytes)? {
            return Ok(());
        }
        // A copy kept on this host may be what is wrong.
        object.forget(place.clone());
        read(&mut bytes)?;
        if self.land(order, &bytes)? {
            return Ok(());
        }
        object.forget(place);
        let at = order.unit * hearth_disk::arrival::UNIT_BYTES;
        let what = format!("bytes {at} to {} of the disk are not what was saved", at + bytes.len() as u64 - 1);
        Err(self.damaged(what))
    }

    fn land(&self, order: Order, bytes: &[u8]) -> Result<bool, SnapshotError> {
        let landed: io::Result<bool> = self.arrival.land(order, bytes);
        landed.map_err(SnapshotError::io(self.arrival.path(), "written"))
    }

    fn object(&self) -> Result<Arc<Object>, SnapshotError> {
        if let Some(object) = &*lock(&self.object) {
            return Ok(object.clone());
        }
        let found = Object::open(&self.far.store, &self.far.cache, &self.far.scheduler, &self.name)?;
        let object = found.ok_or_else(|| self.damaged("it is not there"))?;
        let (bytes, expected) = (object.meta().bytes, self.arrival.counts().bytes);
        if bytes != expected {
            return Err(self.damaged(format!("it has {bytes} bytes, and had {expected} when it was saved")));
        }
        *lock(&self.object) = Some(object.clone());
        Ok(object)
    }

    fn damaged(&self, what: impl Into<String>) -> SnapshotError {
        SnapshotError::damaged(self.arrival.source().as_ref(), what)
    }
}

#[cfg(test)]
mod tests;
