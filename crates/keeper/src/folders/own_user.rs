//! Own user: with `qemu_user = "auto"`, each machine's QEMUs run as a user that nothing else on the host uses.
//!
//! runtime folder -> a number of the range, by its hash -> not in /etc/passwd or /etc/group? -> a claim: /run/hearth-users/NUMBER
//! holds the runtime folder; if that is another machine's, the next number
//!
//! The user is only a number; it needs no entry in a user database. A machine always gets the same number, unless
//! another machine took it first. The claim lasts until the machine has stopped or failed. A QEMU may leave files in /tmp; the
//! range is so large that another machine hardly ever gets that number again: 1 in 67 million.

use std::fs::{self, DirBuilder, File, OpenOptions};
use std::io::{self, ErrorKind, Write};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use super::memory_owner::{self, resolved};
use crate::config::AUTO_USER;

/// One folder for the host, whatever the runtime root is.
const FOLDER: &str = "/run/hearth-users";
/// A claim that is not complete: this, and the pid of its keeper.
const DRAFT_PREFIX: &str = "new-";
/// Free by systemd's table of users and groups (1879048192 to 2147352575), and above what SSSD and FreeIPA give out by default
/// (up to 2000200000).
const FIRST: u32 = 0x7800_0000;
const COUNT: u32 = 1 << 26;

/// User and group that QEMU switches to, from a configuration's `qemu_user`.
pub fn run_as(qemu_user: Option<&str>, runtime: &Path) -> io::Result<Option<String>> {
    match qemu_user {
        Some(AUTO_USER) => claim(Path::new(FOLDER), runtime).map(|user| Some(format!("{user}:{user}"))),
        user => Ok(user.map(str::to_owned)),
    }
}

/// Releases the machine's user. Call it when the machine has stopped or failed.
pub fn release(runtime: &Path) {
    release_in(Path::new(FOLDER), runtime);
}

/// Whether this process may switch to users of the range. A user namespace may not map them.
pub fn is_mapped() -> bool {
    ["uid_map", "gid_map"].iter().all(|map| {
        let map = fs::read_to_string(format!("/proc/self/{map}")).unwrap_or_default();
        map.lines().any(covers_range)
    })
}

/// Whether this line of a map covers the range. A line is: first number inside, first number outside, count.
fn covers_range(line: &str) -> bool {
    let numbers: Vec<u64> = line.split_whitespace().filter_map(|number| number.parse().ok()).collect();
    matches!(*numbers, [inside, _, count] if inside <= FIRST.into() && inside + count >= u64::from(FIRST + COUNT))
}

/// Claims a user of the range for the machine with this runtime folder, by a file in `folder`. Returns the user's number.
pub fn claim(folder: &Path, runtime: &Path) -> io::Result<u32> {
    let runtime = resolved(runtime);
    match DirBuilder::new().mode(0o700).create(folder) {
        Err(error) if error.kind() != ErrorKind::AlreadyExists => return Err(error),
        _ => {}
    }
    remove_dead_drafts(folder);
    for (path, owner) in claims(folder) {
        if owner == runtime
            && let Some(user) = path.file_name().and_then(|name| name.to_str()?.parse().ok())
        {
            return Ok(user);
        }
        if !owner.exists() {
            // The machine was removed without having been stopped.
            let _ = fs::remove_file(path);
        }
    }
    // The draft gets its final name when it is complete: nobody sees half a claim.
    let draft = folder.join(format!("{DRAFT_PREFIX}{}", std::process::id()));
    let claimed = write_draft(&draft, &runtime).and_then(|()| name_draft(&draft, folder, &runtime));
    // If it stays, the next claim removes it.
    let _ = fs::remove_file(&draft);
    claimed
}

fn write_draft(draft: &Path, runtime: &Path) -> io::Result<()> {
    let mut file = OpenOptions::new().create(true).truncate(true).write(true).mode(0o600).open(draft)?;
    file.write_all(runtime.as_os_str().as_bytes())
}

/// Makes the draft the claim of the first free user. Returns the user's number.
fn name_draft(draft: &Path, folder: &Path, runtime: &Path) -> io::Result<u32> {
    let claimed = candidates(runtime).filter(|user| !is_known(*user)).find_map(|user| {
        match fs::hard_link(draft, folder.join(user.to_string())) {
            Ok(()) => Some(Ok(user)),
            Err(error) if error.kind() == ErrorKind::AlreadyExists => None,
            Err(error) => Some(Err(error)),
        }
    });
    claimed.unwrap_or_else(|| Err(io::Error::other("all users of this range are taken")))
}

/// Removes the drafts of keepers that were killed while they made a claim.
fn remove_dead_drafts(folder: &Path) {
    for path in fs::read_dir(folder).into_iter().flatten().flatten().map(|entry| entry.path()) {
        let pid = path.file_name().and_then(|name| name.to_str()?.strip_prefix(DRAFT_PREFIX)?.parse::<u32>().ok());
        if pid.is_some_and(|pid| !Path::new(&format!("/proc/{pid}")).exists()) {
            let _ = fs::remove_file(path);
        }
    }
}

fn release_in(folder: &Path, runtime: &Path) {
    let runtime = resolved(runtime);
    for (path, _) in claims(folder).into_iter().filter(|(_, owner)| *owner == runtime) {
        // The host's next start removes it at the latest.
        let _ = fs::remove_file(path);
    }
}

/// Each claim's path, with the runtime folder that it is for.
fn claims(folder: &Path) -> Vec<(PathBuf, PathBuf)> {
    let entries = fs::read_dir(folder).into_iter().flatten().flatten().map(|entry| entry.path());
    let numbered = entries
        .filter(|path| path.file_name().is_some_and(|name| !name.as_bytes().starts_with(DRAFT_PREFIX.as_bytes())));
    numbered.filter_map(|path| Some((path.clone(), memory_owner::read(&mut File::open(path).ok()?).ok()?))).collect()
}

/// All users of the range, each once, starting with this runtime folder's own.
fn candidates(runtime: &Path) -> impl Iterator<Item = u32> + use<> {
    let first = (hash(runtime.as_os_str().as_bytes()) % u64::from(COUNT)) as u32;
    (0..COUNT).map(move |step| FIRST + (first + step) % COUNT)
}

/// FNV-1a, because every build must compute the same number.
fn hash(bytes: &[u8]) -> u64 {
    bytes.iter().fold(0xcbf2_9ce4_8422_2325, |hash, byte| (hash ^ u64::from(*byte)).wrapping_mul(0x0100_0000_01b3))
}

/// Whether a user or group of this host has the number, although it should not.
fn is_known(number: u32) -> bool {
    let number = number.to_string();
    ["/etc/passwd", "/etc/group"].iter().any(|file| {
        let lines = fs::read_to_string(file).unwrap_or_default();
        lines.lines().any(|line| line.split(':').nth(2) == Some(&number))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_machine_has_a_user_until_it_stops() {
        let folder = tempfile::tempdir().unwrap();
        let claims = folder.path().join("users");
        let runtime = |name: &str| {
            let path = folder.path().join(name);
            fs::create_dir_all(&path).unwrap();
            path
        };
        // The same name under two runtime roots is two machines.
        let (one, other) = (runtime("root/web"), runtime("root2/web"));
        let user = claim(&claims, &one).unwrap();
        assert!((FIRST..FIRST + COUNT).contains(&user));
        assert_ne!(claim(&claims, &other).unwrap(), user);
        assert_eq!(claim(&claims, &one).unwrap(), user, "a later QEMU of it is the same user");
        release_in(&claims, &one);
        assert_eq!(claim(&claims, &one).unwrap(), user, "and so is a later life");
        assert_eq!(fs::read_dir(&claims).unwrap().count(), 2);
    }

    #[test]
    fn taken_user_is_skipped() {
        let folder = tempfile::tempdir().unwrap();
        let (one, other) = (folder.path().join("one"), folder.path().join("other"));
        fs::create_dir(&other).unwrap();
        let first = candidates(&resolved(&one)).next().unwrap();
        fs::write(folder.path().join(first.to_string()), other.as_os_str().as_bytes()).unwrap();
        let second = claim(folder.path(), &one).unwrap();
        assert_eq!(Some(second), candidates(&resolved(&one)).nth(1));
        // The claim of a machine that was removed blocks nobody.
        fs::remove_dir(&other).unwrap();
        release_in(folder.path(), &one);
        assert_eq!(claim(folder.path(), &one).unwrap(), first);
    }

    #[test]
    fn a_user_namespace_must_have_the_whole_range() {
        assert!(covers_range("         0          0 4294967295"));
        assert!(!covers_range("0 100000 65536"));
        assert!(covers_range(&format!("{FIRST} 5 {COUNT}")) && !covers_range(&format!("{FIRST} 5 {}", COUNT - 1)));
    }
}
