//! The guest of the machines: a web server with files.

use std::path::{Path, PathBuf};

use hearth_vmtest::images::{self, File};
use hearth_vmtest::{Disk, PlainVm, PlainVmBuilder, Result, TestVm, TestVmBuilder, artifacts, pattern};

/// Files of the web server.
pub const FILES: usize = 512;
/// Seed of the files' contents.
const SEED: u64 = 1;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Guest {
    /// A Debian with nginx and files of 1 MiB on its root disk, as in production.
    Debian,
    /// A guest that boots in seconds, for quick runs, with small files on a disk; it serves them on request.
    Busybox,
}

impl Guest {
    /// RAM that can cache all files.
    pub fn memory_mib(self) -> u64 {
        match self {
            Guest::Debian => 1024,
            Guest::Busybox => 256,
        }
    }

    pub fn file_bytes(self) -> usize {
        match self {
            Guest::Debian => 1 << 20,
            Guest::Busybox => 64 << 10,
        }
    }

    /// The files' paths in the guest.
    pub fn files(self) -> &'static str {
        match self {
            Guest::Debian => "/var/www/html/files/*.bin",
            Guest::Busybox => "/d/files/*.bin",
        }
    }

    /// The contents of a file.
    pub fn contents(self, number: usize) -> Vec<u8> {
        pattern::bytes(&format!("{number:03}.bin"), self.file_bytes(), SEED)
    }

    /// Command that starts the service after a boot; `None` if it starts by itself.
    pub fn serve(self) -> Option<&'static str> {
        match self {
            Guest::Debian => None,
            Guest::Busybox => Some(
                "mkdir -p /d && (mount /dev/vda /d || mount -o dax /dev/pmem0 /d) && net-up && httpd -h /d -p 80 && { hearth-refill >/tmp/refill & }",
            ),
        }
    }

    /// Command that prints what `hearth-refill` has said since the boot, if it is done.
    pub fn refill_report(self) -> &'static str {
        match self {
            Guest::Debian => "journalctl -b -o cat -u hearth-refill",
            Guest::Busybox => "cat /tmp/refill",
        }
    }

    /// The image of the disk with the files, to be copied. It is made in `folder`, unless it is there, so that all copies have
    /// the same inodes.
    pub(super) fn image(self, folder: &Path) -> Result<PathBuf> {
        match self {
            Guest::Debian => artifacts::debian_root(),
            Guest::Busybox => {
                let image = folder.join("small.img");
                if image.exists() {
                    return Ok(image);
                }
                let page = File { path: "index.html".to_owned(), contents: b"here\n".to_vec() };
                let file = |number| File { path: format!("files/{number:03}.bin"), contents: self.contents(number) };
                let files: Vec<_> = (0..FILES).map(file).chain([page]).collect();
                images::ext4_for_good(&image, (2 * FILES * self.file_bytes()) as u64 >> 20, &files)?;
                Ok(image)
            }
        }
    }

    pub(super) fn machine(self, disk: Disk) -> TestVmBuilder {
        let builder = match self {
            Guest::Debian => TestVm::debian("bench").root(disk),
            Guest::Busybox => TestVm::busybox("bench").disk(disk),
        };
        builder.memory_mib(self.memory_mib())
    }

    pub(super) fn plain(self) -> PlainVmBuilder {
        let builder = match self {
            Guest::Debian => PlainVm::debian("bench"),
            Guest::Busybox => PlainVm::busybox("bench"),
        };
        builder.memory_mib(self.memory_mib())
    }
}
