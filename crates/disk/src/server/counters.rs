//! Counters of a disk. Only the disk's thread writes them; anybody may read them.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use crate::heartbeat::Heartbeat;

/// A reading of the counters of one disk, since it was started.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize)]
pub struct DiskCounters {
    /// Whether a QEMU is connected.
    pub connected: bool,
    /// Whether a QEMU is connected, and each that is has sent all of its first messages.
    pub greeted: bool,
    /// Whether a second QEMU is connected and waits to take over.
    pub successor: bool,
    /// Whether the guest has switched its write cache off.
    pub write_through: bool,
    /// Connections of QEMUs.
    pub connections: u64,
    /// Read requests of the guest.
    pub reads: u64,
    /// Write requests of the guest.
    pub writes: u64,
    /// Flush requests of the guest.
    pub flushes: u64,
    /// Flush requests that needed no operation of their own on the image.
    pub flushes_spared: u64,
    /// Discard and write-zeroes requests of the guest.
    pub discards: u64,
    /// Bytes of reads that were answered from memory.
    pub bytes_read_warm: u64,
    /// Bytes of reads that were answered by the image.
    pub bytes_read_image: u64,
    /// Bytes that the guest wrote.
    pub bytes_written: u64,
    /// Operations on the image that have ended.
    pub image_operations: u64,
    /// The sum of their times, in microseconds.
    pub image_us: u64,
    /// Operations that the image refused or failed.
    pub io_errors: u64,
    /// Operations that wait until the image's file system has space again.
    pub waiting_for_space: u64,
    /// Malformed requests of the guest.
    pub bad_requests: u64,
    /// Requests that an earlier server had taken and this one carried out.
    pub resumed: u64,
    /// Requests during which another one changed the same blocks: nothing is recorded from them.
    pub tainted: u64,
    /// Time that requests waited for the limits, in microseconds.
    pub throttled_us: u64,
    /// Operations that the image has not ended yet.
    pub in_flight: u64,
    /// When QEMU last began to stop the queues: microseconds since 1970, 0 for never. Its guest stands still by then, and
    /// QEMU says so only when all requests are answered.
    pub stop_asked_us: u64,
}

macro_rules! counters {
    ($($name:ident),*) => {
        #[derive(Default)]
        pub struct Counters {
            /// Heartbeat of the disk's thread.
            pub heartbeat: Heartbeat,
            pub connected: AtomicBool,
            pub greeted: AtomicBool,
            pub successor: AtomicBool,
            /// The guest has switched its write cache off. Its connections keep this current.
            pub write_through: Arc<AtomicBool>,
            $(pub $name: AtomicU64,)*
        }

        impl Counters {
            pub fn read(&self) -> DiskCounters {
                DiskCounters {
                    connected: self.connected.load(Ordering::Relaxed),
                    greeted: self.greeted.load(Ordering::Relaxed),
                    successor: self.successor.load(Ordering::Relaxed),
                    write_through: self.write_through.load(Ordering::Relaxed),
                    $($name: self.$name.load(Ordering::Relaxed),)*
                }
            }
        }
    };
}

counters!(
    connections,
    reads,
    writes,
    flushes,
    flushes_spared,
    discards,
    bytes_read_warm,
    bytes_read_image,
    bytes_written,
    image_operations,
    image_us,
    io_errors,
    waiting_for_space,
    bad_requests,
    resumed,
    tainted,
    throttled_us,
    in_flight,
    stop_asked_us
);

/// Adds to a counter. It has one writer, so a load and a store are as right as a locked addition, and cheaper.
pub fn add(counter: &AtomicU64, amount: u64) {
    counter.store(counter.load(Ordering::Relaxed).wrapping_add(amount), Ordering::Relaxed);
}
