//! Checkpoints: moments with a name, and which blocks of the disk were written since each of them. For backups of what has changed.
//!
//! They live in this process, and as long as the image is open: after that nobody knows what was written. A write is noted before
//! it begins, and counts also if it fails.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, MutexGuard};

/// Bytes of the disk for which there is one bit.
const GRANULE_BYTES: u64 = 64 << 10;
/// Checkpoints of one disk. One more takes the place of the oldest.
pub const CHECKPOINTS_MAX: usize = 8;

/// The checkpoints of an image. Clones are of the same image.
#[derive(Clone, Debug, Default)]
pub struct Checkpoints(Arc<Mutex<VecDeque<Checkpoint>>>);

#[derive(Debug)]
struct Checkpoint {
    name: String,
    blocks: u64,
    /// One bit a block.
    written: Vec<u8>,
}

impl Checkpoint {
    /// The blocks from the first to the last, which are of the disk.
    fn note(&mut self, first: u64, last: u64) {
        let (mut block, end) = (first, last + 1);
        while block < end {
            let whole = block.is_multiple_of(8) && end - block >= 8;
            self.written[(block / 8) as usize] |= if whole { u8::MAX } else { 1 << (block % 8) };
            block += if whole { 8 } else { 1 };
        }
    }
}

impl Checkpoints {
    /// Names of the checkpoints, oldest first.
    pub fn names(&self) -> Vec<String> {
        self.lock().iter().map(|checkpoint| checkpoint.name.clone()).collect()
    }

    /// Begins one now, of a disk of this size. Nothing may be in flight. `since`: one that is still needed. False: there is one of
    /// this name.
    pub fn begin(&self, name: &str, since: Option<&str>, disk_bytes: u64) -> bool {
        let mut all = self.lock();
        if all.iter().any(|checkpoint| checkpoint.name == name) {
            return false;
        }
        if all.len() >= CHECKPOINTS_MAX {
            let oldest = all.iter().position(|checkpoint| Some(checkpoint.name.as_str()) != since);
            oldest.and_then(|oldest| all.remove(oldest));
        }
        let blocks = disk_bytes.div_ceil(GRANULE_BYTES);
        all.push_back(Checkpoint { name: name.to_owned(), blocks, written: vec![0; blocks.div_ceil(8) as usize] });
        true
    }

    /// The blocks that were written since this one, the first in the lowest bit of the first byte.
    pub fn written_since(&self, name: &str) -> Option<Vec<u8>> {
        self.lock().iter().find(|checkpoint| checkpoint.name == name).map(|checkpoint| checkpoint.written.clone())
    }

    /// Ends one, if there is one of this name.
    pub fn forget(&self, name: &str) {
        self.lock().retain(|checkpoint| checkpoint.name != name);
    }

    /// The disk was changed by somebody else.
    pub(super) fn forget_all(&self) {
        self.lock().clear();
    }

    /// These bytes of the disk are about to be changed.
    pub(super) fn note(&self, offset: u64, bytes: u64) {
        let mut all = self.lock();
        if all.is_empty() || bytes == 0 {
            return;
        }
        let (first, last) = (offset / GRANULE_BYTES, offset.saturating_add(bytes - 1) / GRANULE_BYTES);
        // The disk has grown since.
        all.retain(|checkpoint| last < checkpoint.blocks);
        all.iter_mut().for_each(|checkpoint| checkpoint.note(first, last));
    }

    fn lock(&self) -> MutexGuard<'_, VecDeque<Checkpoint>> {
        self.0.lock().expect("nobody panics with it")
    }
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::time::Duration;

    use super::*;
    use crate::image::{Format, Image, ImageOptions};

    #[test]
    fn each_checkpoint_has_what_was_written_since() {
        let checkpoints = Checkpoints::default();
        checkpoints.note(0, GRANULE_BYTES);
        assert!(checkpoints.begin("monday", None, 17 * GRANULE_BYTES - 512));
        checkpoints.note(GRANULE_BYTES - 1, 2);
        assert!(checkpoints.begin("tuesday", None, 17 * GRANULE_BYTES - 512));
        checkpoints.note(16 * GRANULE_BYTES, 512);
        checkpoints.note(3 * GRANULE_BYTES, 0);
        let since = |name: &str| checkpoints.written_since(name);
        assert_eq!(since("monday"), Some(vec![0b11, 0, 1]));
        assert_eq!(since("tuesday"), Some(vec![0, 0, 1]));
        assert_eq!(since("sunday"), None);
        assert!(!checkpoints.begin("monday", None, 512), "a name is of one moment");
        assert!(checkpoints.begin("all", None, 17 * GRANULE_BYTES));
        checkpoints.note(3 * GRANULE_BYTES, 13 * GRANULE_BYTES);
        assert_eq!(since("all"), Some(vec![0b1111_1000, 0b1111_1111, 0]));
        checkpoints.forget("all");
        assert!(checkpoints.begin("grown", None, 16 * GRANULE_BYTES));
        checkpoints.note(15 * GRANULE_BYTES, 2 * GRANULE_BYTES);
        assert_eq!((since("grown"), since("tuesday")), (None, Some(vec![0b1111_1000, 0b1111_1111, 1])));
        checkpoints.forget("monday");
        assert_eq!(checkpoints.names(), ["tuesday"]);
        checkpoints.forget_all();
        assert_eq!(since("tuesday"), None);
    }

    #[test]
    fn oldest_checkpoint_makes_way() {
        let checkpoints = Checkpoints::default();
        let names: Vec<_> = (0..=CHECKPOINTS_MAX).map(|number| number.to_string()).collect();
        assert!(names.iter().all(|name| checkpoints.begin(name, None, GRANULE_BYTES)));
        assert_eq!(checkpoints.names(), names[1..]);
        // But not one that somebody builds on.
        assert!(checkpoints.begin("next", Some(&names[1]), GRANULE_BYTES));
        assert_eq!(checkpoints.names()[..2], [names[1].as_str(), &names[3]]);
    }

    #[test]
    fn resized_image_has_no_checkpoints() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("image");
        let file = File::create_new(&path).unwrap();
        file.set_len(1 << 20).unwrap();
        let (format, lock_patience) = (Format::Raw, Duration::ZERO);
        let options = ImageOptions { path, format, read_only: false, direct: false, lock_patience, owner: None };
        let mut image = Image::open(&options).unwrap();
        // Also one that was cut off and extended again.
        for bytes in [2 << 20, 2 << 20] {
            assert!(image.checkpoints().begin("monday", None, image.bytes()));
            file.set_len(bytes).unwrap();
            image.refresh_bytes().unwrap();
            assert!(image.checkpoints().names().is_empty());
        }
    }
}
