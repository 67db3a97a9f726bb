//! Object stores: files that lie far away, read and written with blocking calls.
//!
//! ```text
//! Store    one prefix of a bucket: what is there, put, upload in parts, replacement if nobody was faster, removal
//! Parts    an object on its way up, in pieces that may be sent again until it is complete
//! Object   one of its objects, read by position: blocks of 256 KiB that come once, from there on out of the cache
//! Cache    a folder with a limit, shared by all processes that are given it
//! Turns    which request goes first, of a guest that waits and of others that fetch behind its back
//! ```
//! The crate `object_store` knows the protocols of the houses (`backend`); its requests are carried by `ureq` (`http`), on threads of a runtime that nobody
//! outside sees. Nothing here decides how long to wait for a store that is gone: a call gives up after some seconds, and whoever
//! called says whether it is worth another.

mod address;
mod backend;
mod cache;
mod http;
mod object;
mod parts;
mod replace;
mod settings;
mod store;
mod turns;
mod upload;

pub use address::{Address, shown};
pub use cache::{CACHE_BYTES_MIN, Cache};
pub use http::trusting_the_host;
pub use object::Object;
pub use parts::{Parts, part_bytes};
pub use replace::Replaced;
pub use settings::Settings;
pub use store::{Meta, Store};
pub use turns::{Turn, Turns, Urgency};
pub use upload::UploadError;

#[derive(Debug, thiserror::Error)]
pub enum StoreError {
    #[error("{text:?} is no address of an object store: {what}")]
    Address { text: String, what: &'static str },
    #[error("{path}: {what}")]
    Settings { path: std::path::PathBuf, what: String },
    #[error("{url}: the store's settings are not what it takes: {what}; see `credentials` of [object_store]")]
    Setup { url: String, what: String },
    #[error("{url}: a web server is only read; save to a folder or a bucket")]
    ReadOnly { url: String },
    #[error("{path}: the cache cannot be used; choose another folder")]
    Cache { path: std::path::PathBuf, source: std::io::Error },
    #[error("{url}: is not there")]
    Missing { url: String },
    #[error("{url}: the store refuses: {why}")]
    Refused { url: String, why: String },
    #[error("{url}: the store does not answer as it should: {why}")]
    Away { url: String, why: String },
}
