//! The demo: a Debian web server under Hearth panics and comes back, once with its dead memory and once cold.
//!
//! boot -> fill the file cache -> serve -> panic -> serve -> panic -> read every file; the same again with `ember = "off"`. Then
//! a table, and the report in `target/demo/report.html`.
//!
//! Hearth's own limits slow the disk, which needs no root. The default is the `cloud` profile: an unlimited disk would show the
//! demo host's SSD, which few virtual machines have to themselves.

mod life;
mod page;

use std::io;
use std::path::{Path, PathBuf};
use std::time::Instant;

use hearth_vmtest::{artifacts, images};

use crate::host::facts::{Accelerator, HostFacts};
use crate::host::profile::Profile;
use crate::host::scratch::Scratch;
use crate::load::LoadError;
use crate::table::Table;
use life::Life;

#[derive(Debug, thiserror::Error)]
pub enum DemoError {
    #[error("cannot prepare {path}")]
    Prepare { path: PathBuf, source: io::Error },
    #[error("the demo's machine")]
    Machine(#[from] hearth_vmtest::Error),
    #[error("the demo's web load")]
    Load(#[from] LoadError),
    #[error("in the guest, `{command}` did not report {figure}")]
    NoFigure { command: String, figure: &'static str },
    #[error("cannot write {path}")]
    Write { path: PathBuf, source: io::Error },
}

/// Prints the demo's progress with the seconds since its start.
struct Progress {
    begun: Instant,
}

impl Progress {
    fn tell(&self, what: &str) {
        eprintln!("[{:4.0} s] {what}", self.begun.elapsed().as_secs_f64());
    }
}

/// Runs the demo on a disk of this profile. `folder` gets the image while the demo runs, and the report.
pub fn run(folder: &Path, profile: Profile) -> Result<(), DemoError> {
    let progress = Progress { begun: Instant::now() };
    let images =
        Scratch::new(folder, "images").map_err(|source| DemoError::Prepare { path: folder.to_owned(), source })?;
    let warm = live(images.path(), true, profile, &progress)?;
    let cold = live(images.path(), false, profile, &progress)?;
    drop(images);
    let accelerator = if warm.accelerator == "kvm" { Accelerator::Kvm } else { Accelerator::Tcg };
    let machine = HostFacts::gather(accelerator);
    let report = page::report(&warm, &cold, &machine, profile);
    let path = folder.join("report.html");
    report.write(&path).map_err(|source| DemoError::Write { path: path.clone(), source })?;
    println!("\n{}", table(&report.lines).text());
    for note in &report.notes {
        println!("{note}");
    }
    println!("\nreport: {}", path.display());
    Ok(())
}

/// Runs one machine on a fresh copy of the Debian image.
fn live(folder: &Path, warm: bool, profile: Profile, progress: &Progress) -> Result<Life, DemoError> {
    let image = folder.join("root.img");
    images::copy(&artifacts::debian_root()?, &image)?;
    life::live(&image, warm, profile, progress)
}

fn table(lines: &[crate::report::Line]) -> Table {
    let mut table = Table::new(["", "before", "after warm", "after cold"]);
    for line in lines {
        table.row([&line.measure, &line.before, &line.warm, &line.cold].map(String::as_str));
    }
    table
}
