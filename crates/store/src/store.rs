//! Store: one prefix of a bucket, behind blocking calls.

use std::future::Future;
use std::ops::Range;
use std::sync::LazyLock;
use std::time::{Duration, SystemTime};

use bytes::Bytes;
use object_store::aws::{AmazonS3, AmazonS3Builder};
use object_store::path::Path;
use object_store::{BackoffConfig, Error, ObjectStoreExt, RetryConfig};
use tokio::runtime::{Builder, Runtime};

use crate::http::Connector;
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
    /// The same as the store calls it, if it does.
    pub(crate) e_tag: Option<String>,
    pub modified: SystemTime,
}

#[derive(Debug)]
pub struct Store {
    address: Address,
    pub(crate) reader: AmazonS3,
    pub(crate) writer: AmazonS3,
}

impl Store {
    /// Asks nobody yet.
    pub fn open(address: Address, settings: &Settings) -> Result<Self, StoreError> {
        let (reader, writer) = (
            build(&address, settings, READ_RETRIES, READ_PATIENCE)?,
            build(&address, settings, WRITE_RETRIES, WRITE_PATIENCE)?,
        );
        Ok(Self { address, reader, writer })
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
        match run(self.reader.head(&self.path(name))) {
            Ok(meta) => Ok(Some(Meta {
                bytes: meta.size,
                version: meta.e_tag.clone().unwrap_or_else(|| meta.last_modified.to_rfc3339()),
                e_tag: meta.e_tag,
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
        let mut bytes = Vec::with_capacity(meta.bytes as usize);
        while (bytes.len() as u64) < meta.bytes {
            let from = bytes.len() as u64;
            bytes.extend_from_slice(&run(self.fetch(name, from..meta.bytes.min(from + (8 << 20))))?);
        }
        Ok(Some(bytes))
    }

    /// All of the range, or an error.
    pub(crate) async fn fetch(&self, name: &str, range: Range<u64>) -> Result<Bytes, StoreError> {
        let length = range.end - range.start;
        let bytes = self.reader.get_range(&self.path(name), range).await.map_err(|error| self.failure(name, &error))?;
        if bytes.len() as u64 != length {
            let why = format!("{} bytes came of {length}", bytes.len());
            return Err(StoreError::Away { url: self.url(name), why });
        }
        Ok(bytes)
    }

    /// Fine if it is not there.
    pub fn remove(&self, name: &str) -> Result<(), StoreError> {
        match run(self.reader.delete(&self.path(name))) {
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

fn build(address: &Address, settings: &Settings, retries: usize, patience: Duration) -> Result<AmazonS3, StoreError> {
    let retry = RetryConfig {
        backoff: BackoffConfig { init_backoff: BACKOFF_FIRST, max_backoff: BACKOFF_MAX, base: 2.0 },
        max_retries: retries,
        retry_timeout: patience,
    };
    let mut builder = AmazonS3Builder::new();
    for (key, value) in &settings.0 {
        // The tools of AWS have keys that say nothing to us.
        if let Ok(key) = key.to_ascii_lowercase().parse() {
            builder = builder.with_config(key, value);
        }
    }
    let built = builder.with_bucket_name(&address.bucket).with_retry(retry).with_http_connector(Connector).build();
    built.map_err(|error| StoreError::Setup { what: why(&error) })
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
