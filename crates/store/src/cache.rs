//! Cache: blocks of objects in a folder with a size limit; the least recently used blocks are removed first.
//!
//! ```text
//! FOLDER/
//!   usage             bytes in the cache; locked (flock) while a process adds or removes blocks
//!   new               a block that is being written
//!   objects/KEY/N     block N of the object with this key: a hash of its address and version
//! ```
//! Any number of processes may share the folder: a block is complete or absent (rename), and a block that is removed
//! while a process reads it stays readable there. The folder is private to its owner (0700), because it holds contents
//! of guests.

use std::fs::{self, DirBuilder, File, OpenOptions};
use std::io::{self, Read, Seek, Write};
use std::os::unix::fs::{DirBuilderExt, FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use rustix::fs::{FlockOperation, flock};

use crate::StoreError;

/// Minimum size limit in bytes. With a smaller one, blocks read ahead would be removed before their use.
pub const CACHE_BYTES_MIN: u64 = 64 << 20;
/// Fill level after a clean-up, in percent of the limit. A clean-up walks over all blocks, so it makes space for many.
const ROOM_PERCENT: u64 = 90;
/// Minimum time between two updates of a block's time of use.
const USED_EVERY: Duration = Duration::from_secs(5);

/// A cache folder with its size limit.
#[derive(Debug)]
pub struct Cache {
    folder: PathBuf,
    bytes_max: u64,
}

/// The cached blocks of one version of one object.
#[derive(Debug)]
pub(crate) struct CachedObject {
    cache: Arc<Cache>,
    folder: PathBuf,
}

struct Block {
    path: PathBuf,
    bytes: u64,
    used: SystemTime,
}

impl Cache {
    /// Opens the cache and creates its folder. The limit is at least `CACHE_BYTES_MIN`.
    pub fn open(folder: &Path, bytes_max: u64) -> Result<Arc<Self>, StoreError> {
        let failed = |source| StoreError::Cache { path: folder.to_owned(), source };
        make_folder(&folder.join("objects")).map_err(failed)?;
        Ok(Arc::new(Self { folder: folder.to_owned(), bytes_max: bytes_max.max(CACHE_BYTES_MIN) }))
    }

    /// The blocks of the object with this URL and version.
    pub(crate) fn object(self: &Arc<Self>, url: &str, version: &str) -> CachedObject {
        let mut hasher = blake3::Hasher::new();
        hasher.update(url.as_bytes()).update(&[0]).update(version.as_bytes());
        let key = &hasher.finalize().to_hex()[..32];
        CachedObject { cache: self.clone(), folder: self.folder.join("objects").join(key) }
    }

    /// Locks the cache for changes. Returns the lock and the bytes in the cache.
    fn lock(&self) -> io::Result<(File, u64)> {
        let path = self.folder.join("usage");
        let mut usage =
            OpenOptions::new().read(true).write(true).create(true).truncate(false).mode(0o600).open(path)?;
        flock(&usage, FlockOperation::LockExclusive)?;
        let mut text = String::new();
        (&mut usage).take(32).read_to_string(&mut text)?;
        // A count that was not written completely is calculated again.
        let bytes = match text.trim().parse() {
            Ok(bytes) => bytes,
            Err(_) => self.blocks()?.iter().map(|block| block.bytes).sum(),
        };
        Ok((usage, bytes))
    }

    fn add(&self, path: &Path, bytes: &[u8]) -> io::Result<()> {
        let (mut usage, mut used_bytes) = self.lock()?;
        if path.exists() {
            return Ok(());
        }
        if used_bytes + bytes.len() as u64 > self.bytes_max {
            used_bytes = self.make_room(bytes.len() as u64)?;
        }
        // The count comes first: a process that dies in between leaves it too high, and the next clean-up corrects it.
        write_usage(&mut usage, used_bytes + bytes.len() as u64)?;
        let new = self.folder.join("new");
        let file = OpenOptions::new().write(true).create(true).truncate(true).mode(0o600).open(&new);
        let written = file.and_then(|mut file| file.write_all(bytes));
        let placed = written.and_then(|()| {
            make_folder(path.parent().expect("a block lies in its object's folder"))?;
            fs::rename(&new, path)
        });
        placed.inspect_err(|_| {
            let _ = fs::remove_file(&new);
            let _ = write_usage(&mut usage, used_bytes);
        })
    }

    fn remove(&self, path: &Path) -> io::Result<()> {
        let (mut usage, used_bytes) = self.lock()?;
        let Ok(found) = fs::metadata(path) else { return Ok(()) };
        fs::remove_file(path)?;
        write_usage(&mut usage, used_bytes.saturating_sub(found.len()))
    }

    /// Removes old blocks until `bytes` more fit. Returns the number of bytes that are left in the cache.
    fn make_room(&self, bytes: u64) -> io::Result<u64> {
        let mut blocks = self.blocks()?;
        blocks.sort_by_key(|block| block.used);
        let mut left: u64 = blocks.iter().map(|block| block.bytes).sum();
        for block in blocks {
            if left + bytes <= self.bytes_max / 100 * ROOM_PERCENT {
                break;
            }
            fs::remove_file(&block.path)?;
            left -= block.bytes;
            // Fails unless the folder is empty.
            let _ = block.path.parent().map(fs::remove_dir);
        }
        Ok(left)
    }

    fn blocks(&self) -> io::Result<Vec<Block>> {
        let mut blocks = Vec::new();
        for object in fs::read_dir(self.folder.join("objects"))? {
            for block in fs::read_dir(object?.path())? {
                let block = block?;
                let found = block.metadata()?;
                blocks.push(Block { path: block.path(), bytes: found.len(), used: found.modified()? });
            }
        }
        Ok(blocks)
    }
}

impl CachedObject {
    fn path(&self, block: u64) -> PathBuf {
        self.folder.join(block.to_string())
    }

    /// Whether the block is in the cache.
    pub fn has(&self, block: u64) -> bool {
        self.path(block).exists()
    }

    /// Fills `into` from this offset in the block on. Returns false if the block is absent or too short.
    pub fn read(&self, block: u64, offset: u64, into: &mut [u8]) -> bool {
        let Ok(file) = File::open(self.path(block)) else { return false };
        if file.read_exact_at(into, offset).is_err() {
            return false;
        }
        let used = file.metadata().and_then(|found| found.modified());
        if used.is_ok_and(|used| used.elapsed().is_ok_and(|ago| ago > USED_EVERY)) {
            let now = OpenOptions::new()
                .write(true)
                .open(self.path(block))
                .and_then(|file| file.set_modified(SystemTime::now()));
            // On failure the block is only removed earlier.
            let _ = now;
        }
        true
    }

    /// Adds a block. On failure, such as a full disk, the block is requested again at the next read.
    pub fn add(&self, block: u64, bytes: &[u8]) {
        if let Err(error) = self.cache.add(&self.path(block), bytes) {
            tracing::debug!(folder = %self.cache.folder.display(), %error, "a block is not kept");
        }
    }

    /// Removes a block whose contents are wrong.
    pub fn remove(&self, block: u64) {
        if let Err(error) = self.cache.remove(&self.path(block)) {
            tracing::warn!(folder = %self.cache.folder.display(), %error, "a block cannot be removed");
        }
    }
}

fn write_usage(usage: &mut File, bytes: u64) -> io::Result<()> {
    usage.set_len(0)?;
    usage.rewind()?;
    usage.write_all(format!("{bytes}\n").as_bytes())
}

fn make_folder(path: &Path) -> io::Result<()> {
    DirBuilder::new().recursive(true).mode(0o700).create(path)
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    const BLOCK: usize = 8 << 20;

    fn total(folder: &Path) -> u64 {
        let objects = fs::read_dir(folder.join("objects")).unwrap().map(|object| object.unwrap().path());
        let blocks = objects.flat_map(|object| fs::read_dir(object).unwrap());
        blocks.map(|block| block.unwrap().metadata().unwrap().len()).sum()
    }

    #[test]
    fn limit_holds_and_lru_blocks_go_first() {
        let folder = tempfile::tempdir().unwrap();
        let cache = Cache::open(folder.path(), 0).unwrap();
        let (one, other) = (cache.object("s3://b/p/ram", "1"), cache.object("s3://b/p/ram", "2"));
        for block in 0..8 {
            one.add(block, &vec![block as u8; BLOCK]);
            let old = SystemTime::now() - Duration::from_secs(1000 - block);
            File::options().write(true).open(one.path(block)).unwrap().set_modified(old).unwrap();
        }
        assert_eq!(total(folder.path()), CACHE_BYTES_MIN);
        let mut bytes = [0; 100];
        assert!(one.read(0, BLOCK as u64 - 100, &mut bytes) && bytes == [0; 100]);
        assert!(!one.read(3, BLOCK as u64 - 99, &mut bytes), "it ends before");
        for block in 0..20 {
            other.add(block, &vec![9; BLOCK]);
            assert!(total(folder.path()) <= CACHE_BYTES_MIN);
            assert!(other.has(block));
            if block == 0 {
                assert!(one.has(0) && !one.has(1) && one.has(7), "the first was used since");
            }
        }
        other.remove(19);
        other.remove(19);
        assert!(!other.has(19));
        let noted: u64 = fs::read_to_string(folder.path().join("usage")).unwrap().trim().parse().unwrap();
        assert_eq!(noted, total(folder.path()));
        assert_eq!(fs::metadata(other.path(18)).unwrap().permissions().mode() & 0o77, 0);
    }

    #[test]
    fn lost_count_is_calculated_anew() {
        let folder = tempfile::tempdir().unwrap();
        let object = Cache::open(folder.path(), 0).unwrap().object("a", "1");
        object.add(0, &[1; 1000]);
        fs::write(folder.path().join("usage"), "").unwrap();
        object.add(1, &[1; 500]);
        assert_eq!(fs::read_to_string(folder.path().join("usage")).unwrap(), "1500\n");
    }
}
