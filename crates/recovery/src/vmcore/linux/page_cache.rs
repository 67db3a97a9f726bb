//! Page cache of a dead kernel: which page of which file each cached page was.
//!
//! page descriptor -> mapping -> inode -> file system
//!
//! `struct page` and `struct inode` are read by the offsets that the kernel's own types give (`btf`). All of it is a claim of the
//! guest: whoever uses it must check what it leads to. Numbers of files and of runs are bounded, so a hostile guest costs
//! bounded memory.

use std::collections::HashMap;

use super::super::bytes::u64_at;
use super::super::level::DumpLevel;
use super::super::memory::PhysicalMemory;
use super::address_space::is_kernel_address;
use super::btf::Btf;
use super::descriptor::{Class, Rules, Verdict};
use super::walk::{Block, Visitor, walk};
use super::{AddressSpace, NotUnderstood, Vmcoreinfo, required};

/// Pages of RAM for each file that is remembered, and for each run: 2 MiB of files and 2 MiB of runs for 1 GiB of RAM.
const PAGES_PER_FILE: u64 = 8;
const PAGES_PER_RUN: u64 = 4;
/// Small guests may have as many files and runs as this.
const ITEMS_MIN: u64 = 1 << 14;
const FILE_SYSTEMS_MAX: usize = 1 << 12;
const TYPE_NAME_BYTES: usize = 16;
/// Type of the file system that has the page caches of block devices.
const BLOCK_DEVICES: &str = "bdev";

/// What a page cache held.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PageCache {
    /// File systems with a cached page.
    pub file_systems: Vec<FileSystem>,
    /// Files with a cached page.
    pub files: Vec<CachedFile>,
    /// Cached pages, by page frame.
    pub runs: Vec<CachedRun>,
    /// Pages that are cached, but whose file cannot be read or makes no sense, or that were too many.
    pub unknown_pages: u64,
}

/// A mounted file system (`struct super_block`).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FileSystem {
    /// Name of its type, such as `ext4`.
    pub kind: String,
    /// Its UUID; zeroes if it has none.
    pub uuid: [u8; 16],
    /// Number of its device, in the kernel's own format.
    pub device: u32,
}

/// A file of which pages are cached (`struct inode`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CachedFile {
    /// Number of its file system in `PageCache::file_systems`.
    pub file_system: u32,
    /// What of the file system it is.
    pub what: FileKind,
}

/// What is cached.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FileKind {
    /// A file, by the number and the generation of its inode.
    File {
        /// Number of the inode.
        inode: u64,
        /// Its generation, which tells it from an earlier file with this number.
        generation: u32,
    },
    /// A block device itself, by its number: the metadata of most file systems.
    Device(u32),
}

/// Neighbouring page frames that hold neighbouring pages of a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CachedRun {
    /// The first page frame.
    pub pfn: u64,
    /// Number of pages.
    pub pages: u32,
    /// Number of the file in `PageCache::files`.
    pub file: u32,
    /// How recently the pages were used: 3 for the most.
    pub heat: u8,
    /// Number of the first page in the file.
    pub index: u64,
}

/// Reads what the page cache held.
pub fn read<M: PhysicalMemory>(
    memory: &M,
    space: &AddressSpace<'_, M>,
    vmcoreinfo: &Vmcoreinfo,
) -> Result<PageCache, NotUnderstood> {
    const CACHE: u8 = 2 + 4;
    let btf = required(Btf::find(space, vmcoreinfo), "its types (BTF)")?;
    let rules = Rules::new(vmcoreinfo, DumpLevel::new(CACHE).expect("a level"))?;
    let descriptor_bytes = rules.bytes;
    let fields = Fields::new(&btf, descriptor_bytes)?;
    let mut reader = Reader {
        space,
        rules,
        fields,
        file_numbers: Numbers::new(items_max(memory, PAGES_PER_FILE)),
        system_numbers: Numbers::new(FILE_SYSTEMS_MAX),
        runs_max: items_max(memory, PAGES_PER_RUN),
        found: PageCache::default(),
    };
    walk(memory, space, vmcoreinfo, descriptor_bytes, &mut reader)?;
    Ok(reader.found)
}

fn items_max(memory: &impl PhysicalMemory, pages_per_item: u64) -> usize {
    (memory.ram_pages() / pages_per_item).max(ITEMS_MIN) as usize
}

/// Offsets of members, and masks of flags.
struct Fields {
    page_index: usize,
    active: u64,
    referenced: u64,
    mapping_host: u64,
    inode: InodeFields,
    system: SystemFields,
}

struct InodeFields {
    mapping: u64,
    number: u64,
    generation: u64,
    system: u64,
    device: u64,
}

struct SystemFields {
    kind: u64,
    kind_name: u64,
    uuid: u64,
    device: u64,
}

impl Fields {
    fn new(btf: &Btf, descriptor_bytes: usize) -> Result<Self, NotUnderstood> {
        let flag = |name, what| {
            let bit = required(btf.enumerator("pageflags", name), what)?;
            required(1_u64.checked_shl(bit), what)
        };
        let index = btf.offset_of("folio", "index").or_else(|| btf.offset_of("page", "index"));
        let index = required(index, "folio.index")?;
        if index > descriptor_bytes.saturating_sub(8) as u64 {
            return Err(NotUnderstood::Implausible { name: "folio.index", value: index.into() });
        }
        let offset = |structure, member, what| required(btf.offset_of(structure, member), what);
        Ok(Self {
            page_index: index as usize,
            active: flag("PG_active", "PG_active")?,
            referenced: flag("PG_referenced", "PG_referenced")?,
            mapping_host: offset("address_space", "host", "address_space.host")?,
            inode: InodeFields {
                mapping: offset("inode", "i_mapping", "inode.i_mapping")?,
                number: offset("inode", "i_ino", "inode.i_ino")?,
                generation: offset("inode", "i_generation", "inode.i_generation")?,
                system: offset("inode", "i_sb", "inode.i_sb")?,
                device: offset("inode", "i_rdev", "inode.i_rdev")?,
            },
            system: SystemFields {
                kind: offset("super_block", "s_type", "super_block.s_type")?,
                kind_name: offset("file_system_type", "name", "file_system_type.name")?,
                uuid: offset("super_block", "s_uuid", "super_block.s_uuid")?,
                device: offset("super_block", "s_dev", "super_block.s_dev")?,
            },
        })
    }
}

struct Reader<'a, 'm, M> {
    space: &'a AddressSpace<'m, M>,
    rules: Rules,
    fields: Fields,
    /// Numbers of files, by the address of their mapping.
    file_numbers: Numbers,
    /// Numbers of file systems, by their address.
    system_numbers: Numbers,
    runs_max: usize,
    found: PageCache,
}

/// Numbers of what was read, by address: a structure that many pages lead to is read once.
struct Numbers {
    by_address: HashMap<u64, Option<u32>>,
    max: usize,
}

impl Numbers {
    fn new(max: usize) -> Self {
        Self { by_address: HashMap::new(), max }
    }

    /// The number at this address, or `None` within if there is nothing that makes sense, or no space for more.
    fn known(&self, address: u64) -> Option<Option<u32>> {
        let known = self.by_address.get(&address).copied();
        known.or_else(|| (self.by_address.len() >= self.max).then_some(None))
    }

    /// Puts an item into the list of all, and remembers its number; also that there is none.
    fn give<T>(&mut self, address: u64, item: Option<T>, list: &mut Vec<T>) -> Option<u32> {
        let number = item.map(|item| {
            list.push(item);
            list.len() as u32 - 1
        });
        self.by_address.insert(address, number);
        number
    }
}

impl<M: PhysicalMemory> Visitor for Reader<'_, '_, M> {
    fn undescribed(&mut self, _: u64) {}

    fn unreadable(&mut self, _: u64) {}

    fn page(&mut self, pfn: u64, page: &[u8], _: u64, block: &Block) {
        if self.rules.is_tail(page) {
            return;
        }
        let Verdict::Exclude(Class::Cache | Class::PrivateCache, order) =
            self.rules.judge(page, block.descriptor(pfn + 1), pfn)
        else {
            return;
        };
        let (mapping, flags) = self.rules.mapping_and_flags(page);
        // A page that left its file is no longer cached; the low bits mark other kinds of owners.
        if mapping == 0 || mapping & 3 != 0 {
            return;
        }
        let pages = 1 << order;
        let index = u64_at(page, self.fields.page_index);
        let heat = u8::from(flags & self.fields.active != 0) * 2 + u8::from(flags & self.fields.referenced != 0);
        match self.file(mapping) {
            Some(file) => self.add(CachedRun { pfn, pages, file, heat, index }),
            None => self.found.unknown_pages += u64::from(pages),
        }
    }
}

impl<M: PhysicalMemory> Reader<'_, '_, M> {
    fn add(&mut self, run: CachedRun) {
        if let Some(last) = self.found.runs.last_mut()
            && (last.file, last.heat) == (run.file, run.heat)
            && last.pfn + u64::from(last.pages) == run.pfn
            && last.index.checked_add(last.pages.into()) == Some(run.index)
            && let Some(pages) = last.pages.checked_add(run.pages)
        {
            last.pages = pages;
        } else if self.found.runs.len() < self.runs_max {
            self.found.runs.push(run);
        } else {
            self.found.unknown_pages += u64::from(run.pages);
        }
    }

    /// Number of the file with this mapping.
    fn file(&mut self, mapping: u64) -> Option<u32> {
        if let Some(known) = self.file_numbers.known(mapping) {
            return known;
        }
        let file = self.read_file(mapping);
        self.file_numbers.give(mapping, file, &mut self.found.files)
    }

    fn read_file(&mut self, mapping: u64) -> Option<CachedFile> {
        let Fields { mapping_host, inode: InodeFields { mapping: own, number, generation, system, device }, .. } =
            self.fields;
        let inode = self.address_at(mapping, mapping_host)?;
        // Only an inode that names this mapping is its owner.
        if self.address_at(inode, own)? != mapping {
            return None;
        }
        let system = self.address_at(inode, system)?;
        let file_system = self.file_system(system)?;
        let what = if self.found.file_systems[file_system as usize].kind == BLOCK_DEVICES {
            FileKind::Device(self.u32_at(inode, device)?)
        } else {
            FileKind::File { inode: self.u64_at(inode, number)?, generation: self.u32_at(inode, generation)? }
        };
        Some(CachedFile { file_system, what })
    }

    fn file_system(&mut self, address: u64) -> Option<u32> {
        if let Some(known) = self.system_numbers.known(address) {
            return known;
        }
        let system = self.read_file_system(address);
        self.system_numbers.give(address, system, &mut self.found.file_systems)
    }

    fn read_file_system(&self, address: u64) -> Option<FileSystem> {
        let SystemFields { kind, kind_name, uuid: uuid_offset, device } = self.fields.system;
        let name = self.address_at(self.address_at(address, kind)?, kind_name)?;
        let mut text = [0; TYPE_NAME_BYTES];
        // A short name may be at the end of readable memory.
        self.space.read_pieces(name, &mut text, |_, _| {});
        let end = text.iter().position(|byte| *byte == 0)?;
        let kind = str::from_utf8(&text[..end]).ok().filter(|kind| !kind.is_empty())?.to_owned();
        let mut uuid = [0; 16];
        self.space.read(address.checked_add(uuid_offset)?, &mut uuid).ok()?;
        Some(FileSystem { kind, uuid, device: self.u32_at(address, device)? })
    }

    /// A pointer of the kernel to its own memory.
    fn address_at(&self, structure: u64, offset: u64) -> Option<u64> {
        self.u64_at(structure, offset).filter(|address| is_kernel_address(*address))
    }

    fn u64_at(&self, structure: u64, offset: u64) -> Option<u64> {
        self.space.read_u64(structure.checked_add(offset)?).ok()
    }

    fn u32_at(&self, structure: u64, offset: u64) -> Option<u32> {
        self.space.read_u32(structure.checked_add(offset)?).ok()
    }
}
