//! Residency: the memory that a machine's memory files occupy, measured from outside every 10 ms.
//!
//! The keeper reports a peak too, but a promise is better checked from outside. Allocated memory (`st_blocks`) counts, not the
//! length of the sparse files. A file that was unlinked while it is still mapped is not seen.

use std::cmp::Reverse;
use std::collections::BTreeMap;
use std::fs;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use crate::error::{Error, Result, at};
use crate::wait::Watched;

const INTERVAL: Duration = Duration::from_millis(10);
/// Every tenth measurement is kept with each file's share, for plots.
const LOOKS_A_SAMPLE: u64 = 10;
/// Unit of `st_blocks`, whatever the file system's block size.
const STAT_BLOCK_BYTES: u64 = 512;

/// Measurements of a folder's files.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Seen {
    pub samples: u64,
    pub peak_bytes: u64,
}

/// Memory that each file occupied at one moment.
#[derive(Clone, Debug)]
pub struct Sample {
    pub at: Instant,
    pub bytes: BTreeMap<String, u64>,
}

#[derive(Default)]
struct Notes {
    seen: Seen,
    samples: Vec<Sample>,
}

/// A thread that measures until it is ended or dropped.
pub struct Watch {
    stop: Sender<()>,
    thread: JoinHandle<io::Result<()>>,
    notes: Arc<Watched<Notes>>,
    folder: PathBuf,
}

impl Watch {
    pub fn start(folder: &Path) -> Result<Self> {
        let (stop, stopped) = channel();
        let notes = Arc::new(Watched::<Notes>::default());
        let (watched, theirs) = (folder.to_owned(), Arc::clone(&notes));
        let look = move || look(&watched, &theirs, &stopped);
        let thread = std::thread::Builder::new().name("residency".into()).spawn(look);
        let thread = thread.map_err(|source| Error::Start { program: "the residency watch".into(), source })?;
        Ok(Self { stop, thread, notes, folder: folder.to_owned() })
    }

    /// The measurements so far.
    pub fn so_far(&self) -> Seen {
        self.notes.lock().seen
    }

    /// The kept samples from `since` on.
    pub fn samples(&self, since: Instant) -> Vec<Sample> {
        self.notes.lock().samples.iter().filter(|sample| sample.at >= since).cloned().collect()
    }

    /// Ends the watch.
    pub fn end(self) -> Result<Seen> {
        // Fails only if the thread has ended already; its result then says why.
        let _ = self.stop.send(());
        let ended = self.thread.join().unwrap_or_else(|_| Err(io::Error::other("the watching thread panicked")));
        at("watch", &self.folder, ended)?;
        Ok(self.notes.lock().seen)
    }
}

fn look(folder: &Path, notes: &Watched<Notes>, stopped: &Receiver<()>) -> io::Result<()> {
    loop {
        let over = stopped.recv_timeout(INTERVAL) != Err(RecvTimeoutError::Timeout);
        let bytes = occupied_bytes(folder)?;
        notes.change(|notes| notes.add(bytes));
        if over {
            return Ok(());
        }
    }
}

impl Notes {
    fn add(&mut self, bytes: BTreeMap<String, u64>) {
        self.seen.peak_bytes = self.seen.peak_bytes.max(bytes.values().sum());
        if self.seen.samples.is_multiple_of(LOOKS_A_SAMPLE) {
            self.samples.push(Sample { at: Instant::now(), bytes });
        }
        self.seen.samples += 1;
    }
}

fn occupied_bytes(folder: &Path) -> io::Result<BTreeMap<String, u64>> {
    let mut entries = fs::read_dir(folder)?.collect::<io::Result<Vec<_>>>()?;
    // The living incarnation comes first: memory that a dead one releases for it during the measurement must not count twice.
    entries.sort_by_key(|entry| Reverse(entry.file_name()));
    let mut files = BTreeMap::new();
    for entry in entries {
        match entry.metadata() {
            Ok(metadata) => {
                let name = entry.file_name().to_string_lossy().into_owned();
                files.insert(name, metadata.blocks() * STAT_BLOCK_BYTES);
            }
            // Files may appear and disappear during the measurement.
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            Err(error) => return Err(error),
        }
    }
    Ok(files)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::FileExt;

    #[test]
    fn holes_count_as_no_memory() {
        let folder = tempfile::tempdir_in("/dev/shm").unwrap();
        let watch = Watch::start(folder.path()).unwrap();
        let sparse = fs::File::create(folder.path().join("ram-1")).unwrap();
        sparse.set_len(64 << 20).unwrap();
        sparse.write_all_at(&[1; 8192], 32 << 20).unwrap();
        assert_eq!(watch.end().unwrap().peak_bytes, 8192);
    }

    #[test]
    fn peak_survives_removal_of_its_file() {
        let folder = tempfile::tempdir_in("/dev/shm").unwrap();
        let begun = Instant::now();
        let watch = Watch::start(folder.path()).unwrap();
        fs::write(folder.path().join("ram-1"), vec![1; 1 << 20]).unwrap();
        while watch.samples(begun).last().is_none_or(|sample| !sample.bytes.contains_key("ram-1")) {
            std::thread::yield_now();
        }
        fs::remove_file(folder.path().join("ram-1")).unwrap();
        assert_eq!(watch.so_far().peak_bytes, 1 << 20);
        assert_eq!(watch.samples(begun).last().unwrap().bytes["ram-1"], 1 << 20);
        assert!(watch.samples(Instant::now()).is_empty());
    }

    #[test]
    fn missing_folder_is_an_error() {
        let error = Watch::start(Path::new("/no/such/folder")).unwrap().end().unwrap_err().to_string();
        assert_eq!(error, "watch /no/such/folder");
    }
}
