//! A machine whose keeper and files are somebody else's: of a test that ran before the host's kernel was replaced.

use std::path::{Path, PathBuf};

use super::files;
use crate::console::Line;
use crate::error::{Error, Result};
use crate::guest::{Drives, Guest, Output};

pub struct Parked {
    guest: Guest,
    runtime_root: PathBuf,
}

impl Parked {
    pub fn open(name: &str, runtime_root: &Path) -> Result<Self> {
        let guest = Guest::open(name, Line::Call(runtime_root.join(name).join("console.sock")))?;
        Ok(Self { guest, runtime_root: runtime_root.to_owned() })
    }

    /// Any `hearth` command.
    pub fn cli_output(&self, arguments: &[&str]) -> Result<Output> {
        files::cli(&self.runtime_root, arguments)
    }

    /// Any `hearth` command, which must succeed; returns what it printed.
    pub fn cli(&self, arguments: &[&str]) -> Result<String> {
        let output = self.cli_output(arguments)?;
        if output.status == 0 {
            return Ok(output.text());
        }
        let (command, status) = (format!("hearth {}", arguments.join(" ")), output.status);
        Err(self.guest.fail(Error::Cli { command, status, output: output.text() }))
    }
}

impl Drives for Parked {
    fn guest(&self) -> &Guest {
        &self.guest
    }

    /// Nobody here knows its keeper.
    fn check_alive(&self, _waited: &str) -> Result<()> {
        Ok(())
    }
}
