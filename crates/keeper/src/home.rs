//! Home: the files of a machine that is found by its name alone, as `hearth new` makes them and the units of systemd run them.
//!
//! | | root | other users |
//! |---|---|---|
//! | the machine | `/etc/hearth/NAME.toml` | `$XDG_CONFIG_HOME/hearth/NAME.toml` (`~/.config`) |
//! | its disk, and what it keeps | `/var/lib/hearth/NAME` | `$XDG_STATE_HOME/hearth/NAME` (`~/.local/state`) |
//!
//! A machine elsewhere works as well: `hearth run FILE`.

use std::path::{Path, PathBuf};

/// The folders of one machine's files.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Home {
    name: String,
    configurations: PathBuf,
    folder: PathBuf,
}

impl Home {
    /// Whether this user has a place for machines. Under a user without one, that would be a folder that all users share.
    pub fn is_known() -> bool {
        let given = ["XDG_CONFIG_HOME", "XDG_STATE_HOME"].map(given);
        rustix::process::geteuid().is_root() || has_place(&given, home_folder().as_deref())
    }

    /// Of the machine of this name, whether it exists or not. `name`: a valid one.
    pub fn of(name: &str) -> Self {
        Self { name: name.to_owned(), configurations: configurations(), folder: state_folder(name) }
    }

    /// Names of all machines that have a configuration here, sorted.
    pub fn names() -> Vec<String> {
        if Self::is_known() { names_in(&configurations()) } else { Vec::new() }
    }

    /// The homes of all other machines that have a configuration beside this one's, sorted by name.
    pub fn others(&self) -> impl Iterator<Item = Self> {
        let others = names_in(&self.configurations).into_iter().filter(|name| *name != self.name);
        others.map(|name| Self { folder: self.folder.with_file_name(&name), name, ..self.clone() })
    }

    #[cfg(test)]
    pub fn in_folder(name: &str, folder: &Path) -> Self {
        Self { name: name.to_owned(), configurations: folder.join("etc"), folder: folder.join("lib").join(name) }
    }

    pub fn name(&self) -> &str {
        &self.name
    }

    /// The machine's configuration.
    pub fn file(&self) -> PathBuf {
        self.configurations.join(format!("{}.toml", self.name))
    }

    /// Folder of its disk, dumps and whatever else outlives the host's memory.
    pub fn folder(&self) -> &Path {
        &self.folder
    }

    /// The disk that `hearth new` makes.
    pub fn disk(&self) -> PathBuf {
        self.folder.join("disk.qcow2")
    }

    /// The UEFI variables of a machine that `hearth new` makes.
    pub fn variables(&self) -> PathBuf {
        self.folder.join("uefi-vars.fd")
    }

    /// The disk that cloud-init reads.
    pub fn seed(&self) -> PathBuf {
        self.folder.join("seed.img")
    }
}

/// Names of the machines with a configuration in this folder, sorted.
fn names_in(configurations: &Path) -> Vec<String> {
    let entries = std::fs::read_dir(configurations).into_iter().flatten().flatten();
    let files = entries.filter_map(|entry| entry.file_name().into_string().ok());
    let mut names: Vec<_> = files.filter_map(|file| file.strip_suffix(".toml").map(str::to_owned)).collect();
    names.sort();
    names
}

/// The folder of the configurations.
fn configurations() -> PathBuf {
    let parent = if rustix::process::geteuid().is_root() {
        PathBuf::from("/etc")
    } else {
        of_user("XDG_CONFIG_HOME", ".config")
    };
    parent.join("hearth")
}

/// The state folder of a machine: in /var/lib for root, in the user's state folder for others.
pub fn state_folder(machine: &str) -> PathBuf {
    let parent = if rustix::process::geteuid().is_root() {
        PathBuf::from("/var/lib")
    } else {
        of_user("XDG_STATE_HOME", ".local/state")
    };
    parent.join("hearth").join(machine)
}

/// A base folder of this user.
fn of_user(variable: &str, default: &str) -> PathBuf {
    given(variable).unwrap_or_else(|| home_folder().unwrap_or_else(|| "/var/tmp".into()).join(default))
}

/// The folder in this variable. Relative paths are invalid there.
fn given(variable: &str) -> Option<PathBuf> {
    std::env::var_os(variable).map(PathBuf::from).filter(|path| path.is_absolute())
}

/// `given`: the folders of configurations and of states.
fn has_place(given: &[Option<PathBuf>; 2], home: Option<&Path>) -> bool {
    home.is_some() || given.iter().all(Option::is_some)
}

fn home_folder() -> Option<PathBuf> {
    std::env::home_dir().filter(|path| path.is_absolute())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn user_without_home_needs_both_folders() {
        let folder = || Some(PathBuf::from("/srv/x"));
        for (given, home, expect) in [
            ([None, None], folder(), true),
            ([folder(), folder()], None, true),
            ([folder(), None], None, false),
            ([None, None], None, false),
        ] {
            assert_eq!(has_place(&given, home.as_deref()), expect, "{given:?}, {home:?}");
        }
    }
}
