//! Hearth under KVM, where there need be none: a host with KVM is itself emulated, and the real `hearth` runs guests in it.
//!
//! `outside`: makes that host out of the busybox guest and has the tests of `inside` run in it; on a host with KVM those can be
//! run directly. `reload`: what is done there before and after another kernel takes its place.
//!
//! Ignored by default: `make test-nested` makes what the emulated host needs, and runs `outside`.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

#[path = "nested/host.rs"]
mod host;
#[path = "nested/inside.rs"]
mod inside;
#[path = "nested/outside.rs"]
mod outside;
#[path = "nested/reload.rs"]
mod reload;
