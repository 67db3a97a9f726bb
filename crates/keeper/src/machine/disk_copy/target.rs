//! Target: the file of a copy. Until it is complete it has another name, and it is removed if that never comes.

use std::fs::{self, File, OpenOptions};
use std::io;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use hearth_disk::image::create_overlay_with_bitmap;
use rustix::fs::{CWD, RenameFlags, renameat_with};
use rustix::io::Errno;

use super::apart::apart;

/// What the name of an incomplete copy ends with.
pub const PARTIAL: &str = ".partial";

/// How long the removal of an incomplete copy is waited for. It goes on after that.
const REMOVE_PATIENCE: Duration = Duration::from_secs(2);

/// The image over a copy that tells what was written since a checkpoint.
pub fn image_over(copy: &Path) -> PathBuf {
    let mut over = copy.as_os_str().to_owned();
    over.push(".since");
    over.into()
}

/// The file of a copy that is not complete.
pub struct Target {
    /// Until it is dropped.
    open: Option<File>,
    path: PathBuf,
    partial: PathBuf,
    is_complete: bool,
}

impl Target {
    /// `has_bitmap`: there will be an image over it. The error is for the operator.
    pub fn create(path: &Path, has_bitmap: bool) -> Result<Self, String> {
        let over = has_bitmap.then(|| image_over(path));
        if let Some(there) =
            [Some(path), over.as_deref()].into_iter().flatten().find(|it| it.symlink_metadata().is_ok())
        {
            return Err(format!("{} exists already", there.display()));
        }
        let mut partial = path.as_os_str().to_owned();
        partial.push(PARTIAL);
        let partial = PathBuf::from(partial);
        let open = OpenOptions::new().read(true).write(true).create_new(true).mode(0o600).open(&partial);
        let open = open.map_err(|error| match error.kind() {
            io::ErrorKind::AlreadyExists => {
                format!("{} exists: remove it if no copy to this file runs", partial.display())
            }
            _ => format!("cannot make {}: {error}", partial.display()),
        })?;
        Ok(Self { open: Some(open), path: path.to_owned(), partial, is_complete: false })
    }

    pub fn open(&self) -> &File {
        self.open.as_ref().expect("it is open until it is dropped")
    }

    /// The folder that it is in.
    pub fn folder(&self) -> &Path {
        self.path.parent().unwrap_or(Path::new("/"))
    }

    /// Makes the image over it that has this bitmap. Both are complete afterwards, or there is neither.
    pub fn complete_with_bitmap(self, format: &str, bitmap: (&str, &[u8])) -> io::Result<()> {
        let path = self.path.clone();
        self.complete()?;
        create_overlay_with_bitmap(&image_over(&path), &path, format, bitmap).map_err(|error| {
            if let Err(error) = fs::remove_file(&path) {
                tracing::warn!(%error, file = %path.display(), "cannot remove");
            }
            io::Error::other(crate::chain(&error))
        })
    }

    /// Gives the file its name, which nobody else may have taken meanwhile. Its bytes are on the disk already.
    pub fn complete(mut self) -> io::Result<()> {
        match renameat_with(CWD, &self.partial, CWD, &self.path, RenameFlags::NOREPLACE) {
            Ok(()) => self.is_complete = true,
            // The file system cannot do that (NFS). The partial name is removed at the end.
            Err(Errno::INVAL) => fs::hard_link(&self.partial, &self.path)?,
            Err(error) => return Err(error.into()),
        }
        File::open(self.folder())?.sync_all()
    }
}

impl Drop for Target {
    /// Also a close may hang.
    fn drop(&mut self) {
        let (open, partial, is_complete) = (self.open.take(), self.partial.clone(), self.is_complete);
        let close = move || {
            drop(open);
            if is_complete { Ok(()) } else { fs::remove_file(partial) }
        };
        let closed = apart(REMOVE_PATIENCE, &|| Ok(()), close);
        if let Err(error) = closed.and_then(|removed| removed.map_err(|error| error.to_string())) {
            tracing::warn!(error, file = %self.partial.display(), "cannot remove");
        }
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use super::*;

    #[test]
    fn file_has_its_name_only_when_complete() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("copy");
        let names = || fs::read_dir(folder.path()).unwrap().map(|entry| entry.unwrap().file_name()).collect::<Vec<_>>();
        drop(Target::create(&path, false).unwrap());
        assert!(names().is_empty());
        let target = Target::create(&path, false).unwrap();
        assert_eq!(names(), ["copy.partial"]);
        assert!(Target::create(&path, false).err().unwrap().contains("copy.partial exists"));
        target.open().write_all(b"all of it").unwrap();
        target.complete().unwrap();
        assert_eq!((names(), fs::read(&path).unwrap()), (vec!["copy".into()], b"all of it".to_vec()));
        assert!(Target::create(&path, false).err().unwrap().contains("exists already"));
        assert!(Target::create(Path::new("/no/such/copy"), false).err().unwrap().contains("No such file"));
        fs::write(folder.path().join("next.since"), "another's").unwrap();
        let next = folder.path().join("next");
        assert!(Target::create(&next, true).err().unwrap().contains("next.since exists already"));
        assert!(Target::create(&next, false).is_ok());
    }

    #[test]
    fn file_made_meanwhile_is_not_replaced() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("copy");
        let target = Target::create(&path, false).unwrap();
        fs::write(&path, "another").unwrap();
        assert_eq!(target.complete().unwrap_err().kind(), io::ErrorKind::AlreadyExists);
        assert_eq!(fs::read_to_string(&path).unwrap(), "another");
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 1);
    }
}
