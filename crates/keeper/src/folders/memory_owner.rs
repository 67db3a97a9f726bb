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
use rustix::fs::{AtFlags, CWD, FlockOperation, StatxFlags, flock, statx};
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
    // In a container, both paths may be other folders.
    let is_here = |pid: &u32| !has_other_mounts(*pid) || maps_file_in(*pid, memory);
    processes_naming(&memory.join("ram-")).into_iter().filter(is_ours).filter(is_here).collect()
}

/// Whether the process is known to be in another mount namespace.
fn has_other_mounts(pid: u32) -> bool {
    let (theirs, ours) = (fs::read_link(format!("/proc/{pid}/ns/mnt")), fs::read_link("/proc/self/ns/mnt"));
    theirs.is_ok_and(|theirs| ours.is_ok_and(|ours| theirs != ours))
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

/// Whether the process maps a RAM file of this folder. A file with the same path on another file system is none of it.
fn maps_file_in(pid: u32, folder: &Path) -> bool {
    let Ok(folder) = fs::canonicalize(folder) else { return false };
    let Ok(maps) = File::open(format!("/proc/{pid}/maps")) else { return false };
    let device = file_system_of(&folder);
    let is_there = |found: &[u8]| device.as_ref().is_none_or(|device| device.as_bytes() == found);
    let prefix = [folder.as_os_str().as_bytes(), b"/ram-"].concat();
    // Addresses, rights, offset, device, inode, path. Line by line: a process can have as many mappings as it likes.
    let mut lines = BufReader::new(maps).split(b'\n').map_while(Result::ok);
    lines.any(|line| {
        line.windows(prefix.len()).any(|bytes| bytes == prefix)
            && line.split(|&byte| byte == b' ').nth(3).is_some_and(is_there)
    })
}

/// Numbers of the folder's file system, as `/proc/PID/maps` writes them. `stat` has others for a subvolume of Btrfs.
fn file_system_of(folder: &Path) -> Option<String> {
    let mount = statx(CWD, folder, AtFlags::empty(), StatxFlags::MNT_ID).ok()?.stx_mnt_id.to_string();
    let mounts = fs::read_to_string("/proc/self/mountinfo").ok()?;
    let mut lines = mounts.lines().map(|line| line.split(' '));
    let numbers = lines.find_map(|mut words| (words.next()? == mount).then(|| words.nth(1))?)?;
    let (major, minor) = numbers.split_once(':')?;
    Some(format!("{:02x}:{:02x}", major.parse::<u32>().ok()?, minor.parse::<u32>().ok()?))
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
    use std::process::{Command, Stdio};

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
    fn a_qemu_with_the_same_path_in_a_container_is_none_of_ours() {
        let folder = tempfile::tempdir_in("/dev/shm").unwrap();
        let memory = folder.path();
        let ram = memory.join("ram-1");
        // A program that is the RAM file, so it maps it. Its loader complains that there is no such library.
        let check = |mounts: &str, is_here: bool| {
            let script = format!(
                "{mounts} cp /bin/sh {ram}; LD_PRELOAD={folder}/container/pin.so exec {ram} -c 'echo; read end' \
                 sh memory-backend-file,id=ram,mem-path={ram}",
                ram = ram.display(),
                folder = memory.display()
            );
            let mut qemu = Command::new("unshare");
            qemu.args(["--user", "--map-root-user", "--mount", "sh", "-c", &script]);
            let mut qemu = qemu.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::null()).spawn().unwrap();
            qemu.stdout.as_mut().unwrap().read_exact(&mut [0]).unwrap();
            let ours = qemus_of(&memory.join("container"), memory);
            let others = look(&memory.join("host"), memory);
            drop(qemu.stdin.take());
            qemu.wait().unwrap();
            assert_eq!((ours == [qemu.id()], others.is_some()), (is_here, is_here), "{mounts:?}: {ours:?}, {others:?}");
        };
        check("", true);
        check(&format!("mount -t tmpfs own {};", memory.display()), false);
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
