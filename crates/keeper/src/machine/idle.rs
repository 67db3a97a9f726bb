//! Idle: there is a keeper and no guest, while a machine backs off or waits for its last dump. Whoever changes an image then is a
//! stranger.
//!
//! the guest has ended, its I/O has drained -> what the images are -> the next start, or the stop -> are they that still?
//!
//! The images of a guest that runs are in use, and nobody looks. Those of one that has ended may well be written to: by its operator,
//! who mends the file system that made it crash. What is held of the disks would then be what they were.

use hearth_recovery::boot_set::ImageNote;

use super::Machine;
use super::remount::{image_notes, unseen};

/// What they were when the last guest had ended, or why that cannot be told.
pub(super) type IdleImages = Result<Vec<ImageNote>, String>;

impl Machine {
    /// Nobody of us writes to the images from now on. Of block devices nobody can tell who does.
    pub(super) fn note_idle_images(&mut self) {
        let notes = image_notes(&self.parts);
        if self.idle_images.is_some() || matches!(notes.look(), Ok(None)) {
            return;
        }
        self.idle_images = Some(match notes.at_rest() {
            Ok(Some(images)) => Ok(images),
            Ok(None) => Err("somebody else writes to an image".to_owned()),
            Err(error) => Err(unseen(error)),
        });
        self.renote_images();
    }

    /// Before what is held of them is used, or saved.
    pub(super) fn judge_idle_images(&mut self) {
        let Some(idle) = self.idle_images.take() else { return };
        let notes = image_notes(&self.parts);
        let why = match idle.and_then(|noted| notes.changed_since(&noted).map_err(unseen)) {
            Ok(None) => None,
            Ok(Some(image)) => Some(format!("{} was changed while there was no guest", image.display())),
            Err(why) => Some(why),
        };
        if let Some(why) = why {
            tracing::warn!(why, "the next guest starts cold");
            self.drop_boot_set(why.clone());
            self.forget_disks();
            if let Some(timeline) = &mut self.timeline {
                timeline.turned_cold(why);
            }
        }
        self.note_images();
    }
}
