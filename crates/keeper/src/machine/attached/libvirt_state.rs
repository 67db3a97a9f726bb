//! What libvirt's own file says about a domain with a QEMU: what nobody has told the keeper.

use std::fs::File;
use std::io::Read;
use std::path::Path;
use std::time::{Duration, SystemTime};

use super::QEMU_FOLDER;

/// How its line of the state begins if the guest has crashed.
const CRASHED: &str = "<domstatus state='crashed'";
/// How that line ends before libvirt knows QEMU's pid.
const NO_PID: &str = " pid='0'>";
/// Bytes before which that line is. A comment comes first.
const HEAD_BYTES: u64 = 4 << 10;
/// How old the file is at least if libvirt's daemon has died before it wrote the pid. It takes milliseconds.
const LOST_AFTER: Duration = Duration::from_secs(5);

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
        let is_lost = self.line.ends_with(NO_PID) && self.age >= LOST_AFTER;
        is_lost.then(|| {
            format!(
                "libvirt's daemon died while it started QEMU, and its next one takes the domain for active; to mend that, with no harm \
                 to running domains: rm {}; systemctl restart libvirtd (or virtqemud)",
                path(self.domain)
            )
        })
    }
}

fn path(domain: &str) -> String {
    Path::new(QEMU_FOLDER).join(format!("{domain}.xml")).display().to_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_state_is_told_apart() {
        for (line, secs, crashed, lost) in [
            ("<domstatus state='crashed' reason='panicked' pid='120'>", 60, true, false),
            ("<domstatus state='running' reason='booted' pid='120'>", 60, false, false),
            ("<domstatus state='paused' reason='starting up' pid='0'>", 4, false, false),
            ("<domstatus state='paused' reason='starting up' pid='0'>", 5, false, true),
            ("<domstatus state='paused' reason='starting up' pid='10'>", 60, false, false),
        ] {
            let state = LibvirtState { domain: "web", line: line.to_owned(), age: Duration::from_secs(secs) };
            assert_eq!((state.crashed().is_some(), state.lost_start().is_some()), (crashed, lost), "{line}");
        }
    }
}
