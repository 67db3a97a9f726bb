//! Upload: a snapshot goes to an object store while it is saved to a folder.
//!
//! ```text
//! save     memory, again what was written to ... | guest stands still | disks, memory's index, all that is small | whole
//! upload   parts of memory, as they are there    |                    | disks, as they are there | parts that have changed | manifest
//! ```
//! With the manifest it is a snapshot. What fails or is stopped before that is removed again. What has arrived goes from the folder.

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

/// While there is nothing to be sent it is looked so often whether there is.
const LOOK_EVERY: Duration = Duration::from_millis(20);

/// Hears how many bytes have arrived, and of how many, as far as that is known; its error ends the upload.
pub type Watch<'a> = dyn FnMut(u64, u64) -> Result<(), SaveError> + 'a;

/// What there is to be sent, told by whoever saves.
#[derive(Debug)]
pub enum Order {
    /// The file of memory, from its beginning.
    Ram(Arc<Outgoing>),
    /// The guest stands still: nothing more is begun.
    Hold,
    GoOn,
    /// The disk's file is whole.
    Disk(DiskPart),
    /// All files are, and so is the manifest, but for how disks are stored.
    Finish(Box<Manifest>),
}

/// Bytes that will have to be sent, about: it is not known before they are there.
#[derive(Clone, Debug, Default)]
pub struct Expected {
    pub ram_bytes: u64,
    /// By name.
    pub disks: Vec<(String, u64)>,
}

impl Expected {
    pub fn bytes(&self) -> u64 {
        self.ram_bytes + self.disks.iter().map(|(_, bytes)| bytes).sum::<u64>()
    }
}

impl From<StoreError> for SaveError {
    fn from(error: StoreError) -> Self {
        Self::Snapshot(error.into())
    }
}

/// A place in a store where there is no snapshot.
pub fn must_be_free(store: &Store) -> Result<(), SnapshotError> {
    match store.meta(MANIFEST)? {
        None => Ok(()),
        Some(_) => Err(SnapshotError::Exists { path: store.address().to_string().into() }),
    }
}

/// How far it is, and whether it goes on.
struct Account<'a> {
    /// Bytes of each object, as far as is known.
    planned: BTreeMap<String, u64>,
    arrived: u64,
    watch: &'a mut Watch<'a>,
    /// By whoever watches.
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

    /// What came of sending a file.
    fn settle<T>(&mut self, sent: Result<T, UploadError>, path: &Path) -> Result<T, SaveError> {
        sent.map_err(|error| match (self.stopped.take(), error) {
            (Some(why), _) => why,
            (None, UploadError::Store(error)) => error.into(),
            (None, UploadError::Read(source)) => SnapshotError::io(path, "read")(source).into(),
            (None, UploadError::Stopped) => SaveError::Abandoned,
        })
    }
}

/// Memory that is written to its file.
struct Ram {
    outgoing: Arc<Outgoing>,
    parts: Option<Parts>,
    /// Of parts that were sent, all times.
    bytes: u64,
}

pub struct Upload<'a> {
    folder: &'a Path,
    store: &'a Store,
    account: Account<'a>,
    /// Whoever saves reads its disks until all is there.
    keeps_disks: bool,
    /// Files that have arrived, and are still read.
    kept: Vec<PathBuf>,
    /// Objects that are there, or may be.
    sent: Vec<String>,
    ram: Option<Ram>,
    holds: bool,
    /// That have arrived.
    disks: Vec<DiskPart>,
}

impl<'a> Upload<'a> {
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

    /// Until it is a snapshot. It is given up if nobody gives orders any more.
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

    /// Until there is one, parts of memory are sent: a disk that is whole goes first, because it will not change.
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

    /// What is under way may have arrived, and nobody may want the rest.
    fn look(&mut self) -> Result<(), SaveError> {
        let (path, account) = (self.folder.join(RAM), &mut self.account);
        let looked = match self.ram.as_mut().and_then(|ram| ram.parts.as_mut()) {
            Some(parts) => parts.land(Duration::ZERO, &mut |bytes| account.go_on(bytes)),
            None if account.go_on(0) => Ok(()),
            None => Err(UploadError::Stopped),
        };
        account.settle(looked, &path)
    }

    /// A part of memory. False: none is due.
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

    /// One that is there.
    fn send_file(&mut self, name: &str) -> Result<(), SaveError> {
        let path = self.folder.join(name);
        if !path.exists() {
            return Ok(());
        }
        let opened = File::open(&path).and_then(|file| Ok((file.metadata()?.len(), file)));
        let (bytes, mut file) = opened.map_err(SnapshotError::io(&path, "read"))?;
        self.send(name, bytes, &mut file).map(drop)
    }

    /// How many bytes it was.
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

    /// Before anything of ours is there that could be taken for a part of another snapshot.
    fn must_be_free_at_first(&self) -> Result<(), SnapshotError> {
        if !self.sent.is_empty() {
            return Ok(());
        }
        must_be_free(self.store)?;
        // Of a save that was killed. All else that such a one left is replaced, but this a snapshot may do without.
        if self.store.meta(WORKING_SET)?.is_some() {
            self.store.remove(WORKING_SET)?;
        }
        Ok(())
    }

    /// Files that have arrived and that nobody reads any more.
    fn remove_kept(&mut self) {
        for path in self.kept.drain(..) {
            if let Err(error) = fs::remove_file(&path) {
                tracing::warn!(path = %path.display(), %error, "takes room until the save is over: cannot be removed");
            }
        }
    }

    fn remove_sent(&self) {
        // The manifest first, if it is there: without it there is no snapshot.
        for name in self.sent.iter().rev() {
            if let Err(error) = self.store.remove(name) {
                tracing::warn!(%error, "left behind: cannot be removed");
                // The others would take as long.
                break;
            }
        }
    }
}

#[cfg(test)]
pub(super) mod tests;
