//! A web server for the load generator's tests: it answers by script, counts connections, and can cut all of them.

use std::io::{BufRead, BufReader, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::{Arc, Mutex};

#[derive(Clone, Copy)]
pub enum Script {
    Files { bytes: usize },
    CloseEach,
    HalfBody,
    Silent,
    NotFound,
}

pub struct Server {
    address: SocketAddr,
    streams: Arc<Mutex<Vec<TcpStream>>>,
}

impl Server {
    pub fn start(script: Script) -> Self {
        Self::listen("127.0.0.1:0".parse().expect("a literal address"), script)
    }

    pub fn listen(address: SocketAddr, script: Script) -> Self {
        let listener = TcpListener::bind(address).expect("a free port");
        let address = listener.local_addr().expect("a bound socket has an address");
        let streams = Arc::new(Mutex::new(Vec::new()));
        let kept = streams.clone();
        std::thread::spawn(move || {
            for stream in listener.incoming().flatten() {
                kept.lock().expect("no test panics here").push(stream.try_clone().expect("a spare descriptor"));
                std::thread::spawn(move || answer_all(stream, script));
            }
        });
        Server { address, streams }
    }

    pub fn address(&self) -> SocketAddr {
        self.address
    }

    pub fn connections(&self) -> usize {
        self.streams.lock().expect("no test panics here").len()
    }

    /// Cuts every connection, as a dying machine does. New ones are answered again.
    pub fn cut(&self) {
        for stream in self.streams.lock().expect("no test panics here").iter() {
            let _ = stream.shutdown(Shutdown::Both);
        }
    }
}

fn answer_all(stream: TcpStream, script: Script) {
    let mut requests = BufReader::new(stream.try_clone().expect("a spare descriptor")).lines();
    let mut stream = stream;
    while let Some(Ok(line)) = requests.next() {
        if !line.is_empty() {
            continue;
        }
        let (status, bytes, sent) = match script {
            Script::Files { bytes } => (200, bytes, bytes),
            Script::CloseEach => (200, 5, 5),
            Script::HalfBody => (200, 100, 50),
            Script::NotFound => (404, 0, 0),
            Script::Silent => continue,
        };
        let close = if matches!(script, Script::CloseEach) { "Connection: close\r\n" } else { "" };
        let head = format!("HTTP/1.1 {status} X\r\nContent-Length: {bytes}\r\n{close}\r\n");
        if stream.write_all(head.as_bytes()).and_then(|()| stream.write_all(&vec![b'.'; sent])).is_err() {
            return;
        }
        if matches!(script, Script::CloseEach | Script::HalfBody) {
            let _ = stream.shutdown(Shutdown::Both);
            return;
        }
    }
}
