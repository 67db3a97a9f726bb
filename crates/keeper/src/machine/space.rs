//! Disks whose images cannot grow because a file system of the host is full.
//!
//! The guest's requests wait meanwhile (`hearth_disk`). Whatever stops the guest's queues would turn that into an error, so
//! operations that do are refused.

use std::path::Path;
use std::sync::Arc;

use hearth_api::{ApiError, ErrorWord, EventKind};
use hearth_disk::server::{Notice, Tell};

use super::Machine;
use crate::event::Event;

impl Machine {
    /// Leads a disk's notices into the machine's loop.
    pub(super) fn disk_notices(&self, disk: &str) -> Tell {
        let (tell, disk) = (self.parts.tell.clone(), disk.to_owned());
        // Fails only when the loop is gone, and then nobody wants to know.
        Arc::new(move |notice| drop(tell.send(Event::Disk { disk: disk.clone(), notice })))
    }

    pub(super) fn disk_says(&self, disk: String, notice: Notice) {
        match notice {
            Notice::OutOfSpace { why } => {
                let folder = self.folder_of_disk(&disk);
                self.record(EventKind::DiskFull { disk, folder, why });
            }
            Notice::SpaceAgain { waited } => {
                self.record(EventKind::DiskSpaceAgain { disk, waited_ms: waited.as_secs_f64() * 1e3 });
            }
        }
    }

    fn folder_of_disk(&self, name: &str) -> String {
        let config = &self.parts.config;
        let image = config.disks.iter().find(|disk| disk.name == name).map(|disk| disk.path.as_path());
        let folder =
            image.map_or(self.parts.folders.memory.as_path(), |image| image.parent().unwrap_or(Path::new("/")));
        folder.display().to_string()
    }

    /// No request of the guest waits until an image can grow: it would get an error when the guest is stopped.
    pub(super) fn disks_must_have_space(&self, what: &str) -> Result<(), ApiError> {
        let Some(disk) = self.disks.iter().find(|disk| disk.counters().waiting_for_space > 0) else { return Ok(()) };
        let (name, folder) = (disk.name(), self.folder_of_disk(disk.name()));
        let message = format!("cannot {what}: requests to disk {name} wait for space in {folder}");
        Err(ApiError::new(ErrorWord::WrongState, message).hint("free space there; the guest then goes on by itself"))
    }
}
