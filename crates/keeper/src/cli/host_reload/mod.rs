//! `hearth host-reload`: all machines of the runtime root over the change of the host's kernel.
//!
//! prepare: check -> lock of the fleet -> record -> every machine is parked -> kexec, by the operator
//! resume:  record -> a keeper for every machine, which finds the guest parked -> all run -> lock of the fleet is given back
//!
//! If one machine cannot be parked, those that are go on, and the host stays as it is.

mod check;
mod ground;
mod prepare;
mod resume;
mod status;

use std::path::PathBuf;
use std::time::Duration;

use clap::{Args, Subcommand};

use super::rejuvenate::time;
use super::{CliError, Context, Exit};
use crate::host_reload::{PLACE, PLACE_VARIABLE};

#[derive(Debug, Subcommand)]
pub enum Verb {
    /// Leave the guests of all machines that run in memory, and end their QEMUs and keepers.
    Prepare(PrepareArguments),
    /// Let the guests go on.
    ///
    /// Starts a keeper for each machine that was prepared, unless it has one: with systemd, if the machine ran under a unit
    /// hearth@NAME. A guest whose memory is not as it was left is not let go on; its machine boots.
    Resume(ResumeArguments),
    /// Show what became of each machine.
    Status(RecordArgument),
}

#[derive(Debug, Args)]
pub struct RecordArgument {
    /// What was prepared; must outlive the host's kernel.
    #[arg(long, value_name = "PATH", env = PLACE_VARIABLE, default_value = PLACE)]
    record: PathBuf,
}

#[derive(Debug, Args)]
pub struct PrepareArguments {
    #[command(flatten)]
    record: RecordArgument,
    /// Only say, machine by machine, whether it could be done.
    #[arg(long)]
    check: bool,
    /// For drills on a host that keeps its kernel: the memory may lie on any file system, and no kernel need be loaded.
    #[arg(long)]
    drill: bool,
    /// So many at a time.
    #[arg(long, value_name = "N", default_value_t = 4, value_parser = clap::value_parser!(u16).range(1..=256))]
    parallel: u16,
    /// A machine that cannot be parked is left as it is, and named. It will be lost with the host's kernel.
    #[arg(long)]
    keep_going: bool,
    /// Ends with `systemctl kexec`.
    #[arg(long, conflicts_with = "drill")]
    kexec: bool,
    #[command(flatten)]
    fleet: FleetArguments,
}

#[derive(Debug, Args)]
struct FleetArguments {
    /// Base address of a FleetLock server, which is asked before anything is stopped.
    #[arg(long, value_name = "URL")]
    fleet_lock: Option<String>,
    /// Group of hosts of which only so many may reload at a time.
    #[arg(long, value_name = "GROUP", default_value = "default", requires = "fleet_lock")]
    fleet_group: String,
    /// What the server knows this host by. /etc/machine-id if not given.
    #[arg(long, value_name = "ID", requires = "fleet_lock")]
    fleet_id: Option<String>,
    /// How long to wait for the lock: 30s, 10m, 1h.
    #[arg(long, value_name = "TIME", default_value = "10m", value_parser = time, requires = "fleet_lock")]
    fleet_wait: Duration,
}

#[derive(Debug, Args)]
pub struct ResumeArguments {
    #[command(flatten)]
    record: RecordArgument,
    /// How long a machine may take to run.
    #[arg(long, value_name = "TIME", default_value = "5m", value_parser = time)]
    patience: Duration,
}

pub fn perform(context: &mut Context<'_>, verb: Verb) -> Result<Exit, CliError> {
    match verb {
        Verb::Prepare(arguments) if arguments.check => check::show(context, &arguments),
        Verb::Prepare(arguments) => prepare::prepare(context, &arguments),
        Verb::Resume(arguments) => resume::resume(context, &arguments.record.record, arguments.patience),
        Verb::Status(RecordArgument { record }) => status::show(context, &record),
    }
}
