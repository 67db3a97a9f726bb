//! Guest memory as this connection sees it: the only door through which the server reads or writes it.
//!
//! Every write marks its pages in the dirty log while QEMU asks for one, so no write can be forgotten there. Bytes are
//! copied through volatile slices, never borrowed: the guest runs meanwhile.

use std::cell::Cell;
use std::fs::File;
use std::io;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, AtomicU16, Ordering};

use rustix::fs::{SealFlags, fcntl_get_seals};
use vm_memory::{FileOffset, MmapRegion, VolatileMemory};

use super::foreign::MemoryFile;
use super::recorder::RamPart;
pub use super::region::FileIdentity;
use super::region::Region;
use super::wire::RegionSpec;
use crate::block::{BLOCK_BYTES, RamPage};
use crate::fault_point;
use crate::gate::Gate;
use crate::write_log::WriteLog;

const PAGE_BYTES: u64 = BLOCK_BYTES as u64;
/// Memory regions of one guest. QEMU 7.2 needs 2 to 8, more with hot-plugged memory.
pub const REGIONS_MAX: usize = 64;

#[derive(Debug, thiserror::Error)]
pub enum MemoryError {
    #[error("memory region at {guest:#x}: {what}")]
    Region { guest: u64, what: &'static str },
    #[error("guest memory cannot be accessed: its file was truncated, or its file system is full")]
    Lost,
    #[error("memory region at {guest:#x} cannot be mapped")]
    Map { guest: u64, source: io::Error },
    #[error("dirty log: {0}")]
    Log(&'static str),
    #[error("dirty log cannot be mapped")]
    MapLog(#[source] io::Error),
}

/// A guest's memory, as QEMU has told it to a disk.
#[derive(Clone, Debug)]
pub struct ToldMemory {
    /// QEMU's process.
    pub pid: u32,
    /// The files that are the guest's own memory, by address. Usually one: each NUMA cell and each memory device has its own.
    pub files: Vec<ToldFile>,
}

/// A file of a guest's memory.
#[derive(Clone, Debug)]
pub struct ToldFile {
    /// The file.
    pub file: Arc<File>,
    /// Where its bytes are in the guest's memory, by address.
    pub places: Vec<MemoryPlace>,
}

/// A part of a file that is guest memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MemoryPlace {
    /// Guest-physical address of the first byte.
    pub guest: u64,
    /// Its offset in the file.
    pub file_offset: u64,
    /// Number of bytes.
    pub bytes: u64,
}

/// The address is not (wholly) in guest memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Unmapped;

/// The log's pages, one bit a guest page, shared with QEMU.
struct Log {
    bits: MmapRegion<()>,
}

impl Log {
    fn mark(&self, address: u64, bytes: u64) {
        if bytes == 0 {
            return;
        }
        for page in address / PAGE_BYTES..=address.saturating_add(bytes - 1) / PAGE_BYTES {
            // QEMU sizes the log to cover all guest memory; what lies beyond is not its memory.
            if let Ok(byte) = self.bits.get_atomic_ref::<AtomicU8>((page / 8) as usize) {
                byte.fetch_or(1 << (page % 8), Ordering::Relaxed);
            }
        }
    }
}

/// All of a guest's memory.
#[derive(Default)]
pub struct GuestMap {
    /// Sorted by guest address, not overlapping.
    regions: Vec<Region>,
    /// Something of it was touched that was not there. Nothing is read or written from then on: half an answer is worse.
    lost: Cell<bool>,
    log: Option<Log>,
    log_all: bool,
    tracked: Arc<[RamPart]>,
    /// None: all memory may be taken.
    gate: Option<Gate>,
    /// This process's own log; QEMU's is `log`.
    write_log: Option<Arc<WriteLog>>,
}

impl GuestMap {
    /// Gives the mappings back in a thread of its own: 3 GiB that were in use take 0.15 s, and the next guest, or the other
    /// QEMU's, would wait for that.
    pub fn unmap_apart(self) {
        // If no thread can be started, the memory is unmapped here.
        let _ = std::thread::Builder::new().name("disk-unmap".into()).spawn(move || drop(self.regions));
    }

    /// Pages of these files are pages of the incarnation; `page` knows no others.
    pub fn track(&mut self, files: Arc<[RamPart]>) {
        self.tracked = files;
    }

    /// The pages of a tracked file.
    fn pages_of(&self, file: FileIdentity) -> Option<Range<u64>> {
        let is_it = |part: &RamPart| (part.device, part.inode) == (file.device, file.inode);
        let at = self.tracked.iter().position(is_it)?;
        let first = self.tracked[..at].iter().map(|part| part.pages).sum();
        Some(first..first + self.tracked[at].pages)
    }

    /// The guest's own memory, if not all of it is tracked. `pid`: the process that has told of it.
    pub fn untracked(&self, pid: u32) -> Option<ToldMemory> {
        // What is not QEMU's own may be a device. If nothing is, the keeper finds out why.
        let has_own = self.regions.iter().any(is_own_memory);
        let mut files: Vec<(FileIdentity, ToldFile)> = Vec::new();
        for region in self.regions.iter().filter(|region| !has_own || is_own_memory(region)) {
            let RegionSpec { guest, bytes, file_offset, .. } = region.spec;
            let place = MemoryPlace { guest, file_offset, bytes };
            match files.iter_mut().find(|(identity, _)| *identity == region.file) {
                Some((_, told)) => told.places.push(place),
                None => {
                    let file = region.mapping.file_offset()?.arc().clone();
                    files.push((region.file, ToldFile { file, places: vec![place] }));
                }
            }
        }
        if files.iter().all(|(identity, _)| self.pages_of(*identity).is_some()) {
            return None;
        }
        Some(ToldMemory { pid, files: files.into_iter().map(|(_, told)| told).collect() })
    }

    pub fn set_gate(&mut self, gate: Option<Gate>) {
        self.gate = gate;
    }

    /// From now on what is written to guest memory is noted there too.
    pub fn set_write_log(&mut self, log: Option<Arc<WriteLog>>) {
        self.write_log = log;
    }

    /// The gate that stands before this region, if one does.
    fn gate_of(&self, region: &Region) -> Option<&Gate> {
        let gate = self.gate.as_ref()?;
        (region.file == FileIdentity { device: gate.ram_device, inode: gate.ram_inode }).then_some(gate)
    }

    fn is_granted(&self, region: &Region, offset: usize, bytes: usize) -> bool {
        self.gate_of(region).is_none_or(|gate| gate.keeper.is_granted(region.in_file(offset, bytes)))
    }

    /// Whether this memory may be written to. Memory that can be granted for that is granted. False: ask again later.
    pub fn admit(&self, address: u64, bytes: u64) -> bool {
        if self.gate.is_none() {
            return true;
        }
        let mut admitted = true;
        // An unmapped range takes no memory, and is refused where it is used.
        let _ = self.each(address, bytes as usize, |region, offset, range| {
            let file = region.in_file(offset, range.len());
            admitted = admitted && self.gate_of(region).is_none_or(|gate| gate.keeper.admit(file));
        });
        admitted
    }

    /// Before each look at memory: what is there may have to be brought first.
    fn bring(&self, address: u64, bytes: usize) -> Result<(), Unmapped> {
        if self.lost.get() {
            return Err(Unmapped);
        }
        if self.gate.is_none() {
            return Ok(());
        }
        let mut brought = true;
        // An unmapped range is refused where it is used.
        let _ = self.each(address, bytes, |region, offset, range| {
            let file = region.in_file(offset, range.len());
            brought = brought && self.gate_of(region).is_none_or(|gate| gate.keeper.bring(file));
        });
        if brought { Ok(()) } else { Err(Unmapped) }
    }

    pub fn add(&mut self, spec: RegionSpec, file: MemoryFile) -> Result<(), MemoryError> {
        let refuse = |what| Err(MemoryError::Region { guest: spec.guest, what });
        let ends = [spec.guest, spec.user, spec.file_offset].map(|start| start.checked_add(spec.bytes));
        let aligned = [spec.guest, spec.file_offset].iter().all(|start| start.is_multiple_of(PAGE_BYTES));
        if spec.bytes == 0 || ends.contains(&None) || !aligned {
            return refuse("its range or its file offset makes no sense");
        }
        if self.regions.len() >= REGIONS_MAX {
            return refuse("too many regions");
        }
        if self.regions.iter().any(|other| spec.guest < other.end() && other.spec.guest < spec.guest + spec.bytes) {
            return refuse("overlaps another region");
        }
        let map_error = |source: io::Error| MemoryError::Map { guest: spec.guest, source };
        let stat = rustix::fs::fstat(&file).map_err(|error| map_error(error.into()))?;
        if (stat.st_size as u64) < spec.file_offset + spec.bytes {
            // Access past the end of a mapped file is a SIGBUS, which would end all disks of the machine.
            return refuse("its file is shorter than the region");
        }
        let region =
            Region::map(spec, file, FileIdentity { device: stat.st_dev, inode: stat.st_ino }).map_err(map_error)?;
        let at = self.regions.partition_point(|other| other.spec.guest < spec.guest);
        self.regions.insert(at, region);
        Ok(())
    }

    pub fn remove(&mut self, spec: RegionSpec) -> Result<(), MemoryError> {
        // The file offset is not compared: frontends disagree on whether it is given.
        let same = |region: &Region| {
            (region.spec.guest, region.spec.bytes, region.spec.user) == (spec.guest, spec.bytes, spec.user)
        };
        let at = self.regions.iter().position(same);
        let at = at.ok_or(MemoryError::Region { guest: spec.guest, what: "is not mapped, so it cannot be removed" })?;
        self.regions.remove(at);
        Ok(())
    }

    pub fn clear(&mut self) {
        self.regions.clear();
    }

    /// From now on (and while `log_all`) written pages are marked in this file.
    pub fn set_log(&mut self, file: MemoryFile, offset: u64, bytes: u64) -> Result<(), MemoryError> {
        let stat = rustix::fs::fstat(&file).map_err(|error| MemoryError::MapLog(error.into()))?;
        let end = offset.checked_add(bytes).ok_or(MemoryError::Log("its range makes no sense"))?;
        if bytes == 0 || (stat.st_size as u64) < end {
            return Err(MemoryError::Log("its file is shorter than the log"));
        }
        let file_offset = FileOffset::from_arc(Arc::new(File::from(file)), offset);
        let bits = MmapRegion::from_file(file_offset, bytes as usize)
            .map_err(|error| MemoryError::MapLog(io::Error::other(error)))?;
        self.log = Some(Log { bits });
        Ok(())
    }

    pub fn set_log_all(&mut self, on: bool) {
        self.log_all = on;
    }

    /// Are writes to be marked in a log that has not come yet? QEMU gives it after the queues are started, and before they are
    /// enabled.
    pub fn lacks_log(&self) -> bool {
        self.log_all && self.log.is_none()
    }

    /// Marks pages whether or not all writes are logged: the used ring has a switch of its own.
    pub fn mark(&self, address: u64, bytes: u64) {
        if let Some(log) = &self.log {
            log.mark(address, bytes);
        }
    }

    fn written(&self, address: u64, bytes: usize) {
        if self.log_all {
            self.mark(address, bytes as u64);
        }
        if let Some(log) = &self.write_log {
            // An unmapped range was not written.
            let _ = self.each(address, bytes, |region, offset, range| {
                if log.is_of(region.file.device, region.file.inode) {
                    log.mark(region.in_file(offset, range.len()));
                }
            });
        }
    }

    /// Guest-physical address of what the frontend sees at `user`, if all of it is there.
    pub fn guest_address(&self, user: u64, bytes: u64) -> Option<u64> {
        let region = self
            .regions
            .iter()
            .find(|region| user >= region.spec.user && user - region.spec.user < region.spec.bytes)?;
        let offset = user - region.spec.user;
        (bytes <= region.spec.bytes - offset).then_some(region.spec.guest + offset)
    }

    pub fn is_lost(&self) -> bool {
        self.lost.get()
    }

    /// After each access, and before the next one.
    fn intact(&self, region: &Region) -> Result<(), Unmapped> {
        if region.is_lost() {
            self.lost.set(true);
        }
        if self.lost.get() { Err(Unmapped) } else { Ok(()) }
    }

    fn region(&self, address: u64) -> Result<&Region, Unmapped> {
        let found = self.regions.iter().find(|region| address >= region.spec.guest && address < region.end());
        found.ok_or(Unmapped)
    }

    /// Cuts a range at region borders.
    fn each(
        &self,
        address: u64,
        bytes: usize,
        mut act: impl FnMut(&Region, usize, std::ops::Range<usize>),
    ) -> Result<(), Unmapped> {
        let mut done = 0;
        while done < bytes {
            let at = address.checked_add(done as u64).ok_or(Unmapped)?;
            let region = self.region(at)?;
            let piece = (bytes - done).min((region.end() - at) as usize);
            act(region, (at - region.spec.guest) as usize, done..done + piece);
            self.intact(region)?;
            done += piece;
        }
        Ok(())
    }

    pub fn covers(&self, address: u64, bytes: u64) -> bool {
        self.each(address, bytes as usize, |_, _, _| ()).is_ok()
    }

    /// Fills `out`. On failure it holds nothing that matters.
    pub fn read(&self, address: u64, out: &mut [u8]) -> Result<(), Unmapped> {
        self.bring(address, out.len())?;
        self.each(address, out.len(), |region, offset, range| {
            if !self.is_granted(region, offset, range.len()) {
                return region.read_file(offset, &mut out[range]);
            }
            let slice = region.mapping.get_slice(offset, range.len()).expect("the range was cut to the region");
            slice.copy_to(&mut out[range]);
        })
    }

    /// Writes `bytes`, or a part of them if not all of it is mapped.
    pub fn write(&self, address: u64, bytes: &[u8]) -> Result<(), Unmapped> {
        self.bring(address, bytes.len())?;
        let result = self.each(address, bytes.len(), |region, offset, range| {
            region.write(offset, &bytes[range]);
        });
        self.written(address, bytes.len());
        result
    }

    /// An index or flag of a ring.
    pub fn load_u16(&self, address: u64, order: Ordering) -> Result<u16, Unmapped> {
        let region = self.region(address)?;
        if !self.is_granted(region, (address - region.spec.guest) as usize, 2) {
            let mut bytes = [0; 2];
            self.read(address, &mut bytes)?;
            return Ok(u16::from_le_bytes(bytes));
        }
        self.bring(address, 2)?;
        let loaded = self.atomic(address)?.load(order);
        self.intact(region)?;
        Ok(u16::from_le(loaded))
    }

    pub fn store_u16(&self, address: u64, value: u16, order: Ordering) -> Result<(), Unmapped> {
        self.bring(address, 2)?;
        self.atomic(address)?.store(value.to_le(), order);
        self.intact(self.region(address)?)?;
        fault_point::reach();
        self.written(address, 2);
        Ok(())
    }

    fn atomic(&self, address: u64) -> Result<&AtomicU16, Unmapped> {
        let region = self.region(address)?;
        region.mapping.get_atomic_ref((address - region.spec.guest) as usize).map_err(|_| Unmapped)
    }

    /// The page of the incarnation's RAM that holds this address.
    pub fn page(&self, address: u64) -> Option<RamPage> {
        let region = self.region(address).ok()?;
        let in_file = address - region.spec.guest + region.spec.file_offset;
        let pages = self.pages_of(region.file)?;
        // The file may have grown since.
        let page = Some(pages.start + in_file / PAGE_BYTES).filter(|page| pages.contains(page))?;
        u32::try_from(page).ok().map(RamPage)
    }

    /// The page that `BLOCK_BYTES` bytes from here fill exactly, if it may be there at all.
    pub fn whole_page(&self, address: u64) -> Option<RamPage> {
        let region = self.region(address).ok()?;
        if !self.is_granted(region, (address - region.spec.guest) as usize, 1) {
            return None;
        }
        let in_file = address - region.spec.guest + region.spec.file_offset;
        let fits = region.end() - address >= PAGE_BYTES;
        if fits && in_file.is_multiple_of(PAGE_BYTES) { self.page(address) } else { None }
    }
}

/// Whether QEMU has made the region's file (memfd). A file of another kind may be shared with other programs, as a device.
fn is_own_memory(region: &Region) -> bool {
    let file = region.mapping.file_offset().map(FileOffset::file);
    file.and_then(|file| fcntl_get_seals(file).ok()).is_some_and(|seals| seals.contains(SealFlags::SHRINK))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn file(bytes: u64) -> MemoryFile {
        MemoryFile::new(bytes)
    }

    fn spec(guest: u64, bytes: u64) -> RegionSpec {
        RegionSpec { guest, bytes, user: guest + 0x10_0000_0000, file_offset: 0 }
    }

    #[test]
    fn ranges_over_two_regions_are_one_range() {
        let mut map = GuestMap::default();
        map.add(spec(0x2000, 0x1000), file(0x1000)).unwrap();
        map.add(spec(0x1000, 0x1000), file(0x1000)).unwrap();
        map.write(0x1ffe, b"abcd").unwrap();
        let mut out = [0; 4];
        map.read(0x1ffe, &mut out).unwrap();
        assert_eq!(&out, b"abcd");
        assert!(map.covers(0x1000, 0x2000));
        assert!(!map.covers(0x1000, 0x2001));
        assert_eq!(map.write(0x2ffe, b"abcd"), Err(Unmapped));
        assert_eq!(map.read(u64::MAX, &mut out), Err(Unmapped));
        assert_eq!(map.guest_address(0x10_0000_1ff8, 8), Some(0x1ff8));
        assert_eq!(map.guest_address(0x10_0000_1ff9, 8), None);
    }

    #[test]
    fn regions_that_make_no_sense_are_refused() {
        let mut map = GuestMap::default();
        map.add(spec(0x1000, 0x2000), file(0x2000)).unwrap();
        let mut check = |spec, bytes, expected: &str| {
            let error = map.add(spec, file(bytes)).unwrap_err().to_string();
            assert!(error.contains(expected), "{error}");
        };
        check(spec(0x2000, 0x1000), 0x1000, "overlaps");
        check(spec(0x8000, 0x2000), 0x1000, "shorter");
        check(spec(0x8000, 0), 0x1000, "makes no sense");
        check(RegionSpec { guest: u64::MAX - 1, ..spec(0x8000, 0x1000) }, 0x1000, "makes no sense");
        check(RegionSpec { file_offset: 8, ..spec(0x8000, 0x1000) }, 0x2000, "makes no sense");
        assert!(map.remove(spec(0x9000, 0x1000)).is_err());
        map.remove(spec(0x1000, 0x2000)).unwrap();
        assert!(!map.covers(0x1000, 1));
    }

    #[test]
    fn only_pages_of_tracked_file_have_numbers() {
        let ram = file(0x4000);
        let stat = rustix::fs::fstat(&ram).unwrap();
        let mut map = GuestMap::default();
        map.add(RegionSpec { file_offset: 0x2000, ..spec(0x10_0000, 0x2000) }, ram).unwrap();
        map.add(spec(0x20_0000, 0x2000), file(0x2000)).unwrap();
        assert_eq!(map.page(0x10_0000), None, "nothing is tracked yet");
        let part = RamPart { device: stat.st_dev, inode: stat.st_ino, pages: 4 };
        map.track(Arc::new([part]));
        assert_eq!(map.page(0x10_1004), Some(RamPage(3)));
        assert_eq!(map.whole_page(0x10_1000), Some(RamPage(3)));
        assert_eq!(map.whole_page(0x10_1004), None);
        assert_eq!(map.page(0x20_0000), None);
        // A second file of the memory comes after the first.
        map.track(Arc::new([RamPart { inode: part.inode + 1, pages: 7, ..part }, part]));
        assert_eq!(map.page(0x10_1004), Some(RamPage(10)));
    }

    #[test]
    fn all_files_of_memory_are_told_until_they_are_tracked() {
        let mut map = GuestMap::default();
        assert!(map.untracked(1).is_none());
        map.add(spec(0x4000, 0x2000), file(0x2000)).unwrap();
        map.add(spec(0x10_0000, 0x1000), MemoryFile::new_unsealed(0x1000)).unwrap();
        map.add(spec(0, 0x3000), file(0x3000)).unwrap();
        let told = map.untracked(1).unwrap().files;
        let places: Vec<_> =
            told.iter().flat_map(|told| &told.places).map(|place| (place.guest, place.bytes)).collect();
        assert_eq!(places, [(0, 0x3000), (0x4000, 0x2000)], "without the shared memory of a device");
        let part = |told: &ToldFile| {
            let stat = rustix::fs::fstat(&told.file).unwrap();
            RamPart { device: stat.st_dev, inode: stat.st_ino, pages: stat.st_size as u64 / PAGE_BYTES }
        };
        map.track(told.iter().take(1).map(part).collect());
        assert!(map.untracked(1).is_some());
        map.track(told.iter().map(part).collect());
        assert!(map.untracked(1).is_none());
        assert_eq!((map.page(0x2000), map.page(0x5000)), (Some(RamPage(2)), Some(RamPage(4))));
    }

    #[test]
    fn truncated_memory_is_lost_alone() {
        let mut map = GuestMap::default();
        let cut = MemoryFile::new_unsealed(0x4000);
        let keeps = cut.try_clone();
        map.add(spec(0, 0x4000), cut).unwrap();
        map.add(spec(0x10_0000, 0x1000), file(0x1000)).unwrap();
        map.write(0, &[1; 100]).unwrap();
        rustix::fs::ftruncate(&keeps, 0x1000).unwrap();
        assert_eq!(map.load_u16(0, Ordering::Relaxed), Ok(0x101), "what is left is read");
        assert!(!map.is_lost());
        assert_eq!(map.load_u16(0x2000, Ordering::Relaxed), Err(Unmapped));
        assert!(map.is_lost());
        assert_eq!(map.write(0x10_0000, &[1]), Err(Unmapped), "no half answers");
        assert_eq!(map.read(0x3000, &mut [0; 10]), Err(Unmapped));
        assert_eq!(map.store_u16(0x1000, 1, Ordering::Relaxed), Err(Unmapped));
        drop(map);
        let mut next = GuestMap::default();
        next.add(spec(0, 0x1000), keeps).unwrap();
        assert_eq!(next.load_u16(0, Ordering::Relaxed), Ok(0x101), "the next mapping is another one");
    }

    #[test]
    fn each_write_is_logged_while_asked_for() {
        let mut map = GuestMap::default();
        map.add(spec(0, 0x10_0000), file(0x10_0000)).unwrap();
        let log = MemoryFile::new(32);
        map.set_log(log.try_clone(), 0, 32).unwrap();
        let log = File::from(log);
        let logged = || -> Vec<u64> {
            let mut bits = [0; 32];
            std::os::unix::fs::FileExt::read_exact_at(&log, &mut bits, 0).unwrap();
            (0..256).filter(|page| bits[page / 8] >> (page % 8) & 1 == 1).map(|page| page as u64).collect()
        };
        map.write(0x1000, &[1]).unwrap();
        assert!(logged().is_empty(), "logging is off");
        map.set_log_all(true);
        map.write(0x2fff, &[1, 2]).unwrap();
        map.store_u16(0x9_0000, 7, Ordering::Relaxed).unwrap();
        assert_eq!(logged(), [2, 3, 0x90]);
        map.set_log_all(false);
        map.write(0x5000, &[1]).unwrap();
        map.mark(0x6000, 1);
        assert_eq!(logged(), [2, 3, 6, 0x90]);
        assert!(map.set_log(file(16), 0, 32).is_err(), "a log past the end of its file");
    }
}
