//! A split virtqueue, device side: heads out of the available ring, answers into the used ring, wake-ups both ways.
//!
//! Not the virtio-queue crate: after a crash, requests are taken up again by their head (see `inflight`), which its
//! iterator cannot do, and its writes to the used ring could not follow QEMU's own switch for logging that ring.
//!
//! ```text
//! available: flags u16, index u16, heads u16[n], used_event u16    (the guest writes)
//! used:      flags u16, index u16, (head u32, bytes u32)[n], available_event u16    (we write)
//! ```

use std::sync::atomic::{Ordering, fence};

use super::memory::{GuestMap, Unmapped};

/// The most entries that QEMU lets a guest choose (`VIRTQUEUE_MAX_SIZE` in hw/virtio/virtio.h). Since 10.0.13 it offers as many
/// whatever the size of the device's queues is.
pub const ENTRIES_MAX: u16 = 1024;

const NO_INTERRUPT: u16 = 1;
const NO_NOTIFY: u16 = 1;
const RING_OFFSET: u64 = 4;
const USED_ENTRY_BYTES: u64 = 8;

/// Why a ring cannot be used any further. The guest must reset the device.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum RingFault {
    #[error("a ring is outside of guest memory")]
    Unmapped,
    #[error("the guest announces more requests than the ring has entries")]
    Overrun,
}

impl From<Unmapped> for RingFault {
    fn from(_: Unmapped) -> Self {
        Self::Unmapped
    }
}

/// Guest-physical addresses of the parts of a ring.
#[derive(Clone, Copy, Debug)]
pub struct RingPlace {
    pub descriptors: u64,
    pub available: u64,
    pub used: u64,
    /// Where the used ring is logged, if it is.
    pub log: Option<u64>,
}

/// Bytes of the parts, for checks that they are mapped: descriptors, available, used.
pub fn part_bytes(size: u16) -> (u64, u64, u64) {
    let size = u64::from(size);
    (size * 16, RING_OFFSET + size * 2 + 2, RING_OFFSET + size * USED_ENTRY_BYTES + 2)
}

pub struct Ring {
    size: u16,
    pub place: RingPlace,
    event_index: bool,
    next_available: u16,
    next_used: u16,
    /// Used index at the last decision whether to wake the guest; none: the guest is woken in any case.
    decided_used: Option<u16>,
    /// Used index up to which the guest has been woken, or surely looks by itself.
    settled_used: u16,
}

impl Ring {
    pub fn new(size: u16, place: RingPlace, event_index: bool, next_available: u16, next_used: u16) -> Self {
        debug_assert!(size.is_power_of_two());
        Self { size, place, event_index, next_available, next_used, decided_used: None, settled_used: next_used }
    }

    pub fn next_available(&self) -> u16 {
        self.next_available
    }

    pub fn next_used(&self) -> u16 {
        self.next_used
    }

    /// The used index as the guest sees it.
    pub fn published_used(memory: &GuestMap, place: &RingPlace) -> Result<u16, RingFault> {
        Ok(memory.load_u16(place.used + 2, Ordering::Acquire)?)
    }

    /// The head of the next request.
    pub fn pop(&mut self, memory: &GuestMap) -> Result<Option<u16>, RingFault> {
        let announced = memory.load_u16(self.place.available + 2, Ordering::Acquire)?;
        let waiting = announced.wrapping_sub(self.next_available);
        if waiting == 0 {
            return Ok(None);
        }
        if waiting > self.size {
            return Err(RingFault::Overrun);
        }
        let slot = u64::from(self.next_available % self.size);
        let head = memory.load_u16(self.place.available + RING_OFFSET + slot * 2, Ordering::Relaxed)?;
        self.next_available = self.next_available.wrapping_add(1);
        Ok(Some(head))
    }

    /// Hands a request back; the guest sees it at once.
    pub fn push(&mut self, memory: &GuestMap, head: u16, bytes: u32) -> Result<(), RingFault> {
        let offset = RING_OFFSET + u64::from(self.next_used % self.size) * USED_ENTRY_BYTES;
        let mut entry = [0; USED_ENTRY_BYTES as usize];
        entry[..4].copy_from_slice(&u32::from(head).to_le_bytes());
        entry[4..].copy_from_slice(&bytes.to_le_bytes());
        memory.write(self.place.used + offset, &entry)?;
        self.log(memory, offset, USED_ENTRY_BYTES);
        self.next_used = self.next_used.wrapping_add(1);
        memory.store_u16(self.place.used + 2, self.next_used, Ordering::Release)?;
        self.log(memory, 2, 2);
        Ok(())
    }

    /// Asks the guest not to kick; a hint.
    pub fn disable_kicks(&mut self, memory: &GuestMap) -> Result<(), RingFault> {
        // With event indices nothing needs to be written: the old index is passed already.
        if self.event_index { Ok(()) } else { self.store_flags(memory, NO_NOTIFY) }
    }

    /// Asks for a kick at the next request. True: one has come meanwhile, so look again.
    pub fn enable_kicks(&mut self, memory: &GuestMap) -> Result<bool, RingFault> {
        if self.event_index {
            let offset = RING_OFFSET + u64::from(self.size) * USED_ENTRY_BYTES;
            memory.store_u16(self.place.used + offset, self.next_available, Ordering::Relaxed)?;
            self.log(memory, offset, 2);
        } else {
            self.store_flags(memory, 0)?;
        }
        // The guest writes its index and then reads our wish; we the other way round.
        fence(Ordering::SeqCst);
        self.has_news(memory)
    }

    /// Whether the guest has announced more than was taken.
    pub fn has_news(&self, memory: &GuestMap) -> Result<bool, RingFault> {
        Ok(memory.load_u16(self.place.available + 2, Ordering::Acquire)? != self.next_available)
    }

    /// Forgets an earlier decision not to wake the guest: the guest may not have been woken.
    pub fn wake_in_any_case(&mut self) {
        self.decided_used = None;
    }

    /// Whether the guest wants to be woken for what was pushed since the last call.
    pub fn wants_wake(&mut self, memory: &GuestMap) -> Result<bool, RingFault> {
        let decided = self.decided_used.replace(self.next_used);
        if decided == Some(self.next_used) {
            return Ok(false);
        }
        fence(Ordering::SeqCst);
        let wants = match decided {
            None if self.event_index => true,
            decided => self.asks_for_wake(memory, decided.unwrap_or_default())?,
        };
        if wants {
            self.settled_used = self.next_used;
        }
        Ok(wants)
    }

    /// Does the guest sleep over something that was pushed, and that `wants_wake` said no to? To be asked when nothing was
    /// pushed for a while.
    ///
    /// Between its wish to be woken and its last look at the ring a guest has a memory barrier, as between our push and our
    /// look at the wish there is one. QEMU leaves the guest's out if it emulates a single CPU (TCG without `CF_PARALLEL`: an
    /// instruction with a lock is none, and before 8.1 `tcg_gen_mb` did nothing, `tcg/tcg-op-ldst.c`), so that now and then
    /// neither sees what the other wrote. The guest's write is seen a moment later.
    pub fn overslept(&mut self, memory: &GuestMap) -> Result<bool, RingFault> {
        let settled = std::mem::replace(&mut self.settled_used, self.next_used);
        Ok(settled != self.next_used && self.asks_for_wake(memory, settled)?)
    }

    fn asks_for_wake(&self, memory: &GuestMap, since: u16) -> Result<bool, RingFault> {
        if !self.event_index {
            return Ok(memory.load_u16(self.place.available, Ordering::Relaxed)? & NO_INTERRUPT == 0);
        }
        let offset = RING_OFFSET + u64::from(self.size) * 2;
        let event = memory.load_u16(self.place.available + offset, Ordering::Relaxed)?;
        Ok(crossed(event, self.next_used, since))
    }

    fn store_flags(&self, memory: &GuestMap, flags: u16) -> Result<(), RingFault> {
        memory.store_u16(self.place.used, flags, Ordering::Relaxed)?;
        self.log(memory, 0, 2);
        Ok(())
    }

    fn log(&self, memory: &GuestMap, offset: u64, bytes: u64) {
        if let Some(log) = self.place.log {
            memory.mark(log.wrapping_add(offset), bytes);
        }
    }
}

/// Whether the index passed `event` on its way from `old` to `new` (virtio 1.2, 2.7.7.2).
fn crossed(event: u16, new: u16, old: u16) -> bool {
    new.wrapping_sub(event).wrapping_sub(1) < new.wrapping_sub(old)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::server::foreign::MemoryFile;
    use crate::server::wire::RegionSpec;

    const PLACE: RingPlace = RingPlace { descriptors: 0, available: 0x1000, used: 0x2000, log: None };

    fn memory() -> GuestMap {
        let file = MemoryFile::new(0x4000);
        let mut map = GuestMap::default();
        map.add(RegionSpec { guest: 0, bytes: 0x4000, user: 0, file_offset: 0 }, file).unwrap();
        map
    }

    fn announce(memory: &GuestMap, index: u16, heads: &[(u16, u16)]) {
        for (slot, head) in heads {
            memory.store_u16(0x1004 + u64::from(*slot) * 2, *head, Ordering::Relaxed).unwrap();
        }
        memory.store_u16(0x1002, index, Ordering::Release).unwrap();
    }

    #[test]
    fn heads_come_in_order_and_indices_wrap() {
        let memory = memory();
        let mut ring = Ring::new(4, PLACE, false, u16::MAX, u16::MAX);
        announce(&memory, 1, &[(3, 9), (0, 7)]);
        assert_eq!(ring.pop(&memory), Ok(Some(9)));
        assert_eq!(ring.pop(&memory), Ok(Some(7)));
        assert_eq!(ring.pop(&memory), Ok(None));
        ring.push(&memory, 7, 513).unwrap();
        ring.push(&memory, 9, 1).unwrap();
        let mut used = [0; 4 + 32];
        memory.read(0x2000, &mut used).unwrap();
        assert_eq!(used[2..4], 1u16.to_le_bytes());
        assert_eq!(used[4 + 24..], [7, 0, 0, 0, 1, 2, 0, 0]);
        assert_eq!(used[4..12], [9, 0, 0, 0, 1, 0, 0, 0]);
    }

    #[test]
    fn an_index_that_jumps_breaks_the_ring() {
        let memory = memory();
        let mut ring = Ring::new(4, PLACE, false, 0, 0);
        announce(&memory, 5, &[]);
        assert_eq!(ring.pop(&memory), Err(RingFault::Overrun));
        let mut lost = Ring::new(4, RingPlace { available: 0x10_0000, ..PLACE }, false, 0, 0);
        assert_eq!(lost.pop(&memory), Err(RingFault::Unmapped));
    }

    #[test]
    fn request_without_kick_is_seen() {
        for event_index in [false, true] {
            let memory = memory();
            let mut ring = Ring::new(4, PLACE, event_index, 0, 0);
            ring.disable_kicks(&memory).unwrap();
            assert_eq!(ring.enable_kicks(&memory), Ok(false));
            announce(&memory, 1, &[(0, 2)]);
            assert_eq!(ring.enable_kicks(&memory), Ok(true));
            ring.pop(&memory).unwrap();
            assert_eq!(ring.enable_kicks(&memory), Ok(false));
            let event = memory.load_u16(0x2000 + 4 + 32, Ordering::Relaxed).unwrap();
            assert_eq!(event, u16::from(event_index), "the index at which the guest shall kick");
        }
    }

    #[test]
    fn late_wake_up_request_counts_once() {
        let memory = memory();
        let mut ring = Ring::new(4, PLACE, true, 0, 0);
        assert_eq!(ring.wants_wake(&memory), Ok(true));
        let wish = |event| memory.store_u16(0x1000 + 4 + 8, event, Ordering::Relaxed).unwrap();
        for (event, expected) in [(100, false), (3, true), (3, false)] {
            wish(100);
            (0..2).for_each(|_| ring.push(&memory, 0, 0).unwrap());
            assert_eq!(ring.wants_wake(&memory), Ok(false));
            wish(event);
            assert_eq!(ring.overslept(&memory), Ok(expected), "at {}", ring.next_used());
            assert_eq!(ring.overslept(&memory), Ok(false), "at {}", ring.next_used());
        }
    }

    #[test]
    fn guest_is_woken_when_it_asks() {
        let memory = memory();
        let mut ring = Ring::new(4, PLACE, true, 0, 0);
        let used_event = 0x1000 + 4 + 8;
        let mut check = |event: u16, pushes: u16, expected| {
            memory.store_u16(used_event, event, Ordering::Relaxed).unwrap();
            (0..pushes).for_each(|_| ring.push(&memory, 0, 0).unwrap());
            assert_eq!(ring.wants_wake(&memory), Ok(expected));
        };
        check(100, 1, true); // The first time nothing is known, so wake.
        check(100, 1, false);
        check(3, 1, false);
        check(3, 1, true);
        check(3, 0, false);
        check(5, 3, true);
        let mut flags = Ring::new(4, PLACE, false, 0, 0);
        flags.push(&memory, 0, 0).unwrap();
        memory.store_u16(0x1000, NO_INTERRUPT, Ordering::Relaxed).unwrap();
        assert_eq!(flags.wants_wake(&memory), Ok(false));
    }
}
