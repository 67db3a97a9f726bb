//! The folder with one subfolder per machine, in which commands find a machine by its name.
//!
//! ROOT/NAME/api.sock    the keeper's API
//! ROOT/NAME/console.sock  the guest's serial console
//! ROOT/NAME/vnc.sock    the guest's screen
//!
//! A machine with another runtime folder has a symbolic link here.

use std::io;
use std::path::{Path, PathBuf};

use crate::folders::VNC_SOCKET;

/// The only file beside the machines' folders (see `machine/hop_lock.rs`). No machine may have this name.
pub const HOPS_LOCK: &str = "hops.lock";

/// Names are looked up in this folder.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RuntimeRoot(PathBuf);

impl RuntimeRoot {
    pub fn new(path: impl Into<PathBuf>) -> Self {
        Self(path.into())
    }

    /// `/run/hearth` for root; a user's own runtime folder otherwise.
    pub fn for_this_user() -> Self {
        if rustix::process::geteuid().is_root() {
            return Self::new("/run/hearth");
        }
        match std::env::var_os("XDG_RUNTIME_DIR") {
            Some(folder) => Self(PathBuf::from(folder).join("hearth")),
            None => Self(PathBuf::from(format!("/tmp/hearth-{}", rustix::process::geteuid().as_raw()))),
        }
    }

    pub fn path(&self) -> &Path {
        &self.0
    }

    pub fn machine(&self, name: &str) -> PathBuf {
        self.0.join(name)
    }

    pub fn api_socket(&self, name: &str) -> PathBuf {
        self.machine(name).join("api.sock")
    }

    pub fn console_socket(&self, name: &str) -> PathBuf {
        self.machine(name).join("console.sock")
    }

    pub fn vnc_socket(&self, name: &str) -> PathBuf {
        self.machine(name).join(VNC_SOCKET)
    }

    /// Sorted names of all machines that have or had a keeper. A missing root has none.
    pub fn names(&self) -> Vec<String> {
        let Ok(entries) = std::fs::read_dir(&self.0) else { return Vec::new() };
        let mut names: Vec<String> = entries
            .filter_map(|entry| entry.ok())
            .filter(|entry| entry.path().is_dir())
            .filter_map(|entry| entry.file_name().into_string().ok())
            .collect();
        names.sort();
        names
    }

    /// Registers a machine with another runtime folder by name. An existing link is replaced, because the lock in the
    /// folder, not the link, shows whether the machine runs.
    pub fn enter(&self, name: &str, runtime_folder: &Path) -> io::Result<()> {
        let link = self.machine(name);
        if link == runtime_folder {
            return Ok(());
        }
        std::fs::create_dir_all(&self.0)?;
        if link.is_symlink() {
            std::fs::remove_file(&link)?;
        }
        std::os::unix::fs::symlink(runtime_folder, link)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_machine_elsewhere_is_found_by_name() {
        let folder = tempfile::tempdir().unwrap();
        let root = RuntimeRoot::new(folder.path().join("root"));
        assert_eq!(root.names(), Vec::<String>::new());
        for elsewhere in ["first", "second"] {
            let elsewhere = folder.path().join(elsewhere);
            std::fs::create_dir(&elsewhere).unwrap();
            root.enter("web", &elsewhere).unwrap();
            assert_eq!(root.machine("web").canonicalize().unwrap(), elsewhere.canonicalize().unwrap());
        }
        std::fs::create_dir(root.machine("db")).unwrap();
        assert_eq!(root.names(), ["db", "web"]);
    }
}
