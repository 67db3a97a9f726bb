//! Debian packages: a tree of files and the maintainer's scripts, packed by dpkg-deb; and the package of Hearth itself.

use std::fs;
use std::io;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::shell::{self, ShellError};
use crate::{cargo, paths};

#[derive(Debug, thiserror::Error)]
pub enum DebError {
    #[error(transparent)]
    Shell(#[from] ShellError),
    #[error("cannot write {path}")]
    File { path: PathBuf, source: io::Error },
}

/// A package that is being made.
pub struct Package {
    tree: PathBuf,
}

impl Package {
    /// An empty one. `tree`: an own folder, removed at the end.
    pub fn new(tree: PathBuf) -> Self {
        Self { tree }
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
        self.file("DEBIAN/control", text.replace("VERSION", env!("CARGO_PKG_VERSION")).as_bytes(), 0o644)
    }

    /// Adds a maintainer's script.
    pub fn script(&self, name: &str, text: &str) -> Result<(), DebError> {
        self.file(&format!("DEBIAN/{name}"), text.as_bytes(), 0o755)
    }

    /// Packs it.
    pub fn build(self, package: &Path) -> Result<(), DebError> {
        let mut build = Command::new("dpkg-deb");
        shell::output(build.args(["--root-owner-group", "--build"]).arg(&self.tree).arg(package))?;
        fs::remove_dir_all(&self.tree).map_err(|source| DebError::File { path: self.tree, source })
    }
}

/// Builds the package of Hearth. Returns its path.
pub fn hearth() -> Result<PathBuf, DebError> {
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
    let package = Package::new(tree.clone());
    let stripped = folder.join("hearth");
    fs::create_dir_all(&folder).map_err(failed(&folder))?;
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
    let manual = tree.join("usr/share/man/man1");
    fs::create_dir_all(&manual).map_err(failed(&manual))?;
    shell::output(Command::new(&program).arg("man").arg(&manual))?;
    compress(&manual)?;
    let documents = tree.join("usr/share/doc/hearth");
    package.file("usr/share/doc/hearth/changelog", changelog().as_bytes(), 0o644)?;
    compress(&documents.join("changelog"))?;
    package.control(include_str!("../../packaging/debian/control"))?;
    package.file("DEBIAN/conffiles", include_bytes!("../../packaging/debian/conffiles"), 0o644)?;
    for (name, text) in SCRIPTS {
        package.script(name, text)?;
    }
    let result = folder.join(format!("hearth_{}_amd64.deb", env!("CARGO_PKG_VERSION")));
    package.build(&result)?;
    Ok(result)
}

const FILES: [(&str, &str, u32); 6] = [
    ("lib/systemd/system/hearth@.service", include_str!("../../packaging/hearth@.service"), 0o644),
    (
        "lib/systemd/system/hearth-host-reload.service",
        include_str!("../../packaging/hearth-host-reload.service"),
        0o644,
    ),
    ("lib/systemd/system/hearth-host.service", include_str!("../../packaging/hearth-host.service"), 0o644),
    ("etc/libvirt/hooks/qemu.d/hearth", include_str!("../../packaging/libvirt-hook"), 0o755),
    ("etc/apparmor.d/abstractions/libvirt-qemu.d/hearth", include_str!("../../packaging/apparmor"), 0o644),
    ("usr/share/doc/hearth/copyright", include_str!("../../packaging/debian/copyright"), 0o644),
];

const COMPLETIONS: [(&str, &str); 3] = [
    ("bash", "usr/share/bash-completion/completions/hearth"),
    ("zsh", "usr/share/zsh/vendor-completions/_hearth"),
    ("fish", "usr/share/fish/vendor_completions.d/hearth.fish"),
];

const SCRIPTS: [(&str, &str); 3] = [
    ("postinst", include_str!("../../packaging/debian/postinst")),
    ("prerm", include_str!("../../packaging/debian/prerm")),
    ("postrm", include_str!("../../packaging/debian/postrm")),
];

/// Compresses a file, or all files of a folder, without their times: two builds of one state are the same.
fn compress(path: &Path) -> Result<(), DebError> {
    let mut gzip = Command::new("gzip");
    shell::output(gzip.args(["-9", "--no-name", "--recursive"]).arg(path)).map(drop)?;
    Ok(())
}

fn changelog() -> String {
    format!(
        "hearth ({}) unstable; urgency=medium\n\n  * See the project's CHANGELOG.md.\n\n -- The Hearth developers \
         <developers@hearth.invalid>  Thu, 01 Jan 2026 00:00:00 +0000\n",
        env!("CARGO_PKG_VERSION")
    )
}
