//! Tools to build, test and run Hearth: found, or installed, or named with the command that installs them.
//!
//! A tool counts as installed when its program is found, whatever package it came from, so the package manager is not called when
//! nothing is missing.

use std::path::Path;
use std::process::Command;

use crate::shell::{self, ShellError};

#[derive(Debug, thiserror::Error)]
pub enum SetupError {
    #[error(transparent)]
    Shell(#[from] ShellError),
    #[error("missing: {packages}\nInstall it: sudo apt-get install -y --no-install-recommends {packages}")]
    NotRoot { packages: String },
    #[error("missing: {packages}\nThis system has no apt-get: install the equivalents with its own package manager")]
    NoApt { packages: String },
}

/// A tool: its sign (program or file), its Debian package, and why it is needed.
pub struct Tool {
    sign: &'static str,
    package: &'static str,
}

pub const fn tool(sign: &'static str, package: &'static str) -> Tool {
    Tool { sign, package }
}

/// A sign with a slash is a file, others are programs.
const TOOLS: [Tool; 23] = [
    // The machine itself.
    tool("qemu-system-x86_64", "qemu-system-x86"),
    tool("qemu-img", "qemu-utils"),
    tool("passt", "passt"),
    tool("ip", "iproute2"),
    // Tests make system calls fail with it.
    tool("strace", "strace"),
    tool("/usr/share/OVMF/OVMF_CODE.fd", "ovmf"),
    // Building: Rust links with cc; the preload library and the probe are C.
    tool("cc", "gcc"),
    tool("/usr/include/stdlib.h", "libc6-dev"),
    tool("make", "make"),
    // Guest images.
    tool("mmdebstrap", "mmdebstrap"),
    tool("busybox", "busybox-static"),
    tool("mke2fs", "e2fsprogs"),
    tool("mkfs.xfs", "xfsprogs"),
    tool("mkfs.btrfs", "btrfs-progs"),
    tool("/usr/lib/grub/i386-pc/boot.img", "grub-pc-bin"),
    tool("fio", "fio"),
    tool("cpio", "cpio"),
    tool("zstd", "zstd"),
    tool("xz", "xz-utils"),
    tool("/usr/share/keyrings/debian-archive-keyring.gpg", "debian-archive-keyring"),
    tool("/etc/ssl/certs/ca-certificates.crt", "ca-certificates"),
    // Only an ordinary user's mmdebstrap needs it, but a user may later remake an image that root has made.
    tool("newuidmap", "uidmap"),
    tool("find", "findutils"),
];

const LIBVIRTD: Tool = tool("/usr/sbin/libvirtd", "libvirt-daemon-system");
const VIRSH: Tool = tool("virsh", "libvirt-clients");

/// Comparisons with libvirt need these.
pub const LIBVIRT_TOOLS: [Tool; 2] = [LIBVIRTD, VIRSH];

/// Only tests need these.
pub const TEST_TOOLS: [Tool; 4] = [
    LIBVIRTD,
    VIRSH,
    // Shows the page of `hearth host`.
    tool("chromium", "chromium"),
    // Checks metrics, alert rules and dashboard.
    tool("promtool", "prometheus"),
];

/// OVMF's file has had several names.
const OVMF: [&str; 2] = ["/usr/share/OVMF/OVMF_CODE.fd", "/usr/share/OVMF/OVMF_CODE_4M.fd"];

/// Packages to install, which this user and system can.
pub struct Missing(Vec<&'static str>);

/// Installs the missing tools that everything needs.
pub fn ensure_tools() -> Result<(), SetupError> {
    find_missing_tools(&[])?.install()
}

/// Installs the missing tools as root; otherwise reports the command.
pub fn ensure(tools: &[Tool]) -> Result<(), SetupError> {
    find_missing(tools.iter())?.install()
}

/// The missing ones of the tools that everything needs, and of these; see [`ensure`].
pub fn find_missing_tools(more: &'static [Tool]) -> Result<Missing, SetupError> {
    find_missing(TOOLS.iter().chain(more))
}

fn find_missing<'a>(tools: impl Iterator<Item = &'a Tool>) -> Result<Missing, SetupError> {
    let missing = missing(tools, &is_there);
    if missing.is_empty() {
        return Ok(Missing(missing));
    }
    let packages = missing.join(" ");
    if shell::find("apt-get").is_none() {
        return Err(SetupError::NoApt { packages });
    }
    if !rustix::process::geteuid().is_root() {
        return Err(SetupError::NotRoot { packages });
    }
    Ok(Missing(missing))
}

impl Missing {
    pub fn install(&self) -> Result<(), SetupError> {
        let Self(packages) = self;
        if packages.is_empty() {
            return Ok(());
        }
        println!("installing {}", packages.join(" "));
        let apt = || {
            let mut command = Command::new("apt-get");
            command.env("DEBIAN_FRONTEND", "noninteractive").arg("-qq");
            command
        };
        shell::output(apt().arg("update"))?;
        shell::output(apt().args(["install", "-y", "--no-install-recommends"]).args(packages))?;
        Ok(())
    }
}

fn missing<'a>(tools: impl Iterator<Item = &'a Tool>, is_there: &dyn Fn(&str) -> bool) -> Vec<&'static str> {
    tools.filter(|tool| !is_there(tool.sign)).map(|tool| tool.package).collect()
}

fn is_there(sign: &str) -> bool {
    match sign {
        ovmf if ovmf == OVMF[0] => OVMF.iter().any(|file| Path::new(file).exists()),
        file if file.starts_with('/') => Path::new(file).exists(),
        program => shell::find(program).is_some(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nothing_is_missing_if_all_is_found() {
        assert!(missing(TOOLS.iter(), &|_| true).is_empty());
    }

    #[test]
    fn missing_tools_are_named_by_package() {
        assert_eq!(missing(TOOLS.iter(), &|sign| sign != "mke2fs" && sign != "qemu-img"), ["qemu-utils", "e2fsprogs"]);
    }

    #[test]
    fn ordinary_user_gets_the_install_command() {
        let error = SetupError::NotRoot { packages: "fio passt".into() }.to_string();
        assert!(error.contains("sudo apt-get install -y --no-install-recommends fio passt"), "{error}");
    }
}
