//! The command line: `hearth VERB`.
//!
//! parse -> one function a verb -> exit code
//!
//! Verbs that name a machine go through its API like any other client; only `run` and `check` look at the host. What a
//! verb has to say goes to standard output, in words or, with `--json`, as JSON; what went wrong goes to standard error,
//! once, as a chain.

use std::io::{self, Write};
use std::path::PathBuf;
use std::process::ExitCode;

use clap::{Args, Parser, Subcommand, ValueEnum};
use hearth_api::{CrashMethod, CrashRequest, RebootRequest, StopRequest};
use hearth_disk::image::OverlayError;
use hearth_recovery::lazy_restore::OrderError;
use hearth_recovery::snapshot::SnapshotError;
use hearth_recovery::vmcore::FileError;
use hearth_recovery::vmcore::linux::NotUnderstood;

use crate::client::ClientError;
use crate::fleet_lock::FleetLockError;
use crate::host_reload::RecordError;
use crate::machine::MachineError;
use crate::problem::Problem;
use crate::run::Start;
use crate::runtime_root::RuntimeRoot;
use crate::upgrade::Inheritance;

mod age;
mod clone;
mod configuration;
mod console;
mod dump;
mod events;
mod explain;
mod host_reload;
mod list;
mod machine;
mod object_store;
mod order;
mod pages;
mod parked;
mod plan;
mod rehearse;
mod rejuvenate;
mod remount;
mod restore;
mod save;
mod status;
#[cfg(test)]
mod tests;
mod text;
mod trust;
mod upgrade_keeper;
mod vmcore;
mod words;

pub use words::describe;

/// What the process ends with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Exit {
    Done = 0,
    /// It was tried and failed.
    Failed = 1,
    /// The command line or the configuration file is wrong, and must be changed.
    Wrong = 2,
    /// The machine does not run.
    NotRunning = 3,
    /// The configuration file is in order, its surroundings are not, or not yet. sysexits.h calls this EX_TEMPFAIL.
    Later = 75,
}

impl From<Exit> for ExitCode {
    fn from(exit: Exit) -> Self {
        Self::from(exit as u8)
    }
}

const EXIT_CODES: &str = "\
Exit codes:
  0  done
  1  it was tried and failed
  2  the command line or the configuration file is wrong: change it
  3  the machine does not run
  75 the machine cannot run now (an image in use, a missing file, too little memory): try again";

const EXAMPLES: &str = "\
Examples:
  hearth check web.toml            say everything that is wrong with a configuration
  hearth run web.toml              start the machine; stays in the foreground
  hearth status web                how it is, and what its ember was good for
  hearth console web               its serial console; Ctrl-] leaves it
  hearth reboot web                a new incarnation, with the file cache of the old one
  hearth rejuvenate web            another QEMU under the running guest
  hearth save web -o web-1         all of it to a folder, from which others can go on
  hearth restore web-1 --as web2   one of them
  hearth explain web               where the time of the last recovery went
  hearth events web --follow       what happens, as it happens
";

/// Recovery layer for QEMU/KVM virtual machines: memory outlives whatever died.
#[derive(Debug, Parser)]
#[command(name = "hearth", version, after_help = format!("{EXAMPLES}\n{EXIT_CODES}"))]
pub struct Cli {
    #[command(subcommand)]
    verb: Verb,

    /// Answer in JSON instead of words. Errors are words on standard error; the exit code tells them apart.
    #[arg(long, global = true)]
    json: bool,

    /// Folder that holds one folder per running machine.
    ///
    /// /run/hearth for root; $XDG_RUNTIME_DIR/hearth for others.
    #[arg(long, global = true, value_name = "FOLDER", env = "HEARTH_RUNTIME_ROOT")]
    runtime_root: Option<PathBuf>,
}

#[derive(Debug, Subcommand)]
enum Verb {
    /// Start a machine and look after it, in the foreground.
    ///
    /// If the machine's QEMU is still alive because only its keeper died, it is taken over as it runs. SIGTERM or
    /// Ctrl-C asks the guest to shut down; a second one ends it at once. HEARTH_LOG sets what is logged: error, warn,
    /// info (default), debug.
    #[command(after_help = "Example: hearth run /etc/hearth/web.toml")]
    Run(FileArgument),
    /// Say everything that is wrong with a configuration and its surroundings, without starting anything.
    #[command(
        after_help = "Example: hearth check web.toml --json\n\nExit codes: 0 the machine can run, 2 the file is wrong, 75 it cannot run now"
    )]
    Check {
        #[command(flatten)]
        file: FileArgument,
        /// Say whether this program could go on with the machine, which runs; `upgrade-keeper` asks this.
        #[arg(long)]
        take_over: bool,
    },
    /// List the machines.
    Ls,
    /// Show how a machine is.
    Status(NameArgument),
    /// Connect to the guest's serial console.
    ///
    /// Ctrl-] leaves it. Any number of consoles may be open; each first gets the recent output. Without a terminal,
    /// input and output are passed on as they are.
    Console(NameArgument),
    /// End the living incarnation and start the next one.
    ///
    /// The guest is asked to shut down and has a minute to do so.
    #[command(after_help = "Example: hearth reboot web --cold --force")]
    Reboot {
        #[command(flatten)]
        machine: NameArgument,
        /// Keep nothing of the old memory.
        #[arg(long)]
        cold: bool,
        /// Do not ask the guest: like a power cut.
        #[arg(long)]
        force: bool,
        #[command(flatten)]
        wait: WaitArgument,
    },
    /// Power a machine off and end its keeper.
    ///
    /// The guest is asked to shut down and has a minute to do so.
    Stop {
        #[command(flatten)]
        machine: NameArgument,
        /// Do not ask the guest: like a power cut.
        #[arg(long)]
        force: bool,
        #[command(flatten)]
        wait: WaitArgument,
    },
    /// Make the guest's kernel panic, for drills.
    ///
    /// The guest must be set up for it: `sysctl kernel.unknown_nmi_panic=1` for the method nmi, a keyboard driver and
    /// `sysctl kernel.sysrq=1` for sysrq.
    #[command(after_help = "Example: hearth crash web --wait")]
    Crash {
        #[command(flatten)]
        machine: NameArgument,
        /// How the guest is made to panic.
        #[arg(long, value_enum, default_value_t = Method::Nmi)]
        method: Method,
        /// Wait until the next incarnation runs.
        #[arg(long)]
        wait: bool,
    },
    /// Dump the memory of a machine's guest to a file, as a crash does.
    ///
    /// The guest runs on, but for a millisecond in which its registers are taken; so the dump does not show one moment,
    /// unless --pause is given. Formats, levels and tools are described in docs/crash-recovery.md.
    #[command(after_help = "Example: hearth dump web --level 17 -o /srv/web.vmcore")]
    Dump(dump::DumpArguments),
    /// Replace a machine's QEMU under its running guest.
    ///
    /// The guest stands still for some milliseconds; its memory, disks, console and connections stay. If anything goes
    /// wrong before the new QEMU has the guest it goes on with the old one, and this says why.
    #[command(after_help = "Examples: hearth rejuvenate web --qemu /opt/qemu-10/bin/qemu-system-x86_64
          hearth rejuvenate --all --parallel 4 --stagger 10s
          hearth rejuvenate --plan --boot 20s")]
    Rejuvenate(rejuvenate::RejuvenateArguments),
    /// Let another version of Hearth go on as a machine's keeper, under its running guest.
    ///
    /// The guest runs on; its disks stand still for about a second. A program that would not go on with the machine is refused
    /// before anything happens; if it fails later the old one is started again.
    #[command(after_help = "Example: hearth upgrade-keeper web --program /opt/hearth/hearth")]
    UpgradeKeeper(upgrade_keeper::UpgradeKeeperArguments),
    /// Keep all machines' guests in memory while the host gets another kernel.
    ///
    /// Their memory must lie on a file system of persistent or reserved memory (DAX), and the next kernel be started with kexec.
    /// docs/rejuvenation.md describes the set-up.
    #[command(after_help = "Examples: hearth host-reload prepare --check
          hearth host-reload prepare --fleet-lock https://airlock.example --fleet-id $(hostname) && systemctl kexec
          hearth host-reload resume")]
    HostReload {
        #[command(subcommand)]
        verb: host_reload::Verb,
    },
    /// Show how old a machine's QEMU is, and what speaks for another one.
    ///
    /// Uptime, memory of its own, file descriptors, and the version that is installed now.
    #[command(after_help = "Example: hearth age web")]
    Age(NameArgument),
    /// Save a machine to a folder, from which any number of machines can go on.
    ///
    /// Memory, devices and disks are saved as they are at one moment, while the guest runs: it stands still for that moment
    /// only. Ctrl-C calls it off.
    #[command(after_help = "Example: hearth save web -o /srv/snapshots/web-1")]
    Save(save::SaveArguments),
    /// Make a machine out of a snapshot and look after it, in the foreground.
    ///
    /// The guest goes on where it was saved, before all of its memory is there. The machine gets a folder of its own with a
    /// machine.toml and disks; these lie over the disks of the snapshot, which must stay where it is. One snapshot can be
    /// restored any number of times. Afterwards it is a machine like any other: `hearth run FOLDER/machine.toml`.
    #[command(after_help = "Example: hearth restore /srv/snapshots/web-1 --as web2 --folder /srv/web2")]
    Restore(restore::RestoreArguments),
    /// Find out what a restored guest uses first, in a clone that is thrown away.
    ///
    /// The clone reaches nobody; what it writes to its disks is lost. What it uses is added to the snapshot's working set.
    #[command(after_help = "Example: hearth rehearse /srv/snapshots/web-1 --until-port 80")]
    Rehearse(rehearse::RehearseArguments),
    /// Show which memory of a snapshot is there before a restored guest runs.
    #[command(after_help = "Example: hearth working-set /srv/snapshots/web-1")]
    WorkingSet {
        /// Folder of the snapshot, or its address as s3://BUCKET/PREFIX (gs, az, abfs, https: see the docs).
        snapshot: PathBuf,
        #[command(flatten)]
        store: object_store::StoreArguments,
    },
    /// Say that a machine's guest has done what it boots for.
    ///
    /// What it has read from its disks since its reset is held in memory for its next boot. For a script in the guest's
    /// service or on the host; the machine must have [remount] in its configuration.
    #[command(after_help = "Example: curl -fs http://127.0.0.1:8080/ >/dev/null && hearth ready web")]
    Ready(NameArgument),
    /// Show what a machine's next boot will read from its disks, and how much of it is held in memory.
    ///
    /// After a boot also how it went: hits and misses by disk and by volume, and what was read from the images.
    #[command(after_help = "Example: hearth remount-plan web --list")]
    RemountPlan {
        #[command(flatten)]
        machine: NameArgument,
        /// Show each range that the next boot will read, in that order.
        #[arg(long)]
        list: bool,
    },
    /// Show what happened to a machine.
    ///
    /// Works after the machine's end, too. With --json: one object a line.
    #[command(after_help = "Example: hearth events web --follow --json")]
    Events {
        #[command(flatten)]
        machine: NameArgument,
        /// Go on with what happens from now on, until the keeper ends.
        #[arg(long, short)]
        follow: bool,
        /// Only events after the one with this sequence.
        #[arg(long, value_name = "SEQUENCE", default_value_t = 0)]
        since: u64,
    },
    /// Show where the time of the last recovery went.
    Explain(NameArgument),
    /// Tell the guest that a disk's image was resized.
    #[command(after_help = "Example: truncate -s 20G data.img && hearth resize web data")]
    Resize {
        #[command(flatten)]
        machine: NameArgument,
        /// Name of the disk, as `hearth status` shows it.
        disk: String,
    },
    /// Look into a dump of a guest's memory.
    ///
    /// Reads kdump files (zstd, lzo, zlib or uncompressed) and ELF cores, of Hearth, makedumpfile or QEMU, also
    /// flattened or incomplete ones. For more there are crash and drgn.
    Vmcore {
        #[command(subcommand)]
        verb: VmcoreVerb,
    },
    /// Show a configuration as the keeper understands it, with all defaults filled in: sizes in bytes, paths absolute. It is no
    /// machine.toml.
    Config {
        /// A configuration file (has a "/" or ends in .toml), or the name of a running machine.
        #[arg(value_name = "FILE|NAME")]
        of: String,
    },
    /// Print a completion script for a shell.
    #[command(after_help = "Example: hearth completions bash > /etc/bash_completion.d/hearth")]
    Completions { shell: clap_complete::Shell },
    /// Write the manual pages.
    #[command(after_help = "Example: hearth man /usr/local/share/man/man1")]
    Man {
        /// Folder to write them to; it must exist.
        folder: PathBuf,
    },
}

#[derive(Debug, Subcommand)]
enum VmcoreVerb {
    /// Show what a dump is: kernel, panic, pages, registers and the end of the kernel log.
    #[command(after_help = "Example: hearth vmcore info /var/lib/hearth/web/dumps/3.vmcore --json")]
    Info(DumpArgument),
    /// Print the kernel log that is in a dump.
    #[command(after_help = "Example: hearth vmcore dmesg 3.vmcore | tail -40")]
    Dmesg(DumpArgument),
}

#[derive(Debug, Args)]
struct DumpArgument {
    /// The dump.
    file: PathBuf,
}

#[derive(Debug, Args)]
struct FileArgument {
    /// The machine's configuration file; docs/config.md describes it.
    file: PathBuf,
}

#[derive(Debug, Args)]
struct NameArgument {
    /// Name of the machine.
    name: String,
}

#[derive(Debug, Args)]
struct WaitArgument {
    /// Do not wait until it is done.
    #[arg(long)]
    no_wait: bool,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
enum Method {
    /// Non-maskable interrupt.
    Nmi,
    /// The keys Alt-SysRq-C.
    Sysrq,
}

/// What a verb can fail with.
#[derive(Debug, thiserror::Error)]
pub enum CliError {
    #[error("{name} does not run; {}", words::others(others, root))]
    NotRunning { name: String, others: Vec<String>, root: PathBuf },
    #[error("{name}: its keeper has died and its QEMU (pid {qemu_pid}) runs on; `hearth run FILE` takes it over")]
    Orphaned { name: String, qemu_pid: u32 },
    #[error("{}", guest.sentence(name))]
    Parked { name: String, guest: Box<parked::ParkedGuest> },
    #[error(transparent)]
    Client(#[from] ClientError),
    #[error("{file}: the machine cannot run")]
    Configuration { file: PathBuf, problems: Vec<Problem> },
    #[error("{file}: the machine cannot run now")]
    Surroundings { file: PathBuf, problems: Vec<Problem> },
    #[error("{file}: the machine's QEMU (pid {qemu_pid}) runs on; correct the file, and the next keeper takes it over")]
    CannotTakeOver { file: PathBuf, qemu_pid: u32, problems: Vec<Problem> },
    #[error("no machine in {root} has been rejuvenated yet: do it with one, then ask again")]
    NoHistory { root: PathBuf },
    #[error("{name}: {what}")]
    Machine { name: String, what: String },
    #[error("{path}: cannot be used")]
    File { path: PathBuf, source: io::Error },
    #[error(transparent)]
    Snapshot(#[from] SnapshotError),
    #[error(
        "{file}: names what only the operator of this host may name: {what}; say it yourself with --set KEY=VALUE, or restore with \
         --trust-config if you trust whoever made the snapshot"
    )]
    Untrusted { file: PathBuf, what: String },
    #[error("{file}: the machine has other disks than the snapshot ({configured}; {saved}): it was not saved so")]
    OtherDisks { file: PathBuf, configured: String, saved: String },
    #[error(transparent)]
    Overlay(#[from] OverlayError),
    #[error(transparent)]
    Order(#[from] OrderError),
    #[error(transparent)]
    Vmcore(#[from] FileError),
    #[error("this program cannot go on with the machine")]
    TakeOver(#[source] MachineError),
    #[error("{path}: no kernel log can be read from it")]
    NoLog { path: PathBuf, source: NotUnderstood },
    #[error(transparent)]
    Record(#[from] RecordError),
    #[error(transparent)]
    FleetLock(#[from] FleetLockError),
    #[error("{0}")]
    HostReload(String),
    #[error("the terminal cannot be used")]
    Terminal(#[source] io::Error),
    #[error("no free port on this host")]
    Port(#[source] io::Error),
    #[error("Ctrl-C cannot be listened for")]
    Signals(#[source] io::Error),
    #[error("the output cannot be written")]
    Output(#[from] io::Error),
}

impl CliError {
    fn exit(&self) -> Exit {
        match self {
            Self::NotRunning { .. } | Self::Orphaned { .. } | Self::Parked { .. } => Exit::NotRunning,
            Self::Configuration { .. } => Exit::Wrong,
            Self::Surroundings { .. } | Self::CannotTakeOver { .. } => Exit::Later,
            // `hearth events web | head` is no failure.
            Self::Output(error) if error.kind() == io::ErrorKind::BrokenPipe => Exit::Done,
            _ => Exit::Failed,
        }
    }
}

/// What every verb needs.
struct Context<'a> {
    root: RuntimeRoot,
    json: bool,
    out: &'a mut dyn Write,
}

/// The whole program. `run` looks after a machine until it has stopped.
pub fn main(run: fn(Start) -> ExitCode) -> ExitCode {
    let cli = Cli::parse();
    log_to_stderr();
    let mut out = io::stdout().lock();
    let done = match cli.verb {
        // The machine may run for years: the lock on standard output is not taken along.
        Verb::Run(FileArgument { file }) => {
            drop(out);
            let (root, mut inheritance) = (root_of(cli.runtime_root), Inheritance::of_this_process());
            clone::remove_leftovers(&root);
            configuration::for_run(&file, &root)
                .inspect_err(|error| inheritance.give_back(&crate::chain(error)))
                .map(|in_force| run(Start { in_force, root, restore: None, inheritance }))
        }
        Verb::Restore(arguments) => {
            drop(out);
            let root = root_of(cli.runtime_root);
            let prepared = restore::prepare(arguments, &root);
            prepared.map(|(in_force, order)| {
                run(Start { in_force, root, restore: Some(order), inheritance: Inheritance::default() })
            })
        }
        Verb::Rehearse(arguments) => {
            drop(out);
            let root = root_of(cli.runtime_root);
            rehearse::rehearse(arguments, root, run)
        }
        verb => perform(verb, cli.json, cli.runtime_root, &mut out).map(ExitCode::from),
    };
    done.unwrap_or_else(|error| {
        complain(&error);
        error.exit().into()
    })
}

fn root_of(given: Option<PathBuf>) -> RuntimeRoot {
    given.map_or_else(RuntimeRoot::for_this_user, RuntimeRoot::new)
}

/// To standard error: one line an event, as systemd's journal likes it. HEARTH_LOG takes what `tracing` takes.
fn log_to_stderr() {
    let filter = tracing_subscriber::EnvFilter::try_from_env("HEARTH_LOG")
        .unwrap_or_else(|_| tracing_subscriber::EnvFilter::new("info"));
    let ansi = rustix::termios::isatty(io::stderr());
    // Fails only if a log was set up before, as in tests.
    let _ = tracing_subscriber::fmt().with_env_filter(filter).with_writer(io::stderr).with_ansi(ansi).try_init();
}

fn complain(error: &CliError) {
    if error.exit() == Exit::Done {
        return;
    }
    if let CliError::Configuration { problems, .. }
    | CliError::Surroundings { problems, .. }
    | CliError::CannotTakeOver { problems, .. } = error
    {
        problems.iter().for_each(|problem| eprintln!("{problem}"));
    }
    eprintln!("hearth: {}", crate::chain(error));
}

fn perform(verb: Verb, json: bool, root: Option<PathBuf>, out: &mut dyn Write) -> Result<Exit, CliError> {
    let mut context = Context { root: root_of(root), json, out };
    let context = &mut context;
    match verb {
        Verb::Run(_) | Verb::Restore(_) | Verb::Rehearse(_) => unreachable!("`main` takes these"),
        Verb::WorkingSet { snapshot, store } => restore::working_set(context, &snapshot, &store),
        Verb::Check { file: FileArgument { file }, take_over: false } => configuration::check(context, &file),
        Verb::Check { file: FileArgument { file }, take_over: true } => configuration::check_take_over(context, &file),
        Verb::Ls => list::list(context),
        Verb::Status(NameArgument { name }) => status::show(context, &name),
        Verb::Console(NameArgument { name }) => console::connect(context, &name),
        Verb::Reboot { machine, cold, force, wait } => {
            order::reboot(context, &machine.name, RebootRequest { cold, force }, !wait.no_wait)
        }
        Verb::Stop { machine, force, wait } => {
            order::stop(context, &machine.name, StopRequest { force }, !wait.no_wait)
        }
        Verb::Crash { machine, method, wait } => {
            order::crash(context, &machine.name, CrashRequest { method: method.into() }, wait)
        }
        Verb::Dump(arguments) => dump::perform(context, arguments),
        Verb::Rejuvenate(arguments) => rejuvenate::perform(context, arguments),
        Verb::UpgradeKeeper(arguments) => upgrade_keeper::perform(context, arguments),
        Verb::HostReload { verb } => host_reload::perform(context, verb),
        Verb::Age(NameArgument { name }) => age::show(context, &name),
        Verb::Save(arguments) => save::save(context, arguments),
        Verb::Ready(NameArgument { name }) => remount::ready(context, &name),
        Verb::RemountPlan { machine, list } => remount::show(context, &machine.name, list),
        Verb::Events { machine, follow, since } => events::show(context, &machine.name, since, follow),
        Verb::Explain(NameArgument { name }) => explain::show(context, &name),
        Verb::Resize { machine, disk } => order::resize(context, &machine.name, &disk),
        Verb::Vmcore { verb: VmcoreVerb::Info(DumpArgument { file }) } => vmcore::info(context, &file),
        Verb::Vmcore { verb: VmcoreVerb::Dmesg(DumpArgument { file }) } => vmcore::dmesg(context, &file),
        Verb::Config { of } => configuration::show(context, &of),
        Verb::Completions { shell } => pages::completions(context, shell),
        Verb::Man { folder } => pages::manual(context, &folder),
    }
}

/// The keeper may have been started in another folder.
fn absolute(path: PathBuf) -> PathBuf {
    std::path::absolute(&path).unwrap_or(path)
}

impl From<Method> for CrashMethod {
    fn from(method: Method) -> Self {
        match method {
            Method::Nmi => Self::Nmi,
            Method::Sysrq => Self::Sysrq,
        }
    }
}

impl Context<'_> {
    /// One JSON value on a line of its own.
    fn write_json(&mut self, value: &impl serde::Serialize) -> Result<(), CliError> {
        let text = serde_json::to_string(value).expect("what is shown is plain data with text keys");
        writeln!(self.out, "{text}")?;
        Ok(self.out.flush()?)
    }

    fn write_line(&mut self, line: &str) -> Result<(), CliError> {
        writeln!(self.out, "{line}")?;
        Ok(self.out.flush()?)
    }
}
