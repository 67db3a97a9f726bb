//! Upload: writes an object from a sequential source, in parts if it is longer than one part.

use std::io::{self, ErrorKind, Read};

use object_store::ObjectStoreExt;

use crate::http::CancelToken;
use crate::parts::{LOOK_EVERY, Parts, part_bytes};
use crate::store::run;
use crate::{Store, StoreError};

/// Errors of uploads.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "each variant's message describes it")]
pub enum UploadError {
    #[error(transparent)]
    Store(#[from] StoreError),
    #[error("the data to upload cannot be read")]
    Read(#[source] io::Error),
    /// `go_on` returned false.
    #[error("the upload was stopped")]
    Stopped,
}

impl Store {
    /// Uploads `source`, which holds at most `bytes_max` bytes, and returns its length. A source that returns
    /// `WouldBlock` is read again. `go_on` is told how many more bytes have arrived, and stops the upload by returning
    /// false, from then on. After a stop at the very end, the object may exist in spite of the error; but nothing
    /// arrives after the return.
    pub fn upload(
        &self,
        name: &str,
        bytes_max: u64,
        source: &mut dyn Read,
        go_on: &mut dyn FnMut(u64) -> bool,
    ) -> Result<u64, UploadError> {
        let part_bytes = part_bytes(bytes_max) as usize;
        let mut part = next_part(source, part_bytes.min(bytes_max as usize), go_on)?;
        if part.len() < part_bytes {
            return self.put(name, part, go_on);
        }
        let mut parts = Parts::begin(self, name, go_on)?;
        let mut bytes = 0;
        for number in 0.. {
            bytes += part.len() as u64;
            parts.send(number, part, go_on)?;
            part = next_part(source, part_bytes, go_on)?;
            if part.is_empty() {
                break;
            }
        }
        parts.complete(go_on)?;
        Ok(bytes)
    }

    /// Uploads bytes in one request. Otherwise as `upload`.
    pub fn put(&self, name: &str, bytes: Vec<u8>, go_on: &mut dyn FnMut(u64) -> bool) -> Result<u64, UploadError> {
        let (path, length) = (self.path(name), bytes.len() as u64);
        let put = run(watched(self.writer()?.put(&path, bytes.into()), go_on))?;
        put.map_err(|error| self.failure(name, &error))?;
        if go_on(length) { Ok(length) } else { Err(UploadError::Stopped) }
    }
}

/// Runs `work` until it ends or `go_on` returns false. After a stop, its requests are cancelled or have ended when this
/// returns.
pub(crate) async fn watched<T>(
    work: impl Future<Output = object_store::Result<T>>,
    go_on: &mut dyn FnMut(u64) -> bool,
) -> Result<object_store::Result<T>, UploadError> {
    let leash = CancelToken::default();
    let mut work = std::pin::pin!(leash.hold(work));
    while go_on(0) {
        if let Ok(done) = tokio::time::timeout(LOOK_EVERY, &mut work).await {
            return Ok(done);
        }
    }
    leash.cancel();
    while leash.is_under_way() {
        if let Ok(done) = tokio::time::timeout(LOOK_EVERY, &mut work).await {
            return done.map(Ok).map_err(|_| UploadError::Stopped);
        }
    }
    Err(UploadError::Stopped)
}

/// Reads the next part; shorter at the end of the source.
fn next_part(source: &mut dyn Read, length: usize, go_on: &mut dyn FnMut(u64) -> bool) -> Result<Vec<u8>, UploadError> {
    let (mut part, mut filled) = (vec![0; length], 0);
    while filled < length {
        match source.read(&mut part[filled..]) {
            Ok(0) => break,
            Ok(read) => filled += read,
            Err(error) if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::Interrupted) => {}
            Err(error) => return Err(UploadError::Read(error)),
        }
        if !go_on(0) {
            return Err(UploadError::Stopped);
        }
    }
    part.truncate(filled);
    Ok(part)
}
