//! `hearth view`: opens a VNC viewer on the guest's screen, or says how to see it from elsewhere.

use std::ffi::OsStr;
use std::fs;
use std::os::unix::fs::MetadataExt;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use super::{CliError, Context, Exit};
use crate::config::Config;

/// Viewers that take the path of a unix socket. TigerVNC's has the first name on Debian.
const VIEWERS: [&str; 2] = ["xtigervncviewer", "gvncviewer"];
/// Name of TigerVNC's viewer elsewhere. On Debian it is a link to the viewer that the host's administrator prefers, which may be
/// TightVNC's: that one takes no socket.
const ELSEWHERE: &str = "vncviewer";
/// Variables that name a graphical session.
const SESSIONS: [&str; 2] = ["WAYLAND_DISPLAY", "DISPLAY"];

/// The viewer replaces this process.
pub fn view(context: &mut Context<'_>, name: &str) -> Result<Exit, CliError> {
    let config = context.ask(name, |client| client.config())?;
    let refuse = |what: String| CliError::Machine { name: name.to_owned(), what };
    let file = config["file"].as_str().map(Path::new);
    let is_asked_for =
        file.and_then(|file| Config::load(file, &context.root).ok()).is_some_and(|asked| asked.guest.screen);
    if let Some(what) = no_screen(name, &config, is_asked_for) {
        return Err(refuse(what));
    }
    let socket = context.root.vnc_socket(name);
    let session = SESSIONS.iter().any(|variable| std::env::var_os(variable).is_some());
    let path = std::env::var_os("PATH");
    let owner = owner(&context.root.machine(name)).unwrap_or_else(|| "USER".to_owned());
    let viewer = choose(session, path.as_deref(), &socket, &owner).map_err(refuse)?;
    let source = Command::new(&viewer).arg(&socket).exec();
    Err(CliError::File { path: viewer, source })
}

/// Why the running machine with this configuration has no screen, and what to do. `is_asked_for`: its file asks for one.
fn no_screen(name: &str, config: &serde_json::Value, is_asked_for: bool) -> Option<String> {
    if config["owner"] == "libvirt" {
        return Some(format!("its screen is libvirt's: `virt-viewer {name}`"));
    }
    if config["display"] == "vnc" {
        return None;
    }
    let next = format!("`hearth upgrade-keeper {name} && hearth reboot {name}`");
    Some(match is_asked_for {
        true => format!("its guest has no screen; its next one will: {next}"),
        false => format!("its guest has no screen; `hearth set {name} display=vnc` gives the next one a screen"),
    })
}

/// Name of the local user that owns a machine's folder, and with it the screen.
fn owner(folder: &Path) -> Option<String> {
    let uid = fs::metadata(folder).ok()?.uid().to_string();
    let users = fs::read_to_string("/etc/passwd").ok()?;
    users.lines().map(|line| line.split(':')).find_map(|mut fields| {
        let name = fields.next()?;
        (fields.nth(1)? == uid).then(|| name.to_owned())
    })
}

/// The viewer to run, or what to do instead.
fn choose(session: bool, path: Option<&OsStr>, socket: &Path, owner: &str) -> Result<PathBuf, String> {
    let socket = socket.display();
    if !session {
        let host = rustix::system::uname().nodename().to_string_lossy().into_owned();
        return Err(format!(
            "there is no desktop here (DISPLAY and WAYLAND_DISPLAY are not set); on yours run \
             `ssh -NL 5900:{socket} {owner}@{host}` and open localhost:5900 in a VNC viewer"
        ));
    }
    let folders: Vec<PathBuf> = path.map(|path| std::env::split_paths(path).collect()).unwrap_or_default();
    let find = |viewer: &str| folders.iter().map(|folder| folder.join(viewer)).find(|at| at.is_file());
    let elsewhere =
        || find(ELSEWHERE).filter(|at| fs::canonicalize(at).is_ok_and(|target| target.ends_with(ELSEWHERE)));
    VIEWERS.into_iter().find_map(find).or_else(elsewhere).ok_or_else(|| {
        format!("no VNC viewer is installed (Debian: apt install tigervnc-viewer); its screen is at the unix socket {socket}")
    })
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use serde_json::json;

    use super::*;

    #[test]
    fn machine_without_screen_says_how_to_get_one() {
        let why =
            |owner: &str, display: &str, asked| no_screen("web", &json!({"owner": owner, "display": display}), asked);
        assert_eq!(why("hearth", "vnc", true), None);
        assert_eq!(why("hearth", "vnc", false), None);
        let none = why("hearth", "none", false).unwrap();
        assert!(none.ends_with("`hearth set web display=vnc` gives the next one a screen"), "{none}");
        let pending = why("hearth", "none", true).unwrap();
        assert!(pending.ends_with("its next one will: `hearth upgrade-keeper web && hearth reboot web`"), "{pending}");
        assert!(why("libvirt", "none", false).unwrap().ends_with("`virt-viewer web`"));
    }

    #[test]
    fn owner_is_a_local_user() {
        assert_eq!(owner(Path::new("/etc")).as_deref(), Some("root"));
        assert_eq!(owner(Path::new("/no/such/folder")), None);
    }

    #[test]
    fn first_viewer_on_the_path_is_chosen() {
        let folder = tempfile::tempdir().unwrap();
        let (path, socket) = (Some(folder.path().as_os_str()), Path::new("/run/hearth/web/vnc.sock"));
        let choose = |session, path| choose(session, path, socket, "ann");
        let missing = choose(true, path).unwrap_err();
        assert!(missing.contains("apt install tigervnc-viewer") && missing.contains("/run/hearth/web/vnc.sock"));
        assert_eq!(choose(true, None).unwrap_err(), missing);
        let at = |name: &str| folder.path().join(name);
        fs::write(at("xtightvncviewer"), "").unwrap();
        symlink(at("xtightvncviewer"), at("vncviewer")).unwrap();
        assert_eq!(choose(true, path).unwrap_err(), missing, "TightVNC's takes no socket");
        fs::remove_file(at("vncviewer")).unwrap();
        for viewer in ["vncviewer", "gvncviewer"] {
            fs::write(at(viewer), "").unwrap();
            assert_eq!(choose(true, path).unwrap(), at(viewer));
        }
        let remote = choose(false, path).unwrap_err();
        assert!(remote.contains("`ssh -NL 5900:/run/hearth/web/vnc.sock ann@"), "{remote}");
    }
}
