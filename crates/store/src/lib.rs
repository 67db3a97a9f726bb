//! Object stores: remote files, read and written with blocking calls.
//!
//! ```text
//! Store      one prefix of a bucket: metadata, put, upload in parts, conditional replacement, removal
//! Parts      an upload in parts, each of which can be sent again until the upload is complete
//! Object     an object that is read by position: blocks of 256 KiB, each fetched once and then read from the cache
//! Cache      a folder with a size limit, shared by all processes that use it
//! Scheduler  the order of requests: those that a guest waits for, and those in the background
//! ```
//! The crate `object_store` knows the providers' protocols (`backend`). `ureq` sends its requests (`http`) on threads
//! of a runtime that stays private. A call to a store that does not answer fails after some seconds, or minutes for an
//! upload; the caller decides whether to try again.

#![warn(missing_docs)]

mod address;
mod backend;
mod cache;
mod http;
mod object;
mod parts;
mod replace;
mod scheduler;
mod settings;
mod store;
mod upload;

pub use address::{Address, shown};
pub use cache::{CACHE_BYTES_MIN, Cache};
pub use http::trusting_the_host;
pub use object::Object;
pub use parts::{Parts, part_bytes};
pub use replace::Replaced;
pub use scheduler::{Scheduler, Slot, Urgency};
pub use settings::Settings;
pub use store::{Meta, Store};
pub use upload::UploadError;

/// Errors of object stores; each names the URL or path.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "each variant's message describes it")]
pub enum StoreError {
    #[error("{text:?} is not an address of an object store: {what}")]
    Address { text: String, what: &'static str },
    #[error("{path}: {what}")]
    Settings { path: std::path::PathBuf, what: String },
    #[error(
        "{url}: the store cannot be used with its settings: {what}; correct the file that `credentials` in [object_store] names"
    )]
    Setup { url: String, what: String },
    #[error("{url}: a web server is read-only; save to a folder or a bucket")]
    ReadOnly { url: String },
    #[error("{path}: the cache cannot be used; choose another folder")]
    Cache { path: std::path::PathBuf, source: std::io::Error },
    #[error("{url}: does not exist")]
    Missing { url: String },
    #[error("{url}: the store refuses: {why}")]
    Refused { url: String, why: String },
    #[error("{url}: the store gave no valid answer: {why}")]
    Away { url: String, why: String },
}
