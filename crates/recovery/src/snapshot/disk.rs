//! Disk of a snapshot: a clone of the image that shares its blocks where the file system can (FICLONE). Elsewhere the
//! disk's server copies it while the guest runs (`hearth_disk::image::FrozenImage`).

use std::fs::{self, File};
use std::io::{self, Read};
use std::os::unix::fs::{FileExt, FileTypeExt};
use std::path::Path;

use rustix::fs::ioctl_ficlone;
use rustix::io::Errno;

use super::{SnapshotError, create_file};

const QCOW2_MAGIC: &[u8; 4] = b"QFI\xfb";
/// Maximum length of a backing image's name in the qcow2 format.
const BACKING_NAME_BYTES_MAX: u32 = 1023;

/// Clones an image that nobody writes to at the moment to `target`, a new file. Returns false if they cannot share
/// blocks. Its path is for the error alone: another file may have it by now.
pub fn share_image(disk: &str, path: &Path, source: &File, target: &File) -> Result<bool, SnapshotError> {
    match ioctl_ficlone(target, source) {
        Ok(()) => Ok(true),
        Err(Errno::OPNOTSUPP | Errno::XDEV | Errno::INVAL | Errno::NOTTY) => Ok(false),
        Err(errno) => Err(refused(disk, path, format!("cannot be cloned: {}", io::Error::from(errno)))),
    }
}

/// Checks that this image can be saved to this folder. Returns whether it would share its blocks there, by cloning it
/// once.
pub fn can_share(disk: &str, source: &Path, format: &str, folder: &Path) -> Result<bool, SnapshotError> {
    let failed = |error| refused(disk, source, format!("cannot be looked at: {error}"));
    let image = File::open(source).map_err(failed)?;
    let kind = image.metadata().map_err(failed)?;
    if !kind.is_file() {
        let what = if kind.file_type().is_block_device() { "a block device" } else { "not a regular file" };
        return Err(refused(disk, source, format!("is {what}; only image files can be saved so far")));
    }
    let backing = backing(&image, format).map_err(failed)?;
    if let Some(backing) = backing.filter(|name| !name.starts_with('/')) {
        let what = format!(
            "names its backing image {backing:?} without its folder, and would not find it from the snapshot; name it with \
             qemu-img rebase -u -b /ABSOLUTE/PATH -F FORMAT"
        );
        return Err(refused(disk, source, what));
    }
    let path = folder.join(".hearth-share");
    let target = create_file(&path).map_err(SnapshotError::io(&path, "made"))?;
    let shares = share_image(disk, source, &image, &target);
    // The file was made here.
    let _ = fs::remove_file(&path);
    shares
}

fn refused(disk: &str, path: &Path, what: String) -> SnapshotError {
    SnapshotError::Disk { disk: disk.to_owned(), path: path.to_owned(), what }
}

/// Name of the backing image that a disk lies over, if any.
pub fn backing_image(path: &Path, format: &str) -> Result<Option<String>, SnapshotError> {
    File::open(path).and_then(|image| backing(&image, format)).map_err(SnapshotError::io(path, "read"))
}

/// Name of a qcow2 image's backing image. A raw image has none, whatever its guest has written into it.
pub fn backing(image: &File, format: &str) -> io::Result<Option<String>> {
    if format != "qcow2" {
        return Ok(None);
    }
    let mut header = Vec::new();
    image.take(20).read_to_end(&mut header)?;
    if header.len() < 20 || &header[..4] != QCOW2_MAGIC {
        return Ok(None);
    }
    let offset = u64::from_be_bytes(header[8..16].try_into().expect("8 bytes"));
    let length = u32::from_be_bytes(header[16..20].try_into().expect("4 bytes"));
    if offset == 0 || length > BACKING_NAME_BYTES_MAX {
        return Ok(None);
    }
    let mut name = vec![0; length as usize];
    image.read_exact_at(&mut name, offset)?;
    Ok(Some(String::from_utf8_lossy(&name).into_owned()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn missing_block_sharing_is_told_and_leaves_nothing() {
        // Every Linux system has this tmpfs, which cannot share blocks.
        let folder = tempfile::tempdir_in("/dev/shm").unwrap();
        let (source, snapshot) = (folder.path().join("a.img"), folder.path().join("snapshot"));
        fs::write(&source, [7; 5000]).unwrap();
        fs::create_dir(&snapshot).unwrap();
        assert!(!can_share("root", &source, "raw", &snapshot).unwrap());
        assert_eq!(fs::read_dir(&snapshot).unwrap().count(), 0);
    }

    #[test]
    fn images_that_would_not_be_found_are_refused() {
        let folder = tempfile::tempdir_in("/dev/shm").unwrap();
        let source = folder.path().join("a.qcow2");
        let mut header = vec![0; 512];
        header[..4].copy_from_slice(QCOW2_MAGIC);
        header[8..16].copy_from_slice(&100u64.to_be_bytes());
        header[16..20].copy_from_slice(&8u32.to_be_bytes());
        let mut check = |name: &[u8; 8], format: &str, expect: Option<&str>| {
            header[100..108].copy_from_slice(name);
            fs::write(&source, &header).unwrap();
            let said = can_share("root", &source, format, folder.path()).err().map(|error| error.to_string());
            assert_eq!(said.is_some(), expect.is_some(), "{said:?}");
            assert!(expect.is_none_or(|expect| said.is_some_and(|said| said.contains(expect))));
        };
        check(b"/base.im", "qcow2", None);
        check(b"base.img", "qcow2", Some("\"base.img\" without its folder"));
        // A guest wrote this into its raw disk.
        check(b"base.img", "raw", None);
        let device = can_share("root", Path::new("/dev/null"), "raw", folder.path());
        assert!(device.unwrap_err().to_string().contains("is not a regular file"));
    }
}
