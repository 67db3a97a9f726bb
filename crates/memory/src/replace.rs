//! A small file that takes the place of another one, whole or not at all.

use std::fs::{self, File, OpenOptions};
use std::io;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

/// What a new file is to outlive.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Lasting {
    /// This process. Waits for no disk.
    Process,
    /// A power cut: its content is on the disk before it has its name, and its name before this returns.
    PowerCut,
}

/// What a file is called until it is whole.
pub fn fresh_file(path: &Path) -> PathBuf {
    let mut fresh = path.as_os_str().to_owned();
    fresh.push(".new");
    fresh.into()
}

/// Makes the file under another name in its folder (`NAME.new`), lets `write` fill it, and gives it its name. Only its owner
/// may read it.
///
/// After an error nothing new is in the folder, but for a file that has its name and could not be made to last.
pub fn replace_file<T>(path: &Path, lasting: Lasting, write: impl FnOnce(&mut File) -> io::Result<T>) -> io::Result<T> {
    let fresh = fresh_file(path);
    let mut file = OpenOptions::new().read(true).write(true).create(true).truncate(true).mode(0o600).open(&fresh)?;
    let written = write(&mut file).and_then(|written| {
        if lasting == Lasting::PowerCut {
            file.sync_all()?;
        }
        fs::rename(&fresh, path).map(|()| written)
    });
    let written = written.inspect_err(|_| {
        let _ = fs::remove_file(&fresh);
    })?;
    if lasting == Lasting::PowerCut {
        sync_folder_of(path)?;
    }
    Ok(written)
}

/// Makes the names in the folder of this file last.
pub fn sync_folder_of(path: &Path) -> io::Result<()> {
    let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
    File::open(folder)?.sync_all()
}
