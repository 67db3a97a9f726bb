//! Dead RAM: the RAM file of a dead incarnation as physical memory.
//!
//! The file is read and not mapped: a hole reads as zeroes and stays a hole, even if another thread is punching it at
//! this moment. An access through a mapping would give the hole a page again, against the budget, and no check
//! beforehand could rule that out.

use std::ops::Range;
use std::sync::Arc;

use hearth_memory::{GuestPhysicalAddress, PAGE_BYTES, RamFile};

use super::memory::{PhysicalMemory, Unreadable};

/// Memory of a guest that no longer runs.
#[derive(Clone, Debug)]
pub struct DeadRam {
    ram: Arc<RamFile>,
    ranges: Vec<Range<u64>>,
}

impl DeadRam {
    /// The memory in this file.
    pub fn new(ram: Arc<RamFile>) -> Self {
        let pfns = |range: Range<GuestPhysicalAddress>| range.start.0 / PAGE_BYTES..range.end.0 / PAGE_BYTES;
        let ranges = ram.layout().ranges().into_iter().map(pfns).collect();
        Self { ram, ranges }
    }

    /// How many of these bytes are contiguous in the file.
    fn contiguous(&self, address: u64, bytes: usize) -> usize {
        let pfn = address / PAGE_BYTES;
        let range = self.ranges.iter().find(|range| range.contains(&pfn));
        let left = range.map_or(0, |range| range.end * PAGE_BYTES - address);
        bytes.min(usize::try_from(left).unwrap_or(usize::MAX))
    }
}

impl PhysicalMemory for DeadRam {
    fn read(&self, address: GuestPhysicalAddress, into: &mut [u8]) -> Result<(), Unreadable> {
        let (mut address, mut rest) = (address.0, into);
        while !rest.is_empty() {
            let unreadable = Unreadable::at(address);
            let offset = self.ram.layout().offset_of(GuestPhysicalAddress(address)).ok_or(unreadable)?;
            let bytes = self.contiguous(address, rest.len());
            let (now, later) = rest.split_at_mut(bytes);
            self.ram.read(offset, now).map_err(|error| {
                tracing::warn!(%error, "part of the dead guest's RAM is lost");
                unreadable
            })?;
            (address, rest) = (address + bytes as u64, later);
        }
        Ok(())
    }

    fn ranges(&self) -> &[Range<u64>] {
        &self.ranges
    }
}

#[cfg(test)]
mod tests {
    use std::fs::OpenOptions;
    use std::os::unix::fs::FileExt;

    use super::*;

    const LOW_PAGES: u64 = (2 << 30) / PAGE_BYTES;
    const HIGH_PFN: u64 = (4 << 30) / PAGE_BYTES;

    /// RAM of 3 GiB, which is split. The last low page and the first high one hold data, and they are neighbours in the
    /// file.
    fn split_ram(folder: &tempfile::TempDir) -> DeadRam {
        let bytes = 3 << 30;
        let ram = RamFile::create(&folder.path().join("ram-1"), bytes).unwrap();
        let file = OpenOptions::new().write(true).open(ram.path()).unwrap();
        file.write_all_at(&[1; PAGE_BYTES as usize], (LOW_PAGES - 1) * PAGE_BYTES).unwrap();
        file.write_all_at(&[2; PAGE_BYTES as usize], LOW_PAGES * PAGE_BYTES).unwrap();
        DeadRam::new(Arc::new(ram))
    }

    fn folder() -> tempfile::TempDir {
        tempfile::tempdir_in("/dev/shm").unwrap()
    }

    #[track_caller]
    fn check(ram: &DeadRam, address: u64, bytes: usize, expect: Result<(u8, u8), Unreadable>) {
        let mut into = vec![9; bytes];
        let read = ram.read(GuestPhysicalAddress(address), &mut into).map(|()| (into[0], into[bytes - 1]));
        assert_eq!(read, expect);
    }

    #[test]
    fn addresses_are_the_guests_own() {
        let folder = folder();
        let ram = split_ram(&folder);
        assert_eq!(ram.ranges(), [0..LOW_PAGES, HIGH_PFN..HIGH_PFN + LOW_PAGES / 2]);
        assert_eq!((ram.end_pfn(), ram.ram_pages()), (HIGH_PFN + LOW_PAGES / 2, LOW_PAGES * 3 / 2));
        check(&ram, (2 << 30) - 4096, 4096, Ok((1, 1)));
        check(&ram, (4 << 30) + 5, 4096, Ok((2, 0)));
        check(&ram, (2 << 30) - 4097, 4, Ok((0, 1)));
    }

    #[test]
    fn read_past_the_end_of_ram_fails_there() {
        let folder = folder();
        let ram = split_ram(&folder);
        check(&ram, (2 << 30) - 8, 16, Err(Unreadable::at(2 << 30)));
        check(&ram, 2 << 30, 1, Err(Unreadable::at(2 << 30)));
        check(&ram, u64::MAX, 8, Err(Unreadable::at(u64::MAX)));
    }

    #[test]
    fn reading_takes_no_memory_around_a_release() {
        let folder = folder();
        let ram = split_ram(&folder);
        check(&ram, 0, 1 << 20, Ok((0, 0)));
        assert_eq!(ram.ram.residency_bytes().unwrap(), 2 * PAGE_BYTES);
        ram.ram.release(LOW_PAGES..LOW_PAGES + 1).unwrap();
        check(&ram, 4 << 30, 4096, Ok((0, 0)));
        assert_eq!(ram.ram.residency_bytes().unwrap(), PAGE_BYTES);
    }
}
