//! Host networks for guests, where the user may make them.

use std::net::{Ipv4Addr, TcpListener};
use std::process::Command;
use std::sync::atomic::{AtomicU32, Ordering};

/// A tap interface with a network of four addresses that no other process of these tests uses. Dropping it removes it.
pub struct Tap {
    name: String,
    network: u32,
}

impl Tap {
    /// Makes the interface, or returns `None` without permission.
    pub fn make() -> Option<Self> {
        static MADE: AtomicU32 = AtomicU32::new(0);
        let (pid, number) = (std::process::id(), MADE.fetch_add(1, Ordering::Relaxed));
        let name = format!("hrth{pid}-{number}");
        // 198.18.0.0/15 is reserved for network tests and not routed.
        let network = u32::from(Ipv4Addr::new(198, 18, 0, 0)) + (pid * 4 + number) % (1 << 15) * 4;
        let ip = |arguments: &[&str]| Command::new("ip").args(arguments).output().is_ok_and(|it| it.status.success());
        let tap = ip(&["tuntap", "add", &name, "mode", "tap"]).then(|| Self { name: name.clone(), network })?;
        let address = format!("{}/30", Ipv4Addr::from(network + 1));
        (ip(&["addr", "add", &address, "dev", &name]) && ip(&["link", "set", &name, "up"])).then_some(tap)
    }

    pub fn name(&self) -> &str {
        &self.name
    }

    pub fn guest_address(&self) -> Ipv4Addr {
        Ipv4Addr::from(self.network + 2)
    }

    /// Command that configures the guest's interface.
    pub fn guest_set_up(&self) -> String {
        format!("ip link set eth0 up && ip addr add {}/30 dev eth0", self.guest_address())
    }
}

impl Drop for Tap {
    fn drop(&mut self) {
        let _ = Command::new("ip").args(["link", "delete", &self.name]).output();
    }
}

/// Whether passt can run here: some sandboxes forbid the name spaces that it creates.
pub fn passt_works() -> bool {
    let Ok(home) = tempfile::tempdir() else { return false };
    // Otherwise passt would become `nobody`, who cannot make a socket in this folder.
    let as_root: &[&str] = if rustix::process::geteuid().is_root() { &["--runas", "0"] } else { &[] };
    let mut command = Command::new("timeout");
    command.args(["1", "passt", "--foreground", "--one-off", "--socket"]).arg(home.path().join("try.sock"));
    // 124: passt still ran when the time limit ended.
    command.args(as_root).output().is_ok_and(|output| output.status.code() == Some(124))
}

/// A port that is free at the moment. Another process could take it before QEMU does; then QEMU fails to start and says so.
pub fn free_port() -> u16 {
    let listener = TcpListener::bind("127.0.0.1:0").and_then(|listener| listener.local_addr());
    listener.map(|address| address.port()).expect("the loopback interface has a free port")
}
