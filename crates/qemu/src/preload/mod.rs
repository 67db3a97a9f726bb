//! The preload library: embedded in the keeper, written where QEMU can load it.

use std::ffi::OsString;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

const LIBRARY: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/preload.so"));

/// What QEMU needs in its environment to hand over its userfaultfd, and to heed its valves.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Preload {
    pub library: PathBuf,
    /// Where the keeper waits for it.
    pub socket: PathBuf,
    /// The file of its valves; none without networks that have any.
    pub valves: Option<PathBuf>,
}

impl Preload {
    pub fn environment(&self) -> impl Iterator<Item = (&'static str, OsString)> {
        let always = [("LD_PRELOAD", &self.library), ("HEARTH_USERFAULT_SOCKET", &self.socket)];
        let valves = self.valves.as_ref().map(|valves| ("HEARTH_VALVES", valves));
        always.into_iter().chain(valves).map(|(name, path)| (name, path.clone().into()))
    }
}

/// Writes the library into a folder; one of an older keeper is replaced as a whole, for a QEMU may be loading it.
pub fn install(folder: &Path) -> io::Result<PathBuf> {
    let path = folder.join("preload.so");
    if fs::read(&path).is_ok_and(|present| present == LIBRARY) {
        return Ok(path);
    }
    let temporary = folder.join("preload.so.new");
    fs::write(&temporary, LIBRARY)?;
    fs::rename(&temporary, &path)?;
    Ok(path)
}
