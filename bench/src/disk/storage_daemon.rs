//! QEMU's block layer without a guest: `qemu-storage-daemon` exports an image as a vhost-user-blk disk, opened as a user would
//! for a guest (`cache=none,aio=io_uring`, its own thread).

use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixListener;
use std::path::Path;
use std::process::{Child, Command};

pub const TOOL: &str = "qemu-storage-daemon";
pub const PACKAGE: &str = "qemu-system-common";

/// A running daemon, which is killed when dropped.
pub struct StorageDaemon(Child);

impl StorageDaemon {
    /// Starts the daemon. `driver` is QEMU's name of the format, and `base` the raw image below it. A client may connect at once:
    /// it waits in the socket's queue until the daemon is ready, and is disconnected if the daemon fails.
    pub fn start(socket: &Path, image: &Path, driver: &str, base: Option<&Path>) -> io::Result<Self> {
        let mut command = Command::new(TOOL);
        command.args(["--object", "iothread,id=io"]);
        let file = |image: &Path| format!("driver=file,filename={},aio=io_uring,cache.direct=on", image.display());
        let mut disk = format!("driver={driver},node-name=disk,file=image,cache.direct=on");
        if let Some(base) = base {
            command.args(["--blockdev", &format!("{},node-name=base-file,read-only=on", file(base))]);
            command.args(["--blockdev", "driver=raw,node-name=base,file=base-file,cache.direct=on,read-only=on"]);
            disk += ",backing=base";
        }
        command.args(["--blockdev", &format!("{},node-name=image", file(image)), "--blockdev", &disk]);
        let export = "type=vhost-user-blk,id=export,node-name=disk,addr.type=fd,addr.str=0,writable=on,iothread=io";
        command.args(["--export", export]).stdin(OwnedFd::from(UnixListener::bind(socket)?));
        Ok(StorageDaemon(command.spawn()?))
    }
}

impl Drop for StorageDaemon {
    fn drop(&mut self) {
        // Fails only if the daemon has ended already.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}
