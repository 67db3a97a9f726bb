//! Boot set: what answers a guest's reads from memory, in which order, and whether the images may have changed meanwhile.
//!
//! a read: boot set -> ember -> image. No block is in both: what the boot set takes leaves the ember, and what it holds
//! when an incarnation dies is not kept a second time.
//!
//! What is held is only as good as the guard over the images. A keeper guards them; where keeper and QEMU have both died,
//! the images are compared with a note of what they were. The note is renewed about once a second, and any write since
//! then, the guest's own last ones too, makes it void: nothing is held then, rather than something wrong.

use std::fs;
use std::io;
use std::ops::Range;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime};

use hearth_disk::block::{BLOCK_BYTES, DiskId};
use hearth_disk::boot_set::{BootSet, FILE_PREFIX};
use hearth_disk::tag::Tag;
use hearth_disk::warm::{AfterServing, Answered, WarmSource};
use serde::{Deserialize, Serialize};

use crate::ember::Ember;
use crate::incarnation::{Incarnation, lock};

pub mod saved;

const RENEW_EVERY: Duration = Duration::from_secs(1);
/// A file system's clock advances in steps of up to 10 ms: what was written within one step after a note would have the
/// time of the note. An image that was written this recently is noted later.
const UNSURE: Duration = Duration::from_millis(100);

/// All memory that answers reads of a machine's disks.
pub struct WarmSources {
    pub ember: Arc<Ember>,
    /// None: the machine has no `[remount]`.
    pub boot_set: Option<Arc<BootSet>>,
    /// While it boots, what it writes is made fewer operations.
    pub join_writes: bool,
}

impl WarmSources {
    /// An incarnation has died and is about to become ember: what the boot set holds is not kept twice.
    pub fn part(&self, dead: &Incarnation) {
        if let (Some(boot_set), Some(ledger)) = (&self.boot_set, &dead.ledger) {
            boot_set.take_over_from(&mut lock(ledger));
        }
    }
}

impl WarmSource for WarmSources {
    fn serve(
        &self,
        disk: DiskId,
        block: u64,
        after: AfterServing,
        copy: &mut dyn FnMut(&[u8; BLOCK_BYTES]),
    ) -> Option<Tag> {
        let Some(boot_set) = &self.boot_set else { return self.ember.serve(disk, block, after, copy) };
        if let Some(tag) = boot_set.serve(disk, block, after, copy) {
            return Some(tag);
        }
        if !boot_set.has_room_for(disk, block) {
            return self.ember.serve(disk, block, after, copy).inspect(|_| boot_set.ember_answered(disk, block));
        }
        self.ember.serve(disk, block, AfterServing::Release, &mut |bytes| {
            copy(bytes);
            boot_set.read_from_memory(disk, block, bytes);
        })
    }

    fn may_hold(&self, disk: DiskId, blocks: Range<u64>) -> bool {
        let boot_set = self.boot_set.as_ref();
        boot_set.is_some_and(|set| set.may_hold(disk, blocks.clone())) || self.ember.may_hold(disk, blocks)
    }

    fn forget(&self, disk: DiskId, blocks: Range<u64>) {
        if let Some(boot_set) = &self.boot_set {
            boot_set.forget(disk, blocks.clone());
        }
        self.ember.forget(disk, blocks);
    }

    fn holds_all(&self, disk: DiskId, blocks: Range<u64>) -> bool {
        self.boot_set.as_ref().is_some_and(|set| set.holds_all(disk, blocks))
    }

    fn copy_of(&self, disk: DiskId, block: u64) -> Option<[u8; BLOCK_BYTES]> {
        self.boot_set.as_ref()?.copy_of(disk, block)
    }

    fn needed(&self, disk: DiskId, block: u64, bytes: &[u8; BLOCK_BYTES]) {
        if let Some(boot_set) = &self.boot_set {
            boot_set.needed(disk, block, bytes);
            if boot_set.holds_all(disk, block..block + 1) {
                self.ember.forget(disk, block..block + 1);
            }
        }
    }

    fn take_up(&self, disk: DiskId, block: u64) {
        let Some(boot_set) = &self.boot_set else { return };
        if !boot_set.holds_all(disk, block..block + 1) && boot_set.has_room_for(disk, block) {
            let take = &mut |bytes: &[u8; BLOCK_BYTES]| boot_set.needed(disk, block, bytes);
            self.ember.serve(disk, block, AfterServing::Release, take);
        }
    }

    fn joins_writes(&self) -> bool {
        self.join_writes && self.learns()
    }

    fn learns(&self) -> bool {
        self.boot_set.as_ref().is_some_and(|set| set.is_learning())
    }

    fn wants(&self, bytes: u64) -> bool {
        self.boot_set.as_ref().is_some_and(|set| set.wants(bytes))
    }

    fn missed(&self, disk: DiskId, blocks: Range<u64>) {
        if let Some(boot_set) = &self.boot_set {
            boot_set.missed(disk, blocks);
        }
    }

    fn read_from_image(&self, disk: DiskId, block: u64, bytes: Option<&[u8; BLOCK_BYTES]>) {
        if let Some(boot_set) = &self.boot_set {
            boot_set.read_from_image(disk, block, bytes);
        }
    }

    fn answered(&self, disk: DiskId, how: Answered) {
        if let Some(boot_set) = &self.boot_set {
            boot_set.answered(disk, how);
        }
    }

    fn written(&self, disk: DiskId, block: u64, start: usize, bytes: &[u8], request_bytes: u64) {
        if let Some(boot_set) = &self.boot_set {
            boot_set.written(disk, block, start, bytes, request_bytes);
        }
    }
}

/// What an image was at one moment. Every write changes at least one of these.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ImageNote {
    path: PathBuf,
    device: u64,
    inode: u64,
    bytes: u64,
    modified: (i64, i64),
    changed: (i64, i64),
    /// Where the file system tells: another file may get the same number.
    made: Option<SystemTime>,
}

impl ImageNote {
    /// None: a block device, of which nobody notes when it was written.
    fn of(path: &Path) -> io::Result<Option<Self>> {
        let found = fs::metadata(path)?;
        let note = Self {
            path: path.to_owned(),
            device: found.dev(),
            inode: found.ino(),
            bytes: found.len(),
            modified: (found.mtime(), found.mtime_nsec()),
            changed: (found.ctime(), found.ctime_nsec()),
            made: found.created().ok(),
        };
        Ok(found.is_file().then_some(note))
    }

    fn is_settled(&self, now: SystemTime) -> bool {
        let since = now.duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
        let [modified, changed] = [self.modified, self.changed]
            .map(|(seconds, nanoseconds)| Duration::new(seconds.max(0) as u64, nanoseconds.max(0) as u32));
        since.saturating_sub(modified.max(changed)) > UNSURE
    }
}

/// Notes of what a machine's images were, beside the boot set.
pub struct ImageNotes {
    file: PathBuf,
    images: Vec<PathBuf>,
    noted: Option<Vec<ImageNote>>,
    looked: Option<Instant>,
}

impl ImageNotes {
    pub fn new(folder: &Path, images: Vec<PathBuf>) -> Self {
        Self { file: folder.join(format!("{FILE_PREFIX}-images")), images, noted: None, looked: None }
    }

    /// Renews the note, if it is time and the images have changed. Only while what is held is kept current.
    pub fn renew(&mut self) -> io::Result<()> {
        if self.looked.is_some_and(|looked| looked.elapsed() < RENEW_EVERY) {
            return Ok(());
        }
        self.looked = Some(Instant::now());
        let Some(found) = self.look()? else { return Ok(()) };
        let now = SystemTime::now();
        if self.noted.as_ref() == Some(&found) || !found.iter().all(|note| note.is_settled(now)) {
            return Ok(());
        }
        let fresh = self.file.with_extension("new");
        fs::write(&fresh, serde_json::to_vec(&found)?)?;
        fs::rename(&fresh, &self.file)?;
        self.noted = Some(found);
        Ok(())
    }

    /// Why the images may be others than when they were noted last; none if they are the same.
    pub fn difference(&self) -> Option<String> {
        let found = match self.look() {
            Ok(Some(found)) => found,
            Ok(None) => return Some("of a block device nobody can tell whether it was written to".to_owned()),
            Err(error) => return Some(format!("the images cannot be looked at: {error}")),
        };
        let noted = fs::read(&self.file).ok().and_then(|text| serde_json::from_slice::<Vec<ImageNote>>(&text).ok());
        let Some(noted) = noted else { return Some("it was not noted what the images were".to_owned()) };
        if found.len() != noted.len() {
            return Some("the machine had other disks".to_owned());
        }
        let (found, _) = found.iter().zip(&noted).find(|(found, noted)| found != noted)?;
        Some(format!("{} was changed after it was noted what it is", found.path.display()))
    }

    /// What the images are now that nobody of us writes to them; waits until a later write would be seen. None: one of
    /// them is a block device, or somebody goes on writing.
    pub fn at_rest(&self) -> io::Result<Option<Vec<ImageNote>>> {
        let deadline = Instant::now() + 10 * UNSURE;
        loop {
            let Some(found) = self.look()? else { return Ok(None) };
            let now = SystemTime::now();
            if found.iter().all(|note| note.is_settled(now)) {
                return Ok(Some(found));
            }
            if Instant::now() > deadline {
                return Ok(None);
            }
            std::thread::sleep(UNSURE / 4);
        }
    }

    /// An image that is not any more what was noted of it.
    pub fn changed_since(&self, noted: &[ImageNote]) -> io::Result<Option<&Path>> {
        for (image, noted) in self.images.iter().zip(noted) {
            if ImageNote::of(image)?.as_ref() != Some(noted) {
                return Ok(Some(image));
            }
        }
        Ok(None)
    }

    /// None: one of them is a block device.
    pub fn look(&self) -> io::Result<Option<Vec<ImageNote>>> {
        self.images.iter().map(|image| ImageNote::of(image)).collect()
    }
}

/// What an image has become since; none: nothing. The numbers of devices may differ after the host has booted.
pub(crate) fn difference(noted: &[ImageNote], found: &[ImageNote]) -> Option<String> {
    if noted.len() != found.len() {
        return Some("the machine had other disks".to_owned());
    }
    let same = |noted: &ImageNote, found: &ImageNote| ImageNote { device: found.device, ..noted.clone() } == *found;
    let (_, found) = noted.iter().zip(found).find(|(noted, found)| !same(noted, found))?;
    Some(format!("{} was changed since", found.path.display()))
}

#[cfg(test)]
mod tests {
    use std::fs::File;

    use hearth_disk::block::RamPage;
    use hearth_disk::tag::Tagger;

    use super::*;

    const DISK: DiskId = DiskId(0);
    const RAM_BYTES: u64 = 1 << 20;

    /// A dead incarnation that held blocks 0 to 9, banked.
    fn sources(folder: &Path) -> WarmSources {
        let tagger = Tagger::new(b"a key like noise");
        let ember = Arc::new(Ember::new(folder, tagger.clone()));
        let boot_set = Some(Arc::new(BootSet::open(folder, 1 << 20, tagger.clone()).unwrap()));
        let sources = WarmSources { ember, boot_set, join_writes: true };
        let dead = Incarnation::create(folder, 1, RAM_BYTES, true).unwrap();
        let ram = File::options().write(true).open(dead.ram.path()).unwrap();
        for page in 0..10_u8 {
            let bytes = [page + 1; BLOCK_BYTES];
            std::os::unix::fs::FileExt::write_all_at(&ram, &bytes, u64::from(page) * 4096).unwrap();
            lock(dead.ledger.as_ref().unwrap()).record(RamPage(page.into()), DISK, page.into(), tagger.tag(&bytes));
        }
        sources.part(&dead);
        sources.ember.bank(dead).unwrap();
        sources
    }

    fn read(sources: &WarmSources, block: u64) -> Option<u8> {
        let mut first = None;
        sources.serve(DISK, block, AfterServing::Keep, &mut |bytes| first = Some(bytes[0]))?;
        first
    }

    #[test]
    fn no_block_is_held_twice() {
        let folder = tempfile::tempdir_in("/dev/shm").unwrap();
        let sources = sources(folder.path());
        let boot_set = sources.boot_set.as_ref().unwrap();
        assert_eq!((read(&sources, 0), sources.ember.counts().remaining), (Some(1), 10), "no boot: it stays there");
        boot_set.begin();
        assert_eq!((read(&sources, 1), sources.ember.counts().remaining), (Some(2), 9), "it moves");
        assert_eq!((read(&sources, 1), sources.ember.counts().served), (Some(2), 1));
        let tally = boot_set.plan().disks[&DISK];
        assert_eq!((tally.boot.ember_hits, tally.boot.hits, tally.held), (1, 1, 1));

        let dead = Incarnation::create(folder.path(), 2, RAM_BYTES, true).unwrap();
        let ledger = dead.ledger.clone().unwrap();
        (0..3).for_each(|block| lock(&ledger).record(RamPage(block as u32), DISK, block, Tag(1)));
        sources.part(&dead);
        let left: Vec<u64> = lock(&ledger).entries().map(|entry| entry.block).collect();
        assert_eq!(left, [0, 2]);
    }

    #[test]
    fn what_fills_gaps_is_not_held_twice_either() {
        let folder = tempfile::tempdir_in("/dev/shm").unwrap();
        let sources = sources(folder.path());
        sources.take_up(DISK, 4);
        assert_eq!((sources.holds_all(DISK, 4..5), sources.ember.counts().remaining), (false, 10), "no boot needs it");
        sources.boot_set.as_ref().unwrap().begin();
        [4, 20].into_iter().for_each(|block| sources.take_up(DISK, block));
        assert_eq!((sources.copy_of(DISK, 4), sources.ember.counts().remaining), (Some([5; BLOCK_BYTES]), 9));
        sources.needed(DISK, 5, &[6; BLOCK_BYTES]);
        assert_eq!((sources.copy_of(DISK, 5), sources.ember.counts().remaining), (Some([6; BLOCK_BYTES]), 8));
    }

    #[test]
    fn what_is_forgotten_is_forgotten_everywhere() {
        let folder = tempfile::tempdir_in("/dev/shm").unwrap();
        let sources = sources(folder.path());
        sources.boot_set.as_ref().unwrap().begin();
        assert_eq!(read(&sources, 3), Some(4));
        sources.forget(DISK, 3..5);
        assert_eq!([3, 4, 5].map(|block| read(&sources, block)), [None, None, Some(6)]);
    }

    #[test]
    fn an_image_that_was_touched_is_not_the_noted_one() {
        let folder = tempfile::tempdir().unwrap();
        let image = folder.path().join("disk.raw");
        fs::write(&image, [1; 4096]).unwrap();
        let notes = || ImageNotes::new(folder.path(), vec![image.clone()]);
        assert_eq!(notes().difference().unwrap(), "it was not noted what the images were");
        let settled = ImageNote::of(&image).unwrap().unwrap();
        while !settled.is_settled(SystemTime::now()) {
            std::thread::yield_now();
        }
        let mut first = notes();
        first.renew().unwrap();
        assert_eq!(notes().difference(), None);
        let noted = notes().at_rest().unwrap().unwrap();
        assert_eq!(notes().changed_since(&noted).unwrap(), None);
        let others = ImageNotes::new(folder.path(), vec![image.clone(), image.clone()]);
        assert_eq!(others.difference().unwrap(), "the machine had other disks");
        fs::write(&image, [2; 4096]).unwrap();
        let changed = format!("{} was changed after it was noted what it is", image.display());
        assert_eq!(notes().difference(), Some(changed), "of the same size");
        assert_eq!(notes().changed_since(&noted).unwrap(), Some(image.as_path()));
        fs::remove_file(&image).unwrap();
        assert!(notes().changed_since(&noted).is_err());
    }

    #[test]
    fn what_was_written_a_moment_ago_is_noted_later() {
        let image = tempfile::NamedTempFile::new().unwrap();
        let note = ImageNote::of(image.path()).unwrap().unwrap();
        let written = SystemTime::UNIX_EPOCH + Duration::new(note.changed.0 as u64, note.changed.1 as u32);
        assert!(!note.is_settled(written) && !note.is_settled(written + UNSURE));
        assert!(note.is_settled(written + UNSURE * 2));
        assert!(!note.is_settled(written - UNSURE), "the clock was set back");
    }
}
