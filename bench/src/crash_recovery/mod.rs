//! Bench `crash`: what a kernel panic costs when its memory is to be kept for a debugger.
//!
//! Sides, each from the panic to the first HTTP 200, on a guest whose memory is in use (half file cache, half anonymous):
//! (a) QEMU: pause, dump-guest-memory, cold reboot: what people do today
//! (b) QEMU: the same, with makedumpfile -d 31 before the reboot
//! (c) QEMU: cold reboot, no dump
//! (d) Hearth: dump and reboot at once, at level 31 and, with nothing but zero pages left out, at level 1
//!
//! for each disk profile: plain machine: (c) twice, then (b), of which (a) is a part -> Hearth at level 31 twice -> Hearth
//! at level 1 -> at `paper` also, as in the paper that first dumped beside the reboot (Vicover): chunk sizes (its Table 3),
//! and who gets the disk while a boot needs it (its Table 6).
//!
//! QEMU's dump goes through a pipe to a writer past the page cache, as `virsh dump --bypass-cache` does it: what the page
//! cache swallows is not on the disk, and control groups (v1) would not slow it.

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
    #[error("{what} of {side} ended with {how}")]
    Ended { what: &'static str, side: String, how: String },
    #[error("{side} says no {figure}: {said}")]
    NoFigure { side: String, figure: &'static str, said: String },
}

pub struct Options {
    pub quick: bool,
    pub folder: PathBuf,
    pub profiles: Vec<Profile>,
    /// Only these sides: plain, hearth.
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

/// How large, and how often.
#[derive(Clone, Copy, Debug)]
pub struct Shape {
    pub memory_mib: u64,
    /// Files of 1 MiB of the web server that are in the file cache.
    pub web_files: u64,
    /// A file on a second disk, in the file cache as well.
    pub data_mib: u64,
    pub anonymous_mib: u64,
    /// What the boot copies in the runs that compare who gets the disk.
    pub copied_mib: u64,
    /// Crashes of a kind whose figure is a median; none where a plain reboot is read off the crash that is dumped.
    pub repeats: u32,
    /// Chunk sizes, and policies for the disk's time.
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

    /// Runs that differ from this one in one setting.
    fn comparisons(self, case: Case) -> impl Iterator<Item = Case> {
        let chunks = self.chunks_mib.iter().filter(move |chunk_mib| **chunk_mib != case.chunk_mib);
        let policies = self.policies.iter().map(move |&policy| Case { policy: Some(policy), ..case });
        chunks.map(move |&chunk_mib| Case { chunk_mib, ..case }).chain(policies)
    }

    fn ram_bytes(self) -> f64 {
        (self.memory_mib << 20) as f64
    }
}

/// The chunk size of every run that does not compare them: the paper's.
const CHUNK_MIB: u64 = 128;

/// What every side is started on.
struct Bench<'a> {
    rig: &'a Rig,
    shape: Shape,
    data: PathBuf,
}

pub fn run(options: &Options, record: &mut Record) -> Result<(), CrashError> {
    let shape = Shape::of(options.quick);
    let failed = |source| CrashError::File { path: options.folder.clone(), source };
    // Relative paths in machine.toml start in its own folder.
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
    // A quick run is to be quick: while one machine is measured, the other processor boots the next one.
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

/// A side that does not run here is a finding, not the end of the bench.
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
