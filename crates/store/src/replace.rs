//! Replace: writes a small object only if the store still holds the version that it was made from.
//!
//! The request carries a condition (`If-Match` or `If-None-Match`; for Google the generation).

use object_store::client::{HttpError, HttpErrorKind};
use object_store::{Error, PutMode, PutOptions, PutPayload};

use crate::store::{READ_RETRIES, run};
use crate::{Meta, Store, StoreError};

/// Result of a conditional replacement.
#[derive(Debug)]
pub enum Replaced {
    /// The object is written.
    Done,
    /// The store holds another version by now: another writer's, or this one if the answer to the first try was lost.
    Changed,
    /// The store does not support conditions, or the result is unknown.
    Unknown(StoreError),
}

impl Store {
    /// Writes the object in one request. `over` is the version to replace; None if the object must not exist.
    pub fn replace(&self, name: &str, bytes: Vec<u8>, over: Option<&Meta>) -> Replaced {
        let mode = match over {
            None => PutMode::Create,
            Some(meta) => PutMode::Update(meta.condition()),
        };
        let options = PutOptions { mode, ..PutOptions::default() };
        let writer = match self.hasty_writer() {
            Ok(writer) => writer,
            Err(error) => return Replaced::Unknown(error),
        };
        let (path, bytes) = (self.path(name), PutPayload::from(bytes));
        let put = || run(writer.put_opts(&path, bytes.clone(), options.clone()));
        // A store closes idle connections. A request on one is not repeated by `object_store`: it may have been obeyed.
        let mut answer = put();
        for _ in 0..READ_RETRIES {
            match &answer {
                Err(error) if is_interrupted(error) => answer = put(),
                _ => break,
            }
        }
        match answer {
            Ok(_) => Replaced::Done,
            Err(Error::Precondition { .. } | Error::AlreadyExists { .. }) => Replaced::Changed,
            Err(error) => Replaced::Unknown(self.failure(name, &error)),
        }
    }
}

/// Whether the connection broke before there was an answer.
fn is_interrupted(error: &Error) -> bool {
    let mut causes = std::iter::successors(Some(error as &dyn std::error::Error), |error| error.source());
    causes
        .any(|cause| cause.downcast_ref::<HttpError>().is_some_and(|error| error.kind() == HttpErrorKind::Interrupted))
}
