//! qemu-guest-agent, for guests: unpacked from Debian 12, not installed. On the host it would start where the host is a guest.

use std::path::PathBuf;
use std::process::Command;

use super::GuestError;
use crate::apt::Apt;
use crate::{cache, paths, shell};

/// The program. It goes into guests with the libraries that it loads here.
pub fn ensure() -> Result<PathBuf, GuestError> {
    let folder = paths::guest().join("qemu-ga");
    cache::ensure(&folder, &[include_str!("qemu_ga.rs")], |new| {
        Apt::open(&paths::guest().join("apt"))?.unpack_some(&["qemu-guest-agent"], "./usr/sbin/*", new)?;
        let binary = new.join("usr/sbin/qemu-ga");
        let said = shell::output(Command::new(&binary).arg("--version"));
        said.map(drop).map_err(|source| GuestError::Libraries { binary, source })
    })?;
    Ok(folder.join("usr/sbin/qemu-ga"))
}
