//! Order: a file beside machine.toml with the snapshot that a machine made by `hearth restore` begins with.
//!
//! ```text
//! disks -> order -> machine.toml -> (killed, refused or cancelled: the next keeper reads the order and begins anew)
//!   -> load device state -> remove the order -> THE GUEST RUNS
//! ```
//! The order is written and synced before machine.toml, so a keeper that finds machine.toml finds the order too. It
//! never boots from the snapshot's disks because a restore was killed too early. The order is removed, and the removal
//! is synced, before the guest can write to its disks. So the snapshot's memory is never loaded over newer disks, not
//! even after a power cut. The file is in the machine's own folder: in the runtime folder another machine of the same
//! name would find it.

use std::fs;
use std::io::{self, Write};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use hearth_memory::{Durability, replace_file, sync_folder_of};
use serde::{Deserialize, Serialize};

use super::Mode;

/// Raised when a field changes its meaning.
const VERSION: u32 = 1;

/// The snapshot that a machine begins with, and the machine that the order is for.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Order {
    version: u32,
    /// The configuration file that this order is for.
    configuration: PathBuf,
    /// Folder or store address of the snapshot.
    pub snapshot: PathBuf,
    /// Seal of the snapshot's memory, because another snapshot in that location is another guest.
    pub seal: String,
    /// Memory that is loaded before the guest runs.
    pub mode: Mode,
    /// The machine's disks as they were made, in the machine's order.
    disks: Vec<DiskMark>,
}

/// Mark of a disk that no guest has written to. Its time is not part of it, because a keeper that opens the disk for a
/// guest that never runs changes it. A guest's first write makes the file longer.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct DiskMark {
    path: PathBuf,
    inode: u64,
    bytes: u64,
}

/// Why an order could not be read, written or removed.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "each variant's message describes it")]
pub enum OrderError {
    #[error("{path}: cannot be {what}")]
    Io { path: PathBuf, what: &'static str, source: io::Error },
    #[error("{path}: is not a valid order to restore a machine; remove it to boot from the machine's disks")]
    Malformed { path: PathBuf, source: serde_json::Error },
    #[error("{path}: has version {found}, but this Hearth knows only {VERSION}; use the one that wrote it")]
    Version { path: PathBuf, found: u32 },
}

impl OrderError {
    fn io(path: &Path, what: &'static str) -> impl FnOnce(io::Error) -> Self {
        move |source| Self::Io { path: path.to_owned(), what, source }
    }
}

impl DiskMark {
    fn of(path: &Path) -> io::Result<Self> {
        let found = fs::metadata(path)?;
        Ok(Self { path: path.to_owned(), inode: found.ino(), bytes: found.len() })
    }
}

impl Order {
    /// An order for the machine with this configuration file, whose disks were made just now.
    pub fn new(
        configuration: &Path,
        snapshot: &Path,
        seal: &str,
        mode: Mode,
        disks: &[PathBuf],
    ) -> Result<Self, OrderError> {
        let mark = |path: &PathBuf| DiskMark::of(path).map_err(OrderError::io(path, "read"));
        Ok(Self {
            version: VERSION,
            configuration: configuration.to_owned(),
            snapshot: snapshot.to_owned(),
            seal: seal.to_owned(),
            mode,
            disks: disks.iter().map(mark).collect::<Result<_, _>>()?,
        })
    }

    /// Path of the order for a configuration file.
    pub fn path(configuration: &Path) -> PathBuf {
        configuration.with_extension("restore.json")
    }

    /// Writes the order, whole or not at all, and syncs it.
    pub fn write(&self) -> Result<(), OrderError> {
        let path = Self::path(&self.configuration);
        let text = serde_json::to_vec_pretty(self).expect("an order is plain data");
        replace_file(&path, Durability::PowerCut, |file| file.write_all(&text))
            .map_err(OrderError::io(&path, "written"))
    }

    /// Loads the order; `None` if the machine was not made by a restore, or its guest has run.
    pub fn load(configuration: &Path) -> Result<Option<Self>, OrderError> {
        let path = Self::path(configuration);
        let text = match fs::read(&path) {
            Ok(text) => text,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            Err(source) => return Err(OrderError::io(&path, "read")(source)),
        };
        #[derive(Deserialize)]
        struct Versioned {
            version: u32,
        }
        let malformed = |source| OrderError::Malformed { path: path.clone(), source };
        let Versioned { version } = serde_json::from_slice(&text).map_err(malformed)?;
        if version != VERSION {
            return Err(OrderError::Version { path, found: version });
        }
        serde_json::from_slice(&text).map(Some).map_err(malformed)
    }

    /// Why the order does not hold for a machine with this configuration file and these disks; `None` if it holds.
    pub fn void_for(&self, configuration: &Path, disks: &[&Path]) -> Option<String> {
        if self.configuration != configuration {
            return Some(format!("it is for {}", self.configuration.display()));
        }
        if !self.disks.iter().map(|disk| disk.path.as_path()).eq(disks.iter().copied()) {
            return Some("the machine has other disks now".to_owned());
        }
        self.disks.iter().find_map(|disk| match DiskMark::of(&disk.path) {
            Ok(found) if found == *disk => None,
            Ok(_) => Some(format!("{} was written to or exchanged", disk.path.display())),
            Err(error) => Some(format!("{} cannot be read: {error}", disk.path.display())),
        })
    }

    /// Removes the order so that it stays removed after a power cut: the guest may write to its disks from here on. It
    /// is no error if there is no order.
    pub fn remove(configuration: &Path) -> Result<(), OrderError> {
        let path = Self::path(configuration);
        match fs::remove_file(&path).and_then(|()| sync_folder_of(&path)) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
            removed => removed.map_err(OrderError::io(&path, "removed")),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs::File;

    /// A machine's folder with two disks, and its order.
    struct Stand {
        home: tempfile::TempDir,
        order: Order,
    }

    impl Stand {
        fn new() -> Self {
            let home = tempfile::tempdir().unwrap();
            let disks = ["root", "data"].map(|name| home.path().join(name));
            disks.iter().for_each(|disk| fs::write(disk, "empty").unwrap());
            let configuration = home.path().join("machine.toml");
            let order = Order::new(&configuration, Path::new("/snapshots/web"), "5ea1", Mode::Lazy, &disks).unwrap();
            order.write().unwrap();
            Self { home, order }
        }

        fn configuration(&self) -> PathBuf {
            self.home.path().join("machine.toml")
        }

        fn why_void(&self, configuration: &Path, names: &[&str]) -> Option<String> {
            let disks: Vec<_> = names.iter().map(|name| self.home.path().join(name)).collect();
            let disks: Vec<_> = disks.iter().map(PathBuf::as_path).collect();
            let found = Order::load(&self.configuration()).unwrap().unwrap();
            assert_eq!(found, self.order);
            found.void_for(configuration, &disks)
        }
    }

    #[test]
    fn order_is_void_for_other_configurations_and_disks() {
        let stand = Stand::new();
        let (configuration, disks) = (stand.configuration(), ["root", "data"]);
        assert_eq!(stand.why_void(&configuration, &disks), None);
        assert_eq!(Order::load(&stand.home.path().join("other.toml")).unwrap(), None);
        let void = |configuration: &Path, disks: &[&str], expect: &str| {
            let why = stand.why_void(configuration, disks).expect("it is void");
            assert!(why.contains(expect), "{why}");
        };
        void(&stand.home.path().join("other.toml"), &disks, "it is for ");
        void(&configuration, &["data", "root"], "other disks");
        void(&configuration, &["root"], "other disks");
        void(&configuration, &["root", "data", "more"], "other disks");
    }

    #[test]
    fn written_or_replaced_disk_voids_the_order() {
        type Change = fn(&Path);
        let changes: [Change; 3] = [
            |disk| fs::write(disk, "longer than it was").unwrap(),
            |disk| fs::remove_file(disk).unwrap(),
            |disk| {
                // As long and as old, as after `cp -a`.
                let (copy, of) = (disk.with_extension("copy"), File::open(disk).unwrap().metadata().unwrap());
                fs::write(&copy, "other").unwrap();
                let times = fs::FileTimes::new().set_modified(of.modified().unwrap());
                File::options().write(true).open(&copy).unwrap().set_times(times).unwrap();
                fs::rename(&copy, disk).unwrap();
            },
        ];
        for (number, change) in changes.iter().enumerate() {
            for disk in ["root", "data"] {
                let stand = Stand::new();
                change(&stand.home.path().join(disk));
                let why = stand.why_void(&stand.configuration(), &["root", "data"]);
                assert!(why.is_some_and(|why| why.contains(disk)), "change {number} of {disk}");
            }
        }
    }

    #[test]
    fn removed_order_is_gone_torn_one_refused() {
        let stand = Stand::new();
        let path = Order::path(&stand.configuration());
        let text = fs::read_to_string(&path).unwrap();
        let refusal = || Order::load(&stand.configuration()).unwrap_err().to_string();
        fs::write(&path, &text[..text.len() / 2]).unwrap();
        assert!(refusal().contains("machine.restore.json: is not a valid order to restore a machine"), "{}", refusal());
        fs::write(&path, r#"{"version": 9}"#).unwrap();
        assert!(refusal().contains("version 9, but this Hearth knows only 1"), "{}", refusal());
        for _ in 0..2 {
            Order::remove(&stand.configuration()).unwrap();
            assert_eq!(Order::load(&stand.configuration()).unwrap(), None);
        }
    }
}
