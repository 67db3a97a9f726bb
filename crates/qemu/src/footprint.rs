//! Resources of a QEMU, from `/proc`: its own memory without the guest's RAM, its descriptors, and whether its program
//! file still exists.
//!
//! Its own memory is the anonymous resident memory: guest RAM is a mapped file and never part of it. Adding up `smaps`
//! would be more exact, but would delay a QEMU that maps many GiB.

use std::fs;
use std::io;
use std::path::Path;
use std::time::{Duration, Instant};

use crate::Process;

/// Resources that a QEMU uses at one moment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Footprint {
    /// Anonymous resident memory in bytes.
    pub own_bytes: u64,
    /// Number of open descriptors.
    pub descriptors: u64,
}

impl Process {
    /// Reads the footprint. Fails if the process has ended.
    pub fn footprint(&self) -> io::Result<Footprint> {
        let folder = self.proc_folder();
        let own_bytes = own_bytes(&fs::read_to_string(folder.join("status"))?);
        let descriptors = fs::read_dir(folder.join("fd"))?.count() as u64;
        // The pid belongs to this process as long as it has not ended.
        if self.has_ended() {
            return Err(io::ErrorKind::NotFound.into());
        }
        let own_bytes = own_bytes.ok_or(io::ErrorKind::InvalidData)?;
        Ok(Footprint { own_bytes, descriptors })
    }

    /// When the process started. None if the host's clocks do not tell.
    pub fn began(&self) -> Option<Instant> {
        began(self.id().start_ticks)
    }

    /// Whether the program file was removed or replaced, for example by an update. The version may still be the same.
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

/// When a process started, from its start in clock ticks since the host's boot.
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
    fn start_at_boot_means_uptime_as_age() {
        let text = fs::read_to_string("/proc/uptime").unwrap();
        let uptime = Duration::from_secs_f64(text.split(' ').next().unwrap().parse().unwrap());
        assert!(began(0).unwrap().elapsed() >= uptime);
        assert_eq!(began(u64::MAX), None);
    }

    #[test]
    fn file_memory_is_not_own_memory() {
        let status = "VmRSS:\t  700000 kB\nRssAnon:\t   81920 kB\nRssFile:\t   20480 kB\nRssShmem:\t  524288 kB\n";
        assert_eq!(own_bytes(status), Some(80 << 20));
        assert_eq!(own_bytes("VmRSS:\t1 kB\n"), None);
        assert_eq!(own_bytes("RssAnon:\tmuch\n"), None);
    }

    #[test]
    fn footprint_ends_with_the_process() {
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
