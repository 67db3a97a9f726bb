//! NVRAM of a machine: opened with its disks, served like one of them, and followed by nobody. Persistent memory only has to be
//! there.

use std::path::Path;

use hearth_api::{EventKind, NvramDevice, NvramStatus};
use hearth_disk::block::DiskId;
use hearth_disk::nvram::pmem::Pmem;
use hearth_disk::nvram::{MirrorPolicy, Nvram, NvramOptions, Origin, resident_bytes};
use hearth_disk::server::{DiskOptions, DiskServer};

use super::{Machine, MachineError, launch};
use crate::config::{self, NvramConfig, PmemConfig};

impl NvramConfig {
    pub fn options(&self, memory_folder: &Path) -> NvramOptions {
        let mirror = self.mirror.as_ref().map(|mirror| (mirror.file.clone(), policy(mirror.policy)));
        NvramOptions {
            name: self.name.clone(),
            folder: memory_folder.to_owned(),
            bytes: self.bytes,
            mirror,
            owner: None,
        }
    }
}

impl PmemConfig {
    pub fn options(&self, memory_folder: &Path) -> NvramOptions {
        let mirror = self.mirror_file.clone().map(|file| (file, MirrorPolicy::Sync));
        NvramOptions {
            name: self.name.clone(),
            folder: memory_folder.to_owned(),
            bytes: self.bytes,
            mirror,
            owner: None,
        }
    }
}

impl Machine {
    /// After the disks: the guest sees them behind these.
    pub(super) fn open_nvram(&mut self) -> Result<(), MachineError> {
        let mut locks = Vec::new();
        let disks = self.parts.config.disks.len();
        let (memory, owner) = (self.parts.folders.memory.clone(), self.lock_owner());
        for (position, device) in self.parts.config.nvram.iter().enumerate() {
            let (nvram, backing) = Nvram::open(&NvramOptions { owner, ..device.options(&memory) })?;
            locks.extend(nvram.inheritable_lock().map_err(|source| unlocked(&device.name, source))?);
            self.record(opened(&device.name, nvram.origin));
            let socket = self.parts.folders.disk_socket(&device.name);
            let id = DiskId(u8::try_from(disks + position).expect("a machine has fewer disks than PCI slots"));
            let tell = Some(self.disk_notices(&device.name));
            let options = DiskOptions { gate: self.disk_gate(), tell, ..launch::nvram_options(id, device, socket) };
            let server = DiskServer::start_with(options, backing, None)
                .map_err(|source| MachineError::Server { disk: device.name.clone(), source })?;
            self.watch_disk(&server);
            self.disks.push(server);
            self.nvram.push(nvram);
        }
        for device in &self.parts.config.pmem {
            let pmem = Pmem::open(&NvramOptions { owner, ..device.options(&memory) })?;
            locks.extend(pmem.inheritable_lock().map_err(|source| unlocked(&device.name, source))?);
            self.record(opened(&device.name, pmem.origin));
            self.pmem.push(pmem);
        }
        self.parts.locks.of_mirrors(locks);
        Ok(())
    }

    /// The machine has stopped, and its disks' servers have ended: memory that is mirrored is given back.
    pub(super) fn give_back_nvram(&mut self) {
        self.pmem.clear();
        for (device, nvram) in self.parts.config.nvram.iter().zip(std::mem::take(&mut self.nvram)) {
            let problem = nvram.problem();
            if let (Ok(false), Some(problem)) = (nvram.give_back(), problem) {
                let message =
                    format!("nvram {} stays in memory because its mirror cannot be written: {problem}", device.name);
                self.record(EventKind::Error { message });
            }
        }
    }

    /// Host memory that the devices take.
    pub(super) fn nvram_bytes(&self) -> u64 {
        let folder = &self.parts.folders.memory;
        self.parts.config.nvram_in_memory().map(|(name, _)| resident_bytes(folder, name)).sum()
    }

    pub(super) fn nvram_statuses(&self) -> Vec<NvramStatus> {
        let servers = self.disks.iter().skip(self.parts.config.disks.len());
        let devices = self.parts.config.nvram.iter().zip(&self.nvram).zip(servers);
        let disks = devices.map(|((device, nvram), server)| nvram_status(device, nvram, server));
        let is_mapped = self.life.is_some();
        disks.chain(self.parts.config.pmem.iter().map(|device| pmem_status(device, is_mapped))).collect()
    }
}

fn unlocked(nvram: &str, source: std::io::Error) -> MachineError {
    MachineError::MirrorLock { nvram: nvram.to_owned(), source }
}

fn opened(name: &str, origin: Origin) -> EventKind {
    let from = match origin {
        Origin::Memory => "memory",
        Origin::Mirror => "mirror",
        Origin::Zeroes => "nothing",
    };
    EventKind::NvramOpened { nvram: name.to_owned(), from: from.to_owned() }
}

/// What the guest does with it nobody sees.
fn pmem_status(device: &PmemConfig, is_mapped: bool) -> NvramStatus {
    NvramStatus {
        name: device.name.clone(),
        device: NvramDevice::Pmem,
        bytes: device.bytes,
        mirror: if device.mirror_file.is_some() { "sync" } else { "none" }.to_owned(),
        mirror_file: device.mirror_file.as_ref().map(|file| file.display().to_string()),
        unmirrored_bytes: None,
        problem: None,
        connected: is_mapped,
        reads: 0,
        writes: 0,
        flushes: 0,
    }
}

fn nvram_status(device: &NvramConfig, nvram: &Nvram, server: &DiskServer) -> NvramStatus {
    let counters = server.counters();
    NvramStatus {
        name: device.name.clone(),
        device: NvramDevice::Disk,
        bytes: device.bytes,
        mirror: device.mirror.as_ref().map_or("none", |mirror| mirror.policy.name()).to_owned(),
        mirror_file: device.mirror.as_ref().map(|mirror| mirror.file.display().to_string()),
        unmirrored_bytes: nvram.dirty_bytes(),
        problem: nvram.problem(),
        connected: counters.connected,
        reads: counters.reads,
        writes: counters.writes,
        flushes: counters.flushes,
    }
}

fn policy(policy: config::MirrorPolicy) -> MirrorPolicy {
    match policy {
        config::MirrorPolicy::Async => MirrorPolicy::Async,
        config::MirrorPolicy::Sync => MirrorPolicy::Sync,
    }
}
