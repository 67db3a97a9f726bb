//! A boot set on a disk, saved while its machine is stopped.
//!
//! stop: close images -> note them -> write blocks -> fsync -> rename; start: images as noted? -> check every block ->
//! hold
//!
//! ```text
//! magic 8 | version 4 | bytes of the notes 4 | key 16 | blocks 8 | notes (JSON) | per block: disk 8, number 8, tag 8, 4096
//! ```
//!
//! The notes describe each disk's image. Blocks of a disk without a note, a block device, are not saved.
//!
//! A saved boot set is good for one start: `load` removes it, and the next stop writes another. The tags detect damage,
//! not malice, because their key is in the same file.

use std::fs::{self, File};
use std::io::{self, BufReader, BufWriter, Read, Write};
use std::path::{Path, PathBuf};

use hearth_disk::block::{BLOCK_BYTES, DiskId};
use hearth_disk::boot_set::BootSet;
use hearth_disk::tag::{TAG_KEY_BYTES, Tag, Tagger};
use hearth_memory::{Durability, replace_file, sync_folder_of};

use crate::images::DiskNote;
use crate::random;

const MAGIC: [u8; 8] = *b"HEARTHBS";
const VERSION: u32 = 2;
/// Maximum size of the notes. A machine has few disks.
const NOTES_BYTES_MAX: u32 = 1 << 20;

/// Why a boot set could not be saved or loaded.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "each variant's message describes it")]
pub enum SavedError {
    #[error("cannot write {path}")]
    Write { path: PathBuf, source: io::Error },
    #[error("cannot read {path}")]
    Read { path: PathBuf, source: io::Error },
    #[error("{path} {what}")]
    Void { path: PathBuf, what: String },
}

/// Saves the boot set, whole or not at all. Returns the number of blocks saved.
pub fn save(path: &Path, boot_set: &BootSet, disks: &[DiskNote]) -> Result<u64, SavedError> {
    let folder = path.parent().map_or(Ok(()), fs::create_dir_all);
    folder
        .and_then(|()| replace_file(path, Durability::PowerCut, |file| write(file, boot_set, disks)))
        .map_err(|source| SavedError::Write { path: path.to_owned(), source })
}

fn write(file: &mut File, boot_set: &BootSet, disks: &[DiskNote]) -> io::Result<u64> {
    let key: [u8; TAG_KEY_BYTES] = random::bytes();
    let tagger = Tagger::new(&key);
    let notes = serde_json::to_vec(disks)?;
    let mut file = BufWriter::with_capacity(1 << 20, file);
    let mut blocks = boot_set.held();
    blocks.retain(|(disk, _)| disks.get(usize::from(disk.0)).is_some_and(|disk| disk.rest.is_some()));
    file.write_all(&MAGIC)?;
    file.write_all(&VERSION.to_le_bytes())?;
    file.write_all(&(notes.len() as u32).to_le_bytes())?;
    file.write_all(&key)?;
    file.write_all(&(blocks.len() as u64).to_le_bytes())?;
    file.write_all(&notes)?;
    for &(disk, block) in &blocks {
        // A block that was damaged in memory is written as zeroes with a tag that does not fit.
        let (bytes, tag) = match boot_set.copy_of(disk, block) {
            Some(bytes) => (bytes, tagger.tag(&bytes)),
            None => ([0; BLOCK_BYTES], Tag(0)),
        };
        for number in [u64::from(disk.0), block, tag.0] {
            file.write_all(&number.to_le_bytes())?;
        }
        file.write_all(&bytes)?;
    }
    file.flush()?;
    Ok(blocks.len() as u64)
}

/// Result of loading a saved boot set.
#[derive(Debug, PartialEq, Eq)]
pub struct Loaded {
    /// Number of blocks held again.
    pub blocks: u64,
    /// Disks whose saved blocks are not held again, and why.
    pub void: Vec<(DiskId, String)>,
}

/// Puts the saved blocks into an empty boot set, for each disk whose image is still as noted. `disks` are the opened
/// disks. Returns `None` if nothing was saved.
pub fn load(path: &Path, boot_set: &BootSet, disks: &[DiskNote]) -> Result<Option<Loaded>, SavedError> {
    let unreadable = |source| SavedError::Read { path: path.to_owned(), source };
    let void = |what: String| SavedError::Void { path: path.to_owned(), what };
    let file = match File::open(path) {
        Ok(file) => file,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(unreadable(error)),
    };
    // Removed whatever the outcome: it is good for one start, even if the host loses power meanwhile.
    fs::remove_file(path).and_then(|()| sync_folder_of(path)).map_err(unreadable)?;
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
    let noted: Vec<DiskNote> = serde_json::from_slice(&notes).map_err(|_| void("is damaged".to_owned()))?;
    let doubts = noted.iter().enumerate().map(|(position, noted)| match disks.get(position) {
        Some(open) if noted.is_of_disk(open) => noted.changed(),
        _ => Some("the machine had other disks".to_owned()),
    });
    let doubts: Vec<_> = doubts.collect();
    read_blocks(&mut file, blocks, &Tagger::new(&key), boot_set, &doubts).map(Some).map_err(unreadable)
}

fn read_blocks(
    file: &mut impl Read,
    blocks: u64,
    tagger: &Tagger,
    boot_set: &BootSet,
    doubts: &[Option<String>],
) -> io::Result<Loaded> {
    let mut loaded = Loaded { blocks: 0, void: Vec::new() };
    for _ in 0..blocks {
        let [disk, block, tag] = [read_u64(file)?, read_u64(file)?, read_u64(file)?];
        let mut bytes = [0; BLOCK_BYTES];
        file.read_exact(&mut bytes)?;
        let Ok(disk) = u8::try_from(disk).map(DiskId) else { continue };
        let Some(doubt) = doubts.get(usize::from(disk.0)) else { continue };
        if let Some(why) = doubt {
            if loaded.void.iter().all(|(void, _)| *void != disk) {
                loaded.void.push((disk, why.clone()));
            }
        } else if tagger.tag(&bytes) == Tag(tag) && boot_set.put_back(disk, block, &bytes) {
            loaded.blocks += 1;
        }
    }
    Ok(loaded)
}

fn read_u64(file: &mut impl Read) -> io::Result<u64> {
    let mut bytes = [0; 8];
    file.read_exact(&mut bytes)?;
    Ok(u64::from_le_bytes(bytes))
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::FileExt;

    use hearth_disk::image::ImageFile;
    use hearth_disk::warm::{AfterServing, RequestObserver, WarmSource};

    use super::*;
    use crate::images;

    const DISK: DiskId = DiskId(1);
    const OTHER: DiskId = DiskId(0);

    struct Stopped {
        folder: tempfile::TempDir,
        disks: Vec<DiskNote>,
    }

    impl Stopped {
        /// Saves blocks 7 and 3 of one disk, read in this order, and block 5 of the other.
        fn new() -> Self {
            let folder = tempfile::tempdir().unwrap();
            let note = |name: &str| {
                let image = folder.path().join(name);
                fs::write(&image, [1; 4096]).unwrap();
                DiskNote::of_open(name, vec![ImageFile::of(&image).unwrap()])
            };
            let disks = images::at_rest(&["other.raw", "disk.raw"].map(note));
            let stopped = Self { folder, disks };
            let boot_set = stopped.empty();
            boot_set.begin();
            for (disk, block) in [(DISK, 7), (OTHER, 5), (DISK, 3)] {
                boot_set.read_from_image(disk, block, Some(&[block as u8; BLOCK_BYTES]));
            }
            boot_set.ready();
            assert_eq!(save(&stopped.path(), &boot_set, &stopped.disks).unwrap(), 3);
            stopped
        }

        fn load(&self, boot_set: &BootSet) -> Result<Option<Loaded>, SavedError> {
            load(&self.path(), boot_set, &self.disks)
        }

        fn path(&self) -> PathBuf {
            self.folder.path().join("state/boot-set")
        }

        /// An empty boot set with a key and a folder of its own.
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
    fn saved_blocks_are_held_after_the_start() {
        let stopped = Stopped::new();
        let started = stopped.empty();
        assert_eq!(stopped.load(&started).unwrap(), Some(Loaded { blocks: 3, void: Vec::new() }));
        assert_eq!([3, 7, 8].map(|block| read(&started, block)), [Some(3), Some(7), None]);
        assert_eq!(started.plan().disks[&DISK].blocks, 2, "the next boot is expected to read them");
        assert_eq!(stopped.load(&started).unwrap(), None, "it is good for one start");
    }

    #[test]
    fn machines_saving_to_one_folder_do_not_collide() {
        let stopped = Stopped::new();
        let folder = stopped.folder.path();
        // The temporary name of `boot.web`, if it were shared with `boot.db`.
        fs::create_dir(folder.join("boot.new")).unwrap();
        for name in ["boot.web", "boot.db"] {
            save(&folder.join(name), &stopped.empty(), &stopped.disks).unwrap();
        }
    }

    #[test]
    fn blocks_of_a_changed_image_are_not_held() {
        let stopped = Stopped::new();
        let started = stopped.empty();
        let image = &stopped.disks[1].files[0].path;
        fs::write(image, [2; 4096]).unwrap();
        let why = format!("{} was changed while nobody guarded it", image.display());
        assert_eq!(stopped.load(&started).unwrap(), Some(Loaded { blocks: 1, void: vec![(DISK, why)] }));
        assert_eq!(([3, 7].map(|block| read(&started, block)), started.is_empty()), ([None, None], false));
        let stopped = Stopped::new();
        let started = stopped.empty();
        let one_disk = load(&stopped.path(), &started, &stopped.disks[..1]).unwrap().unwrap();
        assert_eq!(one_disk, Loaded { blocks: 1, void: vec![(DISK, "the machine had other disks".to_owned())] });
    }

    #[test]
    fn disks_without_a_note_are_not_saved() {
        let mut stopped = Stopped::new();
        let held = stopped.empty();
        stopped.load(&held).unwrap();
        stopped.disks[1].rest = None;
        assert_eq!(save(&stopped.path(), &held, &stopped.disks).unwrap(), 1);
        let started = stopped.empty();
        assert_eq!(stopped.load(&started).unwrap(), Some(Loaded { blocks: 1, void: Vec::new() }));
        assert_eq!(read(&started, 7), None);
    }

    #[test]
    fn damaged_blocks_are_dropped_torn_files_refused() {
        let stopped = Stopped::new();
        let file = File::options().write(true).open(stopped.path()).unwrap();
        let bytes = file.metadata().unwrap().len();
        file.write_all_at(&[9], bytes - 10).unwrap();
        let started = stopped.empty();
        assert_eq!(stopped.load(&started).unwrap(), Some(Loaded { blocks: 2, void: Vec::new() }));
        assert_eq!([7, 3].map(|block| read(&started, block)), [Some(7), None]);
        let stopped = Stopped::new();
        File::options().write(true).open(stopped.path()).unwrap().set_len(100).unwrap();
        assert!(stopped.load(&stopped.empty()).is_err());
    }
}
