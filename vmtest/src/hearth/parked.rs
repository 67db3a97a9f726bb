//! A machine whose keeper and files belong to a test that ran before the host's kernel was replaced.

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

    /// Any `hearth` command. Returns its standard output, followed by its standard error.
    pub fn cli_output(&self, arguments: &[&str]) -> Result<Output> {
        files::cli(&self.runtime_root, arguments)
    }

    /// Any `hearth` command, which must succeed. Returns its output.
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

    /// Does nothing: this test does not know the machine's keeper.
    fn check_alive(&self, _waited: &str) -> Result<()> {
        Ok(())
    }
}
