//! Programs in the place of QEMU.

use std::path::{Path, PathBuf};

use hearth_vmtest::{artifacts, write_program};

/// A program that is QEMU when asked for its version, and else this script (`$qemu` is the real one).
pub fn instead_of_qemu(folder: &Path, script: &str) -> PathBuf {
    let path = folder.join("qemu");
    let qemu = artifacts::installed_qemu().expect("QEMU is installed");
    let text =
        format!("#!/bin/sh\nqemu={}\ncase \"$*\" in *--version*) exec $qemu \"$@\";; esac\n{script}\n", qemu.display());
    write_program(&path, &text);
    path
}

/// A QEMU that boots guests and takes over none.
pub fn no_successor(folder: &Path) -> PathBuf {
    instead_of_qemu(folder, "case \"$*\" in *-incoming*) echo no successor >&2; exit 1;; esac; exec $qemu \"$@\"")
}
