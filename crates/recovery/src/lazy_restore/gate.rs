//! Gate: what a machine's disks ask before they touch its memory.

use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use hearth_disk::gate::{Gate, RamGate};
use hearth_memory::PAGE_BYTES;

use super::{LazyRam, passing};

/// Pause between a disk's attempts to reach memory that cannot be loaded.
const TRY_AGAIN: Duration = Duration::from_millis(250);

impl LazyRam {
    /// Gate that the machine's disks ask before they touch guest memory.
    pub fn gate(self: &Arc<Self>) -> Gate {
        let (ram_device, ram_inode) = self.identity;
        Gate { ram_device, ram_inode, keeper: self.clone() }
    }
}

impl RamGate for LazyRam {
    fn is_granted(&self, _file: Range<u64>) -> bool {
        true
    }

    fn admit(&self, _file: Range<u64>) -> bool {
        true
    }

    fn bring(&self, file: Range<u64>) -> bool {
        let pages = file.start / PAGE_BYTES..file.end.div_ceil(PAGE_BYTES);
        for page in pages.map(|page| page as u32) {
            // A page that is not there at the end holds zeroes, and the kernel supplies it.
            while !self.is_there(page) && !self.is_finished() {
                match passing(self.bring_touched(page, None, &mut self.snapshot.ram.reading())) {
                    Ok(Some(())) => {}
                    Ok(None) if !self.is_stopped() => std::thread::sleep(TRY_AGAIN),
                    Ok(None) | Err(_) if self.is_finished() => {}
                    // QEMU has ended, or the restore was stopped: its requests end with it.
                    Ok(None) | Err(_) => return false,
                }
            }
        }
        true
    }
}
