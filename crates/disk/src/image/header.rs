//! The header of a qcow2 image, judged before anything is allocated or written because of it: whoever owns the guest may have
//! got the image from anywhere, and one flipped bit in it must not cost more than an error.
//!
//! bytes -> fields -> features -> does each table fit into the file, and the disk into its table? -> `Header`
//!
//! ```text
//!  0 magic  4 version  8 backing name: offset u64  16 its length u32  20 cluster bits u32  24 size u64
//! 32 encryption u32  36 entries of the L1 table u32  40 its offset u64
//! 48 refcount table: offset u64  56 its clusters u32  60 snapshots u32  64 their offset u64
//! 72 incompatible features u64  96 refcount order u32  100 header length u32 (72 to 104: version 3), then extensions
//! ```
//! (QEMU's docs/interop/qcow2.txt)

use std::fs::File;
use std::io;
use std::path::Path;

use imago::StorageExt as _;

use super::guarded::GuardedFile;
use super::open::{file_bytes, read_aligned};
use super::overlay::{BACKING_FORMAT, BACKING_MARK, Mark};
use super::{ImageError, access_error};
use crate::arrival::Arrival;
use crate::buffer::Pages;

/// The header, its extensions and the backing name all lie in the first cluster, of which we look at this much.
const HEADER_BYTES: usize = 64 * 1024;
/// QEMU's limits.
pub(super) const L1_BYTES_MAX: u64 = 32 << 20;
const REFCOUNT_TABLE_BYTES_MAX: u64 = 8 << 20;
const SNAPSHOTS_MAX: u32 = 65536;
const NAME_BYTES_MAX: usize = 1023;
const REFCOUNT_ORDER_MAX: u32 = 6;
const OFFSET_BITS: u64 = 0x00ff_ffff_ffff_fe00;
/// Room for tables beyond a share of the disk.
const TABLES_BYTES: u64 = 64 << 20;

/// Incompatible feature: reference counts may be behind (`lazy_refcounts`).
const NOT_CLOSED: u64 = 1;

const CONVERT: &str = "rewrite it with qemu-img convert";
const REPAIR: &str = "repair it with qemu-img check -r all";
const RESTORE: &str = "restore it from a copy";

/// The parts of a header that are needed here.
#[derive(Debug)]
pub(super) struct Header {
    /// Size of the disk.
    pub bytes: u64,
    pub has_zero_clusters: bool,
    pub backing: Option<String>,
    pub backing_format: Option<String>,
    /// Only in images of our own making.
    pub backing_mark: Option<Mark>,
    pub geometry: Geometry,
}

/// Where an image's tables lie. All of it is within the file.
#[derive(Clone, Copy, Debug)]
pub(super) struct Geometry {
    pub cluster_bytes: u64,
    pub l1_offset: u64,
    pub l1_entries: u64,
    pub refcount_table_offset: u64,
    pub refcount_table_bytes: u64,
    /// A reference count has 2 to the power of this many bits.
    refcount_order: u32,
    /// The highest offset where a change of the image may end.
    pub reach: u64,
    file_bytes: u64,
}

impl Header {
    pub fn read(file: &File, path: &Path, arrival: Option<&Arrival>) -> Result<Self, ImageError> {
        let there = arrival.map_or(Ok(()), |arrival| arrival.wait(0..HEADER_BYTES as u64));
        there.map_err(|error| access_error(path, "read", error))?;
        Self::read_with(file, path, 0)
    }

    /// As `read`, of an image that a QEMU may be using: one with lazy refcounts is marked as not closed until it is.
    pub fn read_in_use(file: &File, path: &Path) -> Result<Self, ImageError> {
        Self::read_with(file, path, NOT_CLOSED)
    }

    /// `allowed`: incompatible features, as bits, that do not matter.
    fn read_with(file: &File, path: &Path, allowed: u64) -> Result<Self, ImageError> {
        let start = read_start(file).map_err(|error| access_error(path, "read", error))?;
        let bytes = file_bytes(file).map_err(|error| access_error(path, "read", error))?;
        Self::parse(&start, bytes, allowed).map_err(|defect| match defect {
            Defect::NotQcow2 => ImageError::NotQcow2 { path: path.into() },
            Defect::Named(problem, remedy) => ImageError::Qcow2 { path: path.into(), problem, remedy },
        })
    }

    /// `start` is the first bytes of the file, `file_bytes` its length.
    fn parse(start: &[u8], file_bytes: u64, allowed: u64) -> Result<Self, Defect> {
        if start.get(..4) != Some(b"QFI\xfb") {
            return Err(Defect::NotQcow2);
        }
        let u32_at = |at: usize| bytes_at(start, at).map(u32::from_be_bytes).ok_or_else(cut_off);
        let u64_at = |at: usize| bytes_at(start, at).map(u64::from_be_bytes).ok_or_else(cut_off);
        let has_zero_clusters = match u32_at(4)? {
            2 => false,
            3 => true,
            version => return Err(Defect::Named(format!("has the unknown version {version}"), CONVERT)),
        };
        if has_zero_clusters {
            check_features(u64_at(72)? & !allowed)?;
        }
        if u32_at(32)? != 0 {
            return Err(Defect::Named("is encrypted".into(), CONVERT));
        }
        let cluster_bits = u32_at(20)?;
        if !(9..=21).contains(&cluster_bits) {
            return Err(damaged(format!("has clusters of 2^{cluster_bits} bytes")));
        }
        let first_cluster = start.get(..1 << cluster_bits).unwrap_or(start);
        let (header_bytes, refcount_order) = match has_zero_clusters {
            true => (u32_at(100)? as usize, u32_at(96)?),
            false => (72, 4),
        };
        if header_bytes > first_cluster.len() || (has_zero_clusters && header_bytes < 104) {
            return Err(damaged(format!("says that its header is {header_bytes} bytes long")));
        }
        if refcount_order > REFCOUNT_ORDER_MAX {
            return Err(damaged(format!("has reference counts of 2^{refcount_order} bits")));
        }
        let bytes = u64_at(24)?;
        let geometry = Geometry {
            cluster_bytes: 1 << cluster_bits,
            l1_offset: u64_at(40)?,
            l1_entries: u32_at(36)?.into(),
            refcount_table_offset: u64_at(48)?,
            refcount_table_bytes: u64::from(u32_at(56)?) << cluster_bits,
            refcount_order,
            reach: file_bytes.saturating_add(bytes).saturating_add(bytes / 8).saturating_add(TABLES_BYTES),
            file_bytes,
        };
        geometry.check(bytes)?;
        geometry.check_snapshots(u32_at(60)?, u64_at(64)?)?;
        let backing = match (u64_at(8)?, u32_at(16)? as usize) {
            (0, _) | (_, 0) => None,
            (_, length) if length > NAME_BYTES_MAX => {
                return Err(damaged(format!("has a backing image whose name is {length} bytes long")));
            }
            (offset, length) => {
                let name = usize::try_from(offset).ok().and_then(|at| first_cluster.get(at..at.checked_add(length)?));
                Some(String::from_utf8_lossy(name.ok_or_else(cut_off)?).into_owned())
            }
        };
        let extension = |kind| find_extension(first_cluster, header_bytes, kind);
        let backing_format = extension(BACKING_FORMAT).map(|format| String::from_utf8_lossy(format).into_owned());
        let named = backing.as_deref().map(str::as_bytes);
        let backing_mark = extension(BACKING_MARK).zip(named).and_then(|(mark, name)| Mark::read(mark, name));
        Ok(Self { bytes, has_zero_clusters, backing, backing_format, backing_mark, geometry })
    }
}

impl Geometry {
    fn check(&self, disk_bytes: u64) -> Result<(), Defect> {
        let is_inside = |offset: u64, bytes: u64| {
            let end = offset.checked_add(bytes).and_then(|end| end.checked_next_multiple_of(self.cluster_bytes));
            // qemu-img leaves files that end within a cluster.
            let file_end = self.file_bytes.checked_next_multiple_of(self.cluster_bytes);
            offset > 0 && offset.is_multiple_of(self.cluster_bytes) && end.is_some() && end <= file_end
        };
        let l1_bytes = self.l1_entries * 8;
        if l1_bytes > L1_BYTES_MAX || (l1_bytes > 0 && !is_inside(self.l1_offset, l1_bytes)) {
            return Err(damaged("has an L1 table that does not lie in the file".into()));
        }
        let (entry_bytes, table_bytes) = (self.cluster_bytes / 8 * self.cluster_bytes, self.refcount_table_bytes);
        if disk_bytes.div_ceil(entry_bytes) > self.l1_entries {
            return Err(damaged(format!("says that its disk has {disk_bytes} bytes, more than its L1 table leads to")));
        }
        if table_bytes == 0
            || table_bytes > REFCOUNT_TABLE_BYTES_MAX
            || !is_inside(self.refcount_table_offset, table_bytes)
        {
            return Err(damaged("has a refcount table that does not lie in the file".into()));
        }
        Ok(())
    }

    fn check_snapshots(&self, count: u32, offset: u64) -> Result<(), Defect> {
        let is_inside = offset.is_multiple_of(self.cluster_bytes) && offset < self.file_bytes;
        match count {
            0 => Ok(()),
            1..=SNAPSHOTS_MAX if is_inside => Ok(()),
            _ => Err(damaged("has a table of snapshots that does not lie in the file".into())),
        }
    }

    /// The tables that the first ones lead to lie in the file too: an image that says otherwise would be written anywhere.
    pub fn check_entries(&self, file: &GuardedFile, write: bool) -> io::Result<()> {
        self.checked_table(file, "L1", self.l1_offset, self.l1_entries * 8)?;
        if !write {
            return Ok(());
        }
        let blocks = self.checked_table(file, "refcount", self.refcount_table_offset, self.refcount_table_bytes)?;
        self.check_counts(file, &blocks)
    }

    fn checked_table(&self, file: &GuardedFile, name: &str, offset: u64, bytes: u64) -> io::Result<Vec<u64>> {
        let entries = read_entries(file, offset, bytes)?;
        let is_wrong = |entry: &u64| *entry >= self.file_bytes || !entry.is_multiple_of(self.cluster_bytes);
        match entries.iter().position(is_wrong) {
            None => Ok(entries),
            Some(index) => Err(broken(format!("its {name} table leads out of the file (entry {index}); {RESTORE}"))),
        }
    }

    /// The tables are not free to be overwritten, as far as a look at few clusters tells. (The library does not come back from
    /// a count of 0 for the header.)
    fn check_counts(&self, file: &GuardedFile, blocks: &[u64]) -> io::Result<()> {
        let cluster_bits = self.cluster_bytes.trailing_zeros();
        let counts_per_block = (self.cluster_bytes * 8) >> self.refcount_order;
        let clusters = |offset: u64, bytes: u64| offset >> cluster_bits..(offset + bytes).div_ceil(self.cluster_bytes);
        let l1 = clusters(self.l1_offset, self.l1_entries * 8);
        let refcounts = clusters(self.refcount_table_offset, self.refcount_table_bytes);
        let mut block = (0, vec![0; self.cluster_bytes as usize]);
        for cluster in (0..1).chain(l1).chain(refcounts) {
            let place = blocks.get((cluster / counts_per_block) as usize).copied().unwrap_or(0);
            if place > 0 && place != block.0 {
                file.read(&mut block.1[..], place)?;
                block.0 = place;
            }
            let bit = (cluster % counts_per_block) << self.refcount_order;
            let (byte, bytes) = ((bit / 8) as usize, (1 << self.refcount_order) / 8);
            let is_counted = match bytes {
                0 => block.1[byte] >> (bit % 8) & ((1_u16 << (1 << self.refcount_order)) - 1) as u8 > 0,
                _ => block.1[byte..byte + bytes].iter().any(|byte| *byte > 0),
            };
            if place == 0 || !is_counted {
                return Err(broken(format!("its reference counts do not know its tables; {REPAIR}")));
            }
        }
        Ok(())
    }
}

fn broken(problem: String) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, problem)
}

/// The offsets in a table.
pub(super) fn read_entries(file: &GuardedFile, offset: u64, bytes: u64) -> io::Result<Vec<u64>> {
    let mut table = vec![0; bytes as usize];
    file.read(&mut table[..], offset)?;
    Ok(offsets_in(&table).collect())
}

pub(super) fn offsets_in(table: &[u8]) -> impl Iterator<Item = u64> {
    table.chunks_exact(8).map(|entry| u64::from_be_bytes(entry.try_into().expect("8 bytes")) & OFFSET_BITS)
}

#[derive(Debug)]
enum Defect {
    NotQcow2,
    Named(String, &'static str),
}

fn cut_off() -> Defect {
    damaged("ends within its header".into())
}

fn damaged(problem: String) -> Defect {
    Defect::Named(problem, RESTORE)
}

fn check_features(incompatible: u64) -> Result<(), Defect> {
    const KNOWN: [(&str, &str); 5] = [
        ("was not closed cleanly (lazy refcounts)", REPAIR),
        ("is marked corrupt", REPAIR),
        ("keeps its data in an external file", CONVERT),
        ("is compressed with zstd", CONVERT),
        ("has extended L2 entries", CONVERT),
    ];
    if incompatible == 0 {
        return Ok(());
    }
    let bit = incompatible.trailing_zeros() as usize;
    let unknown = || (format!("needs the unknown feature {bit}"), CONVERT);
    let (problem, remedy) = KNOWN.get(bit).map_or_else(unknown, |&(problem, remedy)| (problem.into(), remedy));
    Err(Defect::Named(problem, remedy))
}

/// Extensions are (type u32, length u32, data padded to 8), ended by type 0.
fn find_extension(start: &[u8], mut at: usize, wanted: u32) -> Option<&[u8]> {
    loop {
        let kind = u32::from_be_bytes(bytes_at(start, at)?);
        let length = u32::from_be_bytes(bytes_at(start, at.checked_add(4)?)?) as usize;
        let data = at.checked_add(8)?;
        match kind {
            0 => return None,
            kind if kind == wanted => return start.get(data..data.checked_add(length)?),
            _ => at = data.checked_add(length)?.checked_next_multiple_of(8)?,
        }
    }
}

fn bytes_at<const N: usize>(start: &[u8], at: usize) -> Option<[u8; N]> {
    start.get(at..at.checked_add(N)?)?.try_into().ok()
}

/// The first bytes of a file that may be open with O_DIRECT.
fn read_start(file: &File) -> io::Result<Vec<u8>> {
    let mut pages = Pages::new(HEADER_BYTES)?;
    let length = read_aligned(file, pages.bytes_mut(), 0)?;
    Ok(pages.bytes_mut()[..length].to_vec())
}
