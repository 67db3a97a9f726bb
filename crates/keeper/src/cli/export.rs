//! `hearth export`: a disk of a running machine as it is at one moment, over NBD.
//!
//! copy beside the image -> qemu-nbd opens it, and listens -> its name is removed -> address printed -> a signal, or qemu-nbd's end
//!
//! Once qemu-nbd has the copy open nothing has its name any more, so its space is free when qemu-nbd ends, however that comes. It ends
//! with this command (`setpriv --pdeathsig`). A command that was killed leaves its socket, and during the copy a file; the next one
//! removes both.

use std::fs;
use std::io::{self, Read};
use std::os::unix::fs::FileTypeExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use clap::Args;
use hearth_api::{CopyDiskRequest, EventRecord};
use serde::Serialize;
use serde_json::Value;

use super::disk_copy::{Interrupts, make};
use super::{CliError, Context, Exit, events};
use crate::machine::image_over;

const PROGRAM: &str = "qemu-nbd";
const SOCKET_PREFIX: &str = "export-";
/// How long qemu-nbd may take to open the copy.
const START_PATIENCE: Duration = Duration::from_secs(10);
const LOOK_EVERY: Duration = Duration::from_millis(20);
/// Clients at a time.
const CLIENTS: &str = "16";
/// What is shown of an error of qemu-nbd's.
const ERROR_BYTES_MAX: u64 = 4096;

#[derive(Debug, Args)]
pub struct ExportArguments {
    /// Name of the machine.
    #[arg(add = super::complete::machines())]
    name: String,
    /// Name of the disk, as shown by `hearth status`.
    #[arg(add = super::complete::disks())]
    disk: String,
    /// Begin a checkpoint of this name at the moment of the export.
    #[arg(long, value_name = "NAME")]
    checkpoint: Option<String>,
    /// Tell clients what was written since this checkpoint: metadata context `qemu:dirty-bitmap:NAME`.
    #[arg(long, value_name = "NAME")]
    since: Option<String>,
}

/// What `export --json` prints when it serves.
#[derive(Serialize)]
struct Report<'a> {
    uri: &'a str,
    disk: &'a str,
}

pub fn export(context: &mut Context<'_>, arguments: ExportArguments) -> Result<Exit, CliError> {
    let ExportArguments { name, disk, checkpoint, since } = arguments;
    let failed =
        |what: String| CliError::Machine { name: name.clone(), what: format!("cannot export disk {disk}: {what}") };
    let config = context.ask(&name, |client| client.config())?;
    let (image, format) = image_of(&config, &disk).map_err(failed)?;
    let copy = Copy::beside(&image).map_err(failed)?;
    let interrupts = Interrupts::listen(context.client(&name), copy.0.clone()).map_err(CliError::Signals)?;
    let (disk_name, file) = (disk.clone(), copy.0.clone());
    let request = CopyDiskRequest { disk: disk_name, file, caller_freezes: false, checkpoint, since: since.clone() };
    make(context, &name, request, &interrupts, tell_progress)?;
    let socket = Socket::of_this_command(&context.root.machine(&name));
    let mut server = start(&copy, &format, since.as_deref(), &socket).map_err(failed)?;
    wait_ready(&mut server, &socket.ready(), &interrupts).map_err(failed)?;
    drop(copy);
    let uri = format!("nbd+unix:///?socket={}", socket.0.display());
    if context.json {
        context.write_json(&Report { uri: &uri, disk: &disk })?
    } else {
        context.write_line(&uri)?
    }
    let ended = loop {
        match server.0.try_wait()? {
            Some(status) => break Some(status),
            None if interrupts.came() => break None,
            None => std::thread::sleep(LOOK_EVERY),
        }
    };
    match ended.filter(|_| !interrupts.came()) {
        None => Ok(Exit::Done),
        Some(status) => Err(failed(format!("{PROGRAM} has ended ({status}){}", said(&mut server.0)))),
    }
}

/// Standard output is for the address alone.
fn tell_progress(_: &mut Context<'_>, record: &EventRecord) -> Result<(), CliError> {
    eprintln!("{}", events::line(record));
    Ok(())
}

/// Image and format of a disk, by the keeper's configuration.
fn image_of(config: &Value, disk: &str) -> Result<(PathBuf, String), String> {
    let text = |disk: &Value, key: &str| disk.get(key).and_then(Value::as_str).unwrap_or_default().to_owned();
    let disks = config.get("disks").and_then(Value::as_array).map_or(&[][..], Vec::as_slice);
    match disks.iter().find(|found| text(found, "name") == disk) {
        Some(found) => Ok((text(found, "path").into(), text(found, "format"))),
        None => {
            let names: Vec<_> = disks.iter().map(|disk| text(disk, "name")).collect();
            Err(format!("there is none of this name; its disks are: {}", names.join(", ")))
        }
    }
}

/// The file that is served, until it is open.
struct Copy(PathBuf);

impl Copy {
    fn beside(image: &Path) -> Result<Self, String> {
        let is_device = fs::metadata(image).is_ok_and(|found| found.file_type().is_block_device());
        let temporary = || std::env::var_os("TMPDIR").map_or_else(|| "/var/tmp".into(), PathBuf::from);
        let folder = if is_device { temporary() } else { image.parent().unwrap_or(Path::new("/")).to_owned() };
        let name = image.file_name().ok_or("it has no image")?.to_string_lossy().into_owned();
        let prefix = format!(".{name}.export-");
        remove_leftovers(&folder, &prefix);
        Ok(Self(folder.join(format!("{prefix}{}", std::process::id()))))
    }
}

impl Drop for Copy {
    fn drop(&mut self) {
        for path in [&self.0, &image_over(&self.0)] {
            match fs::remove_file(path) {
                Err(error) if error.kind() != io::ErrorKind::NotFound => {
                    eprintln!("hearth: cannot remove {}: {error}", path.display());
                }
                _ => {}
            }
        }
    }
}

/// Removes what commands have left that were killed.
fn remove_leftovers(folder: &Path, prefix: &str) {
    for entry in fs::read_dir(folder).into_iter().flatten().flatten() {
        let name = entry.file_name().to_string_lossy().into_owned();
        let pid = name.strip_prefix(prefix).and_then(|rest| rest.split('.').next()?.parse::<u32>().ok());
        if pid.is_some_and(|pid| !Path::new(&format!("/proc/{pid}")).exists()) {
            // It is reported when it is in the way.
            let _ = fs::remove_file(entry.path());
        }
    }
}

/// The socket, in the machine's runtime folder, which is for its user alone.
struct Socket(PathBuf);

impl Socket {
    fn of_this_command(runtime: &Path) -> Self {
        remove_leftovers(runtime, SOCKET_PREFIX);
        Self(runtime.join(format!("{SOCKET_PREFIX}{}.sock", std::process::id())))
    }

    /// A file that qemu-nbd makes when it serves.
    fn ready(&self) -> PathBuf {
        self.0.with_extension("pid")
    }
}

impl Drop for Socket {
    fn drop(&mut self) {
        // qemu-nbd may have removed them, or not have made them.
        let _ = (fs::remove_file(&self.0), fs::remove_file(self.ready()));
    }
}

/// qemu-nbd, ended when it is dropped.
struct Server(Child);

impl Drop for Server {
    fn drop(&mut self) {
        // It has ended if this fails.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// The format is always named: what the guest has written to a raw disk must not decide it. qemu-nbd listens before it has opened the
/// copy, so its pid file tells that it serves.
fn start(copy: &Copy, format: &str, since: Option<&str>, socket: &Socket) -> Result<Server, String> {
    let mut command = Command::new("setpriv");
    command.args(["--pdeathsig", "TERM", PROGRAM, "--read-only", "--persistent", "--shared", CLIENTS]);
    command.arg("--pid-file").arg(socket.ready());
    command.arg("--socket").arg(&socket.0);
    match since {
        Some(bitmap) => command.args(["--bitmap", bitmap, "--format", "qcow2", "--"]).arg(image_over(&copy.0)),
        None => command.args(["--format", format, "--"]).arg(&copy.0),
    };
    command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::piped());
    command.spawn().map(Server).map_err(|error| format!("cannot run setpriv, which runs {PROGRAM}: {error}"))
}

fn wait_ready(server: &mut Server, ready: &Path, interrupts: &Interrupts) -> Result<(), String> {
    let deadline = Instant::now() + START_PATIENCE;
    while !ready.exists() {
        match server.0.try_wait() {
            Ok(None) if interrupts.came() => return Err("it was interrupted".to_owned()),
            Ok(None) if Instant::now() < deadline => std::thread::sleep(LOOK_EVERY),
            Ok(None) => return Err(format!("{PROGRAM} does not serve within {START_PATIENCE:?}")),
            Ok(Some(status)) => {
                let said = said(&mut server.0);
                return Err(format!("{PROGRAM} (Debian: apt install qemu-utils) did not start ({status}){said}"));
            }
            Err(error) => return Err(error.to_string()),
        }
    }
    // It would wait for ever to report the next client if nobody read what it says.
    if let Some(mut said) = server.0.stderr.take() {
        std::thread::spawn(move || drop(io::copy(&mut said, &mut io::stderr())));
    }
    Ok(())
}

/// The errors of a qemu-nbd that has ended.
fn said(child: &mut Child) -> String {
    let mut text = Vec::new();
    if let Some(stderr) = child.stderr.take() {
        // What cannot be read is not shown.
        let _ = stderr.take(ERROR_BYTES_MAX).read_to_end(&mut text);
    }
    let text = String::from_utf8_lossy(&text).trim().replace('\n', "; ");
    if text.is_empty() { text } else { format!(": {text}") }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::Config;
    use crate::runtime_root::RuntimeRoot;

    #[test]
    fn image_is_found_in_the_configuration() {
        let text = "name = \"web\"\nmemory = \"64MiB\"\n[[disks]]\nname = \"root\"\npath = \"a\"\nformat = \"qcow2\"\n\
                    [[disks]]\nname = \"data\"\npath = \"b\"\n";
        let config = Config::parse(text, Path::new("/srv/web.toml"), &RuntimeRoot::new("/run/hearth")).unwrap();
        let config = serde_json::to_value(config).unwrap();
        assert_eq!(image_of(&config, "root"), Ok(("/srv/a".into(), "qcow2".to_owned())));
        assert_eq!(image_of(&config, "data"), Ok(("/srv/b".into(), "raw".to_owned())));
        assert!(image_of(&config, "other").unwrap_err().ends_with("its disks are: root, data"));
    }

    #[test]
    fn copies_of_dead_commands_are_removed() {
        let folder = tempfile::tempdir().unwrap();
        let file = |name: &str| fs::write(folder.path().join(name), "").unwrap();
        // No process has this number.
        let dead = u32::MAX;
        let own = format!(".disk.img.export-{}", std::process::id());
        let stay = ["disk.img", ".disk.img.export-x", ".other.img.export-4294967295", &own];
        stay.iter().for_each(|name| file(name));
        file(&format!(".disk.img.export-{dead}"));
        file(&format!(".disk.img.export-{dead}.partial"));
        let copy = Copy::beside(&folder.path().join("disk.img")).unwrap();
        assert_eq!(copy.0, folder.path().join(&own));
        let mut left: Vec<_> = fs::read_dir(folder.path())
            .unwrap()
            .map(|entry| entry.unwrap().file_name().into_string().unwrap())
            .collect();
        left.sort();
        let mut expect = stay.to_vec();
        expect.sort_unstable();
        assert_eq!(left, expect);
        drop(copy);
        assert!(!folder.path().join(&own).exists(), "it is removed with its command");
    }
}
