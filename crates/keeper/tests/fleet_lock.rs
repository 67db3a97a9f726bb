//! A fleet's server over https with a certificate of its own CA. Only the host's trust store decides whether it is
//! trusted.
//!
//! `testdata/fleet`: a CA, a certificate for 127.0.0.1 signed by it, and the server's key. They are valid for a hundred
//! years and used only here.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::sync::{Arc, Mutex};

use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::{ServerConfig, ServerConnection, StreamOwned};

fn testdata(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("testdata/fleet").join(name)
}

/// Starts a server that grants every request. Returns its address and the routes that were requested.
fn server() -> (String, Arc<Mutex<Vec<String>>>) {
    let chain = CertificateDer::pem_file_iter(testdata("server.pem")).unwrap().collect::<Result<_, _>>().unwrap();
    let key = PrivateKeyDer::from_pem_file(testdata("server-key.pem")).unwrap();
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let config = ServerConfig::builder_with_provider(provider).with_safe_default_protocol_versions().unwrap();
    let config = Arc::new(config.with_no_client_auth().with_single_cert(chain, key).unwrap());
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let url = format!("https://{}", listener.local_addr().unwrap());
    let asked = Arc::new(Mutex::new(Vec::new()));
    let notes = Arc::clone(&asked);
    std::thread::spawn(move || {
        for stream in listener.incoming().flatten() {
            let connection = ServerConnection::new(Arc::clone(&config)).unwrap();
            // A client that does not trust the server closes the connection.
            if let Ok(route) = answer(StreamOwned::new(connection, stream)) {
                notes.lock().unwrap().push(route);
            }
        }
    });
    (url, asked)
}

fn answer(stream: impl Read + Write) -> std::io::Result<String> {
    let mut reader = BufReader::new(stream);
    let mut head = String::new();
    while !head.ends_with("\r\n\r\n") && reader.read_line(&mut head)? > 0 {}
    let length = head.lines().find_map(|line| line.to_ascii_lowercase().strip_prefix("content-length: ")?.parse().ok());
    reader.read_exact(&mut vec![0; length.unwrap_or(0)])?;
    let stream = reader.get_mut();
    stream.write_all(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")?;
    stream.flush()?;
    Ok(head.split(' ').nth(1).unwrap_or_default().to_owned())
}

/// Runs `hearth host-reload` on a host without machines. This file holds the host's trusted certificates.
fn host_reload(root: &Path, trusted: &str, arguments: &[&str]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_hearth"));
    command.args(["host-reload"]).args(arguments).arg("--record").arg(root.join("record.json"));
    command.env("HEARTH_RUNTIME_ROOT", root).env_remove("HEARTH_LOG").env_remove("SSL_CERT_DIR");
    command.env("SSL_CERT_FILE", testdata(trusted)).output().unwrap()
}

#[test]
fn slot_is_acquired_and_released_over_trusted_tls() {
    let root = tempfile::tempdir().unwrap();
    let (url, asked) = server();
    let prepare = ["prepare", "--drill", "--fleet-lock", &url, "--fleet-id", "this-host", "--fleet-wait", "0s"];
    // The host trusts another certificate: the server's own, which is no CA.
    let refused = host_reload(root.path(), "server.pem", &prepare);
    let told = String::from_utf8_lossy(&refused.stderr).into_owned();
    assert!(refused.status.code() == Some(1) && told.contains("cannot reach FleetLock server"), "{told}");
    assert!(told.contains("certificate"), "{told}");
    assert_eq!(*asked.lock().unwrap(), [""; 0]);

    for (arguments, route) in [(&prepare[..], "/v1/pre-reboot"), (&["resume"], "/v1/steady-state")] {
        let done = host_reload(root.path(), "ca.pem", arguments);
        assert_eq!(done.status.code(), Some(0), "{}", String::from_utf8_lossy(&done.stderr));
        assert_eq!(asked.lock().unwrap().last().map(String::as_str), Some(route));
    }
}
