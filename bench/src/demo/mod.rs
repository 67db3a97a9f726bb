//! The demo: a Debian web server under Hearth crashes and comes back: with its file cache brought back from its dead memory
//! (refill), on its dead memory alone (warm), and on its disk alone (cold).
//!
//! a machine with refill, then one without: boot -> (fill the file cache -> serve -> crash -> serve) for each of its ways. Then a
//! table, and the report in `target/demo/report.html`.
//!
//! With `OWNER=libvirt` the web server is a domain of a libvirt of the demo's own (as root): attached to Hearth with refill, attached
//! without, and as libvirt alone runs it (cold).
//!
//! Hearth's own limits slow the disk, which needs no root. The default is the `cloud` profile: an unlimited disk would show the
//! demo host's SSD, which few virtual machines have to themselves.

mod life;
mod page;

use std::io;
use std::path::{Path, PathBuf};
use std::time::Instant;

use hearth_vmtest::artifacts::Debian;
use hearth_vmtest::images;

use crate::host::facts::{Accelerator, HostFacts};
use crate::host::profile::Profile;
use crate::host::scratch::Scratch;
use crate::load::LoadError;
use crate::report::Run;
use crate::stats;
use crate::table::Table;
use life::{Life, Runner, Server};

#[derive(Debug, thiserror::Error)]
pub enum DemoError {
    #[error("libvirt's daemons need root: run `make demo OWNER=libvirt` as root")]
    NotRoot,
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

/// Whose machine the web server is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum Owner {
    /// Hearth runs its QEMU.
    Hearth,
    /// libvirt runs its QEMU.
    Libvirt,
}

impl Owner {
    /// What runs the web server, each with the ways in which it comes back.
    fn runners(self) -> &'static [(Runner, &'static [Run])] {
        match self {
            Owner::Hearth => &[
                (Runner::Machine { refill: true }, &[Run::Refill]),
                (Runner::Machine { refill: false }, &[Run::Warm, Run::Cold]),
            ],
            Owner::Libvirt => &[
                (Runner::Attached { refill: true }, &[Run::Refill]),
                (Runner::Attached { refill: false }, &[Run::Warm]),
                (Runner::Domain, &[Run::Cold]),
            ],
        }
    }
}

/// Crashes of each way with `LONG=1`.
const LONG_CRASHES: usize = 3;

/// Runs the demo on a disk of this profile: one crash of each way, or the median of several (`long`). `folder` gets the images while
/// the demo runs, and the report.
pub fn run(folder: &Path, profile: Profile, owner: Owner, long: bool) -> Result<(), DemoError> {
    if owner == Owner::Libvirt && !rustix::process::geteuid().is_root() {
        return Err(DemoError::NotRoot);
    }
    let progress = Progress { begun: Instant::now() };
    let images =
        Scratch::new(folder, "images").map_err(|source| DemoError::Prepare { path: folder.to_owned(), source })?;
    let image = images.path().join("root.img");
    let (mut crashes, mut qemu) = (Vec::new(), None);
    images.let_others_in().map_err(|source| DemoError::Prepare { path: images.path().to_owned(), source })?;
    for (runner, ways) in owner.runners() {
        images::copy(&Debian::Web.root()?, &image)?;
        let mut server = Server::start(&image, *runner, profile, &progress)?;
        qemu = server.qemu()?.or(qemu);
        for _ in 0..if long { LONG_CRASHES } else { 1 } {
            for way in *ways {
                crashes.push(server.crash(*way)?);
            }
        }
    }
    drop(images);
    let before = web_before(&crashes);
    let lives: Vec<Life> = Run::ALL.into_iter().filter_map(|run| middle(&mut crashes, run, before)).collect();
    let on = |accelerator: &str| qemu.as_ref().is_some_and(|qemu| qemu.accelerator == accelerator);
    let machine = HostFacts::gather(if on("kvm") { Accelerator::Kvm } else { Accelerator::Tcg });
    let report = page::report(&lives, before, qemu.as_ref(), &machine, profile, owner);
    let path = folder.join("report.html");
    report.write(&path).map_err(|source| DemoError::Write { path: path.clone(), source })?;
    println!("\n{}\n{}\n", table(&report.lines).text(), report.verdict);
    for note in &report.notes {
        println!("{note}");
    }
    println!("\nreport: {}", path.display());
    Ok(())
}

/// The rate before the crashes to which all are compared: a slow moment of the host before one of them would flatter it alone.
fn web_before(crashes: &[Life]) -> f64 {
    let rates: Vec<f64> = crashes.iter().map(Life::web_before).collect();
    stats::median(&rates).expect("there was a crash")
}

/// Takes the crash of this way that is the median by the time to full speed.
fn middle(crashes: &mut Vec<Life>, run: Run, before: f64) -> Option<Life> {
    let mut of_run: Vec<Life> = crashes.extract_if(.., |life| life.run == run).collect();
    let full_s = |life: &Life| life.full_speed_s(before).unwrap_or(f64::INFINITY);
    of_run.sort_by(|one, other| full_s(one).total_cmp(&full_s(other)));
    (!of_run.is_empty()).then(|| of_run.swap_remove(of_run.len() / 2))
}

fn table(lines: &[crate::report::Line]) -> Table {
    let runs = Run::ALL.map(|run| format!("after {}", run.word()));
    let mut table = Table::new(["", "before"].into_iter().chain(runs.iter().map(String::as_str)));
    for line in lines {
        table.row([&line.measure, &line.before].into_iter().chain(line.values.iter().map(|(_, text)| text)).cloned());
    }
    table
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::load::trace::{Sample, Trace};

    /// Ten requests a second before the crash, and from `full_s` on.
    fn life(run: Run, full_s: u32) -> Life {
        let ends = (0..100).chain(full_s * 10..600).map(|tenth| f64::from(tenth) / 10.0);
        let samples = ends.map(|end| Sample { begun_s: end, ended_s: end, bytes: 1 }).collect();
        Life::with_answers(run, Trace { samples }, [0.0, 10.0, 20.0])
    }

    #[test]
    fn middle_crash_of_each_way_is_shown() {
        let mut crashes = vec![life(Run::Warm, 40), life(Run::Warm, 22), life(Run::Cold, 20), life(Run::Warm, 25)];
        let before = web_before(&crashes);
        assert_eq!(before, 10.0);
        let warm = middle(&mut crashes, Run::Warm, before).unwrap();
        let full_s = warm.full_speed_s(before).unwrap();
        assert!((14.0..15.1).contains(&full_s), "{full_s}");
        assert!(middle(&mut crashes, Run::Refill, before).is_none());
        assert_eq!(crashes.len(), 1);
    }
}
