//! Journal: the facts that a new keeper needs to continue, in one small file of the runtime folder.
//!
//! The file is replaced as a whole at every change (temporary file, rename), so a keeper killed at any moment leaves
//! the old journal or the new one. It names facts that outlive a keeper (QEMU's process, the incarnation's files). Facts
//! that can be read from those files are not repeated here.
//!
//! The facts end with the host, so changes are not synced: a guest that starts would wait for the disk, and for
//! everything that a dump has written there. A host that dies may leave a file without its content, which counts as no
//! journal.

use std::fs;
use std::io::{self, Write};
use std::path::{Path, PathBuf};

use hearth_memory::{Durability, replace_file};
use hearth_qemu::EARLIER_MACHINE_TYPE;
use rustix::fs::{CWD, RenameFlags, renameat_with};
use serde::{Deserialize, Serialize};

use crate::lazy_restore::Mode;
use crate::rejuvenation::ClockDebt;

/// Increased when a field changes its meaning. A keeper refuses journals of versions that it does not know.
pub(crate) const JOURNAL_VERSION: u32 = 1;

/// The journal of one machine.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Journal {
    /// Version of the format: `JOURNAL_VERSION`.
    pub version: u32,
    /// Name of the machine.
    pub machine: String,
    /// Size of the guest's RAM.
    pub ram_bytes: u64,
    /// The living incarnation, or the last one.
    pub incarnation: u32,
    /// Number of QEMU processes of this machine, including those that failed to start.
    pub generation: u32,
    /// Dead incarnations whose RAM is still kept, oldest first.
    pub ember: Vec<u32>,
    /// Incarnations that must be dumped: dead, or about to end.
    #[serde(default)]
    pub dumps: Vec<DumpNote>,
    /// The QEMU that runs the incarnation. None between two QEMUs.
    pub qemu: Option<QemuIdentity>,
    /// The memory of its guest, if QEMU is not the keeper's own but libvirt's.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub memory: Option<MemoryNote>,
    /// A keeper took this QEMU over, and has not yet received a message from it at each disk.
    #[serde(default)]
    pub greeting: bool,
    /// A hop to another QEMU that has begun and not ended: see `rejuvenation`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub hop: Option<HopNote>,
    /// How far the guest's clock is off since its last hop, in nanoseconds.
    #[serde(default)]
    pub clock_debt: ClockDebt,
    /// Disks whose write cache the living guest had switched off when its current QEMU got it. QEMU does not tell a
    /// disk's next server before it has an inflight region.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub write_through: Vec<String>,
    /// A request of the operator that the guest still has to carry out. The next keeper continues it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ordered: Option<OrderNote>,
    /// Whether the guest runs, and if not, why.
    #[serde(flatten)]
    pub guest: GuestNote,
    /// The guest's file systems are frozen by its agent for a save, or may be. Independent of `guest`: they stay frozen
    /// from before the pause until the agent thaws them.
    #[serde(default)]
    pub frozen: bool,
    /// The living incarnation was restored from a snapshot, and some of its memory may still be missing.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub restore: Option<RestoreNote>,
    /// The machine's VM generation ID, which its next boot gets. None if it has none yet.
    #[serde(default)]
    pub vmgenid: Option<String>,
    /// The configuration that the living guest was started with, even if the file has changed since: TOML, with
    /// absolute paths. None if an earlier keeper started the guest.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub started_with: Option<String>,
    /// Machine type of the last guest of this machine. It is kept where the configuration names none. None if no guest
    /// has lived yet. Earlier keepers did not note it, and always used the same type.
    #[serde(default = "earlier_machine_type")]
    pub machine_type: Option<String>,
    /// The disks that QEMU was started with, in order. A keeper that takes over must serve the same ones.
    pub disks: Vec<DiskIdentity>,
}

fn earlier_machine_type() -> Option<String> {
    Some(EARLIER_MACHINE_TYPE.to_owned())
}

/// Whether the guest runs. In the file these are four fields (`GuestFields`), as the first keepers wrote them. A keeper
/// may be upgraded and rolled back while a guest lives, so an older keeper must be able to read this.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(from = "GuestFields", into = "GuestFields")]
#[allow(missing_docs, reason = "the variants describe their fields")]
pub enum GuestNote {
    /// The guest runs, or there is none.
    #[default]
    Runs,
    /// The guest runs while a save scans its memory. QEMU translates the guest's code again until a keeper ends this
    /// mode.
    Scanned,
    /// The guest is paused for a save, or was resumed and has not run yet. The next keeper continues it.
    Paused,
    /// The guest is paused for a dump to this file. The dump ends with its keeper, and the next keeper continues the
    /// guest.
    PausedForDump { file: PathBuf },
    /// The guest is paused, to be parked in this memory folder. If its QEMU lives, the next keeper continues it. If
    /// not, the guest is parked only if the folder says so.
    Parking { folder: PathBuf },
    /// The guest was parked in this memory folder, and its QEMU has ended. The next keeper expects it there.
    Parked { folder: PathBuf },
}

impl GuestNote {
    /// Whether a keeper paused the guest and the next keeper must continue it, if its QEMU lives.
    pub fn is_paused(&self) -> bool {
        match self {
            Self::Paused | Self::PausedForDump { .. } | Self::Parking { .. } => true,
            Self::Runs | Self::Scanned | Self::Parked { .. } => false,
        }
    }

    /// Memory folder in which the guest may be parked.
    pub fn parked_in(&self) -> Option<&Path> {
        match self {
            Self::Parking { folder } | Self::Parked { folder } => Some(folder),
            _ => None,
        }
    }
}

/// `GuestNote` as it is in the file. Keepers write six of the 16 combinations; the others are read as the nearest of
/// these.
#[derive(Serialize, Deserialize)]
struct GuestFields {
    /// The guest is paused by its keeper.
    #[serde(default)]
    saving: bool,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    dump_holds: Option<PathBuf>,
    #[serde(default)]
    scanning: bool,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    parked_in: Option<PathBuf>,
}

impl From<GuestFields> for GuestNote {
    fn from(fields: GuestFields) -> Self {
        let GuestFields { saving, dump_holds, scanning, parked_in } = fields;
        match (saving, parked_in, dump_holds) {
            (true, Some(folder), _) => Self::Parking { folder },
            (false, Some(folder), _) => Self::Parked { folder },
            (true, None, Some(file)) => Self::PausedForDump { file },
            (true, None, None) => Self::Paused,
            (false, None, _) if scanning => Self::Scanned,
            (false, None, _) => Self::Runs,
        }
    }
}

impl From<GuestNote> for GuestFields {
    fn from(note: GuestNote) -> Self {
        let mut fields = Self { saving: note.is_paused(), dump_holds: None, scanning: false, parked_in: None };
        match note {
            GuestNote::Runs | GuestNote::Paused => {}
            GuestNote::Scanned => fields.scanning = true,
            GuestNote::PausedForDump { file } => fields.dump_holds = Some(file),
            GuestNote::Parking { folder } | GuestNote::Parked { folder } => fields.parked_in = Some(folder),
        }
        fields
    }
}

/// A request that ends the living incarnation.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[allow(missing_docs, reason = "`cold`: without the dead guest's memory")]
pub enum OrderNote {
    /// End the guest and start the next one.
    Reboot { cold: bool },
    /// End the guest and stop the machine.
    Stop,
}

/// A dump that a new keeper starts or continues.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct DumpNote {
    /// The incarnation to dump.
    pub incarnation: u32,
    /// Name of the complete file. None if the dump has not begun. The file itself says its format.
    pub file: Option<PathBuf>,
}

/// The restore of the living incarnation.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RestoreNote {
    /// Folder or address of the snapshot.
    pub snapshot: PathBuf,
    /// Seal of the snapshot's memory: another snapshot at this path has another seal. Earlier keepers did not note it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub seal: Option<String>,
    /// Which memory was loaded before the guest ran.
    pub mode: Mode,
    /// Always true. Earlier keepers wrote the note sooner, without this field: such a note names no machine and is
    /// void.
    pub begun: bool,
}

/// A hop between two QEMUs of one guest. A keeper that finds this note ends one of the two before anything else.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct HopNote {
    /// The QEMU that the guest moves to.
    pub successor: QemuIdentity,
    /// Whether the point of no return was passed. If so, the guest is the successor's; if not, it is still
    /// `Journal::qemu`'s.
    pub committed: bool,
}

/// Identity of a disk, to notice that the configuration names another one in its place.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct DiskIdentity {
    /// Name of the disk.
    pub name: String,
    /// Path of the image.
    pub path: PathBuf,
    /// `raw` or `qcow2`.
    pub format: String,
    /// Whether the guest can only read it.
    pub read_only: bool,
}

/// Identity of a QEMU process: no other process of this host has had it since the host's boot.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct QemuIdentity {
    /// Process id.
    pub pid: u32,
    /// Field 22 of /proc/PID/stat.
    pub start_ticks: u64,
    /// QEMU generation: number of this QEMU process, counted over the machine's life.
    pub generation: u32,
    /// QEMU's version, from `--version` at its start.
    pub version: String,
    /// `kvm` or `tcg`.
    pub accelerator: String,
    /// Why this accelerator is used, for the operator.
    pub accelerator_why: String,
    /// Number of the userfaultfd in QEMU, from which a new keeper can fetch it. None if QEMU has none.
    #[serde(default)]
    pub userfault_fd: Option<i32>,
    /// Number of the channel to QEMU's helper. None if there is none.
    #[serde(default)]
    pub helper_fd: Option<i32>,
    /// QEMU lost its disks' server while its guest was paused, and does not notice a new server any more.
    #[serde(default, rename = "deaf")]
    pub stale: bool,
    /// Memory and descriptors of the process when it first answered. None if they could not be read.
    #[serde(default)]
    pub at_start: Option<FootprintNote>,
    /// VM generation ID that QEMU shows its guest. None if it was started without the device; then this guest's next
    /// QEMU has none either.
    #[serde(default)]
    pub vmgenid: Option<String>,
    /// Whether QEMU has a channel to a guest agent. This guest's next QEMU has the same.
    #[serde(default)]
    pub guest_agent: bool,
}

/// Guest memory that QEMU itself has made, without a name: a new keeper finds it among QEMU's descriptors.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct MemoryNote {
    /// Device and inode of its file.
    pub identity: (u64, u64),
    /// The same of further files, each of a NUMA cell or a memory device.
    #[serde(default)]
    pub further: Vec<(u64, u64)>,
    /// Bytes of it that the guest has below 4 GiB.
    pub low_bytes: u64,
    /// Guest-physical addresses of memory devices. The last files are theirs.
    #[serde(default)]
    pub devices: Vec<u64>,
}

/// Memory and descriptors of a QEMU process at one moment.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct FootprintNote {
    /// QEMU's own memory, without the guest's RAM.
    pub own_bytes: u64,
    /// Number of open file descriptors.
    pub descriptors: u64,
}

#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "each variant's message describes it")]
pub enum JournalError {
    #[error("journal {path}: cannot be read or written")]
    Io { path: PathBuf, source: io::Error },
    #[error("journal {path}: cannot be parsed; stop the machine's QEMU if it still runs, then move the file away")]
    Malformed { path: PathBuf, source: serde_json::Error },
    #[error(
        "journal {path}: has version {found}, but this keeper knows only {JOURNAL_VERSION}; use the keeper that wrote it"
    )]
    Version { path: PathBuf, found: u32 },
}

impl Journal {
    /// Journal of a machine that has not run yet.
    pub fn new(machine: &str, ram_bytes: u64) -> Self {
        Self {
            version: JOURNAL_VERSION,
            machine: machine.to_owned(),
            ram_bytes,
            incarnation: 0,
            generation: 0,
            ember: Vec::new(),
            dumps: Vec::new(),
            qemu: None,
            memory: None,
            greeting: false,
            hop: None,
            clock_debt: ClockDebt::default(),
            write_through: Vec::new(),
            ordered: None,
            guest: GuestNote::Runs,
            frozen: false,
            restore: None,
            vmgenid: None,
            started_with: None,
            machine_type: None,
            disks: Vec::new(),
        }
    }

    /// Journal of the same machine after its guest has ended or was parked.
    pub fn without_guest(&self, ram_bytes: u64) -> Self {
        Self { machine_type: self.machine_type.clone(), ..Self::new(&self.machine, ram_bytes) }
    }

    /// Loads the journal. None if there is none: the machine has not run since the host started.
    pub fn load(path: &Path) -> Result<Option<Self>, JournalError> {
        let text = match fs::read(path) {
            Ok(text) if is_lost(&text) => return Ok(None),
            Ok(text) => text,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            Err(source) => return Err(JournalError::Io { path: path.to_owned(), source }),
        };
        #[derive(Deserialize)]
        struct Versioned {
            version: u32,
        }
        let malformed = |source| JournalError::Malformed { path: path.to_owned(), source };
        let Versioned { version } = serde_json::from_slice(&text).map_err(malformed)?;
        if version != JOURNAL_VERSION {
            return Err(JournalError::Version { path: path.to_owned(), found: version });
        }
        serde_json::from_slice(&text).map(Some).map_err(malformed)
    }

    /// Writes the journal for a new keeper. Waits for no disk.
    pub fn save(&self, path: &Path) -> Result<(), JournalError> {
        self.write(path).map_err(|source| JournalError::Io { path: path.to_owned(), source })
    }

    /// Writes a journal in advance, for a moment in which there is no time to write it.
    pub fn stage(&self, path: &Path) -> Result<Staged, JournalError> {
        let staged = Staged { staged: path.with_extension("staged"), path: path.to_owned() };
        let text = serde_json::to_vec_pretty(self).expect("a journal is plain data");
        // A file that was written in part is removed when `staged` is dropped.
        fs::write(&staged.staged, text).map_err(|source| JournalError::Io { path: path.to_owned(), source })?;
        Ok(staged)
    }

    fn write(&self, path: &Path) -> io::Result<()> {
        let text = serde_json::to_vec_pretty(self).expect("a journal is plain data");
        replace_file(path, Durability::Process, |file| file.write_all(&text))
    }
}

/// A journal that was written but does not count yet. If it is dropped, it never counts.
#[derive(Debug)]
pub struct Staged {
    staged: PathBuf,
    path: PathBuf,
}

impl Staged {
    /// Puts it in the place of the current journal. The current one is removed when `self` is dropped.
    ///
    /// The two files exchange their names where the file system supports that, which takes 14 us on ext4. A plain
    /// rename waits until the new file's blocks are allocated: 200 us to milliseconds (`auto_da_alloc`, `ext4_rename`
    /// in Linux's `fs/ext4/namei.c`).
    pub fn enact(&self) -> Result<(), JournalError> {
        renameat_with(CWD, &self.staged, CWD, &self.path, RenameFlags::EXCHANGE)
            .or_else(|_| fs::rename(&self.staged, &self.path))
            .map_err(|source| JournalError::Io { path: self.path.clone(), source })
    }
}

impl Drop for Staged {
    fn drop(&mut self) {
        // This journal, or the one that it replaced.
        let _ = fs::remove_file(&self.staged);
    }
}

/// Whether the file has no content: the host died before the content reached the disk. A keeper that dies leaves no
/// such file.
fn is_lost(text: &[u8]) -> bool {
    text.is_empty() || text.contains(&0)
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use serde_json::{Value, json};

    use super::*;

    #[test]
    fn staged_journal_counts_when_enacted() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("journal.json");
        let (first, second) = (Journal::new("web", 1), Journal { generation: 2, ..Journal::new("web", 1) });
        for _ in 0..2 {
            first.save(&path).unwrap();
            drop(second.stage(&path).unwrap());
            assert_eq!(Journal::load(&path).unwrap(), Some(first.clone()));
            second.stage(&path).unwrap().enact().unwrap();
            assert_eq!(Journal::load(&path).unwrap(), Some(second.clone()));
            fs::remove_file(&path).unwrap();
            // There is no journal to exchange names with.
            second.stage(&path).unwrap().enact().unwrap();
            assert_eq!(Journal::load(&path).unwrap(), Some(second.clone()));
        }
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 1, "nothing else is left");
    }

    #[test]
    fn a_journal_reads_back_as_written() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("journal.json");
        assert_eq!(Journal::load(&path).unwrap(), None);
        let mut journal = Journal::new("web", 1 << 30);
        journal.ember = vec![1, 2];
        journal.write_through = vec!["root".to_owned()];
        journal.clock_debt = ClockDebt::of(Duration::from_millis(1), Duration::from_millis(3));
        journal.save(&path).unwrap();
        assert_eq!(Journal::load(&path).unwrap().as_ref(), Some(&journal));
    }

    /// `testdata/journal-1.json`: without the fields that were added later.
    #[test]
    fn first_versions_journal_is_read() {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("testdata/journal-1.json");
        let qemu = |pid, start_ticks, generation, version: &str| QemuIdentity {
            pid,
            start_ticks,
            generation,
            version: version.into(),
            accelerator: "tcg".into(),
            accelerator_why: "/dev/kvm does not exist".into(),
            userfault_fd: None,
            helper_fd: None,
            stale: false,
            at_start: None,
            vmgenid: None,
            guest_agent: false,
        };
        let (name, format) = ("root".into(), "raw".into());
        let expect = Journal {
            incarnation: 3,
            generation: 5,
            ember: vec![2],
            dumps: vec![DumpNote { incarnation: 2, file: Some("/var/lib/hearth/dumps/web-2.vmcore".into()) }],
            qemu: Some(QemuIdentity { userfault_fd: Some(3), stale: true, ..qemu(4712, 81_234, 4, "7.2.9") }),
            hop: Some(HopNote { successor: qemu(4801, 99_310, 5, "10.0.2"), committed: true }),
            disks: vec![DiskIdentity { name, path: "/var/lib/hearth/web.img".into(), format, read_only: false }],
            machine_type: Some(EARLIER_MACHINE_TYPE.to_owned()),
            ..Journal::new("web", 1 << 30)
        };
        assert_eq!(Journal::load(&path).unwrap(), Some(expect));
    }

    /// Each combination of the fields that earlier keepers wrote, as JSON: paused, dump file, scanning, memory folder.
    fn guest_fields() -> Vec<(bool, bool, bool, bool, Value)> {
        (0..16)
            .map(|bits| {
                let [saving, dump, scanning, parked] = [8, 4, 2, 1].map(|bit| bits & bit > 0);
                let mut fields = json!({ "saving": saving, "scanning": scanning });
                let (dump_file, memory) = (dump.then_some("/dumps/web.vmcore"), parked.then_some("/dev/shm/web"));
                dump_file.into_iter().for_each(|file| fields["dump_holds"] = file.into());
                memory.into_iter().for_each(|folder| fields["parked_in"] = folder.into());
                (saving, dump, scanning, parked, fields)
            })
            .collect()
    }

    #[test]
    fn every_combination_of_guest_fields_has_one_meaning() {
        let (file, folder) = (PathBuf::from("/dumps/web.vmcore"), PathBuf::from("/dev/shm/web"));
        let mut written = Vec::new();
        for (saving, dump, scanning, parked, fields) in guest_fields() {
            let expect = match (saving, dump, scanning, parked) {
                (true, _, _, true) => GuestNote::Parking { folder: folder.clone() },
                (false, _, _, true) => GuestNote::Parked { folder: folder.clone() },
                (true, true, _, false) => GuestNote::PausedForDump { file: file.clone() },
                (true, false, _, false) => GuestNote::Paused,
                (false, _, true, false) => GuestNote::Scanned,
                (false, _, false, false) => GuestNote::Runs,
            };
            let note: GuestNote = serde_json::from_value(fields.clone()).unwrap();
            assert_eq!(note, expect, "{fields}");
            if serde_json::to_value(&note).unwrap() == fields {
                written.push(note.clone());
            }
            // A note means the same to every reader.
            let again: GuestNote = serde_json::from_value(serde_json::to_value(&note).unwrap()).unwrap();
            assert_eq!(again, note);
        }
        let six = [
            GuestNote::Runs,
            GuestNote::Parked { folder: folder.clone() },
            GuestNote::Scanned,
            GuestNote::Paused,
            GuestNote::Parking { folder },
            GuestNote::PausedForDump { file },
        ];
        assert_eq!(written, six);
    }

    /// An older keeper takes over while the guest lives, after a rollback.
    #[test]
    fn guest_fields_lie_where_earlier_keepers_read_them() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("journal.json");
        let guest = GuestNote::Parking { folder: "/dev/shm/web".into() };
        Journal { guest, ..Journal::new("web", 1) }.save(&path).unwrap();
        let written: Value = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
        let fields = ["version", "saving", "scanning", "parked_in", "dump_holds"].map(|key| written[key].clone());
        assert_eq!(fields, [json!(1), json!(true), json!(false), json!("/dev/shm/web"), Value::Null]);
    }

    #[test]
    fn machine_type_outlives_the_guest() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("journal.json");
        for machine_type in [None, Some("pc-q35-10.2".to_owned())] {
            let journal = Journal { machine_type: machine_type.clone(), ..Journal::new("web", 1) };
            journal.without_guest(2).save(&path).unwrap();
            let stopped = Journal::load(&path).unwrap().unwrap();
            assert_eq!((stopped.machine_type, stopped.ram_bytes), (machine_type, 2));
        }
    }

    /// A later keeper of the same version number adds fields, but does not change their meaning.
    #[test]
    fn later_versions_journal_is_read_without_new_fields() {
        let first = Path::new(env!("CARGO_MANIFEST_DIR")).join("testdata/journal-1.json");
        let mut later: Value = serde_json::from_slice(&fs::read(&first).unwrap()).unwrap();
        for place in ["", "/qemu", "/hop", "/hop/successor", "/dumps/0", "/disks/0"] {
            let place = later.pointer_mut(place).and_then(Value::as_object_mut).unwrap();
            place.insert("future".into(), json!({ "since": 2, "what": ["nobody", "knows"] }));
        }
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("journal.json");
        fs::write(&path, later.to_string()).unwrap();
        assert_eq!(Journal::load(&path).unwrap(), Journal::load(&first).unwrap());
    }

    #[test]
    fn empty_journal_counts_as_none() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("journal.json");
        for left in ["", "\0\0\0", "{\"version\": 1, \0\0"] {
            fs::write(&path, left).unwrap();
            assert_eq!(Journal::load(&path).unwrap(), None, "{left:?}");
        }
    }

    #[test]
    fn unknown_versions_and_torn_files_are_refused() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("journal.json");
        fs::write(&path, r#"{"version": 9, "future": true}"#).unwrap();
        assert!(
            Journal::load(&path)
                .unwrap_err()
                .to_string()
                .ends_with("version 9, but this keeper knows only 1; use the keeper that wrote it")
        );
        fs::write(&path, r#"{"version": 1, "machine": "w"#).unwrap();
        assert!(Journal::load(&path).unwrap_err().to_string().contains("cannot be parsed"));
    }
}
