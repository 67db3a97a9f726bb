//! Everything that a line of the Makefile calls: tools, guest images, lints, tests, demo and benches.

mod apt;
mod cache;
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
use std::process::{Command, ExitCode};

use clap::{Parser, Subcommand};

#[derive(Parser)]
#[command(about = "Chores of the Hearth checkout; the Makefile calls them by name")]
struct Arguments {
    #[command(subcommand)]
    chore: Chore,
}

#[derive(Subcommand)]
enum Chore {
    /// Install what is missing and make the guest images
    Setup,
    /// Make the guest images only
    Guest {
        /// The busybox guest with the newer kernel as well
        #[arg(long)]
        newer_kernel: bool,
    },
    /// Unpack QEMU 10 beside the installed one
    Qemu10,
    /// Build the release binary
    Build,
    /// Formatting, clippy, dependency rules
    Lint,
    /// Dependency rules alone
    Deny,
    /// All tests, or those with one of these words in their names
    Test { filter: Vec<String> },
    /// Crash dumps read by crash, drgn and makedumpfile; arguments go to the tests
    TestVmcore { filter: Vec<String> },
    /// Hearth under KVM, on a host that is emulated; arguments go to the tests
    TestNested { filter: Vec<String> },
    /// Tests that take minutes, all or the one with this name
    Soak { name: Option<String> },
    /// Lints and tests from nothing; the last line is the tests' summary
    Ci,
    /// Check the generated pages, or rewrite them with UPDATE=1
    Docs,
    /// A Debian machine crashes and comes back warm
    Demo,
    /// One comparison, or the list of them
    Bench {
        #[arg(required_unless_present = "list")]
        name: Option<String>,
        #[arg(long)]
        list: bool,
        /// Shorter runs: a look, not a result
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
        Chore::Build => shell::run(cargo().args(["build", "--release", "-p", "hearth"]))?,
        Chore::Lint => lint()?,
        Chore::Deny => deny::check()?,
        Chore::Test { filter } => return Ok(reported(&test(&filter)?)),
        Chore::TestVmcore { filter } => return test_vmcore(&filter),
        Chore::TestNested { filter } => return Ok(reported(&test_nested(&filter)?)),
        Chore::Soak { name } => return soak::run(name.as_deref()),
        Chore::Ci => return ci(),
        Chore::Docs => shell::run(cargo().args(["test", "--quiet", "-p", "hearth", "generated"]))?,
        Chore::Demo => bench(&["demo"])?,
        Chore::Bench { list: true, .. } => {
            build_bench()?;
            shell::run(&mut release_bench(&["--list"]))?;
        }
        Chore::Bench { name, quick, .. } => {
            let name = name.unwrap_or_default();
            match name.as_str() {
                "crash" => setup::ensure(&[setup::tool("makedumpfile", "makedumpfile")])?,
                "restore" => {
                    setup::ensure_tools()?;
                    guest::debian_database()?;
                    guest::qemu10()?;
                    // Apart from the bench, whose other runs need not wait for it.
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
    set_up_beside(|| ()).map(drop)
}

/// Tools first: images are made, and all else is compiled, with them. Images take the network and one processor at most, so `work`
/// is done meanwhile.
fn set_up_beside<T>(work: impl FnOnce() -> T) -> Result<T, Box<dyn Error>> {
    setup::ensure_tools()?;
    std::thread::scope(|scope| {
        let images = scope.spawn(make_what_tests_boot);
        let done = work();
        images.join().expect("it says what is wrong")?;
        Ok(done)
    })
}

/// QEMU 10 only when this run is to use it.
fn make_what_tests_boot() -> Result<(), guest::GuestError> {
    guest::ensure_all()?;
    if std::env::var("QEMU").is_ok_and(|version| version == "10") {
        guest::qemu10()?;
    }
    Ok(())
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

/// Some tests are about a newer kernel and a newer QEMU, whatever the host has.
fn test(filter: &[String]) -> Result<suite::Report, Box<dyn Error>> {
    set_up()?;
    guest::ensure_busybox_newer()?;
    guest::qemu10()?;
    Ok(suite::run(filter)?)
}

fn test_vmcore(filter: &[String]) -> Outcome {
    Ok(told(&vmcore::test(filter)?))
}

/// Those that are run on the host of hosts: they run the others inside.
fn test_nested(filter: &[String]) -> Result<suite::Report, Box<dyn Error>> {
    set_up_nested()?;
    let filter = if filter.is_empty() { &["outside".to_owned()] } else { filter };
    // An emulated host has one processor, and each of the two tests one such host.
    Ok(suite::run_ignored_at_once("nested", filter, 2)?)
}

fn set_up_nested() -> Result<(), Box<dyn Error>> {
    setup::ensure_tools()?;
    guest::ensure_busybox()?;
    guest::qemu10()?;
    Ok(guest::nested_host()?)
}

fn told(summary: &suite::Summary) -> ExitCode {
    println!("{summary}");
    if summary.failed == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

/// The slowest tests and those that failed, then the summary.
fn reported(report: &suite::Report) -> ExitCode {
    println!("\nslowest tests:");
    report.slowest().iter().for_each(|line| println!("{line}"));
    println!();
    report.failed.iter().for_each(|name| println!("failed: {name}"));
    told(&report.summary)
}

/// Tests run even where lints fail: one run tells everything that is wrong.
fn ci() -> Outcome {
    let linted = set_up_beside(lint)?;
    if let Err(error) = &linted {
        eprintln!("error: {}", chain(error.as_ref()));
    }
    let tested = test(&[])?;
    let code = reported(&tested.and(test_nested(&[])?));
    Ok(if linted.is_ok() { code } else { ExitCode::FAILURE })
}

fn bench(arguments: &[&str]) -> Result<(), Box<dyn Error>> {
    set_up_beside(build_bench)??;
    Ok(shell::run(&mut release_bench(arguments))?)
}

/// A host whose kernel is replaced must be one that can be lost: the bench takes up what the emulated one came to. One that came
/// to nothing is a finding, not the end of the bench.
fn bench_with_host_reload(arguments: &[&str]) -> Result<(), Box<dyn Error>> {
    set_up()?;
    set_up_nested()?;
    build_bench()?;
    let figures = paths::nested().join("host-reload.json");
    let _of_an_earlier_run = std::fs::remove_file(&figures);
    println!("host reload on an emulated host: {}", suite::reload_host(&figures)?);
    Ok(shell::run(release_bench(arguments).env(suite::HOST_RELOAD_FIGURES, figures))?)
}

/// In one go: built apart, the two would ask for different features of what they share, and compile it twice.
fn build_bench() -> Result<(), shell::ShellError> {
    eprintln!("building hearth and its bench (a few minutes the first time)");
    shell::run(cargo().args(["build", "--quiet", "--release", "-p", "hearth", "-p", "hearth-bench"]))
}

/// Demo and benches measure: they run and drive release binaries.
fn release_bench(arguments: &[&str]) -> Command {
    let release = paths::cargo_target().join("release");
    let mut command = Command::new(release.join("hearth-bench"));
    command.current_dir(paths::root()).args(arguments).env("HEARTH_BIN", release.join("hearth"));
    command
}

/// The cargo that runs this program, working on this checkout from whatever folder it was called.
fn cargo() -> Command {
    let mut command = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    command.current_dir(paths::root());
    command
}

/// An error and its causes on one line.
fn chain(error: &(dyn Error + 'static)) -> String {
    let causes = std::iter::successors(Some(error), |&error| error.source());
    causes.map(ToString::to_string).collect::<Vec<_>>().join(": ")
}
