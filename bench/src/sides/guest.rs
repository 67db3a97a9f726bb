//! The guest of the machines: a web server with files.

use std::path::{Path, PathBuf};

use hearth_vmtest::artifacts::{self, Boot, Debian};
use hearth_vmtest::images::{self, File};
use hearth_vmtest::{Disk, PlainVm, PlainVmBuilder, Result, TestVm, TestVmBuilder, pattern};

/// Files of the web server.
pub const FILES: usize = 512;
/// Seed of the files' contents.
const SEED: u64 = 1;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Guest {
    /// A Debian with nginx and files of 1 MiB on its root disk, as in production.
    Debian,
    /// The same with files of 4 MiB, and PostgreSQL with a table of 1 GiB.
    Large,
    /// A guest that boots in seconds, for quick runs, with small files on a disk; it serves them on request.
    Busybox,
}

impl Guest {
    /// RAM that can cache all files.
    pub fn memory_mib(self) -> u64 {
        match self {
            Guest::Debian => Debian::Web.memory_mib(),
            Guest::Large => Debian::Large.memory_mib(),
            Guest::Busybox => 256,
        }
    }

    /// A server has several processors, and its boot uses hardly more than one of them.
    pub(super) fn cpus(self) -> u32 {
        if self == Guest::Busybox { 1 } else { 2 }
    }

    pub fn file_bytes(self) -> usize {
        match self {
            Guest::Debian => 1 << 20,
            Guest::Large => 4 << 20,
            Guest::Busybox => 64 << 10,
        }
    }

    /// Paths in the guest of the files that its services read.
    pub fn files(self) -> &'static str {
        match self {
            Guest::Debian => "/var/www/html/files/*.bin",
            Guest::Large => "/var/www/html/files/*.bin /var/lib/postgresql/*/main/base/*/[0-9]*",
            Guest::Busybox => "/d/files/*.bin",
        }
    }

    /// The path, for a shell, of a file of 1 GiB, part of the database's table; `None` without a database.
    pub fn large_file(self) -> Option<&'static str> {
        self.rows().map(|_| "$(ls -S /var/lib/postgresql/*/main/base/*/[0-9]* | head -n 1)")
    }

    /// Rows of the database's table, which `xtask/src/guest/debian.rs` has made; `None` without a database.
    pub fn rows(self) -> Option<usize> {
        (self == Guest::Large).then_some(5_500_000)
    }

    /// The contents of a file of the web server.
    pub fn contents(self, number: usize) -> Vec<u8> {
        pattern::bytes(&format!("{number:03}.bin"), self.file_bytes(), SEED)
    }

    /// Command that starts the service after a boot; `None` if it starts by itself.
    pub fn serve(self) -> Option<&'static str> {
        match self {
            Guest::Debian | Guest::Large => None,
            Guest::Busybox => Some(
                "mkdir -p /d && (mount /dev/vda /d || mount -o dax /dev/pmem0 /d) && net-up && httpd -h /d -p 80 && { hearth-refill >/tmp/refill & }",
            ),
        }
    }

    /// Command that waits until `hearth-refill` is done, and prints what it has said since the boot.
    pub fn refill_report(self) -> &'static str {
        match self {
            Guest::Debian | Guest::Large => {
                "while systemctl -q is-active hearth-refill; do sleep 1; done; journalctl -b -o cat -u hearth-refill"
            }
            Guest::Busybox => "while pidof hearth-refill >/dev/null; do sleep 1; done; cat /tmp/refill",
        }
    }

    /// The image of the disk with the files, to be copied. It is made in `folder`, unless it is there, so that all copies have
    /// the same inodes.
    pub(super) fn image(self, folder: &Path) -> Result<PathBuf> {
        match self {
            Guest::Debian => Debian::Web.root(),
            Guest::Large => Debian::Large.root(),
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

    /// Kernel, initial RAM disk and command line.
    pub(super) fn boot(self) -> Result<Boot> {
        match self {
            Guest::Debian => Debian::Web.boot(),
            Guest::Large => Debian::Large.boot(),
            Guest::Busybox => artifacts::busybox(false),
        }
    }

    pub(super) fn machine(self, disk: Disk) -> TestVmBuilder {
        let builder = match self {
            Guest::Debian => TestVm::debian("bench").root(disk),
            Guest::Large => TestVm::debian_with("bench", Debian::Large).root(disk),
            Guest::Busybox => TestVm::busybox("bench").disk(disk),
        };
        builder.memory_mib(self.memory_mib()).cpus(i64::from(self.cpus()))
    }

    pub(super) fn plain(self) -> PlainVmBuilder {
        let builder = match self {
            Guest::Debian => PlainVm::debian("bench", Debian::Web),
            Guest::Large => PlainVm::debian("bench", Debian::Large),
            Guest::Busybox => PlainVm::busybox("bench"),
        };
        builder.memory_mib(self.memory_mib()).cpus(self.cpus())
    }
}
