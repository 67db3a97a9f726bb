//! A web server in the guest, and a client for it.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::time::Duration;

use crate::error::Result;
use crate::guest::Drives;
use crate::wait::patience;

/// Starts a web server in the guest that serves `word` at `/word` on port 80.
pub fn serve(vm: &impl Drives, word: &str) -> Result<()> {
    vm.sh(&format!("mkdir -p /www && echo {word} >/www/word && (pidof httpd || httpd -h /www -p 80)"))?;
    // It goes to the background before it listens.
    vm.sh("while ! netstat -ltn | grep -q ':80 '; do usleep 20000; done").map(drop)
}

/// The whole response of the server at `address` for `/word`.
pub fn fetch(address: &str) -> String {
    let address: SocketAddr = address.parse().expect("the caller passes a socket address");
    let ask = || -> std::io::Result<String> {
        let mut stream = TcpStream::connect_timeout(&address, Duration::from_secs(5))?;
        stream.set_read_timeout(Some(patience(2)))?;
        stream.write_all(b"GET /word HTTP/1.0\r\n\r\n")?;
        let mut answer = String::new();
        stream.read_to_string(&mut answer)?;
        Ok(answer)
    };
    ask().unwrap_or_else(|error| panic!("{address}: {error}"))
}
