//! The record of a host reload: a file that outlives the host's kernel and lists the prepared machines and their
//! outcome. Its commands are in `cli::host_reload`.

use std::fs;
use std::io::{self, Write};
use std::path::{Path, PathBuf};

use hearth_memory::{Durability, replace_file};
use serde::{Deserialize, Serialize};

use crate::fleet_lock::FleetLock;

/// Raised when a field changes its meaning.
const VERSION: u32 = 1;
/// Default path of the record.
pub const PLACE: &str = "/var/lib/hearth/host-reload.json";
pub const PLACE_VARIABLE: &str = "HEARTH_HOST_RELOAD_RECORD";

#[derive(Debug, thiserror::Error)]
pub enum RecordError {
    #[error("cannot read or write {path}; choose another file with --record")]
    Io { path: PathBuf, source: io::Error },
    #[error("{path} does not exist: no host reload was prepared")]
    None { path: PathBuf },
    #[error("cannot understand {path}; move it away, and start the machines as after any boot")]
    Malformed { path: PathBuf, source: serde_json::Error },
    #[error(
        "{path} has format version {found}, but this Hearth reads only version {VERSION}; use the Hearth that wrote it"
    )]
    Version { path: PathBuf, found: u32 },
}

/// The record of a host reload.
#[derive(Debug, Serialize, Deserialize)]
pub struct Record {
    /// Version of the format.
    pub version: u32,
    /// When the machines were prepared (RFC 3339).
    pub prepared_at: String,
    /// Boot id of the kernel before the reload.
    pub boot_id: String,
    /// Folder in which the machines are found by name.
    pub runtime_root: PathBuf,
    /// The fleet lock, held until all machines run again.
    pub fleet: Option<FleetLock>,
    /// The prepared machines.
    pub machines: Vec<MachineNote>,
}

/// A prepared machine.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct MachineNote {
    /// Name of the machine.
    pub name: String,
    /// Its configuration file.
    pub file: PathBuf,
    /// Folder in which its guest may be parked.
    pub memory_folder: PathBuf,
    /// The systemd unit of its keeper.
    pub unit: Option<String>,
    /// The machine's outcome.
    pub outcome: Outcome,
    /// Why it does not run, or could not be parked or resumed.
    pub why: Option<String>,
    /// How long its guest was paused.
    pub stood_ms: Option<u64>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Outcome {
    /// It is being parked.
    Begun,
    Parked,
    /// It could not be parked and keeps running, if it still runs.
    NotParked,
    /// Its guest was resumed.
    Resumed,
    /// Its guest could not resume, so the machine booted.
    Booted,
    /// It does not run; `why` says why.
    Down,
}

impl Outcome {
    pub fn words(self) -> &'static str {
        match self {
            Self::Begun => "begun",
            Self::Parked => "parked",
            Self::NotParked => "not parked",
            Self::Resumed => "resumed",
            Self::Booted => "booted",
            Self::Down => "down",
        }
    }

    /// Whether `resume` still has to handle it.
    pub(crate) fn is_open(self) -> bool {
        matches!(self, Self::Begun | Self::Parked | Self::Down)
    }
}

impl Record {
    /// A record of machines that are about to be parked.
    pub fn new(prepared_at: String, runtime_root: &Path, fleet: Option<FleetLock>, machines: Vec<MachineNote>) -> Self {
        let boot_id = hearth_qemu::accelerator::host_boot();
        Self { version: VERSION, prepared_at, boot_id, runtime_root: runtime_root.to_owned(), fleet, machines }
    }

    /// Reads a record; a missing file is an error of its own.
    pub fn load(path: &Path) -> Result<Self, RecordError> {
        let text = match fs::read(path) {
            Ok(text) => text,
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                return Err(RecordError::None { path: path.to_owned() });
            }
            Err(source) => return Err(RecordError::Io { path: path.to_owned(), source }),
        };
        #[derive(Deserialize)]
        struct Versioned {
            version: u32,
        }
        let malformed = |source| RecordError::Malformed { path: path.to_owned(), source };
        let Versioned { version } = serde_json::from_slice(&text).map_err(malformed)?;
        if version != VERSION {
            return Err(RecordError::Version { path: path.to_owned(), found: version });
        }
        serde_json::from_slice(&text).map_err(malformed)
    }

    /// This host's record; none also if it cannot be read, as by other users.
    pub(crate) fn of_this_host() -> Option<Self> {
        let place = std::env::var_os(PLACE_VARIABLE).map_or_else(|| PathBuf::from(PLACE), PathBuf::from);
        Self::load(&place).ok()
    }

    /// Whether this host has changed its kernel since it was prepared.
    pub fn host_reloaded(&self) -> bool {
        self.boot_id != hearth_qemu::accelerator::host_boot()
    }

    fn open_machines(&self, root: &Path) -> impl Iterator<Item = &MachineNote> {
        let here = self.runtime_root == root;
        self.machines.iter().filter(move |machine| here && machine.outcome.is_open())
    }

    /// Machines of a runtime root whose guests may be parked in memory.
    pub(crate) fn names_parked_in(&self, root: &Path) -> Vec<String> {
        self.open_machines(root).map(|machine| machine.name.clone()).collect()
    }

    /// The folder in which a machine's guest may be parked.
    pub fn parked_in(&self, root: &Path, name: &str) -> Option<PathBuf> {
        self.open_machine(root, name).map(|machine| machine.memory_folder.clone())
    }

    /// The folder in which a machine's guest was left, if any. A guest whose parking was interrupted may have been left
    /// nowhere.
    pub fn left_in(&self, root: &Path, name: &str) -> Option<PathBuf> {
        let left = self.open_machine(root, name).filter(|machine| machine.outcome != Outcome::Begun);
        left.map(|machine| machine.memory_folder.clone())
    }

    fn open_machine(&self, root: &Path, name: &str) -> Option<&MachineNote> {
        self.open_machines(root).find(|machine| machine.name == name)
    }

    /// Writes the record atomically and durably.
    pub fn save(&self, path: &Path) -> Result<(), RecordError> {
        self.write(path).map_err(|source| RecordError::Io { path: path.to_owned(), source })
    }

    fn write(&self, path: &Path) -> io::Result<()> {
        let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
        fs::create_dir_all(folder)?;
        // Only root may read it, because the FleetLock URL may contain a password.
        let text = serde_json::to_vec_pretty(self)?;
        replace_file(path, Durability::PowerCut, |file| file.write_all(&text))
    }

    /// The machine of this name, if it was prepared.
    pub fn machine(&mut self, name: &str) -> Option<&mut MachineNote> {
        self.machines.iter_mut().find(|machine| machine.name == name)
    }
}

impl MachineNote {
    pub fn decide(&mut self, outcome: Outcome, why: Option<String>) {
        (self.outcome, self.why) = (outcome, why);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn record_round_trips_and_bad_ones_are_named() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("new/host-reload.json");
        let refusal = || Record::load(&path).unwrap_err().to_string();
        assert!(refusal().ends_with("no host reload was prepared"));
        let machine = MachineNote {
            name: "web".into(),
            file: "/etc/hearth/web.toml".into(),
            memory_folder: "/pmem/web".into(),
            unit: Some("hearth@web.service".into()),
            outcome: Outcome::Parked,
            why: None,
            stood_ms: None,
        };
        let mut record =
            Record::new("2026-03-01T12:00:00Z".into(), Path::new("/run/hearth"), None, vec![machine.clone()]);
        record.save(&path).unwrap();
        assert_eq!(Record::load(&path).unwrap().machines, [machine]);
        let left_in = |record: &Record, root: &str, name: &str| record.left_in(Path::new(root), name);
        assert_eq!(left_in(&record, "/run/hearth", "web"), Some("/pmem/web".into()));
        assert_eq!(left_in(&record, "/run/hearth", "db"), None);
        assert_eq!(left_in(&record, "/elsewhere", "web"), None);
        record.machine("web").unwrap().outcome = Outcome::Begun;
        assert_eq!(left_in(&record, "/run/hearth", "web"), None);
        record.machine("web").unwrap().decide(Outcome::Booted, Some("the memory is gone".into()));
        record.save(&path).unwrap();
        assert!(!Record::load(&path).unwrap().machine("web").unwrap().outcome.is_open());
        let text = fs::read_to_string(&path).unwrap();
        for length in 0..text.len() {
            fs::write(&path, &text[..length]).unwrap();
            assert!(refusal().contains("cannot understand"), "cut at {length}");
        }
        fs::write(&path, r#"{"version": 9}"#).unwrap();
        assert!(refusal().contains("has format version 9, but this Hearth reads only version 1"));
    }
}
