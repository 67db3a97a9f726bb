//! The preload library: embedded in the keeper, and written to a file that QEMU loads.

use std::ffi::OsString;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

const LIBRARY: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/preload.so"));

/// Seconds for which a QEMU that receives a guest keeps its heap (see `heap.c`): longer than a hop may take.
const KEEP_HEAP_S: &str = "30";

/// The environment that QEMU needs to hand over its userfaultfd, to obey its gates and to keep its heap.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Preload {
    /// Path of the library.
    pub library: PathBuf,
    /// Socket on which the keeper waits for the userfaultfd.
    pub socket: PathBuf,
    /// File of the gates. None without networks that have gates.
    pub gates: Option<PathBuf>,
    /// Whether QEMU keeps free heap memory, because a guest stands still while QEMU receives it.
    pub keeps_heap: bool,
}

impl Preload {
    /// Variables to add to QEMU's environment.
    pub fn environment(&self) -> impl Iterator<Item = (&'static str, OsString)> {
        let always = [("LD_PRELOAD", &self.library), ("HEARTH_USERFAULT_SOCKET", &self.socket)];
        let gates = self.gates.as_ref().map(|gates| ("HEARTH_VALVES", gates));
        let paths = always.into_iter().chain(gates).map(|(name, path)| (name, path.clone().into()));
        paths.chain(self.keeps_heap.then(|| ("HEARTH_KEEP_HEAP_S", KEEP_HEAP_S.into())))
    }
}

/// Writes the library into a folder and returns its path. The old file of an earlier keeper is replaced by a rename,
/// because a QEMU may be loading it.
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
