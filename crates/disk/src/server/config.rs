//! The device as the guest sees it: feature bits and configuration space.

use crate::block::{BLOCK_BYTES, SECTOR_BYTES};
use crate::image::Image;
use crate::server::request::RANGE_SECTORS_MAX;

pub const SEG_MAX: u64 = 1 << 2;
pub const READ_ONLY: u64 = 1 << 5;
pub const BLOCK_SIZE: u64 = 1 << 6;
pub const FLUSH: u64 = 1 << 9;
pub const TOPOLOGY: u64 = 1 << 10;
pub const CONFIG_WCE: u64 = 1 << 11;
pub const MULTI_QUEUE: u64 = 1 << 12;
pub const DISCARD: u64 = 1 << 13;
pub const WRITE_ZEROES: u64 = 1 << 14;
/// Log writes to guest memory. A request rather than a feature: QEMU switches it on for a handover, and refuses the
/// handover if it is not offered.
pub const LOG_ALL: u64 = 1 << 26;
pub const INDIRECT: u64 = 1 << 28;
pub const EVENT_INDEX: u64 = 1 << 29;
pub const PROTOCOL_FEATURES: u64 = 1 << 30;
pub const VERSION_1: u64 = 1 << 32;

/// Features of the vhost-user protocol itself.
pub mod protocol {
    pub const MULTI_QUEUE: u64 = 1 << 0;
    pub const LOG_SHMFD: u64 = 1 << 1;
    pub const REPLY_ACK: u64 = 1 << 3;
    pub const BACKEND_CHANNEL: u64 = 1 << 5;
    pub const CONFIG: u64 = 1 << 9;
    pub const INFLIGHT_SHMFD: u64 = 1 << 12;
    pub const RESET_DEVICE: u64 = 1 << 13;
    pub const CONFIGURE_MEM_SLOTS: u64 = 1 << 15;

    pub const OFFERED: u64 = MULTI_QUEUE
        | LOG_SHMFD
        | REPLY_ACK
        | BACKEND_CHANNEL
        | CONFIG
        | INFLIGHT_SHMFD
        | RESET_DEVICE
        | CONFIGURE_MEM_SLOTS;
}

/// Bytes of the configuration space that are defined for a block device.
pub const SPACE_BYTES: usize = 60;
/// Where the guest switches its write cache.
pub const WRITEBACK_OFFSET: usize = 32;

/// The device as it is offered to any frontend.
#[derive(Clone, Copy, Debug)]
pub struct Device {
    pub features: u64,
    /// Features of the vhost-user protocol that are offered.
    pub protocol: u64,
    pub queues: u16,
    pub queue_size: u16,
    pub space: [u8; SPACE_BYTES],
}

impl Device {
    pub fn of(image: &Image, read_only: bool, queues: u16, queue_size: u16) -> Self {
        let mut features = VERSION_1 | EVENT_INDEX | INDIRECT | PROTOCOL_FEATURES | LOG_ALL;
        features |= SEG_MAX | BLOCK_SIZE | TOPOLOGY | FLUSH | CONFIG_WCE | MULTI_QUEUE;
        features |= match (read_only, image.supports_discard()) {
            (true, _) => READ_ONLY,
            (false, true) => WRITE_ZEROES | DISCARD,
            (false, false) => WRITE_ZEROES,
        };
        let space = space(image, queues, queue_size);
        Self { features, protocol: protocol::OFFERED & !protocol::CONFIGURE_MEM_SLOTS, queues, queue_size, space }
    }

    /// Lets frontends tell their memory piece by piece.
    pub fn offer_memory_slots(&mut self) {
        self.protocol |= protocol::CONFIGURE_MEM_SLOTS;
    }

    pub fn resize(&mut self, bytes: u64) {
        self.space[..8].copy_from_slice(&(bytes / SECTOR_BYTES).to_le_bytes());
    }
}

/// struct virtio_blk_config (virtio 1.2, 5.2.4), little-endian.
fn space(image: &Image, queues: u16, queue_size: u16) -> [u8; SPACE_BYTES] {
    let mut space = [0; SPACE_BYTES];
    let mut put = |at: usize, field: &[u8]| space[at..at + field.len()].copy_from_slice(field);
    let logical = image.logical_block_bytes();
    let physical = image.physical_block_bytes().max(BLOCK_BYTES as u32);
    put(0, &(image.bytes() / SECTOR_BYTES).to_le_bytes());
    // Header and status take a descriptor each.
    put(12, &u32::from(queue_size.saturating_sub(2)).to_le_bytes());
    put(20, &logical.to_le_bytes());
    put(24, &[(physical / logical).max(1).ilog2() as u8]);
    put(26, &1u16.to_le_bytes());
    put(28, &(image.optimal_io_bytes() / logical).to_le_bytes());
    put(WRITEBACK_OFFSET, &[1]);
    put(34, &queues.to_le_bytes());
    // Discard and write-zeroes: one range a request, as QEMU's own export has it.
    put(36, &RANGE_SECTORS_MAX.to_le_bytes());
    put(40, &1u32.to_le_bytes());
    put(44, &((BLOCK_BYTES as u64 / SECTOR_BYTES) as u32).to_le_bytes());
    put(48, &RANGE_SECTORS_MAX.to_le_bytes());
    put(52, &1u32.to_le_bytes());
    put(56, &[1]);
    space
}
