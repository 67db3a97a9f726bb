//! `attach` and `detach`: give a domain's disks to Hearth, and back to libvirt.
//!
//! attach: definition -> what would change -> is libvirt's hook called? -> asked -> files of the machine -> `virsh define`
//!
//! Both change what the domain starts with next. A domain that runs goes on as it is.

use std::collections::HashMap;
use std::fs;
use std::io;
use std::os::unix::fs::FileTypeExt;
use std::path::{Path, PathBuf};

use clap::Args;
use hearth_libvirt::definition::{self, Attached, DefinitionError, Format, Image, OnCrash};
use hearth_libvirt::virsh::Virsh;
use serde::Serialize;
use similar::TextDiff;

use super::{CliError, Context, Exit, arriving, backing, claim, departed, hook};
use crate::attachment::{Attachment, CONFIGURATIONS};
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
    must_have_own_disks(&current, &name, &context.root)?;
    // What was attached before is attached anew: it may have other disks now.
    let before = original(&attachment)?;
    must_be_persistent(&virsh, &name)?;
    let written = file_text(&attachment)?;
    let not_attachable = |problems| CliError::NotAttachable { name: name.clone(), problems };
    let earlier = earlier_file(written.as_deref(), &attachment, not_attachable)?;
    let plain = match &before {
        Some(before) => detached(&current, before, &name, &context.root, &earlier)?,
        None => current.clone(),
    };
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
    let served = served_names(&current, &name, &context.root)?;
    must_keep_served(&attached, &served)?;
    must_serve_saved(&virsh, &attached, &context.root)?;
    let text = configuration(earlier, &attached, &served, &attachment, &context.root)?;
    let diff = difference(&current, &attached.xml);
    if !context.json {
        tell(context, &attached, &attachment, &diff)?;
    }
    if arguments.check {
        return report(context, &attached, &attachment, &diff, false);
    }
    if !arguments.yes && !context.confirmed("Attach", "attached", &name)? {
        return Ok(Exit::Failed);
    }
    hook::install().map_err(|source| CliError::File { path: hook::PATH.into(), source })?;
    if !hook::is_live(&virsh, &plain)? {
        return Err(CliError::DeadHook { name });
    }
    // An answer may take long, and others may change both meanwhile.
    if virsh.definition(domain)? != current || file_text(&attachment)? != written {
        let what = format!(
            "is not attached: its definition or its file has changed meanwhile; run `hearth attach {name}` again"
        );
        return Err(CliError::Machine { name, what });
    }
    attachment.write(&text, &plain).map_err(|source| CliError::File { path: attachment.file(), source })?;
    if let Err(error) = virsh.define(&attached.xml) {
        match before.zip(written) {
            // A failure now leaves the new ones, which the hook checks.
            Some((definition, text)) => drop(attachment.write(&text, &definition)),
            None => attachment.remove(),
        }
        return Err(error.into());
    }
    if !context.json {
        context.write_line(&when_attached(&virsh, &name)?)?;
    }
    report(context, &attached, &attachment, &diff, true)
}

pub fn detach(context: &mut Context<'_>, arguments: &DetachArguments) -> Result<Exit, CliError> {
    let (virsh, domain) = (Virsh::system(), &arguments.domain);
    let current = match virsh.definition(domain) {
        Ok(current) => current,
        Err(error) => return departed::detach_unknown(context, &virsh, domain, error),
    };
    let name = definition::name(&current).map_err(|error| refused(domain, error))?;
    let attachment = Attachment::of(&name);
    claim::must_be_known(&name, &current, &context.root)
        .map_err(|error| stays_attached(&name, error.problem(&name)))?;
    let before = original(&attachment)?;
    // A domain with other disks than Hearth's is not the one that was attached.
    let is_other = before.as_ref().is_none_or(|before| !claim::is_same_domain(before, &current))
        && claim::own_sockets(&name, &current, &context.root).is_empty();
    if is_other && departed::has_files(&name) {
        return departed::detach_earlier(context, &virsh, &name);
    }
    let Some(before) = before else {
        return Err(CliError::Machine { name, what: "is not attached".to_owned() });
    };
    let not_detachable = |problems| CliError::NotDetachable { name: name.clone(), problems };
    let earlier = earlier_file(file_text(&attachment)?.as_deref(), &attachment, not_detachable)?;
    let plain = detached(&current, &before, &name, &context.root, &earlier)?;
    must_have_arrived(&plain, &name)?;
    must_leave_no_saved_guest(&virsh, &name, &context.root)?;
    // One that ends with its QEMU must not stay because of this.
    if virsh.is_persistent(&name)? {
        virsh.define(&plain)?;
    }
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

/// Refuses a domain that has no next start. To define it would make it stay.
fn must_be_persistent(virsh: &Virsh, name: &str) -> Result<(), CliError> {
    if virsh.is_persistent(name)? {
        return Ok(());
    }
    let hint = "define it first (virsh dumpxml --inactive, virsh define)";
    let problem = Problem::error(name, "it is transient: libvirt forgets it when it ends", hint);
    Err(CliError::NotAttachable { name: name.to_owned(), problems: vec![problem] })
}

/// Refuses a domain with a disk whose image Hearth does not know, or whose name another one has left files under.
fn must_have_own_disks(current: &str, name: &str, root: &RuntimeRoot) -> Result<(), CliError> {
    let checked = claim::must_be_known(name, current, root).and_then(|()| claim::must_not_replace(name, current));
    checked.map_err(|error| CliError::NotAttachable { name: name.to_owned(), problems: vec![error.problem(name)] })
}

/// From when on the domain has Hearth's disks.
fn when_attached(virsh: &Virsh, name: &str) -> Result<String, CliError> {
    let when = match virsh.state(name)?.as_str() {
        "shut off" if virsh.has_saved_memory(name)? => {
            return Ok(format!(
                "{name} is attached, but its next start goes on from its saved memory (managedsave), with the disks that it was \
                 saved with; the change counts from the start after that"
            ));
        }
        "shut off" => format!("start it: virsh start {name}"),
        _ => format!("it still runs as before; shut it down, and start it again: virsh shutdown {name}"),
    };
    Ok(format!("{name} is attached from its next start on; {when}"))
}

/// Refuses to give a disk back to libvirt that Hearth serves: the machine's file alone says which image it has.
fn must_keep_served(attached: &Attached, served: &HashMap<String, String>) -> Result<(), CliError> {
    let lost = attached.left.iter().filter(|left| served.contains_key(&left.name));
    let hint = format!("see [[disks]] in {}", Attachment::of(&attached.name).file().display());
    let problems: Vec<_> = lost.map(|left| Problem::error(&left.name, &left.why, &hint)).collect();
    match problems.is_empty() {
        true => Ok(()),
        false => Err(CliError::NotAttachable { name: attached.name.clone(), problems }),
    }
}

/// Refuses to serve fewer disks than a saved guest has: libvirt restores it with the definition of then.
fn must_serve_saved(virsh: &Virsh, attached: &Attached, root: &RuntimeRoot) -> Result<(), CliError> {
    let name = &attached.name;
    let now = claim::own_sockets(name, &attached.xml, root);
    let Some(lost) = saved_sockets(virsh, name, root)?.into_iter().find(|socket| !now.contains(socket)) else {
        return Ok(());
    };
    let message = format!("libvirt has saved its memory (managedsave), with a disk at {}", lost.display());
    let problem = Problem::error(name, message, after_saved(name, "attach it then"));
    Err(CliError::NotAttachable { name: name.clone(), problems: vec![problem] })
}

/// Sockets of Hearth's in the definition that libvirt has saved with the domain's memory.
fn saved_sockets(virsh: &Virsh, name: &str, root: &RuntimeRoot) -> Result<Vec<PathBuf>, CliError> {
    if !virsh.has_saved_memory(name)? {
        return Ok(Vec::new());
    }
    Ok(claim::own_sockets(name, &virsh.saved_definition(name)?, root))
}

fn after_saved(name: &str, then: &str) -> String {
    format!("start it (`virsh start {name}`) and {then}, or drop the saved memory: `virsh managedsave-remove {name}`")
}

/// Refuses to leave a saved guest without its disks: libvirt restores it with the definition of then, which names Hearth's sockets.
fn must_leave_no_saved_guest(virsh: &Virsh, name: &str, root: &RuntimeRoot) -> Result<(), CliError> {
    if saved_sockets(virsh, name, root)?.is_empty() {
        return Ok(());
    }
    let message = "libvirt has saved its memory (managedsave), and restores it only with the disks that Hearth serves";
    Err(stays_attached(name, Problem::error(name, message, after_saved(name, "detach it then"))))
}

fn stays_attached(name: &str, problem: Problem) -> CliError {
    CliError::NotDetachable { name: name.to_owned(), problems: vec![problem] }
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
    Ok(!claim::own_sockets(name, &virsh.live_definition(name)?, root).is_empty())
}

/// The domain's definition before it was attached, if it is.
fn original(attachment: &Attachment) -> Result<Option<String>, CliError> {
    attachment.definition().map_err(|source| CliError::File { path: attachment.file(), source })
}

/// The definition without Hearth. Its disks have the images that the machine's file names: their owner may have moved one.
fn detached(
    current: &str,
    before: &str,
    name: &str,
    root: &RuntimeRoot,
    file: &ConfigFile,
) -> Result<String, CliError> {
    let folder = root.machine(name);
    let (ours, image) = (|socket: &Path| disk_at(&folder, socket), |disk: &str| image(file, disk));
    definition::detach(current, before, ours, image).map_err(|error| refused(name, error))
}

/// What the machine's file says of this disk.
fn image(file: &ConfigFile, disk: &str) -> Option<Image> {
    let section = disk_section(file, disk)?;
    let path = Path::new(CONFIGURATIONS).join(section.path.as_ref()?);
    let is_device = fs::metadata(&path).is_ok_and(|metadata| metadata.file_type().is_block_device());
    let format = section.format.as_deref().and_then(Format::named).unwrap_or(Format::Raw);
    Some(Image { path, is_device, format, queues: section.queues.unwrap_or(1) })
}

fn disk_section<'a>(file: &'a ConfigFile, disk: &str) -> Option<&'a DiskSection> {
    file.disks.iter().find(|section| section.name.as_deref() == Some(disk))
}

/// The disks of this definition that Hearth serves: name of the target, and the name that it had when it was attached.
fn served_names(current: &str, name: &str, root: &RuntimeRoot) -> Result<HashMap<String, String>, CliError> {
    let folder = root.machine(name);
    let served = definition::served_disks(current).map_err(|error| refused(name, error))?;
    Ok(served.into_iter().filter_map(|(target, socket)| Some((target, disk_at(&folder, &socket)?))).collect())
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

/// The text of the machine's file, if it has one.
fn file_text(attachment: &Attachment) -> Result<Option<String>, CliError> {
    let file = attachment.file();
    match fs::read_to_string(&file) {
        Ok(text) => Ok(Some(text)),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(source) => Err(CliError::File { path: file, source }),
    }
}

/// The machine's file, if the domain was attached before: its owner may have changed it. `failed`: the error for its
/// problems.
fn earlier_file(
    text: Option<&str>,
    attachment: &Attachment,
    failed: impl Fn(Vec<Problem>) -> CliError,
) -> Result<ConfigFile, CliError> {
    let Some(text) = text else {
        return Ok(ConfigFile { refill: Some("on".to_owned()), ..ConfigFile::default() });
    };
    let typed = ConfigFile::parse(text).map_err(&failed)?;
    if typed.owner.as_deref() == Some("libvirt") {
        return Ok(typed);
    }
    let message = "is the file of a machine that is not a domain of libvirt";
    let problem =
        Problem::error(attachment.file().display().to_string(), message, "move it away, or rename the domain");
    Err(failed(vec![problem]))
}

/// The text of the machine's file. `served`: the disks that Hearth serves already, as `served_names`. Of these the file says more
/// than the definition: their owner may have changed their limits there.
fn configuration(
    earlier: ConfigFile,
    attached: &Attached,
    served: &HashMap<String, String>,
    attachment: &Attachment,
    root: &RuntimeRoot,
) -> Result<String, CliError> {
    let section_of = |disk: &definition::Disk| {
        let fresh = section(disk);
        match served.get(&disk.name).and_then(|name| disk_section(&earlier, name)) {
            // What the definition has of it, too, came from there.
            Some(kept) => DiskSection {
                name: fresh.name,
                path: fresh.path,
                format: fresh.format,
                queues: fresh.queues,
                ..kept.clone()
            },
            None => fresh,
        }
    };
    let disks = attached.disks.iter().map(section_of).collect();
    let typed = ConfigFile {
        name: Some(attached.name.clone()),
        owner: Some("libvirt".to_owned()),
        memory: Some(format!("{}MiB", attached.memory_bytes.next_multiple_of(MEMORY_STEP) >> 20)),
        disks,
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

#[cfg(test)]
mod tests {
    use super::*;

    const DOMAIN: &str = "<domain type='kvm'>
  <name>web</name>
  <memory unit='MiB'>64</memory>
  <vcpu>2</vcpu>
  <features>
    <acpi/>
  </features>
  <devices>
    <disk type='file' device='disk'>
      <driver name='qemu' type='qcow2' cache='none' discard='unmap'/>
      <source file='/images/old.qcow2'/>
      <target dev='vda' bus='virtio'/>
    </disk>
  </devices>
</domain>";
    const SECOND: &str = "<disk type='file' device='disk'><driver name='qemu' type='raw'/><source file='/images/second'/>\
                          <target dev='vdb' bus='virtio'/></disk>";

    /// The definition without Hearth and the one with it, and the machine's file, after one more `attach`.
    fn attached(current: &str, before: Option<&str>, file: &str) -> (String, Attached, ConfigFile) {
        let root = RuntimeRoot::new("/run/hearth");
        let earlier = ConfigFile::parse(file).unwrap();
        let plain = before.map(|before| detached(current, before, "web", &root, &earlier).unwrap());
        let plain = plain.unwrap_or_else(|| current.to_owned());
        let socket = |disk: &str| disk_socket(&root.machine("web"), disk);
        let attached = definition::attach(&plain, None, OnCrash::Preserve, socket, |_| Ok(())).unwrap();
        let served = served_names(current, "web", &root).unwrap();
        let text = configuration(earlier, &attached, &served, &Attachment::of("web"), &root).unwrap();
        (plain, attached, ConfigFile::parse(&text).unwrap())
    }

    #[test]
    fn served_disk_is_not_given_back() {
        let root = RuntimeRoot::new("/run/hearth");
        let (_, first, file) = attached(DOMAIN, None, "");
        let served = served_names(&first.xml, "web", &root).unwrap();
        let plain = detached(&first.xml, DOMAIN, "web", &root, &file).unwrap();
        let more = plain.replace("</devices>", &format!("{SECOND}</devices>"));
        let socket = |disk: &str| disk_socket(&root.machine("web"), disk);
        let again = |lost: &str| {
            let check = |disk: &definition::Disk| if disk.name == lost { Err("is gone".to_owned()) } else { Ok(()) };
            definition::attach(&more, None, OnCrash::Preserve, socket, check).unwrap()
        };
        assert!(must_keep_served(&again("vdb"), &served).is_ok(), "it was libvirt's");
        let refused = must_keep_served(&again("vda"), &served);
        let Err(CliError::NotAttachable { problems, .. }) = refused else { panic!("{refused:?}") };
        assert_eq!(problems[0].to_string(), "error: vda: is gone; see [[disks]] in /etc/hearth/web.toml");
    }

    #[test]
    fn second_attach_keeps_disks_of_the_machines_file() {
        let (plain, first, file) = attached(DOMAIN, None, "");
        assert_eq!(plain, DOMAIN);
        let (plain, again, same) = attached(&first.xml, Some(DOMAIN), &file.to_text());
        assert_eq!((plain.as_str(), &again.xml, &same), (DOMAIN, &first.xml, &file));

        // Its owner has moved the image, and set other keys.
        let mut changed = file;
        changed.disks[0] = DiskSection {
            path: Some("moved.img".to_owned()),
            format: None,
            queues: Some(5),
            iops: Some(500),
            mib_per_second: Some(7),
            direct: Some(false),
            read_only: Some(true),
            serial: Some("mine".to_owned()),
            ..changed.disks[0].clone()
        };
        let with_second = first.xml.replace("</devices>", &format!("{SECOND}</devices>"));
        let (plain, again, kept) = attached(&with_second, Some(DOMAIN), &changed.to_text());
        for words in ["<source file='/etc/hearth/moved.img'/>", "type='raw' cache='none'", "queues='5'", SECOND] {
            assert!(plain.contains(words), "{words} is missing in {plain}");
        }
        assert!(again.xml.contains("queues='5'") && !plain.contains("old.qcow2"), "{plain}");
        let [first_disk, second] = &kept.disks[..] else { panic!("{:?}", kept.disks) };
        let expect = DiskSection {
            path: Some("/etc/hearth/moved.img".to_owned()),
            format: Some("raw".to_owned()),
            ..changed.disks[0].clone()
        };
        assert_eq!((first_disk, second.name.as_deref()), (&expect, Some("vdb")));

        // A disk under another name has the same section; one that is gone has none.
        let renamed = first.xml.replace("dev='vda'", "dev='vdc'");
        let (_, _, kept) = attached(&renamed, Some(DOMAIN), &changed.to_text());
        assert_eq!(kept.disks, [DiskSection { name: Some("vdc".to_owned()), ..expect }]);
        let only_second = DOMAIN.replace("vda", "vdb");
        let (_, _, kept) = attached(&only_second, Some(DOMAIN), &changed.to_text());
        assert_eq!(kept.disks.iter().map(|disk| disk.name.as_deref()).collect::<Vec<_>>(), [Some("vdb")]);
    }

    #[test]
    fn disk_that_libvirt_has_again_is_taken_from_the_definition() {
        let (_, _, file) = attached(DOMAIN, None, "");
        let later = DOMAIN.replace("old.qcow2", "new.qcow2");
        let (plain, _, again) = attached(&later, Some(DOMAIN), &file.to_text());
        assert_eq!(plain, later);
        assert_eq!(again.disks[0].path.as_deref(), Some("/images/new.qcow2"));
    }
}
