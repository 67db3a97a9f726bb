//! A host with KVM, to be run under emulation: what Hearth and QEMU need of a Linux, as an ext4 image for the busybox guest.
//!
//! installed QEMU, QEMU 10, their firmware and libraries, the guests' kernel and initrd, kernel modules, tools -> `host.img`
//!
//! The busybox guest boots as ever, mounts this and goes on in it (`vmtest/tests/nested.rs`). Hearth itself and the tests come
//! on a disk of their own, so that a new build makes no new image. Guests' files and QEMU 10 lie where they lie here: a test
//! binary knows them by these paths.

use std::fs;
use std::os::unix::fs::symlink;
use std::path::Path;
use std::process::Command;

use super::busybox::{copy, create, put_libraries, put_modules, put_with_libraries, static_busybox};
use super::{GuestError, kernel};
use crate::cache::{self, at};
use crate::{paths, shell};

const MODULES: &str = include_str!("../../../guest/nested/modules");

const PROGRAMS: [&str; 3] = ["qemu-system-x86_64", "mke2fs", "cp"];
/// Mounted over, or written to.
const FOLDERS: [&str; 7] = ["dev", "proc", "sys", "run", "hearth", "bin", "modules"];
/// Of QEMU's data: what a machine without a display and a network's ROM is started with.
const FIRMWARE: [&str; 5] = [
    "usr/share/qemu/kvmvapic.bin",
    "usr/share/qemu/linuxboot.bin",
    "usr/share/qemu/linuxboot_dma.bin",
    "usr/share/qemu/pvh.bin",
    "usr/share/seabios/bios-256k.bin",
];
const IMAGE_MIB: u64 = 384;

/// Makes `nested/host.img`.
pub fn ensure() -> Result<(), GuestError> {
    let release = kernel::STABLE.ensure()?.join("release");
    let release = at("read", &release, fs::read_to_string(&release))?;
    let qemu = shell::output(Command::new("qemu-system-x86_64").arg("--version"))?;
    let place = paths::root().display().to_string();
    let inputs = [MODULES, include_str!("nested.rs"), &release, &qemu, &place];
    cache::ensure(&paths::nested(), &inputs, make)
}

fn make(new: &Path) -> Result<(), GuestError> {
    let tree = new.join("tree");
    for folder in FOLDERS {
        create(&tree.join(folder))?;
    }
    for program in PROGRAMS {
        put_with_libraries(program, &tree)?;
    }
    let this = at("find", Path::new("this program"), std::env::current_exe())?;
    // What any Rust program is linked with.
    put_libraries(&this, &tree)?;
    copy(&static_busybox()?, &tree.join("bin/busybox"))?;
    at("link", &tree, symlink("busybox", tree.join("bin/sh")))?;
    for file in FIRMWARE {
        copy(&Path::new("/").join(file), &tree.join(file))?;
    }
    put_qemu10(&tree)?;
    for file in ["busybox/vmlinuz", "busybox/initrd"] {
        let file = paths::guest().join(file);
        copy(&file, &inside(&tree, &file))?;
    }
    put_modules(MODULES, &kernel::STABLE.folder(), &tree)?;
    make_image(&tree, &new.join("host.img"))?;
    Ok(at("remove", &tree, fs::remove_dir_all(&tree))?)
}

/// Nothing to do where the installed QEMU is that new.
fn put_qemu10(tree: &Path) -> Result<(), GuestError> {
    let from = paths::qemu10();
    let program = from.join("usr/bin/qemu-system-x86_64");
    if !program.exists() {
        return Ok(());
    }
    let to = inside(tree, &from);
    copy(&program, &to.join("usr/bin/qemu-system-x86_64"))?;
    let bundle = to.join("usr/bin/qemu-bundle");
    at("link", &bundle, symlink("../..", &bundle))?;
    for file in FIRMWARE {
        copy(&from.join(file), &to.join(file))?;
    }
    put_libraries(&program, tree)
}

fn make_image(tree: &Path, image: &Path) -> Result<(), GuestError> {
    let mke2fs = shell::find("mke2fs").ok_or(GuestError::Missing("e2fsprogs"))?;
    let mut command = Command::new(mke2fs);
    command.args(["-q", "-F", "-t", "ext4", "-b", "4096", "-O", "^has_journal", "-d"]).arg(tree);
    Ok(shell::output(command.arg(image).arg(format!("{IMAGE_MIB}M"))).map(drop)?)
}

/// Where an absolute path lies in the tree.
fn inside(tree: &Path, path: &Path) -> std::path::PathBuf {
    tree.join(path.strip_prefix("/").unwrap_or(path))
}
