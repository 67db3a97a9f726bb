//! Parts: an upload in parts. Several are in flight at once, in any order, and a part that has changed can be sent
//! again.
//!
//! begin -> send parts -> complete: the object exists. An upload that stops before that removes its parts a moment
//! later (abort), and no object exists.
//! Parts stay only if the process is killed or the abort fails; a lifecycle rule of the bucket removes those.
//!
//! A store forgets a completed upload. So if its answer is lost, it refuses the next attempt, and only the object
//! itself shows whether the upload succeeded. That works only with S3's ETags, which Google and Azure do not use.

use std::sync::Arc;
use std::time::Duration;

use md5::{Digest, Md5};
use object_store::multipart::PartId;
use object_store::path::Path;
use object_store::{ObjectMeta, ObjectStoreExt};
use tokio::task::JoinSet;

use crate::backend::Writer;
use crate::store::{run, runtime};
use crate::upload::{UploadError, watched};
use crate::{Store, StoreError};

/// Minimum size of a part in bytes. The protocol requires at least 5 MiB.
const PART_BYTES: u64 = 8 << 20;
const PARTS_MAX: u64 = 10_000;
const PARTS_AT_ONCE: usize = 4;
/// Interval between calls of `go_on` while nothing happens.
pub(crate) const LOOK_EVERY: Duration = Duration::from_millis(100);

/// Size of each part but the last one, for an object of at most `bytes_max` bytes.
pub fn part_bytes(bytes_max: u64) -> u64 {
    PART_BYTES.max(bytes_max.div_ceil(PARTS_MAX).next_multiple_of(1 << 20))
}

/// Where an upload goes.
#[derive(Debug)]
struct Place {
    /// Client with few retries.
    reader: Arc<dyn Writer>,
    writer: Arc<dyn Writer>,
    path: Path,
    id: String,
    url: String,
}

/// A part that has arrived.
#[derive(Debug)]
struct ArrivedPart {
    number: usize,
    bytes: u64,
    part: PartId,
}

/// An upload in parts. Dropping it before `complete` aborts it.
#[derive(Debug)]
pub struct Parts {
    place: Arc<Place>,
    landed: Vec<Option<ArrivedPart>>,
    /// Numbers of the parts in flight.
    flying: Vec<usize>,
    under_way: JoinSet<object_store::Result<ArrivedPart>>,
    is_complete: bool,
}

impl Parts {
    /// Begins an upload. `go_on` is called now and then, here and in the other methods; false stops the upload.
    pub fn begin(store: &Store, name: &str, go_on: &mut dyn FnMut(u64) -> bool) -> Result<Self, UploadError> {
        let (reader, writer) = (store.hasty_writer()?.clone(), store.writer()?.clone());
        let path = store.path(name);
        let begun = run(watched(writer.create_multipart(&path), go_on))?;
        let id = begun.map_err(|error| store.failure(name, &error))?;
        Ok(Self {
            place: Arc::new(Place { reader, writer, path, id, url: store.url(name) }),
            landed: Vec::new(),
            flying: Vec::new(),
            under_way: JoinSet::new(),
            is_complete: false,
        })
    }

    /// Sends a part, after waiting until fewer than four parts are in flight and none of them has this number. Of two
    /// parts with one number, the later one counts; if not, the store refuses the upload. `go_on` is told how many
    /// bytes have arrived.
    pub fn send(
        &mut self,
        number: usize,
        part: Vec<u8>,
        go_on: &mut dyn FnMut(u64) -> bool,
    ) -> Result<(), UploadError> {
        while self.flying.len() >= PARTS_AT_ONCE || self.flying.contains(&number) {
            self.land(LOOK_EVERY, go_on)?;
        }
        let (place, bytes) = (self.place.clone(), part.len() as u64);
        let sending = async move {
            let part = place.writer.put_part(&place.path, &place.id, number, part.into()).await?;
            Ok(ArrivedPart { number, bytes, part })
        };
        self.under_way.spawn_on(sending, runtime().handle());
        self.flying.push(number);
        Ok(())
    }

    /// Waits for a part in flight, if any, for at most this time.
    pub fn land(&mut self, at_most: Duration, go_on: &mut dyn FnMut(u64) -> bool) -> Result<(), UploadError> {
        let next = run(async { tokio::time::timeout(at_most, self.under_way.join_next()).await });
        let arrived = match next {
            Ok(Some(joined)) => {
                let landed = joined.expect("sending a part does not panic").map_err(|error| self.failure(&error))?;
                self.flying.retain(|flying| *flying != landed.number);
                if self.landed.len() <= landed.number {
                    self.landed.resize_with(landed.number + 1, || None);
                }
                let (number, bytes) = (landed.number, landed.bytes);
                self.landed[number] = Some(landed);
                bytes
            }
            Ok(None) | Err(_) => 0,
        };
        if go_on(arrived) { Ok(()) } else { Err(UploadError::Stopped) }
    }

    /// Completes the object from all parts in order. Panics if one is missing.
    pub fn complete(mut self, go_on: &mut dyn FnMut(u64) -> bool) -> Result<(), UploadError> {
        while !self.flying.is_empty() {
            self.land(LOOK_EVERY, go_on)?;
        }
        let landed: Option<Vec<&ArrivedPart>> = self.landed.iter().map(Option::as_ref).collect();
        let landed = landed.expect("each part was sent");
        let (place, parts) = (&self.place, landed.iter().map(|landed| landed.part.clone()).collect());
        let completed = run(watched(place.writer.complete_multipart(&place.path, &place.id, parts), go_on))?;
        if let Err(error) = completed {
            let found = run(watched(place.reader.head(&place.path), go_on))?;
            if !found.is_ok_and(|found| is_made_of(&found, &landed)) {
                return Err(self.failure(&error).into());
            }
        }
        self.is_complete = true;
        Ok(())
    }

    fn failure(&self, error: &object_store::Error) -> StoreError {
        StoreError::of(&self.place.url, error)
    }
}

impl Drop for Parts {
    fn drop(&mut self) {
        if !self.is_complete {
            runtime().spawn(give_up(self.place.clone(), std::mem::take(&mut self.under_way)));
        }
    }
}

/// Whether the object consists of these parts: it has their length and S3's ETag, the MD5 of the parts' MD5s. Other
/// ETags count as no.
fn is_made_of(object: &ObjectMeta, parts: &[&ArrivedPart]) -> bool {
    let mut hasher = Md5::new();
    for landed in parts {
        let Some(md5) = md5_of(&landed.part.content_id) else { return false };
        hasher.update(md5.to_be_bytes());
    }
    let expected = format!("{:032x}-{}", u128::from_be_bytes(hasher.finalize().into()), parts.len());
    let bytes: u64 = parts.iter().map(|landed| landed.bytes).sum();
    object.size == bytes && object.e_tag.as_deref().is_some_and(|e_tag| e_tag.trim_matches('"') == expected)
}

/// MD5 of a part, from its ETag.
fn md5_of(e_tag: &str) -> Option<u128> {
    let digits = e_tag.trim_matches('"');
    u128::from_str_radix(digits, 16).ok().filter(|_| digits.len() == 32)
}

/// Aborts an upload in the background. It first waits for the parts in flight, because a part that arrives later would
/// never be removed.
async fn give_up(place: Arc<Place>, mut under_way: JoinSet<object_store::Result<ArrivedPart>>) {
    while under_way.join_next().await.is_some() {}
    if let Err(error) = place.writer.abort_multipart(&place.path, &place.id).await {
        tracing::warn!(url = place.url, %error, "parts of an upload that was given up could not be removed");
    }
}
