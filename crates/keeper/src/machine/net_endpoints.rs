//! Network endpoints: the host's ends of a QEMU's networks, each an open tap or a connection to passt.
//!
//! When a QEMU replaces another one it gets the same descriptors, so nothing changes at the other end. Packet gates
//! (`PacketGates`) make sure that only one of the two QEMUs receives packets.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::os::unix::fs::OpenOptionsExt;
use std::path::PathBuf;

use hearth_qemu::packet_gate::{Kind, PacketGates};

use super::passt::{Passt, PasstError};
use crate::config::{Config, NetBackend};
use crate::folders::Folders;

/// The endpoints of one QEMU.
#[derive(Debug)]
pub struct NetEndpoints {
    endpoints: Vec<NetEndpoint>,
    /// Packet gates. None without endpoints: QEMU's own user networks have no descriptor on the host.
    gates: Option<PacketGates>,
    /// passt processes; each ends when nobody is connected to it any more.
    passt: Vec<Passt>,
}

#[derive(Debug)]
struct NetEndpoint {
    /// Index of its network in the configuration.
    position: usize,
    kind: Kind,
    end: OwnedFd,
}

#[derive(Debug, thiserror::Error)]
pub enum EndpointError {
    #[error(transparent)]
    Passt(#[from] PasstError),
    #[error(
        "cannot open tap {ifname}; check with `ip -details tuntap` that it exists, is free and belongs to this user"
    )]
    Tap { ifname: String, source: io::Error },
    #[error("cannot create the networks' packet gates in {path}")]
    PacketGates { path: PathBuf, source: io::Error },
    #[error("cannot duplicate a network's descriptor")]
    Share(#[source] io::Error),
}

impl NetEndpoints {
    /// Creates the endpoints of a QEMU that is started.
    pub fn open(config: &Config, folders: &Folders, generation: u32) -> Result<Self, EndpointError> {
        let (mut endpoints, mut passt) = (Vec::new(), Vec::new());
        for (position, net) in config.devices.nets.iter().enumerate() {
            match &net.backend {
                NetBackend::User { .. } => {}
                NetBackend::Passt { forward } => {
                    let pid_file = folders.passt_pid(position, generation);
                    let (process, end) = Passt::start(&pid_file, forward)?;
                    passt.push(process);
                    endpoints.push(NetEndpoint { position, kind: Kind::Stream, end: end.into() });
                }
                NetBackend::Tap { ifname } => {
                    let end =
                        open_tap(ifname).map_err(|source| EndpointError::Tap { ifname: ifname.clone(), source })?;
                    endpoints.push(NetEndpoint { position, kind: Kind::Tap, end: end.into() });
                }
            }
        }
        Self::with_gates(endpoints, passt, folders, generation, false)
    }

    /// Duplicates the endpoints for a successor QEMU. Its packet gates start closed.
    pub fn share(&self, folders: &Folders, generation: u32) -> Result<Self, EndpointError> {
        let share = |endpoint: &NetEndpoint| {
            Ok(NetEndpoint { position: endpoint.position, kind: endpoint.kind, end: endpoint.end.try_clone()? })
        };
        let endpoints = self.endpoints.iter().map(share).collect::<io::Result<_>>().map_err(EndpointError::Share)?;
        Self::with_gates(endpoints, Vec::new(), folders, generation, true)
    }

    fn with_gates(
        endpoints: Vec<NetEndpoint>,
        passt: Vec<Passt>,
        folders: &Folders,
        generation: u32,
        shut: bool,
    ) -> Result<Self, EndpointError> {
        let nets: Vec<_> = endpoints.iter().map(|endpoint| (endpoint.end.as_raw_fd(), endpoint.kind)).collect();
        let path = folders.gates(generation);
        let gates = (!nets.is_empty()).then(|| PacketGates::make(&path, &nets, shut)).transpose();
        let gates = gates.map_err(|source| EndpointError::PacketGates { path, source })?;
        Ok(Self { endpoints, gates, passt })
    }

    /// Fetches the endpoints of a QEMU that a dead keeper left. That keeper may have died during a hop, so all gates are
    /// opened.
    pub fn find(config: &Config, folders: &Folders, generation: u32, qemu_pid: u32) -> Result<Self, String> {
        let nets = config.devices.nets.iter().enumerate();
        let expected: Vec<_> = nets.filter_map(|(position, net)| Some((position, kind(&net.backend)?))).collect();
        if expected.is_empty() {
            return Ok(Self { endpoints: Vec::new(), gates: None, passt: Vec::new() });
        }
        let gates = PacketGates::open(&folders.gates(generation)).map_err(|error| error.to_string())?;
        gates.open_up();
        let ends =
            gates.fetch(qemu_pid).map_err(|error| format!("cannot get them from QEMU (pid {qemu_pid}): {error}"))?;
        if ends.len() != expected.len() {
            return Err(format!("QEMU was started with {} of them, but {} are configured", ends.len(), expected.len()));
        }
        let endpoints =
            expected.into_iter().zip(ends).map(|((position, kind), end)| NetEndpoint { position, kind, end });
        Ok(Self { endpoints: endpoints.collect(), gates: Some(gates), passt: Vec::new() })
    }

    /// Descriptor number of a network's endpoint, which QEMU inherits.
    pub fn number(&self, position: usize) -> Option<RawFd> {
        self.endpoints.iter().find(|endpoint| endpoint.position == position).map(|endpoint| endpoint.end.as_raw_fd())
    }

    pub fn gates(&self) -> Option<&PacketGates> {
        self.gates.as_ref()
    }

    /// What is beside QEMU goes on with it.
    pub fn leave(self) {
        self.passt.into_iter().for_each(Passt::leave);
    }

    /// What is beside QEMU goes on with the next one.
    pub fn inherit(&mut self, from: &mut Self) {
        self.passt.append(&mut from.passt);
    }
}

fn kind(backend: &NetBackend) -> Option<Kind> {
    match backend {
        NetBackend::User { .. } => None,
        NetBackend::Passt { .. } => Some(Kind::Stream),
        NetBackend::Tap { .. } => Some(Kind::Tap),
    }
}

/// Opens a tap as QEMU would: each packet has a header that says what the guest leaves to the host (checksums,
/// segmentation).
fn open_tap(ifname: &str) -> io::Result<File> {
    let tap = OpenOptions::new().read(true).write(true).custom_flags(libc::O_NONBLOCK).open("/dev/net/tun")?;
    // SAFETY: all zeroes are a request for no interface.
    let mut request: libc::ifreq = unsafe { std::mem::zeroed() };
    if ifname.len() >= request.ifr_name.len() {
        return Err(io::ErrorKind::InvalidInput.into());
    }
    for (to, from) in request.ifr_name.iter_mut().zip(ifname.bytes()) {
        *to = from.cast_signed();
    }
    request.ifr_ifru.ifru_flags = (libc::IFF_TAP | libc::IFF_NO_PI | libc::IFF_VNET_HDR) as libc::c_short;
    // SAFETY: the kernel reads and writes one `ifreq`, which lives until then.
    if unsafe { libc::ioctl(tap.as_raw_fd(), libc::TUNSETIFF, &raw mut request) } != 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(tap)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn missing_tap_is_an_error() {
        assert!(open_tap("a-name-of-too-many-bytes").is_err());
        let text = EndpointError::Tap { ifname: "tap0".into(), source: io::ErrorKind::ResourceBusy.into() }.to_string();
        assert!(text.starts_with("cannot open tap tap0"), "{text}");
    }
}
