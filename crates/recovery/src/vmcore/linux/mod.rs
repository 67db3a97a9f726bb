//! Linux: reads the memory of a dead Linux guest from outside, without a symbol file or an agent.
//!
//! VMCOREINFO -> address space -> sections -> page descriptors -> class of each page (`classify`)
//! VMCOREINFO -> address space -> kernel log, `uname`
//! VMCOREINFO -> address space -> types (`btf`), page descriptors -> what its page cache held (`page_cache`)
//!
//! Partial damage makes nothing fail here: what cannot be read or makes no sense leaves its pages in the dump. Only a
//! memory without any Linux, or one whose layout is unknown, is refused, with the reason; the dump then keeps
//! everything except zeroes.

mod address_space;
mod btf;
mod classify;
mod descriptor;
pub mod log;
pub mod page_cache;
mod sections;
mod utsname;
mod vmcoreinfo;
mod walk;

#[cfg(test)]
mod synthetic;
#[cfg(test)]
mod tests;

pub use address_space::{AddressSpace, Piece};
pub use classify::{ClassCounts, Classification};
pub use utsname::Utsname;
pub use vmcoreinfo::Vmcoreinfo;

use hearth_memory::PAGE_BYTES;

use super::level::DumpLevel;
use super::memory::PhysicalMemory;
use super::notes::{Notes, PageTables};

/// Pages looked at that begin like a VMCOREINFO, and kernels compared. A guest that goes on by kexec, or runs guests of its own, has
/// a few; a hostile one can fill its memory with them.
const CANDIDATES_MAX: usize = 4096;
const KERNELS_MAX: usize = 16;

/// Why the pages of a memory cannot be classified.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[allow(missing_docs, reason = "each variant's message describes it")]
pub enum NotUnderstood {
    #[error("no Linux kernel was found in the guest's memory")]
    NoVmcoreinfo,
    #[error(
        "the guest's processors ran none of the kernels found in its memory ({releases}): \
         it went on to another system, by kexec for instance"
    )]
    NotRunning { releases: String },
    #[error(
        "several kernels were found in the guest's memory ({releases}), and without registers it is unknown which one ran"
    )]
    Ambiguous { releases: String },
    #[error("the guest's kernel does not report {0}")]
    Missing(&'static str),
    #[error("the guest's kernel reports {name}={value}, which is impossible")]
    Implausible { name: &'static str, value: i128 },
    #[error("the guest kernel's table of memory sections cannot be read: it is damaged, or laid out in an unknown way")]
    NoSections,
}

/// A Linux kernel in a dead guest's memory.
pub struct Linux<'m, M> {
    memory: &'m M,
    vmcoreinfo: Vmcoreinfo,
    space: AddressSpace<'m, M>,
}

impl<'m, M: PhysicalMemory> Linux<'m, M> {
    /// Finds the kernel that ran. `notes` are the ELF notes from QEMU or a dump file; without a VMCOREINFO in them RAM
    /// is searched for it.
    ///
    /// A kernel that a guest left by kexec stays in memory, with note and name intact, but its page descriptors are out
    /// of date. So a kernel counts only if a CPU's page tables map it where it says that it is. Notes without page
    /// tables (a dump by another program, a QEMU that died) cannot show that. Then the kernel in the notes counts, and
    /// without one RAM must hold a single kernel.
    pub fn find(memory: &'m M, notes: &[u8]) -> Result<Self, NotUnderstood> {
        let cpus = Notes::parse(notes).map(|notes| notes.page_tables()).unwrap_or_default();
        let mut others: Vec<Self> = Vec::new();
        if let Some(linux) = Vmcoreinfo::in_notes(notes).and_then(|found| Self::checked(memory, found)) {
            if cpus.is_empty() || linux.is_run_by(&cpus) {
                return Ok(linux);
            }
            others.push(linux);
        }
        // Without registers, a second kernel decides that none counts.
        let kernels_max = if cpus.is_empty() { 2 } else { KERNELS_MAX };
        for found in Vmcoreinfo::in_memory(memory).take(CANDIDATES_MAX) {
            if others.len() >= kernels_max {
                break;
            }
            let known = others.iter().any(|other| other.vmcoreinfo == found);
            let Some(linux) = (!known).then(|| Self::checked(memory, found)).flatten() else { continue };
            if linux.is_run_by(&cpus) {
                return Ok(linux);
            }
            others.push(linux);
        }
        let releases = || others.iter().map(|linux| linux.vmcoreinfo.release()).collect::<Vec<_>>().join(", ");
        match others.len() {
            0 => Err(NotUnderstood::NoVmcoreinfo),
            1 if cpus.is_empty() => Ok(others.swap_remove(0)),
            _ if cpus.is_empty() => Err(NotUnderstood::Ambiguous { releases: releases() }),
            _ => Err(NotUnderstood::NotRunning { releases: releases() }),
        }
    }

    /// Trusts this VMCOREINFO.
    pub fn with(memory: &'m M, vmcoreinfo: Vmcoreinfo) -> Result<Self, NotUnderstood> {
        let space = AddressSpace::new(memory, &vmcoreinfo)?;
        Ok(Self { memory, vmcoreinfo, space })
    }

    /// The kernel of this VMCOREINFO, if its name is where the text says.
    fn checked(memory: &'m M, vmcoreinfo: Vmcoreinfo) -> Option<Self> {
        let linux = Self::with(memory, vmcoreinfo).ok()?;
        let genuine = linux.utsname().is_some_and(|name| name.release == linux.vmcoreinfo.release());
        genuine.then_some(linux)
    }

    /// Whether a CPU's page tables map this kernel's name where the kernel says that it is.
    fn is_run_by(&self, cpus: &[PageTables]) -> bool {
        /// With page table isolation a process's own tables are one page above those that map the kernel.
        const USER_TABLES: u64 = PAGE_BYTES;
        let Some(address) = self.vmcoreinfo.symbol("init_uts_ns") else { return false };
        let said = self.space.translate(address).map(|piece| piece.address);
        let roots = |cpu: &PageTables| [cpu.root, cpu.root & !USER_TABLES].map(|root| PageTables { root, ..*cpu });
        let mut seen = cpus.iter().flat_map(roots).map(|tables| self.space.walk(tables, address));
        said.is_some() && seen.any(|piece| piece.map(|piece| piece.address) == said)
    }

    /// The kernel's virtual memory.
    pub fn space(&self) -> &AddressSpace<'m, M> {
        &self.space
    }

    /// The kernel's own description of its layout.
    pub fn vmcoreinfo(&self) -> &Vmcoreinfo {
        &self.vmcoreinfo
    }

    /// The kernel's names, as `uname -a` prints them; `None` if they cannot be read.
    pub fn utsname(&self) -> Option<Utsname> {
        utsname::read(&self.space, &self.vmcoreinfo)
    }

    /// Decides which pages a dump of this level keeps. It does not look for pages of zeroes, because they show when
    /// pages are copied.
    pub fn classify(&self, level: DumpLevel) -> Result<Classification, NotUnderstood> {
        classify::classify(self.memory, &self.space, &self.vmcoreinfo, level)
    }

    /// What the kernel's page cache held: pages of files, and of the devices under them.
    pub fn page_cache(&self) -> Result<page_cache::PageCache, NotUnderstood> {
        page_cache::read(self.memory, &self.space, &self.vmcoreinfo)
    }

    /// The kernel log, oldest line first.
    pub fn log(&self) -> Result<Vec<log::Line>, NotUnderstood> {
        log::read(&self.space, &self.vmcoreinfo)
    }
}

fn required<T>(value: Option<T>, name: &'static str) -> Result<T, NotUnderstood> {
    value.ok_or(NotUnderstood::Missing(name))
}
