//! Replace: a small object takes the place of the one that it was made from, unless somebody was faster.
//!
//! The store is asked to take it only if what is there is still what it was (`If-Match`, `If-None-Match`; Google's by generation).

use object_store::{Error, PutMode, PutOptions};

use crate::store::run;
use crate::{Meta, Store, StoreError};

/// What became of it.
#[derive(Debug)]
pub enum Replaced {
    Done,
    /// Something else is there by now.
    Changed,
    /// The store knows no such conditions, or has not said what came of it.
    Unknown(StoreError),
}

impl Store {
    /// `over`: what was there, if anything was. The bytes are sent in one request.
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
