//! `hearth rehearse`: runs a throwaway clone to record what a restored guest uses first.
//!
//! snapshot -> a folder with overlay disks and isolated networks -> a traced restore, until time is up or the probe
//! succeeds -> the working set is recorded -> the clone is ended and its folder removed

use std::net::{Ipv4Addr, TcpListener};
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use clap::Args;
use hearth_recovery::lazy_restore::Mode;

use super::clone::{CloneNote, remove_leftovers};
use super::lazy_restore::{Draft, make_machine, typed};
use super::object_store::{StoreArguments, place};
use super::trust::Trust;
use super::{CliError, absolute};
use crate::config::SECONDS_MAX;
use crate::machine::lazy_restore::{Probe, RestoreOrder, Trace};
use crate::run::Start;
use crate::runtime_root::RuntimeRoot;
use crate::upgrade::Inheritance;

#[derive(Debug, Args)]
pub struct RehearseArguments {
    /// Snapshot folder, or an address such as s3://BUCKET/PREFIX.
    ///
    /// Addresses of gs, az, abfs and https work too; see docs/object-store.md.
    #[arg(add = super::complete::snapshots())]
    snapshot: PathBuf,
    /// How long to watch the clone, in seconds.
    #[arg(long = "for", value_name = "SECONDS", default_value_t = 20, value_parser = clap::value_parser!(u64).range(..=SECONDS_MAX))]
    seconds: u64,
    /// Stop early, once the guest accepts connections on this port.
    #[arg(long, value_name = "PORT")]
    until_port: Option<u16>,
    /// Stop early, once this host command succeeds; it is retried.
    #[arg(long, value_name = "COMMAND", conflicts_with = "until_port")]
    until: Option<String>,
    /// Host port forwarded into the clone, as HOSTIP:PORT:GUESTPORT.
    #[arg(long, value_name = "FORWARD", requires = "until")]
    forward: Vec<String>,
    /// Let the snapshot name programs, files and users of this host.
    ///
    /// Use this only if you trust whoever made the snapshot.
    #[arg(long)]
    trust_config: bool,
    /// Folder for the clone's disk writes (default: the temporary folder).
    #[arg(long, value_name = "FOLDER")]
    scratch: Option<PathBuf>,
    #[command(flatten)]
    store: StoreArguments,
}

/// `run` supervises a machine until it has stopped.
pub fn rehearse(
    arguments: RehearseArguments,
    root: RuntimeRoot,
    run: fn(Start) -> ExitCode,
) -> Result<ExitCode, CliError> {
    let RehearseArguments { snapshot, seconds, until_port, until, mut forward, trust_config, scratch, store } =
        arguments;
    remove_leftovers(&root);
    let path = place(snapshot);
    let snapshot = store.open(&path)?;
    let typed = typed(&snapshot)?.without_object_store();
    if typed.nets.iter().any(|net| net.kind.as_deref() == Some("tap")) {
        let what = "cannot rehearse: it has a tap network, which cannot be isolated; use `hearth restore --trace`";
        return Err(CliError::Machine { name: snapshot.manifest.machine, what: what.to_owned() });
    }
    let trust = Trust::of(&snapshot, &root, trust_config);
    // The clone gets its own networks.
    trust.check(&snapshot, &typed, |key| key.starts_with("nets["))?;
    let typed = typed.with_object_store(store.section());
    let until = match until_port {
        Some(guest_port) => {
            let port = free_port().map_err(CliError::Port)?;
            forward = vec![format!("127.0.0.1:{port}:{guest_port}")];
            Some(Probe::Port(port))
        }
        None => until.map(Probe::Command),
    };
    let name = format!("rehearsal-{}", std::process::id());
    let folder = absolute(scratch.unwrap_or_else(std::env::temp_dir)).join(format!("hearth-{name}"));
    let trace = Trace { window: Duration::from_secs(seconds), until, then_stop: true };
    let seal = Some(snapshot.seal().to_owned());
    let order = RestoreOrder { snapshot: path.clone(), seal, mode: Mode::Lazy, trace: Some(trace) };
    let draft = Draft { snapshot: &snapshot, typed: typed.isolated(&forward), settings: Vec::new(), trust };
    let clone = CloneNote::write(&name, &folder, &root)?;
    let (in_force, folders) = make_machine(draft, &name, &folder, &order, &root)?;
    let before = snapshot.working_set_version()?;
    drop(snapshot);
    let ended = run(Start { in_force, folders, root, restore: Some(order), inheritance: Inheritance::default() });
    // This also removes its events, which were already printed.
    drop(clone);
    if ended != ExitCode::SUCCESS {
        return Ok(ended);
    }
    let snapshot = store.open(&path)?;
    if snapshot.working_set_version()? == before {
        let what = "the rehearsal ended before it recorded a working set; the events above show why".to_owned();
        return Err(CliError::Machine { name, what });
    }
    let pages = snapshot.working_set?.map_or(0, |set| set.pages().len());
    println!("{}: {pages} pages in the working set", path.display());
    Ok(ended)
}

/// A port that is free now; the clone's QEMU binds it within seconds.
fn free_port() -> std::io::Result<u16> {
    Ok(TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?.local_addr()?.port())
}
