//! The Debian guests: systemd, nginx, 512 files, ext4; kernel and initrd for direct boot beside it. Two that only benches use have
//! a database, too.
//!
//! mmdebstrap makes the tree, hooks from `guest/debian/` configure it and make the image while they still see it with
//! its right owners. So this needs no root: for an ordinary user mmdebstrap works in a user namespace, whose ids do not
//! exist outside; for the same reason results pass through a folder in /tmp that anyone may write.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use super::{GuestError, probe, refill};
use crate::apt::{Apt, GUEST_RELEASE};
use crate::cache::{self, at};
use crate::{paths, shell};

const AGENT: &str = include_str!("../../../guest/agent/agent");
const PACKAGES: &str = include_str!("../../../guest/debian/packages");
const BEFORE: &str = include_str!("../../../guest/debian/before");
const AFTER: &str = include_str!("../../../guest/debian/after");
const DATABASE_PACKAGES: &str = include_str!("../../../guest/debian/database.packages");
const DATABASE: &str = include_str!("../../../guest/debian/database");

/// What a guest has.
struct Contents {
    folder: &'static str,
    /// Size of each of the web server's files.
    file_mib: u32,
    table: Option<Table>,
    image_gib: u32,
}

/// PostgreSQL's table; a million rows with their index are about 190 MiB.
struct Table {
    rows: u32,
    shared_buffers_mib: u32,
}

const WEB: Contents = Contents { folder: "debian", file_mib: 1, table: None, image_gib: 2 };
const DATABASE_TOO: Contents =
    Contents { folder: "debian-database", table: Some(Table { rows: 1_600_000, shared_buffers_mib: 400 }), ..WEB };
const LARGE: Contents = Contents {
    folder: "debian-large",
    file_mib: 4,
    // PostgreSQL's default: nearly all of the table is in the kernel's cache, not in its own.
    table: Some(Table { rows: 5_500_000, shared_buffers_mib: 128 }),
    image_gib: 5,
};

/// Makes `debian/` with `root.img`, `vmlinuz` and `initrd`: a web server with 512 files of 1 MiB.
pub fn ensure() -> Result<(), GuestError> {
    make(&WEB)
}

/// The same with PostgreSQL and a table of 300 MiB: `debian-database/`.
pub fn ensure_database() -> Result<(), GuestError> {
    make(&DATABASE_TOO)
}

/// The same with 512 files of 4 MiB and a table of 1 GiB: `debian-large/`.
pub fn ensure_large() -> Result<(), GuestError> {
    make(&LARGE)
}

fn make(contents: &Contents) -> Result<(), GuestError> {
    let inputs = [AGENT, PACKAGES, BEFORE, AFTER, probe::SOURCE, include_str!("debian.rs")];
    let of_database = if contents.table.is_some() { &[DATABASE_PACKAGES, DATABASE][..] } else { &[] };
    let inputs = [&inputs[..], of_database, &refill::SOURCES].concat();
    cache::ensure(&paths::guest().join(contents.folder), &inputs, |new| {
        let desk = Desk::set_up()?;
        let made = mmdebstrap(&desk.folder, contents).and_then(|()| collect(&desk.folder, new));
        desk.clear(made)
    })
}

/// The folder through which hooks get their programs and hand back their results.
struct Desk {
    folder: PathBuf,
}

impl Desk {
    fn set_up() -> Result<Self, GuestError> {
        let folder = std::env::temp_dir().join(format!("hearth-debian-{}", std::process::id()));
        at("create", &folder, fs::create_dir(&folder))?;
        at("open up", &folder, fs::set_permissions(&folder, fs::Permissions::from_mode(0o777)))?;
        let probe = probe::ensure()?;
        at("copy", &probe, fs::copy(&probe, folder.join("probe")))?;
        let package = refill::ensure()?.join(refill::PACKAGE);
        at("copy", &package, fs::copy(&package, folder.join(refill::PACKAGE)))?;
        for (name, text) in [("agent", AGENT), ("before", BEFORE), ("database", DATABASE), ("after", AFTER)] {
            let file = folder.join(name);
            at("write", &file, fs::write(&file, text))?;
            at("make executable", &file, fs::set_permissions(&file, fs::Permissions::from_mode(0o755)))?;
        }
        Ok(Self { folder })
    }

    fn clear(self, made: Result<(), GuestError>) -> Result<(), GuestError> {
        let cleared = at("remove", &self.folder, fs::remove_dir_all(&self.folder));
        made.and(cleared.map_err(GuestError::from))
    }
}

fn mmdebstrap(desk: &Path, contents: &Contents) -> Result<(), GuestError> {
    let apt = Apt::open(&paths::guest().join("apt"))?;
    let desk = desk.display();
    let lists = [PACKAGES, if contents.table.is_some() { DATABASE_PACKAGES } else { "" }];
    let lines = lists.into_iter().flat_map(str::lines).map(str::trim);
    let packages: Vec<_> = lines.filter(|line| !line.is_empty() && !line.starts_with('#')).collect();
    let mut command = Command::new("mmdebstrap");
    command.args(["--quiet", "--mode=auto", "--variant=minbase", "--format=null"]);
    command.arg(format!("--include={}", packages.join(",")));
    for option in [
        "force-unsafe-io",
        "path-exclude=/usr/share/man/*",
        "path-exclude=/usr/share/doc/*",
        "path-exclude=/usr/share/locale/*",
    ] {
        command.arg(format!("--dpkgopt={option}"));
    }
    command.arg(format!("--setup-hook={desk}/before \"$1\""));
    if let Some(Table { rows, shared_buffers_mib }) = contents.table {
        command.arg(format!("--customize-hook={desk}/database \"$1\" {rows} {shared_buffers_mib}"));
    }
    let Contents { file_mib, image_gib, .. } = contents;
    command.arg(format!("--customize-hook={desk}/after \"$1\" {desk} {file_mib} {image_gib}"));
    command.args([GUEST_RELEASE, "/dev/null"]).arg(apt.sources());
    // Locales of the host do not exist in the guest; perl says so a hundred times.
    command.env("LC_ALL", "C");
    Ok(shell::output(&mut command).map(drop)?)
}

/// Copies with cp: the image is sparse, and copying 2 GiB where 1 is data would take twice as long.
fn collect(desk: &Path, new: &Path) -> Result<(), GuestError> {
    for name in ["root.img", "vmlinuz", "initrd"] {
        let file = desk.join(name);
        shell::output(Command::new("cp").arg("--sparse=always").arg(file).arg(new))?;
    }
    Ok(())
}
