//! The commands behind the Makefile: tools, guest images, lints, tests, demo and benches.

mod apt;
mod cache;
mod deb;
mod deny;
mod guest;
mod paths;
mod setup;
mod shell;
mod soak;
mod suite;
#[cfg(test)]
mod tidy;
mod vmcore;

use std::error::Error;
use std::ffi::OsString;
use std::process::{Command, ExitCode};

use clap::{Parser, Subcommand};
use error_text::chain;

#[derive(Parser)]
#[command(about = "Commands of the Hearth checkout; the Makefile calls them by name")]
struct Arguments {
    #[command(subcommand)]
    chore: Chore,
}

#[derive(Subcommand)]
enum Chore {
    /// Install missing tools and make the guest images
    Setup,
    /// Make the guest images only
    Guest {
        /// Also make the busybox guest with the newer kernel
        #[arg(long)]
        newer_kernel: bool,
    },
    /// Unpack QEMU 10 beside the installed one
    Qemu10,
    /// Build the release binary, and the package for guests
    Build,
    /// Build the Debian packages: for hosts, and for guests
    Deb {
        /// Also install, upgrade and remove them in clean Debians
        #[arg(long)]
        check: bool,
    },
    /// Check formatting, clippy and dependency rules
    Lint,
    /// Check the dependency rules only
    Deny,
    /// Run all tests, or those with one of these words in their names
    Test { filter: Vec<String> },
    /// Test crash dumps with crash, drgn and makedumpfile; arguments go to the tests
    TestVmcore { filter: Vec<String> },
    /// Test Hearth under KVM on an emulated host; arguments go to the tests
    TestNested { filter: Vec<String> },
    /// Run tests that take minutes: all, or the one with this name
    Soak { name: Option<String> },
    /// Run lints and tests from scratch; the last line is the tests' summary
    Ci,
    /// Check the generated pages, or rewrite them with UPDATE=1
    Docs,
    /// Show a Debian machine that crashes and comes back warm
    Demo,
    /// Run a bench, or list them
    Bench {
        #[arg(required_unless_present = "list")]
        name: Option<String>,
        #[arg(long)]
        list: bool,
        /// Run for a minute or two, for a look rather than a result
        #[arg(long)]
        quick: bool,
    },
}

type Outcome = Result<ExitCode, Box<dyn Error>>;

fn main() -> ExitCode {
    match run(Arguments::parse().chore) {
        Ok(code) => code,
        Err(error) => {
            eprintln!("error: {}", chain(error.as_ref()));
            ExitCode::FAILURE
        }
    }
}

fn run(chore: Chore) -> Outcome {
    match chore {
        Chore::Setup => set_up()?,
        Chore::Guest { newer_kernel } => make_guests(newer_kernel)?,
        Chore::Qemu10 => guest::qemu10()?,
        Chore::Build => {
            shell::run(cargo().args(["build", "--release", "-p", "hearth"]))?;
            guest::refill()?;
        }
        Chore::Deb { check: true } => deb::check()?,
        Chore::Deb { check: false } => {
            println!("{}", deb::hearth(deb::VERSION)?.display());
            println!("{}", guest::refill()?.join(guest::REFILL_PACKAGE).display());
        }
        Chore::Lint => lint()?,
        Chore::Deny => deny::check()?,
        Chore::Test { filter } => return Ok(reported(&test(&filter)?)),
        Chore::TestVmcore { filter } => return test_vmcore(&filter),
        Chore::TestNested { filter } => return Ok(reported(&test_nested(&filter)?)),
        Chore::Soak { name } => return soak::run(name.as_deref()),
        Chore::Ci => return ci(),
        Chore::Docs => shell::run(cargo().args(["test", "--quiet", "-p", "hearth", "generated"]))?,
        Chore::Demo => {
            if std::env::var("OWNER").is_ok_and(|owner| owner == "libvirt") {
                setup::ensure(&setup::LIBVIRT_TOOLS)?;
            }
            bench(&["demo"])?;
        }
        Chore::Bench { list: true, .. } => {
            build_bench()?;
            shell::run(&mut release_bench(&["--list"]))?;
        }
        Chore::Bench { name, quick, .. } => {
            let name = name.unwrap_or_default();
            match name.as_str() {
                "warm-reboot" if !quick => {
                    setup::ensure_tools()?;
                    guest::debian_large()?;
                }
                "libvirt" => setup::ensure(&setup::LIBVIRT_TOOLS)?,
                "crash" => setup::ensure(&[setup::tool("makedumpfile", "makedumpfile")])?,
                "restore" => {
                    setup::ensure_tools()?;
                    guest::debian_database()?;
                    guest::qemu10()?;
                    // Built separately, so that other benches need not wait for it.
                    eprintln!("building the object store (some minutes the first time)");
                    shell::run(cargo().args(["build", "--quiet", "--release", "-p", "loopback-s3"]))?;
                }
                _ => {}
            }
            let arguments = [&[name.as_str()][..], if quick { &["--quick"] } else { &[] }].concat();
            if name == "rejuvenate" && !quick { bench_with_host_reload(&arguments)? } else { bench(&arguments)? }
        }
    }
    Ok(ExitCode::SUCCESS)
}

fn set_up() -> Result<(), Box<dyn Error>> {
    set_up_beside(&[], make_images, || ()).map(drop)
}

/// Installs the tools, with these, and makes images. Both use the network and at most one processor, so `work` runs meanwhile: cargo needs
/// only what was needed to build this program, too.
fn set_up_beside<T>(
    more: &'static [setup::Tool],
    make_images: fn() -> Result<(), guest::GuestError>,
    work: impl FnOnce() -> T,
) -> Result<T, Box<dyn Error>> {
    let missing = setup::find_missing_tools(more)?;
    std::thread::scope(|scope| {
        let images = scope.spawn(move || missing.install().map(|()| make_images()));
        let done = work();
        images.join().expect("making images does not panic")??;
        Ok(done)
    })
}

/// Makes the images; unpacks QEMU 10 only if this run uses it.
fn make_images() -> Result<(), guest::GuestError> {
    guest::ensure_all()?;
    if std::env::var("QEMU").is_ok_and(|version| version == "10") {
        guest::qemu10()?;
    }
    Ok(())
}

/// Makes the images of all tests. Some need a newer kernel and a newer QEMU, whatever the host has.
fn make_test_images() -> Result<(), guest::GuestError> {
    make_guests(true)?;
    guest::qemu10()
}

/// Makes the images of all tests, with those of `make test-nested`.
fn make_ci_images() -> Result<(), guest::GuestError> {
    make_test_images()?;
    guest::nested_host()
}

fn make_guests(newer_kernel: bool) -> Result<(), guest::GuestError> {
    guest::ensure_all()?;
    if newer_kernel { guest::ensure_busybox_newer() } else { Ok(()) }
}

fn lint() -> Result<(), Box<dyn Error>> {
    shell::run(cargo().args(["fmt", "--all", "--check"]))?;
    shell::run(cargo().args(["clippy", "--quiet", "--workspace", "--all-targets", "--", "-D", "warnings"]))?;
    Ok(deny::check()?)
}

fn test(filter: &[String]) -> Result<suite::Report, Box<dyn Error>> {
    let built = set_up_beside(&setup::TEST_TOOLS, make_test_images, suite::build)??;
    Ok(suite::run(&built, filter, None)?)
}

fn test_vmcore(filter: &[String]) -> Outcome {
    Ok(exit_code(&vmcore::test(filter)?))
}

/// Runs the tests outside the emulated host, which run the others inside.
fn test_nested(filter: &[String]) -> Result<suite::Report, Box<dyn Error>> {
    set_up_nested()?;
    let filter = if filter.is_empty() { &["outside".to_owned()] } else { filter };
    // Each of the two tests has an emulated host with one processor.
    Ok(suite::run_ignored_at_once("nested", filter, 2)?)
}

fn set_up_nested() -> Result<(), Box<dyn Error>> {
    setup::ensure_tools()?;
    guest::ensure_busybox()?;
    guest::qemu10()?;
    Ok(guest::nested_host()?)
}

fn exit_code(summary: &suite::Summary) -> ExitCode {
    println!("{summary}");
    if summary.failed == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

/// Prints the slowest tests, the failed ones, and the summary.
fn reported(report: &suite::Report) -> ExitCode {
    println!("\nslowest tests:");
    report.slowest().iter().for_each(|line| println!("{line}"));
    println!();
    report.failed.iter().for_each(|name| println!("failed: {name}"));
    exit_code(&report.summary)
}

/// Runs tests even if lints fail, so that one run shows everything that is wrong.
fn ci() -> Outcome {
    let (linted, built) = set_up_beside(&setup::TEST_TOOLS, make_ci_images, || (lint(), suite::build()))?;
    if let Err(error) = &linted {
        eprintln!("error: {}", chain(error.as_ref()));
    }
    let code = reported(&suite::run(&built?, &[], Some(("nested", "outside")))?);
    Ok(if linted.is_ok() { code } else { ExitCode::FAILURE })
}

fn bench(arguments: &[&str]) -> Result<(), Box<dyn Error>> {
    set_up_beside(&[], make_images, build_bench)??;
    Ok(shell::run(&mut release_bench(arguments))?)
}

/// Reloads an emulated host, since a real one could be lost, and runs the bench with its figures. A failed reload does not end
/// the bench.
fn bench_with_host_reload(arguments: &[&str]) -> Result<(), Box<dyn Error>> {
    set_up()?;
    set_up_nested()?;
    build_bench()?;
    let figures = paths::nested().join("host-reload.json");
    let _of_an_earlier_run = std::fs::remove_file(&figures);
    println!("host reload on an emulated host: {}", suite::reload_host(&figures)?);
    Ok(shell::run(release_bench(arguments).env(suite::HOST_RELOAD_FIGURES, figures))?)
}

/// Builds both in one command: separately, they would choose different features of shared crates, and compile those twice.
fn build_bench() -> Result<(), shell::ShellError> {
    eprintln!("building hearth and its bench (a few minutes the first time)");
    shell::run(cargo().args(["build", "--quiet", "--release", "-p", "hearth", "-p", "hearth-bench"]))
}

/// A command of the release build: demo and benches measure, so they run and drive release binaries.
fn release_bench(arguments: &[&str]) -> Command {
    let release = paths::cargo_target().join("release");
    let mut command = Command::new(release.join("hearth-bench"));
    command.current_dir(paths::root()).args(arguments).env("HEARTH_BIN", release.join("hearth"));
    command
}

/// The cargo that runs this program, for this checkout, whatever the current folder.
///
/// `cargo xtask` describes xtask's own package in the environment. The build script of `ring` runs again when these variables
/// change, and everything that uses TLS would be compiled again each time after a build without them.
fn cargo() -> Command {
    let mut command = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    command.current_dir(paths::root());
    hide_package(&mut command, std::env::vars_os().map(|(name, _)| name));
    command
}

/// `variables`: names of those that are set.
fn hide_package(command: &mut Command, variables: impl Iterator<Item = OsString>) {
    for name in variables.filter(|name| describes_a_package(&name.to_string_lossy())) {
        command.env_remove(name);
    }
}

fn describes_a_package(variable: &str) -> bool {
    ["CARGO_PKG_", "CARGO_MANIFEST_", "CARGO_BIN_"].iter().any(|prefix| variable.starts_with(prefix))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn inner_cargo_sees_no_package() {
        let of_a_package = ["CARGO_PKG_NAME", "CARGO_MANIFEST_DIR", "CARGO_BIN_NAME"];
        let others = ["CARGO_TARGET_DIR", "CARGO_INCREMENTAL", "PATH"];
        let mut command = Command::new("cargo");
        hide_package(&mut command, of_a_package.into_iter().chain(others).map(OsString::from));
        let removed: Vec<_> = command.get_envs().filter(|(_, value)| value.is_none()).map(|(name, _)| name).collect();
        assert_eq!(removed.len(), of_a_package.len(), "{removed:?}");
        assert!(of_a_package.iter().all(|name| removed.contains(&std::ffi::OsStr::new(name))), "{removed:?}");
    }
}
