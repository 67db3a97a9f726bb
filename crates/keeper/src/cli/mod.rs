//! The command line: `hearth VERB`.
//!
//! parse -> one function a verb -> exit code
//!
//! Verbs that name a machine use its API like any other client; only `run` and `check` look at the host. Results go to
//! standard output, as text or, with `--json`, as JSON. An error goes to standard error, once, as a chain.

use std::io::{self, BufRead, IsTerminal, Write};
use std::path::PathBuf;
use std::process::ExitCode;

use clap::{Args, CommandFactory, FromArgMatches, Parser, Subcommand};
use clap_complete::CompleteEnv;
use hearth_api::{CrashMethod, CrashRequest, RebootRequest, StopRequest};
use hearth_disk::image::{ImageError, OverlayError};
use hearth_libvirt::virsh::VirshError;
use hearth_recovery::lazy_restore::OrderError;
use hearth_recovery::snapshot::SnapshotError;
use hearth_recovery::vmcore::FileError;
use hearth_recovery::vmcore::linux::NotUnderstood;

use crate::client::ClientError;
use crate::config::{is_name, name_hint};
use crate::fleet_lock::FleetLockError;
use crate::folders::FolderError;
use crate::home::Home;
use crate::host_reload::RecordError;
use crate::machine::MachineError;
use crate::problem::Problem;
use crate::run::Start;
use crate::runtime_root::RuntimeRoot;
use crate::upgrade::Inheritance;

mod age;
mod arriving;
mod attach;
mod backing;
#[cfg(test)]
mod browser;
mod claim;
mod clone;
mod complete;
mod configuration;
mod console;
mod departed;
mod disk_copy;
mod dump;
mod events;
mod explain;
mod export;
mod fast_remount;
mod file_lock;
mod hook;
mod host;
mod host_reload;
mod import;
mod lazy_restore;
mod list;
mod log;
mod machine;
mod manual;
mod new;
mod object_store;
mod order;
mod pages;
mod parked;
mod plan;
mod rehearse;
mod rejuvenation;
mod report;
mod rm;
mod save;
mod service;
mod set;
mod status;
mod survey;
#[cfg(test)]
mod tests;
mod text;
mod top;
mod trust;
mod upgrade_keeper;
mod view;
mod vmcore;
mod words;

pub use pages::reference;
pub use words::describe;

use text::shown;

/// Exit code of the process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Exit {
    Done = 0,
    /// The operation failed.
    Failed = 1,
    /// The command line or the configuration file is wrong.
    Wrong = 2,
    /// The machine is not running.
    NotRunning = 3,
    /// Nothing in the configuration file has to change, but the host cannot run the machine now. sysexits.h calls this
    /// EX_TEMPFAIL.
    Later = 75,
}

impl Exit {
    /// For a machine with these problems. One that stays until the file is edited decides: trying again is no use.
    fn of(problems: &[Problem]) -> Self {
        let mut errors = problems.iter().filter(|problem| problem.is_error());
        if errors.clone().any(|problem| !problem.may_pass) {
            Self::Wrong
        } else if errors.next().is_some() {
            Self::Later
        } else {
            Self::Done
        }
    }
}

impl From<Exit> for ExitCode {
    fn from(exit: Exit) -> Self {
        Self::from(exit as u8)
    }
}

/// Exit codes of all verbs: the code, its meaning, and what systemd does when a keeper ends with it.
const EXIT_CODES: [(u8, &str, &str); 6] = [
    (0, "success; of `run`: the machine has stopped", "stays down"),
    (1, "the operation failed", "starts the next keeper"),
    (2, "wrong command line or configuration file: correct it", "gives up"),
    (3, "the machine is not running", ""),
    (70, "a thread of the keeper panicked or hung: its log says which", "starts the next keeper"),
    (
        75,
        "the machine cannot run now (an image in use, a port taken, a missing file, too little memory): try again",
        "tries again",
    ),
];

/// The exit codes as `hearth --help` shows them.
fn exit_codes() -> String {
    let lines = EXIT_CODES.map(|(code, meaning, _)| format!("\n  {code:<2} {meaning}"));
    format!("Exit codes:{}", lines.concat())
}

/// Verbs that print no JSON.
const WITHOUT_JSON: [&str; 9] = ["run", "host", "hook", "top", "console", "view", "rehearse", "completions", "man"];

const EXAMPLES: &str = "\
Examples:
  hearth new web --image debian-12.qcow2 --ssh-key ~/.ssh/id.pub
                                   create a machine from a disk image
  hearth start web                 start it in the background, as a systemd unit
  hearth check web.toml            report everything wrong with a configuration
  hearth run web.toml              start the machine; stays in the foreground
  hearth status web                show the machine's state and how its ember was used
  hearth console web               connect to its serial console; Ctrl-] disconnects
  hearth view web                  open a VNC viewer on its screen, if it has one
  hearth reboot web                reboot; the old guest's cached blocks stay in memory
  hearth rejuvenate web            replace QEMU under the running guest
  hearth save web -o web-1         save the machine to a folder
  hearth restore web-1 --as web2   create a new machine from that folder
  hearth explain web               show where the last recovery spent its time
  hearth events web --follow       print events as they happen
";

/// Keep virtual machines' memory across guest, QEMU and host restarts.
#[derive(Debug, Parser)]
#[command(name = "hearth", version, after_help = format!("{EXAMPLES}\n{}", exit_codes()))]
pub struct Cli {
    #[command(subcommand)]
    verb: Verb,

    /// Print JSON instead of text.
    ///
    /// Errors remain text on standard error; exit codes tell them apart.
    #[arg(long, global = true)]
    json: bool,

    /// Folder with one subfolder per running machine.
    ///
    /// The default is /run/hearth for root and $XDG_RUNTIME_DIR/hearth for other users.
    #[arg(long, global = true, value_name = "FOLDER", env = "HEARTH_RUNTIME_ROOT")]
    runtime_root: Option<PathBuf>,
}

#[derive(Debug, Subcommand)]
enum Verb {
    /// Create a machine from a disk image.
    ///
    /// Writes the machine's configuration and a disk over the image, for root below /etc/hearth and /var/lib/hearth, for others
    /// below ~/.config/hearth and ~/.local/state/hearth. Then checks it as `check` does, and prints the next command.
    #[command(after_help = "Example: hearth new web --image debian-12.qcow2 --ssh-key ~/.ssh/id.pub --forward 8080:80")]
    New(new::NewArguments),
    /// Start a machine and supervise it in the foreground.
    ///
    /// If only the keeper died and its QEMU still runs, the new keeper takes it over. SIGTERM or Ctrl-C asks the guest
    /// to shut down; a second one ends it at once. HEARTH_LOG sets the log level: error, warn, info (default) or debug.
    #[command(after_help = "Example: hearth run /etc/hearth/web.toml")]
    Run(FileArgument),
    /// Check a configuration and its host without starting anything.
    #[command(
        after_help = "Example: hearth check web.toml --json\n\nExit codes: 0 the machine can run, 2 the file is wrong, 75 the machine cannot run now"
    )]
    Check {
        #[command(flatten)]
        file: FileArgument,
        /// Check whether this program could take over the running machine.
        ///
        /// `upgrade-keeper` runs this.
        #[arg(long)]
        take_over: bool,
    },
    /// Give the disks of a libvirt domain to Hearth.
    ///
    /// The domain stays libvirt's. From its next start on, Hearth serves its disks, and its next guest finds what its last one had in
    /// memory. `attach` shows what it changes, and asks. For a domain that is attached already: takes its new disks.
    #[command(after_help = "Example: hearth attach web && virsh shutdown web    (once it is off: virsh start web)")]
    Attach(attach::AttachArguments),
    /// Give the disks of a domain back to libvirt.
    ///
    /// What `attach` changed in the domain's definition is undone, from its next start on; other changes stay.
    #[command(after_help = "Example: hearth detach web")]
    Detach(attach::DetachArguments),
    /// Make a machine of Hearth's own from a libvirt domain.
    ///
    /// Writes FOLDER/machine.toml, which names the domain's own disks, and lists what it cannot carry over. The domain must
    /// be shut off, and is not changed. From then on start either of them, never both: each writes to the same disks.
    #[command(
        after_help = "Example: hearth import web && hearth check web/machine.toml && hearth run web/machine.toml"
    )]
    Import(import::ImportArguments),
    /// Look after all machines of this host: page, metrics, attached domains.
    ///
    /// Runs in the foreground, once a host. For attached domains it follows libvirt's events: with it, a guest that reboots inside its QEMU finds all of its last guest's blocks in
    /// memory; without it, only those that fit into the budget. It also has crashed guests dumped, and starts their domains again;
    /// without it they stand still.
    #[command(after_help = "Example: hearth host --web 127.0.0.1:9180")]
    Host(host::HostArguments),
    /// What libvirt's hook calls.
    #[command(hide = true)]
    Hook(hook::HookArguments),
    /// List the machines.
    Ls,
    /// Watch all machines in the terminal.
    ///
    /// Up and down choose a machine, Enter shows more of it and the commands that act on it, Esc goes back, and q ends.
    Top,
    /// Show a machine's state.
    Status(NameArgument),
    /// Connect to the guest's serial console.
    ///
    /// Ctrl-] disconnects. Several consoles may be open at once; each first shows the recent output. Without a
    /// terminal, input and output pass through unchanged.
    Console(NameArgument),
    /// Open a VNC viewer on the guest's screen.
    ///
    /// The machine needs `display = "vnc"`. Without a desktop or a viewer, the error says how to see the screen from elsewhere.
    View(NameArgument),
    /// Reboot the guest into a new incarnation.
    ///
    /// The guest is asked to shut down. After a minute its power is cut.
    #[command(after_help = "Example: hearth reboot web --cold --force")]
    Reboot {
        #[command(flatten)]
        machine: NameArgument,
        /// Do not reuse the old memory.
        #[arg(long)]
        cold: bool,
        /// Cut the power instead of asking the guest.
        #[arg(long)]
        force: bool,
        #[command(flatten)]
        wait: WaitArgument,
    },
    /// Start a machine in the background, as a systemd unit.
    ///
    /// The unit is hearth@NAME: the system's for root, the user's own for others. It needs a configuration where `new` writes it.
    Start(NameArgument),
    /// Have a machine start with the host.
    Enable(NameArgument),
    /// Have a machine no longer start with the host.
    ///
    /// If it runs, it keeps running.
    Disable(NameArgument),
    /// Change keys of a machine's configuration.
    ///
    /// The file keeps its comments. A change that would keep the machine from running is refused, also one that names a file or program
    /// that is not there yet, but not one for which the host lacks memory or a port at the moment. For a running machine, the output
    /// says what each change waits for.
    #[command(after_help = "Example: hearth set web cpus=2 'nets[0].forward=[\"8080:80\"]'")]
    Set(set::SetArguments),
    /// Remove a stopped machine and the files that Hearth made for it.
    ///
    /// Lists them first, and asks. Images that Hearth did not make stay, and so does the one that `new` started from.
    Rm(rm::RemoveArguments),
    /// Power a machine off and end its keeper.
    ///
    /// The guest is asked to shut down. After a minute its power is cut. A machine that an error has ended counts as stopped from then on,
    /// and systemd does not try again to start it.
    Stop {
        #[command(flatten)]
        machine: NameArgument,
        /// Cut the power instead of asking the guest.
        #[arg(long)]
        force: bool,
        #[command(flatten)]
        wait: WaitArgument,
    },
    /// Make the guest's kernel panic, for drills.
    ///
    /// The guest must be prepared: `sysctl kernel.unknown_nmi_panic=1` for the method nmi; a keyboard driver and
    /// `sysctl kernel.sysrq=1` for sysrq.
    #[command(after_help = "Example: hearth crash web --wait")]
    Crash {
        #[command(flatten)]
        machine: NameArgument,
        /// How to make the guest panic.
        #[arg(long, value_enum, default_value_t = CrashMethod::Nmi)]
        method: CrashMethod,
        /// Wait until the next incarnation runs.
        #[arg(long)]
        wait: bool,
    },
    /// Dump the memory of a machine's guest to a file.
    ///
    /// The guest keeps running, except for about a millisecond while its registers are read. The dump therefore does
    /// not show a single moment, unless you give --pause. docs/crash-recovery.md describes formats, levels and tools.
    #[command(after_help = "Example: hearth dump web --level 17 -o /srv/web.vmcore")]
    Dump(dump::DumpArguments),
    /// Replace a machine's QEMU under its running guest.
    ///
    /// The guest pauses for some milliseconds; its memory, disks and console stay, and so do connections over tap and
    /// passt; those of `kind = "user"` are lost. If anything fails before the new QEMU has the guest, the guest
    /// continues on the old one, and the command prints the reason.
    #[command(after_help = "Examples: hearth rejuvenate web --qemu /opt/qemu-10/bin/qemu-system-x86_64
          hearth rejuvenate --all --parallel 4 --stagger 10s
          hearth rejuvenate --plan --boot 20s")]
    Rejuvenate(rejuvenation::RejuvenateArguments),
    /// Replace a machine's keeper with another version of Hearth.
    ///
    /// The guest keeps running; its disks pause for about a second. A program that cannot take over the machine is
    /// refused before anything happens. If it fails later, the old program starts again.
    #[command(after_help = "Example: hearth upgrade-keeper web --program /opt/hearth/hearth")]
    UpgradeKeeper(upgrade_keeper::UpgradeKeeperArguments),
    /// Keep all guests in memory while the host changes kernels.
    ///
    /// Guest memory must lie on a DAX file system on persistent or reserved memory, and the next kernel must be started
    /// with kexec. docs/host-reload.md describes the set-up.
    #[command(after_help = "Examples: hearth host-reload prepare --check
          hearth host-reload prepare --fleet-lock https://airlock.example --fleet-id $(hostname) && systemctl kexec
          hearth host-reload resume")]
    HostReload {
        #[command(subcommand)]
        verb: host_reload::Verb,
    },
    /// Show a QEMU's age and whether it should be replaced.
    ///
    /// Shows its uptime, own memory and file descriptors, and the version installed now.
    #[command(after_help = "Example: hearth age web")]
    Age(NameArgument),
    /// Save a running machine to a folder, for later restores.
    ///
    /// Memory, devices and disks are saved as of one moment. The guest keeps running and pauses only for that moment.
    /// Ctrl-C cancels the save.
    #[command(after_help = "Example: hearth save web -o /srv/snapshots/web-1")]
    Save(save::SaveArguments),
    /// Create a machine from a snapshot and run it.
    ///
    /// The guest continues where it was saved, before all of its memory is loaded. The new machine gets its own folder
    /// with a machine.toml and disks. These disks are overlays on the snapshot's disks, so the snapshot must stay where
    /// it is. You can restore one snapshot any number of times. To start the machine again later: `hearth run
    /// FOLDER/machine.toml`.
    #[command(after_help = "Example: hearth restore /srv/snapshots/web-1 --as web2 --folder /srv/web2")]
    Restore(lazy_restore::RestoreArguments),
    /// Record what a restored guest uses first, in a throwaway clone.
    ///
    /// The clone has no network access, and its disk writes are discarded. The pages that it uses are added to the
    /// snapshot's working set.
    #[command(after_help = "Example: hearth rehearse /srv/snapshots/web-1 --until-port 80")]
    Rehearse(rehearse::RehearseArguments),
    /// Show which pages a restore loads before the guest runs.
    #[command(after_help = "Example: hearth working-set /srv/snapshots/web-1")]
    WorkingSet {
        /// Snapshot folder, or an address such as s3://BUCKET/PREFIX.
        ///
        /// Addresses of gs, az, abfs and https work too; see docs/object-store.md.
        #[arg(add = complete::snapshots())]
        snapshot: PathBuf,
        #[command(flatten)]
        store: object_store::StoreArguments,
    },
    /// Copy a disk of a running machine to a file, as it is at one moment.
    ///
    /// The disk's requests wait for that moment: usually milliseconds, at most 10 s for those in flight. The copy then shares its
    /// blocks with the image where the file system can (reflink: btrfs, xfs). Elsewhere it is written while the guest goes on, whose
    /// first write to a part that is not copied yet waits until that part is read. If the storage of FILE hangs, the guest's writes
    /// wait for it at most 2 s; then the copy fails.
    ///
    /// If the guest has an agent, its file systems are frozen for that moment, and its writes wait meanwhile. If not, or if the
    /// agent does not answer within 10 s, the copy is crash-consistent: as after a power cut. The output says which.
    ///
    /// The copy has the image's format. FILE has its name only when it is complete. Ctrl-C cancels the copy. If the guest's file
    /// systems stay frozen because this command was killed with -9, `virsh domfsthaw NAME` thaws those of a libvirt domain.
    #[command(after_help = "Example: hearth copy-disk web root /srv/backup/root.img")]
    CopyDisk(disk_copy::CopyDiskArguments),
    /// Serve a disk of a running machine, as it is at one moment, over NBD.
    ///
    /// Takes a copy as `copy-disk` does, and serves it read-only with qemu-nbd (Debian: qemu-utils) at a unix socket, whose
    /// address is printed. The copy is beside the image, or in $TMPDIR (default: /var/tmp) for a block device. Both end with this
    /// command, by Ctrl-C or SIGTERM.
    ///
    /// For backups of what has changed: --checkpoint gives the moment a name, and a later export with --since that name tells which
    /// blocks were written in between. The keeper keeps 8 checkpoints of a disk. They are lost when it ends, and when the image is
    /// closed or resized: then --since is refused, and a full backup is due.
    #[command(
        after_help = "Example: hearth export web root    (elsewhere: nbdcopy 'nbd+unix:///?socket=...' root.img)"
    )]
    Export(export::ExportArguments),
    /// Mark a machine's boot as finished.
    ///
    /// The blocks that the guest has read from its disks since its reset stay in memory for its next boot. This is for
    /// scripts. The machine must have [remount] in its configuration.
    #[command(after_help = "Example: curl -fs http://127.0.0.1:8080/ >/dev/null && hearth ready web")]
    Ready(NameArgument),
    /// Show what the next boot will read, and what memory holds.
    ///
    /// After a boot, also shows hits and misses by disk and volume, and what was read from the images.
    #[command(after_help = "Example: hearth remount-plan web --list")]
    RemountPlan {
        #[command(flatten)]
        machine: NameArgument,
        /// List each range that the next boot will read, in order.
        #[arg(long)]
        list: bool,
    },
    /// Show a machine's events.
    ///
    /// Also works after the machine has stopped. With --json: one object per line.
    #[command(after_help = "Example: hearth events web --follow --json")]
    Events {
        #[command(flatten)]
        machine: NameArgument,
        /// Keep printing new events until the keeper ends.
        #[arg(long, short)]
        follow: bool,
        /// Print only events after this sequence number.
        #[arg(long, value_name = "SEQUENCE", default_value_t = 0)]
        since: u64,
    },
    /// Show where the last recovery spent its time.
    Explain(NameArgument),
    /// Write a machine's last recoveries to an HTML file.
    ///
    /// Shows for each recovery its phases, memory over time, reads from memory and from the disks, the crash message and the dump,
    /// and compares its downtime with earlier ones. The file is self-contained. It can also be written after the machine has
    /// stopped, while its events are there.
    #[command(after_help = "Example: hearth report web -o /tmp/web.html")]
    Report(report::ReportArguments),
    /// Tell the guest that a disk's image was resized.
    #[command(after_help = "Example: truncate -s 20G data.img && hearth resize web data")]
    Resize {
        #[command(flatten)]
        machine: NameArgument,
        /// Name of the disk, as shown by `hearth status`.
        #[arg(add = complete::disks())]
        disk: String,
    },
    /// Inspect a dump of a guest's memory.
    ///
    /// Reads kdump files (zstd, lzo, zlib or uncompressed) and ELF cores from Hearth, makedumpfile or QEMU, including
    /// incomplete ones. Use crash or drgn for deeper analysis.
    Vmcore {
        #[command(subcommand)]
        verb: VmcoreVerb,
    },
    /// Show a configuration with all defaults filled in.
    ///
    /// Sizes are in bytes and paths are absolute; the output is not a machine.toml.
    Config {
        /// Configuration file, or name of a running machine.
        ///
        /// A file's path has a "/" or ends in .toml.
        #[arg(value_name = "FILE|NAME")]
        of: String,
    },
    /// Print a completion script for a shell.
    #[command(after_help = "Example: hearth completions bash > /etc/bash_completion.d/hearth")]
    Completions { shell: clap_complete::Shell },
    /// Write the manual pages to a folder.
    ///
    /// Those of commands go into its folder man1, hearth.toml(5) into man5.
    #[command(after_help = "Example: hearth man /usr/local/share/man")]
    Man {
        /// Folder to write to; must exist.
        folder: PathBuf,
    },
}

#[derive(Debug, Subcommand)]
enum VmcoreVerb {
    /// Show kernel, panic, pages, registers and the log's end.
    #[command(after_help = "Example: hearth vmcore info /var/lib/hearth/web/dumps/3.vmcore --json")]
    Info(DumpArgument),
    /// Print the kernel log from a dump.
    #[command(after_help = "Example: hearth vmcore dmesg 3.vmcore | tail -40")]
    Dmesg(DumpArgument),
}

#[derive(Debug, Args)]
struct DumpArgument {
    /// Dump file.
    file: PathBuf,
}

#[derive(Debug, Args)]
struct FileArgument {
    /// The machine's configuration file; see hearth.toml(5).
    file: PathBuf,
}

#[derive(Debug, Args)]
struct NameArgument {
    /// Name of the machine.
    #[arg(add = complete::machines())]
    name: String,
}

#[derive(Debug, Args)]
struct WaitArgument {
    /// Return without waiting for completion.
    #[arg(long)]
    no_wait: bool,
}

/// Errors of all verbs.
#[derive(Debug, thiserror::Error)]
pub enum CliError {
    #[error("{name} is not running; {hint}")]
    NotRunning { name: String, hint: String },
    #[error("{name} is an attached domain of libvirt; Hearth serves it from its next start on: virsh start {name}")]
    Off { name: String },
    #[error(
        "the keeper of {name} has died but its QEMU (pid {qemu_pid}) still runs; take it over with `hearth run FILE`"
    )]
    Orphaned { name: String, qemu_pid: u32 },
    #[error("{}", guest.sentence(name))]
    Parked { name: String, guest: Box<parked::ParkedGuest> },
    #[error(transparent)]
    Client(#[from] ClientError),
    #[error("{file}: the machine cannot run")]
    Configuration { file: PathBuf, problems: Vec<Problem> },
    #[error("{file}: the machine cannot run now")]
    Unready { file: PathBuf, problems: Vec<Problem> },
    #[error(
        "{file}: the machine's QEMU (pid {qemu_pid}) still runs; correct the file, then take it over with `hearth run`"
    )]
    CannotTakeOver { file: PathBuf, qemu_pid: u32, problems: Vec<Problem> },
    #[error("{file} is not changed")]
    NotSet { file: PathBuf, problems: Vec<Problem> },
    #[error("{file} is not changed: with that the machine could not run")]
    NotRunnable { file: PathBuf, problems: Vec<Problem> },
    #[error("{name} cannot be attached")]
    NotAttachable { name: String, problems: Vec<Problem> },
    #[error("{name} cannot be detached")]
    NotDetachable { name: String, problems: Vec<Problem> },
    #[error("{name} cannot be imported")]
    NotImportable { name: String, problems: Vec<Problem> },
    #[error(transparent)]
    Virsh(#[from] VirshError),
    #[error(
        "{name} is not attached: libvirt does not call Hearth's hook, which was installed after libvirt's start; restart \
         libvirt (`systemctl restart libvirtd`, or virtqemud where that runs; domains go on) and try again"
    )]
    DeadHook { name: String },
    #[error(transparent)]
    Web(#[from] host::web::WebError),
    #[error(transparent)]
    Textfile(#[from] host::textfile::TextfileError),
    #[error("{0}")]
    Hook(String),
    #[error("cannot predict: no machine in {root} has been rejuvenated yet; rejuvenate one first")]
    NoHistory { root: PathBuf },
    #[error("{what} prints no JSON: leave out --json")]
    NoJson { what: String },
    #[error("{file} exists and is not a Hearth report; choose another file with -o")]
    NoReport { file: PathBuf },
    #[error("{name}: {what}")]
    Machine { name: String, what: String },
    #[error("cannot use {path}")]
    File { path: PathBuf, source: io::Error },
    #[error(transparent)]
    Snapshot(#[from] SnapshotError),
    #[error(
        "{file} sets keys that only this host's operator may set: {what}; set them yourself with --set KEY=VALUE, or \
         restore with --trust-config if you trust whoever made the snapshot"
    )]
    Untrusted { file: PathBuf, what: String },
    #[error(
        "{file} names other disks than the snapshot holds ({configured}; {saved}): it was changed after the save; put the \
         snapshot's own file back"
    )]
    OtherDisks { file: PathBuf, configured: String, saved: String },
    #[error(transparent)]
    Folder(#[from] FolderError),
    #[error(transparent)]
    Image(#[from] ImageError),
    #[error(transparent)]
    Overlay(#[from] OverlayError),
    #[error(transparent)]
    Order(#[from] OrderError),
    #[error(transparent)]
    Vmcore(#[from] FileError),
    #[error("this program cannot take over the machine")]
    TakeOver(#[source] MachineError),
    #[error("cannot read a kernel log from {path}")]
    NoLog { path: PathBuf, source: NotUnderstood },
    #[error(transparent)]
    Record(#[from] RecordError),
    #[error(transparent)]
    FleetLock(#[from] FleetLockError),
    #[error("{0}")]
    HostReload(String),
    #[error("`hearth top` needs a terminal; `hearth ls` lists the machines without one")]
    NoTerminal,
    #[error("cannot use the terminal")]
    Terminal(#[source] io::Error),
    #[error("cannot find a free port on this host")]
    Port(#[source] io::Error),
    #[error("cannot catch Ctrl-C")]
    Signals(#[source] io::Error),
    #[error("cannot write the output")]
    Output(#[from] io::Error),
}

impl CliError {
    fn exit(&self) -> Exit {
        match self {
            Self::NotRunning { .. } | Self::Off { .. } | Self::Orphaned { .. } | Self::Parked { .. } => {
                Exit::NotRunning
            }
            Self::Configuration { .. } | Self::NotSet { .. } | Self::NotRunnable { .. } | Self::NoJson { .. } => {
                Exit::Wrong
            }
            Self::Unready { problems, .. } => Exit::of(problems),
            Self::CannotTakeOver { .. } => Exit::Later,
            // What the check refuses too, unless two keepers start at the same moment.
            Self::Folder(FolderError::Running { .. } | FolderError::OthersMemory { .. }) => Exit::Later,
            // `hearth events web | head` is not a failure.
            Self::Output(error) if error.kind() == io::ErrorKind::BrokenPipe => Exit::Done,
            _ => Exit::Failed,
        }
    }

    /// What is wrong, one by one; empty if the error itself says it.
    fn problems(&self) -> &[Problem] {
        match self {
            Self::Configuration { problems, .. }
            | Self::NotSet { problems, .. }
            | Self::NotRunnable { problems, .. }
            | Self::NotAttachable { problems, .. }
            | Self::NotDetachable { problems, .. }
            | Self::NotImportable { problems, .. }
            | Self::Unready { problems, .. }
            | Self::CannotTakeOver { problems, .. } => problems,
            _ => &[],
        }
    }

    /// All that it says, in one line.
    fn explained(&self) -> String {
        let errors = self.problems().iter().filter(|problem| problem.is_error());
        let errors: Vec<_> = errors.map(|error| format!("{}: {}", error.subject, error.message)).collect();
        let colon = if errors.is_empty() { "" } else { ": " };
        format!("{}{colon}{}", crate::chain(self), errors.join("; "))
    }
}

/// Context of every verb.
struct Context<'a> {
    root: RuntimeRoot,
    json: bool,
    out: &'a mut dyn Write,
}

/// The whole program. `run` supervises a machine until it has stopped.
pub fn main(run: fn(Start) -> ExitCode) -> ExitCode {
    CompleteEnv::with_factory(Cli::command).complete();
    let matches = Cli::command().get_matches();
    let cli = Cli::from_arg_matches(&matches).unwrap_or_else(|error| error.exit());
    if let Err(error) = cli.must_print_json(matches.subcommand_name().unwrap_or_default()) {
        complain(&error);
        return error.exit().into();
    }
    log::start();
    let mut out = io::stdout().lock();
    let done = match cli.verb {
        // The machine may run for years, so the lock on standard output is released.
        Verb::Run(FileArgument { file }) => {
            drop(out);
            let (root, mut inheritance) = (root_of(cli.runtime_root), Inheritance::of_this_process());
            clone::remove_leftovers(&root);
            configuration::for_run(&file, &root)
                .inspect_err(|error| {
                    let why = error.explained();
                    inheritance.give_back(&why);
                    configuration::record_failure(&file, &root, &why);
                })
                .map(|(in_force, folders)| run(Start { in_force, folders, root, restore: None, inheritance }))
        }
        Verb::Restore(arguments) if !arguments.disks_only => {
            drop(out);
            let root = root_of(cli.runtime_root);
            let prepared = lazy_restore::prepare(arguments, &root);
            prepared.map(|(in_force, folders, order)| {
                run(Start { in_force, folders, root, restore: Some(order), inheritance: Inheritance::default() })
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

impl Cli {
    /// Refuses `--json` for a verb that would ignore it.
    fn must_print_json(&self, verb: &str) -> Result<(), CliError> {
        let restores = matches!(&self.verb, Verb::Restore(arguments) if !arguments.disks_only);
        if self.json && (restores || WITHOUT_JSON.contains(&verb)) {
            return Err(CliError::NoJson { what: format!("`hearth {verb}`") });
        }
        Ok(())
    }
}

fn root_of(given: Option<PathBuf>) -> RuntimeRoot {
    given.map_or_else(RuntimeRoot::for_this_user, RuntimeRoot::new)
}

fn complain(error: &CliError) {
    if error.exit() == Exit::Done {
        return;
    }
    error.problems().iter().for_each(|problem| eprintln!("{}", shown(&problem.to_string())));
    eprintln!("hearth: {}", shown(&crate::chain(error)));
}

fn perform(verb: Verb, json: bool, root: Option<PathBuf>, out: &mut dyn Write) -> Result<Exit, CliError> {
    let mut context = Context { root: root_of(root), json, out };
    let context = &mut context;
    match verb {
        Verb::Restore(arguments) => lazy_restore::restore_disks(context, arguments),
        Verb::Run(_) | Verb::Rehearse(_) => unreachable!("`main` takes these"),
        Verb::WorkingSet { snapshot, store } => lazy_restore::working_set(context, &snapshot, &store),
        Verb::Check { file: FileArgument { file }, take_over: false } => configuration::check(context, &file),
        Verb::Check { file: FileArgument { file }, take_over: true } => configuration::check_take_over(context, &file),
        Verb::Attach(arguments) => attach::attach(context, &arguments),
        Verb::Detach(arguments) => attach::detach(context, &arguments),
        Verb::Import(arguments) => import::import(context, arguments),
        Verb::New(arguments) => new::new(context, arguments),
        Verb::Start(NameArgument { name }) => service::perform(context, service::Verb::Start, &name),
        Verb::Enable(NameArgument { name }) => service::perform(context, service::Verb::Enable, &name),
        Verb::Disable(NameArgument { name }) => service::perform(context, service::Verb::Disable, &name),
        Verb::Set(arguments) => set::set(context, &arguments),
        Verb::Rm(arguments) => rm::remove(context, &arguments),
        Verb::Host(arguments) => host::run(context, &arguments),
        Verb::Hook(arguments) => hook::perform(&context.root, &arguments),
        Verb::Ls => list::list(context),
        Verb::Top => top::watch(context),
        Verb::Status(NameArgument { name }) => status::show(context, &name),
        Verb::Console(NameArgument { name }) => console::connect(context, &name),
        Verb::View(NameArgument { name }) => view::view(context, &name),
        Verb::Reboot { machine, cold, force, wait } => {
            order::reboot(context, &machine.name, RebootRequest { cold, force }, !wait.no_wait)
        }
        Verb::Stop { machine, force, wait } => {
            order::stop(context, &machine.name, StopRequest { force }, !wait.no_wait)
        }
        Verb::Crash { machine, method, wait } => order::crash(context, &machine.name, CrashRequest { method }, wait),
        Verb::Dump(arguments) => dump::perform(context, arguments),
        Verb::Rejuvenate(arguments) => rejuvenation::perform(context, arguments),
        Verb::UpgradeKeeper(arguments) => upgrade_keeper::perform(context, arguments),
        Verb::HostReload { verb } => host_reload::perform(context, verb),
        Verb::Age(NameArgument { name }) => age::show(context, &name),
        Verb::Save(arguments) => save::save(context, arguments),
        Verb::CopyDisk(arguments) => disk_copy::copy(context, arguments),
        Verb::Export(arguments) => export::export(context, arguments),
        Verb::Ready(NameArgument { name }) => fast_remount::ready(context, &name),
        Verb::RemountPlan { machine, list } => fast_remount::show(context, &machine.name, list),
        Verb::Events { machine, follow, since } => events::show(context, &machine.name, since, follow),
        Verb::Explain(NameArgument { name }) => explain::show(context, &name),
        Verb::Report(arguments) => report::write(context, &arguments),
        Verb::Resize { machine, disk } => order::resize(context, &machine.name, &disk),
        Verb::Vmcore { verb: VmcoreVerb::Info(DumpArgument { file }) } => vmcore::info(context, &file),
        Verb::Vmcore { verb: VmcoreVerb::Dmesg(DumpArgument { file }) } => vmcore::dmesg(context, &file),
        Verb::Config { of } => configuration::show(context, &of),
        Verb::Completions { shell } => pages::completions(context, shell),
        Verb::Man { folder } => manual::write(context, &folder),
    }
}

/// The home of a machine of this name.
fn home(name: &str) -> Result<Home, CliError> {
    let refuse = |what: String| Err(CliError::Machine { name: name.to_owned(), what });
    if !is_name(name) {
        return refuse(format!("is not a valid name; {}", name_hint()));
    }
    if !Home::is_known() {
        let remedy = "set HOME, or XDG_CONFIG_HOME and XDG_STATE_HOME";
        return refuse(format!("this user has no home directory for its files; {remedy}"));
    }
    Ok(Home::of(name))
}

/// The home of a machine that has a configuration there.
fn existing_home(name: &str) -> Result<Home, CliError> {
    let home = home(name)?;
    if home.file().exists() { Ok(home) } else { Err(no_machine(&home)) }
}

fn no_machine(home: &Home) -> CliError {
    let (name, file) = (home.name().to_owned(), home.file().display().to_string());
    let what = format!("there is no {file}; `hearth new {name} --image FILE` makes a machine");
    CliError::Machine { name, what }
}

/// The keeper may run in another folder.
fn absolute(path: PathBuf) -> PathBuf {
    std::path::absolute(&path).unwrap_or(path)
}

impl Context<'_> {
    /// One JSON value on a line of its own.
    fn write_json(&mut self, value: &impl serde::Serialize) -> Result<(), CliError> {
        let text = serde_json::to_string(value).expect("what is shown is plain data with text keys");
        writeln!(self.out, "{text}")?;
        Ok(self.out.flush()?)
    }

    /// What was done with a machine: a line, or JSON with the line as its message.
    fn write_done(&mut self, name: &str, message: &str) -> Result<(), CliError> {
        match self.json {
            true => self.write_json(&serde_json::json!({ "name": name, "message": message })),
            false => self.write_line(message),
        }
    }

    /// Asks whether to go on. `verb` and `done` as in "Remove" and "removed". With `--json` the output is for a program.
    fn confirmed(&mut self, verb: &str, done: &str, name: &str) -> Result<bool, CliError> {
        if self.json || !io::stdin().is_terminal() {
            let what = format!("is not {done}: nobody can be asked here; add --yes");
            return Err(CliError::Machine { name: name.to_owned(), what });
        }
        write!(self.out, "\n{verb} {name}? [y/N] ")?;
        self.out.flush()?;
        let mut answer = String::new();
        io::stdin().lock().read_line(&mut answer)?;
        Ok(matches!(answer.trim(), "y" | "Y" | "yes"))
    }

    fn write_line(&mut self, line: &str) -> Result<(), CliError> {
        writeln!(self.out, "{}", shown(line))?;
        Ok(self.out.flush()?)
    }
}
