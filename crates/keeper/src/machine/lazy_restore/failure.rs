//! Reasons why a machine could not be restored.

use std::path::PathBuf;

use hearth_disk::server::ServerError;
use hearth_recovery::lazy_restore::RestoreError;
use hearth_recovery::snapshot::SnapshotError;
use hearth_recovery::snapshot::state::StateError;

use super::super::generation::LaunchError;

#[derive(Debug, thiserror::Error)]
pub enum RestoreFailure {
    #[error(transparent)]
    Snapshot(#[from] SnapshotError),
    #[error(
        "snapshot {snapshot} has {saved} bytes of memory, but the machine has {configured}; set `memory` to the \
         snapshot's size"
    )]
    Memory { snapshot: PathBuf, saved: u64, configured: u64 },
    #[error(
        "{snapshot} is not the snapshot that this machine is being restored from; put that one back, then run the \
         keeper again"
    )]
    AnotherSnapshot { snapshot: PathBuf },
    #[error("cancelled before the guest ran; start again with `hearth run {file}`")]
    CalledOff { file: PathBuf },
    #[error(transparent)]
    Restore(#[from] RestoreError),
    #[error(transparent)]
    Launch(#[from] LaunchError),
    #[error("cannot serve page faults: {why}; use `hearth restore --eager`, which needs none")]
    Userfault { why: String },
    #[error("cannot read guest memory that QEMU needs: {what}; repair the snapshot and run it again")]
    Damaged { what: String, source: Option<Box<RestoreFailure>> },
    #[error("QEMU did not load the guest's state; its last message: {}", .last_words.as_deref().unwrap_or("(none)"))]
    State { last_words: Option<String>, source: StateError },
    #[error(transparent)]
    Disk(#[from] ServerError),
    #[error("cannot start a thread")]
    Thread(#[source] std::io::Error),
}
