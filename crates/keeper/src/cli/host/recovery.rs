//! The way back of a domain whose guest has crashed, where libvirt keeps its QEMU.
//!
//! its keeper is told -> registers (`pipe`) -> its keeper is told -> destroy -> its keeper has the memory -> the wait of a crash loop,
//! which its keeper decides about -> start
//!
//! A step that fails leaves the domain as libvirt has it, which its keeper's status shows; only the registers are done without.
//! Whoever does something else with the domain meanwhile is left alone.

use std::fs::{self, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::PathBuf;
use std::thread;
use std::time::Duration;

use hearth_api::{DomainCrashed, DomainHarvested, ErrorWord, MachineState, MachineStatus};
use hearth_libvirt::definition::{self, DefinitionError};
use hearth_libvirt::virsh::{Virsh, VirshError};
use hearth_recovery::journal::Journal;

use super::pipe::{self, Pipe};
use super::silence::{self, is_silent};
use crate::attachment::Attachment;
use crate::client::{Client, ClientError};
use crate::folders::registers;
use crate::runtime_root::RuntimeRoot;

/// Time between two looks at the keeper.
const LOOK_EVERY: Duration = Duration::from_millis(50);
/// The same, while it waits.
const LOOK_EVERY_IDLE: Duration = Duration::from_secs(1);
/// How long a keeper may take to say whether its domain needs something.
const LOOK_PATIENCE: Duration = Duration::from_secs(2);
/// Pause before a start that has failed is tried again.
const START_AGAIN: Duration = Duration::from_secs(5);

#[derive(Debug, thiserror::Error)]
pub enum RecoveryError {
    #[error(transparent)]
    Virsh(#[from] VirshError),
    #[error(transparent)]
    Definition(#[from] DefinitionError),
    #[error(transparent)]
    Keeper(#[from] ClientError),
}

/// One domain's way back.
pub struct Recovery {
    virsh: Virsh,
    client: Client,
    domain: String,
    /// The machine's runtime folder.
    folder: PathBuf,
    /// Whether it was detached while it ran: its definition has no disks of Hearth's any more, and its keeper ends with its guest.
    is_detached: bool,
}

impl Recovery {
    pub fn of(root: &RuntimeRoot, domain: &str) -> Self {
        let client = Client::new(root.api_socket(domain));
        let is_detached = Attachment::of(domain).is_detached();
        Self { virsh: Virsh::system(), client, domain: domain.to_owned(), folder: root.machine(domain), is_detached }
    }

    /// Whether the domain waits for its way back or to be resumed, or its QEMU may not use its disks, as far as its keeper knows.
    pub fn may_be_needed(&self) -> bool {
        if silence::is_noted(&self.folder) {
            return true;
        }
        // A keeper that hangs must not keep other domains waiting.
        match self.client.clone().with_patience(LOOK_PATIENCE).status() {
            Ok(status) => matches!(status.state, MachineState::Paused | MachineState::Recovering) || is_silent(&status),
            Err(ClientError::NotRunning { .. }) => self.is_start_noted(),
            Err(_) => false,
        }
    }

    /// Brings the domain back, if its guest has crashed or it was on its way already.
    pub fn run(&self) -> Result<(), RecoveryError> {
        // In any other case libvirt itself does what follows a crash.
        let is_kept = definition::preserves_crashed(&self.virsh.live_definition(&self.domain)?)?;
        if is_kept && self.virsh.is_crashed(&self.domain)? {
            return self.recover();
        }
        pipe::remove_left(&self.folder);
        match self.client.status() {
            Ok(MachineStatus { state: MachineState::Recovering, incarnation, .. }) => self.start(incarnation),
            Err(ClientError::NotRunning { .. }) => self.start_without_keeper(),
            _ => Ok(()),
        }
    }

    fn recover(&self) -> Result<(), RecoveryError> {
        let Some(incarnation) = self.report()? else { return Ok(()) };
        let mut pipe = Pipe::make(&self.folder);
        let harvested = pipe.as_mut().map_err(|error| error.to_string());
        let harvested = harvested.and_then(|pipe| pipe.harvest(&self.virsh, &self.domain));
        let kept = harvested.and_then(|bytes| self.keep(incarnation, &bytes).map_err(|error| error.to_string()));
        if self.report_harvest(kept.err())? {
            self.virsh.destroy(&self.domain)?;
        } else if self.virsh.has_died(&self.domain)? {
            // Its QEMU has ended by itself meanwhile, so its keeper may not know that it is to come back.
            return Ok(self.virsh.start(&self.domain)?);
        }
        drop(pipe);
        // If somebody has ended the domain, or goes on with it, the keeper does not wait for a start.
        self.start(incarnation)
    }

    /// Tells the keeper, as soon as there is one. Returns the crashed incarnation; None if it is to stay as it is.
    fn report(&self) -> Result<Option<u32>, RecoveryError> {
        loop {
            match self.client.send(&DomainCrashed {}).and_then(|_| self.client.status()) {
                Ok(status) => return Ok(Some(status.incarnation)),
                Err(ClientError::Refused(why)) if why.error == ErrorWord::NotPossible => {
                    tracing::debug!(domain = self.domain, why = why.message, "its crashed guest stays");
                    return Ok(None);
                }
                Err(error) => tracing::debug!(domain = self.domain, %error, "no keeper to tell of a crash yet"),
            }
            thread::sleep(LOOK_EVERY_IDLE);
            if !self.virsh.is_crashed(&self.domain)? {
                return Ok(None);
            }
        }
    }

    /// Tells the keeper that the registers are read, or why not. Only then does the end of QEMU mean a next start. A keeper that began
    /// since the crash was reported is told of that first. Returns whether the domain is still crashed.
    fn report_harvest(&self, why: Option<String>) -> Result<bool, RecoveryError> {
        while let Err(error) = self.client.send(&DomainHarvested { why: why.clone() }) {
            tracing::debug!(domain = self.domain, %error, "no keeper to tell of the registers yet");
            thread::sleep(LOOK_EVERY);
            // Somebody may have reset it instead.
            if !self.virsh.is_crashed(&self.domain)? || self.report()?.is_none() {
                return Ok(false);
            }
        }
        Ok(self.virsh.is_crashed(&self.domain)?)
    }

    /// Leaves the registers where the keeper finds them.
    fn keep(&self, incarnation: u32, bytes: &[u8]) -> io::Result<()> {
        let path = registers(&self.folder, incarnation);
        // One of an attempt that was cut off.
        let _ = fs::remove_file(&path);
        OpenOptions::new().create_new(true).write(true).mode(0o600).open(path)?.write_all(bytes)
    }

    /// Starts the domain when its keeper is ready for the guest after this one.
    fn start(&self, incarnation: u32) -> Result<(), RecoveryError> {
        loop {
            match self.client.status() {
                // Somebody else was faster.
                Ok(status) if status.incarnation != incarnation => return Ok(()),
                Ok(MachineStatus { state: MachineState::Recovering, next_start: None, .. }) => {
                    if self.try_start() {
                        return Ok(());
                    }
                    thread::sleep(START_AGAIN);
                }
                Ok(MachineStatus { state: MachineState::Recovering, .. }) => thread::sleep(LOOK_EVERY_IDLE),
                Ok(MachineStatus { state: MachineState::Stopping | MachineState::Stopped, .. }) if self.is_detached => {
                    thread::sleep(LOOK_EVERY_IDLE);
                }
                // It is on: the rest is `silence`'s.
                Ok(status) if is_silent(&status) => return Ok(()),
                // Told to stop, or ended by somebody else.
                Ok(MachineStatus { state: MachineState::Stopping | MachineState::Stopped, .. }) => return Ok(()),
                // Somebody goes on with it.
                Ok(MachineStatus { state: MachineState::Running, .. }) => return Ok(()),
                // libvirt's daemon has died after it had the disks served, or somebody else is starting the domain.
                Ok(MachineStatus { state: MachineState::Starting, .. }) if self.is_off() => {
                    thread::sleep(START_AGAIN);
                    if self.is_off() {
                        self.try_start();
                    }
                }
                // QEMU does not use its disks yet.
                Ok(MachineStatus { state: MachineState::Starting, .. }) => thread::sleep(LOOK_EVERY_IDLE),
                // The crashed guest's memory is not ready.
                Ok(_) => thread::sleep(LOOK_EVERY),
                Err(ClientError::NotRunning { .. }) if self.is_detached => {
                    return Ok(self.virsh.start(&self.domain)?);
                }
                Err(ClientError::NotRunning { .. }) => return self.start_without_keeper(),
                Err(error) => {
                    tracing::debug!(domain = self.domain, %error, "the keeper does not answer");
                    thread::sleep(LOOK_EVERY_IDLE);
                }
            }
        }
    }

    /// Whether the domain is off, as far as libvirt answers.
    fn is_off(&self) -> bool {
        self.virsh.is_off(&self.domain).unwrap_or(false)
    }

    /// Starts the domain. Returns whether libvirt has.
    fn try_start(&self) -> bool {
        let started = self.virsh.start(&self.domain);
        if let Err(error) = &started {
            let why = self.client.status().ok().and_then(|status| status.state_why);
            tracing::warn!(domain = self.domain, %error, why, "trying again");
        }
        started.is_ok()
    }

    /// Starts the domain if its keeper has died before it did. libvirt's hook starts the next one.
    fn start_without_keeper(&self) -> Result<(), RecoveryError> {
        if self.is_start_noted() {
            self.virsh.start(&self.domain)?;
        }
        Ok(())
    }

    /// Whether the last keeper has left a start to make.
    fn is_start_noted(&self) -> bool {
        // A journal that cannot be read is its next keeper's matter.
        let journal = Journal::load(&self.folder.join("journal.json")).ok().flatten();
        journal.is_some_and(|journal| journal.ordered.is_some())
    }
}
