//! `hearth-bench`: measures Hearth beside the usual alternatives, shows it in a demo, and renders the figures.
//!
//! - warm-reboot, crash, disk, rejuvenate, restore, remount, libvirt: one bench each; record in `target/bench/<name>.json`,
//!   table on standard output
//! - demo: a web server that crashes, three ways back; report in `target/demo/report.html`
//! - docs: the tables of `docs/benchmarks/*.md` from the records

mod crash_recovery;
mod demo;
mod disk;
mod docs;
mod harness;
mod host;
mod lazy_restore;
mod libvirt;
mod load;
#[cfg(test)]
mod overview;
mod record;
mod rejuvenation;
mod remount;
mod report;
mod responsiveness;
mod sides;
mod stats;
mod table;
mod warm_reboot;

use std::error::Error;
use std::num::NonZeroUsize;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use clap::{Parser, Subcommand};
use error_text::chain;

use harness::Common;
use host::profile::Profile;
use sides::Stack;

#[derive(Parser)]
#[command(about = "Side-by-side comparisons, the demo, and their figures")]
struct Arguments {
    /// List the benches
    #[arg(long, exclusive = true)]
    list: bool,
    #[command(subcommand)]
    chore: Option<Chore>,
}

#[derive(Subcommand)]
enum Chore {
    /// Measure a crash: file reads, web load and boot, with Hearth and without
    WarmReboot {
        #[command(flatten)]
        common: Common,
        /// Disk profiles to measure (default: all)
        #[arg(long, env = "PROFILE", value_delimiter = ',')]
        profile: Vec<Profile>,
        /// Sides to measure: hearth, hearth-refill, cold-prefetch, qemu-direct, qemu-host-cache, pmem-dax, ram (default:
        /// all)
        #[arg(long, env = "CASES", value_delimiter = ',', value_parser = stack_by_name)]
        cases: Vec<Stack>,
    },
    /// Measure a panic with a dump, beside the reboot and before it
    Crash {
        #[command(flatten)]
        common: Common,
        /// Disk profiles to measure (default: paper and cloud)
        #[arg(long, env = "PROFILE", value_delimiter = ',')]
        profile: Vec<Profile>,
        /// Sides to measure (default: all)
        #[arg(long, env = "CASES", value_delimiter = ',')]
        sides: Vec<crash_recovery::Side>,
    },
    /// Measure disk requests, hit and miss
    Disk {
        #[command(flatten)]
        common: Common,
    },
    /// Measure the pause of a guest whose QEMU is replaced
    Rejuvenate {
        #[command(flatten)]
        common: Common,
        /// Parts to run (default: all)
        #[arg(long, env = "CASES", value_delimiter = ',')]
        parts: Vec<rejuvenation::Part>,
    },
    /// Measure a restore: time to the first answer and to full speed
    Restore {
        #[command(flatten)]
        common: Common,
        /// Disk profiles to measure (default: asis and cloud)
        #[arg(long, env = "PROFILE", value_delimiter = ',')]
        profile: Vec<Profile>,
    },
    /// Measure a crashed storage appliance until all volumes are mounted
    Remount {
        #[command(flatten)]
        common: Common,
        /// Disk profiles to measure (default: all)
        #[arg(long, env = "PROFILE", value_delimiter = ',')]
        profile: Vec<Profile>,
        /// Sides to measure: hearth, hearth-nvram, hearth-without, qemu-direct, qemu-host-cache, qemu-host-cache-dropped
        /// (default: all)
        #[arg(long, env = "CASES", value_delimiter = ',', value_parser = remount::Side::by_name)]
        cases: Vec<remount::Side>,
        /// Numbers of volumes to measure, with all sides
        #[arg(long, env = "VOLUMES", value_delimiter = ',')]
        volumes: Vec<usize>,
        /// Number of volumes mounted in parallel (default: 4)
        #[arg(long)]
        at_once: Option<NonZeroUsize>,
    },
    /// Measure a reboot and a panic of a libvirt domain, plain and attached
    Libvirt {
        #[command(flatten)]
        common: Common,
        /// Disk profiles to measure (default: all)
        #[arg(long, env = "PROFILE", value_delimiter = ',')]
        profile: Vec<Profile>,
    },
    /// Show a Debian machine that panics and returns, warm and cold
    Demo {
        /// Folder for the report
        #[arg(long, default_value_os_t = target().join("demo"))]
        folder: PathBuf,
        /// Disk profile of the machine
        #[arg(long, env = "PROFILE", default_value = "cloud")]
        profile: Profile,
        /// Whose machine the web server is; `libvirt` needs root
        #[arg(long, env = "OWNER", default_value = "hearth")]
        owner: demo::Owner,
        /// Crash three times in each way, and show the medians
        #[arg(long, env = "LONG", value_parser = clap::builder::FalseyValueParser::new())]
        long: bool,
    },
    /// Write the tables of docs/benchmarks/*.md from the records
    Docs {
        /// Folder of the records
        #[arg(long, default_value_os_t = target().join("bench"))]
        folder: PathBuf,
    },
}

fn main() -> ExitCode {
    let arguments = Arguments::parse();
    if arguments.list {
        for bench in harness::BENCHES {
            println!("{}", bench.name);
        }
        return ExitCode::SUCCESS;
    }
    let Some(chore) = arguments.chore else {
        eprintln!("error: name a bench; `hearth-bench --list` lists them, `--help` shows the options");
        return ExitCode::from(2);
    };
    match run(chore) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {}", chain(error.as_ref()));
            ExitCode::FAILURE
        }
    }
}

fn run(chore: Chore) -> Result<(), Box<dyn Error>> {
    match chore {
        Chore::WarmReboot { common, profile, cases } => {
            let quick = common.is_quick();
            let options = warm_reboot::Options {
                quick,
                folder: common.folder.clone(),
                profiles: chosen(profile, if quick { &[Profile::Paper] } else { &Profile::ALL }),
                stacks: chosen(cases, if quick { &warm_reboot::QUICK_STACKS } else { &Stack::ALL }),
            };
            harness::measure(warm_reboot::NAME, &common, |record| warm_reboot::run(&options, record))
        }
        Chore::Crash { common, profile, sides } => {
            let quick = common.is_quick();
            let options = crash_recovery::Options {
                quick,
                folder: common.folder.clone(),
                profiles: chosen(profile, if quick { &[Profile::Paper] } else { &[Profile::Paper, Profile::Cloud] }),
                sides: chosen(sides, &crash_recovery::Side::ALL),
            };
            harness::measure(crash_recovery::NAME, &common, |record| crash_recovery::run(&options, record))
        }
        Chore::Disk { common } => {
            let options = disk::Options { quick: common.is_quick(), folder: common.folder.clone() };
            harness::measure(disk::NAME, &common, |record| disk::run(&options, record))
        }
        Chore::Rejuvenate { common, parts } => {
            let options = rejuvenation::Options {
                quick: common.is_quick(),
                accelerator: common.accelerator,
                parts: chosen(parts, &rejuvenation::Part::ALL),
            };
            harness::measure(rejuvenation::NAME, &common, |record| rejuvenation::run(&options, record))
        }
        Chore::Restore { common, profile } => {
            let quick = common.is_quick();
            let options = lazy_restore::Options {
                quick,
                folder: common.folder.clone(),
                profiles: chosen(profile, if quick { &[Profile::Asis] } else { &[Profile::Asis, Profile::Cloud] }),
            };
            harness::measure(lazy_restore::NAME, &common, |record| lazy_restore::run(&options, record))
        }
        Chore::Remount { common, profile, cases, volumes, at_once } => {
            let quick = common.is_quick();
            let options = remount::Options {
                quick,
                sides: cases,
                volumes,
                at_once,
                folder: common.folder.clone(),
                profiles: chosen(profile, if quick { &[Profile::Paper] } else { &Profile::ALL }),
            };
            harness::measure(remount::NAME, &common, |record| remount::run(&options, record))
        }
        Chore::Libvirt { common, profile } => {
            let quick = common.is_quick();
            let options = libvirt::Options {
                quick,
                folder: common.folder.clone(),
                profiles: chosen(profile, if quick { &[Profile::Paper] } else { &Profile::ALL }),
            };
            harness::measure(libvirt::NAME, &common, |record| libvirt::run(&options, record))
        }
        Chore::Demo { folder, profile, owner, long } => Ok(demo::run(&folder, profile, owner, long)?),
        Chore::Docs { folder } => Ok(docs::rewrite(&folder, &root().join(docs::PAGES))?),
    }
}

/// The chosen items, or all if none were chosen.
fn chosen<T: Copy>(asked: Vec<T>, all: &[T]) -> Vec<T> {
    if asked.is_empty() { all.to_vec() } else { asked }
}

fn stack_by_name(name: &str) -> Result<Stack, String> {
    let names = || Stack::ALL.map(Stack::name).join(", ");
    Stack::ALL.into_iter().find(|stack| stack.name() == name).ok_or_else(|| format!("sides are {}", names()))
}

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("bench is a folder of the checkout")
}

fn target() -> PathBuf {
    root().join("target")
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::CommandFactory;

    #[test]
    fn command_line_is_valid() {
        Arguments::command().debug_assert();
    }

    #[test]
    fn sides_are_found_by_name() {
        assert_eq!(stack_by_name("pmem-dax"), Ok(Stack::PmemDax));
        let error = stack_by_name("xen").unwrap_err();
        assert_eq!(
            error,
            "sides are hearth, hearth-refill, cold-prefetch, qemu-direct, qemu-host-cache, pmem-dax, ram"
        );
    }

    #[test]
    fn error_chain_includes_all_causes() {
        let source = std::io::Error::other("disk on fire");
        let error = sides::RigError::Prepare { path: "/images".into(), source };
        assert_eq!(chain(&error), "cannot prepare /images: disk on fire");
    }
}
