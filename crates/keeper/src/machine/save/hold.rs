//! Hold: the moment of which a snapshot is, taken by QEMU's thread (`Generation::tell`): the guest stands still, its devices' state is
//! taken, and its images are cloned or frozen. Whoever lets the guest go on tells QEMU so by the same thread, and so afterwards.

use std::sync::mpsc::Sender;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Instant, SystemTime};

use hearth_api::rfc3339;
use hearth_disk::server::Observer;
use hearth_qemu::Qmp;
use hearth_recovery::journal::QemuIdentity;
use hearth_recovery::snapshot::{DiskPart, Manifest, Part, RamPart, SNAPSHOT_VERSION, share_image, state};

use super::super::Context;
use super::super::disks::{Connections, Disks, write_through};
use super::super::generation::Generation;
use super::task::{CopyWay, ImageCopy, PausedState, SaveCommand};
use super::{STATE_PATIENCE, Saving, Target, Tell};
use crate::config::{Config, ConfigFile};
use crate::event::SaveMessage;

/// The way to the thread of a save. Clones share it. A save that is called off hears no more.
#[derive(Clone)]
pub struct SaveCommands(Arc<Mutex<Option<Sender<SaveCommand>>>>);

impl SaveCommands {
    pub fn new(commands: Sender<SaveCommand>) -> Self {
        Self(Arc::new(Mutex::new(Some(commands))))
    }

    pub fn give(&self, command: SaveCommand) {
        if let Some(commands) = &*self.commands() {
            // A thread that is gone has said why.
            let _ = commands.send(command);
        }
    }

    /// The save is called off. Its thread, if it waits, hears of that.
    pub fn close(&self) {
        *self.commands() = None;
    }

    pub fn are_closed(&self) -> bool {
        self.commands().is_none()
    }

    fn commands(&self) -> MutexGuard<'_, Option<Sender<SaveCommand>>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// What is needed of the machine to take the moment.
pub struct Hold {
    commands: SaveCommands,
    targets: Vec<Target>,
    disks: Vec<Observer>,
    config: Config,
    typed: ConfigFile,
    identity: QemuIdentity,
    /// Its file systems may be frozen.
    frozen: bool,
}

impl Hold {
    pub fn begin(context: &Context, disks: &Disks, generation: &Generation, saving: &mut Saving) -> Self {
        Self {
            commands: saving.commands.clone(),
            targets: std::mem::take(&mut saving.targets),
            disks: disks.observers(),
            config: context.config.clone(),
            typed: context.file.typed.clone(),
            identity: generation.identity(),
            frozen: context.journal.frozen,
        }
    }

    /// The guest stands still afterwards, or may. The error is for the operator.
    pub fn capture_paused_state(self, qmp: &Qmp, tell: &Tell) -> Result<(), String> {
        let failed = |error: &dyn std::error::Error| crate::chain(error);
        let connected = Connections::now(&self.disks);
        state::prepare(qmp, STATE_PATIENCE).map_err(|error| failed(&error))?;
        if self.commands.are_closed() {
            return Ok(());
        }
        tell.say(SaveMessage::Stands(Instant::now()));
        qmp.pause().map_err(|error| failed(&error))?;
        self.commands.give(SaveCommand::Held);
        if self.commands.are_closed() {
            return Ok(());
        }
        let state = state::take(qmp, STATE_PATIENCE).map_err(|error| failed(&error))?;
        if !connected.have_lasted(&self.disks) {
            return Err("a disk lost its connection to QEMU meanwhile; try again".to_owned());
        }
        let commands = self.commands.clone();
        commands.give(SaveCommand::PausedState(Box::new(self.paused_state(state)?)));
        Ok(())
    }

    fn paused_state(self, state: Vec<u8>) -> Result<PausedState, String> {
        let Self { targets, disks, config, typed, identity, frozen, .. } = self;
        let parts = targets.iter().map(|target| {
            let (name, format) = (target.disk.clone(), target.format.to_owned());
            DiskPart { name, format, bytes: 0, modified: None, stored: None }
        });
        let parts = parts.collect();
        let write_through = write_through(&disks);
        let images = targets.into_iter().map(|target| copy_image(target, &disks)).collect::<Result<_, _>>()?;
        let nothing = || Part { bytes: 0, blake3: String::new() };
        Ok(PausedState {
            machine: typed.for_snapshot(&config, &identity.accelerator).to_text(),
            state,
            manifest: Manifest {
                version: SNAPSHOT_VERSION,
                machine: config.name.clone(),
                saved_at: rfc3339(SystemTime::now()),
                hearth_version: env!("CARGO_PKG_VERSION").to_owned(),
                qemu_version: identity.version,
                accelerator: identity.accelerator,
                configuration: Some(config.file.clone()),
                ram_bytes: config.guest.memory_bytes,
                vmgenid: identity.vmgenid.is_some(),
                guest_agent: identity.guest_agent,
                write_through,
                frozen,
                machine_file: nothing(),
                state: nothing(),
                ram: RamPart { bytes: 0, pages: 0, seal: String::new() },
                disks: parts,
            },
            images,
        })
    }
}

/// At once, or on its way while the guest goes on.
fn copy_image(target: Target, disks: &[Observer]) -> Result<ImageCopy, String> {
    let Target { disk, image, file, shares, .. } = target;
    let server = disks.iter().find(|server| server.name() == disk);
    let server = server.ok_or_else(|| format!("disk {disk} has no server"))?;
    if shares {
        let open = server.open_image().map_err(|error| crate::chain(&error))?;
        if share_image(&disk, &image, &open, &file).map_err(|error| crate::chain(&error))? {
            return Ok(ImageCopy { path: image, way: CopyWay::Shared(file) });
        }
    }
    let frozen = server.freeze(file).map_err(|error| crate::chain(&error))?;
    Ok(ImageCopy { path: image, way: CopyWay::Frozen(frozen) })
}
