//! `make test-vmcore`: crash dumps, read by other tools.
//!
//! tools (crash, drgn, Debian 12's makedumpfile, and a newer one that knows Linux 6.12) -> debug symbols and a faulty module for
//! each guest
//! kernel -> the ignored tests of `vmcore_tools`
//!
//! It is separate from `make test` because of its size: the symbols of two kernels are 600 MiB to fetch and twice that on disk,
//! and crash
//! takes half a minute to read them. Everything is made once under `target/vmcore/`.

mod makedumpfile;
mod symbols;

use std::process::Command;

use crate::apt::AptError;
use crate::cache::{self, CacheError};
use crate::guest::{GuestError, Kernel, NEWER, STABLE};
use crate::setup::{self, SetupError, Tool, tool};
use crate::shell::{self, ShellError};
use crate::suite::{self, Summary};
use crate::{guest, paths};

/// Tools that read dumps, and the kernels' own compiler for the module.
const TOOLS: [Tool; 4] = [
    tool("crash", "crash"),
    tool("makedumpfile", "makedumpfile"),
    tool("gcc-12", "gcc-12"),
    tool("python3", "python3-venv"),
];

/// The wheel includes its own libkdumpfile, which reads zstd and flattened dumps.
const DRGN: &str = "drgn==0.3.0";

#[derive(Debug, thiserror::Error)]
pub enum VmcoreError {
    #[error(transparent)]
    Shell(#[from] ShellError),
    #[error(transparent)]
    Cache(#[from] CacheError),
    #[error(transparent)]
    Setup(#[from] SetupError),
    #[error(transparent)]
    Guest(#[from] GuestError),
    #[error(transparent)]
    Apt(#[from] AptError),
    #[error(
        "no debug symbols for the guest's kernel {release}: if the mirror has a newer kernel by now, `make clean` and `make setup` fetch it"
    )]
    NoSymbols { release: String, source: AptError },
}

/// Makes what is missing, and runs the tests. `filter` goes to cargo test.
pub fn test(filter: &[String]) -> Result<Summary, VmcoreError> {
    setup::ensure(&TOOLS)?;
    guest::ensure_all()?;
    guest::ensure_busybox_newer()?;
    ensure_drgn()?;
    makedumpfile::ensure()?;
    for kernel in [STABLE, NEWER] {
        symbols::ensure(kernel)?;
    }
    Ok(suite::run_ignored("vmcore_tools", filter)?)
}

/// Installs drgn in a virtual environment, without touching the system.
fn ensure_drgn() -> Result<(), VmcoreError> {
    cache::ensure(&paths::vmcore().join("drgn"), &[DRGN], |new| {
        shell::output(Command::new("python3").args(["-m", "venv"]).arg(new))?;
        let pip = new.join("bin/python3");
        shell::output(Command::new(pip).args(["-m", "pip", "install", "--quiet", DRGN]))?;
        Ok(())
    })
}

/// Folder of a kernel's symbols and module.
fn folder(kernel: Kernel) -> std::path::PathBuf {
    paths::vmcore().join(format!("kernel{}", kernel.suffix))
}
