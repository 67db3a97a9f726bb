//! Checks that ports are free, interfaces exist and helpers are installed.

use std::io;
use std::net::{SocketAddr, TcpListener, UdpSocket};
use std::path::Path;

use super::Life;
use crate::config::{Config, Forward, NetBackend, Protocol};
use crate::problem::Problem;

/// The kernel's bound for interface names.
const IFNAME_BYTES_MAX: usize = 15;

pub fn check(config: &Config, life: Life, problems: &mut Vec<Problem>) {
    for (index, net) in config.devices.nets.iter().enumerate() {
        let subject = |key: &str| format!("nets[{index}].{key}");
        match &net.backend {
            NetBackend::Tap { ifname } => problems.extend(tap(&subject("ifname"), ifname)),
            NetBackend::Passt { .. } => problems.extend(passt(&subject("kind"))),
            NetBackend::User { .. } => {}
        }
        if config.rejuvenate.is_some() && matches!(net.backend, NetBackend::User { .. }) {
            let message = "a rejuvenation cuts the guest's connections on a \"user\" network";
            problems.push(Problem::warning(subject("kind"), message, "set kind to \"passt\" or \"tap\" to keep them"));
        }
        if !life.holds_resources() {
            let taken = |forward| port(&subject("forward"), forward);
            problems.extend(net.backend.forward().iter().filter_map(taken));
        }
    }
}

/// Binds the port for a moment.
fn port(subject: &str, forward: &Forward) -> Option<Problem> {
    let address = SocketAddr::new(forward.host, forward.host_port);
    let bound = match forward.protocol {
        Protocol::Tcp => TcpListener::bind(address).map(drop),
        Protocol::Udp => UdpSocket::bind(address).map(drop),
    };
    let error = bound.err()?;
    let protocol = if forward.protocol == Protocol::Udp { "UDP" } else { "TCP" };
    let make = if error.kind() == io::ErrorKind::PermissionDenied { Problem::error } else { Problem::for_now };
    let (message, hint) = match error.kind() {
        io::ErrorKind::AddrInUse => {
            ("is already in use".to_owned(), "choose another port, or stop the program that uses it (see `ss -lnp`)")
        }
        io::ErrorKind::AddrNotAvailable => {
            ("is not an address of this host".to_owned(), "`ip address` lists this host's addresses")
        }
        io::ErrorKind::PermissionDenied => ("needs root".to_owned(), "choose port 1024 or higher"),
        _ => (format!("cannot be used: {error}"), "choose another port"),
    };
    Some(make(subject, format!("{protocol} port {address} {message}"), hint))
}

fn tap(subject: &str, ifname: &str) -> Option<Problem> {
    // A slash would lead to another path.
    let is_name =
        ifname.len() <= IFNAME_BYTES_MAX && !ifname.contains(|letter: char| letter == '/' || letter.is_whitespace());
    if !is_name || matches!(ifname, "" | "." | "..") {
        let hint = format!("an interface's name has 1 to {IFNAME_BYTES_MAX} bytes, and neither spaces nor slashes");
        return Some(Problem::error(subject, format!("\"{ifname}\" is not the name of an interface"), hint));
    }
    if Path::new("/sys/class/net").join(ifname).exists() {
        return None;
    }
    let hint = format!("create it: ip tuntap add {ifname} mode tap && ip link set {ifname} up");
    Some(Problem::missing(subject, format!("interface {ifname} does not exist"), hint))
}

fn passt(subject: &str) -> Option<Problem> {
    let found = std::env::var_os("PATH").is_some_and(|path| in_path(&path, "passt"));
    (!found).then(|| {
        Problem::missing(
            subject,
            "passt is not installed",
            "install it (Debian: apt install passt), or use kind = \"user\"",
        )
    })
}

fn in_path(path: &std::ffi::OsStr, program: &str) -> bool {
    std::env::split_paths(path).any(|folder| folder.join(program).is_file())
}

#[cfg(test)]
mod tests {
    use std::net::IpAddr;

    use super::*;

    fn forward(protocol: Protocol, host: [u8; 4], host_port: u16) -> Forward {
        Forward { protocol, host: IpAddr::from(host), host_port, guest_port: 80 }
    }

    #[test]
    fn a_port_is_free_taken_or_elsewhere() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let taken = listener.local_addr().unwrap().port();
        let problem = port("nets[0].forward", &forward(Protocol::Tcp, [127, 0, 0, 1], taken)).unwrap();
        assert_eq!(
            problem.to_string(),
            format!(
                "error: nets[0].forward: TCP port 127.0.0.1:{taken} is already in use; choose another port, or stop the program that uses it (see `ss -lnp`)"
            )
        );
        drop(listener);
        assert_eq!(port("x", &forward(Protocol::Tcp, [127, 0, 0, 1], taken)), None);

        let socket = UdpSocket::bind("127.0.0.1:0").unwrap();
        let taken = forward(Protocol::Udp, [127, 0, 0, 1], socket.local_addr().unwrap().port());
        assert!(port("x", &taken).unwrap().message.starts_with("UDP port "));
        // TEST-NET-1 is never assigned.
        let problem = port("x", &forward(Protocol::Tcp, [192, 0, 2, 1], 8080)).unwrap();
        assert_eq!(problem.message, "TCP port 192.0.2.1:8080 is not an address of this host");
    }

    #[test]
    fn interfaces_are_there_or_not() {
        assert_eq!(tap("x", "lo"), None);
        let problem = tap("nets[1].ifname", "hearth-none0").unwrap();
        assert_eq!(
            problem.to_string(),
            "error: nets[1].ifname: interface hearth-none0 does not exist; create it: ip tuntap add hearth-none0 mode tap && ip link set hearth-none0 up"
        );
        assert!(tap("x", "../net/lo").is_some());
    }

    #[test]
    fn invalid_interface_name_is_not_created() {
        for name in ["", ".", "..", "a/b", "../net", "a b", "sixteen-letters-", "tap0\n"] {
            let problem = tap("nets[0].ifname", name).unwrap().to_string();
            assert!(problem.contains("is not the name of an interface") && !problem.contains("ip tuntap"), "{problem}");
        }
        assert!(
            tap("nets[0].ifname", "hearth-none0").unwrap().hint.starts_with("create it: ip tuntap add hearth-none0")
        );
        assert_eq!(tap("nets[0].ifname", "lo"), None);
    }

    #[test]
    fn programs_are_looked_for_on_the_path() {
        let folder = tempfile::tempdir().unwrap();
        let path = std::env::join_paths(["/nowhere".into(), folder.path().to_owned()]).unwrap();
        assert!(!in_path(&path, "passt"));
        std::fs::write(folder.path().join("passt"), "").unwrap();
        assert!(in_path(&path, "passt"));
    }
}
