//! Image formats and their engines, for tests of crashes.

use super::*;
use crate::engine::file::FileEngine;
use crate::image::Contents;
use crate::image::tape::Tape;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Served {
    RawByRing,
    RawByWorkers,
    Qcow2,
}

impl Served {
    const ALL: [Self; 3] = [Self::RawByRing, Self::RawByWorkers, Self::Qcow2];

    /// By its name in `Debug`.
    pub fn named(name: &str) -> Self {
        Self::ALL.into_iter().find(|served| format!("{served:?}") == name).unwrap()
    }

    /// Whether operations are done in the order in which they were pushed, flushes included.
    pub fn is_in_order(self) -> bool {
        self == Self::Qcow2
    }

    pub fn open(self, path: &Path, log: &Path, unwritten: Unwritten) -> Result<Image, ImageError> {
        let format = if self == Self::Qcow2 { Format::Qcow2 } else { Format::Raw };
        // It waits for the lock: the kernel releases a dead process's ring some time after the process has ended.
        let mut image = Image::open(&options(path, format))?;
        image.note_changes_in(log, unwritten);
        if let Contents::Raw(raw) = &mut image.contents {
            // As on a disk with blocks of this size: a smaller write reads, patches and writes a whole block.
            Arc::get_mut(&mut raw.target).expect("it has no engine yet").alignment = BLOCK_BYTES as u64;
        }
        Ok(image)
    }

    /// Records on the tape what later engines of the image do.
    pub fn record(image: &mut Image, tape: &Tape) {
        match &mut image.contents {
            Contents::Raw(raw) => {
                Arc::get_mut(&mut raw.target).expect("it has no engine yet").tape = Some(tape.clone());
            }
            Contents::Qcow2(qcow2) => qcow2.tape = Some(tape.clone()),
        }
    }

    pub fn engine(self, image: &Image, pool: Arc<BufferPool>) -> Result<Box<dyn Engine>, ImageError> {
        match &image.contents {
            Contents::Raw(raw) if self == Self::RawByWorkers => {
                Ok(image.guard(FileEngine::start(raw.target.clone(), pool).unwrap()))
            }
            _ => image.engine(pool, 8),
        }
    }
}
