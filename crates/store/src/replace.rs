//! Replace: writes a small object only if the store still holds the version that it was made from.
//!
//! The request carries a condition (`If-Match` or `If-None-Match`; for Google the generation).

use object_store::{Error, PutMode, PutOptions};

use crate::store::run;
use crate::{Meta, Store, StoreError};

/// Result of a conditional replacement.
#[derive(Debug)]
pub enum Replaced {
    /// The object is written.
    Done,
    /// The store holds another version by now; nothing is written.
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
        match run(writer.put_opts(&self.path(name), bytes.into(), options)) {
            Ok(_) => Replaced::Done,
            Err(Error::Precondition { .. } | Error::AlreadyExists { .. }) => Replaced::Changed,
            Err(error) => Replaced::Unknown(self.failure(name, &error)),
        }
    }
}
