//! Access to object stores, and their cache on this host.

use std::path::PathBuf;

use hearth_store::CACHE_BYTES_MIN;

use super::Resolver;
use crate::config::ObjectStoreConfig;
use crate::config::file::ObjectStoreSection;

pub const DEFAULT_CACHE_BYTES: u64 = 8 << 30;

/// One for all machines, so that clones of one snapshot share the cache.
pub fn default_object_folder() -> PathBuf {
    let caches = if rustix::process::geteuid().is_root() {
        PathBuf::from("/var/cache")
    } else {
        let of_user = std::env::var_os("XDG_CACHE_HOME").map(PathBuf::from).filter(|path| path.is_absolute());
        of_user.unwrap_or_else(|| std::env::home_dir().unwrap_or_else(|| "/var/tmp".into()).join(".cache"))
    };
    caches.join("hearth/objects")
}

impl Resolver<'_> {
    pub(super) fn object_store(&mut self, typed: ObjectStoreSection) -> Option<ObjectStoreConfig> {
        let subject = "object_store.cache_size";
        let cache_bytes = match typed.cache_size {
            None => DEFAULT_CACHE_BYTES,
            Some(text) => {
                let bytes = self.size(subject, &text)?;
                if bytes < CACHE_BYTES_MIN {
                    self.problem(subject, format!("{text} is too small"), "choose 64MiB or more");
                    return None;
                }
                bytes
            }
        };
        Some(ObjectStoreConfig {
            credentials: typed.credentials.map(|path| self.path(&path)),
            folder: self.path_or(typed.folder, default_object_folder),
            cache_bytes,
        })
    }
}
