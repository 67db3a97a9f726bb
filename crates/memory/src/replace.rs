//! Replacing a file with a complete new one, or not at all.

use std::fs::{self, File, OpenOptions};
use std::io;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

/// The loss that a new file must survive.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Durability {
    /// The end of this process. Does not wait for the disk.
    Process,
    /// A power cut: the content is on the disk before the rename, and the name is on the disk before the call returns.
    PowerCut,
}

/// Temporary name of a file until it is complete: `NAME.new`.
pub fn fresh_file(path: &Path) -> PathBuf {
    let mut fresh = path.as_os_str().to_owned();
    fresh.push(".new");
    fresh.into()
}

/// Creates `NAME.new` in the file's folder with mode 0600, lets `write` fill it, and renames it to `NAME`. Whatever has that name
/// already is removed first and never opened: it may be an unfinished file, or another user's link or socket.
///
/// If this fails, the temporary file is removed. Only if the last sync of the folder fails, the file has its new name
/// already.
pub fn replace_file<T>(
    path: &Path,
    lasting: Durability,
    write: impl FnOnce(&mut File) -> io::Result<T>,
) -> io::Result<T> {
    let fresh = fresh_file(path);
    match fs::remove_file(&fresh) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
        _ => {}
    }
    let mut file = OpenOptions::new().read(true).write(true).create_new(true).mode(0o600).open(&fresh)?;
    let written = write(&mut file).and_then(|written| {
        if lasting == Durability::PowerCut {
            file.sync_all()?;
        }
        fs::rename(&fresh, path).map(|()| written)
    });
    let written = written.inspect_err(|_| {
        let _ = fs::remove_file(&fresh);
    })?;
    if lasting == Durability::PowerCut {
        sync_folder_of(path)?;
    }
    Ok(written)
}

/// Syncs the folder of this file, so that its names survive a power cut.
pub fn sync_folder_of(path: &Path) -> io::Result<()> {
    let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
    File::open(folder)?.sync_all()
}

#[cfg(test)]
mod tests {
    use std::io::Write;
    use std::os::unix::fs::symlink;
    use std::os::unix::net::UnixListener;

    use super::*;

    #[test]
    fn what_has_the_temporary_name_is_not_opened() {
        let folder = tempfile::tempdir().unwrap();
        let (file, others) = (folder.path().join("journal.json"), folder.path().join("others"));
        let write = |text: &str| replace_file(&file, Durability::Process, |fresh| fresh.write_all(text.as_bytes()));
        fs::write(&others, "theirs").unwrap();
        symlink(&others, fresh_file(&file)).unwrap();
        write("first").unwrap();
        assert_eq!(fs::read_to_string(&others).unwrap(), "theirs");
        let _socket = UnixListener::bind(fresh_file(&file)).unwrap();
        write("second").unwrap();
        assert_eq!(fs::read_to_string(&file).unwrap(), "second");
        assert!(!file.is_symlink());
    }
}
