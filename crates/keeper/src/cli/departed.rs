//! Departed: `detach` of a domain that libvirt does not have any more. What `attach` made is removed; a disk image never is.
//!
//! unknown to libvirt, or another one with its name -> was it renamed? -> does its QEMU live? -> keeper stopped -> files removed

use std::fs;

use hearth_api::{ErrorWord, StopRequest};
use hearth_libvirt::identity;
use hearth_libvirt::virsh::{KnownDomain, Virsh, VirshError};

use super::{CliError, Context, Exit, claim};
use crate::attachment::Attachment;
use crate::check::life;
use crate::client::ClientError;
use crate::config::{ConfigFile, is_name};

/// Detaches a domain whose definition libvirt has refused with this error, if that is because it has none.
pub fn detach_unknown(
    context: &mut Context<'_>,
    virsh: &Virsh,
    name: &str,
    error: VirshError,
) -> Result<Exit, CliError> {
    // Fails if libvirt does not answer.
    let known = virsh.domains()?;
    let has_it = known.iter().any(|domain| [domain.name.as_str(), &domain.uuid].contains(&name));
    if has_it || !is_name(name) || !has_files(name) {
        return Err(error.into());
    }
    forget(context, &known, name)
}

/// As `detach_unknown`, for a name that now belongs to another domain than the attached one.
pub fn detach_earlier(context: &mut Context<'_>, virsh: &Virsh, name: &str) -> Result<Exit, CliError> {
    forget(context, &virsh.domains()?, name)
}

/// Whether `attach` has left files of a domain of this name. Either of the two may be lost.
pub fn has_files(name: &str) -> bool {
    let attachment = Attachment::of(name);
    let is_attached = attachment.definition().is_ok_and(|definition| definition.is_some());
    is_attached || configuration(&attachment).is_some_and(|file| file.owner.as_deref() == Some("libvirt"))
}

fn forget(context: &mut Context<'_>, known: &[KnownDomain], name: &str) -> Result<Exit, CliError> {
    let attachment = Attachment::of(name);
    let before = attachment.definition().map_err(|source| CliError::File { path: attachment.file(), source })?;
    if let Some(now) = before.and_then(|before| now_named(&before, known)) {
        return Err(refused(name, claim::renamed(name, &now)));
    }
    let runtime = context.root.machine(name);
    if let Some(qemu) = life::living_qemu(&runtime) {
        let what = format!("its QEMU (pid {}) still runs, and libvirt does not know it", qemu.pid);
        return Err(refused(name, claim::NotServed { what, remedy: format!("end it first: `kill {}`", qemu.pid) }));
    }
    if life::has_keeper(&runtime) {
        stop_keeper(context, name)?;
    }
    let images = configuration(&attachment).map(|file| file.disks).unwrap_or_default();
    let images: Vec<_> = images.into_iter().filter_map(|disk| disk.path).collect();
    attachment.remove();
    let stay = if images.is_empty() { String::new() } else { format!("; its images stay: {}", images.join(", ")) };
    let line = format!("Hearth does not serve {name} any more, and has removed its own files of it{stay}");
    context.write_done(name, &line)?;
    Ok(Exit::Done)
}

/// It may complete a dump first.
fn stop_keeper(context: &Context<'_>, name: &str) -> Result<(), CliError> {
    match context.client(name).send(&StopRequest { force: false }) {
        Ok(_) | Err(ClientError::NotRunning { .. }) => Ok(()),
        Err(error) if error.is_refusal(ErrorWord::MachineEnded) => Ok(()),
        Err(error) => Err(error.into()),
    }
}

/// The name that the domain of this definition has by now.
fn now_named(before: &str, known: &[KnownDomain]) -> Option<String> {
    let uuid = identity::uuid(before).ok().flatten()?;
    known.iter().find(|domain| domain.uuid == uuid).map(|domain| domain.name.clone())
}

/// The machine's file, as far as it can be understood.
fn configuration(attachment: &Attachment) -> Option<ConfigFile> {
    ConfigFile::parse(&fs::read_to_string(attachment.file()).ok()?).ok()
}

fn refused(name: &str, error: claim::NotServed) -> CliError {
    CliError::NotDetachable { name: name.to_owned(), problems: vec![error.problem(name)] }
}
