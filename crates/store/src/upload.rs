//! Upload: an object in parts, some of them under way at once.
//!
//! begin -> parts -> complete: the object is there. Whatever stops it before that gives the parts up (abort, a moment later), and there
//! is no object.
//! Only a process that is killed leaves parts behind; a bucket's lifecycle rule removes those.

use std::io::{self, Read};
use std::time::Duration;

use object_store::{MultipartUpload, ObjectStoreExt};
use tokio::task::JoinSet;

use crate::store::{run, runtime};
use crate::{Store, StoreError};

/// 5 MiB at least, says the protocol.
const PART_BYTES: u64 = 8 << 20;
const PARTS_MAX: u64 = 10_000;
const PARTS_AT_ONCE: usize = 4;
/// How often whoever watches is asked, though nothing has come to pass.
const LOOK_EVERY: Duration = Duration::from_millis(100);

#[derive(Debug, thiserror::Error)]
pub enum UploadError {
    #[error(transparent)]
    Store(#[from] StoreError),
    #[error("what was to be sent cannot be read")]
    Read(#[source] io::Error),
    /// Whoever watched had it stopped.
    #[error("the upload was stopped")]
    Stopped,
}

impl Store {
    /// Sends `bytes` bytes. `go_on` hears how many more have arrived, and says false to stop.
    pub fn upload(
        &self,
        name: &str,
        bytes: u64,
        source: &mut dyn Read,
        go_on: &mut dyn FnMut(u64) -> bool,
    ) -> Result<(), UploadError> {
        if bytes <= PART_BYTES {
            let part = next_part(source, bytes).map_err(UploadError::Read)?;
            let path = self.path(name);
            let put = run(watched(self.writer.put(&path, part.into()), go_on))?;
            put.map_err(|error| self.failure(name, &error))?;
            return if go_on(bytes) { Ok(()) } else { Err(UploadError::Stopped) };
        }
        run(async {
            let begun = watched(self.writer.put_multipart(&self.path(name)), go_on).await?;
            let mut upload = begun.map_err(|error| self.failure(name, &error))?;
            let mut under_way = JoinSet::new();
            let sent = self.send(name, bytes, upload.as_mut(), &mut under_way, source, go_on).await;
            if sent.is_err() {
                runtime().spawn(give_up(upload, under_way, self.url(name)));
            }
            sent
        })
    }

    async fn send(
        &self,
        name: &str,
        bytes: u64,
        upload: &mut dyn MultipartUpload,
        under_way: &mut JoinSet<object_store::Result<u64>>,
        source: &mut dyn Read,
        go_on: &mut dyn FnMut(u64) -> bool,
    ) -> Result<(), UploadError> {
        let failed = |error: object_store::Error| UploadError::Store(self.failure(name, &error));
        let part_bytes = PART_BYTES.max(bytes.div_ceil(PARTS_MAX).next_multiple_of(1 << 20));
        let mut left = bytes;
        while left > 0 || !under_way.is_empty() {
            if left > 0 && under_way.len() < PARTS_AT_ONCE {
                let length = left.min(part_bytes);
                let part = next_part(source, length).map_err(UploadError::Read)?;
                let sending = upload.put_part(part.into());
                under_way.spawn(async move { sending.await.map(|()| length) });
                left -= length;
                continue;
            }
            let arrived = match tokio::time::timeout(LOOK_EVERY, under_way.join_next()).await {
                Ok(Some(joined)) => joined.expect("sending a part does not panic").map_err(failed)?,
                Ok(None) | Err(_) => 0,
            };
            if !go_on(arrived) {
                return Err(UploadError::Stopped);
            }
        }
        watched(upload.complete(), go_on).await?.map(drop).map_err(failed)
    }
}

/// Behind whoever gave it up. A part that arrives after that would stay for good, so those that are under way are waited for.
async fn give_up(mut upload: Box<dyn MultipartUpload>, mut under_way: JoinSet<object_store::Result<u64>>, url: String) {
    while under_way.join_next().await.is_some() {}
    if let Err(error) = upload.abort().await {
        tracing::warn!(url, %error, "parts of an upload that was given up could not be removed");
    }
}

/// Until it is done, or whoever watches has it stopped.
async fn watched<T>(work: impl Future<Output = T>, go_on: &mut dyn FnMut(u64) -> bool) -> Result<T, UploadError> {
    let mut work = std::pin::pin!(work);
    while go_on(0) {
        if let Ok(done) = tokio::time::timeout(LOOK_EVERY, &mut work).await {
            return Ok(done);
        }
    }
    Err(UploadError::Stopped)
}

fn next_part(source: &mut dyn Read, length: u64) -> io::Result<Vec<u8>> {
    let mut part = vec![0; length as usize];
    source.read_exact(&mut part)?;
    Ok(part)
}
