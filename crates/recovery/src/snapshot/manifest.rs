//! Manifest: the list of what belongs to a snapshot. JSON, and a last line with its checksum: `blake3 HEX`.

use std::fs::Metadata;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use hearth_memory::PAGE_BYTES;
use serde::{Deserialize, Serialize};

use super::{SnapshotError, seal};

/// Raised when a field changes its meaning, or a file its format.
pub const SNAPSHOT_VERSION: u32 = 2;

/// Description of a snapshot: the machine, the software that saved it, and the files.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Manifest {
    /// Version of the format: `SNAPSHOT_VERSION`.
    pub version: u32,
    /// Name of the machine that was saved.
    pub machine: String,
    /// Time of the save (RFC 3339).
    pub saved_at: String,
    /// Version of Hearth that saved the machine.
    pub hearth_version: String,
    /// Version of the QEMU that ran the guest.
    pub qemu_version: String,
    /// `kvm` or `tcg`.
    pub accelerator: String,
    /// Path of the machine's own configuration file. Earlier versions did not store it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub configuration: Option<PathBuf>,
    /// Size of the guest's RAM.
    pub ram_bytes: u64,
    /// Whether QEMU had the device that tells a guest its VM generation ID. A QEMU that loads the guest needs it too.
    #[serde(default)]
    pub vmgenid: bool,
    /// Whether QEMU had a channel to a guest agent. A QEMU that loads the guest needs it too.
    #[serde(default)]
    pub guest_agent: bool,
    /// Whether the guest's agent had frozen its file systems. A restore must have them thawed.
    #[serde(default)]
    pub frozen: bool,
    /// Disks whose write cache the guest has switched off.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub write_through: Vec<String>,
    /// The machine's configuration.
    pub machine_file: Part,
    /// State of the devices.
    pub state: Part,
    /// The guest's memory.
    pub ram: RamPart,
    /// The disks, in the order of the configuration.
    pub disks: Vec<DiskPart>,
}

/// A file that is read whole, with its length and checksum.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Part {
    /// Length of the file, in bytes.
    pub bytes: u64,
    /// BLAKE3 checksum of the file, in hexadecimal.
    pub blake3: String,
}

/// The file of memory. Its seal covers its index, and the index covers each chunk.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RamPart {
    /// Length of the file, in bytes.
    pub bytes: u64,
    /// Number of pages in it.
    pub pages: u64,
    /// BLAKE3 checksum of its index, in hexadecimal.
    pub seal: String,
}

/// One disk of a snapshot.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct DiskPart {
    /// Name of the disk.
    pub name: String,
    /// `raw` or `qcow2`.
    pub format: String,
    /// Length of the file, in bytes.
    pub bytes: u64,
    /// When the file was last changed, for a snapshot in a folder. A disk has no place for a seal, and is too large to
    /// be read for a checksum.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub modified: Option<Modified>,
    /// How it is stored in an object store.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub stored: Option<StoredDisk>,
}

/// Modification time of a file, since 1970.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Modified {
    seconds: i64,
    nanoseconds: i64,
}

impl Modified {
    /// Modification time in these metadata.
    pub fn of(metadata: &Metadata) -> Self {
        Self { seconds: metadata.mtime(), nanoseconds: metadata.mtime_nsec() }
    }

    /// Whether a file's time is still this one. File systems and archives may drop the fraction of a second.
    pub(super) fn is_still(self, now: Self) -> bool {
        now.seconds == self.seconds && [0, self.nanoseconds].contains(&now.nanoseconds)
    }
}

/// Prints the form that `touch -d` takes.
impl std::fmt::Display for Modified {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "@{}.{:09}", self.seconds, self.nanoseconds)
    }
}

/// A disk's blocks that are not zeroes, one after the other in one object, and a second object that lists them.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct StoredDisk {
    /// Length of the object, in bytes.
    pub bytes: u64,
    /// The object that lists the blocks.
    pub index: Part,
}

/// Name of a disk's file. Names of disks are checked when the manifest is read.
pub(super) fn disk_file(name: &str) -> String {
    format!("disk-{name}")
}

impl Manifest {
    /// Size of the guest's RAM, in pages.
    pub fn ram_pages(&self) -> u64 {
        self.ram_bytes / PAGE_BYTES
    }

    pub(super) fn to_text(&self) -> String {
        seal::close(serde_json::to_string_pretty(self).expect("a manifest is plain data"))
    }

    pub(super) fn parse(text: &str, path: &Path) -> Result<Self, SnapshotError> {
        let damaged = |what: &str| SnapshotError::damaged(path, what);
        let body = seal::open(text).map_err(damaged)?;
        // Only this field is understood in a manifest of another version.
        #[derive(Deserialize)]
        struct Version {
            version: u32,
        }
        let Version { version } = serde_json::from_str(body).map_err(|error| damaged(&error.to_string()))?;
        if !(1..=SNAPSHOT_VERSION).contains(&version) {
            return Err(SnapshotError::Version { path: path.to_owned(), found: version });
        }
        let manifest: Self = serde_json::from_str(body).map_err(|error| damaged(&error.to_string()))?;
        for (position, disk) in manifest.disks.iter().enumerate() {
            if disk.name.contains(['/', '\0']) {
                return Err(damaged(&format!("a disk cannot be called {:?}", disk.name)));
            }
            if manifest.disks[..position].iter().any(|other| other.name == disk.name) {
                return Err(damaged(&format!("two disks are called {:?}", disk.name)));
            }
            if !["raw", "qcow2"].contains(&disk.format.as_str()) {
                return Err(damaged(&format!("disk {:?} has an unknown format, {:?}", disk.name, disk.format)));
            }
        }
        Ok(manifest)
    }
}
