//! The machine's guard over its images: the open files, and the notes of them from before a gap.

use std::path::{Path, PathBuf};

use hearth_recovery::images::{self, DiskNote, Notes};

/// The images of the machine's disks.
#[derive(Default)]
pub struct Images {
    /// The open files, by disk.
    pub(super) open: Vec<DiskNote>,
    /// The time before this keeper. None once the images were compared with the last keeper's notes.
    pub(super) gap: Option<Gap>,
    /// Notes from the beginning of the current wait without a guest.
    pub(super) idle: Option<Vec<DiskNote>>,
    /// A QEMU that has inherited locks is being taken over.
    pub(super) qemu_lives: bool,
}

/// A time in which no keeper guarded the images.
pub(super) struct Gap {
    /// None if there are no notes of what the images were.
    pub(super) noted: Option<Notes>,
    /// The keeper was only replaced by exec, and the images stayed locked.
    pub(super) is_upgrade: bool,
    /// Whether a boot set that was saved at a stop may be loaded.
    pub(super) is_start: bool,
}

impl Images {
    /// Images after a gap. An earlier keeper's notes may be in this folder.
    pub fn after_gap(folder: &Path) -> Self {
        let noted = Notes::load(folder);
        let is_upgrade = noted.as_ref().is_some_and(Notes::are_of_this_process);
        Self { gap: Some(Gap { noted, is_upgrade, is_start: false }), ..Self::default() }
    }

    /// Call it when no living QEMU was found.
    pub fn begin_start(&mut self) {
        if let Some(gap) = &mut self.gap {
            gap.is_start = true;
        }
    }

    /// Call it when a living QEMU was found. Returns a disk whose open file was replaced by another one, with that
    /// file's path.
    pub fn begin_take_over(&mut self) -> Option<(String, PathBuf)> {
        self.qemu_lives = true;
        let (disk, path) = self.gap.as_ref()?.noted.as_ref()?.exchanged()?;
        Some((disk.to_owned(), path.to_owned()))
    }

    /// Call it when the disks were closed. They may be opened again later.
    pub fn closed(&mut self, folder: &Path) {
        if self.are_judged() {
            let noted = Notes::load(folder);
            *self = Self { gap: Some(Gap { noted, is_upgrade: false, is_start: false }), ..Self::default() };
        }
    }

    /// Whether the images are locked and compared: everything in memory about them is valid.
    pub fn are_judged(&self) -> bool {
        self.gap.is_none()
    }

    /// The files of all images.
    pub fn paths(&self) -> impl Iterator<Item = &PathBuf> {
        self.open.iter().flat_map(|disk| &disk.files).map(|file| &file.path)
    }

    /// An open file that was replaced by another one.
    pub fn exchanged(&self) -> Option<&Path> {
        self.open.iter().find_map(DiskNote::exchanged)
    }

    /// Notes of the images now, or from the beginning of the current wait: others may have changed them since.
    pub fn look(&self) -> Vec<DiskNote> {
        self.idle.clone().unwrap_or_else(|| images::look(&self.open))
    }

    /// Notes of the images. Call it while neither keeper nor guest writes to them.
    pub fn at_rest(&self) -> Vec<DiskNote> {
        images::at_rest(&self.open)
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use hearth_disk::image::ImageFile;

    use super::*;

    #[test]
    fn only_an_upgrade_leaves_no_gap() {
        let folder = tempfile::tempdir().unwrap();
        images::write_at_rest(folder.path(), &[]).unwrap();
        let is_upgrade = |images: &Images| images.gap.as_ref().map(|gap| gap.is_upgrade);
        assert_eq!(is_upgrade(&Images::after_gap(folder.path())), Some(true));
        // By this process, which may open them again.
        let mut images = Images::default();
        images.closed(folder.path());
        assert_eq!(is_upgrade(&images), Some(false));
    }

    #[test]
    fn a_change_in_a_wait_is_not_noted() {
        let folder = tempfile::tempdir().unwrap();
        let image = folder.path().join("disk.img");
        fs::write(&image, [1; 4096]).unwrap();
        let open = vec![DiskNote::of_open("root", vec![ImageFile::of(&image).unwrap()])];
        let mut images = Images { open, ..Images::default() };
        let before = images.look();
        images.idle = Some(images.at_rest());
        fs::write(&image, [2; 4096]).unwrap();
        assert_eq!(images.look(), before);
        images.idle = None;
        assert_ne!(images.look(), before);
    }
}
