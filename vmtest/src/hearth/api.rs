//! Client of a keeper's API. It sends any request, also one that the keeper should refuse.

use std::io::{self, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};

use hearth_api::MachineStatus;

use crate::wait::patience;

#[derive(Clone)]
pub struct Api {
    socket: PathBuf,
}

impl Api {
    pub fn new(socket: PathBuf) -> Self {
        Self { socket }
    }

    pub fn socket(&self) -> &Path {
        &self.socket
    }

    /// Status code and body of the answer.
    pub fn ask(&self, method: &str, path: &str, body: &str) -> io::Result<(u16, String)> {
        let mut stream = UnixStream::connect(&self.socket)?;
        stream.set_read_timeout(Some(patience(5)))?;
        let head = format!("{method} {path} HTTP/1.0\r\nContent-Length: {}\r\n\r\n", body.len());
        stream.write_all(format!("{head}{body}").as_bytes())?;
        let mut answer = String::new();
        stream.read_to_string(&mut answer)?;
        let parts = answer.split_once("\r\n\r\n");
        let parse = |(head, body): (&str, &str)| Some((head.split(' ').nth(1)?.parse().ok()?, body.to_owned()));
        parts.and_then(parse).ok_or_else(|| io::ErrorKind::InvalidData.into())
    }

    /// The machine's status. `None` if no keeper answers, or it answers with an error.
    pub fn status(&self) -> Option<MachineStatus> {
        let (_, body) = self.ask("GET", "/v1/status", "").ok()?;
        serde_json::from_str(&body).ok()
    }
}
