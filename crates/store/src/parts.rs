//! Parts: an object that is sent in pieces, some of them under way at once, in any order; and again, if one has changed meanwhile.
//!
//! begin -> parts -> complete: the object is there. Whatever stops it before that gives the parts up (abort, a moment later), and there
//! is no object.
//! Only a process that is killed leaves parts behind; a bucket's lifecycle rule removes those.
//!
//! A store that has completed an upload knows it no more. So if its answer is lost it refuses the next attempt, and only the object
//! itself tells what came of it; if it is called what S3 calls it, which Google's and Azure's are not.

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

/// 5 MiB at least, says the protocol.
const PART_BYTES: u64 = 8 << 20;
const PARTS_MAX: u64 = 10_000;
const PARTS_AT_ONCE: usize = 4;
/// How often whoever watches is asked, though nothing has come to pass.
pub(crate) const LOOK_EVERY: Duration = Duration::from_millis(100);

/// How long each part of an object of at most so many bytes is, but for its last one.
pub fn part_bytes(bytes_max: u64) -> u64 {
    PART_BYTES.max(bytes_max.div_ceil(PARTS_MAX).next_multiple_of(1 << 20))
}

#[derive(Debug)]
struct Place {
    /// Which gives up sooner.
    reader: Arc<dyn Writer>,
    writer: Arc<dyn Writer>,
    path: Path,
    id: String,
    url: String,
}

#[derive(Debug)]
struct Landed {
    number: usize,
    bytes: u64,
    part: PartId,
}

/// Dropped before it is complete, it is given up.
#[derive(Debug)]
pub struct Parts {
    place: Arc<Place>,
    landed: Vec<Option<Landed>>,
    /// Their numbers.
    flying: Vec<usize>,
    under_way: JoinSet<object_store::Result<Landed>>,
    is_complete: bool,
}

impl Parts {
    /// Of this object. `go_on` is asked meanwhile, and says false to stop, here and in all that follows.
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

    /// Puts it under way as soon as there is room for it there, and it is not under way itself: the last of two with the same number
    /// is the one that counts, and a store says no if it is not. `go_on` hears how many bytes have arrived meanwhile.
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
            Ok(Landed { number, bytes, part })
        };
        self.under_way.spawn_on(sending, runtime().handle());
        self.flying.push(number);
        Ok(())
    }

    /// Waits for one that is under way, if any is, but no longer than that.
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

    /// The object is these parts, one after the other; none may be missing.
    pub fn complete(mut self, go_on: &mut dyn FnMut(u64) -> bool) -> Result<(), UploadError> {
        while !self.flying.is_empty() {
            self.land(LOOK_EVERY, go_on)?;
        }
        let landed: Option<Vec<&Landed>> = self.landed.iter().map(Option::as_ref).collect();
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

/// It is these parts, one after the other: so long, and called what S3 calls such an object, the MD5 of the MD5s of its parts. A store
/// that calls its objects otherwise is not believed.
fn is_made_of(object: &ObjectMeta, parts: &[&Landed]) -> bool {
    let mut hasher = Md5::new();
    for landed in parts {
        let Some(md5) = md5_of(&landed.part.content_id) else { return false };
        hasher.update(md5.to_be_bytes());
    }
    let expected = format!("{:032x}-{}", u128::from_be_bytes(hasher.finalize().into()), parts.len());
    let bytes: u64 = parts.iter().map(|landed| landed.bytes).sum();
    object.size == bytes && object.e_tag.as_deref().is_some_and(|e_tag| e_tag.trim_matches('"') == expected)
}

/// Of a part, by what the store calls it.
fn md5_of(e_tag: &str) -> Option<u128> {
    let digits = e_tag.trim_matches('"');
    u128::from_str_radix(digits, 16).ok().filter(|_| digits.len() == 32)
}

/// Behind whoever gave it up. A part that arrives after that would stay for good, so those that are under way are waited for.
async fn give_up(place: Arc<Place>, mut under_way: JoinSet<object_store::Result<Landed>>) {
    while under_way.join_next().await.is_some() {}
    if let Err(error) = place.writer.abort_multipart(&place.path, &place.id).await {
        tracing::warn!(url = place.url, %error, "parts of an upload that was given up could not be removed");
    }
}
