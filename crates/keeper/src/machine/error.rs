//! What ends a machine that was to run.

use super::generation::LaunchError;
use super::restore::RestoreFailure;
use crate::folders::FolderError;

/// What ended the machine for good, or why it never ran.
#[derive(Debug, thiserror::Error)]
pub enum MachineError {
    #[error(transparent)]
    Folder(#[from] FolderError),
    #[error(transparent)]
    Journal(#[from] hearth_recovery::journal::JournalError),
    #[error(transparent)]
    Incarnation(#[from] hearth_recovery::incarnation::IncarnationError),
    #[error(transparent)]
    WarmReboot(#[from] hearth_recovery::warm_reboot::WarmRebootError),
    #[error(transparent)]
    BootSet(hearth_disk::boot_set::BootSetError),
    #[error("disk {disk}")]
    Image { disk: String, source: hearth_disk::image::ImageError },
    #[error(transparent)]
    Nvram(#[from] hearth_disk::nvram::NvramError),
    #[error("disk {disk}: cannot be served")]
    Server { disk: String, source: hearth_disk::server::ServerError },
    #[error("disk {disk}: the thread that serves it has ended: {why}; the guest runs on and waits for the next keeper")]
    DiskEnded { disk: String, why: String },
    #[error(
        "{name} still runs (QEMU, pid {qemu_pid}) with other disks than configured now: {what}; put that back and run it \
         again, or end it with `kill {qemu_pid}`"
    )]
    OtherDisks { name: String, qemu_pid: u32, what: String },
    #[error(
        "{name} still runs (QEMU, pid {qemu_pid}) with another file as disk {disk}: {path} was exchanged while its keeper was \
         dead; put the file back that the guest has and run it again, or end its QEMU with `kill {qemu_pid}` to start with \
         this one"
    )]
    ExchangedImage { name: String, qemu_pid: u32, disk: String, path: std::path::PathBuf },
    #[error("nvram {nvram}: cannot lock its mirror for QEMU")]
    MirrorLock { nvram: String, source: std::io::Error },
    #[error("disk {disk}: cannot look at the files of its image")]
    ImageFiles { disk: String, source: std::io::Error },
    #[error(transparent)]
    Launch(#[from] LaunchError),
    #[error(transparent)]
    Parked(#[from] hearth_recovery::rejuvenation::parked::ParkedError),
    #[error("a disk that is on its way out of an object store")]
    Arrival(#[source] hearth_recovery::snapshot::SnapshotError),
    #[error("no thread for a disk that is on its way out of an object store")]
    ArrivalThread(#[source] std::io::Error),
    #[error(transparent)]
    Order(#[from] hearth_recovery::lazy_restore::OrderError),
    #[error("{name} cannot be restored")]
    Restore { name: String, source: Box<RestoreFailure> },
    #[error("the warden thread cannot be started")]
    Warden(#[source] std::io::Error),
}
