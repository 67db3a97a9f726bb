//! Bench `remount`: a storage appliance with hundreds of volumes crashes while they are in use, and comes back.
//!
//! for each number of volumes, each disk profile, each side in turn, on the same images: boot -> mount -> look through all
//! volumes -> write to all of them -> push their metadata out of the guest's cache -> crash -> boot, mount, look through: ready
//!
//! Where possible the images are on a separate file system, whose flushes cost as much as on production hosts.
//!
//! Volumes are mounted four at a time, with dirty journals. The appliance is ready when a line that was acknowledged before the
//! crash was read back from each volume. A side's cost is its host memory beyond the guest's own.

mod life;
mod page;
mod summary;
mod trace;
mod write_cost;

use std::num::NonZeroUsize;
use std::path::{Path, PathBuf};

use hearth_vmtest::{Blocks, Volumes, images};

use crate::host::file_system::FileSystem;
use crate::host::profile::Profile;
use crate::record::Record;
use crate::sides::{Rig, RigError};

pub use summary::table;

pub const NAME: &str = "remount";
const MIB: f64 = 1048576.0;
/// Guest RAM: enough for hundreds of mounted volumes, but not to cache much of what they read.
const MEMORY_MIB: u64 = 256;
/// Mirror policy of the journals in NVRAM; the mirror is on the disk that is measured.
const MIRROR: &str = "async";
/// Data that is read before a crash, so that the guest's cache holds little of what its next boot needs.
const CHURN_MIB: u64 = 512;

#[derive(Debug, thiserror::Error)]
pub enum RemountError {
    #[error(transparent)]
    Rig(#[from] RigError),
    #[error("machine {side}")]
    Machine { side: &'static str, source: hearth_vmtest::Error },
    #[error("volumes")]
    Volumes(#[source] hearth_vmtest::Error),
    #[error("boot set without a machine")]
    BootSet(#[from] hearth_disk::boot_set::BootSetError),
    #[error("cannot use {path}, or evict it from the host's cache")]
    File { path: PathBuf, source: std::io::Error },
    #[error("{side} did not report {figure}: {said}")]
    NoFigure { side: &'static str, figure: &'static str, said: String },
    #[error("{side} lost acknowledged data: {got} bytes read, {wanted} expected")]
    Lost { side: &'static str, got: usize, wanted: usize },
}

/// How the appliance is run, and what it keeps after a crash.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Side {
    /// Hearth with a boot set.
    BootSet,
    /// Hearth with a boot set, and all journals on NVRAM.
    Nvram,
    /// Hearth without a boot set, with the ember alone.
    Ember,
    /// QEMU alone, `cache=none,aio=io_uring`.
    Direct,
    /// QEMU alone, `cache=writeback`: the host's page cache survives the guest.
    HostCache,
    /// QEMU alone, `cache=writeback`, with the images evicted from the host's page cache.
    HostCacheDropped,
}

impl Side {
    pub const ALL: [Side; 6] =
        [Side::BootSet, Side::Nvram, Side::Ember, Side::Direct, Side::HostCache, Side::HostCacheDropped];
    /// The two sides of the main comparison.
    const BASICS: [Side; 2] = [Side::BootSet, Side::Direct];

    pub fn name(self) -> &'static str {
        match self {
            Side::BootSet => "hearth",
            Side::Nvram => "hearth-nvram",
            Side::Ember => "hearth-without",
            Side::Direct => "qemu-direct",
            Side::HostCache => "qemu-host-cache",
            Side::HostCacheDropped => "qemu-host-cache-dropped",
        }
    }

    pub fn by_name(name: &str) -> Result<Self, String> {
        let names = || Side::ALL.map(Side::name).join(", ");
        Side::ALL.into_iter().find(|side| side.name() == name).ok_or_else(|| format!("sides are {}", names()))
    }

    fn has_boot_set(self) -> bool {
        matches!(self, Side::BootSet | Side::Nvram)
    }

    /// The side's word in the names of figures.
    fn word(self) -> &'static str {
        match self {
            Side::BootSet => "hearth",
            Side::Nvram => "hearth_nvram",
            Side::Ember => "without",
            Side::Direct => "direct",
            Side::HostCache => "hostcache_warm",
            Side::HostCacheDropped => "hostcache_dropped",
        }
    }
}

pub struct Options {
    pub quick: bool,
    /// A folder on the disk that is measured.
    pub folder: PathBuf,
    pub profiles: Vec<Profile>,
    /// Only these sides and numbers of volumes, if given.
    pub sides: Vec<Side>,
    pub volumes: Vec<usize>,
    /// Number of volumes mounted in parallel.
    pub at_once: Option<NonZeroUsize>,
}

/// Measurements with one number of volumes.
struct Cell {
    volumes: usize,
    profiles: Vec<Profile>,
    sides: Vec<Side>,
    /// Measured crashes of the two sides of the main comparison; other sides have one.
    rounds: u32,
    /// Sides whose reads are recorded one by one, each in an extra boot.
    traced: &'static [Side],
}

/// All sides with the largest number of volumes, and the two main sides with the smaller ones.
fn cells(options: &Options) -> Vec<Cell> {
    let sides = |all: &[Side]| -> Vec<Side> {
        let is_asked = |side: &Side| options.sides.is_empty() || options.sides.contains(side);
        all.iter().copied().filter(is_asked).collect()
    };
    let all_profiles = |volumes: usize, all: &[Side]| {
        let (rounds, traced) = if options.quick { (1, &Side::BASICS[..]) } else { (3, &Side::ALL[..]) };
        Cell { volumes, profiles: options.profiles.clone(), sides: sides(all), rounds, traced }
    };
    if !options.volumes.is_empty() {
        return options.volumes.iter().map(|&volumes| all_profiles(volumes, &Side::ALL)).collect();
    }
    if options.quick {
        // Other sides would take another minute; they run when named.
        let three = [Side::BootSet, Side::Direct, Side::HostCache];
        return vec![all_profiles(12, if options.sides.is_empty() { &three } else { &Side::ALL })];
    }
    let paper = || options.profiles.iter().copied().filter(|&profile| profile == Profile::Paper).collect();
    let two = || sides(&Side::BASICS);
    let few = [50, 100, 200].map(|volumes| Cell { volumes, profiles: paper(), sides: two(), rounds: 1, traced: &[] });
    few.into_iter().chain([all_profiles(400, &Side::ALL)]).collect()
}

/// Resources that all sides share.
struct Bench<'a> {
    rig: &'a Rig,
    volumes: Volumes,
    churn: PathBuf,
    /// Lines written to each volume so far.
    lines: Vec<String>,
}

impl<'a> Bench<'a> {
    /// Makes the images. `nvram`: the volumes have external journals, for NVRAM.
    fn prepare(rig: &'a Rig, volumes: usize, at_once: Option<NonZeroUsize>, nvram: bool) -> Result<Self, RemountError> {
        let (folder, files) = (rig.folder(), tree());
        let volumes = if nvram {
            // The journals come after the disks of the volumes and the disk that is read before a crash.
            let first = char::from(b'a' + Volumes::disks(volumes) as u8 + 1);
            Volumes::make_with_journals_apart(folder, volumes, &files, Blocks::All, first)
        } else {
            Volumes::make_in(folder, volumes, &files, Blocks::All)
        };
        let volumes = volumes.map_err(RemountError::Volumes)?;
        let volumes = match at_once {
            Some(at_once) => volumes.at_once(at_once),
            None => volumes,
        };
        let churn = rig.folder().join("churn.img");
        images::empty(&churn, CHURN_MIB).map_err(RemountError::Volumes)?;
        let bench = Self { rig, volumes, churn, lines: Vec::new() };
        bench.evict()?;
        Ok(bench)
    }

    /// Evicts the images from the host's page cache.
    fn evict(&self) -> Result<(), RemountError> {
        self.volumes.images().iter().try_for_each(|image| {
            hearth_vmtest::page_cache::evict(image).map_err(|source| RemountError::File { path: image.clone(), source })
        })
    }

    /// Bytes of the images in the host's page cache.
    fn host_cache_bytes(&self) -> Result<u64, RemountError> {
        let of = |image: &PathBuf| {
            let bytes = hearth_vmtest::page_cache::resident_bytes(image);
            bytes.map_err(|source| RemountError::File { path: image.clone(), source })
        };
        self.volumes.images().iter().map(of).sum()
    }
}

/// Initial contents of each volume: some folders with some files.
fn tree() -> Vec<images::File> {
    let path = |number: usize| format!("share-{}/file-{number}", number % 4);
    (0..16).map(|number| images::File { path: path(number), contents: vec![b'x'; 600 * number] }).collect()
}

pub fn run(options: &Options, record: &mut Record) -> Result<(), RemountError> {
    // Relative paths in machine.toml are relative to its own folder.
    let folder = std::path::absolute(&options.folder);
    let folder = folder.map_err(|source| RemountError::File { path: options.folder.clone(), source })?;
    let file_system = FileSystem::make(&folder);
    let place = file_system.as_ref().map_or_else(|_| folder.clone(), FileSystem::path);
    let rig = Rig::prepare(&place, record.machine.accelerator)?;
    record.profile_by = match &file_system {
        Ok(_) => format!("{}, a separate ext4", rig.profile_by()),
        Err(error) => format!("{}, on the host's file system ({})", rig.profile_by(), crate::chain(error)),
    };
    write_cost::measure(&rig, options.quick, record)?;
    let mut traces = Vec::new();
    for cell in cells(options) {
        // Volumes with external journals are separate images.
        for nvram in [false, true] {
            let is_next = |side: &&Side| **side != Side::HostCacheDropped && (**side == Side::Nvram) == nvram;
            let sides: Vec<Side> = cell.sides.iter().filter(is_next).copied().collect();
            if sides.is_empty() {
                continue;
            }
            let mut bench = Bench::prepare(&rig, cell.volumes, options.at_once, nvram)?;
            for (&profile, &side) in
                cell.profiles.iter().flat_map(|profile| sides.iter().map(move |side| (profile, side)))
            {
                measure(&mut bench, &cell, side, profile, &mut traces, record)?;
            }
        }
    }
    summary::summarise(record, &cells(options));
    write_page(record, &traces, &folder)
}

fn measure(
    bench: &mut Bench<'_>,
    cell: &Cell,
    side: Side,
    profile: Profile,
    traces: &mut Vec<trace::Trace>,
    record: &mut Record,
) -> Result<(), RemountError> {
    let drops = side == Side::HostCache && cell.sides.contains(&Side::HostCacheDropped);
    let mut life = life::Life::start(bench, side, profile, cell.volumes, false)?;
    let rounds = if Side::BASICS.contains(&side) { cell.rounds } else { 1 };
    for _ in 0..rounds {
        life.crash_and_return(side, record)?;
    }
    if drops {
        life.crash_and_return(Side::HostCacheDropped, record)?;
    }
    // Traces use other machines, so that recording does not cost what is measured.
    drop(life);
    let is_traced = |side: &Side| profile == Profile::Paper && cell.traced.contains(side);
    for side in [side].into_iter().chain(drops.then_some(Side::HostCacheDropped)).filter(is_traced) {
        traces.push(life::Life::start(bench, side, profile, cell.volumes, true)?.traced_return()?);
    }
    Ok(())
}

fn write_page(record: &Record, traces: &[trace::Trace], folder: &Path) -> Result<(), RemountError> {
    let path = folder.join(format!("{NAME}.html"));
    let written = crate::report::write_whole(&path, &page::html(record, traces));
    written.map_err(|source| RemountError::File { path: path.clone(), source })?;
    eprintln!("{NAME}: report: {}", path.display());
    Ok(())
}

/// Side, number of volumes, profile: `hearth-400@paper`.
fn case(side: Side, volumes: usize, profile: Profile) -> String {
    format!("{}-{volumes}@{}", side.name(), profile.name())
}
