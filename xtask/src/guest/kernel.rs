//! Debian's cloud kernels, stock: unpacked, not installed.

use std::fs;
use std::path::{Path, PathBuf};

use super::GuestError;
use crate::apt::{Apt, AptError};
use crate::cache::{self, at};
use crate::paths;

/// A kernel: the folder it is kept in, and the metapackage that names its current version.
#[derive(Clone, Copy)]
pub struct Kernel {
    pub suffix: &'static str,
    metapackage: &'static str,
}

/// What a Debian 12 machine runs.
pub const STABLE: Kernel = Kernel { suffix: "", metapackage: "linux-image-cloud-amd64" };
/// What a Debian 13 machine runs, rebuilt for 12.
pub const NEWER: Kernel = Kernel { suffix: "-6.12", metapackage: "linux-image-6.12-cloud-amd64" };

impl Kernel {
    pub fn folder(self) -> PathBuf {
        paths::guest().join(format!("kernel{}", self.suffix))
    }

    /// Makes `vmlinuz`, `config` and `modules/` (the tree of one version).
    pub fn ensure(self) -> Result<PathBuf, GuestError> {
        let folder = self.folder();
        cache::ensure(&folder, &[self.metapackage, include_str!("kernel.rs")], |new| self.make(new))?;
        Ok(folder)
    }

    fn make(self, new: &Path) -> Result<(), GuestError> {
        let apt = Apt::open(&paths::guest().join("apt"))?;
        let package = apt.behind(self.metapackage)?;
        apt.unpack(&[&package], new)?;
        let release = package
            .strip_prefix("linux-image-")
            .ok_or_else(|| AptError::Content { package: package.clone(), expected: "linux-image-*".into() })?;
        for name in ["vmlinuz", "config"] {
            let file = new.join(format!("boot/{name}-{release}"));
            at("move", &file, fs::rename(&file, new.join(name)))?;
        }
        let modules = new.join("lib/modules").join(release);
        at("move", &modules, fs::rename(&modules, new.join("modules")))?;
        for rest in ["boot", "lib", "usr"] {
            let rest = new.join(rest);
            at("remove", &rest, fs::remove_dir_all(&rest))?;
        }
        let file = new.join("release");
        Ok(at("write", &file, fs::write(&file, release))?)
    }
}
