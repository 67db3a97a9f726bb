//! Object store arguments of the snapshot commands.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use clap::Args;
use hearth_recovery::snapshot::{Snapshot, SnapshotError};

use super::absolute;
use crate::config::{Config, ObjectStoreConfig, ObjectStoreSection, size_bytes};
use crate::object_store::{is_address, open_snapshot};

#[derive(Clone, Debug, Default, Args)]
pub struct StoreArguments {
    /// File with object store settings (default: the environment).
    ///
    /// One AWS_*, GOOGLE_* or AZURE_* setting per line, as KEY=value.
    #[arg(long, value_name = "FILE")]
    credentials: Option<PathBuf>,
    /// Folder that caches store data (default: /var/cache/hearth/objects).
    #[arg(long, value_name = "FOLDER")]
    cache: Option<PathBuf>,
    /// Maximum size of the cache (default: 8GiB).
    #[arg(long, value_name = "SIZE", value_parser = is_size)]
    cache_size: Option<String>,
}

fn is_size(text: &str) -> Result<String, String> {
    match size_bytes(text)? {
        bytes if bytes < hearth_store::CACHE_BYTES_MIN => Err("choose 64MiB or more".to_owned()),
        _ => Ok(text.to_owned()),
    }
}

impl StoreArguments {
    /// The section for the new machine's file. That machine may later be saved to a store, wherever it came from.
    pub fn section(&self) -> Option<ObjectStoreSection> {
        let said = self.credentials.is_some() || self.cache.is_some() || self.cache_size.is_some();
        let text = |path: &PathBuf| absolute(path.clone()).display().to_string();
        said.then(|| ObjectStoreSection {
            credentials: self.credentials.as_ref().map(text),
            folder: self.cache.as_ref().map(text),
            cache_size: self.cache_size.clone(),
        })
    }

    fn config(&self) -> ObjectStoreConfig {
        let default = Config::default_object_store();
        ObjectStoreConfig {
            credentials: self.credentials.clone(),
            folder: self.cache.clone().map_or(default.folder, absolute),
            cache_bytes: self
                .cache_size
                .as_deref()
                .and_then(|text| size_bytes(text).ok())
                .unwrap_or(default.cache_bytes),
        }
    }

    /// Opens a snapshot whose disks are still in the store.
    pub fn open(&self, snapshot: &Path) -> Result<Snapshot, SnapshotError> {
        open_snapshot(snapshot, &self.config(), &Arc::default(), None)
    }
}

/// The path or address, as a keeper in another folder understands it.
pub fn place(path: PathBuf) -> PathBuf {
    if is_address(&path) { path } else { absolute(path) }
}
