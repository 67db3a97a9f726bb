//! Folders that are made once and kept: guest kernels, images, the unpacked QEMU.
//!
//! stamp matches -> done; else lock -> check again -> make in `NAME.new` -> write the stamp into it -> swap by rename.
//!
//! An interrupted run leaves a `NAME.new` that the next run removes, never a half-made folder under its final name. Two parallel
//! runs wait for each other at the lock file; the kernel releases the lock of a killed run.

use std::collections::hash_map::DefaultHasher;
use std::fs::{self, File};
use std::hash::{Hash, Hasher};
use std::io;
use std::path::{Path, PathBuf};

const STAMP: &str = ".stamp";

#[derive(Debug, thiserror::Error)]
#[error("{what} {path}")]
pub struct CacheError {
    what: &'static str,
    path: PathBuf,
    source: io::Error,
}

/// Attaches the path to an I/O error.
pub fn at<T>(what: &'static str, path: &Path, result: io::Result<T>) -> Result<T, CacheError> {
    result.map_err(|source| CacheError { what, path: path.to_owned(), source })
}

/// Whether `folder` was made from exactly these inputs.
pub fn is_fresh(folder: &Path, inputs: &[&str]) -> bool {
    fs::read_to_string(folder.join(STAMP)).is_ok_and(|stamp| stamp == stamp_of(inputs))
}

/// Makes `folder` with `make`, which gets an empty folder, unless it was already made from the same inputs.
pub fn ensure<E: From<CacheError>>(
    folder: &Path,
    inputs: &[&str],
    make: impl FnOnce(&Path) -> Result<(), E>,
) -> Result<(), E> {
    if is_fresh(folder, inputs) {
        return Ok(());
    }
    let _lock = lock(&with_suffix(folder, "lock"))?;
    if is_fresh(folder, inputs) {
        return Ok(());
    }
    println!("making {}", folder.display());
    let (fresh, old) = (with_suffix(folder, "new"), with_suffix(folder, "old"));
    for leftover in [&fresh, &old] {
        remove(leftover)?;
    }
    at("create", &fresh, fs::create_dir_all(&fresh))?;
    make(&fresh)?;
    let stamp = fresh.join(STAMP);
    at("write", &stamp, fs::write(&stamp, stamp_of(inputs)))?;
    if folder.exists() {
        at("move away", folder, fs::rename(folder, &old))?;
    }
    at("move into place", folder, fs::rename(&fresh, folder))?;
    Ok(remove(&old)?)
}

/// Holds an exclusive lock until the returned file is dropped.
pub fn lock(path: &Path) -> Result<File, CacheError> {
    if let Some(parent) = path.parent() {
        at("create", parent, fs::create_dir_all(parent))?;
    }
    let file = at("open", path, File::create(path))?;
    let locked = rustix::fs::flock(&file, rustix::fs::FlockOperation::LockExclusive);
    at("lock", path, locked.map_err(io::Error::from))?;
    Ok(file)
}

fn remove(folder: &Path) -> Result<(), CacheError> {
    match fs::remove_dir_all(folder) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => at("remove", folder, Err(error)),
        _ => Ok(()),
    }
}

fn with_suffix(folder: &Path, suffix: &str) -> PathBuf {
    let mut name = folder.as_os_str().to_owned();
    name.push(".");
    name.push(suffix);
    name.into()
}

/// The stamp of some inputs. Another toolchain may change the hash; then folders are made again, without harm.
fn stamp_of(inputs: &[&str]) -> String {
    let mut hasher = DefaultHasher::new();
    inputs.hash(&mut hasher);
    format!("{:016x}\n", hasher.finish())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn make_counting(folder: &Path, inputs: &[&str], count: &mut u32) {
        ensure::<CacheError>(folder, inputs, |new| {
            *count += 1;
            at("write", new, fs::write(new.join("made"), inputs.concat()))
        })
        .unwrap();
    }

    #[test]
    fn only_changed_inputs_are_made_again() {
        let home = tempfile::tempdir().unwrap();
        let (folder, mut count) = (home.path().join("thing"), 0);
        make_counting(&folder, &["a", "b"], &mut count);
        make_counting(&folder, &["a", "b"], &mut count);
        assert_eq!(count, 1);
        make_counting(&folder, &["ab"], &mut count);
        assert_eq!((count, fs::read_to_string(folder.join("made")).unwrap()), (2, "ab".into()));
    }

    #[test]
    fn failed_attempt_leaves_the_old_folder() {
        let home = tempfile::tempdir().unwrap();
        let (folder, mut count) = (home.path().join("thing"), 0);
        make_counting(&folder, &["1"], &mut count);
        let failed = ensure::<CacheError>(&folder, &["2"], |new| {
            fs::write(new.join("half"), "").unwrap();
            at("reach", new, Err(io::Error::other("interrupted")))
        });
        assert!(failed.is_err());
        assert_eq!(fs::read_to_string(folder.join("made")).unwrap(), "1");
        make_counting(&folder, &["2"], &mut count);
        assert!(!folder.join("half").exists());
    }

    #[test]
    fn parallel_runs_make_a_folder_once() {
        let home = tempfile::tempdir().unwrap();
        let folder = home.path().join("thing");
        let made = std::sync::atomic::AtomicU32::new(0);
        std::thread::scope(|scope| {
            for _ in 0..8 {
                scope.spawn(|| {
                    ensure::<CacheError>(&folder, &["x"], |_| {
                        made.fetch_add(1, std::sync::atomic::Ordering::SeqCst);
                        Ok(())
                    })
                    .unwrap();
                });
            }
        });
        assert_eq!(made.into_inner(), 1);
    }
}
