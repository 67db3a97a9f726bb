//! The preload library: embedded in the keeper, written where QEMU can load it.

use std::ffi::OsString;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

const LIBRARY: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/preload.so"));

/// For so long a QEMU that is to take a guest gives no heap back (see `heap.c`): longer than a hop may take.
const KEEP_HEAP_S: &str = "30";

/// What QEMU needs in its environment to hand over its userfaultfd, to heed its valves, and to have heap at hand.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Preload {
    pub library: PathBuf,
    /// Where the keeper waits for it.
    pub socket: PathBuf,
    /// The file of its valves; none without networks that have any.
    pub valves: Option<PathBuf>,
    /// A guest will stand still while QEMU takes it.
    pub keeps_heap: bool,
}

impl Preload {
    pub fn environment(&self) -> impl Iterator<Item = (&'static str, OsString)> {
        let always = [("LD_PRELOAD", &self.library), ("HEARTH_USERFAULT_SOCKET", &self.socket)];
        let valves = self.valves.as_ref().map(|valves| ("HEARTH_VALVES", valves));
        let paths = always.into_iter().chain(valves).map(|(name, path)| (name, path.clone().into()));
        paths.chain(self.keeps_heap.then(|| ("HEARTH_KEEP_HEAP_S", KEEP_HEAP_S.into())))
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
