//! Kernel log of a dead guest: its last messages, read from the kernel's ring buffer.
//!
//! prb -> ring of descriptors -> each: record's text and time -> lines
//!
//! The kernel's buffer of records (5.10 and later) is read as it stands. A record that was being written, or that
//! another one has overwritten, is left out. Numbers from the guest are bounded: no log has more than 2^20 records or
//! more than 32 MiB of text.

use std::fmt::{self, Write};

use super::super::memory::PhysicalMemory;
use super::{AddressSpace, NotUnderstood, Vmcoreinfo, required};

/// `CONFIG_LOG_BUF_SHIFT` is at most 25: 32 MiB of text, and one descriptor for each 32 bytes.
const TEXT_BITS_MAX: u32 = 25;
const RECORD_BITS_MAX: u32 = 20;

/// The state is in the two top bits of a descriptor's `state_var`.
const STATE_SHIFT: u32 = 62;
const ID: u64 = (1 << STATE_SHIFT) - 1;
const COMMITTED: u64 = 1;
const FINALIZED: u64 = 2;
/// A position with this bit set is that of a record without text.
const NO_TEXT: u64 = 1;
/// Each text is preceded by the id of its descriptor.
const TEXT_HEADER_BYTES: u64 = 8;

/// One record of the kernel log.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Line {
    /// Time since boot.
    pub nanoseconds: u64,
    /// It may contain newlines: a record is what one call of the kernel printed.
    pub text: String,
}

/// As `dmesg` prints it, without a newline at the end.
impl fmt::Display for Line {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (seconds, micros) = (self.nanoseconds / 1_000_000_000, self.nanoseconds % 1_000_000_000 / 1000);
        for (number, text) in self.text.split('\n').enumerate() {
            let newline = if number == 0 { "" } else { "\n" };
            write!(f, "{newline}[{seconds:>5}.{micros:06}] ")?;
            text.chars().try_for_each(|c| escaped(c, f))?;
        }
        Ok(())
    }
}

/// Shows control characters as their numbers, because a terminal might take them for commands.
fn escaped(c: char, f: &mut fmt::Formatter<'_>) -> fmt::Result {
    let harmless = c == '\t' || !c.is_control();
    if harmless { f.write_char(c) } else { write!(f, "\\x{:02x}", u32::from(c)) }
}

/// How many lines before an `Oops:` line its `BUG:` line is looked for.
const OOPS_LINES: usize = 6;

/// Why the kernel died, in its own words: the last line that begins like a reason.
pub fn panic_reason(lines: &[Line]) -> Option<&str> {
    const PANIC: &str = "Kernel panic - not syncing: ";
    const LESS: [&str; 6] =
        ["BUG: ", "kernel BUG at ", "Oops: ", "general protection fault", "watchdog: BUG: ", "Internal error: "];
    let texts = || lines.iter().rev().flat_map(|line| line.text.lines());
    let panic = texts().find_map(|text| text.strip_prefix(PANIC));
    let less = || {
        let mut texts = texts().skip_while(|text| !LESS.iter().any(|start| text.starts_with(start)));
        let last = texts.next()?;
        let named = texts.take(OOPS_LINES).find(|text| last.starts_with("Oops: ") && text.starts_with("BUG: "));
        named.or(Some(last))
    };
    let reason = match panic {
        // An oops that was made fatal: the panic line only says that it was, so the oops is the reason.
        Some(panic) if panic.starts_with("Fatal exception") => less().or(Some(panic)),
        panic => panic.or_else(less),
    };
    reason.map(str::trim_end)
}

/// Reads all records that are there in whole, oldest first.
pub fn read<M: PhysicalMemory>(
    space: &AddressSpace<'_, M>,
    vmcoreinfo: &Vmcoreinfo,
) -> Result<Vec<Line>, NotUnderstood> {
    let ring = Ring::open(space, vmcoreinfo)?;
    let first = ring.tail & ID;
    let records = (ring.head.wrapping_sub(first) & ID).saturating_add(1).min(1 << ring.record_bits);
    Ok((0..records).filter_map(|record| ring.line(first.wrapping_add(record) & ID)).collect())
}

/// The ring buffer, with its fixed parts read.
struct Ring<'a, 'm, M> {
    space: &'a AddressSpace<'m, M>,
    record_bits: u32,
    head: u64,
    tail: u64,
    descriptors: u64,
    descriptor: Descriptor,
    infos: u64,
    info: Info,
    text_bits: u32,
    texts: u64,
}

/// Offsets in a descriptor (`struct prb_desc`).
struct Descriptor {
    bytes: u64,
    state: u64,
    begin: u64,
    next: u64,
}

/// Offsets in a record's metadata (`struct printk_info`).
struct Info {
    bytes: u64,
    nanoseconds: u64,
    text_bytes: u64,
}

impl<'a, 'm, M: PhysicalMemory> Ring<'a, 'm, M> {
    fn open(space: &'a AddressSpace<'m, M>, told: &Vmcoreinfo) -> Result<Self, NotUnderstood> {
        const UNREADABLE: NotUnderstood = NotUnderstood::Missing("a readable printk ring buffer");
        let missing = NotUnderstood::Missing("the layout of its printk ring buffer (Linux 5.10 and later do)");
        let offset = |name| told.offset(name).filter(|offset| *offset < 4096).ok_or(missing.clone());
        let size = |name| told.size(name).filter(|size| *size < 4096).ok_or(missing.clone());
        let number = |address: u64| space.read_u64(address).map_err(|_| UNREADABLE);

        let ring = number(required(told.symbol("prb"), "SYMBOL(prb)")?)?;
        let at = |base: u64, offset: u64| base.wrapping_add(offset);
        let records = at(ring, offset("printk_ringbuffer.desc_ring")?);
        let texts = at(ring, offset("printk_ringbuffer.text_data_ring")?);
        let bits = |address, most| {
            let bits = space.read_u32(address).map_err(|_| UNREADABLE)?;
            if (1..=most).contains(&bits) { Ok(bits) } else { Err(UNREADABLE) }
        };
        let position = offset("prb_desc.text_blk_lpos")?;
        Ok(Self {
            space,
            record_bits: bits(at(records, offset("prb_desc_ring.count_bits")?), RECORD_BITS_MAX)?,
            head: number(at(records, offset("prb_desc_ring.head_id")?))?,
            tail: number(at(records, offset("prb_desc_ring.tail_id")?))?,
            descriptors: number(at(records, offset("prb_desc_ring.descs")?))?,
            descriptor: Descriptor {
                bytes: size("prb_desc")?,
                state: offset("prb_desc.state_var")?,
                begin: position + offset("prb_data_blk_lpos.begin")?,
                next: position + offset("prb_data_blk_lpos.next")?,
            },
            infos: number(at(records, offset("prb_desc_ring.infos")?))?,
            info: Info {
                bytes: size("printk_info")?,
                nanoseconds: offset("printk_info.ts_nsec")?,
                text_bytes: offset("printk_info.text_len")?,
            },
            text_bits: bits(at(texts, offset("prb_data_ring.size_bits")?), TEXT_BITS_MAX)?,
            texts: number(at(texts, offset("prb_data_ring.data")?))?,
        })
    }

    /// `None` for a record that is not there in whole.
    fn line(&self, id: u64) -> Option<Line> {
        let place = id % (1 << self.record_bits);
        let descriptor = self.descriptors.wrapping_add(place * self.descriptor.bytes);
        let state = self.number(descriptor, self.descriptor.state)?;
        if state & ID != id || !matches!(state >> STATE_SHIFT, COMMITTED | FINALIZED) {
            return None;
        }
        let info = self.infos.wrapping_add(place * self.info.bytes);
        let nanoseconds = self.number(info, self.info.nanoseconds)?;
        let mut text_bytes = [0; 2];
        self.space.read(info.wrapping_add(self.info.text_bytes), &mut text_bytes).ok()?;
        let (begin, next) =
            (self.number(descriptor, self.descriptor.begin)?, self.number(descriptor, self.descriptor.next)?);
        let text = self.text(id, begin, next, u16::from_le_bytes(text_bytes).into())?;
        Some(Line { nanoseconds, text })
    }

    fn text(&self, id: u64, begin: u64, next: u64, text_bytes: u64) -> Option<String> {
        if begin & NO_TEXT != 0 && next & NO_TEXT != 0 {
            return Some(String::new());
        }
        let size = 1 << self.text_bits;
        let (start, end) = (begin % size, next % size);
        let whole = next.wrapping_sub(begin);
        // A block that would have crossed the end is at the beginning instead.
        let (start, block_bytes) = if whole <= size - start { (start, whole) } else { (0, end) };
        let room = block_bytes.checked_sub(TEXT_HEADER_BYTES)?;
        if self.number(self.texts, start)? != id {
            return None;
        }
        let mut text = vec![0; text_bytes.min(room) as usize];
        self.space.read(self.texts.wrapping_add(start + TEXT_HEADER_BYTES), &mut text).ok()?;
        Some(String::from_utf8_lossy(&text).into_owned())
    }

    fn number(&self, base: u64, offset: u64) -> Option<u64> {
        self.space.read_u64(base.wrapping_add(offset)).ok()
    }
}

#[cfg(test)]
mod tests {
    use super::super::synthetic::{Kind, RING, Synthetic};
    use super::super::{Linux, NotUnderstood};
    use super::*;

    const FIRST_STATE: u64 = 0;

    fn lines(linux: &Synthetic) -> Result<Vec<String>, NotUnderstood> {
        let found = Linux::with(&linux.ram, linux.vmcoreinfo.clone())?.log()?;
        Ok(found.iter().map(ToString::to_string).collect())
    }

    #[test]
    fn records_come_in_order_across_ring_ends() {
        let mut linux = Synthetic::new(Kind::Linux6_1);
        linux.put_ids(6, 9);
        linux.put_record(6, FINALIZED, 0x1f0, 0x218, "put at the start");
        linux.put_record(7, FINALIZED, 0x218, 0x238, "seven\nand more");
        linux.put_record(8, FINALIZED, 0x3, 0x3, "");
        linux.put_record(9, COMMITTED, 0x2e8, 0x300, "to the end");
        let expect =
            ["[    6.000000] put at the start", "[    7.000000] seven\n[    7.000000] and more", "[    8.000000] "];
        assert_eq!(lines(&linux).unwrap(), [&expect[..], &["[    9.000000] to the end"]].concat());
    }

    #[test]
    fn incomplete_records_are_left_out() {
        let mut linux = Synthetic::new(Kind::Linux6_1);
        linux.put_ids(1, 4);
        linux.put_record(1, FINALIZED, 0, 0x20, "one");
        linux.put_record(2, FIRST_STATE, 0x20, 0x40, "being written");
        linux.put_record(3, 3, 0x40, 0x60, "given up");
        linux.put_record(12, FINALIZED, 0x60, 0x80, "in the place of four");
        assert_eq!(lines(&linux).unwrap(), ["[    1.000000] one"]);
        // Its text now belongs to another record.
        linux.put_record(4, FINALIZED, 0, 0x20, "four");
        assert_eq!(lines(&linux).unwrap(), ["[    4.000000] four"]);
    }

    #[test]
    fn guest_ids_are_bounded_by_the_ring() {
        let mut linux = Synthetic::new(Kind::Linux6_1);
        linux.put_record(5, FINALIZED, 0, 0x20, "five");
        for (tail, head) in [(0, u64::MAX), (u64::MAX, 0), (6, 5), (5, 5), (0, 1 << 61)] {
            linux.put_ids(tail, head);
            assert!(lines(&linux).unwrap().len() <= 8, "{tail} {head}");
        }
        linux.put_ids(5, 5);
        assert_eq!(lines(&linux).unwrap(), ["[    5.000000] five"]);
        for bits in [0, 21, 64, u32::MAX] {
            linux.ram.write(RING, &bits.to_le_bytes());
            assert_eq!(lines(&linux), Err(NotUnderstood::Missing("a readable printk ring buffer")));
        }
    }

    #[test]
    fn control_characters_are_shown_and_not_obeyed() {
        let line = Line { nanoseconds: 12_345_678_901, text: "a\x1b[2Jb\tc".into() };
        assert_eq!(line.to_string(), "[   12.345678] a\\x1b[2Jb\tc");
    }

    #[track_caller]
    fn check(texts: &[&str], expect: Option<&str>) {
        let line = |text: &&str| Line { nanoseconds: 0, text: (*text).into() };
        assert_eq!(panic_reason(&texts.iter().map(line).collect::<Vec<_>>()), expect);
    }

    #[test]
    fn panic_reason_is_the_kernels_own() {
        check(&[], None);
        check(&["all is well"], None);
        let panic = "Kernel panic - not syncing: sysrq triggered crash";
        check(&[panic, "CPU: 0 PID: 1", "---[ end Kernel panic - not syncing: no ]---"], Some("sysrq triggered crash"));
        check(
            &["Kernel panic - not syncing: old", "said: Kernel panic - not syncing: x", panic],
            Some("sysrq triggered crash"),
        );
        check(&["BUG: kernel NULL pointer dereference", "RIP: 0010:x"], Some("BUG: kernel NULL pointer dereference"));
        check(&["BUG: x", panic], Some("sysrq triggered crash"));
        let fatal = "Kernel panic - not syncing: Fatal exception";
        check(&["BUG: old", "BUG: x", "#PF: y", "Oops: 0002 [#1] SMP", "RIP: z", fatal], Some("BUG: x"));
        check(&["BUG: old", "1", "2", "3", "4", "5", "6", "Oops: 0000", fatal], Some("Oops: 0000"));
        check(&["BUG: old", "general protection fault: 0000", fatal], Some("general protection fault: 0000"));
        check(&["RIP: z", fatal], Some("Fatal exception"));
    }
}
