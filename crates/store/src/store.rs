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

/// What a store says of an error may be a page.
const WHY_BYTES_MAX: usize = 300;
/// Requests at once; each takes a thread while it is under way.
const THREADS: usize = 24;
/// Whoever reads has somebody waiting, who is told after that; and asks again.
const READ_RETRIES: usize = 6;
const READ_PATIENCE: Duration = Duration::from_secs(10);
/// A save is worth some minutes.
const WRITE_RETRIES: usize = 40;
const WRITE_PATIENCE: Duration = Duration::from_secs(180);
const BACKOFF_FIRST: Duration = Duration::from_millis(100);
const BACKOFF_MAX: Duration = Duration::from_secs(5);

/// It is never taken down: that would wait for requests that nobody wants any more.
static RUNTIME: LazyLock<Runtime> = LazyLock::new(|| {
    let mut builder = Builder::new_multi_thread();
    builder.worker_threads(1).max_blocking_threads(THREADS).thread_name("object-store").enable_time();
    builder.build().expect("a thread can be started")
});

pub(crate) fn runtime() -> &'static Runtime {
    &RUNTIME
}

/// What is known of an object.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Meta {
    pub bytes: u64,
    /// Changes with its content.
    pub version: String,
    /// The same as the store calls it, if it does: by one name, the other, or both.
    e_tag: Option<String>,
    generation: Option<String>,
    pub modified: SystemTime,
}

impl Meta {
    pub(crate) fn condition(&self) -> UpdateVersion {
        UpdateVersion { e_tag: self.e_tag.clone(), version: self.generation.clone() }
    }
}

#[derive(Debug)]
pub struct Store {
    address: Address,
    /// The same, of which one gives up sooner.
    hasty: Backend,
    patient: Backend,
}

impl Store {
    /// Asks nobody yet.
    pub fn open(address: Address, settings: &Settings) -> Result<Self, StoreError> {
        let build = |retries, patience| {
            let backend = Backend::build(&address, settings, retry(retries, patience));
            backend.map_err(|error| StoreError::Setup { url: address.to_string(), what: why(&error) })
        };
        let (hasty, patient) = (build(READ_RETRIES, READ_PATIENCE)?, build(WRITE_RETRIES, WRITE_PATIENCE)?);
        Ok(Self { address, hasty, patient })
    }

    pub(crate) fn reader(&self) -> &dyn ObjectStore {
        self.hasty.reader()
    }

    /// Whoever sends much has time.
    pub(crate) fn writer(&self) -> Result<&Arc<dyn Writer>, StoreError> {
        self.patient.writer().ok_or_else(|| self.read_only())
    }

    /// Of what somebody waits for.
    pub(crate) fn hasty_writer(&self) -> Result<&Arc<dyn Writer>, StoreError> {
        self.hasty.writer().ok_or_else(|| self.read_only())
    }

    /// Before anything is made that is to be sent.
    pub fn must_be_writable(&self) -> Result<(), StoreError> {
        self.writer().map(drop)
    }

    fn read_only(&self) -> StoreError {
        StoreError::ReadOnly { url: self.address.to_string() }
    }

    pub fn address(&self) -> &Address {
        &self.address
    }

    /// How an object is called in messages.
    pub fn url(&self, name: &str) -> String {
        format!("{}/{name}", self.address)
    }

    pub(crate) fn path(&self, name: &str) -> Path {
        Path::from(format!("{}/{name}", self.address.prefix))
    }

    /// None: it is not there.
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

    /// A small object whole. None: it is not there. One of more than `bytes_max` is refused.
    pub fn read(&self, name: &str, bytes_max: u64) -> Result<Option<Vec<u8>>, StoreError> {
        let Some(meta) = self.meta(name)? else { return Ok(None) };
        if meta.bytes > bytes_max {
            let why = format!("it has {} bytes, and {bytes_max} are possible", meta.bytes);
            return Err(StoreError::Refused { url: self.url(name), why });
        }
        if meta.bytes == 0 {
            return Ok(Some(Vec::new()));
        }
        // Of what comes, and not of what is said to come.
        let mut bytes = Vec::new();
        while (bytes.len() as u64) < meta.bytes {
            let from = bytes.len() as u64;
            bytes.extend_from_slice(&run(self.fetch(name, from..meta.bytes.min(from + (8 << 20))))?);
        }
        Ok(Some(bytes))
    }

    /// All of the range, or an error.
    pub(crate) async fn fetch(&self, name: &str, range: Range<u64>) -> Result<Bytes, StoreError> {
        let length = range.end - range.start;
        let bytes =
            self.reader().get_range(&self.path(name), range).await.map_err(|error| self.failure(name, &error))?;
        if bytes.len() as u64 != length {
            let why = format!("{} bytes came of {length}", bytes.len());
            return Err(StoreError::Away { url: self.url(name), why });
        }
        Ok(bytes)
    }

    /// Fine if it is not there.
    pub fn remove(&self, name: &str) -> Result<(), StoreError> {
        match run(self.hasty_writer()?.delete(&self.path(name))) {
            Ok(()) | Err(Error::NotFound { .. }) => Ok(()),
            Err(error) => Err(self.failure(name, &error)),
        }
    }

    pub(crate) fn failure(&self, name: &str, error: &Error) -> StoreError {
        StoreError::of(&self.url(name), error)
    }
}

impl StoreError {
    pub(crate) fn of(url: &str, error: &Error) -> Self {
        let url = url.to_owned();
        match error {
            Error::NotFound { .. } => Self::Missing { url },
            Error::PermissionDenied { .. } | Error::Unauthenticated { .. } => Self::Refused { url, why: why(error) },
            _ => Self::Away { url, why: why(error) },
        }
    }
}

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

/// The innermost reason: the ones around it repeat it, and the address.
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
