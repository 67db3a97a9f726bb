//! NVRAM of a machine: opened after its disks, and served like one of them, but without a ledger. Persistent memory
//! only has to be open: QEMU maps it.

use std::path::Path;

use hearth_api::{ApiError, ErrorWord, EventKind, NvramDevice, NvramStatus};
use hearth_disk::block::DiskId;
use hearth_disk::gate::Gate;
use hearth_disk::nvram::pmem::Pmem;
use hearth_disk::nvram::{MirrorPolicy, Nvram, NvramOptions, Origin, resident_bytes};
use hearth_disk::server::{DiskOptions, DiskServer};

use super::disks::Disks;
use super::{Context, MachineError, launch};
use crate::config::{Config, NvramConfig, PmemConfig};

impl NvramConfig {
    pub fn options(&self, memory_folder: &Path) -> NvramOptions {
        let mirror = self.mirror.as_ref().map(|mirror| (mirror.file.clone(), mirror.policy));
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

/// Refuses a guest with a device whose state QEMU does not transfer. That is virtio-pmem: its queue position is not
/// part of the state (`hw/virtio/virtio-pmem.c` in QEMU describes none).
pub fn must_have_all_state(config: &Config, what: &str) -> Result<(), ApiError> {
    let Some(device) = config.devices.pmem.first() else { return Ok(()) };
    let message =
        format!("cannot {what}: another QEMU cannot take over nvram {}, which is persistent memory", device.name);
    Err(ApiError::new(ErrorWord::NotPossible, message).hint("set device = \"disk\", then stop and start the machine"))
}

impl Disks {
    /// Opens and serves NVRAM, and opens persistent memory. Call it after the disks are served: the guest sees these
    /// devices after them.
    pub fn open_nvram(&mut self, context: &mut Context, gate: Option<&Gate>) -> Result<(), MachineError> {
        let mut locks = Vec::new();
        let disks = context.config.devices.disks.len();
        let (memory, owner) = (context.folders.memory.clone(), self.lock_owner(context));
        for (position, device) in context.config.devices.nvram.iter().enumerate() {
            let (nvram, backing) = Nvram::open(&NvramOptions { owner, ..device.options(&memory) })?;
            locks.extend(nvram.inheritable_lock().map_err(|source| unlocked(&device.name, source))?);
            context.record(opened(&device.name, nvram.origin));
            let socket = context.folders.disk_socket(&device.name);
            let id = DiskId(u8::try_from(disks + position).expect("a machine has fewer disks than PCI slots"));
            let tell = Some(Self::notices(context, &device.name));
            let (gate, write_through) = (gate.cloned(), context.journal.write_through.contains(&device.name));
            let options = DiskOptions { gate, tell, write_through, ..launch::nvram_options(id, device, socket) };
            let server = DiskServer::start_with(options, backing, None)
                .map_err(|source| MachineError::Server { disk: device.name.clone(), source })?;
            Self::watch(context, &server);
            self.servers.push(server);
            self.nvram.push(nvram);
        }
        for device in &context.config.devices.pmem {
            let pmem = Pmem::open(&NvramOptions { owner, ..device.options(&memory) })?;
            locks.extend(pmem.inheritable_lock().map_err(|source| unlocked(&device.name, source))?);
            context.record(opened(&device.name, pmem.origin));
            self.pmem.push(pmem);
        }
        context.qemu.locks.of_mirrors(locks);
        Ok(())
    }

    /// Releases the memory of devices with a mirror. Call it when the machine has stopped and the disks' servers have
    /// ended.
    pub fn give_back_nvram(&mut self, context: &Context) {
        self.pmem.clear();
        for (device, nvram) in context.config.devices.nvram.iter().zip(std::mem::take(&mut self.nvram)) {
            let problem = nvram.problem();
            if let (Ok(false), Some(problem)) = (nvram.give_back(), problem) {
                let message =
                    format!("nvram {} stays in memory because its mirror cannot be written: {problem}", device.name);
                context.record(EventKind::Error { message });
            }
        }
    }

    /// `is_mapped`: a QEMU lives, and maps the persistent memory.
    pub fn nvram_statuses(&self, context: &Context, is_mapped: bool) -> Vec<NvramStatus> {
        let servers = self.servers.iter().skip(context.config.devices.disks.len());
        let devices = context.config.devices.nvram.iter().zip(&self.nvram).zip(servers);
        let disks = devices.map(|((device, nvram), server)| nvram_status(device, nvram, server));
        disks.chain(context.config.devices.pmem.iter().map(|device| pmem_status(device, is_mapped))).collect()
    }
}

/// Host memory that NVRAM and persistent memory take, in bytes.
pub fn nvram_bytes(context: &Context) -> u64 {
    let folder = &context.folders.memory;
    context.config.devices.nvram_in_memory().map(|(name, _)| resident_bytes(folder, name)).sum()
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

/// Status without counters: the keeper does not see the guest's reads and writes of persistent memory.
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
