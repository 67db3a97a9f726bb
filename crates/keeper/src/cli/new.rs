//! `new`: a machine from a disk image, in one line.
//!
//! name, key, ports -> configuration, read as `check` reads it -> disk over the image, seed -> checked -> NAME.toml
//!
//! The image is only read: the machine's own disk is an overlay over it, made at once, and one image serves any number of
//! machines. If anything fails, or this command is interrupted, nothing is left.

use std::collections::BTreeSet;
use std::fs::{self, DirBuilder, File, OpenOptions};
use std::io::{self, Read, Write};
use std::net::{Ipv4Addr, TcpListener};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

use clap::Args;
use hearth_disk::image::{backing_images, create_overlay};
use serde::Serialize;
use signal_hook::consts::{SIGINT, SIGTERM};

use super::machine::start_command;
use super::{CliError, Context, Exit, absolute, service};
use crate::check::{self, Purpose};
use crate::config::{BootSection, Config, ConfigFile, DiskFormat, DiskSection, Forward, NetSection, uefi_template};
use crate::home::Home;
use crate::problem::Problem;

mod seed;

/// Which user QEMU becomes under root.
const OWN_USER: &str = "auto";
/// How images begin that are neither raw nor qcow2. `hearth new` would take them for raw ones.
const FOREIGN: [(usize, &[u8], &str); 5] = [
    (0, b"KDMV", "VMDK"),
    (0, b"# Disk DescriptorFile", "VMDK"),
    (0, b"vhdxfile", "VHDX"),
    (0, b"conectix", "VHD"),
    (64, b"\x7f\x10\xda\xbe", "VDI"),
];
/// How compressed files begin, and the program that unpacks them.
const PACKED: [(&[u8], &str); 4] =
    [(b"\xfd7zXZ\0", "xz"), (b"\x1f\x8b\x08", "gzip"), (b"\x28\xb5\x2f\xfd", "zstd"), (b"BZh", "bzip2")];
const QCOW2_MAGIC: [u8; 4] = *b"QFI\xfb";
/// All of these are within this many bytes.
const HEAD_BYTES: u64 = 128;
/// Where ssh listens in the guest, and from where on a port of the host is chosen for it.
const SSH_PORT: u16 = 22;
const SSH_FROM: u16 = 2222;

#[derive(Debug, Args)]
pub struct NewArguments {
    /// Name of the machine.
    name: String,
    /// Disk image to start from; it is only read.
    ///
    /// A file in the format raw or qcow2 without a backing image, such as a distribution's cloud image. It must stay where it is,
    /// and as it is.
    #[arg(long, value_name = "FILE")]
    image: PathBuf,
    /// Public key that may log in as the user hearth.
    ///
    /// Adds a disk for the guest's cloud-init, and forwards a port to ssh.
    #[arg(long, value_name = "FILE")]
    ssh_key: Option<PathBuf>,
    /// Guest RAM.
    #[arg(long, value_name = "SIZE", default_value = "1GiB")]
    memory: String,
    /// Boot with UEFI (OVMF, Debian: ovmf) instead of BIOS.
    ///
    /// The machine gets its own copy of the firmware's variables.
    #[arg(long)]
    uefi: bool,
    /// Host port forwarded into the guest, as PORT:GUESTPORT.
    ///
    /// May be repeated. HOSTIP:PORT:GUESTPORT listens at another address than 127.0.0.1.
    #[arg(long, value_name = "FORWARD")]
    forward: Vec<String>,
}

/// What `new --json` prints.
#[derive(Serialize)]
struct Report<'a> {
    name: &'a str,
    file: PathBuf,
    disk: PathBuf,
    seed: Option<PathBuf>,
    forward: &'a [Forward],
    warnings: &'a [Problem],
    next: String,
}

pub fn new(context: &mut Context<'_>, arguments: NewArguments) -> Result<Exit, CliError> {
    let home = super::home(&arguments.name)?;
    must_be_free(&home)?;
    let image = absolute(arguments.image);
    let format = format_of(&image)?;
    must_be_whole(&image, format)?;
    let keys = arguments.ssh_key.as_deref().map(read_keys).transpose()?;
    let mut forward = arguments.forward;
    // A forward that cannot be understood is reported below.
    if keys.is_some() && !forward.iter().any(|text| text.ends_with(&format!(":{SSH_PORT}"))) {
        forward.push(format!("{}:{SSH_PORT}", free_port(context)?));
    }
    let typed = configuration(&home, &arguments.memory, forward, keys.is_some());
    let boot = arguments.uefi.then(|| uefi(&home));
    let text = text(&image, &ConfigFile { boot, ..typed });
    let file = home.file();
    let config = Config::parse(&text, &file, &context.root)
        .map_err(|problems| CliError::Configuration { file: file.clone(), problems })?;
    let is_interrupted = catch_interrupts().map_err(CliError::Signals)?;
    let mut made = Made::default();
    let written = write(&mut made, &home, (&image, format), arguments.uefi, keys.as_deref());
    let checked = written.and_then(|()| must_run(context, &config));
    let done = match is_interrupted.load(Relaxed) {
        // The terminal has interrupted the QEMU of the check, too.
        true => {
            Err(CliError::Machine { name: home.name().to_owned(), what: "interrupted; nothing is left".to_owned() })
        }
        false => checked.and_then(|warnings| configure(&mut made, &home, &text).map(|()| warnings)),
    };
    let warnings = done.inspect_err(|_| made.remove(&home))?;
    tell(context, &home, &config, &image, &warnings)?;
    Ok(Exit::Done)
}

/// A flag that is set when this command is to end. It then ends by itself, without what it has made. The second signal ends it at once.
fn catch_interrupts() -> io::Result<Arc<AtomicBool>> {
    let is_interrupted = Arc::new(AtomicBool::new(false));
    for signal in [SIGINT, SIGTERM] {
        signal_hook::flag::register_conditional_default(signal, is_interrupted.clone())?;
        signal_hook::flag::register(signal, is_interrupted.clone())?;
    }
    Ok(is_interrupted)
}

fn must_be_free(home: &Home) -> Result<(), CliError> {
    match [home.file(), home.disk(), home.variables(), home.seed()].into_iter().find(|path| path.exists()) {
        Some(path) => {
            let name = home.name().to_owned();
            let path = path.display();
            let what =
                format!("{path} exists already; choose another name, move it, or `hearth rm {name}` if Hearth made it");
            Err(CliError::Machine { name, what })
        }
        None => Ok(()),
    }
}

/// The image's format, by its first bytes. Refuses what would be a disk that no guest can boot from.
fn format_of(image: &Path) -> Result<DiskFormat, CliError> {
    let name = image.display().to_string();
    let refuse = |what: String| Err(CliError::Machine { name: name.clone(), what });
    let found = fs::metadata(image).map_err(at(image))?;
    if !found.is_file() || found.len() == 0 {
        let what = if found.is_file() { "is empty" } else { "is not a file" };
        return refuse(format!("{what}; give a disk image, such as a distribution's cloud image"));
    }
    let mut head = Vec::new();
    File::open(image).and_then(|file| file.take(HEAD_BYTES).read_to_end(&mut head)).map_err(at(image))?;
    let has = |start: usize, magic: &[u8]| head.get(start..).is_some_and(|rest| rest.starts_with(magic));
    if let Some((_, program)) = PACKED.into_iter().find(|(magic, _)| has(0, magic)) {
        return refuse(format!("is compressed; unpack it first: `{program} -dc {name} >NEW.img`"));
    }
    if let Some((.., format)) = FOREIGN.into_iter().find(|(start, magic, _)| has(*start, magic)) {
        return refuse(format!("is a {format} image; convert it first: `qemu-img convert -O qcow2 {name} NEW.qcow2`"));
    }
    Ok(if has(0, &QCOW2_MAGIC) { DiskFormat::Qcow2 } else { DiskFormat::Raw })
}

/// Refuses an image with a backing image: that would have to stay as it is, too, and `hearth rm` may remove it.
fn must_be_whole(image: &Path, format: DiskFormat) -> Result<(), CliError> {
    if format != DiskFormat::Qcow2 {
        return Ok(());
    }
    match backing_images(image)?.first() {
        Some((beneath, _)) => {
            let (name, beneath) = (image.display().to_string(), beneath.display());
            let flat = format!("`qemu-img convert -O qcow2 {name} NEW.qcow2`");
            let what = format!("has the backing image {beneath}; make an image without one: {flat}");
            Err(CliError::Machine { name, what })
        }
        None => Ok(()),
    }
}

fn read_keys(path: &Path) -> Result<Vec<String>, CliError> {
    let keys = seed::read_keys(path).map_err(|source| CliError::File { path: path.to_owned(), source })?;
    keys.map_err(|what| CliError::Machine { name: path.display().to_string(), what: what.to_owned() })
}

/// A port that nobody listens at, and that no other machine of this user has.
fn free_port(context: &Context<'_>) -> Result<u16, CliError> {
    let others = Home::names().into_iter().filter_map(|name| Config::load(&Home::of(&name).file(), &context.root).ok());
    let nets: Vec<_> = others.flat_map(|config| config.devices.nets).collect();
    let forwards = nets.iter().flat_map(|net| net.backend.forward());
    let taken: BTreeSet<u16> = forwards.map(|forward| forward.host_port).collect();
    let is_free = |port: &u16| !taken.contains(port) && TcpListener::bind((Ipv4Addr::LOCALHOST, *port)).is_ok();
    (SSH_FROM..u16::MAX).find(is_free).ok_or_else(|| CliError::Port(io::ErrorKind::AddrInUse.into()))
}

fn configuration(home: &Home, memory: &str, forward: Vec<String>, has_seed: bool) -> ConfigFile {
    let disk = |name: &str, path: PathBuf| DiskSection {
        name: Some(name.to_owned()),
        path: Some(path.display().to_string()),
        ..DiskSection::default()
    };
    let root = DiskSection { format: Some(DiskFormat::Qcow2.name().to_owned()), ..disk("root", home.disk()) };
    let seed = has_seed.then(|| DiskSection { read_only: Some(true), ..disk("seed", home.seed()) });
    let forward = Some(forward).filter(|forward| !forward.is_empty());
    ConfigFile {
        name: Some(home.name().to_owned()),
        memory: Some(memory.to_owned()),
        qemu_user: rustix::process::geteuid().is_root().then(|| OWN_USER.to_owned()),
        disks: [root].into_iter().chain(seed).collect(),
        nets: vec![NetSection { kind: Some("user".to_owned()), forward, ..NetSection::default() }],
        ..ConfigFile::default()
    }
}

fn uefi(home: &Home) -> BootSection {
    BootSection {
        firmware: Some("uefi".to_owned()),
        firmware_vars: Some(home.variables().display().to_string()),
        ..BootSection::default()
    }
}

/// The file, without lines for sections of which there are none.
fn text(image: &Path, configuration: &ConfigFile) -> String {
    // TOML allows no control characters in a comment.
    let image = image.display().to_string().replace(char::is_control, " ");
    let text = configuration.to_text();
    let lines = text.lines().filter(|line| !line.ends_with(" = []")).map(|line| format!("{line}\n"));
    let head = format!("# Made by `hearth new` from {image}. All keys: hearth.toml(5)\n\n");
    std::iter::once(head).chain(lines).collect()
}

/// Files that this call has made. Another `hearth new` of the same name may run.
#[derive(Default)]
struct Made(Vec<PathBuf>);

impl Made {
    /// Creates a file that only this user can read.
    fn file(&mut self, path: PathBuf) -> Result<File, CliError> {
        let file = OpenOptions::new().read(true).write(true).create_new(true).mode(0o600).open(&path);
        let file = file.map_err(|source| CliError::File { path: path.clone(), source })?;
        self.0.push(path);
        Ok(file)
    }

    /// Removes them.
    fn remove(&self, home: &Home) {
        // The disk was the first one. While it is there, nobody else makes files here.
        for path in self.0.iter().rev() {
            if let Err(error) = fs::remove_file(path) {
                tracing::warn!(%error, path = %path.display(), "cannot remove");
            }
        }
        // It may have been there before, with dumps of an earlier machine.
        let _ = fs::remove_dir(home.folder());
    }
}

/// Makes the machine's files, except for its configuration.
fn write(
    made: &mut Made,
    home: &Home,
    (image, format): (&Path, DiskFormat),
    is_uefi: bool,
    keys: Option<&[String]>,
) -> Result<(), CliError> {
    DirBuilder::new().mode(0o700).recursive(true).create(home.folder()).map_err(at(home.folder()))?;
    create_overlay(&home.disk(), image, format.name())?;
    made.0.push(home.disk());
    if is_uefi {
        let template = uefi_template();
        copy(&template, made.file(home.variables())?).map_err(at(&template))?;
    }
    if let Some(keys) = keys {
        seed::write(made.file(home.seed())?, home.name(), keys).map_err(at(&home.seed()))?;
    }
    Ok(())
}

/// Writes the machine's configuration: with it there is a machine.
fn configure(made: &mut Made, home: &Home, text: &str) -> Result<(), CliError> {
    let file = home.file();
    let folder = file.parent().expect("it is in a folder");
    fs::create_dir_all(folder).map_err(at(folder))?;
    let written = made.file(file.clone())?;
    write_text(written, text).and_then(|()| File::open(folder)?.sync_all()).map_err(at(&file))
}

/// An error with this file.
fn at(path: &Path) -> impl FnOnce(io::Error) -> CliError + use<> {
    let path = path.to_owned();
    |source| CliError::File { path, source }
}

fn copy(from: &Path, mut to: File) -> io::Result<()> {
    io::copy(&mut File::open(from)?, &mut to)?;
    to.sync_all()
}

fn write_text(mut file: File, text: &str) -> io::Result<()> {
    file.write_all(text.as_bytes())?;
    file.sync_all()
}

/// The warnings of a machine that can run.
fn must_run(context: &Context<'_>, config: &Config) -> Result<Vec<Problem>, CliError> {
    let problems = check::check(config, &context.root, Purpose::Check);
    match problems.iter().any(Problem::is_error) {
        true => Err(CliError::Unready { file: config.file.clone(), problems }),
        false => Ok(problems),
    }
}

fn tell(
    context: &mut Context<'_>,
    home: &Home,
    config: &Config,
    image: &Path,
    warnings: &[Problem],
) -> Result<(), CliError> {
    let (name, file) = (home.name(), home.file());
    let forward: Vec<Forward> = config.devices.nets.iter().flat_map(|net| net.backend.forward()).copied().collect();
    let seed = Some(home.seed()).filter(|seed| seed.exists());
    let foreground = format!("hearth run {}", file.display());
    let in_background = service::is_there();
    let next = start_command(home, in_background);
    if context.json {
        let disk = home.disk();
        return context.write_json(&Report { name, file, disk, seed, forward: &forward, warnings, next });
    }
    for warning in warnings {
        context.write_line(&warning.to_string())?;
    }
    context.write_line(&format!("{name} is a machine now: {}", file.display()))?;
    context.write_line(&format!(
        "  disk  {}, over {}, which must stay as it is",
        home.disk().display(),
        image.display()
    ))?;
    if let Some(seed) = &seed {
        let user = seed::USER;
        context.write_line(&format!("  seed  {}: cloud-init makes the user {user} with this key", seed.display()))?;
    }
    for forward in &forward {
        let (host, port, guest) = (forward.host, forward.host_port, forward.guest_port);
        let line = match guest == SSH_PORT && seed.is_some() {
            true => format!("  ssh   ssh -p {port} {}@{host}", seed::USER),
            false => format!("  port  {}", forward.words()),
        };
        context.write_line(&line)?;
    }
    let next = match in_background {
        true => format!("Start it: `{next}`, or `{foreground}` to stay in the foreground."),
        false => format!("Start it: `{next}` (stays in the foreground)."),
    };
    context.write_line(&next)
}

#[cfg(test)]
mod tests {
    use std::process::Command;

    use super::*;
    use crate::runtime_root::RuntimeRoot;

    #[test]
    fn configuration_is_a_machine_with_the_keys_given() {
        let folder = tempfile::tempdir().unwrap();
        let home = Home::in_folder("web", folder.path());
        let typed = configuration(&home, "2G", vec!["8080:80".to_owned(), "2222:22".to_owned()], true);
        let text = text(Path::new("/srv/\u{1b}[1m\n/image"), &typed);
        assert!(text.starts_with("# Made by `hearth new` from /srv/ [1m /image. ") && !text.contains("[]"), "{text}");
        let config = Config::parse(&text, &home.file(), &RuntimeRoot::new("/run/hearth")).unwrap();
        assert_eq!((config.name.as_str(), config.guest.memory_bytes), ("web", 2 << 30));
        let disks: Vec<_> = config.devices.disks.iter().map(|disk| (disk.path.clone(), disk.read_only)).collect();
        assert_eq!(disks, [(home.disk(), false), (home.seed(), true)]);
        let ports: Vec<_> = config.devices.nets[0].backend.forward().iter().map(|forward| forward.host_port).collect();
        assert_eq!(ports, [8080, 2222]);
    }

    #[test]
    fn files_are_complete_or_not_there() {
        let folder = tempfile::tempdir().unwrap();
        let home = Home::in_folder("web", folder.path());
        let image = folder.path().join("image");
        let make = |made: &mut Made| {
            let keys = ["ssh-rsa AAAA".to_owned()];
            write(made, &home, (&image, DiskFormat::Raw), false, Some(&keys))?;
            assert!(!home.file().exists(), "it is not checked yet");
            configure(made, &home, "cpus = 1\n")
        };
        let [mut made, mut late] = [Made::default(), Made::default()];
        assert!(make(&mut made).is_err(), "the image is missing");
        made.remove(&home);
        assert!(!home.folder().exists());
        File::create(&image).unwrap().set_len(1 << 20).unwrap();
        make(&mut made).unwrap();
        assert_eq!(fs::read_to_string(home.file()).unwrap(), "cpus = 1\n");
        assert!(must_be_free(&home).unwrap_err().to_string().contains("web.toml exists already"));
        // A second call that saw a free name, too.
        assert!(make(&mut late).is_err());
        late.remove(&home);
        assert!([home.file(), home.disk(), home.seed()].iter().all(|path| path.exists()));
        made.remove(&home);
        assert!(!home.folder().exists() && !home.file().exists() && image.exists());
    }

    #[test]
    fn images_over_others_are_refused() {
        let folder = tempfile::tempdir().unwrap();
        let [base, over] = ["base", "over"].map(|name| folder.path().join(name));
        File::create(&base).unwrap().set_len(1 << 20).unwrap();
        create_overlay(&over, &base, "raw").unwrap();
        must_be_whole(&base, format_of(&base).unwrap()).unwrap();
        let said = must_be_whole(&over, format_of(&over).unwrap()).unwrap_err().to_string();
        let expect = format!("{}: has the backing image {}; make an image without one", over.display(), base.display());
        assert!(said.starts_with(&expect), "{said}");
    }

    #[test]
    fn format_is_read_from_the_image() {
        let folder = tempfile::tempdir().unwrap();
        let image = folder.path().join("image");
        for (bytes, expect) in [(&b"QFI\xfb\0\0\0\x03"[..], DiskFormat::Qcow2), (b"\xeb\x63", DiskFormat::Raw)] {
            fs::write(&image, bytes).unwrap();
            assert_eq!(format_of(&image).unwrap(), expect);
        }
    }

    #[test]
    fn images_that_no_guest_boots_are_refused() {
        let folder = tempfile::tempdir().unwrap();
        let image = folder.path().join("image");
        let check = |image: &Path, expect: &str| {
            let expect = format!("{}: {}", image.display(), expect.replace("IMAGE", image.to_str().unwrap()));
            let said = format_of(image).unwrap_err().to_string();
            assert!(said.starts_with(&expect), "{said}");
        };
        for (magic, program) in PACKED {
            fs::write(&image, [magic, &[0; 512]].concat()).unwrap();
            check(&image, &format!("is compressed; unpack it first: `{program} -dc IMAGE >NEW.img`"));
        }
        for (format, name) in [("vmdk", "VMDK"), ("vhdx", "VHDX"), ("vpc", "VHD"), ("vdi", "VDI")] {
            let mut qemu_img = Command::new("qemu-img");
            assert!(qemu_img.args(["create", "-q", "-f", format]).arg(&image).arg("1M").status().unwrap().success());
            check(&image, &format!("is a {name} image; convert it first: `qemu-img convert -O qcow2 IMAGE NEW.qcow2`"));
        }
        fs::write(&image, "").unwrap();
        check(&image, "is empty; give a disk image");
        for other in [Path::new("/dev/null"), folder.path()] {
            check(other, "is not a file; give a disk image");
        }
    }
}
