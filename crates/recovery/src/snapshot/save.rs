//! Memory of a guest that stands still, into a file of pages.

use std::path::Path;

use hearth_memory::{FileOffset, MemoryError, PAGE_BYTES, RamFile};

use super::SnapshotError;
use super::pages::{Compression, PageWriter, Sealed};

/// Read at a time; and so often whoever waits for it is asked.
const STEP_PAGES: u64 = 256;

#[derive(Debug, thiserror::Error)]
pub enum SaveError {
    #[error(transparent)]
    Snapshot(#[from] SnapshotError),
    #[error(transparent)]
    Memory(#[from] MemoryError),
    #[error("it was called off: {why}")]
    CalledOff { why: String },
}

/// Pages that hold memory: what there is to read.
pub fn resident_pages(ram: &RamFile) -> Result<u64, MemoryError> {
    Ok(ram.resident_ranges()?.iter().map(|range| range.end - range.start).sum())
}

/// Writes all pages in the order of their addresses. `step` is told how many were read, and says whether to go on.
pub fn write_ram(
    ram: &RamFile,
    path: &Path,
    compression: Compression,
    mut step: impl FnMut(u64) -> Result<(), SaveError>,
) -> Result<Sealed, SaveError> {
    let mut writer = PageWriter::create(path, ram.pages(), compression)?;
    let mut bytes = vec![0; (STEP_PAGES * PAGE_BYTES) as usize];
    for range in ram.resident_ranges()? {
        for first in range.clone().step_by(STEP_PAGES as usize) {
            let pages = STEP_PAGES.min(range.end - first);
            let bytes = &mut bytes[..(pages * PAGE_BYTES) as usize];
            ram.read(FileOffset(first * PAGE_BYTES), bytes)?;
            for (page, bytes) in (first as u32..).zip(bytes.chunks_exact(PAGE_BYTES as usize)) {
                writer.add(page, bytes.try_into().expect("a page"))?;
            }
            step(pages)?;
        }
    }
    Ok(writer.finish()?)
}
