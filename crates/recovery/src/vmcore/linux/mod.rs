//! Linux: what a dead Linux says of its memory, read from outside without a symbol file or an agent.
//!
//! VMCOREINFO -> address space -> sections -> page descriptors -> class of each page (`classify`)
//! VMCOREINFO -> address space -> kernel log, `uname`
//!
//! Nothing here fails for damage in part: what cannot be read or makes no sense leaves its pages in the dump. Only a
//! memory that shows no Linux at all, or one whose layout is unknown, is refused, with the reason; the dump then keeps
//! everything but zeroes.

mod address_space;
mod classify;
mod descriptor;
pub mod log;
mod sections;
mod utsname;
mod vmcoreinfo;

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

/// Why a memory's pages cannot be told apart.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum NotUnderstood {
    #[error("no Linux kernel was found in the guest's memory")]
    NoVmcoreinfo,
    #[error(
        "the guest's processors ran none of the kernels found in its memory ({releases}): \
         it went on to another system, by kexec for instance"
    )]
    NotRunning { releases: String },
    #[error(
        "several kernels were found in the guest's memory ({releases}), and without registers nothing tells which one ran"
    )]
    Ambiguous { releases: String },
    #[error("the guest's kernel does not tell {0}")]
    Missing(&'static str),
    #[error("the guest's kernel tells {name}={value}, which cannot be")]
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
    /// `notes` are the ELF notes that QEMU or a dump file has; without a VMCOREINFO in them RAM is searched for it.
    ///
    /// A kernel that a guest left by kexec stays in memory, note and name intact, and its page descriptors say of memory
    /// what is no longer true. So a kernel counts only if a CPU's page tables have it where it says that it is. Notes
    /// without page tables (a dump by another program, a QEMU that died) cannot tell; then only one kernel may be there.
    pub fn find(memory: &'m M, notes: &[u8]) -> Result<Self, NotUnderstood> {
        let cpus = Notes::parse(notes).map(|notes| notes.page_tables()).unwrap_or_default();
        let mut others: Vec<Self> = Vec::new();
        if let Some(linux) = Vmcoreinfo::in_notes(notes).and_then(|found| Self::checked(memory, found)) {
            if cpus.is_empty() || linux.is_run_by(&cpus) {
                return Ok(linux);
            }
            others.push(linux);
        }
        for found in Vmcoreinfo::in_memory(memory) {
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

    /// Takes the VMCOREINFO as it is.
    pub fn with(memory: &'m M, vmcoreinfo: Vmcoreinfo) -> Result<Self, NotUnderstood> {
        let space = AddressSpace::new(memory, &vmcoreinfo)?;
        Ok(Self { memory, vmcoreinfo, space })
    }

    /// Is this the kernel whose name stands where the text says it stands?
    fn checked(memory: &'m M, vmcoreinfo: Vmcoreinfo) -> Option<Self> {
        let linux = Self::with(memory, vmcoreinfo).ok()?;
        let genuine = linux.utsname().is_some_and(|name| name.release == linux.vmcoreinfo.release());
        genuine.then_some(linux)
    }

    /// Do a CPU's page tables have this kernel's name where the kernel says it is?
    fn is_run_by(&self, cpus: &[PageTables]) -> bool {
        /// With page table isolation a process's own tables lie one page above those with the kernel in them.
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

    pub fn vmcoreinfo(&self) -> &Vmcoreinfo {
        &self.vmcoreinfo
    }

    /// What `uname -a` said.
    pub fn utsname(&self) -> Option<Utsname> {
        utsname::read(&self.space, &self.vmcoreinfo)
    }

    /// Which pages a dump of this level keeps. Pages of zeroes are not looked for: they show when pages are copied.
    pub fn classify(&self, level: DumpLevel) -> Result<Classification, NotUnderstood> {
        classify::classify(self.memory, &self.space, &self.vmcoreinfo, level)
    }

    /// The kernel log, oldest line first.
    pub fn log(&self) -> Result<Vec<log::Line>, NotUnderstood> {
        log::read(&self.space, &self.vmcoreinfo)
    }
}

fn required<T>(value: Option<T>, name: &'static str) -> Result<T, NotUnderstood> {
    value.ok_or(NotUnderstood::Missing(name))
}
