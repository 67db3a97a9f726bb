//! Claim: whether Hearth serves the sockets in a domain's definition to that domain.
//!
//! Hearth knows a domain by its name, and its images by the files that `attach` wrote. The sockets stay in a definition that is
//! renamed, copied, defined again from a backup or taken to another host. QEMU would wait without end for a socket that nobody
//! serves to it, so the hook, `attach` and `detach` look for them and say what mends it.

use std::path::{Path, PathBuf};

use hearth_libvirt::{definition, identity};

use crate::attachment::Attachment;
use crate::folders::{CACHE_MAP, disk_at, disk_socket};
use crate::problem::Problem;
use crate::runtime_root::RuntimeRoot;

/// Why Hearth does not serve a domain's disks.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
#[error("{what}; {remedy}")]
pub struct NotServed {
    pub what: String,
    pub remedy: String,
}

impl NotServed {
    pub fn problem(self, name: &str) -> Problem {
        Problem::error(name, self.what, self.remedy)
    }
}

/// Refuses a definition with a socket of another domain or machine.
pub fn must_be_of(name: &str, xml: &str, root: &RuntimeRoot) -> Result<(), NotServed> {
    other_owner(name, xml, root, before).map_or(Ok(()), Err)
}

/// As `must_be_of`. Also refuses a definition with a socket of this domain's if Hearth does not know the images any more.
pub fn must_be_known(name: &str, xml: &str, root: &RuntimeRoot) -> Result<(), NotServed> {
    must_be_of(name, xml, root)?;
    let Some(socket) = own_sockets(name, xml, root).into_iter().next() else { return Ok(()) };
    match Attachment::of(name).definition() {
        Ok(None) => Err(NotServed {
            what: format!("{name} has a disk at {}, and Hearth does not know its image", socket.display()),
            remedy: images_by_hand(name),
        }),
        // If it cannot be read, its reader says why.
        _ => Ok(()),
    }
}

/// Refuses to attach a domain over the files of an earlier one that had its name.
pub fn must_not_replace(name: &str, xml: &str) -> Result<(), NotServed> {
    match before(name).filter(|before| !is_same_domain(before, xml)) {
        None => Ok(()),
        Some(_) => Err(NotServed {
            what: format!("Hearth keeps the files of another domain that was attached as {name}"),
            remedy: format!("remove them, but no disk image: `hearth detach {name}`"),
        }),
    }
}

/// Whether these are definitions of one domain, whatever its name.
pub fn is_same_domain(one: &str, other: &str) -> bool {
    let [one, other] = [one, other].map(|xml| identity::uuid(xml).ok().flatten());
    one == other || one.is_none() || other.is_none()
}

/// Sockets of this definition that Hearth serves to the domain of this name.
pub fn own_sockets(name: &str, xml: &str, root: &RuntimeRoot) -> Vec<PathBuf> {
    let folder = root.machine(name);
    let mut sockets = all_sockets(xml);
    sockets.retain(|socket| disk_at(&folder, socket).is_some());
    sockets
}

/// How a domain gets its images back that Hearth does not know.
pub fn images_by_hand(name: &str) -> String {
    let cache_map = disk_socket(Path::new(""), CACHE_MAP);
    format!(
        "use `virsh edit {name}` (of a guest that `virsh save` wrote to a file: `virsh save-image-edit FILE`): give each of its \
         disks of type='vhostuser' its image back (<disk type='file' device='disk'>, <driver name='qemu' type='qcow2'/>, \
         <source file='IMAGE'/>), and remove the one at {}; then `hearth attach {name}`",
        cache_map.display()
    )
}

/// The error for a socket that is not this domain's. `before`: the definition of a domain before it was attached.
fn other_owner(
    name: &str,
    xml: &str,
    root: &RuntimeRoot,
    before: impl Fn(&str) -> Option<String>,
) -> Option<NotServed> {
    let folder = root.machine(name);
    let is_foreign = |socket: &PathBuf| socket.starts_with(root.path()) && !socket.starts_with(&folder);
    let socket = all_sockets(xml).into_iter().find(is_foreign)?;
    let owner = socket.strip_prefix(root.path()).ok()?.iter().next()?.to_string_lossy().into_owned();
    if before(&owner).is_some_and(|before| is_same_domain(&before, xml)) {
        return Some(renamed(&owner, name));
    }
    let what = format!("{name} has a disk at {}, which Hearth serves to {owner} alone", socket.display());
    Some(NotServed { what, remedy: images_by_hand(name) })
}

/// The error for a domain that was renamed while it was attached.
pub fn renamed(from: &str, to: &str) -> NotServed {
    NotServed {
        what: format!(
            "{to} was renamed from {from} while it was attached, and Hearth serves its disks to {from} alone"
        ),
        remedy: format!(
            "shut it down, then `virsh domrename {to} {from}`, `hearth detach {from}`, `virsh domrename {from} {to}`, \
             `hearth attach {to}`"
        ),
    }
}

/// The definition of a domain before it was attached.
fn before(name: &str) -> Option<String> {
    Attachment::of(name).definition().ok().flatten()
}

/// None of a text that is not a definition.
fn all_sockets(xml: &str) -> Vec<PathBuf> {
    definition::disk_sockets(xml).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn definition(name: &str, uuid: &str, sockets: &[&str]) -> String {
        let disk = |socket: &&str| format!("<disk type='vhostuser'><source type='unix' path='{socket}'/></disk>");
        let disks: String = sockets.iter().map(disk).collect();
        format!("<domain><name>{name}</name><uuid>{uuid}</uuid><devices>{disks}</devices></domain>")
    }

    /// What is said of domain `www`, with web attached.
    fn said(xml: &str) -> Option<String> {
        let before = |owner: &str| (owner == "web").then(|| definition("web", "7ff9", &[]));
        other_owner("www", xml, &RuntimeRoot::new("/run/hearth"), before).map(|error| error.to_string())
    }

    #[test]
    fn own_and_others_sockets_are_served() {
        for sockets in [&[][..], &["/run/hearth/www/disk-vda.sock", "/run/spdk/vdb.sock", "/run/hearthly/www/a.sock"]] {
            assert_eq!(said(&definition("www", "7ff9", sockets)), None);
        }
        assert_eq!(said("no definition"), None);
    }

    #[test]
    fn socket_of_another_domain_is_refused_with_a_remedy() {
        let sockets = ["/run/hearth/www/disk-vda.sock", "/run/hearth/web/disk-vda.sock"];
        let renamed = said(&definition("www", "7ff9", &sockets)).unwrap();
        assert!(renamed.contains("renamed from web") && renamed.contains("`virsh domrename www web`"), "{renamed}");
        let copied = said(&definition("www", "1234", &sockets)).unwrap();
        assert!(copied.contains("/run/hearth/web/disk-vda.sock, which Hearth serves to web alone"), "{copied}");
        assert!(copied.contains("`virsh edit www`") && copied.contains("at disk-cache-map.sock"), "{copied}");
        let nobodys = said(&definition("www", "7ff9", &["/run/hearth/old/disk-vda.sock"])).unwrap();
        assert!(nobodys.contains("serves to old alone"), "{nobodys}");
    }

    #[test]
    fn domains_are_told_apart_by_their_uuid() {
        let (web, www) = (definition("web", "7ff9", &[]), definition("www", "7ff9", &[]));
        assert!(is_same_domain(&web, &www));
        assert!(!is_same_domain(&web, &definition("web", "1234", &[])));
        assert!(is_same_domain(&web, "<domain><name>web</name><devices/></domain>"), "an old one without");
    }
}
