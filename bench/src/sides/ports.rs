//! Ports of this host that are forwarded to the guest's services.

use std::net::{Ipv4Addr, SocketAddr};

use hearth_vmtest::net::free_port;
use hearth_vmtest::{PlainVmBuilder, TestVmBuilder};
use toml::Value;

#[derive(Clone, Copy, Debug)]
pub struct Ports {
    web: u16,
    database: u16,
}

impl Ports {
    pub fn free() -> Self {
        Ports { web: free_port(), database: free_port() }
    }

    /// Address of the guest's web server.
    pub fn web(self) -> SocketAddr {
        (Ipv4Addr::LOCALHOST, self.web).into()
    }

    /// Address of the guest's PostgreSQL.
    pub fn database(self) -> SocketAddr {
        (Ipv4Addr::LOCALHOST, self.database).into()
    }

    /// Adds a network device that forwards the ports, to a machine under Hearth.
    pub fn under_hearth(self, builder: TestVmBuilder) -> TestVmBuilder {
        let forward = self.forwards().map(|(host, guest)| Value::from(format!("127.0.0.1:{host}:{guest}")));
        builder.net([("kind", Value::from("user")), ("forward", Value::Array(forward.to_vec()))])
    }

    /// The same for a machine under QEMU alone.
    pub fn under_qemu(self, builder: PlainVmBuilder) -> PlainVmBuilder {
        let forwards = self.forwards().map(|(host, guest)| format!(",hostfwd=tcp:127.0.0.1:{host}-:{guest}"));
        let net = format!("user,id=net{}", forwards.concat());
        builder.args(["-netdev", &net, "-device", "virtio-net-pci,netdev=net,romfile="])
    }

    /// Pairs of a port of this host and a port of the guest.
    pub(super) fn forwards(self) -> [(u16, u16); 2] {
        [(self.web, 80), (self.database, 5432)]
    }
}
