//! The probe: one static C program that every guest carries.

use std::path::PathBuf;
use std::process::Command;

use super::GuestError;
use crate::{cache, paths, shell};

pub const SOURCE: &str = include_str!("../../../guest/probe/probe.c");

/// Compiles the probe; returns the binary. Static, so that guest and host need not share a libc.
pub fn ensure() -> Result<PathBuf, GuestError> {
    let folder = paths::guest().join("probe");
    cache::ensure(&folder, &[SOURCE, include_str!("probe.rs")], |new| {
        let source = paths::root().join("guest/probe/probe.c");
        let flags = ["-static", "-O2", "-s", "-Wall", "-Wextra", "-Werror", "-o"];
        shell::output(Command::new("cc").args(flags).arg(new.join("probe")).arg(source))?;
        Ok::<_, GuestError>(())
    })?;
    Ok(folder.join("probe"))
}
