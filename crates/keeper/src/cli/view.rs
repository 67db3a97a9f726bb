//! `hearth view`: opens a VNC viewer on the guest's screen, or says how to see it from elsewhere.

use std::ffi::OsStr;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use super::{CliError, Context, Exit};

/// Viewers that take the path of a unix socket. TigerVNC's has the first name on Debian and the last one elsewhere.
const VIEWERS: [&str; 3] = ["xtigervncviewer", "gvncviewer", "vncviewer"];
/// Variables that name a graphical session.
const SESSIONS: [&str; 2] = ["WAYLAND_DISPLAY", "DISPLAY"];

/// The viewer replaces this process.
pub fn view(context: &mut Context<'_>, name: &str) -> Result<Exit, CliError> {
    let config = context.ask(name, |client| client.config())?;
    let refuse = |what: String| CliError::Machine { name: name.to_owned(), what };
    if let Some(what) = no_screen(name, &config) {
        return Err(refuse(what));
    }
    let socket = context.root.vnc_socket(name);
    let session = SESSIONS.iter().any(|variable| std::env::var_os(variable).is_some());
    let path = std::env::var_os("PATH");
    let viewer = choose(session, path.as_deref(), &socket).map_err(refuse)?;
    let source = Command::new(&viewer).arg(&socket).exec();
    Err(CliError::File { path: viewer, source })
}

/// Why the running machine with this configuration has no screen, and what to do.
fn no_screen(name: &str, config: &serde_json::Value) -> Option<String> {
    if config["owner"] == "libvirt" {
        return Some(format!("its screen is libvirt's: `virt-viewer {name}`"));
    }
    let hint = format!("`hearth set {name} display=vnc` gives it one with its next guest");
    (config["display"] != "vnc").then(|| format!("its guest has no screen; {hint}"))
}

/// The viewer to run, or what to do instead.
fn choose(session: bool, path: Option<&OsStr>, socket: &Path) -> Result<PathBuf, String> {
    let socket = socket.display();
    if !session {
        let host = rustix::system::uname().nodename().to_string_lossy().into_owned();
        return Err(format!(
            "there is no desktop here (DISPLAY and WAYLAND_DISPLAY are not set); on yours run \
             `ssh -NL 5900:{socket} {host}` and open localhost:5900 in a VNC viewer"
        ));
    }
    let folders: Vec<PathBuf> = path.map(|path| std::env::split_paths(path).collect()).unwrap_or_default();
    let found =
        VIEWERS.iter().find_map(|viewer| folders.iter().map(|folder| folder.join(viewer)).find(|at| at.is_file()));
    found.ok_or_else(|| {
        format!("no VNC viewer is installed (Debian: apt install tigervnc-viewer); its screen is at the unix socket {socket}")
    })
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn machine_without_screen_says_how_to_get_one() {
        let why = |owner: &str, display: &str| no_screen("web", &json!({"owner": owner, "display": display}));
        assert_eq!(why("hearth", "vnc"), None);
        let none = why("hearth", "none").unwrap();
        assert!(none.ends_with("`hearth set web display=vnc` gives it one with its next guest"), "{none}");
        assert!(why("libvirt", "none").unwrap().ends_with("`virt-viewer web`"));
    }

    #[test]
    fn first_viewer_on_the_path_is_chosen() {
        let folder = tempfile::tempdir().unwrap();
        let (path, socket) = (Some(folder.path().as_os_str()), Path::new("/run/hearth/web/vnc.sock"));
        let missing = choose(true, path, socket).unwrap_err();
        assert!(missing.contains("apt install tigervnc-viewer") && missing.contains("/run/hearth/web/vnc.sock"));
        assert_eq!(choose(true, None, socket).unwrap_err(), missing);
        for viewer in ["vncviewer", "gvncviewer"] {
            std::fs::write(folder.path().join(viewer), "").unwrap();
            assert_eq!(choose(true, path, socket).unwrap(), folder.path().join(viewer));
        }
        let remote = choose(false, path, socket).unwrap_err();
        assert!(remote.contains("`ssh -NL 5900:/run/hearth/web/vnc.sock "), "{remote}");
    }
}
