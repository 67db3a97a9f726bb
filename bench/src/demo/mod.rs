//! The demo: a Debian web server under Hearth panics and comes back: with its file cache brought back from its dead memory
//! (refill), on its dead memory alone (warm), and on its disk alone (cold).
//!
//! boot -> fill the file cache -> serve -> panic -> serve; the same in each of the three ways. Then a table, and the report in
//! `target/demo/report.html`.
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
use crate::report::Run;
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
    let lives = Run::ALL.into_iter().map(|run| live(images.path(), run, profile, &progress));
    let lives = lives.collect::<Result<Vec<_>, _>>()?;
    drop(images);
    let accelerator = if lives[0].accelerator == "kvm" { Accelerator::Kvm } else { Accelerator::Tcg };
    let machine = HostFacts::gather(accelerator);
    let report = page::report(&lives, &machine, profile);
    let path = folder.join("report.html");
    report.write(&path).map_err(|source| DemoError::Write { path: path.clone(), source })?;
    println!("\n{}\n{}\n", table(&report.lines).text(), report.verdict);
    for note in &report.notes {
        println!("{note}");
    }
    println!("\nreport: {}", path.display());
    Ok(())
}

/// Runs one machine on a fresh copy of the Debian image.
fn live(folder: &Path, run: Run, profile: Profile, progress: &Progress) -> Result<Life, DemoError> {
    let image = folder.join("root.img");
    images::copy(&artifacts::debian_root()?, &image)?;
    life::live(&image, run, profile, progress)
}

fn table(lines: &[crate::report::Line]) -> Table {
    let runs = Run::ALL.map(|run| format!("after {}", run.word()));
    let mut table = Table::new(["", "before"].into_iter().chain(runs.iter().map(String::as_str)));
    for line in lines {
        table.row([&line.measure, &line.before].into_iter().chain(line.values.iter().map(|(_, text)| text)).cloned());
    }
    table
}
