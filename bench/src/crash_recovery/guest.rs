//! The guest of every side. Its memory is in use like a busy server's: half file cache, half anonymous.

use std::net::SocketAddr;
use std::time::Duration;

use hearth_vmtest::images::File;
use hearth_vmtest::{Drives, Result};

use super::Shape;
use crate::load::Targets;

/// Filling 3 GiB under emulation takes a minute on a busy host.
const PATIENCE: Duration = Duration::from_secs(600);

/// The file on the second disk, which no compression makes smaller.
pub fn data_file(shape: Shape) -> File {
    File::pattern("data.bin", (shape.data_mib << 20) as usize, 7)
}

/// Fills the file cache, and anonymous memory for as long as the guest lives.
pub fn fill(guest: &impl Drives, shape: Shape) -> Result<()> {
    let files = format!(
        "mkdir -p /run/data && (mountpoint -q /run/data || mount -o ro /dev/vdb /run/data) && \
         probe read-all $(ls /var/www/html/files/*.bin | head -n {}) /run/data/data.bin",
        shape.web_files
    );
    must(guest, &files)?;
    let hog = format!(
        "pkill probe; probe hog {} >/run/hog 2>&1 & until grep -q hogging= /run/hog; do sleep 0.1; done",
        shape.anonymous_mib
    );
    must(guest, &hog)
}

/// Makes the next boot copy a large file before it serves, so that it needs the disk more than memory.
pub fn make_boot_copy(guest: &impl Drives, shape: Shape) -> Result<()> {
    let unit = format!(
        "[Unit]\\nBefore=nginx.service\\n[Service]\\nType=oneshot\\n\
         ExecStart=/bin/dd if=/dev/vdb of=/var/tmp/copy bs=1M count={} conv=fsync\\n\
         [Install]\\nWantedBy=multi-user.target\\n",
        shape.copied_mib
    );
    must(
        guest,
        &format!(
            "printf '{unit}' >/etc/systemd/system/copy.service && systemctl enable copy.service && \
             mkdir -p /etc/systemd/system/nginx.service.d && \
             printf '[Unit]\\nAfter=copy.service\\n' >/etc/systemd/system/nginx.service.d/copy.conf && sync"
        ),
    )
}

fn must(guest: &impl Drives, command: &str) -> Result<()> {
    let output = guest.run_within(command, PATIENCE)?;
    if output.status == 0 {
        return Ok(());
    }
    Err(hearth_vmtest::Error::GuestCommand { command: command.into(), status: output.status, output: output.text() })
}

/// The service's probe.
pub fn targets(address: SocketAddr) -> Targets {
    Targets { address, probe: "/".into(), files: Vec::new(), database: None }
}
