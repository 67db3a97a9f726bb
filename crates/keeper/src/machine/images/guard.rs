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
    /// Whether a boot set that was saved at a stop may be loaded.
    pub(super) is_start: bool,
}

impl Images {
    /// Images after a gap. An earlier keeper's notes may be in this folder.
    pub fn after_gap(folder: &Path) -> Self {
        Self { gap: Some(Gap { noted: Notes::load(folder), is_start: false }), ..Self::default() }
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
            *self = Self::after_gap(folder);
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

    /// Notes of the images now.
    pub fn look(&self) -> Vec<DiskNote> {
        images::look(&self.open)
    }

    /// Notes of the images. Call it while neither keeper nor guest writes to them.
    pub fn at_rest(&self) -> Vec<DiskNote> {
        images::at_rest(&self.open)
    }
}
