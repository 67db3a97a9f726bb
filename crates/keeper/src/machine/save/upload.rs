//! A save that goes to an object store: by way of a folder of this host, which a thread sends while it is written.

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

/// A snapshot in a folder that is whole but for its manifest.
pub struct Whole {
    pub written: Written,
    pub manifest: Manifest,
    pub draft: Draft,
}

/// To whoever sends it; nobody does if it stays on this host.
pub struct Orders(Option<Sender<Order>>);

impl Orders {
    pub fn to_nobody() -> Self {
        Self(None)
    }

    pub fn give(&self, order: Order) {
        if let Some(orders) = &self.0 {
            // A thread that is gone has said why.
            let _ = orders.send(order);
        }
    }

    /// The file of memory that is about to be written, of so many pages at most.
    pub fn outgoing(&self, ram_pages: u64) -> Option<Arc<Outgoing>> {
        self.0.as_ref()?;
        let outgoing = Arc::new(Outgoing::of_pages(ram_pages));
        self.give(Order::Ram(outgoing.clone()));
        Some(outgoing)
    }
}

impl Upload {
    /// Sends what `write` writes. Either of the two that fails ends the other.
    pub fn send(
        self,
        progress: &Progress,
        tell: &Tell,
        keeps_disks: bool,
        write: impl FnOnce(&Orders) -> Result<Whole, SaveError>,
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
