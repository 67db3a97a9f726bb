//! What libvirt's own file says about a domain with a QEMU: what nobody has told the keeper.

use std::fs::{self, File};
use std::io::Read;
use std::path::Path;
use std::time::{Duration, SystemTime};

use hearth_disk::server::Peer;

use super::QEMU_FOLDER;
use super::orders::ticks_now;

/// How its line of the state begins if the guest has crashed.
const CRASHED: &str = "<domstatus state='crashed'";
/// How that line ends before libvirt knows QEMU's pid.
const NO_PID: &str = " pid='0'>";
/// Bytes before which that line is. A comment comes first.
const HEAD_BYTES: u64 = 4 << 10;
/// Names of the daemon's process.
const DAEMONS: [&str; 2] = ["libvirtd", "virtqemud"];

/// The file about one domain.
pub struct LibvirtState<'a> {
    domain: &'a str,
    line: String,
    age: Duration,
}

impl<'a> LibvirtState<'a> {
    /// None: libvirt has no QEMU for the domain.
    pub fn of(domain: &'a str) -> Option<Self> {
        let file = File::open(path(domain)).ok()?;
        let written = file.metadata().and_then(|it| it.modified()).ok()?;
        let age = SystemTime::now().duration_since(written).unwrap_or_default();
        let mut head = String::new();
        file.take(HEAD_BYTES).read_to_string(&mut head).ok()?;
        let line = head.lines().find(|line| line.starts_with("<domstatus "))?.to_owned();
        Some(Self { domain, line, age })
    }

    /// Why the domain stands still if its guest has crashed and nobody has reported it.
    pub fn crashed(&self) -> Option<String> {
        self.line.starts_with(CRASHED).then(|| {
            format!(
                "its guest has crashed, and libvirt keeps it; `hearth host` would have it dumped, and start the next one: \
                 systemctl start hearth-host; or end it without a dump: virsh destroy {}",
                self.domain
            )
        })
    }

    /// Why the domain cannot start if libvirt's daemon has died while it started QEMU. libvirt 9.0 counts a domain without a pid as
    /// active for ever, and looks for its QEMU never again (`qemuProcessReconnectHelper` in qemu_process.c).
    pub fn lost_start(&self) -> Option<String> {
        self.is_lost(daemon_ages()).then(|| {
            format!(
                "libvirt's daemon died while it started QEMU, and its next one takes the domain for active; to mend that, with no harm \
                 to running domains: rm {}; systemctl restart libvirtd (or virtqemud)",
                path(self.domain)
            )
        })
    }

    /// The daemon that wrote the file may take as long as it likes to start QEMU.
    fn is_lost(&self, mut daemon_ages: impl Iterator<Item = Duration>) -> bool {
        self.line.ends_with(NO_PID) && !daemon_ages.any(|daemon| daemon >= self.age)
    }
}

/// For how long each daemon of libvirt has run.
fn daemon_ages() -> impl Iterator<Item = Duration> {
    let processes = fs::read_dir("/proc").into_iter().flatten().flatten();
    let pids = processes.filter_map(|process| process.file_name().to_str()?.parse().ok());
    pids.filter(|pid| is_daemon(*pid)).filter_map(age_of)
}

fn is_daemon(pid: u32) -> bool {
    fs::read_to_string(format!("/proc/{pid}/comm")).is_ok_and(|name| DAEMONS.contains(&name.trim_end()))
}

fn age_of(pid: u32) -> Option<Duration> {
    let ticks = ticks_now().saturating_sub(Peer::of(pid).ok()?.start_ticks);
    Some(Duration::from_secs(ticks) / u32::try_from(rustix::param::clock_ticks_per_second()).ok()?)
}

fn path(domain: &str) -> String {
    Path::new(QEMU_FOLDER).join(format!("{domain}.xml")).display().to_string()
}

#[cfg(test)]
mod tests {
    use std::process::Command;
    use std::time::Instant;

    use super::*;

    #[test]
    fn each_state_is_told_apart() {
        let age = Duration::from_secs(60);
        let older = &[Duration::from_secs(10), Duration::from_secs(61)];
        let newer = &older[..1];
        for (line, daemons, crashed, lost) in [
            ("<domstatus state='crashed' reason='panicked' pid='120'>", newer, true, false),
            ("<domstatus state='running' reason='booted' pid='120'>", newer, false, false),
            ("<domstatus state='paused' reason='starting up' pid='0'>", older, false, false),
            ("<domstatus state='paused' reason='starting up' pid='0'>", newer, false, true),
            ("<domstatus state='paused' reason='starting up' pid='0'>", &[], false, true),
            ("<domstatus state='paused' reason='starting up' pid='10'>", newer, false, false),
        ] {
            let state = LibvirtState { domain: "web", line: line.to_owned(), age };
            let is_lost = state.is_lost(daemons.iter().copied());
            assert_eq!((state.crashed().is_some(), is_lost), (crashed, lost), "{line} {daemons:?}");
        }
    }

    #[test]
    fn daemon_is_as_old_as_its_process() {
        let folder = tempfile::tempdir().unwrap();
        let daemon = folder.path().join(DAEMONS[0]);
        fs::copy("/bin/sleep", &daemon).unwrap();
        let began = Instant::now();
        let mut child = Command::new(&daemon).arg("1000").spawn().unwrap();
        // A new process has its name a moment after its start.
        while !is_daemon(child.id()) {}
        let age = age_of(child.id());
        let is_found = daemon_ages().any(|daemon| Some(daemon) >= age);
        // Ticks are hundredths of a second.
        let longest = began.elapsed() + Duration::from_millis(20);
        child.kill().unwrap();
        child.wait().unwrap();
        assert!(is_found && age.unwrap() <= longest, "{age:?}, {longest:?}");
    }
}
