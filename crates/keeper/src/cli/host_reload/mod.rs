//! `hearth host-reload`: keeps all machines of the runtime root while the host changes its kernel.
//!
//! prepare: check -> lock of the fleet -> record -> every machine is parked -> kexec, by the operator
//! resume:  record -> a keeper for every machine, which finds the guest parked -> all run -> lock of the fleet is given back
//!
//! If one machine cannot be parked, the parked ones resume and the host keeps its kernel.

mod check;
mod host_root;
mod prepare;
mod resume;
mod status;

use std::path::PathBuf;
use std::time::Duration;

use clap::{Args, Subcommand};

use super::rejuvenation::time;
use super::{CliError, Context, Exit};
use crate::host_reload::{PLACE, PLACE_VARIABLE};

#[derive(Debug, Subcommand)]
pub enum Verb {
    /// Park all running guests and end their QEMUs and keepers.
    Prepare(PrepareArguments),
    /// Resume the parked guests.
    ///
    /// Starts a keeper for each prepared machine that has none, through systemd if the machine ran under a unit
    /// hearth@NAME. If a guest's memory has changed since it was parked, its machine boots instead.
    Resume(ResumeArguments),
    /// Show what became of each machine.
    Status(RecordArgument),
}

#[derive(Debug, Args)]
pub struct RecordArgument {
    /// File that lists the prepared machines; must survive the kernel change.
    #[arg(long, value_name = "PATH", env = PLACE_VARIABLE, default_value = PLACE)]
    record: PathBuf,
}

#[derive(Debug, Args)]
pub struct PrepareArguments {
    #[command(flatten)]
    record: RecordArgument,
    /// Only report, for each machine, whether it could be parked.
    #[arg(long)]
    check: bool,
    /// Practise on a host that keeps its kernel.
    ///
    /// The memory may lie on any file system, and no kernel need be loaded.
    #[arg(long)]
    drill: bool,
    /// Maximum number of machines handled in parallel.
    #[arg(long, value_name = "N", default_value_t = 4, value_parser = clap::value_parser!(u16).range(1..=256))]
    parallel: u16,
    /// Leave machines that cannot be parked running, and report them.
    ///
    /// They are lost with the host's kernel.
    #[arg(long)]
    keep_going: bool,
    /// Run `systemctl kexec` at the end.
    #[arg(long, conflicts_with = "drill")]
    kexec: bool,
    #[command(flatten)]
    fleet: FleetArguments,
}

#[derive(Debug, Args)]
struct FleetArguments {
    /// Base URL of a FleetLock server to ask before stopping anything.
    #[arg(long, value_name = "URL")]
    fleet_lock: Option<String>,
    /// FleetLock group, which limits how many hosts reload at once.
    #[arg(long, value_name = "GROUP", default_value = "default", requires = "fleet_lock")]
    fleet_group: String,
    /// This host's id at the server (default: from /etc/machine-id).
    #[arg(long, value_name = "ID", requires = "fleet_lock")]
    fleet_id: Option<String>,
    /// How long to wait for the lock, such as 30s or 10m.
    #[arg(long, value_name = "TIME", default_value = "10m", value_parser = time, requires = "fleet_lock")]
    fleet_wait: Duration,
}

#[derive(Debug, Args)]
pub struct ResumeArguments {
    #[command(flatten)]
    record: RecordArgument,
    /// How long each machine may take to run.
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
