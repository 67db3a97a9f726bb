//! Utsname: names of the kernel and its machine, as `uname` prints them. A dump's header contains them.

use super::super::memory::PhysicalMemory;
use super::{AddressSpace, Vmcoreinfo};

/// `__NEW_UTS_LEN` and the terminating zero.
const FIELD_BYTES: usize = 65;
const FIELDS: usize = 6;

/// Names that `uname -a` prints (`struct new_utsname`).
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Utsname {
    /// Name of the system: `Linux`.
    pub sysname: String,
    /// The guest's host name.
    pub nodename: String,
    /// Release of the kernel.
    pub release: String,
    /// Version of the kernel's build.
    pub version: String,
    /// Architecture.
    pub machine: String,
    /// NIS domain name.
    pub domainname: String,
}

/// Reads the names; `None` if they cannot be read or are not those of Linux.
pub fn read(space: &AddressSpace<'_, impl PhysicalMemory>, vmcoreinfo: &Vmcoreinfo) -> Option<Utsname> {
    let namespace = vmcoreinfo.symbol("init_uts_ns")?;
    // Before 5.11 VMCOREINFO had no offset for it; a reference count of 4 bytes came first.
    let offset = vmcoreinfo.offset("uts_namespace.name").unwrap_or(4);
    let mut bytes = [0; FIELD_BYTES * FIELDS];
    space.read(namespace.checked_add(offset)?, &mut bytes).ok()?;
    let mut fields = bytes.chunks(FIELD_BYTES).map(text);
    let mut next = || fields.next().expect("as many fields as were read");
    let name = Utsname {
        sysname: next(),
        nodename: next(),
        release: next(),
        version: next(),
        machine: next(),
        domainname: next(),
    };
    (name.sysname == "Linux").then_some(name)
}

fn text(field: &[u8]) -> String {
    let end = field.iter().position(|byte| *byte == 0).unwrap_or(field.len());
    String::from_utf8_lossy(&field[..end]).into_owned()
}
