//! Dump folder: the folder of a machine's dumps: their names, the space for them, and how many are kept.
//!
//! A dump's name is `NAME-INCARNATION-TIME.vmcore`, followed by `.incomplete` until it is complete. Only complete dumps
//! with such a name are ever removed, the oldest first, and only after another dump is complete.

use std::fs::{self, DirBuilder};
use std::io;
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};
use std::time::SystemTime;

const ENDING: &str = ".vmcore";

/// The dump folder of one machine.
#[derive(Clone, Debug)]
pub struct DumpFolder {
    pub folder: PathBuf,
    pub machine: String,
    pub keep_last: usize,
    pub min_free_bytes: u64,
}

/// Why the folder cannot take more.
#[derive(Debug, thiserror::Error)]
pub enum DumpFolderError {
    #[error("cannot use dump folder {folder}")]
    Unusable { folder: PathBuf, source: io::Error },
    #[error("{folder} has {free_mib} MiB free, of which `crash.min_free` reserves {min_mib} MiB: free space there")]
    Full { folder: PathBuf, free_mib: u64, min_mib: u64 },
}

impl DumpFolder {
    /// Creates the folder, for its owner only.
    pub fn prepare(&self) -> Result<(), DumpFolderError> {
        let unusable = |source| DumpFolderError::Unusable { folder: self.folder.clone(), source };
        if !self.folder.is_dir() {
            DirBuilder::new().recursive(true).mode(0o700).create(&self.folder).map_err(unusable)?;
        }
        Ok(())
    }

    /// A name for a dump of this incarnation, without `.incomplete`.
    pub fn name(&self, incarnation: u32, now: SystemTime) -> PathBuf {
        // The time without the characters that are awkward in file names: 20260301T120000123Z.
        let time: String = hearth_api::rfc3339(now).chars().filter(char::is_ascii_alphanumeric).collect();
        self.folder.join(format!("{}-{incarnation}-{time}{ENDING}", self.machine))
    }

    /// Refuses if this many more bytes would leave less space than must stay free.
    pub fn must_hold(&self, more_bytes: u64) -> Result<(), DumpFolderError> {
        let found = rustix::fs::statvfs(&self.folder)
            .map_err(|errno| DumpFolderError::Unusable { folder: self.folder.clone(), source: errno.into() })?;
        let free_bytes = found.f_bavail * found.f_frsize;
        if free_bytes >= self.min_free_bytes.saturating_add(more_bytes) {
            return Ok(());
        }
        let (free_mib, min_mib) = (free_bytes >> 20, self.min_free_bytes >> 20);
        Err(DumpFolderError::Full { folder: self.folder.clone(), free_mib, min_mib })
    }

    /// Removes the oldest complete dumps beyond the number that is kept. Returns the removed files.
    pub fn prune(&self) -> io::Result<Vec<PathBuf>> {
        let mut dumps = Vec::new();
        for entry in fs::read_dir(&self.folder)? {
            let entry = entry?;
            if self.is_ours(&entry.path()) {
                dumps.push((entry.metadata()?.modified()?, entry.path()));
            }
        }
        dumps.sort();
        let old: Vec<_> = dumps.iter().take(dumps.len().saturating_sub(self.keep_last)).collect();
        old.into_iter().map(|(_, path)| fs::remove_file(path).map(|()| path.clone())).collect()
    }

    fn is_ours(&self, path: &Path) -> bool {
        let name = path.file_name().and_then(|name| name.to_str()).unwrap_or_default();
        let parts = name.strip_prefix(&self.machine).and_then(|rest| rest.strip_prefix('-')?.strip_suffix(ENDING));
        parts.and_then(|parts| parts.split_once('-')).is_some_and(|(incarnation, time)| {
            incarnation.parse::<u32>().is_ok()
                && !time.is_empty()
                && time.bytes().all(|byte| byte.is_ascii_alphanumeric())
        })
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    fn dump_folder(folder: &Path) -> DumpFolder {
        DumpFolder { folder: folder.join("a/b"), machine: "web".into(), keep_last: 2, min_free_bytes: 0 }
    }

    #[test]
    fn only_old_complete_dumps_of_this_machine_go() {
        let folder = tempfile::tempdir().unwrap();
        let dump_folder = dump_folder(folder.path());
        dump_folder.prepare().unwrap();
        dump_folder.prepare().unwrap();
        let mut names: Vec<_> =
            (1..=4).map(|incarnation| dump_folder.name(incarnation, SystemTime::UNIX_EPOCH)).collect();
        let others = ["web-notes.vmcore", "web2-1-1970.vmcore", "web-0-1970.vmcore.incomplete", "web-1-1970.txt"];
        names.extend(others.map(|name| dump_folder.folder.join(name)));
        for (age, name) in names.iter().enumerate() {
            let file = fs::File::create(name).unwrap();
            file.set_modified(SystemTime::UNIX_EPOCH + Duration::from_secs(age as u64)).unwrap();
        }
        assert_eq!(dump_folder.prune().unwrap(), names[..2]);
        assert!(names[2..].iter().all(|name| name.exists()));
        assert!(dump_folder.prune().unwrap().is_empty());
    }

    #[test]
    fn reserved_space_stays_free() {
        let folder = tempfile::tempdir().unwrap();
        let mut dump_folder = dump_folder(folder.path());
        dump_folder.prepare().unwrap();
        dump_folder.must_hold(1 << 20).unwrap();
        let refusal = dump_folder.must_hold(u64::MAX).unwrap_err().to_string();
        assert!(refusal.contains("`crash.min_free` reserves 0 MiB"), "{refusal}");
        dump_folder.min_free_bytes = u64::MAX;
        dump_folder.must_hold(0).unwrap_err();
    }
}
