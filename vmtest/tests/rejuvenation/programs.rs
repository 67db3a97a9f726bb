//! Programs that stand in for QEMU.

use std::path::{Path, PathBuf};

use hearth_vmtest::{artifacts, write_program};

/// A program that runs QEMU when asked for its version, and otherwise this script (`$qemu` is the real one).
pub fn instead_of_qemu(folder: &Path, script: &str) -> PathBuf {
    let path = folder.join("qemu");
    let qemu = artifacts::installed_qemu().expect("QEMU is installed");
    let text =
        format!("#!/bin/sh\nqemu={}\ncase \"$*\" in *--version*) exec $qemu \"$@\";; esac\n{script}\n", qemu.display());
    write_program(&path, &text);
    path
}

/// A QEMU that boots guests but refuses incoming ones.
pub fn no_successor(folder: &Path) -> PathBuf {
    instead_of_qemu(folder, "case \"$*\" in *-incoming*) echo no successor >&2; exit 1;; esac; exec $qemu \"$@\"")
}
