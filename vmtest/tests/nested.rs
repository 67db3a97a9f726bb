//! Hearth under KVM, on hosts without KVM too: a host with KVM is emulated, and the real `hearth` runs guests in it.
//!
//! - `outside`: makes that host from the busybox guest, and runs the tests of `inside` in it.
//! - `inside`: the tests under KVM, which a host with KVM can also run directly.
//! - `reload`: tests before and after that host's kernel is replaced.
//!
//! Ignored by default: `make test-nested` makes what the emulated host needs, and runs `outside`.

#![allow(clippy::unwrap_used, reason = "a test may panic")]

#[path = "nested/host.rs"]
mod host;
#[path = "nested/inside.rs"]
mod inside;
#[path = "nested/outside.rs"]
mod outside;
#[path = "nested/reload.rs"]
mod reload;
