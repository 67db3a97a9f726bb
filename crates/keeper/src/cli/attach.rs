//! `attach` and `detach`: give a domain's disks to Hearth, and back to libvirt.
//!
//! attach: definition -> what would change -> is libvirt's hook called? -> asked -> files of the machine -> `virsh define`
//!
//! Both change what the domain starts with next. A domain that runs goes on as it is.

use std::fs;
use std::io::{self, BufRead, IsTerminal};
use std::path::PathBuf;

use clap::Args;
use hearth_libvirt::definition::{self, Attached, DefinitionError, OnCrash};
use hearth_libvirt::virsh::Virsh;
use serde::Serialize;
use similar::TextDiff;

use super::{CliError, Context, Exit, arriving, backing, hook};
use crate::attachment::Attachment;
use crate::check::life;
use crate::config::{Config, ConfigFile, DiskSection};
use crate::folders::{CACHE_MAP, disk_at, disk_socket};
use crate::problem::Problem;
use crate::runtime_root::RuntimeRoot;

/// Memory of a machine is a multiple of this.
pub const MEMORY_STEP: u64 = 2 << 20;

/// What libvirt cannot do with disks that Hearth serves, and what takes its place.
const LOST: [(&str, &str); 5] = [
    ("live migration", "nothing"),
    (
        "snapshots, backup and block jobs of the disks (snapshot-create, backup-begin, blockcopy)",
        "`hearth copy-disk NAME DISK FILE` and `hearth export NAME DISK`",
    ),
    ("blockresize", "resize the image, then `hearth resize NAME DISK`"),
    ("blkdeviotune", "mib_per_second and iops of the disk in the machine's file, from the domain's next start on"),
    ("domblkinfo and domblkstat", "`hearth status NAME`, and metrics"),
];

#[derive(Debug, Args)]
pub struct AttachArguments {
    /// The domain.
    domain: String,
    /// Show what would change, and change nothing.
    #[arg(long)]
    check: bool,
    /// Do not ask.
    #[arg(long, short, conflicts_with = "check")]
    yes: bool,
}

#[derive(Debug, Args)]
pub struct DetachArguments {
    /// The domain.
    domain: String,
}

/// What `attach --json` prints.
#[derive(Serialize)]
struct Report<'a> {
    name: &'a str,
    file: PathBuf,
    /// Whether the domain is attached now.
    attached: bool,
    disks: Vec<&'a str>,
    left: Vec<Left<'a>>,
    dropped: &'a [String],
    diff: &'a str,
}

#[derive(Serialize)]
struct Left<'a> {
    disk: &'a str,
    why: &'a str,
}

pub fn attach(context: &mut Context<'_>, arguments: &AttachArguments) -> Result<Exit, CliError> {
    let (virsh, domain) = (Virsh::system(), &arguments.domain);
    let current = virsh.definition(domain)?;
    let name = definition::name(&current).map_err(|error| refused(domain, error))?;
    let attachment = Attachment::of(&name);
    // What was attached before is attached anew: it may have other disks now.
    let before = original(&attachment)?;
    let plain = match &before {
        Some(before) => detached(&current, before, &name, &context.root)?,
        None => current.clone(),
    };
    let earlier = earlier_file(&name, &attachment)?;
    let cache_map = (earlier.refill.as_deref() == Some("on")).then_some(CACHE_MAP);
    let folder = context.root.machine(&name);
    // What the file means is checked below. Without a dump, the domain restarts inside its QEMU, which is faster.
    let on_crash = match earlier.on_panic.as_deref() {
        Some("recover") => OnCrash::Restart,
        _ => OnCrash::Preserve,
    };
    let attached = definition::attach(&plain, cache_map, on_crash, |disk| disk_socket(&folder, disk), backing::check);
    let attached = attached.map_err(|error| refused(&name, error))?;
    must_leave_none_arriving(&attached)?;
    let text = configuration(earlier, &attached, &attachment, &context.root)?;
    let diff = difference(&current, &attached.xml);
    if !context.json {
        tell(context, &attached, &attachment, &diff)?;
    }
    if arguments.check {
        return report(context, &attached, &attachment, &diff, false);
    }
    if !arguments.yes && !confirmed(context, &name)? {
        return Ok(Exit::Failed);
    }
    hook::install().map_err(|source| CliError::File { path: hook::PATH.into(), source })?;
    if !hook::is_live(&virsh, &plain)? {
        return Err(CliError::DeadHook { name });
    }
    let earlier = fs::read_to_string(attachment.file()).ok();
    attachment.write(&text, &plain).map_err(|source| CliError::File { path: attachment.file(), source })?;
    if let Err(error) = virsh.define(&attached.xml) {
        match before.zip(earlier) {
            // A failure now leaves the new ones, which the hook checks.
            Some((definition, text)) => drop(attachment.write(&text, &definition)),
            None => attachment.remove(),
        }
        return Err(error.into());
    }
    if !context.json {
        let when = match virsh.state(&name)?.as_str() {
            "shut off" => format!("start it: virsh start {name}"),
            _ => format!("it still runs as before; shut it down, and start it again: virsh shutdown {name}"),
        };
        context.write_line(&format!("{name} is attached from its next start on; {when}"))?;
    }
    report(context, &attached, &attachment, &diff, true)
}

pub fn detach(context: &mut Context<'_>, arguments: &DetachArguments) -> Result<Exit, CliError> {
    let (virsh, domain) = (Virsh::system(), &arguments.domain);
    let current = virsh.definition(domain)?;
    let name = definition::name(&current).map_err(|error| refused(domain, error))?;
    let attachment = Attachment::of(&name);
    let Some(before) = original(&attachment)? else {
        return Err(CliError::Machine { name, what: "is not attached".to_owned() });
    };
    let plain = detached(&current, &before, &name, &context.root)?;
    must_have_arrived(&plain, &name)?;
    virsh.define(&plain)?;
    // Its keeper may have died, and the next one needs the files.
    if !virsh.is_off(&name)? && is_served(&virsh, &name, &context.root)? {
        attachment.note_detached().map_err(|source| CliError::File { path: attachment.file(), source })?;
        let line = format!("{name} is detached from its next start on; until then Hearth serves its disks");
        context.write_done(&name, &line)?;
        return Ok(Exit::Done);
    }
    // What is kept of its last guest is of no more use.
    if life::has_keeper(&context.root.machine(&name)) {
        let _ = context.client(&name).send(&hearth_api::StopRequest { force: false });
    }
    attachment.remove();
    context.write_done(&name, &format!("{name} is detached"))?;
    Ok(Exit::Done)
}

/// Refuses to leave a disk with libvirt's own QEMU that has not arrived completely.
fn must_leave_none_arriving(attached: &Attached) -> Result<(), CliError> {
    let name = &attached.name;
    let left: Vec<_> = attached.left.iter().map(|left| format!("{}: {}", left.name, left.why)).collect();
    let hint = format!("make it a disk that Hearth can serve ({})", left.join("; "));
    match arriving::problems(&attached.xml, &hint).map_err(|error| refused(name, error))? {
        arriving if arriving.is_empty() => Ok(()),
        problems => Err(CliError::NotAttachable { name: name.clone(), problems }),
    }
}

/// Refuses to give a disk back to libvirt's own QEMU that has not arrived completely.
fn must_have_arrived(plain: &str, name: &str) -> Result<(), CliError> {
    let hint = format!("run the domain until event disk_complete (`hearth events {name}`), or take the disk out of it");
    match arriving::problems(plain, &hint).map_err(|error| refused(name, error))? {
        arriving if arriving.is_empty() => Ok(()),
        problems => Err(CliError::NotDetachable { name: name.to_owned(), problems }),
    }
}

/// Whether the QEMU that runs the domain uses disks of Hearth's.
fn is_served(virsh: &Virsh, name: &str, root: &RuntimeRoot) -> Result<bool, CliError> {
    let live = virsh.live_definition(name)?;
    let sockets = definition::disk_sockets(&live).map_err(|error| refused(name, error))?;
    Ok(sockets.iter().any(|socket| socket.starts_with(root.machine(name))))
}

/// The domain's definition before it was attached, if it is.
fn original(attachment: &Attachment) -> Result<Option<String>, CliError> {
    attachment.definition().map_err(|source| CliError::File { path: attachment.file(), source })
}

fn detached(current: &str, before: &str, name: &str, root: &RuntimeRoot) -> Result<String, CliError> {
    let folder = root.machine(name);
    definition::detach(current, before, |socket| disk_at(&folder, socket)).map_err(|error| refused(name, error))
}

fn refused(name: &str, error: DefinitionError) -> CliError {
    CliError::NotAttachable { name: name.to_owned(), problems: problems(name, error) }
}

/// Everything that is wrong with a domain.
pub fn problems(name: &str, error: DefinitionError) -> Vec<Problem> {
    match error {
        DefinitionError::Refused(refusals) => {
            refusals.into_iter().map(|refusal| Problem::error(name, refusal.what, refusal.hint)).collect()
        }
        other => vec![Problem::error(name, crate::chain(&other), "")],
    }
}

/// The machine's file, if the domain was attached before: its owner may have added to it.
fn earlier_file(name: &str, attachment: &Attachment) -> Result<ConfigFile, CliError> {
    let file = attachment.file();
    let text = match fs::read_to_string(&file) {
        Ok(text) => text,
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            return Ok(ConfigFile { refill: Some("on".to_owned()), ..ConfigFile::default() });
        }
        Err(source) => return Err(CliError::File { path: file, source }),
    };
    let typed = ConfigFile::parse(&text);
    let typed = typed.map_err(|problems| CliError::NotAttachable { name: name.to_owned(), problems })?;
    if typed.owner.as_deref() == Some("libvirt") {
        return Ok(typed);
    }
    let message = "is the file of a machine that is not a domain of libvirt";
    let problem = Problem::error(file.display().to_string(), message, "move it away, or rename the domain");
    Err(CliError::NotAttachable { name: name.to_owned(), problems: vec![problem] })
}

/// The text of the machine's file.
fn configuration(
    earlier: ConfigFile,
    attached: &Attached,
    attachment: &Attachment,
    root: &RuntimeRoot,
) -> Result<String, CliError> {
    let typed = ConfigFile {
        name: Some(attached.name.clone()),
        owner: Some("libvirt".to_owned()),
        memory: Some(format!("{}MiB", attached.memory_bytes.next_multiple_of(MEMORY_STEP) >> 20)),
        disks: attached.disks.iter().map(section).collect(),
        ..earlier
    };
    let text = typed.to_text();
    // It reports a name that is none for Hearth, among others.
    match Config::parse(&text, &attachment.file(), root) {
        Ok(_) => Ok(text),
        Err(problems) => Err(CliError::NotAttachable { name: attached.name.clone(), problems }),
    }
}

pub fn section(disk: &definition::Disk) -> DiskSection {
    DiskSection {
        name: Some(disk.name.clone()),
        path: Some(disk.path.display().to_string()),
        format: Some(disk.format.name().to_owned()),
        read_only: Some(disk.read_only),
        serial: Some(disk.serial.clone()),
        queues: Some(disk.queues),
        mib_per_second: disk.mib_per_second,
        iops: disk.iops,
        direct: Some(disk.direct),
    }
}

fn difference(old: &str, new: &str) -> String {
    let (old, new) = (with_line_end(old), with_line_end(new));
    TextDiff::from_lines(&old, &new).unified_diff().context_radius(2).to_string()
}

fn with_line_end(text: &str) -> String {
    format!("{}\n", text.trim_end())
}

fn tell(context: &mut Context<'_>, attached: &Attached, attachment: &Attachment, diff: &str) -> Result<(), CliError> {
    let Attached { name, disks, left, dropped, .. } = attached;
    context
        .write_line(&format!("Changes of the definition of {name}, from its next start on:\n\n{}", diff.trim_end()))?;
    for disk in disks {
        let path = disk.path.display();
        context.write_line(&format!("\n{}: Hearth serves it from {path} ({})", disk.name, disk.format.name()))?;
    }
    for disk in left {
        context.write_line(&format!("{}: stays with libvirt: {}", disk.name, disk.why))?;
    }
    dropped.iter().try_for_each(|dropped| context.write_line(dropped))?;
    context.write_line("\nWhile it is attached, libvirt cannot do this with it:")?;
    for (what, instead) in LOST {
        context.write_line(&format!("  {what}; instead: {}", instead.replace("NAME", name)))?;
    }
    let back =
        format!("`hearth detach {name}` takes all of this back. The machine's file: {}", attachment.file().display());
    context.write_line(&format!("\n{back}"))
}

fn report(
    context: &mut Context<'_>,
    attached: &Attached,
    attachment: &Attachment,
    diff: &str,
    is_attached: bool,
) -> Result<Exit, CliError> {
    if context.json {
        context.write_json(&Report {
            name: &attached.name,
            file: attachment.file(),
            attached: is_attached,
            disks: attached.disks.iter().map(|disk| disk.name.as_str()).collect(),
            left: attached.left.iter().map(|left| Left { disk: &left.name, why: &left.why }).collect(),
            dropped: &attached.dropped,
            diff,
        })?;
    }
    Ok(Exit::Done)
}

fn confirmed(context: &mut Context<'_>, name: &str) -> Result<bool, CliError> {
    if !io::stdin().is_terminal() {
        let what = "is not attached: nobody can be asked here; add --yes".to_owned();
        return Err(CliError::Machine { name: name.to_owned(), what });
    }
    write!(context.out, "\nAttach {name}? [y/N] ")?;
    context.out.flush()?;
    let mut answer = String::new();
    io::stdin().lock().read_line(&mut answer)?;
    Ok(matches!(answer.trim(), "y" | "Y" | "yes"))
}
