//! Upload: sends a snapshot to an object store while it is saved to a folder.
//!
//! ```text
//! save     memory, again what was written to ... | guest stands still | disks, memory's index, small files | complete
//! upload   parts of memory, as they are written  |                    | disks, as they are complete | parts that changed | manifest
//! ```
//! The manifest makes it a snapshot. If the upload fails or is stopped before that, the objects are removed again.
//! Files that have arrived are removed from the folder.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::Read;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError, TryRecvError};
use std::time::Duration;

use hearth_store::{Parts, Store, StoreError, UploadError};

use super::manifest::{DiskPart, Manifest, Part, StoredDisk, disk_file};
use super::outgoing::{Due, Outgoing};
use super::stored_disk::{Blocks, Content, index_file};
use super::{MACHINE, MANIFEST, MANIFEST_BYTES_MAX, RAM, STATE, SnapshotError, WORKING_SET};
use crate::snapshot::save::SaveError;

/// Pause between two checks for something to send.
const LOOK_EVERY: Duration = Duration::from_millis(20);

/// Gets the number of bytes that have arrived and the total, as far as it is known. Its error ends the upload.
pub type Watch<'a> = dyn FnMut(u64, u64) -> Result<(), SaveError> + 'a;

/// Order of the saving thread to the upload.
#[derive(Debug)]
pub enum Order {
    /// Send the file of memory, from its beginning.
    Ram(Arc<Outgoing>),
    /// The guest stands still: begin nothing new.
    Hold,
    /// The guest runs again.
    GoOn,
    /// Send this disk, whose file is complete.
    Disk(DiskPart),
    /// All files are complete. So is the manifest, except for how disks are stored.
    Finish(Box<Manifest>),
}

/// Estimate of the bytes to send, because they are not known before they exist.
#[derive(Clone, Debug, Default)]
pub struct Expected {
    /// Bytes of the memory file.
    pub ram_bytes: u64,
    /// Name and bytes of each disk.
    pub disks: Vec<(String, u64)>,
}

impl Expected {
    /// Sum of all estimates.
    pub fn bytes(&self) -> u64 {
        self.ram_bytes + self.disks.iter().map(|(_, bytes)| bytes).sum::<u64>()
    }
}

impl From<StoreError> for SaveError {
    fn from(error: StoreError) -> Self {
        Self::Snapshot(error.into())
    }
}

/// Fails if this location of a store holds a snapshot.
pub fn must_be_free(store: &Store) -> Result<(), SnapshotError> {
    match store.meta(MANIFEST)? {
        None => Ok(()),
        Some(_) => Err(SnapshotError::Exists { path: store.address().to_string().into() }),
    }
}

/// Progress of an upload, and whether it continues.
struct Account<'a> {
    /// Bytes of each object, as far as they are known.
    planned: BTreeMap<String, u64>,
    arrived: u64,
    watch: &'a mut Watch<'a>,
    /// Why the watcher ended the upload.
    stopped: Option<SaveError>,
}

impl Account<'_> {
    fn plan(&mut self, name: &str, bytes: u64) {
        self.planned.insert(name.to_owned(), bytes);
    }

    fn go_on(&mut self, arrived: u64) -> bool {
        self.arrived += arrived;
        self.stopped = (self.watch)(self.arrived, self.planned.values().sum()).err();
        self.stopped.is_none()
    }

    /// Maps the result of sending a file to the reason why it was stopped, if it was.
    fn settle<T>(&mut self, sent: Result<T, UploadError>, path: &Path) -> Result<T, SaveError> {
        sent.map_err(|error| match (self.stopped.take(), error) {
            (Some(why), _) => why,
            (None, UploadError::Store(error)) => error.into(),
            (None, UploadError::Read(source)) => SnapshotError::io(path, "read")(source).into(),
            (None, UploadError::Stopped) => SaveError::Abandoned,
        })
    }
}

/// The file of memory while it is written.
struct Ram {
    outgoing: Arc<Outgoing>,
    parts: Option<Parts>,
    /// Bytes of all parts that were sent, repeated ones included.
    bytes: u64,
}

/// Upload of one snapshot to an object store.
pub struct Upload<'a> {
    folder: &'a Path,
    store: &'a Store,
    account: Account<'a>,
    /// Whether the save reads the disks until everything has arrived.
    keeps_disks: bool,
    /// Files that have arrived but are still read.
    kept: Vec<PathBuf>,
    /// Objects that are in the store, or may be.
    sent: Vec<String>,
    ram: Option<Ram>,
    holds: bool,
    /// Disks that have arrived.
    disks: Vec<DiskPart>,
}

impl<'a> Upload<'a> {
    /// An upload of the snapshot that is being saved to `folder`. For `keeps_disks` see the field.
    pub fn new(
        folder: &'a Path,
        store: &'a Store,
        expected: &Expected,
        keeps_disks: bool,
        watch: &'a mut Watch<'a>,
    ) -> Self {
        let disks = expected.disks.iter().map(|(disk, bytes)| (disk_file(disk), *bytes));
        let planned = disks.chain([(RAM.to_owned(), expected.ram_bytes)]).collect();
        Self {
            folder,
            store,
            account: Account { planned, arrived: 0, watch, stopped: None },
            keeps_disks,
            kept: Vec::new(),
            sent: Vec::new(),
            ram: None,
            holds: false,
            disks: Vec::new(),
        }
    }

    /// Runs until the store holds a snapshot. Gives up if nobody can send orders any more.
    pub fn run(mut self, orders: &Receiver<Order>) -> Result<(), SaveError> {
        let sent = self.obey(orders);
        if sent.is_err() {
            self.remove_sent();
        }
        sent
    }

    fn obey(&mut self, orders: &Receiver<Order>) -> Result<(), SaveError> {
        loop {
            match self.next(orders)? {
                Order::Ram(outgoing) => self.ram = Some(Ram { outgoing, parts: None, bytes: 0 }),
                Order::Hold => self.holds = true,
                Order::GoOn => self.holds = false,
                Order::Disk(disk) => self.send_disk(&disk)?,
                Order::Finish(manifest) => return self.finish(*manifest),
            }
        }
    }

    /// The next order. Until there is one, parts of memory are sent. A complete disk goes first, because it does not
    /// change any more.
    fn next(&mut self, orders: &Receiver<Order>) -> Result<Order, SaveError> {
        loop {
            match orders.try_recv() {
                Ok(order) => return Ok(order),
                Err(TryRecvError::Disconnected) => return Err(SaveError::Abandoned),
                Err(TryRecvError::Empty) => {}
            }
            if !self.holds && self.send_due()? {
                continue;
            }
            self.look()?;
            match orders.recv_timeout(LOOK_EVERY) {
                Ok(order) => return Ok(order),
                Err(RecvTimeoutError::Disconnected) => return Err(SaveError::Abandoned),
                Err(RecvTimeoutError::Timeout) => {}
            }
        }
    }

    /// Collects what has arrived, and asks whether to continue.
    fn look(&mut self) -> Result<(), SaveError> {
        let (path, account) = (self.folder.join(RAM), &mut self.account);
        let looked = match self.ram.as_mut().and_then(|ram| ram.parts.as_mut()) {
            Some(parts) => parts.land(Duration::ZERO, &mut |bytes| account.go_on(bytes)),
            None if account.go_on(0) => Ok(()),
            None => Err(UploadError::Stopped),
        };
        account.settle(looked, &path)
    }

    /// Sends a part of memory. Returns false if none is due.
    fn send_due(&mut self) -> Result<bool, SaveError> {
        let Some(ram) = &mut self.ram else { return Ok(false) };
        let Some(Due { number, bytes }) = ram.outgoing.take_due() else { return Ok(false) };
        let (path, mut part) = (self.folder.join(RAM), vec![0; (bytes.end - bytes.start) as usize]);
        let read = File::open(&path).and_then(|file| file.read_exact_at(&mut part, bytes.start));
        read.map_err(SnapshotError::io(&path, "read"))?;
        ram.bytes += part.len() as u64;
        let account = &mut self.account;
        let sent = match &mut ram.parts {
            Some(parts) => parts.send(number, part, &mut |bytes| account.go_on(bytes)),
            None => Parts::begin(self.store, RAM, &mut |bytes| account.go_on(bytes))
                .and_then(|parts| ram.parts.insert(parts).send(number, part, &mut |bytes| account.go_on(bytes))),
        };
        account.settle(sent, &path).map(|()| true)
    }

    fn send_disk(&mut self, disk: &DiskPart) -> Result<(), SaveError> {
        let name = disk_file(&disk.name);
        let path = self.folder.join(&name);
        let unreadable = |source| SaveError::Image { path: path.clone(), source };
        let content = Content::open(&path, disk)?;
        let mut blocks = Blocks::of(&content).map_err(unreadable)?;
        let bytes_max = blocks.bytes_max().map_err(unreadable)?;
        let bytes = self.send(&name, bytes_max, &mut blocks)?;
        let index = blocks.into_index();
        let part = Part { bytes: index.len() as u64, blake3: blake3::hash(&index).to_hex().to_string() };
        self.send(&index_file(&disk.name), part.bytes, &mut &index[..])?;
        let stored = Some(StoredDisk { bytes, index: part });
        self.disks.push(DiskPart { stored, ..content.part(disk).map_err(unreadable)? });
        self.kept.push(path);
        if !self.keeps_disks {
            self.remove_kept();
        }
        Ok(())
    }

    fn finish(&mut self, mut manifest: Manifest) -> Result<(), SaveError> {
        self.remove_kept();
        for name in [MACHINE, STATE, WORKING_SET] {
            self.send_file(name)?;
        }
        self.finish_ram()?;
        manifest.disks = std::mem::take(&mut self.disks);
        let text = manifest.to_text().into_bytes();
        debug_assert!(text.len() as u64 <= MANIFEST_BYTES_MAX);
        self.send(MANIFEST, text.len() as u64, &mut &text[..]).map(drop)
    }

    fn finish_ram(&mut self) -> Result<(), SaveError> {
        let Some(Ram { outgoing, bytes, .. }) = &self.ram else { return Err(SaveError::Abandoned) };
        self.account.plan(RAM, bytes + outgoing.bytes_left());
        while self.send_due()? {}
        self.must_be_free_at_first()?;
        self.sent.push(RAM.to_owned());
        let Some(parts) = self.ram.take().and_then(|ram| ram.parts) else { return Err(SaveError::Abandoned) };
        let account = &mut self.account;
        let completed = parts.complete(&mut |bytes| account.go_on(bytes));
        account.settle(completed, &self.folder.join(RAM))
    }

    /// Sends a file, if it exists.
    fn send_file(&mut self, name: &str) -> Result<(), SaveError> {
        let path = self.folder.join(name);
        if !path.exists() {
            return Ok(());
        }
        let opened = File::open(&path).and_then(|file| Ok((file.metadata()?.len(), file)));
        let (bytes, mut file) = opened.map_err(SnapshotError::io(&path, "read"))?;
        self.send(name, bytes, &mut file).map(drop)
    }

    /// Sends an object. Returns its number of bytes.
    fn send(&mut self, name: &str, bytes_max: u64, source: &mut dyn Read) -> Result<u64, SaveError> {
        self.must_be_free_at_first()?;
        self.sent.push(name.to_owned());
        self.account.plan(name, bytes_max);
        let account = &mut self.account;
        let sent = self.store.upload(name, bytes_max, source, &mut |bytes| account.go_on(bytes));
        let bytes = account.settle(sent, &self.folder.join(name))?;
        account.plan(name, bytes);
        Ok(bytes)
    }

    /// Checked before the first object is sent, so that nothing can be taken for a part of another snapshot.
    fn must_be_free_at_first(&self) -> Result<(), SnapshotError> {
        if !self.sent.is_empty() {
            return Ok(());
        }
        must_be_free(self.store)?;
        // It is of a save that was killed. All else that such a save left is replaced, but a snapshot may lack this
        // object.
        if self.store.meta(WORKING_SET)?.is_some() {
            self.store.remove(WORKING_SET)?;
        }
        Ok(())
    }

    /// Removes files that have arrived and that nobody reads any more.
    fn remove_kept(&mut self) {
        for path in self.kept.drain(..) {
            if let Err(error) = fs::remove_file(&path) {
                tracing::warn!(path = %path.display(), %error, "takes room until the save is over: cannot be removed");
            }
        }
    }

    fn remove_sent(&self) {
        // The manifest goes first, if it is there: without it there is no snapshot.
        for name in self.sent.iter().rev() {
            if let Err(error) = self.store.remove(name) {
                tracing::warn!(%error, "left behind: cannot be removed");
                // The others would take as long to fail.
                break;
            }
        }
    }
}

#[cfg(test)]
pub(super) mod tests;
