//! Disks of a machine: their servers, notes of their images, NVRAM, and the backfill of disks from an object store.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use hearth_api::{ApiError, DiskSize, ErrorWord, EventKind};
use hearth_disk::arrival::MissPolicy;
use hearth_disk::gate::Gate;
use hearth_disk::nvram::Nvram;
use hearth_disk::nvram::pmem::Pmem;
use hearth_disk::pressure::Pressure;
use hearth_disk::server::{Ask, DiskServer, Expected, Notice, Observer, Peer, Tell};

use super::backfill::Backfill;
use super::images::Images;
use super::{Context, MachineError, access};
use crate::config::{Boot, Config};
use crate::event::Event;

/// How long a command waits for QEMU's first messages to a disk. They take milliseconds, or seconds on a busy host.
const GREETING_PATIENCE: Duration = Duration::from_secs(3);

/// Everything that serves the guest's disks. The fields are dropped in this order, because reads of the servers may
/// wait for the backfill.
pub struct Disks {
    pub images: Images,
    pub backfill: Backfill,
    /// Servers of the configured disks, followed by those of the NVRAM.
    pub servers: Vec<DiskServer>,
    pub nvram: Vec<Nvram>,
    /// Open as long as a QEMU may map them.
    pub pmem: Vec<Pmem>,
    /// The previous keeper may have died while its QEMU greeted the disks. That QEMU must not be paused and continued.
    pub greeting_cut_off: bool,
    /// A check that the adopted QEMU uses its disks.
    pub next_check: Option<InUseCheck>,
    /// Pressure of each configured disk, for other threads. A disk that is opened again has another one.
    pub pressures: Arc<Mutex<Vec<Pressure>>>,
}

/// A check whether the adopted QEMU uses its disks.
pub struct InUseCheck {
    pub generation: u32,
    /// Counts the checks.
    pub attempt: u32,
    pub at: Instant,
}

#[derive(Debug, thiserror::Error)]
#[error("cannot flush disk {disk}")]
pub struct FlushError {
    disk: String,
    source: std::io::Error,
}

/// Has all that the guest has flushed written to the images' files, from any thread.
pub struct DiskFlush {
    disks: Vec<Observer>,
    /// Files that are written to, and the names of their disks.
    files: Vec<(String, PathBuf)>,
}

impl DiskFlush {
    /// Writes all that the guest has flushed to the images' files, and syncs these.
    pub fn flush(&self) -> Result<(), FlushError> {
        // Tables of a qcow2 image may be held outside of its file.
        for disk in &self.disks {
            disk.commit().map_err(|source| FlushError { disk: disk.name().to_owned(), source })?;
        }
        self.files.iter().try_for_each(|(name, path)| {
            let flushed = File::open(path).and_then(|image| image.sync_all());
            flushed.map_err(|source| FlushError { disk: name.clone(), source })
        })
    }

    /// The disks as they are now.
    pub fn disks(&self) -> &[Observer] {
        &self.disks
    }
}

/// How often QEMU has connected to each disk. None: it was not connected to one of them.
#[derive(PartialEq, Eq)]
pub struct Connections(Option<Vec<u64>>);

impl Connections {
    pub fn now(disks: &[Observer]) -> Self {
        let look = |disk: &Observer| {
            let counters = disk.counters();
            counters.connected.then_some(counters.connections)
        };
        Self(disks.iter().map(look).collect())
    }

    /// Whether no disk has lost its connection. Then the requests in flight were answered before the guest stood still.
    pub fn have_lasted(&self, disks: &[Observer]) -> bool {
        self.0.is_some() && *self == Self::now(disks)
    }
}

/// Disks whose write cache the guest has switched off.
pub fn write_through(disks: &[Observer]) -> Vec<String> {
    let disks = disks.iter().filter(|disk| disk.counters().write_through);
    disks.map(|disk| disk.name().to_owned()).collect()
}

impl Disks {
    /// Disks after a time in which no keeper guarded the images. An earlier keeper's notes may be in `folder`.
    pub fn after_gap(folder: &Path) -> Self {
        Self {
            images: Images::after_gap(folder),
            backfill: Backfill::default(),
            servers: Vec::new(),
            nvram: Vec::new(),
            pmem: Vec::new(),
            greeting_cut_off: false,
            next_check: None,
            pressures: Arc::default(),
        }
    }

    /// Finds the disks that are still in an object store, and begins to fetch them. Call it before the disks are opened.
    pub fn find_backfill(&mut self, context: &Context, policy: MissPolicy) -> Result<(), MachineError> {
        self.backfill = Backfill::find(&context.config).map_err(MachineError::Arrival)?;
        self.backfill.set_miss_policy(policy);
        self.backfill.start(&context.outside.tell).map_err(MachineError::ArrivalThread)
    }

    /// Lets a QEMU that runs as another user connect to its disks again.
    pub fn admit(&self, context: &Context, pid: u32) {
        if let Err(error) = access::admit(pid, &context.folders.runtime, &self.servers) {
            let message = format!("QEMU (pid {pid}) cannot reconnect to its disks: {error}");
            context.record(EventKind::Error { message });
        }
    }

    /// Call it when QEMU has ended. If it gave a connection to another process, that connection ends too.
    pub fn expect_nobody(&self) {
        self.servers.iter().for_each(|disk| disk.tell_expected(Expected::and_another([])));
    }

    /// From now on, only this QEMU may connect to the disks: one that this keeper took over, or that continues after a
    /// failed hop.
    pub fn expect_only(&self, peer: Peer) {
        self.servers.iter().for_each(|disk| disk.tell_expected(Expected::these([peer])));
    }

    /// The disks for other threads.
    pub fn observers(&self) -> Vec<Observer> {
        self.servers.iter().map(DiskServer::observer).collect()
    }

    /// Ends the keeper if this disk's server ends: the next keeper serves the disk again.
    pub fn watch(context: &Context, server: &DiskServer) {
        context.outside.watchdog.watch_disk(server.name(), server.heartbeat());
        let (tell, disk) = (context.outside.tell.clone(), server.name().to_owned());
        server.watch(move |why| {
            // Fails only when the loop has ended, and the keeper with it.
            let _ = tell.send(Event::DiskEnded { disk, why });
        });
    }

    /// Call it when the servers have changed.
    pub(super) fn show_pressures(&self, context: &Context) {
        let disks = self.servers.iter().take(context.config.devices.disks.len());
        *self.pressures.lock().expect("holders only assign and read") = disks.map(DiskServer::pressure).collect();
    }

    /// Sends a disk's notices to the machine's loop.
    pub fn notices(context: &Context, disk: &str) -> Tell {
        let (tell, disk) = (context.outside.tell.clone(), disk.to_owned());
        // Fails only when the loop has ended; then nobody needs the message.
        Arc::new(move |notice| drop(tell.send(Event::Disk { disk: disk.clone(), notice })))
    }

    /// Sends the disks' questions to the machine's loop.
    pub fn questions(context: &Context) -> Ask {
        let tell = context.outside.tell.clone();
        // Fails only when the loop has ended; the next keeper is asked again.
        Arc::new(move |question| drop(tell.send(Event::DiskAsks(question))))
    }

    /// Gives the servers this gate, which they use before they touch the guest's memory.
    pub fn set_gate(&self, gate: Option<Gate>) {
        if let Err(error) = self.try_set_gate(gate) {
            tracing::warn!(error = crate::chain(&error), "a disk may use memory that was not granted");
        }
    }

    /// Gives the servers this gate. If a server does not answer, the others still get it.
    pub fn try_set_gate(&self, gate: Option<Gate>) -> Result<(), hearth_disk::server::ServerError> {
        let gated: Vec<_> = self.servers.iter().map(|disk| disk.set_gate(gate.clone())).collect();
        gated.into_iter().collect()
    }

    /// For a thread that flushes the disks.
    pub fn to_flush(&self, context: &Context) -> DiskFlush {
        let written = context.config.devices.disks.iter().filter(|disk| !disk.read_only);
        let written = written.map(|disk| (disk.name.clone(), disk.path.clone()));
        let vars = firmware_vars(&context.config).map(|vars| ("firmware_vars".to_owned(), vars.clone()));
        DiskFlush { disks: self.observers(), files: written.chain(vars).collect() }
    }

    /// Flushes the disks, which may take as long as their storage does.
    pub fn flush(&self, context: &Context) -> Result<(), FlushError> {
        self.to_flush(context).flush()
    }

    /// Stops the servers. The NVRAM's content is then in its mirror, and stays in memory.
    pub fn close(&mut self, context: &Context) {
        std::mem::take(&mut self.servers).into_iter().for_each(DiskServer::stop);
        self.nvram.clear();
        self.images.closed(&context.folders.memory);
    }

    /// Reads the size of this disk's image again.
    pub fn resize(&self, context: &Context, name: &str) -> Result<DiskSize, ApiError> {
        let disk = self.configured(context, name)?;
        let bytes = disk.resize().map_err(|error| ApiError::new(ErrorWord::Failed, crate::chain(&error)))?;
        context.record(EventKind::DiskResized { disk: name.to_owned(), bytes });
        Ok(DiskSize { disk: name.to_owned(), bytes })
    }

    /// The server of this configured disk.
    pub fn configured(&self, context: &Context, name: &str) -> Result<&DiskServer, ApiError> {
        // NVRAM is served after the disks: its image is memory.
        let disks = &self.servers[..self.servers.len().min(context.config.devices.disks.len())];
        disks.iter().find(|disk| disk.name() == name).ok_or_else(|| {
            let names: Vec<_> = disks.iter().map(|disk| disk.name()).collect();
            let message = format!("{} has no disk {name}", context.config.name);
            ApiError::new(ErrorWord::NoSuchDisk, message).hint(format!("its disks are: {}", names.join(", ")))
        })
    }

    pub fn handle_disk(context: &Context, disk: String, notice: Notice) {
        match notice {
            Notice::OutOfSpace { why } => {
                let folder = folder_of_disk(context, &disk);
                context.record(EventKind::DiskFull { disk, folder, why });
            }
            Notice::SpaceAgain { waited } => {
                context.record(EventKind::DiskSpaceAgain { disk, waited_ms: waited.as_secs_f64() * 1e3 });
            }
        }
    }

    /// Refuses while a request waits for an image to grow: a stop would end the request with an error in the guest.
    pub fn must_have_space(&self, context: &Context, what: &str) -> Result<(), ApiError> {
        let Some(disk) = self.servers.iter().find(|disk| disk.counters().waiting_for_space > 0) else { return Ok(()) };
        let (name, folder) = (disk.name(), folder_of_disk(context, disk.name()));
        let message = format!("cannot {what}: requests to disk {name} are waiting for space in {folder}");
        Err(ApiError::new(ErrorWord::WrongState, message).hint("free space there; the guest then continues by itself"))
    }

    /// Refuses while a disk is still in its object store. Whatever copies the disks, or leaves them, needs all of their
    /// blocks.
    pub fn must_be_complete(&self, what: &str) -> Result<(), ApiError> {
        if self.backfill.is_complete() {
            return Ok(());
        }
        let message = format!("cannot {what}: the guest's disks are still being fetched from the object store");
        Err(ApiError::new(ErrorWord::WrongState, message).hint("`hearth status` shows how much is missing"))
    }

    /// Refuses while QEMU does not use a disk. After a pause it would never use that disk again. A QEMU that is only in
    /// the middle of its first messages is waited for.
    pub fn must_be_in_use(&self, what: &str) -> Result<(), ApiError> {
        let deadline = Instant::now() + GREETING_PATIENCE;
        while self.servers.iter().any(is_silent) && Instant::now() < deadline {
            std::thread::sleep(Duration::from_millis(5));
        }
        let Some(disk) = self.servers.iter().find(|disk| is_silent(disk)) else { return Ok(()) };
        let message = format!("cannot {what}: QEMU has not used disk {} since a keeper died", disk.name());
        Err(ApiError::new(ErrorWord::WrongState, message)
            .hint("Hearth repairs this within seconds: see `hearth events`"))
    }
}

/// Whether QEMU is connected but has not sent all of its first messages.
pub fn is_silent(disk: &DiskServer) -> bool {
    let counters = disk.counters();
    counters.connected && !counters.greeted
}

/// The firmware's variables, which QEMU itself writes.
pub fn firmware_vars(config: &Config) -> Option<&PathBuf> {
    match &config.guest.boot {
        Boot::Firmware { vars, .. } => vars.as_ref(),
        Boot::Kernel { .. } => None,
    }
}

fn folder_of_disk(context: &Context, name: &str) -> String {
    let config = &context.config;
    let image = config.devices.disks.iter().find(|disk| disk.name == name).map(|disk| disk.path.as_path());
    let folder = image.map_or(context.folders.memory.as_path(), |image| image.parent().unwrap_or(Path::new("/")));
    folder.display().to_string()
}
