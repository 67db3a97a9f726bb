//! Debian packages without the host's package manager: an apt with its own sources, lists and cache, which works for ordinary
//! users and on other releases, and adds nothing to the system.
//!
//! Guests are always Debian 12, whatever the host runs, so that results are the same everywhere. On a Debian host, its own mirror
//! and proxy settings are used.

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::cache::{self, CacheError, at};
use crate::shell::{self, ShellError};

/// The release of every guest, and of the newer QEMU's backport.
pub const GUEST_RELEASE: &str = "bookworm";
const KEYRING: &str = "/usr/share/keyrings/debian-archive-keyring.gpg";

#[derive(Debug, thiserror::Error)]
pub enum AptError {
    #[error(transparent)]
    Shell(#[from] ShellError),
    #[error(transparent)]
    Cache(#[from] CacheError),
    #[error("{KEYRING} is missing: install debian-archive-keyring")]
    Keyring,
    #[error("package {0} has no dependency to follow: is it still a metapackage in {GUEST_RELEASE}?")]
    NotMeta(String),
    #[error("package {package} unpacked no file {expected}")]
    Content { package: String, expected: String },
}

/// A private apt with fresh package lists. It holds a lock, so that only one runs at a time.
pub struct Apt {
    folder: PathBuf,
    _lock: File,
}

impl Apt {
    pub fn open(folder: &Path) -> Result<Self, AptError> {
        Self::with(folder, |mirror, security| {
            vec![
                line(mirror, GUEST_RELEASE),
                line(mirror, &format!("{GUEST_RELEASE}-backports")),
                line(security, &format!("{GUEST_RELEASE}-security")),
            ]
        })
    }

    /// Opens an apt for another release than the guests'.
    pub fn open_release(folder: &Path, release: &str) -> Result<Self, AptError> {
        Self::with(folder, |mirror, _| vec![line(mirror, release)])
    }

    /// Opens an apt. `lines` makes the `sources.list` from the host's mirror and its mirror of security updates.
    fn with(folder: &Path, lines: impl Fn(&str, &str) -> Vec<String>) -> Result<Self, AptError> {
        if !Path::new(KEYRING).exists() {
            return Err(AptError::Keyring);
        }
        let apt = Self { folder: folder.to_owned(), _lock: cache::lock(&folder.join("lock"))? };
        for part in ["lists/partial", "cache/archives/partial"] {
            let part = folder.join(part);
            at("create", &part, fs::create_dir_all(&part))?;
        }
        let sources = apt.sources();
        let format = "$(REPO_URI) $(RELEASE) $(COMPONENT)";
        let (mirror, security) =
            mirrors(&shell::output(Command::new("apt-get").args(["indextargets", "--format", format]))?);
        at("write", &sources, fs::write(&sources, lines(&mirror, &security).join("\n") + "\n"))?;
        shell::output(apt.command("apt-get").args(["-qq", "update"]))?;
        Ok(apt)
    }

    /// The `sources.list` of this apt, which mmdebstrap accepts unchanged.
    pub fn sources(&self) -> PathBuf {
        self.folder.join("sources.list")
    }

    /// The package that a metapackage names at present: `linux-image-cloud-amd64` -> `linux-image-6.1.0-..`.
    pub fn behind(&self, metapackage: &str) -> Result<String, AptError> {
        let depends = self.depends(metapackage)?.into_iter().next();
        depends.ok_or_else(|| AptError::NotMeta(metapackage.into()))
    }

    /// The packages that a package depends on.
    pub fn depends(&self, package: &str) -> Result<Vec<String>, AptError> {
        let shown = shell::output(self.command("apt-cache").args(["depends", "--important", package]))?;
        Ok(shown.lines().filter_map(|line| line.trim().strip_prefix("Depends: ")).map(str::to_owned).collect())
    }

    /// Downloads packages (`name` or `name/suite`) and unpacks their files under `into`.
    pub fn unpack(&self, packages: &[&str], into: &Path) -> Result<(), AptError> {
        self.each(packages, into, |deb| {
            Ok(shell::output(Command::new("dpkg-deb").arg("-x").arg(deb).arg(into)).map(drop)?)
        })
    }

    /// Downloads packages and unpacks only the files that a wildcard names; the rest is never written to disk.
    pub fn unpack_some(&self, packages: &[&str], wildcard: &str, into: &Path) -> Result<(), AptError> {
        self.each(packages, into, |deb| {
            let script = r#"dpkg-deb --fsys-tarfile "$1" | tar -x -C "$2" --wildcards "$3""#;
            let mut pipe = Command::new("sh");
            pipe.args(["-c", script, "unpack"]).arg(deb).arg(into).arg(wildcard);
            Ok(shell::output(&mut pipe).map(drop)?)
        })
    }

    /// Downloads packages, calls `unpack` with each, and removes them again.
    fn each(
        &self,
        packages: &[&str],
        into: &Path,
        unpack: impl Fn(&Path) -> Result<(), AptError>,
    ) -> Result<(), AptError> {
        let debs = into.join("debs");
        at("create", &debs, fs::create_dir_all(&debs))?;
        shell::output(self.command("apt-get").args(["-qq", "download"]).args(packages).current_dir(&debs))?;
        for deb in at("list", &debs, fs::read_dir(&debs))? {
            unpack(&at("list", &debs, deb)?.path())?;
        }
        Ok(at("remove", &debs, fs::remove_dir_all(&debs))?)
    }

    fn command(&self, program: &str) -> Command {
        let folder = self.folder.display();
        let mut command = Command::new(program);
        for option in [
            format!("Dir::Etc::SourceList={folder}/sources.list"),
            "Dir::Etc::SourceParts=/dev/null".into(),
            "Dir::Etc::Preferences=/dev/null".into(),
            "Dir::Etc::PreferencesParts=/dev/null".into(),
            format!("Dir::State={folder}"),
            "Dir::State::status=/dev/null".into(),
            format!("Dir::Cache={folder}/cache"),
            "APT::Architecture=amd64".into(),
            // apt would otherwise change to a user that may not reach this folder.
            "APT::Sandbox::User=root".into(),
        ] {
            command.args(["-o", &option]);
        }
        command
    }
}

fn line(mirror: &str, suite: &str) -> String {
    format!("deb [signed-by={KEYRING}] {mirror} {suite} main")
}

/// The host's Debian mirrors, from its own list of `URI RELEASE COMPONENT`; Debian's own if it has none.
fn mirrors(known: &str) -> (String, String) {
    let entries = || known.lines().filter_map(|line| line.split_once(' ')).filter(|(_, rest)| rest.ends_with(" main"));
    let uri_where = |fits: fn(&str, &str) -> bool| {
        entries().find(|(uri, rest)| fits(uri, rest)).map(|(uri, _)| uri.trim_end_matches('/').to_owned())
    };
    let mirror = uri_where(|uri, _| uri.trim_end_matches('/').ends_with("/debian"));
    let security = uri_where(|uri, rest| uri.contains("debian-security") && rest.contains("-security "));
    (
        mirror.unwrap_or_else(|| "http://deb.debian.org/debian".into()),
        security.unwrap_or_else(|| "http://deb.debian.org/debian-security".into()),
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hosts_own_mirrors_are_preferred() {
        let known = "https://example.org/tools stable main\nhttp://near.example/debian/ trixie main\n\
                     http://near.example/debian-security/ trixie-security main\n";
        let expected = ("http://near.example/debian".into(), "http://near.example/debian-security".into());
        assert_eq!(mirrors(known), expected);
    }

    #[test]
    fn other_hosts_get_debians_mirrors() {
        let (mirror, security) = mirrors("http://archive.example/ubuntu/ noble main\n");
        assert!(mirror.ends_with("debian.org/debian") && security.ends_with("debian.org/debian-security"));
    }
}
