//! Attachment: the files on this host that say that a domain of libvirt is attached.
//!
//! | file | holds |
//! |---|---|
//! | `/etc/hearth/NAME.toml` | the machine: `owner = "libvirt"` |
//! | `/var/lib/hearth/NAME/domain.xml` | the domain's definition before it was attached, for `hearth detach` |
//! | `/var/lib/hearth/NAME/detached` | the domain was detached while it ran: its keeper removes these files at its end |

use std::io;
use std::path::{Path, PathBuf};
use std::{fs, io::Write};

use hearth_memory::{Durability, replace_file};

/// Folder of the machines' configurations. Relative paths in these start there.
pub const CONFIGURATIONS: &str = "/etc/hearth";
const STATES: &str = "/var/lib/hearth";
/// Where libvirt keeps the memory of `virsh managedsave`.
const SAVED: &str = "/var/lib/libvirt/qemu/save";

/// The files of one domain.
pub struct Attachment {
    name: String,
}

impl Attachment {
    /// Of the domain of this name, attached or not.
    pub fn of(name: &str) -> Self {
        Self { name: name.to_owned() }
    }

    /// Names of all attached domains.
    pub fn names() -> Vec<String> {
        let entries = fs::read_dir(CONFIGURATIONS).into_iter().flatten().flatten();
        let files = entries.filter_map(|entry| entry.file_name().into_string().ok());
        let names = files.filter_map(|file| file.strip_suffix(".toml").map(str::to_owned));
        names.filter(|name| Self::of(name).definition_file().exists()).collect()
    }

    /// The machine's configuration.
    pub fn file(&self) -> PathBuf {
        Path::new(CONFIGURATIONS).join(format!("{}.toml", self.name))
    }

    fn folder(&self) -> PathBuf {
        Path::new(STATES).join(&self.name)
    }

    fn definition_file(&self) -> PathBuf {
        self.folder().join("domain.xml")
    }

    fn detached_file(&self) -> PathBuf {
        self.folder().join("detached")
    }

    /// The domain's definition before it was attached. None: it is not attached.
    pub fn definition(&self) -> io::Result<Option<String>> {
        match fs::read_to_string(self.definition_file()) {
            Ok(definition) => Ok(Some(definition)),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// Writes the files of a domain with this definition.
    pub fn write(&self, configuration: &str, definition: &str) -> io::Result<()> {
        for folder in [Path::new(CONFIGURATIONS), &self.folder()] {
            fs::create_dir_all(folder)?;
        }
        let write =
            |path: &Path, text: &str| replace_file(path, Durability::PowerCut, |file| file.write_all(text.as_bytes()));
        let _ = fs::remove_file(self.detached_file());
        // A definition has the passwords of its displays; the file is for root alone.
        write(&self.definition_file(), definition)?;
        write(&self.file(), configuration)
    }

    /// Notes that the domain is detached from its end on.
    pub fn note_detached(&self) -> io::Result<()> {
        fs::write(self.detached_file(), "")
    }

    /// Whether it was detached while it ran. A guest that libvirt has saved comes back with the disks that it had.
    pub fn is_detached(&self) -> bool {
        self.detached_file().exists() && !Path::new(SAVED).join(format!("{}.save", self.name)).exists()
    }

    /// Removes the files.
    pub fn remove(&self) {
        for path in [self.file(), self.definition_file(), self.detached_file()] {
            match fs::remove_file(&path) {
                Err(error) if error.kind() != io::ErrorKind::NotFound => {
                    tracing::warn!(path = %path.display(), %error, "cannot be removed");
                }
                _ => {}
            }
        }
        // It may hold other files of the machine.
        let _ = fs::remove_dir(self.folder());
    }
}
