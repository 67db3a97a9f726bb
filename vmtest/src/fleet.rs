//! A FleetLock server, written from the protocol's page: a limited number of hosts of a group may hold a slot.

use std::collections::BTreeSet;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::{Arc, Mutex, PoisonError};

use serde_json::{Value, json};

/// A server that runs until the test's process ends.
pub struct FleetServer {
    url: String,
    fleet: Arc<Mutex<Fleet>>,
}

struct Fleet {
    slots: usize,
    /// `group/id` of each host that holds a slot.
    holders: BTreeSet<String>,
    /// Route and `group/id` of each request.
    asked: Vec<String>,
}

impl FleetServer {
    pub fn start(slots: usize) -> std::io::Result<Self> {
        let listener = TcpListener::bind("127.0.0.1:0")?;
        let url = format!("http://{}", listener.local_addr()?);
        let fleet = Arc::new(Mutex::new(Fleet { slots, holders: BTreeSet::new(), asked: Vec::new() }));
        let ours = Arc::clone(&fleet);
        std::thread::Builder::new().name("fleet".into()).spawn(move || {
            for stream in listener.incoming().flatten() {
                // The client may hang up early.
                let _ = ours.lock().unwrap_or_else(PoisonError::into_inner).answer(&stream);
            }
        })?;
        Ok(Self { url, fleet })
    }

    /// Adds a slot for one more host.
    pub fn add_slot(&self) {
        self.fleet.lock().unwrap_or_else(PoisonError::into_inner).slots += 1;
    }

    pub fn url(&self) -> &str {
        &self.url
    }

    pub fn asked(&self) -> Vec<String> {
        self.fleet.lock().unwrap_or_else(PoisonError::into_inner).asked.clone()
    }

    pub fn holders(&self) -> Vec<String> {
        self.fleet.lock().unwrap_or_else(PoisonError::into_inner).holders.iter().cloned().collect()
    }
}

impl Fleet {
    fn answer(&mut self, mut stream: &TcpStream) -> std::io::Result<()> {
        let mut reader = BufReader::new(stream);
        let mut head = String::new();
        while !head.ends_with("\r\n\r\n") && reader.read_line(&mut head)? > 0 {}
        let head = head.to_ascii_lowercase();
        let length = head.lines().find_map(|line| line.strip_prefix("content-length: ")?.parse().ok());
        let mut body = vec![0; length.unwrap_or(0)];
        reader.read_exact(&mut body)?;
        let (status, answer) = match self.decide(&head, &serde_json::from_slice(&body).unwrap_or_default()) {
            Ok(()) => (200, String::new()),
            Err((kind, value)) => (403, json!({ "kind": kind, "value": value }).to_string()),
        };
        write!(stream, "HTTP/1.1 {status} X\r\nContent-Length: {}\r\nConnection: close\r\n\r\n{answer}", answer.len())
    }

    fn decide(&mut self, head: &str, body: &Value) -> Result<(), (&'static str, &'static str)> {
        let params = &body["client_params"];
        let (Some(group), Some(id)) = (params["group"].as_str(), params["id"].as_str()) else {
            return Err(("invalid_parameters", "no client parameters"));
        };
        if !head.contains("\r\nfleet-lock-protocol: true\r\n") {
            return Err(("missing_header", "not meant for this protocol"));
        }
        let route = head.split_ascii_whitespace().nth(1).unwrap_or_default().to_owned();
        let who = format!("{group}/{id}");
        self.asked.push(format!("{route} {who}"));
        match route.as_str() {
            "/v1/pre-reboot" if self.holders.contains(&who) || self.holders.len() < self.slots => {
                self.holders.insert(who);
                Ok(())
            }
            "/v1/pre-reboot" => {
                Err(("failed_lock_semaphore_full", "semaphore currently full, all slots are locked already"))
            }
            "/v1/steady-state" => {
                self.holders.remove(&who);
                Ok(())
            }
            _ => Err(("unknown_route", "no such route")),
        }
    }
}
