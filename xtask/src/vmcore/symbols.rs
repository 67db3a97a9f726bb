//! A guest kernel's debug symbols, and the module that breaks it, compiled against its headers.
//!
//! The headers are unpacked, not installed, so their one absolute path is written anew.

use std::fs;
use std::path::Path;
use std::process::Command;

use super::{VmcoreError, folder};
use crate::apt::Apt;
use crate::cache::{self, at};
use crate::guest::Kernel;
use crate::{paths, shell};

const MODULE: &str = include_str!("../../../guest/fault/hearth_fault.c");

/// Makes `vmlinux` and `hearth_fault.ko`.
pub fn ensure(kernel: Kernel) -> Result<(), VmcoreError> {
    let file = kernel.folder().join("release");
    let release = at("read", &file, fs::read_to_string(&file))?;
    let inputs = [release.as_str(), MODULE, include_str!("symbols.rs")];
    cache::ensure(&folder(kernel), &inputs, |new| {
        let apt = Apt::open(&paths::guest().join("apt"))?;
        put_symbols(&apt, &release, new)?;
        put_module(&apt, &release, new)
    })
}

/// Only the kernel's own symbols: those of all its modules are as large again.
fn put_symbols(apt: &Apt, release: &str, new: &Path) -> Result<(), VmcoreError> {
    let package = format!("linux-image-{release}-dbg");
    let unpacked = apt.unpack_some(&[&package], "./usr/lib/debug/boot/vmlinux-*", new);
    unpacked.map_err(|source| VmcoreError::NoSymbols { release: release.into(), source })?;
    let file = new.join(format!("usr/lib/debug/boot/vmlinux-{release}"));
    at("move", &file, fs::rename(&file, new.join("vmlinux")))?;
    remove(&new.join("usr"))
}

fn put_module(apt: &Apt, release: &str, new: &Path) -> Result<(), VmcoreError> {
    let tree = new.join("headers");
    let headers = format!("linux-headers-{release}");
    let depends = apt.depends(&headers)?;
    let wanted = |name: &&String| name.starts_with("linux-headers-") || name.starts_with("linux-kbuild-");
    let mut packages: Vec<&str> = depends.iter().filter(wanted).map(String::as_str).collect();
    packages.push(&headers);
    apt.unpack(&packages, &tree)?;
    let sources = tree.join("usr/src");
    let makefile = sources.join(&headers).join("Makefile");
    let text = at("read", &makefile, fs::read_to_string(&makefile))?;
    let here = at("find", &sources, fs::canonicalize(&sources))?;
    at("write", &makefile, fs::write(&makefile, text.replace("/usr/src", &here.display().to_string())))?;
    compile(&sources.join(&headers), new)?;
    remove(&tree)
}

fn compile(headers: &Path, new: &Path) -> Result<(), VmcoreError> {
    let desk = new.join("module");
    at("create", &desk, fs::create_dir(&desk))?;
    for (name, text) in [("hearth_fault.c", MODULE), ("Kbuild", "obj-m := hearth_fault.o\n")] {
        let file = desk.join(name);
        at("write", &file, fs::write(&file, text))?;
    }
    let here = at("find", &desk, fs::canonicalize(&desk))?;
    let mut make = Command::new("make");
    make.arg("-s").arg("-C").arg(headers).arg(format!("M={}", here.display())).arg("modules");
    // Type information for BPF would need yet another tool.
    make.arg("CONFIG_DEBUG_INFO_BTF_MODULES=");
    shell::output(&mut make)?;
    let module = desk.join("hearth_fault.ko");
    at("move", &module, fs::rename(&module, new.join("hearth_fault.ko")))?;
    remove(&desk)
}

fn remove(folder: &Path) -> Result<(), VmcoreError> {
    Ok(at("remove", folder, fs::remove_dir_all(folder))?)
}
