//! Crash dumps, as other people's tools read them: `crash`, `drgn` and `makedumpfile` are given what Hearth wrote.
//!
//! `reference`: dumps that QEMU made, for the tools and this harness themselves. `dumps`: those of Hearth. `panics`: the
//! ways a kernel dies. `classes`: pages told apart as makedumpfile does it, on guests that died in `dead`. `tools`: running
//! the readers and understanding what they print. `elf`: cores page by page.
//!
//! Ignored by default: `make test-vmcore` makes the tools, the symbols and the breaking module, and runs all of it.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

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
