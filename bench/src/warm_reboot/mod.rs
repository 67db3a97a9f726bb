//! Bench `warm-reboot`: the cost of a crash, with Hearth and with the usual alternatives.
//!
//! for each disk profile, each side in turn: boot -> fill the file cache -> read, serve -> crash -> serve for 30 s -> fill ->
//! crash -> read every file. Then fault rounds under Hearth: pages of the dead memory are overwritten before it is reused, and
//! every file that is served afterwards is compared with what was put on the disk.
//!
//! A quick run does the same with a guest that boots in seconds.
//!
//! One side runs at a time, and the profiles are the outer loop, so that a slow quarter of an hour of the host does not affect
//! one side alone.

mod faults;
pub mod session;
mod summary;

use std::path::PathBuf;

use crate::host::profile::Profile;
use crate::load::{LoadError, Targets};
use crate::record::Record;
use crate::sides::{FILES, Guest, Machine, Rig, RigError, Stack};

pub use summary::table;

pub const NAME: &str = "warm-reboot";

/// Sides of a quick run.
pub const QUICK_STACKS: [Stack; 4] = [Stack::Hearth, Stack::HearthRefill, Stack::ColdPrefetch, Stack::Ram];

#[derive(Debug, thiserror::Error)]
pub enum WarmRebootError {
    #[error(transparent)]
    Rig(#[from] RigError),
    #[error("machine {side}")]
    Machine { side: String, source: hearth_vmtest::Error },
    #[error("web load on {side}")]
    Load { side: String, source: LoadError },
    #[error("in the guest of {side}, `{command}` did not report {figure}")]
    NoFigure { side: String, command: String, figure: &'static str },
    #[error("the guest of {side} does not serve: {said}")]
    NotServing { side: String, said: String },
    #[error("memory of {side}")]
    Memory { side: String, source: std::io::Error },
}

pub struct Options {
    pub quick: bool,
    pub folder: PathBuf,
    pub profiles: Vec<Profile>,
    pub stacks: Vec<Stack>,
}

/// Times and counts of a run.
#[derive(Clone, Copy, Debug)]
pub struct Shape {
    pub guest: Guest,
    /// Seconds of web load before and after the crash.
    pub window_s: f64,
    /// Whether more crashes of each kind measure file reads, and the database, in a guest that has served no file.
    pub reads_apart: bool,
    pub fault_guest: Guest,
    pub fault_rounds: u32,
    /// Pages overwritten in a round.
    pub fault_pages: u64,
}

impl Shape {
    pub fn of(quick: bool) -> Self {
        if quick {
            let guest = Guest::Busybox;
            let (fault_guest, fault_rounds, fault_pages) = (guest, 1, 2600);
            Shape { guest, window_s: 2.0, reads_apart: false, fault_guest, fault_rounds, fault_pages }
        } else {
            let (guest, fault_guest, fault_rounds, fault_pages) = (Guest::Large, Guest::Debian, 8, 2600);
            Shape { guest, window_s: 30.0, reads_apart: true, fault_guest, fault_rounds, fault_pages }
        }
    }
}

pub fn run(options: &Options, record: &mut Record) -> Result<(), WarmRebootError> {
    let shape = Shape::of(options.quick);
    let rig = Rig::prepare(&options.folder, record.machine.accelerator)?;
    record.profile_by = rig.profile_by();
    for &profile in &options.profiles {
        for &stack in &options.stacks {
            let measured = session::measure(&rig, stack, profile, shape, record);
            leave_out_unless_hearth(measured, stack, profile, record)?;
        }
    }
    if options.stacks.contains(&Stack::HearthRefill) {
        faults::measure(&rig, Shape { guest: shape.fault_guest, ..shape }, record)?;
    }
    summary::summarise(record, &options.profiles);
    Ok(())
}

/// Records a side that does not run here as left out. Hearth itself must run.
fn leave_out_unless_hearth(
    measured: Result<(), WarmRebootError>,
    stack: Stack,
    profile: Profile,
    record: &mut Record,
) -> Result<(), WarmRebootError> {
    match measured {
        Err(error) if !stack.is_hearth() => {
            let why = format!("{}@{}: {}", stack.name(), profile.name(), crate::chain(&error));
            eprintln!("warm-reboot: left out: {why}");
            record.left_out.push(why);
            Ok(())
        }
        measured => measured,
    }
}

/// The load generator's targets on a machine.
pub fn targets(machine: &dyn Machine) -> Targets {
    let files = (0..FILES).map(|number| format!("/files/{number:03}.bin")).collect();
    Targets { address: machine.ports().web(), probe: "/".to_owned(), files, database: None }
}
