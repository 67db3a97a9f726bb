//! What is known of the QEMU that libvirt has started: its process, its accelerator, its version.

use std::fs::{self, File};
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use hearth_qemu::{Accelerator, Binary, ProcessId};
use hearth_recovery::journal::QemuIdentity;

/// The version of the program that was asked last. The answer takes 30 ms, in which the new QEMU would wait for its disks.
#[derive(Default)]
pub struct LastVersion(Option<(Program, Option<String>)>);

/// A program file, as long as nobody changes it.
#[derive(PartialEq, Eq)]
struct Program {
    device: u64,
    inode: u64,
    /// Seconds and nanoseconds.
    changed: (i64, i64),
}

impl LastVersion {
    /// The version of the QEMU that a process runs. Its guest may have taken the process over, so only a program is asked that nobody
    /// but root can have written.
    fn of_process(&mut self, pid: u32) -> Option<String> {
        let program = File::open(format!("/proc/{pid}/exe")).ok()?;
        let about = program.metadata().ok()?;
        if about.uid() != 0 || about.mode() & 0o022 != 0 {
            return None;
        }
        self.of(&program, ask).ok().flatten()
    }

    fn of(&mut self, program: &File, ask: impl FnOnce(&File) -> Option<String>) -> io::Result<Option<String>> {
        let about = program.metadata()?;
        let (device, inode, changed) = (about.dev(), about.ino(), (about.ctime(), about.ctime_nsec()));
        let program_now = Program { device, inode, changed };
        let last = self.0.take().filter(|(asked, _)| *asked == program_now);
        let (_, version) = self.0.insert(last.unwrap_or_else(|| (program_now, ask(program))));
        Ok(version.clone())
    }
}

fn ask(program: &File) -> Option<String> {
    let path = format!("/proc/self/fd/{}", program.as_raw_fd());
    Binary::find(Some(Path::new(&path))).ok().map(|binary| binary.version().to_string())
}

/// Whether libvirt has started this QEMU to restore a guest that it had saved.
pub fn restores(process: ProcessId) -> bool {
    arguments(process).split('\0').any(|argument| argument == "-incoming")
}

fn arguments(process: ProcessId) -> String {
    let arguments = fs::read(format!("/proc/{}/cmdline", process.pid)).unwrap_or_default();
    String::from_utf8_lossy(&arguments).into_owned()
}

/// What is known of libvirt's QEMU.
pub fn identity(process: ProcessId, generation: u32, version: &mut LastVersion) -> QemuIdentity {
    let arguments = arguments(process);
    let accelerator = if ["-accel\0kvm", "accel=kvm"].iter().any(|kvm| arguments.contains(kvm)) {
        Accelerator::Kvm
    } else {
        Accelerator::Tcg
    };
    QemuIdentity {
        pid: process.pid,
        start_ticks: process.start_ticks,
        generation,
        version: version.of_process(process.pid).unwrap_or_else(|| "unknown".to_owned()),
        accelerator: accelerator.name().to_owned(),
        accelerator_why: "the domain's definition".to_owned(),
        userfault_fd: None,
        helper_fd: None,
        stale: false,
        at_start: None,
        vmgenid: None,
        guest_agent: false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn program_is_asked_once_until_it_changes() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("qemu");
        let mut last = LastVersion::default();
        let mut asked = 0;
        let mut version = |path: &Path| {
            let answer = last.of(&File::open(path).unwrap(), |_| {
                asked += 1;
                Some(asked.to_string())
            });
            answer.unwrap().unwrap()
        };
        fs::write(&path, "7.2").unwrap();
        assert_eq!([version(&path), version(&path)], ["1", "1"]);
        // An upgrade puts another file in its place.
        fs::write(folder.path().join("new"), "10.0").unwrap();
        fs::rename(folder.path().join("new"), &path).unwrap();
        assert_eq!([version(&path), version(&path)], ["2", "2"]);
    }
}
