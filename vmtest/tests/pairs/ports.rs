//! Ports of the host that are forwarded to a guest: each can have one machine.

use std::fs::{self, File};
use std::io::Write;
use std::net::TcpListener;
use std::time::Duration;

use crate::machine::{Bed, NAMES};

/// Name of a second machine restored from the same snapshot.
const SECOND_COPY: &str = "second";

/// Takes a free port. The stand-ins for QEMU open none.
fn take_port() -> (TcpListener, u16) {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a free port");
    let port = listener.local_addr().expect("it is bound").port();
    (listener, port)
}

#[test]
fn snapshot_with_a_forward_runs_twice_on_one_host() {
    let bed = Bed::make();
    let (listener, port) = take_port();
    drop(listener);
    let net = format!("[[nets]]\nkind = \"user\"\nforward = [\"127.0.0.1:{port}:80\"]\n");
    let file = File::options().append(true).open(bed.path("machine.toml"));
    file.and_then(|mut file| file.write_all(net.as_bytes())).expect("it was made");
    let _keeper = bed.running();
    let saved = bed.hearth(&["save", NAMES[0], "-o", "snapshot"]).status().expect("hearth can be run");
    assert!(saved.success(), "{}", bed.log());
    // As the saved machine's QEMU has it.
    let mut taken = vec![TcpListener::bind(("127.0.0.1", port)).expect("it is free")];

    let mut refused = bed.keeper(NAMES[1], &["restore", "snapshot", "--as", NAMES[1], "--trust-config"]);
    assert_eq!(refused.wait().code(), Some(75), "{}", refused.said());
    assert!(refused.said().contains(&format!("127.0.0.1:{port} is already in use")), "{}", refused.said());
    drop(refused);
    let mut copies = Vec::new();
    for name in [NAMES[1], SECOND_COPY] {
        let (listener, port) = take_port();
        drop(listener);
        let forward = format!("127.0.0.1:{port}:80");
        let arguments = ["restore", "snapshot", "--as", name, "--trust-config", "--forward", &forward];
        let mut copy = bed.keeper(name, &arguments);
        let status = copy.settled(Duration::ZERO).unwrap_or_else(|why| panic!("{why}: {}", copy.said()));
        let qemu = status.unwrap_or_else(|| panic!("it ended: {}", copy.said())).qemu.expect("it runs").pid;
        let command_line = fs::read_to_string(format!("/proc/{qemu}/cmdline")).expect("it lives");
        assert!(command_line.contains(&format!("hostfwd=tcp:127.0.0.1:{port}-:80")), "{command_line}");
        taken.push(TcpListener::bind(("127.0.0.1", port)).expect("it is free"));
        copies.push(copy);
    }
}
