//! VMCOREINFO: the kernel's description of its own layout, for tools that read its memory from outside.
//!
//! QEMU's notes, or RAM page by page -> text -> fields
//!
//! The kernel keeps the text as an ELF note at the start of a page. QEMU has it too if the guest loaded the driver of
//! `-device vmcoreinfo`. Otherwise the note is still found in RAM, in 0.2 s for 2 GiB.

use std::collections::HashMap;
use std::ops::Range;

use hearth_memory::PAGE_BYTES;

use super::super::memory::{PhysicalMemory, address_of_pfn};

/// Maximum length of the text. The kernel keeps it in one page, and kernels with larger pages are not x86.
const TEXT_BYTES_MAX: usize = 2 * PAGE_BYTES as usize;
/// Pages read at a time when RAM is searched: a system call for each page took ten times as long.
const CHUNK_PAGES: u64 = 64;
const NAME: &[u8] = b"VMCOREINFO\0";
/// Sizes of name and text, and the type.
const NOTE_HEADER_BYTES: usize = 12;
const NAME_PADDED_BYTES: usize = 12;
const FIRST_FIELD: &[u8] = b"OSRELEASE=";

/// The fields of a kernel's VMCOREINFO.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Vmcoreinfo {
    text: Vec<u8>,
    fields: HashMap<String, String>,
}

impl Vmcoreinfo {
    /// Parses the text; `None` if it is not the VMCOREINFO of any kernel.
    pub fn parse(text: &[u8]) -> Option<Self> {
        let end = text.iter().position(|byte| *byte == 0).unwrap_or(text.len());
        let text = &text[..end];
        if !text.starts_with(FIRST_FIELD) || text.len() > TEXT_BYTES_MAX {
            return None;
        }
        let lossy = String::from_utf8_lossy(text);
        let fields = lossy.lines().filter_map(|line| line.split_once('='));
        let fields = fields.map(|(name, value)| (name.to_owned(), value.trim().to_owned())).collect();
        Some(Self { text: text.to_vec(), fields })
    }

    /// The VMCOREINFO among ELF notes, as QEMU or a dump file has them.
    pub(crate) fn in_notes(notes: &[u8]) -> Option<Self> {
        let mut rest = notes;
        while let Some((name, text, after)) = split_note(rest) {
            if name == NAME {
                return Self::parse(text);
            }
            rest = after;
        }
        None
    }

    /// Candidates for a VMCOREINFO at page starts in RAM, in order. Anyone in the guest can write such a page.
    pub fn in_memory(memory: &impl PhysicalMemory) -> impl Iterator<Item = Self> {
        let starts = |range: &Range<u64>| {
            let end = range.end;
            range.clone().step_by(CHUNK_PAGES as usize).map(move |first| first..end.min(first + CHUNK_PAGES))
        };
        let mut chunk = vec![0; (CHUNK_PAGES * PAGE_BYTES) as usize];
        let notes_in = move |pfns: Range<u64>| {
            let chunk = &mut chunk[..((pfns.end - pfns.start) * PAGE_BYTES) as usize];
            read_pages(memory, pfns.start, chunk);
            let pages = chunk.chunks_exact(PAGE_BYTES as usize).zip(pfns);
            pages.filter(|(page, _)| starts_note(page)).map(|(_, pfn)| pfn).collect::<Vec<_>>()
        };
        let chunks = memory.ranges().iter().flat_map(starts).take_while(|_| !memory.is_given_up());
        chunks.flat_map(notes_in).filter_map(|pfn| note_at(memory, pfn))
    }

    /// The text as the kernel wrote it, for the note of a dump.
    pub fn text(&self) -> &[u8] {
        &self.text
    }

    /// Release of the kernel, as `uname -r` prints it.
    pub fn release(&self) -> &str {
        self.field("OSRELEASE").unwrap_or_default()
    }

    /// Major and minor number of the kernel.
    pub fn version(&self) -> Option<(u32, u32)> {
        let mut numbers = self.release().split(|c: char| !c.is_ascii_digit());
        Some((numbers.next()?.parse().ok()?, numbers.next()?.parse().ok()?))
    }

    /// Address of a symbol.
    pub fn symbol(&self, name: &str) -> Option<u64> {
        u64::from_str_radix(self.field(&format!("SYMBOL({name})"))?, 16).ok()
    }

    /// Size of a structure, in bytes.
    pub fn size(&self, name: &str) -> Option<u64> {
        self.field(&format!("SIZE({name})"))?.parse().ok()
    }

    /// Offset of `structure.member`, in bytes.
    pub fn offset(&self, name: &str) -> Option<u64> {
        self.field(&format!("OFFSET({name})"))?.parse().ok()
    }

    /// Length of an array.
    pub fn length(&self, name: &str) -> Option<u64> {
        self.field(&format!("LENGTH({name})"))?.parse().ok()
    }

    /// Value of a constant or variable.
    pub fn number(&self, name: &str) -> Option<i64> {
        let text = self.field(&format!("NUMBER({name})"))?;
        // A few numbers are masks, which are printed in hexadecimal.
        match text.strip_prefix("0x") {
            Some(hexadecimal) => u64::from_str_radix(hexadecimal, 16).ok().map(u64::cast_signed),
            None => text.parse().ok(),
        }
    }

    fn field(&self, name: &str) -> Option<&str> {
        self.fields.get(name).map(String::as_str)
    }
}

/// Fills a buffer with pages. Pages that are not readable become zeroes.
fn read_pages(memory: &impl PhysicalMemory, first: u64, pages: &mut [u8]) {
    if memory.read(address_of_pfn(first), pages).is_ok() {
        return;
    }
    for (page, pfn) in pages.chunks_exact_mut(PAGE_BYTES as usize).zip(first..) {
        if memory.read(address_of_pfn(pfn), page).is_err() {
            page.fill(0);
        }
    }
}

/// The VMCOREINFO whose note begins with this page.
fn note_at(memory: &impl PhysicalMemory, pfn: u64) -> Option<Vmcoreinfo> {
    let mut note = vec![0; TEXT_BYTES_MAX + PAGE_BYTES as usize];
    read_pages(memory, pfn, &mut note);
    Vmcoreinfo::in_notes(&note)
}

fn starts_note(start: &[u8]) -> bool {
    let name = &start[NOTE_HEADER_BYTES..];
    start.starts_with(&(NAME.len() as u32).to_le_bytes())
        && name.starts_with(NAME)
        && name[NAME_PADDED_BYTES..].starts_with(FIRST_FIELD)
}

/// Name and contents of the first note, and the bytes after it.
fn split_note(notes: &[u8]) -> Option<(&[u8], &[u8], &[u8])> {
    let number = |at: usize| {
        let bytes = notes.get(at..at + 4)?;
        Some(u32::from_le_bytes(bytes.try_into().expect("four bytes")) as usize)
    };
    let (name_bytes, text_bytes) = (number(0)?, number(4)?);
    let text_start = NOTE_HEADER_BYTES + name_bytes.next_multiple_of(4);
    let name = notes.get(NOTE_HEADER_BYTES..)?.get(..name_bytes)?;
    let text = notes.get(text_start..)?.get(..text_bytes)?;
    let after = notes.get(text_start + text_bytes.next_multiple_of(4)..).unwrap_or_default();
    Some((name, text, after))
}

#[cfg(test)]
mod tests {
    use super::*;

    const TEXT: &[u8] = b"OSRELEASE=6.1.0-56-cloud-amd64\nSYMBOL(prb)=ffffffff82a5c040\nSIZE(page)=64\n\
        OFFSET(page.flags)=0\nNUMBER(phys_base)=-71303168\nNUMBER(VMALLOC_START)=0xff7b024100000000\n\
        LENGTH(zone.free_area)=11\nNUMBER(broken)=x\nno field\n";

    #[test]
    fn fields_are_read_as_the_kernel_prints_them() {
        let told = Vmcoreinfo::parse(TEXT).unwrap();
        assert_eq!((told.release(), told.version()), ("6.1.0-56-cloud-amd64", Some((6, 1))));
        assert_eq!(told.symbol("prb"), Some(0xffff_ffff_82a5_c040));
        assert_eq!(
            (told.size("page"), told.offset("page.flags"), told.length("zone.free_area")),
            (Some(64), Some(0), Some(11))
        );
        assert_eq!(told.number("phys_base"), Some(-71_303_168));
        assert_eq!(told.number("VMALLOC_START").map(i64::cast_unsigned), Some(0xff7b_0241_0000_0000));
        assert_eq!((told.number("broken"), told.symbol("missing")), (None, None));
        assert_eq!(told.text(), TEXT);
    }

    #[test]
    fn the_text_ends_with_its_first_zero() {
        let padded = [TEXT, &[0; 100], b"SIZE(page)=1"].concat();
        assert_eq!(Vmcoreinfo::parse(&padded), Vmcoreinfo::parse(TEXT));
    }

    #[test]
    fn other_text_is_not_taken_for_vmcoreinfo() {
        assert_eq!(Vmcoreinfo::parse(b"BUILD-ID=1"), None);
        assert_eq!(Vmcoreinfo::parse(&[FIRST_FIELD, &[b'x'; TEXT_BYTES_MAX]].concat()), None);
        for notes in [&[][..], &[1; 11], &[0xff; 64], &[11, 0, 0, 0, 0xff, 0xff, 0xff, 0xff, 0, 0, 0, 0]] {
            assert_eq!(Vmcoreinfo::in_notes(notes), None);
        }
    }
}
