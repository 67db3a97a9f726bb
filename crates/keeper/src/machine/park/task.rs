//! What the thread of a park does: everything that can fail, while the machine's loop goes on.
//!
//! ```text
//! hold -> state -> sum -> settle images -> note (the point of no return) -> QEMU is killed
//!   |       |       |         |
//!   +-------+-------+---------+--> it failed, or was called off: the guest goes on in the QEMU that it has
//! ```
//! It touches neither the machine nor its journal. What it needs of them it is given; the loop hears how it ended.

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::AtomicU8;
use std::sync::atomic::Ordering::SeqCst;
use std::time::{Instant, SystemTime};

use hearth_disk::image::ImageNote;
use hearth_memory::{MemoryError, RamFile};
use hearth_qemu::{Qmp, QmpError};
use hearth_recovery::rejuvenation;
use hearth_recovery::rejuvenation::parked::{self, ChunkSums, NvramNote, ParkPhase, Parked, ParkedError};
use hearth_recovery::snapshot::Part;
use hearth_recovery::snapshot::state::{self, StateError};

use super::super::disks::{Connections, DiskFlush, FlushError, write_through};
use super::STATE_PATIENCE;
use crate::drill::drill;
use crate::event::ParkMessage;

/// Why a guest is not parked.
#[derive(Debug, thiserror::Error)]
enum Failure {
    #[error("it was cancelled")]
    CalledOff,
    #[error(transparent)]
    State(#[from] StateError),
    #[error("QEMU cannot pause the guest")]
    Hold(#[source] QmpError),
    #[error("a disk lost its connection to QEMU meanwhile")]
    Disk,
    #[error(transparent)]
    Flush(#[from] FlushError),
    #[error(transparent)]
    Parked(#[from] ParkedError),
    #[error(transparent)]
    Memory(#[from] MemoryError),
}

/// What becomes of the park. Thread and loop decide it together: once, and for good.
#[derive(Debug, Default)]
pub struct Decision(AtomicU8);

impl Decision {
    const OPEN: u8 = 0;
    const PARKED: u8 = 1;
    const CALLED_OFF: u8 = 2;

    /// Whether the guest is going on; false if it is too late for that.
    pub fn cancel(&self) -> bool {
        self.becomes(Self::CALLED_OFF)
    }

    /// Whether the guest may be parked; false if that was called off.
    fn park(&self) -> bool {
        self.becomes(Self::PARKED)
    }

    fn is_cancelled(&self) -> bool {
        self.0.load(SeqCst) == Self::CALLED_OFF
    }

    fn becomes(&self, wanted: u8) -> bool {
        match self.0.compare_exchange(Self::OPEN, wanted, SeqCst, SeqCst) {
            Ok(_) => true,
            Err(decided) => decided == wanted,
        }
    }
}

/// What is found of a guest that stands still.
pub struct Found {
    pub stopped_at: SystemTime,
    pub state: Part,
    pub ram_sum: String,
    pub nvram: Vec<NvramNote>,
    pub write_through: Vec<String>,
    pub images: Vec<ImageNote>,
}

/// The guest that is to be parked, and where it goes.
pub struct Task {
    /// Where its memory is, and its note comes to be.
    pub folder: PathBuf,
    pub qmp: Arc<Qmp>,
    /// Kills its QEMU.
    pub kill: Box<dyn Fn() + Send>,
    pub ram: Arc<RamFile>,
    /// Files of its NVRAM.
    pub nvram: Vec<PathBuf>,
    pub disks: DiskFlush,
    pub images: Vec<PathBuf>,
    /// Makes the note.
    pub note: Box<dyn Fn(Found) -> Parked + Send>,
    pub decision: Arc<Decision>,
}

impl Task {
    /// Parks the guest, or lets it go on.
    pub fn run(self) -> ParkMessage {
        let (began, mut progress) = (Instant::now(), Progress { phase: ParkPhase::Hold, decision: &self.decision });
        match self.note_guest(&mut progress) {
            Ok(state_bytes) => {
                (self.kill)();
                ParkMessage::Parked { duration: began.elapsed(), state_bytes }
            }
            Err(failure) => {
                let stuck = self.go_on();
                ParkMessage::NotParked { phase: progress.phase.name(), why: crate::chain(&failure), stuck }
            }
        }
    }

    /// The guest stands still afterwards, or may.
    fn note_guest(&self, progress: &mut Progress<'_>) -> Result<u64, Failure> {
        let connected = Connections::now(self.disks.disks());
        let stopped_at = progress.run(ParkPhase::Hold, || {
            state::prepare(&self.qmp, STATE_PATIENCE)?;
            self.qmp.pause().map_err(Failure::Hold)?;
            Ok::<_, Failure>(SystemTime::now())
        })?;
        let state = progress.run(ParkPhase::State, || {
            let state = state::take(&self.qmp, STATE_PATIENCE)?;
            if !connected.have_lasted(self.disks.disks()) {
                return Err(Failure::Disk);
            }
            Ok(parked::write_state(&self.folder, &state)?)
        })?;
        let (ram_sum, nvram) = progress.run(ParkPhase::Sum, || {
            Ok::<_, Failure>((ChunkSums::of_all(&self.ram)?.seal(), note_nvram(&self.nvram)?))
        })?;
        let images = progress.run(ParkPhase::Settle, || {
            self.disks.flush()?;
            Ok::<_, Failure>(parked::note_images(&self.images)?)
        })?;
        let (state_bytes, write_through) = (state.bytes, write_through(self.disks.disks()));
        let note = (self.note)(Found { stopped_at, state, ram_sum, nvram, write_through, images });
        progress.run(ParkPhase::Note, || {
            if !self.decision.park() {
                return Err(Failure::CalledOff);
            }
            Ok::<_, Failure>(note.commit(&self.folder)?)
        })?;
        Ok(state_bytes)
    }

    /// The guest goes on, in the QEMU it has. If it cannot, that QEMU is killed, and this says why.
    fn go_on(&self) -> Option<String> {
        parked::discard(&self.folder);
        match rejuvenation::roll_back(&self.qmp, STATE_PATIENCE) {
            // One that ended is seen elsewhere.
            Ok(()) | Err(QmpError::Ended) => None,
            Err(error) => {
                (self.kill)();
                Some(error.to_string())
            }
        }
    }
}

/// Notes each NVRAM device as it is now, while nobody writes to it.
pub fn note_nvram(files: &[PathBuf]) -> Result<Vec<NvramNote>, MemoryError> {
    let note = |file: &PathBuf| {
        let sum = ChunkSums::of_all(&RamFile::open(file)?)?.seal();
        Ok(NvramNote { file: file.clone(), sum })
    };
    files.iter().map(note).collect()
}

/// How far it is.
struct Progress<'a> {
    phase: ParkPhase,
    decision: &'a Decision,
}

impl Progress<'_> {
    fn run<T, E>(&mut self, phase: ParkPhase, work: impl FnOnce() -> Result<T, E>) -> Result<T, Failure>
    where
        Failure: From<E>,
    {
        self.phase = phase;
        if self.decision.is_cancelled() {
            return Err(Failure::CalledOff);
        }
        let result = work()?;
        drill(phase.name());
        Ok(result)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn park_is_decided_once() {
        let cancelled = Decision::default();
        assert!(cancelled.cancel() && cancelled.cancel() && cancelled.is_cancelled());
        assert!(!cancelled.park());
        let parked = Decision::default();
        assert!(parked.park() && !parked.cancel() && !parked.is_cancelled());
    }
}
