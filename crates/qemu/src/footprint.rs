//! What a QEMU holds for itself, from `/proc`: memory beside its guest's RAM, descriptors, and whether the file it was
//! started from is still there.
//!
//! Its own memory is the anonymous part of what is resident: guest RAM is a mapped file and never in it. Summing up
//! `smaps` would say the same more exactly, and hold up a QEMU that has many GiB mapped.

use std::fs;
use std::io;
use std::path::Path;
use std::time::{Duration, Instant};

use crate::Process;

/// What a QEMU holds for itself at one moment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Footprint {
    pub own_bytes: u64,
    pub descriptors: u64,
}

impl Process {
    pub fn footprint(&self) -> io::Result<Footprint> {
        let folder = self.proc_folder();
        let own_bytes = own_bytes(&fs::read_to_string(folder.join("status"))?);
        let descriptors = fs::read_dir(folder.join("fd"))?.count() as u64;
        // The number is this process's as long as that has not ended.
        if self.has_ended() {
            return Err(io::ErrorKind::NotFound.into());
        }
        let own_bytes = own_bytes.ok_or(io::ErrorKind::InvalidData)?;
        Ok(Footprint { own_bytes, descriptors })
    }

    /// When it began. None where the host's clocks cannot tell.
    pub fn began(&self) -> Option<Instant> {
        began(self.id().start_ticks)
    }

    /// The file that it runs from was removed or replaced: by an update, say. The version may be the same all the same.
    pub fn program_is_gone(&self) -> bool {
        let program = fs::read_link(self.proc_folder().join("exe"));
        program.is_ok_and(|path| path.as_os_str().as_encoded_bytes().ends_with(b" (deleted)"))
    }

    fn proc_folder(&self) -> std::path::PathBuf {
        Path::new("/proc").join(self.id().pid.to_string())
    }
}

fn own_bytes(status: &str) -> Option<u64> {
    let value = status.lines().find_map(|line| line.strip_prefix("RssAnon:"))?;
    let kib: u64 = value.trim().strip_suffix(" kB")?.parse().ok()?;
    Some(kib << 10)
}

/// When a process began, from its start in ticks since the host's boot.
fn began(start_ticks: u64) -> Option<Instant> {
    let uptime: f64 = fs::read_to_string("/proc/uptime").ok()?.split(' ').next()?.parse().ok()?;
    let start = start_ticks as f64 / rustix::param::clock_ticks_per_second() as f64;
    Instant::now().checked_sub(Duration::try_from_secs_f64(uptime - start).ok()?)
}

#[cfg(test)]
mod tests {
    use std::process::{Command, Stdio};

    use super::*;
    use crate::ProcessId;
    use crate::process::start_ticks;

    #[test]
    fn a_process_started_at_boot_is_as_old_as_the_host() {
        let text = fs::read_to_string("/proc/uptime").unwrap();
        let uptime = Duration::from_secs_f64(text.split(' ').next().unwrap().parse().unwrap());
        assert!(began(0).unwrap().elapsed() >= uptime);
        assert_eq!(began(u64::MAX), None);
    }

    #[test]
    fn memory_of_a_file_is_not_its_own() {
        let status = "VmRSS:\t  700000 kB\nRssAnon:\t   81920 kB\nRssFile:\t   20480 kB\nRssShmem:\t  524288 kB\n";
        assert_eq!(own_bytes(status), Some(80 << 20));
        assert_eq!(own_bytes("VmRSS:\t1 kB\n"), None);
        assert_eq!(own_bytes("RssAnon:\tmuch\n"), None);
    }

    #[test]
    fn a_process_is_seen_with_what_it_holds_and_not_after_its_end() {
        let folder = tempfile::tempdir().unwrap();
        let program = folder.path().join("program");
        assert!(Command::new("cp").arg("/bin/sleep").arg(&program).status().unwrap().success());
        let mut child = Command::new(&program).arg("1000").stdin(Stdio::null()).spawn().unwrap();
        let id = ProcessId { pid: child.id(), start_ticks: start_ticks(child.id()).unwrap() };
        let process = Process::adopt(id, Path::new("/dev/null")).unwrap();
        let footprint = process.footprint().unwrap();
        assert!(footprint.own_bytes > 0 && footprint.descriptors >= 3, "{footprint:?}");
        assert!(process.began().unwrap() <= Instant::now());
        assert!(!process.program_is_gone());
        fs::remove_file(&program).unwrap();
        assert!(process.program_is_gone());
        child.kill().unwrap();
        child.wait().unwrap();
        assert!(process.footprint().is_err());
    }
}
