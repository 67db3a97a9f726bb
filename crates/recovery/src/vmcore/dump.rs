//! Dump: a vmcore that is being written.
//!
//! create -> chunks -> pack (any threads) -> write (one) -> .. -> finish
//! resume -> the chunks that are left -> ..
//!
//! The caller owns the threads and the memory. It packs chunks wherever it likes, passes them to one writer in any
//! order, and may release the pages that `write` returns. Until `finish` the file is called NAME.incomplete and is
//! marked as incomplete. It can be opened all the same, and its missing pages are told apart from those that are there.
//! A writer that is killed at any moment leaves a file that tells what is missing: a page counts as written only once
//! its data was.
//!
//! The point of no return is the first release by the caller. From then on the file holds what memory no longer does,
//! so it is resumed or given up, but never begun anew.

use std::fs::File;
use std::io;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use rustix::fs::{CWD, RenameFlags, renameat_with};
use rustix::io::Errno;

use super::bitmap::Bitmap;
use super::chunk::{self, Chunk, Packed, PackedPage, Packer};
use super::compress::Compression;
use super::elf::{ElfError, ElfWriter};
use super::kdump::{KdumpError, KdumpWriter};
use super::level::DumpLevel;
use super::linux::Utsname;
use super::notes::Notes;
use super::storage::{DumpFile, Storage};

/// Suffix of the name of an unfinished file.
const SUFFIX: &str = ".incomplete";

/// Contents of a dump.
#[derive(Clone, Debug)]
pub struct Plan {
    /// Page frames that are RAM.
    pub ranges: Vec<Range<u64>>,
    /// Page frames of RAM that the dump keeps. Pages of zeroes among them take no space.
    pub kept: Bitmap,
    /// Level that decided which pages are kept.
    pub level: DumpLevel,
    /// Registers and VMCOREINFO.
    pub notes: Notes,
    /// Fields that are empty are written as "(none)".
    pub utsname: Utsname,
}

/// File format of a dump.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Format {
    /// kdump-compressed, as makedumpfile writes it.
    Kdump(Compression),
    /// ELF core, uncompressed.
    Elf,
}

impl Format {
    /// Name of the format.
    pub fn name(self) -> &'static str {
        match self {
            Self::Kdump(_) => "kdump",
            Self::Elf => "elf",
        }
    }
}

/// Operations that differ between the two formats.
pub(super) trait FormatWriter: Send {
    /// Writes the data first, and then what makes it part of the file.
    fn write(&mut self, storage: &mut dyn Storage, packed: &Packed) -> io::Result<()>;

    /// Syncs everything. Removes the incomplete mark if no page is missing.
    fn seal(&mut self, storage: &mut dyn Storage, complete: bool) -> io::Result<()>;
}

/// State of an unfinished dump, as read from its file.
pub(super) struct Resumed {
    pub kept: Bitmap,
    pub written: Bitmap,
    /// `None` for ELF.
    pub compression: Option<Compression>,
    pub complete: bool,
}

/// A vmcore that is being written; see the module head.
pub struct Dump {
    /// Path of the finished file.
    path: PathBuf,
    storage: Box<dyn Storage>,
    form: Box<dyn FormatWriter>,
    format: Format,
    kept: Arc<Bitmap>,
    /// Pages that were written before this `Dump` began. Chunks leave them alone.
    before: Arc<Bitmap>,
    written: Bitmap,
    lost: u64,
}

/// Result of one `write`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Written {
    /// Pages that are in the file from now on, ascending. Their memory may be released.
    pub pages: Vec<Range<u64>>,
    /// Number of these pages.
    pub page_count: u64,
    /// Number of these pages that were zero and took no space.
    pub zero: u64,
    /// Number of pages that could not be read. They stay missing.
    pub lost: u64,
    /// Bytes of data written to the file.
    pub bytes: u64,
}

/// Result of a finished dump.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Finished {
    /// Path of the file.
    pub path: PathBuf,
    /// Length of the file.
    pub file_bytes: u64,
    /// Number of pages that could not be read. If there are any, the file stays marked as incomplete.
    pub lost: u64,
}

/// Why a dump could not be written or resumed.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "each variant's message describes it")]
pub enum DumpError {
    #[error("{path}: exists already; move it away or choose another name")]
    Exists { path: PathBuf },
    #[error("{path}: cannot be {what}")]
    Io { path: PathBuf, what: &'static str, source: io::Error },
    #[error("{path}: is not an unfinished dump")]
    NotOurs { path: PathBuf },
    #[error("{path}: cannot be resumed")]
    Kdump { path: PathBuf, source: KdumpError },
    #[error("{path}: cannot be resumed")]
    Elf { path: PathBuf, source: ElfError },
    #[error("{path}: {left} pages are not written yet")]
    Unfinished { path: PathBuf, left: u64 },
}

impl DumpError {
    /// Whether space for the file is all that is missing.
    pub fn is_disk_full(&self) -> bool {
        let Self::Io { source, .. } = self else { return false };
        matches!(source.kind(), io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded | io::ErrorKind::FileTooLarge)
    }
}

impl Dump {
    /// Begins a dump that will be called `path`; until it is finished it is `incomplete_path(path)`. Refuses to replace
    /// either.
    pub fn create(path: &Path, plan: Plan, format: Format) -> Result<Self, DumpError> {
        let incomplete = incomplete_path(path);
        if path.exists() {
            return Err(DumpError::Exists { path: path.to_owned() });
        }
        let storage = DumpFile::create(&incomplete).map_err(|source| match source.kind() {
            io::ErrorKind::AlreadyExists => DumpError::Exists { path: incomplete.clone() },
            _ => DumpError::Io { path: incomplete.clone(), what: "created", source },
        })?;
        Self::begin(path, Box::new(storage), plan, format).inspect_err(|_| {
            // Nothing is in it yet. If it cannot be removed, its missing header distinguishes it from a dump.
            let _ = std::fs::remove_file(&incomplete);
        })
    }

    pub(super) fn begin(
        path: &Path,
        mut storage: Box<dyn Storage>,
        plan: Plan,
        format: Format,
    ) -> Result<Self, DumpError> {
        let begun: io::Result<Box<dyn FormatWriter>> = match format {
            Format::Kdump(compression) => {
                KdumpWriter::begin(&plan, compression, &mut *storage).map(|form| Box::new(form) as _)
            }
            Format::Elf => ElfWriter::begin(&plan, &mut *storage).map(|form| Box::new(form) as _),
        };
        let form = begun.map_err(|source| DumpError::Io { path: incomplete_path(path), what: "begun", source })?;
        let written = Bitmap::new(plan.kept.pages());
        let before = Arc::new(written.clone());
        Ok(Self { path: path.to_owned(), storage, form, format, kept: Arc::new(plan.kept), before, written, lost: 0 })
    }

    /// Continues an unfinished dump, given by its final path. Pages that are not certainly in the file are written
    /// again.
    pub fn resume(path: &Path) -> Result<Self, DumpError> {
        let incomplete = incomplete_path(path);
        let storage =
            DumpFile::open(&incomplete).map_err(|source| DumpError::Io { path: incomplete, what: "opened", source })?;
        Self::resume_in(path, Box::new(storage))
    }

    pub(super) fn resume_in(path: &Path, storage: Box<dyn Storage>) -> Result<Self, DumpError> {
        let incomplete = incomplete_path(path);
        let mut magic = [0; 4];
        storage.read_exact_at(&mut magic, 0).map_err(|_| DumpError::NotOurs { path: incomplete.clone() })?;
        let (form, resumed): (Box<dyn FormatWriter>, Resumed) = match &magic {
            b"\x7fELF" => match ElfWriter::resume(&*storage) {
                Ok((form, resumed)) => (Box::new(form), resumed),
                Err(source) => return Err(DumpError::Elf { path: incomplete, source }),
            },
            b"KDUM" => match KdumpWriter::resume(&*storage) {
                Ok((form, resumed)) => (Box::new(form), resumed),
                Err(source) => return Err(DumpError::Kdump { path: incomplete, source }),
            },
            _ => return Err(DumpError::NotOurs { path: incomplete }),
        };
        let Resumed { kept, written, compression, complete } = resumed;
        // A writer that was killed between the last two steps of `finish` left everything except the name.
        if complete && written != kept {
            return Err(DumpError::NotOurs { path: incomplete });
        }
        let format = compression.map_or(Format::Elf, Format::Kdump);
        let (kept, before) = (Arc::new(kept), Arc::new(written.clone()));
        Ok(Self { path: path.to_owned(), storage, form, format, kept, before, written, lost: 0 })
    }

    /// Chunks that are left to write, ascending. Each has at most as many pages as fit `chunk_bytes` (2 MiB at least).
    /// So a packed chunk needs no more memory than that and a page.
    pub fn chunks(&self, chunk_bytes: u64) -> Vec<Chunk> {
        chunk::chunks(&self.kept, &self.written, chunk_bytes)
    }

    /// A packer for this dump's chunks. Each thread needs its own.
    pub fn packer(&self) -> Packer {
        let compression = match self.format {
            Format::Kdump(compression) => Some(compression),
            Format::Elf => None,
        };
        Packer::new(self.kept.clone(), self.before.clone(), compression)
    }

    /// Writes a chunk to the file. After an error, such as a full disk, nothing of it counts as written, and it may be
    /// tried again.
    pub fn write(&mut self, packed: &Packed) -> Result<Written, DumpError> {
        self.form.write(&mut *self.storage, packed).map_err(|source| self.io("written", source))?;
        let mut done = Written { bytes: packed.bytes(), ..Written::default() };
        for (pfn, page) in self.kept.iter_in(packed.chunk.pfns.clone()).zip(&packed.pages) {
            match page {
                PackedPage::Before => continue,
                PackedPage::Lost => {
                    done.lost += 1;
                    continue;
                }
                PackedPage::Zero => done.zero += 1,
                PackedPage::Data { .. } => {}
            }
            self.written.set(pfn);
            done.page_count += 1;
            match done.pages.last_mut() {
                Some(run) if run.end == pfn => run.end += 1,
                _ => done.pages.push(pfn..pfn + 1),
            }
        }
        self.lost += done.lost;
        Ok(done)
    }

    /// Syncs the dump and gives it its final name.
    pub fn finish(mut self) -> Result<Finished, DumpError> {
        let left = self.kept.count() - self.written.count() - self.lost;
        if left > 0 {
            return Err(DumpError::Unfinished { path: self.path, left });
        }
        self.form.seal(&mut *self.storage, self.lost == 0).map_err(|source| self.io("finished", source))?;
        let file_bytes = self.storage.file_bytes().map_err(|source| self.io("finished", source))?;
        give_name(&self.path).map_err(|source| self.io("renamed", source))?;
        Ok(Finished { path: self.path, file_bytes, lost: self.lost })
    }

    /// Format of the file.
    pub fn format(&self) -> Format {
        self.format
    }

    /// All pages that the dump keeps.
    pub fn kept(&self) -> &Bitmap {
        &self.kept
    }

    /// Pages that are in the file. After `resume` their memory may be released at once.
    pub fn written(&self) -> &Bitmap {
        &self.written
    }

    /// Path of the unfinished file.
    pub fn incomplete_path(&self) -> PathBuf {
        incomplete_path(&self.path)
    }

    fn io(&self, what: &'static str, source: io::Error) -> DumpError {
        DumpError::Io { path: self.incomplete_path(), what, source }
    }
}

/// Path of a dump until it is finished.
pub fn incomplete_path(path: &Path) -> PathBuf {
    let mut name = path.as_os_str().to_owned();
    name.push(SUFFIX);
    name.into()
}

fn give_name(path: &Path) -> io::Result<()> {
    let incomplete = incomplete_path(path);
    match renameat_with(CWD, &incomplete, CWD, path, RenameFlags::NOREPLACE) {
        // The file system cannot refuse to replace a file. `create` has checked that there is none.
        Err(Errno::INVAL | Errno::NOSYS) => std::fs::rename(&incomplete, path)?,
        done => done?,
    }
    let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
    File::open(folder)?.sync_all()
}
