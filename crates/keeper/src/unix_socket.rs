//! Listening on a unix socket that nobody else may open.
//!
//! The mode is set between `bind` and `listen`. Until then every connection is refused, so the socket is never open to
//! others. (A umask would do the same, but affects the whole process.)

use std::fs::{self, Permissions};
use std::io;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};

use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};

/// `sockaddr_un` holds 108 bytes, the last of which is a zero.
pub const PATH_BYTES_MAX: usize = 107;
/// Maximum number of connections that wait to be accepted.
const BACKLOG: i32 = 64;

#[derive(Debug, thiserror::Error)]
pub enum ListenError {
    #[error("socket path {path} has {bytes} bytes, but the limit is {PATH_BYTES_MAX}; choose a shorter runtime_folder")]
    PathTooLong { path: PathBuf, bytes: usize },
    #[error("cannot create socket {path}")]
    Unusable { path: PathBuf, source: io::Error },
}

/// Listens at `path`, mode 0600. A dead keeper's socket is replaced, because callers hold the machine's lock.
pub fn listen(path: &Path) -> Result<UnixListener, ListenError> {
    let bytes = path.as_os_str().len();
    if bytes > PATH_BYTES_MAX {
        return Err(ListenError::PathTooLong { path: path.to_owned(), bytes });
    }
    try_listen(path).map_err(|source| ListenError::Unusable { path: path.to_owned(), source })
}

fn try_listen(path: &Path) -> io::Result<UnixListener> {
    match fs::remove_file(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
        _ => {}
    }
    let socket = rustix::net::socket_with(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::CLOEXEC, None)?;
    rustix::net::bind(&socket, &SocketAddrUnix::new(path)?)?;
    fs::set_permissions(path, Permissions::from_mode(0o600))?;
    rustix::net::listen(&socket, BACKLOG)?;
    Ok(UnixListener::from(socket))
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixStream;
    use std::time::Duration;

    use hearth_qemu::connect_within;

    use super::*;

    #[test]
    fn socket_is_private_and_replaces_stale_one() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("api.sock");
        drop(listen(&path).unwrap());
        assert!(UnixStream::connect(&path).is_err(), "nobody listens any more");
        let _listener = listen(&path).unwrap();
        assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
        UnixStream::connect(&path).unwrap();
    }

    #[test]
    fn full_backlog_holds_nobody_for_ever() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("api.sock");
        let _standing_still = listen(&path).unwrap();
        let patience = Duration::from_millis(20);
        let refused = (0..=BACKLOG + 1).find_map(|_| connect_within(&path, patience).err());
        assert_eq!(refused.unwrap().kind(), io::ErrorKind::WouldBlock);
    }

    #[test]
    fn too_long_socket_path_is_refused_first() {
        let path = PathBuf::from(format!("/tmp/{}/api.sock", "x".repeat(120)));
        assert_eq!(
            listen(&path).unwrap_err().to_string(),
            format!(
                "socket path {} has 134 bytes, but the limit is 107; choose a shorter runtime_folder",
                path.display()
            )
        );
    }
}
