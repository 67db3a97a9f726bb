//! Kernel modules in the order in which they can be loaded.
//!
//! The guest has no modprobe and the package no `modules.dep` (it is made at installation), but each module says in its
//! own `.modinfo` section what it depends on. Loading in any other order ends in an endless wait for a disk: virtio
//! needs virtio_ring first, not the other way round.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::cache::{CacheError, at};
use crate::shell::ShellError;

#[derive(Debug, thiserror::Error)]
pub enum ModulesError {
    #[error(transparent)]
    Cache(#[from] CacheError),
    #[error(transparent)]
    Shell(#[from] ShellError),
    #[error("kernel module {name} is neither in {folder} nor built in")]
    Missing { name: String, folder: PathBuf },
    #[error("{0} does not say what it depends on: not a kernel module?")]
    NoModinfo(PathBuf),
    #[error("{file}: {program} failed to decompress it")]
    Decompress { file: PathBuf, program: &'static str },
}

/// The modules of one kernel.
pub struct Modules {
    folder: PathBuf,
    files: BTreeMap<String, PathBuf>,
    built_in: BTreeSet<String>,
}

/// A module ready to be put into an image.
#[derive(Debug, PartialEq)]
pub struct Module {
    pub name: String,
    pub code: Vec<u8>,
}

impl Modules {
    /// `folder` is what is called `/lib/modules/VERSION` on a running system.
    pub fn scan(folder: &Path) -> Result<Self, ModulesError> {
        let mut files = BTreeMap::new();
        collect(folder, &mut files)?;
        let list = folder.join("modules.builtin");
        let built_in = at("read", &list, fs::read_to_string(&list))?;
        let built_in = built_in.lines().filter_map(|line| module_name(Path::new(line))).collect();
        Ok(Self { folder: folder.to_owned(), files, built_in })
    }

    /// The wanted modules and all they depend on, each after its dependencies. What is built in is left out.
    pub fn in_order<'a>(&self, wanted: impl Iterator<Item = &'a str>) -> Result<Vec<Module>, ModulesError> {
        let mut order = Vec::new();
        for name in wanted {
            self.add(&canonical(name), &mut order)?;
        }
        Ok(order)
    }

    fn add(&self, name: &str, order: &mut Vec<Module>) -> Result<(), ModulesError> {
        if self.built_in.contains(name) || order.iter().any(|module| module.name == name) {
            return Ok(());
        }
        let missing = || ModulesError::Missing { name: name.into(), folder: self.folder.clone() };
        let file = self.files.get(name).ok_or_else(missing)?;
        let code = decompressed(file)?;
        let depends = depends(&code).ok_or_else(|| ModulesError::NoModinfo(file.clone()))?;
        for dependency in depends {
            self.add(&dependency, order)?;
        }
        order.push(Module { name: name.into(), code });
        Ok(())
    }
}

fn collect(folder: &Path, files: &mut BTreeMap<String, PathBuf>) -> Result<(), CacheError> {
    for entry in at("list", folder, fs::read_dir(folder))? {
        let path = at("list", folder, entry)?.path();
        if path.is_dir() {
            collect(&path, files)?;
        } else if let Some(name) = module_name(&path) {
            files.insert(name, path);
        }
    }
    Ok(())
}

/// `kernel/drivers/char/hw_random/virtio-rng.ko.xz` -> `virtio_rng`.
fn module_name(path: &Path) -> Option<String> {
    let (name, _compression) = path.file_name()?.to_str()?.split_once(".ko")?;
    Some(canonical(name))
}

/// The kernel treats `-` and `_` in module names alike; its own lists mix them.
fn canonical(name: &str) -> String {
    name.replace('-', "_")
}

fn decompressed(file: &Path) -> Result<Vec<u8>, ModulesError> {
    let program = match file.extension().and_then(|extension| extension.to_str()) {
        Some("xz") => "xz",
        Some("zst") => "zstd",
        _ => return Ok(at("read", file, fs::read(file))?),
    };
    let result = Command::new(program).arg("-dc").arg(file).output();
    let result = result.map_err(|source| ShellError::Start { program: program.into(), source })?;
    if !result.status.success() {
        return Err(ModulesError::Decompress { file: file.to_owned(), program });
    }
    Ok(result.stdout)
}

/// The `depends=` entry: entries of `.modinfo` end with a zero byte.
fn depends(code: &[u8]) -> Option<Vec<String>> {
    const KEY: &[u8] = b"\0depends=";
    let start = code.windows(KEY.len()).position(|window| window == KEY)? + KEY.len();
    let length = code[start..].iter().position(|&byte| byte == 0)?;
    let list = std::str::from_utf8(&code[start..start + length]).ok()?;
    Some(list.split(',').filter(|name| !name.is_empty()).map(canonical).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn kernel(modules: &[(&str, &str)], built_in: &str) -> tempfile::TempDir {
        let home = tempfile::tempdir().unwrap();
        fs::create_dir(home.path().join("kernel")).unwrap();
        for (name, depends) in modules {
            let code = format!("\u{7f}ELF..license=GPL\0depends={depends}\0retpoline=Y\0");
            fs::write(home.path().join("kernel").join(format!("{name}.ko")), code).unwrap();
        }
        fs::write(home.path().join("modules.builtin"), built_in).unwrap();
        home
    }

    fn check(modules: &[(&str, &str)], built_in: &str, wanted: &[&str], expect: Result<&[&str], &str>) {
        let home = kernel(modules, built_in);
        let order = Modules::scan(home.path()).unwrap().in_order(wanted.iter().copied());
        let names = order.map(|order| order.into_iter().map(|module| module.name).collect::<Vec<_>>());
        match (names, expect) {
            (Ok(names), Ok(expect)) => assert_eq!(names, expect),
            (Err(error), Err(expect)) => assert!(error.to_string().contains(expect), "{error}"),
            (names, expect) => panic!("{names:?}, expected {expect:?}"),
        }
    }

    #[test]
    fn dependencies_come_first_and_once() {
        let modules = [
            ("virtio_blk", "virtio,virtio_ring"),
            ("virtio-rng", "virtio"),
            ("virtio", "virtio_ring"),
            ("virtio_ring", ""),
        ];
        let expect = ["virtio_ring", "virtio", "virtio_blk", "virtio_rng"];
        check(&modules, "", &["virtio_blk", "virtio-rng"], Ok(&expect));
    }

    #[test]
    fn what_is_built_in_is_left_out() {
        check(
            &[("xfs", "libcrc32c")],
            "kernel/lib/libcrc32c.ko\nkernel/fs/ext4/ext4.ko\n",
            &["ext4", "xfs"],
            Ok(&["xfs"]),
        );
    }

    #[test]
    fn a_missing_dependency_is_named() {
        check(&[("xfs", "libcrc32c")], "", &["xfs"], Err("libcrc32c"));
    }

    #[test]
    fn a_file_that_is_no_module_is_named() {
        let home = kernel(&[], "");
        fs::write(home.path().join("kernel/xfs.ko"), "cut off").unwrap();
        let error = Modules::scan(home.path()).unwrap().in_order(["xfs"].into_iter()).unwrap_err();
        assert!(error.to_string().contains("xfs.ko"), "{error}");
    }
}
