//! Gate: what the disks of the machine ask before they look at its memory.

use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use hearth_disk::gate::{Gate, RamGate};
use hearth_memory::PAGE_BYTES;

use super::{LazyRam, passing};

/// Between two attempts of a disk to get at memory that cannot be brought.
const TRY_AGAIN: Duration = Duration::from_millis(250);

impl LazyRam {
    /// What the disks of the machine have to ask.
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
            // What nobody had touched by the end is zeroes, and the kernel sees to that.
            while !self.is_there(page) && !self.is_finished() {
                match passing(self.bring_touched(page, None, &mut self.snapshot.ram.reading())) {
                    Ok(Some(())) => {}
                    Ok(None) if !self.is_stopped() => std::thread::sleep(TRY_AGAIN),
                    Ok(None) | Err(_) if self.is_finished() => {}
                    // QEMU's end: its requests end with it.
                    Ok(None) | Err(_) => return false,
                }
            }
        }
        true
    }
}
