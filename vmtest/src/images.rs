//! Disk images, made on the host without mounting anything: `mke2fs -d` and `mkfs.xfs -p` fill a file system as they make it.

use std::fs;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::Path;
use std::process::Command;

use crate::error::{Error, Result, at};

/// A file to put into a new image.
#[derive(Clone, Debug)]
pub struct File {
    /// The path without a leading slash; missing folders are made.
    pub path: String,
    pub contents: Vec<u8>,
}

impl File {
    /// A file in which all blocks differ. The guest checks it with `probe verify PATH SEED`.
    pub fn pattern(path: &str, bytes: usize, seed: u64) -> Self {
        Self { path: path.into(), contents: crate::pattern::bytes(path, bytes, seed) }
    }
}

/// The smallest external journal of an ext4 with 4 KiB blocks: 1024 blocks, behind two that describe it.
const JOURNAL_BYTES: u64 = 1026 * 4096;
const JOURNAL_UUID: &str = "3c0f9a52-6d0b-4b0e-9e55-6a5d1f0e7a11";
const FILE_SYSTEM_UUID: &str = "b7c41d1e-2f55-4a0c-8f3b-0f4f3a9d6c22";

/// The smallest XFS that mkfs.xfs makes, and its smallest external log.
pub const XFS_MIB_MIN: u64 = 300;
pub const XFS_LOG_MIB_MIN: u64 = 64;

/// A btrfs with space for some files: mkfs.btrfs makes none of less than 109 MiB.
const BTRFS_MIB_MIN: u64 = 256;

/// Whether these are a keeper's notes of the image, the first disk's, as it is at present.
pub fn is_noted(notes: &[u8], image: &Path) -> Result<bool> {
    let image = at("look at", image, fs::metadata(image))?;
    let notes: serde_json::Value = serde_json::from_slice(notes).unwrap_or_default();
    Ok(notes["disks"][0]["rest"][0]["changed"] == serde_json::json!([image.ctime(), image.ctime_nsec()]))
}

/// An image of zeros: a sparse file.
pub fn empty(image: &Path, mib: u64) -> Result<()> {
    let file = at("create", image, fs::File::create(image))?;
    at("size", image, file.set_len(mib << 20))
}

/// An ext4 image with files in it.
pub fn ext4(image: &Path, mib: u64, files: &[File]) -> Result<()> {
    ext4_with(image, mib, files, &[])
}

/// An ext4 image with blocks of 1 KiB.
pub fn ext4_of_small_blocks(image: &Path, mib: u64, files: &[File]) -> Result<()> {
    ext4_with(image, mib, files, &["-b", "1024"])
}

/// An ext4 image that the guest does not initialise further in the background, and that reserves no blocks for root.
pub fn ext4_for_good(image: &Path, mib: u64, files: &[File]) -> Result<()> {
    ext4_with(image, mib, files, &["-m", "0", "-E", "lazy_itable_init=0,lazy_journal_init=0"])
}

fn ext4_with(image: &Path, mib: u64, files: &[File], options: &[&str]) -> Result<()> {
    empty(image, mib)?;
    let tree = tree_of(files)?;
    let mut command = Command::new(program("mke2fs"));
    command.args(["-q", "-F", "-t", "ext4", "-b", "4096"]).args(options).arg("-d").arg(tree.path());
    tool(command.arg(image))
}

/// A folder with these files.
fn tree_of(files: &[File]) -> Result<tempfile::TempDir> {
    let tree = tempfile::tempdir().map_err(|source| Error::Start { program: "a temporary folder".into(), source })?;
    for file in files {
        let path = tree.path().join(&file.path);
        let folder = path.parent().expect("a file is in a folder");
        at("create", folder, fs::create_dir_all(folder))?;
        at("write", &path, fs::write(&path, &file.contents))?;
    }
    Ok(tree)
}

/// A btrfs image with files in its top-level subvolume.
pub fn btrfs(image: &Path, mib: u64, files: &[File]) -> Result<()> {
    empty(image, mib.max(BTRFS_MIB_MIN))?;
    let tree = tree_of(files)?;
    tool(Command::new(program("mkfs.btrfs")).args(["-q", "--rootdir"]).arg(tree.path()).arg(image))
}

/// An ext4 image with its journal in a second image. Mount it with `journal_path=`.
pub fn ext4_with_journal_apart(image: &Path, journal: &Path, mib: u64, files: &[File]) -> Result<()> {
    let options = ["-m", "0", "-O", "^has_journal", "-U", FILE_SYSTEM_UUID, "-E", "lazy_itable_init=0"];
    ext4_with(image, mib, files, &options)?;
    let journal_file = at("create", journal, fs::File::create(journal))?;
    at("size", journal, journal_file.set_len(JOURNAL_BYTES))?;
    let mut command = Command::new(program("mke2fs"));
    tool(command.args(["-q", "-F", "-b", "4096", "-O", "journal_dev", "-U", JOURNAL_UUID]).arg(journal))?;
    // `mke2fs -J device=` does both of these, but only for block devices.
    for request in ["feature has_journal", "ssv journal_inum 0", &format!("ssv journal_uuid {JOURNAL_UUID}")] {
        tool(Command::new(program("debugfs")).args(["-w", "-R", request]).arg(image))?;
    }
    // The journal's own superblock is block 1. It holds the number of its users, and their UUIDs.
    let put = |at_byte: u64, bytes: &[u8]| at("write to", journal, journal_file.write_all_at(bytes, 4096 + at_byte));
    put(0x40, &1u32.to_be_bytes())?;
    let user = u128::from_str_radix(&FILE_SYSTEM_UUID.replace('-', ""), 16).expect("a constant of hexadecimal digits");
    put(0x100, &user.to_be_bytes())
}

/// An XFS image with files in its root folder.
pub fn xfs(image: &Path, mib: u64, files: &[File]) -> Result<()> {
    empty(image, mib.max(XFS_MIB_MIN))?;
    let contents =
        tempfile::tempdir().map_err(|source| Error::Start { program: "a temporary folder".into(), source })?;
    // A prototype file: a boot block, sizes, then the root folder and its contents.
    let mut prototype = String::from("/\n0 0\nd--755 0 0\n");
    for (index, file) in files.iter().enumerate() {
        let path = contents.path().join(index.to_string());
        at("write", &path, fs::write(&path, &file.contents))?;
        prototype += &format!("{} ---644 0 0 {}\n", file.path, path.display());
    }
    prototype += "$\n";
    let list = contents.path().join("prototype");
    at("write", &list, fs::write(&list, prototype))?;
    tool(Command::new(program("mkfs.xfs")).args(["-q", "-f", "-p"]).arg(list).arg(image))
}

/// An empty XFS image of the smallest size with its log in a second image. Mount it with `logdev=`.
pub fn xfs_with_log_apart(image: &Path, log: &Path) -> Result<()> {
    empty(image, XFS_MIB_MIN)?;
    empty(log, XFS_LOG_MIB_MIN)?;
    let log = format!("logdev={}", log.display());
    tool(Command::new(program("mkfs.xfs")).args(["-q", "-f", "-l", &log]).arg(image))
}

/// Fails unless the ext4 file system that begins `offset` bytes into an image is clean. It must not be mounted.
pub fn check_ext4(image: &Path, offset: u64) -> Result<()> {
    let place = format!("{}?offset={offset}", image.display());
    tool(Command::new(program("e2fsck")).args(["-f", "-n"]).arg(place))
}

/// Whether the ext4 file system of a raw image has a journal that must be replayed at the next mount.
pub fn ext4_needs_recovery(image: &Path) -> Result<bool> {
    // `s_feature_incompat` of the superblock, and its bit `RECOVER`.
    let mut features = [0; 4];
    let read = fs::File::open(image).and_then(|file| file.read_exact_at(&mut features, 1024 + 0x60));
    at("read", image, read)?;
    Ok(u32::from_le_bytes(features) & 0x4 != 0)
}

/// Fails unless the XFS file system of an image is clean. It must not be mounted.
pub fn check_xfs(image: &Path) -> Result<()> {
    tool(Command::new(program("xfs_repair")).arg("-n").arg(image))
}

/// Fails unless an XFS file system with an external log is clean. It must not be mounted.
pub fn check_xfs_with_log_apart(image: &Path, log: &Path) -> Result<()> {
    tool(Command::new(program("xfs_repair")).args(["-n", "-l"]).arg(log).arg(image))
}

/// Copies a part of an image into a new image. Both bounds must be whole MiB.
pub fn cut_out(image: &Path, bytes: std::ops::Range<u64>, part: &Path) -> Result<()> {
    let mib = |bytes: u64| bytes >> 20;
    let mut command = Command::new("dd");
    command.arg(format!("if={}", image.display())).arg(format!("of={}", part.display()));
    let count = [("skip", mib(bytes.start)), ("count", mib(bytes.end - bytes.start))];
    tool(command.args(["bs=1M", "conv=sparse"]).args(count.map(|(key, mib)| format!("{key}={mib}"))))
}

/// Makes a store for the variables of UEFI firmware at `vars`, and returns the template that it was copied from. Prints a message
/// and returns `None` on a host that has no template.
pub fn firmware_vars(vars: &Path) -> Option<&'static Path> {
    let template = Path::new("/usr/share/OVMF/OVMF_VARS_4M.fd");
    if !template.is_file() {
        eprintln!("skipped: {} is missing (Debian: apt install ovmf)", template.display());
        return None;
    }
    std::fs::copy(template, vars).expect("our own file");
    Some(template)
}

/// Copies an image. The copy stays sparse, and shares blocks with the original where the file system can.
pub fn copy(from: &Path, image: &Path) -> Result<()> {
    tool(Command::new("cp").args(["--reflink=auto", "--sparse=always"]).arg(from).arg(image))
}

/// The offset at which two files first differ.
pub fn first_difference(one: &Path, other: &Path) -> Result<Option<usize>> {
    let (one, other) = (at("read", one, fs::read(one))?, at("read", other, fs::read(other))?);
    Ok(crate::pattern::first_difference(&one, &other))
}

/// The path of a file-system tool, which may not be in an ordinary user's `PATH`.
fn program(name: &str) -> std::path::PathBuf {
    let system = Path::new("/usr/sbin").join(name);
    if system.is_file() { system } else { name.into() }
}

pub(crate) fn tool(command: &mut Command) -> Result<()> {
    let text = || format!("{command:?}");
    let name = command.get_program().to_string_lossy().into_owned();
    let described = text();
    let output = command.output().map_err(|source| Error::Start { program: name, source })?;
    if output.status.success() {
        return Ok(());
    }
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    Err(Error::Command { command: described, status: output.status, said })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_ext4_image_holds_its_files() {
        let home = tempfile::tempdir().unwrap();
        let image = home.path().join("disk.img");
        let file = File::pattern("deep/er/a.bin", 100_000, 3);
        ext4(&image, 32, std::slice::from_ref(&file)).unwrap();
        let read = Command::new(program("debugfs")).args(["-R", "cat deep/er/a.bin"]).arg(&image).output().unwrap();
        assert_eq!(crate::pattern::first_difference(&read.stdout, &file.contents), None);
    }

    #[test]
    fn an_xfs_image_is_sound() {
        let home = tempfile::tempdir().unwrap();
        let image = home.path().join("disk.img");
        xfs(&image, 0, &[File::pattern("a.bin", 100_000, 3)]).unwrap();
        check_xfs(&image).unwrap();
        assert_eq!(fs::metadata(&image).unwrap().len(), XFS_MIB_MIN << 20);
        fs::write(&image, vec![0; 1 << 20]).unwrap();
        check_xfs(&image).unwrap_err();
    }

    #[test]
    fn a_damaged_ext4_image_is_not_clean() {
        let home = tempfile::tempdir().unwrap();
        let [volume, image] = ["volume.img", "disk.img"].map(|name| home.path().join(name));
        ext4(&volume, 32, &[File::pattern("a.bin", 100_000, 3)]).unwrap();
        let volume = fs::read(&volume).unwrap();
        fs::write(&image, [vec![0; 4096], volume.clone()].concat()).unwrap();
        check_ext4(&image, 4096).unwrap();
        // Marks blocks in use as free in the block bitmap.
        let damaged = fs::File::options().write(true).open(&image).unwrap();
        let bitmap = u32::from_le_bytes(volume[4096..4100].try_into().unwrap());
        damaged.write_all_at(&[0; 64], 4096 + u64::from(bitmap) * 4096).unwrap();
        check_ext4(&image, 4096).unwrap_err();
    }

    #[test]
    fn failed_tool_reports_its_reason() {
        let home = tempfile::tempdir().unwrap();
        let image = home.path().join("small.img");
        let error = ext4(&image, 1, &[File::pattern("big", 4 << 20, 1)]).unwrap_err().to_string();
        assert!(error.contains("mke2fs") && error.contains("small.img"), "{error}");
    }
}
