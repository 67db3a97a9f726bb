//! Order of two devices in a guest's state: moves the VM generation ID ahead of power management.
//!
//! ```text
//! ... | power management | devices between | generation ID | ...   as the old QEMU sends it
//! ... | generation ID | power management | devices between | ...   as the new one receives it
//! ```
//! A QEMU that loads a guest notifies it by an ACPI event even if the ID is unchanged (`vmgenid_post_load` in QEMU's
//! `hw/acpi/vmgenid.c`). The guest finds nothing new. But to find that out it runs its interpreter of ACPI byte code.
//! Under emulation all of that must be translated first, while a connection into the guest waits. The event is raised
//! only if the guest has enabled it, which the registers of power management say. Before these are loaded nothing is
//! enabled; when they are, what is pending in them is what was pending.
//!
//! Sections are found by their heads, as in `clock`. QEMU's loader needs no order among sections that hold a whole
//! device.

use super::clock::{SECTION_FOOTER, SECTION_FULL};

/// Heads of the power management of the two boards, at QEMU's PCI addresses; their instance and version vary.
const POWER_HEADS: [&[u8]; 2] = [b"\x140000:00:1f.0/ICH9LPC", b"\x150000:00:01.3/piix4_pm"];
const ID_HEAD: &[u8] = b"\x07vmgenid\0\0\0\0\0\0\0\x01";
/// The body is the ID's address in guest memory.
const ID_BODY_BYTES: usize = 8;
/// Kind and number of a section before its head, and of its end behind its body.
const ENDS_BYTES: usize = 5;
const ID_BYTES: usize = ENDS_BYTES + ID_HEAD.len() + ID_BODY_BYTES + ENDS_BYTES;

/// How far the order is corrected in a state that arrives in pieces.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Order {
    /// Neither of the two has arrived.
    Awaited,
    /// Power management waits for the ID.
    Held,
    /// Nothing more to do.
    Right,
}

impl Order {
    /// The beginning, for a guest with or without such an ID.
    pub fn of(has_generation_id: bool) -> Self {
        if has_generation_id { Self::Awaited } else { Self::Right }
    }

    /// Corrects the order in the bytes that have arrived and were not passed on. Returns how many of the last ones must
    /// stay.
    pub fn arrange(&mut self, between: &mut [u8]) -> usize {
        if *self == Self::Right {
            return 0;
        }
        let Some(power) = POWER_HEADS.iter().find_map(|head| section(between, head)) else {
            // Part of a head may have arrived.
            return ENDS_BYTES + POWER_HEADS[1].len();
        };
        *self = Self::Held;
        let waiting = &mut between[power..];
        let Some(id) = section(waiting, ID_HEAD).filter(|&id| id + ID_BYTES <= waiting.len()) else {
            return waiting.len();
        };
        *self = Self::Right;
        let (number, end) = (id + 1..id + ENDS_BYTES, id + ID_BYTES - ENDS_BYTES);
        if waiting[end] == SECTION_FOOTER && waiting[number] == waiting[end + 1..end + ENDS_BYTES] {
            waiting[..id + ID_BYTES].rotate_right(ID_BYTES);
        }
        0
    }
}

/// Start of the section with this head.
fn section(state: &[u8], head: &[u8]) -> Option<usize> {
    let mut heads = state.windows(head.len()).enumerate().filter(|(_, window)| window[0] == head[0] && *window == head);
    heads.find_map(|(at, _)| at.checked_sub(ENDS_BYTES).filter(|&start| state[start] == SECTION_FULL))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn device(number: u8, head: &[u8], body: &[u8]) -> Vec<u8> {
        [&[SECTION_FULL, 0, 0, 0, number], head, body, &[SECTION_FOOTER, 0, 0, 0, number]].concat()
    }

    fn power(board: usize) -> Vec<u8> {
        device(3, POWER_HEADS[board], b"\0\0\0\0\0\0\0\x01registers")
    }

    fn id() -> Vec<u8> {
        device(9, ID_HEAD, b"\0\x10\0\0\0\0\0\0")
    }

    /// Output for a state that arrives in pieces of `piece` bytes, and the final order.
    fn passed(state: &[u8], piece: usize) -> (Vec<u8>, Order) {
        let (mut order, mut between, mut out) = (Order::of(true), Vec::new(), Vec::new());
        for piece in state.chunks(piece) {
            between.extend_from_slice(piece);
            let stays = order.arrange(&mut between).min(between.len());
            out.extend(between.drain(..between.len() - stays));
        }
        out.append(&mut between);
        (out, order)
    }

    #[test]
    fn id_goes_first_whatever_the_pieces() {
        for board in [0, 1] {
            let (before, middle, after) = (vec![7; 300], device(4, b"\x05other", b"words"), vec![8; 200]);
            let state = [&before[..], &power(board), &middle, &id(), &after].concat();
            let wanted = [&before[..], &id(), &power(board), &middle, &after].concat();
            for piece in [1, 3, 50, 77, 10_000] {
                assert!(passed(&state, piece) == (wanted.clone(), Order::Right), "{board}, in pieces of {piece}");
            }
        }
    }

    #[test]
    fn unknown_state_passes_unchanged() {
        let mut torn = id();
        *torn.last_mut().unwrap() = 8;
        for (state, order) in [
            ([vec![1; 100], id()].concat(), Order::Awaited),
            ([power(0), vec![1; 100]].concat(), Order::Held),
            ([power(0), torn].concat(), Order::Right),
            ([id(), power(1)].concat(), Order::Held),
        ] {
            assert_eq!(passed(&state, 16), (state, order));
        }
    }

    #[test]
    fn guest_without_id_holds_nothing_back() {
        let mut state = [power(0), id()].concat();
        let before = state.clone();
        assert_eq!(Order::of(false).arrange(&mut state), 0);
        assert_eq!(state, before);
    }
}
