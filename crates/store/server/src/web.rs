//! Web: serves a folder over HTTP with ranges (busybox), on loopback, until this process ends.

use std::net::{SocketAddr, TcpListener};
use std::os::fd::OwnedFd;
use std::path::Path;
use std::process::Command;

/// Starts the server and returns its address. Each connection gets its own busybox process, whose socket is inherited,
/// so no other port is needed.
pub fn serve(folder: &Path) -> SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    let (address, folder) = (listener.local_addr().expect("it is bound"), folder.to_owned());
    std::thread::spawn(move || {
        for client in listener.incoming().flatten() {
            let heard = OwnedFd::from(client.try_clone().expect("a descriptor"));
            let mut command = Command::new("busybox");
            command.args(["httpd", "-i", "-h"]).arg(&folder).stdin(heard).stdout(OwnedFd::from(client));
            let mut server = command.spawn().expect("busybox, which `make setup` installs");
            std::thread::spawn(move || server.wait());
        }
    });
    address
}
