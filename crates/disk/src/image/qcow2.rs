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

use super::frozen::{FrozenImage, Guard};
use super::guarded::{GuardedEngine, GuardedFile, Witness};
use super::open::{Opened, open_file, read_aligned, stop_read_ahead};
use super::overlay::{BACKING_FORMAT, BACKING_MARK, Mark};
use super::{Format, ImageError, ImageOptions, access_error, check_kind, lock};
use crate::arrival::{Arrival, Arrivals};
use crate::block::SECTOR_BYTES;
use crate::buffer::{BufferPool, Pages};
use crate::engine::Engine;
use crate::engine::qcow2::{Chain, Qcow2Engine};

/// Longer chains are loops, or a management program gone wrong.
const CHAIN_MAX: usize = 64;

/// The header, its extensions and the backing name all lie in the first cluster, of which we look at this much.
const HEADER_BYTES: usize = 64 * 1024;

const CONVERT: &str = "rewrite it with qemu-img convert";
const REPAIR: &str = "repair it with qemu-img check -r all";
const PUT_BACK: &str = "put the right one back (cp -a), or if only its time is another, give it that one (touch -d)";
const REBASE: &str = "name it with qemu-img rebase -u -b FILE -F raw (or qcow2)";

#[derive(Debug)]
pub(super) struct Qcow2Image {
    path: PathBuf,
    read_only: bool,
    /// From the top image down to the base.
    layers: Vec<Layer>,
    bytes: u64,
    cluster_bytes: u32,
    has_zero_clusters: bool,
    /// Shared with the engine while there is one.
    lease: Arc<()>,
    /// Before changes of the top image; the others are not changed.
    guard: Guard,
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
}

impl Qcow2Image {
    pub(super) fn open(options: &ImageOptions, arrivals: &Arrivals) -> Result<Self, ImageError> {
        let (top, header) = open_layer(options, Format::Qcow2, arrivals)?;
        let header = header.expect("a qcow2 layer has a header");
        let bytes = header.bytes - header.bytes % SECTOR_BYTES;
        let (cluster_bytes, has_zero_clusters) = (header.cluster_bytes, header.has_zero_clusters);
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
            cluster_bytes,
            has_zero_clusters,
            lease: Arc::new(()),
            guard: Guard::default(),
        };
        // Opened once now, so that damaged tables are told at the start and not by the first read.
        image.chain(true)?;
        Ok(image)
    }

    pub(super) fn bytes(&self) -> u64 {
        self.bytes
    }

    pub(super) fn cluster_bytes(&self) -> u32 {
        self.cluster_bytes
    }

    /// The lowest image, if it is raw: only that one can be.
    pub(super) fn raw_base(&self) -> Option<(&Path, &File)> {
        let base = self.layers.last().filter(|base| base.format != Format::Qcow2)?;
        Some((&base.path, &base.file))
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
        let chain = self.chain(self.read_only)?;
        let engine = Qcow2Engine::start(chain, &self.path, self.read_only, pool, self.lease.clone())
            .map_err(|source| ImageError::Engine { path: self.path.clone(), source })?;
        // Only there an offset of the disk is one of the file.
        let base = self.layers.last().filter(|base| base.format != Format::Qcow2);
        Ok(match base.and_then(|base| base.arrival.clone()) {
            Some(arrival) => Box::new(GuardedEngine::new(engine, Witness::Arrival(arrival))),
            None => engine,
        })
    }

    /// The file of the top image. Its tables are in it: each change is settled before it is reported.
    pub(super) fn freeze(&self, target: File) -> io::Result<Arc<FrozenImage>> {
        self.guard.freeze(self.layers[0].file.try_clone()?, target)
    }

    pub(super) fn describe(&self) -> String {
        let backing = match self.layers.len() - 1 {
            0 => String::new(),
            1 => ", 1 backing image".into(),
            count => format!(", {count} backing images"),
        };
        format!("qcow2, one worker thread, {}{backing}", self.layers[0].cache)
    }

    /// The images on top of each other, base first.
    pub(super) fn chain(&self, read_only: bool) -> Result<Chain, ImageError> {
        let mut below = None;
        for (depth, layer) in self.layers.iter().enumerate().rev() {
            let opened = layer.open_over(below, &self.guard, depth == 0 && !read_only);
            below = Some(opened.map_err(|error| access_error(&layer.path, "read", error))?);
        }
        Ok(below.expect("a chain has at least its top"))
    }
}

impl Layer {
    fn open_over(&self, below: Option<Chain>, guard: &Guard, write: bool) -> io::Result<Chain> {
        // A duplicate shares the open file description, and with it the lock.
        let file = File::from(self.file.as_fd().try_clone_to_owned()?);
        let options = StorageOpenOptions::new().filename(&self.path).write(write).direct(self.alignment > 1);
        let file = ImageFile::from_open_file(file, options)?;
        let storage = GuardedFile::new(file, guard.clone(), self.arrival.clone(), self.alignment);
        let gate = DenyImplicitOpenGate::default();
        Ok(match self.format {
            Format::Qcow2 => {
                let builder = Qcow2::<GuardedFile>::builder(storage).write(write).backing(below).data_file(None);
                FormatAccess::new(builder.open(gate)?)
            }
            Format::Auto | Format::Raw => FormatAccess::new(Raw::builder(storage).write(write).open(gate)?),
        })
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
    while let Some((path, format)) = header.as_ref().map(|header| backing_of(header, layers)).transpose()?.flatten() {
        if layers.len() == CHAIN_MAX {
            let problem = format!("has more than {CHAIN_MAX} images in its backing chain");
            return Err(ImageError::Qcow2 { path, problem, remedy: "does it lead back to itself?" });
        }
        check_kind(&path)?;
        let options = ImageOptions { path, read_only: true, ..options.clone() };
        let (layer, next) = open_layer(&options, format, arrivals)?;
        if let Some(mark) = header.as_ref().and_then(|header| header.backing_mark) {
            must_be_the_same(&layer, mark, layers)?;
        }
        layers.push(layer);
        header = next;
    }
    Ok(())
}

fn open_layer(
    options: &ImageOptions,
    format: Format,
    arrivals: &Arrivals,
) -> Result<(Layer, Option<Header>), ImageError> {
    let path = &options.path;
    let Opened { file, alignment, cache } =
        open_file(options, format).map_err(|error| access_error(path, "open", error))?;
    lock::lock_image(&file, path, options.read_only, options.lock_patience)?;
    let arrival = arrivals.of(&file, path).map_err(|error| access_error(path, "look for what is missing of", error))?;
    let header = match format {
        Format::Qcow2 => Some(Header::read(&file, path, arrival.as_deref())?),
        Format::Auto | Format::Raw => None,
    };
    Ok((Layer { path: path.clone(), format, file, alignment, cache, arrival }, header))
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

fn backing_of(header: &Header, layers: &[Layer]) -> Result<Option<(PathBuf, Format)>, ImageError> {
    let image = &layers.last().expect("a header belongs to a layer").path;
    let error = |problem, remedy| ImageError::Qcow2 { path: image.clone(), problem, remedy };
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

/// What we need to know of a qcow2 header (QEMU's docs/interop/qcow2.txt).
///
/// ```text
///  0 magic  4 version  8 backing name: offset u64  16 its length u32  20 cluster bits u32  24 size u64
/// 32 encryption u32  72 incompatible features u64 (version 3)  100 header length u32 (version 3), then extensions
/// ```
#[derive(Debug)]
struct Header {
    bytes: u64,
    cluster_bytes: u32,
    has_zero_clusters: bool,
    backing: Option<String>,
    backing_format: Option<String>,
    /// If the image is one of our own.
    backing_mark: Option<Mark>,
}

impl Header {
    fn read(file: &File, path: &Path, arrival: Option<&Arrival>) -> Result<Self, ImageError> {
        let there = arrival.map_or(Ok(()), |arrival| arrival.wait(0..HEADER_BYTES as u64));
        let start = there.and_then(|()| read_start(file)).map_err(|error| access_error(path, "read", error))?;
        Self::parse(&start).map_err(|defect| match defect {
            Defect::NotQcow2 => ImageError::NotQcow2 { path: path.into() },
            Defect::Named(problem, remedy) => ImageError::Qcow2 { path: path.into(), problem, remedy },
        })
    }

    /// `start` is the first bytes of the file: the guest's owner may have got them from anywhere.
    fn parse(start: &[u8]) -> Result<Self, Defect> {
        if start.get(..4) != Some(b"QFI\xfb") {
            return Err(Defect::NotQcow2);
        }
        let cut_off = || Defect::Named("ends within its header".into(), "restore it from a copy");
        let u32_at = |at: usize| bytes_at(start, at).map(u32::from_be_bytes).ok_or_else(cut_off);
        let u64_at = |at: usize| bytes_at(start, at).map(u64::from_be_bytes).ok_or_else(cut_off);
        let header_bytes = match u32_at(4)? {
            2 => 72,
            3 => {
                check_features(u64_at(72)?)?;
                u32_at(100)? as usize
            }
            version => return Err(Defect::Named(format!("has the unknown version {version}"), CONVERT)),
        };
        if u32_at(32)? != 0 {
            return Err(Defect::Named("is encrypted".into(), CONVERT));
        }
        let cluster_bits = u32_at(20)?;
        if !(9..=21).contains(&cluster_bits) {
            return Err(Defect::Named(format!("has clusters of 2^{cluster_bits} bytes"), "restore it from a copy"));
        }
        let backing = match (u64_at(8)?, u32_at(16)? as usize) {
            (0, _) | (_, 0) => None,
            (offset, length) => {
                let name = usize::try_from(offset).ok().and_then(|at| start.get(at..at.checked_add(length)?));
                Some(String::from_utf8_lossy(name.ok_or_else(cut_off)?).into_owned())
            }
        };
        let extension = |kind| find_extension(start, header_bytes, kind);
        let backing_format = extension(BACKING_FORMAT).map(|format| String::from_utf8_lossy(format).into_owned());
        let named = backing.as_deref().map(str::as_bytes);
        let backing_mark = extension(BACKING_MARK).zip(named).and_then(|(mark, name)| Mark::read(mark, name));
        let (bytes, has_zero_clusters) = (u64_at(24)?, u32_at(4)? >= 3);
        Ok(Self { bytes, cluster_bytes: 1 << cluster_bits, has_zero_clusters, backing, backing_format, backing_mark })
    }
}

#[derive(Debug)]
enum Defect {
    NotQcow2,
    Named(String, &'static str),
}

fn check_features(incompatible: u64) -> Result<(), Defect> {
    const KNOWN: [(&str, &str); 5] = [
        ("was not closed cleanly (lazy refcounts)", REPAIR),
        ("is marked corrupt", REPAIR),
        ("keeps its data in an external file", CONVERT),
        ("is compressed with zstd", CONVERT),
        ("has extended L2 entries", CONVERT),
    ];
    if incompatible == 0 {
        return Ok(());
    }
    let bit = incompatible.trailing_zeros() as usize;
    let unknown = || (format!("needs the unknown feature {bit}"), CONVERT);
    let (problem, remedy) = KNOWN.get(bit).map_or_else(unknown, |&(problem, remedy)| (problem.into(), remedy));
    Err(Defect::Named(problem, remedy))
}

/// Extensions are (type u32, length u32, data padded to 8), ended by type 0.
fn find_extension(start: &[u8], mut at: usize, wanted: u32) -> Option<&[u8]> {
    loop {
        let kind = u32::from_be_bytes(bytes_at(start, at)?);
        let length = u32::from_be_bytes(bytes_at(start, at.checked_add(4)?)?) as usize;
        let data = at.checked_add(8)?;
        match kind {
            0 => return None,
            kind if kind == wanted => return start.get(data..data.checked_add(length)?),
            _ => at = data.checked_add(length)?.checked_next_multiple_of(8)?,
        }
    }
}

fn bytes_at<const N: usize>(start: &[u8], at: usize) -> Option<[u8; N]> {
    start.get(at..at.checked_add(N)?)?.try_into().ok()
}

/// The first bytes of a file that may be open with O_DIRECT.
fn read_start(file: &File) -> io::Result<Vec<u8>> {
    let mut pages = Pages::new(HEADER_BYTES)?;
    let length = read_aligned(file, pages.bytes_mut(), 0)?;
    Ok(pages.bytes_mut()[..length].to_vec())
}
