//! Note: which units of a file have arrived, in a file beside it, `NAME.arrival`.
//!
//! ```text
//!  0  "HTHARRIV"
//!  8  version u32 | length of the source u32 | bytes of the file u64 | number of units u64
//! 32  source | 24 a unit: which u64, 16 checksum | 32 BLAKE3 of all before
//!     16 a unit: its checksum, once it has landed
//! ```
//! Little endian. A unit has landed if its checksum stands there, and that is written when the unit is on the disk: whatever else is
//! found in that place, or nothing, costs no more than that it is brought again.

use std::fs::{self, File, OpenOptions};
use std::io::{self, ErrorKind, Read, Write};
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use super::{CHECKSUM_BYTES, Checksum, UNIT_BYTES};

const MAGIC: &[u8; 8] = b"HTHARRIV";
const VERSION: u32 = 1;
const HEAD_BYTES: usize = 32;
const UNIT_ENTRY_BYTES: usize = 8 + CHECKSUM_BYTES;
const SEAL_BYTES: usize = 32;
/// Enough for some 1.6 TiB that are not zeroes.
const NOTE_BYTES_MAX: u64 = 64 << 20;

#[derive(Debug)]
pub struct Note {
    file: File,
    /// Where the first unit's checksum belongs.
    landed_at: u64,
}

/// Contents of a note.
#[derive(Debug, PartialEq, Eq)]
pub struct Noted {
    pub bytes: u64,
    pub source: String,
    pub units: Vec<(u64, Checksum)>,
    /// As many.
    pub landed: Vec<bool>,
}

/// Path of the note of the file at `path`.
pub fn path_of(path: &Path) -> PathBuf {
    let mut name = path.as_os_str().to_owned();
    name.push(".arrival");
    name.into()
}

pub fn sync_folder(path: &Path) -> io::Result<()> {
    File::open(path.parent().unwrap_or(Path::new("/")))?.sync_all()
}

impl Note {
    pub fn make(path: &Path, bytes: u64, source: &str, units: &[(u64, Checksum)]) -> io::Result<()> {
        let mut text = MAGIC.to_vec();
        text.extend(VERSION.to_le_bytes());
        text.extend((source.len() as u32).to_le_bytes());
        text.extend(bytes.to_le_bytes());
        text.extend((units.len() as u64).to_le_bytes());
        text.extend(source.as_bytes());
        for (unit, checksum) in units {
            text.extend(unit.to_le_bytes());
            text.extend(checksum);
        }
        let seal = blake3::hash(&text);
        text.extend(seal.as_bytes());
        if (text.len() + units.len() * CHECKSUM_BYTES) as u64 > NOTE_BYTES_MAX {
            return Err(io::Error::new(ErrorKind::FileTooLarge, "too much of it is not zeroes"));
        }
        let mut file = OpenOptions::new().write(true).create_new(true).mode(0o600).open(path_of(path))?;
        file.write_all(&text)?;
        file.sync_all()?;
        // The file must not outlive a power cut without its note: it would count as complete.
        sync_folder(path)
    }

    /// None: there is none.
    pub fn open(path: &Path) -> io::Result<Option<(Self, Noted)>> {
        let path = path_of(path);
        let mut file = match OpenOptions::new().read(true).write(true).open(&path) {
            Err(error) if error.kind() == ErrorKind::NotFound => return Ok(None),
            opened => opened?,
        };
        let mut text = Vec::new();
        (&mut file).take(NOTE_BYTES_MAX).read_to_end(&mut text)?;
        let damaged = || io::Error::new(ErrorKind::InvalidData, format!("{}: is damaged", path.display()));
        let (noted, landed_at) = parse(&text).ok_or_else(damaged)?;
        Ok(Some((Self { file, landed_at: landed_at as u64 }, noted)))
    }

    pub fn add(&mut self, position: usize, checksum: &Checksum) -> io::Result<()> {
        self.file.write_all_at(checksum, self.landed_at + (position * CHECKSUM_BYTES) as u64)
    }

    pub fn sync(&self) -> io::Result<()> {
        self.file.sync_data()
    }

    /// Fine if it is gone already.
    pub fn remove(&mut self, path: &Path) -> io::Result<()> {
        match fs::remove_file(path_of(path)) {
            Err(error) if error.kind() != ErrorKind::NotFound => Err(error),
            _ => sync_folder(path),
        }
    }
}

/// With where the checksums of what has landed begin.
fn parse(text: &[u8]) -> Option<(Noted, usize)> {
    let u32_at = |at: usize| Some(u32::from_le_bytes(text.get(at..at + 4)?.try_into().ok()?));
    let u64_at = |at: usize| Some(u64::from_le_bytes(text.get(at..at + 8)?.try_into().ok()?));
    if text.get(..8)? != MAGIC || u32_at(8)? != VERSION {
        return None;
    }
    let (source_bytes, bytes) = (u32_at(12)? as usize, u64_at(16)?);
    let count = usize::try_from(u64_at(24)?).ok().filter(|count| *count <= text.len() / UNIT_ENTRY_BYTES)?;
    let units_at = HEAD_BYTES.checked_add(source_bytes)?;
    let seal_at = units_at.checked_add(count * UNIT_ENTRY_BYTES)?;
    let landed_at = seal_at + SEAL_BYTES;
    if text.get(seal_at..landed_at)? != blake3::hash(&text[..seal_at]).as_bytes() {
        return None;
    }
    let source = String::from_utf8(text[HEAD_BYTES..units_at].to_vec()).ok()?;
    let unit = |entry: &[u8]| {
        let (unit, checksum) = entry.split_at(8);
        (u64::from_le_bytes(unit.try_into().expect("8 bytes")), checksum.try_into().expect("as many as a checksum has"))
    };
    let units: Vec<(u64, Checksum)> = text[units_at..seal_at].chunks_exact(UNIT_ENTRY_BYTES).map(unit).collect();
    let fits = units.last().is_none_or(|(last, _)| *last < bytes.div_ceil(UNIT_BYTES));
    if !fits || !units.is_sorted_by(|one, next| one.0 < next.0) {
        return None;
    }
    let has_landed = |(position, (_, checksum)): (usize, &(u64, Checksum))| {
        let at = landed_at + position * CHECKSUM_BYTES;
        text.get(at..at + CHECKSUM_BYTES) == Some(&checksum[..])
    };
    let landed = units.iter().enumerate().map(has_landed).collect();
    Some((Noted { bytes, source, units, landed }, landed_at))
}

#[cfg(test)]
mod tests {
    use proptest::collection::vec;
    use proptest::prelude::*;
    use proptest::sample::{Index, select};

    use super::*;
    use crate::allocation::{FOREIGN_BYTES_MAX, with_ceiling};

    proptest! {
        /// Also with a checksum that is right.
        #[test]
        fn fuzz_notes(
            edits in vec((any::<Index>(), select(vec![0u64, 1, 7, 1 << 20, 1 << 40, u64::MAX - 31, u64::MAX]), 1..9usize), 1..5),
            resealed: bool,
            cut in prop::option::weighted(0.2, any::<Index>()),
        ) {
            let folder = tempfile::tempdir().unwrap();
            let path = folder.path().join("disk-root");
            let units: Vec<_> = [0, 1, 4, 7].map(|unit| (unit, [unit as u8; CHECKSUM_BYTES])).to_vec();
            Note::make(&path, 7 * UNIT_BYTES + 5, "s3://b/p/disk-root", &units).unwrap();
            let mut text = fs::read(path_of(&path)).unwrap();
            let seal_at = text.len() - SEAL_BYTES;
            for (at, value, length) in edits {
                let at = at.index(text.len());
                let end = (at + length).min(text.len());
                text[at..end].copy_from_slice(&value.to_le_bytes()[..end - at]);
            }
            if resealed {
                let seal = blake3::hash(&text[..seal_at]);
                text[seal_at..].copy_from_slice(seal.as_bytes());
            }
            if let Some(cut) = cut {
                text.truncate(cut.index(text.len()));
            }
            fs::write(path_of(&path), &text).unwrap();
            match with_ceiling(FOREIGN_BYTES_MAX, || Note::open(&path)) {
                Ok(noted) => {
                    let (_, noted) = noted.expect("it is there");
                    prop_assert_eq!(noted.units.len(), noted.landed.len());
                    prop_assert!(noted.units.iter().all(|(unit, _)| *unit < noted.bytes.div_ceil(UNIT_BYTES)));
                }
                Err(refusal) => prop_assert!(refusal.to_string().contains("disk-root.arrival: is damaged"), "{}", refusal),
            }
        }
    }
}
