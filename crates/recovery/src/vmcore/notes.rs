//! Notes: registers and VMCOREINFO of a dead guest, as ELF notes.
//!
//! QEMU's dump of one byte -> its note segment -> check each note -> the bytes that both file formats contain
//!
//! The bytes keep QEMU's order (all NT_PRSTATUS, then all QEMU, then VMCOREINFO), because readers number CPUs by it.
//! The text of VMCOREINFO comes from the guest, so everything that is read here is bounded. A dump without any note is
//! valid too: it has memory but no registers.

use std::ops::Range;

use super::elf::{ElfError, Headers};

/// Maximum size of all notes. 4096 CPUs have 3.3 MiB of them, and QEMU takes at most 1 MiB of VMCOREINFO from a guest.
pub(crate) const NOTES_BYTES_MAX: usize = 8 << 20;
/// Maximum size of a dump of one byte: headers, notes and that byte. Of a larger dump, the part in which its notes are.
pub const TINY_DUMP_BYTES_MAX: usize = NOTES_BYTES_MAX + (1 << 20);

const NOTE_HEAD_BYTES: usize = 12;
const NT_PRSTATUS: u32 = 1;
const CORE: &[u8] = b"CORE\0";
const VMCOREINFO: &[u8] = b"VMCOREINFO\0";
const QEMU: &[u8] = b"QEMU\0";
/// Offset of the registers in elf_prstatus of x86-64.
const PRSTATUS_REGISTERS: usize = 112;
/// Offset of cr0 to cr4 in QEMU's own note of a CPU (`QEMUCPUState`, QEMU's `target/i386/arch_dump.c`).
const QEMU_CONTROL_REGISTERS: usize = 392;
const CR0_PAGING: u64 = 1 << 31;
const CR4_LA57: u64 = 1 << 12;
/// The address in CR3. Flags or a PCID are below it, no-flush bits above it.
const CR3_FRAME: u64 = 0x000f_ffff_ffff_f000;

/// The notes of one guest, in order.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Notes {
    notes: Vec<Note>,
}

/// One note: its owner, its type and its contents.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Note {
    /// Includes the terminating zero.
    name: Vec<u8>,
    kind: u32,
    description: Vec<u8>,
}

/// Why notes cannot be read.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "each variant's message describes it")]
pub enum NotesError {
    #[error("QEMU's dump is invalid")]
    Dump(#[from] ElfError),
    #[error("QEMU's dump holds no notes")]
    Missing,
    #[error("notes of {0} bytes are more than {NOTES_BYTES_MAX}")]
    TooLong(usize),
    #[error("the note at byte {0} ends past the notes' end")]
    CutOff(usize),
}

impl Notes {
    /// Notes of all CPUs, from QEMU's `dump-guest-memory` of a single byte.
    pub fn of_tiny_dump(bytes: &[u8]) -> Result<Self, NotesError> {
        if bytes.len() > TINY_DUMP_BYTES_MAX {
            return Err(NotesError::TooLong(bytes.len()));
        }
        let headers = Headers::read(bytes)?;
        let range = headers.notes.first().ok_or(NotesError::Missing)?;
        let part = usize::try_from(range.start).ok().zip(usize::try_from(range.end).ok());
        let part = part.and_then(|(start, end)| bytes.get(start..end)).ok_or(NotesError::CutOff(0))?;
        Self::parse(part)
    }

    /// Number of bytes up to the end of the notes in the beginning of a dump by QEMU.
    pub fn end_in(dump: &[u8]) -> Result<u64, NotesError> {
        let headers = Headers::read(dump)?;
        let range = headers.notes.first().ok_or(NotesError::Missing)?;
        if range.end > dump.len() as u64 {
            return Err(NotesError::CutOff(0));
        }
        Ok(range.end)
    }

    /// Parses notes as dumps hold them.
    pub fn parse(blob: &[u8]) -> Result<Self, NotesError> {
        if blob.len() > NOTES_BYTES_MAX {
            return Err(NotesError::TooLong(blob.len()));
        }
        let mut notes = Vec::new();
        let mut at = 0;
        while blob.len() - at >= NOTE_HEAD_BYTES {
            let (note, next) = Note::parse(blob, at).ok_or(NotesError::CutOff(at))?;
            // Space after the last note is filled with zeroes.
            if !note.name.is_empty() || !note.description.is_empty() {
                notes.push(note);
            }
            at = next;
        }
        Ok(Self { notes })
    }

    /// Makes this text the VMCOREINFO, in place of one that QEMU was given. Returns false if there is no space for it.
    pub fn set_vmcoreinfo(&mut self, text: &[u8]) -> bool {
        let ends = |note: &[u8]| note.iter().position(|byte| *byte == 0).unwrap_or(note.len());
        if self.vmcoreinfo().is_some_and(|told| &told[..ends(told)] == text) {
            return true;
        }
        let others = self.notes.iter().filter(|note| !note.is_vmcoreinfo()).map(Note::bytes).sum::<usize>();
        let fits = others + Note::bytes_with(VMCOREINFO.len(), text.len()) <= NOTES_BYTES_MAX;
        if fits {
            self.notes.retain(|note| !note.is_vmcoreinfo());
            self.notes.push(Note { name: VMCOREINFO.to_vec(), kind: 0, description: text.to_vec() });
        }
        fits
    }

    /// The text of the VMCOREINFO note.
    pub fn vmcoreinfo(&self) -> Option<&[u8]> {
        self.notes.iter().find(|note| note.is_vmcoreinfo()).map(|note| note.description.as_slice())
    }

    /// The value of one line `key=value` of VMCOREINFO.
    pub(crate) fn vmcoreinfo_value(&self, key: &str) -> Option<&str> {
        let lines = self.vmcoreinfo()?.split(|byte| *byte == b'\n');
        let value = |line: &'_ [u8]| line.strip_prefix(key.as_bytes())?.strip_prefix(b"=").map(<[u8]>::len);
        let (line, bytes) = lines.map(|line| (line, value(line))).find_map(|(line, len)| Some((line, len?)))?;
        std::str::from_utf8(&line[line.len() - bytes..]).ok()
    }

    /// Difference between where the guest's kernel text is in physical memory and where it was linked for. KASLR may
    /// make it negative.
    pub fn phys_base(&self) -> Option<i64> {
        self.vmcoreinfo_value("NUMBER(phys_base)")?.parse().ok()
    }

    /// Registers, one set for each CPU, in the order of CPUs.
    pub fn registers(&self) -> impl Iterator<Item = Registers> + '_ {
        self.notes.iter().filter(|note| note.is_registers()).filter_map(|note| Registers::parse(&note.description))
    }

    /// Page tables that the CPUs used, without those of CPUs whose paging was off. Only QEMU's own notes have them.
    pub(crate) fn page_tables(&self) -> Vec<PageTables> {
        let notes = self.notes.iter().filter(|note| note.name == QEMU);
        notes.filter_map(|note| PageTables::parse(&note.description)).collect()
    }

    /// Number of CPUs whose registers are here.
    pub fn cpus(&self) -> usize {
        self.notes.iter().filter(|note| note.is_registers()).count()
    }

    /// Whether there are no notes at all.
    pub fn is_empty(&self) -> bool {
        self.notes.is_empty()
    }

    /// The notes as dumps hold them.
    pub fn to_bytes(&self) -> Vec<u8> {
        let mut bytes = Vec::with_capacity(self.bytes());
        self.notes.iter().for_each(|note| note.append_to(&mut bytes));
        bytes
    }

    /// Where the text of VMCOREINFO is in `to_bytes`.
    pub(crate) fn vmcoreinfo_range(&self) -> Option<Range<usize>> {
        let before = self.notes.iter().take_while(|note| !note.is_vmcoreinfo());
        let at = before.map(Note::bytes).sum::<usize>() + NOTE_HEAD_BYTES + padded(VMCOREINFO.len());
        self.vmcoreinfo().map(|text| at..at + text.len())
    }

    fn bytes(&self) -> usize {
        self.notes.iter().map(Note::bytes).sum()
    }
}

impl Note {
    /// The note at this offset, and the offset of the next one.
    fn parse(blob: &[u8], at: usize) -> Option<(Self, usize)> {
        let word = |index: usize| {
            let bytes = blob.get(at + 4 * index..at + 4 * index + 4)?;
            Some(u32::from_le_bytes(bytes.try_into().expect("four bytes")))
        };
        let (name_bytes, description_bytes, kind) = (word(0)? as usize, word(1)? as usize, word(2)?);
        let name_at = at + NOTE_HEAD_BYTES;
        let description_at = name_at + padded(name_bytes);
        let name = blob.get(name_at..name_at + name_bytes)?.to_vec();
        let description = blob.get(description_at..description_at + description_bytes)?.to_vec();
        // The last note's padding may be missing.
        let next = (description_at + padded(description_bytes)).min(blob.len());
        Some((Self { name, kind, description }, next))
    }

    fn append_to(&self, blob: &mut Vec<u8>) {
        for word in [self.name.len() as u32, self.description.len() as u32, self.kind] {
            blob.extend(word.to_le_bytes());
        }
        for part in [&self.name, &self.description] {
            blob.extend(part);
            blob.resize(blob.len() + padded(part.len()) - part.len(), 0);
        }
    }

    fn bytes(&self) -> usize {
        Self::bytes_with(self.name.len(), self.description.len())
    }

    fn bytes_with(name_bytes: usize, description_bytes: usize) -> usize {
        NOTE_HEAD_BYTES + padded(name_bytes) + padded(description_bytes)
    }

    fn is_registers(&self) -> bool {
        self.name == CORE && self.kind == NT_PRSTATUS
    }

    fn is_vmcoreinfo(&self) -> bool {
        self.name == VMCOREINFO
    }
}

fn padded(bytes: usize) -> usize {
    bytes.next_multiple_of(4)
}

/// The page tables by which a CPU translated virtual addresses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PageTables {
    /// Guest-physical address of the top table (CR3).
    pub root: u64,
    /// 4 or 5.
    pub levels: u32,
}

impl PageTables {
    /// `None` if paging was off, or if the note is too short.
    fn parse(cpu: &[u8]) -> Option<Self> {
        let control = cpu.get(QEMU_CONTROL_REGISTERS..)?;
        let register = |number: usize| {
            let bytes = control.get(number * size_of::<u64>()..)?.first_chunk()?;
            Some(u64::from_le_bytes(*bytes))
        };
        let (cr0, cr3, cr4) = (register(0)?, register(3)?, register(4)?);
        let levels = if cr4 & CR4_LA57 != 0 { 5 } else { 4 };
        (cr0 & CR0_PAGING != 0).then_some(Self { root: cr3 & CR3_FRAME, levels })
    }
}

/// Registers of one x86-64 CPU.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Registers {
    /// QEMU's number of the CPU, plus one.
    pub pid: u32,
    values: [u64; Self::NAMES.len()],
}

impl Registers {
    /// Names of the registers, in the order of the kernel's `user_regs_struct`.
    pub const NAMES: [&'static str; 27] = [
        "r15", "r14", "r13", "r12", "rbp", "rbx", "r11", "r10", "r9", "r8", "rax", "rcx", "rdx", "rsi", "rdi",
        "orig_rax", "rip", "cs", "rflags", "rsp", "ss", "fs_base", "gs_base", "ds", "es", "fs", "gs",
    ];

    fn parse(prstatus: &[u8]) -> Option<Self> {
        let pid = u32::from_le_bytes(prstatus.get(32..36)?.try_into().ok()?);
        let mut values = [0; Self::NAMES.len()];
        let bytes = prstatus.get(PRSTATUS_REGISTERS..)?.chunks_exact(size_of::<u64>());
        if bytes.len() < values.len() {
            return None;
        }
        for (value, bytes) in values.iter_mut().zip(bytes) {
            *value = u64::from_le_bytes(bytes.try_into().expect("eight bytes"));
        }
        Some(Self { pid, values })
    }

    /// The value of the register with this name.
    pub fn get(&self, name: &str) -> Option<u64> {
        self.iter().find(|(known, _)| *known == name).map(|(_, value)| value)
    }

    /// Names and values of all registers.
    pub fn iter(&self) -> impl Iterator<Item = (&'static str, u64)> + '_ {
        Self::NAMES.into_iter().zip(self.values)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn note(name: &[u8], kind: u32, description: &[u8]) -> Note {
        Note { name: name.to_vec(), kind, description: description.to_vec() }
    }

    fn prstatus(cpu: u32, rip: u64) -> Vec<u8> {
        let mut bytes = vec![0; 0x150];
        bytes[32..36].copy_from_slice(&(cpu + 1).to_le_bytes());
        bytes[112 + 16 * 8..][..8].copy_from_slice(&rip.to_le_bytes());
        bytes
    }

    fn two_cpus() -> Notes {
        let text = b"OSRELEASE=6.1.0\nNUMBER(phys_base)=-350224384\nX=1\n\n";
        Notes {
            notes: vec![
                note(CORE, NT_PRSTATUS, &prstatus(0, 0xffff_ffff_8100_0000)),
                note(CORE, NT_PRSTATUS, &prstatus(1, 7)),
                note(b"QEMU\0", 0, &[1; 0x1b8]),
                note(VMCOREINFO, 0, &text[..text.len() - 1]),
            ],
        }
    }

    /// A dump as QEMU 7.2 lays it out: program headers behind a section header.
    fn tiny_dump(notes: &[u8]) -> Vec<u8> {
        let mut elf = vec![0; 192];
        elf[..18].copy_from_slice(b"\x7fELF\x02\x01\x01\0\0\0\0\0\0\0\0\0\x04\0");
        elf[18] = 62;
        elf[32] = 192;
        elf[54] = 56;
        elf[56] = 2;
        for (kind, at, bytes) in [(4_u32, 304, notes.len()), (1, 304 + notes.len(), 1)] {
            elf.extend(kind.to_le_bytes());
            elf.extend([0; 4]);
            for word in [at, 0, 0, bytes, bytes, 0] {
                elf.extend((word as u64).to_le_bytes());
            }
        }
        elf.extend(notes);
        elf.push(9);
        elf
    }

    #[test]
    fn qemu_notes_are_parsed_and_kept_unchanged() {
        let blob = two_cpus().to_bytes();
        let notes = Notes::of_tiny_dump(&tiny_dump(&blob)).unwrap();
        assert_eq!(notes, two_cpus());
        assert_eq!(notes.to_bytes(), blob);
        assert_eq!((notes.cpus(), notes.phys_base()), (2, Some(-350_224_384)));
        assert_eq!(notes.vmcoreinfo_value("OSRELEASE"), Some("6.1.0"));
        assert_eq!(notes.vmcoreinfo_value("OSREL"), None);
        assert_eq!(&blob[notes.vmcoreinfo_range().unwrap()], notes.vmcoreinfo().unwrap());
        let registers: Vec<_> = notes.registers().map(|cpu| (cpu.pid, cpu.get("rip").unwrap())).collect();
        assert_eq!(registers, [(1, 0xffff_ffff_8100_0000), (2, 7)]);
    }

    #[test]
    fn page_tables_are_those_of_cpus_with_paging() {
        let cpu = |cr0: u64, cr3: u64, cr4: u64| {
            let control = [cr0, 0, 0, cr3, cr4].map(u64::to_le_bytes).concat();
            note(QEMU, 0, &[&[1; 392][..], &control, &[0; 8]].concat())
        };
        let (four, five) = (cpu(0x8005_0033, 0x8000_0000_0123_4001, 0x6f0), cpu(0x8005_0033, 0x7000, 0x16f0));
        let notes = Notes { notes: vec![four, cpu(0x11, 0x9000, 0), five, note(QEMU, 0, &[0xff; 400])] };
        let expect = [PageTables { root: 0x123_4000, levels: 4 }, PageTables { root: 0x7000, levels: 5 }];
        assert_eq!(notes.page_tables(), expect);
        assert_eq!(Notes::default().page_tables(), []);
    }

    #[test]
    fn found_vmcoreinfo_replaces_another() {
        let mut notes = two_cpus();
        let told = notes.vmcoreinfo().unwrap().to_vec();
        assert!(notes.set_vmcoreinfo(&told));
        assert_eq!(notes, two_cpus());
        assert!(notes.set_vmcoreinfo(b"OSRELEASE=found\n"));
        let read = Notes::parse(&notes.to_bytes()).unwrap();
        assert_eq!((read.cpus(), read.vmcoreinfo_value("OSRELEASE")), (2, Some("found")));
        notes.notes.pop();
        assert!(notes.vmcoreinfo_range().is_none() && notes.set_vmcoreinfo(b"OSRELEASE=joins\n"));
        assert!(!notes.set_vmcoreinfo(&vec![b'a'; NOTES_BYTES_MAX]));
        assert_eq!(notes.vmcoreinfo_value("OSRELEASE"), Some("joins"));
    }

    #[test]
    fn notes_without_registers_are_empty() {
        assert!(Notes::default().to_bytes().is_empty());
        assert_eq!(Notes::parse(&[]).unwrap(), Notes::default());
        assert_eq!(Notes::parse(&[0; 64]).unwrap(), Notes::default());
    }

    #[test]
    fn torn_notes_are_refused() {
        let blob = two_cpus().to_bytes();
        assert!(matches!(Notes::parse(&blob[..blob.len() - 8]), Err(NotesError::CutOff(at)) if at == blob.len() - 76));
        let dump = tiny_dump(&blob);
        assert!(matches!(Notes::of_tiny_dump(&dump[..400]), Err(NotesError::CutOff(0))));
        assert!(matches!(Notes::of_tiny_dump(&dump[..100]), Err(NotesError::Dump(_))));
        assert!(matches!(Notes::of_tiny_dump(b"KDUMP   "), Err(NotesError::Dump(_))));
        assert!(matches!(Notes::end_in(&dump[..400]), Err(NotesError::CutOff(0))));
        assert_eq!(Notes::end_in(&dump).unwrap(), dump.len() as u64 - 1);
        assert!(matches!(Notes::of_tiny_dump(&vec![0; TINY_DUMP_BYTES_MAX + 1]), Err(NotesError::TooLong(_))));
    }

    proptest! {
        #[test]
        fn any_bytes_are_read_without_harm(damage in prop::collection::vec((0_usize..1400, any::<u8>()), 1..20), cut in 0_usize..1400) {
            let mut dump = tiny_dump(&two_cpus().to_bytes());
            for (at, byte) in damage {
                let at = at % dump.len();
                dump[at] = byte;
            }
            dump.truncate(cut.max(1));
            if let Ok(notes) = Notes::of_tiny_dump(&dump) {
                prop_assert!(notes.registers().count() <= notes.cpus());
                prop_assert_eq!(Notes::parse(&notes.to_bytes()).unwrap(), notes);
            }
        }
    }
}
