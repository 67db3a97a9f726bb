//! BTF: the types of a kernel's structures and enumerations, as the kernel carries them for its own tracing.
//!
//! _stext -> header -> types, names -> offset of a member, value of an enumerator
//!
//! `.BTF` is in the kernel's read-only data, behind its code (`scripts/link-vmlinux.sh`; Documentation/bpf/btf.rst). It is found by its
//! header. The search begins at the code, because the decompressor leaves a partly overwritten copy elsewhere.
//!
//! The guest wrote these bytes. Every length is bounded, every reference is checked, and nesting has a limit; a damaged table has
//! no member, or a wrong one, whose reader checks what it finds.

use super::super::memory::PhysicalMemory;
use super::{AddressSpace, Vmcoreinfo};

/// Magic number, version 1 and flags 0, as they begin a table.
const MAGIC: [u8; 4] = [0x9f, 0xeb, 1, 0];
/// The header that all versions have; later ones may be longer.
const HEADER_BYTES: usize = 24;
const HEADER_BYTES_MAX: u32 = 256;
/// A kernel has some megabytes of types, a module's table is much smaller.
const TYPES_BYTES: std::ops::RangeInclusive<u32> = 256 << 10..=16 << 20;
const NAMES_BYTES_MAX: u32 = 16 << 20;
/// Tables that are read before the search is given up: a guest may have made its memory full of them.
const TABLES_MAX: u32 = 8;
/// Code and read-only data of a kernel are smaller.
const SEARCH_BYTES: u64 = 256 << 20;
const CHUNK_BYTES: usize = 1 << 20;
/// Nesting of members that have no name, and of `const` and the like.
const DEPTH_MAX: u32 = 16;
/// Members that are looked at for one name. No structure of a kernel has as many, with all that is nested in it.
const MEMBERS_MAX: u32 = 1 << 16;
const WORD: usize = 4;
const TYPE_WORDS: usize = 3;

/// Numbers of the kinds of types (`include/uapi/linux/btf.h`).
mod kind {
    pub const INT: u32 = 1;
    pub const ARRAY: u32 = 3;
    pub const STRUCT: u32 = 4;
    pub const UNION: u32 = 5;
    pub const ENUM: u32 = 6;
    pub const TYPEDEF: u32 = 8;
    pub const VOLATILE: u32 = 9;
    pub const CONST: u32 = 10;
    pub const RESTRICT: u32 = 11;
    pub const FUNC_PROTO: u32 = 13;
    pub const VAR: u32 = 14;
    pub const DATASEC: u32 = 15;
    pub const DECL_TAG: u32 = 17;
    pub const TYPE_TAG: u32 = 18;
    pub const ENUM64: u32 = 19;
}

/// Types of a kernel.
pub struct Btf {
    types: Vec<u8>,
    names: Vec<u8>,
    /// Offset of each type in `types`, by its number less one: 0 is `void`.
    starts: Vec<u32>,
}

/// One entry of the table of types.
#[derive(Clone, Copy)]
struct Type<'a> {
    name: u32,
    kind: u32,
    /// Whether the offsets of members also have a size.
    has_bit_sizes: bool,
    /// Size in bytes, or the number of another type.
    size_or_type: u32,
    /// Members or values.
    entries: &'a [u8],
}

impl Btf {
    /// Finds the types of the kernel that this VMCOREINFO describes; `None` if it has none, or they make no sense.
    pub fn find<M: PhysicalMemory>(space: &AddressSpace<'_, M>, vmcoreinfo: &Vmcoreinfo) -> Option<Self> {
        let start = vmcoreinfo.symbol("_stext")?;
        let mut chunk = vec![0; CHUNK_BYTES + HEADER_BYTES];
        let (mut at, mut tables) = (start, 0);
        while at - start < SEARCH_BYTES {
            space.read_pieces(at, &mut chunk, |_, _| {});
            let found = (0..CHUNK_BYTES).step_by(WORD).filter(|offset| chunk[*offset..].starts_with(&MAGIC));
            for offset in found {
                let Some(header) = Header::parse(&chunk[offset..]) else { continue };
                let table = header.read(space, at + offset as u64);
                tables += 1;
                if table.is_some() || tables == TABLES_MAX {
                    return table;
                }
            }
            at = at.checked_add(CHUNK_BYTES as u64)?;
        }
        None
    }

    /// `None` if the table of types ends within a type, or has a kind that is not known.
    fn new(types: Vec<u8>, names: Vec<u8>) -> Option<Self> {
        let mut starts = Vec::new();
        let mut at = 0;
        while at < types.len() {
            starts.push(u32::try_from(at).ok()?);
            at = at.checked_add(bytes_of(&types[at..])?)?;
        }
        (at == types.len()).then_some(Self { types, names, starts })
    }

    /// Offset of `path` in a structure, in bytes: the name of a member, and of members of members after dots.
    pub fn offset_of(&self, structure: &str, path: &str) -> Option<u64> {
        let mut within = self.structure(structure)?;
        let mut offset = 0;
        for name in path.split('.') {
            let mut members_left = MEMBERS_MAX;
            let (member_offset, member) = self.member(within, name, DEPTH_MAX, &mut members_left)?;
            offset += member_offset;
            within = self.plain(member)?;
        }
        Some(offset)
    }

    /// Value of an enumerator of a named enumeration.
    pub fn enumerator(&self, enumeration: &str, name: &str) -> Option<u32> {
        let found = self.named(enumeration, |candidate| candidate.kind == kind::ENUM)?;
        let mut values = found.entries.chunks_exact(2 * WORD);
        values.find_map(|value| self.is_named(word(value, 0)?, name).then(|| word(value, 1)).flatten())
    }

    fn structure(&self, name: &str) -> Option<Type<'_>> {
        self.named(name, |candidate| candidate.kind == kind::STRUCT && !candidate.entries.is_empty())
    }

    fn named(&self, name: &str, is_wanted: impl Fn(&Type<'_>) -> bool) -> Option<Type<'_>> {
        let types = self.starts.iter().filter_map(|start| self.at(*start));
        types.into_iter().find(|candidate| is_wanted(candidate) && self.is_named(candidate.name, name))
    }

    /// Offset and number of the type of a member, also of one within a member that has no name.
    fn member(&self, within: Type<'_>, name: &str, depth: u32, members_left: &mut u32) -> Option<(u64, u32)> {
        if within.kind != kind::STRUCT && within.kind != kind::UNION {
            return None;
        }
        for entry in within.entries.chunks_exact(3 * WORD) {
            *members_left = members_left.checked_sub(1)?;
            let (entry_name, entry_type, place) = (word(entry, 0)?, word(entry, 1)?, word(entry, 2)?);
            let bits = if within.has_bit_sizes { place & 0x00ff_ffff } else { place };
            let offset = u64::from(bits / 8);
            if self.is_named(entry_name, name) {
                return Some((offset, entry_type));
            }
            if entry_name == 0 && depth > 0 {
                let inner = self.plain(entry_type);
                let inner = inner.and_then(|inner| self.member(inner, name, depth - 1, members_left));
                if let Some((inner_offset, member)) = inner {
                    return Some((offset + inner_offset, member));
                }
            }
        }
        None
    }

    /// The type behind its other names, and without `const` and the like.
    fn plain(&self, number: u32) -> Option<Type<'_>> {
        let mut number = number;
        for _ in 0..DEPTH_MAX {
            let found = self.at(*self.starts.get(number.checked_sub(1)? as usize)?)?;
            match found.kind {
                kind::TYPEDEF | kind::VOLATILE | kind::CONST | kind::RESTRICT | kind::TYPE_TAG => {
                    number = found.size_or_type;
                }
                _ => return Some(found),
            }
        }
        None
    }

    fn at(&self, start: u32) -> Option<Type<'_>> {
        let bytes = self.types.get(start as usize..)?;
        let info = word(bytes, 1)?;
        Some(Type {
            name: word(bytes, 0)?,
            kind: kind_of(info),
            has_bit_sizes: info >> 31 != 0,
            size_or_type: word(bytes, 2)?,
            entries: bytes.get(TYPE_WORDS * WORD..bytes_of(bytes)?)?,
        })
    }

    fn is_named(&self, offset: u32, name: &str) -> bool {
        let rest = self.names.get(offset as usize..).unwrap_or_default();
        rest.strip_prefix(name.as_bytes()).is_some_and(|after| after.first() == Some(&0))
    }
}

/// Where types and names are, behind the header.
struct Header {
    header_bytes: u32,
    types: (u32, u32),
    names: (u32, u32),
}

impl Header {
    fn parse(bytes: &[u8]) -> Option<Self> {
        let header_bytes = word(bytes, 1)?;
        let (types, names) = ((word(bytes, 2)?, word(bytes, 3)?), (word(bytes, 4)?, word(bytes, 5)?));
        let is_sane = (HEADER_BYTES as u32..=HEADER_BYTES_MAX).contains(&header_bytes)
            && types.0 == 0
            && TYPES_BYTES.contains(&types.1)
            && names.0 == types.1
            && names.1 <= NAMES_BYTES_MAX;
        is_sane.then_some(Self { header_bytes, types, names })
    }

    fn read<M: PhysicalMemory>(&self, space: &AddressSpace<'_, M>, address: u64) -> Option<Btf> {
        let part = |(offset, bytes): (u32, u32)| {
            let start = address.checked_add(u64::from(self.header_bytes) + u64::from(offset))?;
            let mut part = vec![0; bytes as usize];
            space.read(start, &mut part).ok()?;
            Some(part)
        };
        Btf::new(part(self.types)?, part(self.names)?)
    }
}

/// Length of the type that begins here.
fn bytes_of(bytes: &[u8]) -> Option<usize> {
    let info = word(bytes, 1)?;
    let entries = (info & 0xffff) as usize;
    let words = match kind_of(info) {
        kind::INT | kind::VAR | kind::DECL_TAG => 1,
        kind::ARRAY => 3,
        kind::STRUCT | kind::UNION | kind::DATASEC | kind::ENUM64 => 3 * entries,
        kind::ENUM | kind::FUNC_PROTO => 2 * entries,
        1..=kind::ENUM64 => 0,
        _ => return None,
    };
    let all = (TYPE_WORDS + words) * WORD;
    (all <= bytes.len()).then_some(all)
}

fn kind_of(info: u32) -> u32 {
    info >> 24 & 0x1f
}

fn word(bytes: &[u8], number: usize) -> Option<u32> {
    let word = bytes.get(number * WORD..(number + 1) * WORD)?;
    Some(u32::from_le_bytes(word.try_into().expect("four bytes")))
}

#[cfg(test)]
pub mod made_up {
    //! A made-up table of types.

    use super::{HEADER_BYTES, TYPES_BYTES, kind};

    /// Writes types and their names one after the other.
    #[derive(Default)]
    pub struct Table {
        types: Vec<u8>,
        names: Vec<u8>,
        count: u32,
    }

    impl Table {
        pub fn new() -> Self {
            Self { names: vec![0], ..Self::default() }
        }

        fn name(&mut self, name: &str) -> u32 {
            if name.is_empty() {
                return 0;
            }
            let offset = self.names.len() as u32;
            self.names.extend(name.as_bytes());
            self.names.push(0);
            offset
        }

        fn put(&mut self, words: &[u32]) {
            self.types.extend(words.iter().flat_map(|word| word.to_le_bytes()));
        }

        fn begin(&mut self, name: &str, kind: u32, entries: usize, size_or_type: u32) -> u32 {
            let name = self.name(name);
            self.put(&[name, kind << 24 | entries as u32, size_or_type]);
            self.count += 1;
            self.count
        }

        pub fn integer(&mut self, name: &str) -> u32 {
            let number = self.begin(name, kind::INT, 0, 8);
            self.put(&[0]);
            number
        }

        pub fn constant(&mut self, of: u32) -> u32 {
            self.begin("", kind::CONST, 0, of)
        }

        /// Members by name, type, and offset in bytes.
        pub fn structure(&mut self, name: &str, members: &[(&str, u32, u32)]) -> u32 {
            let number = self.begin(name, kind::STRUCT, members.len(), 256);
            for (name, of, offset) in members {
                let name = self.name(name);
                self.put(&[name, *of, offset * 8]);
            }
            number
        }

        pub fn enumeration(&mut self, name: &str, values: &[(&str, u32)]) -> u32 {
            let number = self.begin(name, kind::ENUM, values.len(), 4);
            for (name, value) in values {
                let name = self.name(name);
                self.put(&[name, *value]);
            }
            number
        }

        /// The table as it is in a kernel, filled up to the least size of one.
        pub fn finish(mut self) -> Vec<u8> {
            while (self.types.len() as u32) < *TYPES_BYTES.start() {
                self.integer("");
            }
            let (types, names) = (self.types.len() as u32, self.names.len() as u32);
            let header = [HEADER_BYTES as u32, 0, types, types, names].map(u32::to_le_bytes).concat();
            [super::MAGIC.to_vec(), header, self.types, self.names].concat()
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::made_up::Table;
    use super::*;

    fn parse(table: &[u8]) -> Option<Btf> {
        let header = Header::parse(table)?;
        let part = |(offset, bytes): (u32, u32)| {
            let start = (header.header_bytes + offset) as usize;
            table.get(start..start + bytes as usize).map(<[u8]>::to_vec)
        };
        Btf::new(part(header.types)?, part(header.names)?)
    }

    fn table() -> Vec<u8> {
        let mut table = Table::new();
        let long = table.integer("long");
        let plain = table.constant(long);
        let inner = table.structure("", &[("index", plain, 8)]);
        let held = table.structure("held", &[("first", long, 0), ("second", long, 24)]);
        table.structure("page", &[("flags", long, 0), ("", inner, 16), ("held", held, 40)]);
        table.enumeration("pageflags", &[("PG_locked", 0), ("PG_active", 6)]);
        table.finish()
    }

    #[test]
    fn members_are_found_by_name() {
        let btf = parse(&table()).unwrap();
        assert_eq!(btf.offset_of("page", "flags"), Some(0));
        assert_eq!(btf.offset_of("page", "index"), Some(24), "in a member without a name");
        assert_eq!(btf.offset_of("page", "held.second"), Some(64));
        for (structure, path) in
            [("page", "none"), ("none", "flags"), ("page", "flags.more"), ("pageflags", "PG_active")]
        {
            assert_eq!(btf.offset_of(structure, path), None, "{structure}.{path}");
        }
        assert_eq!((btf.enumerator("pageflags", "PG_active"), btf.enumerator("page", "flags")), (Some(6), None));
    }

    #[test]
    fn types_that_contain_themselves_end() {
        let mut table = Table::new();
        table.constant(1);
        table.structure("loop", &[("", 2, 0), ("", 1, 0)]);
        let many = [("", 4, 0); 2000];
        table.structure("many", &many);
        table.structure("", &many);
        let btf = parse(&table.finish()).unwrap();
        assert_eq!(btf.offset_of("loop", "none"), None);
        assert_eq!(btf.offset_of("many", "none"), None, "2000 to the 16th members are not looked at");
    }

    proptest! {
        /// Lookups in a damaged table end, and say something or nothing.
        #[test]
        fn damaged_tables_do_no_harm(changes in prop::collection::vec((0_usize..400, any::<u8>()), 1..20)) {
            let mut table = table();
            for (at, byte) in changes {
                table[at] = byte;
            }
            if let Some(btf) = parse(&table) {
                for path in ["flags", "index", "held.second", "none"] {
                    let _ = btf.offset_of("page", path);
                }
                let _ = btf.enumerator("pageflags", "PG_active");
            }
        }
    }
}
