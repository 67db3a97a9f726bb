//! Errors that end a machine.

use super::generation::LaunchError;
use super::lazy_restore::RestoreFailure;
use crate::folders::FolderError;

/// Why a machine ended for good, or could not be started.
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
    #[error("cannot serve disk {disk}")]
    Server { disk: String, source: hearth_disk::server::ServerError },
    #[error("the thread serving disk {disk} has ended: {why}; the guest keeps running and waits for the next keeper")]
    DiskEnded { disk: String, why: String },
    #[error(
        "{name} still runs (QEMU pid {qemu_pid}) with other disks than now configured: {what}; restore the old \
         configuration and run it again, or end its QEMU with `kill {qemu_pid}`"
    )]
    OtherDisks { name: String, qemu_pid: u32, what: String },
    #[error(
        "{name} still runs (QEMU pid {qemu_pid}) with another file as disk {disk}: {path} was replaced while its \
         keeper was dead; put the old file back and run it again, or end its QEMU with `kill {qemu_pid}` to start with \
         the new file"
    )]
    ExchangedImage { name: String, qemu_pid: u32, disk: String, path: std::path::PathBuf },
    #[error("cannot lock the mirror of nvram {nvram} for QEMU")]
    MirrorLock { nvram: String, source: std::io::Error },
    #[error("cannot examine the image files of disk {disk}")]
    ImageFiles { disk: String, source: std::io::Error },
    #[error(transparent)]
    Launch(#[from] LaunchError),
    #[error(transparent)]
    Parked(#[from] hearth_recovery::rejuvenation::parked::ParkedError),
    #[error("cannot fetch a disk from its object store")]
    Arrival(#[source] hearth_recovery::snapshot::SnapshotError),
    #[error("cannot start the thread that fetches a disk from its object store")]
    ArrivalThread(#[source] std::io::Error),
    #[error(transparent)]
    Order(#[from] hearth_recovery::lazy_restore::OrderError),
    #[error("cannot restore {name}")]
    Restore { name: String, source: Box<RestoreFailure> },
    #[error("cannot make the disk with the cache map")]
    CacheMap(#[source] std::io::Error),
    #[error("cannot start the thread that watches QEMU")]
    Watch(#[source] std::io::Error),
    #[error("cannot start the memory monitor's thread")]
    MemoryMonitor(#[source] std::io::Error),
}
