//! Crash dumps as `crash`, `drgn` and `makedumpfile` read them.
//!
//! - `reference`: dumps by QEMU, which test the tools and this harness.
//! - `dumps`: dumps by Hearth.
//! - `panics`: the ways in which a kernel dies.
//! - `classes`: classes of pages compared with makedumpfile's, on guests from `dead`.
//! - `tools`: running the tools and parsing their output.
//! - `elf`: ELF cores, page by page.
//!
//! Ignored by default: `make test-vmcore` makes the tools, the symbols and the faulty module, and runs all of it.

#![allow(clippy::unwrap_used, reason = "a test may panic")]

#[path = "vmcore_tools/classes.rs"]
mod classes;
#[path = "vmcore/dead.rs"]
mod dead;
#[path = "vmcore_tools/dumps.rs"]
mod dumps;
#[path = "vmcore_tools/elf.rs"]
mod elf;
#[path = "vmcore_tools/panics.rs"]
mod panics;
#[path = "vmcore_tools/reference.rs"]
mod reference;
#[path = "vmcore_tools/tools.rs"]
mod tools;
