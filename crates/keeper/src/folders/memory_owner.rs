//! Owner: the machine that a memory folder belongs to.
//!
//! A keeper ends QEMUs whose RAM files lie in its memory folder and which no journal names, and removes what dead
//! guests left there. Two machines with the same folder would end each other's guests. So the file `owner` in it names
//! the runtime folder of one machine, and that machine's keeper holds a lock on it. The file stays as long as the
//! folder holds anything else.

use std::ffi::OsString;
use std::fs::{self, File, OpenOptions};
use std::io::{self, BufRead, BufReader, Read, Seek, Write};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use hearth_qemu::{processes_naming, runtime_folder_of};
use rustix::fs::{FlockOperation, flock};
use rustix::io::Errno;

use super::{FolderError, existing, take};

/// Its name, in the memory folder.
pub const FILE: &str = "owner";
const PATH_BYTES_MAX: u64 = 4096;
/// Hint for an operator whose memory folder belongs to another machine.
pub const HINT: &str = "give each machine its own memory_folder or name (`restore --as`); if the other machine no longer exists, remove \
     the file `owner` there";

/// Locks the memory folder for the keeper of the machine with this runtime folder, and records the owner. Fails if
/// another machine has a keeper, a QEMU or files there.
pub fn own(runtime: &Path, memory: &Path) -> Result<File, FolderError> {
    let path = memory.join(FILE);
    let unusable = |source| FolderError::Unusable { path: path.clone(), source };
    let runtime = resolved(runtime);
    loop {
        let mut options = OpenOptions::new();
        let file = options.create(true).truncate(false).read(true).write(true).mode(0o600).open(&path);
        let mut file = file.map_err(unusable)?;
        let is_locked = match take(&file) {
            Ok(()) => false,
            Err(Errno::WOULDBLOCK) => true,
            Err(error) => return Err(unusable(error.into())),
        };
        let held = file.metadata().map_err(unusable)?;
        if !fs::metadata(&path).is_ok_and(|there| there.ino() == held.ino()) {
            // Its keeper has stopped meanwhile and removed the file.
            continue;
        }
        let owner = read(&mut file).map_err(unusable)?;
        let why = why_others(&owner, is_locked, &runtime, memory);
        if let Some(why) = why.or_else(|| is_locked.then(|| keeper_runs(&owner))) {
            return Err(FolderError::OthersMemory { path: memory.to_owned(), why });
        }
        if owner != runtime {
            file.set_len(0).and_then(|()| file.rewind()).map_err(unusable)?;
            file.write_all(runtime.as_os_str().as_bytes()).map_err(unusable)?;
        }
        return Ok(file);
    }
}

/// Why this machine cannot use the memory folder; changes nothing. None if it can, or if the folder cannot be read.
pub fn look(runtime: &Path, memory: &Path) -> Option<String> {
    let (owner, is_locked) = match File::open(memory.join(FILE)) {
        Ok(mut file) => {
            // A shared lock, held only for this test: see `take`.
            let is_locked = flock(&file, FlockOperation::NonBlockingLockShared) == Err(Errno::WOULDBLOCK);
            (read(&mut file).ok()?, is_locked)
        }
        Err(_) => (PathBuf::new(), false),
    };
    why_others(&owner, is_locked, &resolved(runtime), memory)
}

/// Releases the folder if nothing else is in it. A folder that still holds files (NVRAM, for example) stays this
/// machine's.
pub fn leave_if_empty(memory: &Path) -> io::Result<()> {
    if holds_nothing(memory)? { fs::remove_file(memory.join(FILE)) } else { Ok(()) }
}

/// Pids of QEMUs in this memory folder that were started for the machine with this runtime folder.
pub fn qemus_of(runtime: &Path, memory: &Path) -> Vec<u32> {
    let runtime = resolved(runtime);
    let is_ours = |pid: &u32| runtime_folder_of(*pid).is_some_and(|folder| resolved(&folder) == runtime);
    processes_naming(&memory.join("ram-")).into_iter().filter(is_ours).collect()
}

fn why_others(owner: &Path, is_locked: bool, runtime: &Path, memory: &Path) -> Option<String> {
    let is_others = !owner.as_os_str().is_empty() && owner != runtime;
    if is_locked && is_others {
        return Some(keeper_runs(owner));
    }
    for pid in processes_naming(&memory.join("ram-")) {
        let folder = runtime_folder_of(pid).map(|folder| resolved(&folder));
        // Any process may name a RAM file on its command line. Only a process with access to the folder can map it.
        if let Some(folder) = folder.filter(|folder| folder != runtime && maps_file_in(pid, memory)) {
            return Some(format!("its QEMU (pid {pid}) was started for {}", folder.display()));
        }
    }
    let holds_files = is_others && !holds_nothing(memory).unwrap_or(false);
    holds_files.then(|| format!("it holds files of {}", owner.display()))
}

fn keeper_runs(owner: &Path) -> String {
    format!("the keeper of {} runs", owner.display())
}

fn maps_file_in(pid: u32, folder: &Path) -> bool {
    let Ok(folder) = fs::canonicalize(folder) else { return false };
    let Ok(maps) = File::open(format!("/proc/{pid}/maps")) else { return false };
    let prefix = [folder.as_os_str().as_bytes(), b"/ram-"].concat();
    // Line by line: a process can have as many mappings as it likes.
    let mut lines = BufReader::new(maps).split(b'\n').map_while(Result::ok);
    lines.any(|line| line.windows(prefix.len()).any(|bytes| bytes == prefix))
}

pub(super) fn read(file: &mut File) -> io::Result<PathBuf> {
    let mut owner = Vec::new();
    file.take(PATH_BYTES_MAX).read_to_end(&mut owner)?;
    Ok(PathBuf::from(OsString::from_vec(owner)))
}

/// The path without symbolic links, also of a folder that does not exist yet.
pub(super) fn resolved(folder: &Path) -> PathBuf {
    let there = existing(folder);
    let rest = folder.strip_prefix(there).expect("it is one of its ancestors");
    let there = fs::canonicalize(there).unwrap_or_else(|_| there.to_owned());
    if rest.as_os_str().is_empty() { there } else { there.join(rest) }
}

/// Whether the folder holds nothing but the owner file.
fn holds_nothing(memory: &Path) -> io::Result<bool> {
    Ok(fs::read_dir(memory)?.flatten().all(|entry| entry.file_name() == FILE))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::folders::Folders;

    #[test]
    fn a_memory_folder_has_one_machine() {
        let folder = tempfile::tempdir().unwrap();
        let (one, other, memory) =
            (folder.path().join("one"), folder.path().join("other"), folder.path().join("memory"));
        let refused = |expect: &str| {
            let refusal = Folders::prepare("other", &other, &memory).unwrap_err().to_string();
            assert!(refusal.contains("belongs to another machine: ") && refusal.contains(expect), "{refusal}");
            assert!(look(&other, &memory).unwrap().contains(expect), "`check` says the same");
            assert_eq!(look(&one, &memory), None);
        };
        let owner = Folders::prepare("one", &one, &memory).unwrap();
        refused("the keeper of ");
        fs::write(memory.join("ram-notes.txt"), "").unwrap();
        fs::write(memory.join("nvram-log"), "").unwrap();
        fs::write(memory.join("ram-1"), "").unwrap();
        owner.discard_memory().unwrap();
        drop(owner);
        assert!(memory.join("ram-notes.txt").exists() && !memory.join("ram-1").exists());
        refused("it holds files of ");
        // Its own machine uses it again, and releases it when nothing is left.
        let owner = Folders::prepare("one", &one, &memory).unwrap();
        fs::remove_file(memory.join("ram-notes.txt")).unwrap();
        fs::remove_file(memory.join("nvram-log")).unwrap();
        refused("the keeper of ");
        owner.discard_memory().unwrap();
        assert_eq!(fs::read_dir(&memory).unwrap().count(), 0);
        drop(owner);
        Folders::prepare("other", &other, &memory).unwrap();
    }

    #[test]
    fn a_runtime_folder_is_known_by_any_path() {
        let folder = tempfile::tempdir().unwrap();
        let (real, link) = (folder.path().join("real"), folder.path().join("link"));
        fs::create_dir(&real).unwrap();
        std::os::unix::fs::symlink(&real, &link).unwrap();
        assert_eq!(resolved(&link.join("not/yet")), resolved(&real.join("not/yet")));
        assert_eq!(resolved(&link), fs::canonicalize(&real).unwrap());
    }
}
