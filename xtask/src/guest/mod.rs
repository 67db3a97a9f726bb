//! Guest images: kernels, the busybox guest, the Debian guest, the newer QEMU.
//!
//! probe, refill, kernel -> busybox initrd (tests)
//! probe, refill, kernel packages -> Debian image (demo, benches, tests with systemd); larger ones with a database for two benches
//! busybox guest, QEMUs -> root image of a host with KVM, for the busybox guest (`make test-nested`)
//!
//! Each is a folder under `target/guest/`, made once from the recipes in `guest/`, and made again when these change. Package
//! versions are
//! not part of the stamp, because reading them would need the network in every run. `make clean` fetches the newest.

mod busybox;
mod debian;
mod kernel;
mod modules;
mod nested;
mod probe;
mod qemu10;
mod qemu_ga;
mod refill;

pub use debian::{ensure_database as debian_database, ensure_large as debian_large};
pub use kernel::{Kernel, NEWER, STABLE};
pub use nested::ensure as nested_host;
pub use qemu10::ensure as qemu10;
pub use refill::{PACKAGE as REFILL_PACKAGE, ensure as refill};

use crate::apt::AptError;
use crate::cache::CacheError;
use crate::shell::ShellError;

#[derive(Debug, thiserror::Error)]
pub enum GuestError {
    #[error(transparent)]
    Shell(#[from] ShellError),
    #[error(transparent)]
    Cache(#[from] CacheError),
    #[error(transparent)]
    Apt(#[from] AptError),
    #[error(transparent)]
    Deb(#[from] crate::deb::DebError),
    #[error(transparent)]
    Modules(#[from] modules::ModulesError),
    #[error("{0} is not installed; `make setup` installs what is missing")]
    Missing(&'static str),
    #[error("{name} at {path} is dynamically linked, but the guest needs a static one: install busybox-static")]
    NotStatic { name: &'static str, path: std::path::PathBuf },
    #[error("cannot run {binary}: {source}; install the libraries that `ldd {binary}` reports as not found")]
    Libraries { binary: std::path::PathBuf, source: ShellError },
    #[error(
        "QEMU 10 for this release ({release}) is not in Debian 12's backports, and the installed QEMU is {installed}"
    )]
    NoQemu10 { release: String, installed: String },
}

/// Makes all guests that tests, demo and benches boot.
pub fn ensure_all() -> Result<(), GuestError> {
    ensure_busybox()?;
    debian::ensure()
}

pub fn ensure_busybox() -> Result<(), GuestError> {
    busybox::ensure(kernel::STABLE)
}

/// Makes the busybox guest with the newer kernel, for tests of differences between kernels.
pub fn ensure_busybox_newer() -> Result<(), GuestError> {
    busybox::ensure(kernel::NEWER)
}
