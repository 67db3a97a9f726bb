//! Hearth's disk: a header of one block, and behind it the cache map.
//!
//! The host writes the map while the guest boots, so the header is read again until it says that there is a map, or that none
//! comes. Everything is read past the page cache, which may have the header as it was.

use std::fs::{self, File, OpenOptions};
use std::io;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::thread::sleep;
use std::time::{Duration, Instant};

/// Serial number of the disk.
const SERIAL: &str = "hearth-cache-map";
const HEADER_BYTES: usize = 4096;
/// First word of the header, and the version of the format.
const MAGIC: &str = "hearth-cache-map 1";
/// A longer map is a mistake.
const MAP_BYTES_MAX: usize = 256 << 20;
const LOOK_EVERY: Duration = Duration::from_millis(100);
/// The host needs about 0.3 s for each GiB of cache.
const PATIENCE: Duration = Duration::from_secs(120);

/// Why the map cannot be read.
#[derive(Debug, thiserror::Error)]
pub enum DiskError {
    #[error("cannot read {disk}")]
    Read { disk: PathBuf, source: io::Error },
    #[error("{disk} has no cache map that this version understands; install the hearth-refill of the host's Hearth")]
    Format { disk: PathBuf },
}

/// Finds the disk by its serial number; `None` if the machine has none.
pub fn find() -> Option<PathBuf> {
    let disks = fs::read_dir("/sys/block").ok()?.filter_map(|entry| Some(entry.ok()?.path()));
    let is_ours = |disk: &PathBuf| fs::read_to_string(disk.join("serial")).is_ok_and(|serial| serial.trim() == SERIAL);
    let found = disks.into_iter().find(is_ours)?;
    Some(Path::new("/dev").join(found.file_name()?))
}

/// What the header says.
#[derive(Debug, PartialEq, Eq)]
enum Header {
    /// The host has not finished the map.
    Pending,
    /// There is no map.
    Empty,
    /// There is a map.
    Ready { bytes: usize, source: Source },
}

/// Where the pages of the map are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Source {
    /// In the host's memory, or nearly all of them.
    Memory,
    /// On the disk, which the boot needs as well.
    Disk,
}

/// Waits until the map is complete, and reads it. `None` if there is none.
pub fn read_map(disk: &Path) -> Result<Option<(String, Source)>, DiskError> {
    let failed = |source| DiskError::Read { disk: disk.to_owned(), source };
    let file = OpenOptions::new().read(true).custom_flags(libc::O_DIRECT).open(disk).map_err(failed)?;
    let deadline = Instant::now() + PATIENCE;
    loop {
        let block = read_direct(&file, 0, HEADER_BYTES).map_err(failed)?;
        match parse(&block).ok_or_else(|| DiskError::Format { disk: disk.to_owned() })? {
            Header::Ready { bytes, source } => {
                let text = read_direct(&file, HEADER_BYTES as u64, bytes).map_err(failed)?;
                return Ok(Some((String::from_utf8_lossy(&text).into_owned(), source)));
            }
            Header::Pending if Instant::now() < deadline => sleep(LOOK_EVERY),
            Header::Pending | Header::Empty => return Ok(None),
        }
    }
}

fn parse(block: &[u8]) -> Option<Header> {
    let end = block.iter().position(|byte| *byte == 0).unwrap_or(block.len());
    let text = str::from_utf8(&block[..end]).ok()?;
    let mut words = text.strip_prefix(MAGIC)?.split_whitespace();
    match (words.next()?, words.next()) {
        ("pending", _) => Some(Header::Pending),
        ("empty", _) => Some(Header::Empty),
        ("ready", Some(bytes)) => {
            let source = if words.next() == Some("disk") { Source::Disk } else { Source::Memory };
            let bytes = bytes.parse().ok().filter(|bytes| *bytes <= MAP_BYTES_MAX)?;
            Some(Header::Ready { bytes, source })
        }
        _ => None,
    }
}

/// Reads `bytes` bytes at a block of the disk.
fn read_direct(file: &File, at: u64, bytes: usize) -> io::Result<Vec<u8>> {
    let whole = bytes.next_multiple_of(HEADER_BYTES);
    // Such a read needs an aligned buffer.
    let mut buffer = vec![0; whole + HEADER_BYTES];
    let start = buffer.as_ptr().align_offset(HEADER_BYTES);
    file.read_exact_at(&mut buffer[start..start + whole], at)?;
    Ok(buffer[start..start + bytes].to_vec())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn header_says_whether_there_is_a_map() {
        let padded = |text: &str| {
            let mut block = text.as_bytes().to_vec();
            block.resize(HEADER_BYTES, 0);
            parse(&block)
        };
        assert_eq!(padded("hearth-cache-map 1 pending\n"), Some(Header::Pending));
        assert_eq!(padded("hearth-cache-map 1 empty\n"), Some(Header::Empty));
        let ready = |source| Some(Header::Ready { bytes: 1234, source });
        assert_eq!(padded("hearth-cache-map 1 ready 1234\n"), ready(Source::Memory));
        assert_eq!(padded("hearth-cache-map 1 ready 1234 disk\n"), ready(Source::Disk));
        for other in
            ["", "hearth-cache-map 2 ready 1\n", "hearth-cache-map 1 ready\n", "hearth-cache-map 1 ready 99999999999\n"]
        {
            assert_eq!(padded(other), None, "{other}");
        }
    }
}
