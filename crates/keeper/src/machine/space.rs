//! Full file systems of the host.
//!
//! If an image cannot grow, the guest's requests wait (`hearth_disk`). Stopping the guest's queues would turn the wait
//! into an error, so operations that do so are refused.
//!
//! If a memory or runtime folder has no space for the next guest: the ember is given up, so the reboot is cold -> still
//! no space -> the machine waits and tries again.

use std::error::Error;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::time::Duration;

use super::{Machine, MachineError};

/// Time between two attempts to start a guest for which there was no space.
const START_EVERY: Duration = Duration::from_secs(5);

impl Machine {
    /// Whether only space is missing. True only if nothing has been started.
    pub(super) fn may_wait_for_space(&self, error: &MachineError) -> bool {
        self.state.guest().is_none() && is_out_of_space(error)
    }

    /// Tries again without an ember if it takes the missing space: an ember may be as large as a guest. Otherwise tries
    /// again later.
    pub(super) fn wait_for_space(&mut self, error: &MachineError) -> Result<(), MachineError> {
        let why = crate::chain(error);
        self.discard_unused();
        let folders = &self.context.folders;
        if self.warm_reboot.ember.counts().remaining > 0
            && ember_is_in_the_way(error, &folders.runtime, &folders.memory)
        {
            self.warm_reboot.ember.extinguish();
            tracing::warn!(why, "the reboot will be cold");
            self.recovery.set_cold(why);
            return self.start_next();
        }
        self.start_failed(START_EVERY, why)
    }
}

/// Whether the ember takes the missing space. Files of the runtime folder are small: if it is on another file system
/// than the ember, giving up the ember does not help.
fn ember_is_in_the_way(error: &MachineError, runtime: &Path, memory: &Path) -> bool {
    let is_of_runtime = matches!(error, MachineError::Journal(_) | MachineError::Launch(_) | MachineError::Folder(_));
    let device = |folder: &Path| std::fs::metadata(folder).map(|metadata| metadata.dev()).ok();
    !is_of_runtime || device(runtime) == device(memory)
}

fn is_out_of_space(error: &(dyn Error + 'static)) -> bool {
    let mut error = Some(error);
    while let Some(link) = error {
        let kind = link.downcast_ref::<io::Error>().map(io::Error::kind);
        if matches!(kind, Some(io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded)) {
            return true;
        }
        error = link.source();
    }
    false
}

#[cfg(test)]
mod tests {
    use hearth_recovery::journal::JournalError;

    use super::*;
    use crate::folders::FolderError;
    use crate::machine::generation::LaunchError;

    #[test]
    fn ember_is_given_up_where_it_takes_the_space() {
        let full = || io::Error::from_raw_os_error(libc::ENOSPC);
        let path = || "/x".into();
        let of_runtime = || {
            [
                MachineError::from(JournalError::Io { path: path(), source: full() }),
                MachineError::Launch(LaunchError::Preload(full())),
                MachineError::Folder(FolderError::Unusable { path: path(), source: full() }),
            ]
        };
        let of_memory = || MachineError::ImageFiles { disk: "root".into(), source: full() };
        let (memory, proc, tmp) =
            (Path::new("/dev/shm"), Path::new("/proc"), tempfile::tempdir_in("/dev/shm").unwrap());
        for error in of_runtime() {
            assert!(is_out_of_space(&error), "{error:?}");
            assert!(!ember_is_in_the_way(&error, proc, memory), "{error:?}");
            assert!(ember_is_in_the_way(&error, tmp.path(), memory), "{error:?}: the same file system");
        }
        assert!(ember_is_in_the_way(&of_memory(), proc, memory));
    }

    #[test]
    fn missing_space_differs_from_other_errors() {
        let failed = |errno| JournalError::Io { path: "/j".into(), source: io::Error::from_raw_os_error(errno) };
        let check = |errno, expect| assert_eq!(is_out_of_space(&MachineError::from(failed(errno))), expect, "{errno}");
        check(libc::ENOSPC, true);
        check(libc::EDQUOT, true);
        check(libc::EIO, false);
        check(libc::ENOENT, false);
    }
}
