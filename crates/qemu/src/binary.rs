//! The QEMU program: found, and asked for its version.

use std::fmt;
use std::fs::File;
use std::io::{self, Read};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use crate::bounded::{self, Finished};
use crate::environment;

const PROGRAM: &str = "qemu-system-x86_64";

/// Time limit: `--version` takes 20 ms, or a second on a host that swaps.
const VERSION_PATIENCE: Duration = Duration::from_secs(20);
/// Value of `-sandbox`: QEMU may not use obsolete system calls, change its user, start programs or change its
/// scheduling.
pub(crate) const SANDBOX: &str = "on,obsolete=deny,elevateprivileges=deny,spawn=deny,resourcecontrol=deny";

/// The oldest QEMU that Hearth supports: Debian 12's. Older ones lack in-flight tracking for vhost-user-blk.
pub const VERSION_MIN: Version = Version { major: 7, minor: 2, micro: 0 };

/// Version of QEMU.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Version {
    /// First number.
    pub major: u32,
    /// Second number.
    pub minor: u32,
    /// Third number.
    pub micro: u32,
}

impl fmt::Display for Version {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "{}.{}.{}", self.major, self.minor, self.micro)
    }
}

/// A QEMU program that has told its version.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Binary {
    path: PathBuf,
    version: Version,
    /// Firmware folders of a QEMU that was unpacked and not installed.
    data_folders: Vec<PathBuf>,
    has_sandbox: bool,
}

/// Errors of a QEMU program; each names its path.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "each variant's message describes it")]
pub enum BinaryError {
    #[error("{PROGRAM} is not on PATH; install QEMU (Debian: apt-get install qemu-system-x86) or set `qemu`")]
    NotFound,
    #[error("{path}: there is no such program; set `qemu` to a {PROGRAM}")]
    Missing { path: PathBuf },
    #[error("{path}: cannot be run")]
    NotRunnable { path: PathBuf, source: io::Error },
    #[error("{path}: does not answer --version: {how}")]
    Silent { path: PathBuf, how: String },
    #[error("{path}: is not QEMU: its --version prints {said:?}")]
    NotQemu { path: PathBuf, said: String },
    #[error("{path}: QEMU {found} is too old; Hearth needs {VERSION_MIN} or later")]
    TooOld { path: PathBuf, found: Version },
    #[error("{path}: does not list its machine types: {how}; set `qemu` to a {PROGRAM} that works")]
    NoMachineTypes { path: PathBuf, how: String },
    #[error("{path}: has no q35 machine type with a version; set `qemu` to a {PROGRAM} that has one")]
    NoQ35 { path: PathBuf },
}

impl Binary {
    #[cfg(test)]
    pub(crate) fn stand_in(version: Version, has_sandbox: bool) -> Self {
        Self { path: PROGRAM.into(), version, data_folders: Vec::new(), has_sandbox }
    }

    /// Checks the program `wanted`, or the first QEMU on PATH.
    pub fn find(wanted: Option<&Path>) -> Result<Self, BinaryError> {
        let path = match wanted {
            Some(path) if !path.exists() => return Err(BinaryError::Missing { path: path.to_owned() }),
            Some(path) => path.to_owned(),
            None => on_path(PROGRAM).ok_or(BinaryError::NotFound)?,
        };
        // QEMU reads its options in order: without seccomp it fails at the first one, else the second one ends it.
        let sandboxed = ask(&path, &["-sandbox", SANDBOX, "--version"])?;
        let has_sandbox = sandboxed.succeeded();
        let answer = if has_sandbox { sandboxed } else { ask(&path, &["--version"])? };
        let said = answer.stdout.lines().next().unwrap_or_default().to_owned();
        if said.is_empty() {
            return Err(BinaryError::Silent { path, how: answer.how() });
        }
        let found = parse_version(&said).ok_or_else(|| BinaryError::NotQemu { path: path.clone(), said })?;
        if found < VERSION_MIN {
            return Err(BinaryError::TooOld { path, found });
        }
        let data_folders = unpacked_data_folders(&path);
        Ok(Self { path, version: found, data_folders, has_sandbox })
    }

    /// Whether QEMU was built with its VNC server.
    pub fn has_vnc(&self) -> Result<bool, BinaryError> {
        // As for the sandbox: without VNC it fails at the first option. With it, the second one ends it before it listens.
        Ok(ask(&self.path, &["-vnc", "unix:unused", "--version"])?.succeeded())
    }

    /// Path of the program.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Version that the program tells.
    pub fn version(&self) -> Version {
        self.version
    }

    /// Firmware folders for `-L`; empty for an installed QEMU.
    pub(crate) fn data_folders(&self) -> &[PathBuf] {
        &self.data_folders
    }

    /// Whether QEMU was built with seccomp.
    pub(crate) fn has_sandbox(&self) -> bool {
        self.has_sandbox
    }

    /// Whether there is a script now, which starts a QEMU.
    pub(crate) fn is_script(&self) -> bool {
        let mut start = [0; 2];
        let read = File::open(&self.path).and_then(|mut file| file.read_exact(&mut start));
        read.is_ok_and(|()| &start == b"#!")
    }
}

fn ask(path: &Path, arguments: &[&str]) -> Result<Finished, BinaryError> {
    bounded::run(environment::confine(Command::new(path).args(arguments)), VERSION_PATIENCE)
        .map_err(|source| BinaryError::NotRunnable { path: path.to_owned(), source })
}

fn on_path(program: &str) -> Option<PathBuf> {
    let path = std::env::var_os("PATH")?;
    std::env::split_paths(&path).map(|folder| folder.join(program)).find(|candidate| is_executable(candidate))
}

fn is_executable(path: &Path) -> bool {
    path.metadata().is_ok_and(|metadata| metadata.is_file() && metadata.permissions().mode() & 0o111 != 0)
}

/// Parses `QEMU emulator version 7.2.22 (Debian 1:7.2+dfsg-7+deb12u18)`.
fn parse_version(said: &str) -> Option<Version> {
    let (_, rest) = said.split_once("QEMU emulator version ")?;
    let mut numbers = rest.split([' ', '.']).map(|number| number.parse().ok());
    let mut next = || numbers.next().flatten();
    Some(Version { major: next()?, minor: next()?, micro: next().unwrap_or(0) })
}

/// Firmware folders beside a program outside /usr and /usr/local: such a QEMU was unpacked, so its built-in paths are
/// wrong.
fn unpacked_data_folders(program: &Path) -> Vec<PathBuf> {
    let Some(usr) = program.parent().and_then(Path::parent) else { return Vec::new() };
    if usr == Path::new("/usr") || usr == Path::new("/usr/local") {
        return Vec::new();
    }
    let folders = ["share/seabios", "share/qemu", "lib/ipxe/qemu"].map(|folder| usr.join(folder));
    folders.into_iter().filter(|folder| folder.is_dir()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(said: &str, expect: Option<(u32, u32, u32)>) {
        let expect = expect.map(|(major, minor, micro)| Version { major, minor, micro });
        assert_eq!(parse_version(said), expect, "{said}");
    }

    #[test]
    fn versions_are_parsed() {
        check("QEMU emulator version 7.2.22 (Debian 1:7.2+dfsg-7+deb12u18+b3)", Some((7, 2, 22)));
        check("QEMU emulator version 10.0.2 (Debian 1:10.0.2+ds-2~bpo12+1)", Some((10, 0, 2)));
        check("QEMU emulator version 9.0", Some((9, 0, 0)));
        check("qemu-img version 7.2.22", None);
        check("", None);
    }

    /// A script in QEMU's place, in its own folder tree.
    fn script(text: &str) -> (tempfile::TempDir, PathBuf) {
        let folder = tempfile::tempdir().unwrap();
        let (draft, path) = (folder.path().join("draft"), folder.path().join("bin/qemu"));
        std::fs::create_dir(folder.path().join("bin")).unwrap();
        std::fs::write(&draft, format!("#!/bin/sh\n{text}\n")).unwrap();
        // Another process writes the script. If this one did, another test's new child could inherit the open file, and
        // then it could not be executed.
        assert!(Command::new("install").args(["-m", "755"]).args([&draft, &path]).status().unwrap().success());
        (folder, path)
    }

    #[track_caller]
    fn check_refused(text: &str, expect: &str) {
        let (_folder, path) = script(text);
        let refusal = Binary::find(Some(&path)).unwrap_err().to_string();
        assert_eq!(refusal.replace(path.to_str().unwrap(), "QEMU"), expect);
    }

    #[test]
    fn unusable_qemu_is_named_with_reason() {
        check_refused("echo QEMU emulator version 5.2.0", "QEMU: QEMU 5.2.0 is too old; Hearth needs 7.2.0 or later");
        check_refused("echo hello", r#"QEMU: is not QEMU: its --version prints "hello""#);
        check_refused("kill -11 $$", "QEMU: does not answer --version: it was ended by signal 11");
        let error = Binary::find(Some(Path::new("/nowhere/qemu"))).unwrap_err().to_string();
        assert!(error.starts_with("/nowhere/qemu: there is no such program"), "{error}");
        let error = Binary::find(Some(Path::new("/dev/null"))).unwrap_err().to_string();
        assert_eq!(error, "/dev/null: cannot be run");
    }

    #[test]
    fn installed_qemu_is_found_with_sandbox() {
        let binary = Binary::find(None).expect("these tests need QEMU: apt-get install qemu-system-x86");
        assert!(binary.version() >= VERSION_MIN);
        assert!(binary.has_sandbox(), "Debian builds QEMU with seccomp");
    }

    #[test]
    fn a_qemu_without_seccomp_is_used_without_sandbox() {
        let (_folder, path) = script(r#"[ "$1" = -sandbox ] && exit 1; echo QEMU emulator version 8.0.0"#);
        assert!(!Binary::find(Some(&path)).unwrap().has_sandbox());
    }

    #[test]
    fn qemu_without_vnc_is_known() {
        let (_folder, path) = script(r#"[ "$1" = -vnc ] && exit 1; echo QEMU emulator version 8.0.0"#);
        assert!(!Binary::find(Some(&path)).unwrap().has_vnc().unwrap());
        assert!(Binary::find(None).unwrap().has_vnc().unwrap(), "Debian builds QEMU with VNC");
    }

    #[test]
    fn an_unpacked_qemu_brings_its_own_firmware() {
        let (folder, path) = script("echo QEMU emulator version 10.0.2");
        let firmware = folder.path().join("share/seabios");
        std::fs::create_dir_all(&firmware).unwrap();
        assert_eq!(Binary::find(Some(&path)).unwrap().data_folders(), [firmware]);
    }
}
