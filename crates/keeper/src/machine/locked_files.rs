//! Locked files (mlock): the files that the next QEMU needs for its start stay in host memory. These are the program
//! and libraries of the living QEMU, the guest's kernel or firmware, and the keeper's own program, which has to act
//! meanwhile.

use std::collections::BTreeSet;
use std::io;
use std::path::PathBuf;
use std::sync::{Arc, Mutex};

use hearth_qemu::pinned::{Pinned, program_files};

use crate::config::Boot;

/// The files that are locked now. A new keeper locks them again.
#[derive(Default)]
pub struct LockedFiles {
    pinned: Arc<Mutex<Pinned>>,
}

impl LockedFiles {
    /// Locks the files of this QEMU instead of the last one's. Runs in its own thread, because the files may have to be
    /// read.
    pub fn renew(&self, machine: &str, pid: u32, boot: &Boot) {
        let (pinned, boot_files) = (self.pinned.clone(), boot_files(boot));
        let renew = move || match pin(pid, boot_files) {
            Ok(renewed) => {
                tracing::debug!(bytes = renewed.bytes(), "locked the next QEMU's files in memory");
                *pinned.lock().expect("holders only assign") = renewed;
            }
            Err(error) => {
                tracing::info!(%error, "cannot lock the next QEMU's files in memory; starting it may need disk reads");
            }
        };
        if let Err(error) = std::thread::Builder::new().name(format!("files-{machine}")).spawn(renew) {
            tracing::info!(%error, "cannot start the thread that locks QEMU's files in memory");
        }
    }
}

fn pin(pid: u32, mut files: BTreeSet<PathBuf>) -> io::Result<Pinned> {
    files.extend(program_files("self")?);
    // A process that has ended, or belongs to another user, has no readable maps.
    files.extend(program_files(&pid.to_string()).unwrap_or_default());
    Pinned::pin(&files)
}

fn boot_files(boot: &Boot) -> BTreeSet<PathBuf> {
    let files = match boot {
        Boot::Kernel { kernel, initrd, .. } => [Some(kernel), initrd.as_ref()],
        Boot::Firmware { code, vars } => [code.as_ref(), vars.as_ref()],
    };
    files.into_iter().flatten().cloned().collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn boot_files_are_locked() {
        let check =
            |boot: &Boot, expect: &[&str]| assert_eq!(boot_files(boot), expect.iter().map(PathBuf::from).collect());
        let (kernel, cmdline) = (PathBuf::from("/vmlinuz"), String::new());
        let with_initrd =
            Boot::Kernel { kernel: kernel.clone(), initrd: Some("/initrd".into()), cmdline: cmdline.clone() };
        check(&with_initrd, &["/vmlinuz", "/initrd"]);
        check(&Boot::Kernel { kernel, initrd: None, cmdline }, &["/vmlinuz"]);
        check(&Boot::Firmware { code: Some("/OVMF.fd".into()), vars: None }, &["/OVMF.fd"]);
    }
}
