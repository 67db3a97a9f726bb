//! qcow2 images with their backing chain. The headers are read and judged here, so that an image which the format
//! library cannot serve is refused with a reason; the library (imago) then does the work inside the engine.
//!
//! header -> features -> backing image named in it -> its header ... -> each file locked -> chain of images
//!
//! A backing image must be named with its format: guessing would let a guest that once had the base as its raw disk
//! choose what file of the host it is read through.

use std::fs::File;
use std::io;
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use imago::file::File as ImageFile;
use imago::qcow2::Qcow2;
use imago::raw::Raw;
use imago::{DenyImplicitOpenGate, FormatAccess, FormatDriverBuilder, StorageOpenOptions};

use super::checkpoints::Checkpoints;
use super::frozen::{FrozenImage, Guard};
use super::guarded::{GuardedEngine, GuardedFile, Witness};
use super::header::{Geometry, Header};
use super::open::{Opened, open_file, reopen, stop_read_ahead};
use super::overlay::Mark;
use super::tables::{Change, Committer, TableLog, Tables, unit_bytes};
use super::{Format, ImageError, ImageOptions, Unwritten, access_error, check_kind, lock};
use crate::arrival::{Arrival, Arrivals};
use crate::block::SECTOR_BYTES;
use crate::buffer::BufferPool;
use crate::engine::Engine;
use crate::engine::qcow2::{Chain, Qcow2Engine};

/// Longer chains are loops, or a management program gone wrong.
const CHAIN_MAX: usize = 64;

const CONVERT: &str = "rewrite it with qemu-img convert";
const PUT_BACK: &str = "put the right one back (cp -a), or if only its time is another, give it that one (touch -d)";
const REBASE: &str = "name it with qemu-img rebase -u -b FILE -F raw (or qcow2)";

#[derive(Debug)]
pub(super) struct Qcow2Image {
    path: PathBuf,
    read_only: bool,
    /// From the top image down to the base.
    layers: Vec<Layer>,
    bytes: u64,
    has_zero_clusters: bool,
    geometry: Geometry,
    /// Where changes of tables are noted.
    log: Option<(PathBuf, Unwritten)>,
    committer: Committer,
    /// Shared with the engine while there is one.
    lease: Arc<()>,
    /// Before changes of the top image; the others are not changed.
    guard: Guard,
    checkpoints: Checkpoints,
    #[cfg(test)]
    pub tape: Option<super::tape::Tape>,
}

#[derive(Debug)]
struct Layer {
    path: PathBuf,
    format: Format,
    file: File,
    /// As in `Opened`.
    alignment: u64,
    cache: String,
    /// While its bytes are on their way.
    arrival: Option<Arc<Arrival>>,
    /// None: it is raw.
    geometry: Option<Geometry>,
}

impl Qcow2Image {
    pub(super) fn open(options: &ImageOptions, arrivals: &Arrivals) -> Result<Self, ImageError> {
        let (top, header) = open_layer(options, Format::Qcow2, arrivals)?;
        let header = header.expect("a qcow2 layer has a header");
        let bytes = header.bytes - header.bytes % SECTOR_BYTES;
        let (geometry, has_zero_clusters) = (header.geometry, header.has_zero_clusters);
        if bytes == 0 {
            return Err(ImageError::Empty { path: options.path.clone() });
        }
        let mut layers = vec![top];
        add_backing(&mut layers, header, options, arrivals)
            .map_err(|source| ImageError::Backing { path: options.path.clone(), source: Box::new(source) })?;
        let image = Self {
            path: options.path.clone(),
            read_only: options.read_only,
            layers,
            bytes,
            has_zero_clusters,
            geometry,
            log: None,
            committer: Committer::default(),
            lease: Arc::new(()),
            guard: Guard::default(),
            checkpoints: Checkpoints::default(),
            #[cfg(test)]
            tape: None,
        };
        // Opened once now, so that damaged tables are told at the start and not by the first read.
        image.chain()?;
        Ok(image)
    }

    pub(super) fn bytes(&self) -> u64 {
        self.bytes
    }

    pub(super) fn cluster_bytes(&self) -> u32 {
        self.geometry.cluster_bytes as u32
    }

    pub(super) fn committer(&self) -> Committer {
        self.committer.clone()
    }

    pub(super) fn note_changes_in(&mut self, file: &Path, unwritten: Unwritten) {
        self.log = Some((file.to_owned(), unwritten));
    }

    /// The lowest image, if it is raw: only that one can be.
    pub(super) fn raw_base(&self) -> Option<(&Path, &File)> {
        let base = self.layers.last().filter(|base| base.format != Format::Qcow2)?;
        Some((&base.path, &base.file))
    }

    /// From the top image down to the base, each with its path, and whether it is only read.
    pub(super) fn open_files(&self) -> Vec<(&Path, &File, bool)> {
        let layers = self.layers.iter().enumerate();
        layers.map(|(depth, layer)| (layer.path.as_path(), &layer.file, self.read_only || depth > 0)).collect()
    }

    /// Version 2 cannot mark a cluster as zero.
    pub(super) fn supports_discard(&self) -> bool {
        self.has_zero_clusters
    }

    pub(super) fn engine(&self, pool: Arc<BufferPool>) -> Result<Box<dyn Engine>, ImageError> {
        if Arc::strong_count(&self.lease) > 1 {
            return Err(ImageError::HasEngine { path: self.path.clone() });
        }
        let through_cache = self.layers.iter().filter(|layer| layer.alignment == 1);
        through_cache.for_each(|layer| stop_read_ahead(&layer.file));
        let (chain, tables) = match self.read_only {
            true => (self.chain()?, None),
            false => self.writable_chain().map(|(chain, tables)| (chain, Some(tables)))?,
        };
        let engine = Qcow2Engine::start(chain, &self.path, tables, pool, self.lease.clone())
            .map_err(|source| ImageError::Engine { path: self.path.clone(), source })?;
        let engine: Box<dyn Engine> = match self.read_only {
            true => engine,
            false => Box::new(GuardedEngine::new(engine, Witness::DiskChanges(self.checkpoints.clone()))),
        };
        // Only there an offset of the disk is one of the file.
        let base = self.layers.last().filter(|base| base.format != Format::Qcow2);
        Ok(match base.and_then(|base| base.arrival.clone()) {
            Some(arrival) => Box::new(GuardedEngine::new(engine, Witness::Arrival(arrival))),
            None => engine,
        })
    }

    pub(super) fn checkpoints(&self) -> &Checkpoints {
        &self.checkpoints
    }

    pub(super) fn file(&self) -> io::Result<File> {
        self.layers[0].file.try_clone()
    }

    /// The file of the top image, with what is held of its tables.
    pub(super) fn freeze(&self, target: File) -> io::Result<Arc<FrozenImage>> {
        self.committer.commit()?;
        self.guard.freeze(reopen(&self.layers[0].file)?, target)
    }

    pub(super) fn describe(&self) -> String {
        let backing = match self.layers.len() - 1 {
            0 => String::new(),
            1 => ", 1 backing image".into(),
            count => format!(", {count} backing images"),
        };
        format!("qcow2, one worker thread, {}{backing}", self.layers[0].cache)
    }

    /// The images on top of each other, base first, to be read.
    pub(super) fn chain(&self) -> Result<Chain, ImageError> {
        self.layers.iter().rev().try_fold(None, |below, layer| layer.open_over(below, &self.guard).map(Some)).map(made)
    }

    /// The same, the top one to be changed: its tables are, and its data.
    pub(super) fn writable_chain(&self) -> Result<(Chain, Arc<Tables>), ImageError> {
        let (top, backing) = self.layers.split_first().expect("a chain has at least its top");
        let below =
            backing.iter().rev().try_fold(None, |below, layer| layer.open_over(below, &self.guard).map(Some))?;
        let written = |error| access_error(&self.path, "write", error);
        #[cfg_attr(not(test), expect(unused_mut, reason = "tests record what is done to it"))]
        let mut data = top.storage(&self.guard, true).map_err(written)?;
        #[cfg(test)]
        data.tape.clone_from(&self.tape);
        self.geometry.check_entries(&data, true).map_err(|error| access_error(&self.path, "read", error))?;
        let log = self.open_log()?;
        let tables = Tables::new(data.clone(), self.geometry.cluster_bytes, log).map(Arc::new).map_err(written)?;
        self.committer.set(&tables);
        let builder = Qcow2::<GuardedFile>::builder(data.of_tables(tables.clone()));
        let builder = builder.write(true).backing(below).data_file(Some(data));
        let top = builder.open(DenyImplicitOpenGate::default()).map_err(written)?;
        Ok((FormatAccess::new(top), tables))
    }

    fn open_log(&self) -> Result<Option<(TableLog, Vec<Change>)>, ImageError> {
        let Some((path, unwritten)) = &self.log else { return Ok(None) };
        let (image, unit_bytes) = (&self.layers[0].file, unit_bytes(self.geometry.cluster_bytes));
        let opened = match unwritten {
            Unwritten::Keep => TableLog::open(path, image, unit_bytes),
            Unwritten::Drop => TableLog::drop_changes(path, image, unit_bytes).map(|log| (log, Vec::new())),
        };
        #[cfg(test)]
        let opened = opened.map(|(mut log, changes)| {
            log.tape.clone_from(&self.tape);
            (log, changes)
        });
        opened.map(Some).map_err(|error| access_error(&self.path, "note the changes of", error))
    }
}

fn made(chain: Option<Chain>) -> Chain {
    chain.expect("a chain has at least its top")
}

impl Layer {
    fn storage(&self, guard: &Guard, write: bool) -> io::Result<GuardedFile> {
        // A duplicate shares the open file description, and with it the lock.
        let file = File::from(self.file.as_fd().try_clone_to_owned()?);
        let descriptor = file.try_clone()?;
        let direct = self.alignment > 1;
        // Opened for direct writes, the library would look for the alignment by writing the image's start back. That changes
        // the file's times at each start, and for a moment nobody could tell whether a stranger wrote to it.
        let options = StorageOpenOptions::new().filename(&self.path).write(write && !direct).direct(direct);
        let file = ImageFile::from_open_file(file, options)?;
        let reach = self.geometry.map_or(u64::MAX, |geometry| geometry.reach);
        Ok(GuardedFile::new(file, descriptor, guard.clone(), self.arrival.clone(), self.alignment, reach))
    }

    /// To be read.
    fn open_over(&self, below: Option<Chain>, guard: &Guard) -> Result<Chain, ImageError> {
        let opened = self.storage(guard, false).and_then(|storage| {
            let gate = DenyImplicitOpenGate::default();
            Ok(match self.geometry {
                Some(geometry) => {
                    geometry.check_entries(&storage, false)?;
                    let builder = Qcow2::<GuardedFile>::builder(storage).write(false).backing(below).data_file(None);
                    FormatAccess::new(builder.open(gate)?)
                }
                None => FormatAccess::new(Raw::builder(storage).write(false).open(gate)?),
            })
        });
        opened.map_err(|error| access_error(&self.path, "read", error))
    }
}

/// Follows the backing names down to the base, and locks each file against writers.
fn add_backing(
    layers: &mut Vec<Layer>,
    top: Header,
    options: &ImageOptions,
    arrivals: &Arrivals,
) -> Result<(), ImageError> {
    let mut header = Some(top);
    loop {
        let image = &layers.last().expect("a header belongs to a layer").path;
        let Some((path, format)) = header.as_ref().map(|header| backing_of(header, image)).transpose()?.flatten()
        else {
            return Ok(());
        };
        check_length(layers.len(), &path)?;
        check_kind(&path)?;
        let options = ImageOptions { path, read_only: true, ..options.clone() };
        let (layer, next) = open_layer(&options, format, arrivals)?;
        if let Some(mark) = header.as_ref().and_then(|header| header.backing_mark) {
            must_be_the_same(&layer, mark, layers)?;
        }
        layers.push(layer);
        header = next;
    }
}

/// The backing images of this qcow2 image, down to the base, each with its format, as the images' headers name them. Nothing is
/// locked.
pub fn backing_images(path: &Path) -> Result<Vec<(PathBuf, Format)>, ImageError> {
    let mut found = Vec::new();
    add_backing_images(path, &mut found).map(|()| found)
}

/// The files of this image, and of the images below it, that are still arriving. Nothing is locked or fetched. Whoever opens the image
/// learns what else is wrong with it.
pub fn arriving_images(path: &Path, format: Format) -> io::Result<Vec<Arrival>> {
    let mut images = vec![(path.to_owned(), format)];
    if format == Format::Qcow2 {
        let _ = add_backing_images(path, &mut images);
    }
    images.iter().filter_map(|(path, _)| Arrival::open(path).transpose()).collect()
}

/// Adds the backing images of this qcow2 image, as `backing_images`. After an error, those down to the one that cannot be read have been
/// added.
pub fn add_backing_images(path: &Path, found: &mut Vec<(PathBuf, Format)>) -> Result<(), ImageError> {
    let mut image = path.to_owned();
    loop {
        check_kind(&image)?;
        let file = File::open(&image).map_err(|error| access_error(&image, "open", error))?;
        let Some((path, format)) = backing_of(&Header::read_in_use(&file, &image)?, &image)? else { return Ok(()) };
        check_length(found.len() + 1, &path)?;
        found.push((path.clone(), format));
        if format != Format::Qcow2 {
            return Ok(());
        }
        image = path;
    }
}

fn check_length(images: usize, path: &Path) -> Result<(), ImageError> {
    if images < CHAIN_MAX {
        return Ok(());
    }
    let problem = format!("has more than {CHAIN_MAX} images in its backing chain");
    Err(ImageError::Qcow2 { path: path.into(), problem, remedy: "does it lead back to itself?" })
}

fn open_layer(
    options: &ImageOptions,
    format: Format,
    arrivals: &Arrivals,
) -> Result<(Layer, Option<Header>), ImageError> {
    let path = &options.path;
    let Opened { file, alignment, cache } =
        open_file(options, format).map_err(|error| access_error(path, "open", error))?;
    lock::lock_image(&file, path, options.read_only, options.lock_patience, options.owner)?;
    let arrival = arrivals.of(&file, path).map_err(|error| access_error(path, "look for what is missing of", error))?;
    let header = match format {
        Format::Qcow2 => Some(Header::read(&file, path, arrival.as_deref())?),
        Format::Auto | Format::Raw => None,
    };
    let geometry = header.as_ref().map(|header| header.geometry);
    Ok((Layer { path: path.clone(), format, file, alignment, cache, arrival, geometry }, header))
}

/// A backing image as it was when the image over it was made.
fn must_be_the_same(backing: &Layer, mark: Mark, above: &[Layer]) -> Result<(), ImageError> {
    let path = &backing.path;
    let metadata = backing.file.metadata().map_err(|error| access_error(path, "look at", error))?;
    if mark.is_still(Mark::of(&metadata)) {
        return Ok(());
    }
    let image = above.last().expect("somebody names it").path.clone();
    let Mark { seconds, nanoseconds, .. } = mark;
    let problem = format!(
        "was made over {} as that was at @{seconds}.{nanoseconds:09}; it has been changed since, or is another file",
        path.display()
    );
    Err(ImageError::Qcow2 { path: image, problem, remedy: PUT_BACK })
}

/// The backing image that the header of `image` names.
fn backing_of(header: &Header, image: &Path) -> Result<Option<(PathBuf, Format)>, ImageError> {
    let error = |problem, remedy| ImageError::Qcow2 { path: image.into(), problem, remedy };
    let Some(name) = &header.backing else { return Ok(None) };
    let is_protocol =
        name.split_once(':').is_some_and(|(scheme, _)| scheme.chars().all(|c| c.is_ascii_alphanumeric() || c == '-'));
    if is_protocol {
        return Err(error(format!("has the backing image \"{name}\", which is not a file"), CONVERT));
    }
    let format = match header.backing_format.as_deref() {
        Some("raw") => Format::Raw,
        Some("qcow2") => Format::Qcow2,
        Some(other) => return Err(error(format!("has a backing image of format {other}"), CONVERT)),
        None => return Err(error(format!("does not say the format of its backing image \"{name}\""), REBASE)),
    };
    // A relative name counts from the image that holds it.
    Ok(Some((image.parent().unwrap_or(Path::new("")).join(name), format)))
}
