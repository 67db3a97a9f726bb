//! Upload: a save to an object store. It goes through a folder of this host, which a thread sends while it is written.

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::mpsc::{self, Sender};

use hearth_recovery::snapshot::outgoing::Outgoing;
use hearth_recovery::snapshot::save::SaveError;
use hearth_recovery::snapshot::upload::{self, Expected, Order, must_be_free};
use hearth_recovery::snapshot::{Draft, Manifest};
use hearth_store::Store;

use super::Tell;
use super::progress::{Progress, Reporter};
use super::task::Written;
use crate::object_store::Staging;

pub struct Upload {
    pub staging: Staging,
    pub store: Store,
    pub machine: String,
    pub expected: Expected,
}

/// A snapshot in a folder, complete except for its manifest.
pub struct CompleteSnapshot {
    pub written: Written,
    pub manifest: Manifest,
    pub draft: Draft,
}

/// Messages to the upload's thread. None if the snapshot stays on this host.
pub struct Orders(Option<Sender<Order>>);

impl Orders {
    pub fn to_nobody() -> Self {
        Self(None)
    }

    pub fn give(&self, order: Order) {
        if let Some(orders) = &self.0 {
            // A thread that has ended has reported why itself.
            let _ = orders.send(order);
        }
    }

    /// Announces the memory file, of at most `ram_pages` pages, before it is written.
    pub fn outgoing(&self, ram_pages: u64) -> Option<Arc<Outgoing>> {
        self.0.as_ref()?;
        let outgoing = Arc::new(Outgoing::of_pages(ram_pages));
        self.give(Order::Ram(outgoing.clone()));
        Some(outgoing)
    }
}

impl Upload {
    /// Uploads what `write` writes. If one of the two fails, the other ends.
    pub fn send(
        self,
        progress: &Progress,
        tell: &Tell,
        keeps_disks: bool,
        write: impl FnOnce(&Orders) -> Result<CompleteSnapshot, SaveError>,
    ) -> Result<Written, SaveError> {
        must_be_free(&self.store)?;
        let Self { staging, store, machine, expected } = &self;
        let folder = &staging.snapshot();
        let (orders, heard) = mpsc::channel();
        let orders = Orders(Some(orders));
        std::thread::scope(|scope| {
            let send = move || {
                let mut reporter = Reporter::new(progress, tell);
                let watch = &mut |arrived, of| reporter.uploaded(arrived, of);
                let sent = upload::Upload::new(folder, store, expected, keeps_disks, watch).run(&heard);
                sent.inspect_err(|_| progress.abandon())
            };
            let thread = std::thread::Builder::new().name(format!("upload-{machine}")).spawn_scoped(scope, send);
            let thread = thread.map_err(SaveError::Thread)?;
            let whole = write(&orders).inspect_err(|_| progress.abandon());
            if let Ok(whole) = &whole {
                orders.give(Order::Finish(Box::new(whole.manifest.clone())));
            }
            drop(orders);
            let sent = thread.join().unwrap_or(Err(SaveError::Abandoned));
            match (whole, sent) {
                (Ok(whole), Ok(())) => Ok(whole.written),
                (Err(SaveError::Abandoned) | Ok(_), Err(why)) | (Err(why), _) => Err(why),
            }
        })
    }

    pub fn folder(&self) -> PathBuf {
        self.staging.snapshot()
    }
}
