//! What is known of the QEMU that libvirt has started: its process, its accelerator, its version.

use std::fs::{self, DirEntry, File};
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use hearth_qemu::{Accelerator, Binary, ProcessId, arguments_of};
use hearth_recovery::journal::QemuIdentity;

/// Devices through which others access memory by its pages.
const PINNING: [&str; 3] = ["/dev/vfio/", "/dev/iommu", "/dev/vhost-vdpa"];

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
    arguments_of(process.pid).iter().any(|argument| argument == "-incoming")
}

/// Whether a device may access this QEMU's memory by its pages (VFIO, vDPA), or some of it is locked. Pages that were released there
/// would be others for the device than for the guest. A definition does not tell: devices are plugged in, and networks have some.
pub fn pins_memory(pid: u32) -> bool {
    // What cannot be read may be pinned. With an IOMMU for the guest nothing may be pinned yet, so the devices count, too.
    let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
    let descriptors = fs::read_dir(format!("/proc/{pid}/fd"));
    has_pinned(&status) || descriptors.map_or(true, |mut descriptors| descriptors.any(may_pin))
}

fn has_pinned(status: &str) -> bool {
    let is_none = |name| status.lines().any(|line| line.strip_prefix(name).is_some_and(|count| count.trim() == "0 kB"));
    !is_none("VmLck:") || !is_none("VmPin:")
}

fn may_pin(descriptor: io::Result<DirEntry>) -> bool {
    let opened = match descriptor.and_then(|descriptor| fs::read_link(descriptor.path())) {
        Ok(opened) => opened.to_string_lossy().into_owned(),
        // Closed meanwhile.
        Err(error) => return error.kind() != io::ErrorKind::NotFound,
    };
    opened.starts_with("anon_inode:[vfio") || PINNING.iter().any(|device| opened.contains(device))
}

fn uses_kvm(arguments: &[String]) -> bool {
    let is_option = arguments.windows(2).any(|words| words[0] == "-accel" && words[1].starts_with("kvm"));
    is_option || arguments.iter().any(|word| word.contains("accel=kvm"))
}

/// What is known of libvirt's QEMU.
pub fn identity(process: ProcessId, generation: u32, version: &mut LastVersion) -> QemuIdentity {
    let accelerator = if uses_kvm(&arguments_of(process.pid)) { Accelerator::Kvm } else { Accelerator::Tcg };
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
    use std::io::Read;
    use std::process::{Command, Stdio};

    use super::*;

    #[test]
    fn pinned_or_locked_memory_is_found() {
        let pins = |shell: &str, folder: &Path| {
            let script = format!("{shell}; echo; exec sleep 1000");
            let mut child = Command::new("sh").args(["-c", &script]).current_dir(folder).stdout(Stdio::piped()).spawn();
            let child = child.as_mut().unwrap();
            // It has opened its files when it says something.
            child.stdout.take().unwrap().read_exact(&mut [0]).unwrap();
            let pins = pins_memory(child.id());
            child.kill().unwrap();
            child.wait().unwrap();
            pins
        };
        let folder = tempfile::tempdir().unwrap();
        let devices = folder.path().join("dev");
        fs::create_dir_all(devices.join("vfio")).unwrap();
        for (file, expect) in [
            ("kvm", false),
            ("vhost-net", false),
            ("vfio/vfio", true),
            ("vfio/12", true),
            ("iommu", true),
            ("vhost-vdpa-0", true),
        ] {
            assert_eq!(pins(&format!("exec 3>{file}"), &devices), expect, "{file}");
        }
        for (status, expect) in [
            ("VmLck:\t       0 kB\nVmPin:\t       0 kB\n", false),
            ("VmLck:\t       0 kB\nVmPin:\t       8 kB\n", true),
            ("VmLck:\t  786432 kB\nVmPin:\t       0 kB\n", true),
            ("VmLck:\t       0 kB\n", true),
        ] {
            assert_eq!(has_pinned(status), expect, "{status}");
        }
        assert!(pins_memory(0), "nothing is known of it");
    }

    #[test]
    fn accelerator_is_in_the_arguments() {
        let check = |words: &[&str], expect| {
            let words: Vec<_> = words.iter().map(|word| (*word).to_owned()).collect();
            assert_eq!(uses_kvm(&words), expect, "{words:?}");
        };
        check(&["qemu", "-accel", "kvm"], true);
        check(&["qemu", "-accel", "kvm,dirty-ring-size=4096"], true);
        check(&["qemu", "-machine", "pc-q35-7.2,accel=kvm,usb=off"], true);
        check(&["qemu", "-accel", "tcg", "-name", "kvm"], false);
    }

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
