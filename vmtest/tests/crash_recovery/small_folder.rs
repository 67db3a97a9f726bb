//! A dump folder of limited size that can grow.

use std::path::{Path, PathBuf};
use std::process::Command;

use hearth_vmtest::{Disk, Result, TestVm, TestVmBuilder};

/// A tmpfs. Dropping it unmounts it.
pub struct SmallFolder(PathBuf);

impl SmallFolder {
    /// Mounts it, or returns `None` without permission.
    fn mount(path: PathBuf, size: &str) -> Option<Self> {
        std::fs::create_dir_all(&path).expect("the folder is the test's");
        let mounted = run("mount", &["-t", "tmpfs", "-o", &format!("size={size}"), "tmpfs"], &path);
        mounted.then_some(Self(path))
    }

    pub fn path(&self) -> &Path {
        &self.0
    }

    pub fn grow(&self, size: &str) {
        assert!(run("mount", &["-o", &format!("remount,size={size}")], &self.0));
    }
}

impl Drop for SmallFolder {
    fn drop(&mut self) {
        run("umount", &["-l"], &self.0);
    }
}

fn run(program: &str, arguments: &[&str], path: &Path) -> bool {
    Command::new(program).args(arguments).arg(path).status().is_ok_and(|status| status.success())
}

/// Boots a machine whose dump folder has this size.
pub fn boot(builder: TestVmBuilder, name: &str, size: &str) -> Result<Option<(TestVm, SmallFolder)>> {
    let path = std::env::temp_dir().join(format!("hearth-full-{name}-{}", std::process::id()));
    let Some(folder) = SmallFolder::mount(path, size) else {
        eprintln!("skipped: only root can mount a small file system");
        return Ok(None);
    };
    let builder = builder.crash_setting("dump_folder", folder.0.display().to_string());
    let vm = builder.crash_setting("min_free", "4KiB").disk(Disk::empty(8)).running()?;
    Ok(Some((vm, folder)))
}
