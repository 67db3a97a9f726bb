//! Log of changed tables that are not in the image yet: a file in host memory, for the next keeper if this one is killed.
//!
//! ```text
//!  0  "HTHTABLE" | version u32 | bytes of a unit u32 | the image: device u64, inode u64 | boot of the host: 8 | checksum of all before 8
//! 48  for each time that changes were settled: how many u32 | 0 u32 | checksum of place and changes 8
//!     each change: offset u64 | checksum of what the image holds there 8 | a unit
//! ```
//! Little endian; checksums are the first bytes of a BLAKE3. A part that was cut off was not reported to the guest, and does not
//! count. After a reboot of the host the image alone counts: what the log names may never have reached the disk.

use std::fs::{self, File, OpenOptions};
use std::io::{self, ErrorKind};
use std::os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use rustix::fs::{Timespec, Timestamps, UTIME_NOW, futimens};

const MAGIC: &[u8; 8] = b"HTHTABLE";
const VERSION: u32 = 1;
const HEAD_BYTES: usize = 48;
const PART_HEAD_BYTES: usize = 16;
const CHANGE_HEAD_BYTES: usize = 16;
/// More than is ever written.
const READ_BYTES_MAX: u64 = 1 << 30;

/// A change of a table, as it was noted.
#[derive(Debug)]
pub(in crate::image) struct Change {
    pub offset: u64,
    /// Checksum of what the image holds there.
    pub before: u64,
    pub bytes: Box<[u8]>,
}

#[derive(Debug)]
pub(in crate::image) struct TableLog {
    path: PathBuf,
    file: File,
    /// Where the next part goes.
    end: u64,
    #[cfg(test)]
    pub tape: Option<crate::image::tape::Tape>,
}

pub(super) fn checksum(bytes: &[u8]) -> u64 {
    u64::from_le_bytes(blake3::hash(bytes).as_bytes()[..8].try_into().expect("8 bytes"))
}

impl TableLog {
    /// An empty one for this image. An earlier process's changes are dropped: the disk differs from then on, and the
    /// image's times must show it.
    pub fn drop_changes(path: &Path, image: &File, unit_bytes: u64) -> io::Result<Self> {
        if fs::metadata(path).is_ok_and(|found| found.len() > HEAD_BYTES as u64) {
            // Now, and not a time of our choice: that would take the file's owner.
            let now = Timespec { tv_sec: 0, tv_nsec: UTIME_NOW };
            futimens(image, &Timestamps { last_access: now, last_modification: now })?;
        }
        Self::create(path, image, unit_bytes)
    }

    /// An empty one for this image, in place of what is there.
    pub fn create(path: &Path, image: &File, unit_bytes: u64) -> io::Result<Self> {
        match fs::remove_file(path) {
            Err(error) if error.kind() != ErrorKind::NotFound => return Err(error),
            _ => {}
        }
        let file = OpenOptions::new().read(true).write(true).create_new(true).mode(0o600).open(path)?;
        file.write_all_at(&head(image, unit_bytes)?, 0)?;
        let end = HEAD_BYTES as u64;
        Ok(Self {
            path: path.into(),
            file,
            end,
            #[cfg(test)]
            tape: None,
        })
    }

    /// With what a process before this one has left in it, if it is about this image.
    pub fn open(path: &Path, image: &File, unit_bytes: u64) -> io::Result<(Self, Vec<Change>)> {
        let file = match OpenOptions::new().read(true).write(true).open(path) {
            Err(error) if error.kind() == ErrorKind::NotFound => {
                return Ok((Self::create(path, image, unit_bytes)?, Vec::new()));
            }
            opened => opened?,
        };
        if file.metadata()?.len() > READ_BYTES_MAX {
            return Err(io::Error::new(ErrorKind::FileTooLarge, format!("{}: is too large", path.display())));
        }
        let text = fs::read(path)?;
        let is_whole = text.get(..HEAD_BYTES).is_some_and(|head| head[40..] == checksum(&head[..40]).to_le_bytes());
        // One that was cut off is empty. One of another boot is void, and so is a program's that wrote it in another way.
        let expected = head(image, unit_bytes)?;
        if !is_whole || text[..16] != expected[..16] || text[32..40] != expected[32..40] {
            return Ok((Self::create(path, image, unit_bytes)?, Vec::new()));
        }
        let (changes, end) = parse(&text, unit_bytes as usize);
        if text[16..32] != expected[16..32] {
            // About another file: without changes in it that does no harm.
            return match changes.is_empty() {
                true => Ok((Self::create(path, image, unit_bytes)?, changes)),
                false => Err(super::changed()),
            };
        }
        let log = Self {
            path: path.into(),
            file,
            end: end as u64,
            #[cfg(test)]
            tape: None,
        };
        Ok((log, changes))
    }

    pub fn bytes(&self) -> u64 {
        self.end
    }

    /// All of these changes or none.
    pub fn append<'a>(&mut self, changes: impl Iterator<Item = (u64, u64, &'a [u8])>) -> io::Result<()> {
        let mut part = vec![0; PART_HEAD_BYTES];
        let mut count = 0_u32;
        for (offset, before, bytes) in changes {
            part.extend(offset.to_le_bytes());
            part.extend(before.to_le_bytes());
            part.extend(bytes);
            count += 1;
        }
        part[..4].copy_from_slice(&count.to_le_bytes());
        let sum = part_checksum(self.end, &part);
        part[8..16].copy_from_slice(&sum.to_le_bytes());
        self.file.write_all_at(&part, self.end)?;
        #[cfg(test)]
        crate::image::tape::note(&self.tape, || crate::image::tape::Event::Log {
            offset: self.end,
            bytes: part.clone(),
        });
        self.end += part.len() as u64;
        Ok(())
    }

    /// The image has it all.
    pub fn clear(&mut self) -> io::Result<()> {
        if self.end == HEAD_BYTES as u64 {
            return Ok(());
        }
        self.file.set_len(HEAD_BYTES as u64)?;
        self.end = HEAD_BYTES as u64;
        #[cfg(test)]
        crate::image::tape::note(&self.tape, || crate::image::tape::Event::LogEnds { length: self.end });
        Ok(())
    }

    /// Nobody goes on with it.
    pub fn remove(self) -> io::Result<()> {
        fs::remove_file(&self.path)
    }
}

fn head(image: &File, unit_bytes: u64) -> io::Result<[u8; HEAD_BYTES]> {
    let found = image.metadata()?;
    // Of a device the number, wherever its node lies.
    let (device, inode) = if found.rdev() > 0 { (found.rdev(), 0) } else { (found.dev(), found.ino()) };
    let boot = fs::read("/proc/sys/kernel/random/boot_id")?;
    let mut head = [0; HEAD_BYTES];
    head[..8].copy_from_slice(MAGIC);
    head[8..12].copy_from_slice(&VERSION.to_le_bytes());
    head[12..16].copy_from_slice(&(unit_bytes as u32).to_le_bytes());
    head[16..24].copy_from_slice(&device.to_le_bytes());
    head[24..32].copy_from_slice(&inode.to_le_bytes());
    head[32..40].copy_from_slice(&checksum(&boot).to_le_bytes());
    let sum = checksum(&head[..40]);
    head[40..].copy_from_slice(&sum.to_le_bytes());
    Ok(head)
}

fn part_checksum(at: u64, part: &[u8]) -> u64 {
    let mut hasher = blake3::Hasher::new();
    hasher.update(&at.to_le_bytes()).update(&part[..4]).update(&part[PART_HEAD_BYTES..]);
    u64::from_le_bytes(hasher.finalize().as_bytes()[..8].try_into().expect("8 bytes"))
}

/// Changes in their order, and where the whole parts end.
fn parse(text: &[u8], unit_bytes: usize) -> (Vec<Change>, usize) {
    let (mut changes, mut at) = (Vec::new(), HEAD_BYTES);
    while let Some(part) = part_at(text, at, unit_bytes) {
        for change in part[PART_HEAD_BYTES..].chunks_exact(CHANGE_HEAD_BYTES + unit_bytes) {
            let number = |at: usize| u64::from_le_bytes(change[at..at + 8].try_into().expect("8 bytes"));
            changes.push(Change { offset: number(0), before: number(8), bytes: change[CHANGE_HEAD_BYTES..].into() });
        }
        at += part.len();
    }
    (changes, at)
}

/// None: it is not whole.
fn part_at(text: &[u8], at: usize, unit_bytes: usize) -> Option<&[u8]> {
    let head = text.get(at..at + PART_HEAD_BYTES)?;
    let count = u32::from_le_bytes(head[..4].try_into().ok()?) as usize;
    let length = count.checked_mul(CHANGE_HEAD_BYTES + unit_bytes)?.checked_add(PART_HEAD_BYTES)?;
    let part = text.get(at..at.checked_add(length)?)?;
    (count > 0 && part[8..16] == part_checksum(at as u64, part).to_le_bytes()).then_some(part)
}
