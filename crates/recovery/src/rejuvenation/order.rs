//! The order of two devices in a guest's state: its VM generation ID goes ahead of its power management.
//!
//! ```text
//! ... | power management | devices between | generation ID | ...   as the old QEMU says it
//! ... | generation ID | power management | devices between | ...   as the new one hears it
//! ```
//! A QEMU that takes a guest tells it so by an ACPI event, also where the ID is what it was (`vmgenid_post_load` in QEMU's
//! `hw/acpi/vmgenid.c`). The guest finds nothing new; but to find that out its interpreter of ACPI's byte code runs, and under emulation
//! all of that must be translated first, which is what a connection into the guest then waits for. The event is raised where the
//! guest has enabled it, which the registers of power management say: before these are loaded nothing is enabled, and when
//! they are, what is pending in them is what was pending.
//!
//! Sections are found by their heads, as `clock` does it. The loader asks for no order of those that say all of a device at once.

use super::clock::{SECTION_FOOTER, SECTION_FULL};

/// Power management of the two boards, where QEMU puts it; instance and version of these vary.
const POWER_HEADS: [&[u8]; 2] = [b"\x140000:00:1f.0/ICH9LPC", b"\x150000:00:01.3/piix4_pm"];
const ID_HEAD: &[u8] = b"\x07vmgenid\0\0\0\0\0\0\0\x01";
/// Where in the guest's memory the ID is.
const ID_BODY_BYTES: usize = 8;
/// Section's kind and number, before its head and, for the kind of its end, behind its body.
const ENDS_BYTES: usize = 5;
const ID_BYTES: usize = ENDS_BYTES + ID_HEAD.len() + ID_BODY_BYTES + ENDS_BYTES;

/// How far the order of a state is put right, which comes piece by piece.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Order {
    /// Neither of the two has come.
    Awaited,
    /// Power management waits for the ID.
    Held,
    /// Nothing more to be done.
    Right,
}

impl Order {
    /// Of a guest that has such an ID, or not.
    pub fn of(has_generation_id: bool) -> Self {
        if has_generation_id { Self::Awaited } else { Self::Right }
    }

    /// Looks at what has come and was not passed on yet, and puts it in order. How many of its last bytes must stay.
    pub fn arrange(&mut self, between: &mut [u8]) -> usize {
        if *self == Self::Right {
            return 0;
        }
        let Some(power) = POWER_HEADS.iter().find_map(|head| section(between, head)) else {
            // A head may have come in part.
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

/// Where a section with this head begins.
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

    /// What goes out of a state that comes in pieces of so many bytes.
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
    fn the_id_goes_ahead_however_the_state_comes() {
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
    fn a_state_that_is_not_understood_stays_as_it_is() {
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
    fn a_guest_without_an_id_waits_for_nothing() {
        let mut state = [power(0), id()].concat();
        let before = state.clone();
        assert_eq!(Order::of(false).arrange(&mut state), 0);
        assert_eq!(state, before);
    }
}
