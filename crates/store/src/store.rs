//! Store: one prefix of a bucket, behind blocking calls.

use std::future::Future;
use std::ops::Range;
use std::sync::{Arc, LazyLock};
use std::time::{Duration, SystemTime};

use bytes::Bytes;
use object_store::path::Path;
use object_store::{BackoffConfig, Error, ObjectStore, ObjectStoreExt, RetryConfig, UpdateVersion};
use tokio::runtime::{Builder, Runtime};

use crate::backend::{Backend, Writer};
use crate::{Address, Settings, StoreError};

/// Maximum length of an error text from a store, which may be a whole page.
const WHY_BYTES_MAX: usize = 300;
/// Maximum number of requests in flight; each takes a thread.
const THREADS: usize = 24;
/// Retries of a read: a caller waits for it, gets an error soon and asks again.
pub(crate) const READ_RETRIES: usize = 6;
const READ_PATIENCE: Duration = Duration::from_secs(10);
/// Retries of a write: a save may take some minutes.
const WRITE_RETRIES: usize = 40;
const WRITE_PATIENCE: Duration = Duration::from_secs(180);
const BACKOFF_FIRST: Duration = Duration::from_millis(100);
const BACKOFF_MAX: Duration = Duration::from_secs(5);

/// Runtime of all requests. It is never shut down, because that would wait for requests that nobody needs any more.
static RUNTIME: LazyLock<Runtime> = LazyLock::new(|| {
    let mut builder = Builder::new_multi_thread();
    builder.worker_threads(1).max_blocking_threads(THREADS).thread_name("object-store").enable_time();
    builder.build().expect("a thread can be started")
});

/// The runtime of all requests.
pub(crate) fn runtime() -> &'static Runtime {
    &RUNTIME
}

/// Metadata of an object.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Meta {
    /// Size in bytes.
    pub bytes: u64,
    /// Version of the contents: the ETag, or the time of the last change if the store has none.
    pub version: String,
    /// The store's own names of the version, for conditions: ETag, generation or both.
    e_tag: Option<String>,
    generation: Option<String>,
    /// Time of the last change.
    pub modified: SystemTime,
}

impl Meta {
    /// The condition that the store still holds this version.
    pub(crate) fn condition(&self) -> UpdateVersion {
        UpdateVersion { e_tag: self.e_tag.clone(), version: self.generation.clone() }
    }
}

/// A prefix of an object store, and the clients to reach it.
#[derive(Debug)]
pub struct Store {
    address: Address,
    /// Client with few retries, for requests that somebody waits for.
    hasty: Backend,
    /// Client with many retries, for uploads.
    patient: Backend,
}

impl Store {
    /// Builds the clients. Sends no request.
    pub fn open(address: Address, settings: &Settings) -> Result<Self, StoreError> {
        let build = |retries, patience| {
            let backend = Backend::build(&address, settings, retry(retries, patience));
            backend.map_err(|error| StoreError::Setup { url: address.to_string(), what: why(&error) })
        };
        let (hasty, patient) = (build(READ_RETRIES, READ_PATIENCE)?, build(WRITE_RETRIES, WRITE_PATIENCE)?);
        Ok(Self { address, hasty, patient })
    }

    /// The client for reads.
    pub(crate) fn reader(&self) -> &dyn ObjectStore {
        self.hasty.reader()
    }

    /// The client for uploads.
    pub(crate) fn writer(&self) -> Result<&Arc<dyn Writer>, StoreError> {
        self.patient.writer().ok_or_else(|| self.read_only())
    }

    /// The client for writes that somebody waits for.
    pub(crate) fn hasty_writer(&self) -> Result<&Arc<dyn Writer>, StoreError> {
        self.hasty.writer().ok_or_else(|| self.read_only())
    }

    /// Fails if the store is read-only. Call this before the work for an upload begins.
    pub fn must_be_writable(&self) -> Result<(), StoreError> {
        self.writer().map(drop)
    }

    fn read_only(&self) -> StoreError {
        StoreError::ReadOnly { url: self.address.to_string() }
    }

    /// Address of the prefix.
    pub fn address(&self) -> &Address {
        &self.address
    }

    /// URL of an object, for messages.
    pub fn url(&self, name: &str) -> String {
        format!("{}/{name}", self.address)
    }

    /// Path of an object in the bucket.
    pub(crate) fn path(&self, name: &str) -> Path {
        Path::from(format!("{}/{name}", self.address.prefix))
    }

    /// Metadata of an object. Returns None if it does not exist.
    pub fn meta(&self, name: &str) -> Result<Option<Meta>, StoreError> {
        match run(self.reader().head(&self.path(name))) {
            Ok(meta) => Ok(Some(Meta {
                bytes: meta.size,
                version: meta.e_tag.clone().unwrap_or_else(|| meta.last_modified.to_rfc3339()),
                e_tag: meta.e_tag,
                generation: meta.version,
                modified: meta.last_modified.into(),
            })),
            Err(Error::NotFound { .. }) => Ok(None),
            Err(error) => Err(self.failure(name, &error)),
        }
    }

    /// Reads a whole small object. Returns None if it does not exist. Fails if it is larger than `bytes_max`.
    pub fn read(&self, name: &str, bytes_max: u64) -> Result<Option<Vec<u8>>, StoreError> {
        let Some(meta) = self.meta(name)? else { return Ok(None) };
        if meta.bytes > bytes_max {
            let why = format!("it has {} bytes, and at most {bytes_max} are allowed", meta.bytes);
            return Err(StoreError::Refused { url: self.url(name), why });
        }
        if meta.bytes == 0 {
            return Ok(Some(Vec::new()));
        }
        // The buffer grows with the bytes received, not with the announced size.
        let mut bytes = Vec::new();
        while (bytes.len() as u64) < meta.bytes {
            let from = bytes.len() as u64;
            bytes.extend_from_slice(&run(self.fetch(name, from..meta.bytes.min(from + (8 << 20))))?);
        }
        Ok(Some(bytes))
    }

    /// Fetches the whole range, or fails.
    pub(crate) async fn fetch(&self, name: &str, range: Range<u64>) -> Result<Bytes, StoreError> {
        let length = range.end - range.start;
        let bytes =
            self.reader().get_range(&self.path(name), range).await.map_err(|error| self.failure(name, &error))?;
        if bytes.len() as u64 != length {
            let why = format!("{} bytes of {length} arrived", bytes.len());
            return Err(StoreError::Away { url: self.url(name), why });
        }
        Ok(bytes)
    }

    /// Removes an object. Succeeds if it does not exist.
    pub fn remove(&self, name: &str) -> Result<(), StoreError> {
        match run(self.hasty_writer()?.delete(&self.path(name))) {
            Ok(()) | Err(Error::NotFound { .. }) => Ok(()),
            Err(error) => Err(self.failure(name, &error)),
        }
    }

    /// Converts an error of a request for an object.
    pub(crate) fn failure(&self, name: &str, error: &Error) -> StoreError {
        StoreError::of(&self.url(name), error)
    }
}

impl StoreError {
    /// Converts an error of `object_store`.
    pub(crate) fn of(url: &str, error: &Error) -> Self {
        let url = url.to_owned();
        match error {
            Error::NotFound { .. } => Self::Missing { url },
            Error::PermissionDenied { .. } | Error::Unauthenticated { .. } => Self::Refused { url, why: why(error) },
            _ => Self::Away { url, why: why(error) },
        }
    }
}

/// Waits for async work on the calling thread.
pub(crate) fn run<T>(work: impl Future<Output = T>) -> T {
    runtime().block_on(work)
}

fn retry(retries: usize, patience: Duration) -> RetryConfig {
    RetryConfig {
        backoff: BackoffConfig { init_backoff: BACKOFF_FIRST, max_backoff: BACKOFF_MAX, base: 2.0 },
        max_retries: retries,
        retry_timeout: patience,
    }
}

/// The innermost error: the outer ones repeat it and the address.
fn why(error: &dyn std::error::Error) -> String {
    let mut innermost = error;
    while let Some(source) = innermost.source() {
        innermost = source;
    }
    let mut text = innermost.to_string().replace(char::is_control, " ");
    if text.len() > WHY_BYTES_MAX {
        let end = (0..=WHY_BYTES_MAX).rev().find(|&at| text.is_char_boundary(at)).unwrap_or_default();
        text.truncate(end);
        text.push_str("...");
    }
    text
}
