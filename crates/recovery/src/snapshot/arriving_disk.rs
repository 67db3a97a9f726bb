//! A disk of a snapshot in an object store on its way to this host, block by block.
//!
//! ```text
//! (stored_disk::expect) -> the file, full of holes, and what it is to be -> what somebody waits for | the rest -> complete
//! ```
//! Each block is checked against what was saved. So an object that was replaced meanwhile is noticed, and never mixed with what has
//! come: who needs a block of it waits, as for a store that does not answer.

use std::io;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use hearth_disk::arrival::{Arrival, Arrivals, Conduct, Order};
use hearth_disk::image::{Format, Image, ImageOptions};
use hearth_store::{Object, Turn, Urgency};

use super::place::Far;
use super::{DiskPart, SnapshotError};
use crate::incarnation::lock;

/// Before a store that does not answer is asked again; it was asked for ten seconds.
const AWAY_PAUSE: Duration = Duration::from_millis(500);
/// Before what was wrong is fetched again.
const WRONG_PAUSE: Duration = Duration::from_secs(5);
/// Asked for ahead of what is written, by whoever brings all of it.
const AHEAD_BYTES: u64 = 32 << 20;

pub struct ArrivingDisk {
    pub arrival: Arc<Arrival>,
    far: Far,
    /// How the object is called in its store.
    name: String,
    /// As it was when it was last looked at.
    object: Mutex<Option<Arc<Object>>>,
}

impl ArrivingDisk {
    /// `far`: where `Arrival::source` says; by the name that comes last there.
    pub fn new(arrival: Arc<Arrival>, far: Far) -> Self {
        let name = arrival.source().rsplit('/').next().unwrap_or_default().to_owned();
        Self { arrival, far, name, object: Mutex::default() }
    }

    /// Where the object of this name lies: what is before it in the source.
    pub fn folder_of(arrival: &Arrival) -> &str {
        arrival.source().rsplit_once('/').map_or("", |(folder, _)| folder)
    }

    /// Brings what is wanted, and what is not when its turn comes. Several threads may do so at once. `tell` hears, once, of each
    /// block that cannot be brought; of a store that does not answer, of the first one. True: nothing is missing any more.
    pub fn bring(&self, tell: impl Fn(String)) -> bool {
        let turns = &self.far.turns;
        // Not waited for: a block whose turn has yet to come would be under way when somebody wants it.
        while let Some((order, turn)) = self.arrival.next(|| turns.try_take(Urgency::Disks)) {
            let turn = turn.unwrap_or_else(|| turns.take(Urgency::Demand));
            let fetched = self.fetch(order, Some(&turn));
            drop(turn);
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

    /// Brings everything now; `progress` hears how many bytes are there, and of how many.
    pub fn bring_all(&self, progress: &mut dyn FnMut(u64, u64)) -> Result<(), SnapshotError> {
        self.arrival.set_conduct(Conduct::Wait);
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

    /// Brings what must be there for an image over it to be opened: its tables.
    pub fn bring_tables(&self, disk: &DiskPart) -> Result<(), SnapshotError> {
        let options = ImageOptions {
            path: self.arrival.path().to_owned(),
            format: if disk.format == "qcow2" { Format::Qcow2 } else { Format::Raw },
            read_only: true,
            direct: false,
            lock_patience: Duration::ZERO,
            owner: None,
        };
        let arrivals = Arrivals(vec![self.arrival.clone()]);
        // What it lacks it says by wanting it.
        while let Err(error) = Image::open_over(&options, &arrivals) {
            let order = self.arrival.take_wanted().ok_or(error)?;
            self.fetch(order, None)?;
        }
        self.arrival.note_landed().map_err(SnapshotError::io(self.arrival.path(), "written"))
    }

    /// Without a turn: before the guest runs, as everything is fetched then.
    fn fetch(&self, order: Order, turn: Option<&Turn>) -> Result<(), SnapshotError> {
        self.try_fetch(order, turn).inspect_err(|_| *lock(&self.object) = None)
    }

    fn try_fetch(&self, order: Order, turn: Option<&Turn>) -> Result<(), SnapshotError> {
        let (object, place) = (self.object()?, self.arrival.place_of(order.unit).unwrap_or_default());
        let mut bytes = vec![0; (place.end - place.start) as usize];
        let read = |bytes: &mut [u8]| match turn {
            Some(turn) => object.read_in_turn(bytes, place.start, turn),
            None => object.read_at(bytes, place.start, Urgency::WorkingSet),
        };
        read(&mut bytes)?;
        if self.arrival.is_stopped() || self.land(order, &bytes)? {
            return Ok(());
        }
        // What of it is kept on this host must not be what is wrong with it.
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
        let found = Object::open(&self.far.store, &self.far.cache, &self.far.turns, &self.name)?;
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
