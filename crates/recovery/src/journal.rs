//! Journal: what a new keeper must know to carry on, in one small file of the runtime folder.
//!
//! Written whole at every change (temporary file, rename), so that a keeper killed at any moment leaves either the old or
//! the new one. It names facts that outlive a keeper (QEMU's process, the incarnation's files); whatever can be read from
//! the files themselves is not repeated here.
//!
//! These facts end with the host, so a change is not synced: the guest that is to start would wait for the disk, and with
//! it for all that a dump has written there. A host that dies may leave a file without its content, which then tells of
//! nothing.

use std::fs;
use std::io::{self, Write};
use std::path::{Path, PathBuf};

use hearth_memory::{Lasting, replace_file};
use hearth_qemu::EARLIER_MACHINE_TYPE;
use rustix::fs::{CWD, RenameFlags, renameat_with};
use serde::{Deserialize, Serialize};

use crate::lazy_restore::Mode;
use crate::rejuvenation::ClockDebt;

/// Raised when a field changes its meaning. A keeper refuses journals of versions it does not know.
pub const JOURNAL_VERSION: u32 = 1;

/// The journal of one machine.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Journal {
    pub version: u32,
    pub machine: String,
    pub ram_bytes: u64,
    /// The living incarnation, or the last one.
    pub incarnation: u32,
    /// Counts the QEMU processes of this machine, also those that did not come to life.
    pub generation: u32,
    /// Dead incarnations whose RAM is still kept, oldest first.
    pub ember: Vec<u32>,
    /// Dead incarnations, or a dying one, that are to be dumped.
    #[serde(default)]
    pub dumps: Vec<DumpNote>,
    /// The QEMU that runs the incarnation; none between two QEMUs.
    pub qemu: Option<QemuIdentity>,
    /// A keeper took this QEMU over and has not yet heard it at all of its disks.
    #[serde(default)]
    pub greeting: bool,
    /// A hand-over to another QEMU that had begun and was not over: see `rejuvenation`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub hop: Option<HopNote>,
    /// What the living guest's clock is off by since its last hop, in nanoseconds.
    #[serde(default)]
    pub clock_debt: ClockDebt,
    /// Disks whose write cache the living guest had switched off when it came to the QEMU that it has. QEMU does not tell the
    /// disks' next server before it has an inflight region.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub write_through: Vec<String>,
    /// What the operator ordered and the guest is about to do: the next keeper sees to it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ordered: Option<OrderNote>,
    /// Whether the guest runs, and if not, why.
    #[serde(flatten)]
    pub guest: GuestNote,
    /// The guest's file systems are, or may be, frozen by its agent for a save. Independent of `guest`: they stay frozen from
    /// before the pause until the agent thaws them.
    #[serde(default)]
    pub frozen: bool,
    /// The living incarnation comes out of a snapshot, and may not be all there yet.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub restore: Option<RestoreNote>,
    /// The machine's VM generation ID: what its next boot is told. None: it has had none yet.
    #[serde(default)]
    pub vmgenid: Option<String>,
    /// The configuration that the living guest was started with, whatever the file says today: TOML, with absolute paths.
    /// None: an earlier keeper started the guest.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub started_with: Option<String>,
    /// The machine type with which a guest of this machine last came to life: kept where the file names none. None: no guest
    /// has lived yet. Earlier keepers did not note it, and always took the same one.
    #[serde(default = "earlier_machine_type")]
    pub machine_type: Option<String>,
    /// The disks that QEMU was started with, in order: a keeper that takes over must serve the same.
    pub disks: Vec<DiskIdentity>,
}

fn earlier_machine_type() -> Option<String> {
    Some(EARLIER_MACHINE_TYPE.to_owned())
}

/// Whether the guest runs. In the file these are four fields (`GuestFields`), as the first keepers wrote them: a keeper may be
/// upgraded and rolled back above a living guest, so the older one must read this as well.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(from = "GuestFields", into = "GuestFields")]
pub enum GuestNote {
    /// The guest runs, or there is none.
    #[default]
    Runs,
    /// The guest runs while a save scans its memory. QEMU translates the guest's code anew until a keeper ends that.
    Scanned,
    /// The guest is paused for a save, or it was resumed and has not run yet. The next keeper lets it run.
    Paused,
    /// The guest is paused for a dump to this file. The dump ends with its keeper, and the next keeper lets the guest run.
    PausedForDump { file: PathBuf },
    /// The guest is paused, to be parked in this memory folder. If its QEMU lives, the next keeper lets it run. If not, the guest
    /// is parked only if the folder says so.
    Parking { folder: PathBuf },
    /// The guest was parked in this memory folder, and its QEMU ended. The next keeper expects to find it there.
    Parked { folder: PathBuf },
}

impl GuestNote {
    /// Whether this keeper's predecessor paused the guest: its QEMU, if it lives, is to let it run.
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

/// `GuestNote` in the file. Of the 16 combinations keepers write six; the others are read as the nearest of these.
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

/// An order that ends the living incarnation.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum OrderNote {
    Reboot { cold: bool },
    Stop,
}

/// A dump that a new keeper begins or goes on with.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct DumpNote {
    pub incarnation: u32,
    /// What it will be called when it is complete; none: not begun. Its format is in the file itself.
    pub file: Option<PathBuf>,
}

/// A guest on its way out of a snapshot.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RestoreNote {
    pub snapshot: PathBuf,
    /// Of its memory: another snapshot in that place is another guest. Earlier keepers did not note it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub seal: Option<String>,
    pub mode: Mode,
    /// Always true. Earlier keepers wrote the note sooner, without it: such a note names no machine and is void.
    pub begun: bool,
}

/// Two QEMUs of one guest. Whoever reads this ends one of them before anything else.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct HopNote {
    pub successor: QemuIdentity,
    /// The point of no return was passed: the guest is the successor's. Before it, it is still `Journal::qemu`'s.
    pub committed: bool,
}

/// Tells one disk from another that the configuration may name in its place.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct DiskIdentity {
    pub name: String,
    pub path: PathBuf,
    pub format: String,
    pub read_only: bool,
}

/// Tells one process from all others on this host since its boot.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct QemuIdentity {
    pub pid: u32,
    /// Field 22 of /proc/PID/stat.
    pub start_ticks: u64,
    /// QEMU generation: counts the QEMU processes of this machine.
    pub generation: u32,
    /// What `--version` said when it was started.
    pub version: String,
    pub accelerator: String,
    pub accelerator_why: String,
    /// The number of the userfaultfd in QEMU, by which a new keeper gets at it; none if QEMU has none.
    #[serde(default)]
    pub userfault_fd: Option<i32>,
    /// The same of the channel to its helper.
    #[serde(default)]
    pub helper_fd: Option<i32>,
    /// It lost its disks' server while its guest stood still, and does not see any more when that changes.
    #[serde(default)]
    pub deaf: bool,
    /// What it held for itself when it first answered; none if that could not be seen.
    #[serde(default)]
    pub at_start: Option<FootprintNote>,
    /// The VM generation ID that it tells its guest; none: it was started without that device, and so is the next one of this
    /// guest.
    #[serde(default)]
    pub vmgenid: Option<String>,
    /// It has a channel to a guest agent, and so has the next one of this guest.
    #[serde(default)]
    pub guest_agent: bool,
}

/// What a QEMU held for itself at one moment.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct FootprintNote {
    pub own_bytes: u64,
    pub descriptors: u64,
}

#[derive(Debug, thiserror::Error)]
pub enum JournalError {
    #[error("journal {path}: cannot be read or written")]
    Io { path: PathBuf, source: io::Error },
    #[error("journal {path}: not understood; move it away to start the machine afresh")]
    Malformed { path: PathBuf, source: serde_json::Error },
    #[error(
        "journal {path}: has version {found}, but this keeper knows only {JOURNAL_VERSION}; use the keeper that wrote it"
    )]
    Version { path: PathBuf, found: u32 },
}

impl Journal {
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

    /// Of the same machine, whose guest has ended or was parked.
    pub fn without_guest(&self, ram_bytes: u64) -> Self {
        Self { machine_type: self.machine_type.clone(), ..Self::new(&self.machine, ram_bytes) }
    }

    /// None if there is no journal: the machine has not run since the host started.
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

    /// For a keeper that comes after this one. Waits for no disk.
    pub fn save(&self, path: &Path) -> Result<(), JournalError> {
        self.write(path).map_err(|source| JournalError::Io { path: path.to_owned(), source })
    }

    /// Writes what is to be the journal when there is no time to write.
    pub fn stage(&self, path: &Path) -> Result<Staged, JournalError> {
        let staged = Staged { staged: path.with_extension("staged"), path: path.to_owned() };
        let text = serde_json::to_vec_pretty(self).expect("a journal is plain data");
        // What was written in part goes with what is dropped.
        fs::write(&staged.staged, text).map_err(|source| JournalError::Io { path: path.to_owned(), source })?;
        Ok(staged)
    }

    fn write(&self, path: &Path) -> io::Result<()> {
        let text = serde_json::to_vec_pretty(self).expect("a journal is plain data");
        replace_file(path, Lasting::Process, |file| file.write_all(&text))
    }
}

/// A journal that is not in force. Dropped, it never was.
#[derive(Debug)]
pub struct Staged {
    staged: PathBuf,
    path: PathBuf,
}

impl Staged {
    /// In the place of the one that is, which goes when this is dropped.
    ///
    /// They change places where the file system can do that: 14 us on ext4, where a name that is given to another file waits for
    /// that file's blocks to be found, 200 us to milliseconds (`auto_da_alloc`, `ext4_rename` in Linux's `fs/ext4/namei.c`).
    pub fn enact(&self) -> Result<(), JournalError> {
        renameat_with(CWD, &self.staged, CWD, &self.path, RenameFlags::EXCHANGE)
            .or_else(|_| fs::rename(&self.staged, &self.path))
            .map_err(|source| JournalError::Io { path: self.path.clone(), source })
    }
}

impl Drop for Staged {
    fn drop(&mut self) {
        // This one, or the one whose place it took.
        let _ = fs::remove_file(&self.staged);
    }
}

/// A name without its content: the host died before that reached the disk. A keeper that dies leaves no such file.
fn is_lost(text: &[u8]) -> bool {
    text.is_empty() || text.contains(&0)
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use serde_json::{Value, json};

    use super::*;

    #[test]
    fn a_staged_journal_counts_when_it_is_enacted() {
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
            // Nothing to change places with.
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

    /// `testdata/journal-1.json`: without the fields that came later.
    #[test]
    fn a_journal_that_the_first_version_wrote_is_understood() {
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
            deaf: false,
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
            qemu: Some(QemuIdentity { userfault_fd: Some(3), deaf: true, ..qemu(4712, 81_234, 4, "7.2.9") }),
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
            // What is written means the same to whoever reads it.
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

    /// An older keeper takes over above a living guest, after a roll-back.
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

    /// A later version of the same number adds fields, and changes no meaning.
    #[test]
    fn a_journal_that_a_later_version_wrote_is_understood_as_far_as_it_is_known() {
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
    fn what_a_dead_host_left_without_content_tells_of_nothing() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("journal.json");
        for left in ["", "\0\0\0", "{\"version\": 1, \0\0"] {
            fs::write(&path, left).unwrap();
            assert_eq!(Journal::load(&path).unwrap(), None, "{left:?}");
        }
    }

    #[test]
    fn unknown_versions_and_torn_files_are_refused_by_name() {
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
        assert!(Journal::load(&path).unwrap_err().to_string().contains("not understood"));
    }
}
