//! Trace: adds what one more restored guest used to the working set of its snapshot.
//!
//! folder: lock -> merge with the present set -> is the snapshot still there? -> rename into its place
//! store:  read the present set -> merge with it -> is the snapshot still there? -> put, if the present set is still that one | once
//!         more, with the new set
//!
//! So traces that end at the same moment are all in the set. In a store without conditional requests the last one wins.

use std::fs::{self, File};
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use hearth_store::{Replaced, UploadError};
use rustix::fs::{FlockOperation, flock};

use super::pages::{PagesExpected, Sealed};
use super::place::Far;
use super::working_set::{aged_pages, merge, write};
use super::{Snapshot, SnapshotError, WORKING_SET, faults};

/// Maximum number of attempts, because others may be faster.
const ATTEMPTS: u32 = 50;
/// Maximum size of a set that is sent in one request, and held in memory for it. A larger set, which no guest has had
/// so far, replaces the present one.
const REPLACED_BYTES_MAX: u64 = 256 << 20;

/// Number of temporary files of this process.
static FILES: AtomicU64 = AtomicU64::new(0);

impl Snapshot {
    /// Adds the pages that one more restored guest used first, in order of use. A page that is not in the snapshot
    /// holds zeroes, and is left out. Returns the number of pages in the set.
    pub fn add_trace(&self, used: &[u32]) -> Result<u64, SnapshotError> {
        match self.place.far() {
            None => self.add_trace_near(used),
            Some(far) => {
                let number = FILES.fetch_add(1, Relaxed);
                let temporary = far.scratch.join(format!("working-set-{}-{number}", std::process::id()));
                let sent = self.add_trace_far(far, used, &temporary);
                if let Err(error) = fs::remove_file(&temporary) {
                    tracing::debug!(path = %temporary.display(), %error, "left behind");
                }
                sent
            }
        }
    }

    fn add_trace_near(&self, used: &[u32]) -> Result<u64, SnapshotError> {
        let Some(folder) = self.place.folder() else { return Ok(0) };
        // Two clones may be traced at once.
        let lock = File::open(folder).map_err(SnapshotError::io(folder, "read"))?;
        flock(&lock, FlockOperation::LockExclusive)
            .map_err(|errno| SnapshotError::io(folder, "locked")(errno.into()))?;
        let (path, temporary) = (folder.join(WORKING_SET), folder.join("working-set.new"));
        let sealed = self.write_merged(used, &temporary, None)?;
        if let Err(error) = self.must_be_there() {
            let _ = fs::remove_file(&temporary);
            return Err(error);
        }
        let renamed = faults::may_write().and_then(|()| fs::rename(&temporary, &path));
        renamed.map_err(SnapshotError::io(&path, "written"))?;
        lock.sync_all().map_err(SnapshotError::io(folder, "written"))?;
        Ok(sealed.map_or(0, |sealed| sealed.pages))
    }

    fn add_trace_far(&self, far: &Far, used: &[u32], temporary: &Path) -> Result<u64, SnapshotError> {
        let mut sent: Option<Sealed> = None;
        for _ in 0..ATTEMPTS {
            // Asked first: what is read afterwards is this set or a newer one, and a newer one is not replaced.
            let over = far.store.meta(WORKING_SET)?;
            let Some(merged) = self.write_merged(used, temporary, sent.as_ref())? else {
                return Ok(sent.map_or(0, |sent| sent.pages));
            };
            self.must_be_there()?;
            if merged.bytes > REPLACED_BYTES_MAX {
                return Self::send(far, temporary, &merged);
            }
            let set = fs::read(temporary).map_err(SnapshotError::io(temporary, "read"))?;
            match far.store.replace(WORKING_SET, set, over.as_ref()) {
                Replaced::Done => return Ok(merged.pages),
                Replaced::Changed => sent = Some(merged),
                Replaced::Unknown(error) => {
                    tracing::info!(%error, "the working set takes the place of what is there");
                    return Self::send(far, temporary, &merged);
                }
            }
        }
        sent.map_or(Ok(0), |sent| Self::send(far, temporary, &sent))
    }

    fn send(far: &Far, path: &Path, sealed: &Sealed) -> Result<u64, SnapshotError> {
        let mut file = File::open(path).map_err(SnapshotError::io(path, "read"))?;
        match far.store.upload(WORKING_SET, sealed.bytes, &mut file, &mut |_| true) {
            Err(UploadError::Store(error)) => Err(error.into()),
            Err(UploadError::Read(source)) => Err(SnapshotError::io(path, "read")(source)),
            Ok(_) | Err(UploadError::Stopped) => Ok(sealed.pages),
        }
    }

    /// Writes the merged set. Returns `None` if the present set is the one that was sent, although nobody confirmed it.
    fn write_merged(&self, used: &[u32], path: &Path, sent: Option<&Sealed>) -> Result<Option<Sealed>, SnapshotError> {
        // An unreadable set is started over. An unreachable one is an error.
        let before = match Self::open_working_set(&self.place, &self.ram) {
            Err(error) if error.is_away() => return Err(error),
            // Its page numbers are still good, and their contents are read anew.
            Err(SnapshotError::UnsealedWorkingSet { .. }) => {
                self.place.pages(WORKING_SET, &PagesExpected::default())?
            }
            before => before.ok().flatten(),
        };
        if sent.is_some() && before.as_ref().map(|set| set.sealed()) == sent {
            return Ok(None);
        }
        let merged = merge(used, before.iter().flat_map(aged_pages));
        write(path, merged, &self.ram).map(Some)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::{Arc, Barrier};

    use hearth_store::{Address, Cache, Settings, Store};
    use loopback_s3::{BUCKET, S3Server, Wire};

    use super::super::tests::{Stand, aged};
    use super::super::upload::tests::send_folder;
    use super::*;

    /// A snapshot in a store.
    struct FarStand {
        server: S3Server,
        near: Stand,
    }

    impl FarStand {
        fn new() -> Self {
            let stand = Self { server: S3Server::start(), near: Stand::new() };
            let lines = stand.server.environment().into_iter().map(|(key, value)| format!("{key}={value}\n"));
            fs::write(stand.near.folder().with_file_name("s3.env"), lines.collect::<String>()).unwrap();
            send_folder(&stand.near.folder(), &stand.far().store, &mut |_, _| Ok(())).unwrap();
            stand
        }

        fn far(&self) -> Far {
            let folder = self.near.folder();
            let settings = Settings::from_file(&folder.with_file_name("s3.env")).unwrap();
            let address = Address::parse(&format!("s3://{BUCKET}/one")).unwrap();
            let cache = Cache::open(&folder.with_file_name("cache"), 0).unwrap();
            Far {
                store: Arc::new(Store::open(address, &settings).unwrap()),
                cache,
                scheduler: Arc::default(),
                scratch: folder,
            }
        }

        fn open(&self) -> Snapshot {
            Snapshot::open_far(self.far(), None).unwrap()
        }

        fn set(&self) -> Vec<(u32, u32)> {
            let set = self.open().working_set.unwrap().unwrap();
            aged(&set).into_iter().map(|(page, age, _)| (page, age)).collect()
        }
    }

    #[test]
    fn simultaneous_traces_are_all_in_the_set() {
        const TRACES: u32 = 6;
        let stand = FarStand::new();
        let together = Barrier::new(TRACES as usize);
        std::thread::scope(|scope| {
            for trace in 0..TRACES {
                let (stand, together) = (&stand, &together);
                scope.spawn(move || {
                    let snapshot = stand.open();
                    together.wait();
                    snapshot.add_trace(&[10 + trace]).unwrap();
                });
            }
        });
        let set = stand.set();
        // The result is as if the traces had come one after the other.
        assert!(set.iter().map(|page| page.1).eq(0..TRACES), "{set:?}");
        let mut pages: Vec<u32> = set.iter().map(|page| page.0).collect();
        pages.sort_unstable();
        assert!(pages.into_iter().eq(10..10 + TRACES), "{set:?}");
        let left = fs::read_dir(stand.near.folder()).unwrap().flatten();
        let left: Vec<_> = left.filter(|file| file.file_name().to_string_lossy().starts_with("working-set")).collect();
        assert!(left.is_empty(), "{left:?}");
    }

    #[test]
    fn store_without_conditions_takes_the_last_set() {
        let stand = FarStand::new();
        let snapshot = stand.open();
        assert_eq!(snapshot.add_trace(&[11]).unwrap(), 1);
        stand.server.set_wire(Wire::Unconditional);
        assert_eq!(snapshot.add_trace(&[12, 13]).unwrap(), 3);
        assert_eq!(stand.set(), [(12, 0), (13, 0), (11, 1)]);
    }

    #[test]
    fn refused_trace_is_an_error_and_changes_nothing() {
        let stand = FarStand::new();
        let snapshot = stand.open();
        snapshot.add_trace(&[11]).unwrap();
        stand.server.set_wire(Wire::Failing);
        let error = snapshot.add_trace(&[12]).unwrap_err();
        assert!(error.is_away() && error.to_string().contains("working-set"), "{error}");
        stand.server.set_wire(Wire::Whole);
        assert_eq!(stand.set(), [(11, 0)]);
    }
}
