//! The packages in practice: installed, upgraded and removed in clean Debians, by `packaging/debian/check`.

use std::error::Error;
use std::fs;
use std::path::PathBuf;
use std::process::Command;

use super::{VERSION, hearth};
use crate::apt::Apt;
use crate::{guest, paths, setup, shell};

/// Releases that the packages are for.
const RELEASES: [&str; 2] = ["bookworm", "trixie"];
/// A host of libvirt, and what checks packages.
const INSTALLED: &str = "apparmor,libvirt-clients,libvirt-daemon-system,lintian,qemu-system-x86,systemd";

/// Builds the packages, and checks them on each release. Only root can: a libvirt of its own runs there.
pub fn check() -> Result<(), Box<dyn Error>> {
    setup::ensure_tools()?;
    let folder = paths::deb().join("check");
    fs::create_dir_all(&folder)?;
    let next = folder.join("hearth-next.deb");
    fs::rename(hearth(&format!("{VERSION}+next"))?, &next)?;
    let packages = [hearth(VERSION)?, next, guest::refill()?.join(guest::REFILL_PACKAGE)];
    for release in RELEASES {
        println!("--- {release}");
        let apt = Apt::open_release(&folder.join(release), release)?;
        let mut command = Command::new("mmdebstrap");
        command.args(["--quiet", "--mode=root", "--variant=minbase", "--format=null"]);
        command.arg(format!("--include={INSTALLED}"));
        command.args(hooks(&packages)).args([release, "/dev/null"]).arg(apt.sources());
        shell::run(command.env("LC_ALL", "C"))?;
    }
    Ok(())
}

/// What mmdebstrap does with the new Debian in `$1`.
fn hooks(packages: &[PathBuf; 3]) -> [String; 2] {
    let script = paths::root().join("packaging/debian/check");
    let [hearth, next, guests] = packages.each_ref().map(|path| path.display());
    let copy = format!("mkdir \"$1/hearth\" && cp '{hearth}' '{next}' '{guests}' '{}' \"$1/hearth\"", script.display());
    // Root and /dev must be mounts: libvirt gives QEMU its own ones. All processes end with the first one.
    let unshare = "unshare --mount --pid --fork --kill-child --propagation private";
    let enter = "mount --bind \"$1\" \"$1\" && cd \"$1\" && mount --rbind /dev dev && mount --rbind /sys sys && exec chroot . \
                 /hearth/check";
    [copy, format!("{unshare} sh -c '{enter}' inside \"$1\"")].map(|hook| format!("--customize-hook={hook}"))
}
