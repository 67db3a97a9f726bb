//! A disk of a snapshot: a clone of the image that shares its blocks where the file system can (FICLONE), and a copy where
//! the caller has the time.

use std::fs::{self, File};
use std::io::{self, Read};
use std::os::unix::fs::{FileExt, FileTypeExt};
use std::path::Path;

use rustix::fs::{SeekFrom, ioctl_ficlone, seek};
use rustix::io::Errno;

use super::{SnapshotError, create_file};

/// Copied at a time; and so often an order to stop is heard.
const COPY_BYTES: usize = 1 << 20;
const QCOW2_MAGIC: &[u8; 4] = b"QFI\xfb";
/// Longest name of a backing image that the format knows.
const BACKING_NAME_BYTES_MAX: u32 = 1023;

/// May an image be copied where it cannot share its blocks?
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CloneWay {
    ShareOnly,
    ShareOrCopy,
}

/// A clone that was made.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ClonedImage {
    pub bytes: u64,
    pub shared: bool,
}

/// Clones an image that nobody writes to at the moment. `go_on` is asked now and then while bytes are copied.
pub fn clone_image(
    disk: &str,
    source: &Path,
    target: &Path,
    way: CloneWay,
    mut go_on: impl FnMut() -> bool,
) -> Result<ClonedImage, SnapshotError> {
    let refused = |what: String| SnapshotError::Disk { disk: disk.to_owned(), path: source.to_owned(), what };
    let failed = |error: io::Error| refused(format!("cannot be cloned: {error}"));
    let from = File::open(source).map_err(failed)?;
    let kind = from.metadata().map_err(failed)?;
    if !kind.is_file() {
        let what = if kind.file_type().is_block_device() { "a block device" } else { "no file" };
        return Err(refused(format!("is {what}; only image files can be saved so far")));
    }
    if let Some(backing) = relative_backing(&from).map_err(failed)? {
        return Err(refused(format!(
            "names its backing image {backing:?} without its folder, and would not find it from the snapshot; name it with \
             qemu-img rebase -u -b /ABSOLUTE/PATH -F FORMAT"
        )));
    }
    let to = create_file(target).map_err(SnapshotError::io(target, "made"))?;
    let shared = match ioctl_ficlone(&to, &from) {
        Ok(()) => true,
        Err(Errno::OPNOTSUPP | Errno::XDEV | Errno::INVAL | Errno::NOTTY) if way == CloneWay::ShareOrCopy => {
            copy(&from, &to, kind.len(), &mut go_on).map_err(failed)?;
            false
        }
        Err(errno @ (Errno::OPNOTSUPP | Errno::XDEV | Errno::INVAL | Errno::NOTTY)) => {
            return Err(refused(format!(
                "cannot be cloned to {} at once ({}): image and snapshot must be on one file system that shares blocks, as \
                 xfs and btrfs do; or save with --stop, which copies",
                target.display(),
                io::Error::from(errno)
            )));
        }
        Err(errno) => return Err(failed(errno.into())),
    };
    to.sync_all().map_err(SnapshotError::io(target, "written"))?;
    Ok(ClonedImage { bytes: kind.len(), shared })
}

/// Holes stay holes. By reading and writing: `copy_file_range` does not go from one file system to another.
fn copy(from: &File, to: &File, bytes: u64, go_on: &mut impl FnMut() -> bool) -> io::Result<()> {
    to.set_len(bytes)?;
    let mut buffer = vec![0; COPY_BYTES];
    let mut offset = 0;
    while offset < bytes {
        let start = match seek(from, SeekFrom::Data(offset)) {
            Err(Errno::NXIO) => return Ok(()),
            start => start?,
        };
        let end = seek(from, SeekFrom::Hole(start))?;
        offset = start;
        while offset < end {
            if !go_on() {
                return Err(io::Error::new(io::ErrorKind::Interrupted, "the save was called off"));
            }
            let piece = &mut buffer[..COPY_BYTES.min((end - offset) as usize)];
            from.read_exact_at(piece, offset)?;
            to.write_all_at(piece, offset)?;
            offset += piece.len() as u64;
        }
    }
    Ok(())
}

/// The name of a qcow2 image's backing image if it depends on the image's folder.
fn relative_backing(image: &File) -> io::Result<Option<String>> {
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
    let name = String::from_utf8_lossy(&name).into_owned();
    Ok((!name.starts_with('/')).then_some(name))
}

/// Can an image in this folder share its blocks with a clone in that one? A clone of nothing is tried.
pub fn can_share(disk: &str, source: &Path, folder: &Path) -> Result<(), SnapshotError> {
    let target = folder.join(".hearth-share");
    let tried = clone_image(disk, source, &target, CloneWay::ShareOnly, || true);
    // It was made by this try, or never.
    let _ = fs::remove_file(&target);
    tried.map(drop)
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::MetadataExt;

    use super::*;

    /// `/dev/shm` is a tmpfs on every Linux system, and cannot share blocks.
    fn folder() -> tempfile::TempDir {
        tempfile::tempdir_in("/dev/shm").unwrap()
    }

    #[test]
    fn where_blocks_cannot_be_shared_they_are_copied_or_it_is_said() {
        let folder = folder();
        // On another file system.
        let elsewhere = tempfile::tempdir_in(env!("CARGO_MANIFEST_DIR")).unwrap();
        let (source, target) = (folder.path().join("a.img"), elsewhere.path().join("b.img"));
        let image = create_file(&source).unwrap();
        image.set_len(8 << 20).unwrap();
        image.write_all_at(&[7; 5000], 3 << 20).unwrap();
        let refusal = clone_image("root", &source, &target, CloneWay::ShareOnly, || true).unwrap_err().to_string();
        assert!(refusal.starts_with("disk root: ") && refusal.contains("save with --stop"), "{refusal}");
        let made = clone_image("root", &source, &target, CloneWay::ShareOrCopy, || true).unwrap();
        assert_eq!(made, ClonedImage { bytes: 8 << 20, shared: false });
        assert!(fs::read(&source).unwrap() == fs::read(&target).unwrap());
        assert!(fs::metadata(&target).unwrap().blocks() * 512 < 1 << 20, "holes stay");
        assert_eq!(fs::metadata(&target).unwrap().mode() & 0o777, 0o600);
        let stopped = clone_image("root", &source, &target, CloneWay::ShareOrCopy, || false).unwrap_err().to_string();
        assert!(stopped.contains("called off"), "{stopped}");
    }

    #[test]
    fn what_would_not_be_found_again_is_refused() {
        let folder = folder();
        let (source, target) = (folder.path().join("a.qcow2"), folder.path().join("b.qcow2"));
        let mut header = vec![0; 512];
        header[..4].copy_from_slice(QCOW2_MAGIC);
        header[8..16].copy_from_slice(&100u64.to_be_bytes());
        header[16..20].copy_from_slice(&8u32.to_be_bytes());
        let mut check = |name: &[u8; 8], expect: Option<&str>| {
            header[100..108].copy_from_slice(name);
            fs::write(&source, &header).unwrap();
            let made = clone_image("root", &source, &target, CloneWay::ShareOrCopy, || true);
            let said = made.err().map(|error| error.to_string());
            assert_eq!(said.is_some(), expect.is_some(), "{said:?}");
            assert!(expect.is_none_or(|expect| said.is_some_and(|said| said.contains(expect))));
        };
        check(b"/base.im", None);
        check(b"base.img", Some("\"base.img\" without its folder"));
        let device = clone_image("root", Path::new("/dev/null"), &target, CloneWay::ShareOrCopy, || true);
        assert!(device.unwrap_err().to_string().contains("is no file"));
    }
}
