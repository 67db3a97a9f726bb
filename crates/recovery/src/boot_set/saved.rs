//! A boot set on a disk, while its machine is stopped.
//!
//! stop: images closed -> noted -> blocks written -> fsync -> renamed; start: images as noted? -> every block checked -> held
//!
//! ```text
//! magic 8 | version 4 | bytes of the notes 4 | key 16 | blocks 8 | notes (JSON) | per block: disk 8, number 8, tag 8, 4096
//! ```
//!
//! It is good for one start: whoever has taken it removes it, and the next stop writes another. The tags are there for
//! damage, not against malice: the key stands beside them.

use std::fs::{self, File, OpenOptions};
use std::io::{self, BufReader, BufWriter, Read, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use hearth_disk::block::{BLOCK_BYTES, DiskId};
use hearth_disk::boot_set::BootSet;
use hearth_disk::tag::{TAG_KEY_BYTES, Tag, Tagger};

use super::{ImageNote, difference};
use crate::random;

const MAGIC: [u8; 8] = *b"HEARTHBS";
const VERSION: u32 = 1;
/// A machine has few disks.
const NOTES_BYTES_MAX: u32 = 1 << 20;

#[derive(Debug, thiserror::Error)]
pub enum SavedError {
    #[error("cannot write {path}")]
    Write { path: PathBuf, source: io::Error },
    #[error("cannot read {path}")]
    Read { path: PathBuf, source: io::Error },
    #[error("{path} {what}")]
    Void { path: PathBuf, what: String },
}

/// Whole or not at all. Says how many blocks.
pub fn save(path: &Path, boot_set: &BootSet, images: &[ImageNote]) -> Result<u64, SavedError> {
    let mut fresh = path.as_os_str().to_owned();
    fresh.push(".new");
    let fresh = PathBuf::from(fresh);
    write(&fresh, boot_set, images)
        .and_then(|blocks| fs::rename(&fresh, path).map(|()| blocks))
        .map_err(|source| SavedError::Write { path: path.to_owned(), source })
}

fn write(path: &Path, boot_set: &BootSet, images: &[ImageNote]) -> io::Result<u64> {
    if let Some(folder) = path.parent() {
        fs::create_dir_all(folder)?;
    }
    let key: [u8; TAG_KEY_BYTES] = random::bytes();
    let tagger = Tagger::new(&key);
    let notes = serde_json::to_vec(images)?;
    let file = OpenOptions::new().write(true).create(true).truncate(true).mode(0o600).open(path)?;
    let mut file = BufWriter::with_capacity(1 << 20, file);
    let blocks = boot_set.held();
    file.write_all(&MAGIC)?;
    file.write_all(&VERSION.to_le_bytes())?;
    file.write_all(&(notes.len() as u32).to_le_bytes())?;
    file.write_all(&key)?;
    file.write_all(&(blocks.len() as u64).to_le_bytes())?;
    file.write_all(&notes)?;
    for &(disk, block) in &blocks {
        // One that was damaged in memory is written as nothing that could be believed.
        let (bytes, tag) = match boot_set.copy_of(disk, block) {
            Some(bytes) => (bytes, tagger.tag(&bytes)),
            None => ([0; BLOCK_BYTES], Tag(0)),
        };
        for number in [u64::from(disk.0), block, tag.0] {
            file.write_all(&number.to_le_bytes())?;
        }
        file.write_all(&bytes)?;
    }
    file.into_inner()?.sync_all()?;
    Ok(blocks.len() as u64)
}

/// Puts what was saved into an empty boot set, if these are the images that it is of. Says how many blocks; none: nothing
/// was saved.
pub fn load(path: &Path, boot_set: &BootSet, images: &[ImageNote]) -> Result<Option<u64>, SavedError> {
    let unreadable = |source| SavedError::Read { path: path.to_owned(), source };
    let void = |what: String| SavedError::Void { path: path.to_owned(), what };
    let file = match File::open(path) {
        Ok(file) => file,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(unreadable(error)),
    };
    // Whatever comes of it: it is good for one start, also if the host loses power during that.
    let folder = path.parent().unwrap_or(Path::new("/"));
    fs::remove_file(path).and_then(|()| File::open(folder)?.sync_all()).map_err(unreadable)?;
    let mut file = BufReader::with_capacity(1 << 20, file);
    let mut head = [0; 8 + 4 + 4];
    file.read_exact(&mut head).map_err(unreadable)?;
    let number = |bytes: &[u8]| u32::from_le_bytes(bytes.try_into().expect("four bytes are asked for"));
    if head[..8] != MAGIC || number(&head[8..12]) != VERSION {
        return Err(void(format!("is no saved boot set of version {VERSION}")));
    }
    let notes_bytes = number(&head[12..16]);
    if notes_bytes > NOTES_BYTES_MAX {
        return Err(void("is damaged".to_owned()));
    }
    let mut key = [0; TAG_KEY_BYTES];
    file.read_exact(&mut key).map_err(unreadable)?;
    let blocks = read_u64(&mut file).map_err(unreadable)?;
    let mut notes = vec![0; notes_bytes as usize];
    file.read_exact(&mut notes).map_err(unreadable)?;
    let noted: Vec<ImageNote> = serde_json::from_slice(&notes).map_err(|_| void("is damaged".to_owned()))?;
    if let Some(why) = difference(&noted, images) {
        return Err(void(format!("is of other images: {why}")));
    }
    read_blocks(&mut file, blocks, &Tagger::new(&key), boot_set).map(Some).map_err(unreadable)
}

fn read_blocks(file: &mut impl Read, blocks: u64, tagger: &Tagger, boot_set: &BootSet) -> io::Result<u64> {
    let mut held = 0;
    for _ in 0..blocks {
        let [disk, block, tag] = [read_u64(file)?, read_u64(file)?, read_u64(file)?];
        let mut bytes = [0; BLOCK_BYTES];
        file.read_exact(&mut bytes)?;
        let Ok(disk) = u8::try_from(disk) else { continue };
        if tagger.tag(&bytes) == Tag(tag) && boot_set.put_back(DiskId(disk), block, &bytes) {
            held += 1;
        }
    }
    Ok(held)
}

fn read_u64(file: &mut impl Read) -> io::Result<u64> {
    let mut bytes = [0; 8];
    file.read_exact(&mut bytes)?;
    Ok(u64::from_le_bytes(bytes))
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::FileExt;

    use hearth_disk::warm::{AfterServing, WarmSource};

    use super::*;

    const DISK: DiskId = DiskId(1);

    struct Stopped {
        folder: tempfile::TempDir,
        images: Vec<ImageNote>,
    }

    impl Stopped {
        /// With blocks 7 and 3, read in this order.
        fn new() -> Self {
            let folder = tempfile::tempdir().unwrap();
            let image = folder.path().join("disk.raw");
            fs::write(&image, [1; 4096]).unwrap();
            let images = vec![ImageNote::of(&image).unwrap().unwrap()];
            let stopped = Self { folder, images };
            let boot_set = stopped.empty();
            boot_set.begin();
            for block in [7, 3] {
                boot_set.read_from_image(DISK, block, Some(&[block as u8; BLOCK_BYTES]));
            }
            boot_set.ready();
            assert_eq!(save(&stopped.path(), &boot_set, &stopped.images).unwrap(), 2);
            stopped
        }

        fn path(&self) -> PathBuf {
            self.folder.path().join("state/boot-set")
        }

        /// Of another incarnation of the host, so with another key.
        fn empty(&self) -> BootSet {
            let memory = tempfile::tempdir_in(self.folder.path()).unwrap().keep();
            BootSet::open(&memory, 1 << 20, Tagger::new(b"a key like noise")).unwrap()
        }
    }

    fn read(boot_set: &BootSet, block: u64) -> Option<u8> {
        let mut first = None;
        boot_set.serve(DISK, block, AfterServing::Keep, &mut |bytes| first = Some(bytes[0]))?;
        first
    }

    #[test]
    fn what_was_held_at_the_stop_is_held_at_the_start() {
        let stopped = Stopped::new();
        let started = stopped.empty();
        assert_eq!(load(&stopped.path(), &started, &stopped.images).unwrap(), Some(2));
        assert_eq!([3, 7, 8].map(|block| read(&started, block)), [Some(3), Some(7), None]);
        assert_eq!(started.plan().disks[&DISK].blocks, 2, "the next boot is expected to read them");
        assert_eq!(load(&stopped.path(), &started, &stopped.images).unwrap(), None, "it is good for one start");
    }

    #[test]
    fn machines_that_save_beside_each_other_do_not_meet() {
        let stopped = Stopped::new();
        let folder = stopped.folder.path();
        // Where `web` would be written to if it shared a name with `db`.
        fs::create_dir(folder.join("boot.new")).unwrap();
        for name in ["boot.web", "boot.db"] {
            save(&folder.join(name), &stopped.empty(), &stopped.images).unwrap();
        }
    }

    #[test]
    fn blocks_of_an_image_that_was_changed_are_not_held() {
        let stopped = Stopped::new();
        let started = stopped.empty();
        let changed = vec![ImageNote { bytes: 8192, ..stopped.images[0].clone() }];
        let error = load(&stopped.path(), &started, &changed).unwrap_err().to_string();
        let image = stopped.images[0].path.display();
        assert!(error.ends_with(&format!("state/boot-set is of other images: {image} was changed since")), "{error}");
        assert!(started.is_empty());
        let stopped = Stopped::new();
        let other_device = vec![ImageNote { device: 99, ..stopped.images[0].clone() }];
        assert_eq!(load(&stopped.path(), &started, &other_device).unwrap(), Some(2), "the host counts devices anew");
    }

    #[test]
    fn a_damaged_block_is_not_held_and_a_torn_file_is_refused() {
        let stopped = Stopped::new();
        let file = OpenOptions::new().write(true).open(stopped.path()).unwrap();
        let bytes = file.metadata().unwrap().len();
        file.write_all_at(&[9], bytes - 10).unwrap();
        let started = stopped.empty();
        assert_eq!(load(&stopped.path(), &started, &stopped.images).unwrap(), Some(1));
        assert_eq!([7, 3].map(|block| read(&started, block)), [Some(7), None]);
        let stopped = Stopped::new();
        OpenOptions::new().write(true).open(stopped.path()).unwrap().set_len(100).unwrap();
        assert!(load(&stopped.path(), &stopped.empty(), &stopped.images).is_err());
    }
}
