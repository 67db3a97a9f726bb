//! `import`: a machine of Hearth's own from a domain of libvirt.
//!
//! definition -> is it shut off? -> configuration -> checked -> folder -> UEFI variables -> machine.toml, last
//!
//! The domain stays as it is, and its disks where they are. The firmware's variables are copied, because libvirt removes the
//! domain's own with the domain.

use std::fs::{self, DirBuilder, File, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use clap::Args;
use hearth_libvirt::definition;
use hearth_libvirt::import::{self, Boot, Imported, Left, Net};
use hearth_libvirt::virsh::Virsh;
use serde::Serialize;

use super::attach::{MEMORY_STEP, problems, section};
use super::{CliError, Context, Exit, absolute, arriving, backing};
use crate::attachment::Attachment;
use crate::config::{BootSection, Config, ConfigFile, NetSection, WatchdogSection};
use crate::problem::Problem;

const SHUT_OFF: &str = "shut off";
/// The machine's own UEFI variables, in its folder.
const VARIABLES: &str = "vars.fd";
/// Which user QEMU becomes: libvirt did not run it as root either.
const OWN_USER: &str = "auto";

#[derive(Debug, Args)]
pub struct ImportArguments {
    /// The domain.
    domain: String,
    /// Folder to create for the machine (default: its name).
    #[arg(long, value_name = "FOLDER")]
    folder: Option<PathBuf>,
}

/// What `import --json` prints.
#[derive(Serialize)]
struct Report<'a> {
    name: &'a str,
    file: &'a Path,
    disks: Vec<&'a str>,
    left: Vec<LeftOut<'a>>,
}

#[derive(Serialize)]
struct LeftOut<'a> {
    what: &'a str,
    why: &'a str,
}

pub fn import(context: &mut Context<'_>, arguments: ImportArguments) -> Result<Exit, CliError> {
    let (virsh, domain) = (Virsh::system(), arguments.domain);
    let xml = virsh.definition(&domain)?;
    let refused = |error| CliError::NotImportable { name: domain.clone(), problems: problems(&domain, error) };
    let name = definition::name(&xml).map_err(refused)?;
    must_be_free(&virsh, &name)?;
    must_have_arrived(&xml, &name)?;
    let imported = import::import(&xml, backing::check).map_err(refused)?;
    let folder = absolute(arguments.folder.unwrap_or_else(|| PathBuf::from(&name)));
    let file = folder.join("machine.toml");
    let text = configuration(&imported).to_text();
    if let Err(problems) = Config::parse(&text, &file, &context.root) {
        return Err(CliError::NotImportable { name, problems });
    }
    write(&imported, &text, &file)?;
    tell(context, &imported, &file)?;
    Ok(Exit::Done)
}

/// Refuses a domain whose disks are in use, or do not stand for its guest.
fn must_be_free(virsh: &Virsh, name: &str) -> Result<(), CliError> {
    let refuse = |message: &str, hint: String| {
        let problems = vec![Problem::error(name, message, hint)];
        Err(CliError::NotImportable { name: name.to_owned(), problems })
    };
    let attached = Attachment::of(name);
    if attached.definition().map_err(|source| CliError::File { path: attached.file(), source })?.is_some() {
        return refuse("it is attached", format!("give its disks back to libvirt first: hearth detach {name}"));
    }
    let state = virsh.state(name)?;
    if state != SHUT_OFF {
        let message = format!("it is {state}, and two guests on the same disks would destroy them");
        return refuse(&message, format!("shut it down first: virsh shutdown {name}"));
    }
    if virsh.has_saved_memory(name)? {
        let hint = format!("start and shut it down, or drop that memory: virsh managedsave-remove {name}");
        return refuse("libvirt has saved its memory, which belongs to its disks as they are now", hint);
    }
    Ok(())
}

/// The machine would not know its disks' store.
fn must_have_arrived(xml: &str, name: &str) -> Result<(), CliError> {
    let hint = format!("attach it, and run it until all of it is there: hearth attach {name}");
    let failed = |problems| CliError::NotImportable { name: name.to_owned(), problems };
    let arriving = arriving::problems(xml, &hint).map_err(|error| failed(problems(name, error)))?;
    if arriving.is_empty() { Ok(()) } else { Err(failed(arriving)) }
}

fn configuration(imported: &Imported) -> ConfigFile {
    let text = |path: &PathBuf| path.display().to_string();
    let boot = match &imported.boot {
        Boot::Kernel { kernel, initrd, cmdline } => BootSection {
            kernel: Some(text(kernel)),
            initrd: initrd.as_ref().map(text),
            cmdline: Some(cmdline.clone()),
            ..BootSection::default()
        },
        Boot::Bios => BootSection { firmware: Some("bios".to_owned()), ..BootSection::default() },
        Boot::Uefi { code, .. } => BootSection {
            firmware: Some(text(code)),
            firmware_vars: Some(VARIABLES.to_owned()),
            ..BootSection::default()
        },
    };
    ConfigFile {
        name: Some(imported.name.clone()),
        memory: Some(format!("{}MiB", imported.memory_bytes.next_multiple_of(MEMORY_STEP) >> 20)),
        cpus: Some(imported.cpus),
        cpu_model: Some(imported.cpu_model.clone()),
        accelerator: Some(imported.accelerator.to_owned()),
        machine_type: imported.machine_type.clone(),
        qemu: imported.emulator.as_ref().map(text),
        qemu_user: rustix::process::geteuid().is_root().then(|| OWN_USER.to_owned()),
        guest_agent: imported.guest_agent.then_some(true),
        display: imported.screen.then(|| "vnc".to_owned()),
        boot: Some(boot),
        watchdog: imported.watchdog.map(|action| WatchdogSection { action: Some(action.to_owned()) }),
        disks: imported.disks.iter().map(section).collect(),
        nets: imported.nets.iter().map(net).collect(),
        ..ConfigFile::default()
    }
}

fn net(net: &Net) -> NetSection {
    NetSection {
        kind: Some(net.kind.to_owned()),
        forward: Some(net.forward.clone()).filter(|forward| !forward.is_empty()),
        isolated: None,
        ifname: net.ifname.clone(),
        mac: net.mac.clone(),
    }
}

/// Creates the machine's folder. Whatever of it was made is removed if the rest cannot be.
fn write(imported: &Imported, text: &str, file: &Path) -> Result<(), CliError> {
    let folder = file.parent().expect("it is in the machine's folder");
    let at = |path: &Path| {
        let path = path.to_owned();
        |source| CliError::File { path, source }
    };
    DirBuilder::new().mode(0o700).create(folder).map_err(at(folder))?;
    let copied = match &imported.boot {
        Boot::Uefi { vars, .. } => copy_variables(vars, &folder.join(VARIABLES)).map_err(at(vars)),
        _ => Ok(()),
    };
    let written = copied.and_then(|()| write_file(imported, text, file).map_err(at(file)));
    written.inspect_err(|_| {
        if let Err(error) = fs::remove_dir_all(folder) {
            tracing::warn!(%error, folder = %folder.display(), "cannot remove");
        }
    })
}

fn copy_variables(from: &Path, to: &Path) -> io::Result<()> {
    let mut copy = OpenOptions::new().write(true).create_new(true).mode(0o600).open(to)?;
    io::copy(&mut File::open(from)?, &mut copy)?;
    copy.sync_all()
}

fn write_file(imported: &Imported, text: &str, path: &Path) -> io::Result<()> {
    let mut file = OpenOptions::new().write(true).create_new(true).mode(0o600).open(path)?;
    writeln!(file, "# Made from libvirt's domain {} by `hearth import`.", imported.name)?;
    for Left { what, why } in &imported.left {
        writeln!(file, "# not carried over: {}", format!("{what}: {why}").replace(['\n', '\r'], " "))?;
    }
    write!(file, "\n{text}")?;
    file.sync_all()?;
    path.parent().map_or(Ok(()), |folder| File::open(folder)?.sync_all())
}

fn tell(context: &mut Context<'_>, imported: &Imported, file: &Path) -> Result<(), CliError> {
    let Imported { name, disks, left, .. } = imported;
    if context.json {
        let left = left.iter().map(|Left { what, why }| LeftOut { what, why }).collect();
        let disks = disks.iter().map(|disk| disk.name.as_str()).collect();
        return context.write_json(&Report { name, file, disks, left });
    }
    context.write_line(&format!("{name} is a machine now: {}", file.display()))?;
    for disk in disks {
        context.write_line(&format!("{}: {} ({})", disk.name, disk.path.display(), disk.format.name()))?;
    }
    if !left.is_empty() {
        context.write_line("\nNot carried over:")?;
    }
    for Left { what, why } in left {
        context.write_line(&format!("  {what}: {why}"))?;
    }
    context.write_line(&format!(
        "\nStart it with `hearth run {}`. The domain is unchanged: do not start both. `virsh autostart --disable {name}` \
         keeps libvirt from doing so.",
        file.display()
    ))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::runtime_root::RuntimeRoot;

    const DOMAIN: &str = "<domain type='qemu'><name>web</name><memory unit='KiB'>1048577</memory><vcpu>2</vcpu>\
        <os><type arch='x86_64' machine='pc-q35-7.2'>hvm</type>OS</os><devices>\
        <disk type='file'><driver type='qcow2' cache='none'/><source file='/srv/web.qcow2'/><target dev='vda' bus='virtio'/></disk>\
        <interface type='user'><mac address='52:54:00:12:34:56'/><model type='virtio'/></interface>\
        <channel type='unix'><target type='virtio' name='org.qemu.guest_agent.0'/></channel>\
        <watchdog model='i6300esb' action='reset'/><graphics type='vnc'/></devices></domain>";

    fn imported(os: &str) -> Imported {
        import::import(&DOMAIN.replace("OS", os), |_| Ok(())).unwrap()
    }

    #[test]
    fn machine_is_what_the_domain_was() {
        let root = RuntimeRoot::new("/run/hearth");
        let parse = |os: &str| {
            let text = configuration(&imported(os)).to_text();
            Config::parse(&text, Path::new("/srv/web/machine.toml"), &root).unwrap()
        };
        let config = parse("");
        assert_eq!((config.name.as_str(), config.guest.memory_bytes, config.guest.cpus), ("web", 1026 << 20, 2));
        assert_eq!(config.guest.cpu_model.as_deref(), Some("qemu64"));
        assert_eq!(config.guest.machine_type.as_deref(), Some("pc-q35-7.2"));
        assert!(config.guest.agent && config.guest.watchdog.is_some() && config.guest.screen);
        let disk = &config.devices.disks[0];
        assert!(disk.name == "vda" && disk.path == Path::new("/srv/web.qcow2") && disk.direct, "{disk:?}");
        assert_eq!(config.devices.nets[0].mac, "52:54:00:12:34:56");
        let uefi = "<loader type='pflash'>/usr/share/OVMF/OVMF_CODE_4M.fd</loader><nvram>/vars.fd</nvram>";
        let expect = crate::config::Boot::Firmware {
            code: Some("/usr/share/OVMF/OVMF_CODE_4M.fd".into()),
            vars: Some("/srv/web/vars.fd".into()),
        };
        assert_eq!(parse(uefi).guest.boot, expect);
    }

    #[test]
    fn folder_is_complete_or_not_there() {
        let parent = tempfile::tempdir().unwrap();
        let (vars, folder) = (parent.path().join("web_VARS.fd"), parent.path().join("web"));
        let os = format!("<loader type='pflash'>/code.fd</loader><nvram>{}</nvram>", vars.display());
        let imported = imported(&os);
        let file = folder.join("machine.toml");
        assert!(write(&imported, "cpus = 1\n", &file).is_err(), "its variables are missing");
        assert!(!folder.exists());
        fs::write(&vars, "variables").unwrap();
        write(&imported, "cpus = 1\n", &file).unwrap();
        assert_eq!(fs::read_to_string(folder.join(VARIABLES)).unwrap(), "variables");
        let text = fs::read_to_string(&file).unwrap();
        assert!(text.starts_with("# Made from libvirt's domain web") && text.ends_with("\n\ncpus = 1\n"), "{text}");
        // What is there is not replaced.
        assert!(write(&imported, "cpus = 2\n", &file).is_err());
        assert_eq!(fs::read_to_string(&file).unwrap(), text);
    }
}
