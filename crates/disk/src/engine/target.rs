//! Target of the raw engines: an open file or block device, and what it requires of its callers.

use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd, RawFd};

/// An open raw image. Everything goes through this one open file description: it carries the image's lock, so a request
/// that is still in flight when the keeper is killed keeps the next keeper out until it has ended.
#[derive(Debug)]
pub struct Target {
    pub file: File,
    /// For a block device: the unit of discards and zeroing, also where data goes through the page cache.
    pub device_sector_bytes: Option<u64>,
    pub read_only: bool,
    /// Offsets and lengths must be multiples of this: 1 through the page cache, the device's unit with O_DIRECT.
    pub alignment: u64,
    #[cfg(test)]
    pub(crate) tape: Option<crate::image::tape::Tape>,
}

impl Target {
    /// Records a call that succeeded. `begun`: number of recorded events when its operation began.
    #[cfg(test)]
    pub(super) fn note(&self, call: super::transfer::Call, count: usize, begun: usize) {
        use super::transfer::Call;
        use crate::image::tape::Event;
        let Some(tape) = &self.tape else { return };
        match call {
            Call::Read { .. } => {}
            Call::Write { memory, offset, .. } => {
                // SAFETY: the kernel wrote `count` bytes from this memory, and the transfer still owns it.
                let bytes = unsafe { std::slice::from_raw_parts(memory.as_ptr(), count) }.to_vec();
                tape.push(Event::Write { offset, bytes });
            }
            Call::Allocate { offset, bytes, .. } | Call::DiscardDevice { offset, bytes } => {
                tape.push(Event::Zero { offset, length: bytes, grows: false });
            }
            Call::SyncData => tape.push(Event::Sync { before: begun }),
        }
    }

    pub(super) fn fd(&self) -> RawFd {
        self.file.as_raw_fd()
    }

    /// Gives up a range of a block device; its contents are undefined afterwards. Blocks.
    pub(super) fn discard_device(&self, offset: u64, bytes: u64) -> io::Result<()> {
        // _IO(0x12, 119) of linux/fs.h.
        const BLKDISCARD: libc::Ioctl = 0x1277;
        let range = [offset, bytes];
        // SAFETY: the ioctl reads two u64 from the pointer, which is an array of two u64 on this stack.
        match unsafe { libc::ioctl(self.fd(), BLKDISCARD, range.as_ptr()) } {
            0 => Ok(()),
            _ => Err(io::Error::last_os_error()),
        }
    }
}
