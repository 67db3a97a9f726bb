//! A second, newer QEMU beside the distribution's: unpacked from Debian 12's backports, never installed.
//!
//! Debian's QEMU looks for its firmware under `/usr/share`, where the installed version's may be. A folder `qemu-bundle`
//! beside the binary comes before that, so the unpacked tree is complete in itself: no `-L`, and no wrapper script
//! either, which would be the process that the preload library finds itself in.

use std::path::Path;
use std::process::Command;

use super::GuestError;
use crate::apt::Apt;
use crate::cache::{self, at};
use crate::{paths, shell};

/// The firmware comes along: ROM sizes are part of a machine's migration state and differ between versions.
const PACKAGES: [&str; 5] = [
    "qemu-system-x86/bookworm-backports",
    "qemu-system-common/bookworm-backports",
    "qemu-system-data/bookworm-backports",
    "seabios/bookworm-backports",
    "ipxe-qemu",
];

/// Makes `target/qemu10/usr/bin/qemu-system-x86_64`, or does nothing where the installed QEMU is that new.
pub fn ensure() -> Result<(), GuestError> {
    let installed = shell::output(Command::new("qemu-system-x86_64").arg("--version"))?;
    if major(&installed).is_some_and(|major| major >= 10) {
        println!("the installed QEMU is {} already", version(&installed));
        return Ok(());
    }
    let release = host_release();
    if release != crate::apt::GUEST_RELEASE {
        return Err(GuestError::NoQemu10 { release, installed: version(&installed).into() });
    }
    cache::ensure(&paths::qemu10(), &[include_str!("qemu10.rs")], make)
}

fn make(new: &Path) -> Result<(), GuestError> {
    Apt::open(&paths::guest().join("apt"))?.unpack(&PACKAGES, new)?;
    let bundle = new.join("usr/bin/qemu-bundle");
    at("link", &bundle, std::os::unix::fs::symlink("../..", &bundle))?;
    let binary = new.join("usr/bin/qemu-system-x86_64");
    let said = shell::output(Command::new(&binary).arg("--version"));
    let said = said.map_err(|source| GuestError::Libraries { binary, source })?;
    println!("QEMU {}", version(&said));
    Ok(())
}

/// `QEMU emulator version 7.2.22 (Debian ..)` -> `7.2.22`.
fn version(said: &str) -> &str {
    said.split_whitespace().nth(3).unwrap_or("of unknown version")
}

fn major(said: &str) -> Option<u32> {
    version(said).split('.').next()?.parse().ok()
}

fn host_release() -> String {
    let text = std::fs::read_to_string("/etc/os-release").unwrap_or_default();
    let codename = text.lines().find_map(|line| line.strip_prefix("VERSION_CODENAME="));
    codename.unwrap_or("unknown").trim_matches('"').to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_are_read_from_what_qemu_says() {
        let said = "QEMU emulator version 10.0.2 (Debian 1:10.0.2+ds-2)\nCopyright (c) 2003-2025 Fabrice Bellard";
        assert_eq!((version(said), major(said)), ("10.0.2", Some(10)));
        assert_eq!(major("something else"), None);
    }
}
