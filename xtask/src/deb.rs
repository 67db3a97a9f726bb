//! Debian packages: a tree of files and the maintainer's scripts, packed by dpkg-deb; and the package of Hearth itself.

mod check;

use std::fs;
use std::io;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::setup::{self, SetupError};
use crate::shell::{self, ShellError};
use crate::{cargo, paths};
pub use check::check;

/// The version of everything in the checkout.
pub const VERSION: &str = env!("CARGO_PKG_VERSION");

#[derive(Debug, thiserror::Error)]
pub enum DebError {
    #[error(transparent)]
    Shell(#[from] ShellError),
    #[error(transparent)]
    Setup(#[from] SetupError),
    #[error("cannot write {path}")]
    File { path: PathBuf, source: io::Error },
}

/// A package that is being made.
pub struct Package {
    tree: PathBuf,
    name: &'static str,
    version: String,
}

impl Package {
    /// An empty one, but for its copyright and changelog. `tree`: an own folder, removed at the end.
    pub fn new(tree: PathBuf, name: &'static str, version: &str) -> Result<Self, DebError> {
        let package = Self { tree, name, version: version.to_owned() };
        package.file(&package.document("copyright"), include_bytes!("../../packaging/debian/copyright"), 0o644)?;
        let changelog = format!(
            "{name} ({version}) unstable; urgency=medium\n\n  * See the project's CHANGELOG.md.\n\n -- The Hearth developers \
             <developers@hearth.invalid>  Thu, 01 Jan 2026 00:00:00 +0000\n"
        );
        let path = package.document("changelog");
        package.file(&path, changelog.as_bytes(), 0o644)?;
        compress(&package.tree.join(path))?;
        Ok(package)
    }

    /// Path of a file of its documentation.
    fn document(&self, file: &str) -> String {
        format!("usr/share/doc/{}/{file}", self.name)
    }

    /// Adds a file of the installed system.
    pub fn file(&self, path: &str, contents: &[u8], mode: u32) -> Result<(), DebError> {
        let file = self.tree.join(path);
        let failed = |source| DebError::File { path: file.clone(), source };
        let folder = file.parent().expect("a file is in a folder");
        fs::create_dir_all(folder).map_err(failed)?;
        fs::write(&file, contents).map_err(failed)?;
        fs::set_permissions(&file, fs::Permissions::from_mode(mode)).map_err(failed)
    }

    /// Adds the control file, with this package's version.
    pub fn control(&self, text: &str) -> Result<(), DebError> {
        self.file("DEBIAN/control", text.replace("VERSION", &self.version).as_bytes(), 0o644)
    }

    /// Adds a maintainer's script.
    pub fn script(&self, name: &str, text: &str) -> Result<(), DebError> {
        self.file(&format!("DEBIAN/{name}"), text.as_bytes(), 0o755)
    }

    /// Packs it.
    pub fn build(self, package: &Path) -> Result<(), DebError> {
        // Folders have the modes that this user's umask has given them.
        let finish =
            "chmod -R u=rwX,go=rX . && find usr -type f | LC_ALL=C sort | xargs -d '\\n' md5sum >DEBIAN/md5sums";
        shell::output(Command::new("sh").args(["-ec", finish]).current_dir(&self.tree))?;
        let mut build = Command::new("dpkg-deb");
        shell::output(build.args(["--root-owner-group", "--build"]).arg(&self.tree).arg(package))?;
        fs::remove_dir_all(&self.tree).map_err(|source| DebError::File { path: self.tree, source })
    }
}

/// Builds the package of Hearth, as this version. Returns its path.
pub fn hearth(version: &str) -> Result<PathBuf, DebError> {
    setup::ensure(&[setup::tool("dpkg-shlibdeps", "dpkg-dev")])?;
    shell::run(cargo().args(["build", "--release", "-p", "hearth"]))?;
    let program = paths::cargo_target().join("release/hearth");
    let folder = paths::deb();
    let failed = |path: &Path| {
        let path = path.to_owned();
        move |source| DebError::File { path, source }
    };
    let tree = folder.join("tree");
    if tree.exists() {
        fs::remove_dir_all(&tree).map_err(failed(&tree))?;
    }
    fs::create_dir_all(&tree).map_err(failed(&tree))?;
    let package = Package::new(tree.clone(), "hearth", version)?;
    let stripped = folder.join("hearth");
    shell::output(Command::new("strip").arg("-o").arg(&stripped).arg(&program))?;
    let bytes = fs::read(&stripped).map_err(failed(&stripped))?;
    package.file("usr/bin/hearth", &bytes, 0o755)?;
    for (path, text, mode) in FILES {
        package.file(path, text.as_bytes(), mode)?;
    }
    for (shell_name, path) in COMPLETIONS {
        let script = shell::output(Command::new(&program).args(["completions", shell_name]))?;
        package.file(path, script.as_bytes(), 0o644)?;
    }
    let manual = tree.join("usr/share/man");
    fs::create_dir_all(&manual).map_err(failed(&manual))?;
    shell::output(Command::new(&program).arg("man").arg(&manual))?;
    compress(&manual)?;
    let mut copy = Command::new("cp");
    copy.current_dir(paths::root()).arg("-r").args(DOCUMENTS).arg(tree.join(package.document("")));
    shell::output(&mut copy)?;
    let control = include_str!("../../packaging/debian/control");
    package.control(&control.replace("LIBRARIES", &libraries(&folder, &stripped)?))?;
    package.file("DEBIAN/conffiles", include_bytes!("../../packaging/debian/conffiles"), 0o644)?;
    package.file("DEBIAN/triggers", include_bytes!("../../packaging/debian/triggers"), 0o644)?;
    for (name, text) in SCRIPTS {
        package.script(name, text)?;
    }
    let result = folder.join(format!("hearth_{version}_amd64.deb"));
    package.build(&result)?;
    Ok(result)
}

const FILES: [(&str, &str, u32); 9] = [
    ("usr/lib/systemd/system/hearth@.service", include_str!("../../packaging/hearth@.service"), 0o644),
    ("usr/lib/systemd/user/hearth@.service", include_str!("../../packaging/user/hearth@.service"), 0o644),
    (
        "usr/lib/systemd/system/hearth-host-reload.service",
        include_str!("../../packaging/hearth-host-reload.service"),
        0o644,
    ),
    ("usr/lib/systemd/system/hearth-host.service", include_str!("../../packaging/hearth-host.service"), 0o644),
    ("etc/libvirt/hooks/qemu.d/hearth", include_str!("../../packaging/libvirt-hook"), 0o755),
    ("etc/apparmor.d/abstractions/libvirt-qemu.d/hearth", include_str!("../../packaging/apparmor"), 0o644),
    ("usr/share/doc/hearth/examples/web.toml", include_str!("../../packaging/web.toml"), 0o644),
    (
        "usr/share/doc/hearth/examples/hearth-rules.yml",
        include_str!("../../packaging/prometheus/hearth-rules.yml"),
        0o644,
    ),
    ("usr/share/doc/hearth/examples/hearth.json", include_str!("../../packaging/grafana/hearth.json"), 0o644),
];

const COMPLETIONS: [(&str, &str); 3] = [
    ("bash", "usr/share/bash-completion/completions/hearth"),
    ("zsh", "usr/share/zsh/vendor-completions/_hearth"),
    ("fish", "usr/share/fish/vendor_completions.d/hearth.fish"),
];

/// They refer to each other by these paths.
const DOCUMENTS: [&str; 4] = ["README.md", "ARCHITECTURE.md", "CHANGELOG.md", "docs"];

const SCRIPTS: [(&str, &str); 3] = [
    ("postinst", include_str!("../../packaging/debian/postinst")),
    ("prerm", include_str!("../../packaging/debian/prerm")),
    ("postrm", include_str!("../../packaging/debian/postrm")),
];

/// The libraries that a program needs, as dependencies: a program that was built on a newer Debian needs a newer libc6.
fn libraries(folder: &Path, program: &Path) -> Result<String, DebError> {
    // dpkg-shlibdeps reads a source package's description, and nothing of it counts here.
    let control = folder.join("debian/control");
    let failed = |source| DebError::File { path: control.clone(), source };
    fs::create_dir_all(folder.join("debian")).map_err(failed)?;
    fs::write(&control, "Source: hearth\n\nPackage: hearth\nArchitecture: amd64\n").map_err(failed)?;
    let found = shell::output(Command::new("dpkg-shlibdeps").arg("-O").arg(program).current_dir(folder))?;
    Ok(found.trim().trim_start_matches("shlibs:Depends=").to_owned())
}

/// Compresses a file, or all files of a folder, without their times.
fn compress(path: &Path) -> Result<(), DebError> {
    let mut gzip = Command::new("gzip");
    shell::output(gzip.args(["-9", "--no-name", "--recursive"]).arg(path)).map(drop)?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn units_are_no_more_exposed_than_documented() {
        let folder = tempfile::tempdir().unwrap();
        let with_passt =
            concat!(include_str!("../../packaging/hearth@.service"), include_str!("../../packaging/passt.conf"));
        // Ten times what docs/operations.md says.
        for (unit, exposure, text) in [
            ("hearth@web.service", 39, include_str!("../../packaging/hearth@.service")),
            ("hearth@passt.service", 47, with_passt),
            ("hearth-host.service", 25, include_str!("../../packaging/hearth-host.service")),
        ] {
            let file = folder.path().join(unit);
            fs::write(&file, text).unwrap();
            let mut analyze = Command::new("systemd-analyze");
            let threshold = format!("--threshold={exposure}");
            let Ok(output) = analyze.args(["security", "--offline=true", "--no-pager", &threshold]).arg(&file).output()
            else {
                eprintln!("systemd-analyze is not installed: nothing was checked");
                return;
            };
            assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stdout));
        }
    }
}
