//! `hearth copy-disk`: a disk of a running machine as it is at one moment.
//!
//! The keeper makes the copy. The agent of a libvirt domain's guest is asked here, because nothing in a keeper speaks with libvirt:
//! the keeper has made the file -> frozen -> the keeper takes the moment -> thawed.

use std::io;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::Duration;

use clap::Args;
use hearth_api::{CopyDiskCancel, CopyDiskRequest, CopyDiskTake, EventKind, EventRecord, MachineState};
use hearth_libvirt::virsh::{Virsh, VirshError};
use signal_hook::consts::{SIGHUP, SIGINT, SIGQUIT, SIGTERM};
use signal_hook::iterator::Signals;

use super::order::{cut_off, show};
use super::{CliError, Context, Exit, absolute, words};
use crate::attachment::Attachment;
use crate::client::{Client, ClientError};

/// Attempts to thaw a guest, each with libvirt's own patience, and the pause between two.
const THAWS: u32 = 6;
const THAW_AGAIN: Duration = Duration::from_secs(1);
/// How long a keeper may take to hear that its copy is cancelled. File systems may be frozen meanwhile.
const CANCEL_PATIENCE: Duration = Duration::from_secs(2);

#[derive(Debug, Args)]
pub struct CopyDiskArguments {
    /// Name of the machine.
    #[arg(add = super::complete::machines())]
    name: String,
    /// Name of the disk, as shown by `hearth status`.
    #[arg(add = super::complete::disks())]
    disk: String,
    /// File to create; must not exist.
    file: PathBuf,
}

pub fn copy(context: &mut Context<'_>, arguments: CopyDiskArguments) -> Result<Exit, CliError> {
    let CopyDiskArguments { name, disk, file } = arguments;
    let file = absolute(file);
    let interrupts = Interrupts::listen(context.client(&name), file.clone()).map_err(CliError::Signals)?;
    let request = CopyDiskRequest { disk, file, caller_freezes: false, checkpoint: None, since: None };
    make(context, &name, request, &interrupts, show)?;
    Ok(Exit::Done)
}

/// Has the keeper make the copy, and waits for it. `tell` gets each event meanwhile.
pub fn make(
    context: &mut Context<'_>,
    name: &str,
    request: CopyDiskRequest,
    interrupts: &Interrupts,
    tell: fn(&mut Context<'_>, &EventRecord) -> Result<(), CliError>,
) -> Result<(), CliError> {
    let caller_freezes = is_running_domain(context, name)?;
    let request = CopyDiskRequest { caller_freezes, ..request };
    let file = request.file.clone();
    let path = file.display().to_string();
    // Dropped last: cancelled, then thawed.
    let mut frozen = None;
    let mut begun = Begun { client: context.client(name).with_patience(CANCEL_PATIENCE), file, is_over: false };
    let accepted = match context.ask(name, |client| client.send(&request)) {
        // It may have begun all the same.
        Err(error @ CliError::Client(ClientError::Silent { .. })) => return Err(error),
        accepted => accepted.inspect_err(|_| begun.is_over = true)?,
    };
    if caller_freezes && !interrupts.came() {
        let not_frozen = match FrozenDomain::freeze(name) {
            Ok(domain) => {
                frozen = Some(domain);
                None
            }
            Err(why) => Some(why),
        };
        if !interrupts.came() {
            let take = CopyDiskTake { file: begun.file.clone(), not_frozen };
            context.ask(name, |client| client.send(&take))?;
        }
    }
    if interrupts.came() {
        // The keeper may not have known the copy yet when it was cancelled. It ends like any other: then nothing is left of it.
        begun.cancel();
        drop(frozen.take());
    }
    let stream = context.client(name).follow(accepted.since).map_err(|error| context.explained(name, error))?;
    for record in stream {
        let record = record.map_err(|error| context.explained(name, error))?;
        if let EventKind::DiskCopyTaken { file, .. } = &record.event
            && *file == path
        {
            // Before anything else, which may wait for whoever reads it.
            frozen = None;
        }
        match &record.event {
            EventKind::DiskCopied { file, .. } if *file == path => {
                begun.is_over = true;
                interrupts.is_copied.store(true, Relaxed);
                return tell(context, &record);
            }
            failed @ EventKind::DiskCopyFailed { file, .. } if *file == path => {
                begun.is_over = true;
                drop(frozen.take());
                tell(context, &record)?;
                return Err(CliError::Machine { name: name.to_owned(), what: words::describe(failed) });
            }
            _ => tell(context, &record)?,
        }
    }
    Err(cut_off(context, name))
}

/// A copy that a keeper may be making. It is cancelled when this is dropped before it is over.
struct Begun {
    client: Client,
    file: PathBuf,
    is_over: bool,
}

impl Begun {
    fn cancel(&self) {
        // A keeper that is gone makes no copy; one that is silent hears of it when it listens again.
        let _ = self.client.send(&CopyDiskCancel { file: self.file.clone() });
    }
}

impl Drop for Begun {
    fn drop(&mut self) {
        if !self.is_over {
            self.cancel();
        }
    }
}

/// Signals that cancel the copy to a file. A third one ends the process at once; before that a guest's file systems may
/// have to be thawed.
pub struct Interrupts {
    came: Arc<AtomicBool>,
    is_copied: Arc<AtomicBool>,
}

impl Interrupts {
    pub fn listen(client: Client, file: PathBuf) -> io::Result<Self> {
        let mut signals = Signals::new([SIGINT, SIGTERM, SIGHUP, SIGQUIT])?;
        let [came, is_copied] = [(); 2].map(|()| Arc::new(AtomicBool::new(false)));
        let (has_come, has_copied) = (came.clone(), is_copied.clone());
        let listen = move || {
            for (nth, signal) in signals.forever().enumerate() {
                has_come.store(true, Relaxed);
                if !has_copied.load(Relaxed) {
                    // A copy that has not begun or has just ended cannot be cancelled.
                    let _ = client.send(&CopyDiskCancel { file: file.clone() });
                }
                if nth > 1 {
                    let _ = signal_hook::low_level::emulate_default_handler(signal);
                }
            }
        };
        std::thread::Builder::new().name("interrupts".into()).spawn(listen)?;
        Ok(Self { came, is_copied })
    }

    /// Whether one has come.
    pub fn came(&self) -> bool {
        self.came.load(Relaxed)
    }
}

/// Whether this is a domain of libvirt whose guest runs: libvirt's connection to its agent is the only one.
fn is_running_domain(context: &Context<'_>, name: &str) -> Result<bool, CliError> {
    let attached = Attachment::of(name);
    let definition = attached.definition().map_err(|source| CliError::File { path: attached.file(), source })?;
    Ok(definition.is_some() && context.ask(name, |client| client.status())?.state == MachineState::Running)
}

/// A domain of libvirt whose guest's file systems are frozen. They are thawed when this is dropped.
struct FrozenDomain {
    virsh: Virsh,
    name: String,
}

impl FrozenDomain {
    /// The error says why they are not frozen.
    fn freeze(name: &str) -> Result<Self, String> {
        let virsh = Virsh::system();
        let frozen = virsh.freeze(name);
        let domain = Self { virsh, name: name.to_owned() };
        let Err(error) = frozen else { return Ok(domain) };
        let why = crate::chain(&error);
        eprintln!("hearth: {name}: its guest's file systems are not frozen: {why}");
        match error {
            // An agent that answers late freezes them all the same.
            VirshError::Silent { .. } => drop(domain),
            // Nothing is frozen, or somebody else needs it.
            _ => std::mem::forget(domain),
        }
        Err(why)
    }

    /// libvirt may be busy with the freeze for some time.
    fn thaw(&self) -> Result<(), VirshError> {
        for _ in 1..THAWS {
            match self.virsh.thaw(&self.name) {
                Ok(()) => return Ok(()),
                Err(_) => std::thread::sleep(THAW_AGAIN),
            }
        }
        self.virsh.thaw(&self.name)
    }
}

impl Drop for FrozenDomain {
    fn drop(&mut self) {
        if let Err(error) = self.thaw() {
            let name = &self.name;
            eprintln!(
                "hearth: {name}: its guest's file systems may stay frozen: {}; thaw them with `virsh domfsthaw {name}`",
                crate::chain(&error)
            );
        }
    }
}
