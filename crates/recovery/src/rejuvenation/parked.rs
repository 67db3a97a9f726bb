//! Parked: a guest whose QEMU and keeper have ended, and whose memory remains. Meanwhile the host may boot another
//! kernel.
//!
//! ```text
//! park    hold ---> state ---> sum ---> settle ---> note ------------------> leave
//!         guest     devices    RAM is   images      parked.json:             QEMU and keeper end
//!         stands    to a file  hashed   at rest     it is parked from here
//! resume  verify ----------> wake ----------> consume -----------------> go-on
//!         compare with       QEMU has RAM     parked.json is used up:    guest runs
//!         the note           and state        the point of no return
//! ```
//! ```text
//! parked.json     JSON, and a last line with its checksum: `blake3 HEX`
//! parked-state    QEMU's device state
//! ram-N ledger-N  as the guest left them
//! nvram-NAME      as the guest left it
//! ```
//! All files are in the machine's memory folder, so that what loses one loses the others. If a keeper dies before
//! `note`, the guest stands still, and the next keeper lets it continue. If one dies before `consume`, everything stays
//! as it was, and the next one begins anew. A note is good for one resume, because a guest that runs again changes RAM
//! and disks.
//!
//! The checksums cover the whole RAM and not samples: memory that lost its power for a moment comes back with a few
//! bits changed.

use std::fs::{self, File};
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use hearth_disk::image::{ImageFile, ImageNote};
use hearth_memory::{Durability, MemoryError, RamFile, replace_file};
use hearth_qemu::EARLIER_MACHINE_TYPE;
use serde::{Deserialize, Serialize};

use super::clock::{self, Ticker};
use crate::images::{self, DiskNote};
use crate::journal::DiskIdentity;
use crate::snapshot::{Part, SnapshotError, seal};

mod sums;

pub use sums::ChunkSums;

/// Raised when a field changes its meaning.
pub const PARKED_VERSION: u32 = 1;
/// Prefix of a parked guest's files, other than its memory.
pub const FILE_PREFIX: &str = "parked";
const NOTE: &str = "parked.json";
const STATE: &str = "parked-state";
const USED: &str = "parked.used";
/// Maximum size of a note. With all the disks that a machine can have it takes some KiB.
const NOTE_BYTES_MAX: u64 = 1 << 20;

/// Time from setting the clock to the guest's next instruction.
const GO_ON_ALLOWANCE: Duration = Duration::from_millis(15);

/// Steps of parking, in order; the same words in events, errors and drills.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ParkPhase {
    /// The guest is paused.
    Hold,
    /// QEMU writes the state of its devices to a file.
    State,
    /// Memory and NVRAM get checksums.
    Sum,
    /// The images are closed, and noted as they are.
    Settle,
    /// The note of the parked guest is written.
    Note,
    /// QEMU is ended, and memory and NVRAM stay.
    Leave,
}

impl ParkPhase {
    /// All phases, in order.
    pub const ALL: [Self; 6] = [Self::Hold, Self::State, Self::Sum, Self::Settle, Self::Note, Self::Leave];

    /// Name of the phase in events, errors and drills.
    pub fn name(self) -> &'static str {
        match self {
            Self::Hold => "hold",
            Self::State => "state",
            Self::Sum => "sum",
            Self::Settle => "settle-images",
            Self::Note => "note",
            Self::Leave => "leave",
        }
    }
}

/// Steps of resuming, in order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ResumePhase {
    /// The note, memory, NVRAM and images are compared with their checksums and notes.
    Verify,
    /// A new QEMU loads the state of the devices.
    Wake,
    /// The note is marked as used: the guest can resume only once.
    Consume,
    /// The guest continues.
    GoOn,
}

impl ResumePhase {
    /// All phases, in order.
    pub const ALL: [Self; 4] = [Self::Verify, Self::Wake, Self::Consume, Self::GoOn];

    /// Name of the phase in events, errors and drills.
    pub fn name(self) -> &'static str {
        match self {
            Self::Verify => "verify",
            Self::Wake => "wake",
            Self::Consume => "consume",
            Self::GoOn => "go-on",
        }
    }
}

/// Why a guest could not be parked or resumed.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "each variant's message describes it")]
pub enum ParkedError {
    #[error(transparent)]
    File(#[from] SnapshotError),
    #[error("{path}: has version {found}, but this Hearth knows only {PARKED_VERSION}")]
    Version { path: PathBuf, found: u32 },
    #[error(transparent)]
    Memory(#[from] MemoryError),
    #[error("{path}: is not the memory that the guest left: its checksum differs")]
    Altered { path: PathBuf },
    #[error("{path}: is not what the guest left in its NVRAM")]
    AlteredNvram { path: PathBuf },
    #[error("{path}: is not the memory that the guest left: it has {found} bytes, and had {noted}")]
    Cut { path: PathBuf, found: u64, noted: u64 },
    #[error(
        "the machine's configuration has changed since its guest was parked: {what}; restore it, or remove {NOTE} from its \
         memory folder to boot it"
    )]
    OtherMachine { what: String },
    #[error("the images have changed since the guest was parked: {what}")]
    Images { what: String },
    #[error("the images cannot be examined")]
    Look(#[source] io::Error),
    #[error("another process writes to {path}, or the host's clock was set back")]
    Busy { path: PathBuf },
    #[error("its memory is lost: {folder} has none of it; the host lost power, or the file system is not mounted")]
    Gone { folder: PathBuf },
    #[error("it was given up: {NOTE} was removed from {folder}")]
    GivenUp { folder: PathBuf },
}

/// Note of a parked guest: the facts that its resume needs, and that must not have changed.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Parked {
    /// Version of the note's format.
    pub version: u32,
    /// Name of the machine.
    pub machine: String,
    /// Time of the guest's last instruction.
    pub stopped_at: SystemTime,
    /// Boot ID of the host's kernel then. It distinguishes a resume after a reload from a drill.
    pub boot_id: String,
    /// Version of the QEMU that ran the guest.
    pub qemu_version: String,
    /// `kvm` or `tcg`.
    pub accelerator: String,
    /// Number of the incarnation.
    pub incarnation: u32,
    /// Generation of its QEMU.
    pub generation: u32,
    /// Other hardware that the guest has seen, in words. QEMU itself would not notice a missing processor.
    pub hardware: Vec<String>,
    /// Size of the guest's RAM.
    pub ram_bytes: u64,
    /// Checksum of the RAM file.
    pub ram_sum: String,
    /// Disks that are host memory, in the order of the configuration.
    #[serde(default)]
    pub nvram: Vec<NvramNote>,
    /// Length and checksum of the devices' state.
    pub state: Part,
    /// VM generation ID that the guest was given and must find again; `None` if its QEMU had no such device.
    #[serde(default)]
    pub vmgenid: Option<String>,
    /// Whether its QEMU had a channel to a guest agent.
    #[serde(default)]
    pub guest_agent: bool,
    /// The configuration that the guest was started with, as in the journal. `None` if an earlier keeper parked the
    /// guest.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub started_with: Option<String>,
    /// Disks whose write cache the guest has switched off.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub write_through: Vec<String>,
    /// Whether its file systems may be frozen, for a save whose thaw was not seen.
    #[serde(default)]
    pub frozen: bool,
    /// The disks that the guest was started with, in order.
    pub disks: Vec<DiskIdentity>,
    /// The images' files as they were when the guest was parked.
    pub images: Vec<ImageNote>,
}

/// Checksum of an NVRAM device.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct NvramNote {
    /// Path of the file.
    pub file: PathBuf,
    /// Its checksum.
    pub sum: String,
}

/// Whether there is a note of a parked guest. `find` also checks it.
pub fn is_there(folder: &Path) -> bool {
    folder.join(NOTE).exists()
}

/// Reads the note; `None` if no guest is parked here.
pub fn find(folder: &Path) -> Result<Option<Parked>, ParkedError> {
    let path = folder.join(NOTE);
    match read_note(&path) {
        Ok(text) => Parked::parse(&text, &path).map(Some),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        // It is no longer text.
        Err(error) if error.kind() == io::ErrorKind::InvalidData => {
            Err(SnapshotError::damaged(&path, error.to_string()).into())
        }
        Err(error) => Err(SnapshotError::io(&path, "read")(error).into()),
    }
}

/// Why a guest that was parked in `left_in` is not found in the machine's memory folder `folder`.
pub fn why_not_in(left_in: &Path, folder: &Path) -> ParkedError {
    if left_in != folder && is_there(left_in) {
        let what = format!("its memory folder is {}, and was {}", folder.display(), left_in.display());
        return ParkedError::OtherMachine { what };
    }
    let folder = left_in.to_owned();
    if folder.join(STATE).exists() { ParkedError::GivenUp { folder } } else { ParkedError::Gone { folder } }
}

fn read_note(path: &Path) -> io::Result<String> {
    let mut text = String::new();
    io::Read::read_to_string(&mut io::Read::take(File::open(path)?, NOTE_BYTES_MAX), &mut text)?;
    Ok(text)
}

/// Writes the device state of a guest that is about to be parked.
pub fn write_state(folder: &Path, state: &[u8]) -> Result<Part, ParkedError> {
    Ok(crate::snapshot::write_part(&folder.join(STATE), state)?)
}

/// Removes all files except the memory itself, if they exist.
pub fn discard(folder: &Path) {
    for name in [NOTE, STATE, USED] {
        let path = folder.join(name);
        match fs::remove_file(&path) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => {
                tracing::warn!(path = %path.display(), %error, "left behind: cannot be removed");
            }
            _ => {}
        }
    }
}

/// Notes of the image files at rest, when nobody writes to them any more. A block device is not noted, because nobody
/// can tell whether it was written to.
pub fn note_images(files: &[PathBuf]) -> Result<Vec<ImageNote>, ParkedError> {
    let mut notes = Vec::new();
    for path in regular(files) {
        let file = ImageFile::of(&path).map_err(ParkedError::Look)?;
        let rest = images::at_rest(&[DiskNote::of_open("", vec![file])]).remove(0).rest;
        notes.extend(rest.ok_or(ParkedError::Busy { path })?);
    }
    Ok(notes)
}

/// All files that are no block devices. A missing file stays in the list, so that it is reported.
fn regular(files: &[PathBuf]) -> Vec<PathBuf> {
    files.iter().filter(|file| !fs::metadata(file).is_ok_and(|found| is_device(&found))).cloned().collect()
}

/// Earlier keepers noted no machine type where machine.toml named none, and always used the same one.
fn without_default(words: &str) -> String {
    match words {
        "machine_type default" => format!("machine_type {EARLIER_MACHINE_TYPE}"),
        words => words.to_owned(),
    }
}

fn is_device(found: &fs::Metadata) -> bool {
    std::os::unix::fs::FileTypeExt::is_block_device(&found.file_type())
}

impl Parked {
    /// Writes the note: from here on the guest is parked.
    pub fn commit(&self, folder: &Path) -> Result<(), ParkedError> {
        // RAM, ledger and state are synced first, with their names: on a DAX file system also out of the processors'
        // caches.
        let synced = File::open(folder).and_then(|folder| Ok(rustix::fs::syncfs(folder)?));
        synced.map_err(SnapshotError::io(folder, "written"))?;
        let (path, text) = (folder.join(NOTE), self.to_text());
        let written = replace_file(&path, Durability::PowerCut, |file| file.write_all(text.as_bytes()));
        Ok(written.map_err(SnapshotError::io(&path, "written"))?)
    }

    /// Uses up the note: from here on nobody resumes from it again.
    pub fn consume(folder: &Path) -> Result<(), ParkedError> {
        let path = folder.join(NOTE);
        fs::rename(&path, folder.join(USED)).map_err(SnapshotError::io(&path, "used up"))?;
        Ok(crate::snapshot::sync_folder(folder)?)
    }

    /// Fails unless this machine could have left the guest.
    pub fn must_be_of(
        &self,
        machine: &str,
        ram_bytes: u64,
        disks: &[DiskIdentity],
        hardware: &[String],
    ) -> Result<(), ParkedError> {
        let other = |what: String| Err(ParkedError::OtherMachine { what });
        if self.machine != machine {
            return other(format!("it is {machine}, and was {}", self.machine));
        }
        if self.ram_bytes != ram_bytes {
            return other(format!("it has {ram_bytes} bytes of memory, and had {}", self.ram_bytes));
        }
        if self.disks != disks {
            return other("its disks are not those that the guest has".to_owned());
        }
        let had: Vec<String> = self.hardware.iter().map(|words| without_default(words)).collect();
        if had != hardware {
            let new = hardware.iter().find(|words| !had.contains(words));
            let gone = had.iter().find(|words| !hardware.contains(words));
            let words = |words: Option<&String>| words.cloned().unwrap_or_else(|| "nothing".to_owned());
            return other(format!("it has {}, and had {}", words(new), words(gone)));
        }
        Ok(())
    }

    /// Fails if an image has changed. `images` are those that the configuration names. Their backing images were noted
    /// as well.
    pub fn must_find_images(&self, images: &[PathBuf]) -> Result<(), ParkedError> {
        let changed = |path: &Path| Err(ParkedError::Images { what: format!("{} was changed since", path.display()) });
        for noted in &self.images {
            match ImageNote::of(&noted.path).map_err(ParkedError::Look)? {
                Some(found) if noted.is_still(&found) => {}
                _ => return changed(&noted.path),
            }
        }
        let is_noted = |path: &PathBuf| self.images.iter().any(|noted| noted.path == *path);
        match regular(images).iter().find(|path| !is_noted(path)) {
            // A file in the place of a block device.
            Some(other) => changed(other),
            None => Ok(()),
        }
    }

    /// Fails unless `sums`, which cover all chunks, match the note.
    pub fn must_match(&self, ram: &RamFile, sums: &ChunkSums) -> Result<(), ParkedError> {
        if sums.seal() == self.ram_sum { Ok(()) } else { Err(ParkedError::Altered { path: ram.path().to_owned() }) }
    }

    /// Fails unless `found`, the NVRAM devices as they are now, match the note.
    pub fn must_find_nvram(&self, found: &[NvramNote]) -> Result<(), ParkedError> {
        match found.iter().find(|device| !self.nvram.contains(device)) {
            Some(other) => Err(ParkedError::AlteredNvram { path: other.file.clone() }),
            None => Ok(()),
        }
    }

    /// Fails unless the RAM file has the noted size. This is checked before its bytes are read.
    pub fn must_have_size(&self, ram: &RamFile) -> Result<(), ParkedError> {
        let (found, noted) = (ram.bytes(), self.ram_bytes);
        if found == noted { Ok(()) } else { Err(ParkedError::Cut { path: ram.path().to_owned(), found, noted }) }
    }

    /// Reads the device state.
    pub fn state(&self, folder: &Path) -> Result<Vec<u8>, ParkedError> {
        Ok(crate::snapshot::read_part(&folder.join(STATE), &self.state, crate::snapshot::STATE_BYTES_MAX)?)
    }

    /// Sets the guest's clock in its device state to the time that it would show now. Returns by how much; `None` if
    /// the clock is not found there. `ticker` is `None` under KVM.
    pub fn set_clock(&self, state: &mut [u8], ticker: Option<Ticker>) -> Option<Duration> {
        let by = self.stands_for() + GO_ON_ALLOWANCE;
        let is_set = match ticker {
            Some(_) => clock::advance(state, by, ticker),
            None => clock::advance_kvm(state, by),
        };
        is_set.then_some(by)
    }

    /// How long the guest has stood still by now.
    pub fn stands_for(&self) -> Duration {
        SystemTime::now().duration_since(self.stopped_at).unwrap_or_default()
    }

    fn to_text(&self) -> String {
        seal::close(serde_json::to_string_pretty(self).expect("a note is plain data"))
    }

    fn parse(text: &str, path: &Path) -> Result<Self, ParkedError> {
        let damaged = |what: &str| ParkedError::from(SnapshotError::damaged(path, what));
        let body = seal::open(text).map_err(damaged)?;
        // Only this field is understood in a note of another version.
        #[derive(Deserialize)]
        struct Version {
            version: u32,
        }
        let Version { version } = serde_json::from_str(body).map_err(|error| damaged(&error.to_string()))?;
        if version != PARKED_VERSION {
            return Err(ParkedError::Version { path: path.to_owned(), found: version });
        }
        serde_json::from_str(body).map_err(|error| damaged(&error.to_string()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parked() -> Parked {
        Parked {
            version: PARKED_VERSION,
            machine: "web".into(),
            stopped_at: SystemTime::UNIX_EPOCH + Duration::from_millis(1_772_366_400_123),
            boot_id: "7c1d8a7e-0000-4000-8000-000000000001".into(),
            qemu_version: "7.2.9".into(),
            accelerator: "tcg".into(),
            hardware: vec!["1 cpus".into()],
            incarnation: 3,
            generation: 5,
            ram_bytes: 64 << 20,
            ram_sum: "00".into(),
            nvram: vec![NvramNote { file: "/dev/shm/web/nvram-log".into(), sum: "22".into() }],
            state: Part { bytes: 3, blake3: "11".into() },
            vmgenid: None,
            guest_agent: true,
            started_with: None,
            write_through: vec!["root".into()],
            frozen: false,
            disks: vec![DiskIdentity {
                name: "root".into(),
                path: "/a".into(),
                format: "raw".into(),
                read_only: false,
            }],
            images: Vec::new(),
        }
    }

    #[test]
    fn note_reads_back_and_is_good_once() {
        let folder = tempfile::tempdir().unwrap();
        assert_eq!(find(folder.path()).unwrap(), None);
        parked().commit(folder.path()).unwrap();
        assert_eq!(find(folder.path()).unwrap(), Some(parked()));
        Parked::consume(folder.path()).unwrap();
        assert_eq!(find(folder.path()).unwrap(), None);
        assert!(Parked::consume(folder.path()).is_err(), "it is used up");
        discard(folder.path());
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 0);
    }

    #[test]
    fn torn_or_altered_note_is_refused_by_name() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join(NOTE);
        let text = parked().to_text().into_bytes();
        let refused = |bytes: &[u8]| {
            fs::write(&path, bytes).unwrap();
            let error = find(folder.path()).unwrap_err().to_string();
            assert!(error.starts_with(&path.display().to_string()), "{error}");
        };
        (0..text.len()).for_each(|length| refused(&text[..length]));
        for at in 0..text.len() {
            for bit in [0x01, 0x10, 0x80] {
                let mut altered = text.clone();
                altered[at] ^= bit;
                refused(&altered);
            }
        }
        fs::write(&path, &text).unwrap();
        assert_eq!(find(folder.path()).unwrap(), Some(parked()));
    }

    #[test]
    fn other_version_of_note_is_named() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join(NOTE);
        fs::write(&path, seal::close(r#"{"version": 9, "future": true}"#.to_owned())).unwrap();
        let error = find(folder.path()).unwrap_err().to_string();
        assert!(error.ends_with("version 9, but this Hearth knows only 1"), "{error}");
    }

    #[test]
    fn other_machine_cannot_resume_the_guest() {
        let (parked, disks) = (parked(), parked().disks);
        let hardware = ["1 cpus".to_owned()];
        let refusal = |machine: &str, ram_bytes: u64, disks: &[DiskIdentity]| {
            parked.must_be_of(machine, ram_bytes, disks, &hardware).unwrap_err().to_string()
        };
        parked.must_be_of("web", 64 << 20, &disks, &hardware).unwrap();
        let more = ["2 cpus".to_owned(), "a watchdog".to_owned()];
        let error = parked.must_be_of("web", 64 << 20, &disks, &more).unwrap_err().to_string();
        assert!(error.contains("it has 2 cpus, and had 1 cpus"), "{error}");
        let noted_by_earlier_keeper = Parked { hardware: vec!["machine_type default".into()], ..parked.clone() };
        let same = ["machine_type pc-q35-7.2".to_owned()];
        noted_by_earlier_keeper.must_be_of("web", 64 << 20, &disks, &same).unwrap();
        assert!(refusal("db", 64 << 20, &disks).contains("it is db, and was web"));
        assert!(refusal("web", 32 << 20, &disks).contains("it has 33554432 bytes of memory, and had 67108864"));
        assert!(refusal("web", 64 << 20, &[]).contains("its disks are not those that the guest has"));
    }

    #[test]
    fn altered_state_is_refused() {
        let folder = tempfile::tempdir().unwrap();
        let state = write_state(folder.path(), b"devices").unwrap();
        let parked = Parked { state, ..parked() };
        assert_eq!(parked.state(folder.path()).unwrap(), b"devices");
        fs::write(folder.path().join(STATE), b"devicez").unwrap();
        let error = parked.state(folder.path()).unwrap_err().to_string();
        assert!(error.contains("its checksum is wrong"), "{error}");
    }

    #[test]
    fn changed_or_missing_image_is_refused() {
        let folder = tempfile::tempdir().unwrap();
        let images = [folder.path().join("root.img")];
        fs::write(&images[0], [1; 4096]).unwrap();
        let parked = Parked { images: note_images(&images).unwrap(), ..parked() };
        parked.must_find_images(&images).unwrap();
        fs::write(&images[0], [1; 4096]).unwrap();
        let error = parked.must_find_images(&images).unwrap_err().to_string();
        assert!(error.ends_with("root.img was changed since"), "{error}");
        fs::remove_file(&images[0]).unwrap();
        // Its file system may still be mounted later.
        assert!(matches!(parked.must_find_images(&images), Err(ParkedError::Look(_))));
    }

    #[test]
    fn altered_nvram_is_refused_by_its_file() {
        let parked = parked();
        parked.must_find_nvram(&parked.nvram).unwrap();
        let other = NvramNote { sum: "23".into(), ..parked.nvram[0].clone() };
        let error = parked.must_find_nvram(&[other]).unwrap_err().to_string();
        assert_eq!(error, "/dev/shm/web/nvram-log: is not what the guest left in its NVRAM");
    }

    #[test]
    fn phase_names_are_all_different() {
        let park = ParkPhase::ALL.map(ParkPhase::name);
        let resume = ResumePhase::ALL.map(ResumePhase::name);
        let hop = super::super::Phase::ALL.map(super::super::Phase::name);
        let all: std::collections::BTreeSet<_> = park.into_iter().chain(resume).chain(hop).collect();
        assert_eq!(all.len(), park.len() + resume.len() + hop.len(), "a drill means one of them");
    }
}
