//! Bench `crash`: the cost of a kernel panic whose memory is kept for a debugger.
//!
//! Each side runs from the panic to the first HTTP 200, on a guest whose memory is in use (half file cache, half anonymous):
//! (a) QEMU: pause, dump-guest-memory, cold reboot, as is usual today
//! (b) QEMU: the same, with makedumpfile -d 31 before the reboot
//! (c) QEMU: cold reboot, no dump
//! (d) Hearth: dump and reboot at the same time, at level 31, and at level 1, which excludes only zero pages
//!
//! for each disk profile: plain machine: (c) twice, then (b), which includes (a) -> Hearth at level 31 twice -> Hearth at level 1
//! ->
//! at `paper` also the comparisons of the paper that first dumped beside the reboot (Vicover): chunk sizes (its Table 3), and
//! policies for the disk while a boot needs it (its Table 6).
//!
//! QEMU's dump goes through a pipe to a writer that bypasses the page cache, like `virsh dump --bypass-cache`: data in the page
//! cache is not on the disk, and control groups (v1) would not slow it.

mod guest;
mod hearth;
mod page;
mod plain;
mod summary;

use std::path::{Path, PathBuf};

use hearth_vmtest::images;

use crate::host::profile::Profile;
use crate::load::LoadError;
use crate::record::Record;
use crate::sides::{Rig, RigError};
use hearth::{Case, Life};

pub use summary::table;

pub const NAME: &str = "crash";
const MIB: f64 = 1048576.0;

#[derive(Debug, thiserror::Error)]
pub enum CrashError {
    #[error(transparent)]
    Rig(#[from] RigError),
    #[error("machine {side}")]
    Machine { side: String, source: hearth_vmtest::Error },
    #[error("web service of {side}")]
    Load { side: String, source: LoadError },
    #[error("cannot use {path}")]
    File { path: PathBuf, source: std::io::Error },
    #[error("{what} of {side} failed: {how}")]
    Ended { what: &'static str, side: String, how: String },
    #[error("{side} did not report {figure}: {said}")]
    NoFigure { side: String, figure: &'static str, said: String },
}

pub struct Options {
    pub quick: bool,
    pub folder: PathBuf,
    pub profiles: Vec<Profile>,
    /// The sides to measure.
    pub sides: Vec<Side>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum Side {
    Plain,
    Hearth,
}

impl Side {
    pub const ALL: [Side; 2] = [Side::Plain, Side::Hearth];
}

/// Sizes and counts of a run.
#[derive(Clone, Copy, Debug)]
pub struct Shape {
    pub memory_mib: u64,
    /// Files of 1 MiB of the web server in the file cache.
    pub web_files: u64,
    /// Size of a file on a second disk, which is in the file cache as well.
    pub data_mib: u64,
    pub anonymous_mib: u64,
    /// Size of the file that the boot copies in runs that compare policies for the disk.
    pub copied_mib: u64,
    /// Crashes of the sides whose figure is a median. 0: the plain reboot's time is derived from the dumped crash.
    pub repeats: u32,
    /// Chunk sizes and disk policies to compare.
    pub chunks_mib: &'static [u64],
    pub policies: &'static [&'static str],
}

impl Shape {
    pub fn of(quick: bool) -> Self {
        let full = Shape {
            memory_mib: 4096,
            web_files: 512,
            data_mib: 1024,
            anonymous_mib: 1536,
            copied_mib: 200,
            repeats: 2,
            chunks_mib: &[10, CHUNK_MIB, 1024],
            policies: &["recovery-first", "balanced", "dump-first"],
        };
        let quick_shape = Shape {
            memory_mib: 512,
            web_files: 100,
            data_mib: 32,
            anonymous_mib: 128,
            copied_mib: 16,
            repeats: 0,
            chunks_mib: &[],
            policies: &[],
        };
        if quick { quick_shape } else { full }
    }

    /// Runs that differ from this one in a single setting.
    fn comparisons(self, case: Case) -> impl Iterator<Item = Case> {
        let chunks = self.chunks_mib.iter().filter(move |chunk_mib| **chunk_mib != case.chunk_mib);
        let policies = self.policies.iter().map(move |&policy| Case { policy: Some(policy), ..case });
        chunks.map(move |&chunk_mib| Case { chunk_mib, ..case }).chain(policies)
    }

    fn ram_bytes(self) -> f64 {
        (self.memory_mib << 20) as f64
    }
}

/// The chunk size, as in the paper, of every run that does not compare chunk sizes.
const CHUNK_MIB: u64 = 128;

/// Resources that all sides share.
struct Bench<'a> {
    rig: &'a Rig,
    shape: Shape,
    data: PathBuf,
}

pub fn run(options: &Options, record: &mut Record) -> Result<(), CrashError> {
    let shape = Shape::of(options.quick);
    let failed = |source| CrashError::File { path: options.folder.clone(), source };
    // Relative paths in machine.toml are relative to its own folder.
    let folder = std::path::absolute(&options.folder).map_err(failed)?;
    let rig = Rig::prepare(&folder, record.machine.accelerator)?;
    record.profile_by = rig.profile_by();
    let data = rig.folder().join("data.img");
    let failed = |source| CrashError::Machine { side: "every side".into(), source };
    images::ext4(&data, shape.data_mib + 64, &[guest::data_file(shape)]).map_err(failed)?;
    let bench = Bench { rig: &rig, shape, data };
    let mut lives = Vec::new();
    for &profile in &options.profiles {
        measure(&bench, profile, options, record, &mut lives)?;
    }
    summary::summarise(record, &options.profiles);
    write_report(&options.folder, record, shape, &lives)
}

fn measure(
    bench: &Bench<'_>,
    profile: Profile,
    options: &Options,
    record: &mut Record,
    lives: &mut Vec<Life>,
) -> Result<(), CrashError> {
    let shape = bench.shape;
    let selective = Case { level: 31, chunk_mib: CHUNK_MIB, policy: None };
    let whole = Case { level: 1, ..selective };
    let with = |side: Side| options.sides.contains(&side);
    let plain = with(Side::Plain).then(|| plain::Machine::launch(bench, profile));
    // In a quick run, another processor boots the next machine while one is measured.
    let processors = std::thread::available_parallelism().map_or(1, usize::from);
    let ahead = options.quick && with(Side::Hearth) && processors > 1;
    let first = ahead.then(|| hearth::Machine::launch(bench, profile, selective)).transpose()?;
    if let Some(plain) = plain {
        leave_out(plain.and_then(|plain| plain.measure(record)), record);
    }
    if with(Side::Hearth) {
        let first = first.map_or_else(|| hearth::Machine::launch(bench, profile, selective), Ok)?;
        let second = ahead.then(|| hearth::Machine::launch(bench, profile, whole)).transpose()?;
        lives.extend(first.measure(shape.repeats.max(1), record)?);
        let second = second.map_or_else(|| hearth::Machine::launch(bench, profile, whole), Ok)?;
        lives.extend(second.measure(1, record)?);
    }
    if with(Side::Hearth) && profile == Profile::Paper {
        for case in shape.comparisons(whole) {
            let life = hearth::Machine::launch(bench, profile, case).and_then(|machine| machine.measure(1, record));
            lives.extend(leave_out(life, record).flatten());
        }
    }
    Ok(())
}

/// Records a side that does not run here as left out; it does not end the bench.
fn leave_out<T>(measured: Result<T, CrashError>, record: &mut Record) -> Option<T> {
    let error = match measured {
        Ok(measured) => return Some(measured),
        Err(error) => error,
    };
    let why = crate::chain(&error);
    eprintln!("crash: left out: {why}");
    record.left_out.push(why);
    None
}

fn write_report(folder: &Path, record: &Record, shape: Shape, lives: &[Life]) -> Result<(), CrashError> {
    if lives.is_empty() {
        return Ok(());
    }
    let path = folder.join("crash.html");
    let failed = |source| CrashError::File { path: path.clone(), source };
    crate::report::write_whole(&path, &page::html(record, shape, lives)).map_err(failed)?;
    eprintln!("report: {}", path.display());
    Ok(())
}
