//! The API's server: HTTP/1.1 on a unix socket.
//!
//! accept -> one thread per connection -> read one request -> answer -> close
//!
//! This uses no server library: the small ones have no timeouts and do not limit heads and threads, and a client that
//! hangs must not harm a keeper. One request per connection keeps that simple: every read and write has a deadline, and
//! the number of connections is bounded. Some are reserved for clients that do not follow events, so that requests
//! always get through.

use std::net::Shutdown;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::thread::JoinHandle;
use std::time::Duration;

use hearth_api::{ApiError, ErrorWord};

use crate::control::Control;
use crate::event_log::EventLog;
use crate::unix_socket::{ListenError, listen};

mod answer;
mod request;
#[cfg(test)]
mod tests;

/// Maximum number of clients.
const CLIENTS_MAX: usize = 32;
/// Maximum number of clients that follow events.
const FOLLOWERS_MAX: usize = 24;
/// Time for a client to send its request, and to read each piece of the answer.
const CLIENT_PATIENCE: Duration = Duration::from_secs(10);
/// Interval of heartbeats, so that a follower can tell a quiet machine from a dead keeper.
const HEARTBEAT: Duration = Duration::from_secs(15);

/// Time within which a disconnected follower is noticed.
const HANGUP_PATIENCE: Duration = Duration::from_secs(1);
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// The keeper's parts that the server needs to answer requests.
pub struct Context {
    pub control: Control,
    pub events: EventLog,
    /// The resolved configuration of the current guest.
    pub config: Arc<Mutex<serde_json::Value>>,
}

/// The running server. Dropping it stops it.
pub struct Server {
    shared: Arc<Shared>,
    listener: Arc<UnixListener>,
    socket: PathBuf,
    thread: Option<JoinHandle<()>>,
}

struct Shared {
    context: Context,
    clients: Mutex<Clients>,
    fewer: Condvar,
    client_patience: Duration,
    heartbeat: Duration,
}

#[derive(Clone, Copy, Default)]
struct Clients {
    all: usize,
    followers: usize,
}

impl Server {
    pub fn start(socket: &Path, context: Context) -> Result<Self, ListenError> {
        Self::start_with(socket, context, CLIENT_PATIENCE, HEARTBEAT)
    }

    fn start_with(
        socket: &Path,
        context: Context,
        client_patience: Duration,
        heartbeat: Duration,
    ) -> Result<Self, ListenError> {
        let listener = Arc::new(listen(socket)?);
        let clients = Mutex::default();
        let shared = Arc::new(Shared { context, clients, fewer: Condvar::new(), client_patience, heartbeat });
        let thread = std::thread::Builder::new()
            .name("api".to_owned())
            .spawn({
                let (shared, listener) = (shared.clone(), listener.clone());
                move || accept_all(&shared, &listener)
            })
            .map_err(|source| ListenError::Unusable { path: socket.to_owned(), source })?;
        Ok(Self { shared, listener, socket: socket.to_owned(), thread: Some(thread) })
    }

    /// Accepts no more clients, and waits up to `patience` until the connected ones have their answers. Followers end
    /// when the event log is closed, so close it first.
    pub fn finish(mut self, patience: Duration) {
        self.stop_accepting();
        let clients = self.shared.clients();
        // Clients that remain lose their connection when the process ends.
        let _ = self
            .shared
            .fewer
            .wait_timeout_while(clients, patience, |clients| clients.all > 0)
            .expect("holders of this lock do not panic");
    }

    /// Accepts no more clients, and removes the socket.
    pub fn stop_accepting(&mut self) {
        let Some(thread) = self.thread.take() else { return };
        // Wakes `accept`; fails only if the socket is not listening.
        let _ = rustix::net::shutdown(&self.listener, rustix::net::Shutdown::Both);
        if thread.join().is_err() {
            tracing::error!("the API thread panicked");
        }
        // It may already have been removed.
        let _ = std::fs::remove_file(&self.socket);
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.stop_accepting();
    }
}

impl Shared {
    fn clients(&self) -> MutexGuard<'_, Clients> {
        self.clients.lock().expect("holders of this lock do not panic")
    }
}

fn accept_all(shared: &Arc<Shared>, listener: &UnixListener) {
    loop {
        match listener.accept() {
            Ok((stream, _)) => serve(shared, stream),
            Err(error) if is_final(&error) => return,
            Err(error) => {
                tracing::warn!(%error, "an API client disconnected while connecting");
                // Most likely too many open files; retrying at once would only use up a processor.
                std::thread::sleep(ACCEPT_PAUSE);
            }
        }
    }
}

/// A listener that was shut down returns "invalid argument".
fn is_final(error: &std::io::Error) -> bool {
    error.kind() == std::io::ErrorKind::InvalidInput
}

/// Serves the client in its own thread, or refuses it.
fn serve(shared: &Arc<Shared>, mut stream: UnixStream) {
    let Some(seat) = ClientSlot::take(shared) else {
        let error = ApiError::new(ErrorWord::TooManyClients, format!("too many clients: {CLIENTS_MAX} are connected"))
            .hint("close some of them, or try again");
        // The answer fits into the socket's buffer, and a client that is gone does not need it.
        let _ = answer::refuse(&mut stream, &error);
        return;
    };
    let spawned = std::thread::Builder::new().name("api-client".to_owned()).spawn(move || {
        if let Err(error) = answer::serve(&seat, &mut stream) {
            tracing::debug!(%error, "an API client disconnected");
        }
        // Lets the client see the end even while a clone of the socket lives.
        let _ = stream.shutdown(Shutdown::Both);
    });
    if let Err(error) = spawned {
        tracing::warn!(%error, "cannot start a thread for an API client");
    }
}

/// A client's slot.
struct ClientSlot {
    shared: Arc<Shared>,
    follows: std::cell::Cell<bool>,
}

impl ClientSlot {
    fn take(shared: &Arc<Shared>) -> Option<Self> {
        let mut clients = shared.clients();
        if clients.all == CLIENTS_MAX {
            return None;
        }
        clients.all += 1;
        Some(Self { shared: shared.clone(), follows: std::cell::Cell::new(false) })
    }

    /// Counts this client as a follower.
    fn follow(&self) -> Result<(), ApiError> {
        let mut clients = self.shared.clients();
        if clients.followers == FOLLOWERS_MAX {
            return Err(ApiError::new(
                ErrorWord::TooManyClients,
                format!("too many clients: {FOLLOWERS_MAX} follow the events"),
            )
            .hint("close some of them, or request events without follow"));
        }
        clients.followers += 1;
        self.follows.set(true);
        Ok(())
    }
}

impl Drop for ClientSlot {
    fn drop(&mut self) {
        let mut clients = self.shared.clients();
        clients.all -= 1;
        clients.followers -= usize::from(self.follows.get());
        self.shared.fewer.notify_all();
    }
}
